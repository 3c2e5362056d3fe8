"""What is timed: attention mechanisms by themselves on random q, k, v, on each backend that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms.base import AttentionInputs, LinearAttention
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from hf_linear_attn.mechanisms.softmax import EXACT
from hf_linear_attn.ops import backends
from hf_linear_attn.registry import ATTENTIONS, AttentionEntry, build_options, list_attentions

from .timing import InContext

#: The backend of mechanisms that have one form only.
OWN = "own"

#: What a mechanism says where it cannot serve a shape.
UNSUPPORTED_ERRORS = (ValueError, NotImplementedError, TypeError)


@dataclass(frozen=True)
class Inputs:
    """Standard normal q, k, v and an output's gradient, `[B, H, L, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @classmethod
    def make(
        cls, batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        tensors = (torch.randn(batch, heads, length, dim, generator=generator).to(device, dtype) for _ in range(4))
        return cls(*tensors)

    @property
    def length(self) -> int:
        return self.query.shape[2]

    @property
    def scaling(self) -> float:
        return self.query.shape[3] ** -0.5

    def moved_bytes(self, backward: bool) -> int:
        """Bytes that any attention must read or write once: q, k, v, o; backward q, k, v, o, do, dq, dk, dv too."""
        return (12 if backward else 4) * self.query.nbytes


def mechanism_names(chosen: Sequence[str] | None) -> list[str]:
    """The names asked for, or all but exact attention.

    Raises:
        ValueError: an unknown name, or exact attention.
    """
    if chosen is None:
        return [name for name in list_attentions() if name != EXACT]
    list_attentions()
    for name in chosen:
        ATTENTIONS.get(name)
        if name == EXACT:
            raise ValueError(f"attention {EXACT!r} is the exact attention, which is always measured. Leave it out.")
    return list(chosen)


def serves(name: str, causal: bool) -> bool:
    entry = ATTENTIONS.get(name)
    return entry.causal if causal else entry.bidirectional


def options_of(entry: AttentionEntry, seed: int) -> dict[str, Any]:
    return {"seed": seed} if any(field.name == "seed" for field in fields(entry.options)) else {}


def build(
    name: str,
    *,
    heads: int,
    head_dim: int,
    longest: int,
    causal: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> LinearAttention:
    """A mechanism with default options, for inputs of up to `longest` tokens; its random weights come from the seed."""
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(heads, heads, head_dim, head_dim, max_length=longest, causal=causal)
    options = build_options(entry, options_of(entry, seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = entry.factory(shape, options)
    return module.to(device=device, dtype=dtype).eval()


def num_features(module: LinearAttention) -> int | None:
    """m, where the mechanism is plain kernelized attention."""
    return module.feature_map.num_features if isinstance(module, KernelizedAttention) else None


# --------------------------------------------------------------------------------------------------------------------
# Calls


def forward(module: LinearAttention, inputs: Inputs, causal: bool) -> Callable[[], object]:
    def run() -> Tensor:
        return module(AttentionInputs(inputs.query, inputs.key, inputs.value, scaling=inputs.scaling, causal=causal))[0]

    return InContext(run, torch.no_grad)


def forward_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs, parameters: Sequence[Tensor] = ()
) -> Callable[[], object]:
    """Output and the gradients of q, k, v and of the mechanism's own parameters."""
    query, key, value = (
        tensor.detach().clone().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)
    )
    variables = [query, key, value, *(tensor for tensor in parameters if tensor.requires_grad)]

    def run() -> object:
        out = attend(query, key, value)
        return torch.autograd.grad(out, variables, inputs.gradient, allow_unused=True)

    return run


def timed_call(module: LinearAttention, inputs: Inputs, causal: bool, backward: bool) -> Callable[[], object]:
    if not backward:
        return forward(module, inputs, causal)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return module(AttentionInputs(query, key, value, scaling=inputs.scaling, causal=causal))[0]

    return forward_backward(attend, inputs, list(module.parameters()))


def exact_call(inputs: Inputs, causal: bool, backward: bool) -> Callable[[], object]:
    """`scaled_dot_product_attention`."""
    if backward:
        return forward_backward(lambda q, k, v: _sdpa(q, k, v, causal), inputs)

    return InContext(lambda: _sdpa(inputs.query, inputs.key, inputs.value, causal), torch.no_grad)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def eager(inputs: Inputs, causal: bool) -> Tensor:
    """Exact attention with all weights written down, `[B, H, L, L]`."""
    length = inputs.query.shape[2]
    weights = (inputs.query * inputs.scaling) @ inputs.key.transpose(2, 3)
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=weights.device).triu(1)
        weights = weights.masked_fill(hidden, -torch.inf)
    return weights.softmax(-1) @ inputs.value


def on_backend(call: Callable[[], object], backend: str) -> Callable[[], object]:
    """The call with a backend of that name; a mechanism of one form runs as it is."""
    return call if backend == OWN else InContext(call, partial(backends.use_backend, backend))


# --------------------------------------------------------------------------------------------------------------------
# Backends


@contextmanager
def _record_backends() -> Iterator[list[str]]:
    """Names of the backends that served calls meanwhile."""
    seen: list[str] = []
    original = backends.select_backend

    def choose(call: Any) -> Any:
        backend = original(call)
        seen.append(backend.name)
        return backend

    backends.select_backend = choose
    try:
        yield seen
    finally:
        backends.select_backend = original


def backends_of(call: Callable[[], object], chosen: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """Names of the backends that can run a call (`own` where it asks for none), and why others cannot."""
    with _record_backends() as seen:
        call()
    if not seen:
        return [OWN], {}
    supported: list[str] = []
    unsupported: dict[str, str] = {}
    for name in chosen or backends.list_backends():
        try:
            on_backend(call, name)()
        except NotImplementedError as error:
            unsupported[name] = str(error)
        else:
            supported.append(name)
    return supported, unsupported


def check_backends(chosen: Sequence[str] | None) -> None:
    """Raises a ValueError for an unknown name."""
    for name in chosen or ():
        with backends.use_backend(name):
            pass
    if "auto" in (chosen or ()):
        raise ValueError("backend 'auto' chooses among the others. Name those to measure: torch, native, …")
