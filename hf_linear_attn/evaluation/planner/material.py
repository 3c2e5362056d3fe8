"""The data of a plan: to train the mechanism on, to choose layers on, to verify the plan on. None is used twice."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..texts import Text, make_batches, pad_id, passages, whole_documents
from .amounts import Amounts
from .measures import Batch, ClassifierMeasure, EncoderMeasure, LanguageMeasure, Measure


@dataclass(frozen=True)
class Material:
    """`train` and `validation` for the transfer, `choice` and `verification` to measure with; `tokens` to time on."""

    train: list[Batch]
    validation: list[Batch]
    choice: Measure
    verification: Measure
    tokens: list[int]
    facts: dict[str, Any]


def text_material(text: Text, tokenizer: Any, amounts: Amounts, exact: PreTrainedModel, *, decoder: bool) -> Material:
    """From a text: its train part for the transfer, one half of its held-out part each to choose and to verify.

    Raises:
        ValueError: too little text.
    """
    length, pad, batch_size = amounts.sequence_length, pad_id(tokenizer), amounts.batch_size
    train = passages(tokenizer, text.train, length, amounts.train_sequences + amounts.validation_sequences)
    halves = split_halves(text.held_out)
    kept = [passages(tokenizer, half, length, amounts.passages) for half in halves]
    if len(train) < 4 or min(map(len, kept)) < 2:
        raise ValueError(
            f"{text.source!r} gives {len(train)} sequences of up to {length} tokens to train on, {len(kept[0])} to "
            f"choose with and {len(kept[1])} to verify with; 4, 2 and 2 are needed. Give a longer text."
        )
    random.Random(amounts.seed).shuffle(train)
    first = max(1, min(amounts.validation_sequences, len(train) // 4))
    facts: dict[str, Any] = {
        "source": text.source,
        "sha256": text.sha256,
        "sequence_length": length,
        "train_sequences": len(train) - first,
        "validation_sequences": first,
    }
    measures: list[Measure] = []
    for name, half, held in zip(("choice", "verification"), halves, kept, strict=True):
        if decoder:
            documents = whole_documents(tokenizer, half, amounts.tokens)
            stride = max(length // 2, 1)
            measures.append(
                LanguageMeasure(exact, documents, context=length, stride=stride, batch_size=amounts.batch_size)
            )
            facts[name] = {"documents": len(documents), "tokens": sum(map(len, documents)), "stride": stride}
        else:
            measures.append(EncoderMeasure(exact, make_batches(held, batch_size, pad)))
            facts[name] = {"passages": len(held), "tokens": sum(map(len, held))}
    return Material(
        list(make_batches(train[first:], batch_size, pad)),
        list(make_batches(train[:first], batch_size, pad)),
        measures[0],
        measures[1],
        [token for sequence in kept[0] for token in sequence],
        facts,
    )


def split_halves(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every second document; of a single one the first and the second half."""
    if len(documents) > 1:
        return list(documents[::2]), list(documents[1::2])
    cut = documents[0].find(" ", len(documents[0]) // 2)
    cut = cut if cut > 0 else len(documents[0]) // 2
    return [documents[0][:cut].strip()], [documents[0][cut:].strip()]


def task_problem(tokenizer: Any, task: str, folder: str | None, amounts: Amounts) -> Any:
    """The rows of a task, encoded as for fine-tuning.

    Raises:
        ValueError, OSError, ImportError: as `load_task`; the extra `train` is missing.
    """
    from ...training.options import DataSettings
    from ...training.problems import build_problem

    data = DataSettings(
        task=task,
        folder=folder,
        max_length=amounts.sequence_length,
        max_train=amounts.train_sequences + amounts.validation_sequences,
    )
    return build_problem("classification", tokenizer, data, amounts.seed)


def task_material(problem: Any, task: str, amounts: Amounts, exact: PreTrainedModel) -> Material:
    """From a task: rows of its train split for the transfer (labels are not used), every second row of its validation
    split each to choose and to verify."""
    train = [row for row in problem.train if row["input_ids"]]
    rows = [row for split in problem.validation.values() for row in split]
    halves = [rows[::2][: amounts.rows], rows[1::2][: amounts.rows]]
    if len(train) < 4 or min(map(len, halves)) < 2:
        raise ValueError(f"Task {task!r}: {len(train)} rows to train on and {len(rows)} to measure on are too few.")
    first = max(1, min(amounts.validation_sequences, len(train) // 4))
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()

    def batches(held: list[Any]) -> list[Batch]:
        size = amounts.batch_size
        generator = torch.Generator()
        return [problem.collate(held[start : start + size], generator) for start in range(0, len(held), size)]

    choice, verification = (
        ClassifierMeasure(exact, batches(half), problem.metrics, regression=problem.regression) for half in halves
    )
    facts = {
        "source": f"task {task}",
        "sha256": digest,
        "metric": problem.metrics[0],
        "sequence_length": amounts.sequence_length,
        "train_sequences": len(train) - first,
        "validation_sequences": first,
        "choice": {"rows": len(halves[0])},
        "verification": {"rows": len(halves[1])},
    }
    tokens = [token for row in halves[0] for token in row["input_ids"]]
    return Material(batches(train[first:]), batches(train[:first]), choice, verification, tokens, facts)
