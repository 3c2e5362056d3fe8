"""A decoding step made ready: what is the same from one step to the next is filled in and held once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common import State
from . import binding


class ReadyStep:
    """The arguments of a step that wrote over its state, for the next one: of these only four addresses are new.

    The others point into `kept`, the state and the maps' tensors, which stay alive as long as this does. (Every step of
    every layer comes through here: nothing is looked up twice.)
    """

    def __init__(self, name: str, given: binding.Arguments, inputs: tuple[Tensor, Tensor, Tensor], kept: Any) -> None:
        query, _, value = inputs
        self._run, self._kept = binding.prepared_run(name, given), kept
        self._places = given.query, given.key, given.value, given.out
        self._shapes, self._strides = [tensor.shape for tensor in inputs], [tensor.stride() for tensor in inputs]
        self._dtypes = 3 * [value.dtype]
        self._like = torch.empty(query.shape[:3] + value.shape[3:], dtype=value.dtype)

    def fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether these are as the inputs of the last step, but for their numbers."""
        return (
            type(query) is Tensor
            and [query.shape, key.shape, value.shape] == self._shapes
            and [query.stride(), key.stride(), value.stride()] == self._strides
            and [query.dtype, key.dtype, value.dtype] == self._dtypes
            and query.is_cpu
            and key.is_cpu
            and value.is_cpu
            and torch._C._functorch.maybe_current_level() is None
        )

    def run(self, state: State, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output `[B, H, 1, e]` for inputs that fit; the state, whose step this is, is written over."""
        out = torch.empty_like(self._like)
        to_query, to_key, to_value, to_out = self._places
        to_query.data, to_key.data = query.data_ptr(), key.data_ptr()
        to_value.data, to_out.data = value.data_ptr(), out.data_ptr()
        self._run()
        return out
