"""Properties of every mechanism under search: shapes, layouts, dtypes, masks, magnitudes, and NaN in padding.

`HYPOTHESIS_PROFILE=search pytest tests/mechanisms/test_search.py` looks longer, and elsewhere each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hf_linear_attn.mechanisms import AttentionInputs
from tests.cases import every_direction
from tests.comparing import TOLERANCE, assert_close
from tests.small import mechanism

SCALING = 0.4
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """q, k, v with the given layout, a mask `[B, L]` or None, and what they were drawn from."""

    heads: int
    groups: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    def real(self) -> Tensor:
        """`[B, 1, L, 1]`"""
        mask = torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool) if self.mask is None else self.mask
        return mask[:, None, :, None]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers `[B, H, L, d]` with other strides."""
    batch, heads, length, width = x.shape
    if layout == "by token":  # as a projection leaves them: [B, L, H, d] with two axes swapped
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "part of a larger one":  # as a fused projection of q, k and v leaves them
        full = torch.full((batch, heads, length, 3 * width), float("nan"), dtype=x.dtype)
        full[..., width : 2 * width] = x
        return full[..., width : 2 * width]
    if layout == "every other token":
        full = torch.full((batch, heads, 2 * length, width), float("nan"), dtype=x.dtype)
        full[:, :, ::2] = x
        return full[:, :, ::2]
    return x.contiguous()


LAYOUTS = ("contiguous", "by token", "part of a larger one", "every other token")


@st.composite
def cases(draw: Any, dtypes: tuple[torch.dtype, ...] = DTYPES, exponents: tuple[int, int] = (-4, 4)) -> Case:
    """exponents: of ten, the size of the entries of q, k and v."""
    groups = draw(st.sampled_from([1, 2, 3]))
    heads = groups * draw(st.sampled_from([1, 2]))
    batch, length = draw(st.integers(1, 3)), draw(st.one_of(st.integers(0, 3), st.integers(4, 40)))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    inputs = []
    for count in (heads, groups, groups):
        x = torch.randn(batch, count, length, 6, generator=generator) * 10.0 ** draw(st.integers(*exponents))
        x = x.clamp(-6e4, 6e4)  # float16 ends at 65,504
        inputs.append(laid_out(x.to(dtype), draw(st.sampled_from(LAYOUTS))))
    return Case(heads, groups, *inputs, draw(masks(batch, length)))


@st.composite
def masks(draw: Any, batch: int, length: int) -> Tensor | None:
    """None, padding on a side, or any pattern; rows may be wholly padding."""
    kind = draw(st.sampled_from(["none", "left", "right", "any"]))
    if kind == "none":
        return None
    if kind == "any":
        rows = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(batch)]
        return torch.tensor(rows, dtype=torch.bool).view(batch, length)
    sizes = torch.tensor([draw(st.integers(0, length)) for _ in range(batch)])[:, None]
    column = torch.arange(length)
    return column < sizes if kind == "right" else column >= length - sizes


def built(name: str, causal: bool, case: Case) -> Any:
    torch.manual_seed(0)
    return mechanism(name, causal, case.heads, case.groups).to(case.q.dtype)


def run(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))[0]


@every_direction()
@given(case=cases())
@torch.no_grad()
def test_whatever_comes_in_finite_numbers_come_out(name: str, causal: bool, case: Case) -> None:
    """And where the weights are a distribution the output lies between the values that are averaged."""
    module = built(name, causal, case)
    out = run(module, case.q, case.k, case.v, case.mask, causal)
    assert out.shape == (case.q.shape[0], case.heads, case.q.shape[2], 6)
    assert out.dtype == case.q.dtype
    real_out = out.masked_fill(~case.real(), 0.0)
    if not module.distribution and out.dtype == torch.float16:
        # Without a normalizer a result can be larger than every value, and larger than float16 can hold.
        inputs = (x.float() for x in (case.q, case.k, case.v))
        exact = run(built(name, causal, case).float(), *inputs, case.mask, causal)
        real_out = real_out.masked_fill(exact.abs() > 6e4, 0.0)
    assert bool(torch.isfinite(real_out).all())
    if module.distribution and out.numel():
        values = case.v.masked_fill(~case.real(), 0.0).double()
        largest = values.abs().amax(dim=(1, 2, 3), keepdim=True)
        assert bool((real_out.double().abs() <= largest * (1 + 4 * TOLERANCE[out.dtype]) + 1e-7).all())


@every_direction()
@given(case=cases())
@torch.no_grad()
def test_nan_in_padding_changes_nothing(name: str, causal: bool, case: Case) -> None:
    assume(case.mask is not None)
    module = built(name, causal, case)
    poisoned = [x.masked_fill(~case.real(), float("nan")) for x in (case.q, case.k, case.v)]
    zeroed = [x.masked_fill(~case.real(), 0.0) for x in (case.q, case.k, case.v)]
    outs = [run(module, *inputs, case.mask, causal).masked_fill(~case.real(), 0.0) for inputs in (poisoned, zeroed)]
    assert torch.equal(*outs)


@every_direction()
@given(case=cases(exponents=(-4, 0)))
@torch.no_grad()
def test_the_layout_in_memory_changes_nothing(name: str, causal: bool, case: Case) -> None:
    """To rounding: the matrix products of a library may add in another order for other strides."""
    module = built(name, causal, case)
    out = run(module, case.q, case.k, case.v, case.mask, causal).masked_fill(~case.real(), 0.0)
    again = run(
        module, *(x.clone(memory_format=torch.contiguous_format) for x in (case.q, case.k, case.v)), case.mask, causal
    )
    assert_close(out, again.masked_fill(~case.real(), 0.0), case.q.dtype)


@every_direction()
@given(case=cases(exponents=(-4, 0)))
@torch.no_grad()
def test_near_float64(name: str, causal: bool, case: Case) -> None:
    module = built(name, causal, case)
    out = run(module, case.q, case.k, case.v, case.mask, causal).masked_fill(~case.real(), 0.0)
    exact = run(module.double(), case.q.double(), case.k.double(), case.v.double(), case.mask, causal)
    assert_close(out, exact.masked_fill(~case.real(), 0.0), case.q.dtype)


@every_direction()
@given(case=cases(dtypes=(torch.float32,), exponents=(-1, 0)), rows=st.permutations(range(3)))
@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch(name: str, causal: bool, case: Case, rows: list[int]) -> None:
    module = built(name, causal, case)
    order = torch.tensor([row for row in rows if row < case.q.shape[0]])
    out = run(module, case.q, case.k, case.v, case.mask, causal).masked_fill(~case.real(), 0.0)
    mask = None if case.mask is None else case.mask[order]
    again = run(module, case.q[order], case.k[order], case.v[order], mask, causal)
    assert_close(again.masked_fill(~case.real()[order], 0.0), out[order])
