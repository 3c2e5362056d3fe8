"""cosFormer: relu features, reweighted by the distance between query and key."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.common import Features
from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap, Options, epsilon_option


class CosformerOptions(Options):
    max_length: int | None = option(
        None, "M, the longest input; weights fall to 0 at distance M (None: the model's limit)", least=1
    )
    epsilon: float = epsilon_option(0.01, "relu(x)")


@register_feature_map(
    "cosformer",
    description="relu features with cosine weights on the distance, nothing learned",
    paper="Qin et al. 2022, arXiv:2202.08791",
    options=CosformerOptions,
    learned=False,
    cost="O(L·m·d) time, O(m·d) state, m = 2d",
    recommendation="training from scratch where near tokens matter most; inputs up to a fixed length",
)
class CosformerFeatureMap(FeatureMap):
    """`φ(x, i) = relu(x) ⊗ [cos(πi/2M), sin(πi/2M)]`, m = 2d. Qin et al. 2022, arXiv:2202.08791.

    `φ(q, i)·φ(k, j) = relu(q)·relu(k) cos(π(i - j)/2M)`: never negative, since `|i - j| < M`. i is the place of a token
    among the real tokens of its row, so padding does not move it; in decoding it goes on from the state, which holds a
    count per row. relu(τx) = τ relu(x), so the model's scale cancels in the normaliser.

    relu leaves a query with no weight at all where it shares no positive feature with any visible key (with small
    heads the first tokens of a decoder, often), and with nothing but rounding where it nearly does. `epsilon`, added
    to relu(x), then takes over: the average over the visible keys, near ones first. The paper's map is `epsilon=0`.
    """

    uses_positions = True

    def __init__(self, shape: AttentionShape, options: CosformerOptions) -> None:
        max_length = options.max_length or shape.max_length
        if max_length is None:
            raise ValueError("cosformer needs max_length, the longest input: this model's config states no limit.")
        super().__init__(shape, replace(options, max_length=max_length))
        self.max_length: int = max_length
        self.num_features = 2 * shape.head_dim

    def query(self, x: Tensor, scaling: float) -> Features:
        """Map `[B, H, L, d]` at the positions 0, 1, … to `[B, H, L, 2d]`."""
        positions = torch.arange(x.shape[2], dtype=x.dtype, device=x.device).unsqueeze(0)
        return self._rotated(positions).features(x)

    def fused(self, scaling: float, positions: tuple[Tensor, Tensor] | None = None) -> FusedMaps | None:
        return None if positions is None else (self._rotated(positions[0]), self._rotated(positions[1]))

    def _rotated(self, positions: Tensor) -> FusedMap:
        angle = positions * (math.pi / (2 * self.max_length))
        return FusedMap("rotated-relu", epsilon=self.options.epsilon, cosine=angle.cos(), sine=angle.sin())
