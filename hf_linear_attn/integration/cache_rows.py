"""Four verbs on the rows of a cache, so that a batch can change while it runs: filter, extend, extract, merge.

A batch is written from the right: shorter rows have padding before their tokens, and so have the caller's mask and
what grows in the cache. What does not grow is stacked. Linear layers, exact layers and layers of some exact heads may
stand in one cache, and that of a model without linear attention is served alike.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..ops.rows import drop_padding, join_rows
from .cache import LinearStateLayer, cache_layers


def filter_rows(cache: Cache, rows: Sequence[int], padding: int = 0) -> None:
    """Keep some rows of a cache, in this order, in place.

    Args:
        cache: A dynamic cache of a decoder that holds tokens.
        rows: The indices of the rows.
        padding: The number of first columns that are padding in all of these rows: they are dropped.

    Raises:
        ValueError: There are no rows, there is no such padding, or recorded tokens may be taken back.
        NotImplementedError: A layer of the cache is of a class that is not known here.
    """
    layers = _layers(cache)
    if not rows:
        raise ValueError("A cache needs at least one row. Start with a new cache instead.")
    _check_padding(layers, rows, padding)
    mask = _mask(layers)
    selected_mask = None if mask is None else mask[list(rows), padding:]
    for layer in layers:
        layer.batch_select_indices(torch.tensor(rows))
        _drop_columns(layer, padding)
        if isinstance(layer, LinearStateLayer):
            layer.seen = layer.tokens, selected_mask


def extract_row(cache: Cache, row: int, padding: int = 0) -> Cache:
    """Return a cache of its own for a row, without its first `padding` columns; see `filter_rows`."""
    extracted = _shallow_copy(cache)
    filter_rows(extracted, [row], padding)
    return extracted


def merge_rows(caches: Sequence[Cache]) -> Cache:
    """Return one cache with the rows of several, in order; the columns of all end at the same one, the last.

    The caches stay as they are. A mask for the merged cache has the padding `max(lengths) - length` before each row.

    Raises:
        ValueError: There are no caches, one of them is empty or of another model, or has recorded tokens.
        NotImplementedError: A layer of a cache is of a class that is not known here.
    """
    if not caches:
        raise ValueError("merge_rows needs at least one cache.")
    parts = [_layers(cache) for cache in caches]
    if len({tuple(map(type, layers)) for layers in parts}) > 1:
        raise ValueError("The caches have layers of different classes: merge caches of one model.")
    lengths = [layers[0].get_seq_length() for layers in parts]
    padding = [max(lengths) - length for length in lengths]
    merged = _shallow_copy(caches[0])
    mask = _merged_mask(parts, padding)
    for layer, same in zip(_layers(merged), zip(*parts, strict=True), strict=True):
        if isinstance(layer, LinearStateLayer):
            layer.state = join_rows([part.state for part in same], padding)
            layer.tokens = max(lengths)
            layer.seen = layer.tokens, mask
        else:
            layer.keys = _right_aligned([part.keys for part in same])
            layer.values = _right_aligned([part.values for part in same])
            if layer.is_sliding:
                layer.cumulative_length = max(lengths)
    return merged


def extend_rows(cache: Cache, other: Cache) -> None:
    """Add the rows of another cache behind those of a cache, in place; see `merge_rows`."""
    cache.layers = merge_rows([cache, other]).layers


def _layers(cache: Cache) -> list[Any]:
    """Return the layers of a cache that hold tokens; raise where one cannot be served."""
    layers: list[Any] = [layer for layer in cache_layers(cache) if layer.get_seq_length()]
    for layer in layers:
        if type(layer) not in (LinearStateLayer, DynamicLayer, DynamicSlidingWindowLayer):
            raise NotImplementedError(
                f"The rows of a cache with a {type(layer).__name__} cannot be changed one by one. Use the default "
                "(dynamic) cache of a decoder with attention in all of its layers."
            )
        if isinstance(layer, LinearStateLayer) and layer.has_record:
            raise ValueError("The cache has recorded tokens, which may be taken back: call cache.crop(0) first.")
        if isinstance(layer, LinearStateLayer) and layer.state is None:
            raise ValueError("The cache holds packed documents or bidirectional tokens, which leave no state.")
    if not layers:
        raise ValueError("The cache is empty: read a token of each row first.")
    return layers


def _shallow_copy(cache: Cache) -> Cache:
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def _mask(layers: list[Any]) -> Tensor | None:
    """Return the mask `[B, n]` of the tokens in the linear layers; None where all are tokens, or none is linear."""
    for layer in layers:
        if isinstance(layer, LinearStateLayer):
            count, mask = layer.seen
            if mask is None or count != layer.tokens:
                return None
            mask = mask.bool().expand(_row_count(layer), -1)
            return pad(mask, (0, count - mask.shape[1]), value=True)
    return None


def _row_count(layer: LinearStateLayer) -> int:
    assert layer.state is not None
    return max(tensor.shape[0] for tensor in layer.state.values())


def _merged_mask(parts: list[list[Any]], padding: list[int]) -> Tensor | None:
    masks = [_mask(layers) for layers in parts]
    linear = [next((layer for layer in layers if isinstance(layer, LinearStateLayer)), None) for layers in parts]
    if not any(padding) and all(mask is None for mask in masks):
        return None
    padded = []
    for layer, mask, count in zip(linear, masks, padding, strict=True):
        if layer is None:
            return None
        if mask is None:
            mask = torch.ones(_row_count(layer), layer.tokens, dtype=torch.bool, device=layer.device)
        padded.append(pad(mask, (count, 0), value=False))
    return torch.cat(padded)


def _check_padding(layers: list[Any], rows: Sequence[int], padding: int) -> None:
    length = layers[0].get_seq_length()
    mask = _mask(layers)
    is_linear = any(isinstance(layer, LinearStateLayer) for layer in layers)
    holds_tokens = is_linear and padding > 0 and (mask is None or bool(mask[list(rows), :padding].any()))
    if not 0 <= padding < length or holds_tokens:
        raise ValueError(f"padding={padding}: the first columns of a cache of {length} are no padding in all rows.")


def _drop_columns(layer: Any, padding: int) -> None:
    if isinstance(layer, LinearStateLayer):
        assert layer.state is not None
        layer.state = drop_padding(layer.state, padding)
        layer.tokens -= padding
        return
    remaining = layer.keys.shape[-2]
    if layer.is_sliding:
        layer.cumulative_length -= padding
        remaining = min(remaining, layer.cumulative_length)
    else:
        remaining -= padding
    if remaining < layer.keys.shape[-2]:
        layer.keys = layer.keys[:, :, -remaining:].clone(memory_format=torch.contiguous_format)
        layer.values = layer.values[:, :, -remaining:].clone(memory_format=torch.contiguous_format)


def _right_aligned(tensors: list[Tensor]) -> Tensor:
    """Join keys or values `[B, G, n, d]` of different lengths n; zeros come before those of the shorter ones."""
    length = max(tensor.shape[2] for tensor in tensors)
    return torch.cat([pad(tensor, (0, 0, length - tensor.shape[2], 0)) for tensor in tensors])
