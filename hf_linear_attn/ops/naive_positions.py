"""Definition of cosFormer attention with explicit weights, independent of the fast form (tests use float64)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .naive import normalise, repeat_heads


def cosformer_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, *, max_length: int, epsilon: float = 0.0
) -> Tensor:
    """`w_ij = (relu(q_i) + ε)·(relu(k_j) + ε) cos(π(i - j)/2M)`: one row without padding, or any mask `allowed`."""
    length, keys = query.shape[2], key.shape[2]
    distance = (keys - length) + torch.arange(length)[:, None] - torch.arange(keys)[None, :]
    cosine = torch.cos(distance.to(query.dtype) * (math.pi / (2 * max_length)))
    rows = query.clamp_min(0) + epsilon
    columns = repeat_heads(key.clamp_min(0) + epsilon, query.shape[1])
    weights = (rows @ columns.transpose(-1, -2)) * cosine
    return normalise(weights.masked_fill(~allowed, 0.0), value)
