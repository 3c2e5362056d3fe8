"""Packed batches: several documents in one row, each computed as if it were alone, in linear time and both directions.

Where documents lie is told by `cu_seq_lens_q` (Transformers' name for the first token of each document, and the end);
`boundaries.py` makes it of `position_ids` that begin again. It travels as a keyword argument to every attention layer,
through gradient checkpointing and from device to device.

A layer gathers documents of like length into small batches, runs whatever attention it has on these, and puts the
outputs back: no mechanism needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .boundaries import BOUNDARIES

#: On a tensor of boundaries or a mask: the `Documents` that were made of it, by shape.
_PLANS = "_linear_attention_documents"

#: Documents go into one batch if the shortest lacks at most this share of the longest, or so many tokens.
SPREAD_SHARE, SPREAD_TOKENS = 1 / 8, 16

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention on a batch of documents: q, k, v `[n, H | G, L, d]` and a mask `[n, L]` or None -> `[n, H, L, e]`."""


@dataclass(frozen=True)
class Group:
    """Documents of like length. index `[n, L]`: their tokens in the flattened batch; mask `[n, L]`: which are real."""

    index: Tensor
    mask: Tensor | None


class Documents:
    """The documents of a batch `[B, S]`, in groups of like length.

    The elements of all groups are at most 8/7 of the tokens, or 16 a document more; there are at most some 8 groups for
    each doubling of the length, so that the calls do not grow with the number of documents.

    Args:
        boundaries: `[n + 1]`, the first token of each document in the flattened batch, and its size B·S.
        shape: B and S.
        padding: `[B, S]` True for real tokens; others are in no document, and their outputs are zero.

    Raises:
        ValueError: boundaries that do not go up from 0 to B·S, or a document over several rows.
    """

    def __init__(self, boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None = None) -> None:
        self.shape = shape
        device = boundaries.device
        edges = _checked(boundaries.tolist(), shape)
        lengths = [stop - start for start, stop in pairwise(edges)]
        if padding is None or bool(padding.all()):
            self._tokens = torch.arange(edges[-1], device=device)
        else:
            real = padding.reshape(-1).to(device)
            self._tokens = real.nonzero().squeeze(1)
            before = torch.nn.functional.pad(real.cumsum(0), (1, 0))
            kept = before[torch.tensor(edges, device=device)].tolist()
            lengths = [stop - start for start, stop in pairwise(kept)]
        self.lengths = [length for length in lengths if length]
        self._starts = [0]
        for length in self.lengths:
            self._starts.append(self._starts[-1] + length)
        self.groups = [self._group(part) for part in _alike(self.lengths)]

    def _group(self, part: list[int]) -> Group:
        device = self._tokens.device
        starts = torch.tensor([self._starts[document] for document in part], device=device)
        lengths = torch.tensor([self.lengths[document] for document in part], device=device)
        longest = max(self.lengths[document] for document in part)
        column = torch.arange(longest, device=device)
        mask = column < lengths[:, None]
        # Padding repeats the last token of its document: finite, and masked.
        index = self._tokens[starts[:, None] + torch.minimum(column, lengths[:, None] - 1)]
        same = all(self.lengths[document] == longest for document in part)
        return Group(index, None if same else mask)

    def whole(self) -> Group:
        """All documents as one padded batch, in order: for what has to see them at once."""
        return self._group(list(range(len(self.lengths))))

    def gather(self, tensor: Tensor, group: Group) -> Tensor:
        """`[B, H, S, d]` -> `[n, H, L, d]`."""
        flat = tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])
        return flat[group.index].transpose(1, 2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attend: Attend, groups: list[Group] | None = None
    ) -> Tensor:
        """`attend` on every group; the outputs as `[B, H, S, e]`."""
        places, outputs = [], []
        for group in self.groups if groups is None else groups:
            q, k, v = (self.gather(tensor, group) for tensor in (query, key, value))
            out = attend(q, k, v, group.mask)
            flat, place = out.transpose(1, 2).flatten(0, 1), group.index.flatten()
            if group.mask is not None:
                kept = group.mask.flatten().nonzero().squeeze(1)
                flat, place = flat[kept], place[kept]
            outputs.append(flat)
            places.append(place)
        batch, length = self.shape
        if not outputs:
            return value.new_zeros(batch, query.shape[1], length, value.shape[3])
        joined = torch.cat(outputs)
        whole = joined.new_zeros(batch * length, *joined.shape[1:]).index_copy(0, torch.cat(places), joined)
        return whole.unflatten(0, (batch, length)).transpose(1, 2)

    def same_document(self) -> Tensor:
        """`[B, 1, S, S]`: which tokens lie in one document. O(S²)."""
        numbers = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.long, device=self._tokens.device)
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=numbers.device)
        numbers[self._tokens] = torch.arange(1, len(self.lengths) + 1, device=numbers.device).repeat_interleave(lengths)
        rows = numbers.view(self.shape)
        return ((rows[:, :, None] == rows[:, None, :]) & (rows != 0)[:, None, :])[:, None]


def _checked(edges: list[int], shape: tuple[int, int]) -> list[int]:
    batch, length = shape
    rising = all(start <= stop for start, stop in pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != batch * length or not rising:
        raise ValueError(
            f"{BOUNDARIES} must go up from 0 to the {batch * length} tokens of the batch ({batch} x {length}), got "
            f"{edges[:6]}{'…' if len(edges) > 6 else ''} with {edges[-1:]} at the end."
        )
    across = [row * length for row in range(batch) if row * length not in set(edges)] if batch > 1 else []
    if across:
        raise ValueError(
            f"A document of {BOUNDARIES} lies over two rows of the batch (at token {across[0]} of {batch} x {length}): "
            "each row must begin a document."
        )
    return edges


def _alike(lengths: list[int]) -> list[list[int]]:
    """Numbers of documents, the longest first, in groups of like length."""
    groups: list[list[int]] = []
    longest = 0
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or longest - lengths[document] > max(longest * SPREAD_SHARE, SPREAD_TOKENS):
            longest = lengths[document]
            groups.append([])
        groups[-1].append(document)
    return groups


def documents_of(boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None) -> Documents:
    """The documents of an attention call.

    Worked out in the first layer, and kept with the mask or the boundaries for the others. (Where these have moved to
    another device it is done again.)
    """
    keeper: Any = boundaries if padding is None else padding
    plans = getattr(keeper, _PLANS, {})
    if shape not in plans:
        plans = {**plans, shape: Documents(boundaries, shape, padding)}
        setattr(keeper, _PLANS, plans)
    return plans[shape]


@torch.compiler.disable
def run_packed(
    forward: Callable[..., tuple[Tensor, Tensor | None]],
    documents: Documents,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    together: bool,
) -> tuple[Tensor, Tensor | None]:
    """`forward(q, k, v, mask)` for every group; output `[B, S, H, e]`, and weights `[B, H, S, S]` if `forward` has any.

    together: all documents in one padded call.
    """
    groups = [documents.whole()] if together and documents.lengths else documents.groups
    weights: list[tuple[Group, Tensor]] = []
    waiting = iter(groups)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        group = next(waiting)
        out, held = forward(query, key, value, mask, first_call=group is groups[0])
        if held is not None:
            weights.append((group, held))
        return out.transpose(1, 2)

    out = documents.attend(query, key, value, attend, groups)
    return out.transpose(1, 2).contiguous(), _scattered(documents.shape, weights) if weights else None


def _scattered(shape: tuple[int, int], weights: list[tuple[Group, Tensor]]) -> Tensor:
    """Weights of the documents as blocks of `[B, H, S, S]`; 0 between documents."""
    batch, length = shape
    first = weights[0][1]
    whole = first.new_zeros(batch, first.shape[1], length, length)
    for group, held in weights:
        for document, index in enumerate(group.index):
            index = index if group.mask is None else index[group.mask[document]]
            row, places = int(index[0]) // length, index % length
            whole[row][:, places[:, None], places] = held[document, :, : len(index), : len(index)]
    return whole
