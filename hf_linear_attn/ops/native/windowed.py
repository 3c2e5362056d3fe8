"""Hybrids by the compiled kernels: exact weights inside a window, kernelized ones beyond it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common import InPlaceState, State, mask_tokens
from ..fused import QueryMix, StepMix, WindowedCall
from ..window_step import is_decoding_step
from ..windowed import by_row, gather_tokens, ring_of, take_tokens
from . import binding
from .binding import Arguments, Side, address
from .prepared_step import PreparedStep, state_after_step

#: The state of a step, and the kernel's names for it before and after.
STATE = {
    "kv": ("state", "next_state"),
    "k_sum": ("state_sum", "next_sum"),
    "ring_key": ("ring_key", "next_ring_key"),
    "ring_value": ("ring_value", "next_ring_value"),
    "ring_mask": ("ring_mask", "next_ring_mask"),
}
RINGS = ("ring_key", "ring_value")

#: By so many tokens a ring slides before it is copied to the start of its room: a copy takes as long as its attention.
SLIDES = 16


def run_windowed(call: WindowedCall) -> tuple[Tensor, State | None]:
    """The causal form runs on tokens with their padding first, behind the window of a state (see `gather_tokens`), and
    without either on the tokens as they are."""
    assert call.fused is not None
    sides = binding.prepare_both(call.fused, call.query.shape[3])
    if call.state is not None and _steps(call):
        return _step(call, sides, call.state)
    tensors = (sides[0].weight, sides[0].bias, sides[1].weight, sides[1].bias)
    mix = call.log_mix.rest if isinstance(call.log_mix, QueryMix) else call.mix_rows()
    log_mix = by_row(mix.float())
    if not call.causal:
        mask = None if call.mask is None else call.mask.contiguous()
        return _Windowed.apply(call.query, call.key, call.value, log_mix, *tensors, call, sides, mask, None, 0)[0], None
    length, window = call.query.shape[2], call.window
    if not length:
        return call.value.new_zeros(call.query.shape[0], call.query.shape[1], 0, call.value.shape[3]), call.state
    if call.mask is None and call.state is None:
        query, key, value = call.query, call.key, call.value
        out, kv, k_sum = _Windowed.apply(query, key, value, log_mix, *tensors, call, sides, None, None, 0)
        if not call.return_state:
            return out, None
        query, key, value, log_mix = (tensor[:, :, -window:] for tensor in (query, key, value, log_mix))
        tokens = gather_tokens(query, key, value, log_mix, window, None, None)
        return out, {"kv": kv, "k_sum": k_sum, **ring_of(tokens, min(length, window))}
    tokens = gather_tokens(call.query, call.key, call.value, log_mix, window, call.mask, call.state)
    skip = (~tokens.valid).sum(dim=1)
    given = (tokens.query, tokens.key, tokens.value, tokens.log_mix)
    out, kv, k_sum = _Windowed.apply(*given, *tensors, call, sides, None, skip, window)
    if tokens.place is not None:
        out = mask_tokens(take_tokens(out, tokens.place), call.mask)
    return out, {"kv": kv, "k_sum": k_sum, **ring_of(tokens, length)}


def _steps(call: WindowedCall) -> bool:
    """Whether the kernel for one token serves: it reads whole vectors of the state, and a ring of the inputs' dtype."""
    state, query, window = call.state, call.query, call.window
    if state is None or call.value.shape[3] % binding.lanes() or not is_decoding_step(query, call.mask, state):
        return False
    batch, groups, _, size = call.key.shape
    rings = [(state[name].shape, state[name].dtype) for name in RINGS]
    wanted = [((batch, groups, window, width), query.dtype) for width in (size, call.value.shape[3])]
    return rings == wanted and state["ring_mask"].shape == (batch, window) and state["ring_mask"].dtype is torch.bool


def _step(call: WindowedCall, sides: tuple[Side, Side], state: State) -> tuple[Tensor, State]:
    tensors = binding.plain(call.query), binding.plain(call.key), binding.plain(call.value)
    batch, heads, _, _ = call.query.shape
    out = binding.token_major(batch, heads, 1, call.value.shape[3], call.value.dtype)
    mix = call.log_mix
    rows = None if isinstance(mix, StepMix) else by_row(call.mix_rows().float()).exp()
    given = _arguments(call, tensors, sides, None, None, rows, out)
    # Everything that the kernel reads is held by a name until it has run.
    held = {name: state[name].contiguous() for name in STATE}
    own = state if isinstance(state, InPlaceState) else None
    slides = own is not None and own.updated_in_place and isinstance(mix, StepMix)
    rings = [_with_room(held[name]) if slides else torch.empty_like(held[name]) for name in RINGS]
    after = {name: torch.empty_like(held[name]) if own is None else held[name] for name in STATE if name not in RINGS}
    after |= {name: ring[:, :, : call.window] for name, ring in zip(RINGS, rings, strict=True)}
    for name, (before, behind) in STATE.items():
        setattr(given, before, held[name].data_ptr())
        setattr(given, behind, after[name].data_ptr())
    given.ring_capacity, given.next_ring_capacity = call.window, rings[0].shape[2]
    kept = None
    if isinstance(mix, StepMix):
        base, weight = mix.base.float().contiguous(), binding.pad_columns(mix.weight)
        given.mix_base, given.mix_weight, given.mix_bound = base.data_ptr(), address(weight), mix.bound
        if mix.seen is not None:
            seen = mix.seen.long().contiguous()
            after["count"] = torch.empty_like(seen) if own is None else seen
            given.count, given.next_count = seen.data_ptr(), after["count"].data_ptr()
            given.saturation = mix.saturation
        kept = base, weight
    binding.run("windowed_step", given)
    if own is None or kept is None:
        return out, after
    prepare = functools.partial(PreparedWindowStep, "windowed_step", given, tensors, kept=(sides, kept), rings=rings)
    return out, state_after_step(own, after, prepare)


def _with_room(ring: Tensor) -> Tensor:
    """Room for a ring `[B, G, w, d]` and the tokens that follow: it slides, and is copied once in `SLIDES` steps."""
    batch, groups, window, width = ring.shape
    return binding.room(batch, groups, window + SLIDES, width, dtype=ring.dtype)


class PreparedWindowStep(PreparedStep):
    """As `PreparedStep`; the rings slide through their rooms `[B, G, w + SLIDES, d]`."""

    def __init__(
        self,
        name: str,
        given: Arguments,
        inputs: tuple[Tensor, Tensor, Tensor],
        state: State,
        kept: Any,
        rings: list[Tensor],
    ) -> None:
        super().__init__(name, given, inputs, state, kept)
        self._others = [entry for entry in self._state if entry[0] not in RINGS]
        self._given, self._rings, self._at = given, rings, 0
        self._starts = [ring.data_ptr() for ring in rings]
        self._steps = [ring.stride(2) * ring.element_size() for ring in rings]
        given.ring_capacity = given.next_ring_capacity

    def run(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given, (key_start, value_start), (key_step, value_step) = self._given, self._starts, self._steps
        at, after = self._at, (self._at + 1) % (SLIDES + 1)
        given.ring_key, given.ring_value = key_start + at * key_step, value_start + at * value_step
        given.next_ring_key, given.next_ring_value = key_start + after * key_step, value_start + after * value_step
        out = super().run(state, query, key, value)
        self._at, (ring_key, ring_value) = after, (ring.narrow(2, after, given.window) for ring in self._rings)
        state["ring_key"], state["ring_value"] = ring_key, ring_value
        rings = ("ring_key", ring_key, given.next_ring_key), ("ring_value", ring_value, given.next_ring_value)
        self._state = [*self._others, *rings]
        return out


def _arguments(
    call: WindowedCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    sides: tuple[Side, Side],
    mask: Tensor | None,
    skip: Tensor | None,
    mix: Tensor | None,
    out: Tensor,
    backs: tuple[Tensor | None, Tensor | None] = (None, None),
    offset: int = 0,
) -> Arguments:
    query, key, value = tensors
    given = binding.arguments(call._replace(query=query, key=key, value=value, mask=mask), sides, out, backs)
    given.skip = address(skip)
    if mix is not None:
        steps = (0 if size == 1 else step for size, step in zip(mix.shape, mix.stride(), strict=True))
        given.mix = binding.Strided(mix.data_ptr(), *steps)
    given.offset = offset  # the key that row 0 is
    given.window, given.two_sided, given.scaling = call.window, not call.causal, call.scaling
    return given


class _Windowed(torch.autograd.Function):
    """Output and, for the causal form, the sums over all keys that have left the window.

    Keeps inputs, output, normalisers and stabilisers; the backward pass computes the rest again.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        query, key, value, log_mix, *parameters, call, sides, mask, skip, offset = given
        query, key, value = (binding.plain(tensor) for tensor in (query, key, value))
        batch, heads, length, _ = query.shape
        groups, value_size = key.shape[1], value.shape[3]
        out = binding.token_major(batch, heads, length, value_size, value.dtype)
        mix = log_mix.detach().float().exp()
        arguments = _arguments(call, (query, key, value), sides, mask, skip, mix, out, offset=offset)
        weight = None
        if isinstance(call.log_mix, QueryMix):
            weight = binding.pad_columns(call.log_mix.weight)
            arguments.mix_weight, arguments.mix_bound = address(weight), call.log_mix.bound
        kv = k_sum = None
        if call.causal:
            kv, k_sum = (binding.room(batch, groups, call.num_features, *last) for last in ((value_size,), ()))
            arguments.next_state, arguments.next_sum = address(kv), address(k_sum)
        if call.state is not None:
            held = [call.state[name].contiguous() for name in ("kv", "k_sum")]
            arguments.state, arguments.state_sum = address(held[0]), address(held[1])
        normaliser, top = binding.room(batch, heads, length), binding.room(batch, heads, length)
        arguments.normaliser, arguments.top = address(normaliser), address(top)
        binding.run("windowed", arguments)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(query, key, value, *parameters, mix, out, normaliser, top, mask, skip)
            ctx.call, ctx.offset = call._replace(query=None, key=None, value=None, mask=None, state=None), offset
            ctx.sides = tuple(side._replace(weight=None, bias=None) for side in sides)
        if call.causal:
            ctx.mark_non_differentiable(kv, k_sum)
        return out, kv, k_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *rest = ctx.saved_tensors
        parameters, (mix, out, normaliser, top, mask, skip) = tuple(rest[:4]), rest[4:]
        gradient = binding.plain(gradients[0])
        sides = tuple(
            side._replace(weight=parameters[2 * place], bias=parameters[2 * place + 1])
            for place, side in enumerate(ctx.sides)
        )
        backs = (binding.turned(parameters[0]), binding.turned(parameters[2]))
        arguments = _arguments(ctx.call, (query, key, value), sides, mask, skip, mix, out, backs, ctx.offset)
        to_query, to_key, to_value = (binding.token_major_like(tensor) for tensor in (query, key, value))
        to_mix = binding.room(*query.shape[:3]).zero_()
        arguments.out_gradient = binding.strided(gradient)
        arguments.query_gradient, arguments.key_gradient = binding.strided(to_query), binding.strided(to_key)
        arguments.value_gradient, arguments.mix_gradient = binding.strided(to_value), address(to_mix)
        arguments.normaliser, arguments.top = address(normaliser), address(top)
        learned = binding.ParameterGradients(
            parameters, tuple(ctx.needs_input_grad[4:8]), query.shape[0], (query.shape[1], key.shape[1])
        )
        learned.place_in(arguments)
        binding.run("windowed_backward", arguments)
        return to_query, to_key, to_value, to_mix.sum_to_size(mix.shape), *learned.sums(), None, None, None, None, None
