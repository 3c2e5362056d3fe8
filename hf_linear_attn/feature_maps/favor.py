"""FAVOR: trigonometric orthogonal random features."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..ops.common import Features
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap
from .random_features import RandomFeatureOptions, layer_seed

#: Added to the seed of the rows for the phases, which would otherwise repeat their random bits.
PHASE_SEED_OFFSET = 500_009


class FavorOptions(RandomFeatureOptions):
    num_features: int = option(256, "number of features m; 'sincos' makes two of each random row (m even)", least=1)
    trig: Literal["sincos", "cos"] = option(
        "sincos", "'sincos': [cos(Wx), sin(Wx)]; 'cos' (the paper's form): √2 cos(Wx + b), b ~ U(0, 2π)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trig == "sincos" and self.num_features % 2:
            raise ValueError(f"num_features must be even for trig='sincos', got {self.num_features!r}.")


@register_feature_map(
    "favor",
    description="trigonometric orthogonal random features, unbiased for exp(τ q·k); weights can be negative",
    paper="Choromanski et al. 2020, arXiv:2006.03555",
    options=FavorOptions,
    learned=False,
    recommendation="for study, or where all weights are near equal; favor+ is safer: here small weights drown in noise",
)
class FavorFeatureMap(FeatureMap):
    """`φ(x) = exp(‖x'‖²/2) √(2/m) [cos(Wx'), sin(Wx')]`, `x' = √τ x`, W `[m/2, d]` with rows N(0, I); or with
    `trig="cos"` `exp(‖x'‖²/2) √(2/m) cos(Wx' + b)`, W `[m, d]`, b ~ U(0, 2π). Choromanski et al., arXiv:2006.03555.

    `E[φ(q)·φ(k)] = exp(τ q·k)` over the draw. The variance is least for q = k and, against the kernel itself, largest
    where the kernel is small: there estimates are negative about as often as positive, so the implied weights are no
    distribution. The normaliser can come near zero; it is guarded by `ops.common.SIGNED_NORMALISER_EPS`, and outputs
    below that guard shrink to zero instead of blowing up. `exp(‖x'‖²/2)` leaves as the log scale: nothing overflows.
    """

    signed = True
    weight: Tensor
    phase: Tensor | None

    serves_caps = True

    def __init__(self, shape: AttentionShape, options: FavorOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        rows = options.num_features // 2 if options.trig == "sincos" else options.num_features
        self.register_buffer("weight", options.draw(rows, shape))
        phase = None
        if options.trig == "cos":
            generator = torch.Generator(device="cpu").manual_seed(layer_seed(options.seed + PHASE_SEED_OFFSET, shape))
            phase = 2 * math.pi * torch.rand(rows, generator=generator, dtype=torch.float32, device="cpu")
        self.register_buffer("phase", phase)

    def query(self, x: Tensor, scaling: float) -> Features:
        x = x * scaling**0.5
        angle = x @ self.weight.to(x.dtype).T
        if self.phase is None:
            waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        else:
            waves = (angle + self.phase.to(x.dtype)).cos()
        return Features(waves * (2 / self.num_features) ** 0.5, x.square().sum(dim=-1) / 2)
