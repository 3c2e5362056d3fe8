"""The few lines of a benchmark that a reader of the README wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bench import BASELINE
from .decode import STEP
from .options import FREE
from .runner import where
from .tables import EMPTY, Row, Table, markdown, optional_bytes, tables_of, times

#: Lengths of the speedups shown, where they were measured.
LENGTHS = (512, 4096, 16384)
DIRECTIONS = ("bidirectional", "causal")
FORWARD = {"dtype": "float32", "pass": "forward"}


def headline(report: dict[str, Any]) -> str:
    """One table: speedup over `sdpa` by length, time over limit at the longest, one decoding step; then whole models
    and memory in words. Each mechanism on its fastest backend."""
    parts = [where(report)]
    rows = [row for row in report["sections"].get("ops", []) if _matches(row, FORWARD) and "speedup" in row]
    if rows:
        parts.append(markdown(_table(report, [row for row in rows if row["shape"] == rows[0]["shape"]])))
    return "\n\n".join([*parts, *_sentences(report)])


def _table(report: dict[str, Any], rows: list[Row]) -> Table:
    measured = sorted({row["length"] for row in rows})
    lengths = [length for length in LENGTHS if length in measured] or measured[-len(LENGTHS) :]
    steps = [row for row in report["sections"].get("decode", []) if row["what"] == STEP and "speedup" in row]
    steps = [row for row in steps if row["dtype"] == "float32" and row["batch"] == min(one["batch"] for one in steps)]
    context = max((row["context"] for row in steps), default=0)
    columns = [""]
    for direction in DIRECTIONS:
        columns += [f"{direction}, {length:,} tokens" for length in lengths] + ["over limit"]
    columns += [f"decoding step after {context:,}"] if context else []
    lines = []
    for name in dict.fromkeys(_label(row) for row in rows if row["name"] != BASELINE):
        line = [name]
        for direction in DIRECTIONS:
            own = [row for row in rows if _label(row) == name and row["direction"] == direction]
            line += [_best(own, length) for length in lengths]
            line.append(_over_limit(own, lengths[-1]))
        if context:
            line.append(_best([row for row in steps if _label(row) == name], context, "context"))
        lines.append(line)
    title = f"Times as fast as {BASELINE}, float32, forward ({rows[0]['shape']})"
    caption = (
        f"Each mechanism on its fastest backend. Over limit: time at {lengths[-1]:,} tokens over that of PyTorch's own "
        "matrix products alone, or of as many operations. A step is compared with the growing key-value cache."
    )
    return Table(title, columns, lines, caption)


def _label(row: Row) -> str:
    """Other packages by their row's name, mechanisms whatever the backend."""
    return row["name"] if "package" in row["mechanism"] else f"`{row['mechanism']['name']}`"


def _matches(row: Row, facts: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in facts.items())


def _best(rows: list[Row], position: int, axis: str = "length") -> str:
    speedups = [row["speedup"]["median"] for row in rows if row[axis] == position]
    return f"{times(max(speedups))}×" if speedups else EMPTY


def _over_limit(rows: list[Row], length: int) -> str:
    ratios = [row["over_limit"]["median"] for row in rows if row["length"] == length and "over_limit" in row]
    return times(min(ratios)) if ratios else EMPTY


def _sentences(report: dict[str, Any]) -> list[str]:
    """Whole models beside their ceiling, and memory at the longest input."""
    lines = []
    models = report["sections"].get("model", [])
    for model, dtype in dict.fromkeys((row["model"], row["dtype"]) for row in models):
        own = [row for row in models if (row["model"], row["dtype"]) == (model, dtype)]
        longest = max(row["length"] for row in own if row["name"] == FREE)
        last = [row for row in own if row["length"] == longest]
        texts = [
            f"`{row['name']}` {row['speedup']['median']:.2f}×" for row in last if row["name"] not in (BASELINE, FREE)
        ]
        if last and texts:
            ceiling = last[0]["ceiling"]["median"]
            kind = "" if dtype == "float32" else f", {dtype}"
            lines.append(
                f"- {model} at {longest:,} tokens{kind}: {', '.join(texts)}; without attention: {ceiling:.2f}×."
            )
    memory = [row for row in report["sections"].get("memory", []) if row["pass"] == "forward"]
    for what in dict.fromkeys(row["what"] for row in memory):
        own = [row for row in memory if row["what"] == what and row["shape"] == memory[0]["shape"]]
        if own:
            longest = max(row["length"] for row in own)
            texts = [f"`{row['name']}` {optional_bytes(row['bytes'])}" for row in own if row["length"] == longest]
            lines.append(f"- Peak extra memory, {what}, {longest:,} tokens, forward: {', '.join(texts)}.")
    return ["\n".join(lines)] if lines else []


def forward_tables(report: dict[str, Any]) -> str:
    """Speedup and time over limit of attention by itself, forward, float32: the tables of the recipes' page."""

    def selects(table: Table) -> bool:
        return table.section == "ops" and "float32, forward (" in table.title and "moving the bytes" not in table.title

    return _chosen_tables(report, selects)


def memory_part(report: dict[str, Any]) -> str:
    """All tables of memory."""
    return _chosen_tables(report, lambda table: table.section == "memory")


def _chosen_tables(report: dict[str, Any], selects: Callable[[Table], bool]) -> str:
    return "\n\n".join([where(report), *(markdown(table) for table in tables_of(report) if selects(table))])
