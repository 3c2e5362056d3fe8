"""Decoding states in files: a prompt is read once, and other processes continue from it."""

import hashlib
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..config import CONFIG_FIELD
from ..utils.files import atomic_write
from .cache import LinearStateLayer, cache_layers, state_layer
from .context import attention_modules, is_learned, mechanism_of
from .model_class import config_fields
from .models import adapter_parts, base_class, check_patched
from .positions import rotary_scaling

FORMAT = "hf_linear_attn state 1"


def save_state(model: PreTrainedModel, cache: Cache, path: str | Path) -> None:
    """Write the cache of a patched decoder to a safetensors file, so that `load_state` can continue from it.

    The file holds the recurrent state of each linear layer, keys and values of each exact one, and a checksum of the
    model. It appears completely or not at all. What `activate_past_recording` has recorded is not saved.

    Args:
        model: The patched model that filled the cache.
        cache: The cache in the output of a forward pass, or of `generate(…, return_dict_in_generate=True)`.
        path: The file to write; a file that is there is replaced.

    Raises:
        TypeError: `model` is no `PreTrainedModel`.
        ValueError: The model is not patched, or the cache is empty or of another model.
        NotImplementedError: The cache is no dynamic one, or that of an encoder-decoder.
        OSError: The file cannot be written.
    """
    check_patched(model)
    description = _describe(model)
    linear = _linear_layers(model)
    tensors: dict[str, Tensor] = {}
    tokens = {}
    for index, layer in enumerate(cache_layers(cache)):
        if type(layer) not in (LinearStateLayer, DynamicLayer, DynamicSlidingWindowLayer):
            raise NotImplementedError(
                f"save_state: a cache with a {type(layer).__name__} cannot be saved. Use the default (dynamic) cache "
                "of a decoder."
            )
        if not layer.is_initialized or not layer.get_seq_length():
            continue
        is_linear = isinstance(layer, LinearStateLayer)
        if is_linear != (index in linear) or (is_linear and layer.state is None):
            raise ValueError(f"save_state: layer {index} of the cache was not filled by this {type(model).__name__}.")
        tokens[index] = int(layer.get_seq_length())
        if is_linear:
            nothing = torch.empty(0, dtype=layer.dtype)
            entries = {"keys": nothing, "values": nothing, **layer.state}
            if (mask := layer.seen[1]) is not None:  # that of all layers
                tensors["mask"] = mask.detach().bool().contiguous()
        else:
            entries = {"keys": layer.keys, "values": layer.values}
        for name, tensor in entries.items():
            tensors[f"{index}.{name}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not tokens:
        raise ValueError("save_state: the cache has no tokens. Pass the cache of a forward pass.")
    metadata = {"format": FORMAT, "model": json.dumps(description), "tokens": json.dumps(tokens)}
    atomic_write(Path(path), save(tensors, metadata))


def load_state(model: PreTrainedModel, path: str | Path) -> DynamicCache:
    """Read a cache that `save_state` has written: decoding goes on from it bit-equally, with exact heads to rounding.

    Args:
        model: The same patched model: class, linear attention, `rope_parameters` and weights are compared (weights that
            are offloaded or quantized are not).
        path: The file.

    Returns:
        The cache, for a forward pass of the tokens after it, or for `generate` with all tokens, the saved ones
        included.

    Raises:
        TypeError: `model` is no `PreTrainedModel`.
        ValueError: The model is not patched, is not the one that filled the cache, or the file holds no state.
        OSError: There is no such file.
    """
    check_patched(model)
    description = _describe(model)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is truncated or no safetensors file ({error}). Save the state again."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} has no decoding state of this version. Write it with save_state(model, …).")
    difference = _difference(json.loads(metadata["model"]), description)
    if difference:
        raise ValueError(
            f"{str(path)!r} was saved by another model than this {type(model).__name__} ({difference}). Load the model "
            "that read the prompt, or read the prompt again."
        )
    cache = DynamicCache(config=model.config)
    linear = _linear_layers(model)
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    for index, tokens in ((int(key), count) for key, count in json.loads(metadata["tokens"]).items()):
        prefix = f"{index}."
        entries = {name[len(prefix) :]: tensors[name].to(device) for name in tensors if name.startswith(prefix)}
        keys, values = entries.pop("keys"), entries.pop("values")
        layer: Any = state_layer(cache, index) if index in linear else cache.layers[index]
        if isinstance(layer, LinearStateLayer):
            layer.lazy_initialization(keys, values)
            layer.state = entries
            layer.tokens = tokens
            layer.seen = (tokens, tensors.get("mask"))
        else:
            layer.update(keys, values)
            if layer.is_sliding:
                layer.cumulative_length = tokens
    return cache


def fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of what the states of a model depend on, patched or not: where it differs, so may the states."""
    digest = hashlib.blake2b(digest_size=16)
    samples: dict[Any, list[Tensor]] = {}
    for name, tensor in _weights(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        samples.setdefault((tensor.dtype, tensor.device), []).append(_sample(tensor))
    for parts in samples.values():  # joined, as each call of torch takes microseconds
        digest.update(torch.cat(parts).cpu().view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(_identity(model), sort_keys=True).encode())
    return digest.hexdigest()


def _linear_layers(model: PreTrainedModel) -> set[int]:
    modules: Any = attention_modules(model)
    return {int(module.layer_idx) for module in modules if mechanism_of(module).shape.causal}


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies a model, with checksums of its weights."""
    return {**_identity(model), "weights": {name: _checksum(tensor) for name, tensor in _weights(model)}}


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies a model besides its weights: class, linear attention, rotary scaling and adapters."""
    return {
        "class": base_class(type(model)).__name__,
        "linear attention": config_fields(model)[CONFIG_FIELD],
        "rotary scaling": rotary_scaling(model.config.get_text_config(decoder=True)),
        "adapters": [
            [name, list(part.active_adapters), bool(part.disable_adapters), list(part.merged_adapters)]
            for name, part in adapter_parts(model)
        ],
    }


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the parameters and our buffers that are neither offloaded nor quantized."""
    buffers = ((name, tensor) for name, tensor in model.named_buffers() if is_learned(name))
    for name, tensor in chain(model.named_parameters(), buffers):
        if not tensor.is_meta and type(tensor.data) is Tensor:
            yield name, tensor.detach()


def _sample(tensor: Tensor) -> Tensor:
    """Return some 64 numbers of a tensor."""
    return tensor.flatten()[:: max(1, tensor.numel() // 64)]


def _checksum(tensor: Tensor) -> str:
    """Return a checksum of the shape, the dtype and some numbers of a tensor."""
    some = _sample(tensor).contiguous().cpu()
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(some.view(torch.uint8).numpy().tobytes()):08x}"


def _difference(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Return in words how the model of a saved state differs from another; "" where it does not."""
    for name in ("class", "linear attention", "rotary scaling", "adapters"):
        present = json.loads(json.dumps(current[name]))
        if saved.get(name, present) != present:
            return f"another {name}"
    differing = [name for name, value in current["weights"].items() if saved["weights"].get(name, value) != value]
    return f"{len(differing)} weights differ, {differing[0]!r} among them" if differing else ""
