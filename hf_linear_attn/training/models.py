"""Models and tokenizers for a problem: loaded whole, checked, quiet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..integration.discovery import self_attention
from ..integration.positions import extend_positions, position_limit
from ..patching import CONFIG_FIELD
from .options import ModelSettings
from .problems import CausalLM, LanguageModel, Problem


@dataclass(frozen=True)
class Loaded:
    """A model with what its card says of it."""

    model: PreTrainedModel
    fresh: list[str] = field(default_factory=list)


def load_tokenizer(model: ModelSettings) -> Any:
    """The tokenizer of a model.

    Raises:
        ValueError: no model is given.
        OSError: it cannot be found, with what was tried.
    """
    source = model.tokenizer or model.source
    if source is None and model.type is not None:
        raise ValueError("Give model.tokenizer, a folder or a repository, or model.train_tokenizer, a vocabulary size.")
    if source is None:
        raise ValueError("No model: give model.source, a local folder or a repository on the Hub.")
    try:
        return AutoTokenizer.from_pretrained(source, revision=model.revision or "main")
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise OSError(f"The tokenizer of {source!r} cannot be loaded ({first}). Give model.tokenizer.") from error


def train_tokenizer(texts: Iterable[str], size: int, max_length: int) -> Any:
    """A byte-level BPE tokenizer (as GPT-2's; Sennrich et al. 2016, arXiv:1508.07909) trained on texts.

    Its one special token `<|endoftext|>` begins, ends and pads. Any text can be encoded: all 256 bytes are tokens.

    Raises:
        ValueError: fewer tokens than bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    mark = "<|endoftext|>"
    if size < 257:
        raise ValueError(f"model.train_tokenizer must be at least 257 (256 bytes and one mark), got {size!r}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[mark], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=mark, eos_token=mark, pad_token=mark, model_max_length=max_length
    )


def load_model(model: ModelSettings, problem: Problem) -> Loaded:
    """The model in float32 with a head for the problem; patched checkpoints come back patched.

    A head that the checkpoint lacks is drawn from torch's generator.

    Raises:
        ValueError, OSError: it cannot be loaded, or lacks more than a head.
    """
    import transformers

    from ..checkpoints import load_pretrained

    changes = {**problem.config_changes(), **model.overrides}
    auto: Any = getattr(transformers, problem.auto_class)
    if model.type is not None:
        return Loaded(_ready(auto.from_config(_fresh_config(model, problem, changes)), problem, model))
    assert model.source is not None
    try:
        config = AutoConfig.from_pretrained(model.source, revision=model.revision or "main", **changes)
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise OSError(f"The model {model.source!r} cannot be loaded ({first}).") from error
    _check_overrides(config, changes, model)
    _check_labels(model, problem)
    if model.from_config:
        return Loaded(_ready(auto.from_config(config), problem, model))
    settings = {"revision": model.revision or "main", "dtype": torch.float32, "config": config}
    with quiet_transformers():
        if getattr(config, CONFIG_FIELD, None) is not None:
            return Loaded(_ready(load_pretrained(model.source, auto, **settings), problem, model))
        loaded, info = auto.from_pretrained(model.source, output_loading_info=True, **settings)
    missing = sorted(info["missing_keys"])
    prefix = f"{loaded.base_model_prefix}."
    lost = [name for name in missing if name.startswith(prefix) and "pooler" not in name]
    if lost:
        raise ValueError(f"{model.source!r} lacks weights of the model itself ({lost[0]}, …). Give a whole checkpoint.")
    return Loaded(_ready(loaded, problem, model), missing)


def _check_labels(model: ModelSettings, problem: Problem) -> None:
    """A head that was trained with other labels, or in another order, would be scored as if it were wrong."""
    assert model.source is not None
    labels = getattr(problem, "labels", None)
    own = AutoConfig.from_pretrained(model.source, revision=model.revision or "main")
    trained = any("ForSequenceClassification" in name for name in own.architectures or ())
    if labels is None or not trained or model.from_config:
        return
    names = [str(own.id2label[index]) for index in sorted(own.id2label)]
    generic = all(name == f"LABEL_{index}" for index, name in enumerate(names))
    if len(names) != len(labels) or not (
        generic or [name.lower() for name in names] == [name.lower() for name in labels]
    ):
        raise ValueError(
            f"{model.source!r} was trained with the labels {', '.join(names)}, in this order; the data has "
            f"{', '.join(labels)}. Give data with the model's labels, or a model without a classification head."
        )


def _fresh_config(model: ModelSettings, problem: Problem, changes: dict[str, Any]) -> Any:
    """The config of a model type, with the tokenizer's vocabulary and special tokens."""
    assert model.type is not None
    if model.source is not None:
        raise ValueError(f"Give model.type (now {model.type!r}) or model.source (now {model.source!r}), not both.")
    tokenizer = problem.tokenizer
    special = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(tokenizer, name) is not None
    }
    try:
        config = AutoConfig.for_model(model.type)
    except ValueError as error:
        raise ValueError(f"model.type: Transformers knows no model type {model.type!r}, such as 'gpt2'.") from error
    _check_overrides(config, changes, model)
    return AutoConfig.for_model(model.type, **{"vocab_size": len(tokenizer), **special, **changes})


def _ready(loaded: PreTrainedModel, problem: Problem, model: ModelSettings) -> PreTrainedModel:
    """The model, checked, with positions for `max_length` tokens."""
    _check_direction(loaded, problem, model)
    limit = position_limit(loaded)
    if model.max_length is not None and limit is not None and limit < model.max_length:
        extend_positions(loaded, model.max_length, tokenizer=problem.tokenizer)
        limit = model.max_length
    if limit is not None and problem.longest > limit:
        raise ValueError(
            f"The longest row has {problem.longest} tokens, and {type(loaded).__name__} has positions for {limit}. Cut "
            f"the rows (data.max_length {limit}), or add positions (model.max_length {problem.longest})."
        )
    return loaded


def _check_direction(loaded: PreTrainedModel, problem: Problem, model: ModelSettings) -> None:
    """A next-token loss on a model that sees the next token would fall to nothing, and say nothing."""
    if not isinstance(problem, LanguageModel):
        return
    causal = isinstance(problem, CausalLM)
    try:
        layers = self_attention(loaded)
    except NotImplementedError:
        return
    if any(layer.causal is not causal for layer in layers):
        kind = "bidirectional: train it as masked-lm" if causal else "causal: train it as causal-lm"
        raise ValueError(f"The attention of {model.source!r} ({type(loaded).__name__}) is {kind}.")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without Transformers' bars and its report of a loaded checkpoint: what matters of that is checked here."""
    bar, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _check_overrides(config: Any, changes: dict[str, Any], model: ModelSettings) -> None:
    for name in model.overrides:
        if name not in type(config)().to_dict() and name not in getattr(type(config), "attribute_map", {}):
            raise ValueError(f"model.overrides: the config of {config.model_type!r} has no field {name!r}.")
