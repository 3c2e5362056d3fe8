"""The data of a study: a text, a labelled task or sentence pairs, and what is measured on them."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.config import DataConfig
from ..data.task_data import load_task_data
from ..data.tasks import METRICS, load_task
from ..data.text import (
    Text,
    cut_text,
    encode_text,
    evenly_spread,
    packed_rows,
    pad_token,
    padded_batches,
    rows_text,
    text_rows,
)
from ..integration.context import SUBMODULE
from ..measure.quality import (
    PERPLEXITY,
    SENTENCE_EMBEDDINGS,
    SENTENCE_PAIRS,
    Score,
    classification_metric,
    embedding_metric,
    perplexity_metric,
    sentence_pair_metric,
)
from ..measure.recall import RECALL, recall_metric, recall_settings
from ..measure.values import value
from ..training.transfer import transfer_attention
from .settings import Settings
from .study import Conditions, Learned, Study, Values
from .variants import ExactModel, Measurement

Batch = dict[str, Tensor]

#: Where an evaluation measures; a plan has two parts instead, to choose on and to verify with.
HELD_OUT = ("held_out",)

#: Of the settings, what an attention transfer depends on.
TRANSFER_SETTINGS = ("steps", "batch_size", "evaluations", "sequence_length", "train_sequences", "validation_sequences")

SCORES = {score.measurement: score for score in (PERPLEXITY, SENTENCE_EMBEDDINGS, SENTENCE_PAIRS, RECALL)}


@dataclass(frozen=True)
class Inputs:
    """Batches of one text or task for one model, and what is measured on the held-out part."""

    train: list[Batch]  # for attention transfer
    validation: list[Batch]  # choose the best step of a transfer, and are not trained on
    fidelity: list[Batch]  # a part of the held-out data
    tokens: list[int]  # that inputs for timing are made from
    hash: str  # identifies the data
    facts: dict[str, Any]  # what reports say about the data: source, sizes, measured lengths of the inputs
    measurements: tuple[Measurement, ...]  # one for each part of the held-out data


def score_of(conditions: Conditions) -> Score | None:
    """Return the score of a measurement; None for one that is only informative."""
    if conditions.measurement != "task":
        return SCORES.get(conditions.measurement)
    metric = conditions.settings["metrics"][0]
    higher = METRICS.get(metric).higher_is_better if metric in METRICS else True
    return Score("task", "score", f"{conditions.task} {metric}".strip(), higher, task=conditions.task)


def read_inputs(
    exact: ExactModel, text: Text | None, data: DataConfig, settings: Settings, parts: Sequence[str] = HELD_OUT
) -> Inputs:
    """Return the batches of a text, or without one of the labelled data. It raises as `text_inputs`, `task_inputs`."""
    if text is None:
        return task_inputs(exact, data, settings, parts)
    return text_inputs(exact, text, settings, parts)


def text_inputs(exact: ExactModel, text: Text, settings: Settings, parts: Sequence[str] = HELD_OUT) -> Inputs:
    """Cut a text into batches of rows (see `text_rows`); measured are the perplexity or the embeddings of each part.

    Raises:
        ValueError: It is too short.
    """
    tokenizer, causal, length = exact.tokenizer, exact.kind == "decoder", settings.sequence_length
    counts = ((text.train, settings.train_sequences), (text.validation, settings.test_sequences))
    train, test = (
        [{"input_ids": ids} for ids in text_rows(tokenizer, part, length, count, causal=causal)]
        for part, count in counts
    )

    def batches(rows: Sequence[Mapping[str, Any]]) -> list[Batch]:
        return padded_batches([row["input_ids"] for row in rows], settings.batch_size, pad_token(tokenizer))

    inputs = _split(train, test, batches, settings, text.source, text.sha256)
    inputs.facts["rows"] = rows_text(len(text.train) + len(text.validation), length, causal=causal)
    split = [text.validation] if len(parts) == 1 else split_halves(text.validation)
    measurements = []
    for name, documents in zip(parts, split, strict=True):
        windows = {"context": settings.context, "stride": settings.stride} if causal else {}
        if causal:
            rows = packed_rows(tokenizer, documents, settings.perplexity_tokens)[:1]
            metric = perplexity_metric(rows, **windows, batch_size=settings.batch_size, exact=exact.model)
        else:
            rows = text_rows(tokenizer, documents, length, settings.test_sequences, causal=False)
            metric = embedding_metric(exact.model, padded_batches(rows, settings.batch_size, pad_token(tokenizer)))
        facts = row_facts(map(len, rows))
        if facts["tokens"] < 2:
            raise ValueError(f"{text.source!r} gives nothing for the {name}. Give a longer text.")
        inputs.facts.setdefault(name, facts)
        conditions = {"data": inputs.hash, "part": name, **facts, **windows}
        measurement = "perplexity" if causal else "sentence_embeddings"
        measurements.append((exact.conditions(measurement, settings=conditions), metric))
    return replace(inputs, measurements=tuple(measurements))


def task_inputs(exact: ExactModel, data: DataConfig, settings: Settings, parts: Sequence[str] = HELD_OUT) -> Inputs:
    """Encode labelled data: train rows for the transfer (without labels), validation rows to measure on.

    With several parts the validation rows are dealt out to them; with one, each validation set is measured by itself.

    Raises:
        ValueError: The model was trained with other labels, or there are too few rows.
        OSError, ImportError: As `load_task_data`.
    """
    count = settings.train_sequences + settings.validation_sequences
    limited = replace(data, max_length=settings.sequence_length, max_train_samples=data.max_train_samples or count)
    task = load_task_data("classification", exact.tokenizer, limited, settings.seed)
    task.check_labels(exact.model.config, "The model")
    train = list(task.train)
    labeled = {f"_{name}" if name else "": list(part) for name, part in task.validation.items()}
    rows = [row for part in labeled.values() for row in part]

    def batches(rows: Sequence[Mapping[str, Any]], *, labels: bool = False) -> list[Batch]:
        rows = [{key: item for key, item in row.items() if labels or key != "labels"} for row in rows]
        size = settings.batch_size
        return [dict(task.collator(rows[start : start + size])) for start in range(0, len(rows), size)]

    source = f"task {data.task}" if data.dataset is None else Path(data.dataset).name
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    inputs = _split(train, rows, batches, settings, f"the validation data of {source}", digest)
    measurements = []
    for number, name in enumerate(parts):
        sets = labeled if len(parts) == 1 else {"": rows[number :: len(parts)]}
        inputs.facts[name] = row_facts(len(row["input_ids"]) for part in sets.values() for row in part)
        labeled_batches = {suffix: batches(part, labels=True) for suffix, part in sets.items()}
        metric = classification_metric(exact.model, labeled_batches, task.metric_names, regression=task.labels is None)
        conditions = exact.conditions(
            "task",
            task=data.task or Path(str(data.dataset)).name,
            settings={"data": digest, "part": name, **inputs.facts[name], "metrics": list(task.metric_names)},
        )
        measurements.append((conditions, metric))
    return replace(inputs, measurements=tuple(measurements))


def _split(
    train: list[Any],
    test: Sequence[Mapping[str, Any]],
    batches: Callable[[Sequence[Mapping[str, Any]]], list[Batch]],
    settings: Settings,
    source: str,
    digest: str,
) -> Inputs:
    """Split the training rows, draw those for the fidelity, and describe all of them."""
    if len(train) < 4 or len(test) < 2:
        counts = f"{len(train)} inputs to train on and {len(test)} to measure on"
        raise ValueError(f"{source} gives {counts}; 4 and 2 are needed. Give more data.")
    random.Random(settings.seed).shuffle(train)
    count = max(1, min(settings.validation_sequences, len(train) // 4))
    parts = {"train": train[count:], "held_out": test}
    parts["fidelity"] = evenly_spread(test, settings.fidelity_sequences)
    lengths = {name: row_facts(len(row["input_ids"]) for row in rows) for name, rows in parts.items()}
    return Inputs(
        train=batches(train[count:]),
        validation=batches(train[:count]),
        fidelity=batches(parts["fidelity"]),
        tokens=[token for row in test[:256] for token in row["input_ids"]],
        hash=digest,
        facts={"source": source, "rows": "one row for each example", **lengths},
        measurements=(),
    )


def recall_measurement(exact: ExactModel, lengths: Sequence[int], seed: int) -> Measurement:
    """Return the recall at lengths. Raises a ValueError as `recall_metric`, before anything is measured."""
    settings = {**recall_settings(exact.model), "lengths": list(lengths), "seed": seed}
    return exact.conditions("recall", settings=settings), recall_metric(
        exact.model, exact.tokenizer, lengths, seed=seed
    )


def with_sentence_pairs(
    inputs: Inputs, exact: ExactModel, folder: str, settings: Settings, max_rows: int | None
) -> Inputs:
    """Measure first how embeddings rank the validation pairs of STS-B, at most `max_rows` of them, evenly spread.

    Raises:
        ValueError, OSError, ImportError: As `load_task`.
    """
    rows = list(load_task("stsb", folder=folder)["validation"])
    rows = rows if max_rows is None else evenly_spread(rows, max_rows)
    texts = [row[column] for column in ("sentence1", "sentence2") for row in rows]
    tokenizer, length = exact.tokenizer, settings.sequence_length
    ids = [encode_text(tokenizer, text, add_special_tokens=True) for text in texts]
    ids = [row if len(row) <= length else [*row[: length - 1], row[-1]] for row in ids]
    options: dict[str, Any] = {"batch_size": max(settings.batch_size, 16), "pad": pad_token(tokenizer)}
    metric = sentence_pair_metric(ids, [float(row["label"]) for row in rows], **options)
    digest = hashlib.sha256(repr([(row["sentence1"], row["sentence2"], row["label"]) for row in rows]).encode())
    conditions = exact.conditions("sts", settings={"data": digest.hexdigest(), "pairs": len(rows)})
    facts = {**inputs.facts, "sentence_pairs": f"STS-B validation, {Path(folder).name}"}
    return replace(inputs, measurements=((conditions, metric), *inputs.measurements), facts=facts)


def split_halves(documents: Sequence[str]) -> list[Sequence[str]]:
    """Split into every second document and the others; a single document into its first and second half."""
    if len(documents) > 1:
        return [documents[::2], documents[1::2]]
    return [[half] for half in cut_text(documents[0], 0.5)]


def row_facts(lengths: Any) -> dict[str, int]:
    """Return the number of rows, their tokens, and the median and largest length: what the inputs really were."""
    lengths = list(lengths)
    median = round(statistics.median(lengths)) if lengths else 0
    return {"sequences": len(lengths), "tokens": sum(lengths), "median": median, "longest": max(lengths, default=0)}


def inputs_text(facts: Mapping[str, int]) -> str:
    """Return what `row_facts` says as text."""
    lengths = f"median {facts['median']:,}, longest {facts['longest']:,}"
    return f"{facts['sequences']:,} inputs of {facts['tokens']:,} tokens ({lengths})"


def transferred(
    study: Study, model: PreTrainedModel, inputs: Inputs, settings: Settings, conditions: Conditions, *, label: str
) -> PreTrainedModel:
    """Return the patched model with its learned parameters trained: the stored ones, or those of a transfer now."""

    def train() -> tuple[Values, Learned]:
        batches, seed = list(inputs.train), conditions.seed or 0
        if seed != settings.seed:  # seeds must differ in something where nothing else is random
            random.Random(seed).shuffle(batches)
        torch.manual_seed(seed)
        result = transfer_attention(
            model,
            batches,
            steps=settings.steps,
            validation=inputs.validation,
            evaluate_every=max(settings.steps // settings.evaluations, 1),
            progress=lambda step, total, loss: study.progress.status(
                f"{label}: attention transfer, loss {loss:.3f}", step, total
            ),
        )
        values = [
            value("steps", result.steps),
            value("tokens", result.tokens),
            value("best_step", result.best_step),
            value("transfer_seconds", result.seconds, unit="s"),
            *(value("loss", loss, step=step) for step, loss in enumerate(result.losses, start=1)),
            *(value("held_out_loss", loss, step=step) for step, loss in result.evaluations),
        ]
        return values, {name: one for name, one in model.state_dict().items() if f".{SUBMODULE}." in f".{name}"}

    model.load_state_dict(study.learned(conditions, train, label=label), strict=False)
    return model
