"""Kernelized attention: the fast forms against the definition in float64, in outputs and in every gradient."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_linear_attn.ops import common, kernelized
from hf_linear_attn.ops.calls import KernelizedCall
from tests.cases import every_feature_map
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.reference import naive
from tests.reference.naive_feature_maps import normalise_signed
from tests.slow_cases import slow, slow_rows
from tests.small import feature_map

SCALING = 0.4
LENGTHS = [0, 1, 65, 129, *slow(2, 63, 64, 127, 128, 300)]


def fast(built, q, k, v, *, causal, mask=None, state=None, return_state=True):
    def query_features(x):
        return built.query(x, SCALING)

    def key_features(x):
        return built.key(x, SCALING)

    size, signed = built.num_features, built.signed
    call = KernelizedCall(q, k, v, query_features, key_features, None, size, causal, signed, mask, state, return_state)
    return kernelized.causal(call) if causal else (kernelized.bidirectional(call), None)


def full_features(features):
    values, log_scale = features
    return values if log_scale is None else values * log_scale.exp().unsqueeze(-1)


def definition(built, q, k, v, *, causal, mask=None):
    """In float64, with explicit weights."""
    return definition_of(copy.deepcopy(built).double(), q.double(), k.double(), v.double(), causal=causal, mask=mask)


def gradients(compute, built, inputs):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    built.zero_grad()
    out = compute(*leaves)
    return torch.autograd.grad(weighted_sum(out), [*leaves, *built.parameters()])


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("length", LENGTHS)
@every_feature_map()
def test_output_equals_the_definition(name, length, causal):
    built, inputs = feature_map(name), qkv(length, value_dim=9)
    out, _ = fast(built, *inputs, causal=causal)
    assert_close(out, definition(built, *inputs, causal=causal))


@pytest.mark.parametrize("length", [5, 129, *slow(1, 128, 300)])
@every_feature_map()
def test_a_state_that_nobody_wants_changes_nothing(name, length):
    built, inputs = feature_map(name), qkv(length)
    mask = padding_mask([length, length // 2], length, "left")
    out, state = fast(built, *inputs, causal=True, mask=mask, return_state=False)
    assert state is None
    assert_close(out, definition(built, *inputs, causal=True, mask=mask))


@pytest.mark.parametrize("length", [6, 40])
@every_feature_map()
def test_gradients_of_short_inputs_equal_those_of_the_definition(name, length):
    """Short inputs have explicit weights: keys fewer than features, in both directions."""
    built, inputs = feature_map(name, 6, 2, 9), qkv(length, heads=6, groups=2, dim=9, value_dim=11)
    mask, precise = padding_mask([length, 4], length, "left"), copy.deepcopy(built).double()
    for causal in (False, True):
        actual = gradients(lambda *x: fast(built, *x, causal=causal, mask=mask, return_state=False)[0], built, inputs)  # noqa: B023
        expected = gradients(
            lambda *x: definition_of(precise, *x, causal=causal, mask=mask),  # noqa: B023
            precise,
            [x.double() for x in inputs],
        )
        for computed, reference in zip(actual, expected, strict=True):
            assert_close(computed, reference, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim"), [(6, 2, 5, 11), *slow_rows((1, 1, 3, 1), (3, 1, 7, 3))]
)
@every_feature_map()
def test_gradients_equal_those_of_the_definition(name, heads, groups, dim, value_dim, causal):
    built = feature_map(name, heads, groups, dim)
    inputs = qkv(131, heads=heads, groups=groups, dim=dim, value_dim=value_dim)
    mask = padding_mask([131, 70], 131, "left")
    actual = gradients(lambda *x: fast(built, *x, causal=causal, mask=mask)[0], built, inputs)
    precise = copy.deepcopy(built).double()
    expected = gradients(
        lambda *x: definition_of(precise, *x, causal=causal, mask=mask), precise, [x.double() for x in inputs]
    )
    assert len(actual) == 3 + len(list(built.parameters()))
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


def definition_of(precise, q, k, v, *, causal, mask):
    """As `definition`, for a map that is in float64 already and whose own gradients are wanted."""
    allowed = naive.visible(mask, q.shape[0], q.shape[2], k.shape[2], causal)
    query, key = precise.query(q, SCALING), precise.key(k, SCALING)
    if not precise.signed:
        return naive.kernelized_attention(full_features(query), full_features(key), v, allowed)
    weights = query.values @ naive.repeat_heads(key.values, q.shape[1]).transpose(-1, -2)
    if key.log_scale is not None and k.shape[2]:
        scale = naive.repeat_heads(key.log_scale.unsqueeze(-1), q.shape[1]).transpose(-1, -2)
        top = scale.masked_fill(~allowed, float("-inf")).amax(dim=-1, keepdim=True)
        weights = weights * torch.exp((scale - torch.where(top.isinf(), 0.0, top)).masked_fill(~allowed, 0.0))
    return normalise_signed(weights.masked_fill(~allowed, 0.0), v)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_gradcheck(name, causal):
    built = feature_map(name, 2, 1, 3).double()
    inputs = [x.double().requires_grad_() for x in qkv(5, batch=1, heads=2, groups=1, dim=3, value_dim=2)]
    parameters = list(built.parameters())
    mask = torch.tensor([[False, True, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, *_: fast(built, q, k, v, causal=causal, mask=mask)[0], (*inputs, *parameters), fast_mode=True
    )


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("length", [33, *slow(15, 16, 17, 130)])
@every_feature_map()
def test_blocks_do_not_change_the_result(name, length, causal, small_blocks):
    built, inputs = feature_map(name), qkv(length)
    mask = padding_mask([length, length // 2], length, "right")
    out, _ = fast(built, *inputs, causal=causal, mask=mask)
    assert common.block_length(2, 4, 8, length) == 16
    assert_close(out, definition(built, *inputs, causal=causal, mask=mask))


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_non_contiguous_inputs(name, causal):
    built = feature_map(name)
    q, k, v = qkv(37)
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    strided = [torch.cat([x, x], dim=-1)[..., ::2].repeat(1, 1, 2, 1)[:, :, ::2] for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in scattered)
    assert_close(fast(built, *scattered, causal=causal)[0], fast(built, q, k, v, causal=causal)[0])
    assert_close(
        fast(built, *strided, causal=causal)[0],
        fast(built, *(x.contiguous() for x in strided), causal=causal)[0],
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_poison_in_padding_does_not_spread(name, causal, poison):
    built, (q, k, v) = feature_map(name), qkv(70)
    mask = padding_mask([70, 41], 70, "left")
    # With a gradient, as below: without one a CPU may round exponentials differently.
    clean, _ = fast(built, q, k.clone().requires_grad_(), v, causal=causal, mask=mask)
    k[1, :, :29] = poison
    v[1, :, :29] = poison
    k.requires_grad_()
    out, state = fast(built, q, k, v, causal=causal, mask=mask)
    assert torch.equal(out, clean)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (state or {}).values())
    out.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in built.parameters())
    assert bool(torch.isfinite(k.grad).all())


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_a_query_that_sees_no_key_gets_zeros(name, causal):
    built, inputs = feature_map(name), qkv(20)
    mask = padding_mask([20, 0], 20, "left")
    out, _ = fast(built, *inputs, causal=causal, mask=mask)
    assert not bool(out[1].any())
    left = fast(built, *inputs, causal=True, mask=padding_mask([20, 8], 20, "left"))[0]
    assert not bool(left[1, :, :12].any())


@given(
    splits=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    groups=st.sampled_from([1, 2]),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@every_feature_map()
def test_any_split_equals_the_whole(name, splits, groups, repeats, seed):
    built = feature_map(name, groups * repeats, groups)
    length = sum(splits)
    inputs = qkv(length, heads=groups * repeats, groups=groups, seed=seed)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < 0.8
    full, end = fast(built, *inputs, causal=True, mask=mask)
    split, state = in_pieces(partial(fast, built, causal=True), inputs, mask, splits)
    assert_close(split, full)
    for key, tensor in end.items():
        finite = tensor.clamp(min=-1e30)
        assert_close(state[key].clamp(min=-1e30), finite)


@given(seed=st.integers(0, 999), length=st.integers(1, 40), causal=st.booleans())
@every_feature_map()
def test_a_masked_token_might_as_well_not_be_there(name, seed, length, causal):
    built, inputs = feature_map(name), qkv(length, batch=1, seed=seed)
    mask = torch.rand(1, length, generator=torch.Generator().manual_seed(seed)) < 0.6
    expected_state = [x[:, :, mask[0]] for x in inputs]
    out, _ = fast(built, *inputs, causal=causal, mask=mask)
    assert_close(out[:, :, mask[0]], fast(built, *expected_state, causal=causal)[0])


@every_feature_map()
def test_dense_weights_are_the_weights_of_the_fast_form(name):
    built, (q, k, v) = feature_map(name), qkv(33)
    mask = padding_mask([33, 20], 33, "left")
    allowed = naive.visible(mask, 2, 33, 33, True)
    features = built.query(q, SCALING), built.key(k, SCALING)
    weights = kernelized.dense_weights(*features, allowed, signed=built.signed)
    out, _ = fast(built, q, k, v, causal=True, mask=mask)
    assert_close(weights @ v.repeat_interleave(2, dim=1), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_half_inputs_lose_only_their_own_rounding(name, causal, dtype):
    built, inputs = feature_map(name), [x.to(dtype) for x in qkv(150)]
    out, _ = fast(built, *inputs, causal=causal)
    assert out.dtype == dtype
    assert_close(out, definition(built, *inputs, causal=causal), dtype)
