"""Files of JSON lines that several runs append to, and that survive a killed process."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import atomic_write


class JsonLinesFile:
    """One JSON object per line. A line is complete when its line feed is written.

    A process that is killed while it writes leaves an incomplete last line. `read` ignores that line, and `append`
    removes it before it writes. The file need not exist: the first `append` creates it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of all complete lines, none if the file does not exist; other lines are a ValueError."""
        if not self.path.exists():
            return []
        rows = []
        # We split at line feeds only: JSON strings may contain separators such as U+2028, at which splitlines splits.
        complete_lines = self.path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(complete_lines, start=1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
            except ValueError as error:
                where = f"{str(self.path)!r}, line {number}"
                raise ValueError(f"{where} is not a JSON object ({error}). Remove or repair the line.") from error
            rows.append(row)
        return rows

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append one line per row, and wait until the operating system has written them to the disk.

        NaN and infinity, which JSON does not know, are a ValueError (see `utils.environment.json_safe`).
        """
        content = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            with suppress(ImportError):
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read() not in (b"", b"\n"):  # an incomplete last line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file, atomically, without the rows for which `condition` is true."""
        rows = [row for row in self.read() if not condition(row)]
        if self.path.exists():
            atomic_write(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
