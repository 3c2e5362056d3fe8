"""The checks that keep kernels inside the memory of their tensors, for every backend that has kernels of its own."""

import torch
from torch import Tensor

from .calls import BackendCall, KernelizedCall, WindowedCall
from .common import State
from .formulas import PARTS, FusedMap
from .int8 import row_size

#: The type of device of the kernels for GPUs.
GPU = "cuda"

#: Dtypes of queries, keys and values that kernels read.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_inputs(call: BackendCall, *device_types: str) -> str | None:
    """Return why kernels for these types of devices cannot read the inputs of a call, or None if they can.

    Every decoding step runs this code, so that it is terse.
    """
    query, key, value, fused = call.query, call.key, call.value, call.fused
    if call.terms and (reason := _unsupported_terms(call)) is not None:
        return reason
    compiling = torch.compiler.is_compiling()
    if compiling and device_types != ("cpu",) and (not isinstance(call, KernelizedCall) or call.needs_grad()):
        return "torch.compile traces torch operations only, but for kernelized attention without gradients"
    if query.device.type not in device_types:
        return f"the tensors are on {query.device.type}"
    if call.signed:
        return "the feature map has no fused form"
    if fused is not None:
        if fused[0].softcap is not None and (device_types != ("cpu",) or call.needs_grad()):
            return "a cap inside of a feature map has no fused gradient, and no fused form on this device"
        reason = _map_mismatch(fused[0], query, call.num_features)
        if reason is None and (fused[1] is not fused[0] or fused[0].weight is not None):
            reason = _map_mismatch(fused[1], key, call.num_features)
        if reason is not None:
            return reason
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"the dtype is {query.dtype}"
    if type(query) is not Tensor or (not compiling and torch._C._functorch.maybe_current_level() is not None):
        return "the inputs are tensor subclasses or functorch wrappers"
    if not _inputs_match(call) or (call.state is not None and not _state_matches(call, call.state)):
        return "the shapes of queries, keys, values, mask and state do not match"
    if call.causal and (call.state is not None or call.return_state) and call.needs_grad():
        return "gradients through a carried state are not fused"
    if not compiling and torch.is_anomaly_enabled():
        return "anomaly detection needs torch operations"
    return None


def _unsupported_terms(call: BackendCall) -> str | None:
    """Return what of a model's terms kernels cannot apply; those for CPUs compute the outputs of sequences."""
    terms = call.terms
    if call.query.device.type != "cpu":
        return "terms of the model's logits are not fused"
    if terms.slope is not None:
        return "sums that decay by ALiBi are not fused"
    if call.needs_grad():
        return "gradients of a model with terms in its logits are not fused"
    has_bias = terms.bias is not None or terms.relative is not None
    if has_bias and call.query.shape[1] != call.key.shape[1]:
        return "a position bias of grouped heads is not fused"
    is_step = call.state is not None and call.query.shape[2] == 1
    return "decoding steps of a model with terms in its logits are not fused" if is_step else None


def _map_mismatch(fused: FusedMap, x: Tensor, num_features: int) -> str | None:
    """Return which tensor of a map does not match inputs `[B, heads, L, d]`, or its number of features."""
    heads, width = x.shape[1], x.shape[3]
    width = width if fused.weight is None else fused.weight.shape[2]
    for tensor, sizes in ((fused.weight, (x.shape[3], width)), (fused.bias, (width,))):
        if tensor is not None and tensor.device != x.device:
            return "the weights of the feature map are on another device"
        if tensor is not None and (tensor.shape[1:] != sizes or tensor.shape[0] not in (1, heads)):
            return f"the weights of the feature map have the sizes {list(tensor.shape)}"
    if PARTS[fused.activation] * width != num_features:
        return f"the formula of the feature map does not make its {num_features} features"
    return None


def _inputs_match(call: BackendCall) -> bool:
    """Return whether the shapes of queries, keys, values and mask match; torch raises the error if they do not."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, size = query.shape
    rows, groups, keys, width = key.shape
    if rows != batch or width != size or value.shape[:3] != key.shape[:3] or not groups or heads % groups:
        return False
    if keys != length and (call.causal or isinstance(call, WindowedCall)):
        return False
    return mask is None or (mask.dtype is torch.bool and mask.shape[1:] == (keys,) and mask.shape[0] in (1, batch))


Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Sizes and dtypes of entries of a state by name."""


def window_entries(call: WindowedCall) -> Entries:
    """Return sizes and dtypes of what the state of a windowed call has beside its sums."""
    batch, groups, _, size = call.key.shape
    stored = call.cache_dtype or call.query.dtype
    key_size = row_size(size, call.cache_dtype)
    value_size = row_size(call.value.shape[3], call.cache_dtype)
    entries: Entries = {"ring_mask": ((batch, call.window), torch.bool), "count": ((batch,), torch.int64)}
    for prefix, tokens in (("ring", call.window), ("sink", call.sinks)):
        if tokens:
            entries[f"{prefix}_key"] = (batch, groups, tokens, key_size), stored
            entries[f"{prefix}_value"] = (batch, groups, tokens, value_size), stored
    return entries


def has_entries(state: State, entries: Entries) -> bool:
    """Return whether a state has these entries, of these sizes and dtypes."""
    if not entries.keys() <= state.keys():
        return False
    return all(state[name].shape == shape and state[name].dtype is dtype for name, (shape, dtype) in entries.items())


def _state_matches(call: BackendCall, state: State) -> bool:
    """Return whether a state has the shapes and dtype of this call, not those of another mechanism or batch size."""
    kv = state.get("kv")
    k_sum = state.get("k_sum")
    log_scale = state.get("log_scale")
    sizes = (call.key.shape[0], call.key.shape[1], call.num_features)
    if kv is None or k_sum is None or kv.shape != (*sizes, call.value.shape[3]) or k_sum.shape != sizes:
        return False
    if not kv.dtype is k_sum.dtype is torch.float32 or ("count" in state and state["count"].shape != sizes[:1]):
        return False
    if call.fused is not None and call.fused[1].scaled is (log_scale is None):
        return False
    return log_scale is None or (log_scale.dtype is torch.float32 and log_scale.shape == sizes[:2])
