"""Which code computes kernelized attention, alone or beside a window: plain torch, or fused kernels.

    torch    blocks of torch operations; everything, everywhere
    native   C++ kernels for the CPU, compiled on first use (see `ops.native`)
    triton   GPU kernels, where Triton is installed (see `ops.triton`)
    fla      the kernels of flash-linear-attention, by name only (see `ops.fla_backend`)

`auto` takes the first backend, in order of speed, that serves the call. All of them compute the same function, and pass
the same tests; results differ by rounding. A backend is an object with `name`, `refuses` and `run`: `register_backend`
takes more.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from . import banded, gated, kernelized, windowed
from .common import State
from .fla_backend import FlaBackend
from .fused import AttentionCall, GatedCall, WindowedCall
from .native.backend import NativeBackend
from .triton.backend import TritonBackend
from .window_step import is_decoding_step, windowed_step

#: The backend to start with, instead of `auto`.
BACKEND_VARIABLE = "HF_LINEAR_ATTN_BACKEND"


class Backend(Protocol):
    name: str

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        """Why this backend cannot serve the call; None where it can."""

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        """The output `[B, H, L, e]` in the dtype of value, and the state after the last token (causal form)."""


class TorchBackend:
    """The forms of `ops.kernelized`, `ops.windowed`, `ops.banded` and `ops.gated`."""

    name = "torch"

    def unsupported_reason(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> tuple[Tensor, State | None]:
        if isinstance(call, GatedCall):
            return gated.gated_causal(
                *call[:5],
                num_features=call.num_features,
                mask=call.mask,
                state=call.state,
                per_feature=call.per_feature,
                signed=call.signed,
            )
        given = (call.query, call.key, call.value, call.query_features, call.key_features)
        settings: dict[str, Any] = {"mask": call.mask}
        if isinstance(call, WindowedCall):
            settings |= {"window": call.window, "scaling": call.scaling, "log_mix": call.mix_rows()}
            if call.state is not None and call.causal and is_decoding_step(call.query, call.mask, call.state):
                del settings["mask"], settings["window"]
                return windowed_step(*given, **settings, state=call.state)
            if call.causal:
                return windowed.windowed_causal(*given, **settings, state=call.state)
            return banded.windowed_bidirectional(*given, **settings), None
        settings |= {"num_features": call.num_features, "signed": call.signed}
        if call.causal:
            return kernelized.causal(*given, **settings, state=call.state, return_state=call.return_state)
        return kernelized.bidirectional(*given, **settings), None


#: All backends, the fastest first. What stands behind `torch`, which refuses nothing, is used by name only.
_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (NativeBackend(), TritonBackend(), TorchBackend(), FlaBackend())
}
_chosen = "auto"


def list_backends() -> list[str]:
    """Names of the backends, in the order in which `auto` asks them."""
    return list(_BACKENDS)


def register_backend(backend: Backend) -> None:
    """Add a backend; `auto` asks it first.

    Raises:
        ValueError: the name is taken.
    """
    global _BACKENDS
    if backend.name == "auto" or backend.name in _BACKENDS:
        raise ValueError(f"A backend named {backend.name!r} exists already. Choose another name.")
    _BACKENDS = {backend.name: backend, **_BACKENDS}


def set_backend(name: str) -> None:
    """Use one backend for every call from now on, or `auto`.

    With a named backend a call that it cannot serve is an error, never a silent change.

    Raises:
        ValueError: an unknown name.
    """
    global _chosen
    _chosen = _checked(name)


def get_backend() -> str:
    """The name given to `set_backend`, `auto` at first (or the value of `HF_LINEAR_ATTN_BACKEND`)."""
    return _chosen


def selection() -> object:
    """What `select_backend` goes by besides the call; equal as long as nobody has set or registered a backend."""
    return _chosen, _BACKENDS


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """`set_backend` for a while."""
    before = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def _checked(name: str) -> str:
    names = ["auto", *_BACKENDS]
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown backend {name!r}.{hint} There are: {', '.join(names)}.")
    return name


def select_backend(call: AttentionCall) -> Backend:
    """The backend that serves a call.

    Raises:
        NotImplementedError: the backend that was asked for by name cannot.
    """
    if _chosen == "auto":
        return next(backend for backend in _BACKENDS.values() if backend.unsupported_reason(call) is None)
    backend = _BACKENDS[_chosen]
    reason = backend.unsupported_reason(call)
    if reason is not None:
        raise NotImplementedError(
            f"The backend {_chosen!r} cannot compute this attention: {reason}. Use set_backend('auto')."
        )
    return backend


def attend(call: AttentionCall) -> tuple[Tensor, State | None]:
    """Compute a call with the backend in use."""
    return select_backend(call).run(call)


if os.environ.get(BACKEND_VARIABLE):
    set_backend(os.environ[BACKEND_VARIABLE])
