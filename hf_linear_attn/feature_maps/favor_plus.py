"""FAVOR+: positive orthogonal random features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..ops.common import Features
from ..registry import register_feature_map
from .base import AttentionShape, FeatureMap

#: Spreads the seeds of neighbouring layers, so that no two layers of a model share their features.
LAYER_SEED_STRIDE = 1_000_003


def gaussian_features(
    count: int, dim: int, *, seed: int, orthogonal: bool = True, scaling: Literal["chi", "constant"] = "chi"
) -> Tensor:
    """Rows for random features, `[count, dim]`, float32 on the CPU, from a generator of their own.

    Independent: rows are N(0, I). Orthogonal: ⌈count/dim⌉ blocks, each the Q of the QR decomposition of a Gaussian
    matrix with the signs of R's diagonal multiplied in (Haar-distributed); rows are rescaled by the norms of
    independent Gaussian rows (`scaling="chi"`: each row is N(0, I)) or by √dim (`"constant"`).
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")

    if not orthogonal:
        return normal(count).float()
    blocks = []
    for _ in range(math.ceil(count / dim)):
        q, r = torch.linalg.qr(normal(dim))
        blocks.append((q * torch.sign(torch.diagonal(r))).T)
    rows = torch.cat([*blocks, torch.empty(0, dim, dtype=torch.float64, device="cpu")])[:count]
    norms = normal(count).norm(dim=1, keepdim=True) if scaling == "chi" else math.sqrt(dim)
    return (rows * norms).float()


@dataclass(frozen=True)
class FavorPlusOptions:
    num_features: int = field(default=256, metadata={"help": "number of random features m"})
    seed: int = field(default=0, metadata={"help": "seed of the random features; layers draw different ones from it"})
    orthogonal: bool = field(default=True, metadata={"help": "orthogonal blocks instead of independent rows"})
    scaling: Literal["chi", "constant"] = field(
        default="chi",
        metadata={"help": "row norms of orthogonal features: 'chi' (as Gaussian rows) or 'constant' (√d)"},
    )

    def __post_init__(self) -> None:
        if not isinstance(self.num_features, int) or self.num_features < 1:
            raise ValueError(f"num_features must be a positive integer, got {self.num_features!r}.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a non-negative integer, got {self.seed!r}.")
        if self.scaling not in ("chi", "constant"):
            raise ValueError(f"scaling must be 'chi' or 'constant', got {self.scaling!r}.")


@register_feature_map(
    "favor+",
    description="positive orthogonal random features, unbiased for exp(τ q·k)",
    paper="Choromanski et al. 2020, arXiv:2009.14794",
    options=FavorPlusOptions,
    learned=False,
    advice="needs no training data at all; error grows quickly with the size of q and k",
)
class FavorPlusFeatureMap(FeatureMap):
    """`φ(x) = exp(W x' - ‖x'‖²/2) / √m` with `x' = √τ x` and rows of W ~ N(0, I). Choromanski et al., arXiv:2009.14794.

    `E[φ(q)·φ(k)] = exp(τ q·k)` over the draw of W. The largest exponent over the features of each token leaves as its
    log scale, so nothing overflows in any precision; the causal form carries the running maximum over keys j <= i and
    never looks ahead. W `[m, d]` is a persistent buffer, drawn from `seed` and the layer's index.
    """

    weight: Tensor

    def __init__(self, shape: AttentionShape, options: FavorPlusOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        weight = gaussian_features(
            options.num_features,
            shape.head_dim,
            seed=options.seed + LAYER_SEED_STRIDE * shape.layer_index,
            orthogonal=options.orthogonal,
            scaling=options.scaling,
        )
        self.register_buffer("weight", weight)

    def query(self, x: Tensor, scaling: float) -> Features:
        x = x * scaling**0.5
        exponent = x @ self.weight.to(x.dtype).T - x.square().sum(dim=-1, keepdim=True) / 2
        top = exponent.detach().amax(dim=-1, keepdim=True)
        # The maximum is a constant of the sum: it is divided out here and multiplied back by whoever reads log_scale.
        values = torch.exp(exponent - top) * self.num_features**-0.5
        return Features(values, top.squeeze(-1))
