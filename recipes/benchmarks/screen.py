"""The benchmark's progress on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_linear_attn.utils.formatting import printable


class Screen:
    """Progress on a rich console; finished results stay above the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, task: str, total: int | None = None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(escape(task), total=total, note="")

    def update(self, step: int | None = None, note: str = "") -> None:
        changes: dict[str, Any] = {"note": escape(note)}
        if step is not None:
            changes["completed"] = step
        self._progress.update(self._task, **changes)

    def say(self, line: str) -> None:
        name, _, rest = escape(line).partition(": ")
        self._console.print(readable(self._console, f"  [bold]{name}[/]: {rest}"), highlight=False)


def readable(console: Console, text: str) -> str:
    """Replace what the terminal's encoding cannot show."""
    return printable(text, console.encoding)
