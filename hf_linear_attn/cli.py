"""The command `hf-linear-attn`: list, patch, info, convert, finetune, evaluate, plan, demo, env.

Only what a verb needs is imported, when it runs: `--help` and `--version` load neither torch nor transformers.

Exit codes: 0 done; 1 an expected error, told in one line on stderr; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cli_evaluate import add_evaluate_verb
from .cli_plan import add_plan_verb
from .version import __version__

if TYPE_CHECKING:
    from .patching import PatchReport

PROGRAM = "hf-linear-attn"
DTYPES = ("auto", "float32", "float16", "bfloat16")
LAYER_LIST = re.compile(r"-?\d+(,-?\d+)*")

EXAMPLES = """\
examples:
  hf-linear-attn list                                         all mechanisms
  hf-linear-attn list favor+                                  one of them, with its options
  hf-linear-attn patch bert-base-uncased out --attention hedgehog
  hf-linear-attn info out
  hf-linear-attn convert ./bert-sst2 --data.task sst2 --run.output out
  hf-linear-attn evaluate gpt2 --text mine.txt --length 4096
  hf-linear-attn plan gpt2 --budget "2% perplexity"
  hf-linear-attn demo
"""

PATCH_EXAMPLES = """\
examples:
  hf-linear-attn patch ./bert out --attention hedgehog
  hf-linear-attn patch ./bert out --attention favor+ --option num_features=128 --option seed=1
  hf-linear-attn patch ./llama out --attention window --layers 0,1,-1 --dtype bfloat16
  hf-linear-attn patch ./llama out --plan plan.json
  hf-linear-attn patch ./bert out --attention hedgehog --max-length 4096

plan.json (or plan.yaml) holds one mechanism a layer, for example
  {"default": "hedgehog", "0": "softmax", "-1": {"attention": "window", "window_size": 128}}

DST appears whole or not at all. Load it with hf_linear_attn.load_pretrained("DST").
"""


TRAIN_EXAMPLES = {
    "convert": """\
examples:
  hf-linear-attn convert ./bert-sst2 --data.task sst2 --run.output out
  hf-linear-attn convert ./bert --teacher.epochs 3 --data.source reviews.csv --data.text review --run.output out
  hf-linear-attn convert gpt2 --kind causal-lm --data.source wiki.txt --run.output out
  hf-linear-attn convert --config recipe.yaml --distill.lr 1e-4
  accelerate launch -m hf_linear_attn convert --config recipe.yaml
""",
    "finetune": """\
examples:
  hf-linear-attn finetune ./bert --data.task rte --data.folder ./glue --run.output out
  hf-linear-attn finetune ./bert --data.task rte --model.attention hedgehog --run.output out
  accelerate launch -m hf_linear_attn finetune --config recipe.yaml
""",
}

TRAIN_NOTES = """\
Every setting below is also a key of the YAML file of --config: `--data.task sst2` there is `task: sst2` in the section
`data:`. The command line beats the file.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    verb = _command(given)
    parser = build_parser(verb, full_help=bool({"-h", "--help"} & set(given)))
    settings: list[str] = []
    if verb in TRAIN_EXAMPLES:
        given, settings = split_settings(given)
    try:
        arguments = parser.parse_args(_join_layer_lists(given))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        arguments.settings = settings
        return arguments.run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; nothing more can be told to it, not even while the interpreter closes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        if arguments.traceback:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1


def build_parser(verb: str | None = None, *, full_help: bool = False) -> argparse.ArgumentParser:
    """The parser. Some verbs read their flags from their options, which costs an import: only where they are needed."""
    raw = argparse.RawDescriptionHelpFormatter
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Replace the self-attention of a Transformers model by a linear-time mechanism.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    lister = verbs.add_parser("list", parents=[common], help="the mechanisms, or one of them with its options")
    lister.add_argument("name", nargs="?", metavar="NAME", help="show this mechanism and its options")
    lister.add_argument("--json", action="store_true", help="machine-readable output")
    lister.set_defaults(run=run_list)

    patch = verbs.add_parser(
        "patch",
        parents=[common],
        help="patch a checkpoint and save it",
        description="Load a model, replace its self-attention, and save it with its tokenizer files.",
        epilog=PATCH_EXAMPLES,
        formatter_class=raw,
    )
    _add_patch_flags(patch)
    patch.set_defaults(run=run_patch)

    info = verbs.add_parser(
        "info",
        parents=[common],
        help="what is patched in a checkpoint",
        description="Show the linear attention of a checkpoint, layer by layer. Weights are not loaded.",
    )
    info.add_argument("checkpoint", metavar="CHECKPOINT", help="a local folder or a repository on the Hub")
    info.add_argument("--json", action="store_true", help="machine-readable output")
    info.set_defaults(run=run_info)

    _add_training_verbs(verbs, common, verb if full_help else None)

    add_evaluate_verb(verbs, common)
    add_plan_verb(verbs, common)

    demo = verbs.add_parser(
        "demo",
        parents=[common],
        help="convert a small sentence encoder and report quality and speed",
        description="Convert a small model, and report quality and speed beside exact attention.",
    )
    if verb == "demo":
        from .cli_fields import add_flags
        from .demo import DemoOptions

        add_flags(demo, DemoOptions)
    demo.set_defaults(run=run_demo)

    env = verbs.add_parser("env", parents=[common], help="versions and hardware, for a bug report")
    env.set_defaults(run=run_env)
    return parser


def _add_training_verbs(verbs: Any, common: argparse.ArgumentParser, described: str | None) -> None:
    what = {
        "convert": "convert a fine-tuned model: attention transfer, distillation, a card with what it cost",
        "finetune": "train a model, exact or patched, on a task",
    }
    for name, text in what.items():
        parser = verbs.add_parser(
            name,
            parents=[common],
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=TRAIN_NOTES + TRAIN_EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            usage=f"{PROGRAM} {name} [MODEL] [--config FILE] [--SECTION.NAME VALUE ...]",
        )
        parser.add_argument("source", nargs="?", metavar="MODEL", help="the model (the same as --model.source)")
        parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
        parser.add_argument("--show", action="store_true", help="show the settings as they will be used, and stop")
        parser.set_defaults(run=run_training)
        if described == name:
            # For the help only: the settings are read by `read_arguments`, which knows them by sections.
            from .training.entry import settings_class
            from .training.settings import describe

            describe(parser, settings_class(name))


def _add_patch_flags(patch: argparse.ArgumentParser) -> None:
    patch.add_argument("source", metavar="SRC", help="a local folder or a repository on the Hub")
    patch.add_argument("target", metavar="DST", help="the folder to write")
    which = patch.add_mutually_exclusive_group(required=True)
    which.add_argument("--attention", metavar="NAME", help=f"the mechanism (see `{PROGRAM} list`)")
    which.add_argument("--plan", metavar="FILE", help="JSON or YAML file with a mechanism for each layer")
    patch.add_argument(
        "--layers", type=_layer_list, metavar="I,J,…", help="layers to patch, negative ones from the end (default: all)"
    )
    patch.add_argument(
        "--option",
        action="append",
        default=[],
        type=_key_value,
        metavar="KEY=VALUE",
        help=f"option of the mechanism (see `{PROGRAM} list NAME`); the value is JSON, or else text; repeatable",
    )
    patch.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest input in tokens: learned positions are extended to it, and the tokenizer's limit follows; "
        "mechanisms built for a largest length get it as their option",
    )
    patch.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the weights (default: as saved)")
    patch.add_argument(
        "--auto-class",
        metavar="CLASS",
        help="class to load, such as AutoModelForCausalLM (default: the one that the config names)",
    )
    patch.add_argument("--revision", help="branch, tag or commit of a repository on the Hub")
    patch.add_argument("--force", action="store_true", help="replace DST if it holds a checkpoint already")


# --------------------------------------------------------------------------------------------------------------------
# Reading arguments


def _command(given: Sequence[str]) -> str | None:
    return next((word for word in given if not word.startswith("-")), None)


def _join_layer_lists(given: Sequence[str]) -> list[str]:
    """`--layers -1,0` as `--layers=-1,0`: argparse would take the list for an option."""
    joined: list[str] = []
    for word in given:
        if joined and joined[-1] == "--layers" and LAYER_LIST.fullmatch(word):
            joined[-1] = f"--layers={word}"
        else:
            joined.append(word)
    return joined


def split_settings(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--section.name value` (and `--kind value`) out: argparse would take their values for positional words."""
    kept: list[str] = []
    settings: list[str] = []
    words = list(given)
    while words:
        word = words.pop(0)
        name = word.partition("=")[0]
        if not (name.startswith("--") and ("." in name or name == "--kind")):
            kept.append(word)
            continue
        settings.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            settings.append(words.pop(0))
    return kept, settings


def _layer_list(text: str) -> list[int]:
    if not LAYER_LIST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected layer indices such as 0,1,-1, got {text!r}")
    return [int(index) for index in text.split(",")]


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE such as num_features=128, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


# --------------------------------------------------------------------------------------------------------------------
# Verbs


def run_list(arguments: argparse.Namespace) -> int:
    """`list`: all mechanisms as a table, or one with its options."""
    from .registry import ATTENTIONS, list_attentions

    known = list_attentions()
    if arguments.name is not None:
        ATTENTIONS.get(arguments.name)  # raises with near matches
        known = {arguments.name: known[arguments.name]}
    if arguments.json:
        sys.stdout.write(json.dumps(known, indent=2, ensure_ascii=False) + "\n")
    elif arguments.name is not None:
        sys.stdout.write(describe(arguments.name, known[arguments.name]))
    else:
        _write_table(known)
    return 0


def directions(entry: dict[str, Any]) -> str:
    """The directions of one entry of `list_attentions()`, in words."""
    if entry["causal"] and entry["bidirectional"]:
        return "both"
    return "causal" if entry["causal"] else "bidirectional"


def describe(name: str, entry: dict[str, Any]) -> str:
    """One mechanism, all that is known of it."""
    facts = [
        ("what", entry["description"]),
        ("when", entry["advice"]),
        ("directions", directions(entry)),
        ("learned", "yes" if entry["learned"] else "no"),
        ("state", entry["state"]),
        ("cost", entry["cost"]),
        ("paper", entry["paper"]),
    ]
    lines = [name, *(f"  {label:<11} {text}" for label, text in facts if text)]
    lines.append("options:" if entry["options"] else "options: none")
    for option, about in entry["options"].items():
        lines.append(f"  {option} = {json.dumps(about['default'], ensure_ascii=False)}")
        lines += textwrap.wrap(about["help"], 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _write_table(known: dict[str, dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "directions", "learned", "state", "paper", "when to choose"):
        table.add_column(column, no_wrap=column in ("name", "directions", "learned", "state"))
    for name, entry in known.items():
        learned = "yes" if entry["learned"] else "no"
        table.add_row(name, directions(entry), learned, entry["state"], entry["paper"], entry["advice"])
    # Written to a file or a pipe there is no width to keep to; rich would assume 80.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(file=sys.stdout, width=wide, highlight=False, markup=False).print(table)


def run_patch(arguments: argparse.Namespace) -> int:
    """`patch`: load, patch, save; DST appears whole or not at all."""
    from . import cli_checkpoints as checkpoints

    if arguments.plan is not None and (arguments.layers is not None or arguments.option):
        raise ValueError("--layers and --option go with --attention; with --plan, write them into the file.")
    options = dict(arguments.option)
    if len(options) < len(arguments.option):
        raise ValueError(f"--option names one of {', '.join(sorted(options))} twice.")
    checkpoints.check_target(arguments.source, arguments.target, force=arguments.force)
    plan = checkpoints.read_plan(arguments.attention, arguments.plan, arguments.layers, options)
    model = checkpoints.load_and_patch(
        arguments.source,
        plan,
        max_length=arguments.max_length,
        auto_class=arguments.auto_class,
        dtype=arguments.dtype,
        revision=arguments.revision,
    )
    report = checkpoints.save(
        model, arguments.source, arguments.target, revision=arguments.revision, force=arguments.force
    )
    sys.stdout.write(f"{report}\nSaved to {arguments.target}\n")
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """`info`: what is patched; reads the config only."""
    from . import cli_checkpoints as checkpoints

    found = checkpoints.inspect_checkpoint(arguments.checkpoint)
    report: PatchReport | None = found.pop("report")
    if arguments.json:
        from dataclasses import asdict

        found["layers"] = [] if report is None else [asdict(layer) for layer in report.layers]
        sys.stdout.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        return 0
    if report is None:
        sys.stdout.write(
            f"{arguments.checkpoint}: {found['model']} without linear attention. "
            f"Patch it with `{PROGRAM} patch {arguments.checkpoint} DST --attention NAME`.\n"
        )
        return 0
    sys.stdout.write(
        f"{report}\n"
        f"{'':>5}  {found['parameters']:,} parameters in all, saved as {found['dtype']}; "
        f"{found['state_bytes']:,} state bytes a stream\n"
        f"{'':>5}  format {found['format_version']}, written by hf-linear-attn {found['package_version']}\n"
    )
    return 0


def run_training(arguments: argparse.Namespace) -> int:
    """`convert` and `finetune`: YAML and dotted flags become settings."""
    from .training.entry import run_settings

    return run_settings(arguments.command, arguments.config, arguments.source, arguments.settings, show=arguments.show)


def run_demo(arguments: argparse.Namespace) -> int:
    """`demo`: the flags become `DemoOptions`."""
    from .cli_fields import from_arguments
    from .demo import DemoOptions
    from .demo import run_demo as run

    run(from_arguments(DemoOptions, arguments))
    return 0


def run_env(arguments: argparse.Namespace) -> int:
    """`env`: what a bug report needs."""
    from .cli_checkpoints import environment

    known = environment()
    width = max(map(len, known))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in known.items()))
    return 0
