"""A benchmark's tables: the same cells on the screen and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_linear_attn.utils.formatting import format_bytes, format_seconds
from hf_linear_attn.utils.timing import crossover

from .bench import BASELINE

Row = dict[str, Any]
EMPTY = "–"


@dataclass(frozen=True)
class Table:
    """title, the columns (the first one names the rows), cells as text, and a line below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    section: str = ""
    notes: list[str] = field(default_factory=list)


def tables_of(report: dict[str, Any]) -> list[Table]:
    """All tables of a report, section by section."""
    from .decode_tables import decode_tables
    from .memory_tables import memory_tables
    from .model_tables import model_tables

    makers: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
        "ops": ops_tables,
        "decode": decode_tables,
        "model": model_tables,
        "memory": memory_tables,
    }
    return [table for name, make in makers.items() if name in report["sections"] for table in make(report)]


def markdown(table: Table) -> str:
    lines = [f"**{table.title}**", "", _row(table.columns), _row(["---", *["---:"] * (len(table.columns) - 1)])]
    lines += [_row(cells) for cells in table.rows]
    if table.caption:
        lines += ["", table.caption]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def times(value: float) -> str:
    """`0.043`, `0.43`, `4.3`, `43`, `4,300`: two significant digits."""
    if value >= 99.5:
        return f"{float(f'{value:.2g}'):,.0f}"
    digits = 3 if value < 0.0995 else 2 if value < 0.995 else 1 if value < 9.95 else 0
    return f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    return EMPTY if value is None else format_seconds(value)


def optional_bytes(value: float | None) -> str:
    return EMPTY if value is None else format_bytes(value)


def grid(
    title: str,
    rows: Iterable[Row],
    axis: str,
    cell: Callable[[Row], str],
    *,
    caption: str = "",
    section: str = "",
    last: tuple[str, Callable[[list[Row]], str]] | None = None,
) -> Table:
    """Names down, `axis` (a length) across."""
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row[axis]] = row
    positions = sorted({position for by_position in by_name.values() for position in by_position})
    lines = []
    for name, by_position in by_name.items():
        line = [name, *(cell(by_position[position]) if position in by_position else EMPTY for position in positions)]
        if last is not None:
            line.append(last[1]([by_position[position] for position in positions if position in by_position]))
        lines.append(line)
    columns = ["", *(f"{position:,}" for position in positions), *([last[0]] if last else [])]
    return Table(title, columns, lines, caption, section)


def kinds(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows grouped by some of their facts, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


# --------------------------------------------------------------------------------------------------------------------
# Attention by itself


def ops_tables(report: dict[str, Any]) -> list[Table]:
    tables = []
    for kind, rows in kinds(report["sections"]["ops"], "shape", "direction", "dtype", "pass").items():
        setting = f"{kind[1]}, {kind[2]}, {kind[3].replace('+', ' + ')} ({kind[0]})"
        tables.append(
            grid(
                f"Speedup over {BASELINE}: {setting}",
                rows,
                "length",
                _speedup,
                section="ops",
                last=("crossover", _crossover),
                caption=f"The row {BASELINE} shows times. Crossover: from this length on faster than {BASELINE}.",
            )
        )
        tables.append(
            grid(
                f"Time over limit: {setting}",
                [row for row in rows if "over_limit" in row],
                "length",
                lambda row: times(row["over_limit"]["median"]) + ("" if row["limit"] == "products" else "*"),
                section="ops",
                caption="Limit: PyTorch's own matrix products alone for the same shapes"
                f"{' (chunks of 128 tokens)' if kind[1] == 'causal' else ''}; *: operations counted, at the rate of a "
                "product of the heads in the same run.",
            )
        )
        tables.append(
            grid(
                f"Time over moving the bytes: {setting}",
                rows,
                "length",
                lambda row: times(row["over_copy"]["median"]),
                section="ops",
                caption="Against a copy that moves as many bytes as q, k, v and the output"
                f"{', and their gradients,' if 'backward' in kind[3] else ''} hold.",
            )
        )
    return tables


def _speedup(row: Row) -> str:
    if row["name"] == BASELINE:
        return seconds(row["seconds"]["median"])
    return times(row["speedup"]["median"]) if "speedup" in row else EMPTY


def _crossover(rows: list[Row]) -> str:
    known = [row for row in rows if "speedup" in row]
    if not known or known[0]["name"] == BASELINE:
        return ""
    result = crossover([row["length"] for row in known], [row["speedup"]["median"] for row in known])
    return f"{result.length:,.0f}" if result.relation == "=" else str(result)
