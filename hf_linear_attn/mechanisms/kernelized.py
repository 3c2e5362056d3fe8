"""Kernelized attention over any feature map."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureFunctions, FeatureMap
from ..ops import backends, parallel
from ..ops import kernelized as ops
from ..ops.calls import KernelizedCall
from ..ops.common import State, compute_dtype
from ..ops.prepared import prepare, run_prepared
from ..registry import ATTENTIONS, FEATURE_MAPS, AttentionEntry
from .base import AttentionInputs, LinearAttention


class KernelizedAttention(LinearAttention):
    """`o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j φ(k_j) v_jᵀ`, `z = Σ_j φ(k_j)`; causal sums stop at i.

    Every registered feature map is available as the mechanism of the same name. Time O(L·m·(d + e)), memory O(L·e)
    for the output plus a bounded block of features; the state is `[G, m, e + 1]` float32 numbers a stream, and for maps
    with positions the number of real tokens of each row, `count [B]`.
    """

    context_parallel = frozenset({True, False})
    dense_masks = True
    separable_queries = True

    def __init__(self, shape: AttentionShape, options: Any, feature_map: type[FeatureMap]) -> None:
        built = feature_map(shape, options)
        super().__init__(shape, built.options)
        self.feature_map: FeatureMap = built
        self.distribution = built.distribution and not built.signed
        self.served_terms = frozenset({"softcap"} if built.serves_caps else ())

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if (step := run_prepared(self, inputs)) is not None:
            return step
        self.begin_forward(inputs)
        if inputs.terms is not None:  # a cap, which is the map's
            inputs = replace(inputs, terms=None)
        maps, counts = self._maps(inputs)
        size, signed = self.feature_map.num_features, self.feature_map.signed
        call = KernelizedCall(*inputs.finite_tensors(), *maps, size, signed=signed, **inputs.settings)
        if inputs.ranks is not None:
            if not inputs.causal:
                return ops.attend_to_state(call, parallel.total_state(call, inputs.ranks)), None
            call = call.replace(state=parallel.state_before(call, inputs.ranks))
        out, state_after = backends.attend(call)
        if counts is not None and state_after is not None:  # positions change from token to token
            return out, {**state_after, "count": counts}
        prepare(self, inputs, state_after)
        return out, state_after

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        dtype = compute_dtype(inputs.query)
        (query_map, key_map, _), _ = self._maps(inputs)
        features = query_map(inputs.query.to(dtype), 0), key_map(inputs.key.to(dtype), 0)
        return ops.dense_weights(*features, inputs.visible(), signed=self.feature_map.signed)

    def _maps(self, inputs: AttentionInputs) -> tuple[FeatureFunctions, Tensor | None]:
        """Return the feature maps, and the number of real tokens of each row `[B]` if the maps use positions.

        With a full mask positions in the sequence count: they preserve all distances inside of a document.
        """
        feature_map, mask, state = self.feature_map, inputs.padding, inputs.state
        if not feature_map.uses_positions:
            return feature_map.functions(inputs.scaling), None
        batch, length = inputs.key.shape[0], inputs.key.shape[2]
        real = torch.ones(1, length, dtype=torch.long, device=inputs.key.device) if mask is None else mask.long()
        positions = real.cumsum(dim=1) - 1
        counts = real.expand(batch, -1).sum(dim=1)
        if inputs.ranks is not None:
            all_counts = parallel.counts_of_slices(mask, inputs.key, inputs.ranks)
            before = (all_counts * inputs.ranks.earlier(counts.device).unsqueeze(1)).sum(dim=0)
            positions = positions + before.unsqueeze(1)
            counts = counts + before
        if state is not None:
            positions = positions + state["count"].unsqueeze(1)
            counts = counts + state["count"]
        positions = positions.to(compute_dtype(inputs.query))
        return feature_map.functions(inputs.scaling, (inputs.of_queries(positions), positions)), counts


def _register(name: str, entry: AttentionEntry) -> None:
    """Make a feature map's kernelized attention available under the name of the map."""
    ATTENTIONS.add(name, replace(entry, factory=partial(KernelizedAttention, feature_map=entry.factory)))


FEATURE_MAPS.subscribe(_register)
