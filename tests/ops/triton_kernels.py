"""The Triton kernels against the float64 definitions, in Triton's interpreter; `test_triton.py` runs this file.

The interpreter has to be chosen before Triton is imported, so these tests have a process of their own. They are those
of the native kernels at small sizes, with the sequence cut into short spans.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.ops import backends, check, flex, kernel_inputs, kernelized, windowed
from hf_linear_attn.ops.calls import KernelizedCall, Mix, WindowedCall
from hf_linear_attn.ops.formulas import FusedMap
from hf_linear_attn.ops.triton import attention, backend, window_step
from hf_linear_attn.ops.triton.backend import TritonBackend, interpreted
from hf_linear_attn.ops.triton.kernels import ExactArguments
from hf_linear_attn.registry import FEATURE_MAPS
from tests.ops.test_flex import eager_flex  # noqa: F401
from tests.ops.test_native import BOTH, MAPS, SCALED, assert_near, build, definition, inputs, make_call, masks

assert interpreted(), "run through test_triton.py"
BACKEND = TritonBackend()
CASES = [((1, 1, 1, 1), "none"), ((2, 3, 3, 5), "holes"), ((1, 4, 2, 63), "left"), ((2, 2, 1, 100), "holes")]
#: Maps with gradients: those whose keys have no log scale.
LEARNING = sorted((set(MAPS) - SCALED) | {"vq"})


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(attention, "MIN_SPAN", 32)


@BOTH
@pytest.mark.parametrize(("shape", "kind"), CASES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_output_is_the_definitions(name, shape, kind, causal):
    feature_map = build(name, shape[1], shape[2], 9, 6)
    call = make_call(feature_map, *inputs(shape), causal, masks(shape, kind))
    with torch.no_grad():
        assert BACKEND.unsupported_reason(call) is None
        assert_near(BACKEND.run(call)[0], definition(call), 1e-4 if name in SCALED else 2e-5)


@BOTH
@pytest.mark.parametrize(("shape", "kind"), [((2, 3, 3, 5), "none"), ((1, 4, 2, 40), "left"), ((1, 2, 1, 70), "holes")])
@pytest.mark.parametrize("name", LEARNING)
def test_every_gradient_is_the_definitions(name, shape, kind, causal):
    feature_map = build(name, shape[1], shape[2], 9, 6)
    tensors = [tensor.detach().requires_grad_() for tensor in inputs(shape)]
    call = make_call(feature_map, *tensors, causal, masks(shape, kind))
    assert BACKEND.unsupported_reason(call) is None
    weight = torch.randn(shape[0], shape[1], shape[3], 6, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((BACKEND.run(call)[0] * weight).sum(), [*tensors, *feature_map.parameters()])
    exact = feature_map.double()
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(
        (definition(make_call(exact, *doubles, causal, call.mask)) * weight.double()).sum(),
        [*doubles, *exact.parameters()],
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, 2e-4)


@pytest.mark.parametrize("name", MAPS)
def test_resuming_from_a_state(name):
    shape, cuts = (2, 2, 1, 60), (1, 2, 42)
    length = shape[3]
    feature_map = build(name, 2, 1, 9, 6)
    query, key, value = inputs(shape)
    mask = masks(shape, "left")
    with torch.no_grad():
        whole, last = BACKEND.run(make_call(feature_map, query, key, value, True, mask))
        parts, state = [], None
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            piece = slice(start, stop)
            tensors = (tensor[:, :, piece] for tensor in (query, key, value))
            out, state = BACKEND.run(make_call(feature_map, *tensors, True, mask[:, piece], state))
            parts.append(out)
    assert_near(torch.cat(parts, dim=2), whole, 1e-4 if name in SCALED else 1e-5)
    assert state.keys() == last.keys()
    for entry in state:
        assert_near(state[entry], last[entry], 1e-4 if name in SCALED else 1e-5)


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+"])
def test_states_pass_between_backends(name):
    feature_map = build(name, 4, 2, 9, 6)
    query, key, value = inputs((1, 4, 2, 100))
    torch_backend = backends.TorchBackend()
    with torch.no_grad():
        first = make_call(feature_map, query[:, :, :60], key[:, :, :60], value[:, :, :60], True, keep=True)
        whole, _ = torch_backend.run(make_call(feature_map, query, key, value, True))
        for begin, resume in ((torch_backend, BACKEND), (BACKEND, torch_backend)):
            state = begin.run(first)[1]
            rest = make_call(feature_map, query[:, :, 60:], key[:, :, 60:], value[:, :, 60:], True, state=state)
            assert_near(resume.run(rest)[0], whole[:, :, 60:], 1e-4)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+"])
def test_half_precision_rounds_inputs_and_outputs_only(name, dtype, causal):
    feature_map = build(name, 2, 2, 16, 16)
    call = make_call(feature_map, *inputs((1, 2, 2, 200), 16, 16, dtype), causal)
    with torch.no_grad():
        out, _ = BACKEND.run(call)
    assert out.dtype == dtype
    assert_near(out, definition(call), 2 * torch.finfo(dtype).eps)


@BOTH
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_half_precision_gradients(name, causal):
    feature_map = build(name, 2, 1, 16, 16).to(torch.bfloat16)
    tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, 1, 90), 16, 16, torch.bfloat16)]
    leaves = [*tensors, *feature_map.parameters()]
    actual = torch.autograd.grad(BACKEND.run(make_call(feature_map, *tensors, causal))[0].float().sum(), leaves)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(definition(make_call(feature_map.double(), *doubles, causal)).sum(), doubles)
    assert {tensor.dtype for tensor in actual} == {torch.bfloat16}
    assert_near(actual[2], expected[2], 2e-2)  # those of queries and keys are differences that nearly cancel


@BOTH
@pytest.mark.parametrize("name", MAPS)
def test_nan_stays_where_it_is_and_out_of_padding(name, causal):
    feature_map = build(name, 2, 2, 9, 6)
    shape = (1, 2, 2, 80)
    query, key, value = inputs(shape)
    mask = masks(shape, "right")
    call = make_call(feature_map, query, key, value, causal, mask)
    with torch.no_grad():
        clean, _ = BACKEND.run(call)
        for tensor in (query, key, value):
            tensor[:, :, ~mask[0]] = float("nan")
        dirty, _ = BACKEND.run(call)
        assert torch.equal(clean[:, :, mask[0]], dirty[:, :, mask[0]])
        query[0, 1, 7] = float("nan")
        marked, _ = BACKEND.run(call)
    assert marked[0, 1, 7].isnan().all()
    assert not marked[0, 1, 8:20].isnan().any()


@pytest.mark.parametrize("name", sorted(SCALED))
def test_keys_of_very_different_scale(name):
    """A later key e^100 times as large leaves earlier rows alone, and rules the later ones."""
    feature_map = build(name, 1, 1, 9, 6)
    query, key, value = inputs((1, 1, 1, 150))
    key[0, 0, 40] *= 12
    key[0, 0, 99] *= 25
    call = make_call(feature_map, query, key, value, True)
    with torch.no_grad():
        assert_near(BACKEND.run(call)[0], definition(call), 2e-4)


@BOTH
def test_strides_and_broadcasts(causal):
    feature_map = build("elu", 2, 2, 9, 9)
    query, key, value = inputs((2, 2, 2, 33), 9, 9)
    changes = (
        lambda t: t.contiguous(),
        lambda t: torch.stack([t, t], dim=-1)[..., 0],
        lambda t: torch.cat([t, t], dim=2)[:, :, :33],
    )
    with torch.no_grad():
        expected, _ = BACKEND.run(make_call(feature_map, query, key, value, causal))
        for change in changes:
            actual, _ = BACKEND.run(make_call(feature_map, change(query), change(key), change(value), causal))
            assert torch.equal(actual, expected)
        one = [tensor[:1].expand(2, -1, -1, -1) for tensor in (query, key, value)]
        actual, _ = BACKEND.run(make_call(feature_map, *one, causal))
    assert_near(actual[0], expected[0])
    assert torch.equal(actual[1], actual[0])


def test_gradients_that_are_not_contiguous():
    feature_map = build("elu", 2, 2, 9, 6)
    tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, 2, 20))]
    actual = torch.autograd.grad(BACKEND.run(make_call(feature_map, *tensors, True))[0].sum(), tensors)
    expected = torch.autograd.grad(
        backends.TorchBackend().run(make_call(feature_map, *tensors, True))[0].sum(), tensors
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, 1e-4)


def test_derivatives_of_gradients_are_refused():
    tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, 2, 5))]
    out, _ = BACKEND.run(make_call(build("elu", 2, 2, 9, 6), *tensors, True))
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.autograd.grad(gradient.sum(), tensors[0])


@BOTH
def test_nothing_to_attend_to(causal):
    feature_map = build("hedgehog", 2, 2, 9, 6)
    empty = [tensor.requires_grad_() for tensor in inputs((1, 2, 2, 0))]
    out, _ = BACKEND.run(make_call(feature_map, *empty, causal))
    assert out.shape == (1, 2, 0, 6)
    assert [tensor.shape for tensor in torch.autograd.grad(out.sum(), empty)] == [tensor.shape for tensor in empty]
    tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, 2, 40))]
    out, _ = BACKEND.run(make_call(feature_map, *tensors, causal, torch.zeros(1, 40, dtype=torch.bool)))
    assert torch.equal(out, torch.zeros_like(out))
    assert all(not tensor.any() for tensor in torch.autograd.grad(out.sum(), tensors))


def test_value_and_features_wider_than_a_block():
    """Several tiles of the value's columns, and features that leave no room for more than 16 of them."""
    for name, groups, causal in (("elu", 1, True), ("hedgehog", 2, False), ("hedgehog", 1, True)):
        feature_map = build(name, 2, groups, 70, 40)
        tensors = [tensor.requires_grad_() for tensor in inputs((1, 2, groups, 20), 70, 40)]
        call = make_call(feature_map, *tensors, causal)
        actual, expected = ([backend.run(call)[0]] for backend in (BACKEND, backends.TorchBackend()))
        for results in (actual, expected):
            results += torch.autograd.grad(results[0].square().sum(), tensors)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_near(ours, theirs, 1e-3)


def test_every_registered_map_that_has_a_formula():
    """With its defaults: a new map is tested by being registered."""
    actual = 0
    for entry in (entry for _, entry in FEATURE_MAPS):
        shape = AttentionShape(2, 2, 8, 8, max_length=64)
        feature_map = entry.factory(shape, entry.options())
        fused = feature_map.fused(0.35)
        if fused is None:
            continue
        actual += 1
        call = make_call(feature_map, *inputs((1, 2, 2, 40), 8, 8), True, scaling=0.35)
        formulas = tuple(fused_map.features for fused_map in fused)
        with torch.no_grad():
            expected = backends.TorchBackend().run(call)[0]
            assert_near(BACKEND.run(call)[0], expected, 1e-4)
            output = call.replace(query_features=formulas[0], key_features=formulas[1])
            assert_near(backends.TorchBackend().run(output)[0], expected, 1e-5)
    assert actual >= 6


@pytest.mark.parametrize("learning", [False, True], ids=["forward", "gradients"])
@BOTH
@pytest.mark.parametrize("name", ["elu", "t2r", "favor+", "vq"])
def test_the_check_before_first_use(name, causal, learning, monkeypatch):
    monkeypatch.setattr(check, "PIECES", (40, 20, 1))
    monkeypatch.setattr(check, "RUNS", 2)
    feature_map = build(name, 2, 2, 9, 6)
    call = make_call(feature_map, *(tensor.requires_grad_(learning) for tensor in inputs((1, 2, 2, 10))), causal)
    if learning and name not in LEARNING:
        assert "log scale of keys" in BACKEND.unsupported_reason(call)
        return
    case = check.case_of(call)._replace(learning=learning)

    def wrong(call):
        out, state = attention.run(call)
        return out * 1.01, state

    def broken(call):
        raise RuntimeError("out of resource: shared memory")

    assert check.compare(attention.run, case, call.fused) is None
    assert "differ from torch in the output" in check.compare(wrong, case, call.fused)
    assert "shared memory" in check.checked_reason("broken", broken, call)
    assert "shared memory" in check.checked_reason("broken", attention.run, call)  # asked once


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "vq"])
def test_totals_before_normalisation_and_their_gradients(name, kind):
    feature_map, shape = build(name, 4, 2, 9, 6), (2, 4, 2, 40)
    weight = torch.randn(2, 4, 40, 7, generator=torch.Generator().manual_seed(1))

    def gradients(compute, dtype):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs(shape)]
        exact = copy.deepcopy(feature_map).to(dtype)
        call = make_call(exact, *tensors, True, masks(shape, kind))
        totals = compute(call)[0]
        return totals, torch.autograd.grad((totals * weight.to(dtype)).sum(), [*tensors, *exact.parameters()])

    actual, ours = gradients(attention.totals, torch.float32)
    expected, theirs = gradients(lambda call: kernelized.causal(call, normalise=False), torch.float64)
    assert_near(actual, expected, 2e-5)
    for own, true in zip(ours, theirs, strict=True):
        assert_near(own, true, 2e-4)
    with torch.no_grad():
        call = make_call(feature_map, *inputs(shape), True, masks(shape, kind)).replace(return_state=True)
        (totals, scale, state), (_, state_true) = attention.totals(call), kernelized.causal(call)
        assert_near(totals, expected, 2e-5)
        assert_near(state["kv"], state_true["kv"], 2e-5)
        expected_scale = call.query_features(call.query).log_scale
        assert (scale is None) == (expected_scale is None)
        if scale is not None:
            assert_near(scale, expected_scale, 2e-5)


def test_what_it_refuses():
    feature_map = build("elu", 2, 2, 9, 6)
    call = make_call(feature_map, *inputs((1, 2, 2, 10)), False)
    refuses = BACKEND.unsupported_reason
    assert refuses(call) is None
    assert "float64" in refuses(make_call(feature_map, *inputs((1, 2, 2, 10), dtype=torch.float64), False))
    assert "fused form" in refuses(call.replace(fused=None))
    assert "fused form" in refuses(call.replace(signed=True))
    assert "features" in refuses(make_call(build("elu", 1, 1, 600, 6), *inputs((1, 1, 1, 2), 600), False))
    wide = make_call(build("hedgehog", 1, 1, 200, 6), *inputs((1, 1, 1, 2), 200), False)
    assert "in pairs" in refuses(wide)
    assert "numbers" in refuses(make_call(build("elu", 1, 1, 9, 300), *inputs((1, 1, 1, 2), 9, 300), False))
    learning = make_call(feature_map, *(tensor.requires_grad_() for tensor in inputs((1, 2, 2, 10))), True)
    assert refuses(learning) is None
    assert "carried state" in refuses(learning.replace(return_state=True))


def test_by_name_through_the_interface():
    call = make_call(build("elu", 2, 2, 9, 6), *inputs((1, 2, 2, 10)), True)
    with backends.use_backend("triton"), torch.no_grad():
        assert_near(backends.attend(call)[0], definition(call))


@BOTH
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+"])
def test_graphs_of_torch_compile_hold_the_kernels(name, checked, causal, monkeypatch):
    """They are checked while the first call is traced; decoders continue from a state."""
    torch.compiler.reset()  # a function is compiled a few times only
    seen, run = [], attention.run
    monkeypatch.setattr(attention, "run", lambda call: seen.append(call) or run(call))
    if checked:  # as where they are not interpreted
        monkeypatch.setattr(check, "PIECES", (40, 20, 1))
        monkeypatch.setattr(check, "RUNS", 2)
        monkeypatch.setattr(check, "_reasons", {})
        monkeypatch.setattr(backend, "interpreted", lambda: False)
        monkeypatch.setattr(kernel_inputs, "GPU", "cpu")
    feature_map, (query, key, value) = build(name, 4, 2, 9, 6), inputs((2, 4, 2, 50))
    mask = masks((2, 4, 2, 50), "left")

    def attend(piece, state):
        tensors = (tensor[:, :, piece] for tensor in (query, key, value))
        return backends.attend(make_call(feature_map, *tensors, causal, mask[:, piece], state, keep=causal))

    compiled, state, own = torch.compile(attend, backend="aot_eager", fullgraph=True), None, None
    pieces = [slice(0, 40), slice(40, 50), slice(49, 50)] if causal else [slice(0, 50)]
    with backends.use_backend("triton"), torch.no_grad():
        for index, piece in enumerate(pieces):
            out, state_after = compiled(piece, state)
            assert len(seen) == (index + 1 + (len(check.PIECES) if causal else 1) * check.RUNS * checked)
            expected, own = backends.TorchBackend().run(
                make_call(feature_map, *(x[:, :, piece] for x in (query, key, value)), causal, mask[:, piece], own,
                          keep=causal)
            )  # fmt: skip
            assert_near(out, expected, 1e-4)
            assert (state_after is None) == (own is None)
            for entry, numbers in (own or {}).items():
                assert_near(state_after[entry], numbers, 1e-4)
            state = state_after


@pytest.mark.parametrize("gap", [14.0, 25.0])
def test_small_features_in_half_precision(gap):
    """Of a query whose largest feature meets no key: the weights of all keys are e^-gap, and their ratios count."""
    query, key, value = inputs((1, 2, 2, 80), 16, 16, torch.float16)
    bias = torch.zeros(2, 16).index_fill_(1, torch.tensor([0]), gap)
    away = torch.zeros(2, 16).index_fill_(1, torch.tensor([0]), -1e4)
    maps = FusedMap("exp", torch.eye(16)[None], bias), FusedMap("softmax", torch.eye(16)[None], away)
    call = KernelizedCall(query, key, value, maps[0].features, maps[1].features, maps, 16, True)
    with torch.no_grad():
        assert_near(BACKEND.run(call)[0], definition(call), 2e-3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("window", "sinks", "groups"), [(5, 2, 1), (70, 0, 4), (16, 4, 2), (1, 1, 2)])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "hedgehog-odd", "vq"])
def test_tokens_of_windows_after_a_state(name, window, sinks, groups, masked):
    """By one kernel, from the second of the sequence on: the outputs and states of torch, token by token."""
    built = build(name, 4, groups, 9, 6)
    tensors = inputs((2, 4, groups, 30 + window), 9, 6)
    mask = torch.rand(2, 30 + window, generator=torch.Generator().manual_seed(1)) > 0.2 if masked else None
    if mask is not None:
        tensors = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in tensors]
    generator = torch.Generator().manual_seed(0)
    base, weight = (torch.randn(size, generator=generator) for size in ((1, 4, 1), (4, 9)))
    states, seen = [None, None], 0
    with torch.no_grad():
        for start in (0, *range(1, 4), 4, *range(9 + window, 30 + window)):
            stop = 9 + window if start == 4 else start + 1
            piece = None if mask is None else mask[:, start:stop]
            tokens = (x[:, :, start:stop] for x in tensors)
            call = make_call(built, *tokens, True, piece, keep=True)
            before = 0 if not start else states[0]["count"][:, None, None]
            outside = torch.log1p((before + 1 - window - sinks) / 7) if stop == start + 1 and start else torch.zeros(1)
            mix = (
                base
                + ((weight[:, None] * call.query).sum(-1) * 0.3**0.5).clamp(-2, 2)
                - outside.nan_to_num().clamp_min(0)
            )
            call = WindowedCall(**vars(call), window=window, sinks=sinks, scaling=0.3, log_mix=mix)
            expected, states[0] = windowed.windowed(call.replace(state=states[0]))
            if stop > start + 1 or not start:
                states[1] = states[0]
                continue
            formula = Mix(lambda mix=mix: mix, base, weight, 2.0, 7)
            actual, states[1] = window_step.step(call.replace(state=states[1], log_mix=formula))
            seen += 1
            assert states[0].keys() == states[1].keys()
            real = slice(None) if mask is None else mask[:, start]
            assert_near(actual[real], expected[real], 2e-5)
            for entry, value in states[0].items():
                ours = states[1][entry]
                assert value.dtype == ours.dtype
                if entry in ("ring_key", "ring_value"):  # what stands at padding means nothing
                    padding = ~states[0]["ring_mask"][:, None, :, None]
                    ours, value = (x.masked_fill(padding, 0) for x in (ours, value))
                assert_near(ours.float(), value.float(), 1e-5)
    assert seen > 20


@BOTH
@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ["hedgehog", "elu", "vq"])
def test_the_far_keys_are_added_to_flex_attention(name, kind, causal, monkeypatch):
    """Encoders in two passes, the second from the end; decoders in pieces, too, with the state before them."""
    monkeypatch.setattr(attention, "launch", recorded := functools.partial(_recorded, attention.launch, []))
    built = build(name, 4, 2, 9, 6)
    shape, mixed = (2, 4, 2, 90), {"window": 20, "sinks": 2, "scaling": 0.3}
    tensors, mask = inputs(shape), masks(shape, kind)
    base, weight = torch.linspace(-1, 1, 4 * 90).view(1, 4, 90), torch.linspace(-1, 1, 4 * 9).view(4, 9)
    drawn = ((weight[:, None] * tensors[0]).sum(-1) * 0.3**0.5).clamp(-0.5, 0.5)
    saturation = 7 if kind == "none" and causal else None
    outside = (torch.arange(90) + 1 - 20 - 2).clamp_min(0) / (saturation or float("inf"))

    def call_of(now, state):
        part = None if mask is None else mask[:, now]
        call = make_call(built, *(x[:, :, now] for x in tensors), causal, part, state=state, keep=causal)
        mix = (base + drawn - torch.log1p(outside))[:, :, now]
        formula = Mix(lambda: mix, base[:, :, now], weight, 0.5, saturation if state is None else None)
        if state is not None and saturation:
            formula = mix
        return WindowedCall(**vars(call), **mixed, log_mix=formula)

    pieces = [slice(0, 90)] + ([slice(0, 40), slice(40, 90)] if causal else [])
    states = [None, None]
    with torch.no_grad():
        for now in pieces:
            if not now.start:
                states = [None, None]
            expected, states[0] = windowed.windowed(call_of(now, states[0]))
            actual, states[1] = flex.run(call_of(now, states[1]))
            real = slice(None) if mask is None else mask[:, now]
            assert_near(*(x.transpose(1, 2)[real] for x in (actual, expected)), 2e-5)
            for entry, value in (states[0] or {}).items():
                if not entry.startswith("ring"):  # what stands at padding means nothing
                    assert_near(states[1][entry].float(), value.float(), 2e-5)
    merged = [arguments for kernel, arguments in recorded.args[1] if kernel.fn.__name__ == "attend_causal"]
    assert len(merged) == (3 if causal else 2)
    assert all(any(isinstance(one, ExactArguments) and one.gap for one in arguments) for arguments in merged)


@BOTH
@pytest.mark.parametrize("name", ["hedgehog", "vq"])
def test_far_keys_of_padding_leave_it_finite(name, causal):
    """Padding without a key in its window sees keys before that in the first pass, and keys after it in the second."""
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, 20:40] = mask[1, 20:] = False
    call = make_call(build(name, 4, 2, 9, 6), *inputs((2, 4, 2, 60)), causal, mask)
    with torch.no_grad():
        out, _ = flex.run(WindowedCall(**vars(call), window=5, scaling=0.3, log_mix=torch.zeros(4)))
    assert out.isfinite().all()


def _recorded(launch, seen, kernel, grid, *arguments, **options):
    seen.append((kernel, arguments))
    launch(kernel, grid, *arguments, **options)
