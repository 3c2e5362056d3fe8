"""Putting linear attention into a model and taking it out again: planned, built, and only then assigned."""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import LayerConfig, LinearAttentionConfig
from ..feature_maps.base import AttentionShape
from ..mechanisms.base import LinearAttention
from ..mechanisms.head_mixture import HeadMixture, linear_mechanism
from ..mechanisms.softmax import EXACT
from ..registry import ATTENTIONS
from . import source_guards
from .adapters import adapter_of
from .attention import before_attention
from .context import (
    IMPLEMENTATION,
    LAYER_CONTEXT,
    SUBMODULE,
    LayerContext,
    attention_modules,
    layer_context,
    mechanism_of,
)
from .discovery import (
    AttentionLayer,
    attention_shape,
    coupled_configs,
    declared_direction,
    find_attention,
    foreign_attention,
    self_attention,
)
from .models import base_class, model_around, parents_of
from .packing import add_model_hooks, model_context, refuse_packing, remove_hooks

logger = logging.getLogger(__name__)

#: Beginnings of the names of attention implementations whose server lays out the tokens of all requests as one row.
SERVERS = ("paged|", "vllm", "sglang", "tgi")

Plan = dict[int, tuple[AttentionLayer, LayerConfig]]
"""The layers to patch and their mechanisms, by index among the self-attention layers of the whole model."""


def choose_layers(model: PreTrainedModel, config: LinearAttentionConfig, root: PreTrainedModel) -> Plan:
    """Choose the layers to patch and check that they can be; nothing is built or changed yet.

    The config names layers of `model`, which may be a part of `root`; the plan is that of the root, in which the
    models around the part say more of its direction and masks.
    """
    numbers = {id(layer.module): (number, layer) for number, layer in enumerate(self_attention(root))}
    layers = self_attention(model)
    planned: Plan = {}
    skipped: dict[int, str] = {}
    for index, (part, layer_config) in enumerate(
        zip(layers, config.resolve([layer.name for layer in layers]), strict=True)
    ):
        number, layer = numbers[id(part.module)]
        if layer_config is None:
            continue
        if layer_config.attention == EXACT and not (layer.causal and layer_config.stores_int8):
            continue
        if layer.span != "full":
            if layer_config is not config.default and config.layers:
                raise NotImplementedError(
                    f"Layer {index} ({layer.name}) attends to a part of the sequence only ({layer.span}); it is not "
                    "quadratic and stays exact. Leave it out."
                )
            skipped[index] = layer.span
            continue
        _check_layer(model, index, layer, layer_config)
        planned[number] = layer, layer_config
    if not planned:
        reason = " Every layer is 'softmax'."
        if skipped:
            spans = ", ".join(f"{index} ({span})" for index, span in skipped.items())
            reason = f" Left exact: {spans}: only layers of full attention are replaced."
        if any("sliding" in span for span in skipped.values()):
            reason += (
                " Sliding windows become full attention, which can be patched, if the config says so before the model "
                "is loaded (sliding_window=None, or 'full_attention' in layer_types)."
            )
        elif any("hybrid" in span for span in skipped.values()):
            reason += " The layers 'hybrid' keep a state of their mixer beside keys and values in one layer of a cache."
        raise ValueError(f"Nothing to patch in {type(model).__name__} ({len(layers)} self-attention layers).{reason}")
    _check_shared_masks(root, [layer for _, layer in numbers.values()], planned)
    _warn_of_flags(root, [layer for layer, _ in planned.values()])
    return planned


def _check_layer(model: PreTrainedModel, index: int, layer: AttentionLayer, layer_config: LayerConfig) -> None:
    """Raise where a layer cannot be linear, or not by this mechanism."""
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
    entry = ATTENTIONS.get(layer_config.attention)
    entry.check_direction(layer.causal, f", and layer {index} ({layer.name}) is")


def _check_shared_masks(root: PreTrainedModel, layers: Sequence[AttentionLayer], planned: Plan) -> None:
    """Raise where a part of the model that stays as it is reads masks made for the layers to patch."""
    configs = coupled_configs([root], [layer.config for layer, _ in planned.values()])
    foreign = foreign_attention(root, configs)
    if foreign:
        raise NotImplementedError(
            f"{type(root).__name__} cannot be patched: {foreign} computes its attention outside Transformers' "
            "attention interface, from masks that it shares with the layers to patch. It would need to call "
            "ALL_ATTENTION_FUNCTIONS."
        )
    for layer in layers:
        # It would find another attention implementation than those that it makes a mask of the chosen keys for.
        if getattr(layer.module, "indexer", None) is not None and id(layer.config) in configs:
            raise NotImplementedError(
                f"{type(root).__name__} cannot be patched: in {layer.name} ({type(layer.module).__name__}) an indexer "
                "chooses the keys of each query, from masks that it shares with the layers to patch."
            )


def _warn_of_flags(root: PreTrainedModel, layers: Sequence[AttentionLayer]) -> None:
    """Warn where only the flags of a decoder's layers say that they are bidirectional: no checkpoint holds these."""
    modules = dict(root.named_modules())
    for layer in layers:
        around = modules[model_around(layer.name, modules)]
        flagged = declared_direction(layer.module) == (False, True) and not layer.causal
        stated = adapter_of(layer.module) is not None
        causal_masks = flagged and not stated and source_guards.makes_causal_masks_only(type(around))
        if causal_masks and _loses_flag(root, layer):
            logger.warning(
                f"{layer.name} is bidirectional by its flag is_causal=False, which is not saved: a model that is "
                "loaded again is causal. Set config.is_causal = False before patching, which is saved."
            )
            return


def _loses_flag(root: PreTrainedModel, layer: AttentionLayer) -> bool:
    """Return whether a model that is built from the config of this one has another flag in this layer."""
    with torch.device("meta"):
        rebuilt = base_class(type(root))(copy.deepcopy(root.config))
    module = dict(rebuilt.named_modules()).get(layer.name)
    return module is None or declared_direction(module) != declared_direction(layer.module)


def build_mechanisms(model: PreTrainedModel, planned: Plan, max_length: int | None) -> dict[int, LinearAttention]:
    """Build the mechanism of every planned layer, on its device and in its dtype; the model stays as it is."""
    built = {}
    for index, (layer, config) in planned.items():
        built[index] = _build(model, layer, config, attention_shape(layer, index, max_length))
        built[index].check_terms(layer.terms, f"Layer {index} ({layer.name}, {type(layer.module).__name__})")
    # Mechanisms that share parameters across layers take those of the first layer of their kind.
    owners: dict[tuple[type, str, int], LinearAttention] = {}
    for outer in built.values():
        mechanism = linear_mechanism(outer)
        key = (type(mechanism), repr(mechanism.options), mechanism.shape.num_key_value_heads)
        owner = owners.setdefault(key, mechanism)
        if owner is not mechanism:
            mechanism.share_with(owner)
    return built


def _build(
    model: PreTrainedModel, layer: AttentionLayer, config: LayerConfig, shape: AttentionShape
) -> LinearAttention:
    entry = ATTENTIONS.get(config.attention)
    options, cache_dtype = config.build_options()
    if config.exact_heads:
        mechanism: LinearAttention = HeadMixture(shape, entry, options, config.exact_heads, cache_dtype)
    else:
        mechanism = entry.factory(shape, options)
    weights = [tensor for tensor in layer.module.parameters() if tensor.is_floating_point()]
    # Quantised weights have one byte an element: the mechanism takes the dtype of the others.
    like = next((tensor for tensor in weights if tensor.dtype.itemsize > 1), next(model.parameters()))
    device = None if like.device.type == "meta" else like.device
    mechanism.to(device=device, dtype=like.dtype if like.dtype.itemsize > 1 else None)
    return mechanism.train(model.training)


def install_layers(roots: Sequence[PreTrainedModel], planned: Plan, mechanisms: dict[int, LinearAttention]) -> None:
    """Put mechanisms, contexts and hooks into models that own their configs; the plan is that of the first of them.

    There are only assignments here: nothing can fail half-way.
    """
    config_ids = coupled_configs(roots, [layer.config for layer, _ in planned.values()])
    configs = []
    for root in roots:
        # Every module that reads one of these configs goes through our function from now on, exact ones too.
        layers = [layer for layer in find_attention(root) if id(layer.config) in config_ids]
        models = add_model_hooks(root, [layer for layer in layers if not layer.cross])
        configs += [model.config for model in models if id(model.config) in config_ids]
        for layer in layers:
            if layer_context(layer.module) is not None:  # Another part of the model is patched.
                continue
            implementation = layer.config._attn_implementation or "eager"
            if not layer.cross and (adapter := adapter_of(layer.module)) is not None:
                adapter.install(layer.module, parents_of(layer.name, root))
            causal = None if layer.cross else layer.causal
            declared = declared_direction(layer.module)
            context = LayerContext(layer.name, implementation, causal, declared, layer.masks_causal)
            setattr(layer.module, LAYER_CONTEXT, context)
            configs.append(layer.config)
            if not layer.cross:
                layer.module.register_forward_pre_hook(before_attention, with_kwargs=True)
    for config in configs:
        config._attn_implementation_internal = IMPLEMENTATION
    for index, (layer, layer_config) in planned.items():
        layer.module.add_module(SUBMODULE, mechanisms[index])
        patched = layer_context(layer.module)
        assert patched is not None
        # With all of its options written out.
        options = {**layer_config.options, **asdict(mechanisms[index].options)}
        patched.layer_config = replace(layer_config, options=options)


def remove_layers(model: PreTrainedModel, roots: Sequence[PreTrainedModel]) -> None:
    """Take out of a model, a part of these roots or one of them, what `install_layers` has put in."""
    for module in list(attention_modules(model)):
        delattr(module, SUBMODULE)
    patched: Iterator[Any] = chain.from_iterable(map(attention_modules, roots))
    still_patched = coupled_configs(roots, [module.config for module in patched])
    for root in roots:
        for module in root.modules():
            context = layer_context(module)
            if context is None:
                continue
            if mechanism_of(module) is None:
                context.layer_config = None
            # Exact layers stay what they are while others that read the same config are patched.
            if id(module.config) not in still_patched:
                module.config._attn_implementation_internal = context.exact_implementation  # type: ignore[union-attr]
                remove_hooks(module, before_attention)
                if (adapter := adapter_of(module)) is not None:
                    adapter.remove(module, parents_of(context.name, root))
                delattr(module, LAYER_CONTEXT)
        for module in root.modules():
            around = model_context(module)
            if around is not None and not any(map(layer_context, module.modules())):
                config: Any = module.config
                if config._attn_implementation == IMPLEMENTATION:
                    config._attn_implementation_internal = around.exact_implementation
                remove_hooks(module)
        if not any(map(layer_context, root.modules())):
            remove_hooks(root, refuse_packing)


def installed_layers(model: nn.Module) -> dict[int, LayerConfig]:
    """Return the mechanism of each patched layer, with all options, by its index among the self-attention layers."""
    installed = {}
    for index, layer in enumerate(layer for layer in find_attention(model) if not layer.cross):
        context = layer_context(layer.module)
        if context is not None and context.layer_config is not None:
            installed[index] = context.layer_config
    return installed


def is_untrained(model: PreTrainedModel) -> bool:
    """Return whether the mechanisms of all patched layers have the values that they were built with."""
    layers = self_attention(model)
    for index, config in installed_layers(model).items():
        mechanism = mechanism_of(layers[index].module)
        initial = _build(model, layers[index], config, mechanism.shape).state_dict()
        present = mechanism.state_dict()
        names = present.keys() - set(mechanism.tied_parameters)
        if not all(torch.equal(present[name].cpu(), initial[name].cpu()) for name in names):
            return False
    return True
