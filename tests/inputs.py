"""Random inputs: tokens, queries, keys and values, and batches with padding."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.tiny_models import VOCABULARY


def token_ids(batch: int = 2, length: int = 21, seed: int = 0) -> Tensor:
    """Random tokens without the pad token 0 and the begin token 1."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def qkv(
    length: int, batch: int = 2, heads: int = 4, groups: int = 2, dim: int = 6, value_dim: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (groups, dim), (groups, value_dim))
    q, k, v = (torch.randn(batch, count, length, width, generator=generator) for count, width in shapes)
    return q, k, v


def padding_mask(lengths: list[int], total: int, padding: str) -> Tensor:
    """`[B, total]`, True for real tokens."""
    column = torch.arange(total)
    rows = [column < n if padding == "right" else column >= total - n for n in lengths]
    return torch.stack(rows)


def padded_batch(rows: list[Tensor], padding: str) -> dict[str, Tensor]:
    """Rows of different lengths as one batch, with the mask and the positions that generate() would pass."""
    total = max(len(row) for row in rows)
    mask = padding_mask([len(row) for row in rows], total, padding)
    ids = torch.zeros(len(rows), total, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, mask[row]] = tokens
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
