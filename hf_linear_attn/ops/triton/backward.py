"""The backward pass by the Triton kernels, and the function that autograd sees."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common import DENOMINATOR_EPS, State
from ..fused import FusedMap, KernelizedCall
from . import backward_kernels as kernels
from . import layout
from .features import Side
from .forward import bidirectional, causal, scan, sum_tokens
from .layout import Blocks, launch, mask_bytes, plain, rows, token_major


def run(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call, with gradients where they are wanted."""
    fused = call.fused
    assert fused is not None
    call = call._replace(query=plain(call.query), key=plain(call.key), value=plain(call.value))
    if not call.needs_grad():
        with layout.on_device(call.query.device):
            made = (causal if call.causal else bidirectional)(call, _sides(call), False)
        return made.out, made.state
    first, second = fused
    learned = (first.weight, first.bias, second.weight, second.bias)
    return _Attention.apply(call.query, call.key, call.value, *learned, call), None


def _sides(call: KernelizedCall) -> tuple[Side, Side]:
    assert call.fused is not None
    first, second = (layout.side(fused, call.query.shape[3], call.query.dtype) for fused in call.fused)
    return first, second


class _Attention(torch.autograd.Function):
    """Keeps inputs, output and normalisers, `B·H·L` floats, and the sums over the keys (bidirectional).

    Extra memory of the backward pass: `B·H·L` times two floats, the gradients before a projection (`B·H·L·f` floats
    and the inputs in float32, maps with weights only), and for the causal form the sums before and after every chunk,
    `m·(e + 1)` floats for every 64 tokens of a head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        call = rest[4]._replace(query=query, key=key, value=value)
        with layout.on_device(query.device):
            made = (causal if call.causal else bidirectional)(call, _sides(call), True)
        ctx.save_for_backward(query, key, value, *rest[:4], made.out, made.normaliser, made.sums, call.mask)
        ctx.call = call._replace(query=None, key=None, value=None, mask=None)  # what is saved is not held twice
        return made.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *parameters, out, normaliser, sums, mask = ctx.saved_tensors
        call = ctx.call._replace(query=query, key=key, value=value, mask=mask)
        if normaliser is None:  # nothing to attend to
            given = [torch.zeros_like(held) for held in (query, key, value)]
            return *given, *(None if held is None else torch.zeros_like(held) for held in parameters), None
        gradient = plain(gradients[0])
        with layout.on_device(query.device):
            ready = _normalised(gradient, out, normaliser)
            befores, to_value = (_back_causal if call.causal else _back_all)(call, gradient, ready, sums)
        needed = ctx.needs_input_grad[3:7]
        to_query, *query_learned = _through_projection(query, call.fused[0], befores[0], needed[:2])
        to_key, *key_learned = _through_projection(key, call.fused[1], befores[1], needed[2:])
        return to_query, to_key, to_value, *query_learned, *key_learned, None


def _through_projection(
    x: Tensor, fused: FusedMap, before: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, W and b from that of `y = s x W + c b`; without W it is that of x already."""
    if fused.weight is None:
        return before, None, None
    to_x = ((before @ fused.weight.detach().float().transpose(-1, -2)) * fused.in_scale).to(x.dtype)
    to_weight = to_bias = None
    if needed[0]:
        to_weight = _summed((x.float().transpose(-1, -2) @ before) * fused.in_scale, fused.weight)
    if needed[1] and fused.bias is not None:
        to_bias = _summed(before.sum(dim=2) * fused.bias_scale, fused.bias)
    return to_x, to_weight, to_bias


def _summed(parts: Tensor, parameter: Tensor) -> Tensor:
    """Over the batch, and over the heads where they share the parameter."""
    total = parts.sum(dim=0)
    return (total.sum(dim=0, keepdim=True) if parameter.shape[0] == 1 else total).to(parameter.dtype)


def _normalised(gradient: Tensor, out: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    inverse, slope = torch.empty_like(normaliser), torch.empty_like(normaliser)
    batch, heads, length, value_size = out.shape
    columns = min(layout.power_of_two(value_size), 64)
    launch(
        kernels.normalised, (batch * heads, triton.cdiv(length, 64)), rows(gradient), rows(out), normaliser, inverse,
        slope, heads, length, DENOMINATOR_EPS, columns, 64, warps=4,
    )  # fmt: skip
    return inverse, slope


def _before(x: Tensor, fused: FusedMap) -> Tensor:
    """Room for the gradient of the numbers before the activation."""
    batch, heads, length, size = x.shape
    dtype = x.dtype if fused.weight is None else torch.float32
    return token_major(batch, heads, length, fused.width(size), dtype, x.device)


def _cut(x: Tensor, call: KernelizedCall, chunked: bool = False) -> Blocks:
    features = max(layout.padded_features(fused, x.shape[3]) for fused in call.fused or ())
    return layout.blocks(x, features, call.value.shape[3], chunked=chunked)


Gradients = tuple[tuple[Tensor, Tensor], Tensor]


def _back_all(call: KernelizedCall, gradient: Tensor, ready: tuple[Tensor, Tensor], sums: Tensor) -> Gradients:
    assert call.fused is not None
    query, key, value = call.query, call.key, call.value
    sides, masks = _sides(call), mask_bytes(call.mask)
    batch, heads, length, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    cut, reads = _cut(query, call), _cut(key, call)
    query_sums, _ = sum_tokens(query, gradient, None, sides[0], cut, gradient=ready)
    scan(query_sums, value.shape[3], repeats=heads // groups, total=True)
    to_value = token_major(batch, groups, keys, value.shape[3], value.dtype, value.device)
    before = _before(query, call.fused[0]), _before(key, call.fused[1])
    launch(
        kernels.back_all, (batch * heads, cut.spans), rows(query), rows(gradient), None, 0, *ready, sums,
        rows(before[0]), None, sides[0], heads, groups, length, cut.span, sums.shape[1], cut.columns, cut.tokens,
        warps=8,
    )  # fmt: skip
    launch(
        kernels.back_all, (batch * groups, reads.spans), rows(key), rows(value), *masks, None, None, query_sums,
        rows(before[1]), rows(to_value), sides[1], groups, groups, keys, reads.span, cut.spans * (heads // groups),
        reads.columns, reads.tokens, warps=8,
    )  # fmt: skip
    return before, to_value


def _back_causal(call: KernelizedCall, gradient: Tensor, ready: tuple[Tensor, Tensor], _: Any) -> Gradients:
    assert call.fused is not None
    query, key, value = call.query, call.key, call.value
    sides, masks = _sides(call), mask_bytes(call.mask)
    batch, heads, length, _size = query.shape
    groups = key.shape[1]
    cut = _cut(query, call, chunked=True)
    before = _before(query, call.fused[0]), _before(key, call.fused[1])
    to_value = token_major(batch, groups, length, value.shape[3], value.dtype, value.device)
    sums, _none = sum_tokens(key, value, call.mask, sides[1], cut)
    scan(sums, value.shape[3])
    given = rows(query), rows(key), rows(value), rows(gradient), *masks, *ready
    shape = *sides, heads, groups, length, cut.spans, cut.columns, cut.tokens
    launch(kernels.back_causal_queries, (batch * heads, cut.spans), *given, sums, rows(before[0]), *shape, warps=8)
    del sums
    sums, _none = sum_tokens(query, gradient, None, sides[0], cut, gradient=ready)
    scan(sums, value.shape[3], repeats=heads // groups, reverse=True)
    launch(
        kernels.back_causal_keys, (batch * groups, cut.spans), *given, sums, rows(before[1]), rows(to_value), *shape,
        warps=8,
    )  # fmt: skip
    return before, to_value
