"""Runs a benchmark: each cell is measured once, and read from the records when a run is resumed.

A benchmark is a generator function. It yields cells, and gets back the rows of each: so it can leave out what would
take too long, by what the cells before took. Its parameters are the options of the command line.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
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

    The folder gets the records, each as soon as it is known, and `results.json` at the end: name, settings, versions
    and hardware, rows. That is returned, too.

    Raises:
        ValueError, OSError: An option or a folder that cannot be used.
    """
    # It imports torch, whose memory must not count in `runtimes`.
    from hf_linear_attn.study.study import Conditions, defaults_of, open_study

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
        facts = {"settings": settings, "environment": machine, "defaults": defaults_of([settings, rows])}
        results = {"format_version": 1, "benchmark": name, **facts, "rows": rows}
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


def compare(before: Rows, after: Rows, tolerance: float) -> list[Change]:
    """Return the ratios that changed by more than the noise, the worst first.

    Of these the intervals between the 20th and the 80th percentile lie apart, and the medians differ by more than
    `tolerance`, or by more than 0.15 where a ratio comes from fewer than three rounds.

    Raises:
        ValueError: The runs have no ratio in common.
    """
    first, second, changes = _ratios(before), _ratios(after), []
    common = [key for key in first if key in second]
    if not common:
        raise ValueError("The two runs have no ratio in common. Compare runs of the same benchmark and settings.")
    for name, ratio in common:
        old, new = first[name, ratio], second[name, ratio]
        grew = new["median"] / old["median"]
        factor = grew if RATIOS[ratio] else 1 / grew
        apart = new["p20"] > old["p80"] or new["p80"] < old["p20"]
        few = min(old["rounds"], new["rounds"]) < FEW_ROUNDS
        if apart and max(factor, 1 / factor) > 1 + (max(tolerance, FEW_ROUNDS_NOISE) if few else tolerance):
            changes.append(Change(f"{name}: {ratio.replace('_', ' ')}", old["median"], new["median"], factor))
    return sorted(changes, key=lambda change: -change.factor)


def _ratios(rows: Rows) -> dict[tuple[str, str], dict[str, float]]:
    """Name of a row and ratio -> median, p20, p80 and rounds. Ratios of bytes do not vary."""
    ratios = {}
    for row in rows:
        facts = {key: value for key, value in row.items() if isinstance(value, (str, int)) and value != ""}
        measured = ("bytes", "limit", "features")
        name = ", ".join(f"{key} {facts[key]}" for key in sorted(facts) if not key.startswith(measured))
        for ratio in RATIOS.keys() & row.keys():
            value = row[ratio]
            spread = value if isinstance(value, Mapping) else {"median": value, "p20": value, "p80": value, "rounds": 3}
            if spread["median"]:
                ratios[name, ratio] = dict(spread)
    return ratios
