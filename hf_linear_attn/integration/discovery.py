"""Finding the self-attention layers of a model that goes through Transformers' attention interface.

Attributes of the modules and fields of their configs decide where they say enough; `source_guards` answers the rest.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import LayerConfig
from ..feature_maps.base import AttentionShape
from . import source_guards
from .adapters import adapter_of
from .adapters.base import Adapter
from .context import IMPLEMENTATION, layer_context, mechanism_of
from .models import base_class, parent_names

logger = logging.getLogger(__name__)

#: Names of modules that attend to another sequence.
CROSS_ATTENTION = re.compile(
    r"cross|encoder_attn|encdec|enc_dec|encoder_decoder|^x_attn$|attn_token_to_image", re.IGNORECASE
)

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
#: With latent attention (DeepSeek), `head_dim` is the rotated part of a head only.
HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")

#: Beginnings of the names of attention implementations whose server lays out the tokens of all requests as one row.
SERVERS = ("paged|", "vllm", "sglang", "tgi")

#: A module in a model's own stack of layers, by its name in that model: the masks are for these.
LAYER_IN_STACK = re.compile(r"\w+\.\d+\.")


class Direction(NamedTuple):
    """Whether the flag of a module says that it is causal, and whether its config allows it."""

    flag: bool
    allowed: bool


@dataclass(frozen=True)
class AttentionLayer:
    """One module that calls the attention interface, by its name in the model.

    Attributes:
        parents: The modules around it by their names, the nearest first; the last is the model itself.
        adapter: What its family needs beside the interface, or None.
        cross: Whether it attends to another sequence.
        span: "full", or what part of the sequence the layer attends to ("sliding window of 128", …).
        obstacle: Why this layer cannot be linear, or "".
        terms: The names of the terms that it adds to its logits (`ops.terms.Terms`).
        masks_causal: Whether its model makes causal masks for it, though it is bidirectional by its class or config: it
            goes by its mask in calls with padding, then, and by its flag in others, as exact attention does.
    """

    name: str
    module: nn.Module
    parents: Mapping[str, nn.Module]
    adapter: Adapter | None
    cross: bool
    span: str
    obstacle: str
    causal: bool
    masks_causal: bool = False
    terms: tuple[str, ...] = ()

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """The models around it by their names, the nearest first."""
        return {name: parent for name, parent in self.parents.items() if isinstance(parent, PreTrainedModel)}

    @property
    def around(self) -> Any:
        """The nearest model around it, whose config counts where the module has none itself."""
        return next(iter(self.models.values()), [self.module, *self.parents.values()][-1])

    @property
    def config(self) -> Any:
        """The config that the module reads its implementation from."""
        return config_of(self.module) or config_of(self.around)


def find_attention(model: nn.Module) -> list[AttentionLayer]:
    """Return every module of the model that calls the attention interface, in order."""
    modules = dict(model.named_modules())
    layers = []
    for name, module in modules.items():
        adapter = adapter_of(module)
        if source_guards.calls_interface(type(module)) or (adapter is not None and adapter.outside):
            parents = {parent: modules[parent] for parent in parent_names(name)}
            layers.append(_attention_layer(name, module, parents, adapter))
    return layers


def _attention_layer(
    name: str, module: nn.Module, parents: Mapping[str, nn.Module], adapter: Adapter | None
) -> AttentionLayer:
    causal = _is_causal(module, parents.values())
    if adapter is not None and adapter.causal is not None:
        causal = adapter.causal
    kinds = (type(module).__name__, *name.split(".")[-2:])  # BLIP-2 has `crossattention.attention`
    cross = getattr(module, "is_cross_attention", False) is True or any(map(CROSS_ATTENTION.search, kinds))
    layer = AttentionLayer(name, module, parents, adapter, cross, "full", "", causal)
    around = layer.around
    stated = cross or adapter is not None
    against = None if stated else _masks_against_flag(module, causal, around)
    if against is not None and not getattr(around, "_supports_sdpa", False):
        # Its only implementation, eager attention, reads masks only.
        causal = against
        against = None
    return replace(
        layer,
        span=_span(module, around, adapter),
        obstacle=_obstacle(module, adapter),
        causal=causal,
        masks_causal=bool(against),
        terms=() if cross else tuple(_terms(module, adapter)),
    )


def causal_flag(module: nn.Module, default: object) -> Any:
    """Return the flag `is_causal` of a module; the default where it has none."""
    return getattr(module, "is_causal", default)


def declared_direction(module: nn.Module) -> Direction:
    """Return what a module and its config say of its direction now: the one place that reads them."""
    flag = causal_flag(module, ...)
    flag = config_value(module, "is_decoder", False) if flag is ... else flag
    return Direction(bool(flag), config_value(module, "is_causal", True) is not False)


def _is_causal(module: nn.Module, parents: Iterable[nn.Module]) -> bool:
    """Return whether a module is causal: by its flag, else by the argument or mask that the models around it pass.

    A config that says `is_causal=False` decides alone, as it does where Transformers makes masks.
    """
    declared = declared_direction(module)
    if declared.flag or not declared.allowed:
        return declared.allowed
    classes = [type(parent) for parent in parents]
    if any(source_guards.passes_causal_argument(cls) for cls in classes):
        return True
    # Some decoders leave it to their mask. (Elsewhere the flag counts: embedding models take a causal model's code.)
    return any(source_guards.makes_causal_masks_only(cls) for cls in classes if cls.__name__.endswith("Decoder"))


def _masks_against_flag(module: nn.Module, causal: bool, model: nn.Module) -> bool | None:
    """Return the direction of the masks that a model makes for a module of the other one; None where they agree.

    A flag that was set on the module itself says what its user wants, and counts for masks too: only one that its class
    sets, or takes as an argument, is against its model.
    """
    kind: Any = type(module)
    source = source_guards.direction_source(kind)
    masks = source_guards.own_masks(type(model))
    by_config = "use_bidirectional_attention" in source and config_value(module, "use_bidirectional_attention")
    stated = "False" if by_config in (True, "all") else source
    if stated not in (str(causal), "is_causal") or masks != {"bidirectional" if causal else "causal"}:
        return None
    return None if config_value(module, "is_causal", True) is False else not causal


def check_layer(model: PreTrainedModel, index: int, layer: AttentionLayer) -> None:
    """Raise where a layer cannot be linear."""
    if layer.obstacle:
        raise NotImplementedError(
            f"Layer {index} ({layer.name}, {type(layer.module).__name__}) {layer.obstacle}. "
            f"{type(model).__name__} cannot be patched there; give the layer 'softmax'."
        )
    if layer.config._attn_implementation == IMPLEMENTATION and layer_context(layer.module) is None:
        raise ValueError(
            f"The attention implementation of this exact {type(model).__name__} was set to {IMPLEMENTATION!r}, which "
            "leaves nothing to run its exact attention with. Call model.set_attn_implementation('sdpa') first."
        )
    if (layer.config._attn_implementation or "").startswith(SERVERS):
        raise NotImplementedError(
            f"attn_implementation={layer.config._attn_implementation!r} belongs to a server that keeps keys and "
            "values itself, which linear attention does not have. Serve the model with Transformers' generate() "
            "(attn_implementation='sdpa')."
        )


def check_shared_masks(root: PreTrainedModel, chosen: Sequence[AttentionLayer]) -> None:
    """Raise where a part of a model that stays as it is reads masks made for the layers to patch."""
    configs = coupled_configs([root], [layer.config for layer in chosen])
    foreign = _foreign_attention(root, configs)
    if foreign:
        raise NotImplementedError(
            f"{type(root).__name__} cannot be patched: {foreign} computes its attention outside Transformers' "
            "attention interface, from masks that it shares with the layers to patch. It would need to call "
            f"{source_guards.INTERFACE}."
        )
    for layer in self_attention(root):
        # It would find another attention implementation than those that it makes a mask of the chosen keys for.
        if getattr(layer.module, "indexer", None) is not None and id(layer.config) in configs:
            raise NotImplementedError(
                f"{type(root).__name__} cannot be patched: in {layer.name} ({type(layer.module).__name__}) an indexer "
                "chooses the keys of each query, from masks that it shares with the layers to patch."
            )


def warn_of_flags(root: PreTrainedModel, chosen: Sequence[AttentionLayer]) -> None:
    """Warn where only the flags of a decoder's layers say that they are bidirectional: no checkpoint holds these."""
    for layer in chosen:
        declared = declared_direction(layer.module)
        only_flagged = declared == (False, True) and not layer.causal and layer.adapter is None
        if not only_flagged or not source_guards.makes_causal_masks_only(type(layer.around)):
            continue
        with torch.device("meta"):
            rebuilt = base_class(type(root))(copy.deepcopy(root.config))
        module = dict(rebuilt.named_modules()).get(layer.name)
        if module is None or declared_direction(module) != declared:
            logger.warning(
                f"{layer.name} is bidirectional by its flag is_causal=False, which is not saved: a model that is "
                "loaded again is causal. Set config.is_causal = False before patching, which is saved."
            )
            return


def _foreign_attention(model: nn.Module, configs: set[int]) -> str:
    """Return name and class of a module that computes its softmax by itself, from masks made for patched layers; or "".

    Those masks have another form than it expects. `configs` are the ids of the configs of the layers to patch.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if adapter_of(module) is not None or not source_guards.computes_softmax_from_mask(type(module)):
            continue
        makers = [parent for parent in parent_names(name) if source_guards.makes_masks(type(modules[parent]))]
        if not makers or not LAYER_IN_STACK.match(name.removeprefix(makers[0]).removeprefix(".")):
            continue
        if id(config_of(modules[makers[0]])) in configs:
            return f"{name} ({type(module).__name__})"
    return ""


def coupled_configs(models: Iterable[nn.Module], configs: Iterable[Any]) -> set[int]:
    """Return the ids of these configs, and of all others of their classes whose layers get masks from the same models.

    A model makes masks by its own config, and layers that were copied, or taken from another model, read other ones.
    """
    pairs = []
    for model in models:
        for layer in find_attention(model):
            around = layer.around.config
            if layer.config is not around and type(layer.config) is type(around):
                pairs.append({id(layer.config), id(around)})
    coupled = {id(config) for config in configs}
    while more := set().union(*(pair for pair in pairs if pair & coupled)) - coupled:
        coupled |= more
    return coupled


def self_attention(model: PreTrainedModel) -> list[AttentionLayer]:
    """Return the self-attention layers of a model, in order: a NotImplementedError where it has none to patch."""
    layers = [layer for layer in find_attention(model) if not layer.cross]
    if not layers:
        raise NotImplementedError(
            f"{type(model).__name__} (model type {model.config.model_type!r}) computes its attention outside "
            "Transformers' attention interface, so there is nothing to replace. It would need its attention to call "
            f"{source_guards.INTERFACE}. Models that do: BERT, RoBERTa, GPT-2, Llama, Mistral, Qwen, ViT, BART and "
            "about 340 more."
        )
    return layers


def patched_layers(model: nn.Module) -> dict[int, AttentionLayer]:
    """Return the layers that have a linear attention, by their index among the self-attention layers."""
    layers = [layer for layer in find_attention(model) if not layer.cross]
    patched = (layer_context(layer.module) is not None and mechanism_of(layer.module) is not None for layer in layers)
    return {index: layers[index] for index, is_linear in enumerate(patched) if is_linear}


def patched_modules(model: nn.Module) -> dict[int, Any]:
    """Return the modules of the patched layers by their index."""
    return {index: layer.module for index, layer in patched_layers(model).items()}


def installed_layers(model: nn.Module) -> dict[int, LayerConfig]:
    """Return the mechanism of each patched layer, with all options, by its index among the self-attention layers."""
    contexts = {index: layer_context(layer.module) for index, layer in patched_layers(model).items()}
    return {index: context.layer_config for index, context in contexts.items() if context and context.layer_config}


def attention_shape(layer: AttentionLayer, index: int, max_length: int | None) -> AttentionShape:
    """Read the heads and sizes of one layer, by its index in the model, from the module and its config."""
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
    kv_heads = heads // int(groups) if groups else _first(module, ("num_key_value_heads",)) or heads
    adapter = layer.adapter
    if adapter is not None:
        kv_heads = adapter.key_value_heads(module) or kv_heads
    value_dim = _first(module, ("v_head_dim",)) or head_dim
    sizes = heads, kv_heads, head_dim, value_dim
    shape = AttentionShape(*sizes, index, max_length, layer.causal, softcap=softcap_of(module))
    if adapter is None:
        return shape
    return replace(shape, bias_reach=adapter.bias_reach(module), endless_positions=adapter.endless_positions(module))


def predicts_next_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model is a causal language model, whose loss is that of the next tokens."""
    return model.can_generate() and all(layer.causal for layer in self_attention(model))


def longest_input(model: PreTrainedModel) -> int | None:
    """Return the longest input in tokens that the model's positions allow, where its config states one, else None."""
    config = model.config.get_text_config(decoder=False)
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    return _first_size(getattr(config, name, None) for name in names)


def config_of(module: Any) -> Any:
    """Return the config of a module; None where it has none."""
    return getattr(module, "config", None)


def layer_index(module: nn.Module) -> int | None:
    """Return the index of a module's layer, by which caches and configs know it; None where it has none."""
    index: Any = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def config_value(module: nn.Module, name: str, default: object = None) -> object:
    """Return a field of a module's config: that of its layer where the layers differ."""
    config = config_of(module)
    # At every access a config of Transformers looks for other names, and for values of each layer, which takes
    # microseconds. Every layer comes here for every token: where the config has neither, its fields are read directly.
    if config is not None and not torch.compiler.is_compiling():
        kind = type(config)
        fields = object.__getattribute__(config, "__dict__")
        if fields.get("_heterogeneity_spec") is None and name not in getattr(kind, "attribute_map", ()):
            if name in fields:
                return fields[name]
            if not hasattr(kind, name) and not hasattr(kind, "__getattr__"):
                return default
    if getattr(config, "is_heterogeneous", False) and (index := layer_index(module)) is not None:
        config = config.per_layer_config[index]
    return getattr(config, name, default)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these attributes that is a size: those of the module before those of its config."""
    of_module = (getattr(module, name, None) for name in names)
    return _first_size(of_module) or _first_size(config_value(module, name) for name in names)


def _first_size(values: Iterable[object]) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _span(module: nn.Module, model: nn.Module, adapter: Adapter | None) -> str:
    """Return "full", or what part of the sequence a module attends to, in the model that makes its masks."""
    if adapter is not None and (span := adapter.span(module)) != "full":
        return span
    types = config_value(module, "layer_types")
    index = layer_index(module)
    if isinstance(types, (list, tuple)) and index is not None and index < len(types):
        return "full" if types[index] == "full_attention" else f"layer type {types[index]!r}"
    window: Any = getattr(module, "sliding_window", ...)
    classes: list[Any] = [type(module), type(model)]
    if window is ... and any(map(source_guards.names_sliding_window, classes)):
        window = config_value(module, "sliding_window")
    if isinstance(window, int) and window > 0 and config_value(module, "use_sliding_window", True):
        return f"sliding window of {window}"
    return "full"


def softcap_of(module: nn.Module) -> float | None:
    """Return the bound of the logits of a module that caps them, else None."""
    if not source_guards.caps_logits(type(module)):
        return None
    cap: Any = getattr(module, "attn_logit_softcapping", None) or config_value(module, "attn_logit_softcapping")
    return cap or None


def _terms(module: nn.Module, adapter: Adapter | None) -> Iterator[str]:
    if adapter is not None:
        yield from adapter.terms_of(module)
    if getattr(module, "sinks", None) is not None and source_guards.passes_sinks(type(module)):
        yield "sink"
    if softcap_of(module):
        yield "softcap"


def _obstacle(module: nn.Module, adapter: Adapter | None) -> str:
    """Return why a module cannot be linear by its flags, which others of its class do not have; or ""."""
    if adapter is not None:
        return adapter.obstacle(module)
    stores = getattr(module, "store_full_length_kv", False) and config_value(module, "num_kv_shared_layers", 1)
    if stores or getattr(module, "is_kv_shared_layer", False):
        return "shares its keys and values with other layers, and a state does not keep them"
    return ""
