"""Long streams, many steps, other processes, threads: what must not grow, drift or differ.

    python -m recipes.quality_assurance.endurance

Called from the root of the repository: it runs `pytest tests/endurance -m long` (100,000 tokens, 10,000 decoding steps,
1,000 rounds of patching). Needs the `test` extra; some twenty minutes on two cores. Writes
recipes/results/endurance.json and .md. Every value should be within its limit; otherwise the exit code is 1.
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


def table(report: dict[str, Any]) -> str:
    rows, where = report["rows"], report["environment"]
    lines = [
        "# What must not grow, drift or differ",
        "",
        "By `python -m recipes.quality_assurance.endurance` "
        f"(torch {where['versions']['torch']}, {where['hardware']['cpu']}): "
        f"{sum(row['within_limit'] for row in rows)} of {len(rows)} values are within their limits. Drift: errors "
        "against float64 along one stream, the end over the beginning; errors are relative to values N(0, 1).",
        "",
        "| measure | size | value | limit | within the limit | errors: beginning, end, largest |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        size = next((f"{row[key]:,} {key}" for key in ("tokens", "steps", "generations") if key in row), "")
        names = ("error_at_the_beginning", "error_at_the_end", "largest_error")
        errors = ", ".join(f"{row[name]:.0e}" for name in names) if names[0] in row else ""
        value, limit = (f"{row[key]:.2g} {row['unit']}" for key in ("value", "limit"))
        within = "yes" if row["within_limit"] else "**no**"
        lines.append(f"| {row['what']} | {size} | {value} | {limit} | {within} | {errors} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the short sizes of the test suite instead")
    parser.add_argument("--only", metavar="EXPRESSION", help="pytest's -k: these measures only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    selected = ["-k", arguments.only] if arguments.only else []
    tests = run_marked_tests("tests/endurance", "-m", "not long" if arguments.short else "long", *selected)
    report: dict[str, Any] = {"format_version": 1, "created": utc_now(), "environment": environment()}
    report["rows"] = [json.loads(text) for test in tests for text in test["properties"]["row"]]
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (arguments.out / "endurance.json").write_text(text + "\n", encoding="utf-8")
    (arguments.out / "endurance.md").write_text(table(report), encoding="utf-8")
    return 1 if any(test["outcome"] == "failed" for test in tests) else 0


if __name__ == "__main__":
    sys.exit(main())
