"""Metrics of labelled tasks, computed by scikit-learn and SciPy without a network.

Names of the form `hub:PATH[:CONFIG][#KEY]` are modules of the package `evaluate`, from the Hub or from a folder:

    hub:accuracy              the Hub's module `accuracy`
    hub:glue:mrpc#f1          its module `glue` in the configuration `mrpc`; of its values the one called f1
    hub:./my_metric           a folder with a metric module of one's own

A module of the Hub is code, and is fetched on first use: name those only that you trust.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..registry import Registry
from ..utils.extras import require_packages

HUB_PREFIX = "hub:"

Metric = Callable[[np.ndarray, np.ndarray], float]
"""Takes predictions and references, each `[rows]`."""


@dataclass(frozen=True)
class MetricEntry:
    """One metric, which is `continuous` if it compares scores (floats) and not classes (integers)."""

    function: Metric
    higher_is_better: bool = True
    continuous: bool = False


def _classes_metric(name: str, predictions: np.ndarray, references: np.ndarray, **options: Any) -> float:
    from sklearn import metrics

    with warnings.catch_warnings():
        # An untrained model predicts one class only, and would warn at every evaluation.
        warnings.simplefilter("ignore", UserWarning)
        return getattr(metrics, name)(references, predictions, **options)


def _f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1 of two: 2·TP / (2·TP + FP + FN), 0 for 0/0."""
    others = sorted({*predictions.tolist(), *references.tolist()} - {0, 1})
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


def compute_metrics(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Compute metrics of all rows at once, from predictions and references `[rows]`. Raises as `load_metrics`."""
    functions = load_metrics(names)
    continuous = any(name in METRICS and METRICS.get(name).continuous for name in names)
    arrays = [np.asarray(values, dtype=np.float64 if continuous else None) for values in (predictions, references)]
    return {name: float(function(*arrays)) for name, function in functions.items()}


def _hub_metric(name: str) -> Metric:
    location, hash_sign, key = name.removeprefix(HUB_PREFIX).partition("#")
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
