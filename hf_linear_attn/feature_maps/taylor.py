"""Taylor: the second-order expansion of exp as a feature map."""

import torch
from torch import Tensor, nn

from ..ops.common import Features
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options
from .random_features import gaussian_features


class TaylorOptions(Options):
    projection_dim: int | None = option(
        None,
        "d' of a learned projection of q and k before the expansion (None: none, nothing is learned); the state grows "
        "with d'²",
        least=1,
    )


@register_feature_map(
    "taylor",
    description="second-order Taylor expansion of exp(τ q·k); a learned projection first, on request",
    paper="Arora et al. 2024 (Based), arXiv:2402.18668",
    options=TaylorOptions,
    learned=False,
    cost="O(L·d³) time, O(d³) state (d' for d with a projection)",
    recommendation="close to softmax where |τ q·k| stays below about 1; larger logits need the window or training",
)
class TaylorFeatureMap(FeatureMap):
    """`φ(q)·φ(k) = 1 + s + s²/2`, `s = τ q·k`. Arora et al. 2024, arXiv:2402.18668.

    The paper's `φ(x) = [1, x, vec(x xᵀ)/√2]`, `x = √τ x`, has 1 + d + d² features and holds each product `x_i x_j`
    twice. Here each pair is held once, as the products `x_i x_{i+r}` (indices modulo d) for r = 0 … d/2, with weights
    that give the same `φ(q)·φ(k)` exactly: m = 1 + d + d(⌊d/2⌋ + 1), 2177 for d = 64 instead of 4161.

    `1 + s + s²/2 ≥ 1/2`: implied weights are positive though the features are not, and no query is left without
    weight. It grows again for s < -1: what softmax ignores most is seen. With `projection_dim` x is first projected by
    W `[heads, d, d']` (queries and keys separately, both starting at the same orthonormal columns times √(d/d'), which
    keep q·k on average); to be trained before use.
    """

    query_weight: Tensor | None
    key_weight: Tensor | None

    def __init__(self, shape: AttentionShape, options: TaylorOptions) -> None:
        super().__init__(shape, options)
        size = options.projection_dim or shape.head_dim
        self.num_features = 1 + size + size * (size // 2 + 1)
        self.query_weight = self.key_weight = None
        if options.projection_dim is not None:
            rows = gaussian_features(size, shape.head_dim, seed=shape.layer_index, scaling="constant")
            start = (rows / size**0.5).T
            self.query_weight = nn.Parameter(start.repeat(shape.num_heads, 1, 1))
            self.key_weight = nn.Parameter(start.repeat(shape.num_key_value_heads, 1, 1))

    def query(self, x: Tensor, scaling: float) -> Features:
        return self._features(x, self.query_weight, scaling)

    def key(self, x: Tensor, scaling: float) -> Features:
        return self._features(x, self.key_weight, scaling)

    def _features(self, x: Tensor, weight: Tensor | None, scaling: float) -> Features:
        x = x * scaling**0.5
        if weight is not None:
            x = x @ weight.to(x.dtype)
        return Features(torch.cat([torch.ones_like(x[..., :1]), x, pair_products(x)], dim=-1))


def pair_products(x: Tensor) -> Tensor:
    """Map `[…, d] -> […, d(⌊d/2⌋ + 1)]` with `p(x)·p(y) = (x·y)²/2`.

    Entry (r, i) is `c_r x_i x_{i+r}`. `(x·y)²/2` holds every square once with factor 1/2 (r = 0) and every pair once
    with factor 1 (0 < r < d/2); at r = d/2, where d is even, every pair comes up twice.
    """
    size = x.shape[-1]
    offsets = size // 2 + 1
    rolled = torch.cat([x, x], dim=-1).unfold(-1, size, 1)[..., :offsets, :]  # a view: row r is x rolled by r
    factors = torch.ones(offsets, dtype=x.dtype, device=x.device)
    factors[0] = 0.5**0.5
    if size % 2 == 0:
        factors[-1] = 0.5**0.5
    return (rolled * (x.unsqueeze(-2) * factors.unsqueeze(-1))).flatten(-2)
