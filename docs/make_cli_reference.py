"""Write docs/cli.md, the reference of the command line, from the configs of its verbs.

python docs/make_cli_reference.py            # some seconds
python docs/make_cli_reference.py --check    # writes nothing; exit code 1 if the page is out of date
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hf_linear_attn.cli import PROGRAM, VERBS, load_verb
from hf_linear_attn.cli.verb import Verb

PAGE = Path(__file__).resolve().parent / "cli.md"

INTRODUCTION = f"""# Command line

<!-- This page is written by docs/make_cli_reference.py. -->

`{PROGRAM} VERB --help` shows the options of a verb, of the stages of a training only their names. This page has all.

- Every option of a verb is a flag, and a key of a YAML file (`--config FILE`). What stands later counts. Options of a
  section have a dot in their flag (`--data.task`) and stand below the section's name in YAML. `MODEL`, `OUTPUT` and
  `NAME` have no flag.
- `--print_config` prints the options as YAML, and exits.
- A mapping takes one flag for each key: `--options.window_size 32`.
- A list takes several values: `--layers 0 1 -1`. `null` is no value.
- An output folder is new or empty. `--resume` continues an earlier result in it, `--overwrite` replaces it, and other
  files are never touched.
- `--traceback` shows the traceback of an error. Without it an expected error is one line.
- Exit codes: 0 is success, 1 an expected error or a budget that `plan` does not meet, 2 wrong usage,
  3 data that cannot measure a budget of quality, 130 an interruption.
"""

#: Verbs whose options others share.
REFERRED = ("convert", "evaluate")

TYPE_NAMES = {int: "integer", float: "number", bool: "boolean", str: "text", dict: "mapping"}


def main(arguments: list[str]) -> int:
    text = reference()
    if "--check" in arguments:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    described: dict[str, str] = {}
    for name in VERBS:
        parts.append(verb_reference(name, load_verb(name), described))
    return "\n".join(parts)


def verb_reference(name: str, verb: Verb, described: dict[str, str]) -> str:
    """A heading, the summary, the examples, and a table of options for each section.

    Args:
        name: Name of the verb.
        verb: The verb.
        described: Row of an option, without the name of its section -> where the page has it. An option with the same
            row is named only. Rows of the verbs in `REFERRED` are added.
    """
    parts = [f"## {name}", "", f"{verb.summary[0].upper()}{verb.summary[1:]}.", ""]
    commands = [line for line in verb.examples.splitlines() if line.startswith((PROGRAM, "accelerate"))]
    if commands:
        parts += ["```bash", *commands, "```", ""]
    sections: dict[str, list[str]] = {}
    same: dict[tuple[str, str], list[str]] = {}
    for section, row in rows(verb.config_class, verb.positionals):
        words = row.replace(f"--{section}.", "--")
        if words in described:
            same.setdefault((section, described[words]), []).append(option_name(row))
            continue
        sections.setdefault(section, []).append(row)
        if name in REFERRED:
            described[words] = f"[{name}](#{name})" + (f", section `{section}`" if section else "")
    for section, lines in sections.items():
        if section:
            parts += [f"**Section `{section}`**", ""]
        parts += ["| option | value (default) | meaning |", "| --- | --- | --- |", *lines, ""]
    for (section, other), names in same.items():
        prefix = f"--{section}." if section else "--"
        shared = [option_name(row) for row, where in described.items() if where == other]
        parts += [f"The same as in {other}: {listed_options(names, shared, prefix)}.", ""]
    return "\n".join(parts)


def option_name(row: str) -> str:
    """The name of the option of a row, without that of its section."""
    return row.split()[1].strip("`").removeprefix("--").rpartition(".")[2]


def listed_options(names: list[str], shared: list[str], prefix: str) -> str:
    """The options of another section that this one has, too, or the few that it has not."""
    missing = [f"`{name}`" for name in shared if name not in names]
    if len(missing) >= len(names) / 2:
        return ", ".join(f"`{name if name.isupper() else prefix + name}`" for name in names)
    other = f" but {', '.join(missing)}" if missing else ""
    return f"all options{other}, as `{prefix}NAME`"


def rows(config: type, positionals: tuple[str, ...] = (), section: str = "") -> Iterator[tuple[str, str]]:
    """The section and the table row of every option of a config; its own options come before its sections."""
    hints = get_type_hints(config)
    nested = []
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[field.name]):
            nested.append(field.name)
            continue
        flag = f"--{section}.{field.name}" if section else f"--{field.name}"
        flag = field.name.upper() if field.name in positionals else flag
        text = field.metadata.get("help", "").replace("|", "\\|")
        yield section, f"| `{flag}` | {value_name(hints[field.name])}{default(field)} | {text} |"
    for name in nested:
        yield from rows(hints[name], (), f"{section}.{name}" if section else name)


def value_name(hint: Any) -> str:
    """What a value of this type is called."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(value_name(part) for part in arguments if part is not NoneType))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list):
        return f"list: {value_name(arguments[0])}" if arguments else "list"
    return TYPE_NAMES.get(origin or hint, "text")


def default(field: dataclasses.Field[Any]) -> str:
    """The default as it is written in YAML, in brackets; empty where there is none or where the help tells it."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or value is None or value in ((), {}, []):
        return ""
    if isinstance(value, bool):
        return f" (`{str(value).lower()}`)"
    if isinstance(value, (tuple, list)):
        return f" (`{' '.join(str(item) for item in value)}`)"
    return f" (`{value}`)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
