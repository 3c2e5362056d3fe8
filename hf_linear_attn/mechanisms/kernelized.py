"""Kernelized attention over any feature map."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureMap
from ..ops import backends
from ..ops import kernelized as ops
from ..ops.common import FeatureFunction, Features, State, compute_dtype
from ..ops.fused import FusedMaps, KernelizedCall
from ..ops.window_step import is_decoding_step
from ..registry import ATTENTIONS, FEATURE_MAPS, AttentionEntry
from .base import AttentionInputs, LinearAttention, visible


class KernelizedAttention(LinearAttention):
    """`o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j φ(k_j) v_jᵀ`, `z = Σ_j φ(k_j)`; causal sums stop at i.

    Every registered feature map is available as the mechanism of the same name. Time O(L·m·(d + e)), memory O(L·e)
    for the output plus a bounded block of features; the state is `[G, m, e + 1]` float32 numbers a stream, and for maps
    with positions the number of real tokens of each row, `count [B]`.
    """

    dense_masks = True

    def __init__(self, shape: AttentionShape, options: Any, feature_map: type[FeatureMap]) -> None:
        options = feature_map.resolve_options(shape, options)
        super().__init__(shape, options)
        self.feature_map = feature_map(shape, options)
        self.distribution = self.feature_map.distribution and not self.feature_map.signed

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        query, key, value, mask, state = inputs.query, inputs.key, inputs.value, inputs.mask, inputs.state
        scaling, causal = inputs.scaling, inputs.causal
        if mask is not None and is_decoding_step(query, mask, state):
            mask = None
        feature_map = self.feature_map
        if state is None and inputs.first_call:
            feature_map.begin_forward()
        positions, counts = self._positions(key, mask, state) if feature_map.uses_positions else (None, None)
        inputs.refuse_bidirectional_state()
        call = KernelizedCall(
            query,
            key,
            value,
            *self._maps(scaling, positions, query.shape[2]),
            feature_map.num_features,
            causal,
            feature_map.signed,
            mask,
            state,
            inputs.return_state,
        )
        out, state_after = backends.attend(call)
        if counts is None or state_after is None:
            return out, state_after
        return out, {**state_after, "count": counts}

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        start: int | None = None,
    ) -> Tensor:
        dtype = compute_dtype(query)
        # With a mask [B, H, L, S] positions in the sequence count: they preserve all distances inside of a document.
        positions, _ = self._positions(key, None if mask is None or mask.dim() == 4 else mask, None)
        query_features, key_features, _ = self._maps(scaling, positions, query.shape[2], start)
        features = query_features(query.to(dtype), 0), key_features(key.to(dtype), 0)
        return ops.dense_weights(*features, visible(mask, query, key, causal), signed=self.feature_map.signed)

    def separable_queries(self, causal: bool) -> bool:
        return True

    def _positions(self, key: Tensor, mask: Tensor | None, state: State | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the positions `[B | 1, S]` of the keys among the real tokens of their rows, and their number `[B]`."""
        if not self.feature_map.uses_positions:
            return None, None
        batch, length = key.shape[0], key.shape[2]
        if mask is None:
            positions = torch.arange(length, device=key.device).unsqueeze(0)
            counts = torch.full((batch,), length, device=key.device)
        else:
            positions, counts = mask.long().cumsum(dim=1) - 1, mask.sum(dim=1)
        if state is not None and "count" in state:
            positions, counts = positions + state["count"].unsqueeze(1), counts + state["count"]
        self._check_length(length, counts, resumed=state is not None)
        return positions, counts

    def _check_length(self, length: int, counts: Tensor, resumed: bool) -> None:
        """Raise where a row has more real tokens than the map was built for.

        Reading the counts waits for the device, so it is left out where the padded length already fits.
        """
        limit = self.feature_map.max_length
        if limit is None or not counts.numel() or (length <= limit and not resumed):
            return
        longest = length if torch.compiler.is_compiling() else int(counts.max())
        if longest > limit:
            raise ValueError(
                f"The input has {longest} tokens, but this {type(self.feature_map).__name__} was built for "
                f"max_length={limit}. Shorten the input, or patch again with max_length={longest} or more."
            )

    def _maps(
        self, scaling: float, positions: Tensor | None, queries: int, start: int | None = None
    ) -> tuple[FeatureFunction, FeatureFunction, FusedMaps | None]:
        """Return the query map and the key map as functions of a block and its start, and as formulas or None.

        The queries are so many positions from `start`, or the last ones.
        """
        feature_map: Any = self.feature_map
        if positions is None:
            return self.feature_map.functions(scaling)
        first = positions.shape[1] - queries if start is None else start
        query_positions = positions[:, first : first + queries]

        def query_features(x: Tensor, start: int) -> Features:
            return feature_map.query(x, scaling, query_positions[:, start : start + x.shape[2]])

        def key_features(x: Tensor, start: int) -> Features:
            return feature_map.key(x, scaling, positions[:, start : start + x.shape[2]])

        return query_features, key_features, feature_map.fused(scaling, (query_positions, positions))

    def state_bytes(self, length: int = 0) -> int:
        return self.feature_map.state_bytes() + (8 if self.feature_map.uses_positions else 0)


def _register(name: str, entry: AttentionEntry) -> None:
    """Make a feature map's kernelized attention available under the name of the map."""
    ATTENTIONS.add(name, replace(entry, factory=partial(KernelizedAttention, feature_map=entry.factory)))


FEATURE_MAPS.subscribe(_register)
