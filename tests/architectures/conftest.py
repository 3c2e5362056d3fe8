"""`pytest tests/architectures -m architectures --architectures-table FILE.md` writes the table of all architectures.

With `-k "bloom or mpt"` only these are examined anew: the other rows of FILE.json, made with the same version of
Transformers, are kept. So are the other names in the table of the package.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_linear_attn.integration.trial import TABLE
from hf_linear_attn.utils.environment import environment, utc_now
from tests.architectures.properties import FOR_TERMS

OUTCOMES = ("works", "refused", "cannot be built tiny", "wrong")
TITLES = {"refused": "Refused, by message", "cannot be built tiny": "Not built, by reason", "wrong": "Wrong"}

Row = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the results of all architectures to FILE.md and FILE.json"
    parser.addoption("--architectures-table", type=Path, metavar="FILE.md", help=text)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--architectures-table", None)
    if path is not None and not hasattr(config, "workerinput"):  # with pytest-xdist, the controller sees all reports
        config.pluginmanager.register(TableWriter(path))


class TableWriter:
    """Collects what the tests record, and writes the files at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows += [value for name, value in report.user_properties if name == "architecture"]

    def pytest_sessionfinish(self) -> None:
        write_architectures(self.rows, TABLE)
        rows = [thinned(row) for row in self.rows]
        write_table(rows + retained_rows(rows, self.path.with_suffix(".json")), self.path)


def retained_rows(rows: list[Row], path: Path) -> list[Row]:
    """The rows of a saved table of the same version of Transformers for the cases that were not examined again."""
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["environment"]["versions"]["transformers"] != transformers.__version__:
        return []
    new = {row["case"] for row in rows}
    results = [row for row in saved["results"] if row["case"] not in new]
    return [{**row, "attention": name} for row in results for name in row["attention"]]


def thinned(row: Row) -> Row:
    """The row with its checks by outcome (the number of those that passed, and the names of the others) and the first
    sentence of its message."""
    checks: dict[str, list[str]] = {}
    for name, check in row["checks"].items():
        checks.setdefault(check.partition(":")[0], []).append(name)
    row = {**row, "passed": len(checks.pop("passed", ())), "checks": checks}
    row["detail"] = re.split(r"\. (?=[A-Z])", row["detail"], maxsplit=1)[0]
    names = ("level", "parameters", "seconds", "architectures", *(["class_name"] if row["detail"] else []))
    left_out = ("", [], {}), names
    return {name: value for name, value in row.items() if value not in left_out[0] and name not in left_out[1]}


def merged(rows: list[Row]) -> list[Row]:
    """The rows with the mechanisms as a list: those of a case that differ in nothing else are one row."""
    results: dict[str, Row] = {}
    for row in rows:
        key = json.dumps({**row, "attention": None})
        results.setdefault(key, {**row, "attention": []})["attention"].append(row["attention"])
    return list(results.values())


def write_architectures(rows: list[Row], path: Path) -> None:
    """Write the names of what works into the table of the package, for the installed version of Transformers.

    No case may go wrong with the same layers. What these cases do not reach keeps its versions.
    """
    names = {name for row in rows if row["outcome"] == "works" for name in row["architectures"]}
    seen = {name for row in rows for name in row["architectures"]}
    names -= {name for row in rows if row["outcome"] == "wrong" for name in row["architectures"]}
    saved: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    table: dict[str, list[str]] = {}
    for name in sorted({*saved, *names}):
        others = {version for version in saved.get(name, ()) if version != transformers.__version__ or name not in seen}
        table[name] = sorted(others | ({transformers.__version__} if name in names else set()))
    lines = (f"{json.dumps(name)}: {json.dumps(versions)}" for name, versions in table.items() if versions)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_table(rows: list[Row], path: Path) -> None:
    rows = sorted(rows, key=lambda row: (row["case"], row["attention"]))
    counts: dict[str, Counter[str]] = {row["attention"]: Counter(dict.fromkeys(OUTCOMES, 0)) for row in rows}
    for row in rows:
        counts[row["attention"]][row["outcome"]] += 1
    results = merged(rows)
    table = {"format_version": 1, "made": utc_now(), "environment": environment(), "counts": counts, "results": results}
    text = json.dumps(table, ensure_ascii=False, allow_nan=False)
    # One result a line: changes from one version to the next are readable.
    text = text.replace('"results": [{', '"results": [\n{').replace('}, {"case"', '},\n{"case"')
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    path.write_text(markdown(table, path.with_suffix(".json").name), encoding="utf-8")


def markdown(table: dict[str, Any], json_name: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in table["environment"]["versions"].items())
    count_rows = [[f"`{name}`", *(str(count[key]) for key in OUTCOMES)] for name, count in table["counts"].items()]
    lines = [
        "# Every architecture of Transformers",
        "",
        f"A tiny random instance of every model type of Transformers, patched and checked ({versions}). Made by "
        "`pytest tests/architectures -m architectures --architectures-table recipes/results/architectures.md`; every "
        f"check of every case is in `{json_name}`. Model types with a switch `is_decoder` appear twice.",
        "",
        *_table(["mechanism", *OUTCOMES], count_rows),
    ]
    first = next(iter(table["counts"]), None)
    rows = [row for row in table["results"] if first in row["attention"] or row["attention"] == [FOR_TERMS]]
    for outcome, title in TITLES.items():
        lines += _by_message([row for row in rows if row["outcome"] == outcome], title)
    works = [row for row in rows if row["outcome"] == "works"]
    cells = [[f"`{row['case']}`", row["class_name"], _layers(row), _checks(row)] for row in works]
    lines += ["", f"## What works ({len(works)})", ""]
    return "\n".join(lines + _table(["model type", "class", "attention modules", "checks"], cells)) + "\n"


def _by_message(rows: list[Row], title: str) -> list[str]:
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(short_message(row), []).append(f"`{row['case']}`")
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    cells = [[str(len(cases)), _escape(text), ", ".join(cases)] for text, cases in ordered]
    return ["", f"## {title} ({len(rows)})", "", *_table(["cases", "message", "model types"], cells)] if rows else []


def short_message(row: Row) -> str:
    """The detail of a row without the names of its class and layers, so that equal messages can be counted."""
    text = re.sub(r"^refused: ", "", row.get("detail", ""))
    text = re.sub(r"^Layer \d+ \([^)]*\) ", "A layer ", text)
    text = re.sub(r"^\w+ \(model type '[^']*'\) ", "The model ", text)
    text = re.sub(r"Nothing to patch in \w+ \(.*", "Nothing to patch: every layer is exact by its own type.", text)
    return re.sub(r"\d[\d,]*", "N", text)


def _layers(row: Row) -> str:
    text = ", ".join(f"{number} {_escape(kind)}" for kind, number in row.get("layers", {}).items())
    return text + (" (left out by name)" if "left_out" in row else "")


def _checks(row: Row) -> str:
    """How many checks passed, and by name those that were refused or that the exact model does not pass either."""
    text = f"{row['passed']} passed"
    for outcome, title in (("refused", "refused"), ("n/a", "not applicable")):
        names = row.get("checks", {}).get(outcome)
        text += f"; {title}: {', '.join(names)}" if names else ""
    return text


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
