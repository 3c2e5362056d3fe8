"""The native kernels against the float64 definitions: outputs, every gradient, states, masks, dtypes and threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.calls import KernelizedCall
from hf_linear_attn.ops.native.backend import NativeBackend, unavailable_reason
from hf_linear_attn.registry import FEATURE_MAPS, build_options
from tests.reference import naive
from tests.slow_cases import slow, slow_rows

REASON = unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")

MAPS = {
    "elu": ("elu", {}),
    "elu-scaled": ("elu", {"alpha": 0.5, "split_scaling": True}),
    "hedgehog": ("hedgehog", {}),
    "hedgehog-odd": ("hedgehog", {"feature_dim": 7}),
    "hedgehog-joint": ("hedgehog", {"activation": "joint"}),
    "hedgehog-exp": ("hedgehog", {"activation": "exp", "feature_dim": 5}),
    "t2r": ("t2r", {"num_features": 10}),
    "performer-relu": ("performer-relu", {"num_features": 12}),
    "favor+": ("favor+", {"num_features": 20}),
    "favor+-hyperbolic": ("favor+", {"num_features": 20, "hyperbolic": True}),
    "vq": ("vq", {"num_features": 11}),
}
SCALED = {"hedgehog-exp", "favor+", "favor+-hyperbolic", "vq"}
SHAPES = [
    (2, 4, 2, 17),
    *slow((1, 1, 1, 1), (2, 3, 3, 5), (1, 4, 2, 63), (2, 2, 1, 64)),
    (1, 2, 2, 65),
    *slow((1, 4, 1, 200), (1, 1, 1, 2100)),
]
#: Maps of every kind (projected or not, with two parts, with a log scale); the others run in the slow suite.
QUICK_MAPS = ["elu", "hedgehog", "favor+", *slow(*(name for name in MAPS if name not in ("elu", "hedgehog", "favor+")))]
BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def build(name: str, heads: int, groups: int, head_dim: int, value_dim: int):
    kind, options = MAPS[name]
    entry = FEATURE_MAPS.get(kind)
    shape = AttentionShape(heads, groups, head_dim, value_dim)
    feature_map = entry.factory(shape, build_options(entry, options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return feature_map


def inputs(shape, head_dim=9, value_dim=6, dtype=torch.float32, scale=1.0, seed=0):
    batch, heads, groups, length = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(count, width):
        made = torch.randn(batch, length, count, width, generator=generator) * scale
        return made.to(dtype).transpose(1, 2)

    return draw(heads, head_dim), draw(groups, head_dim), draw(groups, value_dim)


def make_call(feature_map, query, key, value, causal, mask=None, state=None, *, scaling=0.4, keep=False):
    maps = feature_map.functions(scaling)
    return KernelizedCall(
        query,
        key,
        value,
        *maps,
        feature_map.num_features,
        causal,
        mask=mask,
        state=state,
        return_state=keep,
    )


def definition(call: KernelizedCall) -> torch.Tensor:
    """The output in float64 from explicit weights; the features' scales are put back first."""
    query, key = (x.double() for x in (call.query, call.key))
    query_features, key_features = call.query_features(query), call.key_features(key)
    allowed = naive.visible(call.mask, query.shape[0], query.shape[2], key.shape[2], call.causal)
    keys = key_features.values
    if key_features.log_scale is not None:
        keys = keys * key_features.log_scale.exp().unsqueeze(-1)
    return naive.kernelized_attention(query_features.values, keys, call.value.double(), allowed)


def assert_near(actual, expected, tolerance=2e-5):
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12)
    assert error < tolerance, f"relative error {error:.1e}"


def masks(shape, kind):
    batch, _, _, length = shape
    mask = torch.ones(batch, length, dtype=torch.bool)
    if kind == "left":
        mask[0, : length // 2] = False
    if kind == "right":
        mask[0, length - length // 3 :] = False
    if kind == "holes":
        mask[:, 1::3] = False
    return None if kind == "none" else mask


@BOTH
@pytest.mark.parametrize("kind", ["holes", *slow("none", "left", "right")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_output_is_the_definitions(name, shape, kind, causal):
    feature_map = build(name, shape[1], shape[2], 9, 6)
    call = make_call(feature_map, *inputs(shape), causal, masks(shape, kind))
    with torch.no_grad():
        out, _ = NativeBackend().run(call)
        expected = definition(call)
    assert_near(out, expected, 1e-4 if name in SCALED else 2e-5)


@BOTH
def test_keys_far_from_most_codes_have_the_weights_of_the_definition(causal):
    """Features below 1e-20 are zero; those of other codes are not changed by it."""
    feature_map = build("vq", 4, 2, 9, 6)
    feature_map.key_weight.data *= 30
    query, key, value = inputs((2, 4, 2, 80))
    features = feature_map.key(key, 0.4).values
    exact = (key.double() @ feature_map.key_weight.double() + feature_map.key_bias.double().unsqueeze(-2)).softmax(-1)
    assert ((features == 0) | (features >= 1e-20)).all()
    assert (features == 0).any()
    assert torch.allclose(features.double(), exact, rtol=1e-4, atol=2e-20)
    call = make_call(feature_map, query, key, value, causal)
    with torch.no_grad():
        assert_near(NativeBackend().run(call)[0], definition(call), 1e-4)
        key[0, 0, 50] = torch.nan
        out = NativeBackend().run(make_call(feature_map, query, key, value, causal))[0]
    assert out[0, :2, 50:].isnan().all()
    assert bool(out[1].isfinite().all())


@BOTH
@pytest.mark.parametrize("kind", ["left", *slow("none", "holes")])
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_every_gradient_is_the_definitions(name, shape, kind, causal):
    feature_map = build(name, shape[1], shape[2], 9, 6)
    tensors = [tensor.detach().requires_grad_() for tensor in inputs(shape)]
    call = make_call(feature_map, *tensors, causal, masks(shape, kind))
    assert NativeBackend().unsupported_reason(call) is None
    weight = torch.randn(shape[0], shape[1], shape[3], 6, generator=torch.Generator().manual_seed(1))
    leaves = [*tensors, *feature_map.parameters()]
    actual = torch.autograd.grad((NativeBackend().run(call)[0] * weight).sum(), leaves)
    exact = feature_map.double()
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(
        (definition(make_call(exact, *doubles, causal, call.mask)) * weight.double()).sum(),
        [*doubles, *exact.parameters()],
    )
    for ours, theirs in zip(actual, expected, strict=True):
        if theirs.norm() < 1e-6:  # one key alone: its features cancel, and only rounding is left
            assert ours.norm() < 1e-4
        else:
            assert_near(ours, theirs, 1e-3 if name in SCALED else 2e-4)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 70), *slow((1,), (64,), (100, 101))], ids=str)
@pytest.mark.parametrize("name", QUICK_MAPS)
def test_resuming_from_a_state(name, cuts):
    shape = (2, 4, 2, 150)
    feature_map = build(name, 4, 2, 9, 6)
    query, key, value = inputs(shape)
    mask = masks(shape, "left")
    with torch.no_grad():
        full, last = NativeBackend().run(make_call(feature_map, query, key, value, True, mask, keep=True))
        parts, state = [], None
        for start, stop in zip((0, *cuts), (*cuts, 150), strict=True):
            piece = slice(start, stop)
            call = make_call(
                feature_map,
                query[:, :, piece],
                key[:, :, piece],
                value[:, :, piece],
                True,
                mask[:, piece],
                state,
                keep=True,
            )
            out, state = NativeBackend().run(call)
            parts.append(out)
    assert_near(torch.cat(parts, dim=2), full, 1e-4 if name in SCALED else 1e-5)
    assert state.keys() == last.keys()
    for entry in state:
        assert_near(state[entry], last[entry], 1e-4 if name in SCALED else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("value_dim", [16, *slow(48, 80, 6)])
@pytest.mark.parametrize("name", QUICK_MAPS)
def test_token_by_token_is_the_whole(name, value_dim, heads, groups, dtype):
    """One token after a state has a kernel of its own where values are whole vectors; some tokens are masked."""
    shape = (2, heads, groups, 9)
    feature_map = build(name, heads, groups, 9, value_dim)
    query, key, value = inputs(shape, 9, value_dim, dtype)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 5] = False
    with torch.no_grad():
        full, last = NativeBackend().run(make_call(feature_map, query, key, value, True, mask, keep=True))
        state, parts = None, []
        for token in range(9):
            tensor = None if state is None else {name: tensor.clone() for name, tensor in state.items()}
            cut = slice(token, token + 1)
            tensors = (tensor[:, :, cut] for tensor in (query, key, value))
            before = state
            out, state = NativeBackend().run(make_call(feature_map, *tensors, True, mask[:, cut], before, keep=True))
            parts.append(out)
            if tensor is not None:  # the state that was given is the caller's
                assert all(torch.equal(before[entry], tensor[entry]) for entry in tensor)
    assert_near(torch.cat(parts, dim=2), full, 1e-4 if dtype == torch.float32 else 1e-2)
    for entry in last:
        finite = last[entry].isfinite()
        assert torch.equal(finite, state[entry].isfinite())
        # In bfloat16 the kernel for whole sequences may round features before it sums them.
        assert_near(state[entry][finite], last[entry][finite], 1e-4 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+"])
def test_states_pass_between_backends(name):
    feature_map = build(name, 4, 2, 9, 6)
    query, key, value = inputs((1, 4, 2, 100))
    torch_backend = backends.TorchBackend()
    with torch.no_grad():
        first = make_call(feature_map, query[:, :, :60], key[:, :, :60], value[:, :, :60], True, keep=True)
        full, _ = torch_backend.run(make_call(feature_map, query, key, value, True))
        for begin, resume in ((torch_backend, NativeBackend()), (NativeBackend(), torch_backend)):
            state = begin.run(first)[1]
            rest = make_call(feature_map, query[:, :, 60:], key[:, :, 60:], value[:, :, 60:], True, state=state)
            assert_near(resume.run(rest)[0], full[:, :, 60:], 1e-4)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["hedgehog", *slow("elu", "favor+")])
def test_half_precision_rounds_inputs_and_outputs_only(name, dtype, causal):
    """Sums are float32: at 2,000 tokens the error is that of rounding the result once."""
    feature_map = build(name, 2, 2, 16, 16)
    query, key, value = inputs((1, 2, 2, 2000), 16, 16, dtype)
    call = make_call(feature_map, query, key, value, causal)
    with torch.no_grad():
        out, _ = NativeBackend().run(call)
    assert out.dtype == dtype
    assert_near(out, definition(call), 2 * torch.finfo(dtype).eps)


@BOTH
@pytest.mark.parametrize("length", [65, *slow(7, 8, 63, 150)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 40), *slow_rows((8, 8), (64, 64), (80, 48), (300, 272))])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "hedgehog-odd", "favor+"])
def test_bfloat16_of_any_size(name, head_dim, value_dim, length, causal):
    """Where the processor multiplies tiles of bfloat16, features and sums are rounded to it: sizes of all kinds."""
    feature_map = build(name, 2, 1, head_dim, value_dim)
    drawn = inputs((1, 2, 1, length), head_dim, value_dim, torch.bfloat16, scale=0.3)
    tensors = [tensor.requires_grad_() for tensor in drawn]
    scaling = head_dim**-0.5
    out, _ = NativeBackend().run(make_call(feature_map, *tensors, causal, scaling=scaling))
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    actual = torch.autograd.grad(out, tensors, direction.to(out.dtype))
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = definition(make_call(feature_map.double(), *doubles, causal, scaling=scaling))
    assert_near(out, expected, 1e-2)
    for computed, exact in zip(actual, torch.autograd.grad(expected, doubles, direction), strict=True):
        assert_near(computed, exact, 4e-2)


@BOTH
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_half_precision_gradients(name, causal):
    feature_map = build(name, 2, 1, 16, 16)
    tensors = [tensor.requires_grad_() for tensor in inputs((2, 2, 1, 90), 16, 16, torch.bfloat16)]
    actual = torch.autograd.grad(
        NativeBackend().run(make_call(feature_map, *tensors, causal))[0].float().sum(), tensors
    )
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(definition(make_call(feature_map.double(), *doubles, causal)).sum(), doubles)
    assert [tensor.dtype for tensor in actual] == [torch.bfloat16] * 3
    assert_near(actual[2], expected[2], 2e-2)  # those of queries and keys are differences that nearly cancel


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", QUICK_MAPS)
def test_the_same_bits_for_any_threads_and_any_batch(name, dtype, causal):
    feature_map = build(name, 4, 2, 16, 16)
    query, key, value = inputs((3, 4, 2, 2500), 16, 16, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append(NativeBackend().run(make_call(feature_map, query, key, value, causal))[0])
    finally:
        torch.set_num_threads(before)
    with torch.no_grad():
        single = NativeBackend().run(make_call(feature_map, query[1:2], key[1:2], value[1:2], causal))[0]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(single, results[0][1:2])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", QUICK_MAPS)
def test_nan_stays_where_it_is_and_out_of_padding(name, dtype, causal):
    feature_map = build(name, 2, 2, 9, 6)
    shape = (1, 2, 2, 80)
    query, key, value = inputs(shape, dtype=dtype)
    mask = masks(shape, "right")
    call = make_call(feature_map, query, key, value, causal, mask)
    with torch.no_grad():
        clean, _ = NativeBackend().run(call)
        for tensor in (query, key, value):
            tensor[:, :, ~mask[0]] = float("nan")
        dirty, _ = NativeBackend().run(call)
        assert torch.equal(clean[:, :, mask[0]], dirty[:, :, mask[0]])
        query[0, 1, 7] = float("nan")
        marked, _ = NativeBackend().run(call)
    assert marked[0, 1, 7].isnan().all()
    assert not marked[0, 1, 8:20].isnan().any()


@pytest.mark.parametrize("name", sorted(SCALED))
def test_keys_of_very_different_scale(name):
    """A later key e^100 times as large leaves earlier rows alone, and rules the later ones."""
    feature_map = build(name, 1, 1, 9, 6)
    query, key, value = inputs((1, 1, 1, 150))
    key[0, 0, 40] *= 12
    key[0, 0, 99] *= 25
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    call = make_call(feature_map, *tensors, True)
    out, _ = NativeBackend().run(call)
    assert_near(out, definition(call), 2e-4)
    actual = torch.autograd.grad(out.square().sum(), tensors)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(definition(make_call(feature_map.double(), *doubles, True)).square().sum(), doubles)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, 2e-3)


@BOTH
def test_strides_and_broadcasts(causal):
    feature_map = build("elu", 4, 4, 9, 9)
    query, key, value = inputs((2, 4, 4, 33), 9, 9)
    with torch.no_grad():
        expected, _ = NativeBackend().run(make_call(feature_map, query, key, value, causal))
        for change in (
            lambda t: t.contiguous(),
            lambda t: torch.stack([t, t], dim=-1)[..., 0],
            lambda t: torch.cat([t, t], dim=2)[:, :, :33],
        ):
            actual, _ = NativeBackend().run(make_call(feature_map, change(query), change(key), change(value), causal))
            assert torch.equal(actual, expected)
        one = [tensor[:1].expand(2, -1, -1, -1) for tensor in (query, key, value)]
        actual, _ = NativeBackend().run(make_call(feature_map, *one, causal))
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[0])


@BOTH
def test_nothing_to_attend_to(causal):
    feature_map = build("elu", 2, 2, 9, 6)
    empty = inputs((1, 2, 2, 0))
    with torch.no_grad():
        assert NativeBackend().run(make_call(feature_map, *empty, causal))[0].shape == (1, 2, 0, 6)
        shape = (1, 2, 2, 70)
        out, _ = NativeBackend().run(
            make_call(feature_map, *inputs(shape), causal, torch.zeros(1, 70, dtype=torch.bool))
        )
    assert torch.equal(out, torch.zeros_like(out))


def test_formulas_and_functions_are_two_forms_of_one_map():
    """Every registered map that has a fused form, with its defaults: a new map is tested by being registered."""
    actual = 0
    for _, entry in FEATURE_MAPS:
        shape = AttentionShape(2, 2, 8, 8, max_length=64)
        feature_map = entry.factory(shape, entry.options())
        if feature_map.fused(0.35) is None:
            continue
        actual += 1
        call = make_call(feature_map, *inputs((1, 2, 2, 40), 8, 8), True, scaling=0.35)
        with torch.no_grad():
            assert_near(NativeBackend().run(call)[0], backends.TorchBackend().run(call)[0], 1e-4)
    assert actual >= 6


@pytest.mark.slow
def test_small_stacks():
    """The room for blocks is not on the threads' stacks, whose size is the user's."""
    code = """
import torch
import hf_linear_attn as hla
from transformers import BertConfig, BertModel
torch.set_num_threads(3)
for name in ("hedgehog", "window"):
    config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = hla.patch_model(BertModel(config), name).eval().to(torch.bfloat16)
    with torch.no_grad():
        print(model(torch.ones(2, 300, dtype=torch.long)).last_hidden_state.isfinite().all().item())
"""
    environment = {**os.environ, "OMP_STACKSIZE": "128k", "HF_LINEAR_ATTN_BACKEND": "native"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_what_it_refuses():
    feature_map = build("elu", 2, 2, 9, 6)
    call = make_call(feature_map, *inputs((1, 2, 2, 10)), False)
    refuses = NativeBackend().unsupported_reason
    assert refuses(call) is None
    assert "float64" in refuses(make_call(feature_map, *inputs((1, 2, 2, 10), dtype=torch.float64), False))
    assert "fused form" in refuses(call.replace(fused=None))
    assert "fused form" in refuses(call.replace(signed=True))
    learning = make_call(feature_map, *(tensor.requires_grad_() for tensor in inputs((1, 2, 2, 10))), True)
    assert refuses(learning) is None
    assert "carried state" in refuses(learning.replace(return_state=True))
