"""Callbacks for `transformers.Trainer`: interruption by signals, periodic checkpoints, and a log of JSON lines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.environment import json_safe
from ..utils.json_lines import JsonLinesFile


class InterruptedRunError(RuntimeError):
    """A signal stopped a run, after a checkpoint was written.

    Attributes:
        code: The exit code that belongs to the signal, 128 + its number.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


class InterruptionCallback(TrainerCallback):
    """Write a checkpoint after the current step and raise an `InterruptedRunError` on SIGINT or SIGTERM.

    A second signal has its usual effect at once. The signal may reach any process of a distributed run. Nothing is
    changed outside of `train()`, in threads other than the main one, or for signals that are ignored, as under nohup.

    The Trainer's own `enable_jit_checkpoint` knows SIGTERM only, waits for three seconds, and lets `train()` return as
    if the run had ended.

    Args:
        remedy: Last sentence of the message: how to resume the run.
    """

    def __init__(
        self, remedy: str = "Resume it with train(resume_from_checkpoint=True) and the same arguments."
    ) -> None:
        self.remedy = remedy
        self._received: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
            assert args.output_dir is not None  # TrainingArguments sets it.
            raise InterruptedRunError(
                f"Interrupted after step {state.global_step} of {state.max_steps}; a checkpoint is in "
                f"{str(Path(args.output_dir) / f'checkpoint-{state.global_step}')!r}. {self.remedy}",
                self._received,
            )


class PeriodicCheckpointCallback(TrainerCallback):
    """Write a checkpoint every few steps besides those of `save_strategy`.

    With `save_strategy="best"` the Trainer saves only where an evaluation is the best so far, and with `"steps"` it
    wants `save_steps` to be a multiple of `eval_steps`: a long run with few evaluations would lose many steps.

    Args:
        every: Steps between checkpoints.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be positive, got {every!r}.")
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint."""
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            control.should_save = True


class JsonLinesCallback(TrainerCallback):
    """Append everything that the Trainer logs to a file of JSON lines, one object per report.

    Each object has the step, and the stage if there is one. A resumed run first removes the lines of steps that it
    repeats.

    Args:
        path: The file.
        stage: Name of the stage in the field `stage`, for several stages in one file.
    """

    def __init__(self, path: str | Path, stage: str | None = None) -> None:
        self.file = JsonLinesFile(Path(path))
        self.stage = stage

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the lines of the steps that are about to be repeated."""
        if state.is_world_process_zero:
            self.file.remove(lambda row: row.get("stage") == self.stage and (row.get("step") or 0) > state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append one line."""
        if state.is_world_process_zero and logs:
            stage = {} if self.stage is None else {"stage": self.stage}
            self.file.append(json_safe({"step": state.global_step, **stage, **logs}))
