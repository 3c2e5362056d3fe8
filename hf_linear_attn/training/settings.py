"""Settings of a recipe: nested dataclasses, read from YAML and from `--section.name value`.

The command line beats the file, the file beats the defaults. An unknown key is an error with near matches.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Settings = TypeVar("Settings")


def read_settings(cls: type[Settings], file: str | None = None, given: Mapping[str, str] | None = None) -> Settings:
    """The settings of a YAML file with `given` (dotted name -> text) laid over them.

    Raises:
        ValueError: an unknown key (with near matches), a value of the wrong type, or one that the class refuses.
        OSError: the file cannot be read.
    """
    values = {} if file is None else read_yaml(file)
    for name, text in (given or {}).items():
        _place(values, name, text)
    return build(cls, values, "")


def read_yaml(file: str) -> dict[str, Any]:
    """A YAML mapping; nothing but plain data is ever built from it."""
    import yaml

    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"There is no settings file {file!r}. Give a YAML file.")
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file!r} is no YAML file ({' '.join(str(error).split())}).") from error
    if held is None:
        return {}
    if not isinstance(held, dict):
        raise ValueError(f"{file!r} holds a {type(held).__name__}. It must hold sections such as 'model:'.")
    return held


def read_arguments(words: Sequence[str]) -> dict[str, str]:
    """`--a.b value`, `--a.b=value` and `--a.b` (true) as dotted name -> text.

    A value may begin with a minus sign if it is a number.
    """
    found: dict[str, str] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise ValueError(f"Expected a setting such as --data.task sst2, got {word!r}.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = "true"
            if index < len(words) and not _is_flag(words[index]):
                value = words[index]
                index += 1
        found[name.replace("-", "_")] = value
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("--")


def build(cls: type[Settings], values: Mapping[str, Any], where: str) -> Settings:
    """A dataclass from nested mappings; `where` is the dotted name of the section, for messages."""
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise ValueError(f"Unknown setting {where + str(key)!r}.{_near(name, known, where)}")
        hint = _without_none(hints[name])
        if is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ValueError(f"{where + name!r} is a section: give its settings by name, got {value!r}.")
            kept[name] = build(hint, value, f"{where}{name}.")  # type: ignore[arg-type]
        else:
            kept[name] = convert(value, hints[name], where + name)
    for field in fields(cls):  # type: ignore[arg-type]
        missing = field.default is MISSING and field.default_factory is MISSING
        if missing and field.name not in kept:
            hint = hints[field.name]
            if not is_dataclass(hint):
                raise ValueError(f"{where + field.name!r} is needed: {field.metadata.get('help', 'no default')}.")
            kept[field.name] = build(hint, {}, f"{where}{field.name}.")  # type: ignore[arg-type]
    return cls(**kept)


def convert(value: Any, hint: Any, name: str) -> Any:
    """A plain value as the type of its field; texts from the command line are read as YAML where that is needed."""
    optional = hint is not _without_none(hint)
    hint = _without_none(hint)
    if value is None or (optional and value in ("null", "none", "None")):
        if optional:
            return None
        raise ValueError(f"{name} must be {_words(hint)}, got nothing.")
    origin = get_origin(hint)
    if origin is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else str(value).replace(",", " ").split()
        return tuple(convert(item, get_args(hint)[0], name) for item in items)
    if origin is dict or hint is dict:
        held = _from_text(value)
        if not isinstance(held, Mapping):
            raise ValueError(f"{name} must be a mapping such as '{{num_features: 256}}', got {value!r}.")
        return dict(held)
    if hint is str:
        return str(value)
    held = _from_text(value)
    if hint is float:
        return _number(held, value, name)
    if hint is bool and not isinstance(held, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")
    if hint is int and (isinstance(held, bool) or not isinstance(held, int)):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return held


def _number(held: Any, value: Any, name: str) -> float:
    # YAML reads 1e-3 (without a dot) as text.
    try:
        if isinstance(held, bool):
            raise ValueError
        return float(held)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}.") from error


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _place(values: dict[str, Any], name: str, text: str) -> None:
    """Put a dotted name into nested mappings; deeper than a section (`model.options.seed`) reaches into a dict."""
    *sections, last = name.split(".")
    place = values
    for section in sections:
        inner = place.get(section)
        if not isinstance(inner, dict):
            inner = place[section] = {}
        place = inner
    # What lies in a free dict has no declared type.
    place[last] = _from_text(text) if len(sections) > 1 else text


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def _near(name: str, known: Sequence[str], where: str) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f" Did you mean {' or '.join(repr(where + match) for match in close)}?"
    return f" Known here: {', '.join(where + each for each in known)}."


def _words(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


# --------------------------------------------------------------------------------------------------------------------
# Out again


def as_mapping(settings: Any) -> dict[str, Any]:
    """Nested plain data, as a YAML file would hold it."""
    found: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            found[field.name] = as_mapping(value)
        else:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def flat(settings: Any, where: str = "") -> dict[str, Any]:
    """Dotted name -> value, for comparing two runs and for trackers."""
    found: dict[str, Any] = {}
    for name, value in as_mapping(settings).items():
        found.update(_flat(value, where + name))
    return found


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: held for inner, item in value.items() for key, held in _flat(item, f"{name}.{inner}").items()}
    return {name: value}


def describe(parser: argparse.ArgumentParser, cls: type) -> None:
    """List every setting in the help of a parser, by section. They are read by `read_arguments`, not by argparse."""
    for name, hint in get_type_hints(cls).items():
        if not is_dataclass(hint):
            continue
        group = parser.add_argument_group(f"{name} (section `{name}` of the YAML file)")
        hints = get_type_hints(hint)
        for field in fields(hint):
            if is_dataclass(_without_none(hints[field.name])):
                continue
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            text = str(field.metadata.get("help", ""))
            if default is not MISSING and default not in (None, {}, ()) and "default" not in text:
                text += f" (default: {default})"
            group.add_argument(
                f"--{name}.{field.name}",
                default=argparse.SUPPRESS,
                metavar=_metavar(hints[field.name]),
                help=text.replace("%", "%%"),
            )


def _metavar(hint: Any) -> str:
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return _metavar(get_args(hint)[0]) + ",…"
    return {int: "INT", float: "NUMBER", bool: "BOOL", str: "TEXT"}.get(hint, "MAPPING")
