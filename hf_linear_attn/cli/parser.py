"""Configs from flags and YAML files, read by jsonargparse, and the exit codes of commands.

A config is a dataclass whose fields are made by `option`. Fields that are dataclasses are sections: the field
`max_length` of the section `data` is `--data.max_length` on the command line, and `max_length` under `data:` in YAML.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser, get_loader
from yaml import YAMLError

from ..utils.formatting import near_matches
from ..utils.options import OptionError, build_config, check_value, default_of, without_none

Config = TypeVar("Config")

#: Errors of a user's input or surroundings: one line without a traceback.
EXPECTED_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, FloatingPointError)

#: How the help shows a value of a type.
METAVARS = {int: "INT", float: "FLOAT", bool: "BOOL", str: "TEXT", dict: "MAPPING"}


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
    `positionals` are given without a flag. `--print_config` prints the options as YAML. `--help` shows those that are
    marked `common`, `--help all` all of them.

    Raises:
        argparse.ArgumentError: A missing or unexpected argument, or a file that cannot be read.
        OptionError: An unknown flag, with near matches, or a value that the config refuses.
        SystemExit: The help or the options were printed.
    """
    parser = ArgumentParser(
        usage=f"{program}{''.join(f' {name.upper()}' for name in positionals)} [--config FILE] [--option VALUE ...]",
        description=description,
        epilog=f"{examples}\n\n--help all shows every option.",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    file = parser.add_argument("--config", action=_ConfigFile, metavar="FILE", help="YAML file with options")
    # What the help hides, --print_config would leave out.
    full = "all" in arguments or not {"-h", "--help"} & {*arguments}
    kinds = dict(_add_options(parser, config_class, positionals, full=full))
    file.config_class, file.known = config_class, list(kinds)
    mappings = tuple(f"{name}." for name, kind in kinds.items() if kind is dict)
    known = [name for name in ("help", "config", "print_config", *kinds) if name not in positionals]
    flags = _checked_flags(arguments, known, mappings, positionals)
    values = parser.parse_args(list(flags)).as_dict()
    return build_config(config_class, {name: value for name, value in values.items() if name != "config"})


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(100, shutil.get_terminal_size().columns - 2))


class _ConfigFile(ActionConfigFile):
    """Reads a YAML file, whose options are checked first: these errors name the option and what it takes."""

    config_class: type
    known: Sequence[str]

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            text = Path(values).read_text(encoding="utf-8")
            content = get_loader("yaml")(text)
        except OSError:
            content = {}  # the base class says what is wrong
        except UnicodeError:
            raise OptionError("config", f"{values!r} is not UTF-8 text. Give a YAML file.") from None
        except YAMLError as error:
            reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
            raise OptionError("config", f"Problems parsing config {values!r}: {reason}. Correct the file.") from None
        if not isinstance(content, Mapping):
            remedy = f"{values!r} must hold options by name, such as 'seed: 0'."
            raise OptionError("config", f"Unexpected config: {text[:80].strip() or 'nothing'}. {remedy}")
        _check_mapping(self.config_class, content, self.known)
        super().__call__(parser, namespace, values, option_string)


def _check_mapping(config_class: type, values: Mapping[str, Any], known: Sequence[str], section: str = "") -> None:
    """Check the names, types and bounds of the options in a YAML file."""
    entries, hints = {entry.name: entry for entry in fields(config_class)}, get_type_hints(config_class)
    for name, value in values.items():
        option = f"{section}{name}"
        if name not in entries:
            raise OptionError(option, f"unknown option.{_similar(option, known)}")
        if not is_dataclass(hints[name]):
            check_value(option, value, hints[name], **entries[name].metadata.get("bounds", {}))
        elif isinstance(value, Mapping):
            _check_mapping(hints[name], value, known, f"{option}.")
        elif value is not None:
            raise OptionError(option, f"is a section: give its options by name, got {value!r}.")


def _add_options(
    parser: Any, config_class: Any, positionals: Sequence[str] = (), section: str = "", base: Any = None, *, full: bool
) -> Iterator[tuple[str, Any]]:
    """Add the options of a config class, and yield their dotted names and types. `base` has the defaults, if given."""
    hints = get_type_hints(config_class)
    group = parser.add_argument_group(f"options of the section {section!r}") if section and full else parser
    for entry in (entry for entry in fields(config_class) if entry.init):
        name, (kind, _) = f"{section}.{entry.name}".lstrip("."), without_none(hints[entry.name])
        default = default_of(config_class, entry.name) if base is None else getattr(base, entry.name)
        if is_dataclass(kind):
            yield from _add_options(parser, kind, section=name, base=default, full=full)
            continue
        settings: dict[str, Any] = {"help": argparse.SUPPRESS}
        if full or entry.metadata.get("common"):
            settings["help"] = _help(entry.metadata.get("help", ""), default)
        settings |= _type_settings(kind)
        if name in positionals:
            group.add_argument(name, **settings | {"metavar": name.upper()}).required = default is MISSING
        elif default is MISSING:
            group.add_argument(f"--{name}", required=True, **settings)
        else:
            group.add_argument(
                f"--{name}", default=list(default) if isinstance(default, tuple) else default, **settings
            )
        yield name, get_origin(kind) or kind


def _type_settings(kind: Any) -> dict[str, Any]:
    """How jsonargparse reads an option. Numbers are left as YAML reads them, because our check has clearer errors."""
    if get_origin(kind) is tuple:
        settings = _type_settings(get_args(kind)[0])
        return {**settings, **({"type": _text_entry} if get_args(kind)[0] is str else {}), "nargs": "*"}
    if get_origin(kind) is Literal:
        return {"type": Any, "metavar": f"{{{','.join(get_args(kind))}}}"}
    kind = get_origin(kind) or kind
    types = {str: str | None, dict: dict[str, Any]}
    settings = {"type": types.get(kind, Any), "metavar": METAVARS[kind]}
    return {**settings, "nargs": "?", "const": True} if kind is bool else settings


def _text_entry(value: Any) -> Any:
    """Read an entry of a list of text, or, as in YAML, a whole list; what has been read already stays."""
    is_list = isinstance(value, str) and (value.startswith("[") or value == "null")
    try:
        return get_loader("yaml")(value) if is_list else value
    except YAMLError:
        raise argparse.ArgumentTypeError(f"{value!r} is no list in YAML, such as '[a, b]'.") from None


def _help(text: str, default: Any) -> str:
    if default not in (MISSING, None, {}, "", ()) and default is not False and "default" not in text:
        text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    return text.replace("%", "%%")


def _checked_flags(
    arguments: Iterable[str], known: Sequence[str], mappings: tuple[str, ...], positionals: Sequence[str]
) -> Iterator[str]:
    """Yield the arguments, their flags with underscores; an unknown flag is an error with near matches."""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            name = flag[2:].replace("-", "_")
            if name in positionals:
                raise OptionError(name, "is given without a flag.")
            key = next((name.removeprefix(one) for one in mappings if name.startswith(one)), "")
            if name not in known and not key:
                raise OptionError(name, f"unknown option.{_similar(name, known)}")
            if "." in key:
                mapping, _, inner = name.rpartition(".")
                raise OptionError(name, f"a mapping in a mapping is given whole: --{mapping} '{{{inner}: VALUE}}'.")
            argument = f"--{name}{equals}{value}"
        yield argument


def _similar(name: str, known: Sequence[str]) -> str:
    """A sentence that suggests options whose names begin so, or that this name abbreviates (`lr`), or similar ones."""
    section, _, last = name.rpartition(".")

    def matches(option: str) -> bool:
        field_name = option.rpartition(".")[2]
        return field_name.startswith(last) or "".join(word[:1] for word in field_name.split("_")) == last

    same_name = [option for option in known if matches(option)]
    same_name = [option for option in same_name if option.rpartition(".")[0] == section] or same_name
    if same_name:
        return f" Did you mean {' or '.join(repr(f'--{option}') for option in same_name[:3])}?"
    return near_matches(f"--{name}", [f"--{option}" for option in known]) or " See --help all."


def exit_code(command: Callable[[], int | None], *, traceback: bool = False) -> int:
    """Run a command and return its exit code: expected errors become one line on stderr.

    That is the command's own exit code (None stands for 0), or 1 for an expected error (which `traceback` raises
    instead), 2 for wrong usage (an `OptionError` or an `ArgumentError`), 130 for Ctrl-C.
    """
    try:
        return command() or 0
    except SystemExit as finished:
        return finished.code if isinstance(finished.code, int) else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone. Without this, the interpreter would report the error again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*EXPECTED_ERRORS, argparse.ArgumentError) as error:
        if traceback:
            raise
        dashes = "--" if isinstance(error, OptionError) else ""
        sys.stderr.write(f"error: {dashes}{' '.join(str(error).split())}\n")
        return 2 if isinstance(error, OptionError | argparse.ArgumentError) else 1
    except RuntimeError as error:
        # An InterruptedRunError, whose module loads torch, has a code: a signal stopped training, after a checkpoint.
        code = getattr(error, "code", None)
        if not isinstance(code, int):
            raise
        sys.stderr.write(f"{error}\n")
        return code
