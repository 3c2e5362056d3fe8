"""A model with its data, as a study measures it: loaded, checked and encoded before anything is measured."""

from __future__ import annotations

import copy
import hashlib
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..checkpoints import load_checkpoint, read_config, read_tokenizer
from ..data.config import DataConfig
from ..data.files import TEXT_FORMATS, file_suffix
from ..data.task_data import load_task_data, read_documents
from ..data.tasks import TASKS, higher_is_better, load_task
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
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..integration.positions import has_position_table
from ..measure.quality import (
    PERPLEXITY,
    SENTENCE_EMBEDDINGS,
    SENTENCE_PAIRS,
    Score,
    classification_measure,
    embedding_measure,
    perplexity_measure,
    sentence_pair_measure,
)
from ..measure.recall import RECALL, recall_measure
from ..measure.values import Measure
from ..mechanisms.softmax import EXACT
from ..ops.backends import get_backend
from ..ops.native.backend import unavailable_reason
from ..ops.triton.backend import installed as triton_installed
from ..patching import CONFIG_FIELD, is_patched, patch_model
from ..registry import ATTENTIONS, seed_options
from ..utils.environment import environment
from ..utils.models import Batch, shared_copy, torch_device
from ..utils.options import OptionError, default_of
from .checkpoint_groups import MODEL_CLASSES, CheckpointGroup, check_same_shape, find_checkpoints
from .options import PYTHON_DOCUMENTATION, DataSizes, EvaluateConfig, ResolvedOptions, resolve_options
from .study import Conditions

Measurement = tuple[Conditions, Measure]
"""What is measured of each variant of a model; the conditions lack what the variant adds (see `Variant.of`)."""

#: Where an evaluation measures; a plan has two parts instead, to choose on and to verify with.
HELD_OUT, HALVES = ("held_out",), ("choice", "verification")

SCORES = {score.measurement: score for score in (PERPLEXITY, SENTENCE_EMBEDDINGS, SENTENCE_PAIRS, RECALL)}


@dataclass(frozen=True)
class ExactModel:
    """The model that mechanisms are compared with, in evaluation mode."""

    model: PreTrainedModel
    tokenizer: Any
    kind: str  # `decoder`, `encoder` or `classifier`
    name: str  # in reports
    fingerprint: str  # a hash of its weights
    device: Mapping[str, Any]  # with `versions` a part of the conditions of its measurements
    versions: Mapping[str, Any]

    @classmethod
    def load(
        cls, source: Any, kind: str, name: str, tokenizer: Any = None, device: str = "cpu", task: str = ""
    ) -> ExactModel:
        """Read the weights and, where none is given, the tokenizer (see `load_exact`)."""
        tokenizer = tokenizer or read_tokenizer(str(getattr(source, "name_or_path", source)))
        model = load_exact(source, kind, torch_device(device), task=task)
        machine = environment(model.device)
        backend = get_backend()
        if backend == "auto":  # the one that serves kernelized attention where it can; some calls fall back to torch
            if model.device.type == "cpu":
                backend = "native" if unavailable_reason() is None else "torch"
            else:
                backend = "triton" if triton_installed() and model.device.type == "cuda" else "torch"
        hardware = {key: machine["hardware"][key] for key in ("device", "cpu", "threads")}
        hardware |= {"dtype": dtype_name(model), "backend": backend}
        return cls(model.eval(), tokenizer, kind, name, weights_fingerprint(model), hardware, machine["versions"])

    @property
    def implementation(self) -> str:
        """The exact attention implementation, such as `sdpa`: the baseline of all speedups."""
        return str(self.model.config._attn_implementation)

    @property
    def positions(self) -> int | None:
        """The longest input in tokens, or None."""
        return longest_input(self.model)

    def cast(self, dtype: str | None) -> ExactModel:
        """Return a copy in another precision; the same object if that is its own (or None)."""
        if dtype in (None, self.device["dtype"]):
            return self
        model: Any = copy.deepcopy(self.model)
        return replace(self, model=model.to(getattr(torch, str(dtype))), device={**self.device, "dtype": dtype})

    def conditions(self, measurement: str, **parts: Any) -> Conditions:
        """Return the conditions of a measurement of this model, on its device."""
        surroundings = {"device": self.device, "versions": self.versions}
        return Conditions(self.name, self.fingerprint, measurement=measurement, **{**surroundings, **parts})

    def facts(self) -> dict[str, Any]:
        """Return what a report says about the model."""
        layers = self_attention(self.model)
        return {
            "name": self.name,
            "kind": self.kind,
            "class": type(self.model).__name__,
            "layers": len(layers),
            "heads": attention_shape(layers[0], 0, None).num_heads,
            "parameters": self.model.num_parameters(),
            "dtype": dtype_name(self.model),
            "attention": self.implementation,
            "positions": self.positions,
        }


def dtype_name(model: PreTrainedModel) -> str:
    """Return the name of the model's precision, such as `float32`."""
    return str(model.dtype).removeprefix("torch.")


def check_fits(model: PreTrainedModel, name: str, purpose: str, **options: Any) -> PreTrainedModel:
    """Return a patched copy with shared weights; a ValueError that names the purpose if the mechanism does not fit."""
    try:
        return patch_model(shared_copy(model), name, **options)
    except NotImplementedError as error:
        raise ValueError(f"{name!r} cannot be {purpose} on this model: {error}") from error


def check_mechanism(name: str) -> None:
    """Raise a ValueError for an unknown mechanism, and for exact attention, which others are compared with."""
    ATTENTIONS.get(name)
    if name == EXACT:
        raise ValueError(f"attention {name!r} is the exact attention, which is always measured. Name another one.")


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 over the names, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1).cpu()
        digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()


def describe_source(source: Any, task: str | None, dataset: str | None = None) -> tuple[str, str, Any]:
    """Return the name, the kind and the config of an unpatched checkpoint, or of a loaded model.

    A checkpoint is a classifier with a task, or where it has the head of one, with a data set that is no plain text. A
    ValueError for a patched one and for an encoder-decoder.
    """
    if isinstance(source, PreTrainedModel):
        class_name = type(source).__name__
        name, kind = Path(source.name_or_path or "").name or class_name, "classifier"
        if not class_name.endswith("ForSequenceClassification"):
            is_decoder(source.config)  # raises for an encoder-decoder
            kind = "decoder" if class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else "encoder"
        check_exact(source, name, kind)
        return name, kind, source.config
    config = read_config(source)
    if getattr(config, CONFIG_FIELD, None) is not None:
        raise ValueError(f"{source!r} is patched already. Give the model as it was before.")
    name = Path(source).resolve().name if Path(source).exists() else source
    has_head = any("ForSequenceClassification" in one for one in config.architectures or ())
    has_labels = dataset not in (None, PYTHON_DOCUMENTATION) and file_suffix(Path(str(dataset))) not in TEXT_FORMATS
    if task is not None or (has_head and has_labels):
        return name, "classifier", config
    return name, "decoder" if is_decoder(config) else "encoder", config


def load_exact(source: Any, kind: str, device: torch.device, *, task: str = "") -> PreTrainedModel:
    """Load a model with exact attention, or copy a loaded one with shared weights; messages name a classifier's task.

    An OSError if it cannot be loaded, and a ValueError if weights are missing, its attention cannot be replaced, or a
    loaded model is on another device (not the CPU, which is the default).
    """
    if isinstance(source, PreTrainedModel):
        own, name = source.device, str(device)
        if device.type != "cpu" and device not in (own, torch.device(own.type)):
            remedy = f"Move it with model.to({name!r}), and leave this option out"
            raise OptionError("device", f"{name!r}, but the loaded model is on {own}. {remedy}.")
        return shared_copy(source)  # whose mode may change
    auto_class = getattr(transformers, MODEL_CLASSES[kind])
    precision = {"dtype": torch.float32} if kind == "classifier" else {}
    model, lacking = load_checkpoint(source, auto_class, **precision)
    if missing := [name for name in lacking if "pooler" not in name]:
        remedy = "Give a complete checkpoint"
        if kind == "classifier" and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
            data = f"task {task}" if task else "dataset FILE"
            remedy = f"It has no head for the task {task!r}: run `hf-linear-attn finetune {source} --data.{data}`"
        raise ValueError(f"{source!r} lacks weights ({missing[0]}, …). {remedy}.")
    check_exact(model, source, kind)
    return model.eval().to(device)


def check_exact(model: PreTrainedModel, source: str, kind: str) -> None:
    """Raise a ValueError if a model is patched, or if its attention cannot be replaced or does not fit its kind."""
    if is_patched(model):
        raise ValueError(f"{source!r} is patched already. Give the model as it was before.")
    try:
        layers = self_attention(model)
    except NotImplementedError as error:
        raise ValueError(str(error)) from error
    if kind != "classifier" and any(layer.causal is not (kind == "decoder") for layer in layers):
        direction = "causal" if kind == "decoder" else "bidirectional"
        raise ValueError(f"{source!r} is taken as {direction}, but not all of its attention is. Give another model.")


def is_decoder(config: Any) -> bool:
    """Return whether a checkpoint is a causal language model, from the class it was saved from.

    Raises:
        ValueError: It is an encoder-decoder model.
    """
    if config.is_encoder_decoder:
        problem = "is an encoder-decoder, which is not evaluated here (patch_model serves it)"
        remedy = "Give an encoder (BERT, RoBERTa, …) or a decoder (GPT-2, Llama, …)."
        raise ValueError(f"Model type {config.model_type!r} {problem}. {remedy}")
    architecture = (config.architectures or [""])[0]
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if architecture == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return not masked or bool(config.is_decoder)
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked


@dataclass(frozen=True)
class Inputs:
    """Batches of one text or task for one model, and what is measured on the held-out part."""

    train: list[Batch]  # for attention transfer
    validation: list[Batch]  # choose the best step of a transfer, and are not trained on
    fidelity: list[Batch]  # a part of the held-out data
    tokens: list[int]  # that inputs for timing are made from
    hash: str  # identifies the data
    facts: dict[str, Any]  # what reports say about the data: source, sizes, measured lengths of the inputs
    measurements: list[Measurement] = field(default_factory=list)  # of each part of the held-out data, and others


def score_of(conditions: Conditions) -> Score | None:
    """Return the score of a measurement; None for one that is only informative."""
    if conditions.measurement != "task":
        return SCORES.get(conditions.measurement)
    metric = conditions.settings["metrics"][0]
    label = f"{conditions.task} {metric}".strip()
    return Score("task", "score", label, higher_is_better(metric), task=conditions.task)


def read_inputs(
    exact: ExactModel, text: Text | None, data: DataConfig, sizes: DataSizes, parts: Sequence[str] = HELD_OUT
) -> Inputs:
    """Return the batches of a text, or without one of the labelled data. It raises as `text_inputs`, `task_inputs`."""
    if text is None:
        return task_inputs(exact, data, sizes, parts)
    return text_inputs(exact, text, sizes, parts)


def text_inputs(exact: ExactModel, text: Text, sizes: DataSizes, parts: Sequence[str] = HELD_OUT) -> Inputs:
    """Cut a text into batches of rows (see `text_rows`); measured are the perplexity or the embeddings of each part."""
    tokenizer, causal, length = exact.tokenizer, exact.kind == "decoder", sizes.sequence_length
    counts = ((text.train, sizes.train_sequences), (text.validation, sizes.test_sequences))
    train, test = (
        [{"input_ids": ids} for ids in text_rows(tokenizer, part, length, count, causal=causal)]
        for part, count in counts
    )

    def batches(rows: Sequence[Mapping[str, Any]]) -> list[Batch]:
        return [*padded_batches([row["input_ids"] for row in rows], sizes.batch_size, pad_token(tokenizer))]

    tokens = [text.sha256, *(row["input_ids"] for row in [*train, *test])]  # another tokenizer makes other data
    digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
    inputs = _split(train, test, batches, sizes, text.source, digest)
    measurements: list[Measurement] = []
    facts = {**inputs.facts, "rows": rows_text(len(text.train) + len(text.validation), length, causal=causal)}
    split = [text.validation] if len(parts) == 1 else split_halves(text.validation)
    for name, documents in zip(parts, split, strict=True):
        windows = {"context": sizes.context, "stride": sizes.stride} if causal else {}
        if causal:
            rows = packed_rows(tokenizer, documents, sizes.perplexity_tokens)[:1]
            measure = perplexity_measure(rows, **windows, batch_size=sizes.batch_size, exact=exact.model)
        else:
            rows = [row["input_ids"] for row in test]
            if len(parts) > 1:
                rows = text_rows(tokenizer, documents, length, sizes.test_sequences, causal=False)
            measure = embedding_measure(exact.model, padded_batches(rows, sizes.batch_size, pad_token(tokenizer)))
        measured = row_facts(map(len, rows))
        if measured["tokens"] < 2:
            raise ValueError(f"{text.source!r} gives nothing for the {name}. Give a longer text.")
        facts.setdefault(name, measured)  # reports describe `held_out` by the rows that the others are drawn from
        settings = {"data": inputs.hash, "part": name, **measured, **windows}
        measurement = "perplexity" if causal else "sentence_embeddings"
        measurements.append((exact.conditions(measurement, settings=settings), measure))
    return replace(inputs, facts=facts, measurements=measurements)


def task_inputs(exact: ExactModel, data: DataConfig, sizes: DataSizes, parts: Sequence[str] = HELD_OUT) -> Inputs:
    """Encode labelled data: train rows for the transfer (without labels), validation rows to measure on.

    With several parts the validation rows are dealt out to them; with one, each validation set is measured by itself.
    It raises as `load_task_data`, and a ValueError for a model with other labels or too few rows.
    """
    count = sizes.train_sequences + sizes.validation_sequences
    limited = replace(data, max_length=sizes.sequence_length, max_train_samples=data.max_train_samples or count)
    task = load_task_data("classification", exact.tokenizer, limited, sizes.seed)
    task.check_labels(exact.model.config, "The model")
    train = list(task.train)
    labeled = {f"_{name}" if name else "": list(part) for name, part in task.validation.items()}
    rows = [row for part in labeled.values() for row in part]

    def batches(rows: Sequence[Mapping[str, Any]], *, labels: bool = False) -> list[Batch]:
        rows = [{key: item for key, item in row.items() if labels or key != "labels"} for row in rows]
        size = sizes.batch_size
        return [dict(task.collator(rows[start : start + size])) for start in range(0, len(rows), size)]

    source = f"task {data.task}" if data.dataset is None else Path(data.dataset).name
    digest = hashlib.sha256(repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]]).encode()).hexdigest()
    inputs = _split(train, rows, batches, sizes, f"the validation data of {source}", digest)
    facts, measurements = dict(inputs.facts), list(inputs.measurements)
    for number, name in enumerate(parts):
        sets = labeled if len(parts) == 1 else {"": rows[number :: len(parts)]}
        facts[name] = row_facts(len(row["input_ids"]) for part in sets.values() for row in part)
        labeled_batches = {suffix: batches(part, labels=True) for suffix, part in sets.items()}
        measure = classification_measure(
            exact.model, labeled_batches, task.metric_names, regression=task.labels is None
        )
        conditions = exact.conditions(
            "task",
            task=data.task or Path(str(data.dataset)).name,
            settings={"data": digest, "part": name, **facts[name], "metrics": list(task.metric_names)},
        )
        measurements.append((conditions, measure))
    return replace(inputs, facts=facts, measurements=measurements)


def _split(
    train: list[Any],
    test: Sequence[Mapping[str, Any]],
    batches: Callable[[Sequence[Mapping[str, Any]]], list[Batch]],
    sizes: DataSizes,
    source: str,
    digest: str,
) -> Inputs:
    """Return the inputs without measurements: rows to train on and validate, in random order, and of the fidelity."""
    if len(train) < 4 or len(test) < 2:
        counts = f"{len(train)} inputs to train on and {len(test)} to measure on"
        raise ValueError(f"{source} gives {counts}; 4 and 2 are needed. Give more data.")
    train = [*train]
    random.Random(sizes.seed).shuffle(train)
    count = max(1, min(sizes.validation_sequences, len(train) // 4))
    parts = {"train": train[count:], "held_out": test}
    parts["fidelity"] = evenly_spread(test, sizes.fidelity_sequences)
    lengths = {name: row_facts(len(row["input_ids"]) for row in rows) for name, rows in parts.items()}
    return Inputs(
        train=batches(train[count:]),
        validation=batches(train[:count]),
        fidelity=batches(parts["fidelity"]),
        tokens=[token for row in test[:256] for token in row["input_ids"]],
        hash=digest,
        facts={"source": source, "rows": "one row for each example", **lengths},
    )


def recall_measurement(exact: ExactModel, lengths: Sequence[int], seed: int) -> Measurement:
    """Return the recall at lengths. Raises a ValueError as `recall_measure`, before anything is measured."""
    settings, measure = recall_measure(exact.model, exact.tokenizer, lengths, seed=seed)
    vocabulary = hashlib.sha256(repr(sorted(exact.tokenizer.get_vocab().items())).encode()).hexdigest()
    return exact.conditions("recall", settings={**settings, "vocabulary": vocabulary}), measure


def with_sentence_pairs(
    inputs: Inputs, exact: ExactModel, folder: str, sizes: DataSizes, max_rows: int | None
) -> Inputs:
    """Measure first how embeddings rank the validation pairs of STS-B, at most `max_rows` of them, evenly spread."""
    rows = list(load_task("stsb", folder=folder)["validation"])
    rows = rows if max_rows is None else evenly_spread(rows, max_rows)
    texts = [row[column] for column in ("sentence1", "sentence2") for row in rows]
    tokenizer, length = exact.tokenizer, sizes.sequence_length
    ids = [encode_text(tokenizer, text, add_special_tokens=True) for text in texts]
    ids = [row if len(row) <= length else [*row[: length - 1], row[-1]] for row in ids]
    options: dict[str, Any] = {"batch_size": max(sizes.batch_size, 16), "pad": pad_token(tokenizer)}
    measure = sentence_pair_measure(ids, [float(row["label"]) for row in rows], **options)
    digest = hashlib.sha256(repr([ids, [row["label"] for row in rows]]).encode())
    conditions = exact.conditions("sts", settings={"data": digest.hexdigest(), "pairs": len(rows)})
    facts = {**inputs.facts, "sentence_pairs": f"STS-B validation, {Path(folder).name}"}
    return replace(inputs, facts=facts, measurements=[(conditions, measure), *inputs.measurements])


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
    noun = "input" if facts["sequences"] == 1 else "inputs"
    return f"{facts['sequences']:,} {noun} of {facts['tokens']:,} tokens ({lengths})"


@dataclass(frozen=True)
class PreparedModel:
    """One model with its data, and what is measured of it."""

    exact: ExactModel
    inputs: Inputs
    resolved: DataSizes

    @property
    def scores(self) -> list[Score]:
        """The scores, the most important first."""
        return [score for conditions, _ in self.inputs.measurements if (score := score_of(conditions)) is not None]


@dataclass(frozen=True)
class EvaluatedModel(PreparedModel):
    """One model of an evaluation."""

    resolved: ResolvedOptions
    groups: tuple[CheckpointGroup, ...] = ()  # checkpoints
    task: str = ""  # a further task that this model is for; only its scores are measured then


def prepare(
    model: Any, config: EvaluateConfig, tokenizer: Any = None, text: Text | None = None
) -> list[EvaluatedModel]:
    """Load the model, and those of further tasks, with their data; every error of the input is raised here."""
    for name in config.attention or ():
        check_mechanism(name)
    for name in config.data.tasks:
        TASKS.get(name)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    labels: dict[str, str] = {}  # of checkpoints that were made alike, in all models
    first = _prepare(model, config.for_model(), labels, tokenizer, text)
    if not first.resolved.attentions and not any(group.layers for group in first.groups):
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    for name in first.resolved.attentions:
        options = seed_options(ATTENTIONS.get(name), first.resolved.seed)
        check_fits(first.exact.model, name, "measured", **options)
    models = [first]
    for task, folder in config.data.other_tasks.items():
        models.append(_prepare(folder, replace(config.for_other_task(task), name=None), labels, first=first))
    return models


def _prepare(
    source: Any,
    config: EvaluateConfig,
    labels: dict[str, str],
    tokenizer: Any = None,
    text: Text | None = None,
    first: EvaluatedModel | None = None,
) -> EvaluatedModel:
    """Load one model with its data. That of a further task has the mechanisms of the `first`."""
    task, data = config.data.own_task, config.data.for_model
    name, kind, model_config = describe_source(source, task, config.data.dataset)
    name = config.name or name
    _check_data(kind, config, name, text)
    groups = find_checkpoints(config.converted or (), config.baseline or (), model_config, labels)
    if kind != "classifier":
        unused = ("label_column", "metrics", *(["max_eval_samples"] if config.data.sts is None else []))
        text = read_text(data, unused, text)
    elif text is not None:
        raise ValueError(f"{name} is measured on the data of its task, not on documents: leave out either.")
    exact = ExactModel.load(source, kind, name, tokenizer, config.device, task or "")
    table, dtype = has_position_table(exact.model), dtype_name(exact.model)
    resolved = resolve_options(config, kind, exact.positions, dtype, table=table)
    if first is not None:
        resolved = replace(resolved, attentions=first.resolved.attentions)  # by default those of its kind
        _check_like_first(str(source), task, exact.model, groups, first)
    inputs = read_inputs(exact, text, data, resolved)
    if config.data.sts is not None:
        inputs = with_sentence_pairs(inputs, exact, config.data.sts, resolved, data.max_eval_samples)
    if config.recall_lengths:
        recall = recall_measurement(exact, config.recall_lengths, config.seed)
        inputs = replace(inputs, measurements=[*inputs.measurements, recall])
    return EvaluatedModel(exact, inputs, resolved, tuple(groups), (task or "") if first else "")


def read_text(data: DataConfig, unused: Sequence[str], text: Text | None = None) -> Text:
    """Return the documents, those of the data unless there are some; an OptionError for options without an effect."""
    for name in unused:
        if getattr(data, name) != default_of(DataConfig, name):
            raise OptionError(f"data.{name}", "is for labelled data, and this model reads a text. Leave it out.")
    return read_documents(data) if text is None else text


def _check_like_first(
    source: str, task: str | None, model: PreTrainedModel, groups: Sequence[CheckpointGroup], first: EvaluatedModel
) -> None:
    """Raise a ValueError where the model of a further task is not made as the first one: time is measured on that."""
    check_same_shape(source, model.config, first.exact.model.config)
    identities = [group.identity for group in first.groups]
    for group in groups:
        if group.layers and group.identity not in identities:
            problem = f"of the task {task!r}, has layers that no converted checkpoint of MODEL has"
            remedy = "Give one converted in the same way: --converted FOLDER."
            raise ValueError(f"{', '.join(group.folders)}, {problem}; time is measured on MODEL. {remedy}")


def _check_data(kind: str, config: EvaluateConfig, name: str, text: Text | None) -> None:
    if kind == "decoder" and config.data.dataset is None and text is None:
        raise ValueError(f"{name!r} is a causal language model: give a text to measure it on with --data.dataset FILE.")
    if kind == "classifier" and config.data.own_task is None and config.data.dataset is None:
        raise ValueError(f"{name!r} is a classifier: give its task (--data.task) or labelled data (--data.dataset).")
    if kind != "encoder" and config.data.sts is not None:
        raise OptionError("data.sts", f"needs an encoder without a head; {name!r} is a {kind}. Leave it out.")
    if kind == "classifier" and config.recall_lengths:
        raise ValueError(f"recall_lengths are for decoders and for encoders without a head; {name!r} is a classifier.")
    if kind != "decoder" and (config.context or config.stride):
        raise ValueError("context and stride are those of a perplexity, and this is no causal language model.")
