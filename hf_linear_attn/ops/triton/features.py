"""Feature maps and their gradients on a block of tokens, in Triton: what every kernel calls.

A block has T tokens. Its features are in `M = parts · half` columns, `half` the width before the activation padded to a
power of two: column j is number `j % half` of part `j // half`. The second part of a pair sees `-y`, so that one
tensor holds both. Numbers are float32 whatever the inputs are.
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
    """The feature map of queries or of keys (`ops.fused.FusedMap`). The last fields are compile-time constants."""

    weight: Any
    weight_head: int
    weight_row: int
    weight_column: int
    bias: Any
    bias_head: int
    bias_scale: float
    cosine: Any
    sine: Any
    angle_batch: int
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
def products(x, batch, head, tokens, real, fmap):
    """Compute `s x W + c b` `[T, half]`, and `‖s x‖²/2` `[T]` for the maps that need it."""
    columns = tl.arange(0, fmap.half)
    halves = tl.zeros((tokens.shape[0],), tl.float32)
    if fmap.weight is not None:
        rows = tl.arange(0, fmap.size_block)
        inputs = load_rows(x, batch, head, tokens, real, rows)
        offsets = rows[:, None] * fmap.weight_row + columns[None, :] * fmap.weight_column
        valid = (rows < x.width)[:, None] & (columns < fmap.width)[None, :]
        weight = tl.load(fmap.weight + head * fmap.weight_head + offsets, mask=valid, other=0.0).to(tl.float32)
        y = tl.dot(inputs, weight, input_precision=fmap.precision) * fmap.in_scale
        if fmap.bias is not None:
            bias = tl.load(fmap.bias + head * fmap.bias_head + columns, mask=columns < fmap.width, other=0.0)
            y += bias.to(tl.float32)[None, :] * fmap.bias_scale
        if (fmap.activation == "positive") or (fmap.activation == "positive-pair"):
            halves = tl.sum(inputs * inputs, axis=1) * (0.5 * fmap.in_scale * fmap.in_scale)
    else:
        y = load_rows(x, batch, head, tokens, real, columns) * fmap.in_scale
    return y, halves


@triton.jit
def all_parts(y, fmap):
    """Expand `[T, half]` to `[T, M]`: the second part is -y, or y for rotated-relu, whose parts differ by an angle."""
    both = y
    if fmap.parts == 2:
        second = -y
        if fmap.activation == "rotated-relu":
            second = y
        both = tl.reshape(tl.permute(tl.join(y, second), (0, 2, 1)), (y.shape[0], 2 * fmap.half))
    return both


@triton.jit
def rotate(values, batch, tokens, real, fmap):
    """Multiply by cos θ (first part) and sin θ (second part) of each token."""
    offsets = batch.to(tl.int64) * fmap.angle_batch + tokens
    cosine = tl.load(fmap.cosine + offsets, mask=real, other=0.0)
    sine = tl.load(fmap.sine + offsets, mask=real, other=0.0)
    first = tl.arange(0, fmap.parts * fmap.half) < fmap.half
    return values * tl.where(first[None, :], cosine[:, None], sine[:, None])


@triton.jit
def activate(y, halves, batch, tokens, real, fmap):
    """Compute features `[T, M]` and their log scale `[T]` from y. Selections instead of minima propagate NaN."""
    y = all_parts(y, fmap)
    _, inside = feature_indices(fmap)
    length: tl.constexpr = tokens.shape[0]
    scale = tl.zeros((length,), tl.float32)
    if fmap.activation == "elu":
        below = tl.where(y > 0, 0.0, y)
        values = tl.where(y > 0, y + 1, fmap.alpha * (tl.exp(below) - 1) + 1)
    elif (fmap.activation == "relu") or (fmap.activation == "rotated-relu"):
        values = tl.where(y < 0, 0.0, y) + fmap.epsilon
        if fmap.activation == "rotated-relu":
            values = rotate(values, batch, tokens, real, fmap)
    elif fmap.activation == "softmax-pair":
        logits = tl.reshape(tl.where(inside[None, :], y, float("-inf")), (length, fmap.parts, fmap.half))
        parts = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
        values = tl.reshape(parts / tl.sum(parts, axis=2, keep_dims=True), (length, fmap.parts * fmap.half))
    elif fmap.activation == "softmax-joint":
        logits = tl.where(inside[None, :], 2 * y, float("-inf"))
        parts = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        values = parts / tl.sum(parts, axis=1, keep_dims=True)
    else:
        top = tl.max(tl.where(inside[None, :], y, float("-inf")), axis=1)
        values = tl.exp(tl.where(inside[None, :], y, 0.0) - top[:, None])
        if fmap.activation != "exp-pair":
            values = values * fmap.factor
        scale = top - halves
    return tl.where(inside[None, :] & real[:, None], values, 0.0), tl.where(real, scale, float("-inf"))


@triton.jit
def features(x, batch, head, tokens, real, fmap):
    """Compute features `[T, M]` and log scales `[T]` of a block; zero and `-inf` without a token."""
    y, halves = products(x, batch, head, tokens, real, fmap)
    return activate(y, halves, batch, tokens, real, fmap)


@triton.jit
def slopes(y, values, gradient, batch, tokens, real, fmap):
    """Compute the gradient of the numbers before the activation `[T, half]` from that of the features."""
    _, inside = feature_indices(fmap)
    y = all_parts(y, fmap)
    length: tl.constexpr = tokens.shape[0]
    if fmap.activation == "elu":
        back = gradient * tl.where(y > 0, 1.0, values + (fmap.alpha - 1))
    elif fmap.activation == "relu":
        back = tl.where(y > 0, gradient, 0.0)
    elif fmap.activation == "rotated-relu":
        back = tl.where(y > 0, rotate(gradient, batch, tokens, real, fmap), 0.0)
    elif fmap.activation == "softmax-pair":
        both = tl.reshape(values * gradient, (length, fmap.parts, fmap.half))
        mean = tl.sum(both, axis=2, keep_dims=True)
        parts = both - tl.reshape(values, (length, fmap.parts, fmap.half)) * mean
        back = tl.reshape(parts, (length, fmap.parts * fmap.half))
    else:
        tl.static_assert(fmap.activation == "softmax-joint", "this feature map has no backward kernel")
        mean = tl.sum(values * gradient, axis=1, keep_dims=True)
        back = 2 * values * (gradient - mean)
    back = tl.where(inside[None, :] & real[:, None], back, 0.0)
    if fmap.weight is None:
        back = back * fmap.in_scale
    if fmap.parts == 2:
        first, second = tl.split(tl.permute(tl.reshape(back, (length, 2, fmap.half)), (0, 2, 1)))
        if fmap.activation == "rotated-relu":
            second = -second
        back = first - second
    return back
