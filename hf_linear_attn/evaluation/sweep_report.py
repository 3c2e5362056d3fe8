"""Files of the architecture sweep: JSON with everything, CSV with a row per case, Markdown with tables."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .measurements import now
from .report import environment
from .sweep import REFUSED, UNBUILT, WORKS, WRONG, Result

FORMAT_VERSION = 1
COLUMNS = ("case", "attention", "outcome", "class_name", "layers", "left_out", "checks", "detail", "seconds")


def write_report(results: list[Result], folder: Path, settings: dict[str, Any]) -> None:
    """Write `sweep.json`, `sweep.csv` and `sweep.md` into the folder."""
    results = sorted(results, key=lambda result: (result.case, result.attention))
    report = {
        "format_version": FORMAT_VERSION,
        "made": now(),
        "settings": settings,
        "environment": environment(torch.device("cpu")),
        "counts": {name: counts(results, name) for name in sorted({result.attention for result in results})},
        "results": [result.to_dict() for result in results],
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, allow_nan=False, indent=None)
    # One result a line: changes from one version to the next are readable.
    text = text.replace('"results": [{', '"results": [\n{').replace('}, {"case"', '},\n{"case"')
    (folder / "sweep.json").write_text(text + "\n", encoding="utf-8")
    with (folder / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(getattr(result, name)) for name in COLUMNS] for result in results)
    (folder / "sweep.md").write_text(markdown(report, results), encoding="utf-8")


def counts(results: list[Result], attention: str) -> dict[str, int]:
    """Outcome -> number of cases with one mechanism."""
    found = Counter(result.outcome for result in results if result.attention == attention)
    return {outcome: found[outcome] for outcome in (WORKS, REFUSED, UNBUILT, WRONG)}


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_brief(given)}" for name, given in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)


def _brief(given: Any) -> str:
    return given.partition(":")[0] if isinstance(given, str) else str(given)


def reason(result: Result) -> str:
    """The detail of a result without the names of its class and its layers, so that like cases can be counted."""
    text = re.sub(r"^refused: ", "", result.detail)
    text = re.sub(r"^Layer \d+ \([^)]*\) ", "A layer ", text)
    text = re.sub(r"^\w+ \(model type '[^']*'\) ", "The model ", text)
    text = re.sub(r"Nothing to patch in \w+ \(.*", "Nothing to patch: every layer is exact by its own type.", text)
    text = text.replace(result.class_name, "The model") if result.class_name else text
    return re.sub(r"\d[\d,]*", "N", text)


def markdown(report: dict[str, Any], results: list[Result]) -> str:
    """The tables, as they stand in `sweep.md`."""
    versions = ", ".join(f"{name} {version}" for name, version in report["environment"]["versions"].items())
    lines = [
        "# The architecture sweep",
        "",
        f"A tiny random instance of every model type of Transformers, patched and checked ({versions}). "
        "Made by `python -m recipes.quality_assurance.sweep`; every check of every case is in `sweep.json`. Model "
        "types with a switch "
        "`is_decoder` appear twice.",
        "",
        *_table(["mechanism", WORKS, REFUSED, UNBUILT, WRONG], _count_rows(report)),
    ]
    first = report["settings"]["attention"][0]
    chosen = [result for result in results if result.attention == first]
    for outcome, title in ((REFUSED, "Refused, by message"), (UNBUILT, "Not built, by reason"), (WRONG, "Wrong")):
        lines += _grouped([result for result in chosen if result.outcome == outcome], title)
    works = [result for result in chosen if result.outcome == WORKS]
    lines += ["", f"## What works ({len(works)})", ""]
    rows = [[f"`{r.case}`", r.class_name, _layers(r), _checks(r)] for r in works]
    return "\n".join(lines + _table(["model type", "class", "attention modules", "checks"], rows)) + "\n"


def _count_rows(report: dict[str, Any]) -> list[list[str]]:
    return [[f"`{name}`", *(str(number) for number in found.values())] for name, found in report["counts"].items()]


def _grouped(results: list[Result], title: str) -> list[str]:
    if not results:
        return []
    groups: dict[str, list[str]] = {}
    for result in results:
        groups.setdefault(reason(result), []).append(result.case)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [[str(len(cases)), _safe(text), ", ".join(f"`{case}`" for case in cases)] for text, cases in ordered]
    return ["", f"## {title} ({len(results)})", "", *_table(["cases", "message", "model types"], rows)]


def _layers(result: Result) -> str:
    text = ", ".join(f"{number} {_safe(kind)}" for kind, number in result.layers.items())
    return text + (" (left out by name)" if result.left_out else "")


def _checks(result: Result) -> str:
    """How many checks passed, and by name those that were refused or that the exact model does not pass either."""
    passed = sum(text == "passed" for text in result.checks.values())
    refused = [name for name, text in result.checks.items() if text.startswith("refused")]
    absent = [name for name, text in result.checks.items() if text.startswith("n/a")]
    text = f"{passed} passed"
    text += f"; refused: {', '.join(refused)}" if refused else ""
    return text + (f"; not applicable: {', '.join(absent)}" if absent else "")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _safe(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
