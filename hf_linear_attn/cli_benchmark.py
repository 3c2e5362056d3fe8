"""The verb `benchmark` of the command line. Reading its flags loads neither torch nor transformers."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .cli_fields import add_flags, from_arguments
from .evaluation.benchmark.options import BenchmarkOptions

EXAMPLES = """\
examples:
  hf-linear-attn benchmark --quick
  hf-linear-attn benchmark --section ops --attention elu hedgehog --lengths 256 1024 4096 --dtypes float32
  hf-linear-attn benchmark --section decode memory --output benchmark --append
  hf-linear-attn benchmark ./llama --section model --model-lengths 1024 4096
  hf-linear-attn benchmark --compare benchmark-before/benchmark.json --output benchmark-now

sections:
  ops     attention by itself: every mechanism and backend against sdpa, other packages, and the limits
  decode  one token after a context: against key-value caches, and whole models' generation
  model   whole models against the speedup that a free attention would give; MODEL instead of random weights
  memory  peak extra memory, each value from a process of its own

Every measurement is on disk at once. Ctrl-C stops; the same command with --append goes on.
exit code 1 with --compare: a ratio became worse by more than the noise.
"""


def add_benchmark_verb(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add `benchmark` to the verbs; its flags are the fields of `BenchmarkOptions`."""
    parser = verbs.add_parser(
        "benchmark",
        parents=[common],
        help="speed and memory of every mechanism and backend, over the limits of this machine",
        description="Measure attention by itself, decoding, whole models and memory, beside exact attention, other "
        "packages, and what bounds them on this machine: matrix products alone, and moving the bytes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint for the section model (default: shapes of known models)",
    )
    add_flags(parser, BenchmarkOptions)
    parser.set_defaults(run=run_benchmark)


def run_benchmark(arguments: argparse.Namespace) -> int:
    """`benchmark`: the flags become `BenchmarkOptions`."""
    from rich.console import Console

    from .evaluation.benchmark.runner import run_benchmark as run

    # Written to a file or a pipe there is no width to keep to; rich would assume 80.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 180
    options = from_arguments(BenchmarkOptions, arguments)
    return run(options, arguments.source, console=Console(file=sys.stdout, width=wide))[1]
