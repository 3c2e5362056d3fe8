"""The bidirectional form of `ops.windowed`: exact weights at distances below `window`, kernelized attention beyond.

The sequence is split into blocks of c >= window tokens, so that the band of a block lies within itself and its two
neighbours. In a neighbour the keys of the band and those beyond it are complementary triangles, and the triangles of
the two neighbours do not overlap either: one c x c matrix holds the exact weights of both. Everything farther comes
from running states over blocks. These are added up from both ends and never subtracted, so that no digits cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .common import FeatureFunction, Features, compute_dtype, finite_or_zero, mask_tokens
from .fused import WindowedCall
from .sinks import Sinks, attend_from_sinks, end_tokens
from .windowed import FLOOR, Accumulator, QueryRows, blocked_keys, make_query_rows, pad_tokens, slice_rows, with_ones

#: Smallest block: narrower bands have blocks of this many tokens.
MIN_BLOCK = 32

#: Elements of one c x c matrix of weights over all heads and blocks that are handled at once (2 MB in float32).
GROUP_ELEMENTS = 1 << 19

#: Smallest number of blocks handled at once: the features of the two blocks next to a group are computed again.
MIN_GROUP = 4


class _FarState(NamedTuple):
    """The state of blocks of keys, `exp(-log_scale) Σ_j φ(k_j) [v_j, 1]`: `[…, m, e + 1]`, log_scale `[…]`."""

    kv: Tensor
    log_scale: Tensor | None

    def block(self, index: int) -> _FarState:
        return _FarState(self.kv[index], None if self.log_scale is None else self.log_scale[index])


class _Blocks(NamedTuple):
    """n blocks of keys, the blocks first (slices of them then need no copy for a batched product): `[k, bias]`
    `[n, B, G, c, d + 1]`, features, `[v, 1]`, and the state of each block."""

    key: Tensor
    features: Features
    value: Tensor
    far: _FarState


def _add(first: _FarState, second: _FarState) -> _FarState:
    """Add two states, relative to the larger of their scales."""
    if first.log_scale is None or second.log_scale is None:
        return _FarState(first.kv + second.kv, None)
    top = torch.maximum(first.log_scale, second.log_scale)
    floor = finite_or_zero(top)
    decay, added_decay = (
        (part.log_scale - floor).exp()[..., None, None] for part in (first, second) if part.log_scale is not None
    )
    return _FarState(first.kv * decay + second.kv * added_decay, top)


def _block_states(features: Features, value: Tensor) -> _FarState:
    values, log_scale = features
    top = None
    if log_scale is not None:
        top = log_scale.detach().amax(dim=-1)
        values = values * torch.exp(log_scale - finite_or_zero(top).unsqueeze(-1)).unsqueeze(-1)
    return _FarState(values.transpose(-1, -2) @ value, top)


class _KeyBlocks:
    """Keys and values, padded to whole blocks and by one more on either side; blocks are made where they are needed."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Sinks | None,
        key_features: FeatureFunction,
        size: int,
    ) -> None:
        length = key.shape[2]
        self.size, self.count = size, -(-length // size)
        self.dtype = compute_dtype(key)
        after = (self.count + 1) * size - length
        self.key, self.value = pad_tokens(key, size, after), pad_tokens(value, size, after)
        real = torch.ones(1, length, dtype=torch.bool, device=key.device) if mask is None else mask
        self.valid = self.far = functional.pad(real, (size, after), value=False)
        if sinks is not None:  # which have no features
            self.far = self.valid.expand(key.shape[0], -1).scatter(1, sinks.position + size, False)
        self.masked = mask is not None
        self.key_features = key_features

    def blocks(self, start: int, stop: int) -> _Blocks:
        """Return blocks `start … stop - 1`; block -1 and block `count` are empty."""
        tokens = slice((start + 1) * self.size, (stop + 1) * self.size)
        valid = self.valid[:, tokens]
        select = valid if self.masked else None  # the padding of the sequence is zero already
        key = mask_tokens(self.key[:, :, tokens].to(self.dtype), select)
        value = mask_tokens(self.value[:, :, tokens].to(self.dtype), select)
        values, log_scale = self.key_features(key, start * self.size)
        # All of it is finite here, so a product drops padding as well as a selection would, and several times faster.
        far = self.far[:, tokens]
        values = values * far.to(values.dtype)[:, None, :, None]
        if log_scale is not None:
            log_scale = mask_tokens(log_scale, far, float("-inf"))
        split = Features(self._split(values), None if log_scale is None else self._split(log_scale))
        block_value = self._split(with_ones(value))
        return _Blocks(self._split(blocked_keys(key, valid)), split, block_value, _block_states(split, block_value))

    def _split(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (-1, self.size)).movedim(2, 0).contiguous()

    def empty(self) -> _FarState:
        """Return the state of no keys, with the shape and scale of the state of any block."""
        return self.blocks(-1, 0).far.block(0)


def _running(blocks: _FarState, start: _FarState, order: range) -> list[_FarState]:
    """Return the running states: `start`, then with block after block of `order` added."""
    running = [start]
    for index in order:
        running.append(_add(running[-1], blocks.block(index)))
    return running


def _stack(parts: list[_FarState]) -> _FarState:
    scales = [part.log_scale for part in parts if part.log_scale is not None]
    return _FarState(torch.stack([part.kv for part in parts]), torch.stack(scales) if scales else None)


def _block_rows(rows: QueryRows, count: int) -> QueryRows:
    """QueryRows `[B, G, R, n·c, …]` as blocks `[n, B, G, R·c, …]`."""

    def split(tensor: Tensor) -> Tensor:
        return tensor.unflatten(3, (count, -1)).movedim(3, 0).flatten(3, 4).contiguous()

    scale = rows.features.log_scale
    return QueryRows(split(rows.query), Features(split(rows.features.values), None if scale is None else split(scale)))


def _unblock(tensor: Tensor, repeats: int) -> Tensor:
    """`[n, B, G, R·c, e] -> [B, H, n·c, e]`."""
    return tensor.unflatten(3, (repeats, -1)).movedim(0, 3).flatten(3, 4).flatten(1, 2)


class _Band(NamedTuple):
    """For a row and a key of the block before, the own block and the block after: 1 in the band, 0 beyond it. And the
    logits' bias, 0 in the band and `-inf` beyond it, for both neighbours together and for the own block. `[R·c, c]`.

    Selecting by arithmetic (lerp, addition) takes a fifth of the time of where and masked_fill on a CPU. It is safe
    here: padding was zeroed before, so that everything is finite.
    """

    before: Tensor
    own: Tensor | None  # None: all of it
    after: Tensor
    beside_bias: Tensor
    own_bias: Tensor | None


def _band(window: int, size: int, repeats: int, like: Tensor) -> _Band:
    column = torch.arange(size, device=like.device)
    row = column.repeat(repeats).unsqueeze(-1)
    before, after = row + size - column < window, column + size - row < window
    own = (row - column).abs() < window

    def bias(inside: Tensor) -> Tensor:
        return torch.zeros(inside.shape, dtype=like.dtype, device=like.device).masked_fill(~inside, float("-inf"))

    full = window == size
    return _Band(
        before.to(like.dtype),
        None if full else own.to(like.dtype),
        after.to(like.dtype),
        bias(before | after),
        None if full else bias(own),
    )


def _scaled(weights: Tensor, rows: Features, keys: Features, top: Tensor) -> Tensor:
    if rows.log_scale is None or keys.log_scale is None:
        return weights
    gap = (rows.log_scale - top).unsqueeze(-1) + keys.log_scale.unsqueeze(-2)
    return weights * gap.clamp(max=0.0).exp()  # at most 0 wherever it is used


def _row_scale(rows: Features, parts: list[tuple[Features, Tensor | None]], far: _FarState) -> Tensor | None:
    """Return each row's largest log scale of a kernelized weight; parts: keys, and 1 where they are in the band."""
    if rows.log_scale is None or far.log_scale is None:
        return None
    scale = far.log_scale.unsqueeze(-1).expand(rows.log_scale.shape)
    for keys, inside in parts:
        if inside is not None and keys.log_scale is not None:
            outside = keys.log_scale.detach().unsqueeze(-2).masked_fill(inside.bool(), float("-inf"))
            scale = torch.maximum(scale, outside.amax(dim=-1))
    return rows.log_scale.detach() + scale


class _SinkColumns(NamedTuple):
    """Sinks of n blocks of rows: `[k, 0]` `[B, G, s, d + 1]`, `[v, 1]`, and which rows they are far from
    `[n, B, 1, R·c, s]`."""

    key: Tensor
    value: Tensor
    outside: Tensor


def _sink_columns(sinks: Sinks, first: int, count: int, size: int, repeats: int, window: int) -> _SinkColumns:
    rows = torch.arange(first * size, (first + count) * size, device=sinks.key.device)
    outside = sinks.outside(rows, window, False).unflatten(1, (count, size)).movedim(1, 0)
    dtype = compute_dtype(sinks.key)
    key, value = functional.pad(sinks.key.to(dtype), (0, 1)), with_ones(sinks.value.to(dtype))
    return _SinkColumns(key, value, outside.repeat(1, 1, repeats, 1).unsqueeze(2))


def _attend(rows: QueryRows, keys: _Blocks, far: _FarState, band: _Band, sinks: _SinkColumns | None) -> Accumulator:
    """Attend from n blocks of rows to n + 2 blocks of keys, the far state `[n, B, G, m, e + 1]` and the sinks."""
    count = rows.query.shape[0]
    features, (key_values, key_scale) = rows.features, keys.features

    def part(shift: int) -> Features:
        scale = None if key_scale is None else key_scale[shift : shift + count]
        return Features(key_values[shift : shift + count], scale)

    before, own, after = (rows.query @ keys.key[shift : shift + count].transpose(-1, -2) for shift in range(3))
    beside = torch.lerp(after, before, band.before) + band.beside_bias
    inner = own if band.own_bias is None else own + band.own_bias
    top = torch.maximum(beside.amax(dim=-1), inner.amax(dim=-1))  # detached where everything is relative to it
    if sinks is not None:
        sink_logits = (rows.query @ sinks.key.transpose(-1, -2)).masked_fill(~sinks.outside, float("-inf"))
        top = torch.maximum(top, sink_logits.amax(dim=-1))
    scale = _row_scale(features, [(part(0), band.before), (part(1), band.own), (part(2), band.after)], far)
    top = (top if scale is None else torch.maximum(top.detach(), scale)).clamp_min(FLOOR)
    beside, inner = torch.exp(beside - top.unsqueeze(-1)), torch.exp(inner - top.unsqueeze(-1))

    def read(exact: Tensor, shift: int, inside: Tensor | None) -> Tensor:
        if inside is not None:
            estimate = features.values @ key_values[shift : shift + count].transpose(-1, -2)
            exact = torch.lerp(_scaled(estimate, features, part(shift), top), exact, inside)
        return exact @ keys.value[shift : shift + count]

    total = features.values @ far.kv
    if features.log_scale is not None and far.log_scale is not None:
        total = total * torch.exp(features.log_scale + far.log_scale.unsqueeze(-1) - top).unsqueeze(-1)
    total = total + read(beside, 0, band.before) + read(inner, 1, band.own) + read(beside, 2, band.after)
    if sinks is not None:
        total = total + torch.exp(sink_logits - top.unsqueeze(-1)) @ sinks.value
    return Accumulator(total, top)


def banded_accumulator(call: WindowedCall, *, normalise: bool = False) -> Accumulator:
    """Compute the bidirectional form before normalisation, `[B, H, L, …]`, with sinks as keys only.

    With `normalise` the values are the outputs `[B, H, L, e]` in the dtype of `call.value`.
    """
    query, key, value, window = call.query, call.key, call.value, call.window
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    if length == 0:
        empty = value.new_zeros(batch, heads, 0, value.shape[-1])
        return Accumulator(empty if normalise else with_ones(empty.to(compute_dtype(query))), empty[..., 0])
    size = min(max(window, MIN_BLOCK), length)
    sinks = end_tokens(call)
    keys = _KeyBlocks(key, value, call.mask, sinks, call.key_features, size)
    padded = pad_tokens(mask_tokens(query, call.mask), 0, keys.count * size - length)
    log_mix = call.log_mixing_weights()
    if log_mix.shape[2] > 1:
        log_mix = functional.pad(log_mix, (0, keys.count * size - length))
    band = _band(min(window, size), size, heads // groups, torch.empty(0, dtype=keys.dtype, device=key.device))
    step = max(MIN_GROUP, GROUP_ELEMENTS // max(batch * heads * size * size, 1))
    step = keys.count if torch.compiler.is_compiling() else min(step, keys.count)
    starts = list(range(0, keys.count, step))
    carried = keys.empty()
    values, scales = [], []
    for start, later in zip(starts, _suffix_states(keys, starts, step, carried), strict=True):
        count = min(step, keys.count - start)
        blocks = keys.blocks(start - 1, start + count + 1)
        ahead = _running(blocks.far, carried, range(count))
        behind = _running(blocks.far, later, range(count + 1, 2, -1))[::-1]
        carried = ahead[-1]
        far = _stack([_add(first, second) for first, second in zip(ahead, behind, strict=False)])
        block = padded[:, :, start * size : (start + count) * size]
        mix = slice_rows(log_mix, start * size, (start + count) * size)
        rows = make_query_rows(block, call.query_features, start * size, groups, call.scaling, mix)
        columns = None if sinks is None else _sink_columns(sinks, start, count, size, heads // groups, window)
        accumulator = _attend(_block_rows(rows, count), blocks, far, band, columns)
        out = accumulator.normalised().to(value.dtype) if normalise else accumulator.values
        values.append(_unblock(out, heads // groups))
        scales.append(_unblock(accumulator.log_scale.unsqueeze(-1), heads // groups))
    return Accumulator(torch.cat(values, dim=2)[:, :, :length], torch.cat(scales, dim=2)[:, :, :length, 0])


def _suffix_states(keys: _KeyBlocks, starts: list[int], step: int, empty: _FarState) -> list[_FarState]:
    """Return, for each group of blocks, the state of all blocks after the one that follows it."""
    behind = [empty]
    for start in reversed(starts[1:]):
        # Block `start` is the neighbour of the group that ends before it; the next ones lie behind that group.
        count = min(step, keys.count - start)
        blocks = keys.blocks(start + 1, start + count + 1)
        behind.append(_running(blocks.far, behind[-1], range(count))[-1])
    return behind[::-1]


def windowed_bidirectional(call: WindowedCall) -> Tensor:
    """Compute the bidirectional form, with query and keys of one length L.

    Time O(L·(window + m)·d); temporaries O(group·(window + m)) for a group of blocks, and the state at each group's
    end.

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`.
    """
    return attend_from_sinks(banded_accumulator(call, normalise=True).values, call, end_tokens(call))
