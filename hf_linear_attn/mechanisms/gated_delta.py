"""The gated delta rule: a state that forgets, and that corrects what it holds under a key instead of adding to it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..feature_maps.base import AttentionShape, Options, constant_parameter, decay_option
from ..feature_maps.hedgehog import HedgehogFeatureMap, HedgehogOptions
from ..ops import gated_delta as ops
from ..ops.calls import GatedCall
from ..ops.common import Features, State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention

#: Smallest β: what is written by it stays well above the rounding of float32.
MIN_RATE = 1e-4


class GatedDeltaOptions(Options):
    feature_dim: int | None = option(
        None, "rows f of the feature map per head (None: the head size); 2f features", least=1
    )
    initial_decay: float = decay_option()
    initial_rate: float = option(
        1e-2,
        "β at the start, in (0.0001, 1): near 0 values are averaged, near 1 the last one replaces",
        above=MIN_RATE,
        below=1,
    )


@register_attention(
    "gated-delta",
    description="learned softmax features; the state forgets, and corrects the value under a key",
    paper="Yang et al. 2024, arXiv:2412.06464",
    options=GatedDeltaOptions,
    bidirectional=False,
    learned=True,
    state="constant",
    cost="O(L·m·(m + d)) time, O(m·d) state",
    recommendation="decoders that must look values up under keys; needs training",
    alternative="hedgehog",
)
class GatedDeltaAttention(LinearAttention):
    """`S_t = α_t (I - β_t k kᵀ) S_{t-1} + β_t k [v_t, 1]ᵀ`, `[n, D] = S_tᵀ q`, `o_t = n / D`. After Yang et al. 2024.

    q and k are hedgehog features scaled to length one. `α = sigmoid(√τ a·k_t + b)` and `β = sigmoid(√τ c·k_t + d)`
    (not below `MIN_RATE`), one of each per key-value head: functions of the keys, where the paper has functions of the
    hidden state. The paper has no normaliser; a pretrained model expects means of values, so the same rule that stores
    the values stores ones beside them, and a query divides by what it reads there. For small β and α near one, where a,
    b, c, d start, nothing is corrected yet, and this is kernelized attention with hedgehog features.
    Learned: the features, a, b, c, d. Implied weights may be negative.
    """

    distribution = False

    def __init__(self, shape: AttentionShape, options: GatedDeltaOptions) -> None:
        super().__init__(shape, options)
        size = options.feature_dim or shape.head_dim
        self.feature_map: HedgehogFeatureMap = HedgehogFeatureMap(shape, HedgehogOptions(feature_dim=size))
        groups = shape.num_key_value_heads
        rate = (options.initial_rate - MIN_RATE) / (1 - MIN_RATE)
        starts = (-math.log(options.initial_decay / (1 - options.initial_decay)), math.log(rate / (1 - rate)))
        #: Rows: decay and rate.
        self.gate_weight = constant_parameter(groups, shape.head_dim, 2)
        self.gate_bias = nn.Parameter(torch.tensor(starts, dtype=torch.float32, device="cpu").repeat(groups, 1))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        call = GatedCall(
            *inputs.tensors,
            lambda x: Features(functional.normalize(self.feature_map.query(x, inputs.scaling).values, dim=-1)),
            lambda x: self._keys(x, inputs.scaling),
            self.feature_map.num_features,
            **inputs.settings,
        )
        return ops.delta_causal(call)

    def _keys(self, key: Tensor, scaling: float) -> ops.DeltaKeys:
        weight = self.gate_weight.to(key.dtype)
        bias = self.gate_bias.to(key.dtype)
        gates = (key * scaling**0.5) @ weight + bias.unsqueeze(-2)
        rate = MIN_RATE + (1 - MIN_RATE) * torch.sigmoid(gates[..., 1])
        values = functional.normalize(self.feature_map.key(key, scaling).values, dim=-1)
        return ops.DeltaKeys(values, functional.logsigmoid(gates[..., 0]), rate)
