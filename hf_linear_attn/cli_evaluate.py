"""The verb `evaluate` of the command line. Reading its flags loads neither torch nor transformers."""

from __future__ import annotations

import argparse
from typing import Any

from .cli_fields import add_flags, from_arguments
from .evaluation.options import EvaluateOptions

EXAMPLES = """\
examples:
  hf-linear-attn evaluate gpt2 --text mine.txt --length 4096 --output report
  hf-linear-attn evaluate ./bert-sst2 --task sst2 --attention hedgehog window --seeds 0 1 2
  hf-linear-attn evaluate ./bert-sst2 --task sst2 --converted run0/model run1/model --baseline run0/control
  hf-linear-attn evaluate ./bert-sst2 --task sst2 rte=./bert-rte mrpc=./bert-mrpc --attention hedgehog
  hf-linear-attn evaluate ./encoder --sts glue --text mine.txt --batch 32 --dtype bfloat16
  hf-linear-attn evaluate gpt2 --text mine.txt --attention gla --output report --append

Every measurement is on disk at once. Ctrl-C stops; the same command with --append goes on.
"""


def add_evaluate_verb(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add `evaluate` to the verbs; its flags are the fields of `EvaluateOptions`."""
    parser = verbs.add_parser(
        "evaluate",
        parents=[common],
        help="quality against speed of a model with linear attention, in one report",
        description="Measure a model with each mechanism beside its exact attention: quality, speed, memory; write a "
        "report that says whether it is worth it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="MODEL", help="a local folder or a repository on the Hub")
    add_flags(parser, EvaluateOptions)
    parser.set_defaults(run=run_evaluate)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """`evaluate`: the flags become `EvaluateOptions`."""
    from .evaluation.runner import run_evaluate as run

    run(arguments.source, from_arguments(EvaluateOptions, arguments))
    return 0
