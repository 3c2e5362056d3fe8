"""The data of an evaluation, cut into batches: a text, a labelled task, sentence pairs."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.config import DataConfig
from ..data.task_data import load_task_data
from ..data.tasks import load_task
from ..data.text import Text, encode_text, pad_token, padded_batches, token_documents, token_passages
from .config import Settings
from .metrics import SentencePairs

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class EvaluationInputs:
    """Batches of one text or task for one model.

    Attributes:
        train, validation: For attention transfer; `validation` chooses the best step and is not trained on.
        fidelity: A part of the held-out data.
        test: Passages that are used for nothing but the reported values.
        documents: Token ids of held-out documents, for the perplexity.
        labeled: Suffix of a validation set (or name of a part) -> batches with labels.
        metrics: Names of the metrics of labelled data, the first of which decides.
        regression: Whether labels are scores.
        tokens: Token ids that inputs for timing are made from.
        hash: Identifies the data.
        facts: What reports say about the data: source, sizes, measured lengths of the inputs.
    """

    train: list[Batch]
    validation: list[Batch]
    fidelity: list[Batch]
    test: list[Batch] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)
    labeled: dict[str, list[Batch]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    regression: bool = False
    tokens: list[int] = field(default_factory=list)
    hash: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def text_inputs(text: Text, tokenizer: Any, settings: Settings) -> EvaluationInputs:
    """Cut a text into batches.

    Raises:
        ValueError: It is too short for a batch of training and one of measuring.
    """
    length, pad, size = settings.sequence_length, pad_token(tokenizer), settings.batch_size
    train = token_passages(tokenizer, text.train, length, settings.train_sequences)
    test = token_passages(tokenizer, text.held_out, length, settings.test_sequences)
    if len(train) < 4 or len(test) < 2:
        raise ValueError(
            f"{text.source!r} gives {len(train)} training and {len(test)} held-out sequences of up to {length} "
            "tokens; 4 and 2 are needed. Give a longer text."
        )
    random.Random(settings.seed).shuffle(train)
    count = max(1, min(settings.validation_sequences, len(train) // 4))
    fidelity = evenly_spread(test, settings.fidelity_sequences)
    return EvaluationInputs(
        train=padded_batches(train[count:], size, pad),
        validation=padded_batches(train[:count], size, pad),
        fidelity=padded_batches(fidelity, size, pad),
        test=padded_batches(test, size, pad),
        documents=token_documents(tokenizer, text.held_out, settings.perplexity_tokens),
        tokens=[token for sequence in test for token in sequence],
        hash=text.sha256,
        facts={
            "source": text.source,
            "train": input_lengths(train[count:]),
            "held_out": input_lengths(test),
            "fidelity": input_lengths(fidelity),
        },
    )


def task_inputs(
    data: DataConfig, tokenizer: Any, config: Any, settings: Settings, *, parts: Sequence[str] = ()
) -> EvaluationInputs:
    """Encode labelled data: train rows for the transfer (without labels), validation rows to measure on.

    Args:
        data: A task, or labelled files.
        tokenizer: The model's tokenizer.
        config: The model's config, whose labels must be those of the data.
        settings: Lengths and sizes.
        parts: Names of equal parts that the validation rows are dealt out to, in place of the validation sets.

    Raises:
        ValueError: The model was trained with other labels, or there are too few rows.
        OSError, ImportError: As `load_task_data`.
    """
    count = settings.train_sequences + settings.validation_sequences
    limited = replace(data, max_length=settings.sequence_length, max_train_samples=data.max_train_samples or count)
    task = load_task_data("classification", tokenizer, limited, settings.seed)
    task.check_labels(config, "The model")
    train = list(task.train)
    labeled = {f"_{name}" if name else "": list(part) for name, part in task.validation.items()}
    rows = [row for part in labeled.values() for row in part]
    source = f"task {data.task}" if data.dataset is None else Path(data.dataset).name
    if len(train) < 4 or min(map(len, labeled.values())) < 2:
        raise ValueError(f"{source} has {len(train)} rows to train on and {len(rows)} to measure on: too few.")
    random.Random(settings.seed).shuffle(train)
    count = max(1, min(settings.validation_sequences, len(train) // 4))

    def batches(rows: Sequence[dict[str, Any]], *, labels: bool = False) -> list[Batch]:
        rows = [{key: item for key, item in row.items() if labels or key != "labels"} for row in rows]
        size = settings.batch_size
        return [dict(task.collator(rows[start : start + size])) for start in range(0, len(rows), size)]

    fidelity = evenly_spread(rows, settings.fidelity_sequences)
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    lengths = {"train": train[count:], "held_out": rows, "fidelity": fidelity}
    if parts:
        labeled = {name: rows[start :: len(parts)] for start, name in enumerate(parts)}
        lengths |= labeled
    return EvaluationInputs(
        train=batches(train[count:]),
        validation=batches(train[:count]),
        fidelity=batches(fidelity),
        labeled={suffix: batches(part, labels=True) for suffix, part in labeled.items()},
        metrics=task.metric_names,
        regression=task.labels is None,
        tokens=[token for row in rows[:256] for token in row["input_ids"]],
        hash=digest,
        facts={
            "source": f"the validation data of {source}",
            **{name: input_lengths([row["input_ids"] for row in part]) for name, part in lengths.items()},
        },
    )


def sentence_pairs(folder: str, tokenizer: Any, settings: Settings, max_rows: int | None) -> SentencePairs:
    """Encode the validation pairs of STS-B, at most `max_rows` of them, evenly spread.

    Raises:
        ValueError, OSError, ImportError: As `load_task`.
    """
    rows = list(load_task("stsb", folder=folder)["validation"])
    rows = rows if max_rows is None else evenly_spread(rows, max_rows)
    texts = [row[column] for column in ("sentence1", "sentence2") for row in rows]
    length = settings.sequence_length
    ids = [encode_text(tokenizer, text, add_special_tokens=True) for text in texts]
    ids = [row if len(row) <= length else [*row[: length - 1], row[-1]] for row in ids]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    digest = hashlib.sha256(repr([(row["sentence1"], row["sentence2"], row["label"]) for row in rows]).encode())
    return SentencePairs(
        batches=padded_batches([ids[index] for index in order], max(settings.batch_size, 16), pad_token(tokenizer)),
        order=order,
        scores=[float(row["label"]) for row in rows],
        data=digest.hexdigest(),
        source=f"STS-B validation, {Path(folder).name}",
        longest=max(map(len, ids)),
    )


def input_lengths(sequences: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the number of sequences, their tokens, and the median and largest length: what the inputs really were."""
    lengths = [len(sequence) for sequence in sequences]
    median = round(statistics.median(lengths)) if lengths else 0
    return {"sequences": len(lengths), "tokens": sum(lengths), "median": median, "longest": max(lengths, default=0)}


def inputs_text(facts: Mapping[str, int]) -> str:
    """Return what `input_lengths` says as text."""
    return (
        f"{facts['sequences']:,} inputs of {facts['tokens']:,} tokens (median {facts['median']:,}, longest "
        f"{facts['longest']:,})"
    )


def evenly_spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]
