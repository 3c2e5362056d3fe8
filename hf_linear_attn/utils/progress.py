"""Progress on the terminal: a bar for an evaluation or a plan, lines for a training run of hours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .formatting import printable

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")

#: Seconds between two lines of progress where there is no bar.
LINE_SECONDS = 60.0


class Progress:
    """What a study reports while it runs: nothing, unless a subclass shows it."""

    @property
    def line_is_due(self) -> bool:
        """Whether a line of progress is due, because the last one is a while ago."""
        return False

    def status(self, message: str, done: int = 0, total: int | None = None) -> None:
        """Report what is being done, and how much of it is done."""

    def log(self, message: str) -> None:
        """Report a result that stays on the screen."""


class ConsoleProgress(Progress):
    """A bar with the time left on a rich console, below the results; in a log a line every minute without another.

    It is used as a context manager.

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
        self._last, self._ends = time.monotonic(), threading.Event()
        self._reminder = threading.Thread(target=self._remind, daemon=True)

    def __enter__(self) -> ConsoleProgress:
        self._bar.start()
        if not self.console.is_terminal:
            self._reminder.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        if self._reminder.is_alive():
            self._reminder.join()
        self._bar.stop()

    def _remind(self) -> None:
        while not self._ends.wait(1.0):
            task = self._bar.tasks[0]
            if task.description and time.monotonic() - self._last >= LINE_SECONDS:
                count = "" if task.total is None else f", {task.completed:,.0f} of {task.total:,.0f}"
                self.log(f"... {task.description}{count}")

    def status(self, message: str, done: int = 0, total: int | None = None) -> None:
        """Show what is being done. A smaller `done` or another `total` begins a stage, with times of its own."""
        task = self._bar.tasks[0]
        if done == 0 or total != task.total:
            self._bar.reset(self._task, total=total)
        self._bar.update(self._task, description=printable(message, self.console.encoding), completed=done, total=total)

    def log(self, message: str) -> None:
        """Print a line above the bar."""
        self._last = time.monotonic()
        print_line(self.console, message)

    def table(self, frame: pandas.DataFrame) -> None:
        """Print a table of text with its index. Columns that do not fit into the width follow in further tables."""
        titled = frame.rename_axis(index=None, columns=frame.index.name)
        self.log(titled.to_string(line_width=max(self.console.width - 2, 1)))


class LineProgress(Progress):
    """Lines on a rich console, whose log somebody reads later.

    Args:
        console: The console; None: stderr.
        shown: Whether anything is shown: by the first of several processes only.
    """

    def __init__(self, console: Any = None, *, shown: bool = True) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.shown = shown
        self.doing = "between two stages"  # what an interruption would interrupt
        self._last = time.monotonic()

    def log(self, message: str) -> None:
        """Print a line."""
        self._last = time.monotonic()
        if self.shown:
            print_line(self.console, message)

    @property
    def line_is_due(self) -> bool:
        return time.monotonic() - self._last >= LINE_SECONDS

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Context manager of something that takes time: a line at once, and one every minute without another line."""
        before, self.doing = self.doing, f"while {text}"
        self.log(f"{text[0].upper()}{text[1:]} ...")
        started, ends = time.monotonic(), threading.Event()

        def remind() -> None:
            while not ends.wait(1.0):
                if self.line_is_due:
                    self.log(f"... {text}, for {(time.monotonic() - started) / 60:.0f} min")

        thread = threading.Thread(target=remind, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
            self.doing = before


def print_line(console: Any, text: str) -> None:
    """Print a line as it is, as far as the console's encoding has its characters."""
    console.print(printable(text, console.encoding), highlight=False, markup=False, soft_wrap=True)
