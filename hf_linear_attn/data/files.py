"""Data sets by split: a file, a folder of files, a saved data set, or one of the Hub, read by the package `datasets`.

Its readers are given the options that keep every row and every text as they are: by default they take the word None for
a missing cell, a quotation mark at the beginning of a text for one that delimits a field, and move the cells of rows
that are longer than the header.
"""

from __future__ import annotations

import csv
import glob
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..utils.extras import require_packages
from ..utils.formatting import near_matches
from ..utils.sources import is_path

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: Rows that are checked at once.
CHECKED_ROWS = 1000

#: Characters of JSON that are read at once: a key need not occur in the first ones.
JSON_CHUNK = 2**30

#: Marks the end of a document in many text files for language models.
END_OF_TEXT = "<|endoftext|>"

DocumentSplit = Literal["auto", "paragraphs", "lines"]
"""What is a document of a text file. See `split_documents`."""

Quoting = Literal["auto", "minimal", "none"]
"""Whether quotation marks delimit the fields of a csv or tsv file (`minimal`) or are text (`none`); `auto`: as the file
shows. See `quotes_delimit`."""

#: Suffix -> reader of `datasets`. All other files are text.
TABLE_FORMATS = {"csv": "csv", "tsv": "csv", "jsonl": "json", "json": "json", "parquet": "parquet"}

#: Suffixes of files that `datasets` decompresses as it reads them.
COMPRESSIONS = (".gz", ".xz", ".bz2")

#: A title of WikiText: one equals sign on each side (titles of sections have more).
_TITLE = re.compile(r" = (?!= ).*(?<! =) = ?")

#: A field of a tsv file that quotation marks delimit, those inside being doubled.
_QUOTED_FIELD = re.compile(r'(?:(?<=[\t\n])|\A)"(?:[^"]|"")*+"(?=[\t\r\n]|\Z)')

#: Other names of the validation split.
ALIASES = {"dev": "validation", "valid": "validation", "val": "validation"}

_SPLIT_FILE = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev)\.[^.]+")


@dataclass(frozen=True)
class Source:
    """A data set by splits."""

    splits: DatasetDict
    notes: tuple[str, ...] = ()  # what was assumed to read it, one sentence each
    name: str = "the data set"  # what messages call it
    files: Mapping[str, Path] = field(default_factory=dict)  # of its splits, where they are files

    def cell_error(self, split: str, row: int, column: str, value: object, problem: str) -> ValueError:
        """Return the error for what stands in one cell. Rows of a file are counted from 0, the first after a header."""
        where = str(self.files.get(split, f"the split {split!r} of {self.name}"))
        return ValueError(
            f"{where}, row {row} (the first is 0): the column {column!r} has {shortened(value)}, {problem}"
        )


def import_datasets() -> Any:
    """Return the package `datasets`. Raises an ImportError with the command that installs it."""
    require_packages("datasets", extra="train", purpose="Reading data")
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def uncompressed_name(path: Path) -> str:
    """Return the file name without the suffix of a compression: `train.jsonl` for `train.jsonl.xz`."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def file_suffix(path: Path) -> str:
    """Return the suffix without dot and without that of a compression: `jsonl` for `train.jsonl.xz`."""
    return Path(uncompressed_name(path)).suffix.lower().removeprefix(".")


def is_table(source: str | Path) -> bool:
    """Return whether the name of a file is that of a table; all other files are text."""
    return file_suffix(Path(source)) in TABLE_FORMATS


def shortened(value: object, length: int = 60) -> str:
    """Return the representation of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def load_source(
    source: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    split_by: DocumentSplit = "auto",
    quoting: Quoting = "auto",
) -> Source:
    """Load the splits of a data set that are trained on and held out: `train`, and those whose names begin with
    `validation`, as dev, valid and val are called, too.

    Args:
        source: A folder made by `save_to_disk`; a file, which becomes the split `train`; a folder with files named by
            split (`train.*`, `dev.*`, `wiki.train.tokens`; others are not read); or, if there is no such file or
            folder, a data set of the Hub. All cells of csv and tsv files are text. Text files have one column, `text`,
            with a document a row.
        config, revision: Of a data set of the Hub.
        split_by: What the documents of a text file are (see `split_documents`).
        quoting: What quotation marks are in csv and tsv files.

    Raises:
        ValueError, OSError: The data are missing, damaged or empty; the message names the file.
    """
    datasets, path = import_datasets(), Path(source).expanduser()
    notes: list[str] = []
    files: dict[str, Path] = {}
    if path.exists():
        if config or revision:
            raise ValueError(f"{source!r} is local; {config or revision!r} applies to data sets of the Hub only.")
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            splits = _load_saved(path)
        else:
            files |= _files_by_split(path) if path.is_dir() else {"train": path}
            splits = {name: read_file(file, notes, split_by, quoting) for name, file in files.items()}
    elif is_path(source) or is_table(source):
        raise FileNotFoundError(f"There is no file or folder {source!r}. Check the path, relative to {Path.cwd()}.")
    else:
        splits = load_hub(source, config, revision, "Connect to the Hub, or give a local file or folder.")
    renamed = datasets.DatasetDict({ALIASES.get(name, name): split for name, split in splits.items()})
    if len(renamed) < len(splits):
        raise ValueError(f"{source!r} has several validation splits: {', '.join(splits)}. Save it with one of them.")
    if "train" not in renamed:
        problem = f"{source!r} has no split 'train', only {', '.join(map(repr, splits))}"
        raise ValueError(f"{problem}. Save it with one of this name.")
    for name in [name for name in renamed if name != "train" and not name.startswith("validation")]:
        renamed.pop(name)  # nothing is done with them, and test splits may have no labels
    empty = [name for name, split in renamed.items() if not len(split)]
    if empty:
        raise ValueError(f"{source!r} has no rows in {', '.join(empty)}. Add some, or save it without empty splits.")
    return Source(renamed, tuple(notes), repr(source), files)


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


def _load_saved(folder: Path) -> Mapping[str, Dataset]:
    datasets = import_datasets()
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, LookupError) as error:
        problem = f"is empty or no complete saved data set ({error})"
        raise OSError(f"{str(folder)!r} {problem}. Save it again.") from error
    return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}


def _files_by_split(folder: Path) -> dict[str, Path]:
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
        missing = "no saved data set and no files named by split (train.*, validation.*)"
        raise FileNotFoundError(f"{str(folder)!r} holds {missing}; found {listed}.")
    return files


def read_file(
    path: Path,
    notes: list[str],
    split_by: DocumentSplit = "auto",
    quoting: Quoting = "auto",
    names: Sequence[str] = (),
    separator: str | None = None,
) -> Dataset:
    """Return the rows of a file; what was assumed to read it is added to the notes.

    `names` are the columns of a csv or tsv file whose first line does not name them, and `separator` stands between its
    cells where its suffix says otherwise. Raises as `load_source`.
    """
    suffix = file_suffix(path)
    near = near_matches(suffix, TABLE_FORMATS)
    if suffix not in TABLE_FORMATS and near:
        raise ValueError(f"The format of {str(path)!r} is unknown.{near} Tables are {', '.join(TABLE_FORMATS)}.")
    if suffix not in TABLE_FORMATS:
        return import_datasets().Dataset.from_dict({"text": text_documents(path, split_by)})
    options: dict[str, Any] = {}
    if suffix in ("csv", "tsv"):
        separator = separator or {"csv": ",", "tsv": "\t"}[suffix]
        options = _csv_options(path, notes, quoting, names, separator)
    elif suffix in ("json", "jsonl"):
        options = {"chunksize": JSON_CHUNK, "encoding": "utf-8-sig"}
    rows = _read(TABLE_FORMATS[suffix], path, **options)
    if suffix == "jsonl" and (blank := len(list(_lines(path))) - len(rows)) > 0:
        notes.append(f"{path.name}: {blank} blank lines are left out.")
    return rows


def _read(reader: str, path: Path, **options: Any) -> Dataset:
    """Return what a reader of `datasets` makes of a file."""
    import pandas as pd

    files = {"train": glob.escape(str(path))}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells that are left out
            return import_datasets().load_dataset(reader, data_files=files, split="train", **options)
    except Exception as error:  # each reader has errors of its own
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that cannot be read, with the reason that lies deepest."""
    if "corresponds to no data" in str(error):
        return ValueError(f"{str(path)!r} has no rows.")
    cause = error.__cause__ or error
    remedy = "Convert it to UTF-8." if isinstance(cause, UnicodeError) else "Correct the file, or fetch it again."
    return ValueError(f"{str(path)!r} cannot be read ({' '.join(str(cause).split())}). {remedy}")


def _csv_options(
    path: Path, notes: list[str], quoting: Quoting, names: Sequence[str], separator: str
) -> dict[str, Any]:
    """Return what `datasets` is given for a csv or tsv file: every cell is text, and stays as it is."""
    import pandas as pd

    datasets = import_datasets()
    if quoting == "auto" and separator == "\t":
        text = "".join(_lines(path))
        quoting = "minimal" if quotes_delimit(text) else "none"
        if '"' in text:
            assumed = "delimit fields" if quoting == "minimal" else "are a part of the text"
            notes.append(f"{path.name}: quotation marks {assumed}; --data.quoting says otherwise.")
    options: dict[str, Any] = {
        "sep": separator,
        "quoting": csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL,
        "encoding": "utf-8-sig",
        "keep_default_na": False,
        "na_filter": False,
        "index_col": False,
    }
    if names:
        options |= {"names": list(names), "header": None}
    try:
        columns = pd.read_csv(path, nrows=0, **options).columns
    except (ValueError, OSError, EOFError) as error:
        raise _unreadable(path, error) from error
    return {**options, "features": datasets.Features({name: datasets.Value("string") for name in columns})}


def _lines(path: Path, newline: str | None = "\n") -> Iterator[str]:
    """Yield the lines of a UTF-8 file, decompressed, with their ends; with `newline=None` these all become `\\n`."""
    import fsspec

    try:
        with fsspec.open(path, "rt", compression="infer", encoding="utf-8-sig", newline=newline) as file:
            yield from file
    except Exception as error:  # each compression has errors of its own
        raise _unreadable(path, error) from error


def quotes_delimit(text: str) -> bool:
    """Return whether quotation marks delimit fields of a tsv file, as pandas and spreadsheets write them.

    They do if every quotation mark belongs to a field that begins and ends with one and doubles those inside, if all
    rows then have as many fields, and if anything speaks for it: a doubled mark, marks in the header, or rows that have
    different numbers of fields otherwise. In most files of GLUE they are a part of the text.
    """
    without = _QUOTED_FIELD.sub("x", text)
    if '"' in without or not _is_regular(without):
        return False
    doubled = any('""' in field[1:-1] for field in _QUOTED_FIELD.findall(text))
    return doubled or '"' in text.partition("\n")[0] or not _is_regular(text)


def _is_regular(text: str) -> bool:
    return len({line.count("\t") for line in text.split("\n") if line.strip("\r")}) < 2


def text_documents(path: Path, split_by: DocumentSplit = "auto") -> list[str]:
    """Return the documents of a UTF-8 text file (see `split_documents`). Raises as `load_source`."""
    parts = split_documents("".join(_lines(path, newline=None)), uncompressed_name(path), split_by)
    if not parts:
        raise ValueError(f"{str(path)!r} has no rows.")
    return parts


def split_documents(text: str, name: str, split_by: DocumentSplit = "auto") -> list[str]:
    """Return the documents of a text, without repetitions.

    Args:
        text: A text.
        name: The name of its file.
        split_by: `"lines"`: each line is a document. `"paragraphs"`: blank lines separate documents. `"auto"`: the
            articles of a WikiText file, the lines of a SMILES file (`.smi`), the parts between `<|endoftext|>` if it
            occurs, and otherwise the whole text as one document.
    """
    if split_by == "auto" and name.startswith("wiki.") and name.endswith((".tokens", ".raw")):
        return split_articles(text)
    if split_by == "lines" or (split_by == "auto" and name.endswith(".smi")):
        parts = text.split("\n")
    elif split_by == "paragraphs":
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


#: What to do without labels.
UNLABELLED = "Without labels, give --task_type: causal-lm for a decoder, embedding or masked-lm for an encoder."


def check_columns(splits: DatasetDict, columns: Sequence[str], labels: Sequence[str] = ()) -> None:
    """Raise a ValueError with near matches if a column, of text or one of labels, is missing in a split."""
    for existing, column in itertools.product(splits.column_names.values(), columns):
        if column not in existing:
            near, listed = near_matches(column, existing), ", ".join(existing)
            remedy = "Name yours with --data.text_columns and --data.label_column."
            unlabelled = f" {UNLABELLED}" if column in labels else ""
            raise ValueError(f"The data set has no column {column!r}.{near} Columns: {listed}. {remedy}{unlabelled}")


def check_text(source: Source, columns: Sequence[str]) -> None:
    """Raise a ValueError that names file, row and column where what is in a split is not text."""
    datasets = import_datasets()
    remedy = "Write text there, remove the row, or name another column with --data.text_columns."
    for (name, split), column in itertools.product(source.splits.items(), columns):
        rows, feature = split.select_columns([column]), split.features[column]
        # (A column of several kinds is `Json`, whose text in the Arrow table is that of JSON.)
        if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
            tables = rows.with_format("arrow").iter(CHECKED_ROWS)
            if not any(table[column].null_count for table in tables):
                continue
        for row, value in enumerate(rows[column]):
            if not isinstance(value, str):
                raise source.cell_error(name, row, column, value, f"which is no text. {remedy}")
