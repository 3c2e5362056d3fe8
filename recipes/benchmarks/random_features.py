"""How well random features estimate the softmax kernel: samples of the estimate, and its published variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.registry import FEATURE_MAPS, build_options, list_attentions


@dataclass(frozen=True)
class Form:
    """One estimator of `exp(q·k)`: a feature map with options; two features of each random row where `paired`."""

    name: str
    feature_map: str
    options: dict[str, Any]
    paired: bool


FORMS = {
    form.name: form
    for form in (
        Form("sin and cos", "favor", {"trig": "sincos"}, True),
        Form("cos with phase", "favor", {"trig": "cos"}, False),
        Form("positive", "favor+", {}, False),
        Form("hyperbolic", "favor+", {"hyperbolic": True}, True),
    )
}


@torch.no_grad()
def kernel_estimates(
    form: str, query: Tensor, key: Tensor, num_features: int, *, draws: int, seed: int = 0, orthogonal: bool = True
) -> Tensor:
    """`φ(q_p)·φ(k_p)` of the pairs `[P, d]` for many draws of the features, with τ = 1: `[draws, P]` in float64.

    The features are those of the registered map, m of them; draw number i has the seed `seed + i`.
    """
    list_attentions()
    chosen, dim = FORMS[form], query.shape[-1]
    entry = FEATURE_MAPS.get(chosen.feature_map)
    shape = AttentionShape(1, 1, dim, dim)
    both = torch.stack([query, key]).double().unsqueeze(1)
    rows = []
    for draw in range(draws):
        settings = {"num_features": num_features, "orthogonal": orthogonal, "seed": seed + draw, **chosen.options}
        values, log_scale = entry.factory(shape, build_options(entry, settings)).query(both, 1.0)
        assert log_scale is not None
        rows.append((values[0] * values[1]).sum(dim=-1) * log_scale.sum(dim=0).exp())
    return torch.cat(rows)


def kernel_variance(form: str, query: Tensor, key: Tensor, num_features: int) -> Tensor:
    """Variance of `φ(q)·φ(k)` around `K = exp(q·k)` with independent rows: `[P]` for pairs `[P, d]`.

    Choromanski et al. 2020, arXiv:2009.14794, lemma 2, for r random rows (r = m, or m/2 where rows are paired):
        sin and cos  `exp(‖q+k‖²) K⁻² (1 - exp(-‖q-k‖²))² / 2r`
        positive     `exp(‖q+k‖²) K² (1 - exp(-‖q+k‖²)) / r`
        hyperbolic   `(1 - exp(-‖q+k‖²)) / 2` times that
    and for one cosine with a random phase, of the same kind, `exp(‖q‖²+‖k‖²) ((1 - exp(-‖q-k‖²))² + 1) / 2r`.
    """
    query, key = query.double(), key.double()
    rows = num_features / 2 if FORMS[form].paired else num_features
    kernel = (query * key).sum(dim=-1).exp()
    total, gap = (query + key).square().sum(dim=-1), (query - key).square().sum(dim=-1)
    if FORMS[form].feature_map == "favor":
        # exp(‖q+k‖²) K⁻² = exp(‖q‖² + ‖k‖²)
        phase = 0.0 if FORMS[form].paired else 1.0
        return total.exp() / kernel.square() * ((1 - (-gap).exp()).square() + phase) / (2 * rows)
    positive = total.exp() * kernel.square() * (1 - (-total).exp()) / rows
    return positive * (1 - (-total).exp()) / 2 if FORMS[form].paired else positive


def orthogonal_gain(query: Tensor, key: Tensor, num_features: int) -> Tensor:
    """By how much orthogonal rows lower the variance of positive features, at least: `[P]`, for m <= d.

    `2(m-1)/(m(d+2)) · (K - exp(-(‖q‖² + ‖k‖²)/2))²`: Choromanski et al. 2020, arXiv:2009.14794, theorem 2.
    """
    query, key = query.double(), key.double()
    kernel = (query * key).sum(dim=-1).exp()
    least = (-(query.square() + key.square()).sum(dim=-1) / 2).exp()
    return 2 * (num_features - 1) / (num_features * (query.shape[-1] + 2)) * (kernel - least).square()


def pairs_at(lengths: Tensor, radius: float, dim: int) -> tuple[Tensor, Tensor]:
    """q and k of norm `radius` with `‖q + k‖` as given `[P]` (at most twice the radius): two tensors `[P, dim]`."""
    if dim < 2 or bool((lengths < 0).any()) or bool((lengths > 2 * radius).any()):
        raise ValueError(f"pairs_at needs dim >= 2 and lengths in [0, {2 * radius}], got {dim} and {lengths.tolist()}.")
    half = lengths.double() / 2
    across = (radius**2 - half.square()).clamp_min(0).sqrt()
    query = torch.zeros(len(lengths), dim, dtype=torch.float64)
    query[:, 0], query[:, 1] = half, across
    key = query.clone()
    key[:, 1] = -across
    return query, key
