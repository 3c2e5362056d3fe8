"""The Triton backend: the calls that it supports, after a check of the kernels on this device."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ..common import State
from ..fused import AttentionCall, KernelizedCall, WindowedCall
from .limits import DTYPES, MAX_FEATURES, MAX_HEAD_DIM, padded_features

#: Environment variable that, set to 1 before Triton is imported, runs the kernels on the CPU, slowly: for tests.
INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def interpreted() -> bool:
    """Return whether Triton interprets the kernels on the CPU."""
    return os.environ.get(INTERPRETER_VARIABLE, "0") == "1"


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class TritonBackend:
    """GPU kernels: one pass over the keys and one over the queries, features never leaving the chip.

    Inputs are float32, bfloat16 or float16; states and features are float32 (bfloat16 and float16 products use tensor
    cores, with 10 bits of mantissa). Extra memory of the forward pass: the sums of every span of the sequence,
    `m·(e + 1)` floats each, with two spans for every multiprocessor; of the backward pass, see `triton.backward`.
    Causal attention runs over chunks of at most 64 tokens; a single token is one kernel. Before the first use of a
    feature map on a device, a small case is compared with torch: kernels that differ or do not compile are not used.
    """

    name = "triton"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces torch operations only"
        reason = _unsupported_tensors(call)
        if reason is not None:
            return reason
        if isinstance(call, WindowedCall):
            return "windows are not fused"
        assert isinstance(call, KernelizedCall)
        if padded_features(call) > MAX_FEATURES:
            return f"the feature map has more than {MAX_FEATURES} features"
        if max(call.query.shape[3], call.value.shape[3]) > MAX_HEAD_DIM:
            return f"heads of more than {MAX_HEAD_DIM} numbers do not fit"
        if call.needs_grad():
            if call.fused[0].scaled:
                return "gradients through a log scale are not fused"
            if call.causal and (call.state is not None or call.return_state):
                return "gradients through a carried state are not fused"
            if torch.is_anomaly_enabled():
                return "anomaly detection needs torch operations"
        if not installed():
            return "Triton is not installed (pip install triton)"
        from .check import mismatch_reason

        return mismatch_reason(call)

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        from . import backward

        assert isinstance(call, KernelizedCall)
        return backward.run(call)


def _unsupported_tensors(call: AttentionCall) -> str | None:
    query, key, value = call.query, call.key, call.value
    if query.device.type != "cuda" and not (query.device.type == "cpu" and interpreted()):
        return f"the tensors are on {query.device.type}"
    if call.fused is None or getattr(call, "signed", False):
        return "the feature map has no fused form"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"the dtype is {query.dtype}"
    if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return "the inputs are tensor subclasses or functorch wrappers"
    return None
