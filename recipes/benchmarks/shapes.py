"""The models of the benchmark: shapes of known ones with random weights, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

Build = Callable[[int], PreTrainedModel]


@dataclass(frozen=True)
class Shape:
    """A model by name; `make` builds it for inputs of a longest length."""

    name: str
    make: Build
    facts: dict[str, Any] = field(default_factory=dict)

    def build(self, longest: int, seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(longest).eval()

    def describe(self) -> dict[str, Any]:
        return dict(self.facts)


@dataclass(frozen=True)
class Decoder(Shape):
    """contexts, batches: instead of the options; longest: the longest context; headline: a published comparison."""

    contexts: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    longest: int | None = None
    headline: bool = False


def bert_base(longest: int) -> PreTrainedModel:
    return BertModel(BertConfig(max_position_embeddings=max(512, longest)), add_pooling_layer=False)


def gpt2_small(longest: int) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_positions=max(1024, longest)))


def minilm(longest: int) -> PreTrainedModel:
    """The shape of all-MiniLM-L6-v2."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    return BertModel(BertConfig(**sizes, max_position_embeddings=max(512, longest)), add_pooling_layer=False)


def smollm2(longest: int) -> PreTrainedModel:
    """The shape of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=longest))


def small_decoder(layers: int, width: int, heads: int, vocabulary: int) -> Build:
    def make(longest: int) -> PreTrainedModel:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=longest,
            pad_token_id=None,
            bos_token_id=1,
            eos_token_id=2,
        )
        return LlamaForCausalLM(config)

    return make


MODELS = (Shape("BERT-base", bert_base), Shape("GPT-2 small, prefill", gpt2_small))

#: Tokens of the images whose generation is the setting of "up to 4,000 times as fast".
IMAGE_TOKENS = 3072

DECODERS = (
    Decoder("4 layers of 4×64", small_decoder(4, 256, 4, 4096)),
    Decoder("GPT-2 small", gpt2_small, batches=(1,), longest=8192),
    Decoder(
        "8 layers of 8×32",
        small_decoder(8, 256, 8, 256),
        contexts=(128, 768, 1536, IMAGE_TOKENS),
        batches=(16,),
        headline=True,
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


def is_decoder(source: str) -> bool:
    """Whether a checkpoint is a causal language model.

    Raises:
        OSError: it cannot be read.
        ValueError: it is patched already, or an encoder-decoder.
    """
    from hf_linear_attn.patching import CONFIG_FIELD

    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"The model {source!r} cannot be loaded ({reason}). Give a local folder or a repository on the Hub."
        ) from error
    if getattr(config, CONFIG_FIELD, None) is not None:
        raise ValueError(f"{source!r} is patched already. Give the model as it was before.")
    if config.is_encoder_decoder:
        raise ValueError(f"{source!r} is an encoder-decoder, which is not measured here. Give an encoder or a decoder.")
    names = config.architectures or []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def load(source: str) -> Build:
    from hf_linear_attn.study.loading import load_exact

    kind = "decoder" if is_decoder(source) else "encoder"
    return lambda longest: load_exact(source, kind, torch.device("cpu"))


def checkpoint_name(source: str) -> str:
    return Path(source).resolve().name if Path(source).is_dir() else source


def checkpoint_decoder(source: str) -> Decoder:
    return Decoder(checkpoint_name(source), load(source), {"source": source}, batches=(1,))


def checkpoint_model(source: str) -> Shape:
    return Shape(checkpoint_name(source), load(source), {"source": source})
