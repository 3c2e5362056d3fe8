"""Local files and Hub sets: read whole, decompressed by suffix, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path
from typing import Any

HINT = "Data sets need the package datasets: pip install 'hf-linear-attn[train]'"

#: How a file with this suffix is unpacked.
COMPRESSIONS = {".xz": lzma.decompress, ".gz": gzip.decompress}


def import_datasets() -> Any:
    """The package datasets.

    Raises:
        ImportError: it is not installed; with the command that installs it.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(HINT) from error
    return datasets


def plain_name(path: Path) -> str:
    """The file name without the suffix of its compression: `train.jsonl` for `train.jsonl.xz`."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in `.xz` or `.gz`.

    Raises:
        OSError: it is missing, unreadable, or damaged.
    """
    raw = path.read_bytes()
    unpack = COMPRESSIONS.get(path.suffix)
    if unpack is None:
        return raw
    try:
        return unpack(raw)
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise OSError(f"{str(path)!r} is no complete {path.suffix} file ({error}). Fetch it again.") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, unpacked; a byte order mark at its start is dropped, line ends stay as they are.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is no UTF-8 text, or empty.
    """
    raw = read_bytes(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{at(path, line)}: not UTF-8 text ({error}). Convert the file.") from error
    if not text.strip():
        raise ValueError(f"{str(path)!r} is empty.")
    return text


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, ended by `\\n` or `\\r\\n` alone (a separator inside a sentence does not end a row)."""
    lines = read_text(path).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def at(path: Path, line: int) -> str:
    return f"{path}, line {line}"


def shown(text: object, length: int = 60) -> str:
    """A value for an error message, cut if it is long."""
    whole = repr(text)
    return whole if len(whole) <= length else f"{whole[:length]}…"


def load_hub(name: str, config: str | None, revision: str | None, remedy: str) -> Any:
    """A data set of the Hub, or of the local cache of it.

    Raises:
        OSError: it cannot be reached, or there is none of this name.
        ValueError: it has no such config or revision.
    """
    datasets = import_datasets()
    tried = f"the Hub data set {name!r}" + (f", config {config!r}" if config else "")
    tried += f", revision {revision!r}" if revision else ""
    try:
        return datasets.load_dataset(name, config, revision=revision)
    except ValueError as error:
        raise ValueError(f"Could not load {tried}: {error}") from error
    except Exception as error:
        # Which library fails first without a network (and with which class) depends on the versions.
        raise OSError(f"Could not load {tried} ({type(error).__name__}: {error}). {remedy}") from error
