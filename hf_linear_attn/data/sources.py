"""Data sets: a saved data set, local files of the usual formats, a folder of them by split, or a Hub set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.extras import require_packages
from ..utils.formatting import near_matches
from ..utils.sources import is_path
from .files import FORMATS, Documents, file_suffix, read_table, uncompressed_name, with_numbers
from .text import validation_rows

if TYPE_CHECKING:
    from datasets import DatasetDict

#: Other names of the validation split.
ALIASES = {"dev": "validation", "valid": "validation", "val": "validation"}

_SPLIT_FILE = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev|test)\.[^.]+")


def import_datasets() -> Any:
    """Return the package `datasets`. Raises an ImportError with the command that installs it."""
    require_packages("datasets", extra="train", purpose="Reading data sets")
    import datasets

    return datasets


def load_source(
    source: str, *, config: str | None = None, revision: str | None = None, documents: Documents = "auto"
) -> DatasetDict:
    """Load a data set by splits.

    Args:
        source: One of
            - a folder made by `save_to_disk`;
            - a file: csv, tsv (without quoting: a tab always separates two columns), json, jsonl, parquet, fasta
              (columns `description`, `sequence`), or text (txt, text, smi, tokens, raw); all also as `.xz` or `.gz`.
              It becomes the split `train`. Text has one column, `text`, with one document per row (see
              `documents`);
            - a folder with such files named by split: `train.*`, `validation.*` (or dev, valid, val), `test.*`,
              `wiki.train.tokens`. Other files in it are not read;
            - the name of a Hub set, if no file or folder has this name.
        config: Configuration of the Hub set.
        revision: Branch, tag or commit of the Hub set.
        documents: What the documents of a text file are: lines, paragraphs, or as `data.files.text_documents` says.

    Returns:
        The splits; dev, valid and val are renamed to validation.
    """
    datasets, path = import_datasets(), Path(source).expanduser()
    if path.exists():
        if config or revision:
            raise ValueError(f"{source!r} is local; {config or revision!r} applies to data sets of the Hub only.")
        splits = _load_folder(path, documents) if path.is_dir() else _load_files({"train": path}, documents)
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


def _load_folder(folder: Path, documents: Documents) -> DatasetDict:
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
    return _load_files(files, documents)


def _load_files(files: Mapping[str, Path], documents: Documents) -> DatasetDict:
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
        tables = with_numbers(tables)
    splits = datasets.DatasetDict()
    for split, table in tables.items():
        try:
            splits[split] = datasets.Dataset.from_dict(table)
        except (ValueError, TypeError) as error:  # Arrow's own errors are subclasses of these
            raise ValueError(f"{files[split]}: a column has values of different kinds ({error}).") from error
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
    for existing in splits.column_names.values():
        for column in columns:
            if column not in existing:
                near, listed = near_matches(column, existing), ", ".join(existing)
                remedy = "Name yours with --data.text_columns and --data.label_column."
                raise ValueError(f"The data set has no column {column!r}.{near} Columns: {listed}. {remedy}")
