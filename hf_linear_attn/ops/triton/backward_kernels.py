"""Kernels of the backward pass, for feature maps without a log scale.

With `g_i = ∂o_i / D_i` and `h_i = -⟨∂o_i, o_i⟩ / D_i` (D the normaliser, ∂o the gradient of the output) a weight's
gradient is `∂a_ij = ⟨g_i, v_j⟩ + h_i`, hence

    ∂φ(q_i) = Σ_j ∂a_ij φ(k_j) = S g_i + h_i z           S, z: the sums over the keys that i sees
    ∂φ(k_j) = Σ_i ∂a_ij φ(q_i) = S' v_j + z'             S', z': Σ φ(q_i) g_iᵀ, Σ φ(q_i) h_i over those that see j
    ∂v_j    = S'ᵀ φ(k_j)

The kernels store the gradient of the numbers before the activation, which is that of the input for maps without
weights.
"""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

import triton
import triton.language as tl

from .features import activate, features, load_rows, products, slopes, store_rows, unmasked
from .forward_kernels import load_k_sum, load_kv


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
    pair, split = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    index = (batch * groups + head // (heads // groups)) * spans
    stop = tl.minimum((split + 1) * span, length)
    for first in range(split * span, stop, block):
        tokens = first + tl.arange(0, block)
        real = unmasked(mask, mask_batch, batch, tokens, stop)
        y, halves = products(x, batch, head, tokens, real, fmap)
        values, _ = activate(y, halves, batch, tokens, real, fmap)
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
            gradient += tl.dot(upstream, tl.trans(kv), input_precision=fmap.precision)
            if to_value is not None:
                value_gradient = tl.dot(values, kv, input_precision=fmap.precision)
                store_rows(to_value, batch, head, tokens, tokens < stop, columns, value_gradient)
        back = slopes(y, values, gradient, batch, tokens, real, fmap)
        store_rows(before, batch, head, tokens, tokens < stop, tl.arange(0, fmap.half), back)


@triton.jit
def backward_causal_queries(
    query, key, value, gradient, mask, mask_batch, inverse, slope, states, before, query_map, key_map, heads, groups,
    length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the queries of one chunk; `sums` over the keys before the chunk."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    group = head // (heads // groups)
    index = (batch * groups + group) * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    exists = tokens < length
    y, halves = products(query, batch, head, tokens, exists, query_map)
    values, _ = activate(y, halves, batch, tokens, exists, query_map)
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
        weights += tl.dot(upstream, tl.trans(value_rows), input_precision=key_map.precision)
        to_features += tl.dot(upstream, tl.trans(kv), input_precision=key_map.precision)
    weights = tl.where(order[:, None] >= order[None, :], weights, 0.0)
    to_features += tl.dot(weights, keys, input_precision=key_map.precision)
    back = slopes(y, values, to_features, batch, tokens, exists, query_map)
    store_rows(before, batch, head, tokens, exists, tl.arange(0, query_map.half), back)


@triton.jit
def backward_causal_keys(
    query, key, value, gradient, mask, mask_batch, inverse, slope, states, before, to_value, query_map, key_map,
    heads, groups, length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the keys of one chunk; `sums` over the queries after the chunk, all heads of the group added up."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, group = pair // groups, pair % groups
    repeats = heads // groups
    index = pair * repeats * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    exists = tokens < length
    real = unmasked(mask, mask_batch, batch, tokens, length)
    y, halves = products(key, batch, group, tokens, real, key_map)
    keys, _ = activate(y, halves, batch, tokens, real, key_map)
    later = order[:, None] <= order[None, :]
    k_sum = load_k_sum(states, index, key_map, value.width)
    to_features = tl.where(real, 1.0, 0.0)[:, None] * k_sum[None, :]
    for left in range(0, value.width, value_block):
        columns = left + tl.arange(0, value_block)
        value_rows = load_rows(value, batch, group, tokens, real, columns)
        kv = load_kv(states, index, key_map, value.width, columns)
        to_features += tl.dot(value_rows, tl.trans(kv), input_precision=key_map.precision)
        value_gradient = tl.dot(keys, kv, input_precision=key_map.precision)
        for repeat in range(repeats):
            head = group * repeats + repeat
            values, _ = features(query, batch, head, tokens, exists, query_map)
            offsets = (batch * heads + head).to(tl.int64) * length + tokens
            factor = tl.load(inverse + offsets, mask=exists, other=0.0)
            upstream = load_rows(gradient, batch, head, tokens, exists, columns) * factor[:, None]
            pairs = tl.dot(keys, tl.trans(values), input_precision=key_map.precision)
            value_gradient += tl.dot(tl.where(later, pairs, 0.0), upstream, input_precision=key_map.precision)
            weights = tl.dot(value_rows, tl.trans(upstream), input_precision=key_map.precision)
            if left == 0:
                weights += tl.load(slope + offsets, mask=exists, other=0.0)[None, :]
            weights = tl.where(later, weights, 0.0)
            to_features += tl.dot(weights, values, input_precision=key_map.precision)
        store_rows(to_value, batch, group, tokens, exists, columns, tl.where(real[:, None], value_gradient, 0.0))
    back = slopes(y, keys, to_features, batch, tokens, real, key_map)
    store_rows(before, batch, group, tokens, exists, tl.arange(0, key_map.half), back)
