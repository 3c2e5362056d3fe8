"""`plan`: which key-value heads stay exact under a budget, and which windows the others get; nothing is trained.

It is `convert` up to that choice: the same rows, the same search, the same metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..training.options import ConvertConfig, DistillConfig, TransferConfig
from ..utils.files import atomic_write, write_json
from ..utils.options import make_config
from .budgets import Budget
from .card import inconclusive, layers_table, met_by, result_lines
from .conversion_result import ConversionResult, HeadChoice
from .convert import execute, prepare_student, result_of
from .options import PlanConfig
from .stages import TrainingRun

#: Files of a plan: what `patch` and `convert` take, and a table of what was measured.
PLAN, TABLE = "plan.json", "plan.md"


@dataclass(frozen=True)
class PlanResult:
    """A choice of exact heads and windows for a budget, and what was measured of it, untrained but calibrated."""

    budget: Budget
    measured: ConversionResult

    @property
    def choice(self) -> HeadChoice:
        """The heads that stay exact, and why."""
        assert self.measured.choice is not None  # a plan has a budget
        return self.measured.choice

    @property
    def problem(self) -> str:
        """Why the data cannot measure a budget of quality; empty if they can, and for other budgets."""
        unit = self.budget.unit
        return "" if unit is None or unit.name == "recall" else inconclusive(self.measured)

    @property
    def plan(self) -> Mapping[str, Any] | None:
        """The mechanism of each layer, as `patch_model` reads it; None where the data cannot measure the budget."""
        return None if self.problem else self.choice.plan

    @property
    def met(self) -> bool:
        """Whether the model is within the budget without any training. That of a cache is counted, not measured."""
        if self.problem:
            return False
        return self.budget.cost == "cache" or self.budget.is_met(met_by(self.budget, self.measured)[0])

    @property
    def exit_code(self) -> int:
        """0: the budget is met; 1: it is not; 3: the data do not tell."""
        if self.problem:
            return 3
        return 0 if self.met else 1

    def summary(self) -> list[str]:
        """Return the findings as lines of Markdown."""
        return [*result_lines(self.measured), *layers_table(self.measured)]

    def __repr__(self) -> str:
        return "\n".join(self.summary())


def plan(config: PlanConfig | None = None, *, console: Console | None = None, **options: Any) -> PlanResult:
    """Choose exact heads and windows for a budget, and write `plan.json` and a table of what was measured.

        plan(model="gpt2", budget="25% cache at 8192", data={"dataset": "wiki.txt"}, output="plan").met

    `patch` and `convert` take the plan. Where the data cannot measure attention, none is written for a budget of
    quality.

    Args:
        config: All options at once.
        console: Where progress and results are shown; None: stderr.
        **options: Fields of `PlanConfig`, which override those of `config`. Sections are mappings, as in YAML.

    Raises:
        ValueError, OSError: Options, a model or data that cannot be used, or a budget that nothing meets.
    """
    config = make_config(PlanConfig, config, options)
    untrained: dict[str, Any] = {
        "transfer": TransferConfig(max_steps=0),
        "distill": DistillConfig(num_train_epochs=0.0),
    }
    measured = execute(ConvertConfig(**vars(config), **untrained, report_to=()), console, "plan", _measure)
    result = PlanResult(Budget.parse(config.budget), measured)
    folder = Path(config.output)
    if result.plan is None:
        (folder / PLAN).unlink(missing_ok=True)
    else:
        write_json(folder / PLAN, dict(result.plan))
    lines = [f"# A plan for {config.budget}", "", result.problem, *result.summary()]
    atomic_write(folder / TABLE, "\n".join(lines) + "\n")
    return result


def _measure(run: TrainingRun) -> ConversionResult:
    """Choose, and measure the model that was chosen."""
    teacher, student, facts, scores = prepare_student(run)
    return result_of(run, teacher, student, facts, scores)
