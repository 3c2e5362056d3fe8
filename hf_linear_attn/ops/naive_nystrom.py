"""Definition of Nyström attention for one row without padding, independent of the fast form (tests use float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import repeat_heads


def segment_mean(tokens: Tensor, segments: int) -> Tensor:
    """Means of equal segments `[B, H, S, d] -> [B, H, segments, d]`, by way of `segments` copies of every token."""
    length = tokens.shape[2]
    copies = tokens.repeat_interleave(segments, dim=2)
    return torch.stack([copies[:, :, r * length : (r + 1) * length].mean(dim=2) for r in range(segments)], dim=2)


def newton_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """`Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z)))/4` from `Aᵀ/(‖A‖₁ ‖A‖_∞)`, for one matrix `[m, m]`."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, float("inf")))
    for _ in range(iterations):
        az = matrix @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z


def nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, iterations: int, scaling: float
) -> Tensor:
    """`softmax(τ Q K̃ᵀ) softmax(τ Q̃ K̃ᵀ)⁺ softmax(τ Q̃ Kᵀ) V`; exact attention for at most `landmarks` tokens."""
    heads = query.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    if query.shape[2] <= landmarks:
        return torch.softmax(scaling * query @ key.transpose(-1, -2), dim=-1) @ value
    query_means, key_means = segment_mean(query, landmarks), segment_mean(key, landmarks)
    left = torch.softmax(scaling * query @ key_means.transpose(-1, -2), dim=-1)
    core = torch.softmax(scaling * query_means @ key_means.transpose(-1, -2), dim=-1)
    right = torch.softmax(scaling * query_means @ key.transpose(-1, -2), dim=-1)
    inverses = torch.stack([torch.stack([newton_pinv(matrix, iterations) for matrix in row]) for row in core])
    return left @ inverses @ right @ value
