"""A decoding step made ready: what is the same from one step to the next is filled in and held once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..common import InPlaceState, State
from . import binding


class PreparedStep:
    """The arguments of a step that wrote over its state, for the next one: of these only four addresses are new.

    The others point into the state and into `kept`, the maps' tensors, which stay alive as long as this does. `guard`
    is for what these are made of (`mechanisms.prepared_steps`). (Every step of every layer comes through here: nothing
    is looked up twice.)
    """

    guard: Any = None

    def __init__(
        self, name: str, given: binding.Arguments, inputs: tuple[Tensor, Tensor, Tensor], state: State, kept: Any
    ) -> None:
        query, _, value = inputs
        self._run, self._kept = binding.prepared_run(name, given), kept
        self._state = [(name, held, held.data_ptr()) for name, held in state.items()]
        self._places = given.query, given.key, given.value, given.out
        self._shapes, self._dtype = [tensor.shape for tensor in inputs], value.dtype
        self._contiguous = all(tensor.is_contiguous() for tensor in inputs)
        self._strides = [tensor.stride() for tensor in inputs]
        self._like = binding.room(*query.shape[:3], value.shape[3], dtype=value.dtype)

    def matches(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the inputs are as those of the last step but for their numbers, and the state is what that left."""
        for name, held, address in self._state:
            if state.get(name) is not held or held.data_ptr() != address:
                return False
        query_shape, key_shape, value_shape = self._shapes
        if query.shape != query_shape or key.shape != key_shape or value.shape != value_shape:
            return False
        if self._contiguous:  # (asked twice as fast as the strides)
            lie = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        else:
            lie = [query.stride(), key.stride(), value.stride()] == self._strides
        return (
            lie
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
        """The output `[B, H, 1, e]` for inputs that fit; the state, whose step this is, is written over."""
        out = torch.empty_like(self._like)
        to_query, to_key, to_value, to_out = self._places
        to_query.data, to_key.data = query.data_ptr(), key.data_ptr()
        to_value.data, to_out.data = value.data_ptr(), out.data_ptr()
        self._run()
        return out


def state_after_step(before: InPlaceState, after: State, prepare: Callable[[State], PreparedStep]) -> InPlaceState:
    """The state after a step that wrote over the one before, ready for the next one where steps follow each other."""
    made = InPlaceState(after)
    made.updated_in_place = True
    if before.updated_in_place:
        made.prepared_step = prepare(made)
    return made
