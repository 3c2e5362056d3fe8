"""Windowed attention by the compiled kernels: exact weights inside a window, kernelized ones beyond it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common import InPlaceState, State, mask_tokens, readable, token_major
from ..fused import QueryMix, StepMix, WindowedCall
from ..sinks import Sinks, attend_from_sinks, end_tokens, first_tokens, take_tokens
from ..window_step import is_decoding_step
from ..windowed import gather_tokens, make_ring
from . import binding
from .binding import Arguments, KernelMap

#: Fields of the kernel's arguments for each entry of the state, before and after a step.
STATE_FIELDS = {
    "kv": ("state", "next_state"),
    "k_sum": ("state_sum", "next_sum"),
    "ring_key": ("ring_key", "next_ring_key"),
    "ring_value": ("ring_value", "next_ring_value"),
    "ring_mask": ("ring_mask", "next_ring_mask"),
    "count": ("count", "next_count"),
}
RINGS = ("ring_key", "ring_value")
SINKS = ("sink_key", "sink_value")


def run_windowed(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute a call. The causal form with a mask or a state takes its tokens from `gather_tokens`, padding first."""
    assert call.fused is not None
    maps = binding.prepare(call.fused)
    if call.state is not None and _is_kernel_step(call):
        return _step(call, maps, call.state)
    tensors = (maps[0].weight, maps[0].bias, maps[1].weight, maps[1].bias)
    log_mix = (call.log_mix.base if isinstance(call.log_mix, QueryMix) else call.log_mixing_weights()).float()
    inputs, tokens, length = (call.query, call.key, call.value, log_mix), None, call.query.shape[2]
    mask, skip, offset = call.mask, None, 0
    sinks: Sinks | None = None
    first: State = {}
    if not call.causal:
        sinks = end_tokens(call)
        mask = None if mask is None else mask.contiguous()
    elif not length:
        return call.value.new_zeros(call.query.shape[0], call.query.shape[1], 0, call.value.shape[3]), call.state
    else:
        sinks, first = first_tokens(call)
        if mask is not None or call.state is not None:
            tokens, offset = gather_tokens(*inputs, call.window, mask, call.state), call.window
            inputs, mask, skip = (*tokens[:3], tokens.log_mix), None, (~tokens.valid).sum(dim=1)
    sink_tensors = (None, None, None) if sinks is None else sinks
    out, kv, k_sum = _Windowed.apply(*inputs, *tensors, *sink_tensors, call, maps, mask, skip, offset)
    if not call.causal:
        return attend_from_sinks(out, call, sinks), None
    if tokens is not None and tokens.query_index is not None:
        out = mask_tokens(take_tokens(out, tokens.query_index), call.mask)
    if tokens is None:
        if not call.return_state:
            return out, None
        query, key, value, log_mix = (tensor[:, :, -call.window :] for tensor in inputs)
        tokens = gather_tokens(query, key, value, log_mix, call.window, None, None)
        length = min(length, call.window)
    return out, {"kv": kv, "k_sum": k_sum, **make_ring(tokens, length), **first}


def _is_kernel_step(call: WindowedCall) -> bool:
    """Whether the kernel for one token applies: it reads whole vectors of a state and a ring of the inputs' dtype."""
    state, query, window = call.state, call.query, call.window
    if state is None or call.value.shape[3] % binding.lanes() or not is_decoding_step(query, call.mask, state):
        return False
    batch, groups, _, size = call.key.shape
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"ring_mask": ((batch, window), torch.bool)}
    for names, count in ((RINGS, window), (SINKS, call.sinks)):
        if count:
            widths = (size, call.value.shape[3])
            shapes = [((batch, groups, count, width), query.dtype) for width in widths]
            expected |= dict(zip(names, shapes, strict=True))
    return all(name in state and (state[name].shape, state[name].dtype) == form for name, form in expected.items())


def _step(call: WindowedCall, maps: tuple[KernelMap, KernelMap], state: State) -> tuple[Tensor, State]:
    inputs = readable(call.query), readable(call.key), readable(call.value)
    batch, heads, _, _ = call.query.shape
    out = token_major(batch, heads, 1, call.value.shape[3], call.value.dtype)
    mix = call.log_mix
    rows = None if isinstance(mix, StepMix) else call.log_mixing_weights().float().exp()
    filled = _arguments(call, inputs, maps, None, None, rows, out)
    before = {name: state[name].contiguous() for name in STATE_FIELDS} | {"count": state["count"].long().contiguous()}
    own = state if isinstance(state, InPlaceState) else None
    after = {name: torch.empty_like(tensor) if own is None else tensor for name, tensor in before.items()}
    for name, (field_before, field_after) in STATE_FIELDS.items():
        filled.point(**{field_before: before[name], field_after: after[name]})
    if call.sinks:  # the kernel writes into them
        after |= {name: state[name].contiguous() if own is not None else state[name].clone() for name in SINKS}
        filled.point(sink_key=after["sink_key"], sink_value=after["sink_value"])
        filled.sinks = call.sinks
    if isinstance(mix, StepMix):
        filled.point(mix_base=mix.base.float().contiguous(), mix_weight=binding.pad_columns(mix.weight))
        filled.mix_bound, filled.saturation = mix.bound, mix.saturation or 0.0
    binding.run("windowed_step", filled)
    return out, after


def _arguments(
    call: WindowedCall,
    inputs: tuple[Tensor, Tensor, Tensor],
    maps: tuple[KernelMap, KernelMap],
    mask: Tensor | None,
    skip: Tensor | None,
    mix: Tensor | None,
    out: Tensor,
    offset: int = 0,
    sinks: Sinks | None = None,
    *,
    backward: bool = False,
) -> Arguments:
    filled = binding.arguments(inputs, mask, maps, call.num_features, out, backward=backward)
    filled.point(skip=skip)
    if mix is not None:
        strides = (0 if size == 1 else stride for size, stride in zip(mix.shape, mix.stride(), strict=True))
        filled.mix = binding.Strided(mix.data_ptr(), *strides)
        filled.mixing_weights = mix  # stays alive
    if sinks is not None:
        filled.point(sink_key=sinks.key, sink_value=sinks.value, sink_position=sinks.position)
        filled.sinks = sinks.position.shape[1]
    filled.offset = offset  # the index of the key that belongs to row 0
    filled.window, filled.two_sided, filled.scaling = call.window, not call.causal, call.scaling
    return filled


class _Windowed(torch.autograd.Function):
    """The output and, for the causal form, the state of all keys that have left the window.

    It saves inputs, output, normalisers and stabilisers; the backward pass computes the rest again.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        query, key, value, log_mix, *rest, call, maps, mask, skip, offset = inputs
        parameters, sink_tensors = rest[:4], rest[4:]
        query, key, value = (readable(tensor) for tensor in (query, key, value))
        sinks = None if sink_tensors[0] is None else Sinks(*(tensor.contiguous() for tensor in sink_tensors))
        batch, heads, length, _ = query.shape
        out = token_major(batch, heads, length, value.shape[3], value.dtype)
        mix = log_mix.detach().float().exp()
        filled = _arguments(call, (query, key, value), maps, mask, skip, mix, out, offset, sinks)
        if isinstance(call.log_mix, QueryMix):
            filled.point(mix_weight=binding.pad_columns(call.log_mix.weight))
            filled.mix_bound = call.log_mix.bound
        kv = k_sum = None
        if call.causal:
            sizes = batch, key.shape[1], call.num_features
            kv, k_sum = binding.empty(*sizes, value.shape[3]), binding.empty(*sizes)
            ctx.mark_non_differentiable(kv, k_sum)
        if call.state is not None:
            filled.point(state=call.state["kv"].contiguous(), state_sum=call.state["k_sum"].contiguous())
        normaliser, top = binding.empty(batch, heads, length), binding.empty(batch, heads, length)
        filled.point(next_state=kv, next_sum=k_sum, normaliser=normaliser, top=top)
        binding.run("windowed", filled)
        if any(ctx.needs_input_grad):
            saved = sinks or (None, None, None)
            ctx.save_for_backward(query, key, value, *parameters, mix, out, normaliser, top, mask, skip, *saved)
            ctx.call, ctx.offset = call.replace(query=None, key=None, value=None, mask=None, state=None), offset
            ctx.maps = binding.replace_parameters(maps, None, None, None, None)
        return out, kv, k_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = ctx.saved_tensors  # read once, because recomputed activations are freed by the first access
        inputs, parameters, saved = tensors[:3], tensors[3:7], tensors[13:]
        mix, out, normaliser, top, mask, skip = tensors[7:13]
        sinks = None if saved[0] is None else Sinks(*saved)
        maps = binding.replace_parameters(ctx.maps, *parameters)
        filled = _arguments(ctx.call, inputs, maps, mask, skip, mix, out, ctx.offset, sinks, backward=True)
        to_mix = torch.zeros_like(normaliser)
        to_sinks = (None, None) if sinks is None else (torch.empty_like(sinks.key), torch.empty_like(sinks.value))
        filled.point(normaliser=normaliser, top=top, mix_gradient=to_mix)
        filled.point(sink_key_gradient=to_sinks[0], sink_value_gradient=to_sinks[1])
        needed = ctx.needs_input_grad[4:8]
        learned = binding.run_backward("windowed_backward", filled, inputs, gradients[0], parameters, needed)
        nothing = [None] * 6  # for positions, and what is no tensor
        return *learned[:3], to_mix.sum_to_size(mix.shape), *learned[3:], *to_sinks, *nothing
