"""Labelled tasks: the nine of GLUE, and IMDB for long documents.

Local files and the Hub give the same columns. Tasks are those of Warstadt et al. 2018 to Cer et al. 2017, as collected
by Wang et al. 2019 (arXiv:1804.07461).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..registry import Registry
from .files import COMPRESSIONS, Source, import_datasets, load_hub, read_file

if TYPE_CHECKING:
    from datasets import Dataset

GLUE_HUB = "nyu-mll/glue"

Names = tuple[str, ...]

#: Names that the files of GLUE's tasks have by split; the first that exists is read.
GLUE_FILES = {"train": ("train.tsv",), "validation": ("dev.tsv", "validation.tsv")}


@dataclass(frozen=True)
class FileLayout:
    """One layout that the files of a task may have. Quotation marks are a part of the text."""

    text: Names = ()  # the text columns; empty: called as after loading
    label: str = "label"  # the label column
    files: Mapping[str, Names] = field(default_factory=lambda: GLUE_FILES)
    names: Names = ()  # of all columns, where the first line does not name them


@dataclass(frozen=True)
class Task:
    """One labelled task."""

    name: str  # on the Hub and the command line
    columns: Names  # the one or two text columns, after loading
    labels: Names | None  # names of the classes in order; None for scores (regression)
    metrics: Names  # the first one stands for the task in an average
    layouts: tuple[FileLayout, ...] = field(default=(), repr=False)
    hub: tuple[str, str | None] = field(default=("", None), repr=False)  # data set and its configuration
    #: Split of the result -> split of the Hub set.
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "validation": "validation"}, repr=False
    )


TASKS: Registry[Task] = Registry("task")


def load_task(name: str, *, folder: str | None = None, revision: str | None = None) -> Source:
    """Load a task with the splits `train` and `validation`, the columns of the task, and `label`.

    MNLI from the Hub or the GLUE archive has `validation_matched` and `validation_mismatched` instead. The test split
    of IMDB, which has no other held-out part, is `validation`. Hidden test splits are not loaded. `label` is a
    `ClassLabel`, or float32 for regression.

    `folder` is that of the task's files, or the one above it (the GLUE archive); None: the Hub, with a `revision`.
    A ValueError for an unknown task or a bad row (file, row and value are named), an OSError for missing files.
    """
    task = TASKS.get(name)
    if folder is not None:
        if revision is not None:
            raise ValueError(f"The revision {revision!r} is of a data set of the Hub, not of the folder {folder!r}.")
        return _from_files(task, Path(folder))
    repository, config = task.hub
    remedy = "Connect to the Hub, or give a folder with the files of the task: --data.folder FOLDER."
    data = load_hub(repository, config, revision, remedy)
    missing = [split for split in task.splits.values() if split not in data]
    if missing:
        raise ValueError(f"{repository!r} has no split {', '.join(missing)}; it has {', '.join(data)}.")
    columns = [*task.columns, "label"]
    splits = {name: data[old].select_columns(columns) for name, old in task.splits.items()}
    return Source(import_datasets().DatasetDict(splits))


def _from_files(task: Task, folder: Path) -> Source:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r} for the task {task.name!r}. Check the path.")
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and _task_name(path.name) == task.name]
    layout, files = _find_files([*(inner or [folder / task.name]), folder], task.layouts)
    splits = import_datasets().DatasetDict({split: _read_rows(path, layout, task) for split, path in files.items()})
    return Source(splits, name=repr(task.name), files=files)


def _task_name(folder: str) -> str:
    """The name of the task whose files a folder of the GLUE archive holds: `sst2` for `SST-2`."""
    return folder.lower().replace("-", "")


def _find_files(folders: Sequence[Path], layouts: Sequence[FileLayout]) -> tuple[FileLayout, dict[str, Path]]:
    """The layout whose training file is in one of the folders, and its files by split."""
    for folder in folders:
        for layout in layouts:
            existing = {split: _first_file(folder, names) for split, names in layout.files.items()}
            files = {split: path for split, path in existing.items() if path is not None}
            if "train" not in files:
                continue
            if len(files) == 1:
                names = chain.from_iterable(names for split, names in layout.files.items() if split != "train")
                problem = f"{str(folder)!r} has a training file but none of {', '.join(names)}"
                raise FileNotFoundError(f"{problem}. Put the validation file beside it.")
            return layout, files
    tried = [str(folder / layout.files["train"][0]) for folder, layout in product(folders, layouts)]
    packed = " or ".join(COMPRESSIONS)
    listed = ", ".join(dict.fromkeys(tried))
    raise FileNotFoundError(f"None of these files exists: {listed}; nor as {packed}. Check --data.folder.")


def _first_file(folder: Path, names: Names) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name, suffix in product(names, ("", *COMPRESSIONS)))
    return next((path for path in paths if path.is_file()), None)


def _read_rows(path: Path, layout: FileLayout, task: Task) -> Dataset:
    """The texts and labels of a file, in the columns of the task."""
    datasets = import_datasets()
    rows = read_file(path, [], quoting="none", names=layout.names, separator="\t")
    columns = dict(zip((*task.columns, "label"), (*(layout.text or task.columns), layout.label), strict=True))
    missing = [column for column in columns.values() if column not in rows.column_names]
    if missing:
        problem = f"{path}: there is no {', '.join(missing)}; found {', '.join(rows.column_names)}"
        raise ValueError(f"{problem}. Give the file as GLUE has it, or your own data with --data.dataset.")
    source = Source(datasets.DatasetDict(train=rows), files={"train": path})
    texts = {name: rows[column][:] for name, column in columns.items()}
    for name in task.columns:
        for row, text in enumerate(texts[name]):
            if not isinstance(text, str) or not text.strip():
                raise source.cell_error("train", row, columns[name], text, "which is no text. Remove the row.")
    kind = datasets.Value("float32") if task.labels is None else datasets.ClassLabel(names=list(task.labels))
    for row, value in enumerate(texts["label"]):
        try:
            texts["label"][row] = _label(value, task.labels)
        except (ValueError, TypeError):
            known = "a score" if task.labels is None else f"one of {', '.join(task.labels)} or its number"
            problem = f"and the task {task.name!r} has {known}. Correct the row or remove it."
            raise source.cell_error("train", row, layout.label, value, problem) from None
    features = datasets.Features({**{name: datasets.Value("string") for name in task.columns}, "label": kind})
    return datasets.Dataset.from_dict(texts, features)


def _label(value: Any, names: Names | None) -> float | int:
    """Return a score, or the number of a class, which is given by name or by number."""
    if names is None:
        return float(value)
    return names.index(value) if value in names else range(len(names)).index(int(value))


_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_MNLI_DEV = {name: (f"dev_{name.rpartition('_')[2]}.tsv",) for name in ("validation_matched", "validation_mismatched")}


def _add(folder: str, columns: Names, labels: Names | None, metrics: Names, *layouts: FileLayout, **parts: Any) -> None:
    name = _task_name(folder)
    TASKS.add(name, Task(name, columns, labels, metrics, layouts, **{"hub": (GLUE_HUB, name), **parts}))


# Is the sentence acceptable English? Warstadt et al. 2019, arXiv:1805.12471.
_cola = FileLayout(names=("source", "label", "mark", "sentence"))
_add("CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",), _cola)

# Is the sentence of a film review positive? Socher et al. 2013, Recursive Deep Models for Semantic Compositionality.
_add("SST-2", ("sentence",), ("negative", "positive"), ("accuracy",), FileLayout())

# Do two sentences of news say the same? Dolan and Brockett 2005, Automatically Constructing a Corpus of Sentential
# Paraphrases.
_mrpc = FileLayout(("#1 String", "#2 String"), "Quality")
_add("MRPC", _PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1"), _mrpc)

# How similar are two sentences, from 0 to 5? Cer et al. 2017, arXiv:1708.00055. The benchmark's own files have tabs
# between genre, file, year, id, score and two sentences, and in some rows two sources more.
_sts_files = {"train": ("sts-train.csv",), "validation": ("sts-dev.csv",)}
_sts_names = ("genre", "file", "year", "id", "score", *_PAIR, "source1", "source2")
_sts = FileLayout(label="score", files=_sts_files, names=_sts_names)
_add("STS-B", _PAIR, None, ("pearson", "spearmanr"), FileLayout(label="score"), _sts)

# Do two questions ask the same? Iyer et al. 2017, First Quora Dataset Release: Question Pairs.
_qqp = FileLayout(label="is_duplicate")
_add("QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1"), _qqp)

# Does the premise entail the hypothesis, contradict it, or neither? Williams et al. 2018, arXiv:1704.05426.
_mnli = FileLayout(_PAIR, "gold_label", {"train": ("train.tsv",), **_MNLI_DEV})
_mnli_labels = ("entailment", "neutral", "contradiction")
_mnli_splits = {"train": "train", **{name: name for name in _MNLI_DEV}}
_add("MNLI", ("premise", "hypothesis"), _mnli_labels, ("accuracy",), _mnli, splits=_mnli_splits)

# Does the sentence answer the question? Rajpurkar et al. 2016, arXiv:1606.05250; Wang et al. 2019, arXiv:1804.07461.
_add("QNLI", ("question", "sentence"), _ENTAILMENT, ("accuracy",), FileLayout())

# Does the first sentence entail the second? Dagan et al. 2006 to Bentivogli et al. 2009.
_add("RTE", _PAIR, _ENTAILMENT, ("accuracy",), FileLayout())

# Does the sentence with the pronoun replaced follow from the first? Levesque et al. 2012, The Winograd Schema
# Challenge.
_add("WNLI", _PAIR, ("not_entailment", "entailment"), ("accuracy",), FileLayout())

# Is the film review positive? (documents of up to 2,500 words) Maas et al. 2011, Learning Word Vectors for Sentiment
# Analysis.
_reviews = FileLayout(files={"train": ("train.jsonl",), "validation": ("test.jsonl",)})
_imdb_splits = {"train": "train", "validation": "test"}
_add("imdb", ("text",), ("neg", "pos"), ("accuracy",), _reviews, hub=("stanfordnlp/imdb", None), splits=_imdb_splits)
