"""Definitions of Luna attention with explicit weights, independent of the fast forms (tests use float64)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .naive import repeat_heads


def luna_attention(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, scaling: float) -> Tensor:
    """`softmax(τ Q K̃ᵀ) Ṽ` with `K̃ = softmax(τ P Kᵀ) K`, `Ṽ = softmax(τ P Kᵀ) V`; packed `[G, l, d]`, no padding."""
    heads = query.shape[1]
    packing = torch.softmax(scaling * torch.einsum("gld,bgsd->bgls", packed, key), dim=-1)
    slots, held = repeat_heads(packing @ key, heads), repeat_heads(packing @ value, heads)
    return torch.softmax(scaling * query @ slots.transpose(-1, -2), dim=-1) @ held


def luna_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    activation: Callable[[Tensor], Tensor],
    scaling: float,
    query_scale: float,
) -> Tensor:
    """`u_i = softmax((1/i) Σ_{j<=i} (s q_i·k_j) a_j)`, `o_i = (1/i) Σ_{j<=i} (u_i·a_j) v_j`, token by token."""
    heads = query.shape[1]
    features = repeat_heads(activation(scaling * torch.einsum("bgsd,gld->bgsl", key, packed)), heads)
    keys, values = repeat_heads(key, heads), repeat_heads(value, heads)
    outputs = [value.new_zeros(query.shape[0], heads, 0, value.shape[-1])]
    for i in range(query.shape[2]):
        seen = slice(0, i + 1)
        products = query_scale * (query[:, :, i : i + 1] * keys[:, :, seen]).sum(dim=-1, keepdim=True)
        mixture = torch.softmax((products * features[:, :, seen]).sum(dim=2) / (i + 1), dim=-1)
        weights = (mixture.unsqueeze(2) * features[:, :, seen]).sum(dim=-1, keepdim=True) / (i + 1)
        outputs.append((weights * values[:, :, seen]).sum(dim=2, keepdim=True))
    return torch.cat(outputs, dim=2)
