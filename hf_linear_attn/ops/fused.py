"""What a fused backend is told: the feature maps by formula instead of by function, and one call of the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .common import FeatureFunction, State
from .gated import GatedKeyFunction

Activation = Literal[
    "elu", "relu", "softmax-pair", "softmax-joint", "exp-pair", "positive", "positive-pair", "rotated-relu"
]

#: How many features each number before the activation becomes.
PARTS: dict[str, int] = {
    "elu": 1,
    "relu": 1,
    "softmax-pair": 2,
    "softmax-joint": 2,
    "exp-pair": 2,
    "positive": 1,
    "positive-pair": 2,
    "rotated-relu": 2,
}

#: Activations that leave a log scale.
SCALED = frozenset({"exp-pair", "positive", "positive-pair"})


class FusedMap(NamedTuple):
    """One side of a feature map, as a formula: `y = s x W + c_b b` (or `s x` without W), then an activation.

        elu             elu_α(y) + 1
        relu            relu(y) + ε
        softmax-pair    [softmax(y), softmax(-y)]
        softmax-joint   softmax([2y, -2y])
        exp-pair        [exp(y), exp(-y)]
        positive        c exp(y - ‖s x‖²/2)
        positive-pair   c [exp(y), exp(-y)] exp(-‖s x‖²/2)
        rotated-relu     (relu(y) + ε) [cos θ, sin θ], θ the token's angle

    weight `[heads | 1, d, f]`, bias `[heads | 1, f]`, cosine and sine `[B | 1, L]`. Gradients flow to weight and bias.
    """

    activation: Activation
    weight: Tensor | None = None
    bias: Tensor | None = None
    in_scale: float = 1.0
    bias_scale: float = 1.0
    alpha: float = 1.0
    epsilon: float = 0.0
    factor: float = 1.0
    cosine: Tensor | None = None
    sine: Tensor | None = None

    def width(self, head_dim: int) -> int:
        """f, the numbers before the activation."""
        return head_dim if self.weight is None else self.weight.shape[-1]

    def num_features(self, head_dim: int) -> int:
        return PARTS[self.activation] * self.width(head_dim)

    @property
    def scaled(self) -> bool:
        return self.activation in SCALED

    @property
    def requires_grad(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in (self.weight, self.bias))


class KernelizedCall(NamedTuple):
    """One call of kernelized attention: query `[B, H, L, d]`, key `[B, G, S, d]`, value `[B, G, S, e]`, mask `[B, S]`.

    The maps come twice: as functions, for any backend, and as formulas (None where there are none).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_features: FeatureFunction
    key_features: FeatureFunction
    fused: tuple[FusedMap, FusedMap] | None
    num_features: int
    causal: bool
    signed: bool = False
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = False

    def needs_grad(self) -> bool:
        return _needs_grad(self)


class StepMix(NamedTuple):
    """Log mixing weights of a decoding step: as a function, `[B, H, 1]`, and as a formula,

        g = b + clip(√τ u·q, ±bound) - log(1 + max(n + 1 - w, 0) / N)

    base b `[H]`, weight u `[H, d]`, seen n `[B]` tokens before this one; saturation N (None: without the last term).
    """

    rows: Callable[[], Tensor]
    base: Tensor
    weight: Tensor
    bound: float
    saturation: int | None
    seen: Tensor | None


class QueryMix(NamedTuple):
    """Log mixing weights of whole sequences: as a function, `[B | 1, H, L | 1]`, and as a formula,

        g = r + clip(√τ u·q, ±bound)

    rest r `[B | 1, H, L | 1]`, weight u `[H, d]`.
    """

    rows: Callable[[], Tensor]
    rest: Tensor
    weight: Tensor
    bound: float


class WindowedCall(NamedTuple):
    """One call of the hybrid: exact weights at distances below `window`, kernelized ones beyond (`ops.windowed`).

    As `KernelizedCall`; log_mix `[H]` or row by row `[B | 1, H, L | 1]`, scaling is τ. Without gradients `log_mix` may
    be a formula: a `StepMix` for a step, a `QueryMix` for sequences.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_features: FeatureFunction
    key_features: FeatureFunction
    fused: tuple[FusedMap, FusedMap] | None
    num_features: int
    causal: bool
    window: int
    scaling: float
    log_mix: Tensor | StepMix | QueryMix
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = False

    def mix_rows(self) -> Tensor:
        """The log mixing weights as a tensor."""
        return self.log_mix if isinstance(self.log_mix, Tensor) else self.log_mix.rows()

    def needs_grad(self) -> bool:
        return _needs_grad(self, *((self.log_mix,) if isinstance(self.log_mix, Tensor) else ()))


class GatedCall(NamedTuple):
    """One call of the causal form that forgets (`ops.gated`): shapes as in `KernelizedCall`.

    It has no formula: keys come with their decays from `key_gates`, one a feature or one a head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_features: FeatureFunction
    key_gates: GatedKeyFunction
    num_features: int
    per_feature: bool
    signed: bool = False
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = True
    causal: bool = True
    fused: None = None

    def needs_grad(self) -> bool:
        return _needs_grad(self)


AttentionCall = KernelizedCall | WindowedCall | GatedCall


def _needs_grad(call: AttentionCall, *more: Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    given = (call.query, call.key, call.value, *more, *(call.state or {}).values())
    return any(tensor.requires_grad for tensor in given) or any(side.requires_grad for side in call.fused or ())
