"""A feature map for proteins: the content of hedgehog, times a kernel of how far apart two residues are.

    w(i, j) = f(q_i)·f(k_j) κ(i - j)
    κ(Δ) = a_any + a_segment F(Δ) + a_side (1 + cos(2πΔ / 3.6)),    a = softmax(mix), learned for each head

An α-helix has 3.6 residues a turn (Pauling, Corey and Branson 1951, doi:10.1073/pnas.37.4.205), so that residues at
such distances lie on the same side of it. It spans a membrane's hydrophobic core of 3 nm with some 20 residues of
0.15 nm each (White and Wimley 1999, doi:10.1146/annurev.biophys.28.1.319): F is a bump that wide.

A kernel of differences is a product of features where its spectrum has no negative number (Bochner's theorem):
`s cos(ω(i - j)) = s [cos ωi, sin ωi]·[cos ωj, sin ωj]`. F is Fejér's kernel, `1 + 2 Σ_n (1 - n/N) cos(2πnΔ/P)` for
n < N: never negative, N at 0, and back after P residues. No part of κ is negative either, and a_any is positive.

Importing this file registers the map: `hla.patch_model(model, "helix")`.
"""

import math
from functools import partial

import torch
from torch import Tensor

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape, FeatureFunctions, constant_parameter
from hf_linear_attn.feature_maps.hedgehog import HedgehogFeatureMap, HedgehogOptions
from hf_linear_attn.ops.common import FeatureFunction, Features
from hf_linear_attn.utils.options import option

#: Residues of a turn, and of a segment in a membrane.
TURN, SEGMENT = 3.6, 20
#: N, numbers in the spectrum of F; P, after which F comes back: it is 0.886 P / N wide at half of its height.
HARMONICS = 4
PERIOD = SEGMENT * HARMONICS / 0.886


class HelixOptions(HedgehogOptions):
    feature_dim: int | None = option(16, "rows f of W per head, 2f (2N + 1) features (None: as hedgehog)", least=1)


@hla.register_feature_map(
    "helix",
    description="softmax features times a kernel of helices and membrane segments",
    paper="recipes/helix.py",
    options=HelixOptions,
    learned=True,
)
class HelixFeatureMap(HedgehogFeatureMap):
    """`φ(x, t) = f(x) ⊗ [1, cos ω₁t, sin ω₁t, …]`, for queries times the spectrum of their head: m = 2f (2N + 1)."""

    uses_positions = True

    def __init__(self, shape: AttentionShape, options: HelixOptions) -> None:
        super().__init__(shape, options)
        self.num_features *= 2 * HARMONICS + 1
        self.mix = constant_parameter(shape.num_heads, 3)

    def functions(self, scaling: float, positions: tuple[Tensor, Tensor] | None = None) -> FeatureFunctions:
        """Return both maps as functions of a block `[B, H, L, d]` and its start, for positions `[B | 1, all L]`."""
        assert positions is not None
        query, key, _ = super().functions(scaling)
        return (
            partial(_with_waves, query, _waves(positions[0]) * self._spectrum().to(positions[0].dtype)),
            partial(_with_waves, key, _waves(positions[1])),
            None,
        )

    def _spectrum(self) -> Tensor:
        """Return the factors of all waves, `[H, 1, 2N + 1]`; the constant's is a_any + a_segment + a_side = 1."""
        _, segment, side = self.mix.softmax(dim=-1).unbind(dim=-1)
        falling = [2 * (1 - n / HARMONICS) * segment for n in range(1, HARMONICS)]
        waves = torch.stack([*falling, side], dim=-1).repeat_interleave(2, dim=-1)
        return torch.cat([torch.ones_like(waves[:, :1]), waves], dim=-1).unsqueeze(1)


def _waves(positions: Tensor) -> Tensor:
    """Return `[1, cos, sin, …]` of all frequencies, `[B | 1, 1, L, 2N + 1]`."""
    turns = torch.stack([*(positions * n / PERIOD for n in range(1, HARMONICS)), positions / TURN], dim=-1)
    angles = 2 * math.pi * turns
    waves = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(-2)
    return torch.cat([torch.ones_like(positions).unsqueeze(-1), waves], dim=-1).unsqueeze(1)


def _with_waves(content: FeatureFunction, waves: Tensor, x: Tensor, start: int) -> Features:
    values, log_scale = content(x, start)
    return Features((values.unsqueeze(-1) * waves[:, :, start : start + x.shape[2], None]).flatten(-2), log_scale)
