"""elu(x) + 1: the feature map of the first linear transformers."""

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options


class EluOptions(Options):
    alpha: float = option(1.0, "α of the elu; in (0, 1] elu(x) + 1 stays positive", above=0, most=1)
    split_scaling: bool = option(False, "multiply q and k by √τ first (the paper takes them raw)")


@register_feature_map(
    "elu",
    description="elu(x) + 1, nothing learned",
    paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    options=EluOptions,
    learned=False,
    recommendation="baseline and training from scratch; converts a pretrained model poorly",
)
class EluFeatureMap(FeatureMap):
    """`φ(x) = elu_α(x) + 1`, elementwise: m = d. Katharopoulos et al. 2020, arXiv:2006.16236.

    `elu_α(x) = x` for x > 0 and `α (eˣ - 1)` otherwise. Nothing is learned; both directions; constant state.
    """

    def __init__(self, shape: AttentionShape, options: EluOptions) -> None:
        super().__init__(shape, options)
        self.num_features = shape.head_dim

    def fused(self, scaling: float) -> FusedMaps | None:
        scale = scaling**0.5 if self.options.split_scaling else 1.0
        formula = FusedMap("elu", alpha=self.options.alpha, in_scale=scale)
        return formula, formula
