"""The profile's parts on tiny inputs. No timing is asserted."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from hf_linear_attn.ops.native.backend import unavailable_reason
from recipes.benchmarks import profile_attention

pytestmark = [
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return profile_attention


@torch.no_grad()
def test_a_step_and_its_kernel_are_timed(recipe: ModuleType) -> None:
    row = recipe.step("elu")
    step, kernel = row["parts"].values()
    assert 0 < kernel < step
    assert row["floor"] > 0
    assert row["features"] == 64


@torch.no_grad()
@pytest.mark.parametrize(("causal", "expected"), [(False, 61_568), (True, 39_424)])
def test_products_of_a_window_are_counted(recipe: ModuleType, causal: bool, expected: int) -> None:
    row = recipe.native_kernel("window", 64, causal, "float32")
    assert row["multiplications_a_token_and_head"] == expected
    assert row["operations_per_second"] * row["seconds"] == pytest.approx(2 * 12 * 64 * expected)
