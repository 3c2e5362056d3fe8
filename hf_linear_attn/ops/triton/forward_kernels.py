"""Kernels of the forward pass.

Sums over tokens are cut into spans, one program each: `sum_tokens` stores `[kv | k_sum]` of every span in `states`
`[B·heads, spans, m·(e + 1)]`, `scan` adds them up in the order of the sequence (no atomics: the same bits every time),
and the programs of `attend_bidirectional` or `attend_causal` read them. The grid is (batch · heads, spans, tiles of the
value's columns).
"""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

import triton
import triton.language as tl

from .features import feature_indices, features, load_rows, store_rows, unmasked


@triton.jit
def finite(top):
    """The largest log scale over no tokens is `-inf`: 0 in its index keeps `exp(-inf - top)` indices 0."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def load_kv(states, index, fmap, value_size, columns):
    """Load `[M, C]`, some columns of one `[kv | k_sum]`."""
    indices, inside = feature_indices(fmap)
    first = states + index.to(tl.int64) * (fmap.parts * fmap.width * (value_size + 1))
    valid = inside[:, None] & (columns < value_size)[None, :]
    return tl.load(first + indices[:, None] * value_size + columns[None, :], mask=valid, other=0.0)


@triton.jit
def load_k_sum(states, index, fmap, value_size):
    """Load `[M]`, the end of one `[kv | k_sum]`."""
    indices, inside = feature_indices(fmap)
    first = states + index.to(tl.int64) * (fmap.parts * fmap.width * (value_size + 1))
    return tl.load(first + fmap.parts * fmap.width * value_size + indices, mask=inside, other=0.0)


@triton.jit
def sum_tokens(
    x, u, mask, mask_batch, inverse, slope, states, tops, fmap, heads, length, span, spans,
    value_block: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """`Σ φ(x) uᵀ` and `Σ φ(x)` over one span. With `inverse` and `slope` `[B, heads, L]`, as the backward pass needs it
    over queries, `Σ φ(x) inverse uᵀ` and `Σ φ(x) slope`."""
    pair, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // heads, pair % heads
    columns = tile * value_block + tl.arange(0, value_block)
    wide: tl.constexpr = fmap.parts * fmap.half
    total = tl.zeros((wide, value_block), tl.float32)
    weights = tl.zeros((wide,), tl.float32)
    top = tl.max(tl.full((16,), float("-inf"), tl.float32), axis=0)
    stop = tl.minimum((split + 1) * span, length)
    for first in range(split * span, stop, block):
        tokens = first + tl.arange(0, block)
        real = unmasked(mask, mask_batch, batch, tokens, stop)
        values, scale = features(x, batch, head, tokens, real, fmap)
        if scaled:
            higher = tl.maximum(top, tl.max(scale, axis=0))
            decay = tl.exp(top - finite(higher))
            total, weights, top = total * decay, weights * decay, higher
            values = values * tl.exp(scale - finite(top))[:, None]
        values_u = load_rows(u, batch, head, tokens, real, columns)
        if inverse is not None:
            offsets = pair.to(tl.int64) * length + tokens
            values_u *= tl.load(inverse + offsets, mask=real, other=0.0)[:, None]
            weights += tl.sum(values * tl.load(slope + offsets, mask=real, other=0.0)[:, None], axis=0)
        else:
            weights += tl.sum(values, axis=0)
        total += tl.dot(tl.trans(values), values_u, input_precision=fmap.precision)
    indices, inside = feature_indices(fmap)
    index = pair.to(tl.int64) * spans + split
    base = states + index * (fmap.parts * fmap.width * (u.width + 1))
    valid = inside[:, None] & (columns < u.width)[None, :]
    tl.store(base + indices[:, None] * u.width + columns[None, :], total, mask=valid)
    if tile == 0:
        tl.store(base + fmap.parts * fmap.width * u.width + indices, weights, mask=inside)
    if scaled:
        tl.store(tops + index, top)


@triton.jit
def scan(
    states, tops, tops_before, kv, k_sum, log_scale, spans, repeats, kv_size, sum_size,
    total: tl.constexpr, reverse: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Replace the sums of every span by those of all spans before it (after it: `reverse`), on top of a state; or
    store their total as the first span. `repeats` heads in a row are added into the first of them."""
    group = tl.program_id(0).to(tl.int64)
    indices = tl.program_id(1) * block + tl.arange(0, block)
    flat = kv_size + sum_size
    carry = tl.zeros((block,), tl.float32)
    top = tl.max(tl.full((16,), float("-inf"), tl.float32), axis=0)
    if kv is not None:
        carry += tl.load(kv + group * kv_size + indices, mask=indices < kv_size, other=0.0)
        carry += tl.load(
            k_sum + group * sum_size + indices - kv_size, mask=(indices >= kv_size) & (indices < flat), other=0.0
        )
    if log_scale is not None:
        top = tl.load(log_scale + group)
    first = group * repeats * spans
    counted = spans
    if not total:
        counted = spans - 1  # the last span is not before any other
    for step in range(counted):
        split = step
        if reverse:
            split = spans - 1 - step
        part = tl.zeros((block,), tl.float32)
        for repeat in range(repeats):
            part += tl.load(states + (first + repeat * spans + split) * flat + indices, mask=indices < flat, other=0.0)
        if not total:
            tl.store(states + (first + split) * flat + indices, carry, mask=indices < flat)
        if tops is not None:
            tl.store(tops_before + group * spans + split, top)  # every program writes the same
            span_top = tl.load(tops + group * spans + split)
            higher = tl.maximum(top, span_top)
            carry = carry * tl.exp(top - finite(higher)) + part * tl.exp(span_top - finite(higher))
            top = higher
        else:
            carry += part
    last = first
    if (not total) and (not reverse):
        last = first + spans - 1
    tl.store(states + last * flat + indices, carry, mask=indices < flat)
    if tops is not None:
        tl.store(tops_before + last, top)


@triton.jit
def attend_bidirectional(
    query, out, states, normaliser, fmap, heads, groups, length, span, spans, floor,
    value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`φ(q)ᵀ S / φ(q)ᵀ z` for the queries of one span; S and z are the first span of each group's states."""
    pair, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // heads, pair % heads
    group = batch * groups + head // (heads // groups)
    columns = tile * value_block + tl.arange(0, value_block)
    kv = load_kv(states, group * spans, fmap, out.width, columns)
    k_sum = load_k_sum(states, group * spans, fmap, out.width)
    stop = tl.minimum((split + 1) * span, length)
    for first in range(split * span, stop, block):
        tokens = first + tl.arange(0, block)
        real = tokens < stop
        values, _ = features(query, batch, head, tokens, real, fmap)
        below = tl.sum(values * k_sum[None, :], axis=1)
        result = tl.dot(values, kv, input_precision=fmap.precision)
        result = result / tl.where(below < floor, floor, below)[:, None]
        store_rows(out, batch, head, tokens, real, columns, result)
        if (normaliser is not None) and (tile == 0):
            tl.store(normaliser + pair.to(tl.int64) * length + tokens, below, mask=real)


@triton.jit
def load_state(states, tops, kv, k_sum, log_scale, index, group, fmap, value_size, columns, scaled: tl.constexpr):
    """Load `[M, C]`, `[M]` and the log scale before a span: from the sums before it, from a state, or zeros."""
    indices, inside = feature_indices(fmap)
    sum_size: tl.constexpr = fmap.parts * fmap.width
    top = tl.max(tl.full((16,), float("-inf"), tl.float32), axis=0)
    if states is not None:
        total = load_kv(states, index, fmap, value_size, columns)
        weights = load_k_sum(states, index, fmap, value_size)
        if scaled:
            top = tl.load(tops + index)
    elif kv is not None:
        offsets = group.to(tl.int64) * sum_size * value_size + indices[:, None] * value_size + columns[None, :]
        total = tl.load(kv + offsets, mask=inside[:, None] & (columns < value_size)[None, :], other=0.0)
        weights = tl.load(k_sum + group * sum_size + indices, mask=inside, other=0.0)
        if scaled:
            top = tl.load(log_scale + group)
    else:
        total = tl.zeros((fmap.parts * fmap.half, columns.shape[0]), tl.float32)
        weights = tl.zeros((fmap.parts * fmap.half,), tl.float32)
    return total, weights, top


@triton.jit
def store_state(total, weights, top, next_kv, next_sum, next_scale, group, tile, fmap, value_size, columns):
    """Store the state after the last span."""
    indices, inside = feature_indices(fmap)
    sum_size: tl.constexpr = fmap.parts * fmap.width
    offsets = group.to(tl.int64) * sum_size * value_size + indices[:, None] * value_size + columns[None, :]
    tl.store(next_kv + offsets, total, mask=inside[:, None] & (columns < value_size)[None, :])
    if tile == 0:
        tl.store(next_sum + group * sum_size + indices, weights, mask=inside)
        if next_scale is not None:
            tl.store(next_scale + group, top)


@triton.jit
def attend_causal(
    query, key, value, out, mask, mask_batch, states, tops, kv, k_sum, log_scale, next_kv, next_sum, next_scale,
    normaliser, query_map, key_map, heads, groups, length, span, spans, floor,
    value_block: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """The queries of one span, chunk by chunk: explicit weights within a chunk, a carried state between chunks.

    The state before the span comes from `states` (and `tops`), or from `kv`, `k_sum`, `log_scale` if there is only one
    span; the last span writes the state after the last token. A single token is the recurrent step.
    """
    pair, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // heads, pair % heads
    repeats = heads // groups
    group = batch * groups + head // repeats
    columns = tile * value_block + tl.arange(0, value_block)
    total, weights, top = load_state(
        states, tops, kv, k_sum, log_scale, group * spans + split, group, key_map, value.width, columns, scaled
    )
    stop = tl.minimum((split + 1) * span, length)
    order = tl.arange(0, block)
    for first in range(split * span, stop, block):
        tokens = first + order
        real = unmasked(mask, mask_batch, batch, tokens, stop)
        values, _ = features(query, batch, head, tokens, tokens < stop, query_map)
        keys, scale = features(key, batch, head // repeats, tokens, real, key_map)
        values_u = load_rows(value, batch, head // repeats, tokens, real, columns)
        pairs = tl.dot(values, tl.trans(keys), input_precision=key_map.precision)
        earlier = order[:, None] >= order[None, :]
        above = tl.dot(values, total, input_precision=key_map.precision)
        below = tl.sum(values * weights[None, :], axis=1)
        if scaled:
            running = tl.maximum(tl.max(tl.where(earlier, scale[None, :], float("-inf")), axis=1), top)
            gap = tl.where(earlier, scale[None, :] - finite(running)[:, None], float("-inf"))
            pairs = pairs * tl.exp(gap)
            decay = tl.exp(top - finite(running))
            above, below = above * decay[:, None], below * decay
        pairs = tl.where(earlier, pairs, 0.0)
        above += tl.dot(pairs, values_u, input_precision=key_map.precision)
        below += tl.sum(pairs, axis=1)
        result = above / tl.where(below < floor, floor, below)[:, None]
        store_rows(out, batch, head, tokens, tokens < stop, columns, result)
        if (normaliser is not None) and (tile == 0):
            tl.store(normaliser + pair.to(tl.int64) * length + tokens, below, mask=tokens < stop)
        if scaled:
            higher = tl.maximum(top, tl.max(scale, axis=0))
            change = tl.exp(top - finite(higher))
            total, weights, top = total * change, weights * change, higher
            keys = keys * tl.exp(scale - finite(top))[:, None]
        total += tl.dot(tl.trans(keys), values_u, input_precision=key_map.precision)
        weights += tl.sum(keys, axis=0)
    if (split == spans - 1) & (head % repeats == 0):
        store_state(
            total, weights, top, next_kv, next_sum, next_scale, group, tile, key_map, value.width, columns
        )  # fmt: skip
