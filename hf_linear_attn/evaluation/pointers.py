"""JSON pointers (RFC 6901): every number of a page says where it stands in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Sourced(str):
    """Text that shows a value of the report, and the pointer to that value (None where it shows none)."""

    source: str | None

    def __new__(cls, text: str, source: str | None = None) -> Sourced:
        made = super().__new__(cls, text)
        made.source = source
        return made


def escaped(name: object) -> str:
    """A name as one part of a pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


def joined(*parts: object) -> str:
    """The pointer through these keys and indices."""
    return "".join(f"/{escaped(part)}" for part in parts)


def resolve(data: Any, pointer: str) -> Any:
    """The value that a pointer leads to.

    Raises:
        LookupError: there is none.
    """
    found = data
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found[name]
        elif isinstance(found, Sequence) and not isinstance(found, str) and name.isdigit():
            found = found[int(name)]
        else:
            raise LookupError(f"{pointer!r} leads to nothing.")
    return found
