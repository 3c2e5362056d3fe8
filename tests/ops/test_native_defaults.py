"""The kernels write float32 to the CPU's memory, whatever dtype and device others have made the default."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.ops.test_native import REASON
from tests.small import default_dtype

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

HEADS, SIZE = 4, 16


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: torch.device("meta"),
}


def tokens(count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, HEADS, count, SIZE, generator=generator) for _ in range(3)]


def everything(module, arguments, single, causal, around):
    """Output and gradients of a sequence and, of a decoder, three steps after it with their state."""
    results = []
    leaves = [*(tensor.clone().requires_grad_() for tensor in arguments), *module.parameters()]
    with around():
        out, _ = module(AttentionInputs(*leaves[:3], scaling=0.25, causal=causal))
        results += [out, *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)]
        if causal:
            with torch.no_grad():
                _, state = module(AttentionInputs(*arguments, scaling=0.25, causal=True, return_state=True))
                for _ in range(3):
                    state = state if isinstance(state, InPlaceState) else InPlaceState(state)
                    out, state = module(
                        AttentionInputs(*single, scaling=0.25, causal=True, state=state, return_state=True)
                    )
                    results.append(out)
            results += [tensor.clone() for tensor in state.values()]
    return results


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "t2r", "window"])
def test_other_defaults_change_nothing(name, causal, default):
    entry = ATTENTIONS.get(name)
    options = {"window_size": 8} if name == "window" else {}
    module = entry.factory(
        AttentionShape(HEADS, HEADS, SIZE, SIZE, causal=causal), build_options(entry, options)
    ).eval()
    arguments, single = tokens(90), tokens(1)
    expected = everything(module, arguments, single, causal, lambda: default_dtype(torch.float32))
    actual = everything(module, arguments, single, causal, DEFAULTS[default])
    for one, other in zip(expected, actual, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
