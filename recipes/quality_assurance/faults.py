"""Everything that may go wrong, done on purpose: what was tried, and what followed.

    python -m recipes.quality_assurance.faults

Called from the root of the repository: the faults are those of tests/faults. Needs the `test` extra, and for some
faults the right to mount a tmpfs (they are listed as not possible elsewhere); some twenty minutes on two cores. Writes
recipes/results/faults.json and .md. Expect: every outcome as expected (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULTS = Path(__file__).resolve().parents[1] / "results"
OUTCOMES = ("as expected", "wrong", "not possible here")


def tried(only: list[str] | None) -> list[dict[str, Any]]:
    from tests.faults import data, disks, files, processes  # noqa: F401  (the faults add themselves)
    from tests.faults.trying import FAULTS, attempt

    rows = []
    for fault in FAULTS:
        if only is not None and fault.group not in only:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            row = attempt(fault, Path(place))
        rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
        sys.stderr.write(f"{fault}: {row['outcome']}\n")
    return rows


def table(report: dict[str, Any]) -> str:
    rows = report["faults"]
    counted = ", ".join(f"{sum(row['outcome'] == name for row in rows)} {name}" for name in OUTCOMES)
    where = report["environment"]
    lines = [
        "# Faults tried, and what followed",
        "",
        f"By `python -m recipes.quality_assurance.faults` (torch {where['versions']['torch']}, transformers "
        f"{where['versions']['transformers']}, {where['hardware']['platform']}): {len(rows)} faults, {counted}.",
    ]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines += [
            "",
            f"## {group.capitalize()}",
            "",
            "| fault | expected | outcome | seen |",
            "| --- | --- | --- | --- |",
        ]
        for row in rows:
            if row["group"] == group:
                cells = [row["fault"], row["expected"], row["outcome"], row["seen"]]
                lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups only, e.g. checkpoint 'full disk'")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    import torch

    from hf_linear_attn.evaluation.measurements import now
    from hf_linear_attn.evaluation.report import environment

    report: dict[str, Any] = {"format_version": 1, "created": now(), "environment": environment(torch.device("cpu"))}
    report["faults"] = tried(arguments.only)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (arguments.out / "faults.json").write_text(text + "\n", encoding="utf-8")
    (arguments.out / "faults.md").write_text(table(report), encoding="utf-8")
    return 1 if any(row["outcome"] == "wrong" for row in report["faults"]) else 0


if __name__ == "__main__":
    sys.exit(main())
