"""Causal kernelized attention with a decaying state: parallel over chunks, recurrent between them.

    S_t = Λ_t S_{t-1} + φ(k_t) v_tᵀ      z_t = Λ_t z_{t-1} + φ(k_t)      o_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t

`Λ_t = exp(log_decay_t)` is one number per head, `[B, G, L, 1]`, or one per feature, `[B, G, L, m]`; padding neither
decays nor writes. Shapes as in `ops.kernelized`; the state is `kv`, `k_sum`, and `log_scale` for keys that carry one.

Decays are summed up in log space, within a chunk only. Per head, the weight of a pair is `exp(G_i - G_j)` with an
exponent of at most 0, for any decay at all. Per feature that would take a tensor of chunk x chunk x m; instead queries
are multiplied by `exp(G_i - G_mid)` and keys by `exp(G_mid - G_j)`, which is safe because log_decay may not lie below
`-MAX_DECAY` there: no exponent leaves ±MAX_DECAY · FEATURE_CHUNK / 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .calls import GatedCall, GatedKeys, KernelizedCall
from .common import (
    Features,
    KVState,
    State,
    block_length,
    compute_dtype,
    earlier,
    finite_or_zero,
    group_heads,
    is_free,
    join_chunks,
    mask_tokens,
    split_chunks,
    token_blocks,
    weighted_mean,
    with_ones,
)
from .graph_nodes import graph_node, places_nodes

#: Tokens per chunk with one decay per head, and with one per feature.
HEAD_CHUNK = 64
FEATURE_CHUNK = 32

#: Strongest decay of a feature by one token: `exp(-1)`, which leaves 1 % after five tokens.
MAX_DECAY = 1.0


def gated_causal(call: GatedCall) -> tuple[Tensor, State | None]:
    """Compute the output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token.

    The log scale of query features is ignored, because it cancels in the normaliser. Time O(L·(chunk + m)·(d + e));
    temporaries O(block·m) and the states of the block's chunks.
    """
    value = call.value
    batch, heads, length, _ = call.query.shape
    if places_nodes(length, call.query):
        keys = masked_keys(call.key_features(mask_tokens(call.key, call.mask)), call.mask)
        return causal_node(call, Features(keys.values, keys.log_scale), keys.log_decay, by_feature=call.per_feature)
    chunk = FEATURE_CHUNK if call.per_feature else HEAD_CHUNK
    step = block_length(batch, heads, max(call.num_features, value.shape[-1]), length)
    carry = None if call.state is None else KVState.from_state(call.state)
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for start, stop, part, (key, values) in token_blocks(step, call.mask, call.key, value):
        rows, missing = _grouped_queries(call, start, stop, part)
        keys = masked_keys(call.key_features(key), part)
        out, carry = _block(rows, keys, with_ones(values), carry, chunk)
        out = weighted_mean(out, signed=call.signed).flatten(1, 2).to(value.dtype)
        outputs.append(out[:, :, missing:] if rows.shape[2] else outputs[0])
    return torch.cat(outputs, dim=2), call.state if carry is None else carry.state()


def causal_node(
    call: GatedCall | KernelizedCall, keys: Features, log_decay: Tensor | None, *, by_feature: bool = False
) -> tuple[Tensor, State]:
    """Return the node of a causal call, whose keys and decays are those of real tokens: zeros for padding."""
    rows = call.query_features(call.query).values
    start = None if call.state is None else KVState.from_state(call.state)
    totals, after = sums_node(rows, keys, with_ones(call.value), log_decay, start, by_feature=by_feature)
    return weighted_mean(totals, signed=call.signed), after.state()


def sums_node(
    rows: Tensor,
    keys: Features,
    value: Tensor,
    log_decay: Tensor | None = None,
    start: KVState | None = None,
    *,
    by_feature: bool = False,
) -> tuple[Tensor, KVState]:
    """Place a node of the sums over j <= i `[B, H, L, x]`, and of those over all keys and `start`.

    Rows are `[B, H, L, m]`, keys and values `[B, G, L, …]`.
    """
    shapes: list[Sequence[int]] = [(*rows.shape[:3], value.shape[3]), (*value.shape[:2], rows.shape[3], value.shape[3])]
    if keys.log_scale is not None:
        shapes.append(value.shape[:2])
    inputs = (rows, keys.values, value, keys.log_scale, log_decay, *(start or (None, None)))
    attributes = {"groups": value.shape[1], "by_feature": int(by_feature)}
    totals, *after = graph_node("CausalSums", inputs, attributes, *shapes)
    return totals, KVState(after[0], after[1] if len(after) > 1 else None)


def masked_keys(keys: GatedKeys, mask: Tensor | None) -> GatedKeys:
    """Remove the features and the decay of padding; mask `[B, L]`."""
    scale = None if keys.log_scale is None else mask_tokens(keys.log_scale, mask, float("-inf"))
    return GatedKeys(mask_tokens(keys.values, mask), mask_tokens(keys.log_decay, mask), scale)


def _grouped_queries(call: GatedCall, start: int, stop: int, mask: Tensor | None) -> tuple[Tensor, int]:
    """Return the features of the queries of some tokens `[B, G, R, stop - start, m]`, and how many tokens have none.

    They are zeros for tokens before the first query, and R is 0 where no token has a query.
    """
    query, groups = call.query, call.key.shape[1]
    first = 0 if is_free(query.shape[2]) else call.key.shape[2] - query.shape[2]
    missing = max(first - start, 0)
    query = query[:, :, max(start - first, 0) : max(stop - first, 0)].to(compute_dtype(query))
    if not query.shape[2]:
        return query.new_zeros(query.shape[0], groups, 0, stop - start, call.num_features), missing
    features = call.query_features(mask_tokens(query, mask if mask is None else mask[:, missing:])).values
    return functional.pad(group_heads(features, groups), (0, 0, missing, 0)), missing


def _block(rows: Tensor, keys: GatedKeys, value: Tensor, carry: KVState | None, chunk: int) -> tuple[Tensor, KVState]:
    """Compute the sums `[B, G, R, l, e + 1]` of a block, and the state after it.

    Rows are `[B, G, R, l, m]`, keys and values `[B, G, l, …]`.
    """
    length = rows.shape[3]
    query = split_chunks(rows, chunk)
    features = split_chunks(keys.values, chunk)
    values = split_chunks(value, chunk)
    total = split_chunks(keys.log_decay, chunk).cumsum(dim=-2)  # G_i, [B, G, n, c, 1 | m]
    last = total[..., -1:, :]
    if keys.log_scale is None:
        added = KVState.of(Features(features * (last - total).exp()), values)
        before, carry = _scan(added, last, carry)
        weights = _weights(query, features, total)
        past = query * total.exp().unsqueeze(2)
    else:
        # Relative to the row's largest decayed key scale; the decay that all keys of a row share cancels. The scale has
        # its gradient: a guarded normaliser depends on it.
        offset = split_chunks(keys.log_scale.unsqueeze(-1), chunk, float("-inf")).squeeze(-1) - total.squeeze(-1)
        added = KVState.of(Features(features, offset), values, signed=True)
        before, carry = _scan(_decayed(added, last), last, carry)
        assert before.log_scale is not None
        carried = before.log_scale.unsqueeze(-1)
        # Formats of exported graphs have no running maximum.
        running = earlier(offset).amax(dim=-1) if torch.compiler.is_exporting() else offset.cummax(dim=-1).values
        top = finite_or_zero(torch.maximum(running, carried))
        gap = offset.unsqueeze(-2) - top.unsqueeze(-1)
        weights = _products(query, features) * gap.clamp(max=0.0).exp().unsqueeze(2)
        past = query * (carried - top).exp().unsqueeze(2).unsqueeze(-1)
    out = weights.tril() @ values.unsqueeze(2) + past @ before.total.unsqueeze(2)
    return join_chunks(out, length, 3), carry


def _products(query: Tensor, features: Tensor) -> Tensor:
    """Multiply rows and keys of chunks: `[B, G, R, n, c, m] x [B, G, n, c, m] -> [B, G, R, n, c, c]`."""
    return query @ features.transpose(-1, -2).unsqueeze(2)


def _weights(query: Tensor, features: Tensor, total: Tensor) -> Tensor:
    """Compute `Σ_f φ(q_i)_f φ(k_j)_f exp(G_if - G_jf)` within chunks; entries with j > i are not used, but finite."""
    if total.shape[-1] == 1:
        gap = total - total.transpose(-1, -2)
        return _products(query, features) * gap.clamp(max=0.0).exp().unsqueeze(2)
    middle = total[..., total.shape[-2] // 2, None, :].detach()  # cancels
    return _products(query * (total - middle).exp().unsqueeze(2), features * (middle - total).exp())


def _decayed(kv_state: KVState, log_decay: Tensor) -> KVState:
    """Decay sums `[…, m, e + 1]` by log_decay `[…, 1, 1 | m]`; with a log scale all features share one decay."""
    if kv_state.log_scale is None:
        return KVState(kv_state.total * log_decay.exp().transpose(-1, -2), None)
    return kv_state.decayed(log_decay.reshape(kv_state.log_scale.shape))


def _scan(added: KVState, log_decay: Tensor, carry: KVState | None) -> tuple[KVState, KVState]:
    """Return the sums before each chunk and after the last, from what each adds `[B, G, n, …]` and its decay."""
    if carry is None:
        scale = None if added.log_scale is None else torch.full_like(added.log_scale[:, :, 0], float("-inf"))
        carry = KVState(torch.zeros_like(added.total[:, :, 0]), scale)
    if is_free(added.total.shape[2]):
        return _free_scan(added, log_decay, carry)
    before = []
    for index in range(added.total.shape[2]):
        before.append(carry)
        carry = _decayed(carry, log_decay[:, :, index]).plus(added.at(index, dim=2))
    return KVState.stack(before, dim=2), carry


def _free_scan(added: KVState, log_decay: Tensor, start: KVState) -> tuple[KVState, KVState]:
    """Compute `_scan` without a loop: decays are log scales, those of features in a dimension of their own."""
    decays = log_decay.squeeze(3).movedim(-1, 2)  # [B, G, 1 | m, n]
    after = decays.cumsum(dim=-1)
    parts = decays.shape[2]

    def split(kv_state: KVState, rows: int) -> KVState:
        total = kv_state.total.unflatten(rows, (parts, -1)).movedim(rows, 2)  # [B, G, 1 | m, n, m | 1, e + 1]
        scale = total.new_zeros(total.shape[:-2]) if kv_state.log_scale is None else kv_state.log_scale.unsqueeze(2)
        return KVState(total, scale)

    def join(kv_state: KVState, decay: Tensor, rows: int) -> KVState:
        assert kv_state.log_scale is not None
        scale = kv_state.log_scale + decay
        total = kv_state.total
        total = total * scale.exp()[..., None, None] if added.log_scale is None else total
        total = total.movedim(2, rows).flatten(rows, rows + 1)
        return KVState(total, None if added.log_scale is None else scale[:, :, 0])

    parted = split(added, 3)
    assert parted.log_scale is not None
    before, last = KVState(parted.total, parted.log_scale - after).running(split(start, 2), dim=3)
    return join(before, after - decays, 3), join(last, after[..., -1], 2)
