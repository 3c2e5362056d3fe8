"""Configs of the trainers: `transformers.TrainingArguments` with a few fields more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from transformers import TrainingArguments

AttentionLoss = Literal["auto", "weights", "outputs"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def _check_range(config: object, lower: float, upper: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lower <= value < upper:
            raise ValueError(f"{name} must lie in [{lower}, {upper}), got {value!r}.")


@dataclass
class FinetuningConfig(TrainingArguments):
    """Arguments of `FinetuningTrainer`.

    All fields of `transformers.TrainingArguments` keep their meaning. `logging_nan_inf_filter` has no effect: a loss
    that is not finite is an error.
    """

    learned_lr: float | None = field(
        default=None,
        metadata=_help("learning rate of the mechanisms' learned parts, without weight decay (default: learning_rate)"),
    )
    disable_dropout: bool = field(default=False, metadata=_help("train without the model's dropout"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learned_lr is not None and not self.learned_lr > 0:
            raise ValueError(f"learned_lr must be positive, got {self.learned_lr!r}.")
        if self.data_seed is None:
            self.data_seed = self.seed


@dataclass
class DistillationConfig(FinetuningConfig):
    """Arguments of `DistillationTrainer`: the weights of the terms of its loss."""

    disable_dropout: bool = field(
        default=True,
        metadata=_help("train without the student's dropout, which is noise beside a teacher that has none"),
    )
    logits_weight: float = field(default=1.0, metadata=_help("weight of KL(teacher || student) of the outputs"))
    temperature: float = field(default=2.0, metadata=_help("temperature of both distributions in that divergence"))
    task_weight: float = field(default=1.0, metadata=_help("weight of the task's own loss"))
    hidden_weight: float = field(
        default=1.0, metadata=_help("weight of the relative squared error of the hidden states, layer by layer")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature!r}.")
        _check_range(self, 0, float("inf"), "logits_weight", "task_weight", "hidden_weight")
        if not self.logits_weight and not self.task_weight and not self.hidden_weight:
            raise ValueError(
                "logits_weight, task_weight and hidden_weight are all 0: there is no loss to minimise. Set one of them."
            )


@dataclass
class AttentionTransferConfig(FinetuningConfig):
    """Arguments of `AttentionTransferTrainer`.

    The optimizer is AdamW without weight decay; the learning rate rises for a tenth of the steps and falls as a cosine
    to a tenth of its peak. `max_grad_norm` is the largest norm per layer.
    """

    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata=_help("peak learning rate (default: what suits each mechanism, 1e-2 for feature maps)"),
    )
    max_steps: int = field(default=200, metadata=_help("optimizer steps"))
    loss: AttentionLoss = field(
        default="auto", metadata=_help("match attention 'weights', attention 'outputs', or 'auto': whichever suits")
    )
    branch_first: float = field(
        default=0.0, metadata=_help("share of the steps, at the beginning, in which a hybrid trains its linear branch")
    )
    window_dropout: float = field(default=0.0, metadata=_help("share of the later steps in which it does so again"))
    patience: int | None = field(
        default=None, metadata=_help("stop after this number of evaluations without a lower loss")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}.")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be positive, got {self.max_steps!r}.")
        if self.loss not in ("auto", "weights", "outputs"):
            raise ValueError(f"loss must be one of 'auto', 'weights', 'outputs', got {self.loss!r}.")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be positive, got {self.patience!r}.")
        _check_range(self, 0, 1, "branch_first", "window_dropout")
