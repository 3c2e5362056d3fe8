"""The forward pass by the Triton kernels: their order, and the tensors between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..common import DENOMINATOR_EPS, State, token_major
from ..fused import KernelizedCall
from . import forward_kernels as kernels
from . import layout
from .features import MapArguments
from .layout import Blocks, launch, mask_bytes, rows

#: Numbers of a state that one program of the scan adds up.
SCAN_BLOCK = 1024


class Forward(NamedTuple):
    """Results of the forward pass: the output, the state, the normalisers, and the sums over all keys."""

    out: Tensor
    state: State | None
    normaliser: Tensor | None
    states: Tensor | None


def sum_tokens(
    x: Tensor,
    u: Tensor,
    mask: Tensor | None,
    fmap: MapArguments,
    split: Blocks,
    *,
    spans: int | None = None,
    gradient: tuple[Tensor, Tensor] | None = None,
    scaled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute sums over each of the first `spans` spans, `[B·heads, all spans, m·(e + 1)]`, and their log scales."""
    batch, heads, length, _ = x.shape
    flat = int(fmap.parts.value * fmap.width.value) * (u.shape[3] + 1)
    states = torch.empty(batch * heads, split.spans, flat, device=x.device, dtype=torch.float32)
    tops = torch.empty(batch * heads, split.spans, device=x.device, dtype=torch.float32) if scaled else None
    grid = (batch * heads, split.spans if spans is None else spans, split.tiles)
    launch(
        kernels.sum_tokens, grid, rows(x), rows(u), *mask_bytes(mask), *(gradient or (None, None)), states, tops, fmap,
        heads, length, split.span, split.spans, split.columns, split.tokens, scaled, warps=split.warps,
    )  # fmt: skip
    return states, tops


def scan(
    states: Tensor,
    value_size: int,
    *,
    tops: Tensor | None = None,
    state: State | None = None,
    repeats: int = 1,
    total: bool = False,
    reverse: bool = False,
) -> Tensor | None:
    """Replace states per span by sums before each span, in place, and return the log scales before each span."""
    pairs, spans, flat = states.shape
    before = None if tops is None else torch.empty_like(tops)
    carried = state or {}
    sum_size = flat // (value_size + 1)
    launch(
        kernels.scan, (pairs // repeats, triton.cdiv(flat, SCAN_BLOCK)), states, tops, before, carried.get("kv"),
        carried.get("k_sum"), carried.get("log_scale"), spans, repeats, flat - sum_size, sum_size, total, reverse,
        SCAN_BLOCK, warps=4,
    )  # fmt: skip
    return before


def bidirectional(call: KernelizedCall, maps: tuple[MapArguments, MapArguments], save: bool) -> Forward:
    """Two passes: the sums over the keys, then the queries. With `save`, normalisers and states are returned."""
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    out = token_major(batch, heads, length, value_size, value.dtype, value.device)
    if not out.numel() or not keys:
        return Forward(out.zero_(), None, None, None)
    assert call.fused is not None
    split, scaled = layout.blocks(key, call), call.fused[1].scaled
    states, tops = sum_tokens(key, value, call.mask, maps[1], split, scaled=scaled)
    if split.spans > 1:
        scan(states, value_size, tops=tops, total=True)
    normaliser = torch.empty(batch, heads, length, device=out.device) if save else None
    reads = layout.blocks(query, call)
    launch(
        kernels.attend_bidirectional, (batch * heads, reads.spans, reads.tiles), rows(query), rows(out), states,
        normaliser, maps[0], heads, groups, length, reads.span, split.spans, DENOMINATOR_EPS, reads.columns,
        reads.tokens, warps=reads.warps,
    )  # fmt: skip
    return Forward(out, None, normaliser, states if save else None)


def causal(call: KernelizedCall, maps: tuple[MapArguments, MapArguments], save: bool) -> Forward:
    """One pass over chunks; if the sequence is split into spans, the sums before each span are computed first."""
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, value_size = key.shape[1], value.shape[3]
    out = token_major(batch, heads, length, value_size, value.dtype, value.device)
    if not out.numel():
        return Forward(out, call.state, None, None)
    assert call.fused is not None
    split, scaled = layout.blocks(query, call), call.fused[1].scaled
    before: State = {name: tensor.float().contiguous() for name, tensor in (call.state or {}).items()}
    states = tops = None
    if split.spans > 1:
        states, tops = sum_tokens(key, value, call.mask, maps[1], split, spans=split.spans - 1, scaled=scaled)
        tops = scan(states, value_size, tops=tops, state=before)
    after: State = {
        "kv": torch.empty(batch, groups, call.num_features, value_size, device=out.device),
        "k_sum": torch.empty(batch, groups, call.num_features, device=out.device),
    }
    if scaled:
        after["log_scale"] = torch.empty(batch, groups, device=out.device)
    normaliser = torch.empty(batch, heads, length, device=out.device) if save else None
    launch(
        kernels.attend_causal, (batch * heads, split.spans, split.tiles), rows(query), rows(key), rows(value),
        rows(out), *mask_bytes(call.mask), states, tops, before.get("kv"), before.get("k_sum"), before.get("log_scale"),
        after["kv"], after["k_sum"], after.get("log_scale"), normaliser, *maps, heads, groups, length, split.span,
        split.spans, DENOMINATOR_EPS, split.columns, split.tokens, scaled, warps=split.warps,
    )  # fmt: skip
    return Forward(out, after, normaliser, None)
