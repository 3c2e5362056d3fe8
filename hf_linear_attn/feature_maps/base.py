"""What a feature map is: the φ of kernelized attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.common import FeatureFunction, Features
from ..ops.fused import FusedMaps
from ..registry import FEATURE_MAPS


@dataclass(frozen=True)
class AttentionShape:
    """The attention layer that a mechanism is built for."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    value_dim: int
    #: Place among the model's self-attention layers; random features of different layers differ.
    layer_index: int = 0
    #: Longest input of the model, where it has a limit.
    max_length: int | None = None
    #: Whether the layer is causal.
    causal: bool = False


class FeatureMap(nn.Module):
    """`φ_q, φ_k`: queries `[B, H, L, d]` and keys `[B, G, L, d]` to features of size `num_features`.

    Inputs arrive in float32 (float64 for float64 models); parameters are cast to that dtype before use. `scaling` is
    τ, the scale of the model's own softmax. A map whose values can overflow returns its log scale beside them
    (see `ops.common.Features`).

    A map with `uses_positions` takes a third argument, the places `[B | 1, L]` of the tokens among the real tokens of
    their rows (None: 0, 1, …); rows of more than `max_length` real tokens never reach it.
    """

    num_features: int
    #: Whether the products of features are a distribution over keys once normalised (no negative ones, never all zero).
    distribution = True
    #: Whether products of features can be negative, so that the normaliser can cross zero (see `ops.common.divide`).
    signed = False
    #: Whether `query` and `key` take positions.
    uses_positions = False
    #: Most tokens of a row that a map with positions can tell apart (None: no limit).
    max_length: int | None = None

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        self.options = options

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: Any) -> Any:
        """Fill in what the options leave to the model, so that the saved settings are complete."""
        return options

    def begin_forward(self) -> None:
        """Called by the mechanism before each forward pass that does not go on from a state."""

    def query(self, x: Tensor, scaling: float) -> Features:
        """Map queries `[B, H, L, d]`; by the formula, unless a subclass defines it."""
        formulas = self.fused(scaling)
        if formulas is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither query nor fused.")
        return formulas[0].features(x)

    def key(self, x: Tensor, scaling: float) -> Features:
        """Map keys `[B, G, L, d]`; by the formula, or as queries where there is none."""
        formulas = self.fused(scaling)
        return self.query(x, scaling) if formulas is None else formulas[1].features(x)

    def fused(self, scaling: float, positions: tuple[Tensor, Tensor] | None = None) -> FusedMaps | None:
        """The formulas of `query` and `key`, for backends that fuse them with the sums; None where there are none.

        Positions `[B | 1, L]` of queries and keys, for maps that use them.
        """
        return None

    def functions(self, scaling: float) -> tuple[FeatureFunction, FeatureFunction, FusedMaps | None]:
        """Return both maps as functions of a block and its start, and as formulas, for maps without positions."""
        formulas = self.fused(scaling)
        if formulas is not None:
            return formulas[0].features, formulas[1].features, formulas
        return lambda x, start: self.query(x, scaling), lambda x, start: self.key(x, scaling), None

    @torch.no_grad()
    def state_bytes(self) -> int:
        """Bytes of the sums over keys `[G, m, e]` and `[G, m]`, in float32, with the running maxima `[G]` of a map that
        has a log scale."""
        shape = self.shape
        device = next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).device
        token = torch.zeros(1, shape.num_key_value_heads, 1, shape.head_dim, device=device)
        maxima = 0 if self.key(token, 1.0).log_scale is None else 1
        return 4 * shape.num_key_value_heads * (self.num_features * (shape.value_dim + 1) + maxima)

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}"


def constant_parameter(*sizes: int, value: float = 0.0) -> nn.Parameter:
    """Return a parameter of equal numbers in float32 on the CPU, whatever torch's default dtype and device are."""
    return nn.Parameter(torch.full(sizes, float(value), dtype=torch.float32, device="cpu"))


FEATURE_MAPS.base_class = FeatureMap
