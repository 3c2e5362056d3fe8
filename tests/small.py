"""Mechanisms, feature maps and patched models with options so small that a few tokens exceed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape, FeatureMap
from hf_linear_attn.mechanisms import AttentionInputs, LinearAttention
from hf_linear_attn.mechanisms.window import is_unfitted
from hf_linear_attn.ops.int8 import to_dtype
from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS, build_options
from tests.inputs import token_ids
from tests.tiny_models import Family

#: Options that make a mechanism approximate on a handful of tokens, by option name: whatever has one gets it.
SMALL_OPTIONS: dict[str, Any] = {
    "num_features": 24,
    "window_size": 4,
    "sink_tokens": 2,
    "mix_init": 0.0,
    "block_size": 4,
    "slots_per_block": 2,
    "num_slots": 5,
    "num_packed": 5,
    "num_landmarks": 5,
}


def small_options(options: type) -> dict[str, Any]:
    return {field.name: SMALL_OPTIONS[field.name] for field in fields(options) if field.name in SMALL_OPTIONS}


def patched(name: str, family: Family, **options: Any) -> PreTrainedModel:
    """A tiny model of the family, patched with small options."""
    return patch_small(family.build(), name, **options)


def patch_small(model: PreTrainedModel, name: str, **options: Any) -> PreTrainedModel:
    chosen = {**small_options(ATTENTIONS.get(name).options), **options}
    return randomize_learned(hla.patch_model(model, name, **chosen))


def attentions(model: PreTrainedModel) -> list[str]:
    """The mechanism of each patched layer."""
    return [layer.attention for layer in hla.patch_report(model).layers]


def open_far_part(model: nn.Module) -> Any:
    """Let what is outside of the windows weigh as much as it would, in place: in decoders it begins with nothing."""
    for module in model.modules():
        if is_unfitted(module):  # type: ignore[arg-type]
            module.log_mix.data.zero_()  # type: ignore[operator,union-attr]
    return model


def randomize_learned(model: nn.Module, scale: float = 0.1) -> Any:
    """Move learned parameters off their start (equal heads, zero biases, a far part that is closed), in place."""
    open_far_part(model)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "linear_attention" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += (scale * noise * parameter.abs().max().clamp(min=0.1)).to(parameter.dtype)
    return model


def far_token_counts(model: PreTrainedModel, layers: int = 2, window: int = 4, sinks: int = 2) -> bool:
    """Return whether the last output of a decoder depends on a token that no chain of its windows reaches.

    A token reaches `window - 1` tokens further in each layer, and sinks are seen from everywhere.
    """
    length = sinks + 2 + layers * (window - 1) + 2
    ids = token_ids(1, length)
    changed = ids.clone()
    changed[:, sinks + 1] = changed[:, sinks + 1] % 50 + 3
    with torch.no_grad():
        before, after = (model(tokens, use_cache=False).logits[:, -1] for tokens in (ids, changed))
    return bool((before - after).abs().max() > 1e-4 * before.abs().max())


def on_the_grid(model: Any) -> Any:
    """Round the keys and values of a patched model's mechanisms so that a cache in int8 stores them without a loss."""

    def round_tokens(module: nn.Module, args: tuple[AttentionInputs]) -> tuple[AttentionInputs]:
        key, value = (to_dtype(to_dtype(x, torch.int8), x.dtype) for x in (args[0].key, args[0].value))
        return (replace(args[0], key=key, value=value),)

    for module in model.modules():
        if hasattr(module, "linear_attention"):
            module.linear_attention.register_forward_pre_hook(round_tokens)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """`torch.set_default_dtype` for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def mechanism(
    name: str, causal: bool, heads: int = 4, groups: int = 2, dim: int = 6, value_dim: int = 6, **options: Any
) -> Any:
    """A mechanism by itself, with small options, in float32; float64 by `.double()`."""
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(heads, groups, dim, value_dim, layer_index=1, max_length=2048, causal=causal)
    chosen = build_options(entry, {**small_options(entry.options), **options})
    module: LinearAttention = open_far_part(entry.factory(shape, chosen))
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return module


def feature_map(name: str, heads: int = 4, groups: int = 2, dim: int = 6, **options: Any) -> FeatureMap:
    entry = FEATURE_MAPS.get(name)
    chosen = build_options(entry, {**small_options(entry.options), **options})
    built = entry.factory(AttentionShape(heads, groups, dim, dim, layer_index=1, max_length=64, causal=True), chosen)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return built
