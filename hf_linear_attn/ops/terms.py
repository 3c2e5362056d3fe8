"""Terms that a model adds to the logits of its attention, declared once and carried by every call.

    l_ij = cap tanh(τ q_i·k_j / cap) + b(i - j) - m (i - j)
    o_i  = Σ_j exp(l_ij) v_j / (exp(s) + Σ_j exp(l_ij))

Exact weights have them as they stand. Outside of a window the weight `φ(q_i)·φ(k_j)` is multiplied by `exp(b(i - j))`,
and b is constant on either side beyond its last distance: sums over far keys are multiplied by one number a head. With
a slope m (ALiBi, Press et al. 2021, arXiv:2108.12409) it is multiplied by `exp(-m (i - j))`: such sums decay by
`exp(-m)` a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .common import Features, compute_dtype, softmax_rows
from .disentangled import Disentangled

#: Queries whose explicit weights are in memory at a time.
QUERY_BLOCK = 256

#: Least exponent of the factor of a weight: the smallest factors would be zeros, which have no logarithm.
LEAST_EXPONENT = -80.0


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The terms of one attention layer; None where it has no such term. It is false where it has none at all.

    Attributes:
        sink: s `[H]`, a logit without a key: an attention sink (gpt-oss).
        softcap: cap, the bound of all logits (Gemma 2).
        bias: b `[H, 2 D + 1]` for the distances i - j from -D to D, constant beyond them (T5).
        relative: Vectors for each distance that queries and keys are multiplied by (DeBERTa).
        slope: m `[H]`, for as many key-value heads; `-m (i - j)` is added in decoders (ALiBi: BLOOM).
    """

    sink: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    relative: Disentangled | None = None
    slope: Tensor | None = None

    def __bool__(self) -> bool:
        # Every decoding step comes here, so that it is terse.
        return not (self.sink is self.softcap is self.bias is self.relative is self.slope is None)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Terms:
        """Apply a function to the tensors, whose first dimension is that of the query heads."""
        heads = (self.sink, self.bias, self.slope)
        sink, bias, slope = (None if value is None else function(value) for value in heads)
        relative = None if self.relative is None else self.relative.apply(function)
        return Terms(sink, self.softcap, bias, relative, slope)

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over the tensors that there are."""
        tables = () if self.relative is None else self.relative.tensors()
        heads = (self.sink, self.bias, self.slope)
        return itertools.chain((value for value in heads if value is not None), tables)

    def names(self) -> tuple[str, ...]:
        """Return the names of the terms that there are."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def capped(self, logits: Tensor) -> Tensor:
        """Return the logits within the cap."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def applied(self, logits: Tensor, distance: Tensor | None) -> Tensor:
        """Return logits `[B, H, L, S]` within the cap and with what depends on distances i - j as for `by_distance`."""
        logits = self.capped(logits)
        if not self.has_distances or distance is None:
            return logits
        return logits + self.by_distance(distance).to(logits.dtype)

    def of_pairs(self, query: Tensor, key: Tensor, distance: Tensor) -> Tensor | float:
        """Return what queries τ q `[B, H, L, d]` and keys `[B, H, S, d]` add to their logits by their distances."""
        return 0.0 if self.relative is None else self.relative.pairs(query, key, distance)

    def far_factors(self, query: Tensor, key: Tensor, distance: Tensor, window: int) -> Tensor | float:
        """Return the factors of all weights outside of a window for these tokens, `[B | 1, H, L, S]`."""
        if self.has_distances:
            return self.by_distance(distance).clamp_min(LEAST_EXPONENT).exp()
        if self.relative is None:
            return 1.0
        rows = self.relative.exponents(query, window, keys=False, scaling=1.0)
        keys = self.relative.exponents(key, window, keys=True, scaling=1.0)
        sides = (rows.unsqueeze(3) + keys.unsqueeze(2)).exp()
        return torch.where(distance > 0, sides[..., 0], sides[..., 1])

    @property
    def has_distances(self) -> bool:
        """Whether a number that depends on the distance alone is added."""
        return self.bias is not None or self.slope is not None

    def by_distance(self, distance: Tensor) -> Tensor:
        """Return b or `-m (i - j)` at the distances i - j `[…, L, S]`, as `[…, H, L, S]`."""
        if self.slope is not None:
            return -self.slope[:, None, None] * distance.unsqueeze(-3)
        assert self.bias is not None
        last = self.bias.shape[1] // 2
        return self.bias[:, distance.clamp(-last, last) + last].movedim(0, -3)

    def placed(self, keys: Features) -> Features:
        """Return the features of all keys with `m j` in their log scales, so that only `-m i` is missing."""
        if self.slope is None:
            return keys
        places = torch.arange(keys.values.shape[2], device=keys.values.device)
        values, log_scale = keys.scaled()
        assert log_scale is not None
        return Features(values, log_scale + self.slope[:, None].to(values.dtype) * places)

    def outside(self, distance: Tensor) -> Tensor:
        """Return `exp(b(i - j) - b(∞))`, by which weights outside of a window are multiplied beside `exp(far)`."""
        return (self.by_distance(distance) - self.far[:, None, None]).exp()

    @property
    def far(self) -> Tensor:
        """b of keys far before the query, `[H]`."""
        assert self.bias is not None
        return self.bias[:, -1]

    @property
    def behind(self) -> Tensor:
        """`exp(b(-∞) - b(∞))`, `[H]`: the factor of keys far behind the query."""
        assert self.bias is not None
        return (self.bias[:, 0] - self.far).exp()


#: Those of most models.
NO_TERMS = Terms()


def no_terms() -> Terms:
    """Return `NO_TERMS`: a default that `torch.compile` can trace."""
    return NO_TERMS


def distances(queries: int, keys: int, start: int | None, device: torch.device) -> Tensor:
    """Return i - j of queries that begin at position `start` (None: they are the last of the keys), `[L, S]`."""
    rows = torch.arange(queries, device=device) + (keys - queries if start is None else start)
    return rows[:, None] - torch.arange(keys, device=device)


def weights_with_terms(
    query: Tensor, key: Tensor, allowed: Tensor | None, scaling: float, terms: Terms, distance: Tensor | None
) -> Tensor:
    """Return softmax weights `[B, H, L, S]`; zeros in a row that sees no key. With a sink, rows sum to less than 1.

    Args:
        query: `[B, H, L, d]`; key is `[B, G, S, d]`.
        allowed: `[B | 1, H | 1, L | 1, S]`, True where a query sees a key; None where each sees all.
        scaling: τ, the factor of `q·k`.
        terms: What is added to the logits.
        distance: i - j, `[L, S]` or `[B, L, S]`; None where no term depends on it.
    """
    dtype = compute_dtype(query)
    keys = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query.to(dtype) @ keys.transpose(-1, -2)) * scaling
    logits = terms.applied(logits, distance)
    if distance is not None:
        logits = logits + terms.of_pairs(query.to(dtype) * scaling, keys, distance)
    if terms.sink is None:
        return softmax_rows(logits, allowed)
    column = terms.sink.to(dtype)[:, None, None].expand(*logits.shape[:3], 1)
    if allowed is not None:
        allowed = torch.nn.functional.pad(allowed, (0, 1), value=True)
    return softmax_rows(torch.cat([logits, column], dim=-1), allowed)[..., :-1]


def attend_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    scaling: float,
    terms: Terms,
    distance: Tensor | None,
) -> Tensor:
    """Return exact attention `[B, H, L, e]` in the dtype of `value`, with the weights of `weights_with_terms`."""
    length = query.shape[2]
    values = value.to(compute_dtype(value)).repeat_interleave(query.shape[1] // value.shape[1], 1)
    whole = torch.compiler.is_compiling() or terms.relative is not None  # whose products with keys serve all queries
    size = length if whole else QUERY_BLOCK
    blocks = []
    for start in range(0, length, size) if isinstance(length, int) else (0,):
        rows = slice(start, start + size)
        shown = allowed if allowed is None or allowed.shape[2] == 1 else allowed[:, :, rows]
        offsets = None if distance is None else distance[..., rows, :]
        blocks.append(weights_with_terms(query[:, :, rows], key, shown, scaling, terms, offsets) @ values)
    out = torch.cat(blocks, dim=2) if blocks else values.new_zeros(*query.shape[:3], values.shape[3])
    return out.to(value.dtype)
