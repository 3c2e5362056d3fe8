"""Feature maps as formulas, which kernels compute by themselves."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .common import Features

#: The activations, in the order of `Activation` in native/feature_maps.h: how many features each makes of a number.
PARTS: dict[str, int] = {
    "elu": 1,
    "relu": 1,
    "softmax-pair": 2,
    "softmax-joint": 2,
    "exp-pair": 2,
    "positive": 1,
    "positive-pair": 2,
    "exp": 1,
    "softmax": 1,
}

#: Features of "softmax" below this are zero, in float64 too. They change no sum, but products with them would leave the
#: range of normal numbers, and these take many processors a hundred times as long: a step of attention transfer with
#: `vq` on all-MiniLM-L6-v2 took 3.4 s instead of 1.0 s by outputs, and 1.7 s instead of 1.0 s by weights.
SMALLEST_FEATURE = 1e-20

#: Activations whose features come with a log scale.
SCALED = frozenset({"exp-pair", "positive", "positive-pair", "exp"})


class FusedMap(NamedTuple):
    """The feature map of queries or of keys as a formula: `y = s x W + c_b b` (`s x` without W), then an activation.

        elu             elu_α(y) + 1
        relu            relu(y) + ε
        softmax-pair    [softmax(y), softmax(-y)]
        softmax-joint   softmax([2y, -2y])
        exp-pair        [exp(y), exp(-y)]
        positive        c exp(y - ‖s x‖²/2)
        positive-pair   c [exp(y), exp(-y)] exp(-‖s x‖²/2)
        exp             exp(y)
        softmax         softmax(y), without what is below SMALLEST_FEATURE

    s is `in_scale`, c_b `bias_scale`, α `alpha`, ε `epsilon` and c `factor`; weight W `[heads | 1, d, f]`, bias b
    `[heads | 1, f]`. Gradients flow to weight and bias. With a `softcap` C, `s x W` is within it: `C tanh(s x W / C)`.
    """

    activation: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    in_scale: float = 1.0
    bias_scale: float = 1.0
    alpha: float = 1.0
    epsilon: float = 0.0
    factor: float = 1.0
    softcap: float | None = None

    def width(self, head_dim: int) -> int:
        """Return f, the width before the activation."""
        return head_dim if self.weight is None else self.weight.shape[-1]

    def num_features(self, head_dim: int) -> int:
        """Return the number of features of each token."""
        return PARTS[self.activation] * self.width(head_dim)

    def features(self, x: Tensor) -> Features:
        """Compute the features of tokens `[B, H, L, d]` by torch, in the dtype of x."""
        x = y = x if self.in_scale == 1.0 else x * self.in_scale
        if self.weight is not None:
            weight = self.weight[0] if self.weight.shape[0] == 1 else self.weight  # one product for all heads
            y = x @ weight.to(x.dtype)
        if self.softcap is not None:
            y = self.softcap * torch.tanh(y / self.softcap)
        if self.bias is not None:
            y = torch.add(y, self.bias.to(x.dtype).unsqueeze(-2), alpha=self.bias_scale)
        if self.activation == "softmax":
            weights = y.softmax(dim=-1)
            if torch.compiler.is_exporting():  # a comparison takes runtimes of graphs as long as all else
                return Features(torch.relu(weights - SMALLEST_FEATURE))
            return Features(functional.threshold(weights, SMALLEST_FEATURE, 0.0))
        if self.scaled:
            y = torch.cat([y, -y], dim=-1) if PARTS[self.activation] == 2 else y
            half = x.square().sum(dim=-1, keepdim=True) / 2 if self.activation.startswith("positive") else 0.0
            # A constant of the sums, which has no gradient: whoever reads log_scale multiplies by it.
            scale = (y.amax(dim=-1, keepdim=True) - half).detach()
            return Features((y - (half + scale - math.log(self.factor))).exp_(), scale.squeeze(-1))
        return Features(_ACTIVATIONS[self.activation](self, y))

    @property
    def scaled(self) -> bool:
        return self.activation in SCALED

    @property
    def requires_grad(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in (self.weight, self.bias))


#: Activations without a log scale.
_ACTIVATIONS: dict[str, Callable[[FusedMap, Tensor], Tensor]] = {
    "elu": lambda fused, y: functional.elu(y, alpha=fused.alpha) + 1,
    "relu": lambda fused, y: torch.relu(y) + fused.epsilon,
    "softmax-pair": lambda fused, y: torch.stack([y, -y], dim=-2).softmax(dim=-1).flatten(-2),
    "softmax-joint": lambda fused, y: torch.cat([2 * y, -2 * y], dim=-1).softmax(dim=-1),
}

FusedMaps = tuple[FusedMap, FusedMap]
"""The maps of queries and of keys."""
