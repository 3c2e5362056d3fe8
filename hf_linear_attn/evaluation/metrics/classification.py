"""Metrics of predicted classes."""

from __future__ import annotations

import warnings
from typing import Any

from .common import HINT, describe

try:
    import datasets  # noqa: F401  (told missing now, not after hours of training)
    import evaluate
    from sklearn import metrics
except ImportError as error:
    raise ImportError(HINT) from error

DOCS = "https://scikit-learn.org/stable/modules/generated/sklearn.metrics."
REFERENCE = "Pedregosa et al. 2011, Scikit-learn: Machine Learning in Python"


class Accuracy(evaluate.Metric):
    """The share of rows with the right class."""

    def _info(self) -> Any:
        return describe("accuracy", "int64", REFERENCE, f"{DOCS}accuracy_score.html")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(metrics.accuracy_score(references, predictions))}


class F1(evaluate.Metric):
    """F1 = 2·TP / (2·TP + FP + FN) of class 1 of two; 0 where class 1 occurs neither in predictions nor references."""

    def _info(self) -> Any:
        return describe("f1", "int64", REFERENCE, f"{DOCS}f1_score.html")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        others = sorted({*map(int, predictions), *map(int, references)} - {0, 1})
        if others:
            raise ValueError(
                f"f1 is of the classes 0 and 1; found {', '.join(map(str, others))}. Take accuracy instead."
            )
        return {"f1": float(metrics.f1_score(references, predictions, zero_division=0.0))}


class MatthewsCorrelation(evaluate.Metric):
    """The correlation of predicted and true classes, in [-1, 1]; 0 where one of the two is constant (0/0)."""

    def _info(self) -> Any:
        return describe("matthews_correlation", "int64", REFERENCE, f"{DOCS}matthews_corrcoef.html")

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        with warnings.catch_warnings():
            # One class only: the value is defined above, and an untrained model would warn at every evaluation.
            warnings.simplefilter("ignore", UserWarning)
            return {"matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))}
