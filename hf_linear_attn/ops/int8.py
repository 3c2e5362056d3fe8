"""Keys and values of a cache in int8, with one scale a token and head.

    s = max_j |x_j| / 127,  q_j = round(x_j / s),  x ≈ s q

The error is at most s/2, 1/254 of the token's largest number. A token in int8 is one row of bytes `[…, d + 4]`: q, and
behind it the bytes of s in float32. What moves, selects, saves or counts the tokens of a state needs to know nothing
of it.

s is rounded up to 17 significant bits. Then s q is exact in float32, and its own s and q are the same again: a token
can be read into float32 and stored again any number of times.
"""

import torch
from torch import Tensor

from .common import compute_dtype

SCALE_BYTES = torch.float32.itemsize
LARGEST = 127
#: The bits of a scale that are zero.
_DROPPED_BITS = 7


def stored_dtype(option: str, *tokens: Tensor) -> torch.dtype | None:
    """Return the dtype in which a state stores tokens, by an option `cache_dtype`; None for their own.

    Rounding has no gradient: tokens through which one is recorded keep their dtype.
    """
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tokens)
    return torch.int8 if option == "int8" and not has_graph else None


def row_size(size: int, dtype: torch.dtype | None) -> int:
    """Return how many elements a token of `size` numbers has in a dtype."""
    return size + SCALE_BYTES if dtype is torch.int8 else size


def to_dtype(tokens: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return tokens `[…, d]`, or `[…, d + 4]` in int8, in another dtype or in int8; None leaves them as they are."""
    if dtype is None or tokens.dtype is dtype:
        return tokens
    if dtype is torch.int8:
        return _quantize(tokens)
    return _dequantize(tokens, dtype) if tokens.dtype is torch.int8 else tokens.to(dtype)


def append(before: Tensor, new: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Append tokens `[B, G, n, d]` to those of a state.

    Returns:
        All of them to compute with, in the dtype of the new ones, and as a state stores them in `dtype` (None: the
        same tensor).
    """
    tokens = torch.cat([to_dtype(before, new.dtype), new], dim=2)
    if dtype is None:
        return tokens, tokens
    return tokens, torch.cat([to_dtype(before, dtype), to_dtype(new, dtype)], dim=2)


def _quantize(tokens: Tensor) -> Tensor:
    tokens = tokens.to(compute_dtype(tokens))
    scale = (tokens.abs().amax(dim=-1, keepdim=True) / LARGEST).float().contiguous()
    dropped = (1 << _DROPPED_BITS) - 1
    scale = ((scale.view(torch.int32) + dropped) & ~dropped).view(torch.float32)
    numbers = (tokens / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    return torch.cat([numbers.to(torch.int8), scale.view(torch.int8)], dim=-1)


def _dequantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy, since a row of bytes need not begin where a float32 may lie.
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    numbers = rows[..., :-SCALE_BYTES].to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (numbers * scale).to(dtype)
