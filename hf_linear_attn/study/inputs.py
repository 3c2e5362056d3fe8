"""The data of an evaluation, cut into batches: a text, a labelled task, sentence pairs."""

import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from ..data.config import DataConfig
from ..data.metrics import compute_metrics
from ..data.task_data import load_task_data
from ..data.tasks import load_task
from ..data.text import Text, encode_text, evenly_spread, packed_rows, pad_token, padded_batches, rows_text, text_rows
from ..measure.quality import SENTENCE_PAIRS, QualityMetric, bootstrap_stderr, sentence_embeddings
from ..measure.values import Values, value
from ..utils.progress import OnBatch
from .settings import Settings

Batch = dict[str, Tensor]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EvaluationInputs:
    """Batches of one text or task for one model."""

    train: list[Batch]  # for attention transfer
    validation: list[Batch]  # choose the best step of a transfer, and are not trained on
    fidelity: list[Batch]  # a part of the held-out data
    tokens: list[int]  # that inputs for timing are made from
    hash: str  # identifies the data
    facts: dict[str, Any]  # what reports say about the data: source, sizes, measured lengths of the inputs
    test: list[Batch] = field(default_factory=list)  # used for nothing but the reported values
    documents: list[list[int]] = field(default_factory=list)  # held out, as token ids, for the perplexity
    labeled: dict[str, list[Batch]] = field(default_factory=dict)  # by suffix of a validation set or name of a part
    metrics: tuple[str, ...] = ()  # of labelled data; the first decides
    regression: bool = False  # whether labels are scores


def text_inputs(text: Text, tokenizer: Any, settings: Settings, *, causal: bool) -> EvaluationInputs:
    """Cut a text into batches of rows (see `text_rows`).

    Raises:
        ValueError: It is too short for a batch of training and one of measuring.
    """
    counts = ((text.train, settings.train_sequences), (text.held_out, settings.test_sequences))
    train, test = (
        [{"input_ids": ids} for ids in text_rows(tokenizer, part, settings.sequence_length, count, causal=causal)]
        for part, count in counts
    )

    def batches(rows: Rows) -> list[Batch]:
        return padded_batches([row["input_ids"] for row in rows], settings.batch_size, pad_token(tokenizer))

    inputs = _inputs(train, test, batches, settings, text.source, text.sha256)
    documents = len(text.train) + len(text.held_out)
    inputs.facts["rows"] = rows_text(documents, settings.sequence_length, causal=causal)
    running = packed_rows(tokenizer, text.held_out, settings.perplexity_tokens)[:1] if causal else []
    return replace(inputs, test=batches(test), documents=running)


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

    def batches(rows: Rows, *, labels: bool = False) -> list[Batch]:
        rows = [{key: item for key, item in row.items() if labels or key != "labels"} for row in rows]
        size = settings.batch_size
        return [dict(task.collator(rows[start : start + size])) for start in range(0, len(rows), size)]

    source = f"task {data.task}" if data.dataset is None else Path(data.dataset).name
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    inputs = _inputs(train, rows, batches, settings, f"the validation data of {source}", digest)
    if parts:
        labeled = {name: rows[start :: len(parts)] for start, name in enumerate(parts)}
        inputs.facts.update({name: row_lengths(part) for name, part in labeled.items()})
    labeled_batches = {suffix: batches(part, labels=True) for suffix, part in labeled.items()}
    return replace(inputs, labeled=labeled_batches, metrics=task.metric_names, regression=task.labels is None)


def _inputs(
    train: list[Any], test: Rows, batches: Callable[[Rows], list[Batch]], settings: Settings, source: str, digest: str
) -> EvaluationInputs:
    """Split the training rows, draw those for the fidelity, and describe all of them."""
    if len(train) < 4 or len(test) < 2:
        counts = f"{len(train)} inputs to train on and {len(test)} to measure on"
        raise ValueError(f"{source} gives {counts}; 4 and 2 are needed. Give more data.")
    random.Random(settings.seed).shuffle(train)
    count = max(1, min(settings.validation_sequences, len(train) // 4))
    parts = {"train": train[count:], "held_out": test}
    parts["fidelity"] = evenly_spread(test, settings.fidelity_sequences)
    return EvaluationInputs(
        train=batches(train[count:]),
        validation=batches(train[:count]),
        fidelity=batches(parts["fidelity"]),
        tokens=[token for row in test[:256] for token in row["input_ids"]],
        hash=digest,
        facts={
            "source": source,
            "rows": "one row for each example",
            **{name: row_lengths(rows) for name, rows in parts.items()},
        },
    )


def sentence_pair_metric(folder: str, tokenizer: Any, settings: Settings, max_rows: int | None) -> QualityMetric:
    """Return how well the cosine of mean-pooled embeddings ranks the validation pairs of STS-B: Spearman and Pearson.

    At most `max_rows` pairs are taken, evenly spread.

    Raises:
        ValueError, OSError, ImportError: As `load_task`.
    """
    rows = list(load_task("stsb", folder=folder)["validation"])
    rows = rows if max_rows is None else evenly_spread(rows, max_rows)
    texts = [row[column] for column in ("sentence1", "sentence2") for row in rows]
    length = settings.sequence_length
    ids = [encode_text(tokenizer, text, add_special_tokens=True) for text in texts]
    ids = [row if len(row) <= length else [*row[: length - 1], row[-1]] for row in ids]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))  # Similar lengths need less padding.
    batches = padded_batches([ids[index] for index in order], max(settings.batch_size, 16), pad_token(tokenizer))
    references = np.array([float(row["label"]) for row in rows])

    def measure(model: PreTrainedModel, on_batch: OnBatch) -> Values:
        embeddings = sentence_embeddings(model, batches, on_batch)[torch.tensor(order).argsort()]
        first, second = embeddings.chunk(2)
        similarity = cosine_similarity(first, second, dim=-1).double().numpy()
        scores = compute_metrics(["spearmanr", "pearson"], similarity, references)
        return [
            value("spearmanr", scores["spearmanr"], stderr=bootstrap_stderr("spearmanr", similarity, references)),
            value("pearson", scores["pearson"]),
            value("pairs", len(rows)),
            value("longest_input", max(map(len, ids)), unit="tokens"),
        ]

    digest = hashlib.sha256(repr([(row["sentence1"], row["sentence2"], row["label"]) for row in rows]).encode())
    return QualityMetric("sts", measure, SENTENCE_PAIRS, {"data": digest.hexdigest(), "pairs": len(rows)})


def row_lengths(rows: Rows) -> dict[str, int]:
    """Return the number of rows, their tokens, and the median and largest length: what the inputs really were."""
    lengths = [len(row["input_ids"]) for row in rows]
    median = round(statistics.median(lengths)) if lengths else 0
    return {"sequences": len(lengths), "tokens": sum(lengths), "median": median, "longest": max(lengths, default=0)}


def inputs_text(facts: Mapping[str, int]) -> str:
    """Return what `row_lengths` says as text."""
    lengths = f"median {facts['median']:,}, longest {facts['longest']:,}"
    return f"{facts['sequences']:,} inputs of {facts['tokens']:,} tokens ({lengths})"
