"""The command `hf-linear-attn`. A verb is a module of this package, which is imported when the verb runs.

Exit codes: 0 done; 1 an expected error, in one line on stderr, or a budget that `plan` does not meet; 2 wrong usage;
3 data that cannot measure one; 130 interrupted (143 by SIGTERM).
"""

import importlib
import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..utils.formatting import near_matches
from ..version import __version__
from .verb import Verb

PROGRAM = "hf-linear-attn"

#: The module of each verb. A module called `list` would hide the function.
VERBS = {"list": "listing"} | {
    name: name
    for name in ("patch", "export", "serve", "info", "convert", "finetune", "evaluate", "plan", "demo", "env")
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
    from .running import exit_code

    options = [argument for argument in rest if argument != "--traceback"]
    return exit_code(lambda: _run_verb(name, options), traceback=options != rest)


def _run_verb(name: str, arguments: Sequence[str]) -> int:
    """Run a verb and return its exit code. A model that is not there is an error before torch is loaded."""
    from ..utils.sources import read_config_file

    verb, config = load_verb(name), parse_verb(name, arguments)
    if "model" in verb.positionals and config.model is not None:
        read_config_file(config.model, vars(config).get("revision"))
    return verb.run(config) or 0


def load_verb(name: str) -> Verb:
    """Return the verb of a name."""
    return importlib.import_module(f".{VERBS[name]}", __package__).VERB


def parse_verb(name: str, arguments: Sequence[str]) -> Any:
    """Return the config of a verb from its arguments. Errors as `parse_config`."""
    from .parser import parse_config

    verb = load_verb(name)
    return parse_config(
        verb.config_class,
        arguments,
        program=f"{PROGRAM} {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        examples=f"examples:\n{textwrap.indent(verb.examples, '  ')}" if verb.examples else "",
        positionals=verb.positionals,
    )


def with_default_config(arguments: Sequence[str] | None, default_config: str | Path) -> list[str]:
    """Return the arguments (None: those of the process) with the YAML file of a recipe, unless they name another."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    is_named = any(argument == "--config" or argument.startswith("--config=") for argument in argv)
    return argv if is_named else ["--config", str(default_config), *argv]


def overview() -> str:
    """The help of the command as a whole: its verbs."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {load_verb(name).summary}" for name in VERBS)
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

`{PROGRAM} VERB --help` shows the options of a verb.
"""
