"""Callbacks for `transformers.Trainer`: interruption by signals; log, progress and periodic checkpoints of a stage."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.environment import json_safe
from ..utils.json_lines import JsonLinesFile

#: Seconds between two lines of progress where there is no terminal.
PROGRESS_SECONDS = 30.0


class InterruptedRunError(RuntimeError):
    """A signal stopped a run, after a checkpoint was written; `code` is the exit code of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


class InterruptionCallback(TrainerCallback):
    """Write a checkpoint after the current step and raise an `InterruptedRunError` on SIGINT or SIGTERM.

    A second signal has its usual effect at once. The signal may reach any process of a distributed run. Nothing is
    changed outside of `train()`, in threads other than the main one, or for signals that are ignored, as under nohup.

    The Trainer's own `enable_jit_checkpoint` knows SIGTERM only, waits for three seconds, and lets `train()` return as
    if the run had ended. `remedy` is the last sentence of the message: how to resume the run.
    """

    def __init__(self, remedy: str = "Resume it with train(resume_from_checkpoint=True) and the same arguments."):
        self.remedy = remedy
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Install the handlers."""
        self.restore_handlers()
        self._received = None
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            try:
                self._handlers[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread, which alone may handle signals
                break

    def _receive(self, number: int, frame: Any) -> None:
        self._received = number
        signal.signal(number, self._handlers[number])

    def restore_handlers(self) -> None:
        """Give the signals the handlers back that they had before training."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint if any process has received a signal."""
        if args.world_size > 1:
            received = torch.tensor([self._received or 0], device=args.device)
            torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
            self._received = int(received) or None
        if self._received is not None:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise the error once the checkpoint is written."""
        if self._received is not None:
            checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            where = f"after step {state.global_step} of {state.max_steps}; a checkpoint is in {str(checkpoint)!r}"
            raise InterruptedRunError(f"Interrupted {where}. {self.remedy}", self._received)


class StageCallback(TrainerCallback):
    """Log a stage to a file of JSON lines, report its progress, and ask for periodic checkpoints.

    With `save_strategy="best"` the Trainer saves only where an evaluation is the best so far, and with `"steps"` it
    wants `save_steps` to be a multiple of `eval_steps`: a long run with few evaluations would lose many steps. So
    `save_steps` here are those between checkpoints besides the ones of `save_strategy` (0: none).

    Each line of the file `log` has the step and the stage. A resumed run first removes those of steps that it repeats.
    """

    def __init__(self, stage: str, log: Path, save_steps: int = 0, say: Callable[[str], None] = lambda line: None):
        self.stage = stage
        self.file = JsonLinesFile(log)
        self.save_steps = save_steps
        self.say = say
        self._last = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the lines of the steps that are about to be repeated."""
        if state.is_world_process_zero:
            self.file.remove(lambda row: row.get("stage") == self.stage and (row.get("step") or 0) > state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if self.save_steps and state.global_step % self.save_steps == 0 and state.global_step < state.max_steps:
            control.should_save = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Append a line, and report the loss if the last report is a while ago."""
        if state.is_world_process_zero and logs:
            self.file.append(json_safe({"step": state.global_step, "stage": self.stage, **logs}))
        if "loss" in (logs or {}) and time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self.say(f"{self.stage}: step {state.global_step} of {state.max_steps}, loss {logs['loss']:.4f}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Report the metrics."""
        numbers = {
            name.removeprefix("eval_"): value
            for name, value in (metrics or {}).items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "preparation_time"))
        }
        self.say(f"{self.stage}: step {state.global_step} of {state.max_steps}: {format_metrics(numbers)}")


def format_metrics(values: Mapping[str, float]) -> str:
    """Return metrics in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
