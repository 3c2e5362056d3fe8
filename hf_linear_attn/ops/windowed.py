"""Exact softmax inside a window, kernelized attention outside it, one normaliser: causal form and explicit weights.

    w_ij = exp(τ q_i·k_j - c_i)                 for j inside the window of i
    w_ij = exp(g) φ(q_i)·φ(k_j) · exp(s_ij)     for every other visible j
    o_i  = Σ_j w_ij v_j / Σ_j w_ij

`c_i` is the row's stabiliser, `g` the log mixing weight of the head. For maps that carry a log scale (which estimate
`exp(τ q·k)` itself) `s_ij` is that scale relative to `c_i`, so that exact and estimated weights share one stabiliser;
for other maps it is 0, and `c_i` is the maximum over the window: the kernelized part is then measured against the
strongest token of the window.

Shapes as in `ops.kernelized`; log_mix `[H]`, or row by row `[B | 1, H, L | 1]`; the window is the last `window` tokens
(causal, the token itself included) or the tokens at a distance below `window` (bidirectional: `ops.banded`). Sinks
(`ops.sinks`) count as inside of every window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .common import FeatureFunction, Features, State, compute_dtype, divide, group_heads, mask_tokens
from .fused import WindowedCall
from .kernelized import masked_key_features, merge_keys, read_state
from .sinks import Sinks, first_tokens, take_tokens

#: Entries of a state that belong to the kernelized part.
FAR = ("kv", "k_sum", "log_scale")

#: Number of queries that the causal form handles at once.
CAUSAL_CHUNK = 64

#: Added to the logits of padding, as one more column of q and k: their exponentials are exactly zero.
BLOCKED = -1e30

#: Lower bound of a row's stabiliser: a row that sees no key gets `exp(BLOCKED - FLOOR) = 0` everywhere, not `exp(0)`.
FLOOR = -1e20


class Accumulator(NamedTuple):
    """Outputs before normalisation, relative to `exp(log_scale)`: `Σ_j w_ij [v_j, 1]` `[…, n, e + 1]`, `[…, n]`."""

    values: Tensor
    log_scale: Tensor

    def normalised(self) -> Tensor:
        """Return the weighted means `[…, n, e]`."""
        return divide(self.values[..., :-1], self.values[..., -1])


class QueryRows(NamedTuple):
    """Queries `[B, G, R, n, …]`: `[τ q, 1]`, and their features with the mixing weight multiplied in."""

    query: Tensor
    features: Features


def make_query_rows(
    query: Tensor, query_features: FeatureFunction, start: int, groups: int, scaling: float, log_mix: Tensor
) -> QueryRows:
    """Prepare a block of queries `[B, H, n, d]` that begins at position `start`; log_mix `[B | 1, H, n | 1]`."""
    block = query.to(compute_dtype(query))
    values, log_scale = query_features(block, start)
    values = values * log_mix.to(block.dtype).exp().unsqueeze(-1)
    grouped_scale = None if log_scale is None else group_heads(log_scale.unsqueeze(-1), groups).squeeze(-1)
    return QueryRows(
        group_heads(functional.pad(block * scaling, (0, 1), value=1.0), groups),
        Features(group_heads(values, groups), grouped_scale),
    )


def slice_rows(log_mix: Tensor, start: int, stop: int) -> Tensor:
    """Return the part of `[B | 1, H, L | 1]` that belongs to rows `start … stop - 1`."""
    return log_mix if log_mix.shape[2] == 1 else log_mix[:, :, start:stop]


def with_ones(value: Tensor) -> Tensor:
    """Append a column of ones to `[…, e]`: one product then gives the numerator and the normaliser."""
    return functional.pad(value, (0, 1), value=1.0)


def blocked_keys(key: Tensor, valid: Tensor) -> Tensor:
    """Return `[k, 0]`, or `[k, BLOCKED]` where `valid [B | 1, S]` is False: times `[q, 1]` it is the masked logit."""
    bias = key.new_zeros(valid.shape).masked_fill(~valid, BLOCKED)
    return torch.cat([key, bias[:, None, :, None].expand(*key.shape[:3], 1)], dim=-1)


def pad_tokens(tensor: Tensor, before: int, after: int) -> Tensor:
    """Add tokens of zeros before and after those of `[B, H, L, d]`."""
    return functional.pad(tensor, (0, 0, before, after))


def row_product(rows: Tensor, keys: Tensor) -> Tensor:
    """Multiply `[B, G, R, n, m] x [B, G, p, m] -> [B, G, R, n, p]` without repeating the keys over R."""
    folded = rows.reshape(rows.shape[0], rows.shape[1], -1, rows.shape[-1])
    return (folded @ keys.transpose(-1, -2)).view(*rows.shape[:-1], keys.shape[2])


def _value_product(weights: Tensor, value: Tensor) -> Tensor:
    return row_product(weights, value.transpose(-1, -2))


def _linear_weights(rows: Features, keys: Features, top: Tensor) -> Tensor:
    """`φ(q)·φ(k) exp(s_q + s_k - top)` `[B, G, R, n, p]`, top `[B, G, R, n]`.

    The exponent is at most 0 wherever the weight is used; the clamp keeps the others from overflowing.
    """
    weights = row_product(rows.values, keys.values)
    if rows.log_scale is None or keys.log_scale is None:
        return weights
    gap = (rows.log_scale - top).unsqueeze(-1) + keys.log_scale[:, :, None, None, :]
    return weights * gap.clamp(max=0.0).exp()


def _largest_scale(keys: Features, used: Tensor) -> Tensor:
    """Largest log scale of the keys that each row uses: used `[…, n, p]` -> `[B, G, 1, n]`, `-inf` where none."""
    assert keys.log_scale is not None
    scales = keys.log_scale.detach()[:, :, None, None, :]
    return scales.masked_fill(~used, float("-inf")).amax(dim=-1)


def _chunk_inside(sinks: Sinks | None, start: int, size: int, window: int, device: torch.device) -> Tensor:
    """Which keys of a chunk have exact weights, `[B | 1, 1, 1, n, window + n (+ sinks)]`."""
    row = torch.arange(size, device=device).unsqueeze(-1)
    column = torch.arange(size + window, device=device)
    inside = ((column > row) & (column <= row + window)).unsqueeze(0)
    if sinks is not None:
        outside = sinks.outside(row.squeeze(-1) + start, window, True)
        inside = torch.cat([inside.expand(outside.shape[0], -1, -1), outside], dim=-1)
    return inside[:, None, None]


def _causal_chunk(
    rows: QueryRows, key: Tensor, value: Tensor, older: Features, inside: Tensor, state: State | None
) -> Accumulator:
    """One chunk of n queries against keys `[k, bias]` and values `[v, 1]`: `window + n` that end with their own, and
    the sinks.

    older: features of the first n of these keys; row i has key j <= i of them outside its window.
    """
    size = rows.query.shape[3]
    left = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    logits = row_product(rows.query, key).masked_fill(~inside, float("-inf"))
    top = logits.amax(dim=-1)  # with a log scale everything is relative to it, so that it has no gradient
    query_scale = rows.features.log_scale
    if query_scale is not None:
        top = top.detach()
        scale = _largest_scale(older, left)
        if state is not None:
            scale = torch.maximum(scale, state["log_scale"][:, :, None, None])
        top = torch.maximum(top, query_scale.detach() + scale)
    top = top.clamp_min(FLOOR)
    exact = torch.exp(logits - top.unsqueeze(-1))
    near = _linear_weights(rows.features, older, top).masked_fill(~left, 0.0)
    total = _value_product(exact[..., :size] + near, value[:, :, :size])
    total = total + _value_product(exact[..., size:], value[:, :, size:])
    if state is not None:
        past, past_sum = read_state(rows.features.values, state)
        far = torch.cat([past, past_sum.unsqueeze(-1)], dim=-1)
        if query_scale is not None:
            far = far * torch.exp(query_scale + state["log_scale"][:, :, None, None] - top).unsqueeze(-1)
        total = total + far
    return Accumulator(total, top)


class Tokens(NamedTuple):
    """`window` older tokens and the new ones, with padding moved to the front, so that windows count real tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor
    #: Mixing weights of the rows, `[B | 1, H, L | 1]`.
    log_mix: Tensor
    #: Index of each new token among the queries `[B, L]` (None: its own index).
    query_index: Tensor | None


def gather_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_mix: Tensor,
    window: int,
    mask: Tensor | None,
    state: State | None,
) -> Tokens:
    """Put the ring of a state (or zeros) before new tokens, and padding first; log_mix `[B | 1, H, L | 1]`."""
    batch, length = key.shape[0], key.shape[2]
    valid = mask if mask is not None else torch.ones(batch, length, dtype=torch.bool, device=key.device)
    if state is None:
        key, value = pad_tokens(key, window, 0), pad_tokens(value, window, 0)
        valid = functional.pad(valid, (window, 0), value=False)
    else:
        key = torch.cat([state["ring_key"].to(key.dtype), key], dim=2)
        value = torch.cat([state["ring_value"].to(value.dtype), value], dim=2)
        valid = torch.cat([state["ring_mask"], valid], dim=1)
    if mask is None:  # a ring has its padding first already
        return Tokens(query, key, value, valid, log_mix, None)
    order = valid.to(torch.int8).argsort(dim=1, stable=True)
    positions = torch.arange(order.shape[1], device=order.device).expand_as(order)
    inverse = torch.empty_like(order).scatter_(1, order, positions)
    rows = (order[:, window:] - window).clamp_min(0)
    if log_mix.shape[2] > 1:
        log_mix = take_tokens(log_mix.expand(batch, -1, -1).unsqueeze(-1), rows).squeeze(-1)
    return Tokens(
        take_tokens(mask_tokens(query, mask), rows),
        take_tokens(key, order),
        take_tokens(value, order),
        valid.gather(1, order),
        log_mix,
        (inverse[:, window:] - window).clamp_min(0),
    )


def make_ring(tokens: Tokens, length: int) -> State:
    """Copy the last `window` tokens, which later tokens see exactly. (A view would retain all tokens in memory.)"""
    ring = {"ring_key": tokens.key[:, :, length:], "ring_value": tokens.value[:, :, length:]}
    ring["ring_mask"] = tokens.valid[:, length:]
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in ring.items()}


def causal_accumulator(call: WindowedCall, *, normalise: bool = False) -> tuple[Accumulator, State | None]:
    """Compute the causal form before normalisation, `[B, H, L, …]`, and the state after it.

    With `normalise` the values are the outputs `[B, H, L, e]` in the dtype of `call.value`, divided chunk by chunk. At
    padding all of it is zero. The state holds what `first_tokens` returns, too.
    """
    query, key, value, window, state = call.query, call.key, call.value, call.window, call.state
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    if length == 0:
        empty = value.new_zeros(batch, heads, 0, value.shape[-1])
        return Accumulator(empty if normalise else with_ones(empty.to(dtype)), empty[..., 0].to(dtype)), state
    groups = key.shape[1]
    tokens = gather_tokens(query, key, value, call.log_mixing_weights(), window, call.mask, state)
    sinks, first = first_tokens(call)
    is_far = tokens.valid
    if sinks is not None:
        is_far = is_far & (torch.arange(-window, length, device=key.device) > sinks.position[:, -1:])
        sink_key, sink_value = functional.pad(sinks.key.to(dtype), (0, 1)), with_ones(sinks.value.to(dtype))
    far: State | None = None if state is None else {name: state[name] for name in FAR if name in state}
    values, scales = [], []
    for start in range(0, length, CAUSAL_CHUNK):
        size = min(CAUSAL_CHUNK, length - start)
        near = slice(start, start + size + window)
        valid = tokens.valid[:, near]
        near_key = mask_tokens(tokens.key[:, :, near].to(dtype), valid)
        near_value = mask_tokens(tokens.value[:, :, near].to(dtype), valid)
        mix = slice_rows(tokens.log_mix, start, start + size)
        block = tokens.query[:, :, start : start + size]
        rows = make_query_rows(block, call.query_features, start, groups, call.scaling, mix)
        older_keys = near_key[:, :, :size], start - window, is_far[:, start : start + size]
        older = masked_key_features(call.key_features, *older_keys, dtype)
        exact_key, exact_value = blocked_keys(near_key, valid), with_ones(near_value)
        if sinks is not None:
            exact_key, exact_value = torch.cat([exact_key, sink_key], 2), torch.cat([exact_value, sink_value], 2)
        inside = _chunk_inside(sinks, start, size, window, key.device)
        chunk = _causal_chunk(rows, exact_key, exact_value, older, inside, far)
        out = chunk.normalised().to(value.dtype) if normalise else chunk.values
        values.append(out.flatten(1, 2))
        scales.append(chunk.log_scale.flatten(1, 2))
        far = merge_keys(far, older, near_value[:, :, :size])
    joined, scale = torch.cat(values, dim=2), torch.cat(scales, dim=2)
    if tokens.query_index is not None:
        joined = mask_tokens(take_tokens(joined, tokens.query_index), call.mask)
        scale = mask_tokens(take_tokens(scale.unsqueeze(-1), tokens.query_index).squeeze(-1), call.mask)
    return Accumulator(joined, scale), {**(far or {}), **make_ring(tokens, length), **first}


def windowed_causal(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute the causal form, continued from `call.state`.

    The kernelized part is causal attention over keys delayed by `window` tokens, so the state consists of `kv`, `k_sum`
    (`log_scale`), a ring of the last `window` keys and values: `ring_key [B, G, w, d]`, `ring_value [B, G, w, e]`,
    `ring_mask [B, w]`, the sinks and the number of tokens. Windows count real tokens: padding anywhere changes nothing.
    Time O(L·(window + chunk + m)·d); temporaries O(chunk·(window + m)).

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token.
    """
    accumulator, state = causal_accumulator(call, normalise=True)
    return accumulator.values, state


def inside_window(mask: Tensor | None, query: Tensor, key: Tensor, window: int, causal: bool) -> Tensor:
    """Return which keys lie in the window of each query, `[B | 1, 1, L, S]`; queries are the last of the tokens.

    Distances are those among real tokens (causal, mask `[B, S]`) or those in the sequence.
    """
    position = torch.arange(key.shape[2], device=key.device).unsqueeze(0)
    if causal and mask is not None and mask.dim() == 2:
        position = mask.long().cumsum(dim=1)
    distance = position[:, None, key.shape[2] - query.shape[2] :, None] - position[:, None, None, :]
    return (distance.abs() < window) & ((distance >= 0) | (not causal))


def dense_windowed_weights(
    query: Tensor,
    key: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    *,
    inside: Tensor,
    allowed: Tensor,
    scaling: float,
    log_mix: Tensor,
) -> Tensor:
    """Compute explicit normalised weights `[B, H, L, S]`, for analysis. O(L·S) time and memory.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, G, S, d]`.
        query_features: The feature map of queries.
        key_features: The feature map of keys.
        inside: `[B | 1, H | 1, L, S]`, which keys have exact weights.
        allowed: `[B | 1, H | 1, L, S]`, which keys are visible at all.
        scaling: τ.
        log_mix: `[H]` or `[B | 1, H, L | 1]`.
    """
    batch, groups, heads, size, keys = key.shape[0], key.shape[1], query.shape[1], query.shape[2], key.shape[2]

    def grouped(flags: Tensor) -> Tensor:
        return flags.expand(batch, heads, size, keys).unflatten(1, (groups, -1))

    log_mix = log_mix.view(1, -1, 1) if log_mix.dim() == 1 else log_mix
    rows = make_query_rows(query, query_features, 0, groups, scaling, log_mix)
    exact, linear = grouped(inside & allowed), grouped(~inside & allowed)
    block = key.to(rows.query.dtype)
    features = key_features(block, 0)
    logits = row_product(rows.query, functional.pad(block, (0, 1))).masked_fill(~exact, float("-inf"))
    top = logits.amax(dim=-1) if keys else logits.new_zeros(logits.shape[:-1])
    if rows.features.log_scale is not None:
        top = torch.maximum(top.detach(), rows.features.log_scale.detach() + _largest_scale(features, linear))
    top = top.clamp_min(FLOOR)
    estimate = _linear_weights(rows.features, features, top).masked_fill(~linear, 0.0)
    weights = torch.exp(logits - top.unsqueeze(-1)) + estimate
    return divide(weights, weights.sum(dim=-1)).flatten(1, 2)
