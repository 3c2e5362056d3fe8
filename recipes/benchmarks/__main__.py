"""Speed and memory of every mechanism and backend, over the limits of this machine.

    python -m recipes.benchmarks --quick
    python -m recipes.benchmarks --section ops --attention elu hedgehog --lengths 256 1024 4096 --dtypes float32
    python -m recipes.benchmarks --section decode memory --output benchmark --append
    python -m recipes.benchmarks ./llama --section model --model_lengths 1024 4096
    python -m recipes.benchmarks --compare benchmark-before/benchmark.json --output benchmark-now

Sections:
    ops     attention by itself: every mechanism and backend against sdpa, other packages, and the limits
    decode  one token after a context: against key-value caches, and whole models' generation
    model   whole models against the speedup of the model without attention; MODEL instead of random weights
    memory  peak extra memory, each value from a process of its own

Every measurement is on disk at once. Ctrl-C stops; the same command with --append continues. The exit code is 1 with
--compare if a ratio became worse by more than the noise.
"""

from __future__ import annotations

import os
import sys

from hf_linear_attn.utils.arguments import exit_code, parse_config

from .options import BenchmarkOptions


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run(arguments), traceback="--traceback" in arguments)


def run(arguments: list[str]) -> int:
    model = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    options = parse_config(
        BenchmarkOptions, arguments, program="python -m recipes.benchmarks [MODEL]", description=__doc__ or ""
    )
    from rich.console import Console

    from .runner import run_benchmark

    # A file or a pipe has no width; rich would assume 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 180
    return run_benchmark(options, model, console=Console(file=sys.stdout, width=width))[1]


if __name__ == "__main__":
    sys.exit(main())
