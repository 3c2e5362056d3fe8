"""Readers of local files, decompressed by suffix, with errors that name the file, the line and the value.

`datasets` reads the same formats; its errors do not name the line, and it takes a row with a missing cell for a null.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Column -> values.
Table = dict[str, list[Any]]

#: Marks the end of a document in many text files for language models.
END_OF_TEXT = "<|endoftext|>"

#: How a file with this suffix is decompressed.
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

#: A title of WikiText: one equals sign on each side (titles of sections have more).
_TITLE = re.compile(r" = (?!= ).*(?<! =) = ?")


def file_suffix(path: Path) -> str:
    """Return the suffix without dot and without that of a compression: `jsonl` for `train.jsonl.xz`."""
    return Path(uncompressed_name(path)).suffix.lower().removeprefix(".")


def uncompressed_name(path: Path) -> str:
    """Return the file name without the suffix of a compression: `train.jsonl` for `train.jsonl.xz`."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without a byte order mark, decompressed if its name ends in `.xz` or `.gz`.

    Raises:
        OSError: The file is missing, unreadable, or damaged.
        ValueError: The file is not UTF-8 text, or empty.
    """
    content = path.read_bytes()
    decompress = COMPRESSIONS.get(path.suffix)
    if decompress is not None:
        try:
            content = decompress(content)
        except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
            raise OSError(f"{str(path)!r} is no complete {path.suffix} file ({error}). Fetch it again.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{location(path, line)}: not UTF-8 text ({error}). Convert the file.") from error
    if not text.strip():
        raise ValueError(f"{str(path)!r} is empty.")
    return text


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file; errors as `read_text`. Other separators than \\n and \\r\\n may be text."""
    lines = read_text(path).split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_table(path: Path) -> Table:
    """Return the columns of a file in a format of `FORMATS`.

    Raises:
        ValueError: The file is empty, not UTF-8 text, or has a bad row. The message names file and line.
        OSError: The file is missing, unreadable or damaged.
    """
    table = FORMATS[file_suffix(path)](path)
    if not table or not next(iter(table.values())):
        raise ValueError(f"{str(path)!r} holds no rows.")
    return table


def json_objects(path: Path, required: Sequence[str] = ()) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yield line number and object of each line of a JSON-lines file. Raises a ValueError if a key is missing."""
    for line, text in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{location(path, line)}: no JSON ({error}); found {shortened(text)}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{location(path, line)}: expected a JSON object, found {shortened(text)}.")
        missing = [key for key in required if key not in row]
        if missing:
            keys = ", ".join(map(str, row))
            raise ValueError(f"{location(path, line)}: no {', '.join(missing)}; found the keys {keys}.")
        yield line, row


def location(path: Path, line: int) -> str:
    """Return file and line for an error message."""
    return f"{path}, line {line}"


def shortened(value: object, length: int = 60) -> str:
    """Return the representation of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


# --------------------------------------------------------------------------------------------------------------------
# Formats


def _read_csv(path: Path) -> Table:
    # Line ends inside quotes belong to the cell, hence newline="".
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    limit = csv.field_size_limit(2**31 - 1)  # documents are longer than the default of 128 kB
    try:
        return _columns(path, ((reader.line_num, row) for row in reader if row))
    except csv.Error as error:
        raise ValueError(f"{location(path, reader.line_num)}: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _read_tsv(path: Path) -> Table:
    return _columns(path, ((line, row.split("\t")) for line, row in enumerate(read_lines(path), start=1)))


def _columns(path: Path, numbered_rows: Iterable[tuple[int, list[str]]]) -> Table:
    rows = iter(numbered_rows)
    line, header = next(rows)
    repeated = sorted({name for name in header if header.count(name) > 1 or not name})
    if repeated:
        names = ", ".join(map(repr, repeated))
        raise ValueError(f"{location(path, line)}: the header has empty or repeated names: {names}.")
    table: Table = {name: [] for name in header}
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"{location(path, line)}: {len(row)} columns, expected {len(header)}; found {shortened(row)}."
            )
        for name, cell in zip(header, row, strict=True):
            table[name].append(cell)
    return table


def _read_json_lines(path: Path) -> Table:
    return _object_columns(path, json_objects(path))


def _read_json(path: Path) -> Table:
    """A list of objects, or one object per line."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{location(path, error.lineno)}: no JSON ({error}).") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {number}: expected a JSON object, found {shortened(row)}.")
    return _object_columns(path, enumerate(rows, start=1))


def _object_columns(path: Path, rows: Iterable[tuple[int, dict[Any, Any]]]) -> Table:
    table: Table = {}
    for line, row in rows:
        if not table:
            table = {name: [] for name in row}
        if row.keys() != table.keys():
            raise ValueError(f"{location(path, line)}: the keys {', '.join(row)}, expected {', '.join(table)}.")
        for name, value in row.items():
            table[name].append(value)
    return table


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet as parquet

    try:
        return parquet.read_table(path).to_pydict()
    except (ValueError, OSError) as error:
        raise OSError(f"{str(path)!r} is no readable Parquet file ({error}).") from error


def _read_documents(path: Path) -> Table:
    text, name = read_text(path), uncompressed_name(path)
    wikitext = name.startswith("wiki.") and name.endswith((".tokens", ".raw"))
    return {"text": split_articles(text) if wikitext else split_documents(text)}


def split_documents(text: str) -> list[str]:
    """Return the documents of a text, without repetitions.

    The text is split at `<|endoftext|>` if it occurs. A text with blank lines is one running document; a text without
    any has one document per line (sentences, SMILES strings, log lines).
    """
    text = text.replace("\r\n", "\n")
    separator = END_OF_TEXT if END_OF_TEXT in text else "\n"
    parts = [text] if separator == "\n" and "\n\n" in text.strip() else text.split(separator)
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def split_articles(text: str) -> list[str]:
    """Return the articles of a WikiText file, each from its title ` = Title = ` (between blank lines) to the next.

    Text before the first title is an article of its own. Lines stay as they are.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    blank = [not line.strip() for line in lines]
    starts = [
        index
        for index, line in enumerate(lines)
        if _TITLE.fullmatch(line) and (index == 0 or blank[index - 1]) and (index + 1 == len(lines) or blank[index + 1])
    ]
    bounds = zip([0, *starts], [*starts, len(lines)], strict=True)
    articles = ["\n".join(lines[start:end]) for start, end in bounds]
    return [article for article in articles if article.strip()]


def _read_fasta(path: Path) -> Table:
    descriptions: list[str] = []
    sequences: list[str] = []
    for line, text in enumerate(read_lines(path), start=1):
        if text.startswith(">"):
            descriptions.append(text[1:].strip())
            sequences.append("")
        elif text.strip():
            if not sequences:
                raise ValueError(f"{location(path, line)}: a FASTA record starts with '>', found {shortened(text)}.")
            sequences[-1] += text.strip()
    for description, sequence in zip(descriptions, sequences, strict=True):
        if not sequence:
            raise ValueError(f"{path}: the record {shortened(description)} has no sequence.")
    return {"description": descriptions, "sequence": sequences}


#: Suffixes of plain text, which is split into documents.
TEXT_FORMATS = ("txt", "text", "smi", "tokens", "raw")

#: Suffix -> reader.
FORMATS: dict[str, Callable[[Path], Table]] = {
    "csv": _read_csv,
    "tsv": _read_tsv,
    "jsonl": _read_json_lines,
    "json": _read_json,
    "parquet": _read_parquet,
    **dict.fromkeys(TEXT_FORMATS, _read_documents),
    **dict.fromkeys(("fasta", "fa"), _read_fasta),
}


def with_numbers(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return tables of text cells in which columns of numbers only, in every split, are numbers; empty cells are None.

    Codes such as 0012 stay text.
    """
    converted: dict[str, Table] = {split: {} for split in tables}
    for name in next(iter(tables.values())):
        cells = [cell for table in tables.values() for cell in table[name] if cell]
        convert: Callable[[str], Any] = str
        if cells and all(map(_INTEGER.fullmatch, cells)):
            convert = int
        elif cells and all(map(_NUMBER.fullmatch, cells)) and not any(re.fullmatch(r"0\d+", cell) for cell in cells):
            convert = float
        for split, table in tables.items():
            converted[split][name] = [convert(cell) if cell or convert is str else None for cell in table[name]]
    return converted
