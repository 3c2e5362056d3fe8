"""Comparisons: the same inputs through another package, through ours, and through the float64 definition."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import TOLERANCE, relative_error
from tests.reference import naive

SEED = 0
BATCH, HEADS, LENGTH, DIM = 2, 4, 37, 16
SCALING = DIM**-0.5

#: A deviation counts as one, and not as rounding, from here on: so many times the tolerance of the dtype.
CLEAR = 2.0


class Outputs(NamedTuple):
    """Of one computation: by the other package, by ours, and by the definition in float64."""

    theirs: Tensor
    ours: Tensor
    definition: Tensor


@dataclass(frozen=True)
class Package:
    """A package on the index, and how it is called where it is imported."""

    name: str
    install: str


@dataclass(frozen=True)
class Comparison:
    """One mechanism of a package against ours.

    `differs` says why theirs is not the definition, or is empty where it is. `accuracy` replaces the tolerance of the
    dtype where an outcome is a statistic, or where a small epsilon of theirs cannot be switched off.
    """

    package: Package
    modules: tuple[str, ...]
    mechanism: str
    case: str
    run: Callable[[], Outputs]
    dtype: torch.dtype
    differs: str
    accuracy: float | None

    def __str__(self) -> str:
        return f"{self.package.name}: {self.mechanism}, {self.case}"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] if self.accuracy is None else self.accuracy


COMPARISONS: list[Comparison] = []


def compare(
    package: Package,
    *modules: str,
    mechanism: str,
    case: str,
    dtype: torch.dtype = torch.float64,
    differs: str = "",
    accuracy: float | None = None,
) -> Callable[[Callable[[], Outputs]], Callable[[], Outputs]]:
    """Decorator: add a comparison. `modules` are imported by it; where one is missing it cannot be run."""

    def add(run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        COMPARISONS.append(Comparison(package, modules, mechanism, case, run, dtype, differs, accuracy))
        return run

    return add


@torch.no_grad()
def measure(comparison: Comparison) -> dict[str, Any]:
    """Largest relative differences `max|a - b| / max|b|`, and whether theirs equals ours to the tolerance."""
    torch.manual_seed(SEED)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # some packages print, most are old
        warnings.simplefilter("ignore")
        outputs = comparison.run()
    difference = relative_error(outputs.theirs, outputs.ours)
    return {
        "difference": difference,
        "ours_to_definition": relative_error(outputs.ours, outputs.definition),
        "theirs_to_definition": relative_error(outputs.theirs, outputs.definition),
        "tolerance": comparison.tolerance,
        "shape": list(outputs.ours.shape),
        "verdict": "equal" if difference <= comparison.tolerance else "different",
    }


# --------------------------------------------------------------------------------------------------------------------
# What the comparisons share


def inputs(
    dtype: torch.dtype = torch.float64, length: int = LENGTH, size: float = 1.0, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, H, L, d]` with entries N(0, size²), N(0, size²) and N(0, 1)."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(BATCH, HEADS, length, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    return (size * q).to(dtype), (size * k).to(dtype), v.to(dtype)


def mechanism(name: str, causal: bool, dim: int = DIM, max_length: int = 512, **options: Any) -> Any:
    """One of our mechanisms by itself, without key-value groups."""
    hla.list_attentions()
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(HEADS, HEADS, dim, dim, layer_index=0, max_length=max_length, causal=causal)
    return entry.factory(shape, build_options(entry, options)).eval()


def allowed(length: int, causal: bool, mask: Tensor | None = None) -> Tensor:
    return naive.visible(mask, BATCH, length, length, causal)


def from_weights(weights: Tensor, value: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """`Σ_j w_ij v_j / Σ_j w_ij` over the keys that a query may see, in float64."""
    seen = allowed(weights.shape[-1], causal, mask)
    return naive.normalise(weights.double().masked_fill(~seen, 0.0), value.double())


def from_features(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """The same from the features themselves."""
    return naive.kernelized_attention(
        query.double(), key.double(), value.double(), allowed(query.shape[2], causal, mask)
    )


def elu_definition(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Kernelized attention with `x + 1` for x > 0, else `e^x`."""
    query, key = (torch.where(x > 0, x + 1, x.exp()) for x in (q.double(), k.double()))
    return from_features(query, key, v, causal, mask)


def by_token(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, L, …] -> [B, L, H, …]`, the order of several packages, and back."""
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


def with_ones(value: Tensor) -> Tensor:
    """Values with a column of ones, whose weighted sum is the normaliser of a package that has none."""
    return torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)


def divided(totals: Tensor) -> Tensor:
    return totals[..., :-1] / totals[..., -1:]


#: Draws of 4 rows, for a standard error of the mean of less than 0.01.
DRAWS = 10_000


def kernel_estimates(
    theirs: Callable[[int], Tensor], ours: Callable[[int], Tensor], kernel: Callable[[Tensor], Tensor]
) -> Outputs:
    """Means over draws of rows `w [4, 4]` of `e^{-1/2} f(w_1)`, which is 1 for rows N(0, I) and f = exp or cosh.

    That is `φ(q)·φ(k) / exp(q·k)` for q = k = e₁/2, the first axis being where a draw by QR shows its signs.
    """
    rows = (torch.stack([draw(seed) for seed in range(DRAWS)]).double()[..., 0] for draw in (theirs, ours))
    means = [kernel(first).mean().unsqueeze(0) * torch.exp(torch.tensor(-0.5)) for first in rows]
    return Outputs(means[0], means[1], torch.ones(1))
