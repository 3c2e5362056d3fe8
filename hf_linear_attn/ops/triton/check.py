"""The check before first use: a small case by the kernels and by plain torch in float64."""

from __future__ import annotations

import logging
import subprocess
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from .. import kernelized
from ..common import FeatureFunction, Features, State
from ..fused import FusedMap, KernelizedCall
from . import backward

logger = logging.getLogger(__name__)

#: Largest relative error. Half precision: that of rounding the result, and of gradients that nearly cancel.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

#: Tokens of a sequence and of the pieces that go on after it: every block length is compiled, and spans are cut.
PIECES = (601, 21, 1)

#: What a compiler, its launcher or a device that lacks something raises.
_FAILURES = (
    *(triton.TritonError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, OSError, ImportError),
    subprocess.SubprocessError,
)


class Case(NamedTuple):
    """What the kernels are compiled for."""

    maps: tuple[tuple[Any, ...], tuple[Any, ...]]
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    value_dim: int
    causal: bool
    learning: bool


_results: dict[Case, str | None] = {}


def differs(call: KernelizedCall) -> str | None:
    """Why the kernels are not to be trusted with such a call on this device; None where a small one came out right."""
    if call.query.device.type == "cpu":  # the interpreter: the tests are the check
        return None
    return verdict(call)


def verdict(call: KernelizedCall) -> str | None:
    """What the check said, run once for every kind of kernel and device."""
    case = case_of(call)
    if case not in _results:
        if case.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and these kernels were not checked before"
        assert call.fused is not None
        _results[case] = reason = compare(case, call.fused)
        if reason is not None:
            name = f"{call.fused[0].activation} features of {case.dtype} inputs"
            logger.warning("No Triton kernels for %s: %s. Attention runs in plain torch.", name, reason)
    return _results[case]


def case_of(call: KernelizedCall) -> Case:
    def described(fused: FusedMap) -> tuple[Any, ...]:
        shapes = (None if held is None else (held.shape[-1], held.dtype) for held in (fused.weight, fused.bias))
        return fused.activation, *shapes

    assert call.fused is not None
    query = call.query
    maps = described(call.fused[0]), described(call.fused[1])
    return Case(maps, query.dtype, query.device, query.shape[3], call.value.shape[3], call.causal, call.needs_grad())


def compare(case: Case, fused: tuple[FusedMap, FusedMap]) -> str | None:
    """Run the case; the first failure or disagreement in words."""
    try:
        with torch.enable_grad() if case.learning else torch.no_grad():
            errors = _errors(case, fused)
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as failure:
        return f"the kernels fail on this device ({type(failure).__name__}: {str(failure).strip()[:200]})"
    for name, error in errors.items():
        if not error <= TOLERANCE[case.dtype]:  # NaN is a difference too
            return f"on this device they differ from plain torch in {name} by {error:.1e}"
    return None


def _errors(case: Case, fused: tuple[FusedMap, FusedMap]) -> dict[str, float]:
    """Relative errors of output, state and gradients, by name: two heads share a key, and the mask has holes."""
    generator = torch.Generator().manual_seed(0)
    total = PIECES[0] if case.learning or not case.causal else sum(PIECES)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.device, case.dtype)

    tensors = draw(2, 2, total, case.head_dim), draw(2, 1, total, case.head_dim), draw(2, 1, total, case.value_dim)
    mask = (torch.arange(total) % 7 != 3).repeat(2, 1)
    mask[0, : total // 3] = False
    sides = tuple(_drawn(side, draw, 2 - place, total) for place, side in enumerate(fused))
    exact = tuple(_as_double(side) for side in sides)
    if not case.learning:
        return _pieces(case, tensors, (sides, exact), mask.to(case.device))
    found = _with_gradients(case, tensors, sides, mask, backward.run)
    wanted = _with_gradients(case, tuple(tensor.double() for tensor in tensors), exact, mask, _plain)
    names = ("the output", "the gradient of query", "the gradient of key", "the gradient of value")
    return {name: relative_error(a, b) for name, a, b in zip(names, found, wanted, strict=True)}


def _with_gradients(case: Case, tensors: tuple[Tensor, ...], maps: Any, mask: Tensor, compute: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = compute(_call(case, leaves, maps, mask.to(case.device)))[0]
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, weight)]


def _pieces(case: Case, tensors: tuple[Tensor, ...], maps: tuple[Any, Any], mask: Tensor) -> dict[str, float]:
    doubles = tuple(tensor.double() for tensor in tensors)
    wanted, last = _plain(_call(case, doubles, maps[1], mask))
    if not case.causal:
        return {"the output": relative_error(backward.run(_call(case, tensors, maps[0], mask))[0], wanted)}
    outputs: list[Tensor] = []
    state: State | None = None
    start = 0
    for length in PIECES:
        piece = slice(start, start + length)
        sides = tuple(
            side if side.cosine is None or side.sine is None
            else side._replace(cosine=side.cosine[:, piece], sine=side.sine[:, piece])
            for side in maps[0]
        )  # fmt: skip
        call = _call(case, tuple(tensor[:, :, piece] for tensor in tensors), sides, mask[:, piece])
        out, state = backward.run(call._replace(state=state))
        outputs.append(out)
        start += length
    assert state is not None
    assert last is not None
    errors = {name: relative_error(state[name], held) for name, held in last.items()}
    return {"the output": relative_error(torch.cat(outputs, dim=2), wanted), **errors}


def _call(case: Case, tensors: Any, maps: Any, mask: Tensor) -> KernelizedCall:
    query_features, key_features = (feature_function(side) for side in maps)
    features = maps[0].num_features(case.head_dim)
    query, key, value = tensors
    return KernelizedCall(
        query, key, value, query_features, key_features, tuple(maps), features, case.causal, mask=mask
    )


def _plain(call: KernelizedCall) -> tuple[Tensor, State | None]:
    given = (call.query, call.key, call.value, call.query_features, call.key_features)
    if call.causal:
        return kernelized.causal(*given, num_features=call.num_features, mask=call.mask)
    return kernelized.bidirectional(*given, num_features=call.num_features, mask=call.mask), None


def _drawn(fused: FusedMap, draw: Any, heads: int, length: int) -> FusedMap:
    """The same map with other numbers in its tensors, and a gradient for each where there was one."""
    given: dict[str, Any] = {}
    for name in ("weight", "bias"):
        held = getattr(fused, name)
        if held is not None:
            shape = (min(heads, held.shape[0]), *held.shape[1:])
            given[name] = (0.3 * draw(*shape)).to(held.dtype)
    if fused.cosine is not None:
        angle = torch.linspace(0, 1.5, length, device=fused.cosine.device).unsqueeze(0)
        given |= {"cosine": angle.cos(), "sine": angle.sin()}
    return fused._replace(**given)


def _as_double(fused: FusedMap) -> FusedMap:
    tensors: dict[str, Any] = {
        name: held.double() for name, held in fused._asdict().items() if isinstance(held, Tensor)
    }
    return fused._replace(**tensors)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def feature_function(fused: FusedMap) -> FeatureFunction:
    """The formula in plain torch, in the dtype of its argument."""
    return lambda x, start: _ACTIVATIONS[fused.activation](fused, x, start)


def _before(fused: FusedMap, x: Tensor) -> Tensor:
    y = x * fused.in_scale if fused.weight is None else x @ fused.weight.to(x.dtype) * fused.in_scale
    return y if fused.bias is None else y + fused.bias.to(x.dtype).unsqueeze(-2) * fused.bias_scale


def _elu(fused: FusedMap, x: Tensor, start: int) -> Features:
    return Features(functional.elu(_before(fused, x), alpha=fused.alpha) + 1)


def _relu(fused: FusedMap, x: Tensor, start: int) -> Features:
    values = _before(fused, x).relu() + fused.epsilon
    if fused.cosine is None or fused.sine is None:
        return Features(values)
    angles = (held[:, start : start + x.shape[2]].to(x.dtype)[:, None, :, None] for held in (fused.cosine, fused.sine))
    return Features(torch.cat([values * angle for angle in angles], dim=-1))


def _softmax_pair(fused: FusedMap, x: Tensor, start: int) -> Features:
    y = _before(fused, x)
    return Features(torch.cat([y.softmax(dim=-1), (-y).softmax(dim=-1)], dim=-1))


def _softmax_joint(fused: FusedMap, x: Tensor, start: int) -> Features:
    y = 2 * _before(fused, x)
    return Features(torch.cat([y, -y], dim=-1).softmax(dim=-1))


def _exponential(fused: FusedMap, x: Tensor, start: int) -> Features:
    y = _before(fused, x)
    if fused.activation != "positive":
        y = torch.cat([y, -y], dim=-1)
    if fused.activation != "exp-pair":
        y = y - (x * fused.in_scale).square().sum(dim=-1, keepdim=True) / 2
    top = y.detach().amax(dim=-1)
    factor = 1.0 if fused.activation == "exp-pair" else fused.factor
    return Features(factor * torch.exp(y - top.unsqueeze(-1)), top)


_ACTIVATIONS = {
    "elu": _elu,
    "relu": _relu,
    "rotated-relu": _relu,
    "softmax-pair": _softmax_pair,
    "softmax-joint": _softmax_joint,
    "exp-pair": _exponential,
    "positive": _exponential,
    "positive-pair": _exponential,
}
