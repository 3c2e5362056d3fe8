"""Every mechanism on CUDA tensors without data: nothing stands on another device, and the host reads nothing.

This needs torch for CUDA, and no GPU: `bash .ci/fake_cuda`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import flex_attention as torch_flex

from hf_linear_attn.mechanisms.base import AttentionInputs
from hf_linear_attn.ops import flex
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_direction
from tests.small import mechanism

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA: see .ci/fake_cuda")

HEADS, GROUPS, DIM, LENGTH = 4, 2, 16, 200


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


#: Causal mechanisms whose host reads a number of tokens, once a pass: it decides a size.
READING = ("linformer-causal",)


def inputs(length: int, causal: bool, mask: Tensor | None = None, **more: Any) -> AttentionInputs:
    sizes = (HEADS, GROUPS, GROUPS)
    tensors = (torch.randn(2, heads, length, DIM, device="cuda", dtype=torch.bfloat16) for heads in sizes)
    return AttentionInputs(*tensors, scaling=0.25, causal=causal, mask=mask, **more)


def mask_of(length: int) -> Tensor:
    return torch.ones(2, length, dtype=torch.bool, device="cuda")


def on_cuda(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def built(name: str, causal: bool) -> Any:
    with unset_fake_temporarily():
        module = mechanism(name, causal, HEADS, GROUPS, DIM, DIM).bfloat16()
    for part in module.modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, torch.nn.Parameter(on_cuda(parameter)))
        for key, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(key, on_cuda(buffer))
    return module


def check(name: str, causal: bool) -> None:
    """Run both forward passes, of training and of inference, and a step; a backward pass would need a device."""
    module = built(name, causal)
    for mask in (None, mask_of(LENGTH)):
        out, _ = module(inputs(LENGTH, causal, mask))
        assert out.device.type == "cuda"
    if not causal or ATTENTIONS.get(name).state == "none":
        return
    with torch.no_grad():
        for mask in (None, mask_of(LENGTH)):
            _, state = module(inputs(LENGTH, causal, mask, return_state=True))
            out, state = module(inputs(1, causal, state=state, return_state=True))
            assert {out.device.type, *(tensor.device.type for tensor in state.values())} == {"cuda"}


@every_direction()
def test_every_mechanism(name, causal):
    if causal and name in READING:
        with pytest.raises(DataDependentOutputException):
            check(name, causal)
        return
    check(name, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_windows_by_flex_attention(causal, monkeypatch):
    seen = []

    def run(self, call):
        seen.append(call.query.shape[2])
        return flex.run(call)

    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_compiled", lambda scale, configuration: functools.partial(flex._attend, scale=scale))
    monkeypatch.setattr(flex.FlexBackend, "unsupported_reason", lambda self, call: None)  # it takes no such tensors
    monkeypatch.setattr(flex.FlexBackend, "run", run)
    check("window", causal)
    assert seen == ([LENGTH, LENGTH, LENGTH, 1, LENGTH, 1] if causal else [LENGTH, LENGTH])
