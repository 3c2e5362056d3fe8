"""One tolerance table, comparisons of tensors, and of a model before and after a call."""

from __future__ import annotations

import copy
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

#: Gradients pass every operation twice and cancel more.
GRADIENT_FACTOR = 10.0


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


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
