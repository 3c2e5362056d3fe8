"""What the flash-linear-attention backend hands over and refuses; a stand-in computes in its place (it needs CUDA)."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from hf_linear_attn.ops import backends, fla_backend
from hf_linear_attn.ops.fla_backend import FlaBackend
from tests.ops.test_native import assert_near, build, definition, inputs, make_call, masks


def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True):
    """What the package documents: `[B, L, H, ·]`, sums over j <= i, no division with normalize=False."""
    assert q.is_contiguous()
    assert q.shape[:3] == k.shape[:3] == v.shape[:3]
    assert not normalize
    assert v.shape[-1] % 2 == 0
    weights = torch.einsum("blhm,bshm->bhls", q.double(), k.double()).tril() * scale
    return torch.einsum("bhls,bshe->blhe", weights, v.double()).to(v.dtype), None


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("fla.ops.linear_attn")
    module.chunk_linear_attn = chunk_linear_attn
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "performer-relu"])
def test_what_it_hands_over_is_our_function(name, kind):
    shape = (2, 4, 2, 50)
    call = make_call(build(name, 4, 2, 16, 15), *inputs(shape, 16, 15, torch.bfloat16), True, masks(shape, kind))
    with torch.no_grad():
        out, state = FlaBackend().run(call)
    assert state is None
    assert out.dtype == torch.bfloat16
    seen = torch.ones(50, dtype=torch.bool) if kind != "left" else torch.arange(50) >= 25
    assert_near(out[:, :, seen], definition(call)[:, :, seen], 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.usefixtures("stand_in")
def test_gradients_flow_through_it():
    feature_map = build("hedgehog", 2, 1, 16, 16)
    tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, 1, 30), 16, 16, torch.bfloat16)]
    out, _ = FlaBackend().run(make_call(feature_map, *tensors, True))
    actual = torch.autograd.grad(out.float().sum(), [*tensors, *feature_map.parameters()])
    assert all(tensor.isfinite().all() for tensor in actual)


def test_what_it_refuses(monkeypatch):
    def call(name="elu", dtype=torch.bfloat16, causal=True, **changes):
        return make_call(build(name, 2, 2, 8, 8), *inputs((1, 2, 2, 10), 8, 8, dtype), causal).replace(**changes)

    backend = FlaBackend()
    assert backend.unsupported_reason(call()) == "the tensors are on cpu"
    monkeypatch.setattr(fla_backend, "DEVICE", "cpu")
    monkeypatch.setattr(fla_backend, "installed", lambda: True)
    with torch.no_grad():
        assert backend.unsupported_reason(call()) is None
        assert "causal" in backend.unsupported_reason(call(causal=False))
        for dtype in (torch.float32, torch.float16):
            assert str(dtype) in backend.unsupported_reason(call(dtype=dtype))
        assert "signed" in backend.unsupported_reason(call(signed=True))
        assert "state" in backend.unsupported_reason(call(return_state=True))
        assert "log scale" in backend.unsupported_reason(call("favor+"))
        assert "log scale" in backend.unsupported_reason(call("favor+", fused=None))
        assert backend.unsupported_reason(call(fused=None)) is None
        monkeypatch.setattr(fla_backend, "installed", lambda: False)
        assert "pip install" in backend.unsupported_reason(call())


def test_it_is_used_by_name_only():
    names = backends.list_backends()
    assert names.index("fla") > names.index("torch")
