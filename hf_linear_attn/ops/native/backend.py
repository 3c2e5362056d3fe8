"""The native backend: kernelized attention by compiled C++ kernels, with its gradients."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..common import (
    Features,
    InPlaceState,
    OutputBlocks,
    State,
    block_length,
    mask_tokens,
    readable,
    token_major,
)
from ..fused import AttentionCall, GatedCall, KernelizedCall, QueryMix, StepMix, WindowedCall
from ..kernel_inputs import unsupported_inputs
from . import binding
from .binding import KernelMap
from .build import BuildError, library
from .windowed import run_windowed

logger = logging.getLogger(__name__)


@functools.cache
def unavailable_reason() -> str | None:
    """Return why the kernels cannot run on this machine, or None if they can. The first call may compile them."""
    try:
        loaded = library()
    except BuildError as error:
        logger.warning("No native CPU kernels: %s. Attention runs in torch operations, several times slower.", error)
        return str(error)
    assert loaded.hla_call_bytes() == ctypes.sizeof(binding.Arguments), "the kernels and their binding disagree"
    return None


def _mix_matches(mix: StepMix | QueryMix, query: Tensor) -> bool:
    """Return whether the tensors of a formula of mixing weights match the queries."""
    batch, heads, length, size = query.shape
    if not (mix.base.is_cpu and mix.weight.is_cpu) or mix.weight.shape != (heads, size):
        return False
    if isinstance(mix, StepMix):
        count = mix.num_tokens
        return mix.base.shape == (heads,) and (count is None or (count.is_cpu and count.shape == (batch,)))
    return mix.base.shape in {(rows, heads, tokens) for rows in (1, batch) for tokens in (1, length)}


class NativeBackend:
    """C++ kernels: one pass over blocks of 64 tokens, the features of a block never leaving the cache.

    Inputs are float32, bfloat16 or float16; states and features are float32. For bfloat16 inputs, on processors with
    AMX, the factors of products are rounded to bfloat16 as those of exact attention are (features, weights, states;
    2⁻⁹; the weights of feature maps in the forward pass to 2⁻¹⁷ only), and an infinite or NaN value reaches all rows of
    its block of 64, as in exact attention; products still add up in float32. Peak extra memory, forward and backward:
    some hundred kilobytes a thread, and the states, `H·m·e` floats for every 2,048 tokens (bidirectional). Windowed
    attention: also `m·(e + 1)` floats a thread for every 64 tokens (bidirectional), and the gradients of a head in
    float32 (backward). Results are the same bits for any number of threads and any other rows of the batch. (Features
    that torch computes, for maps without a formula, are as torch rounds them.)
    """

    name = "native"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        reason = unsupported_inputs(call, "cpu")
        if reason is None and call.fused is None:
            reason = _unsupported_features(call)
        if reason is not None:
            return reason
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation needs torch operations"
        if isinstance(call, WindowedCall):
            if call.fused is not None and call.fused[0].scaled:
                return "windows over a feature map with a log scale are not fused"
            if not isinstance(call.log_mix, Tensor) and not _mix_matches(call.log_mix, call.query):
                return "the mixing weights are on another device or of another shape"
        return unavailable_reason()

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        if isinstance(call, WindowedCall):
            return run_windowed(call)
        return _run_features(call) if call.fused is None else run_kernelized(call)


def _unsupported_features(call: AttentionCall) -> str | None:
    """Return why the causal kernel cannot sum features that torch computes, for a map without a formula."""
    if isinstance(call, WindowedCall) or not call.causal:
        return "the feature map has no fused form"
    if isinstance(call, GatedCall) and not call.per_feature:
        return "decays per head are not fused"
    if torch.is_grad_enabled():
        return "gradients through a feature map without a fused form are not fused"
    return None


def _run_features(call: KernelizedCall | GatedCall) -> tuple[Tensor, State | None]:
    """Compute the causal form over features that torch computes, block by block."""
    batch, heads, length, _ = call.query.shape
    value_size = call.value.shape[3]
    step = block_length(batch, heads, max(call.num_features, value_size), length)
    outputs = OutputBlocks(batch, heads, length, value_size, call.value)
    state = call.state
    for start in range(0, length, step):
        now = slice(start, min(start + step, length))
        mask = None if call.mask is None else call.mask[:, now].contiguous()
        rows, columns = call.query[:, :, now].float(), mask_tokens(call.key[:, :, now].float(), mask)
        decay = None
        if isinstance(call, GatedCall):
            rows = mask_tokens(rows, mask)
            values, decay, log_scale = call.key_features(columns, start)
        else:
            values, log_scale = call.key_features(columns, start)
        query = readable(call.query_features(rows, start).values)  # a log scale would cancel
        key, value = readable(values), readable(call.value[:, :, now])
        size = call.num_features
        _check_sizes("queries", query, (batch, heads, value.shape[2], size))
        _check_sizes("keys", key, (*value.shape[:3], size))
        if state is not None and (log_scale is None) != ("log_scale" not in state):
            raise ValueError(
                "The state belongs to another feature map: only one of the two has a log scale. Start without a state."
            )
        part = call.replace(mask=mask, state=state, return_state=call.return_state or now.stop < length)
        maps = Features(query), Features(key, None if log_scale is None else log_scale.contiguous())
        out, state = _forward(
            part, (query, key, value), maps, decay=None if decay is None else readable(decay.expand_as(key))
        )
        outputs.add(out)
    return outputs.result(), state


def _check_sizes(of: str, features: Tensor, expected: tuple[int, ...]) -> None:
    if features.shape != expected or features.dtype != torch.float32:
        raise ValueError(
            f"The feature map made features of {of} of the shape {list(features.shape)} and dtype {features.dtype}; "
            f"{list(expected)} and float32 are needed (batch, heads, tokens, num_features)."
        )


def run_kernelized(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call whose feature maps have formulas, with gradients where they are needed."""
    assert call.fused is not None
    maps = binding.prepare(call.fused)
    inputs = readable(call.query), readable(call.key), readable(call.value)
    if call.mask is not None and not call.mask.is_contiguous():
        call = call.replace(mask=call.mask.contiguous())
    if not call.needs_grad():
        return _forward(call, inputs, maps)
    return _Attention.apply(*inputs, maps[0].weight, maps[0].bias, maps[1].weight, maps[1].bias, call, maps), None


def _forward(
    call: KernelizedCall | GatedCall,
    inputs: tuple[Tensor, Tensor, Tensor],
    maps: tuple[KernelMap, KernelMap],
    normaliser: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    query, key, value = inputs
    batch, heads, length, _ = query.shape
    groups, value_size = key.shape[1], value.shape[3]
    out = token_major(batch, heads, length, value_size, value.dtype)
    filled = binding.arguments(inputs, call.mask, maps, call.num_features, out)
    if not call.causal:
        binding.run("bidirectional", filled)
        return out, None
    if not length:
        return out, call.state
    before = {name: tensor.contiguous() for name, tensor in (call.state or {}).items()}
    after: State = {}
    if call.return_state and isinstance(call.state, InPlaceState):
        after = {name: before[name] for name in ("kv", "k_sum", "log_scale") if name in before}
    elif call.return_state:
        after["kv"] = binding.empty(batch, groups, call.num_features, value_size)
        after["k_sum"] = binding.empty(batch, groups, call.num_features)
        if maps[1].log_scale is not None if isinstance(maps[1], Features) else maps[1].scaled:
            after["log_scale"] = binding.empty(batch, groups)
    if before:
        filled.point(state=before["kv"], state_sum=before["k_sum"], state_scale=before.get("log_scale"))
    if after:
        filled.point(next_state=after["kv"], next_sum=after["k_sum"], next_scale=after.get("log_scale"))
    if normaliser is not None or decay is not None:
        filled.point(normaliser=normaliser, decay=decay)
    binding.run("causal", filled)
    return out, after or None


class _Attention(torch.autograd.Function):
    """It saves inputs, output and (causal) the normalisers; the backward pass computes features and states again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        call, maps = rest[4:]
        normaliser = binding.empty(*query.shape[:3]) if call.causal else None
        out, _ = _forward(call, (query, key, value), maps, normaliser)
        ctx.save_for_backward(query, key, value, *rest[:4], out, normaliser, call.mask)
        ctx.causal, ctx.num_features = call.causal, call.num_features
        ctx.maps = binding.replace_parameters(maps, None, None, None, None)  # the saved ones are not referenced twice
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        *inputs, query_weight, query_bias, key_weight, key_bias, out, normaliser, mask = ctx.saved_tensors
        parameters = query_weight, query_bias, key_weight, key_bias
        maps = binding.replace_parameters(ctx.maps, *parameters)
        filled = binding.arguments(tuple(inputs), mask, maps, ctx.num_features, out, backward=True)
        filled.point(normaliser=normaliser)
        name = "causal_backward" if ctx.causal else "bidirectional_backward"
        needed = ctx.needs_input_grad[3:7]
        return *binding.run_backward(name, filled, tuple(inputs), gradients[0], parameters, needed), None, None
