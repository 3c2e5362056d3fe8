"""Putting linear attention into a model and taking it out again: planned, built, and only then assigned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from ..config import LayerConfig, LinearAttentionConfig
from ..mechanisms.base import LinearAttention
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.softmax import EXACT
from ..registry import ATTENTIONS, build_options
from .attention import before_attention
from .boundaries import add_model_hooks, remove_hooks
from .context import (
    CONFIG_FIELD,
    IMPLEMENTATION,
    IMPLEMENTATION_FIELD,
    LAYER_CONTEXT,
    SUBMODULE,
    LayerContext,
    layer_context,
)
from .discovery import AttentionLayer, attention_shape, find_attention, foreign_attention, self_attention
from .models import configs_of


@dataclass(frozen=True)
class PlannedLayer:
    """One layer to patch, by its index among the self-attention layers of the model."""

    index: int
    layer: AttentionLayer
    config: LayerConfig


#: A layer with the mechanism that was built for it.
BuiltLayer = tuple[PlannedLayer, LinearAttention]


def plan_layers(model: PreTrainedModel, config: LinearAttentionConfig) -> list[PlannedLayer]:
    """Choose the layers to patch and check that they can be; nothing is built or changed yet.

    Raises:
        ValueError: There is nothing to patch.
        NotImplementedError: The architecture, a layer, or its direction cannot be served.
    """
    layers = self_attention(model)
    planned, skipped = [], []
    for index, (layer, layer_config) in enumerate(
        zip(layers, config.resolve([layer.name for layer in layers]), strict=True)
    ):
        if layer_config is None or layer_config.attention == EXACT:
            continue
        if layer.span != "full":
            if layer_config is not config.default and config.layers:
                raise NotImplementedError(
                    f"Layer {index} ({layer.name}) attends to a part of the sequence only ({layer.span}); it is not "
                    "quadratic and stays exact. Leave it out."
                )
            skipped.append(f"{index} ({layer.span})")
            continue
        if layer.obstacle:
            raise NotImplementedError(
                f"Layer {index} ({layer.name}, {type(layer.module).__name__}) {layer.obstacle}. "
                f"{type(model).__name__} cannot be patched there; give the layer 'softmax'."
            )
        entry = ATTENTIONS.get(layer_config.attention)
        if not (entry.causal if layer.causal else entry.bidirectional):
            direction = "causal" if layer.causal else "bidirectional"
            alternative = f" Use {entry.alternative!r}." if entry.alternative else ""
            raise NotImplementedError(
                f"{entry.name!r} cannot be {direction}, and layer {index} ({layer.name}) is.{alternative}"
            )
        planned.append(PlannedLayer(index, layer, layer_config))
    if not planned:
        reason = " Every layer is 'softmax'."
        if skipped:
            reason = (
                f" Left exact: {', '.join(skipped)}: only layers of full attention are replaced. Sliding windows "
                "become full attention, which can be patched, if the config says so before the model is loaded "
                "(sliding_window=None, or 'full_attention' in layer_types)."
            )
        raise ValueError(f"Nothing to patch in {type(model).__name__} ({len(layers)} self-attention layers).{reason}")
    foreign = foreign_attention(model, {id(item.layer.config) for item in planned})
    if foreign:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be patched: {foreign} computes its attention outside Transformers' "
            "attention interface, from masks that it shares with the layers to patch. It would need to call "
            "ALL_ATTENTION_FUNCTIONS."
        )
    return planned


def build_mechanisms(
    model: PreTrainedModel, planned: Sequence[PlannedLayer], max_length: int | None
) -> list[BuiltLayer]:
    """Build the mechanism of every planned layer, on the device and in the dtype of the layer.

    Args:
        model: The model, which is not changed.
        planned: The layers to patch.
        max_length: The longest input of the model in tokens, or None.
    """
    built = [(item, _build(model, item, max_length)) for item in planned]
    # Mechanisms that share parameters across layers take those of the first layer of their kind.
    owners: dict[tuple[type, str, int], LinearAttention] = {}
    for _, outer in built:
        mechanism = outer.mechanism if isinstance(outer, HeadMixture) else outer
        key = (type(mechanism), repr(mechanism.options), mechanism.shape.num_key_value_heads)
        owner = owners.setdefault(key, mechanism)
        if owner is not mechanism:
            mechanism.share_with(owner)
    return built


def _build(model: PreTrainedModel, item: PlannedLayer, max_length: int | None) -> LinearAttention:
    entry = ATTENTIONS.get(item.config.attention)
    shape = attention_shape(item.layer, item.index, max_length)
    options = build_options(entry, dict(item.config.options))
    exact_heads = item.config.exact_heads
    mechanism: LinearAttention = (
        HeadMixture(shape, entry, options, exact_heads) if exact_heads else entry.build(shape, options)
    )
    weights = [tensor for tensor in item.layer.module.parameters() if tensor.is_floating_point()]
    # Quantised weights have one byte an element: the mechanism takes the dtype of the others.
    like = next((tensor for tensor in weights if tensor.dtype.itemsize > 1), next(model.parameters(), None))
    if like is not None and like.device.type != "meta":
        mechanism.to(device=like.device)
    if like is not None and like.dtype.itemsize > 1:
        mechanism.to(dtype=like.dtype)
    return mechanism.train(model.training)


def install_layers(model: PreTrainedModel, built: Sequence[BuiltLayer]) -> None:
    """Put mechanisms, contexts and hooks into a model that owns its configs.

    There are only assignments here: nothing can fail half-way.
    """
    mechanisms = {id(item.layer.module): mechanism for item, mechanism in built}
    config_ids = {id(item.layer.config) for item, _ in built}
    # Every module that reads one of these configs goes through our function from now on, exact ones too.
    layers = [layer for layer in find_attention(model) if id(layer.config) in config_ids]
    add_model_hooks(model, [layer for layer in layers if not layer.cross])
    for layer in layers:
        implementation = layer.config._attn_implementation or "eager"
        context = LayerContext(layer.name, implementation, causal=None if layer.cross else layer.causal)
        setattr(layer.module, LAYER_CONTEXT, context)
        if id(layer.module) in mechanisms:
            layer.module.add_module(SUBMODULE, mechanisms[id(layer.module)])
        if not layer.cross:
            layer.module.register_forward_pre_hook(before_attention, with_kwargs=True)
    for config in configs_of(model):
        if id(config) in config_ids:
            config._attn_implementation_internal = IMPLEMENTATION
    # The saved form names every patched layer by its index, with all of its options written out.
    saved = {
        str(item.index): LayerConfig(item.config.attention, asdict(made.options), item.config.exact_heads)
        for item, made in built
    }
    setattr(model.config, CONFIG_FIELD, LinearAttentionConfig(None, saved).to_dict())
    setattr(model.config, IMPLEMENTATION_FIELD, IMPLEMENTATION)


def remove_layers(model: PreTrainedModel) -> None:
    """Take out what `install_layers` has put in."""
    implementations: dict[int, str] = {}
    for module in model.modules():
        remove_hooks(module, before_attention)
        context = layer_context(module)
        if context is None:
            continue
        implementations[id(getattr(module, "config", None))] = context.exact_implementation
        if hasattr(module, SUBMODULE):
            delattr(module, SUBMODULE)
        delattr(module, LAYER_CONTEXT)
    any_implementation = next(iter(implementations.values()))
    for config in configs_of(model):
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation_internal = implementations.get(id(config), any_implementation)
    for name in (CONFIG_FIELD, IMPLEMENTATION_FIELD):
        if name in vars(model.config):
            delattr(model.config, name)
