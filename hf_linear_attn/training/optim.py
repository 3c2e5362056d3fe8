"""Optimizer and schedule of one stage."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..integration.attention import SUBMODULE
from .options import TrainSettings


def parameter_groups(model: nn.Module, settings: TrainSettings) -> list[dict[str, object]]:
    """Groups of the trainable parameters: weight decay on matrices only, a rate of their own for learned parts.

    Vectors (biases and the weights of norms, whatever a model calls them) are not decayed; neither are the learned
    parts of a mechanism, whose start is not zero.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            learned = f".{SUBMODULE}." in f".{name}"
            decayed = parameter.dim() >= 2 and not learned
            groups.setdefault((learned, decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": (settings.learned_lr or settings.lr) if learned else settings.lr,
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        for (learned, decayed), parameters in groups.items()
    ]


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Fused AdamW over `parameter_groups`. Raises a ValueError if nothing can be trained.

    On a CPU the loop over parameters takes as long as the forward pass of a small batch: seven times the fused step.
    """
    groups = parameter_groups(model, settings)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def lr_factor(step: int, steps: int, settings: TrainSettings) -> float:
    """The share of the peak learning rate in step `step` (from 0): a linear warm-up, then the schedule towards zero."""
    warmup = math.ceil(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(steps - warmup, 1)
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "linear":
        return max(1 - done, 0.0)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
