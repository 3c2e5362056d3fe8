"""Definition of efficient attention with explicit weights, independent of the fast form (tests use float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import repeat_heads


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """`o_i = Σ_c softmax(s q_i)_c Σ_j softmax_j(s k_jc) v_j`, the softmax over j in the keys allowed to i."""
    heads = query.shape[1]
    features = torch.softmax(query * scale, dim=-1)
    keys, values = repeat_heads(key * scale, heads), repeat_heads(value, heads)
    batch, _, length, _ = query.shape
    allowed = allowed.expand(batch, heads, length, key.shape[2])
    out = value.new_zeros(batch, heads, length, value.shape[-1])
    for i in range(length):
        shown = allowed[:, :, i].unsqueeze(-1)
        share = torch.softmax(keys.masked_fill(~shown, float("-inf")), dim=2)  # [B, H, S, d], over the sequence
        share = torch.where(shown, share, 0.0)
        weights = (share * features[:, :, i : i + 1]).sum(dim=-1)
        out[:, :, i] = (weights.unsqueeze(-1) * values).sum(dim=2)
    return out
