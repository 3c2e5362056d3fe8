"""Luna: attention through a short learned sequence P of l vectors per key-value head.

Bidirectional: `K̃ = softmax(τ P Kᵀ) K`, `Ṽ = softmax(τ P Kᵀ) V`, `O = softmax(τ Q K̃ᵀ) Ṽ`.

Causal, with `a_j = elu(τ P k_j) + 1 ∈ R^l` and n_i the number of real tokens up to i:
`u_i = softmax((1/n_i) Σ_{j<=i} (q_i·k_j) a_j)`, `o_i = (1/n_i) Σ_{j<=i} (u_i·a_j) v_j`.

P is `packed` `[G, l, d]`. Other shapes and τ are those of `AttentionInputs`, with
`H = G·R` query heads for G key-value heads.

The state of the causal form is
    `packed_key`   `[B, G, l, d]`   Σ_j a_j k_jᵀ
    `packed_value` `[B, G, l, e]`   Σ_j a_j v_jᵀ
    `count`        `[B]`            n
"""

import torch
from torch import Tensor
from torch.nn import functional

from .calls import AttentionInputs
from .common import (
    Features,
    KVState,
    State,
    compute_dtype,
    group_heads,
    mask_tokens,
    refuse_free_length,
    softmax_rows,
    token_blocks,
)
from .gated import sums_node
from .graph_nodes import places_nodes
from .linformer import low_rank_attention

#: Tokens per chunk of the causal form.
CHUNK = 128


def bidirectional(inputs: AttentionInputs, packed: Tensor) -> Tensor:
    """Compute the bidirectional form, `[B, H, L, e]` in the dtype of `value`.

    Time O((L + S)·l·d), temporaries O((L + S)·l) per head.
    """
    dtype = compute_dtype(inputs.query)
    mask = inputs.mask
    query, keys, values = (mask_tokens(tensor.to(dtype), mask) for tensor in inputs.tensors)
    logits = (packed.to(dtype) * inputs.scaling) @ keys.transpose(-1, -2)
    weights = softmax_rows(logits, None if mask is None else mask[:, None, None, :])  # [B, G, l, S]
    return low_rank_attention(query, weights @ keys, weights @ values, inputs.scaling).to(inputs.value.dtype)


def causal(inputs: AttentionInputs, packed: Tensor) -> tuple[Tensor, State]:
    """Compute the causal form, continued from `inputs.state`, and the state after the last token.

    There are two causal passes with linear-time sums: time O(L·(CHUNK + l)·(d + e)), temporaries O(CHUNK·(CHUNK + l))
    per head; one token is O(l·(d + e)).
    """
    (query, key, value), mask, state = inputs.tensors, inputs.mask, inputs.state
    dtype = compute_dtype(query)
    batch, heads, length, width = query.shape
    groups, slots = key.shape[1], packed.shape[1]
    if state is None:
        state = {
            "packed_key": key.new_zeros(batch, groups, slots, width, dtype=dtype),
            "packed_value": value.new_zeros(batch, groups, slots, value.shape[-1], dtype=dtype),
            "count": torch.zeros(batch, dtype=torch.long, device=key.device),
        }
    real = torch.ones(batch, length, dtype=torch.bool, device=key.device) if mask is None else mask
    counts = state["count"].unsqueeze(1) + real.long().cumsum(dim=1)
    shares = counts.clamp_min(1).to(dtype).reciprocal()[:, None, None, :, None]  # 1/n_i, [B, 1, 1, L, 1]
    key_sum, value_sum = state["packed_key"], state["packed_value"]
    after_count = {"count": counts[:, -1].clone() if length else state["count"]}
    if places_nodes(length, query):
        keys, values = mask_tokens(key, mask), mask_tokens(value, mask)
        features = mask_tokens(packing_features(packed, keys, inputs.scaling), mask)
        before = KVState(key_sum.transpose(-1, -2), None), KVState(value_sum, None)
        share = shares.squeeze(1)
        logits, packed_keys = sums_node(query, Features(keys), features, start=before[0])
        out, packed_values = sums_node(
            torch.softmax(logits * share, dim=-1), Features(features), values, start=before[1]
        )
        packed_after = {"packed_key": packed_keys.total.transpose(-1, -2), "packed_value": packed_values.total}
        return out * share, {**packed_after, **after_count}
    refuse_free_length(length, "Causal Luna attention")
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for start, stop, part, (queries, keys, values) in token_blocks(CHUNK, mask, query, key, value):
        features = mask_tokens(packing_features(packed, keys, inputs.scaling), part)
        rows = group_heads(queries, groups)
        share = shares[:, :, :, start:stop]
        logits = _causal_read(rows, keys, features, key_sum.transpose(-1, -2)) * share
        out = _causal_read(torch.softmax(logits, dim=-1), features, values, value_sum) * share
        outputs.append(out.flatten(1, 2).to(value.dtype))
        key_sum = key_sum + features.transpose(-1, -2) @ keys
        value_sum = value_sum + features.transpose(-1, -2) @ values
    return torch.cat(outputs, dim=2), {"packed_key": key_sum, "packed_value": value_sum, **after_count}


def packing_features(packed: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Compute `a_j = elu(τ P k_j) + 1`: `[G, l, d] x [B, G, S, d] -> [B, G, S, l]`."""
    return functional.elu((key * scaling) @ packed.to(key.dtype).transpose(-1, -2)) + 1


def _causal_read(rows: Tensor, keys: Tensor, values: Tensor, past: Tensor) -> Tensor:
    """Compute `Σ_{j<=i} (r_i·k_j) v_j` in one chunk plus `r_iᵀ past`, `[B, G, R, n, y]`.

    Rows are `[B, G, R, n, x]`, keys `[B, G, n, x]`, values `[B, G, n, y]` and past `[B, G, x, y]`.
    """
    weights = (rows @ keys.unsqueeze(2).transpose(-1, -2)).tril()
    return weights @ values.unsqueeze(2) + rows @ past.unsqueeze(2)


def dense_causal_weights(inputs: AttentionInputs, packed: Tensor) -> Tensor:
    """Compute the weights `(u_i·a_j)/n_i` `[B, H, L, S]` of the causal form. O(L·S)."""
    query = inputs.query
    key = inputs.key
    allowed = inputs.visible()
    dtype = compute_dtype(query)
    heads, groups = query.shape[1], key.shape[1]
    keys = mask_tokens(key.to(dtype), allowed.any(dim=2).any(dim=1).expand(key.shape[0], -1))
    features = packing_features(packed, keys, inputs.scaling).repeat_interleave(heads // groups, dim=1)
    keys = keys.repeat_interleave(heads // groups, dim=1)
    share = allowed.sum(dim=-1, keepdim=True).clamp_min(1).to(dtype).reciprocal()
    products = (query.to(dtype) @ keys.transpose(-1, -2)).masked_fill(~allowed, 0.0)
    mixture = torch.softmax((products @ features) * share, dim=-1)
    return (mixture @ features.transpose(-1, -2)).masked_fill(~allowed, 0.0) * share
