"""Formulas of feature maps that native kernels must not be given: of third parties, or with weights that are away."""

import re

import pytest
import torch

from hf_linear_attn.ops.backends import select_backend
from hf_linear_attn.ops.calls import KernelizedCall
from hf_linear_attn.ops.common import Features
from hf_linear_attn.ops.formulas import FusedMap
from hf_linear_attn.ops.native.backend import NativeBackend
from tests.inputs import qkv

SIX = torch.zeros(4, 6, 6)


@pytest.mark.parametrize(
    ("fused_map", "features", "reason"),
    [
        (FusedMap("softmax-pair", SIX.to("meta")), 12, "on another device"),
        (
            FusedMap("softmax-pair", SIX, SIX[:, 0].to("meta")),
            12,
            "on another device",
        ),
        (FusedMap("softmax-pair", SIX), 6, "the formula of the feature map does not make its 6 features"),
        (FusedMap("elu"), 7, "the formula of the feature map does not make its 7 features"),
        (FusedMap("softmax-pair", SIX[:3]), 12, r"the weights of the feature map have the sizes \[3, 6, 6\]"),
        (FusedMap("relu", SIX[:, :5]), 6, r"the weights of the feature map have the sizes \[4, 5, 6\]"),
        (FusedMap("relu", SIX, SIX[0, :3]), 6, r"the weights of the feature map have the sizes \[3, 6\]"),
    ],
)
def test_formulas_that_do_not_fit_are_refused(fused_map, features, reason):
    """A kernel takes addresses and sizes as they are given: it would read or write beyond a tensor."""
    q, k, v = qkv(5, groups=4)
    functions = [lambda x: Features(x)] * 2
    call = KernelizedCall(q, k, v, *functions, (fused_map, fused_map), features, False)
    assert re.search(reason, NativeBackend().unsupported_reason(call) or "")


@pytest.mark.parametrize("causal", [True, False])
def test_derivatives_of_gradients_are_refused(causal):
    """`torch.autograd.grad` leaves out what does not lead to its inputs: the error must lie on the way to each."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv(5, groups=4))
    functions = [lambda x: Features(x)] * 2
    out, _ = NativeBackend().run(KernelizedCall(q, k, v, *functions, (FusedMap("elu"), FusedMap("elu")), 6, causal))
    scale = torch.ones((), requires_grad=True)
    for loss, sources in ((out.sum(), (q, k, v)), (scale * out.pow(2).sum(), (q, k, v, scale))):
        (gradient,) = torch.autograd.grad(loss, q, create_graph=True, retain_graph=True)
        for source in sources:
            with pytest.raises(NotImplementedError, match=r"first derivatives only\..*use_backend\('torch'\)"):
                torch.autograd.grad(gradient.sum(), source, retain_graph=True)


def test_float16_is_left_to_torch_where_the_compiler_has_none(monkeypatch):
    """GCC has it on x86 from version 12 on; kernels of an older one know two dtypes."""
    functions = [lambda x: Features(x)] * 2
    for dtype, reason in ((torch.float16, "has no float16"), (torch.bfloat16, None)):
        q, k, v = (tensor.to(dtype) for tensor in qkv(5, groups=4))
        call = KernelizedCall(q, k, v, *functions, (FusedMap("elu"), FusedMap("elu")), 6, True)
        assert NativeBackend().unsupported_reason(call) is None
        with monkeypatch.context() as patch:
            patch.setattr("hf_linear_attn.ops.native.backend._has_float16", lambda: False)
            assert reason is None or reason in str(NativeBackend().unsupported_reason(call))
            assert select_backend(call).name == ("native" if reason is None else "torch")
