"""Tokens in int8: one scale each, and no further loss however often they are read and stored."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.ops.int8 import append, row_size, stored_dtype, to_dtype

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tokens(dtype: torch.dtype, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, 5, size, generator=generator, dtype=torch.float64)
    drawn = drawn * torch.rand(3, 2, 5, 1, generator=generator, dtype=torch.float64).mul(8).exp()
    drawn[0, 0, 0] = 0.0
    return drawn.to(dtype)


@pytest.mark.parametrize("size", [1, 6, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_half_a_step_of_the_largest_number(dtype: torch.dtype, size: int) -> None:
    x = tokens(dtype, size)
    rows = to_dtype(x, torch.int8)
    assert rows.dtype is torch.int8
    assert rows.shape == (3, 2, 5, row_size(size, torch.int8))
    largest = x.double().abs().amax(dim=-1, keepdim=True)
    error = (to_dtype(rows, torch.float64) - x.double()).abs()
    assert bool((error <= largest / 254 * (1 + 1e-4)).all())
    scale = rows[..., size:].contiguous().view(torch.float32).double()
    assert bool((scale >= largest / 127 * (1 - 1e-6)).all() and (scale <= largest / 127 * (1 + 2.0**-16)).all())
    assert torch.equal(rows[..., :size].abs().amax(dim=-1) == 127, largest[..., 0] > 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading_and_storing_again_changes_nothing(dtype: torch.dtype) -> None:
    rows = to_dtype(tokens(dtype), torch.int8)
    for wide in (torch.float32, torch.float64):
        assert torch.equal(to_dtype(to_dtype(rows, wide), torch.int8), rows)
    assert torch.equal(to_dtype(rows, torch.float32).double(), to_dtype(rows, torch.float64))
    assert to_dtype(rows, dtype).dtype is dtype


def test_parts_of_a_tensor_are_read_where_no_float32_could_lie() -> None:
    rows = to_dtype(tokens(torch.float32, size=5), torch.int8)
    for part in (rows[1:, 1:, 2:], rows[:1, :1, 1:2], rows[:, :, :0], rows.transpose(0, 1)):
        full = to_dtype(part.contiguous().clone(), torch.float32)
        assert torch.equal(to_dtype(part, torch.float32), full)


def test_append() -> None:
    x = tokens(torch.float32)
    old, new = x[:, :, :3], x[:, :, 3:]
    same, stored = append(old, new, None)
    assert same is stored
    assert torch.equal(stored, x)
    computed, stored = append(to_dtype(old, torch.int8), new, torch.int8)
    assert torch.equal(stored, to_dtype(x, torch.int8))
    assert torch.equal(computed, torch.cat([to_dtype(to_dtype(old, torch.int8), torch.float32), new], dim=2))


def test_what_carries_a_gradient_is_not_rounded() -> None:
    x = tokens(torch.float32)
    assert stored_dtype("int8", x) is torch.int8
    assert stored_dtype("auto", x) is None
    leaf = x.clone().requires_grad_()
    assert stored_dtype("int8", x, leaf) is None
    with torch.no_grad():
        assert stored_dtype("int8", leaf) is torch.int8


def test_a_token_that_is_not_finite_stays_so() -> None:
    x = tokens(torch.float32)
    x[1, 1, 1, 2], x[2, 1, 1, 0] = float("nan"), float("inf")
    back = to_dtype(to_dtype(x, torch.int8), torch.float32)
    assert not bool(back[1, 1, 1].isfinite().any())
    assert not bool(back[2, 1, 1].isfinite().all())
    assert bool(back[0].isfinite().all())


def test_graphs_that_read_no_bits_compute_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    powers = 2.0 ** torch.arange(-112, 120, dtype=torch.float64)
    steps = 1 + torch.tensor([-(2.0**-24), 0.0, 2.0**-23, 2.0**-16, 0.1, 0.999], dtype=torch.float64)
    scales = (powers[:, None] * steps).flatten().float()
    x = torch.cat([127 * scales.unsqueeze(-1), torch.randn(len(scales), 3) * scales.unsqueeze(-1)], dim=-1)
    stored = to_dtype(x, torch.int8)
    numbers = to_dtype(stored, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(to_dtype(x, torch.int8), stored)
    assert torch.equal(to_dtype(stored, torch.float32), numbers)
    zeros = to_dtype(torch.zeros(2, 3), torch.int8)
    assert torch.equal(to_dtype(zeros, torch.float32), torch.zeros(2, 3))
