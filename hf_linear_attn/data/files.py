"""Readers of local files, decompressed by suffix, with errors that name the file, the line and the value.

`datasets` reads the same formats; its errors do not name the line, and it takes a row with a missing cell for a null.
"""

import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..utils.formatting import near_matches

#: Column -> values.
Table = dict[str, list[Any]]

#: Line number and cells by column, of each row of a file.
Rows = Iterator[tuple[int, dict[str, Any]]]

REMEDY = "Correct the line or remove it."

#: Marks the end of a document in many text files for language models.
END_OF_TEXT = "<|endoftext|>"

Documents = Literal["auto", "paragraphs", "lines"]
"""What is a document of a text file. See `text_documents`."""

#: How a file with this suffix is decompressed.
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}

_INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")

#: A title of WikiText: one equals sign on each side (titles of sections have more).
_TITLE = re.compile(r" = (?!= ).*(?<! =) = ?")


def file_suffix(path: Path) -> str:
    """Return the suffix without dot and without that of a compression: `jsonl` for `train.jsonl.xz`."""
    return Path(uncompressed_name(path)).suffix.lower().removeprefix(".")


def uncompressed_name(path: Path) -> str:
    """Return the file name without the suffix of a compression: `train.jsonl` for `train.jsonl.xz`."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without a byte order mark, decompressed if its name ends in `.xz` or `.gz`."""
    content = _read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{location(path, line)}: not UTF-8 text ({error}). Convert the file.") from error
    if not text.strip():
        raise ValueError(f"{str(path)!r} is empty.")
    return text


def _read_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        return COMPRESSIONS[path.suffix](content) if path.suffix in COMPRESSIONS else content
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise OSError(f"{str(path)!r} is not a complete {path.suffix} file ({error}). Fetch it again.") from error


def read_table(path: Path, documents: Documents = "auto") -> Table:
    """Return the columns of a file in a format of `FORMATS`; `documents` is for text (see `text_documents`).

    Raises:
        ValueError: The format is unknown, or the file is empty, or not UTF-8 text, or has a bad row (it is named).
        OSError: The file is missing, unreadable or damaged.
    """
    suffix = file_suffix(path)
    if suffix not in FORMATS:
        known = f"{', '.join(FORMATS)}; all also as .xz or .gz"
        raise ValueError(f"The format of {str(path)!r} is unknown.{near_matches(suffix, FORMATS)} Known: {known}.")
    table: Table = {}
    text = suffix in TEXT_FORMATS
    for line, row in _document_rows(path, documents) if text else FORMATS[suffix](path):
        table = table or {name: [] for name in row}
        if row.keys() != table.keys():
            raise ValueError(f"{location(path, line)}: the keys {', '.join(row)}, expected {', '.join(table)}.")
        for name, value in row.items():
            table[name].append(value)
    if not table:
        raise ValueError(f"{str(path)!r} has no rows.")
    return table


def location(path: Path, line: int) -> str:
    """Return file and line for an error message."""
    return f"{path}, line {line}"


def shortened(value: object, length: int = 60) -> str:
    """Return the representation of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines. Other separators than \\n and \\r\\n may be text."""
    lines = text.removesuffix("\n").split("\n")
    return enumerate((line.removesuffix("\r") for line in lines), start=1)


def _csv_rows(path: Path) -> Rows:
    # Line ends inside quotes belong to the cell, hence newline="".
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    limit = csv.field_size_limit(2**31 - 1)  # documents are longer than the default of 128 kB
    try:
        yield from _named_cells(path, ((reader.line_num, cells) for cells in reader if cells))
    except csv.Error as error:
        raise ValueError(f"{location(path, reader.line_num)}: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def tsv_rows(path: Path, names: Sequence[str] = (), widths: Sequence[int] = ()) -> Rows:
    """Yield line number and cells by column of a file in which a tab always separates two columns.

    `names` are the columns where the first line does not name them, and `widths` the numbers of cells that a row may
    have, by default as many as there are names. Raises as `read_table`.
    """
    return _named_cells(path, ((line, text.split("\t")) for line, text in _lines(read_text(path))), names, widths)


def _named_cells(
    path: Path, rows: Iterator[tuple[int, list[str]]], names: Sequence[str] = (), widths: Sequence[int] = ()
) -> Rows:
    if not names:
        line, names = next(rows)
        repeated = sorted({name for name in names if names.count(name) > 1 or not name})
        if repeated:
            listed = ", ".join(map(repr, repeated))
            raise ValueError(f"{location(path, line)}: the header has empty or repeated names: {listed}.")
    widths = widths or (len(names),)
    for line, cells in rows:
        if len(cells) not in widths:
            counts = f"{len(cells)} columns, expected {' or '.join(map(str, widths))}"
            raise ValueError(f"{location(path, line)}: {counts}; found {shortened(cells)}. {REMEDY}")
        yield line, dict(zip(names, cells, strict=False))


def json_rows(path: Path) -> Rows:
    """Yield number and object of each line of JSON, or of a JSON file each entry of a list. Raises as `read_table`."""
    text = read_text(path)
    is_list = file_suffix(path) == "json" and text.lstrip().startswith("[")
    for line, part in [(1, text)] if is_list else _lines(text):
        try:
            value = json.loads(part)
        except json.JSONDecodeError as error:
            where = location(path, line + error.lineno - 1)
            raise ValueError(f"{where}: no JSON ({error}); found {shortened(part)}.") from error
        for number, row in enumerate(value, start=1) if is_list else [(line, value)]:
            if not isinstance(row, dict):
                where = f"{path}, entry {number}" if is_list else location(path, line)
                raise ValueError(f"{where}: expected a JSON object, found {shortened(row)}.")
            yield number, row


def _parquet_rows(path: Path) -> Rows:
    import pyarrow.parquet as parquet

    try:
        return enumerate(parquet.read_table(io.BytesIO(_read_bytes(path))).to_pylist())
    except (ValueError, OSError) as error:  # Arrow's own errors are subclasses of these
        raise OSError(f"{str(path)!r} is not a readable Parquet file ({error}).") from error


def _document_rows(path: Path, documents: Documents = "auto") -> Rows:
    return enumerate({"text": document} for document in text_documents(path, documents))


def text_documents(path: Path, documents: Documents = "auto") -> list[str]:
    """Return the documents of a text file, without repetitions.

    Args:
        path: A UTF-8 file.
        documents: `"lines"`: each line is a document. `"paragraphs"`: blank lines separate documents. `"auto"`: the
            articles of a WikiText file, the lines of a SMILES file (`.smi`), the parts between `<|endoftext|>` if it
            occurs, and otherwise the whole file as one document of running text.

    Raises:
        ValueError, OSError: As `read_text`.
    """
    text, name = read_text(path).replace("\r\n", "\n"), uncompressed_name(path)
    if documents == "auto" and name.startswith("wiki.") and name.endswith((".tokens", ".raw")):
        return split_articles(text)
    if documents == "lines" or (documents == "auto" and file_suffix(path) == "smi"):
        parts = text.split("\n")
    elif documents == "paragraphs":
        parts = re.split(r"\n[ \t]*\n", text)
    else:
        parts = text.split(END_OF_TEXT)
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def split_articles(text: str) -> list[str]:
    """Return the articles of a WikiText file, each from its title ` = Title = ` (between blank lines) to the next.

    Text before the first title is an article of its own. Lines stay as they are.
    """
    lines = text.split("\n")
    blank = [not line.strip() for line in lines]
    starts = [
        index
        for index, line in enumerate(lines)
        if _TITLE.fullmatch(line) and (index == 0 or blank[index - 1]) and (index + 1 == len(lines) or blank[index + 1])
    ]
    bounds = zip([0, *starts], [*starts, len(lines)], strict=True)
    articles = ["\n".join(lines[start:end]) for start, end in bounds]
    return [article for article in articles if article.strip()]


def _fasta_rows(path: Path) -> Rows:
    beginning, *records = re.split(r"^>", read_text(path), flags=re.MULTILINE)
    if beginning.strip():
        first = shortened(beginning.strip().partition("\n")[0])
        raise ValueError(f"{location(path, 1)}: a FASTA record starts with '>', found {first}.")
    for number, record in enumerate(records):
        description, _, sequence = record.partition("\n")
        if not sequence.strip():
            raise ValueError(f"{path}: the record {shortened(description.strip())} has no sequence.")
        yield number, {"description": description.strip(), "sequence": "".join(sequence.split())}


#: Suffixes of plain text, which is split into documents.
TEXT_FORMATS = ("txt", "text", "smi", "tokens", "raw")

#: Suffix -> reader.
FORMATS: dict[str, Callable[[Path], Rows]] = {
    "csv": _csv_rows,
    "tsv": tsv_rows,
    "jsonl": json_rows,
    "json": json_rows,
    "parquet": _parquet_rows,
    **dict.fromkeys(TEXT_FORMATS, _document_rows),
    **dict.fromkeys(("fasta", "fa"), _fasta_rows),
}


def with_numbers(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return tables of text cells in which columns of numbers only, in every split, are numbers; empty cells are None.

    Codes such as 0012 stay text.
    """
    converted: dict[str, Table] = {split: {} for split in tables}
    for name in next(iter(tables.values())):
        cells = [cell for table in tables.values() for cell in table[name] if cell]
        kinds: tuple[tuple[Callable[[str], Any], re.Pattern[str]], ...] = ((int, _INTEGER), (float, _NUMBER))
        convert = next((kind for kind, form in kinds if cells and all(map(form.fullmatch, cells))), str)
        for split, table in tables.items():
            converted[split][name] = [convert(cell) if cell or convert is str else None for cell in table[name]]
    return converted
