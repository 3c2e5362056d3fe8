"""Readers of local files: path -> columns as lists. One registration a format, by suffix."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import at, plain_name, read_lines, read_text, shown
from .task_files import json_objects
from .text import split_documents

Table = dict[str, list[Any]]

#: Suffix (without dot, after .xz or .gz is taken off) -> reader.
FORMATS: dict[str, Callable[[Path], Table]] = {}

_WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

#: A title of WikiText: one equals sign on each side (sections have more).
_TITLE = re.compile(r" = (?!= ).*(?<! =) = ?")


def _register(*suffixes: str) -> Callable[[Callable[[Path], Table]], Callable[[Path], Table]]:
    def decorate(reader: Callable[[Path], Table]) -> Callable[[Path], Table]:
        FORMATS.update(dict.fromkeys(suffixes, reader))
        return reader

    return decorate


def read_format(suffix: str, path: Path) -> Table:
    """The columns of a file.

    Raises:
        ValueError: empty, no UTF-8, or a bad row, with file and line.
        OSError: missing, unreadable or damaged.
    """
    table = FORMATS[suffix](path)
    if not table or not next(iter(table.values())):
        raise ValueError(f"{str(path)!r} holds no rows.")
    return table


@_register("csv")
def _read_csv(path: Path) -> Table:
    # Line ends inside quotes belong to the cell, hence newline="".
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    limit = csv.field_size_limit(2**31 - 1)  # documents are longer than the default of 128 kB
    try:
        return _table(path, ((reader.line_num, row) for row in reader if row))
    except csv.Error as error:
        raise ValueError(f"{at(path, reader.line_num)}: {error}.") from error
    finally:
        csv.field_size_limit(limit)


@_register("tsv")
def _read_tsv(path: Path) -> Table:
    return _table(path, ((line, row.split("\t")) for line, row in enumerate(read_lines(path), start=1)))


def _table(path: Path, rows: Iterable[tuple[int, list[str]]]) -> Table:
    numbered = iter(rows)
    line, header = next(numbered)
    twice = sorted({name for name in header if header.count(name) > 1 or not name})
    if twice:
        raise ValueError(f"{at(path, line)}: the header has empty or repeated names: {', '.join(map(repr, twice))}.")
    table: Table = {name: [] for name in header}
    for line, row in numbered:
        if len(row) != len(header):
            raise ValueError(f"{at(path, line)}: {len(row)} columns, expected {len(header)}; found {shown(row)}.")
        for name, cell in zip(header, row, strict=True):
            table[name].append(cell)
    return table


def typed(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Columns of which every cell is a number in every split become numbers; empty cells of these are None."""
    made: dict[str, Table] = {split: {} for split in tables}
    for name in next(iter(tables.values())):
        filled = [cell for table in tables.values() for cell in table[name] if cell]
        convert: Callable[[str], Any] = str
        if filled and all(map(_WHOLE.fullmatch, filled)):
            convert = int
        elif filled and all(map(_NUMBER.fullmatch, filled)) and not any(map(_padded_number, filled)):
            convert = float
        for split, table in tables.items():
            made[split][name] = [convert(cell) if cell or convert is str else None for cell in table[name]]
    return made


def _padded_number(cell: str) -> bool:
    """Whether it is a code such as 0012 and no number."""
    return cell.isdigit() and len(cell) > 1 and cell.startswith("0")


@_register("jsonl")
def _read_json_lines(path: Path) -> Table:
    return _objects(path, json_objects(path))


@_register("json")
def _read_json(path: Path) -> Table:
    """A list of objects, or an object a line."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at(path, error.lineno)}: no JSON ({error}).") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {number}: expected a JSON object, found {shown(row)}.")
    return _objects(path, enumerate(rows, start=1))


def _objects(path: Path, rows: Iterable[tuple[int, dict[Any, Any]]]) -> Table:
    table: Table = {}
    for line, row in rows:
        if not table:
            table = {name: [] for name in row}
        if row.keys() != table.keys():
            raise ValueError(f"{at(path, line)}: the keys {', '.join(row)}, expected {', '.join(table)}.")
        for name, value in row.items():
            table[name].append(value)
    return table


@_register("parquet")
def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
    except (ValueError, OSError) as error:
        raise OSError(f"{str(path)!r} is no readable Parquet file ({error}).") from error
    return dict(zip(table.column_names, (column.to_pylist() for column in table.columns), strict=True))


@_register("txt", "text", "smi", "tokens", "raw")
def _read_plain(path: Path) -> Table:
    text = read_text(path)
    wiki = plain_name(path).startswith("wiki.") and plain_name(path).endswith((".tokens", ".raw"))
    return {"text": split_articles(text) if wiki else split_documents(text)}


def split_articles(text: str) -> list[str]:
    """The articles of a WikiText file, each from its title ` = Title = ` (between blank lines) to the next.

    Text before the first title is an article of its own, so that nothing is lost. Lines stay as they are.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    blank = [not line.strip() for line in lines]
    starts = [
        index
        for index, line in enumerate(lines)
        if _TITLE.fullmatch(line) and (index == 0 or blank[index - 1]) and (index + 1 == len(lines) or blank[index + 1])
    ]
    ends = [*starts, len(lines)]
    articles = ["\n".join(lines[start:end]) for start, end in zip([0, *starts], ends, strict=True)]
    return [article for article in articles if article.strip()]


@_register("fasta", "fa")
def _read_fasta(path: Path) -> Table:
    table: Table = {"description": [], "sequence": []}
    parts: list[list[str]] = []
    for line, text in enumerate(read_lines(path), start=1):
        if text.startswith(">"):
            table["description"].append(text[1:].strip())
            parts.append([])
        elif text.strip():
            if not parts:
                raise ValueError(f"{at(path, line)}: a FASTA record starts with '>', found {shown(text)}.")
            parts[-1].append(text.strip())
    table["sequence"] = ["".join(part) for part in parts]
    for description, sequence in zip(table["description"], table["sequence"], strict=True):
        if not sequence:
            raise ValueError(f"{path}: the record {shown(description)} has no sequence.")
    return table
