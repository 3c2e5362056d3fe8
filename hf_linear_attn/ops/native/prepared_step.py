"""A prepared decoding step: the arguments that do not change from one step to the next are filled in once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..common import InPlaceState, State
from . import binding


class PreparedStep:
    """The kernel arguments of a step that wrote over its state, for the next step, which replaces only four addresses.

    The other arguments point into the state and into `tensors`, those of the feature maps, which stay alive as long as
    this object. `guard` is set by `mechanisms.prepared_steps` to detect changes of the mechanism. Every decoding step
    of every layer runs this code, so nothing is looked up twice.
    """

    guard: Any = None

    def __init__(
        self, name: str, filled: binding.Arguments, inputs: tuple[Tensor, Tensor, Tensor], state: State, tensors: Any
    ) -> None:
        query, _, value = inputs
        self._run, self._tensors = binding.prepare_run(name, filled), tensors
        self._state = [(name, tensor, tensor.data_ptr()) for name, tensor in state.items()]
        self._addresses = filled.query, filled.key, filled.value, filled.out
        self._shapes, self._dtype = [tensor.shape for tensor in inputs], value.dtype
        self._contiguous = all(tensor.is_contiguous() for tensor in inputs)
        self._strides = [tensor.stride() for tensor in inputs]
        self._like = binding.empty(*query.shape[:3], value.shape[3], dtype=value.dtype)

    def matches(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether only the numbers of the inputs differ from the last step, and the state is the one it left."""
        for name, tensor, address in self._state:
            if state.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        query_shape, key_shape, value_shape = self._shapes
        if query.shape != query_shape or key.shape != key_shape or value.shape != value_shape:
            return False
        if self._contiguous:  # twice as fast as comparing strides
            same_layout = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        else:
            same_layout = [query.stride(), key.stride(), value.stride()] == self._strides
        return (
            same_layout
            and type(query) is Tensor
            and query.dtype is key.dtype is value.dtype is self._dtype
            and query.is_cpu
            and key.is_cpu
            and value.is_cpu
            and not (query.is_neg() or key.is_neg() or value.is_neg())
            and torch._C._functorch.maybe_current_level() is None
            and forward_ad._current_level < 0
        )

    def run(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output `[B, H, 1, e]` for inputs that match; the state is written over."""
        out = torch.empty_like(self._like)
        to_query, to_key, to_value, to_out = self._addresses
        to_query.data, to_key.data = query.data_ptr(), key.data_ptr()
        to_value.data, to_out.data = value.data_ptr(), out.data_ptr()
        self._run()
        return out


def state_after_step(before: InPlaceState, after: State, prepare: Callable[[State], PreparedStep]) -> InPlaceState:
    """Return the state after a step that wrote over `before`, with a prepared step if `before` came from one too."""
    state = InPlaceState(after)
    state.updated_in_place = True
    if before.updated_in_place:
        state.prepared_step = prepare(state)
    return state
