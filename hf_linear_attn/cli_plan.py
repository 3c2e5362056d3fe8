"""The verb `plan` of the command line. Reading its flags loads neither torch nor transformers."""

from __future__ import annotations

import argparse
from typing import Any

from .cli_fields import add_flags, from_arguments
from .plan import PlanOptions

EXAMPLES = """\
examples:
  hf-linear-attn plan gpt2 --budget "2% perplexity" --text wiki.txt --out plan
  hf-linear-attn plan gpt2 --budget "1.5x at 4096" --attention window --option window_size=128
  hf-linear-attn plan ./bert-sst2 --budget "0.5 points" --task sst2 --save-model out
  hf-linear-attn patch gpt2 out --plan plan/plan.json

Exit code 0: the budget is kept; 1: it is not, and the report says what is within reach.
"""


def add_plan_verb(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add `plan` to the verbs; its flags are the fields of `PlanOptions`."""
    parser = verbs.add_parser(
        "plan",
        parents=[common],
        help="find which layers to convert under a budget of quality or speed",
        description="Measure what converting each layer costs and brings, and write the plan that keeps a budget.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="MODEL", help="a local folder or a repository on the Hub")
    add_flags(parser, PlanOptions)
    parser.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace) -> int:
    """`plan`: the flags become `PlanOptions`; 1 where the budget is not met."""
    from .plan import run_plan as run

    report = run(arguments.source, from_arguments(PlanOptions, arguments))
    return 0 if report["choice"]["met"] else 1
