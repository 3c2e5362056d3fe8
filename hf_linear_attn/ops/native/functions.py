"""The native backend: calls of the compiled kernels, with their gradients."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..common import State
from ..fused import PARTS, FusedMap, KernelizedCall
from .build import BuildError, library

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {name: number for number, name in enumerate(PARTS)}

#: Multiply-adds below which one thread is faster than waking others.
WORTH_THREADS = 1 << 20


class _Strided(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("activation", "parts", "width", "projected", "input", "unused")),
        *((name, ctypes.c_float) for name in ("in_scale", "alpha", "epsilon", "factor")),
        *((name, ctypes.c_void_p) for name in ("weight", "weight_back", "bias")),
        *((name, ctypes.c_int64) for name in ("weight_head", "weight_back_head", "bias_head")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        ("angle_batch", ctypes.c_int64),
    ]


_STRIDED = ("query", "key", "value", "out", "out_gradient", "query_gradient", "key_gradient", "value_gradient")
_POINTERS = (
    *("state", "state_sum", "state_scale", "next_state", "next_sum", "next_scale", "normaliser"),
    *("query_weight_gradient", "query_bias_gradient", "key_weight_gradient", "key_bias_gradient"),
)


class _Call(ctypes.Structure):
    """`hla::Call` of kernelized.h, field by field."""

    _fields_ = [
        *((name, _Strided) for name in _STRIDED),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_batch", "batch", "heads", "groups", "length", "keys")),
        *((name, ctypes.c_int32) for name in ("size", "value_size", "dtype", "threads")),
        ("query_map", _Map),
        ("key_map", _Map),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None where they can. The first call may compile them."""
    try:
        loaded = library()
    except BuildError as error:
        logger.warning("No native CPU kernels: %s. Attention runs in plain torch, several times slower.", error)
        return str(error)
    assert loaded.hla_call_bytes() == ctypes.sizeof(_Call), "the kernels and their binding disagree"
    return None


class NativeBackend:
    """C++ kernels: one pass over blocks of 64 tokens, the features of a block never leaving the cache.

    float32, bfloat16 and float16 inputs; sums and features in float32. Peak extra memory: the sums, `H·m·e` floats for
    every 2,048 tokens (bidirectional) or none (causal), and some hundred kilobytes a thread; forward and backward.
    Results are the same bits whatever the number of threads and whatever else is in the batch.
    """

    name = "native"

    def refuses(self, call: KernelizedCall) -> str | None:
        if torch.compiler.is_compiling():
            return "torch.compile traces torch operations only"
        query, key, value = call.query, call.key, call.value
        if query.device.type != "cpu":
            return f"the tensors are on {query.device.type}"
        if call.fused is None or call.signed:
            return "the feature map has no fused form"
        if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            return f"the dtype is {query.dtype}"
        if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
            return "the inputs are no plain tensors"
        if call.needs_grad():
            if call.fused[0].scaled:
                return "this feature map's backward is not fused"
            if call.causal and (call.state is not None or call.keep_state):
                return "gradients through a carried state are not fused"
        if torch.is_anomaly_enabled():
            return "anomaly detection asks for torch operations"
        return unavailable()

    def run(self, call: KernelizedCall) -> tuple[Tensor, State | None]:
        assert call.fused is not None
        query_side, key_side = (_prepare(side, call.query.shape[3]) for side in call.fused)
        call = call._replace(query=_plain(call.query), key=_plain(call.key), value=_plain(call.value))
        if call.needs_grad():
            tensors = (query_side.weight, query_side.bias, key_side.weight, key_side.bias)
            return _Attention.apply(call.query, call.key, call.value, *tensors, call, query_side, key_side), None
        return _forward(call, query_side, key_side)


def _plain(tensor: Tensor) -> Tensor:
    """The kernels take any strides but that of the numbers within a token."""
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


class _Side(NamedTuple):
    """A map with its tensors as the kernels read them: float32, contiguous, columns padded to whole vectors."""

    fused: FusedMap
    width: int
    weight: Tensor | None
    bias: Tensor | None
    cosine: Tensor | None
    sine: Tensor | None


def _pad_columns(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    missing = -tensor.shape[-1] % library().hla_lanes()
    return functional.pad(tensor.float(), (0, missing)).contiguous() if missing else tensor.float().contiguous()


def _prepare(side: FusedMap, head_dim: int) -> _Side:
    angles = (None if held is None else held.float().contiguous() for held in (side.cosine, side.sine))
    return _Side(side, side.width(head_dim), _pad_columns(side.weight), _pad_columns(side.bias), *angles)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(tensor: Tensor | None) -> int:
    """Elements from one head (or row of a batch) to the next; 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _strided(tensor: Tensor) -> _Strided:
    return _Strided(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def _map(side: _Side, head_dim: int, weight_back: Tensor | None = None) -> _Map:
    fused = side.fused
    return _Map(
        ACTIVATIONS[fused.activation],
        PARTS[fused.activation],
        side.width,
        fused.weight is not None,
        head_dim,
        0,
        fused.in_scale,
        fused.alpha,
        fused.epsilon,
        fused.factor,
        _address(side.weight),
        _address(weight_back),
        _address(side.bias),
        _step(side.weight),
        _step(weight_back),
        _step(side.bias),
        _address(side.cosine),
        _address(side.sine),
        _step(side.cosine),
    )


def _call(call: KernelizedCall, query_map: _Map, key_map: _Map, out: Tensor) -> _Call:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, length, size = query.shape
    groups, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    filled = _Call(
        query=_strided(query),
        key=_strided(key),
        value=_strided(value),
        out=_strided(out),
        batch=batch,
        heads=heads,
        groups=groups,
        length=length,
        keys=keys,
        size=size,
        value_size=value_size,
        dtype=DTYPES[query.dtype],
        threads=_threads(batch * heads * (length + keys) * call.num_features * value_size),
        query_map=query_map,
        key_map=key_map,
    )
    if mask is not None:
        filled.mask, filled.mask_batch = mask.data_ptr(), _step(mask)
    return filled


def _threads(products: int) -> int:
    return torch.get_num_threads() if products > WORTH_THREADS else 1


def _run(name: str, filled: _Call) -> None:
    status = getattr(library(), f"hla_{name}")(ctypes.byref(filled))
    if status:
        raise MemoryError(f"The native kernel {name!r} got no memory. Free some, or use set_backend('torch').")


def _token_major(batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, L, e]` that lies in memory as `[B, L, H, e]`, the order in which a model goes on with it."""
    return torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def _forward(
    call: KernelizedCall, query_side: _Side, key_side: _Side, normaliser: Tensor | None = None
) -> tuple[Tensor, State | None]:
    batch, heads, length, size = call.query.shape
    groups, value_size = call.key.shape[1], call.value.shape[3]
    out = _token_major(batch, heads, length, value_size, call.value.dtype)
    mask = None if call.mask is None else call.mask.contiguous()
    filled = _call(call._replace(mask=mask), _map(query_side, size), _map(key_side, size), out)
    if not call.causal:
        _run("bidirectional", filled)
        return out, None
    held: State = {name: tensor.contiguous() for name, tensor in (call.state or {}).items()}
    if held:
        filled.state, filled.state_sum = _address(held["kv"]), _address(held["k_sum"])
        filled.state_scale = _address(held.get("log_scale"))
    if not length and not held:
        return out, None
    after: State = {
        "kv": torch.empty(batch, groups, call.num_features, value_size),
        "k_sum": torch.empty(batch, groups, call.num_features),
    }
    filled.next_state, filled.next_sum = _address(after["kv"]), _address(after["k_sum"])
    if key_side.fused.scaled:
        after["log_scale"] = torch.empty(batch, groups)
        filled.next_scale = _address(after["log_scale"])
    filled.normaliser = _address(normaliser)
    _run("causal", filled)
    return out, after


class _Attention(torch.autograd.Function):
    """Keeps inputs, output and (causal) the normalisers; the backward pass computes features and sums again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        call, query_side, key_side = rest[4:]
        batch, heads, length, _ = query.shape
        normaliser = torch.empty(batch, heads, length) if call.causal else None
        out, _ = _forward(call, query_side, key_side, normaliser)
        ctx.save_for_backward(query, key, value, *rest[:4], out, normaliser, call.mask)
        ctx.call = call._replace(query=None, key=None, value=None, mask=None)  # what is saved is not held twice
        ctx.sides = tuple(side._replace(weight=None, bias=None) for side in (query_side, key_side))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *parameters, out, normaliser, mask = ctx.saved_tensors
        gradient = _plain(gradients[0])
        batch, heads, length, size = query.shape
        groups, keys = key.shape[1], key.shape[2]
        sides = [
            side._replace(weight=parameters[2 * place], bias=parameters[2 * place + 1])
            for place, side in enumerate(ctx.sides)
        ]
        backs = [_turned(side.weight) for side in sides]
        maps = [_map(side, size, back) for side, back in zip(sides, backs, strict=True)]
        mask = None if mask is None else mask.contiguous()
        filled = _call(ctx.call._replace(query=query, key=key, value=value, mask=mask), maps[0], maps[1], out)
        to_query = _token_major(batch, heads, length, size, query.dtype)
        to_key = _token_major(batch, groups, keys, size, key.dtype)
        to_value = _token_major(batch, groups, keys, value.shape[3], value.dtype)
        filled.out_gradient = _strided(gradient)
        filled.query_gradient, filled.key_gradient = _strided(to_query), _strided(to_key)
        filled.value_gradient, filled.normaliser = _strided(to_value), _address(normaliser)
        sums = [
            _room(tensor, batch, heads if place < 2 else groups) if ctx.needs_input_grad[3 + place] else None
            for place, tensor in enumerate(parameters)
        ]
        filled.query_weight_gradient, filled.query_bias_gradient = _address(sums[0]), _address(sums[1])
        filled.key_weight_gradient, filled.key_bias_gradient = _address(sums[2]), _address(sums[3])
        _run("causal_backward" if ctx.call.causal else "bidirectional_backward", filled)
        found = [None if held is None else held.sum(0) for held in sums]
        shared = [
            held.sum(0, keepdim=True) if held is not None and tensor.shape[0] == 1 else held
            for held, tensor in zip(found, parameters, strict=True)
        ]
        return to_query, to_key, to_value, *shared, None, None, None


def _turned(weight: Tensor | None) -> Tensor | None:
    """Wᵀ with its rows padded to whole vectors."""
    return None if weight is None else _pad_columns(weight.detach().transpose(-1, -2))


def _room(parameter: Tensor, batch: int, heads: int) -> Tensor:
    """Zeros for the gradient of one head's part of a parameter, for every head of every row."""
    return torch.zeros(batch, heads, *parameter.shape[1:])
