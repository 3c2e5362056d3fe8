"""Labelled tasks: the nine of GLUE, and IMDB for long documents. Local files or the Hub, the same columns from both.

Warstadt et al. 2018 to Cer et al. 2017, as collected by Wang et al. 2019 (arXiv:1804.07461).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..registry import Registry
from .files import import_datasets, load_hub
from .task_files import LabelReader, Layout, find_files, read_rows

if TYPE_CHECKING:
    from datasets import DatasetDict

GLUE_HUB = "nyu-mll/glue"
GLUE_PAPER = "Wang et al. 2019, arXiv:1804.07461"

#: Names of a development file in the GLUE archive, then of a part of one.
_FILES = {"train": ("train.tsv", "train_subset.tsv"), "validation": ("dev.tsv", "dev_subset.tsv")}


@dataclass(frozen=True)
class Task:
    """One labelled task.

    Attributes:
        name: as on the Hub and the command line.
        title: what it asks, one line.
        columns: the one or two text columns, after loading.
        labels: the names of the classes in order; None: a score (regression).
        metrics: the metrics to report.
        main_metric: the one that stands for the task in an average.
        paper: reference.
        hub: data set of the Hub, and its config.
        folders: names that the folder of its files may have.
        layouts: the file layouts that can be read.
        splits: result split -> split of the Hub set.
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
    layouts: tuple[Layout, ...] = field(repr=False)
    splits: tuple[tuple[str, str], ...] = field(default=(("train", "train"), ("validation", "validation")), repr=False)

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
    """The task of this name. Raises a ValueError with near matches if there is none."""
    return TASKS.get(name)


def load_task(name: str, *, folder: str | None = None, revision: str | None = None) -> DatasetDict:
    """A task with the splits `train` and `validation` and the columns of the task and `label`.

    MNLI from the Hub or the GLUE archive has `validation_matched` and `validation_mismatched` instead; a part of it
    (`dev_subset.tsv`) is `validation`. The test split of IMDB, which has no other held-out part, is `validation`.
    Hidden test splits are not loaded. `train.tsv` goes before `train_subset.tsv` if both exist; other files are not
    read.

    Args:
        name: a task of `TASKS`.
        folder: the folder of the task's files, or the one above it (the GLUE archive); None: the Hub.
        revision: commit, branch or tag of the Hub set.

    Returns:
        A `DatasetDict`; `label` is a `ClassLabel`, or float32 for regression.

    Raises:
        ValueError: an unknown task; a bad row (file, line and what was found are named); `revision` with `folder`.
        OSError: files are missing or unreadable, or the Hub cannot be reached.
        ImportError: the package datasets is not installed.
    """
    task = get_task(name)
    if folder is None:
        return _from_hub(task, revision)
    if revision is not None:
        raise ValueError(f"The revision {revision!r} is of a Hub set; it does not go with the folder {folder!r}.")
    return _from_files(task, Path(folder))


def _from_files(task: Task, folder: Path) -> DatasetDict:
    datasets = import_datasets()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r} for the task {task.name!r}; give another --data.folder."
        )
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name.lower() in _lower(task.folders)]
    layout, files = find_files([*(inner or [folder / task.folders[0]]), folder], task.layouts)
    reader = LabelReader(task.labels, layout.by_name)
    loaded = {}
    for split, path in files.items():
        texts, labels = read_rows(path, layout, reader)
        columns: dict[str, list[Any]] = {
            name: [text[place] for text in texts] for place, name in enumerate(task.columns)
        }
        loaded[split] = datasets.Dataset.from_dict({**columns, "label": labels}, features=_features(task))
    return datasets.DatasetDict(loaded)


def _from_hub(task: Task, revision: str | None) -> DatasetDict:
    datasets = import_datasets()
    where, config = task.hub
    remedy = "Connect to the Hub, or give a folder with the files of the task: --data.folder FOLDER."
    found = load_hub(where, config, revision, remedy)
    for split, source in task.splits:
        if source not in found:
            raise ValueError(f"{where!r} has no split {source!r} for {split!r}; found {', '.join(found)}.")
    chosen = {split: found[source].select_columns([*task.columns, "label"]) for split, source in task.splits}
    return datasets.DatasetDict(chosen)


def _features(task: Task) -> Any:
    datasets = import_datasets()
    label = datasets.Value("float32") if task.labels is None else datasets.ClassLabel(names=list(task.labels))
    return datasets.Features({**{name: datasets.Value("string") for name in task.columns}, "label": label})


def _lower(names: Sequence[str]) -> set[str]:
    return {name.lower() for name in names}


# --------------------------------------------------------------------------------------------------------------------
# The tasks


def _glue(
    name: str,
    title: str,
    *,
    columns: tuple[str, ...],
    labels: tuple[str, ...] | None,
    metrics: tuple[str, ...],
    folder: str,
    layouts: tuple[Layout, ...],
    paper: str,
    **rest: Any,
) -> None:
    folders = (folder, name)
    TASKS.add(
        name, Task(name, title, columns, labels, metrics, metrics[0], paper, (GLUE_HUB, name), folders, layouts, **rest)
    )


_glue(
    "cola",
    "Is the sentence acceptable English?",
    columns=("sentence",),
    labels=("unacceptable", "acceptable"),
    metrics=("matthews_correlation",),
    folder="CoLA",
    layouts=(Layout(_FILES, text=(3,), label=1, header=False, widths=(4,)),),
    paper="Warstadt et al. 2019, arXiv:1805.12471",
)
_glue(
    "sst2",
    "Is the sentence of a film review positive?",
    columns=("sentence",),
    labels=("negative", "positive"),
    metrics=("accuracy",),
    folder="SST-2",
    layouts=(Layout(_FILES, text=("sentence",), label="label"),),
    paper="Socher et al. 2013, Recursive Deep Models for Semantic Compositionality",
)
_glue(
    "mrpc",
    "Do two sentences of news say the same?",
    columns=("sentence1", "sentence2"),
    labels=("not_equivalent", "equivalent"),
    metrics=("accuracy", "f1"),
    folder="MRPC",
    layouts=(Layout(_FILES, text=("#1 String", "#2 String"), label="Quality"),),
    paper="Dolan and Brockett 2005, Automatically Constructing a Corpus of Sentential Paraphrases",
)
_glue(
    "stsb",
    "How similar are two sentences, from 0 to 5?",
    columns=("sentence1", "sentence2"),
    labels=None,
    metrics=("pearson", "spearmanr"),
    folder="STS-B",
    layouts=(
        Layout(_FILES, text=("sentence1", "sentence2"), label="score"),
        # The benchmark's own files: genre, file, year, id, score, two sentences; some rows name two sources more.
        Layout(
            {"train": ("sts-train.csv",), "validation": ("sts-dev.csv",)},
            text=(5, 6),
            label=4,
            header=False,
            widths=(7, 9),
        ),
    ),
    paper="Cer et al. 2017, arXiv:1708.00055",
)
_glue(
    "qqp",
    "Do two questions ask the same?",
    columns=("question1", "question2"),
    labels=("not_duplicate", "duplicate"),
    metrics=("accuracy", "f1"),
    folder="QQP",
    layouts=(Layout(_FILES, text=("question1", "question2"), label="is_duplicate"),),
    paper="Iyer et al. 2017, First Quora Dataset Release: Question Pairs",
)
_MNLI_SPLITS = {
    "validation_matched": ("dev_matched.tsv",),
    "validation_mismatched": ("dev_mismatched.tsv",),
}
_glue(
    "mnli",
    "Does the premise entail the hypothesis, contradict it, or neither?",
    columns=("premise", "hypothesis"),
    labels=("entailment", "neutral", "contradiction"),
    metrics=("accuracy",),
    folder="MNLI",
    layouts=(
        Layout(
            {"train": ("train.tsv",), **_MNLI_SPLITS},
            text=("sentence1", "sentence2"),
            label="gold_label",
            by_name=True,
        ),
        Layout(
            {"train": ("train_subset.tsv",), "validation": ("dev_subset.tsv",)},
            text=("sentence1", "sentence2"),
            label="label",
            by_name=True,
        ),
    ),
    paper="Williams et al. 2018, arXiv:1704.05426",
    splits=(("train", "train"), *((name, name) for name in _MNLI_SPLITS)),
)
_glue(
    "qnli",
    "Does the sentence answer the question?",
    columns=("question", "sentence"),
    labels=("entailment", "not_entailment"),
    metrics=("accuracy",),
    folder="QNLI",
    layouts=(Layout(_FILES, text=("question", "sentence"), label="label", by_name=True),),
    paper=f"Rajpurkar et al. 2016, arXiv:1606.05250; {GLUE_PAPER}",
)
_glue(
    "rte",
    "Does the first sentence entail the second?",
    columns=("sentence1", "sentence2"),
    labels=("entailment", "not_entailment"),
    metrics=("accuracy",),
    folder="RTE",
    layouts=(Layout(_FILES, text=("sentence1", "sentence2"), label="label", by_name=True),),
    paper=f"Dagan et al. 2006 to Bentivogli et al. 2009; {GLUE_PAPER}",
)
_glue(
    "wnli",
    "Does the sentence with the pronoun replaced follow from the first?",
    columns=("sentence1", "sentence2"),
    labels=("not_entailment", "entailment"),
    metrics=("accuracy",),
    folder="WNLI",
    layouts=(Layout(_FILES, text=("sentence1", "sentence2"), label="label"),),
    paper=f"Levesque et al. 2012, The Winograd Schema Challenge; {GLUE_PAPER}",
)

_JSON = ("", ".xz", ".gz")
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
            Layout(
                {
                    "train": tuple(f"train.jsonl{suffix}" for suffix in _JSON),
                    "validation": tuple(f"test.jsonl{suffix}" for suffix in _JSON),
                },
                text=("text",),
                label="label",
                json_lines=True,
            ),
        ),
        splits=(("train", "train"), ("validation", "test")),
    ),
)
