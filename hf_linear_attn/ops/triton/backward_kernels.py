"""Kernels of the backward pass, for feature maps without a log scale.

With `g_i = ∂o_i / D_i` and `h_i = -⟨∂o_i, o_i⟩ / D_i` (D the normaliser, ∂o the gradient of the output) a weight's
gradient is `∂a_ij = ⟨g_i, v_j⟩ + h_i`, hence

    ∂φ(q_i) = Σ_j ∂a_ij φ(k_j) = S g_i + h_i z           S, z: the sums over the keys that i sees
    ∂φ(k_j) = Σ_i ∂a_ij φ(q_i) = S' v_j + z'             S', z': Σ φ(q_i) g_iᵀ, Σ φ(q_i) h_i over those that see j
    ∂v_j    = S'ᵀ φ(k_j)

The kernels leave the gradient of the numbers before the activation: that of the input where nothing is learned.
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
    """`1 / D_i` and `h_i`; zero where no key was seen, as the output is."""
    pair = tl.program_id(0)
    batch, head = pair // heads, pair % heads
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    real = tokens < length
    places = pair.to(tl.int64) * length + tokens
    products_of = tl.zeros((block,), tl.float32)
    for first in range(0, out.width, value_block):
        columns = first + tl.arange(0, value_block)
        given = load_rows(gradient, batch, head, tokens, real, columns)
        products_of += tl.sum(given * load_rows(out, batch, head, tokens, real, columns), axis=1)
    below = tl.load(normaliser + places, mask=real, other=0.0)
    turned = tl.where(below <= floor, 0.0, 1.0 / tl.where(below <= floor, 1.0, below))
    tl.store(inverse + places, turned, mask=real)
    tl.store(slope + places, -products_of * turned, mask=real)


@triton.jit
def back_all(
    x, u, mask, mask_batch, inverse, slope, sums, before, to_value, side, heads, groups, length, span, spans,
    value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Bidirectional, one side: queries (`u` the gradient of the output, with `inverse` and `slope`; the keys' sums), or
    keys (`u` the value; the queries' sums), which leave the gradient of the value too."""
    pair, split = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    place = (batch * groups + head // (heads // groups)) * spans
    stop = tl.minimum((split + 1) * span, length)
    for first in range(split * span, stop, block):
        tokens = first + tl.arange(0, block)
        real = unmasked(mask, mask_batch, batch, tokens, stop)
        y, halves = products(x, batch, head, tokens, real, side)
        values, _ = activate(y, halves, batch, tokens, real, side)
        share = tl.where(real, 1.0, 0.0)
        factor = share
        if inverse is not None:
            places = pair.to(tl.int64) * length + tokens
            factor = tl.load(inverse + places, mask=real, other=0.0)
            share = tl.load(slope + places, mask=real, other=0.0)
        k_sum = load_k_sum(sums, place, side, u.width)
        gradient = share[:, None] * k_sum[None, :]
        for left in range(0, u.width, value_block):
            columns = left + tl.arange(0, value_block)
            given = load_rows(u, batch, head, tokens, real, columns) * factor[:, None]
            kv = load_kv(sums, place, side, u.width, columns)
            gradient += tl.dot(given, tl.trans(kv), input_precision=side.precision)
            if to_value is not None:
                made = tl.dot(values, kv, input_precision=side.precision)
                store_rows(to_value, batch, head, tokens, tokens < stop, columns, made)
        back = slopes(y, values, gradient, batch, tokens, real, side)
        store_rows(before, batch, head, tokens, tokens < stop, tl.arange(0, side.half), back)


@triton.jit
def back_causal_queries(
    query, key, value, gradient, mask, mask_batch, inverse, slope, sums, before, query_side, key_side, heads, groups,
    length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the queries of one chunk; `sums` over the keys before the chunk."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, head = pair // heads, pair % heads
    group = head // (heads // groups)
    place = (batch * groups + group) * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    here = tokens < length
    y, halves = products(query, batch, head, tokens, here, query_side)
    values, _ = activate(y, halves, batch, tokens, here, query_side)
    real = unmasked(mask, mask_batch, batch, tokens, length)
    keys, _ = features(key, batch, group, tokens, real, key_side)
    places = pair.to(tl.int64) * length + tokens
    factor = tl.load(inverse + places, mask=here, other=0.0)
    share = tl.load(slope + places, mask=here, other=0.0)
    k_sum = load_k_sum(sums, place, key_side, value.width)
    to_features = share[:, None] * k_sum[None, :]
    weights = tl.zeros((block, block), tl.float32) + share[:, None]
    for left in range(0, value.width, value_block):
        columns = left + tl.arange(0, value_block)
        given = load_rows(gradient, batch, head, tokens, here, columns) * factor[:, None]
        held = load_rows(value, batch, group, tokens, real, columns)
        kv = load_kv(sums, place, key_side, value.width, columns)
        weights += tl.dot(given, tl.trans(held), input_precision=key_side.precision)
        to_features += tl.dot(given, tl.trans(kv), input_precision=key_side.precision)
    weights = tl.where(order[:, None] >= order[None, :], weights, 0.0)
    to_features += tl.dot(weights, keys, input_precision=key_side.precision)
    back = slopes(y, values, to_features, batch, tokens, here, query_side)
    store_rows(before, batch, head, tokens, here, tl.arange(0, query_side.half), back)


@triton.jit
def back_causal_keys(
    query, key, value, gradient, mask, mask_batch, inverse, slope, sums, before, to_value, query_side, key_side,
    heads, groups, length, spans, value_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Causal, the keys of one chunk; `sums` over the queries after the chunk, all heads of the group added up."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    batch, group = pair // groups, pair % groups
    repeats = heads // groups
    place = pair * repeats * spans + chunk
    order = tl.arange(0, block)
    tokens = chunk * block + order
    here = tokens < length
    real = unmasked(mask, mask_batch, batch, tokens, length)
    y, halves = products(key, batch, group, tokens, real, key_side)
    keys, _ = activate(y, halves, batch, tokens, real, key_side)
    later = order[:, None] <= order[None, :]
    k_sum = load_k_sum(sums, place, key_side, value.width)
    to_features = tl.where(real, 1.0, 0.0)[:, None] * k_sum[None, :]
    for left in range(0, value.width, value_block):
        columns = left + tl.arange(0, value_block)
        held = load_rows(value, batch, group, tokens, real, columns)
        kv = load_kv(sums, place, key_side, value.width, columns)
        to_features += tl.dot(held, tl.trans(kv), input_precision=key_side.precision)
        made = tl.dot(keys, kv, input_precision=key_side.precision)
        for repeat in range(repeats):
            head = group * repeats + repeat
            values, _ = features(query, batch, head, tokens, here, query_side)
            places = (batch * heads + head).to(tl.int64) * length + tokens
            factor = tl.load(inverse + places, mask=here, other=0.0)
            given = load_rows(gradient, batch, head, tokens, here, columns) * factor[:, None]
            pairs = tl.dot(keys, tl.trans(values), input_precision=key_side.precision)
            made += tl.dot(tl.where(later, pairs, 0.0), given, input_precision=key_side.precision)
            weights = tl.dot(held, tl.trans(given), input_precision=key_side.precision)
            if left == 0:
                weights += tl.load(slope + places, mask=here, other=0.0)[None, :]
            weights = tl.where(later, weights, 0.0)
            to_features += tl.dot(weights, values, input_precision=key_side.precision)
        store_rows(to_value, batch, group, tokens, here, columns, tl.where(real[:, None], made, 0.0))
    back = slopes(y, keys, to_features, batch, tokens, real, key_side)
    store_rows(before, batch, group, tokens, here, tl.arange(0, key_side.half), back)
