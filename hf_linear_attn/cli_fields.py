"""Command-line flags from the fields of a dataclass: one flag a field, its help from `metadata["help"]`."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Options = TypeVar("Options")


def add_flags(parser: argparse.ArgumentParser, options: type) -> None:
    """Add `--field-name` for every field of a dataclass: bool, int, float, str, Path, Literal, a tuple or list of them.

    Raises:
        TypeError: a field of another type.
    """
    hints = get_type_hints(options)
    for field in fields(options):
        if not field.init:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        required = default is MISSING
        flag = "--" + field.name.replace("_", "-")
        settings: dict[str, Any] = {"dest": field.name, "help": _help(field, default), "required": required}
        if not required:
            settings["default"] = default
        parser.add_argument(flag, **settings, **_reader(field.name, hints[field.name], default))


def from_arguments(options: type[Options], arguments: argparse.Namespace) -> Options:
    """The dataclass from parsed flags; its own checks run, and raise a ValueError that names the field."""
    hints = get_type_hints(options)
    given = {}
    for field in fields(options):  # type: ignore[arg-type]
        if not field.init:
            continue
        value = getattr(arguments, field.name)
        if isinstance(value, list) and get_origin(_without_none(hints[field.name])) is tuple:
            value = tuple(value)
        given[field.name] = value
    return options(**given)


def _help(field: Field[Any], default: Any) -> str:
    text = str(field.metadata.get("help", ""))
    if default not in (MISSING, None, False) and "default" not in text:
        text += f" (default: {default})"
    return text.replace("%", "%%") or " "


def _reader(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    hint = _without_none(hint)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if default is True else "store_true"}
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return {"choices": choices, "type": type(choices[0])}
    if get_origin(hint) in (tuple, list):
        inner = next(argument for argument in get_args(hint) if argument is not Ellipsis)
        again = {"action": "extend"} if default is None else {}  # a flag that is given twice; a default would be kept
        return {"nargs": "+", **again, **_reader(name, inner, None)}
    if isinstance(hint, type):
        return {"type": hint, "metavar": name.rpartition("_")[2].upper()}
    raise TypeError(f"Cannot make a flag from the field {name!r} of type {hint!r}.")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else hint
    return hint
