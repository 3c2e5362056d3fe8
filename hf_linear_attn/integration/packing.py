"""Packed batches: several documents in one row, each computed as if it were a row of its own, in linear time.

`cu_seq_lens_q` (Transformers' name for the first token of each document, and the end) says where documents lie;
`boundaries.py` makes it from `position_ids` that begin again. It travels as a keyword argument to every attention
layer, through gradient checkpointing and from device to device.

A layer gathers documents of similar length into small batches, runs its attention on these, and scatters the outputs
back: no mechanism needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

#: The argument with the boundaries: `[n + 1]`, the first token of each document and the end.
BOUNDARIES = "cu_seq_lens_q"
#: Attribute of a mask: the boundaries of the packed batch that it belongs to.
MASK_BOUNDARIES = "_linear_attention_boundaries"
#: Attribute of a padding mask, or else of the boundaries: the `Documents` that the first layer has made of them.
DOCUMENTS = "_linear_attention_documents"

#: Documents go into one batch if the shortest lacks at most this share of the longest, or so many tokens.
MAX_PADDING_SHARE, MAX_PADDING_TOKENS = 1 / 8, 16

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""Attention on a batch of documents: q, k, v `[n, H | G, L, d]`, a mask `[n, L]` or None, and whether it is the first
batch -> the output `[n, L, H, e]` and the weights `[n, H, L, L]` or None."""


@dataclass(frozen=True)
class Group:
    """Documents of similar length, as one batch.

    Attributes:
        index: `[n, L]`, the tokens of the documents in the flattened batch.
        mask: `[n, L]`, which of them are real, or None where all are.
    """

    index: Tensor
    mask: Tensor | None

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the part of `[B, H, S, d]` that belongs to the group, `[n, H, L, d]`."""
        flat = tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])
        return flat[self.index].transpose(1, 2)


class Documents:
    """The documents of a batch `[B, S]`, in groups of similar length.

    The elements of all groups are at most 8/7 of the tokens, or 16 a document more; there are at most some 8 groups for
    each doubling of the length, so that the number of calls does not grow with the number of documents.

    Args:
        boundaries: `[n + 1]`, the first token of each document in the flattened batch, and its size B·S.
        shape: B and S.
        padding: `[B, S]`, True for real tokens; others are in no document, and their outputs are zero.

    Raises:
        ValueError: The boundaries do not go up from 0 to B·S, or a document lies in several rows.
    """

    def __init__(self, boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None = None) -> None:
        self.shape = shape
        device = boundaries.device
        edges = _checked_edges(boundaries.tolist(), shape)
        lengths = [stop - start for start, stop in pairwise(edges)]
        if padding is None or bool(padding.all()):
            self._tokens = torch.arange(edges[-1], device=device)
        else:
            real = padding.reshape(-1).to(device)
            self._tokens = real.nonzero().squeeze(1)
            real_before = torch.nn.functional.pad(real.cumsum(0), (1, 0))
            real_edges = real_before[torch.tensor(edges, device=device)].tolist()
            lengths = [stop - start for start, stop in pairwise(real_edges)]
        self.lengths = [length for length in lengths if length]
        self._starts = [0, *accumulate(self.lengths)]
        self.groups = [self._group(numbers) for numbers in _group_by_length(self.lengths)]

    def _group(self, numbers: list[int]) -> Group:
        """Make one batch of the documents with these numbers."""
        device = self._tokens.device
        starts = torch.tensor([self._starts[number] for number in numbers], device=device)
        lengths = torch.tensor([self.lengths[number] for number in numbers], device=device)
        longest = max(self.lengths[number] for number in numbers)
        column = torch.arange(longest, device=device)
        mask = column < lengths[:, None]
        # Padding repeats the last token of its document, so that it is finite; it is masked.
        index = self._tokens[starts[:, None] + torch.minimum(column, lengths[:, None] - 1)]
        same_length = all(self.lengths[number] == longest for number in numbers)
        return Group(index, None if same_length else mask)

    def as_single_group(self) -> Group:
        """Return all documents as one padded batch, in order, for what must see them at once."""
        return self._group(list(range(len(self.lengths))))


def document_numbers(boundaries: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the number of the document that each token of a batch lies in, `[B, S]`."""
    tokens = torch.arange(shape[0] * shape[1], device=boundaries.device)
    return torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True).view(shape)


def _checked_edges(edges: list[int], shape: tuple[int, int]) -> list[int]:
    batch, length = shape
    ascending = all(start <= stop for start, stop in pairwise(edges))
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != batch * length or not ascending:
        raise ValueError(
            f"{BOUNDARIES} must go up from 0 to the {batch * length} tokens of the batch ({batch} x {length}), got "
            f"{edges[:6]}{'…' if len(edges) > 6 else ''} with {edges[-1:]} at the end."
        )
    crossed = [row * length for row in range(batch) if row * length not in set(edges)] if batch > 1 else []
    if crossed:
        raise ValueError(
            f"A document of {BOUNDARIES} lies over two rows of the batch (at token {crossed[0]} of {batch} x "
            f"{length}): each row must begin a document."
        )
    return edges


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of the documents in groups of similar length, the longest first."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or longest - lengths[number] > max(longest * MAX_PADDING_SHARE, MAX_PADDING_TOKENS):
            longest = lengths[number]
            groups.append([])
        groups[-1].append(number)
    return groups


def documents_of(boundaries: Tensor, shape: tuple[int, int], padding: Tensor | None) -> Documents:
    """Return the documents of an attention call, which the first layer computes and the others take from its tensors.

    (Where these have moved to another device they are computed again.)
    """
    carrier = boundaries if padding is None else padding
    documents: Documents | None = getattr(carrier, DOCUMENTS, None)
    if documents is None or documents.shape != shape:
        documents = Documents(boundaries, shape, padding)
        setattr(carrier, DOCUMENTS, documents)
    return documents


@torch.compiler.disable
def run_packed(
    forward: Forward, documents: Documents, query: Tensor, key: Tensor, value: Tensor, *, single_batch: bool
) -> tuple[Tensor, Tensor | None]:
    """Run attention on every group of documents, or on all of them in a single padded batch.

    Args:
        forward: The attention.
        documents: The documents of the batch.
        query: `[B, H, S, d]`; key `[B, G, S, d]`, value `[B, G, S, e]`.
        single_batch: Whether all documents go into one call.

    Returns:
        The output `[B, S, H, e]`, and the weights `[B, H, S, S]` if `forward` returns any.
    """
    groups = [documents.as_single_group()] if single_batch and documents.lengths else documents.groups
    batch, length = documents.shape
    indices, outputs = [], []
    weights: list[tuple[Group, Tensor]] = []
    for group in groups:
        q, k, v = (group.gather(tensor) for tensor in (query, key, value))
        out, group_weights = forward(q, k, v, group.mask, group is groups[0])
        if group_weights is not None:
            weights.append((group, group_weights))
        flat, index = out.flatten(0, 1), group.index.flatten()
        if group.mask is not None:
            real = group.mask.flatten().nonzero().squeeze(1)
            flat, index = flat[real], index[real]
        outputs.append(flat)
        indices.append(index)
    if not outputs:
        return value.new_zeros(batch, length, query.shape[1], value.shape[3]), None
    joined = torch.cat(outputs)
    scattered = joined.new_zeros(batch * length, *joined.shape[1:]).index_copy(0, torch.cat(indices), joined)
    return scattered.unflatten(0, (batch, length)), _scatter_weights(documents.shape, weights) if weights else None


def _scatter_weights(shape: tuple[int, int], weights: list[tuple[Group, Tensor]]) -> Tensor:
    """Return the weights of the documents as blocks of `[B, H, S, S]`; 0 between documents."""
    batch, length = shape
    first = weights[0][1]
    scattered = first.new_zeros(batch, first.shape[1], length, length)
    for group, group_weights in weights:
        for number, index in enumerate(group.index):
            index = index if group.mask is None else index[group.mask[number]]
            row, columns = int(index[0]) // length, index % length
            scattered[row][:, columns[:, None], columns] = group_weights[number, :, : len(index), : len(index)]
    return scattered
