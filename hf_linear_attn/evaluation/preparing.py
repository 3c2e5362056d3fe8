"""How much of everything an evaluation uses, and its data: cut into batches, told apart by a hash."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .texts import Text, encode, make_batches, pad_id, passages, whole_documents

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths in tokens, budget in seconds for each timed length; evaluations: how often the
    validation sequences are looked at during a transfer, to keep its best step.

    context, stride: windows of the perplexity (None: the sequence length, half of it). seeds: of everything random;
    each gives a conversion of its own. batch: sequences at once where throughput is timed (1: it is not). own: the
    length of the user's inputs. dtype: of what is timed (None: the model's). layer, backward, resources, prefill,
    decoding: also time one layer's attention by itself, a pass with gradients, operations and peak memory, the prompt
    of a decoder with its cache, single tokens.
    """

    attentions: tuple[str, ...]
    steps: int
    sequence_length: int
    batch_size: int
    evaluations: int
    train_sequences: int
    validation_sequences: int
    held_out_sequences: int
    fidelity_sequences: int
    perplexity_tokens: int
    lengths: tuple[int, ...]
    budget: float
    seed: int
    context: int | None = None
    stride: int | None = None
    seeds: tuple[int, ...] | None = None
    batch: int = 1
    own: int | None = None
    dtype: str | None = None
    layer: bool = True
    backward: bool = False
    resources: bool = False
    decoding: bool = True
    prefill: bool = False


@dataclass(frozen=True)
class Data:
    """Token ids and batches of one text, or one labelled task, for one model. `validation` chooses among training
    steps, and is not trained on; `held_out` is used for nothing but the numbers of the report. `labelled`: its batches
    with labels, by the suffix of their metrics' names."""

    train: list[Batch]
    validation: list[Batch]
    fidelity: list[Batch]
    held_out: list[Batch]
    documents: list[list[int]]
    tokens: list[int]
    facts: dict[str, Any]
    labelled: dict[str, list[Batch]] = field(default_factory=dict)


def prepare(text: Text, tokenizer: Any, plan: Plan) -> Data:
    """Cut the text into batches.

    Raises:
        ValueError: too little text for a single batch of training and of measuring.
    """
    length, pad = plan.sequence_length, pad_id(tokenizer)
    train = passages(tokenizer, text.train, length, plan.train_sequences)
    held_out = passages(tokenizer, text.held_out, length, plan.held_out_sequences)
    if len(train) < 4 or len(held_out) < 2:
        raise ValueError(
            f"{text.source!r} gives {len(train)} training and {len(held_out)} held-out sequences of up to {length} "
            "tokens; 4 and 2 are needed. Give a longer text."
        )
    random.Random(plan.seed).shuffle(train)
    kept = max(1, min(plan.validation_sequences, len(train) // 4))
    validation, train = train[:kept], train[kept:]
    chosen = _spread(held_out, plan.fidelity_sequences)
    documents = whole_documents(tokenizer, text.held_out, plan.perplexity_tokens)
    facts = {
        "kind": "text",
        "source": text.source,
        "sha256": text.sha256,
        "characters": text.characters,
        "train_documents": len(text.train),
        "held_out_documents": len(text.held_out),
        "held_out_sequences": len(held_out),
        "held_out_tokens": sum(map(len, held_out)),
        **_common_facts(length, train, validation, chosen),
    }
    return Data(
        make_batches(train, plan.batch_size, pad),
        make_batches(validation, plan.batch_size, pad),
        make_batches(chosen, plan.batch_size, pad),
        make_batches(held_out, plan.batch_size, pad),
        documents,
        [token for sequence in held_out for token in sequence],
        facts,
    )


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the rows, evenly spread."""
    kept = min(count, len(rows))
    return [rows[int(index * len(rows) / kept)] for index in range(kept)]


def _common_facts(length: int, train: Sequence[Any], validation: Sequence[Any], chosen: Sequence[Any]) -> Any:
    return {
        "sequence_length": length,
        "train_sequences": len(train),
        "train_tokens": sum(map(len, train)),
        "validation_sequences": len(validation),
        "fidelity_sequences": len(chosen),
        "fidelity_tokens": sum(map(len, chosen)),
    }


def prepare_task(problem: Any, task: str, plan: Plan) -> Data:
    """From a labelled task: rows of its train split for the transfer (labels are not used), its validation split to
    measure on.

    Raises:
        ValueError: too few rows.
    """
    train = [row for row in problem.train if row["input_ids"]]
    splits = {suffix: list(rows) for suffix, rows in problem.validation.items()}
    rows = [row for held in splits.values() for row in held]
    if len(train) < 4 or min(map(len, splits.values())) < 2:
        raise ValueError(f"Task {task!r}: {len(train)} rows to train on and {len(rows)} to measure on are too few.")
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    kept = max(1, min(plan.validation_sequences, len(train) // 4))
    chosen = _spread(rows, plan.fidelity_sequences)

    def batches(held: Sequence[Any]) -> list[Batch]:
        size = plan.batch_size
        return [problem.collator(list(held[start : start + size])) for start in range(0, len(held), size)]

    ids = [row["input_ids"] for row in train]
    facts = {
        "kind": "task",
        "source": f"task {task}",
        "task": task,
        "metrics": list(problem.metric_names),
        "sha256": digest,
        "rows": {suffix: len(held) for suffix, held in splits.items()},
        "longest_row": max(len(row["input_ids"]) for row in rows),
        **_common_facts(plan.sequence_length, ids[kept:], ids[:kept], [row["input_ids"] for row in chosen]),
    }
    labelled = {suffix: batches(held) for suffix, held in splits.items()}
    return Data(
        batches(train[kept:]),
        batches(train[:kept]),
        [{name: held for name, held in batch.items() if name != "labels"} for batch in batches(chosen)],
        [],
        [],
        [token for row in rows[:256] for token in row["input_ids"]],
        facts,
        labelled,
    )


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs with a score of their similarity. order: where each sentence of the batches belongs, first
    sentences and then second ones."""

    batches: list[Batch]
    order: list[int]
    scores: list[float]
    sha256: str
    source: str
    longest: int


def prepare_pairs(folder: str, tokenizer: Any, plan: Plan, count: int | None) -> Pairs:
    """The validation pairs of STS-B, an even spread of at most `count` of them.

    Raises:
        ValueError, OSError, ImportError: as `load_task`.
    """
    from ..data.tasks import load_task

    rows = list(load_task("stsb", folder=folder)["validation"])
    if count is not None:
        rows = _spread(rows, count)
    texts = [row[name] for name in ("sentence1", "sentence2") for row in rows]
    ids = [encode(tokenizer, text, special=True) for text in texts]
    end = [row[-1] for row in ids]
    length = plan.sequence_length
    cut = [row if len(row) <= length else [*row[: length - 1], last] for row, last in zip(ids, end, strict=True)]
    order = sorted(range(len(cut)), key=lambda index: len(cut[index]))
    digest = hashlib.sha256(repr([(row["sentence1"], row["sentence2"], row["label"]) for row in rows]).encode())
    batches = make_batches([cut[index] for index in order], max(plan.batch_size, 16), pad_id(tokenizer))
    scores = [float(row["label"]) for row in rows]
    source = f"STS-B validation, {Path(folder).name}"
    return Pairs(batches, order, scores, digest.hexdigest(), source, max(map(len, cut)))
