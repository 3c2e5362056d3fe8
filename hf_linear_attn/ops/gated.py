"""Causal kernelized attention with a decaying state: parallel over chunks, recurrent between them.

    S_t = Λ_t S_{t-1} + φ(k_t) v_tᵀ      z_t = Λ_t z_{t-1} + φ(k_t)      o_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t

`Λ_t = exp(log_decay_t)` is one number per head, `[B, G, L, 1]`, or one per feature, `[B, G, L, m]`; padding neither
decays nor writes. Shapes as in `ops.kernelized`; the state is `kv`, `k_sum`, and `log_scale` for keys that carry one.

Decays are summed up in log space, within a chunk only. Per head, the weight of a pair is `exp(G_i - G_j)` with an
exponent of at most 0, for any decay at all. Per feature that would take a tensor of chunk x chunk x m; instead queries
are multiplied by `exp(G_i - G_mid)` and keys by `exp(G_mid - G_j)`, which is safe because log_decay may not lie below
`-MAX_DECAY` there: no exponent leaves ±MAX_DECAY · FEATURE_CHUNK / 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .common import (
    State,
    block_length,
    compute_dtype,
    divide,
    finite_or_zero,
    group_heads,
    mask_tokens,
)
from .fused import GatedCall, GatedKeys

#: Tokens per chunk with one decay per head, and with one per feature.
HEAD_CHUNK = 64
FEATURE_CHUNK = 32

#: Strongest decay of a feature by one token: `exp(-1)`, which leaves 1 % after five tokens.
MAX_DECAY = 1.0


class _GatedState(NamedTuple):
    """`exp(-log_scale) Σ_j φ(k_j) [v_j, 1]`, decayed to the end of a chunk: `[B, G, m, e + 1]` and `[B, G]`."""

    kv: Tensor
    log_scale: Tensor | None


def gated_causal(call: GatedCall) -> tuple[Tensor, State | None]:
    """Compute causal attention with a decaying state, continued from `call.state`.

    The log scale of query features is ignored, because it cancels in the normaliser. Time O(L·(chunk + m)·(d + e));
    temporaries O(block·m) and the states of the block's chunks.

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token.
    """
    query, key, value, mask, state = call.query, call.key, call.value, call.mask, call.state
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    chunk = FEATURE_CHUNK if call.per_feature else HEAD_CHUNK
    step = block_length(batch, heads, max(call.num_features, value.shape[-1]), length)
    carry: _GatedState | None = None
    if state is not None:
        kv = torch.cat([state["kv"], state["k_sum"].unsqueeze(-1)], dim=-1)
        carry = _GatedState(kv, state.get("log_scale"))
    outputs = []
    for start in range(0, length, step):
        now = slice(start, min(start + step, length))
        part = None if mask is None else mask[:, now]
        rows = group_heads(call.query_features(mask_tokens(query[:, :, now].to(dtype), part), start).values, groups)
        keys = call.key_gates(mask_tokens(key[:, :, now].to(dtype), part), start)
        values = functional.pad(mask_tokens(value[:, :, now].to(dtype), part), (0, 1), value=1.0)
        out, carry = _block(rows, masked_keys(keys, part), values, carry, chunk)
        outputs.append(normalise(out, call.signed).flatten(1, 2).to(value.dtype))
    if carry is None or not outputs:
        return value.new_zeros(batch, heads, 0, value.shape[-1]), state
    after = {"kv": carry.kv[..., :-1], "k_sum": carry.kv[..., -1]}
    return torch.cat(outputs, dim=2), after if carry.log_scale is None else {**after, "log_scale": carry.log_scale}


def masked_keys(keys: GatedKeys, mask: Tensor | None) -> GatedKeys:
    """Remove the features and the decay of padding; mask `[B, L]`."""
    scale = None if keys.log_scale is None else mask_tokens(keys.log_scale, mask, float("-inf"))
    return GatedKeys(mask_tokens(keys.values, mask), mask_tokens(keys.log_decay, mask), scale)


def normalise(numerator: Tensor, signed: bool) -> Tensor:
    """Turn `Σ w [v, 1]` `[…, e + 1]` into the weighted mean of v `[…, e]`."""
    return divide(numerator[..., :-1], numerator[..., -1], signed=signed)


def _split(tensor: Tensor, chunk: int, value: float = 0.0) -> Tensor:
    """Split `[…, L, w]` into chunks `[…, n, c, w]`, the last of them padded with `value`."""
    chunk = min(chunk, tensor.shape[-2])
    return functional.pad(tensor, (0, 0, 0, -tensor.shape[-2] % chunk), value=value).unflatten(-2, (-1, chunk))


def _block(
    rows: Tensor, keys: GatedKeys, value: Tensor, carry: _GatedState | None, chunk: int
) -> tuple[Tensor, _GatedState]:
    """rows `[B, G, R, l, m]`, keys and values `[B, G, l, …]` -> sums `[B, G, R, l, e + 1]` and the state after them."""
    length = rows.shape[3]
    query, features, values = _split(rows, chunk), _split(keys.values, chunk), _split(value, chunk)
    total = _split(keys.log_decay, chunk).cumsum(dim=-2)  # G_i, [B, G, n, c, 1 | m]
    if keys.log_scale is None:
        before, carry = _scan(_chunk_states(features, values, total, None), total[..., -1, :], carry)
        weights, past = _weights(query, features, total), query * total.exp().unsqueeze(2)
    else:
        # Relative to the row's largest decayed key scale; the decay that all keys of a row share cancels. The scale has
        # its gradient: a guarded normaliser depends on it.
        offset = _split(keys.log_scale.unsqueeze(-1), chunk, float("-inf")).squeeze(-1) - total.squeeze(-1)
        before, carry = _scan(_chunk_states(features, values, total, offset), total[..., -1, :], carry)
        assert before.log_scale is not None
        carried = before.log_scale.unsqueeze(-1)
        top = finite_or_zero(torch.maximum(offset.cummax(dim=-1).values, carried))
        gap = offset.unsqueeze(-2) - top.unsqueeze(-1)
        weights = _products(query, features) * gap.clamp(max=0.0).exp().unsqueeze(2)
        past = query * (carried - top).exp().unsqueeze(2).unsqueeze(-1)
    out = weights.tril() @ values.unsqueeze(2) + past @ before.kv.unsqueeze(2)
    return out.flatten(3, 4)[:, :, :, :length], carry


def _products(query: Tensor, features: Tensor) -> Tensor:
    """`[B, G, R, n, c, m] x [B, G, n, c, m] -> [B, G, R, n, c, c]`."""
    return query @ features.transpose(-1, -2).unsqueeze(2)


def _weights(query: Tensor, features: Tensor, total: Tensor) -> Tensor:
    """`Σ_f φ(q_i)_f φ(k_j)_f exp(G_if - G_jf)` within chunks; entries with j > i are not used, but finite."""
    if total.shape[-1] == 1:
        gap = total - total.transpose(-1, -2)
        return _products(query, features) * gap.clamp(max=0.0).exp().unsqueeze(2)
    middle = total[..., total.shape[-2] // 2, None, :].detach()  # cancels
    return _products(query * (total - middle).exp().unsqueeze(2), features * (middle - total).exp())


def _chunk_states(features: Tensor, values: Tensor, total: Tensor, offset: Tensor | None) -> _GatedState:
    """Return what each chunk adds to the state at its end, `[B, G, n, …]`."""
    last = total[..., -1:, :]
    if offset is None:
        return _GatedState((features * (last - total).exp()).transpose(-1, -2) @ values, None)
    top = offset.amax(dim=-1)
    weights = (offset - finite_or_zero(top).unsqueeze(-1)).exp().unsqueeze(-1)
    return _GatedState((features * weights).transpose(-1, -2) @ values, top + last.flatten(-2).squeeze(-1))


def _scan(own: _GatedState, decay: Tensor, carry: _GatedState | None) -> tuple[_GatedState, _GatedState]:
    """Return the states before each chunk `[B, G, n, …]` and after the last; decay `[B, G, n, w]` of each chunk."""
    if carry is None:
        scale = None if own.log_scale is None else torch.full_like(own.log_scale[:, :, 0], float("-inf"))
        carry = _GatedState(torch.zeros_like(own.kv[:, :, 0]), scale)
    states, scales = [], []
    for index in range(own.kv.shape[2]):
        states.append(carry.kv)
        log_decay, added, log_scale = decay[:, :, index], own.kv[:, :, index], None
        if own.log_scale is not None and carry.log_scale is not None:
            scales.append(carry.log_scale)
            log_scale = torch.maximum(carry.log_scale + log_decay.squeeze(-1), own.log_scale[:, :, index])
            floor = finite_or_zero(log_scale)
            log_decay = log_decay + (carry.log_scale - floor).unsqueeze(-1)
            added = added * (own.log_scale[:, :, index] - floor).exp()[..., None, None]
        carry = _GatedState(carry.kv * log_decay.exp().unsqueeze(-1) + added, log_scale)
    return _GatedState(torch.stack(states, dim=2), torch.stack(scales, dim=2) if scales else None), carry


def dense_gated_weights(query: Tensor, keys: GatedKeys, *, signed: bool = False) -> Tensor:
    """Compute explicit normalised weights `[B, H, L, L]`, for analysis and for losses.

    query features `[B, H, L, m]`; keys by `masked_keys`. O(L²) memory, and O(L²·m / FEATURE_CHUNK)
    with a decay per feature.
    """
    groups, length = keys.values.shape[1], query.shape[2]
    rows, total = group_heads(query, groups), keys.log_decay.cumsum(dim=2)
    if total.shape[-1] == 1:
        offset = -total.squeeze(-1) + (0.0 if keys.log_scale is None else keys.log_scale)
        top = finite_or_zero(offset.cummax(dim=-1).values)
        gap = (offset.unsqueeze(-2) - top.unsqueeze(-1)).clamp(max=0.0)
        weights = (rows @ keys.values.unsqueeze(2).transpose(-1, -2) * gap.exp().unsqueeze(2)).tril()
    else:
        parts = []
        for start in range(0, length, FEATURE_CHUNK):
            now = slice(start, min(start + FEATURE_CHUNK, length))
            middle = total[:, :, (now.start + now.stop) // 2, None].detach()
            block = rows[:, :, :, now] * (total[:, :, now] - middle).exp().unsqueeze(2)
            seen = keys.values[:, :, : now.stop] * (middle - total[:, :, : now.stop]).exp()
            part = (block @ seen.unsqueeze(2).transpose(-1, -2)).tril(start)
            parts.append(functional.pad(part, (0, length - now.stop)))
        weights = torch.cat(parts, dim=3) if parts else rows.new_zeros(*rows.shape[:3], 0, 0)
    totals = weights.sum(dim=-1, keepdim=True)
    return normalise(torch.cat([weights, totals], dim=-1), signed).flatten(1, 2)
