"""What a gradient stage minimises: the task's own loss, or that of a student beside its teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .options import DistillSettings

Batch = Mapping[str, Tensor]
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Sums:
    """Loss of one batch as a sum over its targets (examples, or predicted tokens), and its parts."""

    loss: Tensor
    parts: dict[str, Tensor]


class Heads(Protocol):
    """What an objective needs to know of a kind of model."""

    def predicted(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[N, C]` at the places that are predicted, and their targets `[N]`."""

    def row_counts(self, labels: Tensor) -> Tensor:
        """How many of the N are of each row of the batch, `[B]`."""

    regression: bool


class Objective(Protocol):
    """Called with the model in training mode and a batch with labels."""

    heads: Heads

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss of the batch, with gradients."""


class TaskObjective:
    """Cross-entropy of the labels (squared error for scores), summed over targets."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        inputs, labels = split_labels(batch)
        rows, targets = self.heads.predicted(model(**inputs).logits, labels)
        loss = task_loss(rows, targets, self.heads.regression)
        return Sums(loss, {"task": loss.detach()})


class DistillObjective:
    """`a·T²·KL(p_T ‖ q_T) + b·task + c·Σ_l ‖h_l - h'_l‖² / ‖h'_l‖² / layers`, summed over targets
    (the last term: over rows, each with its number of targets).

    p_T, q_T: outputs of teacher and student at temperature T (for scores: their squared difference); h, h': hidden
    states of student and teacher after every layer, over real tokens (the trajectory that guides Linformer-like
    students; Hinton et al. 2015, arXiv:1503.02531).

    teacher: called like a model, without gradients; not at all where the task's loss is the only one.
    """

    def __init__(self, heads: Heads, teacher: Forward, settings: DistillSettings) -> None:
        self.heads = heads
        self.teacher = teacher
        self.settings = settings

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        settings = self.settings
        inputs, labels = split_labels(batch)
        trajectory = settings.hidden > 0
        guide: Any = None
        if settings.logits or trajectory:
            with torch.no_grad():
                guide = self.teacher(**inputs, output_hidden_states=trajectory)
        output = model(**inputs, output_hidden_states=trajectory)
        rows, targets = self.heads.predicted(output.logits, labels)
        total = rows.new_zeros((), dtype=torch.float32)
        parts = {}
        if settings.task:
            parts["task"] = task_loss(rows, targets, self.heads.regression)
            total = total + settings.task * parts["task"]
        if settings.logits:
            wanted, _ = self.heads.predicted(guide.logits, labels)
            parts["logits"] = logits_loss(rows, wanted, settings.temperature, self.heads.regression)
            total = total + settings.logits * parts["logits"]
        if trajectory:
            mask = inputs.get("attention_mask")
            errors = hidden_loss(output.hidden_states, guide.hidden_states, mask)
            # By row, so that the sum over a batch does not depend on how its rows are spread over processes.
            parts["hidden"] = (errors * self.heads.row_counts(labels)).sum()
            total = total + settings.hidden * parts["hidden"]
        return Sums(total, {name: part.detach() for name, part in parts.items()})


def split_labels(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs without labels, and the labels."""
    return {name: tensor for name, tensor in batch.items() if name != "labels"}, batch["labels"]


def task_loss(rows: Tensor, targets: Tensor, regression: bool) -> Tensor:
    """Summed over the rows `[N, C]`: cross-entropy, or squared error of `[N, 1]` scores."""
    if regression:
        return (rows.float().squeeze(-1) - targets.float()).square().sum()
    return functional.cross_entropy(rows.float(), targets, reduction="sum")


def logits_loss(rows: Tensor, wanted: Tensor, temperature: float, regression: bool) -> Tensor:
    """`T² Σ KL(softmax(wanted / T) ‖ softmax(rows / T))` over rows `[N, C]`; squared error for scores."""
    if regression:
        return (rows.float() - wanted.float()).square().sum()
    student = functional.log_softmax(rows.float() / temperature, dim=-1)
    teacher = functional.log_softmax(wanted.float() / temperature, dim=-1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="sum", log_target=True)


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """`‖h - h'‖² / ‖h'‖²` over the real tokens of each row, mean over layers: `[B]`. The embeddings are left out."""
    errors = []
    for own, wanted in zip(student[1:], teacher[1:], strict=True):
        own, wanted = own.float(), wanted.float()
        difference, norm = (own - wanted).square().sum(-1), wanted.square().sum(-1)
        if mask is not None:
            real = mask.bool()
            difference, norm = difference.masked_fill(~real, 0.0), norm.masked_fill(~real, 0.0)
        errors.append(difference.sum(-1) / norm.sum(-1).clamp_min(1e-12))
    return torch.stack(errors).mean(0)
