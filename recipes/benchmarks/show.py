"""A benchmark on the terminal: tables that fit its width, and what a comparison found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .screen import readable
from .tables import Table

if TYPE_CHECKING:
    from .compare import Comparison

#: Notes that are shown; the file holds all of them.
SHOWN_NOTES = 12


def show(console: Console, report: dict[str, Any], tables: list[Table], folder: Path) -> None:
    """All tables, what was left out, and where the rest is."""
    for table in tables:
        print_table(console, table)
    notes = [text for texts in report["notes"].values() for text in texts]
    for text in notes[:SHOWN_NOTES]:
        console.print(readable(console, f"• {escape(text)}"), style="dim", highlight=False)
    if len(notes) > SHOWN_NOTES:
        console.print(f"... and {len(notes) - SHOWN_NOTES} more notes in benchmark.md", style="dim", highlight=False)
    message = f"Written: {folder / 'benchmark.json'}, benchmark.md, benchmark.csv ({report['seconds']:.0f} seconds)"
    console.print(readable(console, message), highlight=False, markup=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """One table, or several below each other where the screen is too narrow for all columns."""
    widths = [
        max(len(readable(console, cell)) for cell in (table.columns[index], *(row[index] for row in table.rows)))
        for index in range(len(table.columns))
    ]
    console.print(readable(console, escape(table.title)), style="bold", highlight=False)
    indices = list(range(1, len(table.columns)))
    while indices:
        count = len(indices)
        while count > 1 and widths[0] + sum(widths[index] + 2 for index in indices[:count]) > console.width:
            count -= 1
        console.print(_part(console, table, [0, *indices[:count]], widths))
        indices = indices[count:]
    if table.caption:
        console.print(readable(console, escape(table.caption)), style="dim", highlight=False)
    console.print()


def _part(console: Console, table: Table, indices: list[int], widths: list[int]) -> RichTable:
    rich_table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in indices:
        rich_table.add_column(
            readable(console, escape(table.columns[index])),
            justify="left" if index == 0 else "right",
            min_width=min(widths[index], max(8, console.width // 2)),
            overflow="fold",
        )
    for row in table.rows:
        rich_table.add_row(*(readable(console, escape(row[index])) for index in indices))
    return rich_table


def show_comparison(
    console: Console, comparison: Comparison, before: dict[str, Any], after: dict[str, Any], name: str
) -> None:
    """What became worse, what better, what could not be compared."""
    lines = [f"Compared with {name}: {comparison.common} ratios on both sides."]
    if before["hardware"]["cpu"] != after["hardware"]["cpu"] or before["versions"] != after["versions"]:
        lines.append(
            f"It was measured elsewhere or with other versions ({before['hardware']['cpu']}, torch "
            f"{before['versions']['torch']}, hf-linear-attn {before['versions']['hf_linear_attn']}): differences may "
            "come from that."
        )
    if comparison.missing:
        lines.append(f"{comparison.missing} of its ratios were not measured now.")
    for line in lines:
        console.print(readable(console, line), highlight=False, markup=False)
    for title, changes in (("Worse", comparison.worse), ("Better", comparison.better)):
        rows = [change.cells() for change in changes]
        if rows:
            print_table(console, Table(title, ("", "ratio", "before", "now", "change"), rows))
    if not comparison.worse:
        console.print("Nothing became worse by more than the noise.", highlight=False)
