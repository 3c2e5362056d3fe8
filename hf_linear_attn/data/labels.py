"""Labels: of what kind those of a data set are, and which output of a model's head stands for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .files import Source, import_datasets

if TYPE_CHECKING:
    from datasets import DatasetDict
    from torch import Tensor

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What a row is labelled with, in the words of a model's config: a class, any number of classes, or a score."""

#: Text that is a number, and the part of it that makes it a score.
_NUMBER = re.compile(r"\s*[-+]?(?:\d+(?P<fraction>\.\d*)?|(?P<point>\.\d+))(?P<power>[eE][-+]?\d+)?\s*")

#: Text that names a class by its number, as Transformers does by default.
_CLASS_NUMBER = re.compile(r"(?:LABEL_)?\s*(\d+)\s*")

#: What messages call the answers of a head, and labels.
PROBLEMS: dict[Problem, str] = {
    "single_label_classification": "classes",
    "multi_label_classification": "several labels a row",
    "regression": "scores",
}


@dataclass(frozen=True)
class Labels:
    """The labels of a data set, as numbers of a head's outputs."""

    problem: Problem
    names: tuple[str, ...] | None = None  # of the outputs in order; None for scores
    #: `outputs[i]` is that of class i of the data, in their own order: a task's, or that of numbers or the alphabet.
    outputs: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what was assumed, one sentence each

    def answers(self, logits: Tensor) -> Tensor:
        """Return what a head answers with logits `[B, C]`.

        Scores or classes `[B]` (NaN and -1 where a logit is NaN), or of several labels a row `[B, C]` 1 for those that
        are more likely than not.
        """
        undefined = logits.isnan()
        if self.problem == "regression":
            return logits.squeeze(-1).float()
        if self.problem == "multi_label_classification":
            return (logits > 0).long().masked_fill(undefined, -1)
        return logits.argmax(dim=-1).masked_fill(undefined.any(dim=-1), -1)  # `argmax` takes NaN for the largest

    def in_order(self, answers: Any) -> np.ndarray:
        """Return answers, or labels, with the classes in the order of the data in place of the outputs of the head.

        So metrics do not depend on the head: the F1 of a task is that of its class 1.
        """
        answers = np.asarray(answers)
        if self.problem != "single_label_classification":
            return answers
        others = sorted({*range(len(self.names or ()))} - {*self.outputs})
        places = np.argsort([*self.outputs, *others])
        return np.where(answers < 0, answers, places[answers])


@dataclass(frozen=True)
class Head:
    """What a model with a classification head was trained to answer."""

    problem: Problem
    names: tuple[str, ...]  # of the outputs in order

    @classmethod
    def of(cls, config: Any) -> Head:
        """Read the config of a model."""
        names = tuple(str(config.id2label[index]) for index in sorted(config.id2label))
        default: Problem = "regression" if len(names) == 1 else "single_label_classification"
        return cls(config.problem_type or default, names)

    def labels(self, classes: Sequence[str], problem: Problem) -> Labels:
        """Return which outputs the classes of some data are. A ValueError if that cannot be known."""
        by_name = {name.casefold(): index for index, name in enumerate(self.names)}
        if len(by_name) == len(self.names) and all(name.casefold() in by_name for name in classes):
            return Labels(problem, self.names, tuple(by_name[name.casefold()] for name in classes))
        is_generic = all(name == f"LABEL_{index}" for index, name in enumerate(self.names))
        numbers = tuple(int(match[1]) for match in map(_CLASS_NUMBER.fullmatch, classes) if match)
        if len(numbers) == len({*numbers}) == len(classes) and max(numbers) < len(self.names):
            pairs = ", ".join(f"{number} is {self.names[number]}" for number in numbers)
            note = f"The labels are taken as the numbers of the model's outputs: {pairs}."
            return Labels(problem, self.names, numbers, () if is_generic else (note,))
        if is_generic and len(classes) == len(self.names):
            pairs = ", ".join(f"{index} is {name}" for index, name in enumerate(classes))
            note = f"The model does not name its outputs. They are taken to be those of the labels in order: {pairs}."
            return Labels(problem, tuple(classes), tuple(range(len(classes))), (note,))
        listed = ", ".join(self.names)
        raise ValueError(
            f"The model was trained with the labels {listed}; the data has {', '.join(classes)}. Give data with the "
            "model's labels, or a model without a head."
        )


@dataclass(frozen=True)
class _Column:
    """The labels of one split, as they stand there or by the names of their classes."""

    source: Source
    split: str
    name: str
    values: list[Any]

    def error(self, row: int, problem: str) -> ValueError:
        remedy = "Correct the row, remove it, or name another column with --data.label_column."
        return self.source.cell_error(self.split, row, self.name, self.values[row], f"{problem}. {remedy}")

    def named(self, row: int, names: list[str]) -> Any:
        """Return the names of the classes of a row in place of their numbers."""
        value = self.values[row]
        if any(entry not in range(len(names)) for entry in _entries(value)):
            raise self.error(row, f"which is no label: classes are 0 and up: {', '.join(names)}")
        return [names[entry] for entry in value] if isinstance(value, list) else names[value]

    def kind(self) -> str:
        """Return what all labels are; a ValueError for the first one that is something else, or none."""
        kinds = [_kind_of(value) for value in self.values]
        for row, kind in enumerate(kinds):
            if not kind:
                raise self.error(row, "which is no label")
            if kind != kinds[0]:
                raise self.error(row, f"which is {kind}, and the rows before have {kinds[0]}")
        return kinds[0]

    def has_scores(self) -> bool:
        """Return whether labels are scores: some number is not whole. A ValueError if others are no numbers at all."""
        numbers = [_number(value) for value in self.values]
        scores = [row for row, value in enumerate(self.values) if numbers[row] is not None and not _is_whole(value)]
        if scores and None in numbers:
            example = self.values[scores[0]]
            raise self.error(numbers.index(None), f"and row {scores[0]} the number {example}, which is a score")
        return bool(scores)

    def classes(self) -> list[str]:
        """Return the names of all classes in order: of numbers, or else of the alphabet."""
        names: set[str] = set()
        for row, value in enumerate(self.values):
            entries = _entries(value)
            if not all(isinstance(entry, str) or _is_whole(entry) for entry in entries):
                raise self.error(row, "of which some are no classes")
            classes = {class_name(entry) for entry in entries}
            if len(classes) < len(entries):
                raise self.error(row, "with a label twice: list those of the row, or give each a column of 0 and 1")
            names |= classes
        return sorted_classes(names)

    def numbered(self, output_of: dict[str, int]) -> Iterator[list[int]]:
        """Yield the outputs of the classes of each row."""
        for row, value in enumerate(self.values):
            names = [class_name(entry) for entry in _entries(value)]
            if not output_of.keys() >= {*names}:
                raise self.error(row, f"which does not occur in the training data ({', '.join(output_of)})")
            yield [output_of[name] for name in names]


def encode_labels(source: Source, columns: Sequence[str], head: Head | None = None) -> tuple[DatasetDict, Labels]:
    """Return a data set with the column `label` in place of those of its labels, and what the labels are.

    Several columns have a class each, and 0 or 1 in every row. A single column has in every row a class (text, a whole
    number or a `ClassLabel`), a list of classes, or a score (any other number).

    Args:
        source: A data set with a split `train`.
        columns: Those of the labels.
        head: That of the model whose outputs the labels are. Classes are matched with its names, whatever their case;
            classes that are numbers are those of its outputs. Without one, classes are in the order of their
            `ClassLabel`, or of their numbers or names in the training rows.

    Raises:
        ValueError: A label that is missing or of another kind than those before (file, row and column are named), or
            labels that are not those of the head.
    """
    datasets, splits = import_datasets(), source.splits
    declared, read = _read(source, columns)
    train = read["train"]
    problem = _problem(read, head)
    if all(value == train.values[0] for value in train.values):
        same = f"All {len(train.values)} training rows have the label {train.values[0]!r}"
        raise ValueError(f"{same}: there is nothing to learn. Give rows with other labels, too.")
    if problem == "regression":
        scores = {name: [float(value) for value in column.values] for name, column in read.items()}
        return _replaced(splits, columns, scores, datasets.Value("float32")), Labels("regression")
    if head is None:
        classes = declared or train.classes()
        labels = Labels(problem, tuple(classes), tuple(range(len(classes))))
    else:
        every = (column.classes() for column in read.values())
        classes = declared or sorted_classes({*chain.from_iterable(every)})
        labels = head.labels(classes, problem)
    output_of = dict(zip(classes, labels.outputs, strict=True))
    names = list(labels.names or ())
    numbers = {split: [*column.numbered(output_of)] for split, column in read.items()}
    if problem == "single_label_classification":
        chosen: dict[str, list[Any]] = {split: [row[0] for row in rows] for split, rows in numbers.items()}
        return _replaced(splits, columns, chosen, datasets.ClassLabel(names=names)), labels
    chosen = {split: [_indicators(row, len(names)) for row in rows] for split, rows in numbers.items()}
    return _replaced(splits, columns, chosen, datasets.Sequence(datasets.Value("float32"))), labels


def _read(source: Source, columns: Sequence[str]) -> tuple[list[str] | None, dict[str, _Column]]:
    """Return the labels of each split, and the names of the classes where the data set declares them."""
    splits, (name, *others) = source.splits, columns
    if others:
        return list(columns), {split: _read_columns(source, split, columns) for split in splits}
    read = {split: _Column(source, split, name, rows[name][:]) for split, rows in splits.items()}
    names = _declared(splits["train"].features[name])
    for split, column in read.items():
        if _declared(splits[split].features[name]) != names:
            raise ValueError(
                f"The classes of the split {split!r} have other names, or another order, than those of the training "
                f"rows ({', '.join(names or ())}). Give all splits the same ClassLabel."
            )
        if names is not None:
            column.values[:] = [column.named(row, names) for row in range(len(column.values))]
    return names, read


def _declared(feature: Any) -> list[str] | None:
    """Return the names of a `ClassLabel`, or of a list of them."""
    datasets = import_datasets()
    kind = feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else feature
    return kind.names if isinstance(kind, datasets.ClassLabel) else None


def _read_columns(source: Source, name: str, columns: Sequence[str]) -> _Column:
    """Return the list of those columns that have a 1, for each row."""
    split = source.splits[name]
    rows: list[Any] = [[] for _ in range(len(split))]
    for label in columns:
        column = _Column(source, name, label, split[label][:])
        for row, value in enumerate(column.values):
            if _number(value) not in (0, 1):
                raise column.error(row, "where 0 or 1 says whether a row has this label")
            if _number(value):
                rows[row].append(label)
    return _Column(source, name, columns[0], rows)


def _problem(read: dict[str, _Column], head: Head | None) -> Problem:
    """Return what the labels are, after a look at all of them."""
    kinds = {name: column.kind() for name, column in read.items()}
    kind = kinds["train"]
    for name, other in kinds.items():
        if other != kind:
            raise read[name].error(0, f"which is {other}, and the training rows have {kind}")
    problem: Problem = "single_label_classification"
    if kind == "a list":
        problem = "multi_label_classification"
    elif read["train"].has_scores():
        problem = "regression"
    if head is None or head.problem == problem:
        return problem
    if problem == "single_label_classification" and head.problem == "multi_label_classification":
        return head.problem  # rows with one label each
    is_number = problem == "single_label_classification" and None not in map(_number, read["train"].values)
    if is_number and head.problem == "regression":
        return head.problem  # scores that happen to be whole
    text = f"The model was trained with {PROBLEMS[head.problem]} ({', '.join(head.names)})"
    raise ValueError(f"{text}; the data has {PROBLEMS[problem]}. Give data like the model's, or one without a head.")


def _replaced(splits: DatasetDict, columns: Sequence[str], labels: dict[str, list[Any]], feature: Any) -> DatasetDict:
    datasets = import_datasets()
    parts = {name: split.remove_columns(list(columns)) for name, split in splits.items()}
    return datasets.DatasetDict(
        {name: part.add_column("label", labels[name], feature=feature) for name, part in parts.items()}
    )


def _indicators(chosen: Sequence[int], width: int) -> list[float]:
    """Return 1 for each chosen index, else 0."""
    return [float(index in chosen) for index in range(width)]


def sorted_classes(names: set[str]) -> list[str]:
    """Return names of classes in order: of numbers, or else of the alphabet."""
    if all(map(_CLASS_NUMBER.fullmatch, names)):
        return sorted(names, key=lambda name: int(name.removeprefix("LABEL_")))
    return sorted(names)


def class_name(value: Any) -> str:
    """Return the name of a class: text as it is, a number in digits, and `true` or `false`."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else str(int(value))


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind_of(value: Any) -> str:
    """Return what a label is; empty if it is none."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float, Decimal)):
        return "a number" if value == value else ""  # NaN is no label
    if isinstance(value, str) and value:
        return "text"
    return "a list" if isinstance(value, list) else ""


def _number(value: Any) -> float | None:
    """Return a number, or that which a text says; else None."""
    if isinstance(value, (bool, int, float, Decimal)):
        return float(value)
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None


def _is_whole(value: Any) -> bool:
    """Return whether a number has no digits after the point, as a class has none."""
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        return match is not None and not any(match.groups())
    if isinstance(value, Decimal):
        return value.is_finite() and not int(value.as_tuple().exponent) < 0
    return isinstance(value, int)
