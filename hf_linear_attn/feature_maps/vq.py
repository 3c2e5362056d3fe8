"""Vector-quantized keys: softmax weights with each key replaced by the codes nearest to it."""

import torch
from torch import Tensor, nn

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options, constant_parameter
from .random_features import unit_rows

#: Steps of Lloyd's algorithm, which ends earlier where no key changes its code.
LLOYD_STEPS = 12

#: Smallest variance of queries along a direction, relative to the largest: no distance of keys is lost altogether.
SMALLEST_EIGENVALUE = 1e-6


#: Smallest variance around codes, relative to that of all keys: of keys that are codes themselves.
SMALLEST_SPREAD = 1e-4


class VQOptions(Options):
    num_features: int = option(128, "number of codes m", least=1)


@register_feature_map(
    "vq",
    description="softmax weights of keys that are quantized to learned codes",
    paper="Lingle 2023 (Transformer-VQ), arXiv:2309.16354",
    options=VQOptions,
    learned=True,
    recommendation="good without training after `calibrate`: its start is fitted to the model's own keys",
)
class VQFeatureMap(FeatureMap):
    """`φ_q(q) = exp(τ C q + b)`, `φ_k(k) = softmax(β (C k - ‖c‖²/2))`, rows of C `[m, d]` the codes: m features.

    The weight `φ_q(q)·φ_k(k)` is `exp(τ q·c + b_c)` for a key whose code is c: that of softmax attention for the
    quantized key (Lingle 2023, arXiv:2309.16354), on the same scale as exact weights beside it in a window; where the
    model caps its logits, `τ q·c` is capped like any of them. Keys are
    assigned softly, by the posterior of a mixture of Gaussians of precision β around the codes; b makes up for the
    spread of the keys around their code. Queries and keys have weights and biases of their own, `[heads, d, m]` and
    `[heads, m]`, which start at these values and are free in training.

    `fit` chooses the codes of each key-value head by k-means on its keys, as its queries see them, and `weigh`
    sets the biases b, so that each code gets the share of attention that its keys have. `calibrate` calls both. Before
    that, C are orthonormal rows divided by √τ.
    """

    fits_keys = True
    serves_caps = True

    def __init__(self, shape: AttentionShape, options: VQOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        rows = unit_rows(options.num_features, shape.head_dim, shape.layer_index).T.float()
        scale = shape.head_dim**0.25  # τ = 1/√d, in nearly all models
        self.query_weight = nn.Parameter((rows * scale).repeat(shape.num_heads, 1, 1))
        self.query_bias = constant_parameter(shape.num_heads, options.num_features)
        self.key_weight = nn.Parameter((rows / scale).repeat(shape.num_key_value_heads, 1, 1))
        self.key_bias = constant_parameter(shape.num_key_value_heads, options.num_features, value=-0.5)

    def fused(self, scaling: float) -> FusedMaps | None:
        query = FusedMap("exp", self.query_weight, self.query_bias, in_scale=scaling, softcap=self.shape.softcap)
        return query, FusedMap("softmax", self.key_weight, self.key_bias)

    @torch.no_grad()
    def fit(
        self, keys: Tensor, queries: Tensor, damping: Tensor | None = None, importance: Tensor | None = None
    ) -> None:
        """Choose the codes by k-means on keys `[G, N, d]`, at the distances that queries `[G, M, d]` see.

        The distance of two keys is `mean_q (q·k - q·k')²`. 1/β is the variance of the coordinates around the codes
        where the queries are white, and b = 0. With fewer keys than codes, some codes are equal.

        With a `damping` `[d]` the coordinates of queries are multiplied by it, here and in the map: by how much of a
        coordinate of the keys is certain. With an `importance` `[G, N]`, not negative, a key counts as so many: the
        attention that it gets, so that codes lie where it goes.
        """
        importance = torch.ones_like(keys[..., 0]) if importance is None else importance
        groups = len(keys)
        repeats = self.shape.num_heads // len(keys)
        damping = torch.ones_like(keys[0, 0]) if damping is None else damping.to(keys)
        for group in range(groups):
            query = queries[group].float() * damping
            moment = query.T @ query / len(query)
            values, vectors = torch.linalg.eigh(moment)
            root = vectors * values.clamp_min(SMALLEST_EIGENVALUE * values[-1]).sqrt()
            # Relative to the mean of all keys, which adds the same to the logits of all codes: what keys have in common
            # would drown their differences in rounding, and leave the range of float16.
            seen = keys[group].float() @ root
            mean = seen.mean(dim=0)
            seen = seen - mean
            weights = importance[group].float()
            weights = weights / weights.mean().clamp_min(torch.finfo(torch.float32).tiny)
            nearest, centres = _k_means(seen, weights, self.num_features)
            squares = (seen - centres[nearest]).square().mean(dim=1)
            least = SMALLEST_SPREAD * seen.square().mean().clamp_min(torch.finfo(torch.float32).eps)
            precision = 1 / torch.maximum((squares * weights).mean(), least)
            # The mean of the keys themselves, so that a query's product with a code is the mean of its products.
            codes = torch.linalg.solve(root.T, (centres + mean).T) * damping.unsqueeze(1)
            self.query_weight[group * repeats : (group + 1) * repeats] = codes
            weight = root @ centres.T
            bias = -(centres * (centres / 2 + mean)).sum(dim=1)
            largest = torch.maximum(weight.abs().max(), bias.abs().max())
            precision = torch.minimum(precision, torch.finfo(self.key_weight.dtype).max / largest)
            self.key_weight[group] = precision * weight
            self.key_bias[group] = precision * bias
        self.query_bias.zero_()

    @torch.no_grad()
    def weigh(self, bias: Tensor) -> None:
        """Add numbers `[H, m]` to b."""
        self.query_bias.add_(bias.to(self.query_bias))


def _k_means(points: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the nearest centre of each of N points `[N, d]`, and the `count` centres (Lloyd's algorithm).

    Centres are means by the weights `[N]`. The first ones are points spread evenly over the sequence. A centre without
    a point, or with points without a weight only, stays where it is.
    """
    centres = points[torch.linspace(0, len(points) - 1, count, device=points.device).round().long()]
    nearest = torch.zeros(len(points), dtype=torch.long, device=points.device)
    weighted = points * weights.unsqueeze(1)
    for _ in range(LLOYD_STEPS):
        previous = nearest
        nearest = (points @ centres.T - centres.square().sum(dim=1) / 2).argmax(dim=1)
        if torch.equal(previous, nearest):
            break
        totals = torch.bincount(nearest, weights, minlength=count).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, weighted)
        centres = torch.where(totals > 0, sums / totals, centres)
    return nearest, centres
