"""The configs that a model's modules hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig


def own_configs(model: nn.Module) -> None:
    """Give the model copies of its configs: another model may share them."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, held in list(vars(module).items()):
            if isinstance(held, PretrainedConfig):
                setattr(module, name, copy.deepcopy(held, memo))


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Every config that a module of the model holds, once each."""
    found = {}
    for module in model.modules():
        for held in vars(module).values():
            if isinstance(held, PretrainedConfig):
                found[id(held)] = held
    return list(found.values())


def all_configs(model: nn.Module) -> Iterator[PretrainedConfig]:
    """Those, and the configs of parts that they hold."""
    waiting: list[PretrainedConfig] = configs_of(model)
    seen = set()
    while waiting:
        config = waiting.pop()
        if id(config) not in seen:
            seen.add(id(config))
            waiting += [held for held in vars(config).values() if isinstance(held, PretrainedConfig)]
            yield config
