"""A token of windowed attention after a state, in one kernel: softmax over the ring and the sinks, and the sums."""

# mypy: disable-error-code="no-untyped-def,annotation-unchecked"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..calls import WindowedCall
from ..common import DENOMINATOR_EPS, State, readable
from ..kernel_inputs import has_entries, window_entries
from ..window_weights import LARGEST_GAP
from . import padded_features, power_of_two
from .attention import launch, map_arguments, mask_bytes, on_device, rows
from .backend import unsupported_sizes
from .kernels import bounded, finite, load_state, store_state
from .maps import features

#: Keys of the ring that are read at once.
BLOCK = 64


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory of a block of threads that the weights of a map may take."""
    if device.type != "cuda":
        return 1 << 20
    # 99 KB on the smaller GPUs since Ampere
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10) - 1024


@triton.jit
def attend_keys(keys, values, visible, query, scaling, top, total, mass):
    """Add the softmax weights of keys `[S, D]` to sums `[C]` and their mass, relative to exp(top).

    What stands at padding may be NaN.
    """
    logits = tl.where(visible, tl.sum(keys.to(tl.float32) * query[None, :], axis=1) * scaling, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, axis=0))
    decay = tl.exp(top - finite(higher))
    weights = tl.exp(logits - finite(higher))
    seen = tl.where(visible[:, None], values.to(tl.float32), 0.0)
    total = total * decay + tl.sum(weights[:, None] * seen, axis=0)
    return higher, total, mass * decay + tl.sum(weights, axis=0)


@triton.jit
def move_tokens(tokens, after, source, target, is_old, is_new, new, width, columns, writes):
    """Load `[S, C]` of the rows `source`, with the new token at its row, and store them as the rows `target`."""
    inside = (columns < width)[None, :]
    moved = tl.load(tokens + source[:, None] * width + columns[None, :], mask=is_old[:, None] & inside, other=0.0)
    moved = tl.where(is_new[:, None], new[None, :], moved)
    mask = (is_old | is_new)[:, None] & inside & writes
    tl.store(after + target[:, None] * width + columns[None, :], moved, mask=mask)
    return moved


@triton.jit
def step_window(
    query, key, value, out, mask, mask_batch, kv, k_sum, oldest, ring_value, ring_mask, sink_key, sink_value, count,
    next_kv, next_sum, next_key, next_value, next_mask, next_sink_key, next_sink_value, next_count, base, base_batch,
    base_head, mix, bound, saturation, query_map, key_map, heads, groups, window, sinks, scaling, floor,
    largest_gap, scaled: tl.constexpr,
    value_block: tl.constexpr, size_block: tl.constexpr, block: tl.constexpr, sink_block: tl.constexpr,
):  # fmt: skip
    """Compute one query head, and some columns of the values; the first head of a group writes the state.

    `oldest` are the rows of the ring's keys. A row whose token is padding leaves its state as it is.
    """
    pair = tl.program_id(0)
    tile = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    repeats = heads // groups
    index = (batch * groups + head // repeats).to(tl.int64)
    writes = head % repeats == 0
    first_tile = tile == 0
    first_head = (head == 0) & (tile == 0)
    dims = tl.arange(0, size_block)
    columns = tile * value_block + tl.arange(0, value_block)
    in_key = dims < query.width
    in_value = columns < value.width
    before = tl.load(count + batch)
    real = tl.full((), 1, tl.int32)
    if mask is not None:
        real = tl.where(tl.load(mask + batch.to(tl.int64) * mask_batch) != 0, 1, 0)
    first = query.data + batch.to(tl.int64) * query.batch + head.to(tl.int64) * query.head
    row = tl.load(first + dims, mask=in_key, other=0.0).to(tl.float32)
    group = (head // repeats).to(tl.int64)
    new_key = tl.load(key.data + batch.to(tl.int64) * key.batch + group * key.head + dims, mask=in_key, other=0.0)
    new_value = tl.load(
        value.data + batch.to(tl.int64) * value.batch + group * value.head + columns, mask=in_value, other=0.0
    )
    top = tl.max(tl.full((16,), float("-inf"), tl.float32), axis=0)
    total = tl.zeros((value_block,), tl.float32)
    mass = tl.sum(tl.zeros((16,), tl.float32), axis=0)
    for first in range(0, window, block):
        slots = first + tl.arange(0, block)
        inside, source = slots < window, slots + real  # the ring moves on by one token
        is_old = inside & (source < window)
        is_new = inside & (source >= window)
        at, to = index * window + source, index * window + slots
        keys = move_tokens(
            oldest.data, next_key, at, to, is_old, is_new, new_key, query.width, dims, writes & first_tile
        )  # fmt: skip
        values = move_tokens(ring_value, next_value, at, to, is_old, is_new, new_value, value.width, columns, writes)
        visible = (tl.load(ring_mask + batch.to(tl.int64) * window + source, mask=is_old, other=0) != 0) | is_new
        flags = tl.where(visible, 1, 0).to(tl.uint8)
        tl.store(next_mask + batch.to(tl.int64) * window + slots, flags, mask=inside & first_head)
        top, total, mass = attend_keys(keys, values, visible, row, scaling, top, total, mass)
    if sink_key is not None:
        order = tl.arange(0, sink_block)
        exists = order < sinks
        at = index * sinks + order
        is_new = exists & (order == before) & (real != 0)
        keys = move_tokens(
            sink_key, next_sink_key, at, at, exists, is_new, new_key, query.width, dims, writes & first_tile
        )  # fmt: skip
        values = move_tokens(
            sink_value, next_sink_value, at, at, exists, is_new, new_value, value.width, columns, writes
        )  # fmt: skip
        visible = exists & (order <= before - window)
        top, total, mass = attend_keys(keys, values, visible, row, scaling, top, total, mass)
    # The oldest key of the ring moves into the sums, unless it is a sink.
    tokens = tl.arange(0, 16)
    leaves = (tl.load(ring_mask + batch.to(tl.int64) * window) != 0) & (before - window >= sinks) & (real != 0)
    moved, _ = features(oldest, batch, head // repeats, tokens, (tokens < 1) & leaves, key_map)
    moved = tl.sum(moved, axis=0)
    at = index * window * value.width
    old_value = tl.load(ring_value + at + columns, mask=in_value & leaves, other=0.0).to(tl.float32)
    state, weights, _ = load_state(
        None, None, kv, k_sum, None, 0, index, key_map, value.width, columns, False
    )  # fmt: skip
    state, weights = state + moved[:, None] * old_value[None, :], weights + moved
    if writes:
        store_state(state, weights, top, next_kv, next_sum, None, index, tile, key_map, value.width, columns)
    far, scale = features(query, batch, head, tokens, tokens < 1, query_map)
    far = tl.sum(far, axis=0)
    log_mix = tl.load(base + batch.to(tl.int64) * base_batch + head.to(tl.int64) * base_head).to(tl.float32)
    if mix is not None:
        drawn = tl.sum(tl.load(mix + head * query.width + dims, mask=in_key, other=0.0).to(tl.float32) * row, axis=0)
        log_mix += tl.minimum(tl.maximum(drawn * tl.sqrt(scaling), -bound), bound)
    if saturation is not None:
        outside = tl.maximum(before + 1 - window - sinks, 0).to(tl.float32)
        log_mix -= tl.log(1 + outside / saturation)
    if scaled:
        log_mix += bounded(tl.max(scale, axis=0) - finite(top), largest_gap)
    factor = tl.exp(log_mix)
    below = mass + factor * tl.sum(far * weights, axis=0)
    result = (total + factor * tl.sum(far[:, None] * state, axis=0)) / tl.where(below < floor, floor, below)
    result = tl.where(real != 0, result, 0.0).to(out.data.dtype.element_ty)
    tl.store(out.data + batch.to(tl.int64) * out.batch + head.to(tl.int64) * out.head + columns, result, mask=in_value)
    tl.store(next_count + batch, before + real, mask=first_head)


def step(call: WindowedCall) -> tuple[Tensor, State] | None:
    """Compute one token after a state, `[B, H, 1, e]`, and the state after it. None where the state has other shapes,
    and where the sizes or the weights of the maps do not fit.

    The call has no int8 cache, no gradient, and a map of keys without a log scale.
    """
    assert call.fused is not None
    assert call.state is not None
    query, key, value = (readable(x) for x in (call.query, call.key, call.value))
    state = {name: tensor.contiguous() for name, tensor in call.state.items()}
    batch, heads, _, size = query.shape
    groups, value_size, window, sinks = key.shape[1], value.shape[3], call.window, call.sinks
    projected = any(fused.weight is not None for fused in call.fused)
    if unsupported_sizes(call) is not None:
        return None
    if projected and 4 * padded_features(call) * power_of_two(size) > shared_bytes(query.device):
        return None
    entries = window_entries(call)
    entries["kv"] = (batch, groups, call.num_features, value_size), torch.float32
    entries["k_sum"] = (batch, groups, call.num_features), torch.float32
    if state.keys() != entries.keys() or not has_entries(state, entries):
        return None
    after: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    out = torch.empty(batch, heads, 1, value_size, dtype=value.dtype, device=value.device)
    base, mix, bound, saturation = call.mixing_formula()
    maps = [map_arguments(fused, size, query.dtype) for fused in call.fused]
    columns = min(power_of_two(value_size), 64)
    arguments = [
        *(rows(query), rows(key), rows(value), rows(out), *mask_bytes(call.mask), state["kv"], state["k_sum"]),
        *(rows(state["ring_key"]), state["ring_value"], state["ring_mask"].view(torch.uint8)),
        *(state.get("sink_key"), state.get("sink_value"), state["count"], after["kv"], after["k_sum"]),
        *(after["ring_key"], after["ring_value"], after["ring_mask"].view(torch.uint8), after.get("sink_key")),
        *(after.get("sink_value"), after["count"], base, 0 if base.shape[0] == 1 else base.stride(0), base.stride(1)),
        *(mix, bound, saturation, *maps, heads, groups, window, sinks, call.scaling, DENOMINATOR_EPS),
        *(LARGEST_GAP, call.fused[0].scaled, columns),
        *(power_of_two(size), min(BLOCK, power_of_two(window)), power_of_two(max(sinks, 1))),
    ]
    with on_device(query.device):
        launch(step_window, (batch * heads, triton.cdiv(value_size, columns)), *arguments, warps=4)
    return out, after
