"""Command-line arguments and YAML files for dataclass configs, read by jsonargparse.

A config is a frozen dataclass whose fields are made by `option`. Fields that are dataclasses are sections: the field
`max_length` of the section `data` is `--data.max_length` on the command line, and `max_length` under `data:` in YAML.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .formatting import near_matches

Config = TypeVar("Config")

#: Errors of a user's input or surroundings: one line without a traceback.
EXPECTED_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError)

#: Flags of every command beside the fields of its config.
COMMON_FLAGS = ("config", "print_config", "help", "help_all", "traceback")

_TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", dict: "a mapping"}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", dict: "MAPPING"}


class UsageError(ValueError):
    """A command line or a YAML file that cannot be read as the config."""


def option(default: Any = MISSING, help: str = "", *, common: bool = False, factory: Any = MISSING) -> Any:
    """Return a dataclass field that is an option of a command.

    Args:
        default: The default value. Without one (and without `factory`) the option is required.
        help: One line for `--help`.
        common: Whether the short `--help` shows the option. `--help all` shows every option.
        factory: Makes the default value, where it is mutable or a section.
    """
    metadata = {"help": help, "common": common}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_positive(section: str, config: Any, *names: str) -> None:
    """Raise a ValueError that names the option unless each of these fields is positive or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{section}{name} must be positive, got {value!r}.")


def check_not_negative(section: str, config: Any, *names: str) -> None:
    """Raise a ValueError that names the option unless each of these fields is at least 0 or None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{section}{name} must not be negative, got {value!r}.")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts and lists, the way a YAML file holds it."""
    return {entry.name: _yaml_value(getattr(config, entry.name)) for entry in fields(config)}


def _yaml_value(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _yaml_value(item) for key, item in value.items()}
    return [_yaml_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys. An empty dict is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# --------------------------------------------------------------------------------------------------------------------
# The options of a config


@dataclass(frozen=True)
class _Option:
    """One option: its type without None, and what `--help` says."""

    hint: Any
    optional: bool
    default: Any
    help: str
    common: bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) in (tuple, list)

    @property
    def is_mapping(self) -> bool:
        return self.hint is dict or get_origin(self.hint) is dict

    @property
    def expected(self) -> str:
        """What a value must be, for error messages."""
        if get_origin(self.hint) is Literal:
            return f"one of {', '.join(map(repr, get_args(self.hint)))}"
        if self.is_list:
            return f"a list, each entry {_TYPE_NAMES.get(get_args(self.hint)[0], 'text')}"
        return _TYPE_NAMES.get(dict if self.is_mapping else self.hint, str(self.hint))

    @property
    def metavar(self) -> str:
        if get_origin(self.hint) is Literal:
            return "{" + ",".join(map(str, get_args(self.hint))) + "}"
        if self.is_list:
            return f"{_METAVARS.get(get_args(self.hint)[0], 'TEXT')} ..."
        return "[true|false]" if self.hint is bool else _METAVARS.get(dict if self.is_mapping else self.hint, "VALUE")

    @property
    def help_text(self) -> str:
        default = self.default
        if default in (MISSING, None, {}, ()) or default is False or "default" in self.help:
            return self.help
        return f"{self.help} (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"


def _options(config_class: type, prefix: str = "", base: Any = None) -> dict[str, _Option]:
    """All options of a config class by dotted name; `base` holds the defaults that the parent chose for a section."""
    hints = get_type_hints(config_class)
    options: dict[str, _Option] = {}
    for entry in fields(config_class):
        if not entry.init:
            continue
        hint, optional = _without_none(hints[entry.name])
        default: Any = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if base is not None:
            default = getattr(base, entry.name)
        if is_dataclass(hint):
            options.update(_options(hint, f"{prefix}{entry.name}.", None if default is MISSING else default))  # type: ignore[arg-type]
        else:
            help_text, common = str(entry.metadata.get("help", "")), bool(entry.metadata.get("common", False))
            options[prefix + entry.name] = _Option(hint, optional, default, help_text, common)
    return options


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return (kinds[0] if len(kinds) == 1 else hint), True
    return hint, False


def _option_of(options: Mapping[str, _Option], name: str) -> _Option | None:
    """The option of a dotted name, or the mapping that an entry such as `options.num_features` belongs to."""
    if name in options:
        return options[name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        parent = options.get(".".join(parts[:count]))
        if parent is not None and parent.is_mapping:
            return _Option(Any, True, None, "", False)
    return None


# --------------------------------------------------------------------------------------------------------------------
# Reading


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
    `--print_config` prints the config as YAML. `--help` shows the options marked `common`, `--help all` all of them.

    Args:
        config_class: A dataclass; its `__post_init__` checks what a type cannot express.
        arguments: The arguments after the command.
        program: How the command is called, for the help and for messages.
        description: First paragraph of the help.
        examples: Last paragraph of the help.
        positionals: Options that may be given without their flag, in this order.

    Raises:
        UsageError: An unknown option (with near matches), a missing value, or a value of the wrong type.
        ValueError: The config refuses its values.
        SystemExit: The help or the config was printed.
    """
    options, arguments = _options(config_class), list(arguments)
    if any(argument in ("-h", "--help", "--help_all", "--help-all") for argument in arguments):
        index = next(index for index, argument in enumerate(arguments) if argument.startswith(("-h", "--help")))
        full = arguments[index] in ("--help_all", "--help-all") or arguments[index + 1 : index + 2] == ["all"]
        sys.stdout.write(_help(config_class, options, program, description, examples, positionals, full))
        raise SystemExit(0)
    files, values = _split_arguments(arguments, options, positionals)
    contents = [_checked_yaml(_read_yaml(file), options, file) for file in files]
    parser_arguments = [f"--config={json.dumps(content, ensure_ascii=False)}" for content in contents if content]
    parser_arguments += [f"--{name}={value}" for name, value in values if name not in COMMON_FLAGS]
    known = {name for name, _ in values}.union(*(flatten(content) for content in contents))
    for name, entry in options.items():
        if entry.default is MISSING and name not in known:
            raise UsageError(f"{name.upper() if name in positionals else f'--{name}'} is missing. See --help.")
    parser = _parser(config_class, program)
    try:
        namespace = parser.parse_args(parser_arguments)
    except argparse.ArgumentError as error:
        raise UsageError(_type_error(str(error), options)) from error
    _check_finite(namespace, options)
    namespace.pop("config", None)
    config = config_class(**vars(parser.instantiate(namespace)))
    if any(name == "print_config" for name, _ in values):
        import yaml

        sys.stdout.write(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
        raise SystemExit(0)
    return config


def exit_code(command: Callable[[], int], *, traceback: bool = False) -> int:
    """Run a command and return its exit code: expected errors become one line on stderr.

    Args:
        command: Returns the exit code.
        traceback: Whether an expected error is raised instead.

    Returns:
        The command's own exit code, or 1 for an expected error, 2 for a UsageError, 130 for Ctrl-C.
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
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, UsageError) else 1
    except RuntimeError as error:
        code = getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        # Training was stopped by a signal, after a checkpoint.
        sys.stderr.write(f"{error}\n")
        return code


def _parser(config_class: type, program: str) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=program, exit_on_error=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="config", help="YAML file with options; flags override it")
    parser.add_class_arguments(config_class)
    return parser


def _split_arguments(
    arguments: Sequence[str], options: Mapping[str, _Option], positionals: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the YAML files and the (name, value) pairs of a command line, in the form that jsonargparse reads."""
    files: list[str] = []
    values: list[tuple[str, str]] = []
    lists: dict[str, list[str]] = {}
    unfilled_positionals = list(positionals)
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            if not unfilled_positionals:
                raise UsageError(f"unexpected argument {argument!r}. Options are given as --name value.")
            values.append((unfilled_positionals.pop(0), argument))
            continue
        flag, equals, value = argument[2:].partition("=")
        name = flag.replace("-", "_")
        if name in ("print_config", "traceback"):
            values.append((name, "true"))
            continue
        entry = options.get(name) or _option_of(options, name)
        if entry is None and name != "config":
            raise UsageError(f"unknown option --{flag}.{_suggestion(name, options, '--')}")
        flag_values = [value] if equals else _pop_values(remaining, name, entry)
        if name == "config":
            files.append(flag_values[0])
        elif entry is not None and entry.is_list and flag_values != ["null"]:
            lists.setdefault(name, []).extend(_list_items(flag_values))
        else:
            values.append((name, flag_values[0]))
    values += [(name, json.dumps(items, ensure_ascii=False)) for name, items in lists.items()]
    return files, values


def _pop_values(remaining: list[str], name: str, entry: _Option | None) -> list[str]:
    """Remove the values of a flag from the front of the arguments that follow it, and return them."""
    count = 0
    while count < len(remaining) and not remaining[count].startswith("--"):
        count += 1
        if entry is None or not entry.is_list:
            break
    is_flag = entry is not None and entry.hint is bool
    if is_flag and (not count or remaining[0].lower() not in ("true", "false", "null")):
        return ["true"]
    if not count:
        raise UsageError(f"--{name} needs a value.")
    values = remaining[:count]
    del remaining[:count]
    return values


def _list_items(values: Sequence[str]) -> list[Any]:
    """The entries of a list from `a b`, `a,b` or `[a, b]`."""
    import yaml

    items: list[Any] = []
    for value in values:
        if value.lstrip().startswith("["):
            loaded = yaml.safe_load(value)
            items += loaded if isinstance(loaded, list) else [value]
        else:
            items += [item for item in value.split(",") if item]
    return items


def _read_yaml(file: str) -> dict[str, Any]:
    import yaml
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


def _checked_yaml(
    content: Mapping[str, Any], options: Mapping[str, _Option], file: str, prefix: str = ""
) -> dict[str, Any]:
    """The content of a YAML file without sections whose lines are all commented out.

    Raises:
        UsageError: A key is no option, or a value is null where the option needs one.
    """
    checked: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}".replace("-", "_")
        entry = options.get(name)
        if entry is not None:
            if value is None and not entry.optional:
                raise UsageError(f"{file}: {name} must be {entry.expected}, got null.")
            checked[name.rpartition(".")[2]] = value
        elif not any(known.startswith(f"{name}.") for known in options):
            raise UsageError(f"{file}: unknown option {name!r}.{_suggestion(name, options, '')}")
        elif isinstance(value, Mapping):
            checked[str(key)] = _checked_yaml(value, options, file, f"{name}.")
        elif value is not None:
            raise UsageError(f"{file}: {name!r} is a section. Give its options by name, got {value!r}.")
    return checked


def _suggestion(name: str, options: Mapping[str, _Option], dashes: str) -> str:
    """A sentence with the options of the same name in another section, or of a similar name."""
    last = name.rpartition(".")[2]
    same_name = [dashes + known for known in options if known.rpartition(".")[2] == last]
    if same_name:
        return f" Did you mean {' or '.join(map(repr, same_name[:3]))}?"
    return near_matches(dashes + name, [dashes + known for known in options]) or " See --help all."


def _type_error(message: str, options: Mapping[str, _Option]) -> str:
    """Rewrite jsonargparse's message about a value: the flag, what it must be, and the value."""
    key = re.search(r'[Kk]ey "([\w.]+)"', message)
    entry = options.get(key[1]) if key else None
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    if key is None or entry is None:
        return " ".join(message.split())
    value_text = f", got {value[1]!r}" if value else ""
    return f"--{key[1]} must be {entry.expected}{value_text}."


def _check_finite(namespace: Any, options: Mapping[str, _Option]) -> None:
    for name, entry in options.items():
        value = namespace.get(name)
        if entry.hint is float and isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name} must be a finite number, got {value!r}.")


# --------------------------------------------------------------------------------------------------------------------
# Help


def _help(
    config_class: type,
    options: Mapping[str, _Option],
    program: str,
    description: str,
    examples: str,
    positionals: Sequence[str],
    full: bool,
) -> str:
    """The help; the short one shows the options that are marked `common`, or all if none is."""
    full = full or not any(entry.common for entry in options.values())
    arguments = "".join(f" [{name.upper()}]" for name in positionals)
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program}{arguments} [--config FILE.yaml] [--option VALUE ...]",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    groups: dict[str, Any] = {"": parser.add_argument_group("options")}
    hidden = 0
    for name, entry in options.items():
        section = name.rpartition(".")[0]
        if not (full or entry.common):
            hidden += 1
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(f"options of the section {section!r}")
        groups[section].add_argument(f"--{name}", metavar=entry.metavar, help=entry.help_text.replace("%", "%%"))
    general = parser.add_argument_group("every command")
    general.add_argument("--config", metavar="FILE", help="YAML file with options; flags override it")
    general.add_argument("--print_config", action="store_true", help="print the config as YAML and exit")
    general.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    if hidden:
        general.add_argument("--help all", action="store_true", help=f"show the {hidden} other options, too")
    return parser.format_help()
