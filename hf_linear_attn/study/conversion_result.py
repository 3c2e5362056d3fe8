"""The result of a conversion or a fine-tuning, which `results.json` holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..measure.metric import Numbers, Score
from ..utils.environment import json_safe
from ..utils.files import write_json

#: The format of `results.json`.
FORMAT_VERSION = 3

Values = Mapping[str, Any]
"""Other values by their names, as JSON holds them: options, what a training did, times."""


@dataclass(frozen=True)
class Scores:
    """What the metric says of each model of a run; None where it was not measured."""

    without_attention: Numbers | None = None  # the teacher, with its attention switched off
    teacher: Numbers | None = None  # the exact model
    control: Numbers | None = None  # the exact model, trained as long
    patched: Numbers | None = None  # linear and calibrated, nothing trained
    transferred: Numbers | None = None  # after attention transfer
    closed: Numbers | None = None  # with harmful linear parts closed
    distilled: Numbers | None = None  # after distillation
    converted: Numbers | None = None  # as saved, without what harmed
    trained: Numbers | None = None  # after fine-tuning


@dataclass(frozen=True)
class Trainings:
    """What each training did: `step`, `seconds`, `tokens`, `best_step`, `evaluations`; None where there was none."""

    teacher: Values | None = None
    calibration: Values | None = None
    transfer: Values | None = None
    distill: Values | None = None
    control: Values | None = None
    train: Values | None = None


@dataclass(frozen=True)
class HeadChoice:
    """The heads that stay exact, and why."""

    plan: Values  # as `patch_model` takes it
    heads: list[Values]  # one row for each key-value head, the most needed first
    reason: str = ""  # of a budget


@dataclass(frozen=True)
class RecallPair:
    """What the teacher and the model as saved recall: `recall`, `low`, `high`, `rows`, and the task with its length."""

    task: str
    length: int
    teacher: Numbers
    student: Numbers


@dataclass(frozen=True)
class SpeedPair:
    """Times of one forward pass of the teacher and of the model as saved, side by side, at each length."""

    lengths: list[int] = field(default_factory=list)
    teacher: list[Values] = field(default_factory=list)
    student: list[Values] = field(default_factory=list)
    longest_input: int | None = None  # tokens that the model was made for

    def at(self, length: int) -> Values | None:
        """Return the times of the model as saved at a length, or None."""
        return dict(zip(self.lengths, self.student, strict=True)).get(length)


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, beside its numbers."""

    class_name: str
    parameters: int = 0
    learned_parameters: int = 0
    layers: list[Values] = field(default_factory=list)  # one entry for each self-attention layer (see `PatchReport`)
    #: How many training `inputs` are `longer` than the `exact_length` that all layers attend to exactly; None if a
    #: layer never attends to all of an input exactly.
    beyond_exact: Values | None = None

    @property
    def can_learn(self) -> bool:
        """Whether there is anything to learn, and a training input that says something of it."""
        return self.learned_parameters > 0 and (self.beyond_exact is None or self.beyond_exact["longer"] > 0)


@dataclass(frozen=True)
class ConversionResult:
    """What a run of `convert` or `finetune` made, and every number that it measured."""

    config: Values  # all options, as a YAML file has them
    model: ModelFacts
    score: Score  # which number of the metric decides
    data: Values  # numbers of rows and tokens
    environment: Values  # versions and hardware
    scores: Scores = field(default_factory=Scores)
    training: Trainings = field(default_factory=Trainings)
    choice: HeadChoice | None = None
    linear_parts: list[Values] | None = None  # what the linear part of each layer is worth
    recall: RecallPair | None = None
    speed: SpeedPair | None = None
    processes: int = 1
    created: str = ""  # UTC

    @property
    def final(self) -> Numbers:
        """What the metric says of the model as saved."""
        scores = self.scores
        return scores.converted or scores.trained or {}

    @property
    def reference(self) -> Numbers:
        """What it says of the exact model that the one as saved is compared with: the control, or else the teacher."""
        return self.scores.control or self.scores.teacher or {}

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        write_json(path, {"format_version": FORMAT_VERSION, **json_safe(asdict(self))})

    @classmethod
    def load(cls, path: str | Path) -> ConversionResult:
        """Read a result. A ValueError if the file is of another format."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            problem = f"has format version {version!r}; hf-linear-attn reads version {FORMAT_VERSION}"
            raise ValueError(f"{str(path)!r} {problem}. Use the release that wrote it.")
        for name, part in PARTS.items():
            if values[name] is not None:
                values[name] = part(**values[name])
        return cls(**{item.name: values[item.name] for item in fields(cls)})


#: The classes of those fields that are no plain values.
PARTS: dict[str, Any] = {
    "model": ModelFacts,
    "score": Score,
    "scores": Scores,
    "training": Trainings,
    "choice": HeadChoice,
    "recall": RecallPair,
    "speed": SpeedPair,
}
