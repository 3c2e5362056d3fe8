"""Reading a stream of tokens in pieces with a carried state: any length, at constant memory.

What a stream has to decide is the positions: a model was trained on so many, and beyond them a learned table ends, and
rotary angles mean nothing to it.
"""

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from .integration.cache import LinearStateLayer
from .integration.cache_argument import cache_argument, output_cache
from .integration.discovery import longest_input
from .integration.packing import STATE_LOST, restarting_mixer
from .integration.positions import first_position, position_limit
from .utils.formatting import near_matches
from .utils.options import check_argument

#: How a stream counts.
POSITIONS = {
    "continue": "positions count on: 0, 1, 2, …",
    "wrap": "positions begin again after a period, the state goes on",
    "restart": "positions and state begin again after a period: pieces without a past",
}


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a stream. start: tokens before them; ids `[1, n]`; output: the model's, of this piece."""

    start: int
    ids: Tensor
    output: Any
    cache: Cache


@torch.no_grad()
def read_stream(
    model: PreTrainedModel,
    tokens: Iterable[int],
    *,
    chunk_length: int = 256,
    positions: str = "continue",
    period: int | None = None,
) -> Iterator[Piece]:
    """Read tokens piece by piece, each with the state that the pieces before it have left.

    The outputs are those of one forward pass over everything, up to rounding, for every `chunk_length`. Memory is that
    of one piece and of the state, which does not grow unless a layer is exact.

    Args:
        model: A decoder, with or without its language modelling head. It runs as it is: call `model.eval()`.
        tokens: Token ids, as many as there are; nothing is read before it is needed.
        chunk_length: Tokens of a piece; more is faster and needs more memory.
        positions: A name of `POSITIONS`. Wrapping equals `extend_positions(model, N, how="tile")` for any N.
        period: Number of positions before they begin again (None: the longest input that the model is made for).

    Raises:
        ValueError: A name is unknown, numbers are out of range, the model has no state, or the stream counts beyond a
            learned table of positions.
        NotImplementedError: A part of the model (Jamba's Mamba) goes on from its state by single tokens only.
    """
    if positions not in POSITIONS:
        near = near_matches(positions, list(POSITIONS))
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}.{near}")
    check_argument("chunk_length", chunk_length, int, least=1)
    if chunk_length > 1 and (mixer := restarting_mixer(model)):
        raise NotImplementedError(STATE_LOST.format(mixer, chunk_length))
    limit = position_limit(model)
    name = type(model).__name__
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if positions == "continue":
        period = sys.maxsize
    else:
        period = period or limit or longest_input(model)
        if period is None:
            raise ValueError(f"The config of {name} does not say how long an input may be. Pass period=.")
        if period < 1 or period > (limit or period):
            raise ValueError(f"period must lie in 1 to {limit or 'the longest input'}, got {period!r}.")
        if not takes_positions:
            raise ValueError(f"{name} takes no position_ids. Read with positions='continue'.")
    origin = first_position(model)
    source = iter(tokens)
    start = 0
    cache = None
    while True:
        first = start % period
        piece = list(itertools.islice(source, min(chunk_length, period - first)))
        if not piece:
            return
        if positions == "restart" and first == 0:
            cache = None
        if limit is not None and first + len(piece) > limit:
            raise ValueError(
                f"Token {start + limit - first:,} of the stream lies beyond the {limit} learned positions of {name}. "
                "Read with positions='wrap' or 'restart', or extend the table first: extend_positions(model, N)."
            )
        ids = torch.tensor([piece], device=model.device)
        position_ids = origin + torch.arange(first, first + len(piece), device=model.device)[None]
        options = {"position_ids": position_ids} if takes_positions else {}
        output = model(ids, use_cache=True, **cache_argument(model, cache), **options)
        cache = output_cache(output)
        if cache is None:
            raise ValueError(f"{name} keeps no state: a stream needs a decoder.")
        yield Piece(start, ids, output, cache)
        start += len(piece)


def stream_losses(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with `-log p(token | all tokens before)` of its tokens: float64 `[n]` on the CPU.

    Nothing predicts the very first token of a stream, so that the first piece has one loss fewer.
    """
    last: Tensor | None = None
    for piece in pieces:
        logits = piece.output.logits[0].float()
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        targets = piece.ids[0, 1:] if last is None else piece.ids[0]
        last = logits[-1:]
        yield piece, torch.nn.functional.cross_entropy(before, targets, reduction="none").double().cpu()


def cache_bytes(cache: Cache) -> int:
    """Return the bytes that a cache holds: states of linear layers, keys and values of exact ones."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearStateLayer):
            total += layer.nbytes()
            continue
        # Transformers' quantized layers have tuples, and tensors that wrap others.
        stored = [getattr(layer, name, None) for name in ("keys", "values", "_quantized_keys", "_quantized_values")]
        total += sum(map(_tensor_bytes, tree_leaves(stored)))
    return total


def _tensor_bytes(value: Any) -> int:
    if is_traceable_wrapper_subclass(value):
        return sum(_tensor_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0
