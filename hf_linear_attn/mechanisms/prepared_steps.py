"""Decoding with a prepared step: the checks and kernel arguments of one decoding step serve the next one.

A backend may leave a `PreparedStep` on the state that it returns (`ops.native.prepared_step`). The mechanism adds a
guard of all that the step was made of; while the guard holds, the next step goes straight to the kernel.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from ..ops import backends
from ..ops.common import ACCELERATE_HOOK, InPlaceState, State

#: Attributes that every module has; submodules and tensors among them are compared one by one.
_COMMON_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training", "_modules"}


class ModuleSnapshot:
    """A module's attributes, submodules and tensors, to see later whether one was exchanged or written to.

    It does not see what PyTorch does not count either: numbers written through `.data` or NumPy, and changes inside of
    an attribute that is a list or the like. (Every decoding step compares: these loops are the fastest we know.)
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes, self._entries, self._tensors = [], [], []
        for part in module.modules():
            names = [name for name in part.__dict__ if name not in _COMMON_ATTRIBUTES]
            getter = operator.itemgetter(*names)
            self._attributes.append((part.__dict__, len(part.__dict__), getter, getter(part.__dict__)))
            for table in (part._modules, part._parameters, part._buffers):
                for name, entry in table.items():
                    self._entries.append((table, name, entry))
                    if isinstance(entry, Tensor):
                        self._tensors.append((entry, entry._version, entry.data_ptr()))

    def is_unchanged(self) -> bool:
        """Return whether the module is as it was."""
        for attributes, count, getter, values in self._attributes:
            try:
                if len(attributes) != count or not all(map(operator.is_, getter(attributes), values)):
                    return False
            except KeyError:
                return False
        for table, name, entry in self._entries:
            if table.get(name) is not entry:
                return False
        for tensor, version, address in self._tensors:
            if tensor._version != version or tensor.data_ptr() != address:
                return False
        return True


def _conditions(mechanism: nn.Module, scaling: float) -> tuple[object, ...]:
    """Return what must be as it was for a prepared step to be valid, besides the inputs, the state and the module."""
    return mechanism, float(scaling), backends.selection(), torch.get_num_threads()


def guard_prepared_step(mechanism: nn.Module, scaling: float, before: State | None, after: State | None) -> None:
    """Add a guard to the prepared step that a backend has left on the state after a call, if it has left one.

    Args:
        mechanism: The module that made the call.
        scaling: τ of the call.
        before: The state before it.
        after: The state after it.
    """
    if not isinstance(after, InPlaceState) or after is before or after.prepared_step is None:
        return
    if ACCELERATE_HOOK in mechanism.__dict__:
        after.prepared_step = None  # The weights are unloaded after each call: we must not refer to them.
    elif not any(tensor.is_inference() for tensor in (*mechanism.parameters(), *mechanism.buffers())):
        # (Tensors made in inference mode have no version to compare.)
        after.prepared_step.guard = _conditions(mechanism, scaling), ModuleSnapshot(mechanism)


def run_prepared_step(
    mechanism: nn.Module, state: State | None, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor | None:
    """Run the step that was prepared with a state, and write over the state.

    Args:
        mechanism: The module that makes the call.
        state: The state before the step.
        query: `[B, H, 1, d]`; key `[B, G, 1, d]`, value `[B, G, 1, e]`.
        scaling: τ of the call.

    Returns:
        The output `[B, H, 1, e]`; None, with the state unchanged, where there is no prepared step or anything differs
        from the step before.
    """
    if torch.compiler.is_compiling() or not isinstance(state, InPlaceState) or state.prepared_step is None:
        return None
    prepared = state.prepared_step
    if prepared.guard is None or torch.is_grad_enabled():
        return None
    conditions, snapshot = prepared.guard
    if conditions != _conditions(mechanism, scaling) or not snapshot.is_unchanged():
        return None
    return prepared.run(state, query, key, value) if prepared.matches(state, query, key, value) else None
