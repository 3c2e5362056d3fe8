"""The kernels' argument block, field by field, and what fills it from tensors."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..common import Features
from ..fused import PARTS, AttentionCall, FusedMap
from .build import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {name: number for number, name in enumerate(PARTS)}
#: The kernels' number for features that come ready-made.
GIVEN = len(ACTIVATIONS)

#: Multiply-adds below which one thread is faster than waking others.
WORTH_THREADS = 1 << 20


class Strided(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class Map(ctypes.Structure):
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
_POINTERS = (
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
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("skip", ctypes.c_void_p),
        ("mix", Strided),
        ("top", ctypes.c_void_p),
        ("mix_gradient", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("window", "two_sided")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("ring_key", "ring_value", "ring_mask")),
        *((name, ctypes.c_void_p) for name in ("next_ring_key", "next_ring_value", "next_ring_mask")),
        *((name, ctypes.c_int64) for name in ("ring_capacity", "next_ring_capacity")),
        *((name, ctypes.c_void_p) for name in ("mix_base", "mix_weight", "count", "next_count")),
        *((name, ctypes.c_float) for name in ("mix_bound", "saturation")),
        ("decay", Strided),
    ]


#: A tensor with its strides; a `Map`; and the fields of `Arguments` that every call sets, in their order. Packing them
#: at once takes a third of the time of setting them one by one: a decoding step feels it.
_TENSOR = "Pqqq"
_MAP = struct.Struct("@iiiiifffffPPPqqqPPqPqq")
_FIELDS = struct.Struct(f"@{4 * _TENSOR}{4 * struct.calcsize(_TENSOR)}xPqqqqqqiiii{2 * f'{_MAP.size}s'}")


class Side(NamedTuple):
    """A map with its tensors as the kernels read them: float32, contiguous, columns padded to whole vectors.

    Without a map the tokens are features already, in float32, with log scales `[B, H, L]` or none.
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


def given(features: Features) -> Side:
    """The side of features `[B, H, L, m]`."""
    scales = None if features.log_scale is None else features.log_scale.contiguous()
    return Side(None, features.values.shape[-1], None, None, None, None, scales)


def prepare(fused: FusedMap, head_dim: int) -> Side:
    if fused.weight is None and fused.cosine is None:
        return _without_tensors(fused, head_dim)
    cosine, sine = (None if held is None else held.float().contiguous() for held in (fused.cosine, fused.sine))
    return Side(fused, fused.width(head_dim), pad_columns(fused.weight), pad_columns(fused.bias), cosine, sine)


@functools.lru_cache(maxsize=256)
def _without_tensors(fused: FusedMap, head_dim: int) -> Side:
    return Side(fused, fused.width(head_dim), None, None, None, None)


def prepare_both(sides: tuple[FusedMap, FusedMap], head_dim: int) -> tuple[Side, Side]:
    """Queries and keys; a map of both is prepared once."""
    query = prepare(sides[0], head_dim)
    return query, query if sides[1] is sides[0] else prepare(sides[1], head_dim)


@functools.cache
def lanes() -> int:
    """Numbers in a vector register."""
    return int(library().hla_lanes())


def pad_columns(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    missing = -tensor.shape[-1] % lanes()
    if not missing and tensor.dtype == torch.float32:
        if tensor.is_contiguous():
            return tensor
        if _is_turned(tensor) and not tensor.requires_grad:
            return _turn_back(tensor)
    return functional.pad(tensor.float(), (0, missing)).contiguous() if missing else tensor.float().contiguous()


def _is_turned(tensor: Tensor) -> bool:
    """Whether this is `[1, d, f]` that lies in memory as `[f, d]`, in whole vectors."""
    if tensor.dim() != 3 or tensor.shape[0] != 1 or tensor.shape[1] % lanes():
        return False
    return tensor.stride(1) == 1 and tensor.stride(2) == tensor.shape[1]


def _turn_back(tensor: Tensor) -> Tensor:
    """A contiguous copy, ten times as fast as torch's: a decoding step needs one."""
    made = room(*tensor.shape)
    library().hla_transpose(tensor.data_ptr(), made.data_ptr(), tensor.shape[2], tensor.shape[1])
    return made


def turned(weight: Tensor | None) -> Tensor | None:
    """Wᵀ with its rows padded to whole vectors."""
    return None if weight is None else pad_columns(weight.detach().transpose(-1, -2))


def plain(tensor: Tensor) -> Tensor:
    """The kernels take any strides but that of the numbers within a token, and numbers as they lie in memory."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def room(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty tensor for a kernel to write to, whatever dtype and device others have made the default."""
    return torch.empty(sizes, dtype=dtype, device="cpu")


def token_major(batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, L, e]` that lies in memory as `[B, L, H, e]`, the order in which a model goes on with it."""
    if length == 1:
        return room(batch, heads, 1, width, dtype=dtype)
    return room(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def token_major_like(tensor: Tensor) -> Tensor:
    batch, heads, length, width = tensor.shape
    return token_major(batch, heads, length, width, tensor.dtype)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def strided(tensor: Tensor) -> Strided:
    return Strided(*_place(tensor))


def _place(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = tensor.stride()
    return tensor.data_ptr(), batch, head, token


def _step(tensor: Tensor | None) -> int:
    """Elements from one head (or row of a batch) to the next; 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _map(side: Side, head_dim: int, weight_t: Tensor | None) -> bytes:
    """The fields of `Map`."""
    if side.fused is None:
        scales = (0, 0, 0) if side.scales is None else (side.scales.data_ptr(), *side.scales.stride()[:2])
        return _MAP.pack(GIVEN, 1, side.width, False, head_dim, *(1.0, 1.0, 1.0, 0.0, 1.0), *(9 * (0,)), *scales)
    if side.weight is None and side.cosine is None:
        return _map_without_tensors(side.fused, side.width, head_dim)
    fused = side.fused
    return _MAP.pack(
        ACTIVATIONS[fused.activation],
        PARTS[fused.activation],
        side.width,
        fused.weight is not None,
        head_dim,
        fused.bias_scale,
        fused.in_scale,
        fused.alpha,
        fused.epsilon,
        fused.factor,
        address(side.weight) or 0,
        address(weight_t) or 0,
        address(side.bias) or 0,
        _step(side.weight),
        _step(weight_t),
        _step(side.bias),
        address(side.cosine) or 0,
        address(side.sine) or 0,
        _step(side.cosine),
        *(0, 0, 0),
    )


@functools.lru_cache(maxsize=256)
def _map_without_tensors(fused: FusedMap, width: int, head_dim: int) -> bytes:
    numbers = (fused.bias_scale, fused.in_scale, fused.alpha, fused.epsilon, fused.factor)
    activation = fused.activation
    return _MAP.pack(ACTIVATIONS[activation], PARTS[activation], width, False, head_dim, *numbers, *(12 * (0,)))


def arguments(
    call: AttentionCall,
    sides: tuple[Side, Side],
    out: Tensor,
    backs: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Arguments:
    """The fields that every kernel reads. Whoever calls keeps the tensors alive until the kernel has run."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, size = query.shape
    _, groups, keys, value_size = value.shape
    products = batch * heads * (length + keys) * call.num_features * value_size
    query_map = _map(sides[0], size, backs[0])
    same = sides[0] is sides[1] and backs[0] is backs[1]
    made = Arguments()
    _FIELDS.pack_into(
        made,
        0,
        *_place(query),
        *_place(key),
        *_place(value),
        *_place(out),
        0 if mask is None else mask.data_ptr(),
        0 if mask is None else _step(mask),
        batch,
        heads,
        groups,
        length,
        keys,
        size,
        value_size,
        DTYPES[value.dtype],
        torch.get_num_threads() if products > WORTH_THREADS else 1,
        query_map,
        query_map if same else _map(sides[1], size, backs[1]),
    )
    return made


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(library(), f"hla_{name}")


def run(name: str, given: Arguments) -> None:
    """Run a kernel.

    Raises:
        MemoryError: it got no memory.
    """
    prepared_run(name, given)()


def prepared_run(name: str, given: Arguments) -> Callable[[], None]:
    """`run` with these arguments, whatever is written into them until then."""
    kernel, address = _kernel(name), ctypes.byref(given)

    def prepared() -> None:
        if kernel(address):
            raise MemoryError(f"The native kernel {name!r} got no memory. Free some, or use set_backend('torch').")

    return prepared


class ParameterGradients:
    """Room for the gradients of the maps' parameters, a part for every head of every row of the batch."""

    def __init__(
        self, parameters: tuple[Tensor | None, ...], wanted: tuple[bool, ...], batch: int, heads: tuple
    ) -> None:
        self.parameters = parameters
        self.parts = [
            room(batch, heads[place // 2], *tensor.shape[1:]).zero_() if tensor is not None and wanted[place] else None
            for place, tensor in enumerate(parameters)
        ]

    def place_in(self, given: Arguments) -> None:
        given.query_weight_gradient, given.query_bias_gradient = (address(part) for part in self.parts[:2])
        given.key_weight_gradient, given.key_bias_gradient = (address(part) for part in self.parts[2:])

    def sums(self) -> list[Tensor | None]:
        """Over the batch, and over the heads where they share the parameter."""
        found: list[Tensor | None] = []
        for part, parameter in zip(self.parts, self.parameters, strict=True):
            if part is None or parameter is None:
                found.append(None)
            else:
                total = part.sum(0)
                found.append(total.sum(0, keepdim=True) if parameter.shape[0] == 1 else total)
        return found
