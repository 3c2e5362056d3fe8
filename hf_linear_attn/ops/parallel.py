"""Attention over a sequence that is split over processes: each has one contiguous slice, in the order of the ranks.

What a process must know of the others' slices are sums over keys and, for windows, some single keys and values: its
size does not depend on the length. Each function is called by all processes of a group at once, forward and backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .calls import KernelizedCall, WindowedCall
from .common import KVState, State, compute_dtype, finite_or_zero, mask_tokens, weighted_mean, with_ones
from .kernelized import key_state, masked_key_features
from .ranks import Ranks
from .sinks import Sinks, first_with_number, repeated, take_tokens, token_numbers
from .window_tokens import pad_tokens
from .windowed import windowed_bidirectional


def _add_states(states: KVState, chosen: Tensor) -> KVState:
    """Add up those states `[n, B, G, …]` that are chosen `[n]`. The others keep a gradient, of zeros."""
    total, scales = states
    if scales is None:
        return KVState(torch.einsum("nbgme,n->bgme", total, chosen.to(total.dtype)), None)
    scales = scales.masked_fill(~chosen[:, None, None], float("-inf"))
    top = scales.amax(dim=0)
    return KVState(torch.einsum("nbgme,nbg->bgme", total, (scales - finite_or_zero(top)).exp()), top)


def state_before(call: KernelizedCall, ranks: Ranks) -> State:
    """Return the state before the slice of a causal call: one message of the size of a state."""
    return _add_states(ranks.gather_states(_own_state(call))[0], ranks.earlier(call.key.device)).state()


def total_state(call: KernelizedCall, ranks: Ranks) -> KVState:
    """Return S and z over the keys of all slices: one sum of the size of a state, and the largest log scale."""
    total, scale = _own_state(call)
    if scale is None:
        return KVState(ranks.total(total), None)
    top = ranks.gather(scale).amax(dim=0)
    return KVState(ranks.total(total * (scale - finite_or_zero(top)).exp()[..., None, None]), top)


def _own_state(call: KernelizedCall | WindowedCall) -> KVState:
    state = key_state(call)
    if state is None:
        raise ValueError("A process has no token of this sequence. Pass each process a slice of at least one token.")
    return state


class Edges(NamedTuple):
    """Tokens of all slices that are sent one by one: key `[B, G, k, d]`, value `[B, G, k, e]`.

    number `[B, k]`: among the real tokens of the sequence, from 1 on, and 0 for no token; position `[B, k]`: in the
    sequence; rank `[k]`: of which process. states `[n, B, G, …]`: over the other tokens of each slice. starts `[n]` and
    counts `[n, B]`: tokens before each slice, real ones of each slice.
    """

    key: Tensor
    value: Tensor
    number: Tensor
    position: Tensor
    rank: Tensor
    states: KVState
    starts: Tensor
    counts: Tensor

    @staticmethod
    def of(call: WindowedCall, ranks: Ranks, numbers: Tensor, index: Tensor) -> "Edges":
        """Exchange those tokens of the own slice that are at `index [B, k]`, numbered as `token_numbers` says."""
        batch, _, length, _ = call.key.shape
        real = torch.ones_like(numbers, dtype=torch.bool) if call.mask is None else call.mask.expand(batch, -1)
        number = (numbers * real).gather(1, index) * ~repeated(index)
        state = _own_state(call.replace(mask=real.scatter(1, index, False)))
        tokens = (mask_tokens(take_tokens(tensor, index), number > 0) for tensor in (call.key, call.value))
        others, (key, value) = ranks.gather_states(state, *tokens)
        lengths = torch.full_like(numbers[:, :1], length)
        facts = ranks.gather(torch.cat([lengths, numbers[:, -1:], number, index], dim=1))
        lengths, counts, number, index = facts.split([1, 1, index.shape[1], index.shape[1]], dim=2)
        starts, before = ((x.cumsum(0) - x) for x in (lengths, counts))
        number = (number + before) * (number > 0)
        position = index + starts
        rank = torch.arange(ranks.size, device=index.device).repeat_interleave(index.shape[2])
        key, value = (x.movedim(0, 2).flatten(2, 3) for x in (key, value))
        number, position = (x.movedim(0, 1).flatten(1) for x in (number, position))
        return Edges(key, value, number, position, rank, others, starts[:, 0, 0], counts.squeeze(2))

    def select(self, among: Tensor, requested: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return key, value, position and whether it exists of each token with `requested [B, t]` in `among [B, k]`."""
        matches = (among.unsqueeze(1) == requested.unsqueeze(2)) & (self.number > 0).unsqueeze(1)
        real = matches.any(dim=-1)
        index = matches.to(torch.int8).argmax(dim=-1)
        key, value = (mask_tokens(take_tokens(tensor, index), real) for tensor in (self.key, self.value))
        return key, value, self.position.gather(1, index), real

    def sum_over(self, call: WindowedCall, chosen: Tensor, slices: Tensor) -> KVState:
        """Add up the tokens that are chosen `[B, k]`, and the other tokens of the chosen slices `[n]`."""
        features = masked_key_features(call.key_features, self.key, chosen, self.key.dtype)
        chosen_state = KVState.of(features, with_ones(mask_tokens(self.value, chosen)), signed=call.signed)
        return _add_states(self.states, slices).plus(chosen_state)


def window_before(call: WindowedCall, ranks: Ranks) -> State:
    """Return the state before the slice of a causal windowed call.

    A process sends the sums over its tokens but the first n and the last w, and these one by one: only a receiver knows
    which of them are sinks and which are in its ring. Padding may be anywhere.
    """
    key = call.key
    device = call.key.device
    sinks = call.sinks
    numbers = token_numbers(call.mask, len(key), key.shape[2], device)
    first = torch.arange(1, sinks + 1, device=device)
    last = torch.arange(1 - call.window, 1, device=device)
    requested = torch.cat([first.expand(len(key), -1), numbers[:, -1:] + last], dim=1)
    index = first_with_number(numbers, requested.clamp_min(1))
    edges = Edges.of(call, ranks, numbers, index)
    earlier = ranks.earlier(device)
    edges = edges._replace(number=edges.number * earlier[edges.rank])
    count = (edges.counts * earlier.unsqueeze(-1)).sum(dim=0).unsqueeze(-1)
    left = (edges.number > sinks) & (edges.number <= count - call.window)
    ring_key, ring_value, _, ring_mask = edges.select(edges.number, count + last)
    state = {"ring_key": ring_key.to(key.dtype), "ring_value": ring_value.to(call.value.dtype), "ring_mask": ring_mask}
    if sinks:
        sink_key, sink_value, _, _ = edges.select(edges.number, first.expand(len(key), -1))
        state |= {"sink_key": sink_key.to(key.dtype), "sink_value": sink_value.to(call.value.dtype)}
    return {**edges.sum_over(call, left, earlier).state(), **state, "count": count.squeeze(-1)}


def windowed_slice(call: WindowedCall, ranks: Ranks) -> Tensor:
    """Compute the slice of a bidirectional windowed call.

    A process sends the sums over its tokens but those at its borders, and the first n and last n, and these one by one.
    With the borders of the neighbours its slice is a part of the sequence; the sinks' own queries are exact.
    """
    key = call.key
    device = call.key.device
    sinks = call.sinks
    border = max(call.window - 1, 1)
    batch, _, length, _ = key.shape
    numbers = token_numbers(call.mask, batch, length, device)
    steps = torch.arange(border, device=device)
    order = torch.arange(1, sinks + 1, device=device).expand(batch, -1)
    borders = torch.cat([steps.clamp(max=length - 1), (length - 1 - steps).clamp_min(0)]).expand(batch, -1)
    requested = torch.cat([order, numbers[:, -1:] + 1 - order], dim=1).clamp_min(1)
    index = torch.cat([first_with_number(numbers, requested), borders], dim=1)
    edges = Edges.of(call, ranks, numbers, index)
    start = edges.starts[ranks.rank] - border
    total = edges.counts.sum(dim=0).unsqueeze(-1)
    ends = torch.cat([torch.minimum(order, total), (total + 1 - order).clamp_min(1)], dim=1)
    sink_key, sink_value, position, _ = edges.select(edges.number, ends)
    is_sink = (edges.number.unsqueeze(-1) == ends.unsqueeze(1)).any(dim=-1)
    near = (edges.position >= start) & (edges.position < start + length + 2 * border)
    others = torch.arange(ranks.size, device=device) != ranks.rank
    far = edges.sum_over(call, (edges.number > 0) & ~is_sink & ~near & others[edges.rank], others)
    neighbours = torch.cat([start + steps, start + border + length + steps]).expand(batch, -1)
    near_key, near_value, _, real = edges.select(edges.position, neighbours)
    mask = torch.ones(1, length, dtype=torch.bool, device=device) if call.mask is None else call.mask
    log_mix = call.log_mixing_weights()
    part = call.replace(
        query=pad_tokens(call.query, border, border),
        key=_between(near_key.to(key.dtype), key, border),
        value=_between(near_value.to(call.value.dtype), call.value, border),
        mask=_between(real, mask.expand(batch, -1), border, dim=1),
        log_mix=log_mix if log_mix.shape[2] == 1 else pad(log_mix, (border, border)),
        state=far.state(),
    )
    of_sequence = Sinks(sink_key, sink_value, position - start) if sinks else None
    out = windowed_bidirectional(part, of_sequence)[:, :, border : border + length]
    return out if of_sequence is None else _exact_sinks(out, call, ranks, position - start - border)


def _between(borders: Tensor, middle: Tensor, border: int, dim: int = 2) -> Tensor:
    left, right = borders.split(border, dim=dim)
    return torch.cat([left, middle, right], dim=dim)


def _exact_sinks(out: Tensor, call: WindowedCall, ranks: Ranks, position: Tensor) -> Tensor:
    """Replace the outputs of the sinks' queries, at `position [B, s]` relative to the slice, as `attend_from_sinks`."""
    key, value = (mask_tokens(x.to(compute_dtype(x)), call.mask) for x in (call.key, call.value))
    batch, groups, length, _ = key.shape
    here = position.unsqueeze(-1) == torch.arange(length, device=key.device)  # [B, s, L]
    query = take_tokens(mask_tokens(call.query.to(key.dtype), call.mask), position.clamp(0, length - 1))
    query = ranks.total(mask_tokens(query, here.any(dim=-1)))
    logits = query.reshape(batch, groups, -1, key.shape[3]) @ key.transpose(-1, -2) * call.scaling
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask[:, None, None], float("-inf"))
    top = logits.detach().amax(dim=-1)
    total = (logits - finite_or_zero(top).unsqueeze(-1)).exp() @ with_ones(value)
    gathered, _ = ranks.gather_states(KVState(total.flatten(1, 2).unsqueeze(2), top.flatten(1)))
    total = _add_states(gathered, torch.ones(ranks.size, dtype=torch.bool, device=key.device)).total.squeeze(2)
    exact = weighted_mean(total).view(*query.shape[:3], -1)
    here = here & ~repeated(position).unsqueeze(-1)
    scattered = here.to(exact.dtype).transpose(1, 2).unsqueeze(1) @ exact
    return mask_tokens(out, ~here.any(dim=1)) + scattered.to(out.dtype)
