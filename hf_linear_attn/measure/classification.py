"""Scores of a labelled task: of classes, of several labels a row, and of numbers (regression)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.labels import Labels
from ..data.metrics import METRICS, compute_metrics, constant_answer_score, higher_is_better
from ..utils.models import Batch, evaluation_mode, model_inputs
from .metric import Metric, Numbers, Score

#: Metrics that are correlations; the Matthews coefficient is the one of two classes.
CORRELATIONS = ("matthews_correlation", "pearson", "spearmanr")

#: Metrics that are the share of the rows whose answer is right.
ACCURACIES = ("accuracy", "subset_accuracy")


class Classification(Metric):
    """The metrics of a task by the answers to all rows of a validation set at once.

    Of several validation sets (those of MNLI) each has a prefix: `matched_accuracy`. The first set and the first metric
    decide.

    Args:
        batches: The labelled batches of each validation set; the name of a single one is empty.
        names: Names of `data.metrics.METRICS`, or `hub:` names.
        labels: What the labels are: `Labels("regression")`, or classes with the names of the model's outputs.
    """

    def __init__(self, batches: Mapping[str, Sequence[Batch]], names: Sequence[str], labels: Labels) -> None:
        self.batches, self.names, self.labels = batches, tuple(names), labels
        every = {name: torch.cat([batch["labels"] for batch in part]) for name, part in batches.items()}
        self.expected = {name: labels.in_order(part) for name, part in every.items()}
        first, metric = next(iter(batches)), self.names[0]
        name = f"{first}_{metric}" if first else metric
        constant = constant_answer_score(metric, self.expected[first]) if metric in METRICS else None
        better = higher_is_better(metric)
        self.score = Score("task", name, name, greater_is_better=better, constant_answer=constant)

    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure a classifier."""
        values: dict[str, Any] = {}
        rows = longest = 0
        for name, batches in self.batches.items():
            answers = self.labels.in_order(self.labels.answers(classifier_logits(model, batches)))
            scores = compute_metrics(self.names, answers, self.expected[name])
            for metric, score in scores.items():
                key = f"{name}_{metric}" if name else metric
                values[key] = score
                error = standard_error(metric, score, len(answers))
                if error is not None:
                    values[f"{key}_stderr"] = error
            rows += len(answers)
            longest = max(longest, *(batch["input_ids"].shape[1] for batch in batches))
        return {**values, "rows": rows, "longest_input": longest}


@torch.no_grad()
def classifier_logits(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """Return the logits `[N, classes]` of a sequence classifier, float32 on the CPU."""
    with evaluation_mode(model):
        return torch.cat([model(**model_inputs(model, batch)).logits.float().cpu() for batch in batches])


def standard_error(metric: str, value: float, rows: int) -> float | None:
    """Return the standard error of a metric over so many rows; None where it has no simple form.

    That of an accuracy p is `√(p (1 - p) / n)` with two right and two wrong answers more, so that it is not 0 for 1.0
    (Agresti and Coull 1998); that of a correlation r is `(1 - r²) / √(n - 1)`.
    """
    if metric in ACCURACIES and rows:
        share = (value * rows + 2) / (rows + 4)
        return math.sqrt(share * (1 - share) / (rows + 4))
    if metric in CORRELATIONS and rows > 1:
        return (1 - value**2) / math.sqrt(rows - 1)
    return None
