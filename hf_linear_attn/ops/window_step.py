"""One token of windowed attention after a state: the oldest key of the ring moves into `kv` and `k_sum` unless it is a
sink, and the new key is appended to the ring."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import Features, KVState, State, compute_dtype, divide, mask_tokens, with_ones
from .fused import WindowedCall
from .kernelized import masked_key_features
from .sinks import first_tokens
from .windowed import Columns, row_weights


def is_decoding_step(query: Tensor, mask: Tensor | None, state: State | None) -> bool:
    """Return whether a call is one real token in every row, after a state. (A mask on a GPU is not read.)"""
    if state is None or query.shape[2] != 1:
        return False
    return mask is None or (not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all()))


def windowed_step(call: WindowedCall) -> tuple[Tensor, State]:
    """Compute one token after a state in O((window + m)·d), without a loop; the state is written anew.

    Returns:
        The output `[B, H, 1, e]` in the dtype of `call.value`, and the state after the token.
    """
    query, key, value, state = call.query, call.key, call.value, call.state
    assert state is not None
    dtype = compute_dtype(query)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    ring: State = {
        "ring_key": torch.cat([state["ring_key"][:, :, 1:].to(key.dtype), key], dim=2),
        "ring_value": torch.cat([state["ring_value"][:, :, 1:].to(value.dtype), value], dim=2),
        "ring_mask": torch.cat([state["ring_mask"][:, 1:], state["ring_mask"].new_ones(batch, 1)], dim=1),
    }
    sinks, first = first_tokens(call)
    outside = state["count"].unsqueeze(1) - call.window  # the position of the oldest token, which leaves the window
    oldest = state["ring_mask"][:, :1] & (outside >= call.sinks)
    older = masked_key_features(call.key_features, state["ring_key"][:, :, :1], 0, oldest, dtype)
    older_value = with_ones(mask_tokens(state["ring_value"][:, :, :1].to(dtype), oldest))
    far = KVState.from_state(state).plus(KVState.of(older, older_value))
    near_key, near_value, near = ring["ring_key"], ring["ring_value"], ring["ring_mask"]
    if sinks is not None:
        near_key, near_value = torch.cat([near_key, sinks.key], dim=2), torch.cat([near_value, sinks.value], dim=2)
        near = torch.cat([near, torch.arange(call.sinks, device=near.device) <= outside], dim=1)
    near_key, near_value = near_key.to(dtype), near_value.to(dtype)
    full = query.device.type == "cpu" and not torch.compiler.is_compiling() and bool(near.all())
    if not full:
        near_key, near_value = mask_tokens(near_key, near), mask_tokens(near_value, near)
    grouped = (batch, groups, heads // groups, -1)
    logits = (query.to(dtype) * call.scaling).reshape(grouped) @ near_key.transpose(-1, -2)
    if not full:
        logits = logits.masked_fill(~near[:, None, None, :], float("-inf"))
    values, scale = call.query_features(query.to(dtype), 0)
    mix = call.log_mixing_weights().to(dtype).exp().unsqueeze(-1)
    features = Features((values * mix).reshape(grouped), None if scale is None else scale.reshape(grouped[:-1]))
    far_scale = None if far.log_scale is None else far.log_scale.unsqueeze(-1)
    (exact,), top = row_weights(features, [Columns(logits)], far_scale)
    total = features.values @ far.total
    if features.log_scale is not None and far_scale is not None:
        total = total * torch.exp(features.log_scale + far_scale - top).unsqueeze(-1)
    out = divide(exact @ near_value + total[..., :-1], exact.sum(dim=-1) + total[..., -1])
    return out.view(batch, heads, 1, -1).to(value.dtype), {**far.state(), **ring, **first}
