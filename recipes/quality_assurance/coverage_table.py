"""Branch coverage by folder of the package, as a table.

    pip install coverage==7.17.3
    coverage run -m pytest && coverage combine
    python -m recipes.quality_assurance.coverage_table

Called from the root of the repository; the settings are in pyproject.toml. The suite takes about half as long again
with it. Processes that tests start (recipes, torchrun, the command line by its name) and code that torch.compile or
Triton runs are not counted, so the numbers are lower bounds. Writes recipes/results/coverage.json and .md, with the
branches that no test took in the files that every model runs through, and why: expect no row without a reason (exit
code 1 otherwise).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "recipes" / "results"
PACKAGE = "hf_linear_attn"
#: Whose missing branches are listed one by one.
LISTED = ("ops", "feature_maps", "integration", "checkpoints.py")
#: Of these, what only processes of its own run.
UNCOUNTED = "ops/triton"
#: Why branches are not taken: a file, the reason.
WHY = {
    "feature_maps/base.py": "the method that every map replaces",
    "feature_maps/cosformer.py": "a map asked for its formula without positions, which no mechanism does",
    "feature_maps/favor_plus.py": "while torch.compile traces",
    "integration/attention.py": "a marker that is compared and never called",
    "integration/cache.py": "what Transformers asks of caches with a limit; a layer fetched before it holds anything",
    "integration/discovery.py": "classes without source; sizes that another attribute tells; cross-attention by flag",
    "integration/exact.py": "flash attention needs a GPU",
    "integration/model_class.py": "a patched class built from a config of a plain model",
    "integration/offload.py": "while torch.compile traces",
    "integration/packing.py": "a batch of padding alone; while torch.compile traces; after an error in another model",
    "ops/backends.py": "a backend named by the environment, set in processes of its own",
    "ops/buckets.py": "features without a log scale: the mechanism gives every map one",
    "ops/common.py": "while torch.compile traces",
    "ops/efficient.py": "weights over no keys at all",
    "ops/fla_backend.py": "flash-linear-attention and a GPU are not there",
    "ops/native/binding.py": "no memory left for a kernel",
    "ops/native/build.py": "Windows; a library that does not load; no /proc; a compiler that does not start",
    "ops/native/backend.py": "a machine where kernels cannot be built; other devices; anomalies",
}
KEYS = {
    "statements": "num_statements",
    "statements run": "covered_lines",
    "branches": "num_branches",
    "branches taken": "covered_branches",
}


def measured(data: Path | None) -> dict[str, Any]:
    """What `coverage json` says of the combined data."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "coverage.json"
        options = [] if data is None else ["--data-file", str(data)]
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(out), *options], cwd=ROOT, check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def folder(path: str) -> str:
    """`ops`, `ops/native`, … or `.` for files at the top of the package."""
    return Path(path).relative_to(PACKAGE).parent.as_posix()


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("files", *KEYS), 0))
    for path, entry in report["files"].items():
        total = totals[folder(path)]
        total["files"] += 1
        for name, key in KEYS.items():
            total[name] += entry["summary"][key]
    return [{"folder": name, **total} for name, total in sorted(totals.items())]


def missing(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Branches not taken from lines that were run: `[from, to]`, where to < 0 leaves the function or module."""
    missing_branches = []
    for path, entry in sorted(report["files"].items()):
        name = Path(path).relative_to(PACKAGE).as_posix()
        if not name.startswith(LISTED) or name.startswith(UNCOUNTED):
            continue
        ran = set(entry["executed_lines"])
        branches = [pair for pair in entry["missing_branches"] if pair[0] in ran]
        if branches or entry["missing_lines"]:
            row = {"file": name, "branches": branches, "lines": entry["missing_lines"]}
            missing_branches.append({**row, "why": WHY.get(name, "")})
    return missing_branches


def share(row: dict[str, Any], part: str, whole: str) -> str:
    return f"{100 * row[part] / row[whole]:.1f} %" if row[whole] else "–"


def table(report: dict[str, Any]) -> str:
    lines = [
        "# Branch coverage of the tests",
        "",
        f"By `coverage run -m pytest` (coverage.py {report['coverage']}, at {report['commit']}) and "
        "`python -m recipes.quality_assurance.coverage_table`. Processes that tests start, and code that "
        "torch.compile or Triton runs, are not counted.",
        "",
        "| folder | files | statements | run | branches | taken |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    whole = {key: sum(row[key] for row in report["folders"]) for key in ("files", *KEYS)}
    for row in [*report["folders"], {"folder": "all", **whole}]:
        run, taken = share(row, "statements run", "statements"), share(row, "branches taken", "branches")
        cells = [f"`{row['folder']}`", row["files"], row["statements"], run, row["branches"], taken]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "## Not taken",
        "",
        "In `ops` (but `ops/triton`), `feature_maps`, `integration` and `checkpoints.py`, by line numbers.",
        "",
    ]
    lines += ["| file | branches | lines | why |", "| --- | --- | --- | --- |"]
    for row in report["missing"]:
        branches = ", ".join(f"{a}→{'out' if b < 0 else b}" for a, b in row["branches"])
        lines.append(f"| `{row['file']}` | {branches} | {ranges(row['lines'])} | {row['why']} |")
    return "\n".join(lines) + "\n"


def ranges(numbers: list[int]) -> str:
    """`1-3, 7` of 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the combined data (default: .coverage)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    coverage_report = measured(arguments.data)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    report = {
        "format_version": 1,
        "coverage": coverage_report["meta"]["version"],
        "commit": commit.strip() or "no commit",
        "folders": rows(coverage_report),
        "missing": missing(coverage_report),
    }
    text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
    (arguments.out / "coverage.json").write_text(text, encoding="utf-8")
    (arguments.out / "coverage.md").write_text(table(report), encoding="utf-8")
    return 1 if any(not row["why"] for row in report["missing"]) else 0


if __name__ == "__main__":
    sys.exit(main())
