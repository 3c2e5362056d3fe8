"""Speed and memory of every mechanism and backend, over the limits of this machine.

    python -m recipes.benchmarks --quick
    python -m recipes.benchmarks --section ops --attention elu hedgehog --lengths 256 1024 4096 --dtypes float32
    python -m recipes.benchmarks --section decode memory --output benchmark --append
    python -m recipes.benchmarks ./llama --section model --model-lengths 1024 4096
    python -m recipes.benchmarks --compare benchmark-before/benchmark.json --output benchmark-now

Sections:
    ops     attention by itself: every mechanism and backend against sdpa, other packages, and the limits
    decode  one token after a context: against key-value caches, and whole models' generation
    model   whole models against the speedup that a free attention would give; MODEL instead of random weights
    memory  peak extra memory, each value from a process of its own

Every measurement is on disk at once. Ctrl-C stops; the same command with --append continues. The exit code is 1 with
--compare if a ratio became worse by more than the noise.
"""

from __future__ import annotations

import argparse
import os
import sys

from hf_linear_attn.cli_fields import add_flags, from_arguments

from .options import BenchmarkOptions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint for the sections model and decode (default: shapes of known models)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    add_flags(parser, BenchmarkOptions)
    arguments = parser.parse_args(argv)
    try:
        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        if arguments.traceback:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from .runner import run_benchmark

    # A file or a pipe has no width; rich would assume 80 columns.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 180
    options = from_arguments(BenchmarkOptions, arguments)
    return run_benchmark(options, arguments.source, console=Console(file=sys.stdout, width=width))[1]


if __name__ == "__main__":
    sys.exit(main())
