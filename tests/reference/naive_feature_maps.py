"""Definitions of kernelized attention for single feature maps, as explicit weights `[B, H, L, S]` from q and k.

Slow, plain, and independent of the feature maps' own code; tests use float64. `naive.normalise` makes outputs of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_linear_attn.ops.common import SIGNED_NORMALISER_EPS

from .naive import repeat_heads


def elu_weights(query: Tensor, key: Tensor, alpha: float) -> Tensor:
    """`Σ_c (elu(q_c) + 1)(elu(k_c) + 1)` with `elu(x) = x` for x > 0 and `α (eˣ - 1)` otherwise."""

    def features(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, alpha * (torch.exp(x.clamp(max=0.0)) - 1) + 1)

    return features(query) @ features(repeat_heads(key, query.shape[1])).transpose(-1, -2)


def hedgehog_weights(
    query: Tensor,
    key: Tensor,
    query_layer: tuple[Tensor, Tensor],
    key_layer: tuple[Tensor, Tensor],
    scaling: float,
    activation: str,
) -> Tensor:
    """`Σ_r e^{y_r + z_r}/(Y Z) + e^{-y_r - z_r}/(Y' Z')` with `y = s (Wᵀq + b)`, `z = s (Uᵀk + c)`, `s = √(τd)`.

    Y, Z, Y' and Z' are the sums of `e^{y_r}`, `e^{z_r}`, `e^{-y_r}` and `e^{-z_r}` ("softmax"), or 1 ("exp"); with
    "joint" y and z are doubled, and the sums run over both signs.
    """

    def exponentials(x: Tensor, layer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weight, bias = layer
        y = (scaling * x.shape[-1]) ** 0.5 * (torch.einsum("bhld,hdf->bhlf", x, weight) + bias[:, None])
        y = 2 * y if activation == "joint" else y
        up, down = torch.exp(y), torch.exp(-y)
        if activation == "exp":
            return up, down
        totals = up.sum(dim=-1, keepdim=True), down.sum(dim=-1, keepdim=True)
        if activation == "joint":
            totals = (totals[0] + totals[1],) * 2
        return up / totals[0], down / totals[1]

    queries = exponentials(query, query_layer)
    keys = (repeat_heads(part, query.shape[1]) for part in exponentials(key, key_layer))
    return sum(q @ k.transpose(-1, -2) for q, k in zip(queries, keys, strict=True))


def vq_weights(
    query: Tensor, key: Tensor, query_layer: tuple[Tensor, Tensor], key_layer: tuple[Tensor, Tensor], scaling: float
) -> Tensor:
    """`Σ_c e^{τ Wᵀ_c q + b_c} p_c(k)`, `p(k) ∝ e^{Uᵀk + a}` summing to 1 over the codes c."""
    (query_weight, query_bias), (key_weight, key_bias) = query_layer, key_layer
    towards = torch.exp(scaling * torch.einsum("bhld,hdc->bhlc", query, query_weight) + query_bias[:, None])
    shares = torch.exp(torch.einsum("bgld,gdc->bglc", key, key_weight) + key_bias[:, None])
    shares = repeat_heads(shares / shares.sum(dim=-1, keepdim=True), query.shape[1])
    return torch.einsum("bhlc,bhsc->bhls", towards, shares)


def t2r_weights(
    query: Tensor,
    key: Tensor,
    query_layer: tuple[Tensor, Tensor],
    key_layer: tuple[Tensor, Tensor],
    scaling: float,
    epsilon: float,
) -> Tensor:
    """`Σ_r (relu(s w_r·q + b_r) + ε)(relu(s u_r·k + c_r) + ε)`, `s = √(τd)`; layers: `W [heads, d, m]`, `b`."""
    temperature = (scaling * query.shape[-1]) ** 0.5

    def features(x: Tensor, layer: tuple[Tensor, Tensor]) -> Tensor:
        weight, bias = layer
        heads = [
            (temperature * x[:, head] @ weight[head] + bias[head]).clamp_min(0) + epsilon for head in range(x.shape[1])
        ]
        return torch.stack(heads, dim=1)

    keys = repeat_heads(features(key, key_layer), query.shape[1])
    return torch.einsum("bhim,bhjm->bhij", features(query, query_layer), keys)


def taylor_weights(
    query: Tensor, key: Tensor, scaling: float, query_weight: Tensor | None = None, key_weight: Tensor | None = None
) -> Tensor:
    """`1 + s + s²/2` with `s = τ q·k`, of projected q and k where there are projections `[heads, d, d']`."""
    if query_weight is not None and key_weight is not None:
        query = torch.einsum("bhid,hdp->bhip", query, query_weight)
        key = torch.einsum("bgid,gdp->bgip", key, key_weight)
    logits = torch.einsum("bhid,bhjd->bhij", query, repeat_heads(key, query.shape[1])) * scaling
    return 1 + logits + logits.square() / 2


def dpfp_weights(query: Tensor, key: Tensor, scaling: float, nu: int, epsilon: float) -> Tensor:
    """`Σ_n Σ_i (r_i(q) r_{i+n}(q) + ε)(r_i(k) r_{i+n}(k) + ε)`, `r(x) = relu([x, -x]) √τ`, indices mod 2d, n ≤ ν."""

    def rectified(x: Tensor) -> Tensor:
        return scaling**0.5 * torch.cat([x.clamp_min(0), (-x).clamp_min(0)], dim=-1)

    rows, columns = rectified(query), rectified(repeat_heads(key, query.shape[1]))
    size = rows.shape[-1]
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=query.dtype)
    for n in range(1, nu + 1):
        for i in range(size):
            other = (i + n) % size
            left = rows[..., i] * rows[..., other] + epsilon
            right = columns[..., i] * columns[..., other] + epsilon
            weights = weights + left[..., :, None] * right[..., None, :]
    return weights


def favor_weights(
    query: Tensor, key: Tensor, allowed: Tensor, rows: Tensor, scaling: float, phase: Tensor | None = None
) -> Tensor:
    """`e^{‖k‖²/2} · mean_r cos(w_r·(q - k))`, or with phases `e^{‖k‖²/2} · mean_r 2 cos(w_r·q + b_r) cos(w_r·k + b_r)`.

    q and k times √τ. Relative to the largest `e^{‖k‖²/2}` that the query may see, a constant of its row; the factor
    `e^{‖q‖²/2}` of each row is left out.
    """
    q, k = scaling**0.5 * query, scaling**0.5 * repeat_heads(key, query.shape[1])
    left, right = (q @ rows.T).unsqueeze(3), (k @ rows.T).unsqueeze(2)
    waves = torch.cos(left - right) if phase is None else 2 * torch.cos(left + phase) * torch.cos(right + phase)
    scale = (k.square().sum(dim=-1) / 2).unsqueeze(2).expand(*q.shape[:3], k.shape[2])
    scale = scale.masked_fill(~allowed, float("-inf"))
    if not scale.numel():
        return scale
    top = scale.amax(dim=-1, keepdim=True)
    return waves.mean(dim=-1) * torch.exp(scale - torch.where(top.isinf(), 0.0, top))


def favor_plus_weights(query: Tensor, key: Tensor, rows: Tensor, scaling: float, hyperbolic: bool = False) -> Tensor:
    """`e^{-(‖q‖² + ‖k‖²)/2} · mean_r f(w_r·(q + k))` with f = exp, or cosh if `hyperbolic`; q and k times √τ."""
    q, k = scaling**0.5 * query, scaling**0.5 * repeat_heads(key, query.shape[1])
    projected = (q @ rows.T).unsqueeze(3) + (k @ rows.T).unsqueeze(2)
    if hyperbolic:
        projected = torch.cat([projected, -projected], dim=-1)
    norms = q.square().sum(dim=-1).unsqueeze(3) + k.square().sum(dim=-1).unsqueeze(2)
    return torch.exp(projected - norms.unsqueeze(-1) / 2).mean(dim=-1)


def performer_weights(
    query: Tensor, key: Tensor, rows: Tensor, function: Callable[[Tensor], Tensor], epsilon: float
) -> Tensor:
    """`Σ_r (f(w_r·q)/√m + ε)(f(w_r·k)/√m + ε)`."""
    keys, size = repeat_heads(key, query.shape[1]), rows.shape[0] ** 0.5
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=query.dtype)
    for row in rows:
        left, right = function(query @ row) / size + epsilon, function(keys @ row) / size + epsilon
        weights = weights + left[..., :, None] * right[..., None, :]
    return weights


def normalise_signed(weights: Tensor, value: Tensor) -> Tensor:
    """`Σ_j w_ij v_j · D_i / max(D_i², ε²)` with `D_i = Σ_j w_ij`: weights over their sum, guarded where it is small."""
    total = weights.sum(dim=-1, keepdim=True)
    guarded = torch.where(total.abs() >= SIGNED_NORMALISER_EPS, 1 / total, total / SIGNED_NORMALISER_EPS**2)
    return (weights * guarded) @ repeat_heads(value, weights.shape[1])
