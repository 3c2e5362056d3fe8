"""The argument structure of the native kernels, and the functions that fill it from tensors."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..common import Features, parameter_gradient, readable, token_major
from ..fused import PARTS, FusedMap
from ..kernel_inputs import DTYPES
from .build import library

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
ACTIVATIONS = {name: number for number, name in enumerate(PARTS)}
#: The kernels' number of the "activation" whose inputs are the features themselves.
PRECOMPUTED = len(ACTIVATIONS)

#: Number of multiply-adds below which one thread is faster than several.
MIN_THREADED_PRODUCTS = 1 << 20


class Strided(ctypes.Structure):
    """`hla::Strided`: an address, and strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class Map(ctypes.Structure):
    """`hla::Map`: the formula of a feature map with the addresses of its tensors."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("activation", "parts", "width", "projected", "input")),
        *((name, ctypes.c_float) for name in ("bias_scale", "in_scale", "alpha", "epsilon", "factor")),
        *((name, ctypes.c_void_p) for name in ("weight", "weight_t", "bias")),
        *((name, ctypes.c_int64) for name in ("weight_head", "weight_t_head", "bias_head")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        ("angle_batch", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("scale_batch", ctypes.c_int64),
        ("scale_head", ctypes.c_int64),
    ]


_STRIDED = ("query", "key", "value", "out", "out_gradient", "query_gradient", "key_gradient", "value_gradient")
_PARAMETER_GRADIENTS = ("query_weight_gradient", "query_bias_gradient", "key_weight_gradient", "key_bias_gradient")
_STATES = ("state", "state_sum", "state_scale", "next_state", "next_sum", "next_scale", "normaliser")


class Arguments(ctypes.Structure):
    """`hla::Call` of kernelized.h; it keeps the tensors alive whose addresses it contains."""

    _fields_ = [
        *((name, Strided) for name in _STRIDED),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_batch", "batch", "heads", "groups", "length", "keys")),
        *((name, ctypes.c_int32) for name in ("size", "value_size", "dtype", "threads")),
        ("query_map", Map),
        ("key_map", Map),
        *((name, ctypes.c_void_p) for name in (*_STATES, *_PARAMETER_GRADIENTS)),
        ("skip", ctypes.c_void_p),
        ("mix", Strided),
        ("top", ctypes.c_void_p),
        ("mix_gradient", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("window", "two_sided")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("ring_key", "ring_value", "ring_mask")),
        *((name, ctypes.c_void_p) for name in ("next_ring_key", "next_ring_value", "next_ring_mask")),
        *((name, ctypes.c_void_p) for name in ("mix_base", "mix_weight", "count", "next_count")),
        *((name, ctypes.c_float) for name in ("mix_bound", "saturation")),
        *((name, Strided) for name in ("sink_key", "sink_value", "sink_key_gradient", "sink_value_gradient")),
        ("sink_position", ctypes.c_void_p),
        ("sinks", ctypes.c_int64),
        ("decay", Strided),
    ]
    tensors: list[Any]

    def point(self, **tensors: Tensor | None) -> None:
        """Set fields to the addresses of tensors, with strides where the field has them."""
        self.tensors.append(tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self, name, strided(tensor) if name in _WITH_STRIDES else tensor.data_ptr())


_WITH_STRIDES = frozenset(field[0] for field in Arguments._fields_ if field[1] is Strided)

KernelMap = FusedMap | Features
"""A formula, by `prepare`, or the features themselves in float32 where these are the inputs of the kernel."""


def prepare(fused: tuple[FusedMap, FusedMap]) -> tuple[FusedMap, FusedMap]:
    """Convert the tensors of the maps of queries and keys to contiguous float32, their columns to whole vectors."""
    query = _prepare(fused[0])
    return query, query if fused[1] is fused[0] else _prepare(fused[1])


def _prepare(fused: FusedMap) -> FusedMap:
    if fused.weight is not None:
        fused = fused._replace(weight=pad_columns(fused.weight), bias=pad_columns(fused.bias))
    if fused.cosine is None or fused.sine is None:
        return fused
    return fused._replace(cosine=fused.cosine.float().contiguous(), sine=fused.sine.float().contiguous())


def replace_parameters(maps: tuple[FusedMap, FusedMap], *parameters: Tensor | None) -> tuple[FusedMap, FusedMap]:
    """Return the maps with other weights and biases: of queries, then of keys."""
    query_weight, query_bias, key_weight, key_bias = parameters
    return maps[0]._replace(weight=query_weight, bias=query_bias), maps[1]._replace(weight=key_weight, bias=key_bias)


@functools.cache
def lanes() -> int:
    """Return the number of floats in a vector register."""
    return int(library().hla_lanes())


def pad_columns(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 tensor whose last dimension is padded to whole vectors."""
    if tensor is None:
        return None
    missing = -tensor.shape[-1] % lanes()
    if missing:
        return functional.pad(tensor.float(), (0, missing)).contiguous()
    if tensor.dtype != torch.float32 or tensor.is_contiguous():
        return tensor.float().contiguous()
    *one, rows, columns = tensor.shape
    if one != [1] or rows % lanes() or tensor.stride()[1:] != (1, rows) or tensor.requires_grad:
        return tensor.contiguous()
    copy = empty(*tensor.shape)  # ten times as fast as torch does: every decoding step needs one
    library().hla_transpose(tensor.data_ptr(), copy.data_ptr(), columns, rows)
    return copy


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory for a kernel to write to, independent of torch's default dtype and device."""
    return torch.empty(sizes, dtype=dtype, device="cpu")


def strided(tensor: Tensor) -> Strided:
    """Return the address and strides of `[B, H, L, d]`."""
    return Strided(tensor.data_ptr(), *tensor.stride()[:3])


def _first_stride(tensor: Tensor | None) -> int:
    """The stride of heads (or of rows of a batch) in elements; 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _map_argument(kernel_map: KernelMap, num_features: int, head_dim: int, weight_t: Tensor | None) -> Map:
    if isinstance(kernel_map, Features):
        scales = kernel_map.log_scale
        strides = (0, 0) if scales is None else scales.stride()[:2]
        own = {"scales": _address(scales), "scale_batch": strides[0], "scale_head": strides[1]}
        return Map(PRECOMPUTED, 1, num_features, False, head_dim, in_scale=1.0, **own)
    parts = PARTS[kernel_map.activation]
    return Map(
        ACTIVATIONS[kernel_map.activation],
        parts,
        num_features // parts,
        kernel_map.weight is not None,
        head_dim,
        kernel_map.bias_scale,
        kernel_map.in_scale,
        kernel_map.alpha,
        kernel_map.epsilon,
        kernel_map.factor,
        _address(kernel_map.weight),
        _address(weight_t),
        _address(kernel_map.bias),
        _first_stride(kernel_map.weight),
        _first_stride(weight_t),
        _first_stride(kernel_map.bias),
        _address(kernel_map.cosine),
        _address(kernel_map.sine),
        _first_stride(kernel_map.cosine),
    )


def arguments(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    maps: tuple[KernelMap, KernelMap],
    num_features: int,
    out: Tensor,
    *,
    backward: bool = False,
) -> Arguments:
    """Fill the fields that every kernel reads, for inputs query, key and value."""
    query, key, value = inputs
    batch, heads, length, size = query.shape
    _, groups, keys, value_size = value.shape
    products = batch * heads * (length + keys) * num_features * value_size
    transposed: list[Tensor | None] = [None, None]
    if backward:
        weights = [one.weight for one in maps if isinstance(one, FusedMap)]
        transposed = [None if weight is None else pad_columns(weight.detach().mT) for weight in weights]
    query_map = _map_argument(maps[0], num_features, size, transposed[0])
    same = maps[0] is maps[1] and not backward
    filled = Arguments(
        query=strided(query),
        key=strided(key),
        value=strided(value),
        out=strided(out),
        mask=_address(mask),
        mask_batch=_first_stride(mask),
        batch=batch,
        heads=heads,
        groups=groups,
        length=length,
        keys=keys,
        size=size,
        value_size=value_size,
        dtype=DTYPE_NUMBERS[value.dtype],
        threads=torch.get_num_threads() if products > MIN_THREADED_PRODUCTS else 1,
        query_map=query_map,
        key_map=query_map if same else _map_argument(maps[1], num_features, size, transposed[1]),
    )
    filled.tensors = [inputs, out, mask, maps, transposed]
    return filled


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(library(), f"hla_{name}")


def run(name: str, filled: Arguments) -> None:
    """Run a kernel.

    Raises:
        MemoryError: The kernel could not allocate its buffers.
    """
    if _kernel(name)(ctypes.byref(filled)):
        raise MemoryError(
            f"The native kernel {name!r} could not allocate memory. Free some, or use set_backend('torch')."
        )


def run_backward(
    name: str,
    filled: Arguments,
    inputs: tuple[Tensor, Tensor, Tensor],
    out_gradient: Tensor,
    parameters: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Run a backward kernel; return the gradients of query, key and value, and the needed ones of the parameters.

    The kernel writes a parameter's gradient for every head of every row of the batch, which are summed here.
    """
    query, key, value = (token_major(x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in inputs)
    heads = query.shape[1], query.shape[1], key.shape[1], key.shape[1]
    parts = [
        empty(query.shape[0], count, *tensor.shape[1:]).zero_() if tensor is not None and is_needed else None
        for tensor, is_needed, count in zip(parameters, needed, heads, strict=True)
    ]
    filled.point(out_gradient=readable(out_gradient), query_gradient=query, key_gradient=key, value_gradient=value)
    filled.point(**dict(zip(_PARAMETER_GRADIENTS, parts, strict=True)))
    run(name, filled)
    pairs = zip(parts, parameters, strict=True)
    return [
        query,
        key,
        value,
        *(None if one is None or of is None else parameter_gradient(one, of) for one, of in pairs),
    ]
