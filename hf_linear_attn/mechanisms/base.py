"""The base class of attention mechanisms: modules from q, k, v and a mask to outputs, with or without a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape
from ..ops.common import State, compute_dtype
from ..registry import ATTENTIONS


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """The inputs of one attention call: `B` rows, `H` query heads, `G` key-value heads, `L` queries, `S` keys.

    Attributes:
        query: `[B, H, L, d]`, after projections and rotary positions.
        key: `[B, G, S, d]`; G divides H (grouped-query heads).
        value: `[B, G, S, e]`.
        scaling: τ, the factor of `q·k` in the model's own softmax.
        causal: whether a token sees earlier tokens (and itself) only.
        mask: `[B, S]`, True for real tokens, or None where all are. It says nothing of the causal order.
        state: the state after earlier tokens; query, key, value and mask then belong to the new tokens only (L = S).
        return_state: whether the state after the last token is returned.
        first_call: False for the second and later calls of one forward pass, of which packed documents make several:
            what is drawn anew for each forward pass (`FeatureMap.begin_forward`) stays as it is.
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

    def refuse_bidirectional_state(self) -> None:
        """Raise a ValueError where bidirectional attention is asked for a state, or given one."""
        if not self.causal and (self.state is not None or self.return_state):
            raise ValueError("Bidirectional attention has no state: a later token would change earlier outputs.")


class LinearAttention(nn.Module):
    """Base class of the mechanisms. Subclasses implement `forward`.

    Shapes are those of `AttentionInputs`. Attention dropout acts on softmax weights, which do not exist here: it is not
    applied (dropout of the residual stream is, by the model).
    """

    #: Whether `attention_weights` accepts an arbitrary mask `[B | 1, H | 1, L, S]`.
    dense_masks = False
    #: Whether the implied weights of a query are a distribution over keys (non-negative, summing to 1).
    distribution = True
    #: Learning rate that suits the learned parts in attention transfer.
    transfer_lr = 1e-2

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        self.options = options

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: Any) -> Any:
        """Fill in what the options leave to the shape of the layer, so that the saved options are complete."""
        return options

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        """Compute attention, for a whole sequence or for the tokens after a state.

        Args:
            inputs: queries, keys and values, and how they see each other. `inputs.state` is not changed, unless it is
                an `ops.common.InPlaceState`, whose memory may be written over.

        Returns:
            The output `[B, H, L, e]` in the dtype of the values, and the state after the last token if
            `inputs.return_state` (None in mechanisms without a state).

        Raises:
            ValueError: a state is given or requested, and the call is not causal.
            NotImplementedError: the mechanism does not serve the direction.
        """
        raise NotImplementedError

    def attention_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        """Return the implied weights `[B, H, L, S]`, rows summing to 1: `forward` equals their product with the values.

        This takes O(L·S): it serves for study, for training losses on short inputs, and for masks that no linear form
        can honour. Unless a mechanism has a form of its own, these are the outputs for an identity of values.

        Args:
            query: `[B, H, L, d]`.
            key: `[B, G, S, d]`.
            scaling: τ, the factor of `q·k`.
            causal: Whether a token sees earlier ones only.
            mask: `[B, S]`, or `[B | 1, H | 1, L, S]` where `dense_masks`, or None.
        """
        keys = key.shape[2]
        identity = torch.eye(keys, dtype=compute_dtype(query), device=key.device).expand(*key.shape[:2], keys, keys)
        return self.forward(AttentionInputs(query, key, identity, scaling, causal, mask))[0]

    def separable_queries(self, causal: bool) -> bool:
        """Return whether `attention_weights` works for some of the queries, so that its memory can be bounded.

        If causal, these are the last ones of the keys. If bidirectional, they come with all keys, and `start=` (an
        argument of `branch_weights` too) is the position of the first of them.
        """
        return False

    def branch_weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        start: int | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return the weights of the linear branch of a hybrid, so that it can be trained where the exact one hides it.

        Returns:
            The weights `[B, H, L, S]` over the keys outside the exact part, rows summing to 1, and a boolean tensor,
            broadcastable to them, that is True for these keys. None for mechanisms of one branch.
        """
        return None

    def dense_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool, mask: Tensor
    ) -> Tensor:
        """Return the weights times the values: the quadratic form, for an arbitrary mask `[B | 1, H | 1, L, S]`."""
        if (feature_map := getattr(self, "feature_map", None)) is not None:
            feature_map.begin_forward()
        weights = self.attention_weights(query, key, scaling=scaling, causal=causal, mask=mask)
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
        return (weights @ value.to(weights.dtype)).to(value.dtype)

    def share_with(self, first: LinearAttention) -> None:
        """Share parameters with the first layer of the same class and options; called when a model is patched.

        A mechanism that shares parameters across layers takes those of `first`, and names them with `tie`.
        """

    def tie(self, *names: str) -> None:
        """Declare parameters of this module that belong to another layer's: Transformers then saves them once."""
        self._tied_weights_keys = {name: name for name in names}

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are another layer's."""
        return tuple(getattr(self, "_tied_weights_keys", ()))

    def learned_parameters(self) -> int:
        """Return the number of parameters that the mechanism adds; those that are another layer's count there."""
        return sum(parameter.numel() for name, parameter in self.named_parameters() if name not in self.tied_parameters)

    @property
    def exact_length(self) -> int:
        """The longest input in tokens that is attended to exactly; 0 where none is."""
        return 0

    def state_bytes(self, length: int = 0) -> int:
        """Return the bytes of the state of one token stream after `length` tokens; 0 in a mechanism without a state."""
        return 0

    def extra_repr(self) -> str:
        return repr(self.options)


ATTENTIONS.base_class = LinearAttention


def visible(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Return which keys a query may see, `[B | 1, H | 1, L, S]`, from a padding mask `[B, S]` or a full mask.

    A full mask decides by itself, `causal` or not: in a prefix a token may look ahead.
    """
    if mask is not None and mask.dim() == 4:
        return mask
    length, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device)
    if causal:
        allowed = allowed.tril(keys - length)
    return allowed if mask is None else allowed & mask[:, None, None, :]
