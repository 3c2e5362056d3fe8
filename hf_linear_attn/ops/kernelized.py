"""Kernelized attention: bidirectional, causal and recurrent forms with bounded temporaries.

Shapes: `B` batch, `H` query heads, `G` key-value heads (`H = G·R`), `L` queries, `S` keys, `d` head size, `e` value
size, `m` features. All sums are float32 (float64 for float64 inputs) whatever the dtype of the inputs.

The state of the recurrence is
    `kv`        `[B, G, m, e]`   Σ_j φ(k_j) v_jᵀ · exp(-log_scale)
    `k_sum`     `[B, G, m]`      Σ_j φ(k_j)      · exp(-log_scale)
    `log_scale` `[B, G]`         running maximum of the log scale of the keys (maps that need a stabiliser only)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import (
    FeatureFunction,
    Features,
    OutputBlocks,
    State,
    block_length,
    compute_dtype,
    divide,
    finite_or_zero,
    group_heads,
    mask_tokens,
)
from .fused import KernelizedCall

#: Tokens per chunk of the causal form: weights are explicit within a chunk, and the state passes between chunks. Chunks
#: of 128 tokens take 1.3 times as many operations (64 features), in calls that are hardly more efficient.
CHUNK = 64

#: Largest number of keys for which a bidirectional call may compute explicit weights.
MAX_EXPLICIT_KEYS = 256


def masked_key_features(
    key_features: FeatureFunction, key: Tensor, start: int, mask: Tensor | None, dtype: torch.dtype
) -> Features:
    """Compute the features of one block of keys, with zero features (and log scale `-inf`) for masked keys.

    The keys themselves are zeroed first: NaN in padding reaches neither the state nor the gradient of a learned map.
    """
    values, log_scale = key_features(mask_tokens(key.to(dtype), mask), start)
    values = mask_tokens(values, mask)
    return Features(values, None if log_scale is None else mask_tokens(log_scale, mask, float("-inf")))


def merge_keys(state: State | None, keys: Features, value: Tensor, *, signed: bool = False) -> State:
    """Add keys `[B, G, l, m]` and values `[B, G, l, e]`, whose masked tokens are zero, to a state.

    With a log scale, `c' = max(c, max_j s_j)`, and state and keys are rescaled to `c'`: nothing overflows at any
    length. The result does not depend on `c`, so no gradient flows through it, unless the guard of signed features
    reads it.
    """
    values, log_scale = keys
    carried = state
    scales: State = {}
    if log_scale is not None:
        top = (log_scale if signed else log_scale.detach()).amax(dim=-1)
        if state is not None:
            top = torch.maximum(top, state["log_scale"])
            decay = torch.exp(state["log_scale"] - finite_or_zero(top))
            carried = {"kv": state["kv"] * decay[..., None, None], "k_sum": state["k_sum"] * decay[..., None]}
        values = values * torch.exp(log_scale - finite_or_zero(top).unsqueeze(-1)).unsqueeze(-1)
        scales = {"log_scale": top}
    if carried is None:
        return {"kv": values.transpose(-1, -2) @ value, "k_sum": values.sum(dim=-2), **scales}
    kv, values_t = carried["kv"], values.flatten(0, 1).transpose(1, 2)
    kv = torch.baddbmm(kv.flatten(0, 1), values_t, value.flatten(0, 1)).view(kv.shape)
    one = values.shape[2] == 1
    return {"kv": kv, "k_sum": carried["k_sum"] + (values.squeeze(2) if one else values.sum(dim=-2)), **scales}


def bidirectional(call: KernelizedCall) -> Tensor:
    """Compute `o_i = φ(q_i)ᵀ S / φ(q_i)ᵀ z` with `S = Σ_j m_j φ(k_j) v_jᵀ`, `z = Σ_j m_j φ(k_j)`.

    Time O((L + S)·m·(d + e)); temporaries O(block·m), independent of L and S.

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`.
    """
    query, key, value, mask, signed = call.query, call.key, call.value, call.mask, call.signed
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if _explicit_is_cheaper(length, keys, call.num_features, value.shape[-1]):
        return _explicit(call)
    step = block_length(batch, groups, max(call.num_features, value.shape[-1]), keys)
    state: State | None = None
    for start in range(0, keys, step):
        stop = min(start + step, keys)
        part = None if mask is None else mask[:, start:stop]
        features = masked_key_features(call.key_features, key[:, :, start:stop], start, part, dtype)
        values = mask_tokens(value[:, :, start:stop].to(dtype), part)
        state = merge_keys(state, features, values, signed=signed)
    if state is None:  # no keys at all
        return value.new_zeros(batch, heads, length, value.shape[-1])
    step = block_length(batch, heads, max(call.num_features, value.shape[-1]), length)
    outputs = OutputBlocks(batch, heads, length, value.shape[-1], value)
    for start in range(0, length, step):
        block = call.query_features(query[:, :, start : start + step].to(dtype), start).values
        rows = block.shape[2]
        folded = block.reshape(batch, groups, -1, block.shape[-1])
        normaliser = _row_products(folded, state["k_sum"])
        numerator = (folded @ state["kv"]).view(batch, heads, rows, -1)
        outputs.add_quotient(numerator, normaliser.view(batch, heads, rows), signed=signed)
    return outputs.result()


def _row_products(rows: Tensor, vector: Tensor) -> Tensor:
    """`[…, n, m]`, `[…, m]` -> `[…, n]`: the vector from the left, which takes torch a third of the time."""
    return (vector.unsqueeze(-2) @ rows.transpose(-1, -2)).squeeze(-2)


def _explicit_is_cheaper(length: int, keys: int, features: int, width: int) -> bool:
    """Whether explicit weights take fewer operations than the state: L·S·(m + e) against (L + S)·m·e."""
    return 0 < keys <= MAX_EXPLICIT_KEYS and length * keys * (features + width) <= (length + keys) * features * width


def _explicit(call: KernelizedCall) -> Tensor:
    """The outputs of short inputs without a state: all weights `[B, G, R·L, S]` at once.

    At such lengths the number of operations is what costs, not their size.
    """
    dtype, signed = compute_dtype(call.query), call.signed
    batch, heads, length, _ = call.query.shape
    groups = call.key.shape[1]
    queries = call.query_features(call.query.to(dtype), 0).values
    keys = masked_key_features(call.key_features, call.key, 0, call.mask, dtype)
    values = mask_tokens(call.value.to(dtype), call.mask)
    if call.causal:
        weights = chunk_weights(group_heads(queries, groups), keys, None, signed=signed)[0]
        weights = weights.view(batch, groups, -1, length)
    else:
        features = keys.values
        if keys.log_scale is not None:
            top = finite_or_zero((keys.log_scale if signed else keys.log_scale.detach()).amax(dim=-1, keepdim=True))
            features = features * (keys.log_scale - top).exp().unsqueeze(-1)
        weights = queries.reshape(batch, groups, -1, queries.shape[-1]) @ features.transpose(-1, -2)
    out = divide(weights @ values, weights.sum(dim=-1), signed=signed)
    return out.view(batch, heads, length, -1).to(call.value.dtype)


def chunk_weights(
    query: Tensor, keys: Features, carried: Tensor | None, *, signed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute causal weights within one chunk, relative to the running log scale of each row.

    query `[B, G, R, n, m]`, keys `[B, G, n, …]`, carried `[B, G]` (log scale of the state) ->
    weights `[B, G, R, n, n]` and the log scale `[B, G, n]` that row i is relative to: the maximum over the state and
    the keys j <= i. A later key never touches an earlier row.
    """
    batch, groups, repeats, length, width = query.shape
    values, log_scale = keys
    folded = query.reshape(batch, groups, repeats * length, width)
    weights = (folded @ values.transpose(-1, -2)).view(batch, groups, repeats, length, length)
    if log_scale is None:
        return weights.tril_(), None  # in place, since no gradient reads a product itself
    running = (log_scale if signed else log_scale.detach()).cummax(dim=-1).values
    if carried is not None:
        running = torch.maximum(running, carried.unsqueeze(-1))
    # For j <= i the exponent is at most 0; the clamp only keeps the entries that tril drops from overflowing.
    gap = (log_scale.unsqueeze(-2) - finite_or_zero(running).unsqueeze(-1)).clamp(max=0.0)
    return (weights * gap.exp().unsqueeze(2)).tril_(), running


def causal(call: KernelizedCall, chunk: int = CHUNK) -> tuple[Tensor, State | None]:
    """Compute the same sums over `j <= i` only, continued from `call.state`.

    Time O(L·(chunk + m)·(d + e)); temporaries O(block·m). A single token is the recurrent step: O(m·e).

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token if
        `call.return_state`.
    """
    query, key, value, mask, state, signed = call.query, call.key, call.value, call.mask, call.state, call.signed
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    if state is None and not call.return_state and 0 < length <= 2 * chunk:
        return _explicit(call), None
    if state is not None and length == 1:
        return _step(call, state)
    step = block_length(batch, heads, max(call.num_features, value.shape[-1]), length)
    outputs = OutputBlocks(batch, heads, length, value.shape[-1], value)
    for start in range(0, length, step):
        stop = min(start + step, length)
        part = None if mask is None else mask[:, start:stop]
        queries = group_heads(call.query_features(query[:, :, start:stop].to(dtype), start).values, groups)
        keys = masked_key_features(call.key_features, key[:, :, start:stop], start, part, dtype)
        values = mask_tokens(value[:, :, start:stop].to(dtype), part)
        for low in range(0, stop - start, chunk):
            high = min(low + chunk, stop - start)
            chunk_q, chunk_v = queries[:, :, :, low:high], values[:, :, low:high]
            chunk_scale = None if keys.log_scale is None else keys.log_scale[:, :, low:high]
            chunk_k = Features(keys.values[:, :, low:high], chunk_scale)
            numerator, denominator = _causal_chunk(chunk_q, chunk_k, chunk_v, state, signed)
            heads_first = numerator.view(batch, heads, high - low, -1), denominator.view(batch, heads, high - low)
            outputs.add_quotient(*heads_first, signed=signed)
            if call.return_state or start + high < length:
                state = merge_keys(state, chunk_k, chunk_v, signed=signed)
    return outputs.result(), state if call.return_state else None


def _step(call: KernelizedCall, state: State) -> tuple[Tensor, State]:
    """One token: add it to the state, then read the state."""
    dtype, signed = compute_dtype(call.query), call.signed
    batch, heads, groups = call.query.shape[0], call.query.shape[1], call.key.shape[1]
    queries = call.query_features(call.query.to(dtype), 0).values.reshape(batch, groups, heads // groups, -1)
    keys = masked_key_features(call.key_features, call.key, 0, call.mask, dtype)
    after = merge_keys(state, keys, mask_tokens(call.value.to(dtype), call.mask), signed=signed)
    normaliser = _row_products(queries, after["k_sum"])
    out = divide(queries @ after["kv"], normaliser, signed=signed)
    return out.view(batch, heads, 1, -1).to(call.value.dtype), after


def _causal_chunk(
    query: Tensor, keys: Features, value: Tensor, state: State | None, signed: bool
) -> tuple[Tensor, Tensor]:
    """Numerators and normalisers of one chunk, of B·H·n rows: the keys of the state, and the chunk's own, j <= i."""
    batch, groups, repeats, length, width = query.shape
    carried = None if state is None else state.get("log_scale")
    weights, running = chunk_weights(query, keys, carried, signed=signed)
    weights = weights.view(batch * groups, repeats * length, length)
    numerator, denominator = torch.bmm(weights, value.flatten(0, 1)), weights.sum(dim=-1)
    if state is None:
        return numerator, denominator
    if carried is not None and running is not None:
        query = query * torch.exp(carried.unsqueeze(-1) - finite_or_zero(running))[:, :, None, :, None]
    rows = query.reshape(batch * groups, repeats * length, width)
    numerator = torch.baddbmm(numerator, rows, state["kv"].flatten(0, 1))
    return numerator, denominator + _row_products(rows, state["k_sum"].flatten(0, 1))


def read_state(query: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return `(φ(q)ᵀ S, φ(q)ᵀ z)` for query features `[B, G, R, n, m]`: `[B, G, R, n, e]` and `[B, G, R, n]`."""
    batch, groups, repeats, length, width = query.shape
    folded = query.reshape(batch, groups, repeats * length, width)
    numerator = (folded @ state["kv"]).view(batch, groups, repeats, length, -1)
    denominator = _row_products(folded, state["k_sum"]).view(batch, groups, repeats, length)
    return numerator, denominator


def dense_weights(query: Features, keys: Features, allowed: Tensor, *, signed: bool = False) -> Tensor:
    """Compute explicit normalised weights, for analysis and for masks that no recurrence supports.

    Masked entries are removed by selection before anything is summed. O(L·S) time and memory.

    Args:
        query: Features of queries `[B, H, L, m]`.
        keys: Features of keys `[B, G, S, m]`.
        allowed: `[B | 1, H | 1, L, S]`, True where query i sees key j.
        signed: Whether features can be negative.

    Returns:
        The weights `[B, H, L, S]`.
    """
    groups = keys.values.shape[1]
    grouped = group_heads(query.values, groups)
    weights = (grouped @ keys.values.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if keys.log_scale is not None:
        repeats = weights.shape[1] // groups
        scales = keys.log_scale.repeat_interleave(repeats, dim=1).unsqueeze(-2)
        top = (scales if signed else scales.detach()).expand(weights.shape).masked_fill(~allowed, float("-inf"))
        top = top.amax(dim=-1, keepdim=True)
        weights = weights * (scales - finite_or_zero(top)).clamp(max=0.0).exp()
    weights = weights.masked_fill(~allowed, 0.0)
    return divide(weights, weights.sum(dim=-1), signed=signed)
