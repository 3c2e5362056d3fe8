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


class StageLog(TrainerCallback):
    """The log of one stage in a file of JSON lines, its progress on the screen, and its periodic checkpoints.

    Each line of the file has the step and the stage. A resumed run first removes those of steps that it repeats.

    With `save_strategy="best"` the Trainer saves only where an evaluation is the best so far, and with `"steps"` it
    wants `save_steps` to be a multiple of `eval_steps`: a long run with few evaluations would lose many steps. So
    `save_steps` here are those between checkpoints besides the ones of `save_strategy` (0: none).
    """

    def __init__(
        self,
        stage: str,
        path: Path | None,
        say: Callable[[str], None] = lambda line: None,
        *,
        steps: int = 0,
        save_steps: int = 0,
    ) -> None:
        self.stage, self.say, self.steps, self.save_steps = stage, say, steps, save_steps
        self.file = None if path is None else JsonLinesFile(path)  # None: another process writes it
        self._last = time.monotonic()

    def begin(self, step: int) -> None:
        """Remove the lines of the steps after this one, which are about to be repeated."""
        if self.file is not None:
            self.file.remove(lambda row: row.get("stage") == self.stage and (row.get("step") or 0) > step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line. Report the metrics of an evaluation, and the loss if the last report is a while ago."""
        metrics = {
            name.removeprefix("eval_"): value
            for name, value in values.items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time", "stderr"))
        }
        is_due = time.monotonic() - self._last >= PROGRESS_SECONDS
        if metrics or ("loss" in values and is_due):
            self._last = time.monotonic()
            text = f": {format_metrics(metrics)}" if metrics else f", loss {values['loss']:.4f}"
            self.say(f"{self.stage}: step {step} of {self.steps}{text}")
        if self.file is not None:
            self.file.append(json_safe({"step": step, "stage": self.stage, **values}))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the lines of the steps that are about to be repeated."""
        self.steps = state.max_steps
        self.begin(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if self.save_steps and state.global_step % self.save_steps == 0 and state.global_step < state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Log the loss, or the metrics of an evaluation."""
        self.write(state.global_step, logs or {})


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
