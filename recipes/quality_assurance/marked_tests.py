"""Tests that record what they see, run by their marker, and the tables of what they saw.

    python -m recipes.quality_assurance.marked_tests faults
    python -m recipes.quality_assurance.marked_tests endurance
    python -m recipes.quality_assurance.marked_tests packages

Called from the root of the repository; needs the `test` extra. Each writes a JSON file and a page to recipes/results,
and ends with exit code 1 if a test failed.

- faults: everything that may go wrong, done on purpose (`pytest tests/faults -m fault`, twenty minutes on two cores).
  Some need the right to mount a tmpfs, and are listed as not possible elsewhere.
- endurance: long streams, many steps, other processes, threads: what must not grow, drift or differ (`pytest
  tests/endurance -m long`, twenty minutes: 100,000 tokens, 10,000 decoding steps, 1,000 rounds of patching).
- packages: our mechanisms beside those of other packages, on the same numbers and beside the float64 definitions
  (`pytest tests/peers -m peer`, a minute). Lists what could not run; tests/peers says how each package is installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from hf_linear_attn.study.tables import to_markdown
from hf_linear_attn.utils.environment import environment, utc_now
from hf_linear_attn.utils.files import atomic_write, write_json
from recipes.result_files import RESULTS, ROOT

Rows = list[dict[str, Any]]


def run_tests(*arguments: str, **environment: str) -> Rows:
    """Run pytest from the root of the repository, in one process.

    Args:
        arguments: Of pytest, such as `-m fault`.
        environment: Further variables of the process.

    Returns:
        One row a test: `name`, `outcome` ("passed", "failed" or "skipped"), `message` unless it passed, `seconds`, and
        `properties`: name -> values, all that the test recorded by `record_property`.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", "0", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode
        if not report.exists():
            raise RuntimeError(f"`{' '.join(command)}` ended with exit code {code} and wrote no report.")
        return [_row(case) for case in ET.parse(report).iter("testcase")]


def _row(case: ET.Element) -> dict[str, Any]:
    outcomes = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    failure = next((part for part in case if part.tag in outcomes), None)
    outcome = "passed" if failure is None else outcomes[failure.tag]
    properties: defaultdict[str, list[str]] = defaultdict(list)
    for item in case.iter("property"):
        properties[item.get("name", "")].append(item.get("value", ""))
    message = "" if failure is None else failure.get("message", "")
    facts = {"outcome": outcome, "message": message, "seconds": float(case.get("time", 0)), "properties": properties}
    return {"name": case.get("name", ""), **facts}


# --------------------------------------------------------------------------------------------------------------------
# Faults

OUTCOMES = {"passed": "as expected", "failed": "wrong", "skipped": "not possible here"}


def fault_rows(tests: Rows) -> dict[str, Rows]:
    rows = []
    for test in tests:
        recorded = {name: values[0] for name, values in test["properties"].items()}
        row = {"group": recorded["group"], "fault": recorded["what"], "expected": recorded["expected"]}
        row |= {"outcome": OUTCOMES[test["outcome"]], "seen": recorded.get("observed", test["message"])}
        rows.append({**row, "seconds": round(test["seconds"], 1)})
    return {"faults": rows}


def faults_page(report: dict[str, Any]) -> str:
    rows, where = pd.DataFrame(report["faults"]), report["environment"]
    counts = ", ".join(f"{(rows['outcome'] == name).sum()} {name}" for name in OUTCOMES.values())
    parts = [
        "# Faults tried, and what followed",
        f"By `python -m recipes.quality_assurance.marked_tests faults` (torch {where['versions']['torch']}, "
        f"transformers {where['versions']['transformers']}, {where['hardware']['platform']}): "
        f"{len(rows)} faults, {counts}.",
    ]
    for group, part in rows.groupby("group", sort=False):
        cells = part[["fault", "expected", "outcome", "seen"]]
        parts += [f"## {str(group).capitalize()}", to_markdown(cells, text_columns=None)]
    return "\n\n".join(parts) + "\n"


# --------------------------------------------------------------------------------------------------------------------
# Endurance


def endurance_rows(tests: Rows) -> dict[str, Rows]:
    texts = chain.from_iterable(test["properties"]["row"] for test in tests)
    return {"rows": [*map(json.loads, texts)]}


def endurance_page(report: dict[str, Any]) -> str:
    rows, where, lines = report["rows"], report["environment"], []
    errors = ("error_at_the_beginning", "error_at_the_end", "largest_error")
    for row in rows:
        line = {"measure": row["what"]}
        line["size"] = next((f"{row[key]:,} {key}" for key in ("tokens", "steps", "generations") if key in row), "")
        line |= {name: f"{row[name]:.2g} {row['unit']}" for name in ("value", "limit")}
        line["within the limit"] = "yes" if row["within_limit"] else "**no**"
        line["errors: beginning, end, largest"] = ", ".join(f"{row[name]:.0e}" for name in errors if name in row)
        lines.append(line)
    head = (
        f"By `python -m recipes.quality_assurance.marked_tests endurance` (torch {where['versions']['torch']}, "
        f"{where['hardware']['cpu']}): {sum(row['within_limit'] for row in rows)} of {len(rows)} values are within "
        "their limits. Drift: errors against float64 along one stream, the end over the beginning; errors are relative "
        "to values N(0, 1)."
    )
    table = to_markdown(pd.DataFrame(lines), text_columns=None)
    return f"# What must not grow, drift or differ\n\n{head}\n\n{table}\n"


# --------------------------------------------------------------------------------------------------------------------
# Other packages

DIFFERENCES = {
    "theirs to ours": "difference",
    "theirs to definition": "theirs_to_definition",
    "ours to definition": "ours_to_definition",
}


def package_rows(tests: Rows) -> dict[str, Rows]:
    rows = [{**json.loads(test["properties"]["comparison"][-1]), "reason": test["message"]} for test in tests]
    rows.sort(key=lambda row: (row["package"], row["mechanism"]))
    compared = [{name: row[name] for name in row if name != "reason"} for row in rows if "verdict" in row]
    if not compared:
        raise RuntimeError("None of the packages is installed: nothing was compared, nothing is written.")
    return {"comparisons": compared, "not_run": [row for row in rows if "verdict" not in row]}


def packages_page(report: dict[str, Any]) -> str:
    """Return the largest relative differences, and what follows from them."""
    lines, compared, skipped = [], report["comparisons"], report["not_run"]
    for row in (*compared, *skipped):
        package = f"{row['package']} {row.get('package_version', '')}".strip()
        line = {"package": package, "mechanism": f"`{row['mechanism']}`", "case": row["case"]}
        for title, name in DIFFERENCES.items():
            line[title] = "" if name not in row else f"{row[name]:.0e}".replace("0e+00", "0")
        result = ": ".join(filter(None, (row["verdict"], row["why"]))) if "verdict" in row else None
        lines.append({**line, "result": result or f"not run: {row['reason']}"})
    equal = sum(row["verdict"] == "equal" for row in compared)
    head = (
        "By `python -m recipes.quality_assurance.marked_tests packages`: the same inputs through the code of another "
        "package, through ours, and through the float64 definitions of `tests/reference/`. "
        f"{equal} of {len(compared)} comparisons are equal, {len(compared) - equal} differ, {len(skipped)} not run.\n\n"
        "Numbers are largest relative differences `max|a - b| / max|b|`. Two are `equal` where they differ by "
        "rounding, in float64 wherever the other package computes in it. Means over draws of random features deviate "
        "by their sampling error (below 0.01). All ran on a CPU, flash-linear-attention by its plain-torch references "
        "(`naive.py`): its gated rules have no normalizer: ours is read from a column of ones among the values. "
        "`gated-delta` and `favor` guard small normalizers, which others do not: there q and k are short."
    )
    return f"# Other packages\n\n{head}\n\n{to_markdown(pd.DataFrame(lines), text_columns=None)}\n"


# --------------------------------------------------------------------------------------------------------------------

#: Name -> arguments of pytest, the rows of its tests, and the page of a report.
CHECKS: dict[str, Any] = {
    "faults": (("tests/faults", "-m", "fault"), fault_rows, faults_page),
    "endurance": (("tests/endurance", "-m", "long"), endurance_rows, endurance_page),
    "packages": (("tests/peers", "-m", "peer", "-k", "beside"), package_rows, packages_page),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args(argv)
    arguments, rows_of, page = CHECKS[options.check]
    tests = run_tests("-v", *arguments, *options.pytest)
    report = {"format_version": 1, "created": utc_now(), "environment": environment(), **rows_of(tests)}
    write_json(options.out / f"{options.check}.json", report)
    atomic_write(options.out / f"{options.check}.md", page(report))
    return 1 if any(test["outcome"] == "failed" for test in tests) else 0


if __name__ == "__main__":
    sys.exit(main())
