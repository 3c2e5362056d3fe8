"""Where the documents of a packed batch begin: read from position ids, handed to the layers, and never lost.

`before_model` runs before each model around patched layers. Where `position_ids` begin again it adds the boundaries as
`cu_seq_lens_q`, the argument in which Transformers hands them to flash attention; `after_model` objects if none of the
layers was given them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

#: Transformers' arguments that carry boundaries: `[n + 1]`, the first token of each document and the end.
BOUNDARIES = "cu_seq_lens_q"
CARRIERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: On a model around patched layers: what its `forward` takes (`ForwardArguments`).
ARGUMENTS = "_linear_attention_arguments"
#: On a cache: a packed batch went through it.
PACKED = "_holds_packed_documents"

FILLED = (
    "Packed documents (position_ids that begin again, or cu_seq_lens_q) cannot be combined with a cache that holds "
    "tokens: which document would go on? Pass use_cache=False, or generate from padded rows."
)


@torch.compiler.disable
def find_documents(position_ids: Tensor, *, any_jump: bool = False) -> Tensor | None:
    """`position_ids [B, S]` that begin again -> boundaries `[n + 1]` in the flattened batch; None for one a row.

    A document is a run of positions that go up by one, and all begin with the same one (0; 2 in RoBERTa). Anything else
    says nothing about documents: permuted, repeated or skipped positions. any_jump: every run is a document.
    """
    first = torch.ones_like(position_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first, position_ids.diff(dim=1) != 1], dim=1)
    starts = begins.flatten().nonzero().squeeze(1)
    if len(starts) == len(position_ids):
        return None
    if not any_jump:
        values = position_ids.reshape(-1)[starts]
        if len(starts) == position_ids.numel() or bool((values != values[0]).any()):
            return None
    end = torch.tensor([position_ids.numel()], device=starts.device)
    return torch.cat([starts, end]).to(torch.int32)


@dataclass(frozen=True)
class ForwardArguments:
    """What the `forward` of a model around patched layers takes, in order, and the direction of these layers."""

    names: tuple[str, ...]
    more: bool
    causal: bool

    @classmethod
    def of(cls, model: nn.Module, causal: bool) -> ForwardArguments:
        parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
        names = tuple(held.name for held in parameters if held.kind is held.POSITIONAL_OR_KEYWORD)
        return cls(names, any(held.kind is held.VAR_KEYWORD for held in parameters), causal)


class _Seen(threading.local):
    """How often boundaries have reached a layer in this thread, and for each model that runs what that number was when
    it handed boundaries on (None: it does not)."""

    def __init__(self) -> None:
        self.count = 0
        self.begun: list[tuple[int, int | None]] = []


_seen = _Seen()


def reached() -> None:
    """Called by a layer that was handed boundaries."""
    _seen.count += 1


def watch(model: nn.Module, layers: Iterable[tuple[str, bool]]) -> None:
    """Put the hooks on every model around these layers (name, causal): the nearest `PreTrainedModel` of each."""
    modules = dict(model.named_modules())
    for name, causal in layers:
        while name and not isinstance(modules[name], PreTrainedModel):
            name = name.rpartition(".")[0]
        around = modules[name]
        if hasattr(around, ARGUMENTS):
            continue
        setattr(around, ARGUMENTS, ForwardArguments.of(around, causal))
        around.register_forward_pre_hook(before_model, with_kwargs=True)
        around.register_forward_hook(after_model, always_call=True)


def unwatch(module: nn.Module) -> None:
    """Take the hooks off a module, where it has them."""
    vars(module).pop(ARGUMENTS, None)
    for hooks, flags, ours in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, before_model),
        (module._forward_hooks, module._forward_hooks_always_called, after_model),
    ):
        for number, hook in list(hooks.items()):
            if hook is ours:
                del hooks[number]
                flags.pop(number, None)


def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a model around patched layers: where position ids begin again, hand boundaries on.

    The mask of ones that goes with them keeps Transformers from making a mask `[B, 1, L, L]` of the same documents.
    """
    if not torch.compiler.is_compiling():
        _seen.begun.append((id(module), None))
    takes: Any = getattr(module, ARGUMENTS)
    given = {**dict(zip(takes.names, args, strict=False)), **kwargs}
    added: dict[str, Any] = {}
    if given.get(BOUNDARIES) is not None:
        _check_positions(module, takes, given)
    elif not (takes.causal and torch.compiler.is_compiling()):
        # (While compiling, a decoder is handed the full mask that Transformers then makes of its positions.)
        added = _added(module, takes, given)
    if given.get(BOUNDARIES) is None and not added:
        return None
    cache = _cache(given)
    if cache is not None and int(cache.get_seq_length()):
        raise NotImplementedError(FILLED)
    if given.get("attention_mask") is None and "attention_mask" in takes.names:
        tokens = _tokens(given)
        if tokens is not None:
            added["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    placed = {name for name, _ in zip(takes.names, args, strict=False)}
    if placed & set(added):  # an explicit None by position
        args = tuple(added.pop(name, held) for name, held in zip(takes.names, args, strict=False))
    if not torch.compiler.is_compiling():
        _seen.begun[-1] = (id(module), _seen.count)
    return args, {**kwargs, **added}


def after_model(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of the same model: boundaries that no layer has seen would be documents that see each other."""
    if torch.compiler.is_compiling() or not _seen.begun or _seen.begun[-1][0] != id(module):
        return
    _, begun = _seen.begun.pop()
    if begun is not None and output is not None and _seen.count == begun:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand {BOUNDARIES} to its attention, so that packed documents would see "
            "each other. Pass padded rows with an attention_mask."
        )


def _check_positions(module: nn.Module, takes: ForwardArguments, given: dict[str, Any]) -> None:
    if "position_ids" in takes.names and given.get("position_ids") is None:
        raise ValueError(
            f"{BOUNDARIES} needs position_ids that begin again with each document: without them "
            f"{type(module).__name__} counts positions over all documents. DataCollatorWithFlattening makes both."
        )


def _added(module: nn.Module, takes: ForwardArguments, given: dict[str, Any]) -> dict[str, Any]:
    """Boundaries of the documents that positions tell of; nothing where there is one document a row."""
    positions, tokens = given.get("position_ids"), _tokens(given)
    if not isinstance(positions, Tensor) or given.get("attention_mask") is not None or tokens is None:
        return {}
    if positions.dim() != 2 or positions.shape[1] < 2:
        return {}
    use_cache = given.get("use_cache")
    if use_cache is None:
        use_cache = getattr(getattr(module, "config", None), "use_cache", False)
    # As Transformers does where there can be no cache; with one it takes positions for positions.
    any_jump = takes.causal and _cache(given) is None and not use_cache
    found = find_documents(positions.expand(tokens.shape[0], -1), any_jump=any_jump)
    if found is None:
        return {}
    if not takes.more:
        raise NotImplementedError(
            f"{type(module).__name__} cannot take packed documents (position_ids that begin again): its forward has no "
            f"place for {BOUNDARIES}. Pass padded rows with an attention_mask."
        )
    return {"cu_seq_lens_q": found, "cu_seq_lens_k": found}


def _tokens(given: dict[str, Any]) -> Tensor | None:
    return next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)


def _cache(given: dict[str, Any]) -> Cache | None:
    return next((held for held in given.values() if isinstance(held, Cache)), None)


def mark_cache(cache: Cache, layer_index: int, kwargs: dict[str, Any]) -> None:
    """Let a packed batch go through an empty cache, and nothing come after it.

    Raises:
        NotImplementedError: the cache holds tokens, of a packed batch or before one.
    """
    packed = kwargs.get(BOUNDARIES) is not None
    if not packed and not getattr(cache, PACKED, False):
        return
    if int(cache.get_seq_length(layer_index)):
        raise NotImplementedError(FILLED)
    setattr(cache, PACKED, packed)
