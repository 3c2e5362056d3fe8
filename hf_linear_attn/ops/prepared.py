"""Decoding steps that are prepared once: from one token to the next, a few addresses in a kernel's arguments change.

A mechanism whose step the native kernels have computed in the memory of its state calls `prepare`, which leaves the
filled arguments with the state. At the next token `run_prepared` launches them again if nothing else has changed: the
state (it is another one when it was reordered, moved, converted or put back), sizes, dtype and device of the token, the
mechanism's attributes and options, and where its parameters are. Their numbers may change at any time: kernels read
them where they are, or copies that are made anew for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import backends
from .calls import AttentionInputs
from .common import ACCELERATE_HOOK, InPlaceState, State, capacity_for
from .kernel_inputs import DTYPES
from .native import binding
from .native.backend import has_float16, unavailable_reason

#: The parts of a state that move through memory with each token.
RING = ("ring_key", "ring_value")

#: The parts that grow by each token: the kernel's field of their memory, and their dimension of tokens.
GROWING = {
    "exact_key": ("next_ring_key", 2),
    "exact_value": ("next_ring_value", 2),
    "exact_mask": ("next_ring_mask", 1),
}


def run_prepared(mechanism: nn.Module, inputs: AttentionInputs) -> tuple[Tensor, State] | None:
    """Return the output of a step and the state after it, if the state has a step that is prepared for this call."""
    state = inputs.state
    if torch.compiler.is_compiling() or not isinstance(state, InPlaceState) or state.prepared is None:
        return None
    if not state.prepared.matches(mechanism, inputs):
        state.prepared = None
        return None
    return state.prepared.run(inputs), state


def prepare(mechanism: nn.Module, inputs: AttentionInputs, after: State | None) -> None:
    """Prepare the next step where a kernel has computed this one in the memory of its state `after`."""
    if torch.compiler.is_compiling() or not isinstance(after, InPlaceState) or after.launch is None:
        return
    launch, after.launch = after.launch, None
    if is_ordinary_call() and (weights := _Weights.of(mechanism, launch.learned)) is not None:
        after.prepared = PreparedStep(mechanism, weights, inputs, [KernelStep(launch, after)])


def step_with_exact(
    mechanism: nn.Module, inputs: AttentionInputs, linear: State | None, heads: tuple[list[int], list[int]], int8: bool
) -> tuple[Tensor, State] | None:
    """Compute a token of the exact heads of a mixture, and prepare the next step of all heads.

    The keys and values of a state in int8 stay as they are: nothing is read into floating point first.

    Args:
        mechanism, inputs: Those of all heads.
        linear: The state of the linear heads after the token.
        heads: The linear and the exact key-value heads.
        int8: Whether the mechanism stores keys and values in int8.

    Returns:
        The output of all query heads, in which those of the exact ones are filled, and the state of all heads after
        the token. None where no kernel has computed the linear heads in place, or none can compute these.
    """
    if not isinstance(linear, InPlaceState) or linear.prepared is None or not _holds_exact(inputs, int8):
        return None
    step = linear.prepared
    weights = step.weights._replace(attributes=[*_values_of(mechanism), *step.weights.attributes])
    prepared = PreparedStep(mechanism, weights, inputs, step.kernels)
    if not prepared.matches(mechanism, inputs) or not step.kernels[0].select_heads(heads[0]):
        return None
    return _first_exact_step(prepared, inputs, InPlaceState(linear), linear.memory, heads[1])


def step_exactly(mechanism: nn.Module, inputs: AttentionInputs, int8: bool) -> tuple[Tensor, State] | None:
    """Compute a token of a layer of exact heads alone, and prepare the next step; see `step_with_exact`."""
    dtype = inputs.query.dtype
    if torch.compiler.is_compiling() or not isinstance(inputs.state, InPlaceState) or not _holds_exact(inputs, int8):
        return None
    if inputs.query.shape[2] != 1 or dtype not in DTYPES or backends.get_backend() not in ("auto", "native"):
        return None
    if unavailable_reason() is not None or (dtype is torch.float16 and not has_float16()):
        return None
    prepared = PreparedStep(mechanism, _Weights([], _values_of(mechanism), []), inputs, [])
    if not prepared.matches(mechanism, inputs):
        return None
    return _first_exact_step(prepared, inputs, InPlaceState({}), {}, list(range(inputs.key.shape[1])))


def _holds_exact(inputs: AttentionInputs, int8: bool) -> bool:
    """Return whether a state has keys and values that the kernel can go on from: the option may have changed."""
    if inputs.terms or inputs.state is None:
        return False
    return (inputs.state["exact_key"].dtype is torch.int8) == int8


def _first_exact_step(
    prepared: PreparedStep, inputs: AttentionInputs, after: InPlaceState, memory: State, heads: list[int]
) -> tuple[Tensor, State]:
    """Run the kernel of exact heads, add it to a prepared step, and return the output and the state after it."""
    assert inputs.state is not None
    after.update({name: inputs.state[name] for name in GROWING if name in inputs.state})
    after.memory = memory
    step = ExactStep(inputs, after, heads)
    out = binding.empty(*prepared.sizes, dtype=prepared.dtype)
    step.run((*inputs.tensors, out), inputs.mask, after)
    prepared.kernels = [*prepared.kernels, step]
    after.prepared = prepared
    return out, after


def is_ordinary_call() -> bool:
    """Return whether nothing but the kernel is to happen: no gradient, no transformation of functions."""
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    return not (transformed or torch.is_grad_enabled())


class _Weights(NamedTuple):
    """The tensors that a kernel reads, as the entries of modules that they were, and all that these modules have.

    The memory stays alive, so that an equal address is the same memory.
    """

    entries: list[tuple[dict[str, Tensor], str, int, int, torch.dtype]]
    attributes: list[tuple[Mapping[str, Any], tuple[Any, ...]]]
    memory: list[Tensor]

    @staticmethod
    def of(mechanism: nn.Module, learned: Mapping[str, Tensor]) -> _Weights | None:
        """Return them; None where a kernel reads other tensors, or accelerate moves them from call to call."""
        modules = list(mechanism.modules())
        if any(ACCELERATE_HOOK in module.__dict__ for module in modules):
            return None
        owned: dict[int, tuple[dict[str, Any], str]] = {}
        for module in modules:
            for entries in (module._parameters, module._buffers):
                owned |= {x.data_ptr(): (entries, name) for name, x in entries.items() if type(x) in _TENSOR_TYPES}  # type: ignore[union-attr]
        addresses = {tensor.data_ptr() for tensor in learned.values()}
        if not addresses <= owned.keys():
            return None
        read, memory = [], []
        for owner, name in (owned[address] for address in addresses):
            tensor: Tensor = owner[name]
            read.append((owner, name, tensor.data_ptr(), tensor.nbytes, tensor.dtype))
            memory.append(tensor.detach())
        attributes: list[tuple[Mapping[str, Any], tuple[Any, ...]]] = []
        for module in modules:
            attributes += _values_of(module)
        return _Weights(read, attributes, memory)

    def unchanged(self) -> bool:
        for entries, name, address, size, dtype in self.entries:
            now = entries.get(name)
            if now is None or now.data_ptr() != address or now.nbytes != size or now.dtype is not dtype:
                return False
        for holder, before in self.attributes:
            if len(holder) != len(before) or not all(map(is_, holder.values(), before)):
                return False
        return True


_TENSOR_TYPES = (Tensor, nn.Parameter)


def _values_of(module: nn.Module) -> list[tuple[Mapping[str, Any], tuple[Any, ...]]]:
    """Return the attributes and the parts of a module, and what they are now."""
    return [(holder, tuple(holder.values())) for holder in (module.__dict__, module._modules)]


class KernelStep:
    """The arguments of a kernel that has run in the memory of a state, filled but for the token and the output."""

    def __init__(self, launch: binding.Launch, state: InPlaceState) -> None:
        filled = self.filled = launch.filled
        used, outputs = filled.tensors
        token = ("query", "key", "value", "mask")
        self.memory = [tensor for name, tensor in used.items() if name not in token], outputs[1:]
        del filled.tensors  # with the token and its output
        self.kernel = launch.kernel
        self.launch = binding.launcher(launch.kernel, filled)
        self.fields = (filled.query, filled.key, filled.value, filled.out)
        self.is_large = filled.threads > 1
        #: Copies of parameters that the kernel cannot read where they are.
        self.copies = [
            (used[name][..., : tensor.shape[-1]], tensor.detach())
            for name, tensor in launch.learned.items()
            if used[name].data_ptr() != tensor.data_ptr()
        ]
        self.rings: list[tuple[str, Tensor, int]] = []
        self.start = 0
        self.capacity = capacity_for(filled.window)
        filled.ring_capacity = self.capacity
        for name in RING if filled.window else ():
            ring = state[name]
            memory = state.memory[name] = ring.new_empty(*ring.shape[:2], self.capacity, ring.shape[3])
            memory[:, :, : filled.window] = ring
            self.rings.append((name, memory, ring.shape[3] * ring.itemsize))

    def select_heads(self, heads: list[int]) -> bool:
        """Let the kernel read and write these key-value heads among all; return whether it can."""
        filled = self.filled
        if self.kernel == "causal":  # the form for one token, where it applies
            if filled.value_size % binding.lanes() or filled.heads // filled.groups > STEP_REPEATS:
                return False
            self.launch = binding.launcher("causal_step", filled)
        self.head_index = torch.tensor(heads, dtype=torch.int64, device="cpu")
        filled.head_index = self.head_index.data_ptr()
        return True

    def run(self, tensors: Token, mask: Tensor | None, state: InPlaceState) -> None:
        """Run the kernel on a query, key and value, into an output, and move the ring of the state on by a token."""
        filled = self.filled
        _set_token(filled, self.fields, tensors, mask)
        filled.threads = torch.get_num_threads() if self.is_large else 1
        for copy, tensor in self.copies:
            copy.copy_(tensor)
        start, window = self.start, filled.window
        after = start + 1 if start + window < self.capacity else 0
        for name, memory, size in self.rings:
            address = memory.data_ptr()
            setattr(filled, name, address + start * size)
            setattr(filled, f"next_{name}", address + after * size)
        self.launch()
        self.start = after
        for name, memory, _ in self.rings:
            state[name] = memory.narrow(2, after, window)


class ExactStep:
    """Exact attention of some key-value heads over keys and values that grow in memory with spare capacity.

    `inputs` is a call with a token like those to come, `state` has the keys and values so far.
    """

    def __init__(self, inputs: AttentionInputs, state: InPlaceState, heads: list[int]) -> None:
        query, key, value = inputs.tensors
        repeats = query.shape[1] // key.shape[1]
        self.length = state["exact_key"].shape[2]
        is_int8 = state["exact_key"].dtype is torch.int8
        self.dtype = torch.int8 if is_int8 else query.dtype
        self.head_index = torch.tensor(heads, dtype=torch.int64, device="cpu")
        self.products = query.shape[0] * repeats * len(heads) * (key.shape[3] + value.shape[3])
        self.filled = filled = binding.Arguments(
            batch=query.shape[0],
            heads=repeats * len(heads),
            groups=len(heads),
            length=1,
            size=key.shape[3],
            value_size=value.shape[3],
            dtype=binding.DTYPE_NUMBERS[query.dtype],
            int8_rows=is_int8,
            scaling=inputs.scaling,
            head_index=self.head_index.data_ptr(),
        )
        self.fields = (filled.query, filled.key, filled.value, filled.out)
        self.launch = binding.launcher("exact_step", filled)
        self.capacity = 0

    def _grow(self, state: InPlaceState) -> None:
        """Copy keys, values and the mask into memory with capacity for more tokens."""
        self.capacity = self.filled.ring_capacity = capacity_for(self.length + 1)
        for name, (field, dim) in GROWING.items():
            if name in state:
                tokens = state[name]
                sizes = self.filled.batch, *tokens.shape[1:dim], self.capacity, *tokens.shape[dim + 1 :]
                dtype = tokens.dtype if name == "exact_mask" else self.dtype
                memory = state.memory[name] = torch.empty(sizes, dtype=dtype, device="cpu")
                memory.narrow(dim, 0, self.length).copy_(tokens)
                setattr(self.filled, field, memory.data_ptr())

    def run(self, tensors: Token, mask: Tensor | None, state: InPlaceState) -> None:
        """Append the token to the keys and values of the state, and compute the output of its query."""
        filled = self.filled
        if mask is not None and "exact_mask" not in state:
            state["exact_mask"] = torch.ones(filled.batch, self.length, dtype=torch.bool, device="cpu")
            self.capacity = 0
        if self.length >= self.capacity:
            self._grow(state)
        _set_token(filled, self.fields, tensors, mask)
        length = filled.keys = self.length + 1
        is_large = length * self.products > binding.MIN_THREADED_PRODUCTS
        filled.threads = torch.get_num_threads() if is_large else 1
        self.launch()
        self.length = length
        for name, (_, dim) in GROWING.items():
            if name in state:
                state[name] = state.memory[name].narrow(dim, 0, length)


Token = tuple[Tensor, Tensor, Tensor, Tensor]
"""Query, key and value of one token, and its output."""

#: Most query heads of a key-value head that the form of a causal step serves.
STEP_REPEATS = 64


def _set_token(filled: binding.Arguments, fields: tuple[Any, ...], tensors: Token, mask: Tensor | None) -> None:
    for field, tensor in zip(fields, tensors, strict=True):
        field.data = tensor.data_ptr()
        field.batch, field.head, _, _ = tensor.stride()
    if mask is None:
        filled.mask = None
    else:
        filled.mask = mask.data_ptr()
        filled.mask_batch = mask.stride(0) if mask.shape[0] > 1 else 0


class PreparedStep:
    """The kernels of a decoding step, ready for the next token, and what makes them stale."""

    def __init__(self, mechanism: nn.Module, weights: _Weights, inputs: AttentionInputs, kernels: list[Any]) -> None:
        self.mechanism, self.weights, self.kernels = mechanism, weights, kernels
        self.backends = backends.selection()
        self.scaling = inputs.scaling
        self.dtype = inputs.query.dtype
        self.shapes = tuple(tensor.shape for tensor in inputs.tensors)
        self.in_inference = torch.is_inference_mode_enabled()
        batch, heads, _, _ = inputs.query.shape
        self.sizes = batch, heads, 1, inputs.value.shape[3]

    def takes(self, query: Tensor) -> bool:
        """Return whether the state is one for such queries: of as many rows, in their precision, on their device, and
        made in the inference mode of this call, outside of which its tensors cannot be written to."""
        if self.in_inference is not torch.is_inference_mode_enabled():
            return False
        return query.shape == self.shapes[0] and query.dtype is self.dtype and query.is_cpu

    def matches(self, mechanism: nn.Module, inputs: AttentionInputs) -> bool:
        """Return whether this step computes a call of the mechanism, and its kernels stay inside of all memory."""
        is_step = inputs.causal and inputs.return_state and inputs.ranks is None and inputs.start is None
        if mechanism is not self.mechanism or inputs.scaling != self.scaling or not (is_step and is_ordinary_call()):
            return False
        for tensor, shape in zip(inputs.tensors, self.shapes, strict=True):
            if type(tensor) is not Tensor or tensor.shape != shape or tensor.dtype is not self.dtype:
                return False
            if not tensor.is_cpu or tensor.stride(3) != 1 or tensor.is_neg():
                return False
        if inputs.mask is not None and not self._fits(inputs.mask):
            return False
        return backends.selection() == self.backends and self.weights.unchanged()

    def _fits(self, mask: Tensor) -> bool:
        is_bool_mask = type(mask) is Tensor and mask.is_cpu and mask.dtype is torch.bool
        return is_bool_mask and mask.dim() == 2 and mask.shape[1] == 1 and mask.shape[0] in (1, self.sizes[0])

    def run(self, inputs: AttentionInputs) -> Tensor:
        """Advance the state of a call that matches, and return the output."""
        out = binding.empty(*self.sizes, dtype=self.dtype)
        for kernel in self.kernels:
            kernel.run((*inputs.tensors, out), inputs.mask, inputs.state)
        return out
