"""Metrics of labelled tasks, computed by scikit-learn and SciPy.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..registry import Registry
from ..utils.extras import require_packages
from .labels import PROBLEMS, Problem

if TYPE_CHECKING:
    from torch import Tensor

HUB_PREFIX = "hub:"

MetricFunction = Callable[[np.ndarray, np.ndarray], float]
"""Takes predictions and references, each `[rows]`, or of several labels a row `[rows, labels]`."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric, and for which labels it is."""

    function: MetricFunction
    problem: Problem = "single_label_classification"
    higher_is_better: bool = True


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, which is finite for any loss: at most `exp(700)`, near the largest number of float64."""
    return math.exp(min(loss, 700.0))


def loss_with_error(by_row: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """Return the mean loss of all targets and its standard error, from the sum and the number of targets of each row.

    The error is that of a ratio of sums over rows, of which the last digit may be chance where there are few. One row
    does not tell how much rows vary, and has none.
    """
    loss = by_row.sum() / counts.sum()
    error = (by_row - loss * counts).square().sum().sqrt() / counts.sum()
    return float(loss), float(error) if len(counts) > 1 else None


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

    predictions = predictions.astype(np.float64)
    references = references.astype(np.float64)
    finite = np.isfinite(predictions).all() and np.isfinite(references).all()
    if len(predictions) < 2 or not finite or np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        return getattr(stats, name)(predictions, references).statistic


def _mse(predictions: np.ndarray, references: np.ndarray) -> float:
    """Mean squared error; NaN if scores are not finite."""
    predictions = predictions.astype(np.float64)
    references = references.astype(np.float64)
    if np.isfinite(predictions).all():
        return float(np.mean((predictions - references) ** 2))
    return math.nan


METRICS: Registry[MetricEntry] = Registry("metric")
METRICS.add("accuracy", MetricEntry(partial(_classes_metric, "accuracy_score")))
METRICS.add("f1", MetricEntry(_f1))
METRICS.add("matthews_correlation", MetricEntry(partial(_classes_metric, "matthews_corrcoef")))
for _average in ("micro", "macro"):
    _averaged = partial(_classes_metric, "f1_score", average=_average, zero_division=0.0)
    METRICS.add(f"f1_{_average}", MetricEntry(_averaged, "multi_label_classification"))
METRICS.add("subset_accuracy", MetricEntry(partial(_classes_metric, "accuracy_score"), "multi_label_classification"))
METRICS.add("pearson", MetricEntry(partial(_correlation, "pearsonr"), "regression"))
METRICS.add("spearmanr", MetricEntry(partial(_correlation, "spearmanr"), "regression"))
METRICS.add("mse", MetricEntry(_mse, "regression", higher_is_better=False))

#: The metrics of labels where none are named; the first decides.
DEFAULT_METRICS: dict[Problem, tuple[str, ...]] = {
    "single_label_classification": ("accuracy",),
    "multi_label_classification": ("f1_micro", "f1_macro", "subset_accuracy"),
    "regression": ("pearson", "spearmanr"),
}


def load_metrics(names: Sequence[str]) -> dict[str, MetricFunction]:
    """Return the functions of metrics: names of `METRICS`, or `hub:` names (see the module)."""
    if isinstance(names, str):
        raise TypeError(f"Give the metrics as a list of names, got {names!r}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Metrics are one or more different names, got {', '.join(names) or 'none'}.")
    require_packages("sklearn", "scipy", extra="train", purpose="Task metrics")
    return {name: _hub_metric(name) if name.startswith(HUB_PREFIX) else METRICS.get(name).function for name in names}


def higher_is_better(name: str) -> bool:
    """Return whether more of a metric is better."""
    if name in METRICS:
        return METRICS.get(name).higher_is_better
    return not name.startswith(f"{HUB_PREFIX}-")


def check_metrics(names: Sequence[str], problem: Problem) -> None:
    """Raise a ValueError for a metric that is for other labels (classes are numbers, too); or as `load_metrics`."""
    load_metrics(names)
    for name in names:
        meant = METRICS.get(name).problem if name in METRICS else problem
        if meant != problem and (meant, problem) != ("regression", "single_label_classification"):
            remedy = f"Use {', '.join(other for other, entry in METRICS if entry.problem == problem)}."
            raise ValueError(f"{name} is for {PROBLEMS[meant]}, and these labels are {PROBLEMS[problem]}. {remedy}")


def compute_metrics(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Compute metrics of all rows at once, from predictions and references `[rows]` or `[rows, labels]`.

    Raises as `load_metrics`, and a ValueError for `f1` of more than two classes.
    """
    functions = load_metrics(names)
    return {name: float(function(*map(np.asarray, (predictions, references)))) for name, function in functions.items()}


def constant_answer_score(metric: str, references: Any) -> float:
    """Return the best value of a metric for the same answer to all rows.

    The answers are the mean of scores; the most frequent class, of two classes each (f1 is that of class 1, however
    rare it is); of several labels the most frequent ones, as many as are best. It is 0 where it is undefined, as the
    correlation of one answer is: that knows nothing.
    """
    references = np.asarray(references)
    answers: list[Any]
    if references.ndim == 2:
        frequent = (-references.sum(axis=0)).argsort(kind="stable")
        answers = [np.isin(np.arange(len(frequent)), frequent[:count]) for count in range(len(frequent) + 1)]
    elif np.issubdtype(references.dtype, np.floating):
        answers = [references.mean()]
    else:
        counts = np.bincount(references)
        answers = [0, 1] if len(counts) == 2 else [counts.argmax()]
    constant = [np.broadcast_to(np.asarray(answer, references.dtype), references.shape) for answer in answers]
    scores = [compute_metrics([metric], answer, references)[metric] for answer in constant]
    defined = [0.0 if math.isnan(score) else score for score in scores]
    return max(defined) if higher_is_better(metric) else min(defined)


def _hub_metric(name: str) -> MetricFunction:
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
