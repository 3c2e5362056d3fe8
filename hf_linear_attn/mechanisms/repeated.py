"""Decoding steps like the one before: what that one checked and filled in is not checked and filled in again."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import backends
from ..ops.common import ACCELERATE_HOOK, InPlaceState, State

#: What every module has; the parts and tensors among it are looked at one by one.
_COMMON = frozenset(nn.Module().__dict__) - {"training", "_modules"}


class Snapshot:
    """A module's attributes, parts and tensors as they are now, to see whether one was exchanged or written to.

    Not seen is what PyTorch does not count either: numbers written through `.data` or NumPy, and changes inside of an
    attribute that is a list or the like. (Every decoding step asks: loops where they are the fastest.)
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes, self._held, self._tensors = [], [], []
        for part in module.modules():
            names = [name for name in part.__dict__ if name not in _COMMON]
            getter = operator.itemgetter(*names)
            self._attributes.append((part.__dict__, len(part.__dict__), getter, getter(part.__dict__)))
            for table in (part._modules, part._parameters, part._buffers):
                for name, held in table.items():
                    self._held.append((table, name, held))
                    if isinstance(held, Tensor):
                        self._tensors.append((held, held._version, held.data_ptr()))

    def unchanged(self) -> bool:
        for attributes, count, getter, values in self._attributes:
            try:
                if len(attributes) != count or not all(map(operator.is_, getter(attributes), values)):
                    return False
            except KeyError:
                return False
        for table, name, held in self._held:
            if table.get(name) is not held:
                return False
        for held, version, address in self._tensors:
            if held._version != version or held.data_ptr() != address:
                return False
        return True


class Guard(NamedTuple):
    """What must be as it was for a step to be repeated, besides the inputs and the state."""

    mechanism: nn.Module
    snapshot: Snapshot
    scaling: float
    choice: object
    threads: int


def remember(mechanism: nn.Module, scaling: float, before: State | None, after: State | None) -> None:
    """Let the next step be like this one, where a backend left the state ready for it."""
    if not isinstance(after, InPlaceState) or after is before or after.prepared_step is None:
        return
    if ACCELERATE_HOOK in mechanism.__dict__:  # weights that come for a call and go after it: nothing is to hold them
        after.prepared_step = None
    elif not any(held.is_inference() for held in (*mechanism.parameters(), *mechanism.buffers())):  # (has no version)
        guard = Guard(mechanism, Snapshot(mechanism), float(scaling), backends.selection(), torch.get_num_threads())
        after.prepared_step.guard = guard


def repeated(
    mechanism: nn.Module, state: State | None, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor | None:
    """The output of a step like the last one, with the state written over; None where something is different."""
    if torch.compiler.is_compiling() or not isinstance(state, InPlaceState) or state.prepared_step is None:
        return None
    prepared = state.prepared_step
    guard = prepared.guard
    if guard is None or guard.mechanism is not mechanism or torch.is_grad_enabled():
        return None
    if float(scaling) != guard.scaling or guard.choice != backends.selection():
        return None
    if torch.get_num_threads() != guard.threads:
        return None
    if not (guard.snapshot.unchanged() and prepared.matches(state, query, key, value)):
        return None
    return prepared.run(state, query, key, value)
