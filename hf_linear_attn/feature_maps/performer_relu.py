"""Generalised kernels of Performers: a nonlinearity over random projections."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..ops.common import Features
from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, epsilon_option
from .random_features import RandomFeatureOptions

#: Nonlinearities that are never negative, but for `relu` and `exp`, which have a formula and a log scale.
POSITIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}
#: Nonlinearities with negative values: the implied weights can be negative as well.
SIGNED: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "tanh": torch.tanh}


class PerformerReluOptions(RandomFeatureOptions):
    kernel: Literal["relu", "exp", "abs", "sigmoid", "softplus", "gelu", "tanh"] = option(
        "relu", "the nonlinearity f: relu, exp, abs, sigmoid or softplus; gelu and tanh give signed weights"
    )
    epsilon: float = epsilon_option(1e-3)
    split_scaling: bool = option(False, "multiply q and k by √τ first (the paper takes them raw)")


@register_feature_map(
    "performer-relu",
    description="relu, or another nonlinearity, of random projections: a kernel of its own, not softmax",
    paper="Choromanski et al. 2020, arXiv:2009.14794",
    options=PerformerReluOptions,
    learned=False,
    recommendation="training from scratch; blunter and more stable than favor+, and no approximation of softmax",
)
class PerformerReluFeatureMap(FeatureMap):
    """`φ(x) = f(W x)/√m + ε`, rows of W ~ N(0, I), f = relu. Choromanski et al., arXiv:2009.14794 (generalised).

    `φ(q)·φ(k)` estimates `E_w[f(w·q) f(w·k)]`, for relu the arc-cosine kernel `‖q‖‖k‖ (sin θ + (π - θ) cos θ)/2π`, θ
    the angle between q and k. Positive f keep weights positive; with ε = 0 relu may leave a query without any. `exp`
    returns the largest exponent of each token as its log scale. For signed f see `ops.common.SIGNED_NORMALISER_EPS`.
    W `[m, d]` is a persistent buffer.
    """

    weight: Tensor

    def __init__(self, shape: AttentionShape, options: PerformerReluOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        self.signed = options.kernel in SIGNED
        self.distribution = not self.signed and (options.epsilon > 0 or options.kernel not in ("relu", "abs"))
        self.register_buffer("weight", options.draw(options.num_features, shape))

    def query(self, x: Tensor, scaling: float) -> Features:
        if self.options.kernel == "relu":
            return super().query(x, scaling)
        if self.options.split_scaling:
            x = x * scaling**0.5
        projected = x @ self.weight.to(x.dtype).T
        if self.options.kernel == "exp":
            top = projected.detach().amax(dim=-1, keepdim=True).clamp_min(0.0)
            values = torch.exp(projected - top) * self.num_features**-0.5 + self.options.epsilon * torch.exp(-top)
            return Features(values, top.squeeze(-1))
        function = (SIGNED if self.signed else POSITIVE)[self.options.kernel]
        return Features(function(projected) * self.num_features**-0.5 + self.options.epsilon)

    def fused(self, scaling: float) -> FusedMaps | None:
        if self.options.kernel != "relu":
            return None
        scale = (scaling**0.5 if self.options.split_scaling else 1.0) * self.num_features**-0.5
        formula = FusedMap("relu", self.weight.T.unsqueeze(0), in_scale=scale, epsilon=self.options.epsilon)
        return formula, formula
