"""One token of a hybrid after a state (`ops.windowed`): the ring gives its oldest key to the sums and takes the new."""

from __future__ import annotations

import torch
from torch import Tensor

from .common import FeatureFunction, State, compute_dtype, divide, mask_tokens
from .kernelized import masked_key_features, merge_keys
from .windowed import FLOOR, by_row

RING = ("ring_key", "ring_value", "ring_mask")


def is_decoding_step(query: Tensor, mask: Tensor | None, state: State | None) -> bool:
    """Whether a call is one real token in every row, after a state. (Reading a mask makes a GPU wait: not there.)"""
    if state is None or query.shape[2] != 1:
        return False
    return mask is None or (not torch.compiler.is_compiling() and mask.device.type == "cpu" and bool(mask.all()))


def next_ring(key: Tensor, value: Tensor, state: State) -> State:
    """The ring without its oldest token and with the new one."""
    ring_key, ring_value, ring_mask = (state[name] for name in RING)
    new = ring_mask.new_ones(ring_mask.shape[0], 1)
    return {
        "ring_key": torch.cat([ring_key[:, :, 1:].to(key.dtype), key], dim=2),
        "ring_value": torch.cat([ring_value[:, :, 1:].to(value.dtype), value], dim=2),
        "ring_mask": torch.cat([ring_mask[:, 1:], new], dim=1),
    }


def windowed_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    *,
    scaling: float,
    log_mix: Tensor,
    state: State,
) -> tuple[Tensor, State]:
    """query `[B, H, 1, d]`, key `[B, G, 1, d]`, value `[B, G, 1, e]` -> the output `[B, H, 1, e]`, the state after it.

    Time O((window + m)·d) and no loop: the sums and the ring are written anew.
    """
    dtype = compute_dtype(query)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    ring = next_ring(key, value, state)
    oldest = state["ring_mask"][:, :1]
    older = masked_key_features(key_features, state["ring_key"][:, :, :1], 0, oldest, dtype)
    sums: State = {name: held for name, held in state.items() if name not in RING}
    sums = merge_keys(sums, older, mask_tokens(state["ring_value"][:, :, :1].to(dtype), oldest))
    near_key, near_value = ring["ring_key"].to(dtype), ring["ring_value"].to(dtype)
    full = query.device.type == "cpu" and not torch.compiler.is_compiling() and bool(ring["ring_mask"].all())
    if not full:
        near_key, near_value = mask_tokens(near_key, ring["ring_mask"]), mask_tokens(near_value, ring["ring_mask"])
    rows = (query.to(dtype) * scaling).reshape(batch, groups, heads // groups, -1)
    logits = rows @ near_key.transpose(-1, -2)
    if not full:
        logits = logits.masked_fill(~ring["ring_mask"][:, None, None, :], float("-inf"))
    values, scale = query_features(query.to(dtype), 0)
    features = (values * by_row(log_mix).to(dtype).exp().unsqueeze(-1)).reshape(batch, groups, heads // groups, -1)
    top = logits.amax(dim=-1, keepdim=True)
    far, far_sum = features @ sums["kv"], features @ sums["k_sum"].unsqueeze(-1)
    if scale is not None:  # everything is relative to the row's largest exponent, which then has no gradient
        far_scale = scale.reshape(batch, groups, -1, 1) + sums["log_scale"][:, :, None, None]
        top = torch.maximum(top.detach(), far_scale.detach()).clamp_min(FLOOR)
        decay = torch.exp(far_scale - top)
        far, far_sum = far * decay, far_sum * decay
    exact = torch.exp(logits - top)
    total = exact.sum(dim=-1, keepdim=True) + far_sum
    out = divide(exact @ near_value + far, total.squeeze(-1))
    return out.view(batch, heads, 1, -1).to(value.dtype), {**sums, **ring}
