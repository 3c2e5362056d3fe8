"""Progress of an evaluation or a plan on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from .formatting import printable

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

OnBatch = Callable[[int, int], None]
"""Called with the rows done and all rows."""


class Progress:
    """What an evaluation reports while it runs: nothing, unless a subclass shows it."""

    def status(self, message: str, done: int = 0, total: int | None = None) -> None:
        """Report what is being done, and how much of it is done."""

    def log(self, message: str) -> None:
        """Report a result that stays on the screen."""


class ConsoleProgress(Progress):
    """A bar with the time left on a rich console, below the results. Used as a context manager.

    Args:
        console: The console; None: stdout.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self.console = console or Console()
        # On a narrow terminal the description gives way, and not the time left.
        description = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        left = TimeRemainingColumn(compact=True)
        columns = (description, BarColumn(bar_width=12), MofNCompleteColumn(), left, TextColumn("left"))
        self._bar = Progress(*columns, console=self.console, transient=True, expand=True)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ConsoleProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def status(self, message: str, done: int = 0, total: int | None = None) -> None:
        """Show what is being done. A smaller `done` or another `total` begins a stage, with times of its own."""
        task = self._bar.tasks[0]
        if done == 0 or total != task.total:
            self._bar.reset(self._task, total=total)
        self._bar.update(self._task, description=printable(message, self.console.encoding), completed=done, total=total)

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        text = printable(message, self.console.encoding)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self, frame: pandas.DataFrame) -> None:
        """Print a table of text with its index. Columns that do not fit into the width follow in further tables."""
        titled = frame.rename_axis(index=None, columns=frame.index.name)
        self.log(titled.to_string(line_width=max(self.console.width - 2, 1)))


def report_nothing(done: int, total: int) -> None:
    """Do nothing: where nobody watches."""


def report_batches(batches: Sequence[T], on_batch: OnBatch) -> Iterator[T]:
    """Yield the batches, and report before each one how many rows are done."""
    sizes = [len(batch["input_ids"] if isinstance(batch, Mapping) else batch) for batch in batches]  # type: ignore[arg-type]
    for done, batch in zip(accumulate(sizes, initial=0), batches, strict=False):
        on_batch(done, sum(sizes))
        yield batch
