"""The kernels of kernelized attention in Triton, the forward and the backward pass; `maps` has the feature maps.

Forward pass: sums over tokens are cut into spans, one program each. `sum_tokens` stores `[kv | k_sum]` of every span in
`states` `[B·heads, spans, m·(e + 1)]`, `scan` adds them up in the order of the sequence (no atomics, so that the bits
are always the same), and the programs of `attend_bidirectional` or `attend_causal` read them. The grid is (batch ·
heads, spans, tiles of the value's columns).

Backward pass, for maps whose keys have no log scale (that of a query is a constant of its row): with
`g_i = ∂o_i / D_i` and `h_i = -⟨∂o_i, o_i⟩ / D_i` (D the normaliser, ∂o the gradient of the output) a weight's
gradient is `∂a_ij = ⟨g_i, v_j⟩ + h_i`, hence

    ∂φ(q_i) = Σ_j ∂a_ij φ(k_j) = S g_i + h_i z           S, z: the sums over the keys that i sees
    ∂φ(k_j) = Σ_i ∂a_ij φ(q_i) = S' v_j + z'             S', z': Σ φ(q_i) g_iᵀ, Σ φ(q_i) h_i over those that see j
    ∂v_j    = S'ᵀ φ(k_j)

The kernels store the gradient of the numbers before the activation, which is that of the input for maps without
weights.
"""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .maps import dot, feature_indices, features, load_numbers, load_rows, rounded, store_rows, through, unmasked


@triton.jit
def finite(top):
    """Return 0 in place of `-inf`, the largest log scale over no tokens, so that `exp(-inf - top)` is 0, not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def bounded(exponent, largest):
    """Return an exponent, or the largest one where it is above; a NaN stays, which a minimum would drop."""
    return tl.where(exponent > largest, largest, exponent)


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
def sum_span(
    x, u, mask, mask_batch, pair, inverse, slope, states, tops, fmap, heads, length, span, spans,
    value_block: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Compute `Σ φ(x) uᵀ` and `Σ φ(x)` over one span.

    With `inverse` and `slope` `[B, heads, L]` these are `Σ φ(x) inverse uᵀ` and `Σ φ(x) slope`, as the backward pass
    needs them over queries.
    """
    split = tl.program_id(1)
    tile = tl.program_id(2)
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
        total += dot(tl.trans(values), values_u, fmap.precision)
    indices, inside = feature_indices(fmap)
    index = tl.program_id(0).to(tl.int64) * spans + split
    base = states + index * (fmap.parts * fmap.width * (u.width + 1))
    valid = inside[:, None] & (columns < u.width)[None, :]
    tl.store(base + indices[:, None] * u.width + columns[None, :], total, mask=valid)
    if tile == 0:
        tl.store(base + fmap.parts * fmap.width * u.width + indices, weights, mask=inside)
    if scaled:
        tl.store(tops + index, top)


@triton.jit
def sum_tokens(
    x, u, mask, mask_batch, other_x, other_u, other_mask, other_batch, pairs, inverse, slope, states, tops, fmap, heads,
    length, span, spans, value_block: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Compute `sum_span` of x by the first `pairs` programs, and by the others that of other tokens (None: of none)."""
    pair = tl.program_id(0)
    if pair < pairs:
        sum_span(
            x, u, mask, mask_batch, pair, inverse, slope, states, tops, fmap, heads, length, span, spans, value_block,
            block, scaled,
        )  # fmt: skip
    else:
        if other_x is not None:
            sum_span(
                other_x, other_u, other_mask, other_batch, pair - pairs, inverse, slope, states, tops, fmap, heads,
                length, span, spans, value_block, block, scaled,
            )  # fmt: skip


@triton.jit
def span_sum(states, first, spans, repeats, counted, step, flat, indices, reverse: tl.constexpr):
    """Load the sums of one span, those of all repeats; zeros beyond the last one."""
    split = step
    if reverse:
        split = spans - 1 - step
    part = tl.zeros((indices.shape[0],), tl.float32)
    for repeat in range(repeats):
        offsets = (first + repeat * spans + split) * flat + indices
        part += tl.load(states + offsets, mask=(indices < flat) & (step < counted), other=0.0)
    return part


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
    for step in range(0, counted, 4):  # four loads in flight: they would wait for the stores between them
        parts = (
            span_sum(states, first, spans, repeats, counted, step, flat, indices, reverse),
            span_sum(states, first, spans, repeats, counted, step + 1, flat, indices, reverse),
            span_sum(states, first, spans, repeats, counted, step + 2, flat, indices, reverse),
            span_sum(states, first, spans, repeats, counted, step + 3, flat, indices, reverse),
        )
        for ahead in tl.static_range(4):
            real = step + ahead < counted
            split = step + ahead
            if reverse:
                split = spans - 1 - split
            if not total:
                tl.store(states + (first + split) * flat + indices, carry, mask=(indices < flat) & real)
            if tops is not None:
                tl.store(tops_before + group * spans + split, top, mask=real)  # every program writes the same
                span_top = tl.load(tops + group * spans + split, mask=real, other=float("-inf"))
                higher = tl.maximum(top, span_top)
                carry = carry * tl.exp(top - finite(higher)) + parts[ahead] * tl.exp(span_top - finite(higher))
                top = higher
            else:
                carry += parts[ahead]
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
    """Compute `φ(q)ᵀ S / φ(q)ᵀ z` for the queries of one span; S and z are the first span of each group's states."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
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
        result = dot(values, kv, fmap.precision)
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


class ExactArguments(NamedTuple):
    """Softmax attention to other keys: the log-sum-exp l of its logits (`-inf` without a key) and the number c that
    weights are relative to, `[B, heads, L]` with the same strides, and the log mixing weight g. `gap` bounds what a log
    scale is above c. All are None without such attention.

    g is `base` `[B, heads, L]` and, with a `weight` u `[heads, d]`, `clip(root u·q, ±bound)`, of queries q as they are
    before the map; with a `saturation` N less `log(1 + max(i + start, 0) / N)` for row i. Rows with the bit 2 in their
    `code` `[B, L]` have no part of these sums.
    """

    log_sum: Any = None
    top: Any = None
    batch: int = 0
    head: int = 0
    token: int = 0
    base: Any = None
    base_batch: int = 0
    base_head: int = 0
    base_token: int = 0
    query: Any = None
    query_batch: int = 0
    query_head: int = 0
    query_token: int = 0
    code: Any = None
    code_batch: int = 0
    code_token: int = 0
    weight: Any = None
    root: float = 0.0
    bound: float = 0.0
    start: int = 0
    saturation: Any = None
    gap: float = 0.0
    size: Any = 0
    size_block: Any = 0


@triton.jit
def mixing_weights(batch, head, tokens, real, exact):
    """Compute g `[T]`."""
    log_mix = load_numbers(
        exact.base, exact.base_batch, exact.base_head, exact.base_token, batch, head, tokens, real, 0.0
    )  # fmt: skip
    if exact.weight is not None:
        columns = tl.arange(0, exact.size_block)
        inside = columns < exact.size
        first = exact.query + batch.to(tl.int64) * exact.query_batch + head.to(tl.int64) * exact.query_head
        offsets = tokens.to(tl.int64)[:, None] * exact.query_token + columns[None, :]
        query = tl.load(first + offsets, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        weight = tl.load(exact.weight + head * exact.size + columns, mask=inside, other=0.0).to(tl.float32)
        drawn = tl.sum(query * weight[None, :], axis=1) * exact.root
        log_mix += tl.minimum(tl.maximum(drawn, -exact.bound), exact.bound)
    if exact.saturation is not None:
        log_mix -= tl.log(1 + tl.maximum(tokens + exact.start, 0).to(tl.float32) / exact.saturation)
    return log_mix


@triton.jit
def merge(above, below, row_scale, before, batch, head, tokens, real, query_map, exact):
    """Add `exp(l - c)` times the output before to `exp(g + s - c)` times the sums `[T, C]` and their weight `[T]`,
    where the features of queries have a log scale s, and exp(g) times them otherwise. Return both, and c."""
    log_sum = load_numbers(
        exact.log_sum, exact.batch, exact.head, exact.token, batch, head, tokens, real, float("-inf")
    )  # fmt: skip
    # A row without an exact key has -inf for both; after an earlier pass for c only.
    top = finite(load_numbers(exact.top, exact.batch, exact.head, exact.token, batch, head, tokens, real, 0.0))
    mass = tl.exp(log_sum - top)
    log_mix = mixing_weights(batch, head, tokens, real, exact)
    if query_map.log_scale is not None:
        log_mix += bounded(row_scale - top, exact.gap)
    factor = tl.exp(log_mix)
    if exact.code is not None:
        first = exact.code + batch.to(tl.int64) * exact.code_batch
        flags = tl.load(first + tokens * exact.code_token, mask=real, other=0)
        factor = tl.where((flags & 2) != 0, 0.0, factor)
    return mass[:, None] * before + factor[:, None] * above, mass + factor * below, top


@triton.jit
def attend_causal(
    query, key, value, out, mask, mask_batch, states, tops, kv, k_sum, log_scale, next_kv, next_sum, next_scale,
    normaliser, exact, query_map, key_map, heads, groups, length, span, spans, floor,
    value_block: tl.constexpr, block: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """Compute the queries of one span, chunk by chunk: explicit weights within a chunk, a carried state between chunks.

    The state before the span comes from `states` (and `tops`), or from `kv`, `k_sum`, `log_scale` if there is only one
    span; the last span writes the state after the last token. A single token is the recurrent step.
    exact: what the output holds already, which this is added to (`merge`).
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
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
        exists = tokens < stop
        values, row_scale = features(query, batch, head, tokens, exists, query_map)
        below = tl.sum(values * weights[None, :], axis=1)
        values = rounded(values, key_map.precision)
        above = dot(values, total, key_map.precision)
        keys, scale = features(key, batch, head // repeats, tokens, real, key_map)
        earlier = order[:, None] >= order[None, :]
        if scaled:
            pairs = dot(values, tl.trans(keys), key_map.precision)
            running = tl.maximum(tl.max(tl.where(earlier, scale[None, :], float("-inf")), axis=1), top)
            pairs = pairs * tl.exp(tl.where(earlier, scale[None, :] - finite(running)[:, None], float("-inf")))
            decay = tl.exp(top - finite(running))
            above, below = above * decay[:, None], below * decay
            higher = tl.maximum(top, tl.max(scale, axis=0))
            change = tl.exp(top - finite(higher))
            total, weights, top = total * change, weights * change, higher
            keys = keys * tl.exp(scale - finite(top))[:, None]
            weights += tl.sum(keys, axis=0)
            keys = rounded(keys, key_map.precision)
        else:
            weights += tl.sum(keys, axis=0)
            keys = rounded(keys, key_map.precision)
            pairs = dot(values, tl.trans(keys), key_map.precision)
        pairs = tl.where(earlier, pairs, 0.0)
        below += tl.sum(pairs, axis=1)
        values_u = rounded(load_rows(value, batch, head // repeats, tokens, real, columns), key_map.precision)
        above += dot(pairs, values_u, key_map.precision)
        if exact.log_sum is not None:
            before = load_rows(out, batch, head, tokens, exists, columns)
            above, below, top_of_row = merge(
                above, below, row_scale, before, batch, head, tokens, exists, query_map, exact
            )  # fmt: skip
        result = above / tl.where(below < floor, floor, below)[:, None]
        store_rows(out, batch, head, tokens, exists, columns, result)
        if (normaliser is not None) and (tile == 0):
            if exact.log_sum is not None:
                below = tl.where(below > 0, top_of_row + tl.log(below), float("-inf"))
            tl.store(normaliser + pair.to(tl.int64) * length + tokens, below, mask=exists)
        total += dot(tl.trans(keys), values_u, key_map.precision)
    if (split == spans - 1) & (head % repeats == 0):
        store_state(
            total, weights, top, next_kv, next_sum, next_scale, group, tile, key_map, value.width, columns
        )  # fmt: skip


@triton.jit
def normalised(
    gradient, out, normaliser, inverse, slope, heads, length, floor, value_block: tl.constexpr, block: tl.constexpr
):
    """Compute `1 / D_i` and `h_i`; both are zero for a row without keys, as its output is."""
    pair = tl.program_id(0)
    batch, head = pair // heads, pair % heads
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    real = tokens < length
    offsets = pair.to(tl.int64) * length + tokens
    products_of = tl.zeros((block,), tl.float32)
    for first in range(0, out.width, value_block):
        columns = first + tl.arange(0, value_block)
        upstream = load_rows(gradient, batch, head, tokens, real, columns)
        products_of += tl.sum(upstream * load_rows(out, batch, head, tokens, real, columns), axis=1)
    below = tl.load(normaliser + offsets, mask=real, other=0.0)
    reciprocal = tl.where(below <= floor, 0.0, 1.0 / tl.where(below <= floor, 1.0, below))
    tl.store(inverse + offsets, reciprocal, mask=real)
    tl.store(slope + offsets, -products_of * reciprocal, mask=real)


@triton.jit
def backward_bidirectional(
    x, u, mask, mask_batch, inverse, slope, states, before, to_value, fmap, heads, groups, length, span, spans,
    value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Bidirectional, for queries (`u` the gradient of the output, with `inverse` and `slope`; the keys' states) or
    keys (`u` the value; the queries' states), which also store the gradient of the value."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    index = (batch * groups + head // (heads // groups)) * spans
    stop = tl.minimum((split + 1) * span, length)
    for first in range(split * span, stop, block):
        tokens = first + tl.arange(0, block)
        real = unmasked(mask, mask_batch, batch, tokens, stop)
        values, _ = features(x, batch, head, tokens, real, fmap)
        sum_factor = tl.where(real, 1.0, 0.0)
        factor = sum_factor
        if inverse is not None:
            offsets = pair.to(tl.int64) * length + tokens
            factor = tl.load(inverse + offsets, mask=real, other=0.0)
            sum_factor = tl.load(slope + offsets, mask=real, other=0.0)
        k_sum = load_k_sum(states, index, fmap, u.width)
        gradient = sum_factor[:, None] * k_sum[None, :]
        for left in range(0, u.width, value_block):
            columns = left + tl.arange(0, value_block)
            upstream = load_rows(u, batch, head, tokens, real, columns) * factor[:, None]
            kv = load_kv(states, index, fmap, u.width, columns)
            gradient += dot(upstream, tl.trans(kv), fmap.precision)
            if to_value is not None:
                value_gradient = dot(values, kv, fmap.precision)
                store_rows(to_value, batch, head, tokens, tokens < stop, columns, value_gradient)
        back = through(x, values, gradient, batch, head, tokens, real, fmap)
        store_rows(before, batch, head, tokens, tokens < stop, tl.arange(0, fmap.half), back)


@triton.jit
def backward_causal_queries(
    query, key, value, gradient, mask, mask_batch, inverse, slope, states, before, query_map, key_map, heads, groups,
    length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the queries of one chunk; `states`: the sums over the keys before the chunk."""
    pair = tl.program_id(0)
    chunk = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    group = head // (heads // groups)
    index = (batch * groups + group) * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    exists = tokens < length
    values, _ = features(query, batch, head, tokens, exists, query_map)
    real = unmasked(mask, mask_batch, batch, tokens, length)
    keys, _ = features(key, batch, group, tokens, real, key_map)
    offsets = pair.to(tl.int64) * length + tokens
    factor = tl.load(inverse + offsets, mask=exists, other=0.0)
    sum_factor = tl.load(slope + offsets, mask=exists, other=0.0)
    k_sum = load_k_sum(states, index, key_map, value.width)
    to_features = sum_factor[:, None] * k_sum[None, :]
    weights = tl.zeros((block, block), tl.float32) + sum_factor[:, None]
    for left in range(0, value.width, value_block):
        columns = left + tl.arange(0, value_block)
        upstream = load_rows(gradient, batch, head, tokens, exists, columns) * factor[:, None]
        value_rows = load_rows(value, batch, group, tokens, real, columns)
        kv = load_kv(states, index, key_map, value.width, columns)
        weights += dot(upstream, tl.trans(value_rows), key_map.precision)
        to_features += dot(upstream, tl.trans(kv), key_map.precision)
    weights = tl.where(order[:, None] >= order[None, :], weights, 0.0)
    to_features += dot(weights, keys, key_map.precision)
    back = through(query, values, to_features, batch, head, tokens, exists, query_map)
    store_rows(before, batch, head, tokens, exists, tl.arange(0, query_map.half), back)


@triton.jit
def backward_causal_keys(
    query, key, value, gradient, mask, mask_batch, inverse, slope, states, before, to_value, query_map, key_map,
    heads, groups, length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the keys of one chunk; `states`: over the queries after the chunk, all heads of the group added up."""
    pair = tl.program_id(0)
    chunk = tl.program_id(1)
    batch, group = pair // groups, pair % groups
    repeats = heads // groups
    index = pair * repeats * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    exists = tokens < length
    real = unmasked(mask, mask_batch, batch, tokens, length)
    keys, _ = features(key, batch, group, tokens, real, key_map)
    later = order[:, None] <= order[None, :]
    k_sum = load_k_sum(states, index, key_map, value.width)
    to_features = tl.where(real, 1.0, 0.0)[:, None] * k_sum[None, :]
    for left in range(0, value.width, value_block):
        columns = left + tl.arange(0, value_block)
        value_rows = load_rows(value, batch, group, tokens, real, columns)
        kv = load_kv(states, index, key_map, value.width, columns)
        to_features += dot(value_rows, tl.trans(kv), key_map.precision)
        value_gradient = dot(keys, kv, key_map.precision)
        for repeat in range(repeats):
            head = group * repeats + repeat
            values, _ = features(query, batch, head, tokens, exists, query_map)
            offsets = (batch * heads + head).to(tl.int64) * length + tokens
            factor = tl.load(inverse + offsets, mask=exists, other=0.0)
            upstream = load_rows(gradient, batch, head, tokens, exists, columns) * factor[:, None]
            pairs = dot(keys, tl.trans(values), key_map.precision)
            value_gradient += dot(tl.where(later, pairs, 0.0), upstream, key_map.precision)
            weights = dot(value_rows, tl.trans(upstream), key_map.precision)
            if left == 0:
                weights += tl.load(slope + offsets, mask=exists, other=0.0)[None, :]
            weights = tl.where(later, weights, 0.0)
            to_features += dot(weights, values, key_map.precision)
        store_rows(to_value, batch, group, tokens, exists, columns, tl.where(real[:, None], value_gradient, 0.0))
    back = through(key, keys, to_features, batch, group, tokens, real, key_map)
    store_rows(before, batch, group, tokens, exists, tl.arange(0, key_map.half), back)
