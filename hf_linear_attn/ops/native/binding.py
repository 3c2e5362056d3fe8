"""The argument structure of the native kernels, and the functions that fill it from tensors."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..common import Features, parameter_gradient, token_major
from ..fused import PARTS, AttentionCall, FusedMap
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
_ADDRESSES = (
    *("state", "state_sum", "state_scale", "next_state", "next_sum", "next_scale", "normaliser"),
    *("query_weight_gradient", "query_bias_gradient", "key_weight_gradient", "key_bias_gradient"),
)


class Arguments(ctypes.Structure):
    """`hla::Call` of kernelized.h."""

    _fields_ = [
        *((name, Strided) for name in _STRIDED),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_batch", "batch", "heads", "groups", "length", "keys")),
        *((name, ctypes.c_int32) for name in ("size", "value_size", "dtype", "threads")),
        ("query_map", Map),
        ("key_map", Map),
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
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


class KernelMap(NamedTuple):
    """A feature map with its tensors as the kernels read them: float32, contiguous, columns padded to whole vectors.

    With `fused` None the inputs are the features themselves, in float32, with log scales `[B, H, L]` or None.
    """

    fused: FusedMap | None
    width: int
    weight: Tensor | None
    bias: Tensor | None
    cosine: Tensor | None
    sine: Tensor | None
    scales: Tensor | None = None

    @property
    def scaled(self) -> bool:
        return self.scales is not None if self.fused is None else self.fused.scaled


def precomputed(features: Features) -> KernelMap:
    """Return the map of precomputed features `[B, H, L, m]`."""
    scales = None if features.log_scale is None else features.log_scale.contiguous()
    return KernelMap(None, features.values.shape[-1], None, None, None, None, scales)


def prepare(fused: FusedMap, head_dim: int) -> KernelMap:
    """Convert the tensors of a feature map for inputs of size `head_dim`."""
    cosine, sine = (None if x is None else x.float().contiguous() for x in (fused.cosine, fused.sine))
    return KernelMap(fused, fused.width(head_dim), pad_columns(fused.weight), pad_columns(fused.bias), cosine, sine)


def prepare_both(fused: tuple[FusedMap, FusedMap], head_dim: int) -> tuple[KernelMap, KernelMap]:
    """Convert the maps of queries and keys; one map of both is converted once."""
    query = prepare(fused[0], head_dim)
    return query, query if fused[1] is fused[0] else prepare(fused[1], head_dim)


@functools.cache
def lanes() -> int:
    """Return the number of floats in a vector register."""
    return int(library().hla_lanes())


def pad_columns(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 tensor whose last dimension is padded to whole vectors."""
    if tensor is None:
        return None
    missing = -tensor.shape[-1] % lanes()
    if not missing and tensor.dtype == torch.float32:
        if tensor.is_contiguous():
            return tensor
        if _is_transposed(tensor) and not tensor.requires_grad:
            return _copy_transposed(tensor)
    return functional.pad(tensor.float(), (0, missing)).contiguous() if missing else tensor.float().contiguous()


def _is_transposed(tensor: Tensor) -> bool:
    """Whether this is `[1, d, f]` with the memory layout `[f, d]`, in whole vectors."""
    if tensor.dim() != 3 or tensor.shape[0] != 1 or tensor.shape[1] % lanes():
        return False
    return tensor.stride(1) == 1 and tensor.stride(2) == tensor.shape[1]


def _copy_transposed(tensor: Tensor) -> Tensor:
    """Make a contiguous copy, ten times as fast as torch does: every decoding step needs one."""
    copy = empty(*tensor.shape)
    library().hla_transpose(tensor.data_ptr(), copy.data_ptr(), tensor.shape[2], tensor.shape[1])
    return copy


def transposed_weight(weight: Tensor | None) -> Tensor | None:
    """Return Wᵀ with its rows padded to whole vectors."""
    return None if weight is None else pad_columns(weight.detach().transpose(-1, -2))


def restore_parameters(
    maps: tuple[KernelMap, KernelMap], parameters: tuple[Tensor | None, ...]
) -> tuple[tuple[KernelMap, KernelMap], tuple[Tensor | None, Tensor | None]]:
    """Put saved weights and biases (of queries, then of keys) into maps; return the maps and the transposed weights."""
    query_weight, query_bias, key_weight, key_bias = parameters
    query_map = maps[0]._replace(weight=query_weight, bias=query_bias)
    key_map = maps[1]._replace(weight=key_weight, bias=key_bias)
    return (query_map, key_map), (transposed_weight(query_weight), transposed_weight(key_weight))


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory for a kernel to write to, independent of torch's default dtype and device."""
    return torch.empty(sizes, dtype=dtype, device="cpu")


def token_major_like(tensor: Tensor) -> Tensor:
    """Allocate a tensor of the same shape and dtype by `token_major`."""
    batch, heads, length, width = tensor.shape
    return token_major(batch, heads, length, width, tensor.dtype)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the data, None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def strided(tensor: Tensor) -> Strided:
    """Return the address and strides of `[B, H, L, d]`."""
    return Strided(tensor.data_ptr(), *tensor.stride()[:3])


def _first_stride(tensor: Tensor | None) -> int:
    """The stride of heads (or of rows of a batch) in elements; 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _map_argument(kernel_map: KernelMap, head_dim: int, weight_t: Tensor | None) -> Map:
    fused, scales = kernel_map.fused or FusedMap("relu"), kernel_map.scales
    return Map(
        PRECOMPUTED if kernel_map.fused is None else ACTIVATIONS[fused.activation],
        PARTS[fused.activation],
        kernel_map.width,
        kernel_map.weight is not None,
        head_dim,
        fused.bias_scale,
        fused.in_scale,
        fused.alpha,
        fused.epsilon,
        fused.factor,
        address(kernel_map.weight),
        address(weight_t),
        address(kernel_map.bias),
        _first_stride(kernel_map.weight),
        _first_stride(weight_t),
        _first_stride(kernel_map.bias),
        address(kernel_map.cosine),
        address(kernel_map.sine),
        _first_stride(kernel_map.cosine),
        address(scales),
        *((0, 0) if scales is None else scales.stride()[:2]),
    )


def arguments(
    call: AttentionCall,
    maps: tuple[KernelMap, KernelMap],
    out: Tensor,
    weights_t: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Arguments:
    """Fill the fields that every kernel reads. The caller keeps the tensors alive until the kernel has run."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, size = query.shape
    _, groups, keys, value_size = value.shape
    products = batch * heads * (length + keys) * call.num_features * value_size
    query_map = _map_argument(maps[0], size, weights_t[0])
    same = maps[0] is maps[1] and weights_t[0] is weights_t[1]
    return Arguments(
        query=strided(query),
        key=strided(key),
        value=strided(value),
        out=strided(out),
        mask=address(mask),
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
        key_map=query_map if same else _map_argument(maps[1], size, weights_t[1]),
    )


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


class ParameterGradients:
    """Buffers of the gradients of the maps' parameters, one for every head of every row of the batch."""

    def __init__(
        self, parameters: tuple[Tensor | None, ...], needed: tuple[bool, ...], batch: int, heads: tuple
    ) -> None:
        self.parameters = parameters
        self.parts = [
            empty(batch, heads[index // 2], *tensor.shape[1:]).zero_() if tensor is not None and needed[index] else None
            for index, tensor in enumerate(parameters)
        ]

    def fill(self, filled: Arguments) -> None:
        """Set the addresses of the buffers."""
        filled.query_weight_gradient, filled.query_bias_gradient = (address(part) for part in self.parts[:2])
        filled.key_weight_gradient, filled.key_bias_gradient = (address(part) for part in self.parts[2:])

    def totals(self) -> list[Tensor | None]:
        """Return the gradients, summed over the batch, and over the heads where they share the parameter."""
        pairs = zip(self.parts, self.parameters, strict=True)
        return [
            None if part is None or parameter is None else parameter_gradient(part, parameter)
            for part, parameter in pairs
        ]
