"""The base class of attention mechanisms: modules from q, k, v and a mask to outputs, with or without a state."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, FeatureMap
from ..ops.common import State, compute_dtype
from ..ops.parallel import Ranks
from ..registry import ATTENTIONS, AttentionEntry


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


class LinearAttention(nn.Module):
    """Base class of the mechanisms. Subclasses implement `forward`.

    Shapes are those of `AttentionInputs`. Attention dropout acts on softmax weights, which do not exist here: it is not
    applied (dropout of the residual stream is, by the model).
    """

    #: The registration of the class.
    entry: AttentionEntry | None = None
    #: Whether `attention_weights` accepts a full mask.
    dense_masks = False
    #: Directions in which a sequence may be split over processes (`AttentionInputs.ranks`): True stands for causal.
    context_parallel: frozenset[bool] = frozenset()
    #: Whether the implied weights of a query are a distribution over keys (non-negative, summing to 1).
    distribution = True
    #: Whether `attention_weights` and `branch_weights` work for some of the queries, so that memory can be bounded.
    separable_queries = False
    #: Learning rate that suits the learned parts in attention transfer.
    transfer_lr = 1e-2

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        #: The options, with all that they leave to the shape of the layer filled in.
        self.options = options

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

    def begin_forward(self, inputs: AttentionInputs) -> None:
        """Check the direction of a call, and announce a new forward pass to the feature map if there is one."""
        if self.entry is not None:
            self.entry.check_direction(inputs.causal)
        if not inputs.causal and (inputs.state is not None or inputs.return_state):
            raise ValueError("Bidirectional attention has no state: a later token would change earlier outputs.")
        feature_map: FeatureMap | None = getattr(self, "feature_map", None)
        if feature_map is not None and inputs.state is None and inputs.first_call:
            feature_map.begin_forward()

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the implied weights `[B, H, L, S]`, rows summing to 1: `forward` equals their product with the values.

        This takes O(L·S): it serves for study, for training losses on short inputs, and for masks that no linear form
        can honour. Unless a mechanism has a form of its own, these are the outputs for an identity of values.
        """
        key, keys = inputs.key, inputs.key.shape[2]
        identity = torch.eye(keys, dtype=compute_dtype(key), device=key.device).expand(*key.shape[:2], keys, keys)
        return self.forward(replace(inputs, value=identity, return_state=False))[0]

    def branch_weights(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
        """Return the weights of the linear branch of a hybrid, so that it can be trained where the exact one hides it.

        Returns:
            The weights `[B, H, L, S]` over the keys outside the exact part, rows summing to 1, and a boolean tensor,
            broadcastable to them, that is True for these keys. None for mechanisms of one branch.
        """
        return None

    def dense_forward(self, inputs: AttentionInputs) -> Tensor:
        """Return the weights times the values: the quadratic form, for a full mask."""
        self.begin_forward(inputs)
        weights = self.attention_weights(inputs)
        value = inputs.value.repeat_interleave(weights.shape[1] // inputs.value.shape[1], dim=1)
        return (weights @ value.to(weights.dtype)).to(value.dtype)

    def share_with(self, first: LinearAttention) -> None:
        """Share parameters with the first layer of the same class and options; called when a model is patched.

        A mechanism that shares parameters across layers takes those of `first`, and names them in `_tied_weights_keys`.
        """

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are another layer's: Transformers saves `_tied_weights_keys` once."""
        return tuple(getattr(self, "_tied_weights_keys", ()))

    def learned_parameters(self) -> int:
        """Return the number of parameters that the mechanism adds; those that are another layer's count there."""
        return sum(parameter.numel() for name, parameter in self.named_parameters() if name not in self.tied_parameters)

    @property
    def exact_length(self) -> int:
        """The longest input in tokens that is attended to exactly; 0 where none is."""
        return 0

    @torch.no_grad()
    def state_bytes(self, length: int = 0) -> int:
        """Return the bytes of the state of one token stream after `length` tokens; 0 in a mechanism without a state.

        Unless a mechanism has a growing state, this is the state after one token of zeros in float32.
        """
        if self.entry is not None and self.entry.state == "none":
            return 0
        device = next(itertools.chain(self.parameters(), self.buffers()), torch.empty(0)).device
        query = torch.zeros(1, self.shape.num_heads, 1, self.shape.head_dim, device=device)
        key = query[:, : self.shape.num_key_value_heads]
        value = key.new_zeros(*key.shape[:3], self.shape.value_dim)
        inputs = AttentionInputs(query, key, value, 1.0, True, return_state=True, first_call=False)
        return sum(tensor.nbytes for tensor in (self.forward(inputs)[1] or {}).values())

    def extra_repr(self) -> str:
        return repr(self.options)


ATTENTIONS.base_class = LinearAttention
