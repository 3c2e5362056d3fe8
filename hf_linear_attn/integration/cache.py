"""The recurrent state as a layer of Transformers' own caches.

A `Cache` is a list of layers. `state_layer` replaces the (still empty) layer of a patched attention module by a
`LinearStateLayer`, so that whatever cache `generate`, a forward pass or the user creates contains our state where the
layer is linear and keys and values where it is exact.

The attention module calls `cache.update(k, v)` and then the attention function. `update` returns the new keys and
values unchanged and leaves the layer in `forward_context`, where the attention function takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..mechanisms.base import AttentionInputs
from ..ops.common import InPlaceState, State, compute_dtype, may_read
from .cache_argument import find_cache
from .context import forward_context

Replay = Callable[[AttentionInputs], State | None]
"""Computes the state after a call again."""

NO_KEYS = (
    "A layer of linear attention keeps a state in its cache, no keys and values of single tokens. What asks for them "
    "(a compression of the cache, such as kvpress) is for exact attention: call unpatch_model(model), or leave it out."
)
FILLED_CACHE = (
    "Packed documents (position_ids that begin again, or cu_seq_lens_q) cannot be combined with a cache that holds "
    "tokens: which document would be continued? Pass use_cache=False, or generate from padded rows."
)


class NoKeysError(NotImplementedError, AttributeError):
    """Keys or values were asked for where there is a state: something that the layer does not have."""


class NoKeys:
    """The keys, or the values, of a layer that has a state: none, and what needs some of them raises a NoKeysError.

    Models may ask how many there are: Mllama tells so whether a layer of cross-attention has seen an image.
    """

    def numel(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise NoKeysError(NO_KEYS)

    def __getitem__(self, index: Any) -> Any:
        raise NoKeysError(NO_KEYS)

    @classmethod
    def __torch_function__(cls, *args: Any) -> Any:
        raise NoKeysError(NO_KEYS)


class LinearStateLayer(CacheLayerMixin):
    """The recurrent state of one linear attention layer: its size does not depend on the number of tokens seen.

    It serves all that a cache layer must: `reorder_cache` (beam search), `batch_repeat_interleave`,
    `batch_select_indices`, `reset`, offloading. A recurrent state cannot be cropped, unless recording was switched on
    (`activate_past_recording`, as assisted decoding does): then the state before the record and the recorded keys and
    values are retained until the next `crop`, which replays what remains.

    Attributes:
        state: The state after `tokens` tokens, or None.
        tokens: The number of tokens seen, padding included.
        record_past: Whether recent keys and values are recorded.
    """

    #: Not in the instance's dictionary, all of which an exported graph takes as an input.
    __slots__ = ("seen",)

    #: How many tokens calls outside of compiled graphs have seen, and the mask `[B | 1, n]` of the last with one. All
    #: layers have the same. Tokens behind the mask are real.
    seen: tuple[int, Tensor | None]

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # exporters make layers without calling `__init__`
        layer = super().__new__(cls)
        layer.seen = (0, None)
        return layer

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.state: State | None = None
        #: An empty tensor `[B, 0, tokens + 1]`: exported graphs have inputs with sizes, and integers are constants in
        #: them. A size that varies is two or more there, and a prompt may have one token.
        self._counter = torch.empty(1, 0, 1)
        self.record_past = False
        self._expects_update = False
        self._packed = False
        #: Whether an autograd graph may refer to the state, which then must not be written over.
        self._in_graph = False
        #: The calls since recording began, each with the state before it.
        self._record: list[AttentionInputs] = []
        self._replay: Replay | None = None

    @property
    def keys(self) -> Any:
        """None: hooks that compress or move the keys and values of a cache get a NoKeysError from them."""
        return NoKeys()

    @keys.setter
    def keys(self, keys: Any) -> None:
        if keys is not None:  # by the constructor of all cache layers
            raise NoKeysError(NO_KEYS)

    values = keys

    @property
    def tokens(self) -> int:
        return self._counter.shape[2] - 1

    @tokens.setter
    def tokens(self, count: int) -> None:
        rows = self._counter.shape[0]
        if not isinstance(self.state, InPlaceState):  # whose rows are those of the token before
            rows = 1 if self.state is None else next(tensor.shape[0] for tensor in self.state.values())
        self._counter = self._counter.new_empty(rows, 0, count + 1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def expect_update(self, packed: bool = False) -> None:
        """Prepare for `update`; called just before the attention module of a patched model runs.

        Packed documents leave no state to continue from: a NotImplementedError if a call before or after them has one.
        """
        if (packed or self._packed) and self.tokens:
            raise NotImplementedError(FILLED_CACHE)
        self._packed = packed
        self._expects_update = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; the attention function takes this layer and advances its state."""
        if not self._expects_update and forward_context.runs:
            raise ValueError(
                "Cross-attention would write the keys of the encoder into the cache of self-attention. Pass the model "
                "EncoderDecoderCache(DynamicCache(), DynamicCache()), or no cache: it makes its own."
            )
        if not self._expects_update:
            raise RuntimeError(
                "This cache belongs to a model with linear attention, and was given to one without. "
                "Start with a new cache."
            )
        self._expects_update = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        forward_context.cache_layers.append(self)
        return key_states, value_states

    def advance(
        self, state: State | None, inputs: AttentionInputs, replay: Replay | None = None, in_graph: bool = False
    ) -> None:
        """Store the state after a call, which `replay` can compute again from inputs where these are recorded.

        `in_graph` says whether an autograd graph may refer to the state.
        """
        if self.record_past:  # Of the queries, which no state depends on, the sizes are enough.
            self._record.append(replace(inputs, query=inputs.query[:, :, :0].clone()))
            self._replay = replay
        self.state, self._in_graph = state, in_graph
        before = self.tokens
        self.tokens = after = before + inputs.key.shape[2]
        if not torch.compiler.is_compiling():
            count, mask = self.seen
            if count == before:
                self.seen = after, mask

    def check_mask(self, mask: Tensor) -> None:
        """Raise where a mask `[B | 1, S]` says something else of the tokens in the state than earlier calls did.

        Where one of these was recorded as a graph, that is not known.
        """
        if not may_read(mask):
            return
        count, previous = self.seen
        # The first layer of a forward pass compares for all others, which have the same tensors.
        is_new = not all(map(is_, forward_context.compared_masks, (previous, mask)))
        if self.tokens and count == self.tokens and is_new:
            before = mask[:, : self.tokens].bool()
            earlier = before.new_ones(1, 0) if previous is None else previous.to(before.device).bool()
            if bool((before != pad(earlier, (0, self.tokens - earlier.shape[1]), value=True)).any()):
                raise ValueError(
                    "The attention mask hides tokens of the cache that earlier calls did not hide, or the other way "
                    "round, and a recurrent state cannot leave them out or take them in. Pass one mask from the first "
                    "call on."
                )
            forward_context.compared_masks = (previous, mask)
        self.seen = count, mask

    @property
    def has_record(self) -> bool:
        """Whether tokens are recorded that `crop` could take back."""
        return bool(self._record)

    def skip_tokens(self, count: int) -> None:
        """Count the tokens of a bidirectional pass, which leaves no state and must be the first."""
        if self.tokens:
            raise NotImplementedError(
                "Bidirectional attention has no state: a later token would change earlier outputs. "
                "Pass use_cache=False."
            )
        self.tokens = count

    def state_for(self, query: Tensor) -> State | None:
        """Return the state to continue from, on the query's device (it may be offloaded) and in its precision.

        The next step may write over it, unless its tokens may be taken back or a graph may refer to it.
        """
        if self.state is None:
            return None
        inplace = self.state if isinstance(self.state, InPlaceState) and not self.record_past else None
        if inplace is not None and inplace.prepared is not None:
            if inplace.prepared.takes(query):
                return inplace
            inplace.prepared = None
        rows = next(tensor.shape[0] for tensor in self.state.values())
        if rows != query.shape[0]:
            raise ValueError(
                f"The cache has the states of {rows} rows, and the input has {query.shape[0]}. Give each row a "
                "state: cache.batch_repeat_interleave(n) repeats every one n times, "
                "cache.batch_select_indices(indices) takes some."
            )
        device, dtype = query.device, compute_dtype(query)
        other = torch.float32 if dtype == torch.float64 else torch.float64
        is_outside = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()

        def converted(tensor: Tensor) -> Tensor:
            # Outside of inference mode its tensors can be neither written to nor saved for gradients.
            copy = is_outside and tensor.is_inference()  # a graph would break at the question
            return tensor.to(device, dtype if tensor.dtype is other else tensor.dtype, copy=copy)

        state = {name: converted(tensor) for name, tensor in self.state.items()}
        if not isinstance(self.state, InPlaceState) or not all(map(is_, state.values(), self.state.values())):
            self.state = state
            if not self._in_graph and not any(tensor.requires_grad for tensor in self.state.values()):
                self.state = InPlaceState(self.state)
        return dict(self.state) if self.record_past else self.state

    def get_seq_length(self, *args: Any) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        length = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.tokens + length, 0

    def reset(self) -> None:
        self.state = None
        self.tokens = 0
        self._in_graph = False
        self._packed = False
        self.seen = (0, None)
        self._record, self._replay = [], None

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last `-tokens_to_remove` tokens (a number <= 0, as in Transformers) from the record."""
        # Some versions of Transformers pass a tensor, to which later tokens would be added in place.
        count = -int(tokens_to_remove)
        if count < 0:
            raise ValueError(f"crop({-count}): pass the number of tokens to remove as a negative number.")
        if not self.tokens:  # Drafts by an early exit leave the later layers of their cache empty.
            return
        recorded = sum(call.key.shape[2] for call in self._record)
        if count > recorded:
            raise ValueError(
                f"Cannot remove the last {count} tokens: a recurrent state does not keep its past ({recorded} tokens "
                "recorded). Call cache.activate_past_recording() after the first forward pass, and before those that "
                "may be taken back."
            )
        if count:
            first, remaining = self._record[0], recorded - count
            # Others may refer to this state: it is no longer written over.
            self.state, self._in_graph = first.state, True
            self.tokens -= count
            seen, mask = self.seen
            self.seen = min(seen, self.tokens), None if mask is None else mask[:, : self.tokens]
            if remaining and self._replay is not None:
                key = torch.cat([call.key for call in self._record], 2)[:, :, :remaining]
                value = torch.cat([call.value for call in self._record], 2)[:, :, :remaining]
                masks = [key.new_ones(call.key.shape[::2]) if call.mask is None else call.mask for call in self._record]
                query = key.new_zeros(len(key), first.query.shape[1], remaining, first.query.shape[3])
                call = replace(first, query=query, key=key, value=value, mask=torch.cat(masks, 1)[:, :remaining].bool())
                # What was recorded without gradients is replayed without them, wherever `crop` is called.
                has_gradient = key.requires_grad or value.requires_grad
                with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                    self.state = self._replay(call)
        self._record, self._replay = [], None

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
        """Return the bytes that the state takes now, with the memory that it has for more tokens."""
        memory = self.state.memory if isinstance(self.state, InPlaceState) else {}
        return sum(memory.get(name, tensor).nbytes for name, tensor in (self.state or {}).items())

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        def mapped(state: State | None) -> State | None:
            return None if state is None else {name: function(tensor) for name, tensor in state.items()}

        self.state = mapped(self.state)
        self.tokens = self.tokens  # with a row for each of the state
        count, mask = self.seen
        if mask is not None and len(mask) > 1:
            self.seen = count, function(mask)
        self._record = [
            replace(
                call,
                query=function(call.query),
                key=function(call.key),
                value=function(call.value),
                mask=None if call.mask is None else function(call.mask),
                state=mapped(call.state),
            )
            for call in self._record
        ]


def self_attention_cache(values: Iterable[Any]) -> Cache | None:
    """Return the first cache among the arguments of a call; of an encoder-decoder's, that of its self-attention."""
    cache = find_cache(values)
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_layers(cache: Cache) -> list[Any]:
    """Return the layers of a cache; that of an encoder-decoder, which has two caches instead, stands for itself."""
    return [cache] if isinstance(cache, EncoderDecoderCache) else cache.layers


def holds_state(values: Iterable[Any]) -> bool:
    """Return whether the first cache among some values has the state of a linear attention in one of its layers."""
    cache = self_attention_cache(values)
    return cache is not None and any(isinstance(layer, LinearStateLayer) for layer in cache.layers)


def state_layer(cache: Cache, layer_index: int) -> LinearStateLayer:
    """Return a layer of a cache, replaced by a `LinearStateLayer` where it is not one; it must be empty then."""
    while len(cache.layers) <= layer_index:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    layer: Any = cache.layers[layer_index]
    if not isinstance(layer, LinearStateLayer):
        if layer.is_initialized and int(layer.get_seq_length()) > 0:
            raise ValueError(
                f"Layer {layer_index} of this cache has {int(layer.get_seq_length())} tokens of exact "
                "attention, which linear attention cannot continue. Start with a new cache. (PEFT's prefix tuning "
                "makes one: use LoRA or prompt tuning.)"
            )
        record_past = getattr(layer, "record_past", False)
        layer = cache.layers[layer_index] = LinearStateLayer()
        layer.record_past = record_past
    return layer


def replace_static_layers(cache: Cache, config: Any) -> None:
    """Replace the preallocated layers of an empty cache, whose length only tensors know, by ones that grow.

    Those of linear layers become states later on; those of the exact layers of a mixture remain. Their sliding windows
    are those of the model's config: a static layer may be shorter than its window.
    """
    growing: list[Any] = []
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, StaticLayer):
            continue
        if layer.is_initialized and int(layer.get_seq_length()):
            raise ValueError(
                f"Layer {index} of this static cache has tokens of an exact model, which linear attention cannot "
                "continue. Start with a new cache."
            )
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise NotImplementedError(
                f"A {type(layer).__name__} (layer {index} of this static cache) cannot be part of a patched model's "
                "cache. Leave out cache_implementation."
            )
        growing = growing or DynamicCache(config=config).layers
        cache.layers[index] = growing[index]
