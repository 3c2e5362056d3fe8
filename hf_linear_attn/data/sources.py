"""Text to train on: a saved data set, local files of the usual formats, a folder of them by split, or a Hub set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ..utils.formatting import near_matches
from .files import COMPRESSIONS, import_datasets, load_hub, plain_name
from .formats import FORMATS, read_format, typed

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: Names that the validation split goes by.
ALIASES = {"dev": "validation", "valid": "validation", "val": "validation"}

_SPLIT_FILE = re.compile(r"(?:wiki\.)?(train|validation|valid|val|dev|test)\.[^.]+")


def load_source(
    source: str,
    *,
    config: str | None = None,
    revision: str | None = None,
    split_map: Mapping[str, str] | None = None,
) -> DatasetDict:
    """A data set by splits.

    Args:
        source: one of
            - a folder made by `save_to_disk`;
            - a file: csv, tsv (no quoting: a tab always parts two columns), json, jsonl, parquet, fasta (columns
              `description`, `sequence`), or text (txt, text, smi, tokens, raw); all but parquet also as `.xz` or
              `.gz`. It becomes the split `train`. Text has one column, `text`, a document a row: split as
              `data.text.split_documents` does, WikiText (`wiki.*.tokens`, `wiki.*.raw`) into its articles;
            - a folder with such files named by split: `train.*`, `validation.*` (or dev, valid, val), `test.*`,
              `wiki.train.tokens`. Other files in it are not read;
            - the name of a Hub set, if no file or folder has this name.
        config, revision: of the Hub set.
        split_map: wanted split -> split of the source; only those named are kept. None: all, dev and valid renamed
            to validation.

    Raises:
        OSError: missing, unreadable, or the Hub cannot be reached.
        ValueError: empty; files of different columns or formats, or two for one split; a bad row (file and line are
            named); an unknown split; `config` or `revision` of a local source.
    """
    path = Path(source).expanduser()
    if path.exists():
        given = [f"{name}={value!r}" for name, value in (("config", config), ("revision", revision)) if value]
        if given:
            raise ValueError(f"{source!r} is local; {' and '.join(given)} go with Hub sets only.")
        found = _load_folder(path) if path.is_dir() else _load_files({"train": path})
    elif _looks_local(source):
        raise FileNotFoundError(f"There is no file or folder {source!r}. Check the path, relative to {Path.cwd()}.")
    else:
        remedy = "Connect to the Hub, or give a local file or folder."
        found = _as_dict(load_hub(source, config, revision, remedy))
    found = _choose(found, split_map, source)
    empty = [split for split, part in found.items() if not len(part)]
    if empty:
        raise ValueError(f"{source!r} has no rows in {', '.join(empty)}.")
    return found


def _looks_local(source: str) -> bool:
    path = Path(source)
    suffix = Path(plain_name(path)).suffix
    return source.startswith((".", "/", "~")) or len(path.parts) > 2 or suffix[1:] in FORMATS


def _load_folder(folder: Path) -> DatasetDict:
    datasets = import_datasets()
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        try:
            return _as_dict(datasets.load_from_disk(str(folder)))
        except (OSError, ValueError, LookupError) as error:
            raise OSError(
                f"{str(folder)!r} is empty or no complete saved data set ({error}). Save it again."
            ) from error
    files: dict[str, Path] = {}
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        matched = _SPLIT_FILE.fullmatch(plain_name(folder / name))
        if not matched:
            continue
        split = ALIASES.get(matched[1], matched[1])
        if split in files:
            raise ValueError(f"{str(folder)!r} has two files for {split}: {files[split].name}, {name}. Keep one.")
        files[split] = folder / name
    if not files:
        listed = ", ".join(names[:10]) or "nothing"
        raise FileNotFoundError(
            f"{str(folder)!r} holds no saved data set and no files named by split (train.*, validation.*, test.*); "
            f"found {listed}."
        )
    return _load_files(files)


def _load_files(files: Mapping[str, Path]) -> DatasetDict:
    datasets = import_datasets()
    formats = {split: _format(path) for split, path in files.items()}
    if len(set(formats.values())) > 1:
        listed = ", ".join(path.name for path in files.values())
        raise ValueError(f"The files of one data set have different formats: {listed}. Convert them to one.")
    tables = {split: read_format(formats[split], path) for split, path in files.items()}
    first = next(iter(files))
    for split, table in tables.items():
        if list(table) != list(tables[first]):
            raise ValueError(
                f"{files[split]} has the columns {', '.join(table)}, but {files[first]} has "
                f"{', '.join(tables[first])}. The files of one data set need the same."
            )
    if formats[first] in ("csv", "tsv"):
        tables = typed(tables)
    made = {}
    for split, table in tables.items():
        try:
            made[split] = datasets.Dataset.from_dict(table)
        except (ValueError, TypeError) as error:  # Arrow's own errors derive from these
            raise ValueError(f"{files[split]}: a column holds values of different kinds ({error}).") from error
    return datasets.DatasetDict(made)


def _format(path: Path) -> str:
    suffix = Path(plain_name(path)).suffix.lower().removeprefix(".")
    if suffix not in FORMATS or (suffix == "parquet" and path.suffix in COMPRESSIONS):
        raise ValueError(
            f"The format of {str(path)!r} is unknown.{near_matches(suffix, list(FORMATS))} Known: "
            f"{', '.join(FORMATS)}; all but parquet also as .xz or .gz."
        )
    return suffix


def _as_dict(found: Any) -> DatasetDict:
    datasets = import_datasets()
    if isinstance(found, datasets.DatasetDict):
        return found
    return datasets.DatasetDict({"train": found})


def _choose(found: DatasetDict, split_map: Mapping[str, str] | None, source: str) -> DatasetDict:
    datasets = import_datasets()
    if split_map is None:
        renamed = {split: ALIASES.get(split, split) for split in found}
        if len(set(renamed.values())) < len(renamed):
            raise ValueError(f"{source!r} has several validation splits: {', '.join(found)}. Choose with a split map.")
        return datasets.DatasetDict({renamed[split]: part for split, part in found.items()})
    for split in split_map.values():
        if split not in found:
            raise ValueError(
                f"{source!r} has no split {split!r}.{near_matches(split, list(found))} Splits: {', '.join(found)}."
            )
    return datasets.DatasetDict({wanted: found[split] for wanted, split in split_map.items()})


def hold_out_validation(dataset: DatasetDict, share_or_count: float | int, seed: int) -> DatasetDict:
    """The data set with a `validation` split drawn from `train`: seeded, disjoint, both in their old order.

    Args:
        dataset: with a split `train` and without `validation`; other splits stay.
        share_or_count: a float is a share of the rows in (0, 1), rounded up to at least one; an int is a number.
        seed: of the draw.

    Raises:
        ValueError: no `train` or already a `validation` split, or nothing would be left of either.
        TypeError: `share_or_count` is no number.
    """
    datasets = import_datasets()
    if "train" not in dataset or "validation" in dataset:
        raise ValueError(
            f"A validation split is taken from 'train' where there is none; the splits are {', '.join(dataset)}."
        )
    if isinstance(share_or_count, bool) or not isinstance(share_or_count, (int, float)):
        raise TypeError(f"Give the validation split as a share or a number of rows, got {share_or_count!r}.")
    train = dataset["train"]
    rows = len(train)
    count = share_or_count
    if isinstance(share_or_count, float):
        if not 0 < share_or_count < 1:
            raise ValueError(f"A share of the rows lies between 0 and 1, got {share_or_count!r}. A count is an int.")
        count = max(1, round(share_or_count * rows))
    if not 1 <= count < rows:
        raise ValueError(f"{count} of {rows} rows cannot be held out: both splits need at least one.")
    held = set(Random(seed).sample(range(rows), int(count)))
    rest = {split: part for split, part in dataset.items() if split != "train"}
    kept = train.select([row for row in range(rows) if row not in held])
    return datasets.DatasetDict({"train": kept, "validation": train.select(sorted(held)), **rest})


def check_columns(dataset: Dataset | DatasetDict, columns: Sequence[str], label: str | None) -> None:
    """Raise a ValueError with near matches if a column, or the label column, is missing in a split."""
    names = dataset.column_names
    for present in names.values() if isinstance(names, dict) else [names]:
        for column in [*columns, *([] if label is None else [label])]:
            if column not in present:
                raise ValueError(
                    f"The data set has no column {column!r}.{near_matches(column, present)} "
                    f"Columns: {', '.join(present)}."
                )
