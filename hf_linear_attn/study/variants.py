"""The variants of a model that a study compares: exact, without attention, with a mechanism, converted."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..checkpoints import load_pretrained, read_config, read_tokenizer
from ..data.files import TEXT_FORMATS, file_suffix
from ..integration.ablation import without_attention
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..integration.positions import has_position_table
from ..measure.speed import timing_options
from ..measure.values import Metric
from ..mechanisms.softmax import EXACT
from ..ops.backends import get_backend
from ..ops.native.backend import unavailable_reason
from ..patching import CONFIG_FIELD, is_patched, patch_model
from ..registry import ATTENTIONS, AttentionEntry
from ..utils.environment import environment
from ..utils.gguf import dequantized, split_source
from ..utils.models import quiet_transformers, shared_copy, torch_device
from ..utils.progress import OnBatch, report_nothing
from ..utils.sources import loading_errors
from .settings import PYTHON_DOCUMENTATION, EvaluateConfig, Settings, resolve_settings
from .study import Conditions, Record, Study, Values

#: Kinds of models, and the auto class of each.
KINDS = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModel", "classifier": "AutoModelForSequenceClassification"}

#: Labels of the two references, and the mechanism's name of a model without attention.
EXACT_LABEL, WITHOUT_ATTENTION, NO_ATTENTION = "exact", "without attention", "none"

Loader = Callable[[], PreTrainedModel]

Measurement = tuple[Conditions, Metric]
"""What is measured of each variant of a model; the conditions lack what the variant adds (see `Variant.of`)."""


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
    def load(cls, source: Any, kind: str, name: str, tokenizer: Any, device: str, task: str) -> ExactModel:
        """Read the weights and, where none is given, the tokenizer (see `load_exact`)."""
        tokenizer = tokenizer or read_tokenizer(str(getattr(source, "name_or_path", source)))
        return cls.of(load_exact(source, kind, torch_device(device), task=task), tokenizer, kind, name)

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any, kind: str, name: str) -> ExactModel:
        """Describe a loaded model on its device."""
        state = environment(model.device)
        device = {key: state["hardware"][key] for key in ("device", "cpu", "threads")}
        backend = get_backend()
        if backend == "auto":  # the one that serves kernelized attention where it can; some calls fall back to torch
            backend = "native" if model.device.type == "cpu" and unavailable_reason() is None else "torch"
        device.update(dtype=dtype_name(model), backend=backend)
        return cls(model.eval(), tokenizer, kind, name, weights_fingerprint(model), device, state["versions"])

    @property
    def implementation(self) -> str:
        """The exact attention implementation, such as `sdpa`: the baseline of all speedups."""
        return str(self.model.config._attn_implementation)

    @property
    def positions(self) -> int | None:
        """The longest input in tokens, or None."""
        return longest_input(self.model)

    def settings(self, config: EvaluateConfig) -> Settings:
        """Return how much is measured (see `resolve_settings`)."""
        table = has_position_table(self.model)
        return resolve_settings(config, self.kind, self.positions, dtype_name(self.model), table=table)

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


def seed_options(entry: AttentionEntry, seed: int) -> dict[str, Any]:
    """Return the mechanism's seed option, or nothing where it has none."""
    return {"seed": seed} if any(field.name == "seed" for field in fields(entry.options)) else {}


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

    A checkpoint is a classifier with a task, or where it has the head of one, with a data set that is no plain text.

    Raises:
        OSError: It cannot be loaded.
        ValueError: It is patched already, or an encoder-decoder; or the attention of a loaded model cannot be replaced.
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
    """Load a model with exact attention, unless it is loaded; messages name the task of a classifier.

    Raises:
        OSError: It cannot be loaded.
        ValueError: Weights are missing, or its attention cannot be replaced.
    """
    if isinstance(source, PreTrainedModel):
        return source
    auto_class = getattr(transformers, KINDS[kind])
    precision = {"dtype": torch.float32} if kind == "classifier" else {}
    with loading_errors(f"The model {source!r}"), quiet_transformers():
        folder, gguf_file = split_source(source)
        model, info = auto_class.from_pretrained(folder, output_loading_info=True, **precision, **gguf_file)
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing:
        remedy = "Give a complete checkpoint"
        if kind == "classifier" and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
            remedy = f"It has no head for the task {task!r}: run `hf-linear-attn finetune {source} --data.task {task}`"
        raise ValueError(f"{source!r} lacks weights ({missing[0]}, …). {remedy}.")
    check_exact(dequantized(model), source, kind)
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
class CheckpointGroup:
    """Checkpoints that differ in their weights and seeds only: converted ones, or tuned ones with exact attention."""

    attention: str  # the mechanism of most layers (`softmax` for exact attention)
    layers: Mapping[str, Any]  # the config of each patched layer; empty for exact attention
    folders: Mapping[str, str]  # with the fingerprint of each
    label: str = ""  # which no other group has

    @property
    def state(self) -> str:
        return "converted" if self.layers else "tuned"

    @property
    def identity(self) -> str:
        """A text that is equal for groups which differ in weights and seeds only."""
        layers = {
            index: {**layer, "options": {name: item for name, item in layer["options"].items() if name != "seed"}}
            for index, layer in self.layers.items()
        }
        return json.dumps(layers, sort_keys=True, default=str)

    def sized(self, *longest: Any) -> CheckpointGroup:
        """Return the group as it is timed with inputs up to a length (the last arguments of `timing_options`)."""
        layers = {
            index: {**layer, "options": timing_options(ATTENTIONS.get(layer["attention"]), layer["options"], *longest)}
            for index, layer in self.layers.items()
        }
        return replace(self, layers=layers)

    def load(self, folder: str, kind: str, device: torch.device) -> PreTrainedModel:
        """Read the weights of one of the checkpoints."""
        auto_class = getattr(transformers, KINDS[kind])
        with quiet_transformers():
            model = load_pretrained(folder, auto_class) if self.layers else auto_class.from_pretrained(folder)
        return model.eval().to(device)


def find_checkpoints(
    converted: Sequence[str], baseline: Sequence[str], exact_config: Any, labels: dict[str, str]
) -> list[CheckpointGroup]:
    """Group checkpoints, tuned ones with exact attention first, by their layers. Weights are not loaded yet.

    Groups of equal identity have equal `labels`, such as "hedgehog (converted)"; those of new ones are added.

    Raises:
        ValueError, OSError: A folder is missing, no checkpoint, of the wrong kind, or of another architecture than the
            exact model's config.
    """
    groups: dict[str, CheckpointGroup] = {}
    for folder in (*baseline, *converted):
        with loading_errors(f"The checkpoint {folder!r}"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        saved = getattr(config, CONFIG_FIELD, None)
        if folder in baseline and saved is not None:
            raise ValueError(f"{folder!r} is patched; a baseline has exact attention. Give it with --converted.")
        if folder in converted and saved is None:
            raise ValueError(f"{folder!r} has exact attention: nothing was converted. Give it with --baseline.")
        check_same_shape(folder, config, exact_config)
        layers = {} if saved is None else {str(index): layer for index, layer in saved["layers"].items()}
        names = [layer["attention"] for layer in layers.values()] or [EXACT]
        group = CheckpointGroup(max(dict.fromkeys(names), key=names.count), layers, {})
        known = groups.get(group.identity, group)
        groups[group.identity] = replace(known, folders={**known.folders, folder: folder_fingerprint(Path(folder))})
    for group in groups.values():
        base = f"{group.attention} ({group.state})"
        numbered = itertools.chain([base], (f"{base} {number}" for number in itertools.count(2)))
        labels.setdefault(group.identity, next(label for label in numbered if label not in labels.values()))
    return [replace(group, label=labels[group.identity]) for group in groups.values()]


def check_same_shape(folder: str, config: Any, exact_config: Any) -> None:
    """Raise a ValueError if a checkpoint does not have the shape of the exact model."""
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        own, expected = getattr(config, name, None), getattr(exact_config, name, None)
        if own != expected:
            raise ValueError(f"{folder!r} was not made from this model: its {name} is {own!r}, not {expected!r}.")


def folder_fingerprint(folder: Path) -> str:
    """Return the SHA-256 over a checkpoint's config and weights. Raises a ValueError if it has no weights."""
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{str(folder)!r} has no weights (*.safetensors). Give a complete checkpoint.")
    for path in (folder / "config.json", *weights):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Variant:
    """One variant of a model, with what its measurements depend on besides the exact model."""

    label: str  # the row of tables that it belongs to
    attention: str  # the mechanism
    load: Loader
    state: str = ""  # what was done to the mechanism (`results.STATES`)
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, conditions: Conditions) -> Conditions:
        """Return the conditions of a measurement of this variant."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("attention", "state", "seed", "options")}
        return replace(conditions, **own, settings={**conditions.settings, **self.settings})

    def measure(self, study: Study, measurements: Iterable[Measurement], status: str = "") -> dict[str, Record]:
        """Measure what the study does not know yet; return the records by the name of the measurement.

        With a status, the rows that are done are reported as its progress.
        """
        records = {}
        for conditions, metric in measurements:
            stage = f"{status}: {conditions.measurement.replace('_', ' ')}"
            watch = partial(study.progress.status, stage) if status else report_nothing
            function = partial(self._measured, metric, watch)
            records[conditions.measurement] = study.measure(self.of(conditions), function, label=self.label)
        return records

    def _measured(self, metric: Metric, on_batch: OnBatch) -> Values:
        return metric(self.load(), on_batch)


def references(model: PreTrainedModel) -> list[Variant]:
    """Return the exact model and the model without attention."""
    floor = cache(lambda: without_attention(model))
    return [
        Variant(EXACT_LABEL, EXACT, lambda: model, "exact"),
        Variant(WITHOUT_ATTENTION, NO_ATTENTION, floor, "without attention"),
    ]


def checkpoints(exact: ExactModel, group: CheckpointGroup) -> list[Variant]:
    """Return the checkpoints of a group, which have its label."""
    return [
        Variant(
            group.label,
            group.attention,
            cache(partial(group.load, folder, exact.kind, exact.model.device)),
            group.state,
            settings={"checkpoint": fingerprint},
        )
        for folder, fingerprint in group.folders.items()
    ]


def timed_variants(exact: ExactModel, settings: Settings, groups: Sequence[CheckpointGroup]) -> list[Variant]:
    """Return what is timed side by side. Time depends on what is patched and not on weights: none are loaded.

    A mechanism that is built for a largest length is built for the longest one that is timed.
    """
    model, limit, length = exact.model, longest_input(exact.model), max(settings.lengths)
    first, last = references(model)
    variants = [replace(first, options={"implementation": exact.implementation})]
    for name in settings.attentions:
        entry = ATTENTIONS.get(name)
        options = timing_options(entry, seed_options(entry, settings.seed), limit, length)
        identity = {key: item for key, item in options.items() if key != "seed"}
        patched = cache(partial(patch_model, shared_copy(model), name, **options))
        variants.append(Variant(name, name, patched, options=identity))
    for group in filter(lambda group: group.layers, groups):
        sized = group.sized(limit, length)
        patched = cache(partial(patch_model, shared_copy(model), {"default": EXACT, **sized.layers}))
        variants.append(Variant(group.label, group.attention, patched, options={"layers": sized.identity}))
    return [*variants, last]
