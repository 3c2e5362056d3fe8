"""Log, progress and periodic checkpoints of a stage."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..utils.environment import json_safe
from ..utils.json_lines import JsonLinesFile

#: Seconds between two lines of progress where there is no terminal.
PROGRESS_SECONDS = 60.0


class StageLog:
    """The log of one stage in a file of JSON lines, and its progress on the screen.

    Each line of the file has the step and the stage. A resumed run first removes those of steps that it repeats.
    """

    def __init__(self, stage: str, path: Path, say: Callable[[str], None] = lambda line: None, steps: int = 0) -> None:
        self.stage = stage
        self.steps = steps
        self.file = JsonLinesFile(path)
        self.say = say
        self._last = time.monotonic()

    def begin(self, step: int) -> None:
        """Remove the lines of the steps after this one, which are about to be repeated."""
        self.file.remove(lambda row: row.get("stage") == self.stage and (row.get("step") or 0) > step)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        self.file.append(json_safe({"step": step, "stage": self.stage, **values}))

    def report(self, step: int, loss: float) -> None:
        """Report the loss if the last report is a while ago."""
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self.say(f"{self.stage}: step {step} of {self.steps}, loss {loss:.4f}")

    def report_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report the metrics of an evaluation, `eval_NAME`."""
        numbers = {
            name.removeprefix("eval_"): value
            for name, value in metrics.items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time", "stderr"))
        }
        self._last = time.monotonic()
        self.say(f"{self.stage}: step {step} of {self.steps}: {format_metrics(numbers)}")


class StageCallback(TrainerCallback):
    """Log a stage to a file of JSON lines, report its progress, and ask for periodic checkpoints.

    With `save_strategy="best"` the Trainer saves only where an evaluation is the best so far, and with `"steps"` it
    wants `save_steps` to be a multiple of `eval_steps`: a long run with few evaluations would lose many steps. So
    `save_steps` here are those between checkpoints besides the ones of `save_strategy` (0: none).
    """

    def __init__(self, stage: str, log: Path, save_steps: int = 0, say: Callable[[str], None] = lambda line: None):
        self.log = StageLog(stage, log, say)
        self.save_steps = save_steps

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the lines of the steps that are about to be repeated."""
        self.log.steps = state.max_steps
        if state.is_world_process_zero:
            self.log.begin(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if self.save_steps and state.global_step % self.save_steps == 0 and state.global_step < state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Append a line, and report the loss if the last report is a while ago."""
        if state.is_world_process_zero and logs:
            self.log.add(state.global_step, logs)
        if "loss" in (logs or {}):
            self.log.report(state.global_step, logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Report the metrics."""
        self.log.report_metrics(state.global_step, metrics or {})


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
