"""Settings of a recipe: nested dataclasses, read from YAML and from `--section.name value`.

The command line beats the file, the file beats the defaults. An unknown key is an error with near matches.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
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
    return build(cls, values)


def read_yaml(file: str) -> dict[str, Any]:
    """A YAML mapping; nothing but plain data is ever built from it."""
    import yaml

    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"There is no settings file {file!r}. Give a YAML file.")
    try:
        held = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2026-13-01 is a ValueError
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


def build(cls: type[Settings], values: Mapping[str, Any], where: str = "", base: Any = None) -> Settings:
    """A dataclass from nested mappings.

    where: dotted name of the section with a dot at its end, for messages.
    base: holds the defaults of a section; the class that contains it may have chosen others than the section's own.
    """
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    kept: dict[str, Any] = {} if base is None else {name: getattr(base, name) for name in known}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"Unknown setting {where + str(key)!r}.{_near(name, [*known], where)}")
        hint = _without_none(hints[name])
        if is_dataclass(hint):
            # A section whose every line is commented out is read as null.
            inner = {} if value is None else value
            if not isinstance(inner, Mapping):
                raise ValueError(f"{where + name!r} is a section: give its settings by name, got {value!r}.")
            default = kept.get(name, _default(known[name]))
            kept[name] = build(hint, inner, f"{where}{name}.", default)  # type: ignore[arg-type]
        else:
            kept[name] = convert(value, hints[name], where + name)
    for name, field in known.items():
        if name not in kept and field.default is MISSING and field.default_factory is MISSING:
            hint = hints[name]
            if not is_dataclass(hint):
                raise ValueError(f"{where + name!r} is needed: {field.metadata.get('help', 'no default')}.")
            kept[name] = build(hint, {}, f"{where}{name}.")  # type: ignore[arg-type]
    return cls(**kept)


def _default(field: Field[Any]) -> Any:
    """The default of a field; None where there is none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


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
        # YAML reads the words no, off, yes and on as booleans.
        words = {False: ("no", "off"), True: ("yes", "on")}[value] if isinstance(value, bool) else (value,)
        found = next((word for word in words if word in choices), None)
        if found is None:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        return found
    if origin is tuple:
        return tuple(convert(item, get_args(hint)[0], name) for item in _items(value, name))
    if origin is dict or hint is dict:
        held = _from_text(value)
        if not isinstance(held, Mapping) or not all(isinstance(key, str) for key in held):
            raise ValueError(f"{name} must be a mapping such as '{{num_features: 256}}', got {value!r}.")
        return dict(held)
    if hint is str:
        # What YAML took for something else (1.10, no, 2026-01-01) cannot be told from its value any more.
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}. Put it into quotation marks.")
        return value
    held = _from_text(value)
    if hint is float:
        return _number(held, value, name)
    if hint is bool and not isinstance(held, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")
    if hint is int and (isinstance(held, bool) or not isinstance(held, int)):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return held


def _items(value: Any, name: str) -> list[Any]:
    """What a list holds: a YAML list, in brackets also as text, or words with commas or spaces between them."""
    held = _from_text(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if isinstance(held, (list, tuple)):
        return list(held)
    if isinstance(held, str):
        return held.replace(",", " ").split()
    if held is None or isinstance(held, Mapping):
        raise ValueError(f"{name} must be a list such as '[a, b]', got {value!r}.")
    return [held]


def _number(held: Any, value: Any, name: str) -> float:
    # YAML reads 1e-3 (without a dot) as text.
    try:
        number = math.nan if isinstance(held, bool) else float(held)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return number


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    import yaml

    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        return value


def _place(values: dict[str, Any], name: str, text: str) -> None:
    """Put a dotted name into nested mappings; deeper than a section (`model.options.seed`) reaches into a dict."""
    *sections, last = name.split(".")
    place = values
    for depth, section in enumerate(sections, start=1):
        # `--model.options '{seed: 1}'` may stand before `--model.options.num_features 8`.
        inner = _from_text(place.get(section))
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ValueError(
                f"{name} has no place: {'.'.join(sections[:depth])} is {inner!r} already. Give one of them."
            )
        place[section] = inner
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
    named = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", tuple: "a list"}
    return named.get(get_origin(hint) or hint, str(hint))


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
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """A copy without tuples, which YAML and JSON do not know."""
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, (list, tuple)) else value


def flat(settings: Any, where: str = "") -> dict[str, Any]:
    """Dotted name -> value, for comparing two runs and for trackers."""
    return flatten(as_mapping(settings), where)


def flatten(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The same of nested mappings, as a file holds them. An empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found.update(flatten(value, f"{where}{name}."))
        else:
            found[f"{where}{name}"] = value
    return found


def describe(parser: argparse.ArgumentParser, cls: type) -> None:
    """List every setting in the help of a parser, by section. They are read by `read_arguments`, not by argparse."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, default = hints[field.name], _default(field)
        if not is_dataclass(hint):
            _describe_field(parser, field, field.name, hint, default)
            continue
        group = parser.add_argument_group(f"{field.name} (section `{field.name}` of the YAML file)")
        inner_hints = get_type_hints(hint)
        for inner in fields(hint):
            held = _default(inner) if default is None else getattr(default, inner.name)
            _describe_field(group, inner, f"{field.name}.{inner.name}", inner_hints[inner.name], held)


def _describe_field(group: Any, field: Field[Any], name: str, hint: Any, default: Any) -> None:
    text = str(field.metadata.get("help", ""))
    if default not in (None, {}, ()) and "default" not in text:
        text += f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=_metavar(hint), help=text.replace("%", "%%"))


def _metavar(hint: Any) -> str:
    hint = _without_none(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return _metavar(get_args(hint)[0]) + ",…"
    return {int: "INT", float: "NUMBER", bool: "BOOL", str: "TEXT"}.get(hint, "MAPPING")
