"""Command-line arguments and YAML files for dataclass configs, read by jsonargparse.

A config is a frozen dataclass whose fields are made by `option`. Fields that are dataclasses are sections: the field
`max_length` of the section `data` is `--data.max_length` on the command line, and `max_length` under `data:` in YAML.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from .formatting import near_matches
from .options import OptionError, to_dict

Config = TypeVar("Config")

#: Errors of a user's input or surroundings: one line without a traceback.
EXPECTED_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError)

#: How the help shows a value of a type, and what error messages call it.
TYPES = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a finite number"),
    bool: ("", "true or false"),
    str: ("TEXT", "text"),
    dict: ("MAPPING", "a mapping such as {key: value}"),
}

#: Columns of the help, where the terminal has as many.
HELP_WIDTH = 100


class UsageError(ValueError):
    """A command line or a YAML file that cannot be read as the config."""


@dataclass(frozen=True)
class _Option:
    """One option: its type without None, and what `--help` says. Without a type it is a key of a mapping."""

    hint: Any = Any
    optional: bool = True
    default: Any = None
    help: str = ""
    common: bool = False

    @property
    def kind(self) -> Any:
        """The type without its arguments: tuple for a list, dict for a mapping, Literal for a choice."""
        return get_origin(self.hint) or self.hint

    @property
    def names(self) -> tuple[str, str]:
        """How the help shows a value, and what error messages call it."""
        entries = get_args(self.hint)
        if self.kind is Literal:
            return "{" + ",".join(map(str, entries)) + "}", f"one of {', '.join(map(repr, entries))}"
        if self.kind is tuple:
            return f"{TYPES[entries[0]][0]} ...", f"a list, each entry {TYPES[entries[0]][1]}"
        return TYPES[self.kind]

    @property
    def help_text(self) -> str:
        default = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        if default in (MISSING, None, {}, "") or default is False or "default" in self.help:
            return self.help
        return f"{self.help} (default: {default})"


Options = Mapping[str, _Option]
"""Dotted name -> option."""


def _options(config_class: type, prefix: str = "", base: Any = None) -> dict[str, _Option]:
    """All options of a config class by dotted name; `base` holds the defaults that the parent chose for a section."""
    hints = get_type_hints(config_class)
    options: dict[str, _Option] = {}
    for entry in (entry for entry in fields(config_class) if entry.init):
        hint = hints[entry.name]
        types = [part for part in get_args(hint) if part is not NoneType]
        optional = NoneType in get_args(hint)
        default: Any = entry.default if entry.default_factory is MISSING else entry.default_factory()
        default = default if base is None else getattr(base, entry.name)
        if is_dataclass(hint):
            options.update(_options(hint, f"{prefix}{entry.name}.", None if default is MISSING else default))  # type: ignore[arg-type]
        else:
            options[prefix + entry.name] = _Option(
                types[0] if optional else hint,
                optional,
                default,
                entry.metadata.get("help", ""),
                entry.metadata.get("common", False),
            )
    return options


def _find(name: str, options: Options, location: str, dashes: str = "") -> _Option:
    """The option of a dotted name, or of a key of a mapping. A UsageError at `location` suggests similar names."""
    if name in options:
        return options[name]
    parts = name.split(".")
    parents = [options.get(".".join(parts[:count])) for count in range(1, len(parts))]
    if any(parent is not None and parent.kind is dict for parent in parents):
        return _Option()
    same_name = [repr(dashes + known) for known in options if known.rpartition(".")[2].startswith(parts[-1])]
    suggestion = f" Did you mean {' or '.join(same_name[:3])}?" if same_name else ""
    suggestion = suggestion or near_matches(dashes + name, [dashes + known for known in options]) or " See --help all."
    raise UsageError(f"{location}unknown option {dashes + name if dashes else repr(name)}.{suggestion}")


#: Options of every command.
GENERAL = {
    "config": _Option(str, help="YAML file with options; flags override it"),
    "print_config": _Option(bool, help="print the config as YAML and exit"),
    "traceback": _Option(bool, help="show the traceback of an error"),
}


def parse_config(
    config_class: type[Config],
    arguments: Sequence[str],
    *,
    program: str,
    description: str = "",
    examples: str = "",
    positionals: Sequence[str] = (),
) -> Config:
    """Read a config from command-line arguments and from the YAML files of `--config`, which the arguments override.

    A flag is `--section.name VALUE` or `--section.name=VALUE`; dashes and underscores are the same. A list takes
    several values, or one with commas; a flag of a list that is repeated adds to it. A boolean flag needs no value.
    `--print_config` prints the config as YAML. `--help` shows the options marked `common`, `--help all` all of them,
    between a description and examples. Values of `positionals` may be given without their flags, in this order.

    Raises:
        UsageError: An unknown option (with near matches), a missing value, or a value of the wrong type.
        ValueError: The config refuses its values.
        SystemExit: The help or the config was printed.
    """
    from jsonargparse import ArgumentParser, Namespace

    options = _options(config_class)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_help(options, program, description, examples, positionals, full="all" in arguments))
        raise SystemExit(0)
    flags = list(_flag_values(arguments, options, positionals))
    files = [file for name, file in flags if name == "config"]
    values = [value for file in files for value in _file_values(_read_yaml(file), options, file)]
    values += [(name, value) for name, value in flags if name not in GENERAL]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config_class)
    for name, entry in options.items():
        if entry.default is MISSING and name not in dict(values):
            raise UsageError(f"{name.upper() if name in positionals else f'--{name}'} is missing. See --help.")
    nested = Namespace()
    for name, value in values:
        nested[name] = value
    try:
        namespace = parser.parse_object(nested.as_dict())
    except argparse.ArgumentError as error:
        match = re.search(r'key "([\w.]+)":.*(?:Got|Given) value: (.*)', str(error), re.DOTALL)
        if match is None or match[1] not in options:
            raise UsageError(str(error)) from error
        raise OptionError(match[1], f"must be {options[match[1]].names[1]}, got {match[2]!r}.") from error
    config = _build(config_class, vars(namespace))
    if ("print_config", "true") in flags:
        sys.stdout.write(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
        raise SystemExit(0)
    return config


def _build(config_class: type[Config], values: Mapping[str, Any], section: str = "") -> Config:
    """Return the config with its sections; an OptionError of a section names it."""
    hints = get_type_hints(config_class)
    arguments = {
        name: _build(hints[name], vars(value), f"{section}{name}.") if is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    try:
        return config_class(**arguments)
    except OptionError as error:
        raise OptionError(f"{section}{error.field}", error.text) from None


def _flag_values(arguments: Sequence[str], options: Options, positionals: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the flags: of a list all its entries, of a mapping a dict, of others the text."""
    known = {**options, **GENERAL}
    lists: dict[str, list[str]] = {}
    unfilled = list(positionals)
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            if not unfilled or re.match(r"-[A-Za-z]", argument):
                raise UsageError(f"unexpected argument {argument!r}. Options are given as --name value.")
            yield unfilled.pop(0), argument
            continue
        flag, equals, text = argument[2:].partition("=")
        name = flag.replace("-", "_")
        entry = _find(name, known, "", "--")
        following = list(takewhile(lambda value: not value.startswith("--"), remaining))
        if entry.kind is bool and not equals and following[:1] not in (["true"], ["false"], ["null"]):
            yield name, "true"
            continue
        values = [text] if equals else following if entry.kind is tuple else following[:1]
        del remaining[: 0 if equals else len(values)]
        if not values:
            raise UsageError(f"--{name} needs a value.")
        if entry.kind is tuple and values[0] != "null" and not values[0].lstrip().startswith("["):
            lists.setdefault(name, []).extend(item for value in values for item in value.split(",") if item)
        else:
            yield name, _mapping(name, values[0]) if entry.kind is dict else values[0]
    yield from lists.items()


def _mapping(name: str, value: Any) -> dict[str, Any]:
    loaded = yaml.safe_load(value) if isinstance(value, str) else value
    if not isinstance(loaded, dict):
        text = f"must be {TYPES[dict][1]}, got {value!r}. One key is given as --{name}.KEY VALUE."
        raise OptionError(name, text)
    return loaded


def _read_yaml(file: str) -> dict[str, Any]:
    from jsonargparse import get_loader

    if not Path(file).is_file():
        raise UsageError(f"--config: there is no file {file!r}.")
    try:
        # This loader reads 1e-3, which YAML 1.1 takes for text, as a number.
        content = get_loader("yaml")(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--config: {file!r} is not YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(content, dict | None):
        raise UsageError(f"--config: {file!r} must hold options such as 'data:', not a {type(content).__name__}.")
    return content or {}


def _file_values(values: Mapping[str, Any], options: Options, file: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of the options in a YAML file. A section without lines says nothing."""
    for key, value in values.items():
        name = f"{prefix}{key}".replace("-", "_")
        if name not in options and any(known.startswith(f"{name}.") for known in options):
            if not isinstance(value, Mapping | None):
                raise UsageError(f"{file}: {name!r} is a section. Give its options by name, got {value!r}.")
            yield from _file_values(value or {}, options, file, f"{name}.")
            continue
        entry = _find(name, options, f"{file}: ")
        if value is None and not entry.optional:
            raise UsageError(f"{file}: {name} must be {entry.names[1]}, got null.")
        yield name, _mapping(name, value) if entry.kind is dict and value is not None else value


def exit_code(command: Callable[[], int], *, traceback: bool = False) -> int:
    """Run a command and return its exit code: expected errors become one line on stderr.

    That is the command's own exit code, or 1 for an expected error (which `traceback` raises instead), 2 for a
    UsageError or an OptionError, 130 for Ctrl-C.
    """
    try:
        return command()
    except SystemExit as finished:
        return finished.code if isinstance(finished.code, int) else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Without this, the interpreter would report the error again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EXPECTED_ERRORS as error:
        if traceback:
            raise
        is_option = isinstance(error, OptionError)
        sys.stderr.write(f"error: {'--' if is_option else ''}{' '.join(str(error).split())}\n")
        return 2 if is_option or isinstance(error, UsageError) else 1
    except RuntimeError as error:
        code = getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        # Training was stopped by a signal, after a checkpoint.
        sys.stderr.write(f"{error}\n")
        return code


def _help(options: Options, prog: str, description: str, examples: str, positionals: Sequence[str], full: bool) -> str:
    """The help; the short one shows the options that are marked `common`, or all if none is."""
    shown = {name: entry for name, entry in options.items() if full or entry.common} or options
    width = min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 0)).columns)
    arguments = "".join(f" [{name.upper()}]" for name in positionals)
    parser = argparse.ArgumentParser(
        usage=f"{prog}{arguments} [--config FILE.yaml] [--option VALUE ...]",
        description=description,
        epilog=examples,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=37, width=width),
        add_help=False,
    )
    groups: dict[str, Any] = {}
    for name, entry in [*shown.items(), *GENERAL.items()]:
        section = name.rpartition(".")[0] if full else ""
        title = f"options of the section {section!r}" if section else "options"
        title = "every command" if name in GENERAL else title
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        value: dict[str, Any] = {"action": "store_true"} if entry.kind is bool else {"metavar": entry.names[0]}
        group.add_argument(f"--{name}", help=entry.help_text.replace("%", "%%"), **value)
    if len(shown) < len(options):
        hidden = len(options) - len(shown)
        group.add_argument("--help all", action="store_true", help=f"show the {hidden} other options, too")
    return parser.format_help()
