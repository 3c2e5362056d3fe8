"""Exact attention: a layer that a mixture leaves to the model's own implementation, or with a cache in int8."""

import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..config import CacheDtype
from ..feature_maps.base import AttentionShape, Options
from ..ops.common import State, mask_tokens
from ..ops.int8 import append, row_size, stored_dtype, to_dtype
from ..ops.prepared import run_prepared, step_exactly
from ..ops.terms import NO_TERMS, Terms, attend_with_terms, distances, weights_with_terms
from ..registry import register_attention
from ..utils.options import option
from .base import EVERY_TERM, AttentionInputs, LinearAttention

#: The name of exact attention in the registry.
EXACT = "softmax"


class SoftmaxOptions(Options):
    cache_dtype: CacheDtype = option(
        "auto",
        "int8: a decoder's cache stores keys and values in int8, with one scale a token and head (auto: as they are)",
    )


@register_attention(
    EXACT,
    description="exact attention, computed by the model's own implementation",
    paper="Vaswani et al. 2017, arXiv:1706.03762",
    options=SoftmaxOptions,
    learned=False,
    state="growing",
    cost="O(L²·d) time, O(L·d) state",
    recommendation="layers of a mixture that must stay as they were",
)
class SoftmaxAttention(LinearAttention):
    """`softmax(τ q Kᵀ) V`. A layer of this name keeps the model's own code and cache, unless a decoder stores its cache
    in int8: then `patch_model` inserts this module.

    The state is keys `[B, G, n, d]` and values `[B, G, n, e]`, which grow with the number n of tokens.
    """

    dense_masks = True
    served_terms = EVERY_TERM
    options: SoftmaxOptions

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if (step := run_prepared(self, inputs)) is not None:
            return step
        self.begin_forward(inputs)
        cache_dtype = self.options.cache_dtype
        if (step := step_exactly(self, inputs, stored_dtype(cache_dtype) is torch.int8)) is not None:
            return step
        out, after = attend_exactly(inputs, cache_dtype)
        return out, after if inputs.return_state else None

    def dense_forward(self, inputs: AttentionInputs) -> Tensor:
        return softmax_attention(*inputs.tensors, inputs.visible(), inputs.scaling, terms=inputs.terms)

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        return exact_weights(inputs)

    @property
    def exact_length(self) -> int:
        return sys.maxsize

    def state_bytes(self, length: int = 0) -> int:
        return length * self.shape.num_key_value_heads * head_token_bytes(self.shape, self.options.cache_dtype)


def head_token_bytes(shape: AttentionShape, cache_dtype: CacheDtype) -> int:
    """Return the bytes of the key and the value of a token in one head, in float32 or in int8."""
    dtype = stored_dtype(cache_dtype) or torch.float32
    return sum(row_size(size, dtype) for size in (shape.head_dim, shape.value_dim)) * dtype.itemsize


def attend_exactly(inputs: AttentionInputs, cache_dtype: CacheDtype) -> tuple[Tensor, State]:
    """Return exact attention `[B, H, L, e]`, and the state after the new tokens: `exact_key` `[B, G, n, d]`,
    `exact_value` `[B, G, n, e]`, and `exact_mask` `[B, n]` where there is padding."""
    mask = inputs.mask
    state = inputs.state or {}
    length = inputs.key.shape[2]
    # Padding may hold anything, NaN too.
    key, value = (mask_tokens(tensor, mask) for tensor in (inputs.key, inputs.value))
    query = mask_tokens(inputs.query, None if mask is None else inputs.of_queries(mask))
    dtype = stored_dtype(cache_dtype, key, value)
    if not state:
        after = {"exact_key": to_dtype(key, dtype), "exact_value": to_dtype(value, dtype)}
    else:
        before = state.get("exact_mask")
        if mask is not None or before is not None:
            before = torch.ones_like(state["exact_key"][:, 0, :, 0], dtype=torch.bool) if before is None else before
            mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
            # Either may be one for all rows.
            mask = torch.cat([part.expand(key.shape[0], -1) for part in (before, mask)], dim=1)
        # The model may have changed its precision since.
        key, stored_key = append(state["exact_key"], key, dtype)
        value, stored_value = append(state["exact_value"], value, dtype)
        after = {"exact_key": stored_key, "exact_value": stored_value}
    if mask is not None:
        after["exact_mask"] = mask
    lower_triangle = inputs.causal and mask is None and not state and not inputs.terms
    if query.shape[2] != length:  # a branch, since `is_causal` must be no symbol under `torch.compile`
        lower_triangle = False
    needs_mask = mask is not None or (inputs.causal and not lower_triangle and length > 1)
    allowed = replace(inputs, key=key, mask=mask).visible() if needs_mask else None
    out = softmax_attention(query, key, value, allowed, inputs.scaling, lower_triangle, terms=inputs.terms)
    return out, after


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    scaling: float,
    causal: bool = False,
    terms: Terms = NO_TERMS,
) -> Tensor:
    """Return exact attention `[B, H, L, e]`; zeros in a row that sees no key.

    Args:
        query: `[B, H, L, d]`; key is `[B, G, S, d]`, value `[B, G, S, e]`.
        allowed: `[B | 1, H | 1, L, S]`, True where a query sees a key; None where each sees all, or all up to its own.
        scaling: τ, the factor of `q·k`.
        causal: Whether each query sees the keys up to its own only (without `allowed`, for as many queries as keys).
        terms: What the model adds to its logits.
    """
    # Under autocast rotary positions give float32 queries and keys, and the projection half-precision values.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if terms:
        distance = distances(query.shape[2], key.shape[2], None, query.device)
        if causal:
            allowed = (distance >= 0)[None, None]
        return attend_with_terms(query, key, value, allowed, scaling, terms, distance)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out if allowed is None else out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)


def exact_weights(inputs: AttentionInputs) -> Tensor:
    """Return the exact weights `[B, H, L, S]`; zeros in a row that sees no key."""
    query, key = inputs.query, inputs.key
    distance = distances(query.shape[2], key.shape[2], inputs.start, query.device)
    return weights_with_terms(query, key, inputs.visible(), inputs.scaling, inputs.terms, distance)
