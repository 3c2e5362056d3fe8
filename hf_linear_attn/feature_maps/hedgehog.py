"""Hedgehog: learned softmax features that mimic the spiky, monotone weights of softmax attention."""

from typing import Literal

from torch import nn

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options, constant_parameter
from .random_features import unit_rows

#: Rows of W for heads below 64, by default: twice the size of such heads is too few for pairs of sentences
#: (recipes/results/README.md#defaults).
SMALL_HEAD_ROWS = 128

#: The activations' names among the fused forms.
_FUSED = {"softmax": "softmax-pair", "exp": "exp-pair", "joint": "softmax-joint"}


class HedgehogOptions(Options):
    feature_dim: int | None = option(
        None, f"rows f of W per head, 2f features (None: the head size, or {SMALL_HEAD_ROWS} below 64)", least=1
    )
    activation: Literal["softmax", "exp", "joint"] = option(
        "softmax",
        "'softmax': [softmax(y), softmax(-y)]; 'exp' (the paper's): [exp(y), exp(-y)]; 'joint': softmax([2y, -2y])",
    )
    temperature: float | None = option(
        None, "factor s of the features' logits (None: √(τd), from the second-order match)", above=0
    )


@register_feature_map(
    "hedgehog",
    description="learned softmax features, one map per head for queries and one for keys",
    paper="Zhang et al. 2024, arXiv:2402.04347",
    options=HedgehogOptions,
    learned=True,
    recommendation="nothing exact: faster and half the state of window; near it in encoders after attention transfer",
)
class HedgehogFeatureMap(FeatureMap):
    """`y = s (Wᵀx + b)`, `φ(x) = [softmax(y), softmax(-y)]` over the features: m = 2f. Zhang et al., arXiv:2402.04347.

    `activation="exp"` is the paper's `[exp(y), exp(-y)]`; `"joint"` is one softmax over `[2y, -2y]`.
    W `[heads, d, f]` starts at the identity (continued by random orthonormal rows where f > d) and b `[heads, f]` at
    zero, separately for queries and keys.

    Why s = √(τd): summed over d features, `exp(y_q + y_k) + exp(-y_q - y_k)` is 2d (1 + s²‖q + k‖²/2d) + O(s⁴), so
    that relative to its mean a weight grows by s²/d per unit of q·k, with several such sets of rows as well. Softmax
    grows by τ. The two agree to first order for s² = τd, and the normalisation of each token's features removes the
    terms in ‖q‖ and ‖k‖, as it should.
    """

    serves_caps = True

    def __init__(self, shape: AttentionShape, options: HedgehogOptions) -> None:
        super().__init__(shape, options)
        rows = options.feature_dim or (shape.head_dim if shape.head_dim >= 64 else SMALL_HEAD_ROWS)
        self.num_features = 2 * rows
        start = unit_rows(rows, shape.head_dim, shape.layer_index).T
        self.query_weight = nn.Parameter(start.repeat(shape.num_heads, 1, 1))
        self.query_bias = constant_parameter(shape.num_heads, rows)
        self.key_weight = nn.Parameter(start.repeat(shape.num_key_value_heads, 1, 1))
        self.key_bias = constant_parameter(shape.num_key_value_heads, rows)

    def fused(self, scaling: float) -> FusedMaps | None:
        temperature = self.options.temperature or (scaling * self.shape.head_dim) ** 0.5
        activation = _FUSED[self.options.activation]
        query = FusedMap(activation, self.query_weight, self.query_bias, in_scale=temperature, bias_scale=temperature)
        key = FusedMap(activation, self.key_weight, self.key_bias, in_scale=temperature, bias_scale=temperature)
        return query, key
