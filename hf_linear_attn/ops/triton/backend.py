"""The Triton backend: the calls that it supports, after a check of the kernels on this device."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .. import kernel_inputs
from ..calls import BackendCall, KernelizedCall, WindowedCall
from ..check import Case, case_of, checked_case, checked_reason
from ..common import State, constant_result, token_major
from ..formulas import PARTS, FusedMap
from ..kernel_inputs import unsupported_inputs
from . import MAX_FEATURES, MAX_HEAD_DIM, MAX_PROJECTED_PAIRS, interpreted, padded_features


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


#: The same; a constant where torch.compile traces a call.
_installed = constant_result(lambda: installed())


class TritonBackend:
    """GPU kernels: one pass over the keys and one over the queries, features never leaving the chip.

    Inputs are float32, bfloat16 or float16; states are float32, products are in the dtype of the inputs. Extra memory
    of the forward pass: the features of maps with weights or a log scale, `B·H·L·m`, and the sums of every span of the
    sequence, `m·(e + 1)` floats each, with two spans for every multiprocessor; of the backward pass, see
    `triton.attention`.
    Causal attention runs over chunks of at most 64 tokens; a single token is one kernel. Before the first use of a
    feature map on a device, a small case is compared with torch: kernels that differ or do not compile are not used.
    """

    name = "triton"

    def unsupported_reason(self, call: BackendCall) -> str | None:
        reason = unsupported_inputs(call, kernel_inputs.GPU, *(["cpu"] if interpreted() else []))
        if reason is not None:
            return reason
        if call.fused is None:
            return "the feature map has no fused form"
        if isinstance(call, WindowedCall):
            return "windows are not fused"
        assert isinstance(call, KernelizedCall)
        if (reason := unsupported_sizes(call)) is not None:
            return reason
        if call.fused[1].scaled and call.needs_grad():
            return "gradients through a log scale of keys are not fused"
        if not _installed():
            return "Triton is not installed (pip install triton)"
        if interpreted():
            return None
        if torch.compiler.is_compiling():
            tensors = [x for fused in call.fused for x in (fused.weight, fused.bias)]
            sizes = tuple(None if x is None else ((*x.shape,), x.dtype) for x in tensors)
            return _checked_constant((*case_of(call),), sizes)  # a tuple with names would arrive without its values
        from . import attention

        return checked_reason(self.name, attention.run, call)

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        assert isinstance(call, KernelizedCall)
        if torch.compiler.is_compiling():
            return _run_operator(call)
        from . import attention

        return attention.run(call)


# --------------------------------------------------------------------------------------------------------- The operator


@constant_result
def _checked_constant(fields: tuple[Any, ...], sizes: tuple[Any, ...]) -> str | None:
    """Return `checked_reason` where torch.compile traces a call: from the fields of its case, and from the shape and
    dtype of weight and bias of both maps, constants of the graph."""
    from . import attention

    case = Case(*fields)
    first, second = case.maps
    tensors = [None if size is None else torch.zeros(size[0], dtype=size[1], device=case.device) for size in sizes]
    fused = FusedMap(first[0], *tensors[:2]), FusedMap(second[0], *tensors[2:])  # type: ignore[arg-type]
    return checked_case(TritonBackend.name, attention.run, case, fused)


def _run_operator(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call inside of a graph of torch.compile, as `hf_linear_attn::triton`."""
    assert call.fused is not None
    state = call.state or {}
    tensors = [call.mask, *(x for fused in call.fused for x in (fused.weight, fused.bias)), *map(state.get, _STATE)]
    numbers = [float(getattr(fused, name)) for fused in call.fused for name in _NUMBERS]
    activations = " ".join(fused.activation for fused in call.fused)
    out, *after = _operator(call.query, call.key, call.value, tensors, activations, numbers, call.causal)
    return out, dict(zip(_STATE, after, strict=False)) if call.return_state else None


#: The entries of the state, and the numbers of a map.
_STATE = ("kv", "k_sum", "log_scale")
_NUMBERS = ("in_scale", "bias_scale", "alpha", "epsilon", "factor")


@torch.library.custom_op("hf_linear_attn::triton", mutates_args=())
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor | None],
    activations: str,
    numbers: list[float],
    causal: bool,
) -> list[Tensor]:
    """Return the output, and if it is causal the state after the last token.

    tensors: The mask, weight and bias of both maps, and the state before, each of them or None.
    """
    from . import attention

    mask, *learned = tensors[:5]
    names = activations.split()
    first, second = (dict(zip(_NUMBERS, part, strict=True)) for part in (numbers[:5], numbers[5:]))
    maps = FusedMap(names[0], learned[0], learned[1], **first), FusedMap(names[1], learned[2], learned[3], **second)
    size = maps[0].num_features(query.shape[3])
    state = {name: tensor for name, tensor in zip(_STATE, tensors[5:], strict=True) if tensor is not None}
    functions = maps[0].features, maps[1].features
    call = KernelizedCall(query, key, value, *functions, maps, size, causal, mask=mask, state=state or None)
    out, after = attention.run(call)
    return [out, *(after or {}).values()]


@_operator.register_fake
def _operator_outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor | None],
    activations: str,
    numbers: list[float],
    causal: bool,
) -> list[Tensor]:
    out = token_major((*query.shape[:3], value.shape[3]), value.dtype, value.device)
    if not causal:
        return [out]
    activation = activations.split()[1]
    fused = FusedMap(activation, tensors[3])
    sizes = *key.shape[:2], fused.num_features(key.shape[3])
    states = [(*sizes, value.shape[3]), sizes, *([sizes[:2]] if fused.scaled else [])]
    return [out, *(torch.empty(size, device=out.device) for size in states)]


def unsupported_sizes(call: KernelizedCall | WindowedCall) -> str | None:
    """Return which size of a call with fused maps does not fit into a block of a kernel, or None."""
    assert call.fused is not None
    features = padded_features(call)
    if features > MAX_FEATURES:
        return f"the feature map has more than {MAX_FEATURES} features"
    pairs = any(PARTS[fused.activation] == 2 and fused.weight is not None for fused in call.fused)
    if pairs and features > MAX_PROJECTED_PAIRS:
        return f"projections to more than {MAX_PROJECTED_PAIRS} features in pairs do not fit"
    if max(call.query.shape[3], call.value.shape[3]) > MAX_HEAD_DIM:
        return f"heads of more than {MAX_HEAD_DIM} numbers do not fit"
    return None
