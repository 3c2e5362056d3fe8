"""The local files of a labelled task: which names they have, where the columns are, and how a row is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import at, read_lines, shown

REMEDY = "Correct the line or take it out."

Row = tuple[list[str], Any]


@dataclass(frozen=True)
class Layout:
    """One way in which the files of a task are laid out.

    Attributes:
        files: split -> names that its file may have, the first that exists is taken.
        text: where the text columns are: names of a header, or indices in files without one.
        label: where the label is, in the same way.
        header: whether the first line names the columns.
        widths: numbers of columns that rows may have; empty: as many as the header.
        json_lines: each line is a JSON object; `text` and `label` are its keys.
        by_name: whether the labels are written by name; else by number.
    """

    files: Mapping[str, tuple[str, ...]]
    text: tuple[str, ...] | tuple[int, ...]
    label: str | int
    header: bool = True
    widths: tuple[int, ...] = ()
    json_lines: bool = False
    by_name: bool = False


@dataclass(frozen=True)
class LabelReader:
    """Labels as written in a file -> numbers; a float between `low` and `high` if there are no names."""

    names: tuple[str, ...] | None
    by_name: bool
    low: float = 0.0
    high: float = 5.0

    def __call__(self, written: Any) -> float | int:
        """The label as a number; a ValueError says what was expected instead."""
        return self._score(written) if self.names is None else self._index(self.names, str(written))

    def _index(self, names: tuple[str, ...], written: str) -> int:
        known = names if self.by_name else tuple(str(index) for index in range(len(names)))
        if written not in known:
            raise ValueError(f"unknown label {shown(written)}; expected one of {', '.join(known)}")
        return known.index(written)

    def _score(self, written: Any) -> float:
        try:
            score = float(written)
        except (TypeError, ValueError):
            raise ValueError(f"the score {shown(written)} is no number") from None
        if not math.isfinite(score) or not self.low <= score <= self.high:
            raise ValueError(f"the score {shown(written)} is not between {self.low:g} and {self.high:g}")
        return score


def find_files(folders: Sequence[Path], layouts: Sequence[Layout]) -> tuple[Layout, dict[str, Path]]:
    """The layout whose training file lies in one of the folders, and its files by split.

    Raises:
        FileNotFoundError: there is none, or no validation file beside it; all names tried are listed.
    """
    for folder in folders:
        for layout in layouts:
            found = {split: _first(folder, names) for split, names in layout.files.items()}
            held = {split: path for split, path in found.items() if path is not None}
            if "train" not in held:
                continue
            if len(held) == 1:
                tried = [name for split, names in layout.files.items() if split != "train" for name in names]
                raise FileNotFoundError(f"{str(folder)!r} has a training file but none of {', '.join(tried)}.")
            return layout, held
    tried = [str(folder / name) for folder in folders for layout in layouts for name in layout.files["train"]]
    raise FileNotFoundError(f"None of these files exists: {', '.join(dict.fromkeys(tried))}.")


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_rows(path: Path, layout: Layout, labels: LabelReader) -> tuple[list[list[str]], list[float | int]]:
    """All texts and labels of a file, each row checked.

    Raises:
        ValueError: a row has another number of columns, an empty text, an unknown label or no numeric score; or there
            are no rows. The message names file and line.
        OSError: the file is unreadable.
    """
    texts: list[list[str]] = []
    numbers: list[float | int] = []
    rows = _json_rows if layout.json_lines else _table_rows
    for line, (text, label) in rows(path, layout):
        for position, part in enumerate(text):
            if not isinstance(part, str) or not part.strip():
                raise ValueError(
                    f"{at(path, line)}: column {layout.text[position]!r} holds no text: {shown(part)}. {REMEDY}"
                )
        try:
            number = labels(label)
        except ValueError as error:
            raise ValueError(f"{at(path, line)}: {error}. {REMEDY}") from None
        texts.append(text)
        numbers.append(number)
    if not texts:
        raise ValueError(f"{str(path)!r} holds no rows.")
    return texts, numbers


def _table_rows(path: Path, layout: Layout) -> Iterator[tuple[int, Row]]:
    # Quotes are part of the text in these files, so that a row is a line and a tab always parts two columns.
    lines = read_lines(path)
    start, widths = 0, layout.widths
    where = [*layout.text, layout.label]
    if layout.header:
        names = lines[0].split("\t")
        missing = [str(name) for name in where if name not in names]
        if missing:
            raise ValueError(
                f"{at(path, 1)}: the header lacks {', '.join(missing)}; found the columns {', '.join(names)}."
            )
        start, widths = 1, (len(names),)
        where = [names.index(str(name)) for name in where]
    columns = [int(place) for place in where]
    for line, row in enumerate(lines[start:], start=start + 1):
        cells = row.split("\t")
        if len(cells) not in widths:
            expected = " or ".join(map(str, widths))
            raise ValueError(
                f"{at(path, line)}: {len(cells)} columns, expected {expected}; found {shown(row)}. {REMEDY}"
            )
        yield line, ([cells[column] for column in columns[:-1]], cells[columns[-1]])


def _json_rows(path: Path, layout: Layout) -> Iterator[tuple[int, Row]]:
    for line, row in json_objects(path, [str(name) for name in (*layout.text, layout.label)]):
        yield line, ([row[name] for name in layout.text], row[layout.label])


def json_objects(path: Path, required: Sequence[str] = ()) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Line number and object of each line of a JSON-lines file.

    Raises:
        ValueError: a line is no JSON object, or lacks a required key.
    """
    for line, text in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{at(path, line)}: no JSON ({error}); found {shown(text)}.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{at(path, line)}: expected a JSON object, found {shown(text)}.")
        missing = [key for key in required if key not in row]
        if missing:
            raise ValueError(f"{at(path, line)}: no {', '.join(missing)}; found the keys {', '.join(map(str, row))}.")
        yield line, row
