"""Labelled tasks: the nine of GLUE, and IMDB for long documents; and metrics, which need no network.

Local files and the Hub give the same columns. Tasks are those of Warstadt et al. 2018 to Cer et al. 2017, as collected
by Wang et al. 2019 (arXiv:1804.07461). Metrics are computed by scikit-learn and SciPy.

Metrics of the form `hub:PATH[:CONFIG][#KEY]` are modules of the package `evaluate`, from the Hub or from a folder:

    hub:accuracy              the Hub's module `accuracy`
    hub:glue:mrpc#f1          its module `glue` in the configuration `mrpc`; of its values the one called f1
    hub:./my_metric           a folder with a metric module of one's own
    hub:-mse                  the module `mse`, of which less is better (of the others more)

A module of the Hub is code, and is fetched on first use: name those only that you trust.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..registry import Registry
from ..utils.extras import require_packages
from .files import (
    COMPRESSIONS,
    REMEDY,
    file_suffix,
    import_datasets,
    json_rows,
    load_hub,
    location,
    shortened,
    tsv_rows,
)

if TYPE_CHECKING:
    from datasets import DatasetDict

HUB_PREFIX = "hub:"

Metric = Callable[[np.ndarray, np.ndarray], float]
"""Takes predictions and references, each `[rows]`."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric, which is `continuous` if it compares scores (floats) and not classes (integers)."""

    function: Metric
    higher_is_better: bool = True
    continuous: bool = False


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, which is finite for any loss: at most `exp(700)`, near the largest number of float64."""
    return math.exp(min(loss, 700.0))


def likeliest_classes(logits: Any) -> Any:
    """Return the class of each row of logits `[N, C]`, -1 where there is NaN, which `argmax` takes for the largest."""
    return logits.argmax(dim=-1).masked_fill(logits.isnan().any(dim=-1), -1)


def _classes_metric(name: str, predictions: np.ndarray, references: np.ndarray, **options: Any) -> float:
    """A metric of scikit-learn; NaN if a row has no answer (-1)."""
    from sklearn import metrics

    if (predictions < 0).any():
        return math.nan
    with warnings.catch_warnings():
        # An untrained model predicts one class only, and would warn at every evaluation.
        warnings.simplefilter("ignore", UserWarning)
        return getattr(metrics, name)(references, predictions, **options)


def _f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1 of two: 2·TP / (2·TP + FP + FN), 0 for 0/0."""
    others = sorted({*predictions.tolist(), *references.tolist()} - {-1, 0, 1})
    if others:
        listed = ", ".join(map(str, others))
        raise ValueError(f"f1 is defined for the classes 0 and 1; these rows have {listed}. Use accuracy instead.")
    return _classes_metric("f1_score", predictions, references, zero_division=0.0)


def _correlation(name: str, predictions: np.ndarray, references: np.ndarray) -> float:
    """A correlation of `scipy.stats`; NaN if scores are constant, not finite, or fewer than two."""
    from scipy import stats

    finite = np.isfinite(predictions).all() and np.isfinite(references).all()
    if len(predictions) < 2 or not finite or np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        return getattr(stats, name)(predictions, references).statistic


def _mse(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean squared error; NaN if scores are not finite."""
    return float(np.mean((predictions - references) ** 2)) if np.isfinite(predictions).all() else math.nan


METRICS: Registry[MetricEntry] = Registry("metric")
METRICS.add("accuracy", MetricEntry(partial(_classes_metric, "accuracy_score")))
METRICS.add("f1", MetricEntry(_f1))
METRICS.add("matthews_correlation", MetricEntry(partial(_classes_metric, "matthews_corrcoef")))
METRICS.add("pearson", MetricEntry(partial(_correlation, "pearsonr"), continuous=True))
METRICS.add("spearmanr", MetricEntry(partial(_correlation, "spearmanr"), continuous=True))
METRICS.add("mse", MetricEntry(_mse, higher_is_better=False, continuous=True))


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the functions of metrics: names of `METRICS`, or `hub:` names (see the module)."""
    if isinstance(names, str):
        raise TypeError(f"Give the metrics as a list of names, got {names!r}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Metrics are one or more different names, got {', '.join(names) or 'none'}.")
    require_packages("sklearn", "scipy", extra="train", purpose="Task metrics")
    return {name: _hub_metric(name) if name.startswith(HUB_PREFIX) else METRICS.get(name).function for name in names}


def higher_is_better(name: str) -> bool:
    """Return whether more of a metric is better."""
    return METRICS.get(name).higher_is_better if name in METRICS else not name.startswith(f"{HUB_PREFIX}-")


def compute_metrics(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Compute metrics of all rows at once, from predictions and references `[rows]`.

    Raises as `load_metrics`, and a ValueError for a metric that such labels do not have.
    """
    functions = load_metrics(names)
    continuous = {name: METRICS.get(name).continuous for name in names if name in METRICS}
    dtype = np.float64 if any(continuous.values()) else None
    arrays = [np.asarray(values, dtype=dtype) for values in (predictions, references)]
    of_classes = [name for name, is_continuous in continuous.items() if not is_continuous]
    if of_classes and (arrays[1] % 1).any():
        remedy = "Use pearson, spearmanr or mse."
        raise ValueError(f"{of_classes[0]} compares classes, and these labels are scores. {remedy}")
    return {name: float(function(*arrays)) for name, function in functions.items()}


def constant_answer_score(metric: str, references: Any) -> float:
    """Return a metric of the same answer to all rows: the most frequent class, or the mean of scores.

    Of two classes it is the better one, which for f1 is class 1 however rare. It is 0 where it is undefined, as the
    correlation of one answer is: that knows nothing.
    """
    references = np.asarray(references)
    is_score = np.issubdtype(references.dtype, np.floating)
    counts = None if is_score else np.bincount(references)
    answers = [references.mean()] if counts is None else (0, 1) if len(counts) == 2 else [counts.argmax()]
    scores = [compute_metrics([metric], np.full_like(references, one), references)[metric] for one in answers]
    known = [0.0 if math.isnan(score) else score for score in scores]
    return max(known) if higher_is_better(metric) else min(known)


def _hub_metric(name: str) -> Metric:
    location, hash_sign, key = name.removeprefix(HUB_PREFIX).removeprefix("-").partition("#")
    path, colon, config = location.partition(":")
    if not path or (hash_sign and not key) or (colon and not config):
        raise ValueError(f"{name!r} is not a metric: write hub:PATH, hub:PATH:CONFIG or hub:PATH:CONFIG#KEY.")
    require_packages("evaluate", extra="train", purpose=f"The metric {name!r}")
    import evaluate

    try:
        module: Any = evaluate.load(path, config or None)
    except (FileNotFoundError, ConnectionError, ImportError, ValueError) as error:
        remedy = "Connect to the Hub, check its name, or use one that needs no network, such as accuracy."
        raise OSError(f"The metric {name!r} cannot be loaded ({error}). {remedy}") from error

    def metric(predictions: np.ndarray, references: np.ndarray) -> float:
        values = module.compute(predictions=predictions, references=references) or {}
        chosen = key or (next(iter(values)) if len(values) == 1 else None)
        if chosen not in values:
            available = ", ".join(values) or "nothing"
            raise ValueError(f"The metric {name!r} gives {available}: add #KEY with one of these to its name.")
        return float(values[chosen])

    return metric


GLUE_HUB = "nyu-mll/glue"

#: Names that the files of GLUE's tasks have by split; the first that exists is read.
GLUE_FILES = {
    "train": ("train.tsv", "train_subset.tsv"),
    "validation": ("dev.tsv", "dev_subset.tsv", "validation.tsv"),
}

Names = tuple[str, ...]

#: Range of the scores of a regression task.
MIN_SCORE, MAX_SCORE = 0.0, 5.0


@dataclass(frozen=True)
class FileLayout:
    """One layout that the files of a task may have."""

    text: Names = ()  # the text columns, or keys of a file of JSON lines; empty: called as after loading
    label: str = "label"  # the label column, likewise
    files: Mapping[str, Names] = field(default_factory=lambda: GLUE_FILES)
    names: Names = ()  # of all columns, where the first line does not name them
    widths: tuple[int, ...] = ()  # numbers of columns that rows may have; empty: as many as have a name
    label_names: bool = False  # whether labels are written by name, not by number


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


def load_task(name: str, *, folder: str | None = None, revision: str | None = None) -> DatasetDict:
    """Load a task with the splits `train` and `validation`, the columns of the task, and `label`.

    MNLI from the Hub or the GLUE archive has `validation_matched` and `validation_mismatched` instead; a part of it
    (`dev_subset.tsv`) is `validation`. The test split of IMDB, which has no other held-out part, is `validation`.
    Hidden test splits are not loaded. `train.tsv` goes before `train_subset.tsv` if both exist. `label` is a
    `ClassLabel`, or float32 for regression.

    `folder` is that of the task's files, or the one above it (the GLUE archive); None: the Hub, with a `revision`.
    A ValueError for an unknown task or a bad row (file, line and value are named), an OSError for missing files.
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
    return import_datasets().DatasetDict({name: data[old].select_columns(columns) for name, old in task.splits.items()})


def _from_files(task: Task, folder: Path) -> DatasetDict:
    datasets = import_datasets()
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r} for the task {task.name!r}. Check the path.")
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and _task_name(path.name) == task.name]
    layout, files = _find_files([*(inner or [folder / task.name]), folder], task.layouts)
    label = datasets.Value("float32") if task.labels is None else datasets.ClassLabel(names=list(task.labels))
    features = datasets.Features({**{name: datasets.Value("string") for name in task.columns}, "label": label})
    tables = {split: _read_rows(path, layout, task) for split, path in files.items()}
    return datasets.DatasetDict({name: datasets.Dataset.from_dict(table, features) for name, table in tables.items()})


def _task_name(folder: str) -> str:
    """The name of the task whose files a folder of the GLUE archive holds: `sst2` for `SST-2`."""
    return folder.lower().replace("-", "")


def _find_files(folders: Sequence[Path], layouts: Sequence[FileLayout]) -> tuple[FileLayout, dict[str, Path]]:
    """The layout whose training file is in one of the folders, and its files by split."""
    for folder in folders:
        for layout in layouts:
            files = {
                split: path
                for split, names in layout.files.items()
                for name in reversed(names)
                for path in (folder / f"{name}{suffix}" for suffix in reversed(("", *COMPRESSIONS)))
                if path.is_file()
            }
            if "train" not in files:
                continue
            if len(files) == 1:
                names = [name for split, names in layout.files.items() if split != "train" for name in names]
                raise FileNotFoundError(f"{str(folder)!r} has a training file but none of {', '.join(names)}.")
            return layout, files
    tried = [str(folder / name) for folder in folders for layout in layouts for name in layout.files["train"]]
    raise FileNotFoundError(f"None of these files exists: {', '.join(dict.fromkeys(tried))}; nor as .xz or .gz.")


def _read_rows(path: Path, layout: FileLayout, task: Task) -> dict[str, list[Any]]:
    """The texts and labels of a file by column. Raises a ValueError that names file and line for a bad row."""
    json_lines = file_suffix(path) == "jsonl"
    table: dict[str, list[Any]] = {name: [] for name in (*task.columns, "label")}
    columns = dict(zip(task.columns, layout.text or task.columns, strict=True))
    for line, row in json_rows(path) if json_lines else tsv_rows(path, layout.names, layout.widths):
        missing = [name for name in (*columns.values(), layout.label) if name not in row]
        if missing:
            where = location(path, line if json_lines else 1)
            raise ValueError(f"{where}: there is no {', '.join(missing)}; found {', '.join(row)}.")
        for name, column in columns.items():
            if not isinstance(row[column], str) or not row[column].strip():
                problem = f"column {column!r} has no text: {shortened(row[column])}"
                raise ValueError(f"{location(path, line)}: {problem}. {REMEDY}")
            table[name].append(row[column])
        try:
            table["label"].append(_label(row[layout.label], task, layout))
        except ValueError as error:
            raise ValueError(f"{location(path, line)}: {error}. {REMEDY}") from None
    if not table["label"]:
        raise ValueError(f"{str(path)!r} has no rows.")
    return table


def _label(value: Any, task: Task, layout: FileLayout) -> float | int:
    if task.labels is not None:
        known = task.labels if layout.label_names else tuple(str(index) for index in range(len(task.labels)))
        if str(value) not in known:
            raise ValueError(f"unknown label {shortened(str(value))}; expected one of {', '.join(known)}")
        return known.index(str(value))
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the score {shortened(value)} is not a number") from None
    if not MIN_SCORE <= score <= MAX_SCORE:  # true of NaN, too
        raise ValueError(f"the score {shortened(value)} is not between {MIN_SCORE:g} and {MAX_SCORE:g}")
    return score


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

# How similar are two sentences, from 0 to 5? Cer et al. 2017, arXiv:1708.00055. The benchmark's own files have genre,
# file, year, id, score and two sentences, and in some rows two sources more.
_sts_files = {"train": ("sts-train.csv",), "validation": ("sts-dev.csv",)}
_sts_names = ("genre", "file", "year", "id", "score", *_PAIR)
_sts = FileLayout(label="score", files=_sts_files, names=_sts_names, widths=(7, 9))
_add("STS-B", _PAIR, None, ("pearson", "spearmanr"), FileLayout(label="score"), _sts)

# Do two questions ask the same? Iyer et al. 2017, First Quora Dataset Release: Question Pairs.
_qqp = FileLayout(label="is_duplicate")
_add("QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1"), _qqp)

# Does the premise entail the hypothesis, contradict it, or neither? Williams et al. 2018, arXiv:1704.05426.
_mnli = FileLayout(_PAIR, "gold_label", {"train": ("train.tsv",), **_MNLI_DEV}, label_names=True)
_mnli_files = {"train": ("train_subset.tsv",), "validation": ("dev_subset.tsv",)}
_mnli_subset = FileLayout(_PAIR, files=_mnli_files, label_names=True)
_mnli_labels = ("entailment", "neutral", "contradiction")
_mnli_splits = {"train": "train", **{name: name for name in _MNLI_DEV}}
_add("MNLI", ("premise", "hypothesis"), _mnli_labels, ("accuracy",), _mnli, _mnli_subset, splits=_mnli_splits)

# Does the sentence answer the question? Rajpurkar et al. 2016, arXiv:1606.05250; Wang et al. 2019, arXiv:1804.07461.
_add("QNLI", ("question", "sentence"), _ENTAILMENT, ("accuracy",), FileLayout(label_names=True))

# Does the first sentence entail the second? Dagan et al. 2006 to Bentivogli et al. 2009.
_add("RTE", _PAIR, _ENTAILMENT, ("accuracy",), FileLayout(label_names=True))

# Does the sentence with the pronoun replaced follow from the first? Levesque et al. 2012, The Winograd Schema
# Challenge.
_add("WNLI", _PAIR, ("not_entailment", "entailment"), ("accuracy",), FileLayout())

# Is the film review positive? (documents of up to 2,500 words) Maas et al. 2011, Learning Word Vectors for Sentiment
# Analysis.
_reviews = FileLayout(files={"train": ("train.jsonl",), "validation": ("test.jsonl",)})
_imdb_splits = {"train": "train", "validation": "test"}
_add("imdb", ("text",), ("neg", "pos"), ("accuracy",), _reviews, hub=("stanfordnlp/imdb", None), splits=_imdb_splits)
