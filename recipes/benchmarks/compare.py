"""A guard against regressions: ratios of one run against those of an earlier one. Times are never compared."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Of each section, the ratios that count, and whether less is better.
RATIOS: dict[str, dict[str, bool]] = {
    "ops": {"speedup": False, "over_limit": True},
    "decode": {"speedup": False, "over_floor": True, "growth": True},
    "model": {"speedup": False, "ceiling_share": False},
    "memory": {"to_output": True},
}
#: Facts of a row that tell it from others, in order.
FACTS = ("what", "shape", "model", "direction", "dtype", "pass", "batch", "length", "context", "name")

#: What a ratio of fewer rounds than this may vary by without our knowing (its percentiles are too near each other).
FEW_ROUNDS, FEW_ROUNDS_NOISE = 3, 0.15


@dataclass(frozen=True)
class Change:
    """One ratio then and now; factor above 1: worse by so much."""

    id: str
    ratio: str
    before: float
    after: float
    factor: float

    def cells(self) -> list[str]:
        sign = 100 * (self.factor - 1)
        change = f"{sign:.0f} % worse" if sign > 0 else f"{100 * (1 / self.factor - 1):.0f} % better"
        return [self.id, self.ratio.replace("_", " "), f"{self.before:.3g}", f"{self.after:.3g}", change]


@dataclass(frozen=True)
class Comparison:
    """Changes beyond the noise, the largest first; common: how many ratios both runs have; missing: only the old."""

    worse: list[Change]
    better: list[Change]
    common: int
    missing: int


def ratios_of(sections: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All ratios of a report: `id` (what was measured), `ratio`, `lower_is_better`, median, p20, p80, rounds."""
    return [
        {"id": _id(section, row), "ratio": name, "lower_is_better": lower, **_spread(row[name])}
        for section, rows in sections.items()
        for row in rows
        for name, lower in RATIOS[section].items()
        if row.get(name) is not None and not row.get("reference")
    ]


def _id(section: str, row: Mapping[str, Any]) -> str:
    return " / ".join([section, *(str(row[fact]) for fact in FACTS if fact in row)])


def _spread(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {name: value[name] for name in ("median", "p20", "p80", "rounds")}
    return {"median": value, "p20": value, "p80": value, "rounds": 1}


def read_report(path: Path) -> dict[str, Any]:
    """A `benchmark.json`, or one that gzip has compressed."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def load_report(path: str) -> dict[str, Any]:
    """An earlier `benchmark.json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no benchmark's report.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path!r} is a folder. Give the benchmark.json in it with --compare.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path!r}. Give an earlier benchmark.json with --compare.")
    try:
        report = read_report(Path(path))
        report.setdefault("ratios", ratios_of(report["sections"]))  # committed results leave them out
        for ratio in report["ratios"]:
            _check(ratio)
        report["hardware"]["cpu"], report["versions"]["torch"]
    except (ValueError, KeyError, TypeError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path!r} is no benchmark.json of hf-linear-attn ({error!r}). Give another file.") from error
    return report


def _check(ratio: Mapping[str, Any]) -> None:
    for name in ("median", "p20", "p80", "rounds"):
        if not ratio[name] >= 0:
            raise ValueError(f"{ratio['id']}: {name} is {ratio[name]!r}")
    ratio["lower_is_better"], ratio["ratio"]


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> Comparison:
    """Which ratios changed by more than the noise: the intervals between the 20th and the 80th percentile lie apart,
    and the medians differ by more than `tolerance` (0.15 where a ratio comes from fewer than three rounds)."""
    old = {(entry["id"], entry["ratio"]): entry for entry in before["ratios"]}
    new = {(entry["id"], entry["ratio"]): entry for entry in after["ratios"]}
    changes = list(_changes(old, new, tolerance))
    return Comparison(
        sorted((entry for entry in changes if entry.factor > 1), key=lambda entry: -entry.factor),
        sorted((entry for entry in changes if entry.factor <= 1), key=lambda entry: entry.factor),
        len(old.keys() & new.keys()),
        len(old.keys() - new.keys()),
    )


def _changes(old: Mapping[Any, Any], new: Mapping[Any, Any], tolerance: float) -> Iterator[Change]:
    for key in old.keys() & new.keys():
        first, second = old[key], new[key]
        if not first["median"] or not second["median"]:
            continue
        few = min(first["rounds"], second["rounds"]) < FEW_ROUNDS and key[1] not in EXACT_RATIOS
        least = max(tolerance, FEW_ROUNDS_NOISE) if few else tolerance
        grew = second["median"] / first["median"]
        factor = grew if first["lower_is_better"] else 1 / grew
        apart = second["p20"] > first["p80"] or second["p80"] < first["p20"]
        if apart and max(factor, 1 / factor) > 1 + least:
            yield Change(key[0], key[1], first["median"], second["median"], factor)


#: Ratios of bytes, which do not vary by the round.
EXACT_RATIOS = frozenset({"to_output"})
