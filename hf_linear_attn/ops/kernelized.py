"""Kernelized attention: bidirectional, causal and recurrent forms with bounded temporaries.

Shapes: `B` batch, `H` query heads, `G` key-value heads (`H = G·R`), `L` queries, `S` keys, `d` head size, `e` value
size, `m` features. All sums are float32 (float64 for float64 inputs) whatever the dtype of the inputs.

The state of the recurrence is
    `kv`        `[B, G, m, e]`   Σ_j φ(k_j) v_jᵀ · exp(-log_scale)
    `k_sum`     `[B, G, m]`      Σ_j φ(k_j)      · exp(-log_scale)
    `log_scale` `[B, G]`         running maximum of the log scale of the keys (maps that need a stabiliser only)
"""

import torch
from torch import Tensor

from .calls import GatedCall, GatedKeys, KernelizedCall, WindowedCall
from .common import (
    FeatureFunction,
    Features,
    KVState,
    State,
    block_length,
    compute_dtype,
    divide,
    finite_or_zero,
    group_heads,
    is_free,
    mask_tokens,
    token_blocks,
    weighted_mean,
    with_ones,
)
from .gated import causal_node, gated_causal
from .graph_nodes import places_nodes

#: Tokens per chunk of the causal form: weights are explicit within a chunk, and the state passes between chunks. Chunks
#: of 128 tokens take 1.3 times as many operations (64 features), in calls that are hardly more efficient.
CHUNK = 64


def masked_key_features(
    key_features: FeatureFunction, key: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> Features:
    """Compute the features of one block of keys, with zero features (and log scale `-inf`) for masked keys.

    The keys themselves are zeroed first: NaN in padding reaches neither the state nor the gradient of a learned map.
    """
    return _masked(key_features(mask_tokens(key.to(dtype), mask)), mask)


def _masked(keys: Features, mask: Tensor | None) -> Features:
    values, log_scale = keys
    return Features(
        mask_tokens(values, mask), None if log_scale is None else mask_tokens(log_scale, mask, float("-inf"))
    )


def attend(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute either form: the output, and the state if it is causal and asked for."""
    return causal(call) if call.causal else (bidirectional(call), None)


def bidirectional(call: KernelizedCall) -> Tensor:
    """Compute `o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j m_j φ(k_j) v_jᵀ`, `z = Σ_j m_j φ(k_j)`, in the dtype of v.

    Time O((L + S)·m·(d + e)); temporaries O(block·m), independent of L and S.
    """
    kv_state = key_state(call)
    if kv_state is None:  # no keys at all
        return call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1])
    return attend_to_state(call, kv_state)


def key_state(call: KernelizedCall | WindowedCall) -> KVState | None:
    """Return S and z over the keys of a call, None where it has no keys."""
    key, value = call.key, call.value
    width = max(call.num_features, value.shape[-1])
    kv_state = None
    for _, _, part, (columns, values) in token_blocks(
        block_length(key.shape[0], key.shape[1], width, key.shape[2]), call.mask, key, value
    ):
        new = KVState.of(_masked(call.key_features(columns), part), with_ones(values), signed=call.signed)
        kv_state = new if kv_state is None else kv_state.plus(new)
    return kv_state


def attend_to_state(call: KernelizedCall, kv_state: KVState) -> Tensor:
    """Return the outputs `[B, H, L, e]` of the queries of a bidirectional call, given S and z."""
    query, value, signed = call.query, call.value, call.signed
    batch, heads, length, _ = query.shape
    groups = call.key.shape[1]
    width = max(call.num_features, value.shape[-1])
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for _, _, _, (rows,) in token_blocks(block_length(batch, heads, width, length), None, query):
        features = call.query_features(rows).values
        out = features.reshape(batch, groups, -1, features.shape[-1]) @ kv_state.total
        outputs.append(weighted_mean(out.view(batch, heads, rows.shape[2], -1), signed=signed).to(value.dtype))
    return torch.cat(outputs, dim=2)


def causal(call: KernelizedCall, chunk: int = CHUNK, *, normalise: bool = True) -> tuple[Tensor, State | None]:
    """Compute the same over `j <= i`, continued from `call.state`, and if `call.return_state` the state after them.

    Without `normalise` (of features without a log scale, in graphs of fixed lengths) the result is `Σ_j w_ij [v_j, 1]`
    `[B, H, L, e + 1]` in the dtype of sums. Time O(L·(chunk + m)·(d + e)); temporaries O(block·m). A single token is
    the recurrent step: O(m·e).
    """
    query = call.query
    key = call.key
    value = call.value
    state = call.state
    signed = call.signed
    batch, heads, length, _ = query.shape
    slope = call.terms.slope
    if places_nodes(length, query) and slope is None:
        keys = _masked(call.key_features(mask_tokens(key, call.mask)), call.mask)
        out, node_state = causal_node(call, keys, None)
        return out, node_state if call.return_state else None
    if is_free(length) or slope is not None:
        out, after = gated_causal(_gated(call))
        return out, after if call.return_state else None
    kv_state = None if state is None else KVState.from_state(state)
    step = block_length(batch, heads, max(call.num_features, value.shape[-1]), length)
    empty = value.new_zeros(batch, heads, 0, value.shape[-1])
    outputs = [empty if normalise else with_ones(empty.to(compute_dtype(value)))]
    for start, stop, part, (columns, values) in token_blocks(step, call.mask, key, value):
        rows = query[:, :, start:stop].to(columns.dtype)
        queries = group_heads(call.query_features(rows).values, key.shape[1])
        keys = _masked(call.key_features(columns), part)
        values = with_ones(values)
        for low in range(0, stop - start, chunk):
            now = slice(low, min(low + chunk, stop - start))
            chunk_scale = None if keys.log_scale is None else keys.log_scale[:, :, now]
            chunk_k = Features(keys.values[:, :, now], chunk_scale)
            chunk_v = values[:, :, now]
            if length == 1 and kv_state is not None:  # the recurrent step: add the token, then read the sums
                kv_state = kv_state.plus(KVState.of(chunk_k, chunk_v, signed=signed))
                out = queries.flatten(2, 3) @ kv_state.total
            else:
                out = _causal_chunk(queries[:, :, :, now], chunk_k, chunk_v, kv_state, signed)
                if call.return_state or start + now.stop < length:
                    new = KVState.of(chunk_k, chunk_v, signed=signed)
                    kv_state = new if kv_state is None else kv_state.plus(new)
            out = out.view(batch, heads, now.stop - low, -1)
            outputs.append(weighted_mean(out, signed=signed).to(value.dtype) if normalise else out)
    return torch.cat(outputs, dim=2), kv_state.state() if call.return_state and kv_state is not None else None


def _gated(call: KernelizedCall) -> GatedCall:
    """Return the call as one of a state that decays by the slopes of ALiBi, or that does not decay."""
    slope = call.terms.slope

    def key_features(key: Tensor) -> GatedKeys:
        values, log_scale = call.key_features(key)
        log_decay = values.new_zeros(*values.shape[:-1], 1)
        return GatedKeys(values, log_decay if slope is None else log_decay - slope[:, None, None], log_scale)

    return GatedCall(**{**vars(call), "key_features": key_features, "fused": None})


def _causal_chunk(query: Tensor, keys: Features, value: Tensor, kv_state: KVState | None, signed: bool) -> Tensor:
    """Compute the sums `Σ w [v, 1]` `[B·G, R·n, e + 1]` of one chunk: the keys before it, and the chunk's own, j <= i.

    query `[B, G, R, n, m]`, keys and value `[B, G, n, …]`. Row i is relative to the largest log scale of the state and
    of the keys j <= i: a later key never touches an earlier row.
    """
    batch, groups, repeats, length, width = query.shape
    folded = query.reshape(batch, groups, repeats * length, width)
    weights = (folded @ keys.values.transpose(-1, -2)).view(batch, groups, repeats, length, length)
    if keys.log_scale is not None:
        running = (keys.log_scale if signed else keys.log_scale.detach()).cummax(dim=-1).values
        if kv_state is not None and kv_state.log_scale is not None:
            carried = kv_state.log_scale.unsqueeze(-1)
            running = torch.maximum(running, carried)
            query = query * torch.exp(carried - finite_or_zero(running))[:, :, None, :, None]
        # For j <= i the exponent is at most 0; the clamp only keeps the entries that tril drops from overflowing.
        gap = (keys.log_scale.unsqueeze(-2) - finite_or_zero(running).unsqueeze(-1)).clamp(max=0.0)
        weights = weights * gap.exp().unsqueeze(2)
    weights = weights.tril_().view(batch * groups, repeats * length, length)  # no gradient reads a product itself
    inside = torch.bmm(weights, value.flatten(0, 1))
    if kv_state is None:
        return inside
    return torch.baddbmm(inside, query.reshape(batch * groups, repeats * length, width), kv_state.total.flatten(0, 1))


def dense_weights(query: Features, keys: Features, allowed: Tensor, *, signed: bool = False) -> Tensor:
    """Compute explicit normalised weights `[B, H, L, S]`, for analysis and for masks that no recurrence supports.

    Masked entries are removed by selection before anything is summed. O(L·S) time and memory.

    Args:
        query: Features of queries `[B, H, L, m]`.
        keys: Features of keys `[B, G, S, m]`.
        allowed: `[B | 1, H | 1, L, S]`, True where query i sees key j.
        signed: Whether features can be negative.
    """
    groups = keys.values.shape[1]
    grouped = group_heads(query.values, groups)
    # Keys come first, so that the gradient of their features, the largest tensor, is contiguous.
    weights = (keys.values.unsqueeze(2) @ grouped.transpose(-1, -2)).transpose(-1, -2).flatten(1, 2)
    if keys.log_scale is not None:
        repeats = weights.shape[1] // groups
        scales = keys.log_scale.repeat_interleave(repeats, dim=1).unsqueeze(-2)
        top = (scales if signed else scales.detach()).expand(weights.shape).masked_fill(~allowed, float("-inf"))
        top = top.amax(dim=-1, keepdim=True)
        weights = weights * (scales - finite_or_zero(top)).clamp(max=0.0).exp()
    weights = weights.masked_fill(~allowed, 0.0)
    return divide(weights, weights.sum(dim=-1), signed=signed)
