"""The native hybrid kernels against the float64 definition: outputs, every gradient, states, masks and precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS
from tests.ops.test_native import BOTH, REASON, assert_near, inputs, masks
from tests.slow_cases import slow, slow_rows

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"the native kernels cannot run here: {REASON}")

#: Batch, heads, groups, length; window; feature map. (Sinks: as many as the option's default.)
CASES = [
    ((1, 1, 1, 5), 2, "hedgehog"),
    ((2, 4, 2, 150), 16, "hedgehog"),
    ((1, 2, 1, 130), 64, "hedgehog"),
    ((1, 2, 2, 300), 7, "elu"),
    ((2, 2, 2, 70), 100, "hedgehog"),
    ((1, 2, 2, 65), 1, "t2r"),
    ((1, 2, 2, 64), 64, "performer-relu"),
    ((1, 2, 1, 450), 64, "elu"),  # many blocks of 64 rows: with a window on both sides they share blocks of keys
    ((2, 1, 1, 300), 32, "elu"),
    ((1, 2, 2, 333), 96, "hedgehog"),
    ((1, 1, 1, 500), 160, "elu"),
    ((2, 4, 2, 150), 16, "vq"),
    ((1, 2, 1, 450), 64, "vq"),
]
CASE = pytest.mark.parametrize(
    ("shape", "window", "feature_map"),
    [CASES[1], CASES[7], CASES[11], *slow_rows(CASES[0], *CASES[2:7], *CASES[8:11], *CASES[12:])],
    ids=str,
)


def build(shape, window, feature_map, head_dim=9, value_dim=6, causal=True, saturation=None, sinks="auto"):
    entry = ATTENTIONS.get("window")
    options = entry.options(
        window_size=window, mix_init=-0.3, feature_map=feature_map, saturation=saturation, sink_tokens=sinks
    )
    mechanism = entry.factory(AttentionShape(shape[1], shape[2], head_dim, value_dim, causal=causal), options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return mechanism


def attend(backend, mechanism, tensors, causal, mask=None, **more):
    with hla.use_backend(backend):
        return mechanism(AttentionInputs(*tensors, scaling=0.4, causal=causal, mask=mask, **more))


def definition(mechanism, tensors, causal, mask):
    """The explicit weights in float64, times the values."""
    query, key, value = tensors
    weights = mechanism.attention_weights(AttentionInputs(query, key, value, scaling=0.4, causal=causal, mask=mask))
    return weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)


@BOTH
@pytest.mark.parametrize(("saturation", "sinks"), [(None, "auto"), (20, 0), *slow_rows((20, 17))])
@pytest.mark.parametrize("kind", ["left", *slow("none", "right", "holes")])
@CASE
def test_output_and_gradients_are_the_definitions(shape, window, feature_map, kind, saturation, sinks, causal):
    mechanism = build(shape, window, feature_map, causal=causal, saturation=saturation, sinks=sinks)
    mask = masks(shape, kind)
    weight = torch.randn(shape[0], shape[1], shape[3], 6, generator=torch.Generator().manual_seed(1))
    if mask is not None:  # what padding gets is nobody's business
        weight = weight * mask[:, None, :, None]
    tensors = [tensor.requires_grad_() for tensor in inputs(shape)]
    out, _ = attend("native", mechanism, tensors, causal, mask)
    actual = torch.autograd.grad((out * weight).sum(), [*tensors, *mechanism.parameters()])
    exact = mechanism.double()
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected_out = definition(exact, doubles, causal, mask)
    expected = torch.autograd.grad(
        (expected_out * weight.double()).sum(), [*doubles, *exact.parameters()], allow_unused=True
    )
    real = torch.ones(shape[0], shape[3], dtype=torch.bool) if mask is None else mask
    assert_near(out.transpose(1, 2)[real], expected_out.transpose(1, 2)[real])
    for ours, theirs in zip(actual, expected, strict=True):
        if theirs is None or theirs.norm() < 1e-2:  # terms of order 1 that cancel
            assert (ours - (0.0 if theirs is None else theirs)).norm() < 1e-5
        else:
            assert_near(ours, theirs, 1e-4)


@BOTH
@pytest.mark.parametrize("feature_map", ["hedgehog", "vq"])
@pytest.mark.parametrize("log_mix", [-86.0, -89.0, -100.0, -103.5, -110.0, -1e4])
def test_weights_of_nearly_nothing_have_gradients_of_nothing(log_mix, feature_map, causal):
    """Below exp(-87.3) mixing weights have no inverse in float32."""
    shape = (1, 2, 1, 70)
    mechanism = build(shape, 9, feature_map, causal=causal)
    mechanism.log_mix.data.fill_(log_mix)
    tensors = [tensor.requires_grad_() for tensor in inputs(shape)]
    out, _ = attend("native", mechanism, tensors, causal)
    actual = torch.autograd.grad(out.square().sum(), [*tensors, *mechanism.parameters()])
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(definition(mechanism.double(), doubles, causal, None).square().sum(), doubles)
    for ours, theirs in zip(actual, expected, strict=False):
        assert_near(ours, theirs, 1e-4)
    assert all(gradient.abs().max() < 1e-5 for gradient in actual[3:])


@pytest.mark.parametrize("sinks", [1, 20])
@pytest.mark.parametrize("tokens", [(67, 128), (129, 3), (0, 200)], ids=str)
def test_few_far_keys_and_rows_with_more_sinks_than_tokens(tokens, sinks):
    """Only the first and last tokens of short rows see far keys; padding behind the last token has no output."""
    length = max(tokens)
    mechanism = build((2, 2, 1, length), 64, "hedgehog", causal=False, sinks=sinks)
    mask = torch.arange(length) < torch.tensor(tokens).unsqueeze(1)
    tensors = [tensor.requires_grad_() for tensor in inputs((2, 2, 1, length))]
    out, _ = attend("native", mechanism, tensors, False, mask)
    actual = torch.autograd.grad(out.square().sum(), tensors)
    assert not out.transpose(1, 2)[~mask].any()
    for row, count in enumerate(tokens):
        assert not any(gradient[row, :, count:].any() for gradient in actual)
        if not count:
            continue
        row_tensors = [tensor[row : row + 1, :, :count].detach().double().requires_grad_() for tensor in tensors]
        expected = definition(mechanism.double(), row_tensors, False, None)
        assert_near(out[row : row + 1, :, :count], expected)
        for ours, theirs in zip(actual, torch.autograd.grad(expected.square().sum(), row_tensors), strict=True):
            assert_near(ours[row : row + 1, :, :count], theirs, 1e-4)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 70), *slow((1,), (64,), (100, 101))], ids=str)
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize(("window", "saturation"), [(3, None), (64, None), (7, 20)])
def test_resuming_from_a_state(window, saturation, kind, cuts):
    shape = (2, 4, 2, 150)
    mechanism = build(shape, window, "hedgehog", saturation=saturation)
    tensors, mask = inputs(shape), masks(shape, kind)
    with torch.no_grad():
        full, _ = attend("native", mechanism, tensors, True, mask)
        parts, state = [], None
        for number, (start, stop) in enumerate(zip((0, *cuts), (*cuts, 150), strict=True)):
            pieces = [tensor[:, :, start:stop] for tensor in tensors]
            part = None if mask is None else mask[:, start:stop]
            backend = ("native", "torch")[number % 2]  # states pass between the two
            out, state = attend(backend, mechanism, pieces, True, part, state=state, return_state=True)
            parts.append(out)
    assert_near(torch.cat(parts, dim=2), full)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_inputs_and_outputs_only(dtype, causal):
    shape = (1, 2, 2, 1500)
    mechanism = build(shape, 32, "hedgehog", 16, 16, causal)
    tensors = inputs(shape, 16, 16, dtype)
    with torch.no_grad():
        out, _ = attend("native", mechanism, tensors, causal)
        expected = definition(mechanism.double(), [tensor.double() for tensor in tensors], causal, None)
    assert out.dtype == dtype
    assert_near(out, expected, 2 * torch.finfo(dtype).eps)


@BOTH
@pytest.mark.parametrize(("length", "window"), [(65, 64), *slow_rows((7, 3), (8, 64), (330, 5), (330, 64), (330, 100))])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 40), *slow_rows((8, 8), (64, 64), (80, 48))])
def test_bfloat16_of_any_size(head_dim, value_dim, length, window, causal):
    """Where the processor multiplies tiles of bfloat16, features, weights and sums are rounded to it."""
    shape = (1, 2, 1, length)
    mechanism = build(shape, window, "hedgehog", head_dim, value_dim, causal)
    drawn = inputs(shape, head_dim, value_dim, torch.bfloat16, scale=0.5)
    tensors = [tensor.requires_grad_() for tensor in drawn]
    out, _ = attend("native", mechanism, tensors, causal)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    actual = torch.autograd.grad(out, tensors, direction.to(out.dtype))
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = definition(mechanism.double(), doubles, causal, None)
    assert_near(out, expected, 1e-2)
    for computed, exact in zip(actual, torch.autograd.grad(expected, doubles, direction), strict=True):
        assert_near(computed, exact, 4e-2)


@BOTH
@pytest.mark.parametrize("saturation", [None, 20])
@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_mixing_weights_by_formula(backend, kind, saturation, causal):
    """Without gradients the kernel computes what the query adds to them; with gradients torch does."""
    shape = (2, 4, 2, 150)
    mechanism = build(shape, 16, "hedgehog", causal=causal, saturation=saturation)
    with torch.no_grad():
        mechanism.mix_weight.mul_(10.0)  # beyond the bound for some
    tensors, mask = inputs(shape), masks(shape, kind)
    with_gradients, _ = attend(backend, mechanism, tensors, causal, mask)
    with torch.no_grad():
        by_formula, _ = attend(backend, mechanism, tensors, causal, mask)
    real = torch.ones(2, 150, dtype=torch.bool) if mask is None else mask
    assert_near(by_formula.transpose(1, 2)[real], with_gradients.transpose(1, 2)[real].detach())


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixing_weights_are_float32_in_half_precision_models(dtype, causal):
    """Counts of thousands of tokens have no place in them."""
    mechanism = build((1, 2, 2, 1), 16, "hedgehog", 16, 16, causal, saturation=20).to(dtype)
    query, key, value = inputs((1, 2, 2, 3000), 16, 16, dtype)
    with torch.no_grad():
        call = AttentionInputs(query, key, value, scaling=0.4, causal=causal)
        actual, formula = mechanism._log_mix(call), mechanism._mix_of_call(call)
        expected = mechanism.double()._log_mix(replace(call, query=query.double(), key=key.double()))
    assert actual.dtype == formula.base.dtype == torch.float32
    assert_near(actual, expected, 1e-6)
    assert torch.equal(formula.compute(), actual)


@BOTH
def test_nan_stays_out_of_what_does_not_see_it(causal):
    shape = (1, 2, 2, 200)
    mechanism = build(shape, 16, "hedgehog", causal=causal)
    query, key, value = inputs(shape)
    mask = masks(shape, "right")
    with torch.no_grad():
        clean, _ = attend("native", mechanism, (query, key, value), causal, mask)
        for tensor in (query, key, value):
            tensor[:, :, ~mask[0]] = float("nan")
        dirty, _ = attend("native", mechanism, (query, key, value), causal, mask)
    assert torch.equal(clean[:, :, mask[0]], dirty[:, :, mask[0]])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_bits_for_any_threads_and_any_batch(dtype, causal):
    shape = (3, 4, 2, 700)
    mechanism = build(shape, 32, "hedgehog", 16, 16, causal)
    tensors = inputs(shape, 16, 16, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append(attend("native", mechanism, tensors, causal)[0])
    finally:
        torch.set_num_threads(before)
    with torch.no_grad():
        single, _ = attend("native", mechanism, [tensor[1:2] for tensor in tensors], causal)
    assert torch.equal(results[0], results[1])
    assert torch.equal(single, results[0][1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("saturation", [None, 6])
@pytest.mark.parametrize(("window", "value_dim"), [(1, 16), (5, 16), (40, 48), (5, 6)])
@pytest.mark.parametrize("feature_map", ["hedgehog", "elu", "favor+", "vq"])
def test_token_by_token_is_the_whole(feature_map, window, value_dim, saturation, dtype):
    """One token after a state has a form of its own, in either backend; states pass between them."""
    shape = (2, 4, 2, 30)
    mechanism = build(shape, window, feature_map, value_dim=value_dim, saturation=saturation)
    tensors, mask = inputs(shape, 9, value_dim, dtype), masks(shape, "left")
    with torch.no_grad():
        full, last = attend("torch", mechanism, tensors, True, mask, return_state=True)
        _, state = attend(
            "auto", mechanism, [tensor[:, :, :18] for tensor in tensors], True, mask[:, :18], return_state=True
        )
        parts = []
        for token in range(18, 30):
            before, copied = state, {name: tensor.clone() for name, tensor in state.items()}
            backend = "torch" if feature_map == "favor+" or token % 2 else "native"
            cut = slice(token, token + 1)
            part = None if token % 3 else mask[:, cut]
            pieces = [tensor[:, :, cut] for tensor in tensors]
            out, state = attend(backend, mechanism, pieces, True, part, state=state, return_state=True)
            parts.append(out)
            assert all(torch.equal(before[name], copied[name]) for name in copied)
    assert_near(torch.cat(parts, dim=2), full[:, :, 18:], 2e-5 if dtype == torch.float32 else 1e-2)
    assert state.keys() == last.keys()
    for name in last:
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert state[name].dtype == last[name].dtype
        real = last["ring_mask"][:, None, :, None].expand_as(last[name]) if name in ("ring_key", "ring_value") else ...
        actual, expected = (tensor[name][real].float().clamp_min(-1e9) for tensor in (state, last))
        assert_near(actual, expected, tolerance)


def prompt_and_token(mechanism, backend="native"):
    """The state after 20 tokens, and the next token."""
    tensors = inputs((1, 4, 2, 21), 9, 16)
    _, state = attend(backend, mechanism, [tensor[:, :, :20] for tensor in tensors], True, return_state=True)
    return state, [tensor[:, :, 20:] for tensor in tensors]


def test_a_step_bounds_what_the_query_says_about_the_mixture():
    """Products of queries and `mix_weight` far beyond the bound, either way."""
    mechanism = build((1, 4, 2, 20), 4, "hedgehog", value_dim=16)
    with torch.no_grad():
        mechanism.mix_weight *= 100.0
        state, token = prompt_and_token(mechanism, "torch")
        actual = [
            attend(name, mechanism, token, True, state=state, return_state=True)[0] for name in ("native", "torch")
        ]
    assert_near(actual[0], actual[1], 2e-5)


@pytest.mark.parametrize("saturation", [None, 3])
def test_a_step_takes_states_of_any_layout(saturation):
    """One row's state for five equal rows, without copies of it."""
    mechanism = build((1, 4, 2, 20), 4, "hedgehog", value_dim=16, saturation=saturation)
    with torch.no_grad():
        state, token = prompt_and_token(mechanism)
        shared = {name: tensor.expand(5, *tensor.shape[1:]) for name, tensor in state.items()}
        rows = [tensor.expand(5, -1, -1, -1) for tensor in token]
        out, after = attend("native", mechanism, rows, True, state=shared, return_state=True)
        single, _ = attend("native", mechanism, token, True, state=state, return_state=True)
    assert all(torch.equal(out[row], single[0]) for row in range(5))
    assert all(torch.equal(tensor[row], tensor[0]) for tensor in after.values() for row in range(5))


def test_a_step_refuses_mixing_weights_that_are_not_there():
    mechanism = build((1, 4, 2, 20), 4, "elu", value_dim=16, saturation=3)
    with torch.no_grad():
        state, last = prompt_and_token(mechanism)
        weight = mechanism.mix_weight
        for wrong in (weight.to("meta"), weight[:3], weight[:, :5]):
            mechanism.mix_weight = torch.nn.Parameter(wrong)
            with pytest.raises(NotImplementedError, match="mixing weights"):
                attend("native", mechanism, last, True, state=state, return_state=True)
        mechanism.mix_weight = weight
        with pytest.raises(NotImplementedError, match="state do not match"):
            attend(
                "native", mechanism, last, True, state={**state, "count": state["count"].repeat(2)}, return_state=True
            )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inside_one_window_it_is_exact_attention(dtype, causal):
    shape = (2, 4, 2, 40)
    mechanism = build(shape, 40, "hedgehog", causal=causal).to(dtype)
    tensors = inputs(shape, dtype=dtype)
    with torch.no_grad():
        actual, _ = attend("auto", mechanism, tensors, causal)
        expected = definition(mechanism.double(), [tensor.double() for tensor in tensors], causal, None)
    assert_near(actual, expected, 2e-5 if dtype != torch.bfloat16 else 1e-2)


@BOTH
def test_the_mixture_by_itself_can_be_trained(causal):
    """Nothing else asks for a gradient then: no inputs, no weights of the map."""
    mechanism = build((1, 2, 1, 70), 8, "elu", causal=causal)
    assert [name for name, _ in mechanism.named_parameters()] == ["log_mix", "mix_weight"]
    tensors = inputs((1, 2, 1, 70), 9, 6)
    actual = []
    for backend in ("native", "torch"):
        out, _ = attend(backend, mechanism, tensors, causal)
        actual.append(torch.autograd.grad(out.square().sum(), [mechanism.log_mix, mechanism.mix_weight]))
    for native, reference in zip(*actual, strict=True):
        assert_near(native, reference)


@pytest.mark.parametrize("more", [1, 5])
def test_the_mixture_by_itself_can_be_trained_after_a_state(more):
    """The kernel for single tokens records no gradient: it must not be taken for one."""
    mechanism = build((1, 2, 1, 30), 8, "elu", value_dim=16)
    first, then = (
        [x[:, :, part] for x in inputs((1, 2, 1, 30 + more), 9, 16)] for part in (slice(30), slice(30, None))
    )
    with torch.no_grad():
        _, state = attend("native", mechanism, first, True, return_state=True)
    actual = []
    for backend in ("auto", "torch"):
        out, _ = attend(backend, mechanism, then, True, state=state, return_state=True)
        actual.append(torch.autograd.grad(out.square().sum(), [mechanism.log_mix, mechanism.mix_weight]))
    for native, reference in zip(*actual, strict=True):
        assert_near(native, reference)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str)
@torch.no_grad()
def test_the_rest_of_a_batch_changes_a_row_by_rounding_only(dtype, limit, causal):
    """The limits that the page on deployment states."""
    for rows, length, real in ((2, 300, 300), (16, 700, 700), (3, 700, 290)):
        mechanism = build((rows, 4, 2, length), 64, "hedgehog", head_dim=64, value_dim=64, causal=causal)
        tensors = [x.detach().to(dtype) for x in inputs((rows, 4, 2, length), 64, 64)]
        mask = torch.ones(rows, length, dtype=torch.bool)
        mask[0, real:] = False
        together = attend("native", mechanism, tensors, causal, mask)[0][:1, :, :real].double()
        single = attend("native", mechanism, [x[:1, :, :real] for x in tensors], causal)[0].double()
        assert float((together - single).abs().max() / single.abs().max()) <= limit


@BOTH
@pytest.mark.parametrize("size", [0.5, 3.0])  # of queries and keys: with the larger ones far or near keys have it all
@pytest.mark.parametrize(("shape", "window"), [((2, 4, 2, 150), 16), ((1, 2, 1, 450), 64), ((1, 1, 1, 5), 2)], ids=str)
def test_queries_with_a_log_scale(shape, window, size, causal):
    """Fitted codes, whose weights have the scale of exact ones: outputs against float64, padded and step by step."""
    mechanism = build(shape, window, "vq", value_dim=16, causal=causal)
    tensors = inputs(shape, value_dim=16, scale=size)
    for mask in (masks(shape, kind) for kind in ("none", "left", "holes")):
        with torch.no_grad():
            expected = definition(mechanism, [x.double() for x in tensors], causal, mask)
            out = attend("native", mechanism, tensors, causal, mask)[0]
        real = slice(None) if mask is None else mask
        assert_near(out.transpose(1, 2)[real], expected.transpose(1, 2)[real], 2e-5)
    if not causal:
        return
    with torch.no_grad():
        full = definition(mechanism, [x.double() for x in tensors], True, None)
        out, state = attend("native", mechanism, [x[:, :, :-3] for x in tensors], True, return_state=True)
        for token in range(shape[3] - 3, shape[3]):
            now = [x[:, :, token : token + 1] for x in tensors]
            out, state = attend("native", mechanism, now, True, state=state, return_state=True)
            assert_near(out, full[:, :, token : token + 1], 2e-5)
