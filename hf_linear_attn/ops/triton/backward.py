"""The backward pass by the Triton kernels, and the function that autograd sees."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common import DENOMINATOR_EPS, State, parameter_gradient, readable, token_major
from ..fused import FusedMap, KernelizedCall
from . import backward_kernels as kernels
from . import layout
from .features import MapArguments
from .forward import bidirectional, causal, scan, sum_tokens
from .layout import launch, mask_bytes, rows
from .limits import power_of_two


def run(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call, with gradients where they are needed."""
    fused = call.fused
    assert fused is not None
    call = call.replace(query=readable(call.query), key=readable(call.key), value=readable(call.value))
    if not call.needs_grad():
        with layout.on_device(call.query.device):
            result = (causal if call.causal else bidirectional)(call, _map_arguments(call), False)
        return result.out, result.state
    first, second = fused
    learned = (first.weight, first.bias, second.weight, second.bias)
    return _Attention.apply(call.query, call.key, call.value, *learned, call), None


def _map_arguments(call: KernelizedCall) -> tuple[MapArguments, MapArguments]:
    assert call.fused is not None
    first, second = (layout.map_arguments(fused, call.query.shape[3], call.query.dtype) for fused in call.fused)
    return first, second


class _Attention(torch.autograd.Function):
    """It saves inputs, output and normalisers, `B·H·L` floats, and the sums over the keys (bidirectional).

    Extra memory of the backward pass: `B·H·L` times two floats, the gradients before a projection (`B·H·L·f` floats
    and the inputs in float32, maps with weights only), and for the causal form the sums before and after every chunk,
    `m·(e + 1)` floats for every 64 tokens of a head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        call = rest[4].replace(query=query, key=key, value=value)
        with layout.on_device(query.device):
            result = (causal if call.causal else bidirectional)(call, _map_arguments(call), True)
        ctx.save_for_backward(query, key, value, *rest[:4], result.out, result.normaliser, result.states, call.mask)
        ctx.call = call.replace(query=None, key=None, value=None, mask=None)  # not referenced twice
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *parameters, out, normaliser, states, mask = ctx.saved_tensors
        call = ctx.call.replace(query=query, key=key, value=value, mask=mask)
        if normaliser is None:  # there are no keys
            tensors = (query, key, value, *parameters)
            return *(None if x is None else torch.zeros_like(x) for x in tensors), None
        gradient = readable(gradients[0])
        with layout.on_device(query.device):
            factors = _normalised(gradient, out, normaliser)
            pre_gradients, to_value = (_backward_causal if call.causal else _backward_bidirectional)(
                call, gradient, factors, states
            )
        needed = ctx.needs_input_grad[3:7]
        to_query, *query_learned = _through_projection(query, call.fused[0], pre_gradients[0], needed[:2])
        to_key, *key_learned = _through_projection(key, call.fused[1], pre_gradients[1], needed[2:])
        return to_query, to_key, to_value, *query_learned, *key_learned, None


def _through_projection(
    x: Tensor, fused: FusedMap, before: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of x, W and b from that of `y = s x W + c b`; without W it is that of x already."""
    if fused.weight is None:
        return before, None, None
    to_x = ((before @ fused.weight.detach().float().transpose(-1, -2)) * fused.in_scale).to(x.dtype)
    to_weight = to_bias = None
    if needed[0]:
        to_weight = parameter_gradient((x.float().transpose(-1, -2) @ before) * fused.in_scale, fused.weight)
    if needed[1] and fused.bias is not None:
        to_bias = parameter_gradient(before.sum(dim=2) * fused.bias_scale, fused.bias)
    return to_x, to_weight, to_bias


def _normalised(gradient: Tensor, out: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    inverse, slope = torch.empty_like(normaliser), torch.empty_like(normaliser)
    batch, heads, length, value_size = out.shape
    columns = min(power_of_two(value_size), 64)
    launch(
        kernels.normalised, (batch * heads, triton.cdiv(length, 64)), rows(gradient), rows(out), normaliser, inverse,
        slope, heads, length, DENOMINATOR_EPS, columns, 64, warps=4,
    )  # fmt: skip
    return inverse, slope


def _before(x: Tensor, fused: FusedMap) -> Tensor:
    """Allocate the gradient of the numbers before the activation."""
    batch, heads, length, size = x.shape
    dtype = x.dtype if fused.weight is None else torch.float32
    return token_major(batch, heads, length, fused.width(size), dtype, x.device)


Gradients = tuple[tuple[Tensor, Tensor], Tensor]


def _backward_bidirectional(
    call: KernelizedCall, gradient: Tensor, factors: tuple[Tensor, Tensor], states: Tensor
) -> Gradients:
    assert call.fused is not None
    query, key, value = call.query, call.key, call.value
    maps, masks = _map_arguments(call), mask_bytes(call.mask)
    batch, heads, length, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    split, key_split = layout.blocks(query, call), layout.blocks(key, call)
    query_states, _ = sum_tokens(query, gradient, None, maps[0], split, gradient=factors)
    scan(query_states, value.shape[3], repeats=heads // groups, total=True)
    to_value = token_major(batch, groups, keys, value.shape[3], value.dtype, value.device)
    before = _before(query, call.fused[0]), _before(key, call.fused[1])
    launch(
        kernels.backward_bidirectional, (batch * heads, split.spans), rows(query), rows(gradient), None, 0, *factors,
        states, rows(before[0]), None, maps[0], heads, groups, length, split.span, states.shape[1], split.columns,
        split.tokens, warps=8,
    )  # fmt: skip
    launch(
        kernels.backward_bidirectional, (batch * groups, key_split.spans), rows(key), rows(value), *masks, None, None,
        query_states, rows(before[1]), rows(to_value), maps[1], groups, groups, keys, key_split.span,
        split.spans * (heads // groups), key_split.columns, key_split.tokens, warps=8,
    )  # fmt: skip
    return before, to_value


def _backward_causal(call: KernelizedCall, gradient: Tensor, factors: tuple[Tensor, Tensor], _: Any) -> Gradients:
    assert call.fused is not None
    query, key, value = call.query, call.key, call.value
    maps, masks = _map_arguments(call), mask_bytes(call.mask)
    batch, heads, length, _size = query.shape
    groups = key.shape[1]
    split = layout.blocks(query, call, chunked=True)
    before = _before(query, call.fused[0]), _before(key, call.fused[1])
    to_value = token_major(batch, groups, length, value.shape[3], value.dtype, value.device)
    states, _none = sum_tokens(key, value, call.mask, maps[1], split)
    scan(states, value.shape[3])
    inputs = rows(query), rows(key), rows(value), rows(gradient), *masks, *factors
    shape = *maps, heads, groups, length, split.spans, split.columns, split.tokens
    launch(
        kernels.backward_causal_queries, (batch * heads, split.spans), *inputs, states, rows(before[0]), *shape, warps=8
    )
    del states
    states, _none = sum_tokens(query, gradient, None, maps[0], split, gradient=factors)
    scan(states, value.shape[3], repeats=heads // groups, reverse=True)
    outputs = rows(before[1]), rows(to_value)
    launch(kernels.backward_causal_keys, (batch * groups, split.spans), *inputs, states, *outputs, *shape, warps=8)
    return before, to_value
