"""The command `hf-linear-attn`. A verb is a config and a function, which are imported when the verb runs.

Exit codes: 0 done; 1 an expected error, in one line on stderr; 2 wrong usage; 130 interrupted.
"""

import importlib
import io
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .utils.arguments import exit_code, parse_config
from .utils.formatting import near_matches
from .utils.options import option
from .version import __version__

PROGRAM = "hf-linear-attn"


@dataclass(frozen=True)
class Verb:
    """One verb of the command line. Its config class and its function are `module:name`, relative to this package."""

    config: str
    function: str  # takes the config, and returns an exit code, or anything else for 0
    summary: str
    positionals: tuple[str, ...] = ()  # options that may be given without their flag
    examples: str = ""


VERBS = {
    "list": Verb(
        "cli:ListConfig",
        "cli:list_attentions",
        "list the attention mechanisms, or one of them with its options",
        ("name",),
        "hf-linear-attn list\nhf-linear-attn list favor+",
    ),
    "patch": Verb(
        "cli_checkpoints:PatchConfig",
        "cli_checkpoints:patch",
        "replace the attention of a checkpoint and save it, with its tokenizer",
        ("model", "output"),
        """\
hf-linear-attn patch ./bert out --attention hedgehog
hf-linear-attn patch ./bert out --attention favor+ --options.num_features 128 --options.seed 1
hf-linear-attn patch ./llama out --attention window --layers 0,1,-1 --dtype bfloat16
hf-linear-attn patch ./llama out --plan plan.json
hf-linear-attn patch ./bert out --attention hedgehog --max_length 4096

plan.json (or plan.yaml) names the mechanism of each layer, for example
  {"default": "hedgehog", "0": "softmax", "-1": {"attention": "window", "window_size": 128}}

The output folder appears completely or not at all. load_pretrained("out") loads it.""",
    ),
    "export": Verb(
        "export:ExportConfig",
        "export:export",
        "export a patched checkpoint to ONNX or torch.export, with a free batch and length",
        ("model", "output"),
        """\
hf-linear-attn export out onnx-out
hf-linear-attn export out pt2-out --format torch

A model that generates becomes two graphs: one for the prompt, one for each token after it.""",
    ),
    "info": Verb(
        "cli_checkpoints:InfoConfig",
        "cli_checkpoints:info",
        "show the linear attention of a checkpoint, layer by layer, without loading its weights",
        ("model",),
        "hf-linear-attn info out --json",
    ),
    "convert": Verb(
        "training.options:ConvertConfig",
        "study.convert:convert",
        "convert a fine-tuned model: attention transfer, distillation, a measured checkpoint with a card",
        ("model",),
        """\
hf-linear-attn convert ./bert-sst2 --data.task sst2 --output out
hf-linear-attn convert ./bert --teacher.num_train_epochs 3 --data.dataset reviews.csv --output out
hf-linear-attn convert gpt2 --task_type causal-lm --data.dataset wiki.txt --output out
hf-linear-attn convert --config recipe.yaml --distill.learning_rate 1e-4
accelerate launch -m hf_linear_attn convert --config recipe.yaml""",
    ),
    "finetune": Verb(
        "training.options:FinetuneConfig",
        "study.convert:finetune",
        "train a model, with exact or with linear attention, on a task",
        ("model",),
        """\
hf-linear-attn finetune ./bert --data.task rte --data.folder ./glue --output out
hf-linear-attn finetune ./bert --data.task rte --attention hedgehog --output out
accelerate launch -m hf_linear_attn finetune --config recipe.yaml""",
    ),
    "evaluate": Verb(
        "study.settings:EvaluateConfig",
        "study.evaluate:run_evaluate",
        "measure quality, speed and memory of a model with linear attention, in one report",
        ("model",),
        """\
hf-linear-attn evaluate gpt2 --data.dataset mine.txt --length 4096
hf-linear-attn evaluate ./bert-sst2 --data.task sst2 --attention hedgehog window --seeds 0 1 2
hf-linear-attn evaluate ./bert-sst2 --data.task sst2 --converted run0/model run1/model
hf-linear-attn evaluate ./bert-sst2 --data.task sst2 rte=./bert-rte --attention hedgehog
hf-linear-attn evaluate ./encoder --data.sts glue --speed.batch_size 32 --speed.dtype bfloat16
hf-linear-attn evaluate gpt2 --data.dataset mine.txt --attention elu gla --resume

Every record is on disk at once. Ctrl-C stops; the same command with --resume continues.""",
    ),
    "plan": Verb(
        "study.settings:PlanConfig",
        "study.plan:run_plan",
        "find which layers to convert under a budget of quality or speed",
        ("model",),
        """\
hf-linear-attn plan gpt2 --budget "2% perplexity" --data.dataset wiki.txt --output plan
hf-linear-attn plan gpt2 --budget "1.5x at 4096" --attention window --options.window_size 128
hf-linear-attn plan ./bert-sst2 --budget "0.5 points" --data.task sst2 --save_model out
hf-linear-attn patch gpt2 out --plan plan/plan.json

The exit code is 0 if the budget is met, 1 if it is not, and 3 if the data cannot judge it.""",
    ),
    "demo": Verb(
        "demo:DemoConfig",
        "demo:run_demo",
        "evaluate a small model: quality and speed of linear attention beside exact attention",
        ("model",),
        "hf-linear-attn demo\nhf-linear-attn demo smollm2\nhf-linear-attn demo ./llama --data.dataset mine.txt --full",
    ),
    "env": Verb("cli:EnvConfig", "cli:show_environment", "show versions and hardware, for a bug report"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that lack characters such as → and ×
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv or argv[0] in ("-h", "--help"):
        (sys.stdout if argv else sys.stderr).write(overview())
        return 0 if argv else 2
    name, *rest = argv
    if name == "--version":
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    if name not in VERBS:
        kind = "option" if name.startswith("-") else "verb"
        suggestion = near_matches(name, VERBS) or f" Verbs: {', '.join(VERBS)}."
        sys.stderr.write(f"error: unknown {kind} {name!r}.{suggestion}\n")
        return 2

    def run() -> int:
        config = parse_verb(name, rest)  # first: the help must not load the verb's module, which imports torch
        result = _resolve(VERBS[name].function)(config)
        return result if isinstance(result, int) else 0

    return exit_code(run, traceback="--traceback" in rest)


def parse_verb(name: str, arguments: Sequence[str]) -> Any:
    """Return the config of a verb from its arguments. Errors as `parse_config`."""
    verb = VERBS[name]
    return parse_config(
        _resolve(verb.config),
        arguments,
        program=f"{PROGRAM} {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        examples=f"examples:\n{textwrap.indent(verb.examples, '  ')}" if verb.examples else "",
        positionals=verb.positionals,
    )


def with_default_config(arguments: Sequence[str] | None, default_config: str) -> list[str]:
    """Return the arguments (None: those of the process) with the YAML file of a recipe, unless they name another."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    is_named = any(argument == "--config" or argument.startswith("--config=") for argument in argv)
    return argv if is_named else ["--config", default_config, *argv]


def run_recipe(verb: str, default_config: str, arguments: Sequence[str] | None = None) -> int:
    """Run a verb with the YAML file of a recipe, or with the one that the arguments name, and return the exit code."""
    return main([verb, *with_default_config(arguments, default_config)])


def overview() -> str:
    """The help of the command as a whole: its verbs."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return f"""\
usage: {PROGRAM} VERB [arguments] | --version

Replace the self-attention of a Transformers model by a linear-time mechanism.

verbs:
{verbs}

examples:
  hf-linear-attn list favor+
  hf-linear-attn patch bert-base-uncased out --attention hedgehog
  hf-linear-attn convert ./bert-sst2 --data.task sst2 --output out
  hf-linear-attn demo

`{PROGRAM} VERB --help` shows the options that matter first, `--help all` every option.
"""


def _resolve(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


@dataclass(frozen=True)
class ListConfig:
    """Options of `list`."""

    name: str | None = option(None, "show this mechanism with its options", common=True)
    json: bool = option(False, "print JSON", common=True)


@dataclass(frozen=True)
class EnvConfig:
    """`env` has no options."""


def list_attentions(config: ListConfig) -> None:
    """Print all mechanisms as a table, or one of them with its options."""
    from . import registry

    entries = registry.list_attentions()
    if config.name is not None:
        registry.ATTENTIONS.get(config.name)  # raises with near matches
        entries = {config.name: entries[config.name]}
    if config.json:
        sys.stdout.write(json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
    elif config.name is not None:
        sys.stdout.write(describe(config.name, entries[config.name]))
    else:
        _print_table(entries)


def directions(entry: dict[str, Any]) -> str:
    """Return the directions of one entry of `list_attentions()` as a word."""
    if entry["causal"] and entry["bidirectional"]:
        return "both"
    return "causal" if entry["causal"] else "bidirectional"


def describe(name: str, entry: dict[str, Any]) -> str:
    """Return the description of one mechanism with its options."""
    facts = {
        "what": entry["description"],
        "when": entry["recommendation"],
        "directions": directions(entry),
        "learned": "yes" if entry["learned"] else "no",
        "state": entry["state"],
        "cost": entry["cost"],
        "paper": entry["paper"],
    }
    lines = [name, *(f"  {label:<11} {text}" for label, text in facts.items() if text)]
    lines.append("options:" if entry["options"] else "options: none")
    for option_name, details in entry["options"].items():
        lines.append(f"  {option_name} = {json.dumps(details['default'], ensure_ascii=False)}")
        lines += textwrap.wrap(details["help"], 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _print_table(entries: dict[str, dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    short = [Column(title, no_wrap=True) for title in ("name", "directions", "learned", "state")]
    table = Table(*short, "paper", "when to choose", box=SIMPLE_HEAD, pad_edge=False)
    for name, entry in entries.items():
        learned = "yes" if entry["learned"] else "no"
        table.add_row(name, directions(entry), learned, entry["state"], entry["paper"], entry["recommendation"])
    # rich assumes 80 columns where the output is a file or a pipe.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    Console(file=sys.stdout, width=width, highlight=False, markup=False).print(table)


def show_environment(config: EnvConfig) -> None:
    """Print the versions and the hardware that a bug report needs."""
    from .ops.native.backend import unavailable_reason
    from .ops.native.build import library_path
    from .utils.environment import package_versions

    reason = unavailable_reason()
    kernels = f"none: {reason}" if reason is not None else "native, {}: {}".format(*library_path())
    versions = {**package_versions(), "kernels": kernels}
    width = max(map(len, versions))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in versions.items()))
