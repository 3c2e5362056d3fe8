"""Putting linear attention into a model and taking it out again: planned, built, and only then assigned."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..config import LayerConfig, LinearAttentionConfig
from ..feature_maps.base import AttentionShape
from ..mechanisms.base import LinearAttention
from ..mechanisms.head_mixture import HeadMixture, linear_mechanism
from ..mechanisms.softmax import EXACT
from ..registry import ATTENTIONS
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
    check_layer,
    check_shared_masks,
    coupled_configs,
    declared_direction,
    find_attention,
    installed_layers,
    longest_input,
    patched_layers,
    self_attention,
    warn_of_flags,
)
from .models import parents_of
from .packing import add_model_hooks, model_context, refuse_packing, remove_hooks


class PlannedLayer(NamedTuple):
    """A layer to patch, its place in the config, and its mechanism."""

    layer: AttentionLayer
    config: LayerConfig
    mechanism: LinearAttention


Plan = dict[int, PlannedLayer]
"""The layers to patch, by index among the self-attention layers of the whole model."""


def plan_layers(model: PreTrainedModel, config: LinearAttentionConfig, root: PreTrainedModel, added: int = 0) -> Plan:
    """Choose the layers to patch, check that they can be, and build their mechanisms; the model stays as it is.

    The config names layers of `model`, which may be a part of `root`; the plan is that of the root, in which the
    models around the part say more of its direction and masks. Its positions are to grow by `added` tokens.
    """
    longest = longest_input(model)
    numbers = {id(layer.module): (number, layer) for number, layer in enumerate(self_attention(root))}
    layers = self_attention(model)
    plan: Plan = {}
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
        ATTENTIONS.get(layer_config.attention).check_direction(layer.causal, f", and layer {index} ({layer.name}) is")
        check_layer(model, index, layer)
        shape = attention_shape(layer, number, longest and longest + added)
        plan[number] = PlannedLayer(layer, layer_config, _build(model, layer, layer_config, shape))
    if not plan:
        raise ValueError(
            f"Nothing to patch in {type(model).__name__} ({len(layers)} self-attention layers).{_left_exact(skipped)}"
        )
    share_parameters([planned.mechanism for planned in plan.values()])
    chosen = [planned.layer for planned in plan.values()]
    check_shared_masks(root, chosen)
    warn_of_flags(root, chosen)
    return plan


def _left_exact(skipped: dict[int, str]) -> str:
    """Say why no layer of a model was chosen; `skipped` has the spans of layers that see a part of the sequence."""
    if not skipped:
        return " Every layer is 'softmax'."
    spans = ", ".join(f"{index} ({span})" for index, span in skipped.items())
    reason = f" Left exact: {spans}: only layers of full attention are replaced."
    if "sliding" in spans:
        return (
            f"{reason} Sliding windows become full attention, which can be patched, if the config says so before the "
            "model is loaded (sliding_window=None, or 'full_attention' in layer_types)."
        )
    if "hybrid" in spans:
        return (
            f"{reason} The layers 'hybrid' keep a state of their mixer beside keys and values in one layer of a cache."
        )
    return reason


def _build(
    model: PreTrainedModel, layer: AttentionLayer, config: LayerConfig, shape: AttentionShape
) -> LinearAttention:
    """Build the mechanism of a layer, on its device and in its dtype."""
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
    mechanism.check_terms(layer.terms, f"Layer {shape.layer_index} ({layer.name}, {type(layer.module).__name__})")
    return mechanism.train(model.training)


def share_parameters(mechanisms: Sequence[LinearAttention]) -> None:
    """Give mechanisms that share parameters across layers those of the first layer of their kind."""
    owners: dict[tuple[type, str, int], LinearAttention] = {}
    for mechanism in map(linear_mechanism, mechanisms):
        key = (type(mechanism), repr(mechanism.options), mechanism.shape.num_key_value_heads)
        owner = owners.setdefault(key, mechanism)
        if owner is not mechanism:
            mechanism.share_with(owner)


def install_layers(roots: Sequence[PreTrainedModel], plan: Plan) -> None:
    """Put mechanisms, contexts and hooks into models that own their configs; the plan is that of the first of them.

    There are only assignments here: nothing can fail half-way.
    """
    config_ids = coupled_configs(roots, [planned.layer.config for planned in plan.values()])
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
            if not layer.cross and layer.adapter is not None:
                layer.adapter.install(layer.module, [*layer.parents.values()])
            causal = None if layer.cross else layer.causal
            declared = declared_direction(layer.module)
            context = LayerContext(layer.name, implementation, causal, declared, layer.masks_causal)
            setattr(layer.module, LAYER_CONTEXT, context)
            configs.append(layer.config)
            if not layer.cross:
                layer.module.register_forward_pre_hook(before_attention, with_kwargs=True)
    for config in configs:
        config._attn_implementation_internal = IMPLEMENTATION
    for layer, layer_config, mechanism in plan.values():
        layer.module.add_module(SUBMODULE, mechanism)
        patched = layer_context(layer.module)
        assert patched is not None
        # With all of its options written out.
        patched.layer_config = replace(layer_config, options={**layer_config.options, **asdict(mechanism.options)})


def remove_layers(model: PreTrainedModel, roots: Sequence[PreTrainedModel]) -> None:
    """Take out of a model, a part of these roots or one of them, what `install_layers` has put in."""
    for module in list(attention_modules(model)):
        delattr(module, SUBMODULE)
    patched: Iterator[Any] = chain.from_iterable(map(attention_modules, roots))
    still_patched = coupled_configs(roots, [module.config for module in patched])
    for root in roots:
        for module in root.modules():
            _remove_from_layer(module, root, still_patched)
        for module in root.modules():
            _remove_from_model(module)
        if not any(map(layer_context, root.modules())):
            remove_hooks(root, refuse_packing)


def _remove_from_layer(module: Any, root: PreTrainedModel, still_patched: Collection[int]) -> None:
    """Give an attention module its implementation again; exact ones stay while others of their config are patched."""
    context = layer_context(module)
    if context is None:
        return
    if mechanism_of(module) is None:
        context.layer_config = None
    if id(module.config) not in still_patched:
        module.config._attn_implementation_internal = context.exact_implementation
        remove_hooks(module, before_attention)
        if (adapter := adapter_of(module)) is not None:
            adapter.remove(module, parents_of(context.name, root))
        delattr(module, LAYER_CONTEXT)


def _remove_from_model(module: Any) -> None:
    """Give a model around attention modules its implementation again where none of them is patched any more."""
    around = model_context(module)
    if around is not None and not any(map(layer_context, module.modules())):
        if module.config._attn_implementation == IMPLEMENTATION:
            module.config._attn_implementation_internal = around.exact_implementation
        remove_hooks(module)


def is_untrained(model: PreTrainedModel) -> bool:
    """Return whether the mechanisms of all patched layers have the values that they were built with."""
    installed = installed_layers(model)
    for index, layer in patched_layers(model).items():
        mechanism = mechanism_of(layer.module)
        initial = _build(model, layer, installed[index], mechanism.shape).state_dict()
        present = mechanism.state_dict()
        names = present.keys() - set(mechanism.tied_parameters)
        if not all(torch.equal(present[name].cpu(), initial[name].cpu()) for name in names):
            return False
    return True
