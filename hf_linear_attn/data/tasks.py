"""Labelled tasks: the nine of GLUE, and IMDB for long documents. Local files and the Hub give the same columns.

Warstadt et al. 2018 to Cer et al. 2017, as collected by Wang et al. 2019 (arXiv:1804.07461).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..registry import Registry
from .files import json_objects, location, read_lines, shortened
from .sources import import_datasets, load_hub

if TYPE_CHECKING:
    from datasets import DatasetDict

GLUE_HUB = "nyu-mll/glue"
GLUE_PAPER = "Wang et al. 2019, arXiv:1804.07461"

#: Range of the scores of a regression task.
MIN_SCORE, MAX_SCORE = 0.0, 5.0

REMEDY = "Correct the line or remove it."


@dataclass(frozen=True)
class FileLayout:
    """One layout that the files of a task may have.

    Attributes:
        text: The text columns: names in a header, or indices in files without one.
        label: The label column, likewise.
        files: Split -> names that its file may have; the first that exists is read.
        header: Whether the first line names the columns.
        widths: Numbers of columns that rows may have; empty: as many as the header.
        json_lines: Whether each line is a JSON object; `text` and `label` are then its keys.
        label_names: Whether labels are written by name, not by number.
    """

    text: tuple[str, ...] | tuple[int, ...]
    label: str | int
    files: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "train": ("train.tsv", "train_subset.tsv"),
            "validation": ("dev.tsv", "dev_subset.tsv"),
        }
    )
    header: bool = True
    widths: tuple[int, ...] = ()
    json_lines: bool = False
    label_names: bool = False


@dataclass(frozen=True)
class Task:
    """One labelled task.

    Attributes:
        name: Name on the Hub and the command line.
        title: What the task asks, in one line.
        columns: The one or two text columns, after loading.
        labels: Names of the classes in order; None for scores (regression).
        metrics: Metrics to report.
        main_metric: The metric that stands for the task in an average.
        paper: Reference.
        hub: Data set of the Hub, and its configuration.
        folders: Names that the folder of the files may have.
        layouts: Layouts that the files may have.
        splits: Split of the result -> split of the Hub set.

    Raises:
        ValueError: There are not one or two text columns, or `main_metric` is none of `metrics`.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...]
    main_metric: str
    paper: str
    hub: tuple[str, str | None] = field(repr=False)
    folders: tuple[str, ...] = field(repr=False)
    layouts: tuple[FileLayout, ...] = field(repr=False)
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "validation": "validation"}, repr=False
    )

    def __post_init__(self) -> None:
        if len(self.columns) not in (1, 2):
            raise ValueError(f"Task {self.name!r} has {len(self.columns)} text columns; one or two are possible.")
        if self.main_metric not in self.metrics:
            raise ValueError(f"The main metric {self.main_metric!r} of {self.name!r} is none of {self.metrics}.")

    @property
    def num_labels(self) -> int:
        """Outputs of the model's head; 1 for regression."""
        return 1 if self.labels is None else len(self.labels)

    @property
    def problem_type(self) -> str:
        """As in `PreTrainedConfig.problem_type`."""
        return "regression" if self.labels is None else "single_label_classification"


TASKS: Registry[Task] = Registry("task")


def get_task(name: str) -> Task:
    """Return the task of a name. Raises a ValueError with near matches if there is none."""
    return TASKS.get(name)


def load_task(name: str, *, folder: str | None = None, revision: str | None = None) -> DatasetDict:
    """Load a task with the splits `train` and `validation`, the columns of the task, and `label`.

    MNLI from the Hub or the GLUE archive has `validation_matched` and `validation_mismatched` instead; a part of it
    (`dev_subset.tsv`) is `validation`. The test split of IMDB, which has no other held-out part, is `validation`.
    Hidden test splits are not loaded. `train.tsv` goes before `train_subset.tsv` if both exist.

    Args:
        name: A task of `TASKS`.
        folder: The folder of the task's files, or the one above it (the GLUE archive); None: the Hub.
        revision: Branch, tag or commit of the Hub set.

    Returns:
        A `DatasetDict`; `label` is a `ClassLabel`, or float32 for regression.

    Raises:
        ValueError: An unknown task; a bad row (file, line and value are named); `revision` with `folder`.
        OSError: Files are missing or unreadable, or the Hub cannot be reached.
        ImportError: The package datasets is not installed.
    """
    task = get_task(name)
    if folder is None:
        return _from_hub(task, revision)
    if revision is not None:
        raise ValueError(f"The revision {revision!r} is of a Hub set; it does not go with the folder {folder!r}.")
    return _from_files(task, Path(folder))


def _from_hub(task: Task, revision: str | None) -> DatasetDict:
    repository, config = task.hub
    remedy = "Connect to the Hub, or give a folder with the files of the task: --data.folder FOLDER."
    data = load_hub(repository, config, revision, remedy)
    for split, hub_split in task.splits.items():
        if hub_split not in data:
            raise ValueError(f"{repository!r} has no split {hub_split!r} for {split!r}; it has {', '.join(data)}.")
    columns = [*task.columns, "label"]
    return import_datasets().DatasetDict({name: data[old].select_columns(columns) for name, old in task.splits.items()})


def _from_files(task: Task, folder: Path) -> DatasetDict:
    datasets = import_datasets()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r} for the task {task.name!r}; give another --data.folder."
        )
    names = {name.lower() for name in task.folders}
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name.lower() in names]
    layout, files = _find_files([*(inner or [folder / task.folders[0]]), folder], task.layouts)
    label = datasets.Value("float32") if task.labels is None else datasets.ClassLabel(names=list(task.labels))
    features = datasets.Features({**{name: datasets.Value("string") for name in task.columns}, "label": label})
    splits = {}
    for split, path in files.items():
        texts, labels = _read_rows(path, layout, task)
        columns = dict(zip(task.columns, map(list, zip(*texts, strict=True)), strict=True))
        splits[split] = datasets.Dataset.from_dict({**columns, "label": labels}, features=features)
    return datasets.DatasetDict(splits)


def _find_files(folders: Sequence[Path], layouts: Sequence[FileLayout]) -> tuple[FileLayout, dict[str, Path]]:
    """The layout whose training file is in one of the folders, and its files by split."""
    for folder in folders:
        for layout in layouts:
            files = {
                split: folder / name
                for split, names in layout.files.items()
                for name in reversed(names)
                if (folder / name).is_file()
            }
            if "train" not in files:
                continue
            if len(files) == 1:
                names = [name for split, names in layout.files.items() if split != "train" for name in names]
                raise FileNotFoundError(f"{str(folder)!r} has a training file but none of {', '.join(names)}.")
            return layout, files
    tried = [str(folder / name) for folder in folders for layout in layouts for name in layout.files["train"]]
    raise FileNotFoundError(f"None of these files exists: {', '.join(dict.fromkeys(tried))}.")


def _read_rows(path: Path, layout: FileLayout, task: Task) -> tuple[list[list[str]], list[float | int]]:
    """The texts and labels of a file. Raises a ValueError that names file and line for a bad row."""
    texts: list[list[str]] = []
    labels: list[float | int] = []
    for line, row, label in (_json_rows if layout.json_lines else _table_rows)(path, layout):
        for column, text in zip(layout.text, row, strict=True):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"{location(path, line)}: column {column!r} holds no text: {shortened(text)}. {REMEDY}"
                )
        try:
            labels.append(_score(label) if task.labels is None else _class_index(label, task.labels, layout))
        except ValueError as error:
            raise ValueError(f"{location(path, line)}: {error}. {REMEDY}") from None
        texts.append(row)
    if not texts:
        raise ValueError(f"{str(path)!r} holds no rows.")
    return texts, labels


def _table_rows(path: Path, layout: FileLayout) -> Iterator[tuple[int, list[str], str]]:
    """Line number, texts and label of each row. Quotes are text in these files: a tab always separates two columns."""
    lines = read_lines(path)
    columns: Sequence[Any] = [*layout.text, layout.label]
    widths = layout.widths
    if layout.header:
        header = lines[0].split("\t")
        missing = [str(name) for name in columns if name not in header]
        if missing:
            raise ValueError(
                f"{location(path, 1)}: the header lacks {', '.join(missing)}; found the columns {', '.join(header)}."
            )
        widths, columns = (len(header),), [header.index(name) for name in columns]
    first = 1 if layout.header else 0
    for line, row in enumerate(lines[first:], start=first + 1):
        cells = row.split("\t")
        if len(cells) not in widths:
            expected = " or ".join(map(str, widths))
            raise ValueError(
                f"{location(path, line)}: {len(cells)} columns, expected {expected}; found {shortened(row)}. {REMEDY}"
            )
        yield line, [cells[index] for index in columns[:-1]], cells[columns[-1]]


def _json_rows(path: Path, layout: FileLayout) -> Iterator[tuple[int, list[str], Any]]:
    for line, row in json_objects(path, [str(name) for name in (*layout.text, layout.label)]):
        yield line, [row[name] for name in layout.text], row[layout.label]


def _class_index(label: Any, names: tuple[str, ...], layout: FileLayout) -> int:
    known = names if layout.label_names else tuple(str(index) for index in range(len(names)))
    if str(label) not in known:
        raise ValueError(f"unknown label {shortened(str(label))}; expected one of {', '.join(known)}")
    return known.index(str(label))


def _score(label: Any) -> float:
    try:
        score = float(label)
    except (TypeError, ValueError):
        raise ValueError(f"the score {shortened(label)} is no number") from None
    if not math.isfinite(score) or not MIN_SCORE <= score <= MAX_SCORE:
        raise ValueError(f"the score {shortened(label)} is not between {MIN_SCORE:g} and {MAX_SCORE:g}")
    return score


# --------------------------------------------------------------------------------------------------------------------
# The tasks

_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_MNLI_DEV = {name: (f"dev_{name.rpartition('_')[2]}.tsv",) for name in ("validation_matched", "validation_mismatched")}


def _add_glue(
    name: str,
    folder: str,
    title: str,
    columns: tuple[str, ...],
    labels: tuple[str, ...] | None,
    metrics: tuple[str, ...],
    layouts: FileLayout | tuple[FileLayout, ...],
    paper: str,
    **options: Any,
) -> None:
    layouts = layouts if isinstance(layouts, tuple) else (layouts,)
    hub, folders = (GLUE_HUB, name), (folder, name)
    TASKS.add(name, Task(name, title, columns, labels, metrics, metrics[0], paper, hub, folders, layouts, **options))


_add_glue(
    "cola",
    "CoLA",
    "Is the sentence acceptable English?",
    ("sentence",),
    ("unacceptable", "acceptable"),
    ("matthews_correlation",),
    FileLayout((3,), 1, header=False, widths=(4,)),
    "Warstadt et al. 2019, arXiv:1805.12471",
)
_add_glue(
    "sst2",
    "SST-2",
    "Is the sentence of a film review positive?",
    ("sentence",),
    ("negative", "positive"),
    ("accuracy",),
    FileLayout(("sentence",), "label"),
    "Socher et al. 2013, Recursive Deep Models for Semantic Compositionality",
)
_add_glue(
    "mrpc",
    "MRPC",
    "Do two sentences of news say the same?",
    _PAIR,
    ("not_equivalent", "equivalent"),
    ("accuracy", "f1"),
    FileLayout(("#1 String", "#2 String"), "Quality"),
    "Dolan and Brockett 2005, Automatically Constructing a Corpus of Sentential Paraphrases",
)
_add_glue(
    "stsb",
    "STS-B",
    "How similar are two sentences, from 0 to 5?",
    _PAIR,
    None,
    ("pearson", "spearmanr"),
    (
        FileLayout(_PAIR, "score"),
        # The benchmark's own files: genre, file, year, id, score, two sentences; some rows name two sources more.
        FileLayout(
            (5, 6),
            4,
            {"train": ("sts-train.csv",), "validation": ("sts-dev.csv",)},
            header=False,
            widths=(7, 9),
        ),
    ),
    "Cer et al. 2017, arXiv:1708.00055",
)
_add_glue(
    "qqp",
    "QQP",
    "Do two questions ask the same?",
    ("question1", "question2"),
    ("not_duplicate", "duplicate"),
    ("accuracy", "f1"),
    FileLayout(("question1", "question2"), "is_duplicate"),
    "Iyer et al. 2017, First Quora Dataset Release: Question Pairs",
)
_add_glue(
    "mnli",
    "MNLI",
    "Does the premise entail the hypothesis, contradict it, or neither?",
    ("premise", "hypothesis"),
    ("entailment", "neutral", "contradiction"),
    ("accuracy",),
    (
        FileLayout(_PAIR, "gold_label", {"train": ("train.tsv",), **_MNLI_DEV}, label_names=True),
        FileLayout(
            _PAIR, "label", {"train": ("train_subset.tsv",), "validation": ("dev_subset.tsv",)}, label_names=True
        ),
    ),
    "Williams et al. 2018, arXiv:1704.05426",
    splits={"train": "train", **{name: name for name in _MNLI_DEV}},
)
_add_glue(
    "qnli",
    "QNLI",
    "Does the sentence answer the question?",
    ("question", "sentence"),
    _ENTAILMENT,
    ("accuracy",),
    FileLayout(("question", "sentence"), "label", label_names=True),
    f"Rajpurkar et al. 2016, arXiv:1606.05250; {GLUE_PAPER}",
)
_add_glue(
    "rte",
    "RTE",
    "Does the first sentence entail the second?",
    _PAIR,
    _ENTAILMENT,
    ("accuracy",),
    FileLayout(_PAIR, "label", label_names=True),
    f"Dagan et al. 2006 to Bentivogli et al. 2009; {GLUE_PAPER}",
)
_add_glue(
    "wnli",
    "WNLI",
    "Does the sentence with the pronoun replaced follow from the first?",
    _PAIR,
    ("not_entailment", "entailment"),
    ("accuracy",),
    FileLayout(_PAIR, "label"),
    f"Levesque et al. 2012, The Winograd Schema Challenge; {GLUE_PAPER}",
)
_JSON_LINES = ("jsonl", "jsonl.xz", "jsonl.gz")
TASKS.add(
    "imdb",
    Task(
        name="imdb",
        title="Is the film review positive? (documents of up to 2,500 words)",
        columns=("text",),
        labels=("neg", "pos"),
        metrics=("accuracy",),
        main_metric="accuracy",
        paper="Maas et al. 2011, Learning Word Vectors for Sentiment Analysis",
        hub=("stanfordnlp/imdb", None),
        folders=("imdb",),
        layouts=(
            FileLayout(
                ("text",),
                "label",
                {
                    "train": tuple(f"train.{suffix}" for suffix in _JSON_LINES),
                    "validation": tuple(f"test.{suffix}" for suffix in _JSON_LINES),
                },
                json_lines=True,
            ),
        ),
        splits={"train": "train", "validation": "test"},
    ),
)
