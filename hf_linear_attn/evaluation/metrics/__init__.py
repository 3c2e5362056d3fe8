"""Metrics of labelled tasks as modules of the package evaluate, carried here so that they load without a network."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...registry import Registry
from .foreign import ForeignMetric, Together, is_foreign

if TYPE_CHECKING:
    from ...data.tasks import Task


@dataclass(frozen=True)
class MetricEntry:
    """One metric.

    Attributes:
        name: also the key of its value.
        title: what it is, one line; with the value on degenerate inputs.
        home: module and class; imported when the metric is loaded.
        higher_is_better: the direction.
        of_scores: whether it compares scores (floats) and not classes (ints).
    """

    name: str
    title: str
    home: tuple[str, str]
    higher_is_better: bool = True
    of_scores: bool = False


METRICS: Registry[MetricEntry] = Registry("metric")

for _entry in (
    MetricEntry("accuracy", "share of rows with the right class", (f"{__name__}.classification", "Accuracy")),
    MetricEntry(
        "f1",
        "harmonic mean of precision and recall of class 1 of two; 0 if neither is defined",
        (f"{__name__}.classification", "F1"),
    ),
    MetricEntry(
        "matthews_correlation",
        "correlation of predicted and true classes; 0 if one of them is constant",
        (f"{__name__}.classification", "MatthewsCorrelation"),
    ),
    MetricEntry(
        "pearson",
        "linear correlation; nan if scores are constant, not finite, or fewer than two",
        (f"{__name__}.regression", "Pearson"),
        of_scores=True,
    ),
    MetricEntry(
        "spearmanr",
        "correlation of ranks; nan if scores are constant, not finite, or fewer than two",
        (f"{__name__}.regression", "Spearmanr"),
        of_scores=True,
    ),
    MetricEntry(
        "mse",
        "mean squared error; nan if scores are not finite",
        (f"{__name__}.regression", "Mse"),
        higher_is_better=False,
        of_scores=True,
    ),
):
    METRICS.add(_entry.name, _entry)


def load_metric(name: str) -> Any:
    """An `evaluate.Metric` that needs no network and writes to a temporary folder of its own.

    Each call gives a fresh module with its own experiment id, so that no two share what was added, in one process or in
    several. The folder goes with the module.

    Raises:
        ValueError: an unknown name.
        ImportError: evaluate, scikit-learn or SciPy is not installed.
    """
    module, cls = METRICS.get(name).home
    made_of = getattr(import_module(module), cls)
    folder = tempfile.mkdtemp(prefix="hf-linear-attn-metric-")
    made = made_of(cache_dir=folder, experiment_id=uuid.uuid4().hex)
    weakref.finalize(made, shutil.rmtree, folder, ignore_errors=True)
    return made


def combine(names: Sequence[str]) -> Any:
    """Several metrics as one `evaluate.combine`: `add_batch(predictions=…, references=…)`, then `compute()`.

    The result has one value a name. After `compute()` it can be filled again. Names that begin with `hub:` are modules
    of the Hub or of a folder (see `foreign`).

    Raises:
        TypeError: one name and no list.
        ValueError: an unknown or repeated name, or none.
        ImportError: as `load_metric`.
        OSError: a module of the Hub that cannot be loaded.
    """
    if isinstance(names, str):
        raise TypeError(f"Give the metrics as a list of names, got {names!r}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Metrics to combine are one or more different names, got {', '.join(names) or 'none'}.")
    modules = [load_metric(name) for name in names if not is_foreign(name)]
    foreign = [ForeignMetric(name) for name in names if is_foreign(name)]
    import evaluate

    if not foreign:
        return evaluate.combine(modules)
    return Together([*([evaluate.combine(modules)] if modules else []), *foreign])


def task_metrics(task: Task | str) -> Any:
    """The metrics of a task, combined.

    Raises:
        ValueError: an unknown task.
        ImportError: as `load_metric`.
    """
    if isinstance(task, str):
        from ...data.tasks import get_task

        task = get_task(task)
    return combine(task.metrics)
