"""The recurrent state as a layer of Transformers' own caches.

A `Cache` is a list of layers. `adopt` replaces the (still empty) layer of a patched attention module by a
`LinearStateLayer`, so that whatever cache `generate`, a plain forward or the user creates holds our state where the
layer is linear and keys and values where it is exact.

The attention module calls `cache.update(k, v)` and then the attention function. `update` hands the new keys and values
back unchanged and leaves the layer for `take_layer`, which the attention function calls next, in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from ..ops.common import InPlaceState, State, compute_dtype

Replay = Callable[[Tensor, Tensor, Tensor | None, State | None], State | None]
"""Advances a state over recorded keys, values and mask."""


class _Handoff(threading.local):
    layer: LinearStateLayer | None = None


_handoff = _Handoff()


class LinearStateLayer(CacheLayerMixin):
    """The recurrent state of one linear attention layer: its size does not depend on the number of tokens seen.

    Everything a cache layer owes is here: `reorder_cache` (beam search), `batch_repeat_interleave`,
    `batch_select_indices`, `reset`, offloading. A recurrent state cannot be cropped, unless recording was switched on
    (`activate_past_recording`, as assisted decoding does): then the state before the record and the recorded keys and
    values are kept until the next `crop`, which replays what remains.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.state: State | None = None
        self.tokens = 0
        self.record_past = False
        self._armed = False
        self._held = False
        self._before: tuple[State | None, int, bool] = (None, 0, False)
        self._record: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._replay: Replay | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)  # some models look at their size
        self.is_initialized = True

    def arm(self) -> None:
        """Called just before the attention module of a patched model runs. Without it, `update` refuses."""
        self._armed = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on; the attention function takes this layer and advances its state."""
        if not self._armed:
            raise RuntimeError(
                "This cache belongs to a model with linear attention, and was given to one without. "
                "Start with a new cache."
            )
        self._armed = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _handoff.layer = self
        return key_states, value_states

    def advance(
        self,
        state: State | None,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        replay: Replay | None,
        held: bool = False,
    ) -> None:
        """Store the state after `key.shape[2]` more tokens. replay is needed while the past is recorded.

        held: a graph may hold the state.
        """
        if self.record_past:
            if not self._record:
                self._before = (self.state, self.tokens, self._held)
            self._record.append((key, value, mask))
            self._replay = replay
        self.state, self._held = state, held
        self.tokens += key.shape[2]

    def pass_over(self, count: int) -> None:
        """Count the tokens of a bidirectional pass, which leaves no state.

        Raises:
            NotImplementedError: it is not the first pass.
        """
        if self.tokens:
            raise NotImplementedError(
                "Bidirectional attention has no state: a later token would change earlier outputs. "
                "Pass use_cache=False."
            )
        self.tokens = count

    def state_for(self, query: Tensor) -> State | None:
        """The state to go on from, on the query's device (it may have been offloaded) and in its precision.

        The step may write over it, unless the tokens that follow may be taken back or a graph may hold it.
        """
        if self.state is None:
            return None
        rows = {held.shape[0] for held in self.state.values()}
        if rows != {query.shape[0]}:
            raise ValueError(
                f"The cache holds the states of {max(rows)} rows, and the input has {query.shape[0]}. Give each row a "
                "state: cache.batch_repeat_interleave(n) repeats every one n times, "
                "cache.batch_select_indices(indices) takes some."
            )
        device, dtype = query.device, compute_dtype(query)
        other = torch.float32 if dtype == torch.float64 else torch.float64
        fits = not any(held.device != device or held.dtype is other for held in self.state.values())
        if not isinstance(self.state, InPlaceState) or not fits:
            self.state = {
                name: held.to(device, dtype if held.dtype is other else held.dtype) for name, held in self.state.items()
            }
            if not self._held and not any(held.requires_grad for held in self.state.values()):
                self.state = InPlaceState(self.state)
        return dict(self.state) if self.record_past else self.state

    def get_seq_length(self, *args: Any) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.tokens + length, 0

    def reset(self) -> None:
        self.state, self.tokens, self._held = None, 0, False
        self._forget()

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last `-tokens_to_remove` tokens (a number <= 0, as in Transformers).

        Raises:
            ValueError: a positive number, or more tokens than were recorded.
        """
        # Some versions of Transformers pass a tensor; kept as the number of tokens it would be added to in place.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number.")
        count = -tokens_to_remove
        if count == 0:
            return self._forget()
        recorded = sum(key.shape[2] for key, _, _ in self._record)
        if count > recorded or self._replay is None:
            raise ValueError(
                f"Cannot remove the last {count} tokens: a recurrent state does not keep its past ({recorded} tokens "
                "recorded). Call cache.activate_past_recording() before the forward passes that may be taken back."
            )
        state, tokens, held = self._before
        state = None if state is None else dict(state)  # as it is now: the replay writes over nothing
        keep = recorded - count
        # What was recorded without gradients is replayed without them, wherever `crop` is called.
        wanted = torch.is_grad_enabled() and any(
            key.requires_grad or value.requires_grad for key, value, _ in self._record
        )
        with torch.set_grad_enabled(wanted):
            for key, value, mask in self._record:
                size = min(keep, key.shape[2])
                if size:
                    part = None if mask is None else mask[:, :size]
                    state, held = self._replay(key[:, :, :size], value[:, :, :size], part, state), False
                keep, tokens = keep - size, tokens + size
        self.state, self.tokens, self._held = state, tokens, held
        self._forget()

    def _forget(self) -> None:
        """Drop what was recorded."""
        self._record, self._before, self._replay = [], (None, 0, False), None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        self._map_batch(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map_batch(lambda tensor: tensor.to(self.device, non_blocking=True))

    def nbytes(self) -> int:
        """Bytes that the state takes now."""
        return sum(tensor.nbytes for tensor in (self.state or {}).values())

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        def mapped(state: State | None) -> State | None:
            return None if state is None else {name: function(tensor) for name, tensor in state.items()}

        self.state = mapped(self.state)
        self._before = (mapped(self._before[0]), *self._before[1:])
        self._record = [
            (function(key), function(value), None if mask is None else function(mask))
            for key, value, mask in self._record
        ]


def take_layer() -> LinearStateLayer | None:
    """The layer whose `update` ran just before, if the attention module uses a cache."""
    layer = _handoff.layer
    if layer is not None:
        _handoff.layer = None
    return layer


def adopt(cache: Cache, layer_index: int) -> LinearStateLayer:
    """Make layer `layer_index` of a cache a `LinearStateLayer`.

    Raises:
        ValueError: the layer already holds keys and values of exact attention.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while len(cache.layers) <= layer_index:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    layer: Any = cache.layers[layer_index]
    if not isinstance(layer, LinearStateLayer):
        if layer.is_initialized and int(layer.get_seq_length()) > 0:
            raise ValueError(
                f"Layer {layer_index} of the given cache holds {int(layer.get_seq_length())} tokens of exact "
                "attention, which linear attention cannot continue. Start with a new cache."
            )
        record = getattr(layer, "record_past", False)
        layer = cache.layers[layer_index] = LinearStateLayer()
        layer.record_past = record
    return layer


def refuse_static(cache: Cache, layer_index: int) -> None:
    """An exact layer of a mixture reads lengths from its cache, which a preallocated one does not tell."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if layer_index < len(cache.layers) and isinstance(cache.layers[layer_index], StaticLayer):
        raise NotImplementedError(
            "A static cache cannot serve a mixture of exact and linear layers. Use the default (dynamic) cache: leave "
            "out cache_implementation."
        )
