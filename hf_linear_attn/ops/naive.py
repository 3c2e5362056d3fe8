"""The definitions, with explicit L x S weights: slow, plain, and independent of the fast forms.

Every function works head by head with broadcasting and no blocks, in the dtype of its inputs (tests use float64).
`allowed` is a boolean tensor that broadcasts to `[B, H, L, S]`: True where query i may see key j.
"""

from __future__ import annotations

import torch
from torch import Tensor


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Give each of `heads` query heads its own copy of its key-value head: `[B, G, S, d] -> [B, H, S, d]`."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def visible(mask: Tensor | None, batch: int, queries: int, keys: int, causal: bool) -> Tensor:
    """`allowed [B, 1, L, S]` from a key padding mask `[B, S]`; query i is the token `S - L + i`."""
    allowed = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if causal:
        allowed = allowed & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return allowed


def normalise(weights: Tensor, value: Tensor) -> Tensor:
    """`Σ_j w_ij v_j / Σ_j w_ij`, zeros where a row has no weight."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0) @ repeat_heads(
        value, weights.shape[1]
    )


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """`o_i = Σ_j exp(τ q_i·k_j) v_j / Σ_j exp(τ q_i·k_j)` over the allowed keys."""
    logits = query @ repeat_heads(key, query.shape[1]).transpose(-1, -2) * scaling
    logits = logits.masked_fill(~allowed, float("-inf"))
    top = logits.amax(dim=-1, keepdim=True)
    return normalise(torch.exp(logits - torch.where(top.isinf(), 0.0, top)), value)


def kernelized_attention(query_features: Tensor, key_features: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """`o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)` over the allowed keys, from the features themselves."""
    weights = query_features @ repeat_heads(key_features, query_features.shape[1]).transpose(-1, -2)
    return normalise(weights.masked_fill(~allowed, 0.0), value)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    allowed: Tensor,
    *,
    window: int,
    causal: bool,
    scaling: float,
    log_mix: Tensor,
    relative: bool = True,
) -> Tensor:
    """Exact weights inside the window, `exp(g) φ(q)·φ(k)` outside it, one normaliser.

    With `relative` (maps whose features carry no scale of their own) the exact weights are `exp(τ q·k - c_i)`, c_i the
    largest logit of the window; otherwise both are absolute estimates of `exp(τ q·k)`.
    """
    heads, length, keys = query.shape[1], query.shape[2], key.shape[2]
    distance = (keys - length) + torch.arange(length)[:, None] - torch.arange(keys)[None, :]
    inside = (distance.abs() < window) & ((distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool))
    inside = inside & allowed
    logits = (query @ repeat_heads(key, heads).transpose(-1, -2) * scaling).masked_fill(~inside, float("-inf"))
    if relative:
        top = logits.amax(dim=-1, keepdim=True)
        logits = logits - torch.where(top.isinf(), 0.0, top)
    linear = query_features @ repeat_heads(key_features, heads).transpose(-1, -2)
    linear = linear * log_mix.exp()[None, :, None, None]
    return normalise(torch.where(inside, logits.exp(), torch.where(allowed, linear, 0.0)), value)


def linformer_attention(
    query: Tensor, key: Tensor, value: Tensor, project_key: Tensor, project_value: Tensor, scaling: float
) -> Tensor:
    """`softmax(τ q (E K)ᵀ) (F V)` for one row without padding, projections `[h, k, S]` already fitted to S."""
    heads = query.shape[1]
    slots = repeat_heads(project_key @ key, heads)
    weights = torch.softmax(query @ slots.transpose(-1, -2) * scaling, dim=-1)
    return weights @ repeat_heads(project_value @ value, heads)


def linformer_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, project_key: Tensor, project_value: Tensor, scaling: float
) -> Tensor:
    """One softmax over the slots of finished blocks and the tokens `<= i` of the own block, token by token."""
    heads, length, block = query.shape[1], query.shape[2], project_key.shape[-1]
    outputs = []
    for i in range(length):
        done = i // block
        keys, values = [], []
        for number in range(done):
            part = slice(number * block, (number + 1) * block)
            keys.append(project_key @ key[:, :, part])
            values.append(project_value @ value[:, :, part])
        keys.append(key[:, :, done * block : i + 1])
        values.append(value[:, :, done * block : i + 1])
        seen, held = repeat_heads(torch.cat(keys, dim=2), heads), repeat_heads(torch.cat(values, dim=2), heads)
        outputs.append(torch.softmax(query[:, :, i : i + 1] @ seen.transpose(-1, -2) * scaling, dim=-1) @ held)
    return torch.cat(outputs, dim=2)
