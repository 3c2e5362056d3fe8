"""The native backend: kernelized attention by the compiled kernels, with its gradients."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..common import Features, InPlaceState, OutputBlocks, State, block_length, mask_tokens
from ..fused import PARTS, AttentionCall, FusedMap, GatedCall, KernelizedCall, QueryMix, StepMix, WindowedCall
from . import binding
from .binding import Side, address
from .build import BuildError, library
from .prepared_step import PreparedStep, state_after_step
from .windowed import run_windowed

logger = logging.getLogger(__name__)


@functools.cache
def unavailable_reason() -> str | None:
    """Why the kernels cannot run on this machine; None where they can. The first call may compile them."""
    try:
        loaded = library()
    except BuildError as error:
        logger.warning("No native CPU kernels: %s. Attention runs in plain torch, several times slower.", error)
        return str(error)
    assert loaded.hla_call_bytes() == ctypes.sizeof(binding.Arguments), "the kernels and their binding disagree"
    return None


def _misfit(side: FusedMap, num_features: int, heads: int, size: int) -> str | None:
    """What a kernel, which checks nothing, would read or write beyond a tensor for. (On the path of every step: terse.)

    heads and size are those of the queries or keys.
    """
    weight, bias = side.weight, side.bias
    width = size
    if weight is not None:
        if not weight.is_cpu:
            return "the weights of the feature map are elsewhere"
        count, rows, width = weight.shape
        if rows != size or (count != heads and count != 1):
            return f"the weights of the feature map have the sizes {list(weight.shape)}"
    if bias is not None:
        if not bias.is_cpu:
            return "the weights of the feature map are elsewhere"
        count, columns = bias.shape
        if columns != width or (count != heads and count != 1):
            return f"the weights of the feature map have the sizes {list(bias.shape)}"
    if PARTS[side.activation] * width != num_features:
        return f"the formula of the feature map makes other than its {num_features} features"
    return None


def _fits(mix: StepMix | QueryMix, query: Tensor) -> bool:
    """As `_misfit`, for mixing weights by formula."""
    batch, heads, length, size = query.shape
    if isinstance(mix, QueryMix):
        if not (mix.rest.is_cpu and mix.weight.is_cpu) or mix.rest.dim() != 3 or mix.weight.shape != (heads, size):
            return False
        rows, held, places = mix.rest.shape
        return rows in (1, batch) and held == heads and places in (1, length)
    if not (mix.base.is_cpu and mix.weight.is_cpu):
        return False
    if mix.seen is not None and not (mix.seen.is_cpu and mix.seen.shape == (batch,)):
        return False
    return mix.base.shape == (heads,) and mix.weight.shape == (heads, size)


def _agree(call: AttentionCall) -> bool:
    """As `_misfit`, for the inputs; who misuses them is told by torch."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, size = query.shape
    rows, groups, keys, width = key.shape
    if rows != batch or width != size or value.shape[:3] != key.shape[:3] or not groups or heads % groups:
        return False
    if call.causal and keys != length:
        return False
    return mask is None or (mask.dtype is torch.bool and mask.shape[1:] == (keys,) and mask.shape[0] in (1, batch))


def _continues(call: AttentionCall, state: State) -> bool:
    """As `_misfit`, for a state: that of another mechanism, batch size or precision is none of this call."""
    kv, k_sum, log_scale = state.get("kv"), state.get("k_sum"), state.get("log_scale")
    sizes = (call.key.shape[0], call.key.shape[1], call.num_features)
    if kv is None or k_sum is None or kv.shape != (*sizes, call.value.shape[3]) or k_sum.shape != sizes:
        return False
    if not kv.dtype is k_sum.dtype is torch.float32:
        return False
    if call.fused is not None and call.fused[1].scaled is (log_scale is None):
        return False
    return log_scale is None or (log_scale.dtype is torch.float32 and log_scale.shape == sizes[:2])


class NativeBackend:
    """C++ kernels: one pass over blocks of 64 tokens, the features of a block never leaving the cache.

    float32, bfloat16 and float16 inputs; sums and features in float32. Of bfloat16 inputs, on processors with AMX, the
    factors of products are rounded to bfloat16 as exact attention's are (features, weights, sums over keys; 2⁻⁹; the
    weights of feature maps forward to 2⁻¹⁷ only), and an infinite or NaN value reaches all rows of its block of 64, as
    in exact attention's; products still add up in float32. Peak extra memory, forward and backward: some hundred
    kilobytes a thread, and the sums, `H·m·e` floats for every 2,048 tokens (bidirectional). Hybrids: also
    `m·(e + 1)` floats a thread for every 64 tokens (bidirectional), and the gradients of a head in float32 (backward).
    Results are the same bits whatever the number of threads and whatever else is in the batch. (Features that torch
    computes, for maps without a formula, are as torch rounds them.)
    """

    name = "native"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces torch operations only"
        query, key, value = call.query, call.key, call.value
        if query.device.type != "cpu":
            return f"the tensors are on {query.device.type}"
        if getattr(call, "signed", False):
            return "the feature map has no fused form"
        if call.fused is None:
            unfit = _refuses_features(call)
        else:
            queries, keys = call.fused
            unfit = _misfit(queries, call.num_features, query.shape[1], query.shape[3])
            if unfit is None and (keys is not queries or queries.weight is not None):
                unfit = _misfit(keys, call.num_features, key.shape[1], key.shape[3])
        if unfit is not None:
            return unfit
        if query.dtype not in binding.DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            return f"the dtype is {query.dtype}"
        if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
            return "the inputs are no plain tensors"
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation asks for torch operations"
        if not _agree(call) or (call.state is not None and not _continues(call, call.state)):
            return "queries, keys, values, mask and state do not belong together"
        if isinstance(call, WindowedCall):
            if call.fused is not None and call.fused[0].scaled:
                return "windows over a feature map with a log scale are not fused"
            if not isinstance(call.log_mix, Tensor) and not _fits(call.log_mix, query):
                return "the mixing weights are elsewhere, or of other sizes"
        if call.needs_grad() and call.causal and (call.state is not None or call.return_state):
            return "gradients through a carried state are not fused"
        if torch.is_anomaly_enabled():
            return "anomaly detection asks for torch operations"
        return unavailable_reason()

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        if isinstance(call, WindowedCall):
            return run_windowed(call)
        return _run_features(call) if call.fused is None else run_kernelized(call)


def _refuses_features(call: AttentionCall) -> str | None:
    """Why torch cannot compute the features of a map without a formula, block by block, for the causal kernel."""
    if isinstance(call, WindowedCall) or not call.causal:
        return "the feature map has no fused form"
    if isinstance(call, GatedCall) and not call.per_feature:
        return "decays per head are not fused"
    if torch.is_grad_enabled():
        return "gradients through a feature map without a fused form are not fused"
    return None


def _run_features(call: KernelizedCall | GatedCall) -> tuple[Tensor, State | None]:
    """The causal form over features that torch computes; temporaries: those of one block."""
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
            values, decay, log_scale = call.key_gates(columns, start)
        else:
            values, log_scale = call.key_features(columns, start)
        query = binding.plain(call.query_features(rows, start).values)  # a log scale would cancel
        key, value = binding.plain(values), binding.plain(call.value[:, :, now])
        size = call.num_features
        _check_sizes("queries", query, (batch, heads, value.shape[2], size))
        _check_sizes("keys", key, (*value.shape[:3], size))
        if state is not None and (log_scale is None) != ("log_scale" not in state):
            raise ValueError("The state is not of this feature map: one of the two has a log scale. Start anew.")
        keep = call.return_state or now.stop < length
        functions = call.query_features, call.query_features
        part = KernelizedCall(query, key, value, *functions, None, size, True, False, mask, state, keep)
        sides = binding.given(Features(query)), binding.given(Features(key, log_scale))
        out, state = _forward(part, sides, decay=None if decay is None else binding.plain(decay.expand_as(key)))
        outputs.add(out)
    return outputs.joined(), state


def _check_sizes(of: str, features: Tensor, wanted: tuple[int, ...]) -> None:
    if features.shape != wanted or features.dtype != torch.float32:
        raise ValueError(
            f"The feature map gave features of {of} of the shape {list(features.shape)} and dtype {features.dtype}; "
            f"{list(wanted)} and float32 are needed (batch, heads, tokens, num_features)."
        )


def run_kernelized(call: KernelizedCall) -> tuple[Tensor, State | None]:
    assert call.fused is not None
    query_side, key_side = binding.prepare_both(call.fused, call.query.shape[3])
    query, key, value = binding.plain(call.query), binding.plain(call.key), binding.plain(call.value)
    mask = None if call.mask is None else call.mask.contiguous()
    if query is not call.query or key is not call.key or value is not call.value or mask is not call.mask:
        call = call._replace(query=query, key=key, value=value, mask=mask)
    if not call.needs_grad():
        return _forward(call, (query_side, key_side))
    tensors = (query_side.weight, query_side.bias, key_side.weight, key_side.bias)
    return _Attention.apply(call.query, call.key, call.value, *tensors, call, (query_side, key_side)), None


def _forward(
    call: KernelizedCall, sides: tuple[Side, Side], normaliser: Tensor | None = None, decay: Tensor | None = None
) -> tuple[Tensor, State | None]:
    batch, heads, length, _ = call.query.shape
    groups, value_size = call.key.shape[1], call.value.shape[3]
    out = binding.token_major(batch, heads, length, value_size, call.value.dtype)
    given = binding.arguments(call, sides, out)
    if not call.causal:
        binding.run("bidirectional", given)
        return out, None
    if not length:
        return out, call.state
    held: State = {}
    if call.state is not None:
        held = {name: tensor.contiguous() for name, tensor in call.state.items()}
        given.state, given.state_sum = held["kv"].data_ptr(), held["k_sum"].data_ptr()
        given.state_scale = address(held.get("log_scale"))
    after: State = {}
    if call.return_state and isinstance(call.state, InPlaceState):
        after = {name: held[name] for name in ("kv", "k_sum", "log_scale") if name in held}
    elif call.return_state:
        after["kv"] = binding.room(batch, groups, call.num_features, value_size)
        after["k_sum"] = binding.room(batch, groups, call.num_features)
        if sides[1].scaled:
            after["log_scale"] = binding.room(batch, groups)
    if after:
        given.next_state, given.next_sum = after["kv"].data_ptr(), after["k_sum"].data_ptr()
        given.next_scale = address(after.get("log_scale"))
    if normaliser is not None:
        given.normaliser = normaliser.data_ptr()
    if decay is not None:
        given.decay = binding.strided(decay)
    binding.run("causal", given)
    formulas = sides[0].fused is not None  # (the next step's features have yet to be computed otherwise)
    if length == 1 and after and isinstance(call.state, InPlaceState) and call.mask is None and formulas:
        inputs = call.query, call.key, call.value
        after = state_after_step(
            call.state, after, functools.partial(PreparedStep, "causal", given, inputs, kept=sides)
        )
    return out, after or None


class _Attention(torch.autograd.Function):
    """Keeps inputs, output and (causal) the normalisers; the backward pass computes features and sums again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        call, sides = rest[4:]
        normaliser = binding.room(*query.shape[:3]) if call.causal else None
        out, _ = _forward(call, sides, normaliser)
        ctx.save_for_backward(query, key, value, *rest[:4], out, normaliser, call.mask)
        ctx.call = call._replace(query=None, key=None, value=None, mask=None)  # what is saved is not held twice
        ctx.sides = tuple(side._replace(weight=None, bias=None) for side in sides)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *parameters, out, normaliser, mask = ctx.saved_tensors
        gradient = binding.plain(gradients[0])
        batch, heads = query.shape[:2]
        sides = tuple(
            side._replace(weight=parameters[2 * place], bias=parameters[2 * place + 1])
            for place, side in enumerate(ctx.sides)
        )
        backs = (binding.turned(parameters[0]), binding.turned(parameters[2]))
        call = ctx.call._replace(query=query, key=key, value=value, mask=mask)
        given = binding.arguments(call, sides, out, backs)
        to_query, to_key, to_value = (binding.token_major_like(tensor) for tensor in (query, key, value))
        given.out_gradient = binding.strided(gradient)
        given.query_gradient, given.key_gradient = binding.strided(to_query), binding.strided(to_key)
        given.value_gradient, given.normaliser = binding.strided(to_value), address(normaliser)
        learned = binding.ParameterGradients(
            tuple(parameters), tuple(ctx.needs_input_grad[3:7]), batch, (heads, key.shape[1])
        )
        learned.place_in(given)
        binding.run("causal_backward" if call.causal else "bidirectional_backward", given)
        return to_query, to_key, to_value, *learned.sums(), None, None
