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
#: The bits of the fraction of a float32, the last of them that are zero in a scale, and the bias of the exponent.
_FRACTION_BITS, _DROPPED_BITS, _EXPONENT_BIAS = 23, 7, 127


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
    scale = _pack((tokens.abs().amax(dim=-1, keepdim=True) / LARGEST).float())
    numbers = (tokens / _unpack(scale).clamp_min(torch.finfo(torch.float32).tiny)).round()
    return torch.cat([numbers.to(torch.int8), scale], dim=-1)


def _dequantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = rows[..., :-SCALE_BYTES].to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (numbers * _unpack(rows[..., -SCALE_BYTES:])).to(dtype)


def _pack(scale: Tensor) -> Tensor:
    """Return the bytes `[…, 4]` of scales `[…, 1]` that are rounded up."""
    dropped = (1 << _DROPPED_BITS) - 1
    if not torch.compiler.is_exporting():
        return ((scale.contiguous().view(torch.int32) + dropped) & ~dropped).view(torch.int8)
    # ONNX and OpenVINO read no number as bytes. Where `log2` is rounded to the next exponent, the fraction carries.
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    exponent = scale.log2().floor()
    steps = 1 << (_FRACTION_BITS - _DROPPED_BITS)
    fraction = ((scale * 2.0**-exponent - 1) * steps).ceil()
    bits = ((exponent + _EXPONENT_BIAS) * steps + fraction).int() * (1 << _DROPPED_BITS)
    return ((bits // _places(bits) + 128) % 256 - 128).to(torch.int8)


def _unpack(packed: Tensor) -> Tensor:
    """Return the scales `[…, 1]` of bytes `[…, 4]`."""
    if not torch.compiler.is_exporting():
        # A copy, since a row of bytes need not begin where a float32 may lie.
        return packed.clone(memory_format=torch.contiguous_format).view(torch.float32)
    bits = (packed.int() % 256 * _places(packed)).sum(dim=-1, keepdim=True, dtype=torch.int32)
    size = 1 << _FRACTION_BITS
    return (1 + bits % size / size) * 2.0 ** (bits // size - _EXPONENT_BIAS).float()


def _places(like: Tensor) -> Tensor:
    """Return what each byte of a number counts, the first one least."""
    return 256 ** torch.arange(SCALE_BYTES, dtype=torch.int32, device=like.device)
