"""Definitions of gated linear attention, token by token, independent of the chunked forms (tests use float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import repeat_heads


def gated_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, mask: Tensor | None, guard: float
) -> Tensor:
    """`S_t = Λ_t S_{t-1} + w_t φ(k_t) v_tᵀ`, `z_t = Λ_t z_{t-1} + w_t φ(k_t)`, `o_t = S_tᵀ φ(q_t) / z_t·φ(q_t)`.

    query `[B, H, L, m]`, key `[B, G, L, m]` (features), decay `[B, G, L, m]`, write `[B, G, L]`. Where the normaliser,
    relative to the largest decayed w, is smaller than `guard`, the division is by its square over the guard's.
    """
    heads, outputs = query.shape[1], []
    key, value, decay = (repeat_heads(x, heads) for x in (key, value, decay))
    write = repeat_heads(write.unsqueeze(-1), heads)
    state, total = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3]), torch.zeros_like(query[:, :, 0])
    largest = query.new_zeros(*query.shape[:2], 1)
    for t in range(query.shape[2]):
        now = torch.ones(len(query), dtype=torch.bool) if mask is None else mask[:, t]
        kept = torch.where(now[:, None, None], decay[:, :, t], 1.0)
        added = torch.where(now[:, None, None], write[:, :, t] * key[:, :, t], 0.0)
        state = kept.unsqueeze(-1) * state + added.unsqueeze(-1) * value[:, :, t].nan_to_num().unsqueeze(-2)
        total = kept * total + added
        largest = torch.maximum(largest * kept[..., :1], torch.where(now[:, None, None], write[:, :, t], 0.0))
        normaliser = (query[:, :, t] * total).sum(-1, keepdim=True)
        seen = largest > 0
        scale = torch.where(seen, largest, 1.0)
        safe = torch.where(seen & ((normaliser / scale).abs() >= guard), normaliser, 1.0)
        inverse = 1 / safe
        if guard:
            inverse = torch.where((normaliser / scale).abs() >= guard, inverse, normaliser / (guard * scale) ** 2)
        outputs.append(torch.where(seen, (query[:, :, t].unsqueeze(-2) @ state).squeeze(-2) * inverse, 0.0))
    return torch.stack(outputs, dim=2)


def gated_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, mask: Tensor | None, guard: float
) -> Tensor:
    """`S_t = α_t S_{t-1} - β_t k_t (α_t k_tᵀ S_{t-1}) + β_t k_t [v_t, 1]ᵀ`, `[n, D] = S_tᵀ q_t`, output `n / D`.

    query `[B, H, L, m]`, key `[B, G, L, m]` (features of length one), decay α and rate β `[B, G, L]`. Where |D| is
    smaller than `guard` times `c_t = α_t (1 - β_t) c_{t-1} + β_t`, the output is `n D / (guard c_t)²`.
    """
    heads, outputs = query.shape[1], []
    value = torch.cat([value.nan_to_num(), torch.ones_like(value[..., :1])], dim=-1)
    key, value, decay, rate = (repeat_heads(x, heads) for x in (key, value, decay.unsqueeze(-1), rate.unsqueeze(-1)))
    state = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3])
    level = query.new_zeros(*query.shape[:2], 1)
    for t in range(query.shape[2]):
        k, beta = key[:, :, t].unsqueeze(-1), rate[:, :, t].unsqueeze(-1)
        now = torch.ones(len(query), dtype=torch.bool) if mask is None else mask[:, t]
        kept = decay[:, :, t].unsqueeze(-1) * state
        new = kept - beta * k @ (k.transpose(-1, -2) @ kept) + beta * k @ value[:, :, t].unsqueeze(-2)
        state = torch.where(now[:, None, None, None], new, state)
        filled = decay[:, :, t] * (1 - rate[:, :, t]) * level + rate[:, :, t]
        level = torch.where(now[:, None, None], filled, level)
        sums = (query[:, :, t].unsqueeze(-2) @ state).squeeze(-2)
        total, floor = sums[..., -1:], guard * level
        near = (total.abs() < floor) | (level == 0)
        inverse = torch.where(near, total / torch.where(level > 0, floor, 1.0) ** 2, 1 / torch.where(near, 1.0, total))
        outputs.append(torch.where(level > 0, sums[..., :-1] * inverse, 0.0))
    return torch.stack(outputs, dim=2)
