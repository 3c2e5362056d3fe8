"""Long streams, many steps, other processes, threads: what must not grow, drift or differ.

    python -m recipes.quality_assurance.endurance

Called from the root of the repository: the measures are those of tests/endurance, at full length (100,000 tokens,
10,000 decoding steps, 1,000 rounds of patching). Needs the `test` extra; some twenty minutes on two cores. Writes
recipes/results/endurance.json and .md. Expect: every limit kept (exit code 1 otherwise).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULTS = Path(__file__).resolve().parents[1] / "results"
TOKENS, STEPS, ROUNDS, REPEATS = 100 * 1024, 10_000, 1_000, 20
PATCHED = ("hedgehog", "favor+")
DECODED = ("hedgehog", "gla")
REPEATED = ("favor+", "hedgehog", "window", "gla")
#: The state of linformer-causal grows by declaration, and its time with it: a stream of this length says as much.
GROWING = {"linformer-causal": 16 * 1024}


def measured() -> Iterator[dict[str, Any]]:
    import torch

    from tests.endurance import measures
    from tests.helpers import BERT, LLAMA, entries, serves

    torch.set_num_threads(1)
    for entry in entries():
        for dtype in (torch.float32, torch.bfloat16) if entry.causal else ():
            yield measures.drift(entry.name, dtype, GROWING.get(entry.name, TOKENS))
        for family in (BERT, LLAMA):
            if serves(entry, family.causal):
                yield measures.batches(entry.name, family, 32)
        if entry.name in REPEATED:
            yield measures.in_other_processes(entry.name)
    for name in DECODED:
        yield from measures.decoding(name, STEPS, 1_000)
    for name in PATCHED:
        yield from measures.rounds(name, ROUNDS)
    yield measures.threads("hedgehog", "window", REPEATS)


def table(report: dict[str, Any]) -> str:
    rows, where = report["rows"], report["environment"]
    lines = [
        "# What must not grow, drift or differ",
        "",
        "By `python -m recipes.quality_assurance.endurance` "
        f"(torch {where['versions']['torch']}, {where['hardware']['cpu']}): "
        f"{sum(row['kept'] for row in rows)} of {len(rows)} limits kept. Drift: errors against float64 along one "
        "stream, the end over the beginning; errors are relative to values N(0, 1).",
        "",
        "| measure | size | found | limit | kept | errors: beginning, end, largest |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        size = next((f"{row[key]:,} {key}" for key in ("tokens", "steps", "generations") if key in row), "")
        names = ("error_at_the_beginning", "error_at_the_end", "largest_error")
        errors = ", ".join(f"{row[name]:.0e}" for name in names) if names[0] in row else ""
        found, limit = (f"{row[key]:.2g} {row['unit']}" for key in ("found", "limit"))
        kept = "yes" if row["kept"] else "**no**"
        lines.append(f"| {row['what']} | {size} | {found} | {limit} | {kept} | {errors} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args(argv)
    import torch

    from hf_linear_attn.evaluation.measurements import now
    from hf_linear_attn.evaluation.report import environment

    report: dict[str, Any] = {"format_version": 1, "created": now(), "environment": environment(torch.device("cpu"))}
    report["rows"] = []
    for row in measured():
        report["rows"].append(row)
        sys.stderr.write(f"{row['what']}: {row['found']:.3g} {row['unit']}\n")
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (arguments.out / "endurance.json").write_text(text + "\n", encoding="utf-8")
    (arguments.out / "endurance.md").write_text(table(report), encoding="utf-8")
    return 0 if all(row["kept"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
