"""The check of GPU kernels before first use: a small case by the kernels and by torch in float64."""

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernelized
from .calls import KernelizedCall, WindowedCall
from .common import State, compute_dtype, is_capturing
from .formulas import FusedMap, FusedMaps
from .windowed import windowed

logger = logging.getLogger(__name__)

#: Largest relative error. Half precision: that of rounding the result, and of gradients that nearly cancel.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: The same of a window's gradients: which of two nearly equal logits is the largest one is not sharp (`ops.flex`).
WINDOW_GRADIENT_TOLERANCE = 5e-2

#: Numbers of tokens of a sequence and of its continuations: every block length is compiled, and the sequence is split.
PIECES = (601, 21, 1)

#: How often the case runs by the kernels: results that differ come from a race, which may be right at times.
RUNS = 8

CheckedCall = KernelizedCall | WindowedCall
Run = Callable[[Any], tuple[Tensor, State | None]]


class Case(NamedTuple):
    """What the kernels are compiled for."""

    maps: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    value_dim: int
    causal: bool
    learning: bool
    window: int = 0
    sinks: int = 0


_reasons: dict[tuple[str, Case], str | None] = {}


def checked_reason(name: str, run: Run, call: CheckedCall) -> str | None:
    """Return why a backend's kernels, by which `run` computes a call, cannot be used for such calls on this device, or
    None if a small case came out right, which runs at the first call."""
    assert call.fused is not None
    return checked_case(name, run, case_of(call), call.fused)


def checked_case(name: str, run: Run, case: Case, fused: FusedMaps) -> str | None:
    """Return `checked_reason` of calls of a case; of the maps it reads the sizes of their tensors only."""
    if (name, case) not in _reasons:
        if is_capturing(case.device):
            return "a CUDA graph is being captured, and these kernels were not checked before"
        _reasons[name, case] = reason = compare(run, case, fused)
        if reason is not None:
            what = f"{fused[0].activation} features of {case.dtype} inputs"
            logger.warning("No %s kernels for %s: %s. Attention runs in torch operations.", name, what, reason)
    return _reasons[name, case]


def case_of(call: CheckedCall) -> Case:
    """Return the case of a call: activations, sizes, dtypes, device, direction, and whether gradients are needed."""
    assert call.fused is not None
    query = call.query
    maps = tuple(
        (fused.activation, *((x.shape[-1], x.dtype) if x is not None else None for x in (fused.weight, fused.bias)))
        for fused in call.fused
    )
    case = Case(maps, query.dtype, query.device, query.shape[3], call.value.shape[3], call.causal, call.needs_grad())
    if isinstance(call, WindowedCall):
        return case._replace(window=call.window, sinks=call.sinks)
    return case


def compare(run: Run, case: Case, fused: tuple[FusedMap, FusedMap]) -> str | None:
    """Run the case; return the first failure or difference as a text, or None."""
    try:
        with torch.enable_grad() if case.learning else torch.no_grad():
            actual, *repeated = (results(case, fused, run, double=False) for _ in range(RUNS))
            expected = results(case, fused, _torch, double=True)
            errors = {name: relative_error(actual[name], expected[name]) for name in expected}
            unequal = [name for name in expected if not all(torch.equal(actual[name], x[name]) for x in repeated)]
    except torch.OutOfMemoryError:
        raise
    except failures() as failure:
        return f"the kernels fail on this device ({type(failure).__name__}: {str(failure).strip()[:200]})"
    for name, error in errors.items():
        loose = case.window and "gradient" in name
        limit = max(TOLERANCE[case.dtype], WINDOW_GRADIENT_TOLERANCE if loose else 0.0)
        if not error <= limit:  # NaN is a difference too
            return f"on this device they differ from torch in {name} by {error:.1e}"
    return f"on this device {unequal[0]} is not the same at every run" if unequal else None


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a compiler, of its launcher, or of a device without the instructions or memory."""
    triton = sys.modules.get("triton")
    of_triton = () if triton is None else (triton.TritonError,)
    errors = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, OSError, ImportError)
    return (*errors, subprocess.SubprocessError, *of_triton)


def results(case: Case, fused: tuple[FusedMap, FusedMap], run: Run, *, double: bool) -> dict[str, Tensor]:
    """Return output, state and gradients by name, for random inputs: two heads share a key, and the mask has holes.

    The tensors of the feature maps are random too; `double`: in float64, from inputs rounded to `case.dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    pieces = (PIECES[0],) if case.learning or not case.causal else PIECES
    total = sum(pieces)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(case.device, case.dtype)

    inputs = draw(2, 2, total, case.head_dim), draw(2, 1, total, case.head_dim), draw(2, 1, total, case.value_dim)
    mask = (torch.arange(total, device=case.device) % 7 != 3).repeat(2, 1)
    mask[0, : total // 3] = False
    maps = _random_map(fused[0], draw, 2, double), _random_map(fused[1], draw, 1, double)
    leaves = [(tensor.double() if double else tensor).requires_grad_(case.learning) for tensor in inputs]
    outputs, state, start = [], None, 0
    for length in pieces:
        now = slice(start, start + length)
        features = maps[0].num_features(case.head_dim)
        query, key, value = (tensor[:, :, now] for tensor in leaves)
        call: CheckedCall = KernelizedCall(
            query, key, value, maps[0].features, maps[1].features, maps, features, case.causal,
            mask=mask[:, now], state=state, return_state=case.causal and not case.learning,
        )  # fmt: skip
        if case.window:
            sizes: dict[str, Any] = {"window": case.window, "sinks": case.sinks, "scaling": case.head_dim**-0.5}
            log_mix = torch.zeros(query.shape[1], device=case.device, dtype=compute_dtype(query))
            call = WindowedCall(**vars(call), **sizes, log_mix=log_mix)
        out, state = run(call)
        outputs.append(out)
        start += length
    named = {"the output": torch.cat(outputs, dim=2)}
    if not case.learning:
        named |= state or {}
    else:
        out = named["the output"]
        weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, leaves, weight)
        names = ("the gradient of query", "the gradient of key", "the gradient of value")
        named |= dict(zip(names, gradients, strict=True))
    return named


def _torch(call: CheckedCall) -> tuple[Tensor, State | None]:
    return windowed(call) if isinstance(call, WindowedCall) else kernelized.attend(call)


def _random_map(fused: FusedMap, draw: Callable[..., Tensor], heads: int, double: bool) -> FusedMap:
    """Return the same map with random weights."""

    def random(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        drawn = (0.3 * draw(min(heads, tensor.shape[0]), *tensor.shape[1:])).to(tensor.dtype)
        return drawn.double() if double else drawn

    return fused._replace(weight=random(fused.weight), bias=random(fused.bias))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return `‖a - b‖ / ‖b‖`."""
    actual = actual.detach().double()
    expected = expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))
