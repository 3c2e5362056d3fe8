"""Attention over a sequence that is split over processes: each has one contiguous slice, in the order of the ranks.

What a process must know of the others' slices are sums over keys and, for windows, some single keys and values: its
size does not depend on the length. Each function is called by all processes of a group at once, forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .common import KVState, State, compute_dtype, finite_or_zero, mask_tokens, with_ones
from .fused import KernelizedCall, WindowedCall
from .kernelized import key_sums, masked_key_features
from .sinks import take_tokens, token_numbers


class Ranks(NamedTuple):
    """The processes that share a sequence, this one's number among them, and how many there are."""

    group: Any
    rank: int
    size: int

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes `[n, …]`; gradients flow back to each of them."""
        gathered: Tensor = _Gather.apply(tensor, self)
        return gathered

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, with a gradient."""
        total: Tensor = _Total.apply(tensor, self)
        return total

    def earlier(self, device: torch.device) -> Tensor:
        """Return which processes have an earlier slice, `[n]`."""
        return torch.arange(self.size, device=device) < self.rank

    def gather_sums(self, own: KVState, *others: Tensor) -> tuple[KVState, list[Tensor]]:
        """Gather sums over keys, and other tensors `[B, G, …]`, in one message: `[n, B, G, …]` each."""
        tensors = [own.total, *others] if own.log_scale is None else [own.total, own.log_scale.unsqueeze(-1), *others]
        sizes = [tensor[0, 0].numel() for tensor in tensors]
        message = torch.cat([tensor.flatten(2).to(own.total.dtype) for tensor in tensors], dim=-1)
        parts = self.gather(message).split(sizes, dim=-1)
        shaped = [part.unflatten(-1, tensor.shape[2:]) for part, tensor in zip(parts, tensors, strict=True)]
        scale = None if own.log_scale is None else shaped.pop(1).squeeze(-1)
        return KVState(shaped[0], scale), shaped[1:]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        gathered = tensor.new_empty(ranks.size, *tensor.shape)
        distributed.all_gather(list(gathered), tensor.contiguous(), group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = torch.empty_like(gradient[0])
        distributed.reduce_scatter(own, list(gradient.contiguous()), group=ctx.ranks.group)
        return own, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(gradient, ctx.ranks), None


def _sum_of(states: KVState, chosen: Tensor) -> KVState:
    """Add up those sums `[n, B, G, …]` that are chosen `[n]`. The others keep a gradient, of zeros."""
    total, scales = states
    if scales is None:
        return KVState(torch.einsum("nbgme,n->bgme", total, chosen.to(total.dtype)), None)
    scales = scales.masked_fill(~chosen[:, None, None], float("-inf"))
    top = scales.amax(dim=0)
    return KVState(torch.einsum("nbgme,nbg->bgme", total, (scales - finite_or_zero(top)).exp()), top)


def sums_before(call: KernelizedCall, ranks: Ranks) -> State:
    """Return the state before the slice of a causal call: one message of the size of a state."""
    return _sum_of(ranks.gather_sums(_own_sums(call))[0], ranks.earlier(call.key.device)).state()


def sums_of_all(call: KernelizedCall, ranks: Ranks) -> KVState:
    """Return S and z over the keys of all slices: one sum of the size of a state, and the largest log scale."""
    total, scale = _own_sums(call)
    if scale is None:
        return KVState(ranks.total(total), None)
    top = ranks.gather(scale).amax(dim=0)
    return KVState(ranks.total(total * (scale - finite_or_zero(top)).exp()[..., None, None]), top)


def _own_sums(call: KernelizedCall | WindowedCall) -> KVState:
    sums = key_sums(call)
    if sums is None:
        raise ValueError("A process has no token of this sequence. Pass each process a slice of at least one token.")
    return sums


def counts_of_slices(mask: Tensor | None, key: Tensor, ranks: Ranks) -> Tensor:
    """Return how many real tokens the slice of each process has in each row, `[n, B]`."""
    return ranks.gather(token_numbers(mask, len(key), key.shape[2], key.device)[:, -1].contiguous())


def window_before(call: WindowedCall, ranks: Ranks) -> State:
    """Return the state before the slice of a causal windowed call.

    A process sends the sums over its tokens but the first n and the last w, and these one by one: only a receiver knows
    which of them are sinks and which are in its ring. Padding may be anywhere.
    """
    key, value, device, sinks, window = call.key, call.value, call.key.device, call.sinks, call.window
    numbers = token_numbers(call.mask, len(key), key.shape[2], device)
    counts = counts_of_slices(call.mask, key, ranks)
    # Of all slices: the numbers of the tokens that are sent one by one, 0 where there is none.
    first = torch.arange(1, sinks + 1, device=device).expand(*counts.shape, -1)
    last = counts.unsqueeze(-1) + torch.arange(1 - window, 1, device=device)
    edges = torch.cat([first * (first <= counts.unsqueeze(-1)), last * (last > sinks)], dim=-1)
    own = edges[ranks.rank]
    index, real = torch.searchsorted(numbers.contiguous(), own.clamp_min(1)).clamp(max=key.shape[2] - 1), own > 0
    between = (numbers > sinks) & (numbers <= counts[ranks.rank].unsqueeze(-1) - window)
    between = between if call.mask is None else between & call.mask
    sums, others = ranks.gather_sums(
        _own_sums(call.replace(mask=between)), *(mask_tokens(take_tokens(x, index), real) for x in (key, value))
    )
    earlier = ranks.earlier(device)
    edges = torch.where((edges > 0) & earlier[:, None, None], edges + (counts.cumsum(0) - counts).unsqueeze(-1), 0)
    edges = edges.movedim(0, 1).flatten(1)  # numbers among all tokens, [B, n·k]
    edge_key, edge_value = (x.movedim(0, 2).flatten(2, 3) for x in others)
    count = (counts * earlier.unsqueeze(-1)).sum(dim=0)

    def select(wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matches = edges.unsqueeze(1) == wanted.unsqueeze(2)
        real = matches.any(dim=-1) & (wanted > 0)
        position = matches.to(torch.int8).argmax(dim=-1)
        chosen_key, chosen_value = (mask_tokens(take_tokens(x, position), real) for x in (edge_key, edge_value))
        return chosen_key, chosen_value, real

    left = (edges > sinks) & (edges <= count.unsqueeze(-1) - window)
    features = masked_key_features(call.key_features, edge_key, 0, left, compute_dtype(edge_key))
    rest = KVState.of(features, with_ones(mask_tokens(edge_value, left)), signed=call.signed)
    ring_key, ring_value, ring_mask = select(count.unsqueeze(-1) + torch.arange(1 - window, 1, device=device))
    state = {"ring_key": ring_key.to(key.dtype), "ring_value": ring_value.to(value.dtype), "ring_mask": ring_mask}
    if sinks:
        sink_key, sink_value, _ = select(torch.arange(1, sinks + 1, device=device).expand(len(key), -1))
        state |= {"sink_key": sink_key.to(key.dtype), "sink_value": sink_value.to(value.dtype)}
    return {**_sum_of(sums, earlier).plus(rest).state(), **state, "count": count}
