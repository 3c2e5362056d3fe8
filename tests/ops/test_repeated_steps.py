"""Decoding steps that are taken like the one before: the same numbers, and never where something has changed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape, FeatureMap
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from hf_linear_attn.ops.common import Features, InPlaceState
from hf_linear_attn.ops.native.prepared_step import PreparedStep
from hf_linear_attn.ops.native.windowed import RING_MARGIN
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.helpers import assert_close
from tests.ops.test_native import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

NAMES = ["elu", "hedgehog", "favor+", "t2r", "performer-relu", "window"]
HEADS, SIZE, BATCH = 4, 16, 2


def tokens(count, seed, dtype=torch.float32, groups=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, heads, count, SIZE, generator=generator).to(dtype) for heads in (HEADS, groups, groups)]


def build(name, dtype=torch.float32, groups=HEADS, **options):
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(HEADS, groups, SIZE, SIZE, max_length=256, causal=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = entry.factory(shape, build_options(entry, options)).to(dtype).eval()
        with torch.no_grad():
            for parameter in module.parameters():  # nothing that begins at zero stays there
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


@torch.no_grad()
def step(module, arguments, state, **more):
    return module(
        AttentionInputs(*arguments, **{"scaling": 0.25, "causal": True, "state": state, "return_state": True, **more})
    )


def copied(state):
    """A copy that every step computes from the beginning."""
    return {name: tensor.clone() for name, tensor in state.items()}


def begun(module, dtype=torch.float32, length=90, groups=HEADS):
    """A state that the last step left ready: the second one that wrote over it."""
    _, state = step(module, tokens(length, 0, dtype, groups), None)
    for number in range(2):
        _, state = step(module, tokens(1, 100 + number, dtype, groups), owned(state))
    return state


def owned(state):
    """The state as the cache hands it to the next step."""
    return state if isinstance(state, InPlaceState) else InPlaceState(state)


def same(module, arguments, state, **more):
    """The next step from `state` is what it is from a copy of it: output and state after it."""
    expected, expected_state = step(module, arguments, copied(state), **more)
    actual, after = step(module, arguments, state, **more)
    assert torch.equal(actual, expected)
    assert after.keys() == expected_state.keys()
    assert all(torch.equal(after[name], expected_state[name]) for name in expected_state)
    return after


@pytest.fixture
def repeats(monkeypatch):
    """How many steps went straight to the kernel."""
    seen = []
    original = PreparedStep.run
    monkeypatch.setattr(PreparedStep, "run", lambda self, *arguments: seen.append(1) or original(self, *arguments))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_steps_give_the_same_numbers_as_each_by_itself(name, dtype, repeats):
    module = build(name, dtype)
    state = begun(module, dtype)
    count = 2 * RING_MARGIN + 5
    for number in range(count):
        state = same(module, tokens(1, 2 + number, dtype), state)
    assert len(repeats) == count


@pytest.mark.parametrize("name", NAMES)
def test_grouped_heads(name, repeats):
    module = build(name, groups=2)
    state = begun(module, groups=2)
    for number in range(3):
        state = same(module, tokens(1, 2 + number, groups=2), state)
    assert len(repeats) == 3


class Rectified(FeatureMap):
    """As many features as the tokens have numbers, and no formula: torch computes them."""

    def __init__(self, shape, options=None):
        super().__init__(shape, options)
        self.num_features = shape.head_dim

    def query(self, x, scaling):
        return Features(torch.nn.functional.softplus(x))

    key = query


def test_features_are_never_taken_for_tokens(repeats):
    module = KernelizedAttention(AttentionShape(HEADS, HEADS, SIZE, SIZE, causal=True), None, Rectified).eval()
    state = begun(module)
    for number in range(3):
        state = owned(same(module, tokens(1, 2 + number), state))
    assert not repeats


@pytest.mark.parametrize("name", [name for name, entry in ATTENTIONS if entry.state == "constant"])
def test_every_mechanism_takes_a_state_of_its_own(name):
    module = build(name)
    state = begun(module)
    for number in range(3):
        state = owned(same(module, tokens(1, 2 + number), state))


@pytest.mark.parametrize("window", [1, 3, 70])
def test_windows_of_any_length_slide(window, repeats):
    module = build("window", window_size=window)
    state = begun(module, length=40)
    for number in range(2 * RING_MARGIN + 5):
        state = same(module, tokens(1, 2 + number), state)
    assert len(repeats) == 2 * RING_MARGIN + 5


@pytest.mark.parametrize("name", NAMES)
def test_padding_before_the_steps(name, repeats):
    module = build(name)
    mask = torch.ones(BATCH, 90, dtype=torch.bool)
    mask[0, :70] = False
    _, state = step(module, tokens(90, 0), None, mask=mask)
    ones = torch.ones(BATCH, 1, dtype=torch.bool)
    for number in range(2):
        _, state = step(module, tokens(1, 100 + number), owned(state), mask=ones)
    for number in range(5):
        state = same(module, tokens(1, 2 + number), state, mask=ones)
    assert len(repeats) == 5
    same(module, tokens(1, 9), state, mask=torch.tensor([[True], [False]]))
    assert len(repeats) == 5


def halve(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def exchange(module):
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.detach() + 0.1)


def other_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data + 0.1


def other_map(module):
    with torch.no_grad():
        module.feature_map = copy.deepcopy(module.feature_map)
        for parameter in module.feature_map.parameters():
            parameter.add_(0.1)


@pytest.mark.parametrize("change", [halve, exchange, other_data, other_map])
@pytest.mark.parametrize("name", ["hedgehog", "window", "t2r"])
def test_other_weights_are_seen(name, change, repeats):
    module = build(name)
    state = begun(module)
    change(module)
    state = same(module, tokens(1, 2), state)
    assert not repeats
    same(module, tokens(1, 3), state)
    assert len(repeats) == 1


@pytest.mark.parametrize(("name", "other"), [("hedgehog", "hedgehog"), ("hedgehog", "t2r"), ("window", "window")])
def test_another_mechanism_computes_for_itself(name, other, repeats):
    width = {"num_features": build(name).feature_map.num_features} if other == "t2r" else {}
    first, second = build(name), build(other, **width)
    halve(second)
    state = begun(first)
    state = same(second, tokens(1, 2), state)
    assert not repeats
    same(second, tokens(1, 3), state)
    assert len(repeats) == 1


def other_options(module):
    module.feature_map.options = replace(module.feature_map.options, temperature=20.0)


def other_formula(module):
    original = module.feature_map.fused
    module.feature_map.fused = lambda scaling, *positions: original(2 * scaling, *positions)


def other_formula_instead_of_a_part(module):
    del module.feature_map.training
    other_formula(module)


@pytest.mark.parametrize("change", [other_options, other_formula, other_formula_instead_of_a_part])
@pytest.mark.parametrize("name", ["hedgehog", "window"])
def test_other_attributes_are_seen(name, change, repeats):
    module = build(name)
    state = begun(module)
    change(module)
    state = same(module, tokens(1, 2), state)
    assert not repeats


def test_a_scale_that_is_a_tensor(repeats):
    module, scaling = build("hedgehog"), torch.tensor(0.25)
    state = begun(module)
    state = same(module, tokens(1, 2), state, scaling=scaling)
    assert len(repeats) == 1
    scaling.mul_(3)
    same(module, tokens(1, 3), state, scaling=scaling)
    assert len(repeats) == 1


def exchanged(state):
    for name, tensor in state.items():
        state[name] = tensor.clone()
    state["kv"].mul_(0.5)


def moved(state):
    for tensor in state.values():
        tensor.share_memory_()


@pytest.mark.parametrize("change", [exchanged, moved])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "window"])
def test_a_state_in_other_memory_is_read_there(name, steps, change, repeats):
    module = build(name)
    state = begun(module)
    for number in range(1, steps):
        state = same(module, tokens(1, 20 + number), state)
    change(state)
    state = same(module, tokens(1, 2), state)
    assert len(repeats) == steps - 1
    same(module, tokens(1, 3), state)
    assert len(repeats) == steps


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ["elu", "window"])
def test_negative_views(name, index, repeats):
    module = build(name)
    state = begun(module)
    arguments = tokens(1, 2)
    expected, _ = step(module, arguments, copied(state))
    arguments[index] = torch._neg_view(-arguments[index])
    actual, _ = step(module, arguments, state)
    assert torch.equal(actual, expected)
    assert not repeats


@pytest.mark.parametrize("name", ["elu", "window"])
def test_forward_mode_derivatives(name, repeats):
    module = build(name)
    state = begun(module)
    query, key, value = tokens(1, 2)
    tangent = torch.ones_like(query)

    def along(distance):
        return step(module, [query + distance * tangent, key, value], copied(state))[0]

    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(query, tangent)
        out, _ = module(AttentionInputs(dual, key, value, scaling=0.25, causal=True, state=state, return_state=True))
        actual = forward_ad.unpack_dual(out).tangent
    assert_close(actual, (along(0.01) - along(-0.01)) / 0.02, factor=100)
    assert not repeats


def test_a_new_draw_of_random_features_is_seen(repeats):
    module = build("favor+")
    state = begun(module)
    module.feature_map.redraw(7)
    same(module, tokens(1, 2), state)
    assert not repeats


def rotated(tensor):
    """The same numbers in another order in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def spread(tensor):
    """The same numbers with gaps between them."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("form", [rotated, spread])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_other_places_in_memory_are_computed_anew(name, form, repeats):
    module = build(name)
    state = begun(module)
    arguments = tokens(1, 2)
    for index in range(3):
        state = same(module, [form(x) if index == number else x for number, x in enumerate(arguments)], state)
    assert not repeats


@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_other_scales_lengths_and_dtypes_are_computed_anew(name, repeats):
    module = build(name)
    state = same(module, tokens(1, 2), begun(module), scaling=0.5)
    state = same(module, tokens(5, 3), state)
    state = same(module, tokens(1, 4), InPlaceState(state))
    assert not repeats
    same(module, tokens(1, 5, torch.bfloat16), state)
    assert not repeats


@pytest.mark.parametrize("name", ["elu", "window"])
def test_another_backend_is_requested(name, repeats):
    module = build(name)
    state = begun(module)
    with hla.use_backend("torch"):
        expected, _ = step(module, tokens(1, 2), copied(state))
        actual, state = step(module, tokens(1, 2), state)
    assert torch.equal(actual, expected)
    assert not repeats
    assert not isinstance(state, InPlaceState)


@pytest.mark.parametrize("name", ["elu", "window"])
def test_a_step_with_gradients_is_another(name, repeats):
    module = build(name)
    state = begun(module)
    query, key, value = tokens(1, 2)
    query.requires_grad_()
    out, _ = module(
        AttentionInputs(query, key, value, scaling=0.25, causal=True, state=copied(state), return_state=True)
    )
    again, _ = module(
        AttentionInputs(
            query, key, value, scaling=0.25, causal=True, state=InPlaceState(copied(state)), return_state=True
        )
    )
    actual, _ = module(AttentionInputs(query, key, value, scaling=0.25, causal=True, state=state, return_state=True))
    assert torch.equal(actual, out)
    assert torch.equal(again, out)
    assert actual.requires_grad
    assert not repeats


def test_the_number_of_threads_is_seen(repeats):
    module = build("elu")
    state = begun(module)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        same(module, tokens(1, 2), state)
    finally:
        torch.set_num_threads(before)
    assert not repeats


@pytest.mark.parametrize("name", NAMES)
def test_states_made_anew_after_every_step_are_not_made_ready(name):
    """As beam search makes them: preparing would cost as much as the step."""
    module = build(name)
    _, state = step(module, tokens(90, 0), None)
    for number in range(3):
        state = same(module, tokens(1, 2 + number), InPlaceState(copied(state)))
        assert state.prepared_step is None


def test_offloaded_weights_are_not_prepared():
    module = build("hedgehog")
    module._hf_hook = object()
    assert begun(module).prepared_step is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_copies_are_states_of_their_own(name, copied, repeats):
    module = build(name)
    state = begun(module)
    other = copied(state)
    assert not isinstance(other, InPlaceState)
    before = copied(other)
    state = same(module, tokens(1, 2), state)
    assert all(torch.equal(other[part], before[part]) for part in before)
    same(module, tokens(1, 3), InPlaceState(other))
    same(module, tokens(1, 4), state)


def test_weights_whose_changes_cannot_be_seen():
    with torch.inference_mode():
        module = build("hedgehog")
        state = begun(module)
        assert state.prepared_step.guard is None
        same(module, tokens(1, 2), state)
