"""Features that torch computes and native kernels sum: maps without a formula, and sums that forget."""

import pytest
import torch

from hf_linear_attn.ops import backends
from hf_linear_attn.ops.calls import GatedCall, KernelizedCall
from hf_linear_attn.ops.common import Features
from hf_linear_attn.ops.gated import GatedKeys
from hf_linear_attn.ops.native import backend as native_backend
from hf_linear_attn.ops.native.backend import NativeBackend, unavailable_reason
from tests.ops.test_native import SHAPES, assert_near, definition, inputs, masks
from tests.reference import naive
from tests.slow_cases import slow

REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")


def squared(x):
    return Features(x.square() + 0.1)


def scaled(x):
    """exp(x), relative to a log scale that grows by hundreds over a long input."""
    top = x.amax(dim=-1)
    return Features((x - top.unsqueeze(-1)).exp(), top)


def kernelized(tensors, phi, mask=None, state=None, keep=False):
    return KernelizedCall(*tensors, phi, phi, None, 9, True, mask=mask, state=state, return_state=keep)


def gates(x):
    return GatedKeys(x.square() + 0.1, -torch.sigmoid(3 * x))


def gated(tensors, mask=None, state=None):
    return GatedCall(*tensors, squared, gates, 9, per_feature=True, mask=mask, state=state)


def gated_definition(call):
    query, key, value = (x.double() for x in (call.query, call.key, call.value))
    features, log_decay, _ = gates(key)
    write = torch.ones_like(key[..., 0])
    return naive.gated_attention(squared(query).values, features, value, log_decay.exp(), write, call.mask, 0.0)


def assert_same_tokens(call, expected, tolerance=2e-5):
    """What padded queries get does not matter."""
    pair = [NativeBackend().run(call)[0], expected]
    if call.mask is not None:
        pair = [out.transpose(1, 2)[call.mask] for out in pair]
    assert_near(*pair, tolerance)


@pytest.mark.parametrize("kind", ["holes", *slow("none", "left", "right")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("phi", [squared, scaled])
@torch.no_grad()
def test_output_is_the_definitions(phi, shape, kind):
    call = kernelized(inputs(shape), phi, masks(shape, kind))
    assert NativeBackend().unsupported_reason(call) is None
    assert_same_tokens(call, definition(call), 1e-4 if phi is scaled else 2e-5)


@pytest.mark.parametrize("kind", ["holes", *slow("none", "left", "right")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_decayed_output_is_the_definitions(shape, kind):
    call = gated(inputs(shape), masks(shape, kind))
    assert NativeBackend().unsupported_reason(call) is None
    assert_same_tokens(call, gated_definition(call))


@pytest.mark.parametrize("cuts", [(1, 2, 3, 70), *slow((1,), (64,), (100, 101))], ids=str)
@pytest.mark.parametrize("value_dim", [6, 32])
@pytest.mark.parametrize("make", [lambda *a: kernelized(a[0], squared, *a[1:], True), lambda *a: gated(*a)])
@torch.no_grad()
def test_resuming_from_a_state_of_either_backend(monkeypatch, make, value_dim, cuts):
    """Pieces alternate between native and torch: the state is the same tensor to both. Blocks are small here."""
    monkeypatch.setattr(native_backend, "block_length", lambda *_: 32)
    shape = (2, 4, 2, 150)
    tensors, mask = inputs(shape, value_dim=value_dim), masks(shape, "left")
    full, last = NativeBackend().run(make(tensors, mask, None))
    parts, state = [], None
    for index, (start, stop) in enumerate(zip((0, *cuts), (*cuts, 150), strict=True)):
        with backends.use_backend(("native", "torch")[index % 2]):
            pieces = [tensor[:, :, start:stop] for tensor in tensors]
            out, state = backends.attend(make(pieces, mask[:, start:stop], state))
        parts.append(out)
    assert_near(torch.cat(parts, dim=2), full)
    assert state.keys() == last.keys()
    for name in state:
        assert_near(state[name], last[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_inputs_have_features_in_float32(dtype):
    for call in (kernelized(inputs((2, 4, 2, 70), dtype=dtype), squared), gated(inputs((2, 4, 2, 70), dtype=dtype))):
        out, _ = NativeBackend().run(call)
        expected = definition(call) if isinstance(call, KernelizedCall) else gated_definition(call)
        assert out.dtype == dtype
        assert_near(out, expected, 1e-2)


@torch.no_grad()
def test_padding_may_be_nan():
    shape = (2, 4, 2, 70)
    mask = masks(shape, "left")
    clean = inputs(shape)
    dirty = [tensor.masked_fill(~mask[:, None, :, None], float("nan")) for tensor in clean]
    for make in (lambda tensors: kernelized(tensors, squared, mask), lambda tensors: gated(tensors, mask)):
        actual, expected = (NativeBackend().run(make(tensors))[0].transpose(1, 2)[mask] for tensors in (dirty, clean))
        assert torch.equal(actual, expected)


def test_what_the_kernels_leave_to_torch():
    tensors = inputs((1, 2, 2, 5))
    backend = NativeBackend()
    assert "gradients" in backend.unsupported_reason(kernelized(tensors, squared))
    with torch.no_grad():
        assert "no fused form" in backend.unsupported_reason(kernelized(tensors, squared).replace(causal=False))
        assert "no fused form" in backend.unsupported_reason(kernelized(tensors, squared).replace(signed=True))
        assert "decays per head" in backend.unsupported_reason(gated(tensors).replace(per_feature=False))


@torch.no_grad()
def test_a_map_that_gives_other_sizes_than_it_says_is_an_error():
    call = kernelized(inputs((1, 2, 2, 5)), squared).replace(num_features=8)
    with pytest.raises(
        ValueError, match=r"features of queries of the shape \[1, 2, 5, 9\].*\[1, 2, 5, 8\] and float32"
    ):
        NativeBackend().run(call)
