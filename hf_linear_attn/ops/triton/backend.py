"""The Triton backend: the calls that it supports, after a check of the kernels on this device."""

import functools
import importlib.util

from torch import Tensor

from .. import kernel_inputs
from ..calls import BackendCall, KernelizedCall, WindowedCall
from ..check import checked_reason
from ..common import State
from ..formulas import PARTS
from ..kernel_inputs import unsupported_inputs
from . import MAX_FEATURES, MAX_HEAD_DIM, MAX_PROJECTED_PAIRS, interpreted, padded_features


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


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
        if not installed():
            return "Triton is not installed (pip install triton)"
        if call.query.device.type == "cpu":  # interpreted
            return None
        from . import attention

        return checked_reason(self.name, attention.run, call)

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        from . import attention

        assert isinstance(call, KernelizedCall)
        return attention.run(call)


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
