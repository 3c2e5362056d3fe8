"""Metrics of labelled tasks, computed by scikit-learn and SciPy without a network.

Names of the form `hub:PATH[:CONFIG][#KEY]` are modules of the package `evaluate`, from the Hub or from a folder:

    hub:accuracy              the Hub's module `accuracy`
    hub:glue:mrpc#f1          its module `glue` in the configuration `mrpc`; of its values the one called f1
    hub:./my_metric           a folder with a metric module of one's own

A module of the Hub is code, and is fetched on first use: name those only that you trust.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..registry import Registry
from ..utils.extras import require_packages

if TYPE_CHECKING:
    import numpy as np

    from .tasks import Task

HUB_PREFIX = "hub:"


@dataclass(frozen=True)
class MetricEntry:
    """One metric.

    Attributes:
        name: the metric's name, which is also the key of its value.
        title: one line that defines it, with its value on degenerate inputs.
        function: computes it from arrays `(predictions, references)`, each `[rows]`.
        higher_is_better: the direction.
        continuous: whether it compares scores (floats) and not classes (integers).
    """

    name: str
    title: str
    function: Callable[[np.ndarray, np.ndarray], float]
    higher_is_better: bool = True
    continuous: bool = False


def _accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(references, predictions)


def _f1(predictions: np.ndarray, references: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    others = sorted({*predictions.tolist(), *references.tolist()} - {0, 1})
    if others:
        raise ValueError(
            f"f1 is defined for the classes 0 and 1; these rows have {', '.join(map(str, others))}. Take accuracy "
            "instead."
        )
    return f1_score(references, predictions, zero_division=0.0)


def _matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    with warnings.catch_warnings():
        # One class only: the value is defined as 0, and an untrained model would warn at every evaluation.
        warnings.simplefilter("ignore", UserWarning)
        return matthews_corrcoef(references, predictions)


def _pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, references)


def _spearman(predictions: np.ndarray, references: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, references)


def _mse(predictions: np.ndarray, references: np.ndarray) -> float:
    from sklearn.metrics import mean_squared_error

    return mean_squared_error(references, predictions) if _all_finite(predictions, references) else math.nan


def _correlation(function: Callable[..., Any], predictions: np.ndarray, references: np.ndarray) -> float:
    """The correlation, or nan for constant, infinite or nan scores (a model that diverged) and fewer than two rows."""
    import numpy as np
    from scipy.stats import NearConstantInputWarning

    if len(predictions) < 2 or not _all_finite(predictions, references):
        return math.nan
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NearConstantInputWarning)
        return function(predictions, references).statistic


def _all_finite(*arrays: np.ndarray) -> bool:
    import numpy as np

    return all(bool(np.isfinite(array).all()) for array in arrays)


METRICS: Registry[MetricEntry] = Registry("metric")

for _entry in (
    MetricEntry("accuracy", "share of rows with the right class", _accuracy),
    MetricEntry(
        "f1", "harmonic mean of precision and recall of class 1 of two: 2·TP / (2·TP + FP + FN), 0 for 0/0", _f1
    ),
    MetricEntry(
        "matthews_correlation",
        "correlation of predicted and true classes; 0 if one of them is constant",
        _matthews_correlation,
    ),
    MetricEntry(
        "pearson",
        "linear correlation; nan if scores are constant, not finite, or fewer than two",
        _pearson,
        continuous=True,
    ),
    MetricEntry(
        "spearmanr",
        "correlation of ranks; nan if scores are constant, not finite, or fewer than two",
        _spearman,
        continuous=True,
    ),
    MetricEntry(
        "mse", "mean squared error; nan if scores are not finite", _mse, higher_is_better=False, continuous=True
    ),
):
    METRICS.add(_entry.name, _entry)


class TaskMetrics:
    """Several metrics of the same rows, filled batch by batch.

        metrics = TaskMetrics(["accuracy", "f1"])
        metrics.add_batch(predictions=[0, 1], references=[0, 0])
        metrics.compute()  # {"accuracy": 0.5, "f1": 0.0}

    Args:
        names: names of `METRICS`, or `hub:` names (see the module).

    Raises:
        TypeError: `names` is one string and no list.
        ValueError: a name is unknown or repeated, or there is none.
        ImportError: scikit-learn or SciPy is missing (for `hub:` names: evaluate).
        OSError: a module of the Hub cannot be loaded.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str):
            raise TypeError(f"Give the metrics as a list of names, got {names!r}.")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Metrics are one or more different names, got {', '.join(names) or 'none'}.")
        require_packages("sklearn", "scipy", extra="train", purpose="Task metrics")
        self.names = tuple(names)
        self._functions: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
            name: HubMetric(name) if name.startswith(HUB_PREFIX) else METRICS.get(name).function for name in names
        }
        self._continuous = any(name in METRICS and METRICS.get(name).continuous for name in names)
        self._predictions: list[np.ndarray] = []
        self._references: list[np.ndarray] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add rows: sequences, arrays or tensors of the shape `[rows]`."""
        import numpy as np

        dtype = np.float64 if self._continuous else None
        self._predictions.append(np.asarray(predictions, dtype=dtype))
        self._references.append(np.asarray(references, dtype=dtype))

    def compute(self, *, predictions: Any = None, references: Any = None) -> dict[str, float]:
        """Compute the value of each metric over all rows added, and empty the object.

        Args:
            predictions, references: more rows, or all of them.
        """
        import numpy as np

        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        if not self._predictions:
            raise ValueError("There are no rows to compute metrics from. Call add_batch() first.")
        arrays = np.concatenate(self._predictions), np.concatenate(self._references)
        self._predictions, self._references = [], []
        return {name: float(function(*arrays)) for name, function in self._functions.items()}


def compute_metrics(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Compute metrics of all rows at once; arguments and errors are those of `TaskMetrics`."""
    return TaskMetrics(names).compute(predictions=predictions, references=references)


def task_metrics(task: Task | str) -> TaskMetrics:
    """The metrics of a task.

    Raises:
        ValueError: the task is unknown.
        ImportError: as `TaskMetrics`.
    """
    if isinstance(task, str):
        from .tasks import get_task

        task = get_task(task)
    return TaskMetrics(task.metrics)


# --------------------------------------------------------------------------------------------------------------------
# Modules of the package evaluate


class HubName(NamedTuple):
    """The parts of a name `hub:PATH[:CONFIG][#KEY]`."""

    path: str
    config: str | None
    key: str | None


def parse_hub_name(name: str) -> HubName:
    """Split a `hub:` name into its parts.

    Raises:
        ValueError: there is no path, or an empty configuration or key.
    """
    rest, hash_sign, key = name.removeprefix(HUB_PREFIX).partition("#")
    path, colon, config = rest.partition(":")
    if not path or (hash_sign and not key) or (colon and not config):
        raise ValueError(f"{name!r} is no metric: write hub:PATH, hub:PATH:CONFIG or hub:PATH:CONFIG#KEY.")
    return HubName(path, config or None, key or None)


class HubMetric:
    """A metric module of the package `evaluate`, called with `(predictions, references)`.

    Raises:
        ValueError: the name has another form.
        ImportError: evaluate is missing.
        OSError: the module cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._parts = parse_hub_name(name)
        require_packages("evaluate", extra="train", purpose=f"The metric {name!r}")
        import evaluate

        try:
            self._module: Any = evaluate.load(self._parts.path, self._parts.config)
        except (FileNotFoundError, ConnectionError, ImportError, ValueError) as error:
            raise OSError(
                f"The metric {name!r} cannot be loaded ({error}). Connect to the Hub, check its name, or use one that "
                "needs no network, such as accuracy."
            ) from error

    def __call__(self, predictions: np.ndarray, references: np.ndarray) -> float:
        values = self._module.compute(predictions=predictions, references=references) or {}
        key = self._parts.key or (next(iter(values)) if len(values) == 1 else None)
        if key not in values:
            available = ", ".join(values) or "nothing"
            raise ValueError(f"The metric {self.name!r} gives {available}: add #KEY with one of these to its name.")
        return float(values[key])
