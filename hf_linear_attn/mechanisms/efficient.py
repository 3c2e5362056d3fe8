"""Efficient attention: softmax over the features of queries, softmax over the sequence of keys."""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from ..feature_maps.base import Options
from ..ops import efficient as ops
from ..ops.common import State, mask_tokens
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class EfficientOptions(Options):
    scale: Literal["raw", "split", "matched"] = option(
        "raw", "factor of q and k: 'raw' (the paper's): 1; 'split': √τ; 'matched': √(τd), see the class"
    )


@register_attention(
    "efficient",
    description="softmax of q over features, softmax of k over the sequence, nothing learned",
    paper="Shen et al. 2018, arXiv:1812.01243",
    options=EfficientOptions,
    learned=False,
    state="constant",
    cost="O(L·d²) time, O(d²) state",
    recommendation="baseline and training from scratch; the features pool the sequence globally",
)
class EfficientAttention(LinearAttention):
    """`o_i = softmax(s q_i)ᵀ (softmax_j(s k_j)ᵀ V)`, the second softmax over the sequence, one for each feature.

    Shen et al. 2018, arXiv:1812.01243. The weights `Σ_c softmax(s q_i)_c softmax_j(s k_jc)` are a distribution over the
    keys without a further normaliser. Causal: each feature's softmax runs over the keys j <= i, with its running
    maximum in the state, so that nothing overflows and no later key touches an earlier row.

    The scale s is 1 as in the paper (`"raw"`), √τ (`"split"`) or √(τd) (`"matched"`). To second order in s a weight,
    relative to the mean of its row, is `1 + (s²/d) Σ_c (q_c - q̄)(k_jc - k̄_c)` (q̄ over features, k̄ over tokens), and
    softmax attention grows by τ per unit of q·k: s² = τd. Large keys leave that regime, where the features see a few
    tokens only; on pretrained models `"raw"` had the smaller output error.
    """

    dense_masks = True

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        # A NaN in a padded query would meet a zero gradient, and spread through the state.
        inputs = replace(inputs, query=mask_tokens(inputs.query, inputs.mask))
        scale = self._scale(inputs.scaling)
        return ops.causal(inputs, scale) if inputs.causal else (ops.bidirectional(inputs, scale), None)

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        return ops.dense_weights(inputs, self._scale(inputs.scaling))

    def _scale(self, scaling: float) -> float:
        scales = {"raw": 1.0, "split": scaling**0.5, "matched": (scaling * self.shape.head_dim) ** 0.5}
        return scales[self.options.scale]
