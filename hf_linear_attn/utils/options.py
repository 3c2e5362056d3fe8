"""Options: dataclass fields with a help text and bounds, and one check of their values.

Reading options loads neither torch nor transformers.
"""

import json
import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, field, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .formatting import near_matches

Config = TypeVar("Config")

#: Types of options: what a value must be an instance of, and what error messages call it.
TYPES: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a finite number"),
    bool: (bool, "true or false"),
    str: ((str, os.PathLike), "text"),
    dict: (Mapping, "a mapping such as {key: value}"),
}

#: Bounds of a number, or of each entry of a list: what messages call them, and the comparison.
BOUNDS = {
    "least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("of at most", operator.le),
    "below": ("below", operator.lt),
}


class OptionError(ValueError):
    """A value that an option cannot have. The command line names the option as it was typed, `--data.task: ...`.

    Args:
        field: The option, with dots between a section and its option.
        text: What is wrong, and the remedy.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(field, text)
        self.field, self.text = field, text

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def option(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **bounds: Any) -> Any:
    """Return a dataclass field that is an option. Its choices are those of its type, a `Literal`.

    Args:
        default: The default value. Without one (and without `factory`) the option is required.
        help: One line for `--help`.
        factory: Makes the default value, where it is mutable or a section.
        bounds: Those of `BOUNDS`, and `parity`, `"even"` or `"odd"`. Of a section `brief`: the help names it only.
    """
    metadata: dict[str, Any] = {"help": help, "brief": bounds.pop("brief", False), "bounds": bounds}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(config: Any, check: Callable[..., None] | None = None) -> None:
    """Check the fields that `option` made against their types and bounds, by `check_value` or by `check`."""
    hints = get_type_hints(type(config))
    for entry in fields(config):
        if "bounds" in entry.metadata:
            bounds = entry.metadata["bounds"]
            (check or check_value)(entry.name, vars(config)[entry.name], hints[entry.name], **bounds)


def check_value(name: str, value: Any, hint: Any, **bounds: Any) -> None:
    """Check one value against a type, such as `int | None`, `Literal["a", "b"]` or `tuple[int, ...]`, and bounds.

    Raises:
        OptionError: The value is of another type, out of bounds, not finite, or a list with an entry twice.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    is_list = get_origin(kinds[0]) is tuple
    entries = value if is_list and isinstance(value, (tuple, list)) else (value,)
    entry_kinds = get_args(kinds[0])[:1] if is_list else kinds
    fits = [any(_is_valid(entry, kind, bounds) for kind in entry_kinds) for entry in entries]
    if not all(fits) or (is_list and entries is not value):
        first, *others = map(type_name, kinds)
        limits = [f"{BOUNDS[bound][0]} {limit}" for bound, limit in bounds.items() if bound in BOUNDS]
        if "parity" in bounds:
            first = first.replace("a whole", f"an {bounds['parity']} whole")
        expected = " or ".join([" ".join([first, " and ".join(limits)]).strip(), *others])
        raise OptionError(name, f"must be {expected}, got {value!r}.")
    if len(set(map(repr, entries))) < len(entries):
        raise OptionError(name, f"has an entry twice: {', '.join(map(str, entries))}.")


def check_argument(name: str, value: Any, hint: Any, **bounds: Any) -> None:
    """Check an argument of a function as `check_value` does. A ValueError says "NAME must be ..., got ..."."""
    try:
        check_value(name, value, hint, **bounds)
    except OptionError as error:
        raise ValueError(f"{error.field} {error.text}") from None


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was a part of it."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    is_optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint) and len(kinds) == 1
    return (kinds[0], True) if is_optional else (hint, False)


def type_name(kind: Any) -> str:
    """Return what error messages call a value of a type."""
    if get_origin(kind) is Literal:
        choices = [*map(repr, get_args(kind))]
        return f"one of {', '.join(choices)}" if choices[1:] else choices[0]
    if get_origin(kind) is tuple:
        return f"a list, each entry {type_name(get_args(kind)[0])}"
    return TYPES.get(get_origin(kind) or kind, (object, kind.__name__))[1]


def _is_valid(value: Any, kind: Any, bounds: Mapping[str, Any]) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if not isinstance(value, TYPES.get(get_origin(kind) or kind, (object, ""))[0]):
        return False
    if kind not in (int, float):
        return True
    if isinstance(value, bool) or not math.isfinite(value):
        return False
    within = all(BOUNDS[bound][1](value, limit) for bound, limit in bounds.items() if bound in BOUNDS)
    return within and ("parity" not in bounds or value % 2 == (bounds["parity"] == "odd"))


def check_exclusive(config: Any, first: str, second: str) -> None:
    """Raise an OptionError if both of two options are set."""
    if vars(config)[first] and vars(config)[second]:
        raise OptionError(first, f"excludes {second}. Give only one of them.")


def build_config(config_class: type[Config], values: Mapping[str, Any], section: str = "") -> Config:
    """Return a config from its options by name, as a YAML file has them: sections are mappings, and lists are lists.

    Options and sections that are left out, and sections without a value, have their defaults.

    Raises:
        OptionError: A value that the config refuses; an option of a section is named with its section.
        TypeError: There is no such option, or one without a default is missing.
    """
    hints, arguments = get_type_hints(config_class), dict(values)
    names = [entry.name for entry in fields(cast(Any, config_class))]
    for name, value in values.items():
        if name not in names:
            raise TypeError(f"There is no option {section + str(name)!r}.{near_matches(str(name), names)}")
        kind, _ = without_none(hints[name])
        if is_dataclass(kind):
            if not isinstance(value, Mapping | None | cast(Any, kind)):
                raise OptionError(section + name, f"is a section: give its options by name, got {value!r}.")
            if not isinstance(value, cast(Any, kind)):
                # The parent may have chosen other defaults than the section itself.
                default = to_dict(default_of(config_class, name))
                arguments[name] = build_config(cast(Any, kind), default | dict(value or {}), f"{section}{name}.")
        elif get_origin(kind) is tuple and isinstance(value, list):
            is_nested = len(value) == 1 and isinstance(value[0], list)  # a flag whose value is a list in YAML
            arguments[name] = tuple(value[0] if is_nested else value)
        elif kind is float and type(value) is int:
            arguments[name] = float(value)
        elif isinstance(value, os.PathLike):
            arguments[name] = os.fspath(value)
    try:
        config = config_class(**arguments)
        check_options(config)  # a config need not check itself
    except OptionError as error:
        raise OptionError(f"{section}{error.field}", error.text) from None
    return config


def make_config(config_class: type[Config], config: Config | None, options: Mapping[str, Any]) -> Config:
    """Return the config with further options, or the one that options make by themselves. Errors as `build_config`.

    Options of a section override those of the config's section. Of a config of a subclass, whose further fields are its
    own, those of `config_class` count.
    """
    if config is None or not options:
        return config or build_config(config_class, options)
    before = to_dict(config)
    values = {entry.name: before[entry.name] for entry in fields(cast(Any, config_class))}
    for name, value in options.items():
        is_section = isinstance(values.get(name), dict) and isinstance(value, Mapping)
        is_section = is_section and is_dataclass(vars(config)[name])
        values[name] = {**values[name], **value} if is_section else value
    return build_config(config_class, values)


def default_of(config_class: Any, name: str) -> Any:
    """Return the default value of a field of a dataclass, or `dataclasses.MISSING`."""
    entry = config_class.__dataclass_fields__[name]
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as nested dicts and lists, the way a YAML file holds it; a path is text."""
    return json.loads(json.dumps(asdict(config), default=os.fspath))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys. An empty dict is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat
