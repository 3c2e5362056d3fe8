"""What an attention mechanism is: a module that turns q, k, v and a mask into outputs, with or without a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape
from ..ops.common import State


class LinearAttention(nn.Module):
    """Base class of the mechanisms. Subclasses implement `forward` and `attention_weights`.

    Shapes: query `[B, H, L, d]`, key `[B, G, S, d]`, value `[B, G, S, e]` (G divides H: grouped-query heads), mask
    `[B, S]` with True for real tokens. `scaling` is τ, the scale of the model's own softmax. Attention dropout acts on
    softmax weights, which do not exist here: it is not applied (dropout of the residual stream is, by the model).
    """

    #: Whether `attention_weights` accepts an arbitrary mask `[B | 1, H | 1, L, S]`.
    dense_masks = False
    #: Whether the implied weights of a query are a distribution over keys (non-negative, summing to 1).
    distribution = True
    #: Whether a call goes on with a forward pass, of which packed documents make several calls.
    goes_on = False
    #: Learning rate that suits the learned parts in attention transfer.
    transfer_lr = 1e-2

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        self.options = options

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: Any) -> Any:
        """Fill in what the options leave to the model, so that the saved settings are complete."""
        return options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        state: State | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        """The output `[B, H, L, e]` in the dtype of `value`, and the state after the last token if `keep_state`.

        With a `state`, query, key, value and mask hold the new tokens only (L = S). It stays as it is, unless it is an
        `ops.common.OwnState`.
        """
        raise NotImplementedError

    def attention_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        """The implied weights `[B, H, L, S]`, rows summing to 1: `forward` equals their product with the values.

        O(L·S): for study, training losses on short inputs, and masks that no linear form can honour. mask is `[B, S]`,
        or `[B | 1, H | 1, L, S]` where `dense_masks`.
        """
        raise NotImplementedError

    def separable_queries(self, causal: bool) -> bool:
        """Whether `attention_weights` may be asked for some of the queries, to bound its memory.

        Causal: for queries that are the last ones of the keys given. Bidirectional: for any of them, with all keys.
        """
        return False

    def branch_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """For hybrids: the linear branch by itself, so that it can be trained where the exact branch would hide it.

        Weights `[B, H, L, S]` over the keys outside the exact part, rows summing to 1, and where these keys are
        (boolean, broadcastable to the weights). None for mechanisms of one branch.
        """
        return None

    def dense_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool, mask: Tensor
    ) -> Tensor:
        """`attention_weights` times the values: the quadratic form, for an arbitrary mask `[B | 1, H | 1, L, S]`."""
        weights = self.attention_weights(query, key, scaling=scaling, causal=causal, mask=mask)
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
        return (weights @ value.to(weights.dtype)).to(value.dtype)

    def share_with(self, first: LinearAttention) -> None:
        """Called when a model is patched, for every layer but the first of those with the same class and options.

        A mechanism that shares parameters across layers takes those of `first`, and names them with `tie`.
        """

    def tie(self, *names: str) -> None:
        """Declare parameters of this module that belong to another layer's: Transformers then saves them once."""
        self._tied_weights_keys = {name: name for name in names}

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are another layer's."""
        return tuple(getattr(self, "_tied_weights_keys", ()))

    def learned_parameters(self) -> int:
        """Number of parameters that the mechanism adds; those that are another layer's count there."""
        return sum(held.numel() for name, held in self.named_parameters() if name not in self.tied_parameters)

    @property
    def exact_length(self) -> int:
        """Inputs of up to so many tokens are attended to exactly: what the mechanism does beyond shows on longer ones.

        0 where nothing is exact.
        """
        return 0

    def state_bytes(self, length: int = 0) -> int:
        """Bytes of the state of one token stream after `length` tokens; 0 where the mechanism has no state."""
        return 0


def visible(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """`[B | 1, H | 1, L, S]`: which keys a query may see, from a padding mask `[B, S]` or a full mask.

    A full mask says it all, `causal` or not: a prefix may look ahead.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    length, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed.tril(keys - length)
    return allowed if mask is None else allowed & mask[:, None, None, :]
