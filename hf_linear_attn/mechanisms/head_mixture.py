"""Exact attention for some key-value heads of a layer, a linear mechanism for the others."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import CacheDtype
from ..feature_maps.base import AttentionShape
from ..ops.common import State
from ..ops.int8 import stored_dtype
from ..ops.prepared import run_prepared, step_with_exact
from ..ops.terms import Terms
from ..registry import AttentionEntry
from .base import AttentionInputs, LinearAttention
from .softmax import attend_exactly, exact_weights, head_token_bytes, softmax_attention

#: Prefix of the entries of the state that belong to the exact heads.
PREFIX = "exact_"


def linear_mechanism(mechanism: Any) -> Any:
    """Return the mechanism of the linear heads of a mixture; any other mechanism itself."""
    return mechanism.mechanism if isinstance(mechanism, HeadMixture) else mechanism


class HeadMixture(LinearAttention):
    """`softmax(τ q Kᵀ) V` for the query heads of the chosen key-value heads, and a linear mechanism for all others.

    A few heads of a language model look up single tokens far back; the others look near (DuoAttention, Xiao et al.
    2024, arXiv:2410.10819). With the former exact, a converted model keeps its recall at a fraction of the cache. With
    g of G key-value heads exact, a layer takes about g/G of the time of its exact attention plus (G - g)/G of that of
    the mechanism. The state is that of the mechanism, and keys and values `[B, g, n, d]` of the exact heads, which grow
    with the number n of tokens; in int8, one scale a token and head (`ops.int8`), with `cache_dtype` "int8".

    `patch_model` builds it where a layer has `exact_heads`; it is not registered under a name of its own. Attention
    dropout is applied to no head.

    Args:
        shape: The whole layer.
        entry, options: The mechanism of the other heads.
        exact_heads: The indices of the exact key-value heads. With grouped queries each stands for all query heads that
            share it.
        cache_dtype: How the exact heads' keys and values are stored.
    """

    def __init__(
        self,
        shape: AttentionShape,
        entry: AttentionEntry,
        options: object,
        exact_heads: Sequence[int],
        cache_dtype: CacheDtype = "auto",
    ) -> None:
        chosen = set(exact_heads)
        groups = shape.num_key_value_heads
        others = groups - len(chosen)
        if not chosen <= set(range(groups)):
            raise ValueError(
                f"exact_heads={list(exact_heads)}: layer {shape.layer_index} has {groups} key-value heads "
                f"(0 to {groups - 1})."
            )
        if not others:
            raise ValueError(
                f"exact_heads={list(exact_heads)} are all key-value heads of layer {shape.layer_index}: give the layer "
                "'softmax' instead."
            )
        linear_shape = replace(shape, num_heads=shape.num_heads // groups * others, num_key_value_heads=others)
        mechanism: LinearAttention = entry.factory(linear_shape, options)
        super().__init__(shape, mechanism.options)
        self.mechanism = mechanism
        self.exact_heads = tuple(sorted(chosen))
        self.cache_dtype = cache_dtype
        self.dense_masks = mechanism.dense_masks
        self.distribution = mechanism.distribution
        self.separable_queries = mechanism.separable_queries
        self.sampled_outputs = mechanism.sampled_outputs
        self.transfer_loss = mechanism.transfer_loss
        self.transfer_lr = mechanism.transfer_lr

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if (step := run_prepared(self, inputs)) is not None:
            return step
        self.begin_forward(inputs)
        linear_inputs, exact_inputs = self._split_inputs(inputs)
        linear, linear_after = self.mechanism(linear_inputs)
        others = [head for head in range(self.shape.num_key_value_heads) if head not in self.exact_heads]
        is_int8 = stored_dtype(self.cache_dtype) is torch.int8
        step = step_with_exact(self, inputs, linear_after, (others, list(self.exact_heads)), is_int8)
        if step is not None:
            out, after = step
            return self._join(linear, self._split(out)[1]), after
        exact, exact_after = attend_exactly(exact_inputs, self.cache_dtype)
        return self._join(linear, exact), {**linear_after, **exact_after} if inputs.return_state else None

    def check_terms(self, names: Iterable[str], label: str = "This layer") -> None:
        self.mechanism.check_terms(names, label)

    def dense_forward(self, inputs: AttentionInputs) -> Tensor:
        linear, exact = self._split_inputs(inputs)
        out = softmax_attention(*exact.tensors, exact.mask, exact.scaling, terms=exact.terms)
        return self._join(self.mechanism.dense_forward(linear), out)

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        linear, exact = self._split_inputs(inputs)
        return self._join(self.mechanism.attention_weights(linear), exact_weights(exact))

    def outside(self, inputs: AttentionInputs) -> Tensor | None:
        linear, exact = self._split_inputs(inputs)
        outside = self.mechanism.outside(linear)
        if outside is None:
            return None
        none = torch.zeros_like(outside[:, :1]).expand(-1, exact.query.shape[1], -1, -1)
        return self._join(outside.expand(-1, linear.query.shape[1], -1, -1), none)

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        return tuple(f"mechanism.{name}" for name in self.mechanism.tied_parameters)

    @property
    def exact_length(self) -> int:
        return self.mechanism.exact_length

    def state_bytes(self, length: int = 0) -> int:
        token = head_token_bytes(self.shape, self.cache_dtype)
        return self.mechanism.state_bytes(length) + length * len(self.exact_heads) * token

    @torch.no_grad()
    def load_heads(self, layer: LinearAttention) -> None:
        """Copy the parameters and buffers of the linear heads from the same mechanism of the whole layer."""
        tensors = layer.state_dict()
        for name, parameter in self.mechanism.state_dict().items():
            tensor = tensors[name]
            parameter.copy_(tensor if tensor.shape == parameter.shape else self._split(tensor[None])[0][0])

    def linear_heads(self, tensor: Tensor) -> Tensor:
        """Return the heads of the mechanism of a tensor `[B, H | G, L, x]` of all heads."""
        return self._split(tensor)[0]

    def linear_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs of the heads of the mechanism."""
        return self._split_inputs(inputs)[0]

    def extra_repr(self) -> str:
        stored = f", cache_dtype={self.cache_dtype}" if self.cache_dtype != "auto" else ""
        return f"exact_heads={list(self.exact_heads)}{stored}"

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Split `[B, H | G, L, x]` into the heads of the mechanism and the exact ones."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, heads in enumerate(tensor.chunk(self.shape.num_key_value_heads, dim=1)):
            parts[index in self.exact_heads].append(heads)
        linear, exact = (torch.cat(part, dim=1) for part in parts)
        return linear, exact

    def _split_inputs(self, inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
        """Return the inputs of the mechanism's heads and those of the exact ones."""
        mask = inputs.mask
        states: tuple[State | None, State | None] = (None, None)
        # A mask may differ from head to head; any other serves all heads.
        masks = self._split(mask) if mask is not None and mask.dim() == 4 and mask.shape[1] > 1 else (mask, mask)
        if (state := inputs.state) is not None:
            # The mechanism may write over its part of an `InPlaceState`.
            linear_state = type(state)({name: state[name] for name in state if not name.startswith(PREFIX)})
            states = linear_state, {name: state[name] for name in state if name.startswith(PREFIX)}
        parts = zip(*map(self._split, inputs.tensors), masks, states, self._split_terms(inputs.terms), strict=True)
        linear, exact = (
            replace(inputs, query=q, key=k, value=v, mask=m, state=s, terms=t) for q, k, v, m, s, t in parts
        )
        return linear, exact

    def _split_terms(self, terms: Terms) -> tuple[Terms, Terms]:
        """Return what is added to the logits of the mechanism's heads and of the exact ones."""
        linear = terms.apply(lambda tensor: self._split(tensor.unsqueeze(0))[0][0])
        return linear, terms.apply(lambda tensor: self._split(tensor.unsqueeze(0))[1][0])

    def _join(self, linear: Tensor, exact: Tensor) -> Tensor:
        """Put the heads `[B, H, L, x]` of the mechanism and the exact ones into their places."""
        count = len(self.exact_heads)
        groups = self.shape.num_key_value_heads
        parts = iter(linear.chunk(groups - count, dim=1)), iter(exact.chunk(count, dim=1))
        return torch.cat([next(parts[index in self.exact_heads]) for index in range(groups)], dim=1)
