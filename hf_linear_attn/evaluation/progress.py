"""Progress of an evaluation on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

#: Characters that old terminals lack, and what is shown instead.
ASCII = (
    ("★", "*"),
    ("→", "->"),
    ("×", "x"),
    ("•", "-"),
    ("≤", "<="),
    ("–", "-"),
    ("µ", "u"),
    ("±", "+-"),
    ("…", "..."),
)


class Progress(Protocol):
    """What an evaluation reports while it runs."""

    def status(self, message: str) -> None:
        """Report what is being done."""

    def log(self, message: str) -> None:
        """Report a result that stays on the screen."""


class NoProgress:
    """Reports nothing."""

    def status(self, message: str) -> None:
        """Do nothing."""

    def log(self, message: str) -> None:
        """Do nothing."""


class ConsoleProgress:
    """A status line on a rich console, below the results. Used as a context manager.

    Args:
        console: The console; None: stdout.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console

        self.console = console or Console()
        self._status = self.console.status("")

    def __enter__(self) -> ConsoleProgress:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def status(self, message: str) -> None:
        """Show what is being done."""
        from rich.markup import escape

        self._status.update(escape(printable(message, self.console.encoding)))

    def log(self, message: str) -> None:
        """Print a line above the status."""
        text = printable(message, self.console.encoding)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def printable(text: str, encoding: str) -> str:
    """Return the text with replacements for what the terminal's encoding lacks."""
    try:
        text.encode(encoding)
    except LookupError:
        return text
    except UnicodeEncodeError:
        for sign, replacement in ASCII:
            text = text.replace(sign, replacement)
        return text.encode(encoding, "replace").decode(encoding)
    return text
