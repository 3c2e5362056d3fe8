"""What the fault tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Observed = Callable[[str], None]


def error_message(call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...], *parts: str) -> str:
    """The message of the error that the call raises, which must contain the parts."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{raised.type.__name__} does not mention {missing}: {message}"
    return f"{raised.type.__name__}: {message}"


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class CreatesFileWhenUnpickled:
    """Creates a file when it is unpickled, which shows that the pickle was run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
