"""What does not belong together never reaches a kernel, which would read and write beyond it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.native.backend import NativeBackend
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.ops.test_native import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

HEADS, SIZE, ROWS = 4, 16, 2
STATES = ["elu", "hedgehog", "favor+", "t2r", "dpfp", "gla"]


def build(name, causal=True):
    entry = ATTENTIONS.get(name)
    return entry.factory(AttentionShape(HEADS, HEADS, SIZE, SIZE, causal=causal), build_options(entry, {})).eval()


def tokens(count, rows=ROWS):
    return [torch.randn(rows, HEADS, count, SIZE) for _ in range(3)]


def attend(module, arguments, causal=True, **more):
    with torch.no_grad():
        return module(AttentionInputs(*arguments, scaling=0.25, causal=causal, **more))


@pytest.fixture
def kernels(monkeypatch):
    """How many calls have reached the kernels."""
    seen = []
    original = NativeBackend.run
    monkeypatch.setattr(NativeBackend, "run", lambda self, call: seen.append(1) or original(self, call))
    return seen


def attempt(kernels, act):
    """Whatever torch says of it: an error or, where it broadcasts, numbers."""
    del kernels[:]
    with suppress(RuntimeError, ValueError, TypeError, IndexError, KeyError):
        act()
    assert not kernels


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", STATES)
def test_states_of_other_rows(name, rows, kernels):
    module = build(name)
    _, state = attend(module, tokens(9), return_state=True)
    assert kernels
    attempt(kernels, lambda: attend(module, tokens(1, rows), state=state, return_state=True))


@pytest.mark.parametrize("other", ["elu", "hedgehog", "favor+", "window"])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+"])
def test_states_of_other_mechanisms(name, other, kernels):
    first, second = build(other), build(name)
    _, state = attend(first, tokens(9), return_state=True)
    if name == other or (name, other) == ("hedgehog", "window"):  # (of as many features: its sums mean the same)
        return
    attempt(kernels, lambda: attend(second, tokens(1), state=state, return_state=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "window"])
def test_masks_of_other_dtypes(name, causal, dtype, kernels):
    module = build(name, causal)
    attempt(kernels, lambda: attend(module, tokens(90), causal, mask=torch.ones(ROWS, 90, dtype=dtype)))


@pytest.mark.parametrize("shape", [(ROWS, 50), (3, 90), (90,)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_other_sizes(causal, shape, kernels):
    module = build("elu", causal)
    attempt(kernels, lambda: attend(module, tokens(90), causal, mask=torch.ones(shape, dtype=torch.bool)))


def test_a_bidirectional_window_of_fewer_queries_than_keys(kernels):
    module, (query, key, value) = build("window", causal=False), tokens(90)
    attempt(kernels, lambda: attend(module, (query[:, :, :5], key, value), causal=False))


def shorter(x):
    return x[:, :, :50]


def fewer_rows(x):
    return x[:1]


def fewer_heads(x):
    return x[:, :3]


def narrower(x):
    return x[..., :8]


@pytest.mark.parametrize(
    ("index", "cut"),
    [(1, shorter), (2, shorter), (0, fewer_rows), (1, fewer_rows), (2, fewer_rows), (2, fewer_heads), (1, narrower)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "window"])
def test_inputs_that_disagree(name, causal, index, cut, kernels):
    module, arguments = build(name, causal), tokens(90)
    arguments[index] = cut(arguments[index])
    attempt(kernels, lambda: attend(module, arguments, causal))
