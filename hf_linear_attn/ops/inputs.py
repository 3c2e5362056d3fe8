"""The inputs of one attention call, as mechanisms receive them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .common import State
from .parallel import Ranks


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

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def settings(self) -> dict[str, Any]:
        """What a call of `ops.fused` takes over, beside the tensors."""
        return {"causal": self.causal, "mask": self.mask, "state": self.state, "return_state": self.return_state}

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

    def of_queries(self, values: Tensor) -> Tensor:
        """Return the part of `values [B, S]` that belongs to the queries."""
        first = values.shape[1] - self.query.shape[2] if self.start is None else self.start
        return values[:, first : first + self.query.shape[2]]
