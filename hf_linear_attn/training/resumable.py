"""What makes a training resumable: signals, and batches that depend on the seed and the epoch alone."""

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
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices


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
    python, numpy = random.getstate(), np.random.get_state()
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
        content = json.dumps(rows, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value))
        with local_seed(mixed_seed(self.seed, int(self._epoch), zlib.crc32(content.encode()))):
            return self.collator(rows)
