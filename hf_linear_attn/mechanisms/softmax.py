"""Exact attention, as a name in the registry: a layer that a mixture leaves to the model's own implementation."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..feature_maps.base import Options
from ..ops.common import State, compute_dtype, softmax_rows
from ..registry import register_attention
from .base import AttentionInputs, LinearAttention

#: The name of exact attention in the registry.
EXACT = "softmax"


@register_attention(
    EXACT,
    description="exact attention, computed by the model's own implementation",
    paper="Vaswani et al. 2017, arXiv:1706.03762",
    options=Options,
    learned=False,
    state="growing",
    cost="O(L²·d) time, O(L·d) state",
    recommendation="layers of a mixture that must stay as they were",
)
class SoftmaxAttention(LinearAttention):
    """`softmax(τ q Kᵀ) V`. `patch_model` never inserts this module: a layer of this name keeps the model's own code.

    It exists for mixtures, and as the exact counterpart in studies of the weights.
    """

    dense_masks = True

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if inputs.state is not None or inputs.return_state:
            raise ValueError("Exact attention keeps its keys and values in the model's own cache, not in a state.")
        return self.dense_forward(inputs), None

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        return softmax_weights(inputs.query, inputs.key, inputs.visible(), inputs.scaling)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scaling: float, causal: bool = False
) -> Tensor:
    """Return exact attention `[B, H, L, e]`; zeros in a row that sees no key.

    Args:
        query: `[B, H, L, d]`; key is `[B, G, S, d]`, value `[B, G, S, e]`.
        allowed: `[B | 1, H | 1, L, S]`, True where a query sees a key; None where each sees all, or all up to its own.
        scaling: τ, the factor of `q·k`.
        causal: Whether each query sees the keys up to its own only (without `allowed`, for as many queries as keys).
    """
    # Under autocast rotary positions give float32 queries and keys, and the projection half-precision values.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out if allowed is None else out.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)


def softmax_weights(query: Tensor, key: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """Return the exact weights `[B, H, L, S]`; zeros in a row that sees no key.

    Args:
        query: `[B, H, L, d]`; key is `[B, G, S, d]`.
        allowed: `[B | 1, H | 1, L, S]`, True where a query sees a key.
        scaling: τ, the factor of `q·k`.
    """
    dtype = compute_dtype(query)
    keys = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query.to(dtype) @ keys.transpose(-1, -2)) * scaling
    return softmax_rows(logits, allowed)
