"""flash-linear-attention (package `flash-linear-attention`, import name `fla`) as an optional backend on CUDA.

The package receives the features and computes the sums: any feature map without a log scale is supported. The backend
stands behind `torch` in the order of `auto`, so that it is used by name only: its speed here was not measured.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .calls import BackendCall, KernelizedCall
from .common import Features, State, divide, mask_tokens
from .kernelized import masked_key_features

#: The columns of the value and one of ones, whose sums are the normaliser, are padded to a multiple of this.
COLUMN_QUANTUM = 16

#: The type of device that its kernels run on.
DEVICE = "cuda"


@functools.cache
def installed() -> bool:
    """Return whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None


class FlaBackend:
    """`o = (Σ φ(q)·φ(k) [v, 1])`, divided by its last column: `chunk_linear_attn` without its own normaliser.

    It supports bfloat16, causal, whole sequences. The normaliser of the package sums keys in the inputs' dtype and adds
    1e-10, which is another function. float32 inputs would pass through products of 10 bits, and float16 sums overflow:
    both are refused.
    Masked keys have zero features. Features are rounded to bfloat16, and so are its states between chunks. Extra
    memory: the features, `B·H·L·m` numbers, and one copy of key and value for every query head of a group.
    """

    name = "fla"

    def unsupported_reason(self, call: BackendCall) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces torch operations only"
        if call.query.device.type != DEVICE:
            return f"the tensors are on {call.query.device.type}"
        if not isinstance(call, KernelizedCall) or not call.causal:
            return "it supports only causal attention without a window or decays"
        if any(tensor.dtype != torch.bfloat16 for tensor in (call.query, call.key, call.value)):
            return f"the dtype is {call.query.dtype}, and it is exact enough for bfloat16 inputs only"
        if call.signed:
            return "the feature map is signed"
        if call.state is not None or call.return_state:
            return "it supports no recurrent state"
        if not call.query.shape[2]:
            return "there are no tokens"
        if _scaled(call):
            return "the feature map has a log scale"
        if not installed():
            return "flash-linear-attention is not installed (pip install flash-linear-attention)"
        return None

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        from fla.ops.linear_attn import chunk_linear_attn

        assert isinstance(call, KernelizedCall)
        query, key, value = arguments(call)
        out, _ = chunk_linear_attn(query, key, value, scale=1.0, output_final_state=False, normalize=False)
        width = call.value.shape[3]
        out = out.transpose(1, 2).float()
        return divide(out[..., :width], out[..., width]).to(call.value.dtype), None


def _scaled(call: KernelizedCall) -> bool:
    """Return whether the features have a log scale: by the formula, else by the features of one token."""
    if call.fused is not None:
        return call.fused[1].scaled
    with torch.no_grad():
        return call.key_features(call.key[:, :, :1].float()).log_scale is not None


def arguments(call: KernelizedCall) -> tuple[Any, Any, Any]:
    """Return φ(q), φ(k) `[B, L, H, m]` and `[v, 1, 0 …]` `[B, L, H, e']`, in the dtype of value, masked keys zero."""
    dtype = call.value.dtype
    repeats = call.query.shape[1] // call.key.shape[1]
    queries: Features = call.query_features(call.query.float())
    keys = masked_key_features(call.key_features, call.key, call.mask, torch.float32)
    width = call.value.shape[3]
    value = functional.pad(mask_tokens(call.value, call.mask), (0, 1), value=1.0)
    value = functional.pad(value, (0, -(width + 1) % COLUMN_QUANTUM))
    tensors = (queries.values, *(x.repeat_interleave(repeats, dim=1) for x in (keys.values, value)))
    query, key, value = (x.to(dtype).transpose(1, 2).contiguous() for x in tensors)
    return query, key, value
