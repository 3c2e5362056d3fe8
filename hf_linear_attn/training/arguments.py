"""Configs of the trainers: `transformers.TrainingArguments` with a few fields more."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..utils.options import check_options
from .options import DistillConfig, StageConfig, check_loss_weights


def _as_in(section: Any, name: str) -> Any:
    """A field with the default, the help and the bounds of an option of the command line."""
    entry = section.__dataclass_fields__[name]
    return field(default=entry.default, metadata=entry.metadata)


@dataclass
class FinetuningConfig(TrainingArguments):
    """Arguments of `FinetuningTrainer`.

    All fields of `transformers.TrainingArguments` keep their meaning. `logging_nan_inf_filter` has no effect: a loss
    that is not finite is an error.
    """

    learned_lr: float | None = _as_in(StageConfig, "learned_lr")
    disable_dropout: bool = _as_in(StageConfig, "disable_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)


@dataclass
class DistillationConfig(FinetuningConfig):
    """Arguments of `DistillationTrainer`: the weights of the terms of its loss."""

    disable_dropout: bool = _as_in(DistillConfig, "disable_dropout")
    logits_weight: float = _as_in(DistillConfig, "logits_weight")
    temperature: float = _as_in(DistillConfig, "temperature")
    task_weight: float = _as_in(DistillConfig, "task_weight")
    hidden_weight: float = _as_in(DistillConfig, "hidden_weight")
    carried_length: int = _as_in(DistillConfig, "carried_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss_weights(self)
        if self.carried_length and self.gradient_checkpointing:
            raise ValueError("carried_length needs a cache, which gradient_checkpointing excludes. Set one of them.")
