"""Training batches as a pure function of their number: the order of the data survives any interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Steps whose rows are sorted by length among themselves.
SORTED = 16

Collate = Callable[[list[Any], torch.Generator], dict[str, Tensor]]


class BatchStream:
    """An endless stream of batches; epoch after epoch in an order drawn from (seed, epoch).

    Micro-batch m of the whole run holds the examples [m·B, (m+1)·B) of the concatenated orders; of n processes, process
    r takes the micro-batches r, n + r, 2n + r, …: together they see what one process with an n times larger batch sees.
    Whatever is random in a batch (masked tokens) is drawn from (seed, m). No state is kept: `read(start)` begins
    anywhere.

    Args:
        lengths: of the rows, in tokens. Rows of alike length then share a step, so that little is padding: of each
            `SORTED` steps, as the epoch's order has them, the rows are sorted, and the steps are taken in an order
            drawn anew. Every row still comes once an epoch.
        together: rows of one step (default: those of one micro-batch of all processes).
    """

    def __init__(
        self,
        rows: Sequence[Any],
        collate: Collate,
        *,
        batch_size: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
        workers: int = 0,
        lengths: Sequence[int] | None = None,
        together: int | None = None,
    ) -> None:
        if not len(rows):
            raise ValueError("There is no training example.")
        self.rows = rows
        self.collate = collate
        self.batch_size = batch_size
        self.seed = seed
        self.process = process
        self.processes = processes
        self.workers = workers
        self.lengths = lengths
        self.together = together or batch_size * processes
        self._order = lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.rows), generator=generator).tolist()
        return order if self.lengths is None else self._grouped(order, epoch, self.lengths, generator)

    def _grouped(self, order: list[int], epoch: int, lengths: Sequence[int], generator: torch.Generator) -> list[int]:
        """The order with rows of alike length in each step; a step that an epoch shares with the next stays mixed."""
        size = self.together
        begun = -epoch * len(order) % size  # rows of this epoch that fill the last step of the one before
        found, rest = order[:begun], order[begun:]
        for start in range(0, len(rest), SORTED * size):
            part = sorted(rest[start : start + SORTED * size], key=lengths.__getitem__)
            whole = len(part) // size
            for step in torch.randperm(whole, generator=generator).tolist():
                found += part[step * size : (step + 1) * size]
            found += part[whole * size :]
        return found

    def indices(self, batch: int) -> list[int]:
        """Rows of one micro-batch, counted over all processes."""
        found = []
        for place in range(batch * self.batch_size, (batch + 1) * self.batch_size):
            epoch, within = divmod(place, len(self.rows))
            found.append(self._order(epoch)[within])
        return found

    def batch(self, number: int) -> dict[str, Tensor]:
        """One micro-batch, counted over all processes."""
        generator = torch.Generator().manual_seed((self.seed * 7_368_787 + number + 1) % 2**63)
        return self.collate([self.rows[index] for index in self.indices(number)], generator)

    def read(self, start: int) -> Iterator[Mapping[str, Tensor]]:
        """This process's micro-batches from its own number `start` on, for ever."""
        loader = torch.utils.data.DataLoader(
            _Numbered(self, start),
            batch_size=None,
            num_workers=self.workers,
            # Without one the loader takes a number from torch's own generator when it begins, and the dropout of the
            # first step after a resumption would differ from that of the same step in a run that went through.
            generator=torch.Generator(),
        )
        yield from loader

    def __getstate__(self) -> dict[str, Any]:
        # A cache of methods cannot be sent to a worker.
        return {key: value for key, value in vars(self).items() if key != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._order = lru_cache(maxsize=2)(self._draw)


class _Numbered(torch.utils.data.IterableDataset[Mapping[str, Tensor]]):
    """The stream of one process; its workers take turns, and the loader takes from them in turns too."""

    def __init__(self, stream: BatchStream, start: int) -> None:
        self.stream = stream
        self.start = start

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        own = self.start + first
        while True:
            yield self.stream.batch(own * self.stream.processes + self.stream.process)
            own += stride
