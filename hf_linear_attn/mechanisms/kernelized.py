"""Kernelized attention over any feature map."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureMap
from ..ops import kernelized as ops
from ..ops.common import Features, State, compute_dtype
from .base import LinearAttention, visible


class KernelizedAttention(LinearAttention):
    """`o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j φ(k_j) v_jᵀ`, `z = Σ_j φ(k_j)`; causal sums stop at i.

    Every registered feature map is available as the mechanism of the same name. Time O(L·m·(d + e)), memory O(L·e)
    for the output plus a bounded block of features; the state is `[G, m, e + 1]` float32 numbers a stream.
    """

    dense_masks = True

    def __init__(self, shape: AttentionShape, options: Any, feature_map: type[FeatureMap]) -> None:
        super().__init__(shape, options)
        self.feature_map = feature_map(shape, options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        state: State | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        def query_features(x: Tensor, start: int) -> Features:
            return self.feature_map.query(x, scaling)

        def key_features(x: Tensor, start: int) -> Features:
            return self.feature_map.key(x, scaling)

        size = self.feature_map.num_features
        if not causal:
            if state is not None or keep_state:
                raise ValueError("Bidirectional attention has no state: a later token would change earlier outputs.")
            return (
                ops.bidirectional(query, key, value, query_features, key_features, num_features=size, mask=mask),
                None,
            )
        return ops.causal(query, key, value, query_features, key_features, num_features=size, mask=mask, state=state)

    def attention_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        dtype = compute_dtype(query)
        features = self.feature_map.query(query.to(dtype), scaling), self.feature_map.key(key.to(dtype), scaling)
        return ops.dense_weights(*features, visible(mask, query, key, causal))

    def state_bytes(self, length: int = 0) -> int:
        return 4 * self.shape.num_key_value_heads * self.feature_map.num_features * (self.shape.value_dim + 1)
