"""Definition of Scatterbrain attention with explicit weights, token by token, independent of the fast forms."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import normalise, repeat_heads


def hash_bucket(x: Tensor, directions: Tensor) -> int:
    """The direction, or its opposite, that one vector has the largest product with; directions `[d, buckets / 2]`."""
    products = [float(x @ column) for column in directions.T]
    return max(
        range(2 * len(products)), key=lambda b: products[b] if b < len(products) else -products[b - len(products)]
    )


def support(
    query: Tensor, key: Tensor, allowed: Tensor, directions: Tensor | None, *, window: int, capacity: int, causal: bool
) -> Tensor:
    """Ω as booleans `[B, H, L, L]`: the band, and what each round of hashing adds. allowed `[B, 1, L, L]`."""
    batch, heads, length, _ = query.shape
    key = repeat_heads(key, heads)
    pairs = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for row, head, i in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, length))).tolist():
        seen = [j for j in range(length) if allowed[row, 0, i, j]]
        for j in seen:
            pairs[row, head, i, j] = abs(i - j) < window
        for columns in directions if directions is not None else ():
            mine = hash_bucket(query[row, head, i], columns)
            same = [j for j in seen if hash_bucket(key[row, head, j], columns) == mine]
            before = sum(j <= i for j in same)
            low = before - capacity if causal else min(before - (capacity + 1) // 2, len(same) - capacity)
            for j in same[max(low, 0) :][:capacity]:
                pairs[row, head, i, j] = True
    return pairs


def scatterbrain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    allowed: Tensor,
    support: Tensor,
    scaling: float,
) -> Tensor:
    """`w_ij = exp(τ q_i·k_j)` in Ω, `φ(q_i)·φ(k_j)` elsewhere, divided by their sum. Features with their scale."""
    heads = query.shape[1]
    exact = torch.exp(query @ repeat_heads(key, heads).transpose(-1, -2) * scaling)
    estimate = query_features @ repeat_heads(key_features, heads).transpose(-1, -2)
    return normalise(torch.where(support, exact, estimate).masked_fill(~allowed, 0.0), value)
