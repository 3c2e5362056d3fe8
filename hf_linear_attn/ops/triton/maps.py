"""Feature maps and their gradients on a block of tokens, in Triton.

A block has T tokens. Its features are in `M = parts · half` columns, `half` the width before the activation padded to a
power of two: column j is number `j % half` of part `j // half`. The second part of a pair sees `-y`, so that one
tensor holds both, from the product with the weight on: tensors that are joined, transposed or split afterwards made
the compiler (3.6) produce wrong gradients. Features are float32, and rounded as factors of products (`rounded`).

Maps with weights or a log scale run by themselves: `map_tokens` stores the features, which the other kernels read
as inputs "mapped", and `map_gradients` comes after the backward pass. Only a step of decoding computes them in place.
"""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Tokens `[B, heads, L, width]` with their strides; the numbers of a token are contiguous."""

    data: Any
    batch: int
    head: int
    token: int
    width: int


class MapArguments(NamedTuple):
    """The feature map of queries or of keys (`ops.formulas.FusedMap`). The last fields are compile-time constants.

    Of the activation "mapped" the inputs are features already, and `log_scale` `[B, heads, L]` or None belongs to them.
    Strides stand beside their tensors: the compiler (3.6) loses the constants of tuples in tuples.
    """

    weight: Any
    weight_head: int
    weight_row: int
    weight_column: int
    bias: Any
    bias_head: int
    bias_scale: float
    log_scale: Any
    scale_batch: int
    scale_head: int
    scale_token: int
    in_scale: float
    alpha: float
    epsilon: float
    factor: float
    activation: Any
    parts: Any
    width: Any
    half: Any
    size_block: Any
    precision: Any


@triton.jit
def rounded(values, precision: tl.constexpr):
    """Return values as factors of a product: rounded to bfloat16 where that is the precision."""
    if precision == "bf16":
        values = values.to(tl.bfloat16)
    return values


@triton.jit
def dot(left, right, precision: tl.constexpr):
    """Multiply matrices in a precision; sums are float32."""
    if precision == "bf16":
        result = tl.dot(rounded(left, precision), rounded(right, precision))
    else:
        result = tl.dot(left, right, input_precision=precision)
    return result


@triton.jit
def load_rows(rows, batch, head, tokens, real, columns):
    """Load `[T, C]` in float32, with zeros where there is no token or no column."""
    first = rows.data + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    offsets = tokens.to(tl.int64)[:, None] * rows.token + columns[None, :]
    return tl.load(first + offsets, mask=real[:, None] & (columns < rows.width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(rows, batch, head, tokens, real, columns, values):
    """Store `[T, C]` in the dtype of the tensor."""
    first = rows.data + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    offsets = tokens.to(tl.int64)[:, None] * rows.token + columns[None, :]
    inside = real[:, None] & (columns < rows.width)[None, :]
    tl.store(first + offsets, values.to(rows.data.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(numbers, batch_stride, head_stride, token_stride, batch, head, tokens, real, other):
    """Load `[T]` of numbers `[B, heads, L]`."""
    first = numbers + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return tl.load(first + tokens.to(tl.int64) * token_stride, mask=real, other=other).to(tl.float32)


@triton.jit
def unmasked(mask, mask_batch, batch, tokens, stop):
    """Return which of the tokens exist and are not padding."""
    real = tokens < stop
    if mask is not None:
        real = real & (tl.load(mask + batch.to(tl.int64) * mask_batch + tokens, mask=real, other=0) != 0)
    return real


@triton.jit
def feature_indices(fmap):
    """Return the index of every column among the features, and whether the column is a feature."""
    columns = tl.arange(0, fmap.parts * fmap.half)
    return columns // fmap.half * fmap.width + columns % fmap.half, columns % fmap.half < fmap.width


@triton.jit
def signs(fmap):
    """Return what each column multiplies y with `[M]`: -1 in the second part of a pair."""
    return tl.where(tl.arange(0, fmap.parts * fmap.half) < fmap.half, 1.0, -1.0)


@triton.jit
def products(x, batch, head, tokens, real, fmap):
    """Compute `± (s x W + c b)` `[T, M]`, and `‖s x‖²/2` `[T]` for the maps that need it."""
    columns = tl.arange(0, fmap.parts * fmap.half) % fmap.half
    halves = tl.zeros((tokens.shape[0],), tl.float32)
    if fmap.weight is not None:
        rows = tl.arange(0, fmap.size_block)
        inputs = load_rows(x, batch, head, tokens, real, rows)
        offsets = rows[:, None] * fmap.weight_row + columns[None, :] * fmap.weight_column
        valid = (rows < x.width)[:, None] & (columns < fmap.width)[None, :]
        weight = tl.load(fmap.weight + head * fmap.weight_head + offsets, mask=valid, other=0.0).to(tl.float32)
        y = dot(inputs, weight, fmap.precision) * fmap.in_scale
        if fmap.bias is not None:
            bias = tl.load(fmap.bias + head * fmap.bias_head + columns, mask=columns < fmap.width, other=0.0)
            y += bias.to(tl.float32)[None, :] * fmap.bias_scale
        if (fmap.activation == "positive") or (fmap.activation == "positive-pair"):
            halves = tl.sum(inputs * inputs, axis=1) * (0.5 * fmap.in_scale * fmap.in_scale)
    else:
        y = load_rows(x, batch, head, tokens, real, columns) * fmap.in_scale
    if fmap.parts == 2:
        y = y * signs(fmap)[None, :]
    return y, halves


@triton.jit
def pair_sums(values, fmap):
    """Sum over the columns of either part, and return the sum of its part for every column `[T, M]`."""
    first = (tl.arange(0, fmap.parts * fmap.half) < fmap.half)[None, :]
    sum_first = tl.sum(tl.where(first, values, 0.0), axis=1)
    sum_second = tl.sum(tl.where(first, 0.0, values), axis=1)
    return tl.where(first, sum_first[:, None], sum_second[:, None])


@triton.jit
def activate(y, halves, real, fmap):
    """Compute features `[T, M]` and their log scale `[T]` from y. Selections instead of minima propagate NaN."""
    _, inside = feature_indices(fmap)
    length: tl.constexpr = y.shape[0]
    scale = tl.zeros((length,), tl.float32)
    if fmap.activation == "elu":
        below = tl.where(y > 0, 0.0, y)
        values = tl.where(y > 0, y + 1, fmap.alpha * (tl.exp(below) - 1) + 1)
    elif fmap.activation == "relu":
        values = tl.where(y < 0, 0.0, y) + fmap.epsilon
    elif fmap.activation == "softmax-pair":
        first = (tl.arange(0, fmap.parts * fmap.half) < fmap.half)[None, :]
        logits = tl.where(inside[None, :], y, float("-inf"))
        top_first = tl.max(tl.where(first, logits, float("-inf")), axis=1)
        top_second = tl.max(tl.where(first, float("-inf"), logits), axis=1)
        parts = tl.exp(logits - tl.where(first, top_first[:, None], top_second[:, None]))
        values = parts / pair_sums(parts, fmap)
    elif fmap.activation == "softmax-joint":
        logits = tl.where(inside[None, :], 2 * y, float("-inf"))
        parts = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        values = parts / tl.sum(parts, axis=1, keep_dims=True)
    elif fmap.activation == "softmax":
        logits = tl.where(inside[None, :], y, float("-inf"))
        parts = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        values = parts / tl.sum(parts, axis=1, keep_dims=True)
    else:
        top = tl.max(tl.where(inside[None, :], y, float("-inf")), axis=1)
        values = tl.exp(tl.where(inside[None, :], y, 0.0) - top[:, None])
        if (fmap.activation == "positive") or (fmap.activation == "positive-pair"):
            values = values * fmap.factor
        scale = top - halves
    return tl.where(inside[None, :] & real[:, None], values, 0.0), tl.where(real, scale, float("-inf"))


@triton.jit
def features(x, batch, head, tokens, real, fmap):
    """Compute features `[T, M]` and log scales `[T]` of a block; zero and `-inf` without a token."""
    if fmap.activation == "mapped":
        values = load_rows(x, batch, head, tokens, real, tl.arange(0, fmap.half))
        scale = tl.zeros((tokens.shape[0],), tl.float32)
        if fmap.log_scale is not None:
            scale = load_numbers(
                fmap.log_scale, fmap.scale_batch, fmap.scale_head, fmap.scale_token, batch, head, tokens, real, 0.0
            )  # fmt: skip
        scale = tl.where(real, scale, float("-inf"))
    else:
        y, halves = products(x, batch, head, tokens, real, fmap)
        values, scale = activate(y, halves, real, fmap)
    return values, scale


@triton.jit
def store_features(x, out, log_scale, fmap, heads, length, both: tl.constexpr, pair, block: tl.constexpr):
    """Store the features `[B, heads, L, m]` of a block of tokens, and their log scales `[B·heads, L]`.

    both: the features of -y come after those of y.
    """
    batch, head = pair // heads, pair % heads
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    real = tokens < length
    y, halves = products(x, batch, head, tokens, real, fmap)
    values, scale = activate(y, halves, real, fmap)
    indices, inside = feature_indices(fmap)
    inside = real[:, None] & inside[None, :]
    features_of: tl.constexpr = (2 if both else 1) * fmap.parts * fmap.width
    offsets = (pair.to(tl.int64) * length + tokens)[:, None] * features_of + indices[None, :]
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=inside)
    if both:
        values, _ = activate(-y, halves, real, fmap)
        tl.store(out + offsets + fmap.width, values.to(out.dtype.element_ty), mask=inside)
    if log_scale is not None:
        tl.store(log_scale + pair.to(tl.int64) * length + tokens, scale, mask=real)


@triton.jit
def map_tokens(
    x, out, log_scale, fmap, heads, length, both: tl.constexpr,
    key, key_out, key_scale, key_map, groups, keys, key_both: tl.constexpr, pairs, block: tl.constexpr,
):  # fmt: skip
    """Store features of one tensor by the first `pairs` programs, and by the others those of keys (None: of none)."""
    pair = tl.program_id(0)
    if pair < pairs:
        store_features(x, out, log_scale, fmap, heads, length, both, pair, block)
    else:
        if key is not None:
            store_features(key, key_out, key_scale, key_map, groups, keys, key_both, pair - pairs, block)


@triton.jit
def map_gradients(x, gradient, before, fmap, heads, length, both: tl.constexpr, block: tl.constexpr):
    """Store what the gradient of the features `[B, heads, L, m]` adds to that of y (see `slopes`) in `before`.

    both: the features of -y come after those of y, and `before` has the sum. Otherwise it may be the gradient itself.
    """
    pair = tl.program_id(0)
    batch, head = pair // heads, pair % heads
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    real = tokens < length
    y, halves = products(x, batch, head, tokens, real, fmap)
    values, _ = activate(y, halves, real, fmap)
    indices, inside = feature_indices(fmap)
    inside = real[:, None] & inside[None, :]
    first = gradient.data + batch.to(tl.int64) * gradient.batch + head.to(tl.int64) * gradient.head
    offsets = tokens.to(tl.int64)[:, None] * gradient.token + indices[None, :]
    upstream = tl.load(first + offsets, mask=inside, other=0.0)
    back = slopes(y, values, upstream, real, fmap)
    if both:
        values, _ = activate(-y, halves, real, fmap)
        upstream = tl.load(first + offsets + fmap.width, mask=inside, other=0.0)
        back -= slopes(-y, values, upstream, real, fmap)
    first = before.data + batch.to(tl.int64) * before.batch + head.to(tl.int64) * before.head
    tl.store(first + tokens.to(tl.int64)[:, None] * before.token + indices[None, :], back, mask=inside)


@triton.jit
def slopes(y, values, gradient, real, fmap):
    """Compute from the gradient of the features what each adds to that of y `[T, M]`, the numbers before an activation:
    both features of a pair add to the same number."""
    _, inside = feature_indices(fmap)
    if fmap.activation == "elu":
        back = gradient * tl.where(y > 0, 1.0, values + (fmap.alpha - 1))
    elif fmap.activation == "relu":
        back = tl.where(y > 0, gradient, 0.0)
    elif fmap.activation == "softmax-pair":
        back = values * (gradient - pair_sums(values * gradient, fmap))
    elif fmap.activation == "exp":
        back = gradient * values
    else:
        is_softmax: tl.constexpr = (fmap.activation == "softmax") or (fmap.activation == "softmax-joint")
        tl.static_assert(is_softmax, "this feature map has no backward kernel")
        mean = tl.sum(values * gradient, axis=1, keep_dims=True)
        back = values * (gradient - mean)
        if fmap.activation == "softmax-joint":
            back = 2 * back
    back = tl.where(inside[None, :] & real[:, None], back, 0.0)
    if fmap.weight is None:
        back = back * fmap.in_scale
    if fmap.parts == 2:
        back = back * signs(fmap)[None, :]
    return back


@triton.jit
def through(x, values, gradient, batch, head, tokens, real, fmap):
    """Compute what `before` stores of a block: the gradient of the features themselves where these are the inputs."""
    if fmap.activation == "mapped":
        back = tl.where(real[:, None], gradient, 0.0)
    else:
        y, _ = products(x, batch, head, tokens, real, fmap)
        back = slopes(y, values, gradient, real, fmap)
        if fmap.parts == 2:
            columns = tl.arange(0, fmap.parts * fmap.half) % fmap.half
            same = columns[:, None] == tl.arange(0, fmap.half)[None, :]
            back = dot(back, tl.where(same, 1.0, 0.0), fmap.precision)
    return back
