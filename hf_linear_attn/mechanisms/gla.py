"""Gated linear attention: a state whose features forget at rates that depend on the data."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, Options, constant_parameter, decay_option
from ..feature_maps.hedgehog import HedgehogFeatureMap, HedgehogOptions
from ..feature_maps.random_features import gaussian_features
from ..ops import backends
from ..ops import gated as ops
from ..ops.calls import GatedCall
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class GLAOptions(Options):
    feature_dim: int | None = option(
        None, "rows f of the feature map per head (None: the head size); 2f features", least=1
    )
    activation: Literal["softmax", "joint"] = option("softmax", "of the hedgehog map: 'softmax' or 'joint'")
    gate_rank: int = option(16, "rank of the map from keys to the features' decays", least=1)
    initial_decay: float = decay_option("share that a feature forgets")


@register_attention(
    "gla",
    description="learned softmax features whose state forgets, feature by feature, as the keys say",
    paper="Yang et al. 2023, arXiv:2312.06635",
    options=GLAOptions,
    bidirectional=False,
    learned=True,
    state="constant",
    cost="O(L·m·d) time, O(m·d) state",
    recommendation="decoders on long texts: hedgehog that learns what to forget",
    alternative="hedgehog",
)
class GatedLinearAttention(LinearAttention):
    """`S_t = Diag(α_t) S_{t-1} + φ(k_t) v_tᵀ`, z_t likewise, `o_t = S_tᵀφ(q_t) / z_t·φ(q_t)`. After Yang et al. 2023.

    The paper's gate is a function of the hidden state; a mechanism sees keys only, so here
    `log α_t = -sigmoid(U D √τ k_t + b)`, with D `[d, r]`, U `[r, m]`, b `[m]` per key-value head: no feature loses more
    than the factor 1/e by one token. The paper has no normaliser and normalises the output; a pretrained model
    expects means of values, so z is decayed along. φ is the hedgehog map. U starts at zero and b at almost no
    forgetting: the untrained start is hedgehog. Learned: φ, D, U, b.
    """

    sampled_outputs = True

    def __init__(self, shape: AttentionShape, options: GLAOptions) -> None:
        super().__init__(shape, options)
        features = HedgehogOptions(feature_dim=options.feature_dim or shape.head_dim, activation=options.activation)
        self.feature_map: HedgehogFeatureMap = HedgehogFeatureMap(shape, features)
        size = self.feature_map.num_features
        groups = shape.num_key_value_heads
        rank = options.gate_rank
        down = gaussian_features(rank, shape.head_dim, seed=shape.layer_index) / shape.head_dim**0.5
        self.gate_down = nn.Parameter(down.T.repeat(groups, 1, 1))
        self.gate_up = constant_parameter(groups, rank, size)
        log_decay = -math.log1p(-options.initial_decay) / ops.MAX_DECAY
        self.gate_bias = constant_parameter(groups, size, value=math.log(log_decay / (1 - log_decay)))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        call = GatedCall(
            *inputs.tensors,
            lambda x: self.feature_map.query(x, inputs.scaling),
            lambda x: self._keys(x, inputs.scaling),
            self.feature_map.num_features,
            per_feature=True,
            **inputs.settings,
        )
        return backends.attend(call)

    def _keys(self, key: Tensor, scaling: float) -> ops.GatedKeys:
        down, up, bias = (p.to(key.dtype) for p in (self.gate_down, self.gate_up, self.gate_bias))
        gate = torch.sigmoid((key * scaling**0.5) @ down @ up + bias.unsqueeze(-2))
        return ops.GatedKeys(self.feature_map.key(key, scaling).values, -ops.MAX_DECAY * gate)
