"""What a feature map is: the φ of kernelized attention, with the shape and the options that it is built for."""

from dataclasses import dataclass
from typing import Any, dataclass_transform

import torch
from torch import Tensor, nn

from ..ops.common import FeatureFunction, Features
from ..ops.formulas import FusedMaps
from ..registry import FEATURE_MAPS
from ..utils.options import check_argument, check_options, option


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
    #: The bound of all logits, where the model has one (`ops.terms.Terms.softcap`).
    softcap: float | None = None
    #: The distance from which on the model's position bias is constant.
    bias_reach: int = 0
    #: Whether the model's position terms go on changing at any distance, so that no sums over far keys have them.
    endless_positions: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in float32."""
        return 4 * self.num_key_value_heads * (self.head_dim + self.value_dim)


def epsilon_option(default: float, added_to: str = "every feature") -> Any:
    """Return the field of a small number that leaves no query without any weight."""
    help = f"added to {added_to}; a query that shares no feature with any key then attends to their average"
    return option(default, help, least=0, below=1)


def decay_option(what: str = "share of the state that is forgotten") -> Any:
    """Return the field of a decay at the start of training."""
    return option(1e-2, f"{what} per token at the start, in (0, 0.5]", above=0, most=0.5)


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Options:
    """Base class of options, whose subclasses are frozen dataclasses without a decorator.

    A value of another type than that of its field, made by `option`, or out of its bounds is a ValueError.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        check_options(self, check_argument)


FeatureFunctions = tuple[FeatureFunction, FeatureFunction, FusedMaps | None]
"""The maps of queries and of keys as functions, and both as formulas if there are any."""


class FeatureMap(nn.Module):
    """`φ_q, φ_k`: queries `[B, H, L, d]` and keys `[B, G, L, d]` to features of size `num_features`.

    Inputs arrive in float32 (float64 for float64 models); parameters are cast to that dtype before use. `scaling` is
    τ, the scale of the model's own softmax. A map whose values can overflow returns its log scale beside them
    (see `ops.common.Features`).
    """

    num_features: int
    #: Whether the products of features are a distribution over keys once normalised (no negative ones, never all zero).
    distribution = True
    #: Whether products of features can be negative, so that the normaliser can cross zero (see `ops.common.divide`).
    signed = False
    #: Whether the map serves capped logits: it learns such weights, or estimates those without the cap.
    serves_caps = False
    #: Whether `fit(keys, queries)` and `weigh(bias)` find a start for the model's own keys (see `feature_maps.vq`).
    fits_keys = False

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        #: The options, with all that they leave to the shape of the layer filled in.
        self.options = options

    @property
    def redraws(self) -> bool:
        """Whether the next forward pass in training mode begins with new random features."""
        return False

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

    def fused(self, scaling: float) -> FusedMaps | None:
        """Return the formulas of `query` and `key`, for backends that fuse them with the sums; None without any."""
        return None

    def functions(self, scaling: float) -> FeatureFunctions:
        """Return both maps as functions, and as formulas if there are any."""
        formulas = self.fused(scaling)
        if formulas is not None:
            return formulas[0].features, formulas[1].features, formulas
        return lambda x: self.query(x, scaling), lambda x: self.key(x, scaling), None

    def extra_repr(self) -> str:
        return f"num_features={self.num_features}"


def constant_parameter(*sizes: int, value: float = 0.0) -> nn.Parameter:
    """Return a parameter of equal numbers in float32 on the CPU, whatever torch's default dtype and device are."""
    return nn.Parameter(torch.full(sizes, float(value), dtype=torch.float32, device="cpu"))


FEATURE_MAPS.base_class = FeatureMap
