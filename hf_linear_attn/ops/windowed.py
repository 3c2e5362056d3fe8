"""Exact softmax inside a window, kernelized attention outside it, one normaliser.

    w_ij = exp(τ q_i·k_j - c_i)                 for j inside the window of i
    w_ij = exp(g) φ(q_i)·φ(k_j) · exp(s_ij)     for every other visible j
    o_i  = Σ_j w_ij v_j / Σ_j w_ij

`c_i` is the row's stabiliser, `g` the learned log mixing weight of the head. For maps that carry a log scale (which
estimate `exp(τ q·k)` itself) `s_ij` is that scale relative to `c_i`; for other maps it is 0, and `c_i` is the maximum
over the window: the kernelized part is then measured against the strongest token of the window.

Shapes as in `ops.kernelized`; log_mix `[H]`; the window is the last `window` tokens (causal, the token itself
included) or the tokens at a distance below `window` (bidirectional).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import (
    FeatureFunction,
    Features,
    State,
    compute_dtype,
    divide,
    finite_or_zero,
    group_heads,
    mask_tokens,
)
from .kernelized import masked_key_features, merge_keys, read_state

#: Smallest chunk of queries handled at once.
MIN_CHUNK = 64


class Rows(NamedTuple):
    """One chunk of queries `[B, G, R, n, …]`: scaled queries, their features, and the mixing weight `[G, R, 1]`."""

    query: Tensor
    features: Features
    log_mix: Tensor


def _fold(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], tensor.shape[1], -1, tensor.shape[-1])


def _row_product(rows: Tensor, keys: Tensor) -> Tensor:
    """`[B, G, R, n, m] x [B, G, p, m] -> [B, G, R, n, p]` without repeating the keys over R."""
    return (_fold(rows) @ keys.transpose(-1, -2)).view(*rows.shape[:-1], keys.shape[2])


def _mix(rows: Rows, exact: Tensor, near: list[tuple[Features, Tensor]], far: list[State]) -> tuple[Tensor, ...]:
    """Weights of exact keys, of kernelized near keys, and the factors of the far states, all relative to one row scale.

    exact: logits `[B, G, R, n, p]` with `-inf` outside the window; near: pairs (key features, allowed); far: states.
    """
    scaled = rows.features.log_scale is not None or any(keys.log_scale is not None for keys, _ in near)
    # With a scale, the result does not depend on `top`; without one, `top` is part of the weights and has a gradient.
    logits = exact.detach() if scaled else exact
    top = logits.amax(dim=-1) if exact.shape[-1] else exact.new_full(exact.shape[:-1], float("-inf"))
    query_scale = rows.features.log_scale if rows.features.log_scale is not None else torch.zeros_like(top)
    if scaled:
        for keys, allowed in near:
            assert keys.log_scale is not None
            scale = keys.log_scale.detach()[:, :, None, None, :].expand(*top.shape, keys.log_scale.shape[-1])
            scale = scale.masked_fill(~allowed, float("-inf")).amax(dim=-1) + query_scale.detach()
            top = torch.maximum(top, scale)
        for state in far:
            top = torch.maximum(top, state["log_scale"][:, :, None, None] + query_scale.detach())
    top = finite_or_zero(top)
    parts = [torch.exp(exact - top.unsqueeze(-1))]
    mix = rows.log_mix
    for keys, allowed in near:
        weights = _row_product(rows.features.values, keys.values)
        if scaled:
            assert keys.log_scale is not None
            gap = (query_scale + mix - top).unsqueeze(-1) + keys.log_scale[:, :, None, None, :]
            weights = weights * gap.masked_fill(~allowed, float("-inf")).exp()
        else:
            weights = weights * mix.exp().unsqueeze(-1)
        parts.append(weights.masked_fill(~allowed, 0.0))
    for state in far:
        factor = state["log_scale"][:, :, None, None] + query_scale + mix - top if scaled else mix
        parts.append(factor.exp())
    return tuple(parts)


def _attend(
    rows: Rows,
    exact: tuple[Tensor, Tensor, Tensor],
    near: list[tuple[Features, Tensor, Tensor]],
    far: list[State],
) -> Tensor:
    """Output `[B, G, R, n, e]` of one chunk.

    exact: keys, values, allowed; near: features, values, allowed of the same keys or a part of them; far: states.
    """
    key, value, allowed = exact
    logits = _row_product(rows.query, key).masked_fill(~allowed, float("-inf"))
    parts = _mix(rows, logits, [(keys, ok) for keys, _, ok in near], far)
    shape = (*rows.query.shape[:-1], value.shape[-1])
    numerator = (_fold(parts[0]) @ value).view(shape)
    denominator = parts[0].sum(dim=-1)
    for weights, (_, near_value, _) in zip(parts[1:], near, strict=False):
        numerator = numerator + (_fold(weights) @ near_value).view(shape)
        denominator = denominator + weights.sum(dim=-1)
    for factor, state in zip(parts[1 + len(near) :], far, strict=True):
        past, past_sum = read_state(rows.features.values, state)
        numerator = numerator + past * factor.unsqueeze(-1)
        denominator = denominator + past_sum * factor
    return divide(numerator, denominator)


def _rows(
    query: Tensor, query_features: FeatureFunction, start: int, stop: int, groups: int, scaling: float, log_mix: Tensor
) -> Rows:
    block = query[:, :, start:stop].to(compute_dtype(query))
    values, log_scale = query_features(block, start)
    grouped_scale = None if log_scale is None else group_heads(log_scale.unsqueeze(-1), groups).squeeze(-1)
    return Rows(
        group_heads(block, groups) * scaling,
        Features(group_heads(values, groups), grouped_scale),
        log_mix.to(block.dtype).view(groups, -1, 1),
    )


def _pad_tokens(tensor: Tensor, before: int, after: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, before, after))


def windowed_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    *,
    window: int,
    scaling: float,
    log_mix: Tensor,
    mask: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """Causal form, continued from `state`.

    The kernelized part is causal attention over keys delayed by `window` tokens, so a ring of the last `window` keys
    and values is all that the state holds beside the sums: `kv`, `k_sum` (`log_scale`), `ring_key [B, G, w, d]`,
    `ring_value [B, G, w, e]`, `ring_mask [B, w]`. Time O(L·(window + chunk + m)·d); temporaries O(chunk·(window + m)).
    """
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    valid = mask if mask is not None else torch.ones(batch, length, dtype=torch.bool, device=key.device)
    sums: State | None = None
    if state is None:
        keys, values = _pad_tokens(key, window, 0), _pad_tokens(value, window, 0)
        valid = torch.nn.functional.pad(valid, (window, 0), value=False)
    else:
        keys = torch.cat([state["ring_key"].to(key.dtype), key], dim=2)
        values = torch.cat([state["ring_value"].to(value.dtype), value], dim=2)
        valid = torch.cat([state["ring_mask"], valid], dim=1)
        sums = {name: tensor for name, tensor in state.items() if not name.startswith("ring_")}
    chunk = max(MIN_CHUNK, min(window, 2 * MIN_CHUNK))
    outputs = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        size = stop - start
        rows = _rows(query, query_features, start, stop, groups, scaling, log_mix)
        near_valid = valid[:, start : start + size + window]
        near_key = mask_tokens(keys[:, :, start : start + size + window].to(dtype), near_valid)
        near_value = mask_tokens(values[:, :, start : start + size + window].to(dtype), near_valid)
        row = torch.arange(size, device=key.device).unsqueeze(-1)
        column = torch.arange(size + window, device=key.device)
        shown = near_valid[:, None, None, None, :]
        exact = (column > row) & (column <= row + window) & shown
        older = masked_key_features(key_features, near_key[:, :, :size], start - window, near_valid[:, :size], dtype)
        near = [(older, near_value[:, :, :size], (column[:size] <= row) & shown[..., :size])]
        out = _attend(rows, (near_key, near_value, exact), near, [] if sums is None else [sums])
        outputs.append(out.reshape(batch, heads, size, -1).to(value.dtype))
        sums = merge_keys(sums, older, near_value[:, :, :size])
    if sums is None or not outputs:  # no new tokens
        return value.new_zeros(batch, heads, 0, value.shape[-1]), state or {}
    ring = {
        "ring_key": keys[:, :, length:].contiguous(),
        "ring_value": values[:, :, length:].contiguous(),
        "ring_mask": valid[:, length:].contiguous(),
    }
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), {**sums, **ring}


def windowed_bidirectional(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    *,
    window: int,
    scaling: float,
    log_mix: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Bidirectional form: query and keys of one length L. The sums left and right of the neighbourhood come from
    running sums over blocks, added and never subtracted, so that no digits cancel. Memory O(L/block·m·e)."""
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    chunk = max(2 * MIN_CHUNK, window)
    bounds = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    blocks: list[tuple[Tensor, Features, Tensor, Tensor]] = []
    for start, stop in bounds:
        part = (
            mask[:, start:stop]
            if mask is not None
            else torch.ones(batch, stop - start, dtype=torch.bool, device=key.device)
        )
        block_key = mask_tokens(key[:, :, start:stop].to(dtype), part)
        features = masked_key_features(key_features, block_key, start, part, dtype)
        blocks.append((block_key, features, mask_tokens(value[:, :, start:stop].to(dtype), part), part))
    before = _running_sums(blocks)
    after = _running_sums(blocks[::-1])[::-1]
    outputs = []
    for index, (start, stop) in enumerate(bounds):
        first, last = max(index - 1, 0), min(index + 2, len(blocks))
        near_key = torch.cat([block[0] for block in blocks[first:last]], dim=2)
        near_value = torch.cat([block[2] for block in blocks[first:last]], dim=2)
        shown = torch.cat([block[3] for block in blocks[first:last]], dim=1)[:, None, None, None, :]
        near_features = _join([block[1] for block in blocks[first:last]])
        row = torch.arange(start, stop, device=key.device).unsqueeze(-1)
        column = torch.arange(bounds[first][0], bounds[last - 1][1], device=key.device)
        inside = (row - column).abs() < window
        rows = _rows(query, query_features, start, stop, groups, scaling, log_mix)
        far = [
            sums
            for sums in ((before[first - 1] if first else None), (after[last] if last < len(blocks) else None))
            if sums
        ]
        out = _attend(rows, (near_key, near_value, inside & shown), [(near_features, near_value, ~inside & shown)], far)
        outputs.append(out.reshape(batch, heads, stop - start, -1).to(value.dtype))
    if not outputs:
        return value.new_zeros(batch, heads, 0, value.shape[-1])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _running_sums(blocks: list[tuple[Tensor, Features, Tensor, Tensor]]) -> list[State]:
    sums: State | None = None
    running = []
    for _, features, value, _ in blocks:
        sums = merge_keys(sums, features, value)
        running.append(sums)
    return running


def _join(features: list[Features]) -> Features:
    values = torch.cat([part.values for part in features], dim=2)
    scales = [part.log_scale for part in features if part.log_scale is not None]
    return Features(values, torch.cat(scales, dim=2) if scales else None)


def dense_windowed_weights(
    query: Tensor,
    key: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    *,
    window: int,
    causal: bool,
    scaling: float,
    log_mix: Tensor,
    allowed: Tensor,
) -> Tensor:
    """Explicit normalised weights `[B, H, L, S]` for study; allowed `[B | 1, H | 1, L, S]`. O(L·S) time and memory."""
    groups, size, keys = key.shape[1], query.shape[2], key.shape[2]
    rows = _rows(query, query_features, 0, size, groups, scaling, log_mix)
    distance = torch.arange(size, device=key.device).unsqueeze(-1) - torch.arange(keys, device=key.device)
    inside = distance.abs() < window
    if causal:
        inside = inside & (distance >= 0)
    grouped = allowed.expand(query.shape[0], query.shape[1], size, keys)
    grouped = grouped.view(query.shape[0], groups, -1, size, keys)
    logits = _row_product(rows.query, key.to(rows.query.dtype)).masked_fill(~(inside & grouped), float("-inf"))
    features = key_features(key.to(rows.query.dtype), 0)
    exact, linear = _mix(rows, logits, [(features, ~inside & grouped)], [])
    weights = exact + linear
    return divide(weights, weights.sum(dim=-1)).flatten(1, 2)
