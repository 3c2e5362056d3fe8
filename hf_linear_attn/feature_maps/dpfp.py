"""DPFP: deterministic parameter-free projection."""

import torch
from torch import Tensor

from ..ops.common import Features
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options, epsilon_option


class DpfpOptions(Options):
    nu: int = option(1, "number ν of products per entry: m = 2dν features; at most 2d - 1", least=1)
    epsilon: float = epsilon_option(0.01)


@register_feature_map(
    "dpfp",
    description="products of rectified entries of [x, -x], nothing learned",
    paper="Schlag et al. 2021, arXiv:2102.11174",
    options=DpfpOptions,
    learned=False,
    cost="O(L·ν·d²) time, O(ν·d²) state",
    recommendation="training from scratch, where keys should not interfere; converts a pretrained model poorly",
)
class DpfpFeatureMap(FeatureMap):
    """`r = relu([x, -x])`, `φ(x) = concat over n = 1 … ν of r ⊙ roll(r, n)`, plus ε: m = 2dν. Schlag et al. 2021,
    arXiv:2102.11174.

    Each feature is the product of two entries of r that lie n apart: active in one orthant of two coordinates only, so
    that many keys can be told apart. The weights are products of such products, hence sparse: with the paper's ε = 0 a
    query may share no feature with any key and gets zeros. x is scaled by √τ, which matters next to ε only.
    """

    def __init__(self, shape: AttentionShape, options: DpfpOptions) -> None:
        super().__init__(shape, options)
        if options.nu > 2 * shape.head_dim - 1:
            raise ValueError(
                f"nu must be at most 2·head_dim - 1 = {2 * shape.head_dim - 1} (larger rolls repeat), got {options.nu}."
            )
        self.num_features = 2 * shape.head_dim * options.nu
        self.distribution = options.epsilon > 0

    def query(self, x: Tensor, scaling: float) -> Features:
        x = x * scaling**0.5
        rectified = torch.relu(torch.cat([x, -x], dim=-1))
        products = [rectified * rectified.roll(n, dims=-1) for n in range(1, self.options.nu + 1)]
        return Features(torch.cat(products, dim=-1) + self.options.epsilon)
