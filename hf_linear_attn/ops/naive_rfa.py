"""Definition of random feature attention without features: what its weights are estimates of, and of its gate."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import repeat_heads


def rfa_weights(query: Tensor, key: Tensor, rows: Tensor, sigma: Tensor) -> Tensor:
    """`(2/m) Σ_r cos((w_r ⊙ σ)·(q̂_i - k̂_j))`, r = 1 … m/2: `[B, H, L, S]`. rows `[m/2, d]`, sigma `[G, d]`."""
    heads = query.shape[1]
    unit = [x / x.square().sum(-1, keepdim=True).sqrt() for x in (query, repeat_heads(key, heads))]
    difference = unit[0].unsqueeze(3) - unit[1].unsqueeze(2)
    scaled = sigma.repeat_interleave(heads // sigma.shape[0], dim=0)[:, None, None, :] * difference
    return torch.stack([torch.cos(scaled @ row) for row in rows]).mean(0)


def gated_weights(weights: Tensor, gate: Tensor) -> Tensor:
    """`w_ij (1 - g_j) Π_{j < t <= i} g_t` for j <= i, else 0; gate `[B, G, L]`."""
    gate = repeat_heads(gate.unsqueeze(-1), weights.shape[1]).squeeze(-1)
    held = torch.zeros_like(weights)
    for i in range(weights.shape[2]):
        for j in range(i + 1):
            held[:, :, i, j] = weights[:, :, i, j] * (1 - gate[:, :, j]) * gate[:, :, j + 1 : i + 1].prod(dim=-1)
    return held
