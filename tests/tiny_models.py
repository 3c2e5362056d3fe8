"""Tiny random models by family, and their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

import hf_linear_attn as hla
from tests.tiny_text import tiny_tokenizer

VOCABULARY = 61
MAX_LENGTH = 96

#: initializer_range is ten times the usual: with 0.02 every attention is uniform and the tests would prove nothing.
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.25}

#: What every architecture gets whose config has such a field, by its standard name.
STANDARD_SIZES: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": MAX_LENGTH,
}
_DECODER_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_ENCODER_DECODER_SIZES: dict[str, Any] = {
    "init_std": 0.25,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
}

#: Architecture -> fields that the standard sizes do not cover.
ARCHITECTURE_FIELDS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bart": {**_ENCODER_DECODER_SIZES, "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    | {"bos_token_id": 1, "forced_eos_token_id": None},
    "distilbert": {"hidden_dim": 40},
    "electra": {"embedding_size": 16},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "gpt2": _DECODER_TOKENS,
    "llama": {**_DECODER_TOKENS, "num_key_value_heads": 2, "attention_bias": True},
    "mistral": {**_DECODER_TOKENS, "num_key_value_heads": 2},
    "modernbert": {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2},
    "opt": {"init_std": 0.25, "ffn_dim": 40, "word_embed_proj_dim": 32, "pad_token_id": 1},
}

#: Architectures that only generate: a causal language model stands for them.
DECODER_ARCHITECTURES = ("gpt2", "llama", "mistral", "opt")


def tiny_config(architecture: str, **config: Any) -> PretrainedConfig:
    """The config of a tiny model without dropout.

    Args:
        architecture: Transformers' model type: "bert", "gpt2", "llama", ….
        config: fields that replace those of the tiny config, by any name that the config class takes.
    """
    cls = CONFIG_MAPPING[architecture]
    default = cls()
    sizes = {name: value for name, value in STANDARD_SIZES.items() if hasattr(default, name)}
    dropout = {
        name: 0.0
        for name, value in vars(default).items()
        if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop")))
    }
    aliases = getattr(cls, "attribute_map", {})
    fields = {**sizes, **dropout, **ARCHITECTURE_FIELDS.get(architecture, {}), **config}
    # The config class must see one name only of fields that have two: `hidden_size` is GPT-2's `n_embd`.
    return cls(**{aliases.get(name, name): value for name, value in fields.items()})


def tiny_model(architecture: str, model_class: type | None = None, **config: Any) -> PreTrainedModel:
    """A tiny random model in evaluation mode, without dropout.

    Args:
        architecture: Transformers' model type: "bert", "gpt2", "llama", ….
        model_class: a class of that architecture or one of Transformers' Auto classes. Without it: the bare model of
            an encoder, the causal language model of a decoder, the sequence-to-sequence model of an encoder-decoder.
        config: fields of the config, see `tiny_config`.
    """
    made = tiny_config(architecture, **config)
    if model_class is None:
        decoder_class = AutoModelForCausalLM if architecture in DECODER_ARCHITECTURES else AutoModel
        model_class = AutoModelForSeq2SeqLM if made.is_encoder_decoder else decoder_class
    model = model_class(made) if issubclass(model_class, PreTrainedModel) else model_class.from_config(made)
    return model.eval()


@dataclass(frozen=True)
class Family:
    """One tiny architecture of the test matrix."""

    name: str
    causal: bool
    projections: tuple[str, ...]
    model_class: type | None = None
    num_layers: int = 2

    def build(self, **config: Any) -> PreTrainedModel:
        return tiny_model(self.name, self.model_class, **{"num_hidden_layers": self.num_layers, **config})

    def __str__(self) -> str:
        return self.name


BERT = Family("bert", False, ("query", "value"), AutoModelForMaskedLM)
GPT2 = Family("gpt2", True, ("c_attn",))
LLAMA = Family("llama", True, ("q_proj", "v_proj"))
FAMILIES = (BERT, GPT2, LLAMA)
DECODERS = (GPT2, LLAMA)


def save_checkpoint(
    folder: Path,
    architecture: str,
    model_class: type | None = None,
    *,
    mask: bool = False,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A tiny random checkpoint with its tokenizer."""
    torch.manual_seed(seed)
    tiny_model(architecture, model_class, **config).save_pretrained(folder)
    tiny_tokenizer(mask=mask).save_pretrained(folder)
    return folder


def saved_and_loaded(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Any:
    model.save_pretrained(folder)
    return hla.load_pretrained(str(folder), **kwargs)
