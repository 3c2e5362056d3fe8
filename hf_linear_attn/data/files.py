"""Data sets: local files of the usual formats, a folder of them by split, a saved data set, or one of the Hub.

Readers decompress by suffix, and their errors name the file, the line and the value. `datasets` reads the same formats;
its errors do not name the line, and it takes a row with a missing cell for a null.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..utils.extras import require_packages
from ..utils.formatting import near_matches
from ..utils.sources import is_path

if TYPE_CHECKING:
    from datasets import DatasetDict

#: Column -> values.
Table = dict[str, list[Any]]

#: Line number and cells by column, of each row of a file.
Rows = Iterator[tuple[int, dict[str, Any]]]

REMEDY = "Correct the line or remove it."

#: Rows that are checked at once.
CHECKED_ROWS = 1000

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


def _classes(path: Path) -> dict[str, Any]:
    """Return the columns of a Parquet file that `datasets` wrote as classes, with the names of these."""
    if file_suffix(path) != "parquet":
        return {}
    import pyarrow.parquet as parquet

    schema = parquet.read_schema(io.BytesIO(_read_bytes(path)) if path.suffix in COMPRESSIONS else path)
    saved = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = saved.get("info", {}).get("features", {})
    classes = {name: one["names"] for name, one in features.items() if one.get("_type") == "ClassLabel"}
    return {name: import_datasets().ClassLabel(names=names) for name, names in classes.items()}


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


def with_numbers(tables: Mapping[str, Table], text_columns: Sequence[str] = ()) -> dict[str, Table]:
    """Return tables of text cells in which columns of numbers only, in every split, are numbers; empty cells are None.

    Codes such as 0012 stay text, and so do the cells of `text_columns`.
    """
    converted: dict[str, Table] = {split: {} for split in tables}
    for name in next(iter(tables.values())):
        cells = [cell for table in tables.values() for cell in table[name] if cell and name not in text_columns]
        kinds: tuple[tuple[Callable[[str], Any], re.Pattern[str]], ...] = ((int, _INTEGER), (float, _NUMBER))
        convert = next((kind for kind, form in kinds if cells and all(map(form.fullmatch, cells))), str)
        for split, table in tables.items():
            converted[split][name] = [convert(cell) if cell or convert is str else None for cell in table[name]]
    return converted


def validation_rows(count: int, share: float) -> list[int]:
    """Return the indices of a share of so many rows, at least one, in order.

    They depend on nothing else, a seed included: what one command trains on, no other one measures on.
    """
    return sorted(random.Random(0).sample(range(count), max(1, round(share * count))))


#: Other names of the validation split.
ALIASES = {"dev": "validation", "valid": "validation", "val": "validation"}

_SPLIT_FILE = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev|test)\.[^.]+")


def import_datasets() -> Any:
    """Return the package `datasets`. Raises an ImportError with the command that installs it."""
    require_packages("datasets", extra="train", purpose="Reading data sets")
    import datasets

    return datasets


def load_source(
    source: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    documents: Documents = "auto",
    text_columns: Sequence[str] = (),
) -> DatasetDict:
    """Load a data set by splits, of which dev, valid and val are renamed to validation.

    Args:
        source: A folder made by `save_to_disk`; a file in a format of `FORMATS`, which becomes the split `train`; a
            folder with such files named by split (`train.*`, `dev.*`, `wiki.train.tokens`; others are not read); or, if
            there is no such file or folder, a data set of the Hub. Text has one column, `text`, with a document a row.
        config, revision: Of a data set of the Hub.
        documents: What the documents of a text file are (see `text_documents`).
        text_columns: Columns of a csv or tsv file that are text, whatever they hold. Others with numbers only are
            numbers.
    """
    datasets, path = import_datasets(), Path(source).expanduser()
    if path.exists():
        if config or revision:
            raise ValueError(f"{source!r} is local; {config or revision!r} applies to data sets of the Hub only.")
        local = (documents, text_columns)
        splits = _load_folder(path, *local) if path.is_dir() else _load_files({"train": path}, *local)
    elif is_path(source) or file_suffix(path) in FORMATS:
        raise FileNotFoundError(f"There is no file or folder {source!r}. Check the path, relative to {Path.cwd()}.")
    else:
        splits = load_hub(source, config, revision, "Connect to the Hub, or give a local file or folder.")
    renamed = datasets.DatasetDict({ALIASES.get(name, name): split for name, split in splits.items()})
    if len(renamed) < len(splits):
        raise ValueError(f"{source!r} has several validation splits: {', '.join(splits)}. Save it with one of them.")
    empty = [name for name, split in renamed.items() if not len(split)]
    if empty:
        raise ValueError(f"{source!r} has no rows in {', '.join(empty)}.")
    return renamed


def load_hub(name: str, config: str | None, revision: str | None, remedy: str) -> Any:
    """Load a data set of the Hub, or of the local cache of it.

    Raises:
        OSError: The data set cannot be reached (the message ends with the remedy), or there is none of this name.
        ValueError: It has no such configuration or revision.
    """
    options = "".join(f", {key} {value!r}" for key, value in (("config", config), ("revision", revision)) if value)
    description = f"the Hub data set {name!r}{options}"
    try:
        return import_datasets().load_dataset(name, config, revision=revision)
    except ValueError as error:
        raise ValueError(f"Could not load {description}: {error}") from error
    except Exception as error:
        # Which library fails first without a network, and with which class, depends on the versions.
        raise OSError(f"Could not load {description} ({type(error).__name__}: {error}). {remedy}") from error


def _load_folder(folder: Path, documents: Documents, text_columns: Sequence[str]) -> DatasetDict:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        datasets = import_datasets()
        try:
            saved = datasets.load_from_disk(str(folder))
            return saved if isinstance(saved, datasets.DatasetDict) else datasets.DatasetDict({"train": saved})
        except (OSError, ValueError, LookupError) as error:
            problem = f"is empty or no complete saved data set ({error})"
            raise OSError(f"{str(folder)!r} {problem}. Save it again.") from error
    files: dict[str, Path] = {}
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        match = _SPLIT_FILE.fullmatch(uncompressed_name(folder / name))
        if match is None:
            continue
        split = ALIASES.get(match[1], match[1])
        if split in files:
            raise ValueError(f"{str(folder)!r} has two files for {split}: {files[split].name}, {name}. Remove one.")
        files[split] = folder / name
    if not files:
        listed = ", ".join(names[:10]) or "nothing"
        missing = "no saved data set and no files named by split (train.*, validation.*, test.*)"
        raise FileNotFoundError(f"{str(folder)!r} holds {missing}; found {listed}.")
    return _load_files(files, documents, text_columns)


def _load_files(files: Mapping[str, Path], documents: Documents, text_columns: Sequence[str]) -> DatasetDict:
    datasets = import_datasets()
    tables = {split: read_table(path, documents) for split, path in files.items()}
    suffixes = set(map(file_suffix, files.values()))
    if len(suffixes) > 1:
        listed = ", ".join(path.name for path in files.values())
        raise ValueError(f"The files of one data set have different formats: {listed}. Convert them to one.")
    first = next(iter(files))
    for split, table in tables.items():
        if list(table) != list(tables[first]):
            columns = [f"{files[name]} has the columns {', '.join(tables[name])}" for name in (split, first)]
            raise ValueError(f"{', but '.join(columns)}. The files of one data set need the same.")
    if suffixes <= {"csv", "tsv"}:
        tables = with_numbers(tables, text_columns)
    splits = datasets.DatasetDict()
    for split, table in tables.items():
        try:
            splits[split] = datasets.Dataset.from_dict(table)
        except (ValueError, TypeError) as error:  # Arrow's own errors are subclasses of these
            raise ValueError(f"{files[split]}: a column has values of different kinds ({error}).") from error
        for name, feature in _classes(files[split]).items():
            if unknown := set(tables[split][name]) - {None, -1, *range(feature.num_classes)}:
                known = ", ".join(feature.names)
                raise ValueError(f"{files[split]}: {name} is {min(unknown)}, but its classes are 0 and up: {known}.")
            splits[split] = splits[split].cast_column(name, feature)
    return splits


def hold_out_validation(splits: DatasetDict, share: float) -> DatasetDict:
    """Return the data set with a `share` of the rows of `train` (see `validation_rows`) as the split `validation`.

    Rows stay in their order. A ValueError if no row would be left to train on.
    """
    train = splits["train"]
    validation = validation_rows(len(train), share)
    if len(validation) >= len(train):
        rows = f"{len(validation)} of {len(train)} rows"
        raise ValueError(f"{rows} cannot be held out for validation. Give more rows, or a file for validation.")
    rest = train.select(sorted({*range(len(train))} - {*validation}))
    return import_datasets().DatasetDict({**splits, "train": rest, "validation": train.select(validation)})


def check_columns(splits: DatasetDict, columns: Sequence[str]) -> None:
    """Raise a ValueError with near matches if a column is missing in a split."""
    for existing, column in itertools.product(splits.column_names.values(), columns):
        if column not in existing:
            near, listed = near_matches(column, existing), ", ".join(existing)
            remedy = "Name yours with --data.text_columns and --data.label_column."
            raise ValueError(f"The data set has no column {column!r}.{near} Columns: {listed}. {remedy}")


def check_text(splits: DatasetDict, columns: Sequence[str], source: str) -> None:
    """Raise a ValueError that names source, row and column where what is in a split is not text."""
    for name, column in itertools.product(splits, columns):
        is_text = getattr(splits[name].features[column], "dtype", "") in ("string", "large_string")
        tables = splits[name].select_columns([column]).with_format("arrow").iter(CHECKED_ROWS)
        for number, values in enumerate(table[column] for table in tables):
            if is_text and not values.null_count:
                continue
            for row, value in enumerate(values.to_pylist(), start=number * CHECKED_ROWS):
                if not isinstance(value, str):
                    where = f"{source}, row {row} of {name} (the first is 0)"
                    remedy = "Write text there, remove the row, or name another column with --data.text_columns."
                    problem = f"the column {column!r} has {shortened(value)}, which is no text"
                    raise ValueError(f"{where}: {problem}. {remedy}")
