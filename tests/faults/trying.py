"""What a fault is, and the helpers that all of them share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class NotPossibleHereError(Exception):
    """The fault needs something that this machine does not give; the message says what."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    `run` does it in an empty folder, raises an AssertionError unless what follows is as `expected`, and returns what
    was seen.
    """

    group: str
    what: str
    expected: str
    run: Callable[[Path], str]
    quick: bool

    def __str__(self) -> str:
        return f"{self.group}: {self.what}"


FAULTS: list[Fault] = []


def fault(
    group: str, what: str, expected: str, *, quick: bool = True
) -> Callable[[Callable[[Path], str]], Callable[[Path], str]]:
    """Decorator: add a fault."""

    def add(run: Callable[[Path], str]) -> Callable[[Path], str]:
        FAULTS.append(Fault(group, what, expected, run, quick))
        return run

    return add


def attempt(fault: Fault, place: Path) -> dict[str, Any]:
    """Do it, and tell the outcome: `as expected`, `wrong` or `not possible here`."""
    torch.manual_seed(0)
    row = {"group": fault.group, "fault": fault.what, "expected": fault.expected}
    try:
        return {**row, "outcome": "as expected", "seen": short(fault.run(place), place)}
    except NotPossibleHereError as reason:
        return {**row, "outcome": "not possible here", "seen": str(reason)}
    except AssertionError as error:
        return {**row, "outcome": "wrong", "seen": short(str(error), place)}


def short(text: str, place: Path) -> str:
    """One line, without the folder that the fault was done in."""
    text = re.sub(r"\.[0-9a-f]{8}\.part", ".….part", text.replace(f"{place}/", "").replace(str(place), "."))
    return " ".join(text.split())[:400]


def told(call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...], *words: str) -> str:
    """The message of the error that the call raises; it must hold the words."""
    try:
        call()
    except error as raised:
        message = str(raised)
        missing = [word for word in words if word not in message]
        if missing:
            raise AssertionError(f"{type(raised).__name__} says nothing of {missing}: {message}") from raised
        return f"{type(raised).__name__}: {message}"
    except Exception as other:
        raise AssertionError(f"{type(other).__name__} instead of {error}: {other}") from other
    raise AssertionError(f"no error: {error} was expected")


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder, and what is in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
