"""Our mechanisms beside those of other packages, on the same numbers and beside the float64 definitions.

    python -m recipes.quality_assurance.compare_packages

Called from the root of the repository: it runs `pytest tests/peers -m peer`. Needs the packages that it compares
(performer-pytorch, linformer, pytorch-fast-transformers, flash-linear-attention; tests/peers says how each is
installed) and lists what it could not run; under a minute on one core. Writes recipes/results/packages.json;
`python -m recipes.benchmarks.write_tables` writes the table. Expect:
`equal` to rounding, or `different` with the reason, ours at the definition in both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hf_linear_attn.utils.environment import environment
from recipes.quality_assurance.marked_tests import run_marked_tests

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "recipes" / "results" / "packages.json"
DIFFERENCES = ("difference", "theirs_to_definition", "ours_to_definition")


def compare() -> dict[str, Any]:
    done, not_run = [], []
    for test in run_marked_tests("tests/peers", "-m", "peer", "-k", "beside"):
        row = json.loads(test["properties"]["comparison"][-1])
        if "verdict" in row:
            done.append(row)
        else:
            not_run.append({**row, "reason": test["message"]})
    for rows in (done, not_run):
        rows.sort(key=lambda row: (row["package"], row["mechanism"]))
    return {"format_version": 1, "comparisons": done, "not_run": not_run, "environment": environment()}


def table(report: dict[str, Any]) -> str:
    """Markdown: largest relative differences, and the verdict with its reason."""
    lines = [
        "| package | mechanism | case | theirs to ours | theirs to definition | ours to definition | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["comparisons"]:
        numbers = [f"{row[key]:.0e}" if row[key] else "0" for key in DIFFERENCES]
        conclusion = f"{row['verdict']}: {row['why']}" if row["why"] else row["verdict"]
        package = f"{row['package']} {row['package_version']}"
        lines.append("| " + " | ".join([package, f"`{row['mechanism']}`", row["case"], *numbers, conclusion]) + " |")
    for row in report["not_run"]:
        cells = [row["package"], f"`{row['mechanism']}`", row["case"], "", "", "", f"not run: {row['reason']}"]
        lines.append("| " + " | ".join(cells) + " |")
    equal = sum(row["verdict"] == "equal" for row in report["comparisons"])
    total = len(report["comparisons"])
    lines += [
        "",
        f"{equal} of {total} comparisons are equal, {total - equal} differ, {len(report['not_run'])} not run.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print-only", action="store_true", help="write no files")
    arguments = parser.parse_args(argv)
    report = compare()
    sys.stdout.write(table(report) + "\n")
    if not report["comparisons"]:
        sys.stderr.write("None of the packages is installed: nothing was compared, nothing is written.\n")
        return 1
    if not arguments.print_only:
        text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
        RESULTS.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
