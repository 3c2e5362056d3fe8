"""Finding the self-attention layers of a model that goes through Transformers' attention interface."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..feature_maps.base import AttentionShape

#: What a module's `forward` calls when it goes through the attention interface.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

#: Names of modules that attend to another sequence.
CROSS_ATTENTION = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder", re.IGNORECASE)

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "qk_head_dim")


@dataclass(frozen=True)
class AttentionLayer:
    """One module that calls the attention interface."""

    name: str
    module: nn.Module
    cross: bool
    #: "full", or why the layer attends to a part of the sequence only ("sliding window of 128", …).
    span: str
    #: Why this layer cannot be linear, or "".
    obstacle: str

    @property
    def config(self) -> Any:
        """The config that the module reads its implementation from."""
        return self.module.config

    @property
    def causal(self) -> bool:
        """As the attention interface reads it."""
        return bool(getattr(self.module, "is_causal", _config_value(self.module, "is_decoder", False)))


@functools.cache
def forward_source(cls: Any) -> str:
    """Source text of the class's `forward`, or "" where there is none to read."""
    try:
        return inspect.getsource(inspect.unwrap(cls.forward))
    except (AttributeError, OSError, TypeError):
        return ""


def find_attention(model: nn.Module) -> list[AttentionLayer]:
    """Every module of the model that calls the attention interface, in order."""
    found = []
    for name, module in model.named_modules():
        if INTERFACE in forward_source(type(module)):  # type: ignore[arg-type]
            found.append(AttentionLayer(name, module, _is_cross(name, module), _span(module), _obstacle(module)))
    return found


def self_attention(model: PreTrainedModel) -> list[AttentionLayer]:
    """The self-attention layers of a model, in order.

    Raises:
        NotImplementedError: the architecture does not go through the attention interface.
    """
    layers = [layer for layer in find_attention(model) if not layer.cross]
    if not layers:
        raise NotImplementedError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) computes its attention outside "
            "Transformers' attention interface, so there is nothing to replace. It would need its attention to call "
            f"{INTERFACE}. Models that do: BERT, RoBERTa, GPT-2, Llama, Mistral, Qwen, ViT, BART and about 340 more."
        )
    return layers


def attention_shape(layer: AttentionLayer, index: int, max_length: int | None) -> AttentionShape:
    """Heads and sizes of one layer, read from the module and its config.

    Raises:
        NotImplementedError: they are not to be found.
    """
    module = layer.module
    heads = _first(module, HEADS)
    head_dim = _first(module, HEAD_DIM)
    if heads and not head_dim:
        width = _first(module, ("hidden_size", "embed_dim", "d_model"))
        head_dim = width // heads if width else None
    if not heads or not head_dim:
        raise NotImplementedError(
            f"The number of heads or their size is not to be found on {layer.name!r} ({type(module).__name__}). "
            f"Looked for {', '.join(HEADS)} and {', '.join(HEAD_DIM)} on the module and its config."
        )
    groups = getattr(module, "num_key_value_groups", None)
    kv_heads = heads // groups if groups else _first(module, ("num_key_value_heads",)) or heads
    value_dim = _first(module, ("v_head_dim",)) or head_dim
    return AttentionShape(heads, kv_heads, head_dim, value_dim, index, max_length, layer.causal)


def longest_input(model: PreTrainedModel) -> int | None:
    """The longest input that the model's positions allow, where its config states one."""
    config = model.config.get_text_config(decoder=False)
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _config_value(module: nn.Module, name: str, default: object = None) -> object:
    return getattr(getattr(module, "config", None), name, default)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for name in names:
        for found in (getattr(module, name, None), _config_value(module, name)):
            if isinstance(found, int) and found > 0:
                return found
    return None


def _is_cross(name: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False) is True:
        return True
    return bool(CROSS_ATTENTION.search(type(module).__name__) or CROSS_ATTENTION.search(name.rpartition(".")[2]))


def _span(module: nn.Module) -> str:
    types, index = _config_value(module, "layer_types"), getattr(module, "layer_idx", None)
    if isinstance(types, (list, tuple)) and isinstance(index, int) and index < len(types):
        return "full" if types[index] == "full_attention" else f"layer type {types[index]!r}"
    window = getattr(module, "sliding_window", _config_value(module, "sliding_window"))
    if isinstance(window, int) and window > 0 and _config_value(module, "use_sliding_window", True):
        return f"sliding window of {window}"
    return "full"


def _obstacle(module: nn.Module) -> str:
    source = forward_source(type(module))  # type: ignore[arg-type]
    if "position_bias" in source or getattr(module, "has_relative_attention_bias", False):
        return "adds a relative position bias to its logits, which a product of feature maps cannot express"
    if "softcap" in source and (
        getattr(module, "attn_logit_softcapping", None) or _config_value(module, "attn_logit_softcapping")
    ):
        return "caps its logits (softcap), which a product of feature maps cannot express"
    if "s_aux=" in source and getattr(module, "sinks", None) is not None:
        return "adds learned attention sinks to its softmax"
    return ""
