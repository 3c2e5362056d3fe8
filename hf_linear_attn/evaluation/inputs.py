"""The data of an evaluation, cut into batches: a text, a labelled task, sentence pairs."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.tasks import Task, get_task, load_task
from ..data.text import Text, encode_text, pad_token, padded_batches, token_documents, token_passages
from .config import EvaluationData, Settings
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
        labeled: Suffix of a validation set -> batches with labels.
        rows: The encoded rows of all validation sets, in order.
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
    rows: list[dict[str, Any]] = field(default_factory=list)
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


def task_inputs(name: str, tokenizer: Any, config: Any, data: EvaluationData, settings: Settings) -> EvaluationInputs:
    """Encode a labelled task: train rows for the transfer (without labels), validation rows to measure on.

    Args:
        name: The task.
        tokenizer: The model's tokenizer.
        config: The model's config, whose labels must be the task's.
        data: Where the files are, and how many rows to use.
        settings: Lengths and sizes.

    Raises:
        ValueError: The model was trained with other labels, or there are too few rows.
        OSError, ImportError: As `load_task`.
    """
    task = get_task(name)
    check_labels(task, config)
    splits = load_task(name, folder=data.folder)
    pad, size = pad_token(tokenizer), settings.batch_size

    def encode(split: Any, count: int | None) -> list[dict[str, Any]]:
        chosen = split if count is None or count >= len(split) else split.select(_drawn(len(split), count))
        texts = [list(chosen[column]) for column in task.columns]
        encoded = tokenizer(*texts, truncation=True, max_length=settings.sequence_length, return_attention_mask=False)
        columns = {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
        labels = list(chosen["label"])
        return [{**{key: rows[i] for key, rows in columns.items()}, "labels": label} for i, label in enumerate(labels)]

    def batches(rows: Sequence[dict[str, Any]], *, labels: bool = True) -> list[Batch]:
        rows = [{key: item for key, item in row.items() if labels or key != "labels"} for row in rows]
        return [labeled_batch(rows[start : start + size], pad) for start in range(0, len(rows), size)]

    train = encode(splits["train"], settings.train_sequences + settings.validation_sequences)
    names = [split for split in splits if split.startswith("validation")]
    labeled = {
        "" if len(names) == 1 else split.removeprefix("validation"): encode(splits[split], data.max_eval_samples)
        for split in names
    }
    rows = [row for part in labeled.values() for row in part]
    if len(train) < 4 or min(map(len, labeled.values())) < 2:
        raise ValueError(f"Task {name!r} has {len(train)} rows to train on and {len(rows)} to measure on: too few.")
    random.Random(settings.seed).shuffle(train)
    count = max(1, min(settings.validation_sequences, len(train) // 4))
    fidelity = evenly_spread(rows, settings.fidelity_sequences)
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    return EvaluationInputs(
        train=batches(train[count:], labels=False),
        validation=batches(train[:count], labels=False),
        fidelity=batches(fidelity, labels=False),
        labeled={suffix: batches(part) for suffix, part in labeled.items()},
        rows=rows,
        tokens=[token for row in rows[:256] for token in row["input_ids"]],
        hash=digest,
        facts={
            "source": f"the validation data of {name}",
            "train": input_lengths([row["input_ids"] for row in train[count:]]),
            "held_out": input_lengths([row["input_ids"] for row in rows]),
            "fidelity": input_lengths([row["input_ids"] for row in fidelity]),
        },
    )


def labeled_batch(rows: Sequence[dict[str, Any]], pad: int) -> Batch:
    """Return one batch of encoded rows, padded on the right with the token `pad`."""
    batch = padded_batches([row["input_ids"] for row in rows], len(rows), pad)[0]
    if "token_type_ids" in rows[0]:
        batch["token_type_ids"] = padded_batches([row["token_type_ids"] for row in rows], len(rows), 0)[0]["input_ids"]
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch


def check_labels(task: Task, config: Any) -> None:
    """Raise a ValueError if a head was trained with other labels or in another order: it would be scored as wrong."""
    trained = any("ForSequenceClassification" in name for name in config.architectures or ())
    if task.labels is None or not trained:
        return
    names = [str(config.id2label[index]) for index in sorted(config.id2label)]
    generic = all(name == f"LABEL_{index}" for index, name in enumerate(names))
    same = [name.lower() for name in names] == [name.lower() for name in task.labels]
    if len(names) != len(task.labels) or not (generic or same):
        raise ValueError(
            f"The model was trained with the labels {', '.join(names)}, in this order; the task {task.name!r} has "
            f"{', '.join(task.labels)}. Give a model that was fine-tuned for this task."
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


def evenly_spread(rows: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def _drawn(total: int, count: int) -> list[int]:
    """Rows in a fixed random order of their own: files are often sorted by label."""
    generator = torch.Generator().manual_seed(0)
    return sorted(torch.randperm(total, generator=generator)[:count].tolist())
