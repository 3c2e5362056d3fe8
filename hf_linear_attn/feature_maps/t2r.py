"""T2R: one learned layer with relu as the feature map."""

import torch
from torch import nn

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options, constant_parameter, epsilon_option
from .random_features import unit_rows


class T2ROptions(Options):
    num_features: int | None = option(None, "number of features m per head (None: four times the head size)", least=1)
    bias_init: float = option(-1.0, "start of b; below 0 only keys well aligned with a feature count: spikier weights")
    epsilon: float = epsilon_option(0.01)


@register_feature_map(
    "t2r",
    description="learned relu(Wx + b), one map per head for queries and one for keys",
    paper="Kasai et al. 2021 (T2R), arXiv:2103.13076",
    options=T2ROptions,
    learned=True,
    recommendation="conversions followed by fine-tuning; no exponentials; untrained it is blunter than hedgehog",
)
class T2RFeatureMap(FeatureMap):
    """`φ(x) = relu(s Wᵀx + b) + ε`, W `[heads, d, m]`, b `[heads, m]`. Kasai et al. 2021, arXiv:2103.13076.

    `s = √(τd)` is a constant, so that W starts at unit rows whatever the model's scale. W starts at `[R, -R]`, R the
    identity continued by random orthonormal rows, the same for queries and keys. With pairs ±r no token loses all its
    features, and with b = 0 the map is the even arc-cosine kernel of orthogonal directions: a weight grows with q·k.
    b < 0 cuts off the features that hardly fire, which sharpens the weights. The paper has ε = 0; a query whose
    features meet none of the keys' then gets zeros.
    """

    serves_caps = True

    def __init__(self, shape: AttentionShape, options: T2ROptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features or 4 * shape.head_dim
        self.distribution = options.epsilon > 0
        rows = unit_rows((self.num_features + 1) // 2, shape.head_dim, shape.layer_index)
        start = torch.cat([rows, -rows])[: self.num_features].T  # an odd row out has no partner
        self.query_weight = nn.Parameter(start.repeat(shape.num_heads, 1, 1))
        self.query_bias = constant_parameter(shape.num_heads, self.num_features, value=options.bias_init)
        self.key_weight = nn.Parameter(start.repeat(shape.num_key_value_heads, 1, 1))
        self.key_bias = constant_parameter(shape.num_key_value_heads, self.num_features, value=options.bias_init)

    def fused(self, scaling: float) -> FusedMaps | None:
        temperature = (scaling * self.shape.head_dim) ** 0.5
        epsilon = self.options.epsilon
        query = FusedMap("relu", self.query_weight, self.query_bias, in_scale=temperature, epsilon=epsilon)
        key = FusedMap("relu", self.key_weight, self.key_bias, in_scale=temperature, epsilon=epsilon)
        return query, key
