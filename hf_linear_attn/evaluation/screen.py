"""A study on the terminal: its progress, its table, its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .summary import Summary, summarise_report


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


def show(console: Console, report: dict[str, Any], folder: Path, written: list[str]) -> None:
    """The table, what it says, and where the rest is."""
    summary = summarise_report(report)
    console.print()
    if console.width >= 150:
        _print_table(console, summary, ("quality", "speed"), _title(report))
    else:
        _print_table(console, summary, ("quality",), f"Quality: {_title(report)}")
        _print_table(console, summary, ("speed",), f"Speed against {report['speed']['baseline']}")
    console.print(
        readable(console, "a→b: as patched → after transfer; ×: times as fast as the exact form, below 1 is slower"),
        style="dim",
        highlight=False,
    )
    console.print()
    advice = report.get("advice") or {"verdicts": []}
    for held in advice["verdicts"]:
        told = f"[bold]{escape(held['name'])}: {escape(held['call'])}[/]: {escape(held['words'])}"
        console.print(readable(console, f"• {told}"), highlight=False)
    for line in report["verdicts"]:
        console.print(readable(console, f"• {escape(line)}"), highlight=False)
    console.print()
    plots = sum(name.endswith(".png") for name in written)
    console.print(
        readable(
            console,
            f"Report: [bold]{escape(str(folder / 'report.html'))}[/], with report.json and {plots} plots",
        ),
        highlight=False,
        soft_wrap=True,
    )


def _title(report: dict[str, Any]) -> str:
    return f"{escape(report['model']['name'])} ({report['model']['kind']})"


def _print_table(console: Console, summary: Summary, groups: tuple[str, ...], title: str) -> None:
    """One table, or several below each other where the screen is too narrow for all columns."""
    places = [place for place, column in enumerate(summary.columns) if column.group in groups]
    while places:
        count = len(places)
        while (
            count > 1 and sum(_narrowest(console, summary, place) + 2 for place in [0, *places[:count]]) > console.width
        ):
            count -= 1
        console.print(_table(console, summary, [0, *places[:count]], title))
        places, title = places[count:], ""


def _narrowest(console: Console, summary: Summary, place: int) -> int:
    """Width of a column in which no number and no word of its title is broken."""
    cells = [readable(console, row[place]) for row in summary.rows]
    return max(map(len, [*summary.columns[place].title.split(), *cells]))


def _table(console: Console, summary: Summary, places: list[int], title: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        title=readable(console, title) or None,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place in places:
        # Widths of our own: rich would take the room from numbers rather than break a title between its words.
        table.add_column(
            summary.columns[place].title,
            justify="left" if place == 0 else "right",
            width=_narrowest(console, summary, place),
        )
    for row, kind in zip(summary.rows, summary.kinds, strict=True):
        table.add_row(
            *(readable(console, escape(row[place])) for place in places),
            style="" if kind == "mechanism" else "dim",
            end_section=kind == "exact",
        )
    return table


def readable(console: Console, text: str) -> str:
    """Replace what the terminal's encoding cannot show."""
    try:
        text.encode(console.encoding)
    except LookupError:
        return text
    except UnicodeEncodeError:
        for sign, ascii_form in (("→", "->"), ("×", "x"), ("•", "-"), ("≤", "<="), ("–", "-"), ("µ", "u")):
            text = text.replace(sign, ascii_form)
        return text.encode(console.encoding, "replace").decode(console.encoding)
    return text
