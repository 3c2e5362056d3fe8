"""Windowed attention on GPUs: FlexAttention for the exact weights, kernelized attention for the others.

    N_i = Σ_near exp(τ q_i·k_j - c_i) = exp(lse_i - c_i)             c_i: the largest exact logit
    F_i = exp(g_i) Σ_far φ(q_i)·φ(k_j)                               with a log scale s_i of queries also exp(s_i - c_i)
    o_i = (N_i near_i + F_i far_i) / (N_i + F_i)

FlexAttention (Dong et al. 2024, arXiv:2412.05496) computes near_i, lse_i and c_i, with a block mask of windows and
sinks. Causal attention to keys that are delayed by the window computes F_i and far_i, in encoders once more from the
end: by Triton kernels where these support the map.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import kernel_inputs, kernelized
from .calls import BackendCall, FarPass, KernelizedCall, WindowedCall
from .check import checked_reason
from .common import State, compute_dtype, group_heads, is_capturing, mask_tokens, readable, weighted_mean, with_ones
from .kernel_inputs import unsupported_inputs
from .sinks import Sinks, end_positions, first_tokens, take_tokens
from .triton import interpreted
from .triton.backend import TritonBackend, installed
from .window_tokens import gather_tokens, make_ring, pad_tokens
from .window_weights import FLOOR, LARGEST_GAP

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # imports torch.compile, which takes seconds

#: Least size of a head that FlexAttention's kernels support, and rows and columns of a block of its masks.
MIN_HEAD_DIM, BLOCK = 16, 128

#: Up to so many queries have explicit weights: a few products take less time than making a block mask.
FEW_QUERIES = 16

#: FlexAttention has no gradient for c. That of the log-sum-exp of the logits within `TIE·ε (1 + |c|)` of it is used.
TIE = 128


class FlexBackend:
    """Windows in fused kernels, forward and backward; a token after a state is one kernel.

    Kernels are compiled for every window, dtype and size of heads, and checked before their first use.
    """

    name = "flex"

    def unsupported_reason(self, call: BackendCall) -> str | None:
        if not isinstance(call, WindowedCall):
            return "it supports only windows"
        reason = unsupported_inputs(call, kernel_inputs.GPU)
        if reason is not None:
            return reason
        if call.fused is None or call.fused[1].scaled:
            return "the feature map has no fused form without a log scale"
        if not call.query.shape[2]:
            return "there are no tokens"
        if min(call.query.shape[3], call.value.shape[3]) < MIN_HEAD_DIM:
            return f"heads of fewer than {MIN_HEAD_DIM} numbers are not supported"
        if not installed():
            return "Triton is not installed (pip install triton)"
        return checked_reason(self.name, run, call)

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        assert isinstance(call, WindowedCall)
        return run(call)


class _Keys(NamedTuple):
    """Keys and values `[B, G, S, ·]`, and for each key `4·position + 2·(exact for all later rows) + (exact in windows)`
    `[B, S]` int32, so that a mask reads one number, and that mask (None for few queries)."""

    key: Tensor
    value: Tensor
    code: Tensor
    blocks: BlockMask | None = None


def run(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute a call with at least one token: the output `[B, H, L, e]`, and the state after it (causal)."""
    length = call.query.shape[2]
    window = call.window
    query = call.query
    if length == 1 and call.state is not None and (token := _step(call)) is not None:
        return token
    if not call.causal:
        return _whole(call)[0], None
    if call.mask is None and call.state is None and length > window:  # the usual case, without copies
        out, far = _whole(call)
        if not call.return_state:
            return out, None
        valid = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
        return out, {**(far or {}), **make_ring(call, valid, length - window), **first_tokens(call)[1]}
    sinks, first = first_tokens(call)
    inputs, valid, index, ring = gather_tokens(call, call.log_mixing_weights())
    out, far = _continued(inputs, valid, sinks)
    if index is not None:
        out = mask_tokens(take_tokens(out, index), call.mask)
    return out, {**(far or {}), **ring, **first} if call.return_state else None


def _step(call: WindowedCall) -> tuple[Tensor, State] | None:
    """Compute one token after a state by one kernel, or return None where it does not support the call."""
    assert call.fused is not None
    supported = installed() and (call.query.device.type != "cpu" or interpreted())
    if not supported or call.cache_dtype is not None or call.needs_grad():
        return None
    from .triton import window_step

    return window_step.step(call)


def _whole(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Return the output of a sequence whose windows count positions, and the state of the far keys.

    The sinks of an encoder see every key. A decoder has no padding here.
    """
    query, key, value = call.query, call.key, call.value
    device, mask = query.device, call.mask
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    is_volatile = is_capturing(device) or (mask is not None and mask.is_inference())
    layout_of = _layout.__wrapped__ if is_volatile else _layout
    sizes = query.shape[0], query.shape[2], call.window, call.sinks, call.causal
    layout = layout_of(*sizes, device, stream, None if mask is None else _Mask.of(mask))
    if layout.padding is not None:
        query, value = (x.masked_fill(layout.padding, 0.0) for x in (query, value))
        if call.needs_grad():  # otherwise the mask selects what its products are
            key = key.masked_fill(layout.padding, 0.0)
    call = call.replace(query=query, key=key, value=value)
    return _joined(call, _Keys(key, value, layout.code, layout.blocks), layout.passes)


@dataclass(frozen=True)
class _Mask:
    """A mask `[B | 1, L]`, equal to any other view of the same numbers. Whoever holds it keeps these where they are."""

    identity: tuple[Any, ...]
    tensor: Tensor = field(compare=False)

    @staticmethod
    def of(mask: Tensor) -> _Mask:
        version = None if mask.is_inference() else mask._version
        place = mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape, mask.stride()
        return _Mask((*place, version), mask)


class Layout(NamedTuple):
    """The code of `_Keys`, and its mask, the passes over far keys, and where there is padding `[B, 1, L, 1]`."""

    code: Tensor
    blocks: BlockMask | None
    passes: list[FarPass]
    padding: Tensor | None


@functools.lru_cache(maxsize=8)
def _layout(
    batch: int,
    length: int,
    window: int,
    sinks: int,
    causal: bool,
    device: torch.device,
    stream: int,
    mask: _Mask | None,
) -> Layout:
    """Return the layout of a sequence: all layers of a model have the same, each stream its own."""
    with torch.inference_mode(False):  # it may be saved for a backward pass later on
        real = None if mask is None else mask.tensor.expand(batch, -1)
        valid = torch.ones(batch, length, dtype=torch.bool, device=device) if real is None else real
        position = torch.arange(length, device=device)
        positions = position[None, :sinks] if causal or not sinks else end_positions(real, sinks, batch, length, device)
        is_sink = torch.zeros_like(valid).scatter(1, positions.expand(batch, -1), True) & valid
        code = (4 * position + 2 * is_sink + valid).int()
        is_far = valid & ~is_sink
        late, old = slice(window, length), slice(0, length - window)
        passes = [FarPass(late, old, False, is_far[:, :-window])]
        if not causal:
            passes.append(FarPass(old, late, True, is_far[:, window:].flip(1)))
        padding = None if real is None else ~real[:, None, :, None]
        blocks = _block_mask(code, length, window, causal, 0, positions)
        return Layout(code, blocks, passes if length > window else [], padding)


def _continued(call: WindowedCall, valid: Tensor, sinks: Sinks | None) -> tuple[Tensor, State | None]:
    """Return the same for what `gather_tokens` returns: `window` older tokens come first, and sinks by themselves."""
    length, window = call.query.shape[2], call.window
    key = mask_tokens(call.key, valid)
    value = mask_tokens(call.value, valid)
    near_key, near_value = key, value
    position = torch.arange(-window, length, device=valid.device)
    is_far, code = valid, 4 * position + valid
    code = code.int()
    shift = window
    columns = position.new_empty(1, 0)
    if sinks is not None:
        is_far = valid & (position > sinks.position[:, -1:])
        code = torch.cat([4 * sinks.position + 2, code], dim=1).int()
        shift = window + call.sinks
        near_key = torch.cat([sinks.key.to(key.dtype), key], 2)
        near_value = torch.cat([sinks.value.to(value.dtype), value], 2)
        columns = torch.arange(call.sinks, device=code.device)[None]
    keys = _Keys(near_key, near_value, code, _block_mask(code, length, window, True, shift, columns))
    everything = slice(0, length)
    call = call.replace(key=key[:, :, everything], value=value[:, :, everything])
    return _joined(call, keys, [FarPass(everything, everything, False, is_far[:, everything])])


def _joined(call: WindowedCall, keys: _Keys, passes: list[FarPass]) -> tuple[Tensor, State | None]:
    """Return the output and the state after the far keys: exact attention, to which passes over far keys are added.

    Without gradients the kernel of each pass adds it, where the Triton kernels support the map.

    call: Queries, and keys and values of the passes. Rows of an encoder's sinks have no part of these.
    """
    query, length = call.query, call.query.shape[2]
    after = None
    learning = call.needs_grad()
    exact_rows = None if call.causal else keys.code
    if passes and keys.blocks is not None and not learning:
        far_call = _far_call(call, query, call.key, call.value, None)
        if TritonBackend().unsupported_reason(far_call) is None:
            from .triton import attention

            out, log_sum, top = _exact(call, query, keys)
            out = readable(out.to(call.value.dtype))
            near = call.window + call.sinks
            exact = attention.Exact(out, log_sum, top, call.mixing_formula(), call.scaling, near, exact_rows)
            return out, attention.merge(far_call, exact, passes)
    mix = call.log_mixing_weights()
    total, top = _near(call, query, keys)
    if learning and not passes:  # the learned parts have a gradient of zeros, not none
        features = call.query_features(query[:, :, :0]), call.key_features(call.key[:, :, :0])
        total = total + mix.sum() * 0 + sum(part.values.sum() for part in features)
    mix = mix.expand(-1, -1, length)
    if exact_rows is not None:
        mix = mix.masked_fill((exact_rows & 2).bool()[:, None], float("-inf"))
    for part in passes:
        far, after = _far(call, part, mix, top)
        far = _tokens(far, slice(None), part.reverse)
        before, behind = part.queries.start, length - part.queries.stop
        total = total + (pad_tokens(far, before, behind) if far.shape[2] < length else far)
    return weighted_mean(total).to(call.value.dtype), after


def _tokens(x: Tensor, part: slice, reverse: bool) -> Tensor:
    """Return a part of the tokens of `[B, heads, L, …]`, from its end where `reverse`."""
    x = x[:, :, part]
    return x.flip(2) if reverse else x


def _far_call(call: WindowedCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> KernelizedCall:
    """Return the causal call of the far keys."""
    maps = call.query_features, call.key_features, call.fused, call.num_features
    state = None if call.state is None else {name: call.state[name] for name in ("kv", "k_sum")}
    return KernelizedCall(query, key, value, *maps, True, mask=mask, state=state, return_state=call.return_state)


def _far(call: WindowedCall, part: FarPass, log_mix: Tensor, top: Tensor) -> tuple[Tensor, State | None]:
    """Return `exp(g_i) Σ_{j <= i} φ(q_i)·φ(k_j) [v_j, 1]` `[B, H, n, e + 1]` of a pass, and the state after it.

    log_mix g `[B | 1, H, L]`; top c `[B, H, L]`, to which log scales of queries are relative.
    """
    query, log_mix, top = (_tokens(x, part.queries, part.reverse) for x in (call.query, log_mix, top))
    key, value = (_tokens(x, part.keys, part.reverse) for x in (call.key, call.value))
    far_call = _far_call(call, query, key, value, part.mask)
    if TritonBackend().unsupported_reason(far_call) is None:
        from .triton import attention

        total, scale, after = attention.totals(far_call)
    else:
        total, after = kernelized.causal(far_call, normalise=False)
        assert call.fused is not None
        scaled = call.fused[0].scaled  # otherwise the features would be computed twice for nothing
        scale = call.query_features(query.to(compute_dtype(query))).log_scale if scaled else None
    if scale is not None:
        log_mix = log_mix + (scale - top).clamp(max=LARGEST_GAP)
    return log_mix.to(total.dtype).exp().unsqueeze(-1) * total, after


def _near(call: WindowedCall, query: Tensor, keys: _Keys) -> tuple[Tensor, Tensor]:
    """Return `Σ_j exp(τ q_i·k_j - c_i) [v_j, 1]` over the exact keys of each row, `[B, H, L, e + 1]`, and c.

    c `[B, H, L]` has no gradient where queries have a log scale: everything is relative to it then.
    """
    assert call.fused is not None
    scaled = call.fused[0].scaled
    length = query.shape[2]
    count = keys.key.shape[2]
    device = query.device
    if keys.blocks is None:
        visible = _visible(keys.code, call.window, call.causal)
        batch, rows, columns = (torch.arange(size, device=device) for size in (query.shape[0], length, count))
        allowed = visible(batch[:, None, None], rows, rows[:, None], columns)[:, None, None]
        grouped = group_heads(query.to(compute_dtype(query)) * call.scaling, keys.key.shape[1])
        logits = grouped @ keys.key.to(grouped.dtype).unsqueeze(2).transpose(-1, -2)
        logits = logits.masked_fill(~allowed, float("-inf"))
        top = logits.amax(dim=-1, keepdim=True).clamp_min(FLOOR)
        weights = (logits - (top.detach() if scaled else top)).exp()
        total = weights @ with_ones(keys.value.to(grouped.dtype)).unsqueeze(2)
        return total.flatten(1, 2), top.detach().squeeze(-1).flatten(1, 2)
    out, mass, top = _exact(call, query, keys, gradient=not scaled)
    blind = mass < FLOOR  # rows without a key: the gradient of -inf would be NaN
    top = top.masked_fill(blind, 0.0)
    mass = (mass.masked_fill(blind, 0.0) - top).exp().masked_fill(blind, 0.0).unsqueeze(-1)
    return torch.cat([out * mass, mass], dim=-1), top.detach()


def _exact(call: WindowedCall, query: Tensor, keys: _Keys, gradient: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return FlexAttention to the exact keys `[B, H, L, e]`, the log-sum-exp of the logits `[B, H, L]`, and the largest
    one; `gradient`: that has a gradient, too, where the inputs need one."""
    inputs = (query, keys.key, keys.value)
    mask = keys.blocks
    assert mask is not None
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    guarded = learning, torch.is_inference_mode_enabled(), query.device, query.shape[0] == 1, keys.key.shape[2] <= BLOCK
    configuration = call.window, call.causal, query.dtype, *(x.shape[1::2] for x in inputs), *guarded
    out, aux = _compiled(call.scaling, configuration)(*inputs, mask, None)
    top = aux.max_scores.detach()
    if learning and gradient:
        level = top.masked_fill(aux.lse < FLOOR, 0.0)
        threshold = level - TIE * torch.finfo(top.dtype).eps * (1 + level.abs())
        largest = _compiled(call.scaling, (*configuration, "largest"))(*inputs, mask, threshold)[1].lse
        top = top + (largest - largest.detach()).masked_fill(aux.lse < FLOOR, 0.0)
    return out, aux.lse, top


def _visible(code: Tensor, window: int, causal: bool) -> Callable[..., Tensor]:
    """Return the function of FlexAttention that says which columns a row sees."""
    least = 0 if causal else 1 - window

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        of_key = code[batch, column]
        distance = row - (of_key >> 2)
        outside = (of_key & 2) != 0
        near = (distance >= least) & (distance < window)
        if causal:
            outside = outside & (distance >= 0)
        else:  # where rows are columns, sinks see every key
            near = near | ((code[batch, row] & 2) != 0)
        return torch.where(near, (of_key & 1) != 0, outside)

    return visible


def _block_mask(code: Tensor, length: int, window: int, causal: bool, shift: int, sinks: Tensor) -> BlockMask | None:
    """Return the blocks that hold windows or sinks (None for few queries): computed for blocks, never for pairs.

    Tokens stand at column `position + shift`, sinks at the columns `[B | 1, s]`.
    """
    if length <= FEW_QUERIES:
        return None
    from torch.nn.attention.flex_attention import BlockMask

    count = code.shape[1]
    device = code.device
    ahead = 0 if causal else window - 1
    row = torch.arange(0, length, BLOCK, device=device)[:, None] + shift
    column = torch.arange(0, count, BLOCK, device=device)
    some = (column <= row + BLOCK - 1 + ahead) & (column + BLOCK - 1 >= row - window + 1)
    sinks = sinks // BLOCK
    some = some.expand(len(sinks), -1, -1).scatter(2, sinks.unsqueeze(1).expand(-1, len(row), -1), True)
    if not causal:
        some = some.scatter(1, sinks.unsqueeze(2).expand(-1, -1, len(column)), True)
    some = some.unsqueeze(1)
    order = some.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()
    sizes: dict[str, Any] = {"BLOCK_SIZE": BLOCK, "seq_lengths": (length, count)}
    return BlockMask.from_kv_blocks(some.sum(dim=-1).int(), order, mask_mod=_visible(code, window, causal), **sizes)


@functools.cache
def _compiled(scale: float, configuration: object) -> Callable[..., Any]:
    """Return compiled FlexAttention, a function of its own for each configuration.

    A function is compiled a few times only, eight by default, for what torch does not take to be the same.
    """
    attend = FunctionType(_attend.__code__.replace(), globals(), "attend", (scale,))
    return torch.compile(attend, dynamic=True, fullgraph=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, threshold: Tensor | None, scale: float) -> Any:
    """Call FlexAttention, with the logits at or above a threshold `[B, H, L]` only."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def select(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        assert threshold is not None
        return torch.where(score >= threshold[batch, head, row], score, float("-inf"))

    modify = None if threshold is None else select
    aux = AuxRequest(lse=True, max_scores=threshold is None)
    return flex_attention(q, k, v, modify, mask, scale, q.shape[1] != k.shape[1], return_aux=aux)
