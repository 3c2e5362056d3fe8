"""What the kernels are given: feature maps and tensors as tuples, and how the work is cut into programs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused import PARTS, FusedMap
from .features import Rows, Side

#: Numbers of the state that one program holds at a time: 16 KB in float32.
STATE_BLOCK = 1 << 12

#: A span of the sequence has at least this many tokens: its sums are then small beside it.
MIN_SPAN = 256

#: Loads that are under way while a block is computed. More would not fit beside the blocks on smaller GPUs.
STAGES = 2

#: Programs per processor of the GPU that the sequence is cut for; how many processors the interpreter pretends to have.
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 8

#: Half-precision inputs go through the tensor cores with 10 bits of mantissa, which hold them exactly; float32 ones in
#: three such products, which come near float32, or without tensor cores on other makers' GPUs. Sums are float32.
HALF_PRECISION, FULL_PRECISION, PLAIN_PRECISION = "tf32", "tf32x3", "ieee"


class Blocks(NamedTuple):
    """How one pass is cut: tokens a block, tokens a span, spans, columns of the value a tile, tiles, warps."""

    tokens: int
    span: int
    spans: int
    columns: int
    tiles: int
    warps: int


def power_of_two(number: int) -> int:
    """The next power of two, at least 16: the least that the tensor cores take."""
    return max(triton.next_power_of_2(number), 16)


@functools.cache
def processors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision(dtype: torch.dtype) -> str:
    if torch.version.hip is not None:
        return PLAIN_PRECISION
    return FULL_PRECISION if dtype == torch.float32 else HALF_PRECISION


def blocks(x: Tensor, features: int, value_size: int, *, chunked: bool = False) -> Blocks:
    """Cut the tokens of `[B, heads, L, d]` so that every processor has work; `chunked`: one block a span."""
    pairs, length = x.shape[0] * x.shape[1], x.shape[2]
    columns = max(min(power_of_two(value_size), 64, STATE_BLOCK // features), 16)
    tiles = triton.cdiv(value_size, columns)
    most = 64 if features <= 64 and x.dtype != torch.float32 else 32 if features <= 128 else 16
    tokens = min(most, power_of_two(length))
    span = tokens
    if not chunked:
        wanted = max(processors(x.device) * PROGRAMS_PER_PROCESSOR // (pairs * tiles), 1)
        spans = min(triton.cdiv(length, MIN_SPAN), wanted)
        span = triton.cdiv(triton.cdiv(length, spans), tokens) * tokens
    warps = 8 if features * columns >= 1 << 12 else 4
    return Blocks(tokens, span, triton.cdiv(length, span), columns, tiles, warps)


def padded_features(fused: FusedMap, head_dim: int) -> int:
    """M, the columns that the kernels keep a feature map in."""
    return PARTS[fused.activation] * power_of_two(fused.width(head_dim))


def side(fused: FusedMap, head_dim: int, dtype: torch.dtype) -> Side:
    weight, bias = (None if held is None else held.detach() for held in (fused.weight, fused.bias))
    cosine, sine = (None if held is None else held.float().contiguous() for held in (fused.cosine, fused.sine))
    steps = (0, 0, 0) if weight is None else weight.stride()
    width = fused.width(head_dim)
    return Side(
        weight=weight,
        weight_head=0 if weight is None or weight.shape[0] == 1 else steps[0],
        weight_row=steps[1],
        weight_column=steps[2],
        bias=None if bias is None else bias.contiguous(),
        bias_head=0 if bias is None or bias.shape[0] == 1 else bias.shape[1],
        bias_scale=fused.bias_scale,
        cosine=cosine,
        sine=sine,
        angle_batch=0 if cosine is None or cosine.shape[0] == 1 else cosine.shape[1],
        in_scale=fused.in_scale,
        alpha=fused.alpha,
        epsilon=fused.epsilon,
        factor=fused.factor,
        activation=tl.constexpr(fused.activation),
        parts=tl.constexpr(PARTS[fused.activation]),
        width=tl.constexpr(width),
        half=tl.constexpr(power_of_two(width)),
        size_block=tl.constexpr(power_of_two(head_dim)),
        precision=tl.constexpr(precision(dtype)),
    )


def rows(tensor: Tensor) -> Rows:
    batch, head, token = tensor.stride()[:3]
    return Rows(tensor, batch, head, token, tensor.shape[3])


def mask_bytes(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """The mask as bytes, and the step from one row of the batch to the next."""
    if mask is None:
        return None, 0
    held = mask.contiguous().view(torch.uint8)
    return held, 0 if held.shape[0] == 1 else held.shape[1]


def plain(tensor: Tensor) -> Tensor:
    """The kernels take any strides but that of the numbers within a token."""
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def token_major(batch: int, heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[B, H, L, e]` that lies in memory as `[B, L, H, e]`, the order in which a model goes on with it."""
    return torch.empty(batch, length, heads, width, dtype=dtype, device=device).transpose(1, 2)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, warps: int, **constants: Any) -> None:
    """Run one kernel; the one place where that happens."""
    kernel[grid](*given, num_warps=warps, num_stages=STAGES, **constants)
