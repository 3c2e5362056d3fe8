"""Kernelized attention over any feature map."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureMap
from ..ops import backends, parallel
from ..ops import kernelized as ops
from ..ops.calls import KernelizedCall
from ..ops.common import State, compute_dtype
from ..ops.prepared import prepare, run_prepared
from ..ops.terms import NO_TERMS
from ..registry import ATTENTIONS, FEATURE_MAPS, AttentionEntry
from .base import AttentionInputs, LinearAttention


class KernelizedAttention(LinearAttention):
    """`o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j φ(k_j) v_jᵀ`, `z = Σ_j φ(k_j)`; causal sums stop at i.

    Every registered feature map is available as the mechanism of the same name. Time O(L·m·(d + e)), memory O(L·e)
    for the output plus a bounded block of features; the state is `[G, m, e + 1]` float32 numbers a stream. With the
    slope m of ALiBi the sums decay by `exp(-m)` a token.
    """

    context_parallel = frozenset({True, False})
    dense_masks = True
    separable_queries = True

    def __init__(self, shape: AttentionShape, options: Any, feature_map: type[FeatureMap]) -> None:
        built = feature_map(shape, options)
        super().__init__(shape, built.options)
        self.feature_map: FeatureMap = built
        self.distribution = built.distribution and not built.signed
        self.served_terms = frozenset({"slope", "softcap"} if built.serves_caps else {"slope"})

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if (step := run_prepared(self, inputs)) is not None:
            return step
        self.begin_forward(inputs)
        if inputs.terms and inputs.terms.slope is None:  # a cap, which is the map's
            inputs = replace(inputs, terms=NO_TERMS)
        maps = self.feature_map.functions(inputs.scaling)
        size, signed = self.feature_map.num_features, self.feature_map.signed
        call = KernelizedCall(*inputs.finite_tensors(), *maps, size, signed=signed, **inputs.settings)
        if inputs.ranks is not None:
            if not inputs.causal:
                return ops.attend_to_state(call, parallel.total_state(call, inputs.ranks)), None
            call = call.replace(state=parallel.state_before(call, inputs.ranks))
        out, state_after = backends.attend(call)
        prepare(self, inputs, state_after)
        return out, state_after

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        dtype = compute_dtype(inputs.query)
        query = self.feature_map.query(inputs.query.to(dtype), inputs.scaling)
        key = inputs.terms.placed(self.feature_map.key(inputs.key.to(dtype), inputs.scaling))
        return ops.dense_weights(query, key, inputs.visible(), signed=self.feature_map.signed)


def _register(name: str, entry: AttentionEntry) -> None:
    """Make a feature map's kernelized attention available under the name of the map."""
    ATTENTIONS.add(name, replace(entry, factory=partial(KernelizedAttention, feature_map=entry.factory)))


FEATURE_MAPS.subscribe(_register)
