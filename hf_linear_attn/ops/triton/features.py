"""Feature maps and their gradients on a block of tokens, in Triton: what every kernel calls.

A block has T tokens. Its features lie in `M = parts · half` columns, `half` the width before the activation padded to a
power of two: column j is number `j % half` of part `j // half`. The second part of a pair sees `-y`, so that one
tensor holds both. Numbers are float32 whatever the inputs are.
"""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Tokens `[B, heads, L, width]` with their strides; the numbers within a token lie side by side."""

    data: Any
    batch: int
    head: int
    token: int
    width: int


class Side(NamedTuple):
    """One side of a feature map (`ops.fused.FusedMap`). The last fields are constants of the compiled kernel."""

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
    """`[T, C]` in float32, zero where there is no token or no column."""
    first = rows.data + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    places = tokens.to(tl.int64)[:, None] * rows.token + columns[None, :]
    return tl.load(first + places, mask=real[:, None] & (columns < rows.width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(rows, batch, head, tokens, real, columns, values):
    first = rows.data + batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    places = tokens.to(tl.int64)[:, None] * rows.token + columns[None, :]
    inside = real[:, None] & (columns < rows.width)[None, :]
    tl.store(first + places, values.to(rows.data.dtype.element_ty), mask=inside)


@triton.jit
def unmasked(mask, mask_batch, batch, tokens, stop):
    """Which of the tokens exist and are no padding."""
    real = tokens < stop
    if mask is not None:
        real = real & (tl.load(mask + batch.to(tl.int64) * mask_batch + tokens, mask=real, other=0) != 0)
    return real


@triton.jit
def feature_places(side):
    """For every column: its place among the features, and whether it is one."""
    columns = tl.arange(0, side.parts * side.half)
    return columns // side.half * side.width + columns % side.half, columns % side.half < side.width


@triton.jit
def products(x, batch, head, tokens, real, side):
    """`s x W + c b` `[T, half]`, and `‖s x‖²/2` `[T]` for the maps that need it."""
    columns = tl.arange(0, side.half)
    halves = tl.zeros((tokens.shape[0],), tl.float32)
    if side.weight is not None:
        rows = tl.arange(0, side.size_block)
        given = load_rows(x, batch, head, tokens, real, rows)
        places = rows[:, None] * side.weight_row + columns[None, :] * side.weight_column
        known = (rows < x.width)[:, None] & (columns < side.width)[None, :]
        weight = tl.load(side.weight + head * side.weight_head + places, mask=known, other=0.0).to(tl.float32)
        y = tl.dot(given, weight, input_precision=side.precision) * side.in_scale
        if side.bias is not None:
            bias = tl.load(side.bias + head * side.bias_head + columns, mask=columns < side.width, other=0.0)
            y += bias.to(tl.float32)[None, :] * side.bias_scale
        if (side.activation == "positive") or (side.activation == "positive-pair"):
            halves = tl.sum(given * given, axis=1) * (0.5 * side.in_scale * side.in_scale)
    else:
        y = load_rows(x, batch, head, tokens, real, columns) * side.in_scale
    return y, halves


@triton.jit
def all_parts(y, side):
    """`[T, half]` -> `[T, M]`: the second part sees -y, but for rotated-relu, whose parts differ by an angle."""
    made = y
    if side.parts == 2:
        second = -y
        if side.activation == "rotated-relu":
            second = y
        made = tl.reshape(tl.permute(tl.join(y, second), (0, 2, 1)), (y.shape[0], 2 * side.half))
    return made


@triton.jit
def turn(values, batch, tokens, real, side):
    """Times cos θ (first part) and sin θ (second part) of each token."""
    places = batch.to(tl.int64) * side.angle_batch + tokens
    cosine = tl.load(side.cosine + places, mask=real, other=0.0)
    sine = tl.load(side.sine + places, mask=real, other=0.0)
    first = tl.arange(0, side.parts * side.half) < side.half
    return values * tl.where(first[None, :], cosine[:, None], sine[:, None])


@triton.jit
def activate(y, halves, batch, tokens, real, side):
    """y -> features `[T, M]` and their log scale `[T]`. Selects, not minima: NaN has to come through."""
    y = all_parts(y, side)
    _, inside = feature_places(side)
    length: tl.constexpr = tokens.shape[0]
    scale = tl.zeros((length,), tl.float32)
    if side.activation == "elu":
        below = tl.where(y > 0, 0.0, y)
        values = tl.where(y > 0, y + 1, side.alpha * (tl.exp(below) - 1) + 1)
    elif (side.activation == "relu") or (side.activation == "rotated-relu"):
        values = tl.where(y < 0, 0.0, y) + side.epsilon
        if side.activation == "rotated-relu":
            values = turn(values, batch, tokens, real, side)
    elif side.activation == "softmax-pair":
        logits = tl.reshape(tl.where(inside[None, :], y, float("-inf")), (length, side.parts, side.half))
        parts = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
        values = tl.reshape(parts / tl.sum(parts, axis=2, keep_dims=True), (length, side.parts * side.half))
    elif side.activation == "softmax-joint":
        logits = tl.where(inside[None, :], 2 * y, float("-inf"))
        parts = tl.exp(logits - tl.max(logits, axis=1, keep_dims=True))
        values = parts / tl.sum(parts, axis=1, keep_dims=True)
    else:
        top = tl.max(tl.where(inside[None, :], y, float("-inf")), axis=1)
        values = tl.exp(tl.where(inside[None, :], y, 0.0) - top[:, None])
        if side.activation != "exp-pair":
            values = values * side.factor
        scale = top - halves
    return tl.where(inside[None, :] & real[:, None], values, 0.0), tl.where(real, scale, float("-inf"))


@triton.jit
def features(x, batch, head, tokens, real, side):
    """Features `[T, M]` and log scales `[T]` of a block; zero and `-inf` for what is no token."""
    y, halves = products(x, batch, head, tokens, real, side)
    return activate(y, halves, batch, tokens, real, side)


@triton.jit
def slopes(y, values, gradient, batch, tokens, real, side):
    """Gradient of the features -> gradient of the numbers before the activation: `[T, half]`."""
    _, inside = feature_places(side)
    y = all_parts(y, side)
    length: tl.constexpr = tokens.shape[0]
    if side.activation == "elu":
        back = gradient * tl.where(y > 0, 1.0, values + (side.alpha - 1))
    elif side.activation == "relu":
        back = tl.where(y > 0, gradient, 0.0)
    elif side.activation == "rotated-relu":
        back = tl.where(y > 0, turn(gradient, batch, tokens, real, side), 0.0)
    elif side.activation == "softmax-pair":
        both = tl.reshape(values * gradient, (length, side.parts, side.half))
        mean = tl.sum(both, axis=2, keep_dims=True)
        parts = both - tl.reshape(values, (length, side.parts, side.half)) * mean
        back = tl.reshape(parts, (length, side.parts * side.half))
    else:
        tl.static_assert(side.activation == "softmax-joint", "this feature map has no backward kernel")
        mean = tl.sum(values * gradient, axis=1, keep_dims=True)
        back = 2 * values * (gradient - mean)
    back = tl.where(inside[None, :] & real[:, None], back, 0.0)
    if side.weight is None:
        back = back * side.in_scale
    if side.parts == 2:
        first, second = tl.split(tl.permute(tl.reshape(back, (length, 2, side.half)), (0, 2, 1)))
        if side.activation == "rotated-relu":
            second = -second
        back = first - second
    return back
