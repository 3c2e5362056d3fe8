"""Models and tokenizers for a task: loaded, checked, with adapters."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, GPT2Tokenizer, PreTrainedConfig, PreTrainedModel

from ..checkpoints import load_checkpoint, model_without_weights, optional_file, read_config, read_tokenizer
from ..config import LinearAttentionConfig
from ..data.config import DataConfig, TaskType
from ..data.files import UNLABELLED
from ..data.task_data import TaskData
from ..integration.context import SUBMODULE
from ..integration.discovery import longest_input, self_attention
from ..integration.positions import extend_positions, position_limit
from ..patching import patch_model
from ..training.options import TrainingRunConfig
from ..utils.extras import require_packages
from ..utils.gguf import split_source
from ..utils.models import shared_copy
from ..utils.options import OptionError
from .kinds import KINDS, Kind, task_type_of

#: Longest input, or block of a causal language model, where `data.max_length` is not given. Exact attention, with which
#: teachers are trained, takes quadratic time beyond it.
DEFAULT_MAX_LENGTH = 1024

#: Tokens of held-out text that are measured on where `data.max_eval_samples` is not given.
HELD_OUT_TOKENS = 65_536


def load_tokenizer(config: TrainingRunConfig) -> Any:
    """Return the tokenizer of a model, or the one that is given instead."""
    source = config.tokenizer or config.model
    if source is None:
        raise OptionError("model", "is missing: give it; with a model_type, give tokenizer or train_tokenizer.")
    return read_tokenizer(source, config.revision, remedy="Give another one with --tokenizer.")


def train_tokenizer(texts: Iterable[str], size: int, max_length: int) -> Any:
    """Train a byte-level BPE tokenizer (as GPT-2's; Sennrich et al. 2016, arXiv:1508.07909).

    Its one special token `<|endoftext|>` begins, ends and pads. It encodes any text: all 256 bytes are tokens.
    """
    end_of_text = "<|endoftext|>"
    tokenizer = GPT2Tokenizer(pad_token=end_of_text).train_new_from_iterator(texts, size, show_progress=False)
    tokenizer.model_max_length = max_length
    return tokenizer


def row_limit(
    config: TrainingRunConfig, tokenizer: Any = None, model: PreTrainedModel | None = None
) -> tuple[int, str]:
    """Return the length to which rows are cut, and what decides it.

    It is `data.max_length`, else `max_length`, else as many tokens as the model has positions for and its tokenizer
    says, but at most `DEFAULT_MAX_LENGTH`.
    """
    if config.data.max_length is not None:
        return config.data.max_length, "data.max_length"
    if config.max_length is not None:
        return config.max_length, "max_length"
    skeleton = model or model_without_weights(str(config.model), _model_config(config, {}), AutoModel)
    limits = [position_limit(skeleton) or longest_input(skeleton)]
    if tokenizer is not None:
        limits.append(tokenizer.model_max_length)
    limit = min(value for value in (*limits, DEFAULT_MAX_LENGTH + 1) if value is not None)
    if limit > DEFAULT_MAX_LENGTH:
        return DEFAULT_MAX_LENGTH, "the default; set --data.max_length for longer rows"
    return limit, "the model's limit; patch, convert and finetune add positions with --max_length"


def with_limits(kind: Kind, data: DataConfig, *, quick: bool = False) -> DataConfig:
    """Return the options of the data with a limit of the held-out rows, the same for every verb, if they have none.

    Labelled rows are all measured on; of other data as many rows as have `HELD_OUT_TOKENS` tokens if none is shorter
    than `max_length`. `quick` takes at most 256 labelled rows, and a quarter of other data.
    """
    if data.max_eval_samples is not None:
        return data
    if kind.task_type == "classification":
        return replace(data, max_eval_samples=256) if quick else data
    rows = HELD_OUT_TOKENS // cast(int, data.max_length) // (4 if quick else 1)
    return replace(data, max_eval_samples=max(rows, 8))


def load_model(
    config: TrainingRunConfig, data: TaskData, path: str | None = None, *, loaded: PreTrainedModel | None = None
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model, or the one in a folder that the run has saved, in float32 with a head for the task.

    Of a `loaded` model it is a copy that shares its weights.

    A patched checkpoint comes back patched. Returns the model, and the names of its parameters that the checkpoint
    lacks: those of a new head, which is drawn from torch's generator. A checkpoint that lacks more is an error.
    """
    if loaded is not None:
        return _checked(shared_copy(loaded), data, config), []
    if path is not None:
        config = TrainingRunConfig(model=path, max_length=config.max_length, task_type=config.task_type)
    auto = KINDS[data.task_type].model_class
    changes = dict(data.config_changes)
    if config.model_type is not None:
        tokenizer, names = data.tokenizer, ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}
        changes = {"vocab_size": len(tokenizer), **special, **changes}
    model_config = _model_config(config, changes)
    if type(model_config) not in auto._model_mapping:
        problem = f"Transformers has no model for {data.task_type} of the type {model_config.model_type!r}"
        raise ValueError(f"{problem}. Give another --task_type.")
    if config.from_config or config.model_type is not None:
        return _checked(auto.from_config(model_config), data, config), []
    name, _ = split_source(str(config.model))
    arguments = {"revision": config.revision or "main", "dtype": torch.float32, "config": model_config}
    model, missing = load_checkpoint(str(config.model), auto, **arguments)
    body = [key for key in missing if key.startswith(f"{model.base_model_prefix}.") and "pooler" not in key]
    if data.task_type == "embedding":  # a model without a head; poolers are not used
        _check_pooling(optional_file(name, "1_Pooling/config.json", config.revision))
        body, missing = [key for key in missing if "pooler" not in key], []
    if body:
        raise ValueError(f"{name!r} lacks weights of the model itself ({body[0]}, …). Give a complete checkpoint.")
    return _checked(model, data, config), missing


def default_task_type(config: TrainingRunConfig) -> TaskType:
    """Return the task type of a run that names none: that of the model, or classification where it gets a new head."""
    if config.finetunes or config.model is None:
        return "classification"
    return task_type_of(read_config(config.model, config.revision), None, config.data)


def head_of(config: TrainingRunConfig, loaded: PreTrainedModel | None = None) -> PreTrainedConfig | None:
    """Return the config of a checkpoint, or of a loaded model, that has a classification head, or else None."""
    if config.task_type != "classification" or config.model is None or config.from_config:
        return None
    if not _has_head(_class_names(config, loaded)):
        return None
    return read_config(str(config.model), config.revision) if loaded is None else loaded.config


def check_head(config: TrainingRunConfig, loaded: PreTrainedModel | None = None) -> None:
    """Raise a ValueError if a checkpoint, as its config says, or a loaded model has no head for classification.

    The weights of a checkpoint say so, too, but are loaded later.
    """
    if config.model is None or config.from_config or config.model_type is not None:
        return
    classes = _class_names(config, loaded)
    if classes and not _has_head(classes):
        raise missing_head(config, f"it is a {classes[0]}")


def _class_names(config: TrainingRunConfig, loaded: PreTrainedModel | None) -> list[str]:
    """Return the names of the class that a checkpoint was saved from, or of those that a loaded model is of."""
    if loaded is not None:
        return [cls.__name__ for cls in type(loaded).mro()]
    return read_config(str(config.model), config.revision).architectures or []


def _has_head(class_names: list[str]) -> bool:
    return any("ForSequenceClassification" in name for name in class_names)


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 over the names, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1).cpu()
        digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()


def missing_head(config: TrainingRunConfig, reason: str) -> ValueError:
    """Return the error for a checkpoint without a head for its task."""
    how = "the verb finetune, or convert with --teacher.num_train_epochs 3"
    remedy = f"Give a fine-tuned model, or fine-tune it first ({how})."
    return ValueError(f"{config.model!r} has no head for this task ({reason}). {remedy} {UNLABELLED}")


def _check_pooling(path: str | None) -> None:
    """Raise a ValueError if sentence-transformers computes the embeddings of a checkpoint by anything but the mean."""
    if path is not None:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        mode = settings.get("pooling_mode") or ", ".join(modes)
        if mode not in ("mean", "pooling_mode_mean_tokens"):
            raise ValueError(f"{str(path)!r} has the pooling {mode!r}; embedding needs the mean.")


def _model_config(config: TrainingRunConfig, changes: dict[str, Any]) -> Any:
    read = partial(read_config, str(config.model), config.revision)
    if config.model_type is not None:
        if config.model is not None:
            raise ValueError(f"Give model_type (now {config.model_type!r}) or MODEL (now {config.model!r}), not both.")
        if config.model_type not in CONFIG_MAPPING:
            raise ValueError(f"model_type {config.model_type!r} is unknown to Transformers. Use one such as 'gpt2'.")
        read = partial(AutoConfig.for_model, config.model_type)
    model_config = read(**{**changes, **config.config_overrides})
    names = {*type(model_config)().to_dict(), *type(model_config).attribute_map}
    for name in config.config_overrides:
        if name not in names:
            raise ValueError(f"config_overrides: the config of {model_config.model_type!r} has no field {name!r}.")
    return model_config


def read_attention(config: TrainingRunConfig) -> LinearAttentionConfig | None:
    """Return the mechanisms by name or by plan; None for exact attention."""
    if config.plan is not None:
        return LinearAttentionConfig.from_file(config.plan)
    return None if config.attention is None else LinearAttentionConfig.parse(config.attention, None, config.options)


def patch_as_configured(
    model: PreTrainedModel, config: TrainingRunConfig, attention: LinearAttentionConfig | None
) -> None:
    """Patch a model in place, unless its attention is to stay exact (None).

    Mechanisms without a seed have the run's.
    """
    if attention is None:
        return
    attention = attention.with_seed(config.seed)
    if config.max_length is not None:
        # The positions are extended already. Mechanisms that are built for a largest length are left.
        attention = attention.with_default("max_length", config.max_length)
    patch_model(model, attention)


def add_adapters(model: PreTrainedModel, rank: int) -> nn.Module:
    """Add LoRA adapters (alpha: twice the rank) to all linear layers of the body. Learned parts stay trainable."""
    require_packages("peft", extra="train", purpose="distill.lora_rank")
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and f".{SUBMODULE}." not in f".{name}."
        and (model.base_model is model or name.startswith(model.base_model_prefix))
    ]
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if f".{SUBMODULE}." in name:
            parameter.requires_grad_(True)
    return adapted


def _checked(model: PreTrainedModel, data: TaskData, config: TrainingRunConfig) -> PreTrainedModel:
    """Return the model with positions for `max_length` tokens; raise a ValueError if it does not fit the data."""
    causal = KINDS[data.task_type].is_causal
    layers = []
    if causal is not None:
        with suppress(NotImplementedError):
            layers = self_attention(model)
    if any(layer.causal is not causal for layer in layers):  # A model that sees the next token would learn to copy it.
        bidirectional = "bidirectional: train it as masked-lm, embedding or classification (--task_type)"
        remedy = bidirectional if causal else "causal: train it as causal-lm"
        raise ValueError(f"The attention of this {type(model).__name__} is {remedy}.")
    limit = position_limit(model)
    if config.max_length is not None and limit is not None and limit < config.max_length:
        extend_positions(model, config.max_length, tokenizer=data.tokenizer)
        limit = config.max_length
    if limit is not None and data.longest > limit:
        problem = f"The longest row has {data.longest} tokens, and {type(model).__name__} has positions for {limit}"
        remedy = f"Truncate the rows (--data.max_length {limit}), or add positions"
        raise ValueError(f"{problem}. {remedy} (patch, convert or finetune with --max_length {data.longest}).")
    return model
