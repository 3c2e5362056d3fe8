"""One stage of gradient steps on accelerate: accumulation, checkpoints, resumption, evaluation, the best model kept.

Every step is a pure function of the weights, the optimizer's state and its number: the order of the data, masked tokens
and dropout are drawn from (seed, step). A run that was interrupted and resumed is therefore, on a CPU, bit for bit the
run that was not.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..integration.models import weight_write_errors
from .callbacks import InterruptedRunError
from .objectives import Objective, Sums
from .optim import lr_factor
from .options import RunSettings, TrainSettings
from .saving import clear_leftovers, whole_folder, without_shared
from .sharding import autocast, place
from .stream import BatchStream
from .tracking import JsonLinesTracker, Reporter, short

Evaluate = Callable[[nn.Module], dict[str, float]]

#: Steps between two reports to the trackers.
REPORT_EVERY = 10


@dataclass
class Progress:
    """Where a stage is. evaluations: (step, metrics); seconds: of training alone."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Goal:
    """The metric that decides which step is best."""

    metric: str
    higher_is_better: bool

    def better(self, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
        """Whether `new` is an improvement; what is no number never is."""
        if not math.isfinite(new[self.metric]):
            return False
        if old is None or not math.isfinite(old[self.metric]):
            return True
        return new[self.metric] > old[self.metric] if self.higher_is_better else new[self.metric] < old[self.metric]


class Loop:
    """Trains a model in one stage.

    Args:
        name: of the stage; its checkpoints are in `folder / "checkpoints" / name`.
        evaluate: called with the prepared model in eval mode, on every process.
        goal: what `evaluate` is judged by; None keeps the last step.

    After `run`, `result` is the plain model with the weights that were kept: the model that was given, or of one that
    accelerate shards a whole copy on the CPU.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        objective: Objective,
        stream: BatchStream,
        *,
        accelerator: Accelerator,
        train: TrainSettings,
        run: RunSettings,
        folder: Path,
        evaluate: Evaluate | None,
        goal: Goal | None,
        reporter: Reporter,
        log: JsonLinesTracker | None = None,
    ) -> None:
        self.name = name
        self.objective = objective
        self.stream = stream
        self.accelerator = accelerator
        self.train = train
        self.run_settings = run
        self.folder = folder / "checkpoints" / name
        self.evaluate = evaluate if train.evaluations else None
        self.goal = goal
        self.reporter = reporter
        self.log = log
        self.steps = total_steps(train, stream, accelerator.num_processes)
        self.placed = place(accelerator, model, train)
        self.model, self.result = self.placed.model, self.placed.result
        self.progress = Progress()
        self._signal: int | None = None

    # ---------------------------------------------------------------------------------------------- the loop

    def run(self) -> Progress:
        """Train to the end, from the last checkpoint of the stage if the run resumes.

        Raises:
            InterruptedRunError: SIGINT or SIGTERM; a checkpoint has been written.
            FloatingPointError: the loss is infinite or NaN.
        """
        if self.run_settings.resume:
            self._resume()
        batches = self.stream.read(self.progress.step * self.train.accumulation)
        self.reporter.start(self.name, self.steps, self.progress.step)
        try:
            with self._signals():
                while self.progress.step < self.steps and not self._out_of_patience():
                    self._step(batches)
                    self._after_step()
        finally:
            self.reporter.stop()
        self._finish()
        return self.progress

    def _step(self, batches: Iterator[Mapping[str, Tensor]]) -> None:
        began = time.perf_counter()
        accelerator, step = self.accelerator, self.progress.step
        self._training_mode()
        torch.manual_seed(hash_seed(self.run_settings.seed, step, accelerator.process_index))
        group = [to_device(next(batches), accelerator.device) for _ in range(self.train.accumulation)]
        sums = self._backward(group)
        # A function of the step alone: there is no scheduler whose state could be lost.
        self.placed.set_rate(lr_factor(step, self.steps, self.train))
        self.placed.step()
        self.progress.step += 1
        tokens = sum(int(batch["attention_mask"].sum()) for batch in group) * accelerator.num_processes
        self.progress.tokens += tokens
        seconds = time.perf_counter() - began
        self.progress.seconds += seconds
        self._report(sums, tokens / max(seconds, 1e-9))

    def _training_mode(self) -> None:
        """Training mode; without dropout only for the layers that recompute their activations, which ask for it."""
        self.model.train(self.train.dropout)
        if not self.train.dropout:
            for module in self.model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True

    def _backward(self, group: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Gradients of the loss over all targets of the step, on all processes, however they are spread; its parts."""
        accelerator = self.accelerator
        counted = torch.stack([self.objective.heads.row_counts(batch["labels"]).sum() for batch in group]).sum()
        # The gradients of the processes are averaged: the mean over all targets needs a sum.
        total = float(accelerator.reduce(counted, "sum")) / accelerator.num_processes
        parts: dict[str, float] = {}
        for number, batch in enumerate(group):
            last = number == len(group) - 1
            with self.placed.collecting(last):
                sums = self._loss(batch)
                self.placed.backward(sums.loss / total)
            for name, value in {"loss": sums.loss.detach(), **sums.parts}.items():
                parts[name] = parts.get(name, 0.0) + float(value) / total
        if not math.isfinite(parts["loss"]):
            raise FloatingPointError(
                f"The loss of {self.name} became {parts['loss']} at step {self.progress.step + 1}. Lower the learning "
                f"rate (now {self.train.lr}), or train without fp16."
            )
        return parts

    def _loss(self, batch: Mapping[str, Tensor]) -> Sums:
        with autocast(self.accelerator):
            return self.objective(self.model, batch)

    def _after_step(self) -> None:
        step, every = self.progress.step, self.run_settings.checkpoint_every
        if self.evaluate is not None and step in evaluation_steps(self.steps, self.train.evaluations):
            self._evaluate()
        stop = self._stop_wanted()
        if stop is not None or (every and step % every == 0 and step < self.steps):
            self.save_checkpoint()
        if stop is not None:
            raise InterruptedRunError(
                f"Interrupted in {self.name!r} after step {step} of {self.steps}; a checkpoint is in "
                f"{str(self.folder)!r}. Go on with the same settings and --run.resume true.",
                stop,
            )

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        self.model.eval()
        metrics = self.evaluate(self.model)
        old = next((held for step, held in self.progress.evaluations if step == self.progress.best_step), None)
        self.progress.evaluations.append((self.progress.step, metrics))
        self.accelerator.log({"stage": self.name, **metrics}, step=self.progress.step)
        self.reporter.say(f"{self.name}: step {self.progress.step} of {self.steps}: {short(metrics)}")
        if self.goal is not None and self.goal.better(metrics, old):
            self.progress.best_step = self.progress.step
            self._save_best()

    def _out_of_patience(self) -> bool:
        if self.train.patience is None or self.progress.best_step is None:
            return False
        since = [step for step, _ in self.progress.evaluations if step > self.progress.best_step]
        return len(since) >= self.train.patience

    def _report(self, parts: dict[str, float], speed: float) -> None:
        step = self.progress.step
        self.reporter.update(step, f"loss {parts['loss']:.4f}, {speed:,.0f} tokens/s")
        if step % REPORT_EVERY == 0 or step in (1, self.steps):
            held = torch.tensor(list(parts.values()), device=self.accelerator.device)
            means = self.accelerator.reduce(held, "mean").tolist()  # each process has seen its own part of the batch
            values = {f"train/{name}": value for name, value in zip(parts, means, strict=True)}
            rate = self.placed.optimizer.param_groups[0]["lr"]
            self.accelerator.log({"stage": self.name, **values, "lr": rate, "tokens_per_second": speed}, step=step)

    # ---------------------------------------------------------------------------------------------- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step under way; a second one ends it at once."""
        before: dict[int, Any] = {}

        def note(number: int, frame: Any) -> None:
            self._signal = number
            signal.signal(number, before[number])

        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as nohup and shells in the background ask for
            try:
                before[number] = signal.signal(number, note)
            except ValueError:  # not the main thread: signals are somebody else's
                break
        try:
            yield
        finally:
            for changed, handler in before.items():
                signal.signal(changed, handler)

    def _stop_wanted(self) -> int | None:
        """The signal that any process has got, known to all."""
        if self.accelerator.num_processes == 1:
            return self._signal
        own = torch.tensor([self._signal or 0], device=self.accelerator.device)
        found = int(self.accelerator.gather(own).max())
        return found or None

    # ---------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> None:
        """Write the state aside, rename it to `step-00000042`, and remove the oldest ones."""
        accelerator = self.accelerator
        accelerator.wait_for_everyone()
        target = self.folder / f"step-{self.progress.step:08d}"
        if not target.exists():
            aside = self.folder / f".{target.name}.state.part"
            if accelerator.is_main_process:
                shutil.rmtree(aside, ignore_errors=True)
            accelerator.wait_for_everyone()
            with weight_write_errors(aside):
                accelerator.save_state(str(aside), safe_serialization=True)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (aside / "progress.json").write_text(
                    json.dumps({**asdict(self.progress), "processes": accelerator.num_processes}), encoding="utf-8"
                )
                aside.rename(target)
                for old in self._checkpoints()[: -self.run_settings.keep]:
                    shutil.rmtree(old, ignore_errors=True)
                self._forget_best()
        accelerator.wait_for_everyone()

    def _best_folder(self, step: int | None) -> Path:
        return self.folder / f"best-{step or 0:08d}"

    def _forget_best(self) -> None:
        """Remove best weights that neither the run nor one of its checkpoints, which a crash may lead back to, name."""
        named = {self.progress.best_step}
        named |= {
            json.loads((path / "progress.json").read_text(encoding="utf-8"))["best_step"]
            for path in self._checkpoints()
        }
        kept = {self._best_folder(step).name for step in named}
        for path in self.folder.glob("best-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if (path / "progress.json").is_file())

    def _resume(self) -> None:
        if self.accelerator.is_main_process and self.folder.is_dir():
            clear_leftovers(self.folder)
        self.accelerator.wait_for_everyone()
        found = self._checkpoints()
        if found:
            held = json.loads((found[-1] / "progress.json").read_text(encoding="utf-8"))
            before, now = held.pop("processes"), self.accelerator.num_processes
            if before != now:
                raise ValueError(
                    f"{str(found[-1])!r} was written by {before} process(es), and this run has {now}: the order of the "
                    "data would change. Resume with as many as before."
                )
            self.accelerator.load_state(str(found[-1]))
            held["evaluations"] = [(step, metrics) for step, metrics in held["evaluations"]]
            self.progress = Progress(**held)
            self.reporter.say(f"{self.name}: goes on after step {self.progress.step} of {self.steps}")
        if self.log is not None and self.accelerator.is_main_process:
            self.log.rewind(self.name, self.progress.step)

    def _save_best(self) -> None:
        state = self.placed.whole_state()
        if self.accelerator.is_main_process:
            with whole_folder(self._best_folder(self.progress.best_step)) as aside, weight_write_errors(aside):
                save_file(without_shared(state), str(aside / "model.safetensors"))
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        """Put the best step's weights into `result`."""
        if self.progress.best_step in (None, self.progress.step):
            state = self.placed.last_state()
        else:
            state = load_file(str(self._best_folder(self.progress.best_step) / "model.safetensors"))
        self.placed.release()
        if state is None:
            return
        model = self.result
        missing, unexpected = model.load_state_dict(state, strict=False)
        shared = set(model.state_dict()) - set(without_shared(model.state_dict()))
        if unexpected or set(missing) - shared:
            raise RuntimeError(f"The best step's weights do not fit the model: {[*unexpected, *missing][:3]}.")


# --------------------------------------------------------------------------------------------------------------------


def total_steps(train: TrainSettings, stream: BatchStream, processes: int) -> int:
    """Optimizer steps of a stage."""
    if train.steps is not None:
        return train.steps
    return max(1, math.ceil(train.epochs * len(stream.rows) / (train.batch_size * train.accumulation * processes)))


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """Evenly spread, the last step included."""
    return {round(steps * number / evaluations) for number in range(1, evaluations + 1)} - {0}


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def hash_seed(*numbers: int) -> int:
    """One seed of several numbers, the same in every process and Python."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF
