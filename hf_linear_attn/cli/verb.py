"""What a verb of the command line is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verb:
    """One verb: a summary, the class of its options, and a function of such a config."""

    summary: str
    config_class: type
    run: Callable[[Any], int | None]  # returns the exit code; None: 0
    positionals: tuple[str, ...] = ()  # options that are given without a flag
    examples: str = ""
