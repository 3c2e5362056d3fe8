"""Long sums and long decoding: no drift, constant state."""

import copy

import pytest
import torch

from hf_linear_attn.mechanisms import AttentionInputs
from tests.cases import every_feature_map, every_mechanism
from tests.comparing import assert_close, relative_error
from tests.inputs import qkv
from tests.ops.test_kernelized import SCALING, fast, full_features
from tests.reference import naive
from tests.slow_cases import long
from tests.small import feature_map, mechanism


def error_of_the_last_rows(built, length, causal, rows=32):
    """Against float64, for the last rows only: the whole L x S matrix would not fit."""
    inputs = qkv(length, batch=1, heads=2, groups=1)
    out, _ = fast(built, *inputs, causal=causal)
    q, k, v = (x.double() for x in inputs)
    precise = copy.deepcopy(built).double()
    query, key = full_features(precise.query(q[:, :, -rows:], SCALING)), full_features(precise.key(k, SCALING))
    expected = naive.kernelized_attention(query, key, v, naive.visible(None, 1, rows, length, causal))
    return relative_error(out[:, :, -rows:], expected)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@every_feature_map()
def test_accumulation_over_16k_tokens_does_not_drift(name, causal):
    built = feature_map(name, 2, 1)
    short, long = (error_of_the_last_rows(built, length, causal) for length in (1024, 16384))
    # Outputs shrink like 1/√L while sums grow: √16 = 4 is allowed on top of the rounding at 1k.
    assert long < 4 * max(short, 2e-6)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, *long(torch.float32)], ids=["bf16", "fp32"])
@every_mechanism(causal=True)
def test_two_thousand_steps_equal_the_full_forward(name, dtype):
    module = mechanism(name, True, heads=2, groups=1)
    q, k, v = (x.to(dtype) for x in qkv(2000, batch=1, heads=2, groups=1))
    full, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    state, steps = None, []
    for t in range(2000):
        now = slice(t, t + 1)
        out, state = module(
            AttentionInputs(
                q[:, :, now], k[:, :, now], v[:, :, now], scaling=SCALING, causal=True, state=state, return_state=True
            )
        )
        steps.append(out)
    # In bfloat16 both round the same float32 result, which may fall on either side: one unit in the last place.
    assert_close(torch.cat(steps, dim=2), full, dtype, factor=1.0 if dtype == torch.float32 else 0.2)
