"""A state that a step may write over: the same numbers, in the same memory. Any other state stays as it is."""

from __future__ import annotations

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.registry import ATTENTIONS
from recipes.benchmarks import workloads
from tests.ops.test_native import REASON

NAMES = [name for name, entry in ATTENTIONS if entry.causal and entry.state == "constant"]


def tokens(count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, count, 16, generator=generator).to(dtype) for _ in range(3)]


def run(module, arguments, state, backend):
    with torch.no_grad(), hla.use_backend(backend):
        return module(AttentionInputs(*arguments, scaling=0.25, causal=True, state=state, return_state=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_same_whether_the_state_may_be_overwritten_or_not(name, backend, dtype):
    module = workloads.build(name, heads=4, head_dim=16, longest=256, causal=True, seed=0, dtype=dtype)
    _, expected_state = run(module, tokens(90, 0, dtype), None, backend)
    state = {part: tensor.clone() for part, tensor in expected_state.items()}
    for step, count in enumerate((1, 1, 5, 1, 70, 1)):
        arguments = tokens(count, 1 + step, dtype)
        before = {part: tensor.clone() for part, tensor in expected_state.items()}
        expected, after = run(module, arguments, expected_state, backend)
        assert all(torch.equal(tensor, before[part]) for part, tensor in expected_state.items())
        actual, state = run(module, arguments, InPlaceState(state), backend)
        assert torch.equal(actual, expected)
        assert state.keys() == after.keys()
        assert all(torch.equal(tensor, after[part]) for part, tensor in state.items())
        expected_state = after


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "window"])
def test_a_native_step_allocates_no_new_state(name):
    module = workloads.build(name, heads=4, head_dim=16, longest=256, causal=True, seed=0)
    _, state = run(module, tokens(90, 0), None, "native")
    _, after = run(module, tokens(1, 1), InPlaceState(state), "native")
    assert [after[part].data_ptr() for part in ("kv", "k_sum")] == [state[part].data_ptr() for part in ("kv", "k_sum")]
