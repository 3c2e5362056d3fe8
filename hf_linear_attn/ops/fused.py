"""One call of attention as every backend receives it, with the feature maps both as functions and as formulas."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from .common import FeatureFunction, Features, State

Activation = Literal[
    "elu", "relu", "softmax-pair", "softmax-joint", "exp-pair", "positive", "positive-pair", "rotated-relu"
]

#: Number of features that the activation makes of each number.
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

#: Activations whose features come with a log scale.
SCALED = frozenset({"exp-pair", "positive", "positive-pair"})


class FusedMap(NamedTuple):
    """The feature map of queries or of keys as a formula: `y = s x W + c_b b` (`s x` without W), then an activation.

        elu             elu_α(y) + 1
        relu            relu(y) + ε
        softmax-pair    [softmax(y), softmax(-y)]
        softmax-joint   softmax([2y, -2y])
        exp-pair        [exp(y), exp(-y)]
        positive        c exp(y - ‖s x‖²/2)
        positive-pair   c [exp(y), exp(-y)] exp(-‖s x‖²/2)
        rotated-relu     (relu(y) + ε) [cos θ, sin θ], θ the token's angle

    s is `in_scale`, c_b `bias_scale`, α `alpha`, ε `epsilon` and c `factor`; weight W `[heads | 1, d, f]`, bias b
    `[heads | 1, f]`, cosine and sine `[B | 1, L]`. Gradients flow to weight and bias.
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
        """Return f, the width before the activation."""
        return head_dim if self.weight is None else self.weight.shape[-1]

    def num_features(self, head_dim: int) -> int:
        """Return the number of features of each token."""
        return PARTS[self.activation] * self.width(head_dim)

    def features(self, x: Tensor, start: int = 0) -> Features:
        """Compute the features of tokens `[B, H, L, d]` from position `start` on by torch, in the dtype of x."""
        x = y = x if self.in_scale == 1.0 else x * self.in_scale
        if self.weight is not None:
            weight = self.weight[0] if self.weight.shape[0] == 1 else self.weight  # one product for all heads
            y = x @ weight.to(x.dtype)
        if self.bias is not None:
            y = torch.add(y, self.bias.to(x.dtype).unsqueeze(-2), alpha=self.bias_scale)
        if self.scaled:
            y = y if self.activation == "positive" else torch.cat([y, -y], dim=-1)
            half = 0.0 if self.activation == "exp-pair" else x.square().sum(dim=-1, keepdim=True) / 2
            # A constant of the sums, which has no gradient: whoever reads log_scale multiplies by it.
            scale = (y.amax(dim=-1, keepdim=True) - half).detach()
            return Features((y - (half + scale - math.log(self.factor))).exp_(), scale.squeeze(-1))
        values = _ACTIVATIONS[self.activation](self, y)
        if self.cosine is None or self.sine is None:
            return Features(values)
        now = slice(start, start + x.shape[2])
        angles = (table[:, now].to(x.dtype)[:, None, :, None] for table in (self.cosine, self.sine))
        return Features(torch.cat([values * angle for angle in angles], dim=-1))

    @property
    def scaled(self) -> bool:
        return self.activation in SCALED

    @property
    def requires_grad(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in (self.weight, self.bias))


#: Activations without a log scale, before the angles.
_ACTIVATIONS: dict[str, Callable[[FusedMap, Tensor], Tensor]] = {
    "elu": lambda fused, y: functional.elu(y, alpha=fused.alpha) + 1,
    "relu": lambda fused, y: torch.relu(y) + fused.epsilon,
    "rotated-relu": lambda fused, y: torch.relu(y) + fused.epsilon,
    "softmax-pair": lambda fused, y: torch.stack([y, -y], dim=-2).softmax(dim=-1).flatten(-2),
    "softmax-joint": lambda fused, y: torch.cat([2 * y, -2 * y], dim=-1).softmax(dim=-1),
}

FusedMaps = tuple[FusedMap, FusedMap]
"""The maps of queries and of keys."""


class GatedKeys(NamedTuple):
    """Features of keys `[B, G, L, m]`, their log decay `[B, G, L, 1 | m]`, and their log scale `[B, G, L]` or None."""

    values: Tensor
    log_decay: Tensor
    log_scale: Tensor | None = None


@dataclass
class _Call:
    """One call of attention.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, G, S, d]`, with `H = G·R`.
        value: `[B, G, S, e]`.
        query_features: The map of queries as a function.
        key_features: The map of keys as a function.
        fused: Both maps as formulas; None for maps without a formula.
        num_features: m.
        causal: Whether query i sees keys j <= i only (then L = S).
        signed: Whether features can be negative; the normaliser is guarded then.
        mask: `[B | 1, S]`, True for tokens; None without padding.
        state: The state before these tokens (causal form).
        return_state: Whether the state after the last token is needed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_features: FeatureFunction
    key_features: Callable[[Tensor, int], Any]
    fused: FusedMaps | None
    num_features: int
    causal: bool
    signed: bool = False
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = False

    def needs_grad(self) -> bool:
        """Return whether a gradient is recorded for an input, the state, a map or a tensor of mixing weights."""
        if not torch.is_grad_enabled():
            return False
        values = (*vars(self).values(), *(self.state or {}).values(), *(self.fused or ()))
        return any(value.requires_grad for value in values if isinstance(value, Tensor | FusedMap))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)


class KernelizedCall(_Call):
    """One call of kernelized attention (`ops.kernelized`)."""


class Mix(NamedTuple):
    """Log mixing weights as a function that computes `[B | 1, H, L | 1]`, and as a formula,

        g = base + clip(√τ u·q, ±bound) - log(1 + max(n + 1 - w - s, 0) / N)

    base `[B | 1, H, L | 1]`, weight u `[H, d]`, s sinks and stored keys; saturation N of a decoding step, n the
    tokens before it (None: without the last term).
    """

    compute: Callable[[], Tensor]
    base: Tensor
    weight: Tensor
    bound: float
    saturation: int | None = None


@dataclass(kw_only=True)
class WindowedCall(_Call):
    """One call of windowed attention: exact weights at distances below `window`, kernelized ones beyond
    (`ops.windowed`).

    `scaling` is τ, and log_mix `[H]` or row by row `[B | 1, H, L | 1]`; without gradients it may be a formula. With
    `sinks` n, the first n tokens of each row (causal), or the first n and the last n, have exact weights for every
    query (`ops.sinks`). With a `store` n (causal), so have n keys that the linear part recalls badly (`ops.store`).
    """

    window: int
    scaling: float
    log_mix: Tensor | Mix
    sinks: int = 0
    store: int = 0

    def log_mixing_weights(self) -> Tensor:
        """Return the log mixing weights as a tensor `[B | 1, H, L | 1]`."""
        log_mix = self.log_mix if isinstance(self.log_mix, Tensor) else self.log_mix.compute()
        return log_mix.view(1, -1, 1) if log_mix.dim() == 1 else log_mix


@dataclass(kw_only=True)
class GatedCall(_Call):
    """One call of causal attention with a decaying state (`ops.gated`, `ops.gated_delta`).

    There is no formula: `key_features` returns keys with their decays (`GatedKeys`), one per feature or one per head.
    `ops.gated` takes fewer queries than keys, too: those of the last tokens.
    """

    per_feature: bool = False
    fused: None = None
    causal: bool = True
    return_state: bool = True


AttentionCall = KernelizedCall | WindowedCall | GatedCall
