"""Windowed attention: the fast forms against the definition in float64, in outputs and in every gradient."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_linear_attn.ops import windowed
from hf_linear_attn.ops.calls import WindowedCall
from tests.cases import every_feature_map
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.ops.test_kernelized import SCALING, full_features
from tests.reference import naive
from tests.slow_cases import slow, slow_rows
from tests.small import feature_map

BOTH = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
LOG_MIX = torch.tensor([0.3, -0.5, 0.0, 0.8, -0.2, 0.1])


def maps(built):
    return (lambda x: built.query(x, SCALING)), (lambda x: built.key(x, SCALING))


def call_of(built, q, k, v, *, window, causal, log_mix=None, mask=None, state=None, sinks=0):
    log_mix = LOG_MIX[: q.shape[1]] if log_mix is None else log_mix
    size = built.num_features
    options = {"window": window, "scaling": SCALING, "log_mix": log_mix, "sinks": sinks}
    return WindowedCall(q, k, v, *maps(built), built.fused(SCALING), size, causal, mask=mask, state=state, **options)


def fast(*inputs, **options):
    return windowed.windowed(call_of(*inputs, **options))


def definition(precise, q, k, v, *, window, causal, log_mix=None, mask=None, sinks=0):
    """With explicit weights; the map and the inputs must be in float64."""
    log_mix = LOG_MIX[: q.shape[1]].double() if log_mix is None else log_mix
    allowed = naive.visible(mask, q.shape[0], q.shape[2], k.shape[2], causal)
    query, key = precise.query(q, SCALING), precise.key(k, SCALING)
    return naive.windowed_attention(
        q,
        k,
        v,
        full_features(query),
        full_features(key),
        allowed,
        window=window,
        causal=causal,
        scaling=SCALING,
        log_mix=log_mix,
        relative=query.log_scale is None,
        sinks=sinks,
    )


def defined(built, *inputs, **options):
    return definition(copy.deepcopy(built).double(), *(x.double() for x in inputs), **options)


@BOTH
@pytest.mark.parametrize(
    ("length", "window", "sinks"),
    [(65, 64, 0), (129, 5, 3), *slow_rows((1, 4, 0), (2, 1, 4), (64, 63, 1), (300, 70, 0), (300, 70, 17))],
)
@every_feature_map(signed=False)
def test_output_equals_the_definition(name, length, window, sinks, causal):
    built, inputs = feature_map(name), qkv(length, value_dim=9)
    out, _ = fast(built, *inputs, window=window, causal=causal, sinks=sinks)
    assert_close(out, defined(built, *inputs, window=window, causal=causal, sinks=sinks))


@BOTH
@every_feature_map(signed=False)
def test_no_tokens_give_no_outputs(name, causal):
    assert fast(feature_map(name), *qkv(0, value_dim=9), window=4, causal=causal)[0].shape == (2, 4, 0, 9)


@BOTH
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("padding", ["left", "right"])
@every_feature_map(signed=False)
def test_padding(name, padding, sinks, causal):
    built, inputs, mask = feature_map(name), qkv(150, batch=3), padding_mask([150, 90, 0], 150, padding)
    out, _ = fast(built, *inputs, window=20, causal=causal, mask=mask, sinks=sinks)
    expected = defined(built, *inputs, window=20, causal=causal, mask=mask, sinks=sinks)
    assert_close(*(x.transpose(1, 2)[mask] for x in (out, expected)))  # what padding gets is nobody's business
    assert not bool(out[2].any())


@BOTH
@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), [(6, 2, 5, 11), *slow_rows((1, 1, 3, 1))])
@pytest.mark.parametrize("sinks", [3, *slow(0)])
@every_feature_map(signed=False)
def test_gradients_equal_those_of_the_definition(name, sinks, heads, groups, dim, value_dim, causal):
    built = feature_map(name, heads, groups, dim)
    inputs = qkv(131, heads=heads, groups=groups, dim=dim, value_dim=value_dim)
    mask = padding_mask([131, 70], 131, "left")

    def gradients(compute, built, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        mix = LOG_MIX[:heads].to(leaves[0].dtype).clone().requires_grad_()
        options = {"window": 7, "causal": causal, "log_mix": mix, "mask": mask, "sinks": sinks}
        out = compute(built, *leaves, **options).transpose(1, 2)[mask]
        return torch.autograd.grad(weighted_sum(out), [*leaves, mix, *built.parameters()])

    actual = gradients(lambda *x, **y: fast(*x, **y)[0], built, inputs)
    expected = gradients(definition, copy.deepcopy(built).double(), [x.double() for x in inputs])
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


@BOTH
@pytest.mark.parametrize("sinks", [0, 1])
@every_feature_map(signed=False)
def test_gradcheck(name, sinks, causal):
    built = feature_map(name, 2, 1, 3).double()
    inputs = [x.double().requires_grad_() for x in qkv(6, batch=1, heads=2, groups=1, dim=3, value_dim=2)]
    mix = LOG_MIX[:2].double().requires_grad_()
    mask = torch.tensor([[False, True, True, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, mix, *_: fast(built, q, k, v, window=2, causal=causal, log_mix=mix, mask=mask, sinks=sinks)[0],
        (*inputs, mix, *built.parameters()),
        fast_mode=True,
    )


@BOTH
@pytest.mark.parametrize("length", [30, *slow(1, 90)])
@every_feature_map(signed=False)
def test_with_everything_inside_the_window_it_is_exact_attention(name, length, causal):
    q, k, v = qkv(length)
    mask = padding_mask([length, length // 2], length, "left")
    out, _ = fast(feature_map(name), q, k, v, window=90, causal=causal, mask=mask)
    allowed = naive.visible(mask, 2, length, length, causal)
    exact = naive.softmax_attention(q.double(), k.double(), v.double(), allowed, SCALING)
    assert_close(*(x.transpose(1, 2)[mask] for x in (out, exact)))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@BOTH
@every_feature_map(signed=False)
def test_poison_in_padding_does_not_spread(name, causal, poison):
    built, (q, k, v), mask = feature_map(name), qkv(70), padding_mask([70, 41], 70, "left")
    clean, _ = fast(built, q, k, v, window=9, causal=causal, mask=mask, sinks=2)
    k[1, :, :29] = poison
    v[1, :, :29] = poison
    assert torch.equal(fast(built, q, k, v, window=9, causal=causal, mask=mask, sinks=2)[0], clean)


@given(
    splits=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.integers(1, 50),
    repeats=st.integers(1, 3),
    padding=st.integers(0, 30),
    sinks=st.integers(0, 5),
)
@every_feature_map(signed=False)
def test_any_split_equals_the_whole(name, splits, window, repeats, padding, sinks):
    built, length = feature_map(name, 2 * repeats, 2), sum(splits)
    inputs = qkv(length, heads=2 * repeats)
    mask = padding_mask([length, max(length - padding, 0)], length, "left")
    full, end = fast(built, *inputs, window=window, causal=True, mask=mask, sinks=sinks)
    split, state = in_pieces(partial(fast, built, window=window, causal=True, sinks=sinks), inputs, mask, splits)
    assert_close(split, full)
    assert {name: tensor.shape for name, tensor in state.items()} == {name: x.shape for name, x in end.items()}


@BOTH
@every_feature_map(signed=False)
def test_dense_weights_are_the_weights_of_the_fast_form(name, causal):
    built, (q, k, v), mask = feature_map(name), qkv(80), padding_mask([80, 50], 80, "right")
    out, _ = fast(built, q, k, v, window=6, causal=causal, mask=mask)
    allowed = naive.visible(mask, 2, 80, 80, causal)
    inside = windowed.inside_window(mask, q, k, 6, causal)
    weights = windowed.dense_windowed_weights(call_of(built, q, k, v, window=6, causal=causal), inside, allowed)
    assert_close(*(x.transpose(1, 2)[mask] for x in (weights @ v.repeat_interleave(2, dim=1), out)))


def test_a_step_skips_the_rows_whose_token_is_padding():
    built, (q, k, v) = feature_map("hedgehog"), qkv(12)
    options = {"window": 4, "causal": True, "sinks": 2}
    with torch.no_grad():
        _, state = fast(built, *(x[:, :, :11] for x in (q, k, v)), **options)
        mask = torch.tensor([[True], [False]])
        call = call_of(built, *(x[:, :, 11:] for x in (q, k, v)), **options, mask=mask, state=state)
        expected, expected_state = windowed.windowed_causal(call)
        out, after = windowed.windowed(call)
    assert_close(out, expected)
    for name, entry in after.items():
        assert_close(entry.float(), expected_state[name].float())
