"""Backends of kernelized attention, with or without a window: torch operations, or fused kernels.

    torch    blocks of torch operations; everything, everywhere
    native   C++ kernels for the CPU, compiled on first use (see `ops.native`)
    triton   GPU kernels, where Triton is installed (see `ops.triton`)
    flex     windows on GPUs, by PyTorch's FlexAttention (see `ops.flex`)
    fla      the kernels of flash-linear-attention, by name only (see `ops.fla_backend`)

`auto` selects the first backend, in order of speed, that supports the call. All backends compute the same function and
pass the same tests; results differ by rounding. `register_backend` adds more.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..utils.formatting import near_matches
from . import gated, kernelized
from .calls import BackendCall, GatedCall, WindowedCall
from .common import State
from .fla_backend import FlaBackend
from .flex import FlexBackend
from .native.backend import NativeBackend
from .triton.backend import TritonBackend
from .windowed import windowed

#: Environment variable with the name of the backend to start with, instead of `auto`.
BACKEND_VARIABLE = "HF_LINEAR_ATTN_BACKEND"


class Backend(Protocol):
    """An implementation of attention calls."""

    name: str

    def unsupported_reason(self, call: BackendCall) -> str | None:
        """Return why this backend cannot compute the call, or None if it can."""

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        """Return the output `[B, H, L, e]` in the dtype of value, and the state after the last token (causal form)."""


class TorchBackend:
    """The forms of `ops.kernelized`, `ops.windowed` and `ops.gated`: every call on every device."""

    name = "torch"

    def unsupported_reason(self, call: BackendCall) -> str | None:
        return None

    def run(self, call: BackendCall) -> tuple[Tensor, State | None]:
        if isinstance(call, GatedCall):
            return gated.gated_causal(call)
        return windowed(call) if isinstance(call, WindowedCall) else kernelized.attend(call)


#: All backends, the fastest first. Backends behind `torch`, which supports every call, are used by name only.
_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (NativeBackend(), TritonBackend(), FlexBackend(), TorchBackend(), FlaBackend())
}
_selected = "auto"


def list_backends() -> list[str]:
    """Return the names of the backends, in the order in which `auto` tries them."""
    return list(_BACKENDS)


def register_backend(backend: Backend) -> None:
    """Add a backend, which `auto` tries first.

    Args:
        backend: An object with `name`, `unsupported_reason` and `run` (see `Backend`).

    Raises:
        ValueError: The name is taken.
    """
    global _BACKENDS
    if backend.name == "auto" or backend.name in _BACKENDS:
        raise ValueError(f"A backend named {backend.name!r} exists already. Choose another name.")
    _BACKENDS = {backend.name: backend, **_BACKENDS}


def set_backend(name: str) -> None:
    """Use one backend for every call from now on.

    Args:
        name: A name of `list_backends`, or `auto`. A call that a named backend does not support is an error.

    Raises:
        ValueError: The name is unknown.
    """
    global _selected
    names = ["auto", *_BACKENDS]
    if name not in names:
        raise ValueError(f"Unknown backend {name!r}.{near_matches(str(name), names)} There are: {', '.join(names)}.")
    _selected = name


def get_backend() -> str:
    """Return the name set by `set_backend`; at first `auto`, or the value of `HF_LINEAR_ATTN_BACKEND`."""
    return _selected


def selection() -> tuple[str, dict[str, Backend]]:
    """Return all that `select_backend` depends on beside the call."""
    return _selected, _BACKENDS


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend inside a `with` statement; see `set_backend`."""
    before = _selected
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def select_backend(call: BackendCall) -> Backend:
    """Return the backend that computes a call.

    Raises:
        NotImplementedError: The backend set by name does not support the call.
    """
    if torch.compiler.is_exporting():  # An exported graph runs without this package.
        return _BACKENDS["torch"]
    if _selected == "auto":
        return next(backend for backend in _BACKENDS.values() if backend.unsupported_reason(call) is None)
    backend = _BACKENDS[_selected]
    reason = backend.unsupported_reason(call)
    if reason is not None:
        raise NotImplementedError(
            f"The backend {_selected!r} cannot compute this attention: {reason}. Use set_backend('auto')."
        )
    return backend


def attend(call: BackendCall) -> tuple[Tensor, State | None]:
    """Compute a call with the selected backend: the output `[B, H, L, e]` and the state (see `Backend.run`)."""
    return select_backend(call).run(call)


if os.environ.get(BACKEND_VARIABLE):
    set_backend(os.environ[BACKEND_VARIABLE])
