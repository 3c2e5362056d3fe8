"""Random feature attention: trigonometric features of normalised queries and keys, and a gate in the causal form."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..feature_maps.base import AttentionShape, Options, constant_parameter, decay_option
from ..feature_maps.random_features import gaussian_features, layer_seed
from ..ops import backends, gated, kernelized
from ..ops.calls import GatedCall, KernelizedCall
from ..ops.common import Features, State, compute_dtype
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class RFAOptions(Options):
    num_features: int = option(256, "number of features m, two of each random row (even)", least=1, parity="even")
    sigma_init: float = option(1.0, "start of the learned scales σ of the random rows", above=0)
    gate: bool = option(True, "learned forgetting, in causal layers")
    initial_decay: float = decay_option()
    seed: int = option(0, "seed of the random rows; layers draw different ones from it", least=0)


@register_attention(
    "rfa",
    description="trigonometric random features of normalised queries and keys with learned scales, gated if causal",
    paper="Peng et al. 2021, arXiv:2103.02143",
    options=RFAOptions,
    learned=True,
    state="constant",
    cost="O(L·m·d) time, O(m·d) state",
    recommendation="training from scratch, or where keys have similar lengths: only directions count",
)
class RandomFeatureAttention(LinearAttention):
    """`φ(x) = √(2/m) [sin(W x̂), cos(W x̂)]`, `x̂ = x / ‖x‖`, rows of W: σ ⊙ N(0, I). Peng et al. 2021, arXiv:2103.02143.

    `E[φ(q)·φ(k)] = exp(-‖σ ⊙ (q̂ - k̂)‖² / 2)`, which for equal σ is proportional to `exp(σ² q̂·k̂)`: σ takes the place
    of the model's own scale. It starts at 1, which does best untrained: 2 costs far more in noise than it gains.
    Causal layers have the paper's gate by default, `S_t = g_t S_{t-1} + (1 - g_t) φ(k_t) v_tᵀ`, z_t likewise,
    `g_t = sigmoid(√τ w·k_t + b)`, with w = 0 and g near one at the start.
    Weights can be negative; the normaliser is guarded (`ops.common.SIGNED_NORMALISER_EPS`).
    Learned: σ `[d]`, w `[d]` and b, one of each per key-value head.
    """

    distribution = False
    weight: Tensor

    def __init__(self, shape: AttentionShape, options: RFAOptions) -> None:
        super().__init__(shape, options)
        groups = shape.num_key_value_heads
        seed = layer_seed(options.seed, shape)
        self.register_buffer("weight", gaussian_features(options.num_features // 2, shape.head_dim, seed=seed))
        self.sigma = constant_parameter(groups, shape.head_dim, value=options.sigma_init)
        self.gated = options.gate and shape.causal
        self.dense_masks = not self.gated
        self.sampled_outputs = self.gated or not shape.causal
        if self.gated:
            bias = -math.log(options.initial_decay / (1 - options.initial_decay))
            self.gate_weight = constant_parameter(groups, shape.head_dim, 1)
            self.gate_bias = constant_parameter(groups, 1, value=bias)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        if not (self.gated and inputs.causal):
            maps = (self._features, self._features, None)
            size = self.options.num_features
            call = KernelizedCall(*inputs.finite_tensors(), *maps, size, signed=True, **inputs.settings)
            return kernelized.attend(call)
        gated_call = GatedCall(
            *inputs.tensors,
            self._features,
            lambda x: self._gated_keys(x, inputs.scaling),
            self.options.num_features,
            signed=True,
            **inputs.settings,
        )
        return backends.attend(gated_call)

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        if self.gated and inputs.causal:
            return super().attention_weights(inputs)
        dtype = compute_dtype(inputs.query)
        features = self._features(inputs.query.to(dtype)), self._features(inputs.key.to(dtype))
        return kernelized.dense_weights(*features, inputs.visible(), signed=True)

    def _features(self, x: Tensor) -> Features:
        """Queries share the scales of their key-value head."""
        sigma = self.sigma.to(x.dtype).repeat_interleave(x.shape[1] // self.sigma.shape[0], dim=0)
        angle = (functional.normalize(x, dim=-1) * sigma.unsqueeze(-2)) @ self.weight.to(x.dtype).T
        return Features(torch.cat([angle.sin(), angle.cos()], dim=-1) * (2 / self.options.num_features) ** 0.5)

    def _gated_keys(self, key: Tensor, scaling: float) -> gated.GatedKeys:
        gate = (key * scaling**0.5) @ self.gate_weight.to(key.dtype) + self.gate_bias.to(key.dtype).unsqueeze(-2)
        log_write = functional.logsigmoid(-gate).squeeze(-1)
        return gated.GatedKeys(self._features(key).values, functional.logsigmoid(gate), log_write)
