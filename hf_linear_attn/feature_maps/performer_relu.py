"""The generalised kernel of Performers: relu over random projections."""

from torch import Tensor

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, epsilon_option
from .random_features import RandomFeatureOptions


class PerformerReluOptions(RandomFeatureOptions):
    epsilon: float = epsilon_option(1e-3)
    split_scaling: bool = option(False, "multiply q and k by √τ first (the paper takes them raw)")


@register_feature_map(
    "performer-relu",
    description="relu of random projections: a kernel of its own, not softmax",
    paper="Choromanski et al. 2020, arXiv:2009.14794",
    options=PerformerReluOptions,
    learned=False,
    recommendation="training from scratch; blunter and more stable than favor+, and no approximation of softmax",
)
class PerformerReluFeatureMap(FeatureMap):
    """`φ(x) = relu(W x)/√m + ε`, rows of W ~ N(0, I). Choromanski et al., arXiv:2009.14794 (generalised).

    `φ(q)·φ(k)` estimates the arc-cosine kernel `‖q‖‖k‖ (sin θ + (π - θ) cos θ)/2π`, θ the angle between q and k. With
    ε = 0 a query may be left without any weight. W `[m, d]` is a persistent buffer.
    """

    weight: Tensor

    def __init__(self, shape: AttentionShape, options: PerformerReluOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        self.distribution = options.epsilon > 0
        self.register_buffer("weight", options.draw(options.num_features, shape))

    def fused(self, scaling: float) -> FusedMaps | None:
        scale = (scaling**0.5 if self.options.split_scaling else 1.0) * self.num_features**-0.5
        formula = FusedMap("relu", self.weight.T.unsqueeze(0), in_scale=scale, epsilon=self.options.epsilon)
        return formula, formula
