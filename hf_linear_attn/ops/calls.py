"""The calls of attention: what a mechanism receives, and what it hands to the backends.

A mechanism receives `AttentionInputs` and computes them by itself, or makes a `BackendCall` of them, which any backend
can compute: it has the feature maps as functions and as formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .common import FeatureFunction, State
from .formulas import FusedMap, FusedMaps
from .ranks import Ranks
from .terms import Terms, no_terms


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The inputs of one attention call: `B` rows, `H` query heads, `G` key-value heads, `L` queries, `S` keys.

    Attributes:
        query: `[B, H, L, d]`, after projections and rotary positions.
        key: `[B, G, S, d]`; G divides H (grouped-query heads).
        value: `[B, G, S, e]`.
        scaling: τ, the factor of `q·k` in the model's own softmax.
        causal: whether a token sees earlier tokens (and itself) only.
        mask: `[B, S]`, True for real tokens, or None where all are. It says nothing of the causal order. Explicit
            weights may have a full mask `[B | 1, H | 1, L, S]` instead, which decides by itself, `causal` or not: in a
            prefix a token may look ahead.
        state: the state after earlier tokens; query, key, value and mask then belong to the new tokens only (L = S).
        return_state: whether the state after the last token is returned.
        first_call: False for the second and later calls of one forward pass, of which packed documents make several:
            what is drawn anew for each forward pass (`FeatureMap.begin_forward`) stays as it is.
        start: the position of the first query, for explicit weights of some queries of a bidirectional call. (Causal
            queries are the last ones of the keys.)
        ranks: the processes of context parallelism, where queries, keys, values and mask are those of one slice of the
            sequence; None otherwise. Only mechanisms with `context_parallel` receive it.
        terms: what the model adds to its logits. Only mechanisms that serve them receive any.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    causal: bool
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = False
    first_call: bool = True
    start: int | None = None
    ranks: Ranks | None = None
    terms: Terms = field(default_factory=no_terms)

    def __len__(self) -> int:
        """Return B. PEFT asks for it where rows have adapters of their own, before it says what it cannot mix."""
        return len(self.query)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def settings(self) -> dict[str, Any]:
        """What a `BackendCall` takes over, beside the tensors."""
        return {
            "causal": self.causal,
            "mask": self.mask,
            "state": self.state,
            "return_state": self.return_state,
            "terms": self.terms,
        }

    @property
    def padding(self) -> Tensor | None:
        """The mask `[B, S]` of real tokens; None where there is none, or a full mask instead."""
        return None if self.mask is None or self.mask.dim() == 4 else self.mask

    def visible(self) -> Tensor:
        """Return which keys a query may see, `[B | 1, H | 1, L, S]`."""
        if self.mask is not None and self.mask.dim() == 4:
            return self.mask
        length, keys = self.query.shape[2], self.key.shape[2]
        allowed = torch.ones(1, 1, length, keys, dtype=torch.bool, device=self.query.device)
        if self.causal:
            allowed = allowed.tril(keys - length)
        return allowed if self.mask is None else allowed & self.mask[:, None, None, :]

    def finite_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value; where gradients are needed without NaN and infinity in queries of padding.

        Their outputs are not read, but the gradients of the keys would have them, too.
        """
        query, padding = self.query, self.padding
        if padding is not None and torch.is_grad_enabled():
            is_padding = ~self.of_queries(padding)[:, None, :, None]
            query = query.masked_fill(is_padding & ~query.isfinite(), 0.0)
        return query, self.key, self.value

    def of_queries(self, values: Tensor) -> Tensor:
        """Return the part of `values [B, S]` that belongs to the queries."""
        first = values.shape[1] - self.query.shape[2] if self.start is None else self.start
        return values[:, first : first + self.query.shape[2]]


class GatedKeys(NamedTuple):
    """Features of keys `[B, G, L, m]`, their log decay `[B, G, L, 1 | m]`, and their log scale `[B, G, L]` or None."""

    values: Tensor
    log_decay: Tensor
    log_scale: Tensor | None = None


@dataclass
class _FeatureCall:
    """One call of attention with feature maps, as every backend receives it.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, G, S, d]`, with `H = G·R`.
        value: `[B, G, S, e]`.
        query_features: The map of queries as a function.
        key_features: The map of keys as a function.
        fused: Both maps as formulas; None for maps without a formula.
        num_features: m.
        causal: Whether query i sees keys j <= i only (then L = S).
        signed: Whether features can be negative; the normaliser is guarded then.
        mask: `[B | 1, S]`, True for tokens; None without padding.
        state: The state before these tokens (causal form).
        return_state: Whether the state after the last token is needed.
        terms: What the model adds to its logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_features: FeatureFunction
    key_features: Callable[[Tensor], Any]
    fused: FusedMaps | None
    num_features: int
    causal: bool
    signed: bool = False
    mask: Tensor | None = None
    state: State | None = None
    return_state: bool = False
    terms: Terms = field(default_factory=no_terms)

    def needs_grad(self) -> bool:
        """Return whether a gradient is recorded for an input, the state, a map or a tensor of mixing weights."""
        if not torch.is_grad_enabled():
            return False
        values = (*vars(self).values(), *(self.state or {}).values(), *(self.fused or ()), *self.terms.tensors())
        return any(value.requires_grad for value in values if isinstance(value, Tensor | FusedMap))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)


class KernelizedCall(_FeatureCall):
    """One call of kernelized attention (`ops.kernelized`)."""


class Mix(NamedTuple):
    """Log mixing weights as a function that computes `[B | 1, H, L | 1]`, and as a formula,

        g = base + clip(√τ u·q, ±bound) - log(1 + max(n + 1 - w - s, 0) / N)

    base `[B | 1, H, L | 1]`, weight u `[H, d]`, s sinks; saturation N of a decoding step, or of a sequence without
    padding from its first token on, n the tokens before the row (None: without the last term).
    """

    compute: Callable[[], Tensor]
    base: Tensor
    weight: Tensor
    bound: float
    saturation: int | None = None


class FarPass(NamedTuple):
    """Causal attention to keys outside of windows: the i-th of the queries sees the first i of the keys, where the mask
    `[B, n]` is True. `reverse`: both, and the mask, are counted from their ends."""

    queries: slice
    keys: slice
    reverse: bool
    mask: Tensor


@dataclass(kw_only=True)
class WindowedCall(_FeatureCall):
    """One call of windowed attention: exact weights at distances below `window`, kernelized ones beyond
    (`ops.windowed`).

    `scaling` is τ, and log_mix `[H]` or row by row `[B | 1, H, L | 1]`; without gradients it may be a formula. With
    `sinks` n, the first n tokens of each row (causal), or the first n and the last n, have exact weights for every
    query (`ops.sinks`). The state stores keys and values in `cache_dtype`, int8 as in `ops.int8` (None: as they are).
    """

    window: int
    scaling: float
    log_mix: Tensor | Mix
    sinks: int = 0
    cache_dtype: torch.dtype | None = None

    def log_mixing_weights(self) -> Tensor:
        """Return the log mixing weights as a tensor `[B | 1, H, L | 1]`."""
        log_mix = self.log_mix if isinstance(self.log_mix, Tensor) else self.log_mix.compute()
        return log_mix.view(1, -1, 1) if log_mix.dim() == 1 else log_mix

    def mixing_formula(self) -> tuple[Tensor, Tensor | None, float, int | None]:
        """Return base, weight u, bound and saturation of the log mixing weights; the base alone without a formula."""
        if isinstance(self.log_mix, Mix):
            mix = self.log_mix
            return mix.base.detach(), mix.weight.detach().contiguous(), mix.bound, mix.saturation
        return self.log_mixing_weights().detach(), None, 0.0, None


@dataclass(kw_only=True)
class GatedCall(_FeatureCall):
    """One call of causal attention with a decaying state (`ops.gated`, `ops.gated_delta`).

    There is no formula: `key_features` returns keys with their decays (`GatedKeys`), one per feature or one per head.
    `ops.gated` takes fewer queries than keys, too: those of the last tokens.
    """

    per_feature: bool = False
    fused: None = None
    causal: bool = True
    return_state: bool = True


BackendCall = KernelizedCall | WindowedCall | GatedCall
