"""Runs a benchmark: each cell is measured once, and read from the records when a run is resumed.

A benchmark is a generator function. It yields cells, and gets back the rows of each: so it can leave out what would
take too long, by what the cells before took. Its parameters are the options of the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_linear_attn.utils.environment import environment, json_safe
from hf_linear_attn.utils.files import write_json

RESULTS_FILE = "results.json"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """What is measured in one go.

    Args:
        facts: Columns that all rows of the cell share, such as its length.
        measure: Makes the rows, without these columns.
        settings: What else the values depend on: names of mechanisms, seconds, the seed.
    """

    facts: Mapping[str, Any]
    measure: Callable[[], Rows]
    settings: Mapping[str, Any] = field(default_factory=dict)


Cells = Generator[Cell, Rows, None]
Benchmark = Callable[..., Cells]


def run_benchmark(
    name: str,
    benchmark: Benchmark,
    options: Mapping[str, Any],
    folder: Path,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure all cells, and write the results to a folder.

    Args:
        name: What the results are called.
        benchmark: Yields the cells.
        options: Its parameters.
        folder: Gets the records, each as soon as it is known, and `results.json` at the end.
        resume: Whether to go on with what the folder holds.

    Returns:
        What `results.json` holds: name, settings, versions and hardware, rows.

    Raises:
        ValueError, OSError: An option or a folder that cannot be used.
    """
    from hf_linear_attn.study.records import Conditions  # imports torch, whose memory must not count in `deployment`
    from hf_linear_attn.study.study import open_study

    settings, rows = json_safe(options), []
    device = options.get("device", "cpu")
    machine = environment(device)
    parts = {part: machine["hardware"][part] for part in ("device", "cpu", "threads")}
    with open_study(folder, name, settings, device=device, resume=resume) as study:
        for cell, answer in driven(benchmark(**options)):
            sys.stderr.write(", ".join(f"{key} {value}" for key, value in cell.facts.items()) + "\n")
            conditions = {"settings": {**cell.facts, **cell.settings}, "device": parts, "versions": machine["versions"]}
            record = study.measure(Conditions("", "", "", name, **conditions), cell.measure)
            answer.extend({**cell.facts, **row} for row in record.values)
            rows += answer
        results = {"format_version": 1, "benchmark": name, "settings": settings, "environment": machine, "rows": rows}
        write_json(folder / RESULTS_FILE, json_safe(results))
    return results


def driven(cells: Cells) -> Iterator[tuple[Cell, Rows]]:
    """Yield each cell with a list, and send what the list holds afterwards back to the generator."""
    rows: Rows | None = None
    while True:
        try:
            cell = next(cells) if rows is None else cells.send(rows)
        except StopIteration:
            return
        rows = []
        yield cell, rows


# --------------------------------------------------------------------------------------------------------------------
# Comparison of two runs

#: Columns that are ratios, and whether less is better. Times are never compared.
RATIOS = {"speedup": False, "over_limit": True, "over_floor": True, "to_output": True}

#: A ratio of fewer rounds than this may vary by so much without our knowing: its percentiles are too near each other.
FEW_ROUNDS, FEW_ROUNDS_NOISE = 3, 0.15


@dataclass(frozen=True)
class Change:
    """A ratio before and now. A factor above 1 means: worse by so much."""

    name: str
    before: float
    after: float
    factor: float

    def __str__(self) -> str:
        change = f"{100 * (max(self.factor, 1 / self.factor) - 1):.0f} % {'worse' if self.factor > 1 else 'better'}"
        return f"{self.name}: {self.before:.3g} before, {self.after:.3g} now, {change}"


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], tolerance: float) -> list[Change]:
    """Return the ratios that changed by more than the noise, the worst first.

    Of these the intervals between the 20th and the 80th percentile lie apart, and the medians differ by more than
    `tolerance`, or by more than 0.15 where a ratio comes from fewer than three rounds.

    Raises:
        ValueError: The runs have no ratio in common.
    """
    first, second = (dict(ratio for row in rows for ratio in _ratios(row)) for rows in (before, after))
    if not first.keys() & second.keys():
        raise ValueError("The two runs have no ratio in common. Compare runs of the same benchmark and settings.")
    changes = [_change(key, first[key], second[key], tolerance) for key in first if key in second]
    return sorted(filter(None, changes), key=lambda change: -change.factor)


def _ratios(row: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
    """Name of a row and ratio -> median, p20, p80 and rounds. Ratios of bytes do not vary."""
    facts = [f"{name} {value}" for name, value in sorted(row.items()) if isinstance(value, (str, int)) and value != ""]
    name = ", ".join(fact for fact in facts if not fact.startswith(("bytes", "limit", "features")))
    for ratio in RATIOS.keys() & row.keys():
        value = row[ratio]
        spread = value if isinstance(value, Mapping) else {"median": value, "p20": value, "p80": value, "rounds": 3}
        if spread["median"]:
            yield (name, ratio), dict(spread)


def _change(key: tuple[str, str], first: dict[str, float], second: dict[str, float], tolerance: float) -> Change | None:
    few = min(first["rounds"], second["rounds"]) < FEW_ROUNDS
    grew = second["median"] / first["median"]
    factor = grew if RATIOS[key[1]] else 1 / grew
    apart = second["p20"] > first["p80"] or second["p80"] < first["p20"]
    if not apart or max(factor, 1 / factor) <= 1 + (max(tolerance, FEW_ROUNDS_NOISE) if few else tolerance):
        return None
    return Change(f"{key[0]}: {key[1].replace('_', ' ')}", first["median"], second["median"], factor)
