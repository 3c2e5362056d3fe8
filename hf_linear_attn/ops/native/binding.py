"""The kernels' arguments by name, and the operator that runs a kernel inside of a graph of torch.compile."""

import ctypes
import functools
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..common import constant_result, first_derivative, parameter_gradient, readable, token_major
from ..formulas import PARTS, FusedMap
from ..kernel_inputs import DTYPES
from .build import library

Tensors = dict[str, Tensor]
"""Inputs or outputs of a kernel by the name of their field in `Arguments`; of feature maps also `query_weight`
and `query_bias`, and those of `key_…`."""

Numbers = dict[str, float]
"""Numbers by the name of their field in `Arguments`; of feature maps also `query_activation` and so on."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
ACTIVATIONS = {name: number for number, name in enumerate(PARTS)}
#: The kernels' number of the "activation" whose inputs are the features themselves.
PRECOMPUTED = len(ACTIVATIONS)
_PARTS = (*PARTS.values(), 1)

#: Number of multiply-adds below which one thread is faster than several.
MIN_THREADED_PRODUCTS = 1 << 20

_FACTORS = ("in_scale", "bias_scale", "alpha", "epsilon", "factor", "softcap")
_MAP_NUMBERS = {of: tuple(f"{of}_{name}" for name in ("activation", *_FACTORS)) for of in ("query", "key")}
_MAP_TENSORS = {of: tuple(f"{of}_{name}" for name in ("weight", "bias")) for of in ("query", "key")}


class Strided(ctypes.Structure):
    """`hla::Strided`: an address, and strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "token"))]


class Map(ctypes.Structure):
    """`hla::Map`: the formula of a feature map with the addresses of its tensors."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "weight_t", "bias", "scales")),
        *((f"{name}_head", ctypes.c_int64) for name in ("weight", "weight_t", "bias")),
        *((name, ctypes.c_int64) for name in ("scale_batch", "scale_head")),
        *((name, ctypes.c_int32) for name in ("activation", "parts", "width", "projected", "input")),
        *((name, ctypes.c_float) for name in _FACTORS),
    ]


_STRIDED = (
    *("query", "key", "value", "out", "out_gradient", "query_gradient", "key_gradient", "value_gradient", "mix"),
    *("sink_key", "sink_value", "sink_key_gradient", "sink_value_gradient", "decay"),
    *("near_bias", "sink_bias", "row_behind", "key_before", "key_behind"),
)
_PARAMETER_GRADIENTS = ("query_weight_gradient", "query_bias_gradient", "key_weight_gradient", "key_bias_gradient")
_TENSOR_FIELDS = (
    *("mask", "kv", "k_sum", "log_scale", "next_kv", "next_k_sum", "next_log_scale", "normaliser", "top"),
    *(*_PARAMETER_GRADIENTS, "mix_gradient", "mix_weight", "model_sink"),
    *("skip", "sink_position", "count", "next_count"),
    *("ring_key", "ring_value", "ring_mask", "next_ring_key", "next_ring_value", "next_ring_mask"),
    "head_index",
)
_LENGTHS = ("mask_batch", "batch", "heads", "groups", "length", "keys", "offset", "sinks", "ring_capacity")
_SIZES = ("size", "value_size", "dtype", "threads", "window", "two_sided", "int8_rows")
_REALS = ("scaling", "mix_bound", "saturation", "softcap")


class Arguments(ctypes.Structure):
    """`hla::Call` of kernelized.h; `tensors` are those whose memory it refers to: inputs by name, as they are read, and
    outputs."""

    _fields_ = [
        *((name, Strided) for name in _STRIDED),
        *((name, ctypes.c_void_p) for name in _TENSOR_FIELDS),
        ("query_map", Map),
        ("key_map", Map),
        *((name, ctypes.c_int64) for name in _LENGTHS),
        *((name, ctypes.c_int32) for name in _SIZES),
        *((name, ctypes.c_float) for name in _REALS),
    ]
    tensors: tuple[Tensors, list[Tensor]]


_SETTINGS = frozenset((*("offset", "sinks", "window", "two_sided", "int8_rows", "ring_capacity"), *_REALS))
_HAS_STRIDES = frozenset(_STRIDED)
_HAS_ADDRESS = frozenset(_TENSOR_FIELDS)


def map_arguments(fused: tuple[FusedMap, FusedMap]) -> tuple[Tensors, Numbers]:
    """Return the tensors and numbers of the maps of queries and keys; of one map for both, those of queries."""
    tensors: Tensors = {}
    numbers: Numbers = {}
    shared = fused[1] is fused[0] and not fused[0].requires_grad
    for of, fused_map in zip(("query",) if shared else ("query", "key"), fused, strict=False):
        factors = fused_map.in_scale, fused_map.bias_scale, fused_map.alpha, fused_map.epsilon, fused_map.factor
        values = ACTIVATIONS[fused_map.activation], *factors, fused_map.softcap or 0.0
        numbers.update(zip(_MAP_NUMBERS[of], values, strict=True))
        for name, tensor in zip(_MAP_TENSORS[of], (fused_map.weight, fused_map.bias), strict=True):
            if tensor is not None:
                tensors[name] = tensor
    return tensors, numbers


@functools.cache
def _lanes() -> int:
    return int(library().hla_lanes())


#: The number of floats in a vector register; a constant where torch.compile traces a call.
lanes = constant_result(lambda: _lanes())


def pad_columns(tensor: Tensor) -> Tensor:
    """Return a contiguous float32 tensor whose last dimension is padded to whole vectors."""
    tensor, missing = tensor.float(), -tensor.shape[-1] % _lanes()
    return (functional.pad(tensor, (0, missing)) if missing else tensor).contiguous()


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory for a kernel to write to, independent of torch's default dtype and device."""
    return torch.empty(sizes, dtype=dtype, device="cpu")


def _first_stride(tensor: Tensor | None) -> int:
    """Return the stride of heads (or of rows of a batch) in elements; 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def _map(of: str, inputs: Tensors, numbers: Numbers, backward: bool, used: Tensors) -> Map:
    """Return the map of queries or keys; the tensors that it refers to are added to `used`."""
    activation, *factors = [numbers.get(name, 1.0) for name in _MAP_NUMBERS[of]]
    weight, bias = map(inputs.get, _MAP_TENSORS[of])
    size = inputs["query"].shape[3]
    scales = inputs.get(f"{of}_scales")
    transposed = None
    width = size if weight is None else weight.shape[-1]
    if weight is not None:
        weight = pad_columns(weight)
        bias = None if bias is None else pad_columns(bias)
        transposed = pad_columns(weight.mT) if backward else None
    scales = None if scales is None else scales.contiguous()
    tensors = weight, transposed, bias, scales
    names = f"{of}_weight", f"{of}_transposed", f"{of}_bias", f"{of}_scales"
    used.update((name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None)
    return Map(
        *[None if tensor is None else tensor.data_ptr() for tensor in tensors],
        *[_first_stride(tensor) for tensor in tensors[:3]],
        *((0, 0) if scales is None else scales.stride()[:2]),
        *(int(activation), _PARTS[int(activation)], width, weight is not None, size),
        *factors,
    )


def _run(kernel: str, inputs: Tensors, outputs: Tensors, numbers: Numbers) -> Arguments:
    backward = kernel.endswith("backward")
    used: Tensors = {}  # what the arguments refer to
    query_map = key_map = _map("query", inputs, numbers, backward, used)
    if "key_activation" in numbers:
        key_map = _map("key", inputs, numbers, backward, used)
    batch, heads, length, size = inputs["query"].shape
    _, groups, keys, value_size = inputs["value"].shape
    sink_key = inputs.get("sink_key", outputs.get("sink_key"))
    products = batch * heads * (length + keys) * key_map.parts * key_map.width * value_size
    filled = Arguments(
        query_map=query_map,
        key_map=key_map,
        batch=batch,
        heads=heads,
        groups=groups,
        length=length,
        keys=keys,
        sinks=0 if sink_key is None else sink_key.shape[2],
        size=size,
        value_size=value_size,
        dtype=DTYPE_NUMBERS[inputs["value"].dtype],
        threads=torch.get_num_threads() if products > MIN_THREADED_PRODUCTS else 1,
    )
    for name in _SETTINGS & numbers.keys():
        setattr(filled, name, numbers[name])
    for name, tensor in inputs.items():
        if name in _HAS_STRIDES:
            tensor = used[name] = tensor.float() if name == "mix" else readable(tensor)
            tensor = tensor.expand(batch, heads, length) if name == "mix" else tensor
            setattr(filled, name, Strided(tensor.data_ptr(), *tensor.stride()[:3]))
        elif name in _HAS_ADDRESS:
            tensor = pad_columns(tensor) if name == "mix_weight" else tensor.contiguous()
            setattr(filled, name, tensor.data_ptr())
            if name == "mask":
                filled.mask_batch = _first_stride(tensor)
            used[name] = tensor
    parts: Tensors = {}
    for name, tensor in outputs.items():
        if name in _PARAMETER_GRADIENTS:  # of every head of every row of the batch, in whole vectors; added up below
            columns = tensor.shape[-1] + -tensor.shape[-1] % _lanes()
            count = heads if name.startswith("query") else groups
            tensor = parts[name] = empty(batch, count, *tensor.shape[1:-1], columns).zero_()
        if name in _HAS_STRIDES:
            setattr(filled, name, Strided(tensor.data_ptr(), *tensor.stride()[:3]))
        else:
            assert tensor.is_contiguous()
            setattr(filled, name, tensor.data_ptr())
            if f"next_{name}" in _HAS_ADDRESS:
                setattr(filled, f"next_{name}", tensor.data_ptr())
    filled.tensors = used, [*outputs.values(), *parts.values()]
    launch(kernel, filled)
    for name, part in parts.items():
        outputs[name].copy_(parameter_gradient(part[..., : outputs[name].shape[-1]], outputs[name]))
    return filled


def launch(name: str, filled: Arguments) -> None:
    """Run a kernel."""
    launcher(name, filled)()


def launcher(name: str, filled: Arguments) -> Callable[[], None]:
    """Return what runs a kernel with these arguments, as they are at the time; a MemoryError where memory runs out."""
    function = getattr(library(), f"hla_{name}")
    reference = ctypes.byref(filled)

    def run_kernel() -> None:
        if function(reference):
            raise MemoryError(
                f"The native kernel {name!r} could not allocate memory. Free some, or use set_backend('torch')."
            )

    return run_kernel


class Launch(NamedTuple):
    """What a kernel has run with, and the tensors of feature maps and mixing weights as the call had them."""

    kernel: str
    filled: Arguments
    learned: Tensors


# --------------------------------------------------------------------------------------------------------- The operator


def run(kernel: str, inputs: Tensors, outputs: Tensors, numbers: Numbers) -> Arguments | None:
    """Run a kernel, which writes to the outputs; inside of a graph of torch.compile as `hf_linear_attn::run`.

    Returns the arguments that the kernel ran with; None inside of a graph.

    Args:
        kernel: The name of the kernel.
        inputs: At least query, key and value; they may have any strides.
        outputs: They are contiguous, or where the kernel knows strides contiguous within a token. An output with the
            name of an entry of a state, `kv` and not `next_kv`, is both: read, and written over.
        numbers: Integers are passed as they are, or as whole numbers.
    """
    if not torch.compiler.is_compiling():
        return _run(kernel, inputs, outputs, numbers)
    names = " ".join((*inputs, *outputs, *numbers))
    values = [float(number) for number in numbers.values()]
    torch.ops.hf_linear_attn.run(kernel, names, [*inputs.values()], [*outputs.values()], values)
    return None


def _run_operator(kernel: str, names: str, inputs: list[Tensor], outputs: list[Tensor], numbers: list[float]) -> None:
    named = iter(names.split())
    groups: list[list[Any]] = [inputs, outputs, [int(number) if number.is_integer() else number for number in numbers]]
    _run(kernel, *(dict(zip(islice(named, len(group)), group, strict=True)) for group in groups))


_LIBRARY = torch.library.Library("hf_linear_attn", "DEF")
_LIBRARY.define("run(str kernel, str names, Tensor[] inputs, Tensor(a!)[] outputs, float[] numbers) -> ()")
_LIBRARY.impl("run", _run_operator, "CPU")
torch.library.register_fake("hf_linear_attn::run", lambda *arguments: None, lib=_LIBRARY)


# ------------------------------------------------------------------------------------------------------------ Gradients


def output(inputs: Tensors) -> Tensor:
    """Allocate the output `[B, H, L, e]` of a kernel."""
    value = inputs["value"]
    return token_major((*inputs["query"].shape[:3], value.shape[3]), value.dtype)


def differentiable(kernel: str, inputs: Tensors, numbers: Numbers) -> Tensor:
    """Return the output of a kernel without a state, with gradients."""
    tensors = [*inputs.values()]
    if torch.compiler.is_compiling():
        # It does not take a tensor twice, such as a weight of queries and of keys.
        tensors = [tensor.view_as(tensor) for tensor in tensors]
        # With dynamic=True a number is an input of the graph, which cannot be read inside of the function first.
        numbers = {name: float(number) for name, number in numbers.items()}
    return _Kernel.apply(kernel, tuple(inputs), numbers, *tensors)


class _Kernel(torch.autograd.Function):
    """A kernel with gradients: it saves its inputs, the output, the normalisers and the stabilisers (of the windowed
    form), and the backward kernel computes the rest again."""

    @staticmethod
    def forward(ctx: Any, kernel: str, names: tuple[str, ...], numbers: Numbers, *tensors: Tensor) -> Tensor:
        inputs = dict(zip(names, tensors, strict=True))
        saved = {"bidirectional": (), "causal": ("normaliser",), "windowed": ("normaliser", "top")}[kernel]
        outputs = {"out": output(inputs), **{name: empty(*inputs["query"].shape[:3]) for name in saved}}
        run(kernel, inputs, outputs, numbers)
        ctx.save_for_backward(*tensors, *outputs.values())
        ctx.kernel = kernel
        ctx.names = (*names, *outputs)
        ctx.numbers = numbers
        return outputs["out"]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, tensors: tuple[Tensor, ...], out_gradient: Tensor) -> Any:
        inputs = {**dict(zip(ctx.names, tensors, strict=True)), "out_gradient": out_gradient}
        gradients: Tensors = {}
        for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=False):
            tensor = inputs[name]
            if name in ("query", "key", "value"):
                gradients[name] = token_major(tensor.shape, tensor.dtype)
            elif name == "mix":
                gradients[name] = empty(*inputs["query"].shape[:3]).zero_()
            elif name in ("sink_key", "sink_value"):
                gradients[name] = empty(*tensor.shape, dtype=tensor.dtype)
            elif needed:
                gradients[name] = empty(*tensor.shape)
        outputs = {f"{name}_gradient": gradient for name, gradient in gradients.items()}
        run(f"{ctx.kernel}_backward", inputs, outputs, ctx.numbers)
        if "mix" in gradients:
            gradients["mix"] = gradients["mix"].sum_to_size(inputs["mix"].shape)
        of_names = (gradients.get(name) for name in ctx.names[: len(ctx.needs_input_grad) - 3])
        return None, None, None, *of_names
