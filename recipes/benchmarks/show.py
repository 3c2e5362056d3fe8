"""A benchmark on the terminal: tables that fit its width, and what a comparison found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from hf_linear_attn.evaluation.screen import readable

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
    told = f"Written: {folder / 'benchmark.json'}, benchmark.md, benchmark.csv ({report['seconds']:.0f} seconds)"
    console.print(readable(console, told), highlight=False, markup=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """One table, or several below each other where the screen is too narrow for all columns."""
    widths = [
        max(len(readable(console, cell)) for cell in (table.columns[place], *(row[place] for row in table.rows)))
        for place in range(len(table.columns))
    ]
    console.print(readable(console, escape(table.title)), style="bold", highlight=False)
    places = list(range(1, len(table.columns)))
    while places:
        count = len(places)
        while count > 1 and widths[0] + sum(widths[place] + 2 for place in places[:count]) > console.width:
            count -= 1
        console.print(_part(console, table, [0, *places[:count]], widths))
        places = places[count:]
    if table.caption:
        console.print(readable(console, escape(table.caption)), style="dim", highlight=False)
    console.print()


def _part(console: Console, table: Table, places: list[int], widths: list[int]) -> RichTable:
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place in places:
        made.add_column(
            readable(console, escape(table.columns[place])),
            justify="left" if place == 0 else "right",
            min_width=min(widths[place], max(8, console.width // 2)),
            overflow="fold",
        )
    for row in table.rows:
        made.add_row(*(readable(console, escape(row[place])) for place in places))
    return made


def tell_comparison(
    console: Console, found: Comparison, before: dict[str, Any], after: dict[str, Any], name: str
) -> None:
    """What became worse, what better, what could not be compared."""
    said = [f"Compared with {name}: {found.common} ratios on both sides."]
    if before["hardware"]["cpu"] != after["hardware"]["cpu"] or before["versions"] != after["versions"]:
        said.append(
            f"It was measured elsewhere or with other versions ({before['hardware']['cpu']}, torch "
            f"{before['versions']['torch']}, hf-linear-attn {before['versions']['hf_linear_attn']}): differences may "
            "come from that."
        )
    if found.missing:
        said.append(f"{found.missing} of its ratios were not measured now.")
    for line in said:
        console.print(readable(console, line), highlight=False, markup=False)
    for title, changes in (("Worse", found.worse), ("Better", found.better)):
        rows = [change.cells() for change in changes]
        if rows:
            print_table(console, Table(title, ("", "ratio", "before", "now", "change"), rows))
    if not found.worse:
        console.print("Nothing became worse by more than the noise.", highlight=False)
