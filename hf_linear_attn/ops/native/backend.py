"""The native backend: kernelized attention by compiled C++ kernels, with its gradients."""

import ctypes
import functools
import logging

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..calls import BackendCall, GatedCall, KernelizedCall, Mix, WindowedCall
from ..common import InPlaceState, State, block_length, constant_result, mask_tokens
from ..kernel_inputs import unsupported_inputs
from . import binding
from .binding import Numbers, Tensors, differentiable, empty, output
from .build import BuildError, library
from .windowed import run_windowed

logger = logging.getLogger(__name__)

#: The entries of a state.
_STATE = ("kv", "k_sum", "log_scale")


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


@functools.cache
def has_float16() -> bool:
    """Return whether the compiler of the kernels has float16: GCC on x86 from version 12 on."""
    return bool(library().hla_has_float16())


#: The same two; constants where torch.compile traces a call.
_unavailable_reason = constant_result(lambda: unavailable_reason())
_has_float16 = constant_result(lambda: has_float16())


def _mix_matches(mix: Mix, query: Tensor) -> bool:
    """Return whether the tensors of a formula of mixing weights match the queries."""
    batch, heads, length, size = query.shape
    base, weight = mix.base, mix.weight
    if not (base.is_cpu and weight.is_cpu) or weight.shape != (heads, size):
        return False
    return base.dim() == 3 and base.shape[0] in (1, batch) and base.shape[1] == heads and base.shape[2] in (1, length)


class NativeBackend:
    """C++ kernels: one pass over blocks of 64 tokens, the features of a block never leaving the cache.

    Inputs are float32, bfloat16 or float16; states and features are float32. For bfloat16 inputs, on processors with
    AMX, the factors of products are rounded to bfloat16 as those of exact attention are (features, weights, states;
    2⁻⁹; the weights of feature maps in the forward pass to 2⁻¹⁷ only), and an infinite or NaN value reaches all rows of
    its block of 64, as in exact attention; products still add up in float32. Peak extra memory, forward and backward:
    some hundred kilobytes a thread, and the states, `H·m·e` floats for every 2,048 tokens (bidirectional). Windowed
    attention: also `2 m·(e + 1)` floats a thread for every 64 tokens (bidirectional), and the gradients of a head in
    float32 (backward). Results are the same bits for any number of threads and any other rows of the batch. (Features
    that torch computes, for maps without a formula, are as torch rounds them.)
    """

    name = "native"

    def unsupported_reason(self, call: BackendCall) -> str | None:
        reason = unsupported_inputs(call, "cpu")
        if reason is None and call.fused is None:
            reason = _unsupported_features(call)
        if reason is not None:
            return reason
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation needs torch operations"
        if isinstance(call, WindowedCall):
            if call.fused is not None and call.fused[1].scaled:
                return "windows over keys with a log scale are not fused"
            if not isinstance(call.log_mix, Tensor) and not _mix_matches(call.log_mix, call.query):
                return "the mixing weights are on another device or of another shape"
        reason = _unavailable_reason()
        if reason is None and call.query.dtype is torch.float16 and not _has_float16():
            return "the compiler that made the kernels has no float16"
        return reason

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        if isinstance(call, WindowedCall):
            return run_windowed(call)
        return _run_features(call) if call.fused is None else run_kernelized(call)


def _unsupported_features(call: BackendCall) -> str | None:
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
    outputs = [call.value.new_zeros(batch, heads, 0, value_size)]
    state = call.state
    for start in range(0, length, step):
        now = slice(start, min(start + step, length))
        mask = None if call.mask is None else call.mask[:, now]
        rows, columns = (x[:, :, now].float() for x in (call.query, call.key))
        rows = mask_tokens(rows, mask) if isinstance(call, GatedCall) else rows
        keys = call.key_features(mask_tokens(columns, mask))
        query = call.query_features(rows).values
        key = keys.values
        value = call.value[:, :, now]
        _check_sizes("queries", query, (batch, heads, value.shape[2], call.num_features))
        _check_sizes("keys", key, (*value.shape[:3], call.num_features))
        if state is not None and (keys.log_scale is None) != ("log_scale" not in state):
            raise ValueError(
                "The state belongs to another feature map: only one of the two has a log scale. Start without a state."
            )
        part = call.replace(mask=mask, state=state, return_state=call.return_state or now.stop < length)
        inputs = {"query": query, "key": key, "value": value}
        if keys.log_scale is not None:
            inputs["key_scales"] = keys.log_scale
        if isinstance(call, GatedCall):
            inputs["decay"] = keys.log_decay.expand_as(key)
        out, state = _forward(part, inputs, dict.fromkeys(("query_activation", "key_activation"), binding.PRECOMPUTED))
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def _check_sizes(of: str, features: Tensor, expected: tuple[int, ...]) -> None:
    if features.shape != expected or features.dtype != torch.float32:
        raise ValueError(
            f"The feature map made features of {of} of the shape {list(features.shape)} and dtype {features.dtype}; "
            f"{list(expected)} and float32 are needed (batch, heads, tokens, num_features)."
        )


def run_kernelized(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call whose feature maps have formulas, with gradients where they are needed."""
    assert call.fused is not None
    tensors, numbers = binding.map_arguments(call.fused)
    return _forward(call, {"query": call.query, "key": call.key, "value": call.value}, numbers, tensors)


def _forward(
    call: KernelizedCall | GatedCall, inputs: Tensors, numbers: Numbers, learned: Tensors | None = None
) -> tuple[Tensor, State | None]:
    learned = learned or {}
    inputs |= learned
    if call.mask is not None:
        inputs["mask"] = call.mask
    kernel = "causal" if call.causal else "bidirectional"
    if call.needs_grad():
        return differentiable(kernel, inputs, numbers), None
    outputs = {"out": output(inputs)}
    if call.causal and not call.query.shape[2]:
        return outputs["out"], call.state
    after: State = {}
    if call.causal:
        before = {name: tensor.contiguous() for name, tensor in (call.state or {}).items() if name in _STATE}
        overwrites = call.return_state and isinstance(call.state, InPlaceState)
        (outputs if overwrites else inputs).update(before)
        if overwrites:
            after = before
        elif call.return_state:
            (batch, groups), size = call.key.shape[:2], call.num_features
            after = {"kv": empty(batch, groups, size, call.value.shape[3]), "k_sum": empty(batch, groups, size)}
            if "key_scales" in inputs or (call.fused is not None and call.fused[1].scaled):
                after["log_scale"] = empty(batch, groups)
            outputs |= {f"next_{name}": tensor for name, tensor in after.items()}
    filled = binding.run(kernel, inputs, outputs, numbers)
    if filled is None or not isinstance(call.state, InPlaceState) or not call.return_state:
        return outputs["out"], after or None
    call.state.update(after)
    if call.query.shape[2] == 1 and call.fused is not None:
        call.state.launch = binding.Launch(kernel, filled, learned)
    return outputs["out"], call.state
