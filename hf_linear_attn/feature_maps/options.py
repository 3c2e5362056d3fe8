"""Options of feature maps and mechanisms: dataclass fields that carry their help text and their limits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_INTERVALS_IN_WORDS = {"(0, inf)": "be positive", "(-inf, inf)": "be finite"}


def option(default: Any, help: str, *, least: int | None = None, within: str | None = None, **metadata: Any) -> Any:
    """Return a field of `Options`.

    Args:
        default: The default value.
        help: One line for users.
        least: The least value of an integer, 0 or 1.
        within: The interval of a number, such as `"[0, 1)"`.
        metadata: More of the field's metadata, such as `before` (see `config.py`).
    """
    return field(default=default, metadata={"help": help, "least": least, "within": within, **metadata})


def epsilon_option(default: float, added_to: str = "every feature") -> Any:
    """Return the field of a small number that leaves no query without any weight."""
    help = f"added to {added_to}; a query that shares no feature with any key then attends to their average"
    return option(default, help, within="[0, 1)")


@dataclass(frozen=True)
class Options:
    """Base class of options. A value outside of its field's limits or `Literal` choices is a ValueError."""

    def __post_init__(self) -> None:
        own_class: Any = type(self)
        for entry in fields(self):
            value, hints = getattr(self, entry.name), _field_hints(own_class)[entry.name]
            choices = [None] if NoneType in hints else []
            choices += [choice for hint in hints if get_origin(hint) is Literal for choice in get_args(hint)]
            limit = _unmet_limit(value, entry.metadata.get("least"), entry.metadata.get("within"))
            only_choices = all(hint is NoneType or get_origin(hint) is Literal for hint in hints)
            if value in choices or not (limit or only_choices):
                continue
            names = [repr(choice) for choice in choices]
            first, *others = [limit, *names] if limit else [f"be {names[0]}", *names[1:]]
            requirement = ", ".join([first, *others[:-1]]) + "".join(f" or {last}" for last in others[-1:])
            raise ValueError(f"{entry.name} must {requirement}, got {value!r}.")


@functools.cache
def _field_hints(options: Any) -> dict[str, tuple[Any, ...]]:
    """Return the types in the union that each field is annotated with."""
    hints = get_type_hints(options)
    return {name: (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,) for name, hint in hints.items()}


def _unmet_limit(value: Any, least: int | None, within: str | None) -> str | None:
    if least is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        return "be a positive integer" if least else "be a non-negative integer"
    if within is None:
        return None
    low, high = (float(bound) for bound in within[1:-1].split(","))
    if isinstance(value, Real):
        number = float(value)
        above = number >= low if within[0] == "[" else number > low
        if above and (number <= high if within[-1] == "]" else number < high):
            return None
    return _INTERVALS_IN_WORDS.get(within, f"lie in {within}")
