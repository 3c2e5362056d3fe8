"""The Triton backend: what it serves, and the check that it passes before it serves anything."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from ..common import State
from ..fused import AttentionCall, FusedMap, KernelizedCall, WindowedCall

#: Set to 1 before Triton is imported, it runs the kernels on the CPU, slowly: for tests.
INTERPRETER_VARIABLE = "TRITON_INTERPRET"

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Most features (padded to powers of two) and numbers of a token that one block of a kernel holds.
MOST_FEATURES = 512
MOST_SIZE = 256


def interpreted() -> bool:
    return os.environ.get(INTERPRETER_VARIABLE, "0") == "1"


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class TritonBackend:
    """GPU kernels: one pass over the keys and one over the queries, features never leaving the chip.

    float32, bfloat16 and float16 inputs; sums and features in float32 (bfloat16 and float16 products through the
    tensor cores, with 10 bits of mantissa). Extra memory of the forward pass: the sums of every span of the sequence,
    `m·(e + 1)` floats each, cut so that every processor has two; of the backward pass, see `triton.backward`. Causal
    attention goes over chunks of 64 tokens; a single token is one kernel. Before a feature map is served for the first
    time on a device, a small case is compared with plain torch: what differs, or does not compile, is refused.
    """

    name = "triton"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces torch operations only"
        reason = _refuses_tensors(call)
        if reason is not None:
            return reason
        if isinstance(call, WindowedCall):
            return "windows are not fused"
        assert isinstance(call, KernelizedCall)
        assert call.fused is not None
        if max(_padded(side, call.query.shape[3]) for side in call.fused) > MOST_FEATURES:
            return f"the feature map has more than {MOST_FEATURES} features"
        if max(call.query.shape[3], call.value.shape[3]) > MOST_SIZE:
            return f"heads of more than {MOST_SIZE} numbers do not fit"
        if call.needs_grad():
            if call.fused[0].scaled:
                return "gradients through a log scale are not fused"
            if call.causal and (call.state is not None or call.return_state):
                return "gradients through a carried state are not fused"
            if torch.is_anomaly_enabled():
                return "anomaly detection asks for torch operations"
        return _untrusted(call)

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        from . import backward

        assert isinstance(call, KernelizedCall)
        return backward.run(call)


def _refuses_tensors(call: AttentionCall) -> str | None:
    query, key, value = call.query, call.key, call.value
    if query.device.type != "cuda" and not (query.device.type == "cpu" and interpreted()):
        return f"the tensors are on {query.device.type}"
    if call.fused is None or getattr(call, "signed", False):
        return "the feature map has no fused form"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"the dtype is {query.dtype}"
    if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return "the inputs are no plain tensors"
    return None


def _padded(fused: FusedMap, head_dim: int) -> int:
    parts = fused.num_features(head_dim) // fused.width(head_dim)
    return parts * max(1 << (fused.width(head_dim) - 1).bit_length(), 16)


def _untrusted(call: KernelizedCall) -> str | None:
    if not installed():
        return "Triton is not installed (pip install triton)"
    from .check import differs

    return differs(call)
