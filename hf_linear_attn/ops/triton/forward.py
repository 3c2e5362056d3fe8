"""The forward pass by the Triton kernels: which of them run, in which order, over what."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..common import DENOMINATOR_EPS, State
from ..fused import KernelizedCall
from . import forward_kernels as kernels
from . import layout
from .features import Side
from .layout import Blocks, launch, mask_bytes, rows, token_major

#: Numbers of a state that one program of the scan adds up.
SCAN_BLOCK = 1024


class Forward(NamedTuple):
    """What the backward pass goes on with: the output, the state, the normalisers, and the sums over all keys."""

    out: Tensor
    state: State | None
    normaliser: Tensor | None
    sums: Tensor | None


def sum_tokens(
    x: Tensor,
    u: Tensor,
    mask: Tensor | None,
    side: Side,
    cut: Blocks,
    *,
    spans: int | None = None,
    gradient: tuple[Tensor, Tensor] | None = None,
    scaled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sums over each of the first `spans` spans, `[B·heads, spans of the cut, m·(e + 1)]`, and their log scales."""
    batch, heads, length, _ = x.shape
    flat = int(side.parts.value * side.width.value) * (u.shape[3] + 1)
    sums = torch.empty(batch * heads, cut.spans, flat, device=x.device, dtype=torch.float32)
    tops = torch.empty(batch * heads, cut.spans, device=x.device, dtype=torch.float32) if scaled else None
    grid = (batch * heads, cut.spans if spans is None else spans, cut.tiles)
    launch(
        kernels.sum_tokens, grid, rows(x), rows(u), *mask_bytes(mask), *(gradient or (None, None)), sums, tops, side,
        heads, length, cut.span, cut.spans, cut.columns, cut.tokens, scaled, warps=cut.warps,
    )  # fmt: skip
    return sums, tops


def scan(
    sums: Tensor,
    value_size: int,
    *,
    tops: Tensor | None = None,
    state: State | None = None,
    repeats: int = 1,
    total: bool = False,
    reverse: bool = False,
) -> Tensor | None:
    """Turn sums per span into sums before each span, in place (see the kernel); the log scales before each span."""
    pairs, spans, flat = sums.shape
    before = None if tops is None else torch.empty_like(tops)
    held = state or {}
    sum_size = flat // (value_size + 1)
    launch(
        kernels.scan, (pairs // repeats, triton.cdiv(flat, SCAN_BLOCK)), sums, tops, before, held.get("kv"),
        held.get("k_sum"), held.get("log_scale"), spans, repeats, flat - sum_size, sum_size,
        total, reverse, SCAN_BLOCK, warps=4,
    )  # fmt: skip
    return before


def bidirectional(call: KernelizedCall, sides: tuple[Side, Side], keep: bool) -> Forward:
    """Two passes: the sums over the keys, then the queries. `keep` the normalisers and sums for the backward pass."""
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    out = token_major(batch, heads, length, value_size, value.dtype, value.device)
    if not out.numel() or not keys:
        return Forward(out.zero_(), None, None, None)
    assert call.fused is not None
    features = max(layout.padded_features(held, query.shape[3]) for held in call.fused)
    cut = layout.blocks(key, features, value_size)
    scaled = call.fused[1].scaled
    sums, tops = sum_tokens(key, value, call.mask, sides[1], cut, scaled=scaled)
    if cut.spans > 1:
        scan(sums, value_size, tops=tops, total=True)
    normaliser = torch.empty(batch, heads, length, device=out.device) if keep else None
    reads = layout.blocks(query, features, value_size)
    launch(
        kernels.attend_all, (batch * heads, reads.spans, reads.tiles), rows(query), rows(out), sums, normaliser,
        sides[0], heads, groups, length, reads.span, cut.spans, DENOMINATOR_EPS, reads.columns, reads.tokens,
        warps=reads.warps,
    )  # fmt: skip
    return Forward(out, None, normaliser, sums if keep else None)


def causal(call: KernelizedCall, sides: tuple[Side, Side], keep: bool) -> Forward:
    """One pass over chunks; where the sequence is cut into spans, the sums before each of them come first."""
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, value_size = key.shape[1], value.shape[3]
    out = token_major(batch, heads, length, value_size, value.dtype, value.device)
    if not out.numel():
        return Forward(out, call.state, None, None)
    assert call.fused is not None
    features = max(layout.padded_features(held, query.shape[3]) for held in call.fused)
    cut = layout.blocks(query, features, value_size)
    scaled = call.fused[1].scaled
    held: State = {name: tensor.float().contiguous() for name, tensor in (call.state or {}).items()}
    sums = tops = None
    if cut.spans > 1:
        sums, tops = sum_tokens(key, value, call.mask, sides[1], cut, spans=cut.spans - 1, scaled=scaled)
        tops = scan(sums, value_size, tops=tops, state=held)
    after: State = {
        "kv": torch.empty(batch, groups, call.num_features, value_size, device=out.device),
        "k_sum": torch.empty(batch, groups, call.num_features, device=out.device),
    }
    if scaled:
        after["log_scale"] = torch.empty(batch, groups, device=out.device)
    normaliser = torch.empty(batch, heads, length, device=out.device) if keep else None
    launch(
        kernels.attend_causal, (batch * heads, cut.spans, cut.tiles), rows(query), rows(key), rows(value), rows(out),
        *mask_bytes(call.mask), sums, tops, held.get("kv"), held.get("k_sum"), held.get("log_scale"),
        after["kv"], after["k_sum"], after.get("log_scale"), normaliser, *sides, heads, groups, length, cut.span,
        cut.spans, DENOMINATOR_EPS, cut.columns, cut.tokens, scaled, warps=cut.warps,
    )  # fmt: skip
    return Forward(out, after, normaliser, None)
