"""The base class of attention mechanisms: modules from q, k, v and a mask to outputs, with or without a state."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, FeatureMap
from ..ops.calls import AttentionInputs
from ..ops.common import State, compute_dtype
from ..registry import ATTENTIONS, AttentionEntry

#: The terms that a model may add to its logits, by the names of `ops.terms.Terms`, as messages name them.
TERM_NAMES = {
    "sink": "attention sinks",
    "softcap": "a cap of the logits",
    "bias": "a relative position bias",
    "relative": "vectors of distances",
    "slope": "ALiBi's linear biases",
}
EVERY_TERM = frozenset(TERM_NAMES)


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
    #: The terms of a model's logits that the mechanism applies, by their names in `ops.terms.Terms`.
    served_terms: frozenset[str] = frozenset()
    #: Whether the implied weights of a query are a distribution over keys (non-negative, summing to 1).
    distribution = True
    #: Whether `attention_weights` and `outside` work for some of the queries, so that memory can be bounded.
    separable_queries = False
    #: Whether attention transfer by outputs draws queries, as it does by weights: where all outputs cost more, and
    #: `forward` takes fewer queries than keys, in decoders those of the last tokens.
    sampled_outputs = False
    #: What attention transfer matches by default where the weights are a distribution: "weights" or "outputs".
    transfer_loss = "weights"
    #: Learning rate that suits the learned parts in attention transfer.
    transfer_lr = 1e-2
    #: Parameters that are another layer's, by name, as Transformers reads them.
    _tied_weights_keys: Mapping[str, str] = {}

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        super().__init__()
        self.shape = shape
        #: The options, with all that they leave to the shape of the layer filled in.
        self.options = options
        #: Its feature map, if it has one.
        self.feature_map: FeatureMap | None = None

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
        """Check direction and mask of a call, and announce a new forward pass to the feature map if there is one."""
        if self.entry is not None:
            self.entry.check_direction(inputs.causal)
        self.check_mask(inputs.mask)
        if inputs.terms:
            self.check_terms(inputs.terms.names())
        if not inputs.causal and (inputs.state is not None or inputs.return_state):
            raise ValueError("Bidirectional attention has no state: a later token would change earlier outputs.")
        if self.feature_map is not None and inputs.state is None and inputs.first_call:
            self.feature_map.begin_forward()

    def check_mask(self, mask: Tensor | None) -> None:
        """Raise a NotImplementedError on a mask `[B | 1, H | 1, L, S]` that the mechanism cannot apply."""
        if mask is not None and mask.dim() == 4 and not self.dense_masks:
            raise NotImplementedError(
                f"This mechanism cannot apply a 4D attention mask of shape {tuple(mask.shape)} (packed documents, a "
                "prefix, or one made by hand). Pass a 2D padding mask, or use a kernelized mechanism."
            )

    def check_terms(self, names: Iterable[str], label: str = "This layer") -> None:
        """Raise a NotImplementedError on terms of a model's logits that the mechanism cannot apply."""
        refused = [TERM_NAMES[name] for name in names if name not in self.served_terms]
        if refused:
            raise NotImplementedError(
                f"{label} adds {' and '.join(refused)} to its logits, which this mechanism cannot apply. Use 'window' "
                "(or 'scatterbrain'), which does, or give the layer 'softmax'."
            )

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the implied weights `[B, H, L, S]`, rows summing to 1: `forward` equals their product with the values.

        This takes O(L·S): it serves for study, for training losses on short inputs, and for masks that no linear form
        can apply. Unless a mechanism has a form of its own, these are the outputs for an identity of values.
        """
        key, keys = inputs.key, inputs.key.shape[2]
        identity = torch.eye(keys, dtype=compute_dtype(key), device=key.device).expand(*key.shape[:2], keys, keys)
        return self.forward(replace(inputs, value=identity, return_state=False))[0]

    def outside(self, inputs: AttentionInputs) -> Tensor | None:
        """Return which keys the linear branch of a hybrid weighs, to train it where the exact one hides it.

        The tensor is boolean and broadcastable to `[B, H, L, S]`. None for mechanisms of one branch.
        """
        return None

    def dense_forward(self, inputs: AttentionInputs) -> Tensor:
        """Return the weights times the values: the quadratic form, for a full mask."""
        self.begin_forward(inputs)
        weights = self.attention_weights(inputs)
        value = inputs.value.repeat_interleave(weights.shape[1] // inputs.value.shape[1], dim=1)
        return (weights @ value.to(weights.dtype)).to(value.dtype)

    def share_with(self, first: "LinearAttention") -> None:
        """Share parameters with the first layer of the same class and options; called when a model is patched.

        A mechanism that shares parameters across layers takes those of `first`, and names them in `_tied_weights_keys`.
        """

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that are another layer's, which are saved once."""
        return tuple(self._tied_weights_keys)

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
