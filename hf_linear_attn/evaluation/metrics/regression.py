"""Metrics of predicted scores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from .common import HINT, describe

try:
    import datasets  # noqa: F401  (told missing now, not after hours of training)
    import evaluate
    import numpy as np
    from scipy import stats
    from sklearn import metrics
except ImportError as error:
    raise ImportError(HINT) from error

DOCS = "https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats."
REFERENCE = "Virtanen et al. 2020, SciPy 1.0"


class Pearson(evaluate.Metric):
    """The linear correlation of predictions and references; nan where it is undefined."""

    def _info(self) -> Any:
        return describe("pearson", "float64", REFERENCE, f"{DOCS}pearsonr.html")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"pearson": _correlation(stats.pearsonr, predictions, references)}


class Spearmanr(evaluate.Metric):
    """The linear correlation of the ranks, ties at their mean rank; nan where it is undefined."""

    def _info(self) -> Any:
        return describe("spearmanr", "float64", REFERENCE, f"{DOCS}spearmanr.html")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"spearmanr": _correlation(stats.spearmanr, predictions, references)}


class Mse(evaluate.Metric):
    """The mean squared error; nan where a score is not finite."""

    def _info(self) -> Any:
        url = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics.mean_squared_error.html"
        return describe("mse", "float64", "Pedregosa et al. 2011, Scikit-learn: Machine Learning in Python", url)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if not _finite(predictions, references):
            return {"mse": math.nan}
        return {"mse": float(metrics.mean_squared_error(references, predictions))}


def _correlation(function: Callable[..., Any], predictions: Any, references: Any) -> float:
    """nan for constant, infinite or nan scores (a model that diverged) and fewer than two rows."""
    if len(predictions) < 2 or not _finite(predictions, references):
        return math.nan
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        return float(function(predictions, references).statistic)


def _finite(*scores: Any) -> bool:
    return all(bool(np.isfinite(part).all()) for part in scores)
