"""Everything that may go wrong, done on purpose: what was tried, and what followed.

    python -m recipes.quality_assurance.faults

Called from the root of the repository: it runs `pytest -m fault`. Needs the `test` extra, and for some faults the right
to mount a tmpfs (they are listed as not possible elsewhere); some twenty minutes on two cores. Writes
recipes/results/faults.json and .md. Every outcome should be as expected; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hf_linear_attn.utils.environment import environment, utc_now
from recipes.quality_assurance.marked_tests import run_marked_tests

RESULTS = Path(__file__).resolve().parents[1] / "results"
OUTCOMES = {"passed": "as expected", "failed": "wrong", "skipped": "not possible here"}


def fault_rows(*arguments: str) -> list[dict[str, Any]]:
    rows = []
    for test in run_marked_tests("tests/faults", "-m", "fault", *arguments):
        recorded = {name: values[0] for name, values in test["properties"].items()}
        rows.append(
            {
                "group": recorded["group"],
                "fault": recorded["what"],
                "expected": recorded["expected"],
                "outcome": OUTCOMES[test["outcome"]],
                "seen": recorded.get("observed", test["message"]),
                "seconds": round(test["seconds"], 1),
            }
        )
    return rows


def table(report: dict[str, Any]) -> str:
    rows = report["faults"]
    counts = ", ".join(f"{sum(row['outcome'] == name for row in rows)} {name}" for name in OUTCOMES.values())
    where = report["environment"]
    lines = [
        "# Faults tried, and what followed",
        "",
        f"By `python -m recipes.quality_assurance.faults` (torch {where['versions']['torch']}, transformers "
        f"{where['versions']['transformers']}, {where['hardware']['platform']}): {len(rows)} faults, {counts}.",
    ]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines += ["", f"## {group.capitalize()}", ""]
        lines += ["| fault | expected | outcome | seen |", "| --- | --- | --- | --- |"]
        for row in rows:
            if row["group"] == group:
                cells = [row["fault"], row["expected"], row["outcome"], row["seen"]]
                lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="EXPRESSION", help="pytest's -k: these faults only, e.g. 'weights or plan'")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    report: dict[str, Any] = {"format_version": 1, "created": utc_now(), "environment": environment()}
    report["faults"] = fault_rows(*(["-k", arguments.only] if arguments.only else []))
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (arguments.out / "faults.json").write_text(text + "\n", encoding="utf-8")
    (arguments.out / "faults.md").write_text(table(report), encoding="utf-8")
    return 1 if any(row["outcome"] == "wrong" for row in report["faults"]) else 0


if __name__ == "__main__":
    sys.exit(main())
