"""Arguments of the kernels (feature maps and tensors as tuples), and the division of the work into programs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused import PARTS, FusedMap, KernelizedCall
from .features import MapArguments, Rows
from .limits import padded_features, power_of_two

#: Numbers of the state that one program holds at a time: 16 KB in float32.
STATE_BLOCK = 1 << 12

#: A span of the sequence has at least this many tokens: its states are then small beside it.
MIN_SPAN = 256

#: Number of loads in flight while a block is computed. More would not fit into the memory of smaller GPUs.
STAGES = 2

#: Programs per multiprocessor that a sequence is split into; number of multiprocessors assumed by the interpreter.
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 8

#: Half-precision inputs go through the tensor cores with 10 bits of mantissa, which represent them exactly; float32
#: ones in three such products, which come near float32, or without tensor cores on other GPUs. Sums are float32.
HALF_PRECISION, FULL_PRECISION, IEEE_PRECISION = "tf32", "tf32x3", "ieee"


class Blocks(NamedTuple):
    """Sizes of one pass: tokens a block, tokens a span, spans, columns of the value a tile, tiles, warps."""

    tokens: int
    span: int
    spans: int
    columns: int
    tiles: int
    warps: int


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products for inputs of a dtype."""
    if torch.version.hip is not None:
        return IEEE_PRECISION
    return FULL_PRECISION if dtype == torch.float32 else HALF_PRECISION


def blocks(x: Tensor, call: KernelizedCall, *, chunked: bool = False) -> Blocks:
    """Split the tokens of `[B, heads, L, d]` so that every processor has work; `chunked`: one block a span."""
    pairs, length, value_size = x.shape[0] * x.shape[1], x.shape[2], call.value.shape[3]
    features = padded_features(call)
    columns = max(min(power_of_two(value_size), 64, STATE_BLOCK // features), 16)
    tiles = triton.cdiv(value_size, columns)
    most = 64 if features <= 64 and x.dtype != torch.float32 else 32 if features <= 128 else 16
    tokens = min(most, power_of_two(length))
    span = tokens
    if not chunked:
        target = max(processors(x.device) * PROGRAMS_PER_PROCESSOR // (pairs * tiles), 1)
        spans = min(triton.cdiv(length, MIN_SPAN), target)
        span = triton.cdiv(triton.cdiv(length, spans), tokens) * tokens
    warps = 8 if features * columns >= 1 << 12 else 4
    return Blocks(tokens, span, triton.cdiv(length, span), columns, tiles, warps)


def map_arguments(fused: FusedMap, head_dim: int, dtype: torch.dtype) -> MapArguments:
    """Return the kernels' arguments of a feature map for inputs `[…, head_dim]`."""
    weight, bias = (None if x is None else x.detach() for x in (fused.weight, fused.bias))
    cosine, sine = (None if x is None else x.float().contiguous() for x in (fused.cosine, fused.sine))
    strides = (0, 0, 0) if weight is None else weight.stride()
    width = fused.width(head_dim)
    return MapArguments(
        weight=weight,
        weight_head=0 if weight is None or weight.shape[0] == 1 else strides[0],
        weight_row=strides[1],
        weight_column=strides[2],
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
    """Return a tensor `[B, heads, L, width]` with its strides."""
    batch, head, token = tensor.stride()[:3]
    return Rows(tensor, batch, head, token, tensor.shape[3])


def mask_bytes(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """Return the mask as bytes, and its stride from one row of the batch to the next."""
    if mask is None:
        return None, 0
    flags = mask.contiguous().view(torch.uint8)
    return flags, 0 if flags.shape[0] == 1 else flags.shape[1]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any) -> None:
    """Launch one kernel. All launches go through this function."""
    kernel[grid](*arguments, num_warps=warps, num_stages=STAGES, **constants)
