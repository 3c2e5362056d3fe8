"""Patch a tiny random instance of every architecture that Transformers knows, and check what it then does.

    python -m recipes.quality_assurance.sweep

Needs the package only: no network, no data; about half an hour on two cores. An interrupted run goes on where it was.
Writes recipes/results/sweep.json (all checks), sweep.csv (one row each) and sweep.md (tables). Each model type ends as
`works`, `refused` (with a message that says what would be needed) or `cannot be built tiny`; none may be `wrong`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hf_linear_attn.evaluation.sweep import WORKS, WRONG, Result
from hf_linear_attn.evaluation.sweep_pool import run_sweep
from hf_linear_attn.evaluation.sweep_report import write_report
from hf_linear_attn.evaluation.tiny import every_case


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["elu", "hedgehog"],
        help="mechanisms (default: elu hedgehog); later ones run where the first works",
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types only, e.g. bert llama")
    parser.add_argument("--processes", type=int, default=2, help="cases at the same time (default: 2)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one case (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("recipes/results"), help="folder for the results")
    arguments = parser.parse_args(argv)
    cases = [case for case in every_case() if arguments.only is None or case.model_type in arguments.only]
    unknown = set(arguments.only or ()) - {case.model_type for case in cases}
    if unknown:
        parser.error(f"--only: Transformers has no model type {', '.join(sorted(unknown))}")
    journal = arguments.out / "sweep.journal.jsonl"
    results: list[Result] = []
    for attention in arguments.attention:
        # What cannot be built or is refused with the first mechanism is so with every other one.
        working = {result.case for result in results if result.outcome in (WORKS, WRONG)}
        results = run_sweep(
            [(case, attention) for case in cases if not results or str(case) in working],
            journal,
            processes=arguments.processes,
            seconds=arguments.seconds,
            on_result=_show,
        )
    write_report(results, arguments.out, {"attention": arguments.attention, "seconds": arguments.seconds})
    journal.unlink()
    return 1 if any(result.outcome == WRONG for result in results) else 0


def _show(result: Result) -> None:
    detail = f": {result.detail[:200]}" if result.outcome == WRONG else ""
    sys.stderr.write(f"{result.case} with {result.attention}: {result.outcome}{detail}\n")


if __name__ == "__main__":
    sys.exit(main())
