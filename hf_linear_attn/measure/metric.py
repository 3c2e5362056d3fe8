"""What a metric is: a callable that measures a model, like the evaluators of sentence-transformers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..utils.models import Batch

#: Tokens of one forward pass of a measurement, padding included. Batches depend on the rows alone, so that whoever
#: measures a model on them gets the same number, to the last bit.
BATCH_TOKENS = 4096


Numbers = Mapping[str, Any]
"""What a metric says of a model: numbers by their names. `NAME_stderr` is the standard error of the number `NAME`."""


@dataclass(frozen=True)
class Score:
    """The number of a metric that stands for the quality of a model."""

    measurement: str  # the metric that it belongs to, in records
    metric: str  # its name among the metric's numbers
    title: str  # in tables and plots
    greater_is_better: bool = True
    digits: int = 3  # decimals to show
    is_agreement: bool = False  # whether it compares with the exact model, whose score is then 1 by definition
    constant_answer: float | None = None  # the score of the same answer to all rows, of a classifier


#: Numbers that say how much was measured.
SIZES = ("tokens", "rows", "longest_input")


def is_shown(name: str) -> bool:
    """Return whether a number of a metric is one of quality, and no error of another one and no size."""
    return not name.endswith("_stderr") and name not in SIZES


class Metric(ABC):
    """A callable `metric(model) -> Numbers` that measures a model on rows which the metric holds.

    `score` says which of the numbers stands for the quality of the model. The model is measured in its own precision,
    in evaluation mode, and stays as it is.
    """

    score: Score

    @abstractmethod
    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure a model."""


def in_batches(
    rows: Sequence[Mapping[str, Any]], collator: Callable[[list[Any]], Batch], *, seed: int = 0
) -> list[Batch]:
    """Return rows, in their order, as batches of up to `BATCH_TOKENS` tokens.

    What the collator draws at random, such as the masked tokens of a masked language model, it draws from the seed.
    """
    parts: list[list[Mapping[str, Any]]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row["input_ids"]))
        if not parts or longest * (len(parts[-1]) + 1) > BATCH_TOKENS:
            parts.append([])
            longest = len(row["input_ids"])
        parts[-1].append(row)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [collator(part) for part in parts]
