"""Random rows of feature maps, from generators of their own."""

import math
from typing import Literal

import torch
from torch import Tensor

from ..utils.options import option
from .base import AttentionShape, Options

#: Spreads the seeds of neighbouring layers.
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


def layer_seed(seed: int, shape: AttentionShape) -> int:
    """Return the seed of a layer, so that no two layers of a model share their features."""
    return seed + LAYER_SEED_STRIDE * shape.layer_index


def gaussian(*sizes: int, seed: int) -> Tensor:
    """Return independent N(0, 1) numbers, float32 on the CPU, from a generator of their own."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu")


def unit_rows(count: int, dim: int, layer_index: int) -> Tensor:
    """Rows `[count, dim]` of length one: the identity, continued by random orthonormal rows where count > dim."""
    extra = gaussian_features(max(count - dim, 0), dim, seed=layer_index, scaling="constant")
    return torch.cat([torch.eye(dim, device="cpu"), extra / dim**0.5])[:count]


class RandomFeatureOptions(Options):
    """Options of maps with random rows."""

    num_features: int = option(256, "number of random features m", least=1)
    seed: int = option(0, "seed of the random features; layers draw different ones from it", least=0)
    orthogonal: bool = option(True, "orthogonal blocks instead of independent rows")
    scaling: Literal["chi", "constant"] = option(
        "chi", "row norms of orthogonal features: 'chi' (as Gaussian rows) or 'constant' (√d)"
    )

    def draw(self, count: int, shape: AttentionShape, seed: int | None = None) -> Tensor:
        """Draw rows `[count, d]` for a layer, from `seed` instead of the option where it is given."""
        seed = layer_seed(self.seed if seed is None else seed, shape)
        return gaussian_features(count, shape.head_dim, seed=seed, orthogonal=self.orthogonal, scaling=self.scaling)
