"""What makes a training resumable: signals, batches that depend on the seed and the epoch alone, whole checkpoints."""

import json
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ..integration.context import is_learned
from ..utils.files import remove_partial_files, replace_folder
from .sharding import check_sharding, fill_copy, is_sharded, meta_copy, name_layers, release, reshard, shards_models

#: In a checkpoint: learned parts of mechanisms that neither PEFT's adapter file nor a frozen base holds.
LEARNED_FILE = "linear_attention.safetensors"

#: Types of arrays and of their numbers, which JSON does not know.
ARRAYS = (torch.Tensor, np.ndarray, np.generic)


class InterruptedRunError(RuntimeError):
    """A signal stopped a run.

    Attributes:
        where: Where the run stopped, and what has been saved.
        code: The exit code of the signal.
    """

    def __init__(self, where: str, remedy: str, number: int) -> None:
        super().__init__(f"Interrupted {where}. {remedy}")
        self.where = where
        self.number = number
        self.code = 128 + number


class SignalWatch:
    """Notes SIGINT and SIGTERM between `start` and `stop`, so that a loop can save its state before it ends.

    A second signal has its usual effect at once. Nothing is changed in threads other than the main one, or for signals
    that are ignored, as under nohup.

    Args:
        action: Called with the number of the first signal, inside the handler.
    """

    def __init__(self, action: Callable[[int], None] = lambda number: None) -> None:
        self.action = action
        self.received: int | None = None
        self._handlers: dict[int, Any] = {}

    def start(self) -> None:
        """Install the handlers."""
        self.stop()
        self.received = None
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            try:
                self._handlers[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread, which alone may handle signals
                break

    def stop(self) -> None:
        """Give the signals the handlers back that they had before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(number, self._handlers[number])
        self.action(number)

    def received_anywhere(self, device: torch.device | str = "cpu") -> int | None:
        """Return the number of a signal that any process of a distributed run has received. Every process calls it."""
        if torch.distributed.is_initialized():
            received = torch.tensor([self.received or 0], device=device)
            torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
            self.received = int(received) or None
        return self.received


class InterruptionCallback(TrainerCallback):
    """Write a checkpoint after the current step and raise an `InterruptedRunError` on SIGINT or SIGTERM.

    The signal may reach any process of a distributed run. The Trainer's own `enable_jit_checkpoint` knows SIGTERM only,
    waits for three seconds, and lets `train()` return as if the run had ended.

    Args:
        remedy: The last sentence of the message: how to resume the run.
    """

    def __init__(self, remedy: str = "Resume it with train(resume_from_checkpoint=True) and the same arguments."):
        self.remedy = remedy
        self.watch = SignalWatch()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Watch for signals."""
        self.watch.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a checkpoint if any process has received a signal."""
        if self.watch.received_anywhere(args.device) is not None:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise the error once the checkpoint is written."""
        if self.watch.received is not None:
            checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            where = f"after step {state.global_step} of {state.max_steps}; a checkpoint is in {str(checkpoint)!r}"
            raise InterruptedRunError(where, self.remedy, self.watch.received)


def mixed_seed(*numbers: int) -> int:
    """Return one seed in [0, 2⁶³) made of several numbers, the same in every process and Python."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ (number + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF


@contextmanager
def local_seed(seed: int) -> Iterator[None]:
    """Context manager that seeds Python's, NumPy's and torch's generators on the CPU, and restores their states."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass
class EpochSampler(Sampler[int]):
    """A random order of all rows that is drawn from (seed, epoch).

    Transformers' own `LengthGroupedSampler` draws its order from torch's generator, whose state at the beginning of an
    epoch is not known to a run that resumes in the middle of it. In several processes accelerate does not tell the
    sampler of a resumed loader its epoch either. With the `lengths` of all rows in tokens, the `batch_size` rows of an
    optimizer step are of similar length, so that little is padding. The steps are in random order: those of
    Transformers go from long rows to short ones, again and again.
    """

    size: int
    seed: int
    lengths: Sequence[int] | None = None
    batch_size: int = 1
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the following order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        if self.lengths is None:
            return iter(torch.randperm(self.size, generator=generator).tolist())
        rows = torch.tensor(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))
        *steps, last = rows.split(self.batch_size)
        order = torch.randperm(len(steps), generator=generator).tolist()
        return iter(torch.cat([*(steps[index] for index in order), last]).tolist())


class SeededCollator:
    """A data collator whose random numbers, such as masked tokens, are drawn from (seed, epoch, rows).

    The Trainer restores torch's generator after it has fetched the first batches of a resumed run, and accelerate
    fetches one batch ahead: a collator that draws from this generator would mask other tokens than in an undisturbed
    run. As nothing is drawn from it here, dropout is not affected by the number of loader processes either.
    """

    def __init__(self, collator: Callable[[list[Any]], Any], seed: int) -> None:
        self.collator = collator
        self.seed = seed
        # Shared memory, because worker processes may outlive an epoch.
        self._epoch = torch.zeros(1, dtype=torch.long).share_memory_()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the collator, which the Trainer saves with the model; None if it has none."""
        return getattr(self.collator, "tokenizer", None)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the following batches."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: list[Any]) -> Any:
        # (JSON is the same for equal rows in every process; lists stand for tensors.)
        content = json.dumps(rows, default=lambda value: value.tolist() if isinstance(value, ARRAYS) else repr(value))
        with local_seed(mixed_seed(self.seed, int(self._epoch), zlib.crc32(content.encode()))):
            return self.collator(rows)


class ResumableTrainer(Trainer):
    """`transformers.Trainer` whose interrupted runs end as undisturbed ones.

    What it does differently, and why:

    - A checkpoint is written to a hidden folder and then renamed. The Trainer writes in place: a process that is killed
      meanwhile leaves a folder from which it cannot resume.
    - A resumed run sees the batches of the undisturbed one, and ends on a CPU with the same bits, given the same number
      of threads (see `EpochSampler` and `SeededCollator`; a data set whose rows are random themselves is beyond that).
    - It goes on with the states of its callbacks: an early stop counts the evaluations before it, too. From a
      checkpoint of the last step it takes no further one.
    - SIGINT and SIGTERM write a checkpoint and raise an `InterruptedRunError`, unless `callbacks` has an
      `InterruptionCallback` of its own.
    - Learned parts of mechanisms are saved beside PEFT's adapters, which would leave them out of a checkpoint.
    - After a run that was sharded, `complete_model` returns the whole model.

    It overrides four private methods of the Trainer, which has no public way for what they do. A test for each says
    what to do if the Trainer changes.
    """

    data_collator: "SeededCollator"
    model: nn.Module

    def __init__(self, model: nn.Module | None = None, args: Any = None, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        check_sharding(self.accelerator)
        self._output_folder = Path(str(self.args.output_dir))
        # The patience of an early stop, for one, would begin anew.
        self.args.restore_callback_states_from_checkpoint = True
        self.data_collator = SeededCollator(self.data_collator, self.args.seed)
        self._sampler: EpochSampler | None = None
        self._skeleton: Any = None
        self._partial_folder: Path | None = None
        self.resumed_from: str | bool | None = None
        self.add_callback(_ResumptionCallback(self))
        if not self._interruption_callbacks():
            self.add_callback(InterruptionCallback())

    def _interruption_callbacks(self) -> list[InterruptionCallback]:
        return [item for item in self.callback_handler.callbacks if isinstance(item, InterruptionCallback)]

    @property
    def shards_models(self) -> bool:
        """Whether the model becomes shards, or an engine of DeepSpeed."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled) and shards_models(self.accelerator)

    def complete_model(self) -> Any:
        """Return the model that was passed, or, where training has sharded it, a complete copy on the CPU.

        Every process must call it.
        """
        if self._skeleton is None:
            return self.accelerator.unwrap_model(self.model)
        reshard(self.model)
        return fill_copy(self._skeleton, self.accelerator.unwrap_model(self.model_wrapped))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, optionally from a checkpoint (see `Trainer.train`).

        Raises:
            InterruptedRunError: SIGINT or SIGTERM; a checkpoint has been written.
            ValueError: There is no checkpoint, it was written by another number of processes, or the model is sharded.
        """
        folder = self._output_folder
        if self.is_world_process_zero() and folder.is_dir():
            remove_partial_files(folder)
        self.accelerator.wait_for_everyone()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no checkpoint to resume from in {str(folder)!r}.")
        self._check_checkpoint(Path(str(resume_from_checkpoint)))
        release(self.model)
        if self.shards_models:
            if is_sharded(self.model):
                raise ValueError("The model is sharded already. Pass the complete_model() of its trainer to a new one.")
            self._skeleton = meta_copy(self.accelerator.unwrap_model(self.model))
            if self.is_fsdp_enabled:
                name_layers(self.accelerator, self.model)
        self.resumed_from = resume_from_checkpoint or None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if not self.shards_models:
                # accelerate wraps the forward pass of the model itself in mixed precision, for good.
                self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=False)
            for callback in self._interruption_callbacks():
                callback.watch.stop()

    def _check_checkpoint(self, checkpoint: Path) -> None:
        before = len(list(checkpoint.glob("rng_state_*.pth"))) or 1
        if (checkpoint / "trainer_state.json").is_file() and before != self.args.world_size:
            counts = f"was written by {before} process(es), and this run has {self.args.world_size}"
            remedy = "Resume with as many as before."
            raise ValueError(f"{str(checkpoint)!r} {counts}: the order of the data would change. {remedy}")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the following training batches."""
        self.data_collator.set_epoch(epoch)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of a step; none if the run had ended when its checkpoint was written."""
        stoppers = (item for item in self.callback_handler.callbacks if isinstance(item, EarlyStoppingCallback))
        stopped = any(item.early_stopping_patience_counter >= item.early_stopping_patience for item in stoppers)
        if self.resumed_from is not None and (stopped or self.state.global_step >= self.state.max_steps):
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of a validation set. What is random in its batches is the same in every evaluation."""
        training_collator = self.data_collator
        self.data_collator = SeededCollator(training_collator.collator, self.args.seed)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = training_collator

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and the learned parts of its mechanisms beside adapters."""
        super().save_model(output_dir, _internal_call)
        if hasattr(self.model, "peft_config") and self.args.should_save and not self.shards_models:
            trained = (item for item in self.model.named_parameters() if item[1].requires_grad)
            learned = {  # PEFT saves what it has been told to save, and its adapters.
                name: tensor.detach().cpu().contiguous()
                for name, tensor in (*trained, *self.model.named_buffers())
                if is_learned(name) and "modules_to_save" not in name
            }
            save_file(learned, str((Path(output_dir) if output_dir else self._output_folder) / LEARNED_FILE))

    def load_learned(self, folder: str | Path) -> None:
        """Load the learned parts of mechanisms that a checkpoint holds beside adapters."""
        path = Path(folder) / LEARNED_FILE
        if path.is_file():
            self.model.load_state_dict(load_file(str(path)), strict=False)

    # ---- Private methods of the Trainer ----

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler: Any = super()._get_train_sampler(train_dataset)
        if sampler is None or self.args.train_sampling_strategy not in ("random", "group_by_length"):
            return sampler
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * max(self.args.world_size, 1)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = sampler.lengths if isinstance(sampler, LengthGroupedSampler) else None
        self._sampler = EpochSampler(len(sampler), seed, lengths, rows)
        return self._sampler

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # save_strategy="best" withdraws a callback's request to save in a step whose evaluation is not the best.
        return super()._determine_best_metric(metrics, trial) or self.control.should_save

    def _get_output_dir(self, trial: Any) -> str:
        if self._partial_folder is None:
            return super()._get_output_dir(trial)
        return str(self._partial_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        pushes = self.args.push_to_hub
        partial = folder / f".{name}.part"
        # It is pushed once it has its name.
        self._partial_folder = partial
        self.args.push_to_hub = False
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._partial_folder = None
            self.args.push_to_hub = pushes
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder / name)  # and not where it was written
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / "trainer_state.json"))
            torch.save(self.args, partial / name / "training_args.bin")
            replace_folder(folder / name, partial / name)
            partial.rmdir()
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        if pushes:
            self._push_from_checkpoint(str(folder / name))


class _ResumptionCallback(TrainerCallback):
    """Tells a `ResumableTrainer` its epochs, and loads what its checkpoints hold beside those of the Trainer."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer
        self.epoch = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.epoch = int(state.epoch or 0)
        if self.trainer.resumed_from is not None:
            self.trainer.load_learned(str(self.trainer.resumed_from))
        best = Path(str(args.output_dir)) / f"checkpoint-{state.best_global_step}"
        if state.best_model_checkpoint is None and best.is_dir():
            # The output folder has been moved since the checkpoint was written.
            state.best_model_checkpoint = str(best)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.set_epoch(self.epoch)
        self.epoch += 1

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.trainer.load_learned(state.best_model_checkpoint)
