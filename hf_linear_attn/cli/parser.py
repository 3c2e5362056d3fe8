"""Configs from flags and YAML files, read by jsonargparse.

A config is a dataclass whose fields are made by `option`. Fields that are dataclasses are sections: the field
`max_length` of the section `data` is `--data.max_length` on the command line, and `max_length` under `data:` in YAML.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser

from ..utils.formatting import near_matches
from ..utils.options import OptionError, build_config, default_of, without_none

Config = TypeVar("Config")

#: A flag or a key that jsonargparse does not know, in its messages.
UNKNOWN = re.compile(r"unrecognized arguments: --([\w.-]+)|Option '([\w.-]+)' is not accepted")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(120, shutil.get_terminal_size().columns - 2))


def parse_config(
    config_class: type[Config],
    arguments: Sequence[str],
    *,
    program: str,
    description: str = "",
    examples: str = "",
    positionals: Sequence[str] = (),
) -> Config:
    """Read a config from command-line arguments and the YAML file of `--config`; what stands later overrides.

    A list takes several values, a boolean flag needs none, and a key of a mapping is `--options.key VALUE`. Options in
    `positionals` are given without a flag. `--print_config` prints the options as YAML. Of a section whose field is
    `brief`, `--help` names the options in one line.

    Raises:
        argparse.ArgumentError: A missing or unexpected argument, or a file that cannot be read.
        OptionError: An unknown option, with near matches, or a value that the config refuses.
        SystemExit: The help or the options were printed.
    """
    usage = f"{program}{''.join(f' {name.upper()}' for name in positionals)} [--config FILE] [--option VALUE ...]"
    style: dict[str, Any] = {"usage": usage, "description": description, "epilog": examples}
    parser = ArgumentParser(**style, formatter_class=_HelpFormatter, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help="YAML file with options")
    # What the help hides, --print_config would leave out.
    brief = bool({"-h", "--help"} & {*arguments})
    names = [*_add_options(parser, config_class, positionals, brief=brief)]
    flags = [re.sub(r"^--[^=]*", lambda flag: "--" + flag[0][2:].replace("-", "_"), text) for text in arguments]
    try:
        values = parser.parse_args(flags).as_dict()
    except argparse.ArgumentError as error:
        unknown = UNKNOWN.search(str(error))
        if unknown is None:
            raise
        name = unknown[1] or unknown[2]
        last = name.rpartition(".")[2]
        same = [f"--{option}" for option in names if option.rpartition(".")[2] == last]
        suggestion = near_matches(f"--{name}", same or [f"--{option}" for option in names])
        raise OptionError(name, f"unknown option.{suggestion or ' See --help.'}") from None
    return build_config(config_class, {name: value for name, value in values.items() if name != "config"})


def _add_options(
    parser: Any, config_class: Any, positionals: Sequence[str] = (), section: str = "", base: Any = None, **how: bool
) -> Iterator[str]:
    """Add the options of a config class, and yield their dotted names. `base` has the defaults, if given."""
    hints = get_type_hints(config_class)
    for entry in (entry for entry in fields(config_class) if entry.init):
        name = f"{section}.{entry.name}".lstrip(".")
        kind, _ = without_none(hints[entry.name])
        default = default_of(config_class, entry.name) if base is None else getattr(base, entry.name)
        if is_dataclass(kind):
            hidden = how["brief"] and bool(entry.metadata.get("brief"))
            if hidden:
                listed = f"{entry.metadata['help']}: {', '.join(field.name for field in fields(kind))}"
                parser.add_argument_group(f"--{name}.OPTION VALUE", textwrap.fill(listed, 110))
            yield from _add_options(parser, kind, (), name, default, brief=how["brief"], hidden=hidden)
            continue
        settings: dict[str, Any] = {"type": hints[entry.name], "metavar": _metavar(kind)}
        if get_origin(kind) is tuple:
            # A list of numbers may be written as in YAML, too; its entries are checked with all values.
            settings |= {"type": str if get_args(kind)[0] is str else Any, "nargs": "*"}
            default = list(default) if isinstance(default, tuple) else default
        elif kind is bool:
            settings |= {"nargs": "?", "const": True}
        text = entry.metadata.get("help", "")
        is_empty = default is MISSING or default is None or default is False or default in ("", {}, [])
        if not is_empty and "default" not in text:
            text += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
        settings["help"] = argparse.SUPPRESS if how.get("hidden") else text.replace("%", "%%")
        if name in positionals:
            parser.add_argument(name, **settings | {"metavar": name.upper()}).required = default is MISSING
        elif default is MISSING:
            parser.add_argument(f"--{name}", required=True, **settings)
        else:
            parser.add_argument(f"--{name}", default=default, **settings)
        yield name


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    kind = get_args(kind)[0] if get_origin(kind) is tuple else get_origin(kind) or kind
    return {str: "TEXT", dict: "MAPPING"}.get(kind, kind.__name__.upper())
