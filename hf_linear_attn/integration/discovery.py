"""Finding the self-attention layers of a model that goes through Transformers' attention interface."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
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
#: With latent attention (DeepSeek), `head_dim` is the rotated part of a head only.
HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")

#: In the `forward` of a model around causal layers whose own flag says otherwise (CLIP's text tower).
CAUSAL_CALL = re.compile(r"\bis_causal=True\b")
#: In the `forward` of a decoder that makes the mask of its self-attention layers.
SELF_MASK = re.compile(r"\b(?!encoder)\w+ = create_(causal|bidirectional)_mask\(")

#: A module in a model's own stack of layers, by its name in that model: the masks go there.
OWN_LAYER = re.compile(r"\w+\.\d+\.")
MASKS = re.compile(r"\bcreate_\w*mask\w*\(")

#: What stands in a module's `forward` if it cannot be linear, and why.
OBSTACLES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (
            r"position_bias|attention_mask=matrix_bd",
            "adds a relative position bias to its logits, which a product of feature maps cannot express",
        ),
        (
            r"attention_mask=attention_bias|prepare_dynamic_mask",
            "adds a bias to its logits, which a product of feature maps cannot express",
        ),
        (
            r"\bmerged_attention_mask\b",
            "attends to its own sequence and another one in a single softmax, which would need a state of both",
        ),
        (
            r"\.update\([^)]*layer_idx \+",
            "runs several times on one input with a cache layer for each, which would need several states",
        ),
        (
            r"(?s)past_key_values\.update.*attention_interface\(\n.*attention_interface\(\n",
            "computes attention twice on one cache layer, which would need two states",
        ),
    )
)


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
    #: Whether a token sees earlier ones only.
    causal: bool

    @property
    def config(self) -> Any:
        """The config that the module reads its implementation from."""
        return self.module.config


def forward_source(cls: type) -> str:
    """Source text of the class's `forward`, or "" where there is none to read."""
    return _forward_source(cls)


@functools.cache
def _forward_source(cls: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(cls.forward))
    except (AttributeError, OSError, TypeError):
        return ""


def find_attention(model: nn.Module) -> list[AttentionLayer]:
    """Every module of the model that calls the attention interface, in order."""
    found = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if INTERFACE in forward_source(type(module)):
            causal = _is_causal(module, [modules[outer] for outer in _outer(name)])
            cross = _is_cross(name, module)
            found.append(AttentionLayer(name, module, cross, _span(module), _obstacle(module), causal))
    return found


def _outer(name: str) -> Iterator[str]:
    """Names of the modules around a module, the nearest first; the model itself is the last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_causal(module: nn.Module, around: list[nn.Module]) -> bool:
    """As the attention interface reads it, or as the models around the module see to it by argument or mask."""
    if getattr(module, "is_causal", _config_value(module, "is_decoder", False)):
        return True
    sources = [forward_source(type(outer)) for outer in around]
    if any(CAUSAL_CALL.search(source) for source in sources):
        return True
    # Some decoders leave it to their mask. (Elsewhere the flag counts: embedding models take a causal model's code.)
    decoders = [forward_source(type(outer)) for outer in around if type(outer).__name__.endswith("Decoder")]
    return any(set(SELF_MASK.findall(source)) == {"causal"} for source in decoders)


def _has_softmax(cls: type) -> bool:
    return "ttention" in cls.__name__ and "softmax(" in inspect.getsource(cls)


def foreign_attention(model: nn.Module, configs: set[int]) -> str:
    """A module that computes softmax attention by itself from masks made for one of these configs (by id), or "".

    The masks of a patched model have another form than such code expects.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        source = forward_source(type(module))
        if INTERFACE in source or "mask" not in source or not _has_softmax(type(module)):
            continue
        makers = [outer for outer in _outer(name) if MASKS.search(forward_source(type(modules[outer])))]
        if not makers or not OWN_LAYER.match(name.removeprefix(makers[0]).removeprefix(".")):
            continue
        if id(getattr(modules[makers[0]], "config", None)) in configs:
            return f"{name} ({type(module).__name__})"
    return ""


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
            f"Looked for {', '.join(HEADS)} and {', '.join(HEAD_DIM)} on the module and its config. Give the layer "
            "'softmax'."
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
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False) and isinstance(index, int):
        config = config.per_layer_config[index]  # type: ignore[union-attr]
    return getattr(config, name, default)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of these that is a size: what the module itself holds counts before its config."""
    for read in (getattr, _config_value):
        for name in names:
            found = read(module, name, None)
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
    source = forward_source(type(module))
    if getattr(module, "has_relative_attention_bias", False):
        return OBSTACLES[0][1]
    for pattern, reason in OBSTACLES:
        if pattern.search(source):
            return reason
    if "softcap" in source and (
        getattr(module, "attn_logit_softcapping", None) or _config_value(module, "attn_logit_softcapping")
    ):
        return "caps its logits (softcap), which a product of feature maps cannot express"
    if "s_aux=" in source and getattr(module, "sinks", None) is not None:
        return "adds learned attention sinks to its softmax"
    return ""
