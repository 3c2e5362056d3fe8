"""One tolerance table, comparisons of tensors, and of a model before and after a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.inputs import token_ids

#: Largest relative error `max|a - b| / max|b|` that two ways to the same number may differ by.
TOLERANCE = {
    torch.float64: 1e-10,  # 2^-53 = 1e-16, times some 1e3 additions, exponentials and a division by small sums
    torch.float32: 2e-5,  # 2^-24 = 6e-8, times the same: the fast forms add in another order than the definition
    torch.float16: 5e-3,  # 2^-11 = 5e-4 for each rounded tensor between the layers; sums are kept in float32
    torch.bfloat16: 4e-2,  # 2^-8 = 4e-3 for each rounded tensor between the layers; sums are kept in float32
}

#: Tokens that `generate` adds.
NEW = 8

#: Gradients pass every operation twice and cancel more.
GRADIENT_FACTOR = 10.0


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def generate(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    """`NEW` more tokens, greedily unless the settings say otherwise."""
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **settings})


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`max|a - b| / max|b|`; infinite where `a` is not finite."""
    if not actual.numel():
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), 1e-12)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    assert actual.shape == expected.shape
    error, limit = relative_error(actual, expected), TOLERANCE[dtype] * factor
    assert error <= limit, f"relative error {error:.2e} exceeds {limit:.2e}"


def weighted_sum(x: Tensor) -> Tensor:
    """A sum with another weight for each entry, so that no two gradients cancel."""
    return (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum()


def assert_same_function(
    out: Tensor,
    expected: Tensor,
    leaves: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    factor: float = 1.0,
    gradient_factor: float = GRADIENT_FACTOR,
    floor: float = 1e-6,
) -> None:
    """Compare outputs `[B, H, L, e]` in float64 at the tokens of a mask `[B, L]`, and the gradients of both.

    A gradient may be zero but for rounding: `floor` is the least size that errors are relative to.
    """
    if mask is not None:
        out, expected = (x.transpose(1, 2)[mask] for x in (out, expected))
    assert_close(out, expected, torch.float64, factor)
    least = torch.full((1,), floor, dtype=torch.float64)
    pairs = (torch.autograd.grad(weighted_sum(x), leaves) for x in (out, expected))
    for computed, reference in zip(*pairs, strict=True):
        assert_close(*(torch.cat([x.flatten(), least]) for x in (computed, reference)), torch.float64, gradient_factor)


def in_pieces(
    call: Callable[..., tuple[Tensor, Any]], tensors: Iterable[Tensor], mask: Tensor | None, sizes: Iterable[int]
) -> tuple[Tensor, Any]:
    """Run `call(q, k, v, mask=…, state=…)` on consecutive pieces; return the joined outputs and the last state."""
    outs, state, start, tensors = [], None, 0, list(tensors)
    for size in sizes:
        now = slice(start, start + size)
        part = None if mask is None else mask[:, now]
        out, state = call(*(x[:, :, now] for x in tensors), mask=part, state=state)
        outs.append(out)
        start += size
    return torch.cat(outs, dim=2), state


def config_dict(model: PreTrainedModel) -> dict[str, Any]:
    return {**model.config.to_dict(), "_attn_implementation": model.config._attn_implementation}


@dataclass(frozen=True)
class Snapshot:
    """Everything that a failed call must leave as it was."""

    cls: type
    config: dict[str, Any]
    state: dict[str, Tensor]
    modules: list[str]
    hooks: int
    outputs: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, **inputs: Any) -> Snapshot:
        with torch.no_grad():
            outputs = model(**(inputs or {"input_ids": token_ids()}))[0]
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
        names = [f"{name}:{type(module).__name__}" for name, module in model.named_modules()]
        return cls(type(model), copy.deepcopy(config_dict(model)), state, names, hooks, outputs)

    def assert_same(self, model: PreTrainedModel, **inputs: Any) -> None:
        now = Snapshot.of(model, **inputs)
        assert now.cls is self.cls
        assert now.config == self.config
        assert now.modules == self.modules
        assert now.hooks == self.hooks
        assert list(now.state) == list(self.state)
        assert all(torch.equal(now.state[name], self.state[name]) for name in self.state)
        assert torch.equal(now.outputs, self.outputs)
