"""A model with its data, and the metrics that it is measured by: loaded and checked before anything is measured."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints import read_config, read_tokenizer
from ..data.config import PYTHON_DOCUMENTATION
from ..data.task_data import TaskData, load_task_data
from ..data.tasks import load_task
from ..integration.context import is_patched
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..measure.embedding import SentencePairs
from ..measure.metric import Metric, in_batches
from ..measure.recall import RecallMetric
from ..ops.backends import get_backend
from ..ops.native.backend import unavailable_reason
from ..ops.triton.backend import installed as triton_installed
from ..training.options import TrainingRunConfig
from ..training.resumable import SeededCollator
from ..utils.environment import environment
from ..utils.models import Batch, torch_device
from ..utils.options import OptionError
from . import models
from .kinds import KINDS, Kind, task_type_of
from .options import EvaluateConfig
from .study import Conditions

#: What an evaluation asks decoders: a key in noise, one of four keys in prose, pairs of tokens.
RECALL_TASKS = ("niah_single_1", "niah_multikey_1", "mqar")

#: Prompts of decoders for each task, length and depth; documents of encoders, of which one must be retrieved.
PROMPTS, DOCUMENTS = 8, 16

#: Tokens of one step of attention transfer, and the steps whose rows are loaded.
STEP_TOKENS, LOADED_STEPS, QUICK_STEPS = 1024, 120, 26


@dataclass(frozen=True)
class EvaluatedModel:
    """The model that mechanisms are compared with, in evaluation mode, with its data and its metrics."""

    model: PreTrainedModel
    kind: Kind
    name: str  # in reports
    data: TaskData
    metrics: Mapping[str, Metric]  # by measurement, the most important first
    fingerprint: str  # a hash of its weights
    hardware: Mapping[str, Any]  # with `versions` a part of the conditions of its measurements
    versions: Mapping[str, Any]
    checksum: int  # of the rows
    limit: str  # what decides the length that rows are cut to

    def conditions(self, measurement: str, **parts: Any) -> Conditions:
        """Return the conditions of a measurement of this model, on its device."""
        surroundings: dict[str, Any] = {"device": self.hardware, "versions": self.versions, **parts}
        return Conditions(self.name, self.fingerprint, measurement=measurement, **surroundings)

    @property
    def row_settings(self) -> dict[str, Any]:
        """What says on which rows something was measured or trained."""
        return {"data": self.checksum, **self.data.facts}

    def metric_settings(self, measurement: str) -> dict[str, Any]:
        """Return what a measurement depends on besides the model: the rows, and the prompts of a recall."""
        settings = self.row_settings
        metric = self.metrics.get(measurement)
        if isinstance(metric, RecallMetric):
            settings |= {"tasks": metric.tasks, "lengths": metric.lengths, "seed": metric.seed}
        if isinstance(metric, SentencePairs):
            settings["similarities"] = metric.similarities
        return settings

    def cast(self, dtype: str) -> EvaluatedModel:
        """Return a copy in another precision; the same object if that is its own."""
        if dtype == self.hardware["dtype"]:
            return self
        model: Any = copy.deepcopy(self.model)
        return replace(self, model=model.to(getattr(torch, dtype)), hardware={**self.hardware, "dtype": dtype})

    @property
    def tokens(self) -> list[int]:
        """The tokens of the longest held-out row, the last one, which inputs for timing are made of."""
        rows: Any = next(iter(self.data.held_out.values()))
        return [int(token) for token in rows[len(rows) - 1]["input_ids"]]

    def training_batches(self, seed: int) -> tuple[list[Batch], list[Batch]]:
        """Return batches for an attention transfer, in an order by the seed, and a few that choose its best step."""
        rows: Any = self.data.inputs(self.data.train)
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        size = rows_of_step(self.data.longest)
        collate = SeededCollator(self.data.collator, seed)
        batches: list[Batch] = [
            collate([rows[index] for index in order[start : start + size]]) for start in range(0, len(order), size)
        ]
        count = max(1, min(2, len(batches) // 4))
        return batches[count:] or batches, batches[:count]

    def facts(self) -> dict[str, Any]:
        """Return what a report says about the model."""
        layers = self_attention(self.model)
        return {
            "name": self.name,
            "kind": self.kind.noun,
            "class": type(self.model).__name__,
            "layers": len(layers),
            "heads": attention_shape(layers[0], 0, None).num_heads,
            "parameters": self.model.num_parameters(),
            "dtype": self.hardware["dtype"],
            "attention": str(self.model.config._attn_implementation),
            "positions": longest_input(self.model),
        }


def load_evaluated_model(
    source: Any, config: EvaluateConfig, tokenizer: Any = None, documents: Sequence[str] | None = None
) -> EvaluatedModel:
    """Load an exact model, or take a loaded one, with its data, and make its metrics.

    Raises:
        ValueError, OSError: A model or data that cannot be used.
    """
    loaded = source if isinstance(source, PreTrainedModel) else None
    path = str(loaded.name_or_path if loaded is not None else source)
    model_config = read_config(path) if loaded is None else loaded.config
    task_type = config.task_type or task_type_of(model_config, loaded, config.data)
    kind, seed = KINDS[task_type], config.seeds[0]
    tokenizer = tokenizer or read_tokenizer(path)
    data_config = config.data
    if task_type == "embedding" and documents is None and data_config.dataset is None:
        data_config = replace(data_config, dataset=PYTHON_DOCUMENTATION)
    loading = TrainingRunConfig(model=path, task_type=task_type, data=data_config)
    length, limit = models.row_limit(loading, tokenizer, loaded)
    steps = QUICK_STEPS if config.quick else LOADED_STEPS
    data_config = models.with_limits(kind, replace(data_config, max_length=length), quick=config.quick)
    if data_config.max_train_samples is None:
        data_config = replace(data_config, max_train_samples=steps * rows_of_step(length))
    head = models.head_of(loading, loaded)
    data = load_task_data(task_type, tokenizer, data_config, seed, documents=documents, head=head)
    if task_type == "classification":
        models.check_head(loading, loaded)
    model, missing = models.load_model(loading, data, loaded=loaded)
    if missing:
        raise models.missing_head(loading, f"{missing[0]} is missing")
    if is_patched(model):
        raise ValueError(f"{path!r} is patched already. Give the model as it was before.")
    model = model.eval().to(torch_device(config.device)) if loaded is None else model.eval()
    if loaded is not None and config.device not in ("cpu", str(model.device)):
        remedy = f"Move it with model.to({config.device!r}), and leave this option out"
        raise OptionError("device", f"{config.device!r}, but the loaded model is on {model.device}. {remedy}.")
    metric = kind.metric(data, model)
    metrics = {metric.score.measurement: metric}
    if config.sts is not None:
        if task_type != "embedding":
            raise OptionError("sts", f"needs an encoder without a head; this is {kind.noun}. Leave it out.")
        metrics = {"sts": sentence_pairs(config.sts, tokenizer, data.collator, length), **metrics}
    if config.recall_lengths:
        recall = recall_metric(kind, tokenizer, config.recall_lengths, seed)
        recall.check(model)
        metrics["recall"] = recall
    machine = environment(model.device)
    hardware = {key: machine["hardware"][key] for key in ("device", "cpu", "threads")}
    hardware |= {"dtype": str(model.dtype).removeprefix("torch."), "backend": _backend(model.device)}
    name = config.name or (Path(path).name if Path(path).exists() or loaded is not None else path)
    name = name or type(model).__name__
    fingerprint = models.weights_fingerprint(model)
    versions, checksum = machine["versions"], data.checksum()
    return EvaluatedModel(model, kind, name, data, metrics, fingerprint, hardware, versions, checksum, limit)


def rows_of_step(longest: int) -> int:
    """Return how many rows one step of attention transfer takes."""
    return max(1, min(32, STEP_TOKENS // longest))


def recall_metric(kind: Kind, tokenizer: Any, lengths: Sequence[int], seed: int) -> RecallMetric:
    """Return the recall at lengths. An OptionError for a kind of model that recalls nothing."""
    if not kind.recall_task:
        raise OptionError("recall_lengths", f"are for decoders and for encoders without a head; this is {kind.noun}.")
    if kind.is_causal:
        return RecallMetric(tokenizer, lengths, RECALL_TASKS, trials=PROMPTS, seed=seed)
    return RecallMetric(tokenizer, lengths, [kind.recall_task], trials=DOCUMENTS, seed=seed)


def sentence_pairs(folder: str, tokenizer: Any, collator: Any, length: int) -> SentencePairs:
    """Return how embeddings rank the validation pairs of STS-B."""
    rows = list(load_task("stsb", folder=folder).splits["validation"])
    texts = [row["sentence1"] for row in rows] + [row["sentence2"] for row in rows]
    encoded = tokenizer(texts, truncation=True, max_length=length, verbose=False)
    ids = [{"input_ids": row} for row in encoded["input_ids"]]
    return SentencePairs(in_batches(ids, collator), [float(row["label"]) for row in rows])


def _backend(device: torch.device) -> str:
    """Return the backend that serves kernelized attention where it can; some calls fall back to torch."""
    backend = get_backend()
    if backend != "auto":
        return backend
    if device.type == "cpu":
        return "native" if unavailable_reason() is None else "torch"
    return "triton" if triton_installed() and device.type == "cuda" else "torch"
