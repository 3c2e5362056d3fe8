"""What the hybrids share: exact weights for some keys of a query, a feature map for the others, one normaliser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureMap
from ..feature_maps.options import Options, option
from ..ops.common import FeatureFunction, compute_dtype
from ..ops.fused import FusedMaps
from ..ops.kernelized import dense_weights
from ..ops.windowed import dense_windowed_weights
from ..registry import FEATURE_MAPS, build_options
from .base import AttentionInputs, LinearAttention


@dataclass(frozen=True)
class HybridOptions(Options):
    """Options of a window with exact weights, and of the feature map outside it."""

    window_size: int = option(64, "tokens with exact weights: the last w, or |i - j| < w", least=1)
    feature_map: str = option("hedgehog", "feature map outside the window")
    feature_map_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of that map"})

    def __post_init__(self) -> None:
        super().__post_init__()
        entry = FEATURE_MAPS.get(self.feature_map)
        if entry.factory.uses_positions:
            # The state of the window delays keys, and does not count the tokens before them.
            raise ValueError(f"A window cannot use {self.feature_map!r}: this feature map needs the tokens' positions.")
        build_options(entry, dict(self.feature_map_options))


class HybridAttention(LinearAttention):
    """Base class of the hybrids. Subclasses implement `forward`, and say which keys have exact weights."""

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__(shape, options)
        entry = FEATURE_MAPS.get(options.feature_map)
        self.feature_map: FeatureMap = entry.factory(shape, build_options(entry, dict(options.feature_map_options)))
        if self.feature_map.signed:
            raise ValueError(
                f"A window cannot use {options.feature_map!r} with these options: its weights can be negative, and one "
                "normaliser over them and the exact weights could cross zero."
            )

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        return dense_windowed_weights(
            inputs.query,
            inputs.key,
            *self._maps(inputs.scaling)[:2],
            inside=self._inside(inputs),
            allowed=inputs.visible(),
            scaling=inputs.scaling,
            log_mix=self._log_mix(inputs),
        )

    def branch_weights(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(inputs.query)
        outside = inputs.visible() & ~self._inside(inputs)
        query_map, key_map, _ = self._maps(inputs.scaling)
        return dense_weights(query_map(inputs.query.to(dtype), 0), key_map(inputs.key.to(dtype), 0), outside), outside

    def _maps(self, scaling: float) -> tuple[FeatureFunction, FeatureFunction, FusedMaps | None]:
        return self.feature_map.functions(scaling)

    def _inside(self, inputs: AttentionInputs) -> Tensor:
        """Return which keys a query sees exactly, `[B | 1, H | 1, L, S]`."""
        raise NotImplementedError

    def _log_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return the log mixing weights of the part outside, `[H]` or `[B | 1, H, L | 1]`."""
        return torch.zeros(self.shape.num_heads, dtype=compute_dtype(inputs.query), device=inputs.query.device)

    @property
    def exact_length(self) -> int:
        return self.options.window_size
