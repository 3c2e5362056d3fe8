"""Exact softmax inside a window, kernelized attention outside it, one normaliser: the fast forms and explicit weights.

    w_ij = exp(τ q_i·k_j - c_i)                 for j inside the window of i
    w_ij = exp(g) φ(q_i)·φ(k_j) · exp(s_ij)     for every other visible j
    o_i  = Σ_j w_ij v_j / Σ_j w_ij

`c_i` is the row's stabiliser, `g` the log mixing weight of the head. For maps that carry a log scale (which estimate
`exp(τ q·k)` itself) `s_ij` is that scale relative to `c_i`, so that exact and estimated weights share one stabiliser;
for other maps it is 0, and `c_i` is the maximum over the window: the kernelized part is then measured against the
strongest token of the window.

Shapes as in `ops.kernelized`; log_mix `[H]`, or row by row `[B | 1, H, L | 1]`; the window is the last `window` tokens
(causal, the token itself included) or the tokens at a distance below `window` (bidirectional). Sinks (`ops.sinks`)
count as inside of every window.

The sequence is split into blocks of c tokens. The window of a block lies within itself and the `reach` blocks before
it (bidirectional: and after it), its neighbours. Everything farther comes from running sums over blocks, which are
added up from the beginning (and from the end) and never subtracted, so that no digits cancel.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .calls import WindowedCall
from .common import (
    FeatureFunction,
    Features,
    KVState,
    State,
    chunk_order,
    compute_dtype,
    divide,
    group_heads,
    is_free,
    join_chunks,
    mask_tokens,
    weighted_mean,
    with_ones,
)
from .disentangled import one_direction, shifted
from .graph_nodes import graph_node, places_nodes
from .int8 import append, to_dtype
from .kernelized import masked_key_features
from .sinks import Sinks, attend_from_sinks, end_tokens, first_tokens, take_tokens
from .terms import Terms, distances

#: Smallest and largest block: those of narrower windows have the smallest one.
MIN_BLOCK, MAX_BLOCK = 32, 64

#: Elements of one c x c matrix of weights over all heads and blocks that are handled at once (2 MB in float32).
GROUP_ELEMENTS = 1 << 19

#: Smallest number of blocks handled at once: the features of the neighbours of a group are computed again.
MIN_GROUP = 4

#: Added to the logits of padding, as one more column of q and k: their exponentials are exactly zero.
BLOCKED = -1e30

#: Lower bound of a row's stabiliser: a row that sees no key gets `exp(BLOCKED - FLOOR) = 0` everywhere, not `exp(0)`.
FLOOR = -1e20

#: Largest exponent of a linear part relative to the exact one.
LARGEST_GAP = 60.0


def far_mix(call: WindowedCall) -> Tensor:
    """Return the log mixing weights `[B | 1, H, L | 1]` with the bias of keys far before the query."""
    log_mix, terms = call.log_mixing_weights(), call.terms
    return log_mix if terms.bias is None else log_mix + terms.far.unsqueeze(-1).to(log_mix.dtype)


def capped_products(rows: Tensor, key: Tensor, terms: Terms) -> Tensor:
    """Return the logits of rows `[τ q, 1]` and keys `[k, 0]`, of which the last number is no part of a capped logit."""
    if terms.softcap is None:
        return rows @ key.transpose(-1, -2)
    logits = terms.capped(rows[..., :-1] @ key[..., :-1].transpose(-1, -2))
    return logits + key[..., -1].unsqueeze(-2)


def with_term_features(call: WindowedCall) -> WindowedCall:
    """Return a call whose features are such as its terms need.

    They are doubled where a term distinguishes keys on either side. Those of keys have a log scale where sums decay.
    """
    if call.terms.slope is not None:
        if not call.causal:
            raise NotImplementedError("ALiBi is for decoders: in a bidirectional layer no sums decay.")
        key_features = call.key_features
        return call.replace(key_features=lambda x: key_features(x).scaled())
    if call.terms.relative is None:
        return call
    if call.causal or is_free(call.query.shape[2]):
        raise NotImplementedError("Disentangled attention is for encoders, and no graph of a free length has it.")
    doubled = partial(call.terms.relative.sided, window=call.window, scaling=call.scaling)
    query_features = doubled(call.query_features, keys=False)
    key_features = doubled(call.key_features, keys=True)
    return call.replace(query_features=query_features, key_features=key_features)


def head_rows(tensor: Tensor, groups: int) -> Tensor:
    """Turn `[…, H, c, p]` into the rows of blocks, `[…, G, R·c, p]`."""
    return tensor.unflatten(-3, (groups, -1)).flatten(-3, -2)


class QueryRows(NamedTuple):
    """Queries `[B, G, R, n, …]`: `[τ q, 1]`, and their features with the mixing weight multiplied in."""

    query: Tensor
    features: Features


def make_query_rows(
    query: Tensor, query_features: FeatureFunction, groups: int, scaling: float, log_mix: Tensor
) -> QueryRows:
    """Prepare a block of queries `[B, H, n, d]`; log_mix `[B | 1, H, n | 1]`."""
    block = query.to(compute_dtype(query))
    values, log_scale = query_features(block)
    values = values * log_mix.to(block.dtype).exp().unsqueeze(-1)
    features = Features(values, log_scale).apply(lambda x: x.unflatten(1, (groups, -1)))
    return QueryRows(group_heads(with_ones(block * scaling), groups), features)


def pad_tokens(tensor: Tensor, before: int, after: int) -> Tensor:
    """Add tokens of zeros before and after those of `[B, H, L, d]`; a negative number removes tokens."""
    if torch.compiler.is_compiling():  # torch traces the result as contiguous, also where nothing is added
        tensor = tensor.contiguous()
    return functional.pad(tensor, (0, 0, before, after))


def split_blocks(tensor: Tensor, size: int, count: int, dim: int = 2) -> Tensor:
    """Split tokens into blocks: a new first dimension of blocks, and tokens at `dim + 1`.

    Tokens of a free length are in the order of `chunk_order`.
    """
    if is_free(count):
        return tensor.unflatten(dim, (size, count)).movedim(dim + 1, 0)
    return tensor.unflatten(dim, (count, size)).movedim(dim, 0).contiguous()


class Columns(NamedTuple):
    """Some keys of every row: logits `[…, n, p]`, `-inf` outside of the window, the keys' features `[…, p, m]`, and 1
    where the feature map gives the weight, 0 elsewhere `[…, n, p]` (None: nowhere).

    Selecting by arithmetic takes a CPU a fifth of the time of where and masked_fill. It is safe, as everything is
    finite.
    """

    logits: Tensor
    keys: Features | None = None
    outside: Tensor | None = None


def _largest(columns: Sequence[Columns]) -> Tensor:
    """Return the largest logit of each row `[…, n]`."""
    return reduce(torch.maximum, (part.logits.amax(dim=-1) for part in columns)).clamp_min(FLOOR)


def _decaying(rows: Features, columns: Sequence[Columns], log_decay: Tensor | float) -> Features:
    """Return features of rows whose weights outside of the window are multiplied by `exp(log_decay)`, `[…, n]`.

    Those without a log scale are measured against the largest exact weight, as they are without a decay.
    """
    scale = _largest(columns) if rows.log_scale is None else rows.log_scale
    return rows._replace(log_scale=scale + log_decay)


def row_weights(
    rows: Features, columns: Sequence[Columns], far_scale: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the weights of all columns and the stabilisers c `[…, n]`; far_scale: the log scale of all other keys."""
    top = _largest(columns)
    if rows.log_scale is not None:  # everything is relative to the row's largest exponent, which then has no gradient
        scales = [] if far_scale is None else [far_scale]
        for part in columns:
            if part.outside is not None and part.keys is not None and part.keys.log_scale is not None:
                scale = part.keys.log_scale.detach().unsqueeze(-2)
                scales.append(scale.masked_fill(part.outside == 0, float("-inf")).amax(dim=-1))
        top = reduce(torch.maximum, (rows.log_scale.detach() + scale.detach() for scale in scales), top.detach())
    weights = []
    for part in columns:
        weight = (part.logits - top.unsqueeze(-1)).exp_()
        if part.outside is not None and part.keys is not None:
            values = rows.values
            if rows.log_scale is not None and part.keys.log_scale is None:
                values = values * _far_scale(rows.log_scale, None, top)
            # Keys come first, so that the gradient of their features is contiguous.
            estimate = (part.keys.values @ values.transpose(-1, -2)).transpose(-1, -2)
            if rows.log_scale is not None and part.keys.log_scale is not None:
                gap = (rows.log_scale - top).unsqueeze(-1) + part.keys.log_scale.unsqueeze(-2)
                # It is at most 0 wherever it is used, but for rounding, which must not take its gradient away.
                estimate = estimate * (gap - gap.detach().clamp_min(0.0)).exp()
            weight = torch.addcmul(weight, estimate, part.outside)
        weights.append(weight)
    return weights, top


def _far_scale(log_scale: Tensor, key_scale: Tensor | None, top: Tensor) -> Tensor:
    """Return `exp(log_scale + key_scale - top)` `[…, n, 1]`, for rows relative to `exp(top)`.

    Keys without a log scale have no part in `top`: where the exponent exceeds 60, exact weights are lost in rounding.
    """
    exponent = (log_scale - top).clamp(max=LARGEST_GAP) if key_scale is None else log_scale + key_scale - top
    return exponent.exp().unsqueeze(-1)


def _far_and_near(rows: Features, columns: Sequence[Columns], far: KVState) -> tuple[list[Tensor], Tensor]:
    """Return the weights of the columns, and the far keys' `Σ w [v, 1]` `[…, n, e + 1]`, relative to one stabiliser."""
    far_scale = None if far.log_scale is None else far.log_scale.unsqueeze(-1)
    weights, top = row_weights(rows, columns, far_scale)
    total = rows.values @ far.total
    if rows.log_scale is not None:
        total = total * _far_scale(rows.log_scale, far_scale, top)
    return weights, total


class Gathered(NamedTuple):
    """`window` older tokens, and the new ones after them.

    Attributes:
        call: The call with these queries, keys, values and log_mix `[B | 1, H, L | 1]`.
        valid: Which keys are tokens `[B, window + L]`.
        query_index: The index of each new token among the queries `[B, L]` (None: its own).
        ring: The last `window` tokens, which later tokens see exactly, as entries of the state.
    """

    call: WindowedCall
    valid: Tensor
    query_index: Tensor | None
    ring: State


def gather_tokens(call: WindowedCall, log_mix: Tensor) -> Gathered:
    """Put `window` older tokens before the new ones, and padding first, so that windows count real tokens."""
    key = call.key
    value = call.value
    mask = call.mask
    state = call.state
    window = call.window
    batch, length = key.shape[0], key.shape[2]
    valid = torch.ones(batch, length, dtype=torch.bool, device=key.device) if mask is None else mask.expand(batch, -1)
    if state is None:
        key, value = pad_tokens(key, window, 0), pad_tokens(value, window, 0)
        valid = functional.pad(valid, (window, 0), value=False)
    else:
        key = torch.cat([to_dtype(state["ring_key"], key.dtype), key], dim=2)
        value = torch.cat([to_dtype(state["ring_value"], value.dtype), value], dim=2)
        valid = torch.cat([state["ring_mask"], valid], dim=1)
    if mask is None:  # a ring has its padding first already
        gathered = call.replace(key=key, value=value, log_mix=log_mix)
        return Gathered(gathered, valid, None, make_ring(gathered, valid, length))
    real = valid.long().cumsum(dim=1)
    missing = (~valid).long().cumsum(dim=1)
    inverse = torch.where(valid, real + missing[:, -1:], missing) - 1  # where each token goes
    positions = torch.arange(inverse.shape[1], device=inverse.device).expand_as(inverse)
    order = torch.zeros_like(inverse).scatter(1, inverse, positions)
    rows = (order[:, window:] - window).clamp_min(0)
    if log_mix.shape[2] > 1:
        log_mix = take_tokens(log_mix.expand(batch, -1, -1).unsqueeze(-1), rows).squeeze(-1)
    query = take_tokens(mask_tokens(call.query, mask), rows)
    key, value = take_tokens(key, order), take_tokens(value, order)
    index = (inverse[:, window:] - window).clamp_min(0)
    gathered = call.replace(query=query, key=key, value=value, log_mix=log_mix)
    valid = valid.gather(1, order)
    return Gathered(gathered, valid, index, make_ring(gathered, valid, length, order[:, length:]))


def make_ring(call: WindowedCall, valid: Tensor, start: int, order: Tensor | None = None) -> State:
    """Copy the last `window` tokens, from `start` on, for the state. (A view would retain all tokens in memory.)

    order: `[B, window]`, where they stood among the tokens of the former ring and the new ones; None: where they are.
    """
    ring = {"ring_key": call.key[:, :, start:], "ring_value": call.value[:, :, start:]}
    if call.cache_dtype is not None:
        ring = {name: to_dtype(tokens, call.cache_dtype) for name, tokens in ring.items()}
        if call.state is not None:  # what was rounded once stays as it is
            if order is None:
                order = torch.arange(start, start + call.window, device=valid.device).expand(valid.shape[0], -1)
            is_old = (order < call.window)[:, None, :, None]
            index = order.clamp(max=call.window - 1)
            for name, tokens in ring.items():
                old = take_tokens(to_dtype(call.state[name], call.cache_dtype), index)
                ring[name] = torch.where(is_old, old, tokens)
    ring["ring_mask"] = valid[:, start:]
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in ring.items()}


class _Part(NamedTuple):
    """For a block of rows and one of its neighbours: 0 in the window and `-inf` elsewhere (None: all of it is in the
    window), and 1 for the keys that a row sees outside of its window, 0 elsewhere (None: there are none). `[R·c, c]`;
    with a bias of the model `[G, R·c, c]`, that bias and its factor in place of 0 and 1.
    """

    bias: Tensor | None
    outside: Tensor | None
    #: How far the first row is behind the first key.
    offset: int
    #: With a slope, what the log scales of the keys lack, `[G, c]`.
    shift: Tensor | None


class _Blocks(NamedTuple):
    """n blocks of keys, the blocks first (slices of them then need no copy for a batched product): `[k, 0]`, or
    `[k, BLOCKED]` at padding, `[n, B, G, c, d + 1]`, `[v, 1]`, features, and the sums of each block."""

    key: Tensor
    value: Tensor
    features: Features
    kv_state: KVState

    def columns(self, rows: QueryRows, now: slice, part: _Part, terms: Terms) -> Columns:
        """Return some of the blocks as columns of as many blocks of rows."""
        logits = capped_products(rows.query, self.key[now], terms)
        logits = logits if part.bias is None else logits + part.bias
        features = None if part.outside is None else self.features.apply(lambda x: x[now])
        if features is not None and features.log_scale is not None and part.shift is not None:
            features = features._replace(log_scale=features.log_scale + part.shift)
        if features is not None and terms.relative is not None:
            features = features._replace(values=one_direction(features.values, 0 if part.offset > 0 else 1))
        return Columns(logits, features, part.outside)

    def joined(self, near: Sequence[slice]) -> "_Blocks":
        """Return blocks of which each has the keys of all neighbours of a block of rows."""

        def join(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[now] for now in near], dim=3)

        return self._replace(key=join(self.key), value=join(self.value), features=self.features.apply(join))


def _neighbours(call: WindowedCall, size: int, offsets: Sequence[int], width: int) -> list[_Part]:
    """Return the geometry of a block of rows and of as many keys, `width`, from each offset before it on."""
    parts, dtype = [], compute_dtype(call.query)
    index, keys = (torch.arange(length, device=call.query.device) for length in (size, width))
    repeats = call.query.shape[1] // call.key.shape[1]
    least, terms = 0 if call.causal else 1 - call.window, call.terms
    for offset in offsets:
        near = index.unsqueeze(-1) - keys + offset
        distance = near.repeat(repeats, 1)
        inside = (distance >= least) & (distance < call.window)
        outside = ~inside if not call.causal else distance >= call.window
        bias = torch.zeros(inside.shape, dtype=dtype, device=inside.device).masked_fill(~inside, float("-inf"))
        nearest = offset - width + 1
        farthest = offset + size - 1
        all_inside = nearest >= least and farthest < call.window
        any_outside = farthest >= call.window or (not call.causal and nearest < least)
        factor, shift = outside.to(dtype), None
        if terms.has_distances:
            groups, all_inside = call.key.shape[1], False
            bias = bias + head_rows(terms.by_distance(near).to(dtype), groups)
            if terms.slope is None:
                factor = factor * head_rows(terms.outside(near).to(dtype), groups)
            else:  # the scales of a block stand for the distances of the block before the neighbours
                shift = terms.slope[:, None].to(dtype) * (keys // size * size + offsets[0] + size - offset)
        parts.append(_Part(None if all_inside else bias, factor if any_outside else None, offset, shift))
    return parts


class _BlockedCall:
    """A call in blocks of tokens, of which some are handled at once; features and sums are computed for these only.

    Args:
        call: The call, with its tokens in the order of `gather_tokens` and zeros as queries of padding.
        valid: `[B | 1, S]`, False for padding.
        far: `[B | 1, S]`, False for padding too, and for keys that no row sees outside of its window.
        sinks: Keys that are near every row.
        older: The keys before the first query.
    """

    def __init__(self, call: WindowedCall, valid: Tensor, far: Tensor, sinks: Sinks | None, older: int = 0) -> None:
        batch, heads, length, _ = call.query.shape
        self.call = call
        self.sinks = sinks
        self.free = is_free(length)
        self.slope = None if call.terms.slope is None else call.terms.slope.to(compute_dtype(call.query))
        size = min(max(call.window, MIN_BLOCK), MAX_BLOCK)
        self.size = size
        if not self.free:
            self.size = min(size, length if call.state is None else max(length, MIN_BLOCK))
        # One more of a free number of blocks: a dimension that may be 1 would fix the length.
        self.count = (length + self.size - 1) // self.size + (1 if self.free else 0)
        reach = -(-call.window // self.size)
        self.reach = reach if self.free or call.state is not None else min(reach, self.count)
        self.ahead = 0 if call.causal else self.reach
        self.before = self.reach * self.size - older
        pad_keys = self._padding(call.key, self.before, self.reach + self.count + self.ahead)
        self.pad_rows = self._padding(call.query, 0, self.count)
        self.key, self.value = pad_keys(call.key), pad_keys(call.value)
        self.valid, self.far = (pad_keys(real[:, None, :, None])[:, 0, :, 0] for real in (valid, far))
        self.masked = call.mask is not None or call.state is not None  # other padding is zero already
        self.query = self.pad_rows(call.query)
        log_mix = far_mix(call)
        self.log_mix = log_mix if log_mix.shape[2] == 1 else self.pad_rows(log_mix.unsqueeze(-1)).squeeze(-1)
        # The neighbours of a free number of blocks are joined: a graph of a few products is traced sooner.
        width = (self.reach + 1 + self.ahead) * self.size if self.free else self.size
        offsets = range(self.reach * self.size, -self.ahead * self.size - 1, -width)
        self.parts = _neighbours(call, self.size, offsets, width)
        #: What the sums before a block are multiplied by to be those before the next.
        self.log_decay = None if self.slope is None else -self.slope * self.size
        step = max(MIN_GROUP, GROUP_ELEMENTS // max(batch * heads * self.size * self.size, 1))
        step = self.count if torch.compiler.is_compiling() else min(step, self.count)
        #: The first block of rows of each group.
        self.starts = range(1) if self.free else range(0, self.count, step)
        blocks = self._key_blocks(0, self.reach + self.count + self.ahead if self.free else 1)
        self._all = blocks if self.free else None
        #: The sums over no keys: where no state stands before the first token, block 0 is empty.
        self.nothing = blocks.kv_state.at(0)

    def _padding(self, like: Tensor, before: int, count: int) -> Callable[[Tensor], Tensor]:
        """Return what adds zeros to `[B, H, L, …]` so that it has `count` blocks; so many tokens of them come `before`.

        What follows must not depend on the order of a free length (`chunk_order`).
        """
        if not self.free:
            return lambda x: pad_tokens(x, before, count * self.size - before - x.shape[2])
        index, padding = chunk_order(count, self.size, like.shape[2], -before, like.device)
        return lambda x: x.index_select(2, index).masked_fill(padding.unsqueeze(-1), 0)

    def group_size(self, start: int) -> int:
        """Return the number of blocks of rows in the group that begins with block `start`."""
        return self.count if self.free else min(self.starts.step, self.count - start)

    def keys(self, start: int) -> _Blocks:
        """Return the blocks of keys near a group, with features and sums; causal ones of the first and one more."""
        if self._all is not None:
            return self._all
        size = self.group_size(start)
        return self._key_blocks(start, start + size + self.reach + self.ahead, size + 1 if self.call.causal else None)

    def _key_blocks(self, start: int, stop: int, featured: int | None = None) -> _Blocks:
        """Return blocks `start … stop - 1`, with features and sums for the first `featured` of them."""
        count = stop - start
        featured = count if featured is None else featured
        # Of a free length these are all blocks, not in the order of tokens.
        tokens = slice(None) if self.free else slice(start * self.size, stop * self.size)
        some = slice(None) if self.free else slice(0, featured * self.size)
        valid = self.valid[:, tokens]
        dtype = compute_dtype(self.call.key)
        select = valid if self.masked else None
        key = mask_tokens(self.key[:, :, tokens].to(dtype), select)
        value = split_blocks(with_ones(mask_tokens(self.value[:, :, tokens].to(dtype), select)), self.size, count)
        bias = key.new_zeros(valid.shape).masked_fill(~valid, BLOCKED)[:, None, :, None].expand(*key.shape[:3], 1)
        values, log_scale = self.call.key_features(key[:, :, some])
        # All of it is finite here, so a product drops padding as well as a selection would, and several times faster.
        far = self.far[:, tokens][:, some]
        values = split_blocks(values * far.to(values.dtype)[:, None, :, None], self.size, featured)
        if log_scale is not None:
            log_scale = split_blocks(mask_tokens(log_scale, far, float("-inf")), self.size, featured)
            if self.slope is not None:  # relative to the first row that has the block in no neighbour
                log_scale = log_scale + self.slope[:, None] * (self._index() - (self.reach + 1) * self.size)
        features = Features(values, log_scale)
        kv_state = KVState.of(features, value[:featured])
        return _Blocks(split_blocks(torch.cat([key, bias], dim=-1), self.size, count), value, features, kv_state)

    def _index(self) -> Tensor:
        """Return the numbers of the tokens of a block."""
        return torch.arange(self.size, device=self.key.device)

    def rows(self, start: int) -> QueryRows:
        """Return the queries of a group as blocks `[n, B, G, R·c, …]`."""
        call = self.call
        count = self.group_size(start)
        groups = self.call.key.shape[1]
        span = slice(None) if self.free else slice(start * self.size, (start + count) * self.size)
        mix = self.log_mix if self.log_mix.shape[2] == 1 else self.log_mix[:, :, span]
        query = self.query[:, :, span]
        rows = make_query_rows(query, call.query_features, groups, call.scaling, mix)

        def split(tensor: Tensor) -> Tensor:
            return split_blocks(tensor, self.size, count, 3).flatten(3, 4)

        return QueryRows(split(rows.query), rows.features.apply(split))

    def attend(self, start: int, rows: QueryRows, keys: _Blocks, far: KVState) -> Tensor:
        """Attend from a group to its neighbours, to the sinks and to far sums `[n, B, G, m, e + 1]`."""
        features, count = rows.features, rows.query.shape[0]
        near = [slice(shift, shift + count) for shift in range(self.reach + 1 + self.ahead)]
        if self.free:
            keys, near = keys.joined(near), [slice(None)]
        terms = self.call.terms
        parts = zip(near, self.parts, strict=True)
        pairs = [(keys.columns(rows, now, part, terms), keys.value[now]) for now, part in parts]
        if terms.relative is not None:
            pairs = self._with_distances(rows, keys, near, pairs)
        if self.sinks is not None:
            pairs.append(_sink_columns(self.sinks, rows, start * self.size, self.call))
        if terms.sink is not None:
            pairs.append(_keyless_column(terms.sink, rows, keys.value))
        columns, values = zip(*pairs, strict=True)
        if self.slope is not None:
            features = _decaying(features, columns, -self.slope[:, None] * self._index())
        weights, total = _far_and_near(features, columns, far)
        for weight, value in zip(weights, values, strict=True):
            total = total + weight @ value
        return weighted_mean(total).to(self.call.value.dtype)

    def _with_distances(
        self, rows: QueryRows, keys: _Blocks, near: list[slice], pairs: list[tuple[Columns, Tensor]]
    ) -> list[tuple[Columns, Tensor]]:
        """Add the products with the vectors of distances (`ops.disentangled`) to the logits in the window."""
        assert self.call.terms.relative is not None
        window, size = self.call.window, self.size
        query, key = rows.query[..., :-1], keys.key[..., :-1]
        of_queries, of_keys = self.call.terms.relative.near(query, key, window)
        for index, (now, part) in enumerate(zip(near, self.parts, strict=True)):
            columns, value = pairs[index]
            logits = columns.logits
            if of_queries is not None:
                logits = logits + shifted(of_queries, window, window - 1 - part.offset, size)
            if of_keys is not None:
                logits = logits + shifted(of_keys[now], window, window - 1 + part.offset, size).transpose(-1, -2)
            pairs[index] = columns._replace(logits=logits), value
        return pairs

    def later_states(self) -> list[KVState]:
        """Return, for each group, the sums of all keys after the neighbours of its last block of rows."""
        later = [self.nothing]
        for start in reversed(self.starts[1:]):
            first = start + 2 * self.reach
            later.append(self._key_blocks(first, first + self.group_size(start)).kv_state.running(later[-1])[1])
        return later[::-1]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Put the outputs of all groups, `[n, B, G, R·c, e]`, in the order of tokens `[B, H, L, e]`."""
        heads, length = self.call.query.shape[1:3]
        repeats = heads // self.call.key.shape[1]
        tokens = torch.cat([part.unflatten(3, (repeats, -1)).movedim(0, 3) for part in parts], dim=3)
        return join_chunks(tokens, length, 3).flatten(1, 2)


def _sink_columns(sinks: Sinks, rows: QueryRows, first: int, call: WindowedCall) -> tuple[Columns, Tensor]:
    """Return the sinks as columns of blocks of rows, which begin at row `first`, and their values `[v, 1]`."""
    count = rows.query.shape[0]
    repeats = call.query.shape[1] // call.key.shape[1]
    size = rows.query.shape[3] // repeats
    device = sinks.key.device
    numbers = torch.arange(count, device=device)[:, None] * size + torch.arange(size, device=device) + first
    outside = sinks.outside(numbers, call.window, call.causal).movedim(1, 0)
    key = functional.pad(sinks.key.to(rows.query.dtype), (0, 1))
    hidden = ~outside.repeat(1, 1, repeats, 1).unsqueeze(2)
    logits = capped_products(rows.query, key, call.terms)
    if call.terms.has_distances:
        bias = call.terms.by_distance(sinks.distance(numbers)).to(logits.dtype)  # [B, n, H, c, s]
        logits = logits + head_rows(bias, call.key.shape[1]).movedim(1, 0)
    if call.terms.relative is not None:
        query = rows.query[..., :-1].movedim(0, 2)
        added = call.terms.relative.pairs(
            query.flatten(2, 3), sinks.key.to(query.dtype), sinks.distance(numbers).flatten(1, 2)
        )
        logits = logits + added.unflatten(2, (count, size)).movedim(2, 0)
    return Columns(logits.masked_fill(hidden, float("-inf"))), with_ones(sinks.value.to(rows.query.dtype))


def _keyless_column(sink: Tensor, rows: QueryRows, values: Tensor) -> tuple[Columns, Tensor]:
    """Return the sink of the model `[H]` as a column of rows `[…, G, R·c, d + 1]`, and its value `[0, 1]`."""
    groups, size = rows.query.shape[-3:-1]
    logits = sink.to(rows.query.dtype).view(groups, -1, 1, 1).expand(-1, -1, size * groups // len(sink), -1)
    column = logits.flatten(1, 2).expand(*rows.query.shape[:-1], 1)
    return Columns(column), functional.pad(values.new_zeros(1, values.shape[-1] - 1), (0, 1), value=1.0)


def _becomes_node(call: WindowedCall) -> bool:
    """Return whether a call becomes one node of the graph that is exported (`ops.graph_nodes`)."""
    served = {"softcap", "sink"} if call.causal else {"softcap"}
    if call.state is not None or not served.issuperset(call.terms.names()):
        return False
    return places_nodes(call.query.shape[2], call.query)


def _node(call: WindowedCall, valid: Tensor, *others: Tensor | None) -> Sequence[Tensor]:
    """Place the node of a call, and return its outputs: those of the queries, and the sums of the causal state.

    `others` are the inputs behind `valid` of the function in `ops.onnx_functions`.
    """
    batch, heads, length, _ = call.query.shape
    groups = call.key.shape[1]
    terms = call.terms
    mix = call.log_mixing_weights()
    keys = call.key_features(call.key[:, :, :length])
    inputs = (call.query, call.key, call.value, *call.query_features(call.query), *keys, mix, valid)
    attributes = {
        "heads": heads,
        "groups": groups,
        "window": call.window,
        "scaling": float(call.scaling),
        "softcap": float(terms.softcap or 0.0),
        "mixes_rows": int(mix.shape[2] != 1),
    }
    width = call.value.shape[3]
    shapes: list[Sequence[int]] = [(batch, heads, length, width)]
    if not call.causal:
        return graph_node("Window", inputs, {**attributes, "sinks": call.sinks}, *shapes)
    shapes.append((batch, groups, keys.values.shape[3], width + 1))
    if keys.log_scale is not None:
        shapes.append((batch, groups))
    return graph_node("CausalWindow", (*inputs, *others, terms.sink), {**attributes, "causal": 1}, *shapes)


def windowed_causal(call: WindowedCall) -> tuple[Tensor, State]:
    """Compute the causal form of at least one token, and the state after it; outputs at padding are zero."""
    length, window = call.query.shape[2], call.window
    call = with_term_features(call)
    inputs, valid, query_index, ring = gather_tokens(call, call.log_mixing_weights())
    sinks, first = first_tokens(call)
    position = torch.arange(-window, length, device=call.query.device)
    far = valid & (position < length - window)  # the others stay in the ring
    if sinks is not None:
        far = far & (position > sinks.position[:, -1:])
    if _becomes_node(call):
        out, *kv = _node(inputs, valid, far[:, :length], *((None,) * 3 if sinks is None else sinks))
        if query_index is not None:
            out = mask_tokens(take_tokens(out, query_index), call.mask)
        return out, {**KVState(kv[0], kv[1] if len(kv) > 1 else None).state(), **ring, **first}
    blocked = _BlockedCall(inputs, valid, far, sinks, older=window)
    carried = blocked.nothing if call.state is None else KVState.from_state(call.state)
    parts = []
    slope = blocked.slope
    if slope is not None and call.state is not None and call.mask is not None:  # whose padding comes first
        carried = carried.decayed((~call.mask).sum(dim=1, keepdim=True) * slope)
    for start in blocked.starts:
        count = blocked.group_size(start)
        rows = blocked.rows(start)
        keys = blocked.keys(start)
        before, carried = keys.kv_state.at(slice(0, count)).running(carried, log_decay=blocked.log_decay)
        parts.append(blocked.attend(start, rows, keys, before))
    out = blocked.join(parts)
    if query_index is not None:
        out = mask_tokens(take_tokens(out, query_index), call.mask)
    after = carried.decayed(blocked.log_decay).plus(keys.kv_state.at(-blocked.reach if blocked.free else count))
    if slope is not None:  # relative to the next token
        after = after.decayed(slope * ((blocked.count + 1) * blocked.size - length))
    return out, {**after.state(), **ring, **first}


def windowed_bidirectional(call: WindowedCall, sinks: Sinks | None) -> Tensor:
    """Compute the bidirectional form; outputs at padding mean nothing.

    Sinks (`end_tokens`) are keys only here: `attend_from_sinks` replaces the outputs of their own queries. A call may
    be a part of a sequence: `call.state` then holds the sums over keys that are far from all of its tokens, and `sinks`
    are those of the sequence, at positions relative to the first token of the part.
    """
    positions = torch.arange(call.query.shape[2], device=call.query.device)
    valid = far = torch.ones_like(positions, dtype=torch.bool).unsqueeze(0) if call.mask is None else call.mask
    if sinks is not None:
        far = far & ~(sinks.position.unsqueeze(-1) == positions).any(dim=1)
    masked = with_term_features(call.replace(query=mask_tokens(call.query, call.mask)))
    blocked = _BlockedCall(masked, valid, far, sinks)
    carried = blocked.nothing if call.state is None else KVState.from_state(call.state)
    parts = []
    for start, later in zip(blocked.starts, blocked.later_states(), strict=True):
        keys = blocked.keys(start)
        before, carried = keys.kv_state.at(slice(0, blocked.group_size(start))).running(carried)
        behind, _ = keys.kv_state.at(slice(2 * blocked.reach, None)).apply(lambda x: x.flip(0)).running(later)
        behind = behind.apply(lambda x: x.flip(0))
        if call.terms.bias is not None:
            behind = behind._replace(total=behind.total * call.terms.behind[:, None, None].to(behind.total.dtype))
        if call.terms.relative is not None:
            before = before._replace(total=one_direction(before.total, 0, dim=-2))
            behind = behind._replace(total=one_direction(behind.total, 1, dim=-2))
        far_state = before.plus(behind)
        parts.append(blocked.attend(start, blocked.rows(start), keys, far_state))
    return blocked.join(parts)


def windowed(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute either form; the causal one is continued from `call.state`.

    The kernelized part of the causal form is attention over keys delayed by `window` tokens, so the state consists of
    `kv`, `k_sum` (`log_scale`), a ring of the last `window` keys and values: `ring_key [B, G, w, d]`,
    `ring_value [B, G, w, e]`, `ring_mask [B, w]`, the sinks and the number of tokens. Its windows count real tokens:
    padding anywhere changes nothing. Time O(L·(window + m)·d); temporaries O(group·(window + m)) for a group of blocks,
    and (bidirectional) the sums at each group's end.

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token (causal).
    """
    mask, state, length = call.mask, call.state, call.query.shape[2]
    if length == 0:
        return call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1]), state
    # One token in every row is a step. A mask is read on a CPU only.
    may_read = not torch.compiler.is_compiling() and call.query.device.type == "cpu"
    if state is not None and length == 1 and (mask is None or (may_read and bool(mask.all()))):
        return _step(call, state)
    if state is not None and length == 1 and mask is not None and torch.compiler.is_exporting():
        return _masked_step(call, state, mask)
    if call.causal:
        return windowed_causal(call)
    if _becomes_node(call):
        return _node(call, call.key.new_ones(1, length).bool() if mask is None else mask)[0], None
    sinks = end_tokens(call)
    return attend_from_sinks(windowed_bidirectional(call, sinks), call, sinks), None


def _masked_step(call: WindowedCall, state: State, mask: Tensor) -> tuple[Tensor, State]:
    """Compute `_step` in rows whose token is real: others have zeros, and the state that they had."""
    out, after = _step(call.replace(mask=None), state)
    real = mask[:, 0].expand(out.shape[0])

    def chosen(name: str) -> Tensor:
        new, old = after[name], state[name]
        is_new = real.view(-1, *(1,) * (new.dim() - 1))
        if new.dtype == torch.bool:  # which ONNX Runtime cannot select
            return (is_new & new) | (~is_new & old)
        return torch.where(is_new, new, old)

    return mask_tokens(out, mask), {name: chosen(name) for name in after}


def _step(call: WindowedCall, state: State) -> tuple[Tensor, State]:
    """Compute one token after a state in O((window + m)·d), without a loop, and the state after it, written anew.

    The oldest key of the ring moves into `kv` and `k_sum` unless it is a sink, and the new key is appended to the ring.
    """
    call = with_term_features(call)
    query, key, value, terms = call.query, call.key, call.value, call.terms
    dtype = compute_dtype(query)
    slope = None if terms.slope is None else terms.slope.to(dtype)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    near = torch.cat([state["ring_mask"][:, 1:], state["ring_mask"].new_ones(batch, 1)], dim=1)
    near_key, ring_key = append(state["ring_key"][:, :, 1:], key, call.cache_dtype)
    near_value, ring_value = append(state["ring_value"][:, :, 1:], value, call.cache_dtype)
    ring = {"ring_key": ring_key, "ring_value": ring_value, "ring_mask": near}
    sinks, first = first_tokens(call)
    far = _with_oldest(call, state)
    if sinks is not None:
        near_key = torch.cat([near_key, sinks.key], dim=2)
        near_value = torch.cat([near_value, sinks.value], dim=2)
        has_left = torch.arange(call.sinks, device=near.device) <= state["count"].unsqueeze(1) - call.window
        near = torch.cat([near, has_left], dim=1)
    near_key, near_value = near_key.to(dtype), near_value.to(dtype)
    full = query.device.type == "cpu" and not torch.compiler.is_compiling() and bool(near.all())
    if not full:
        near_key = mask_tokens(near_key, near)
        near_value = mask_tokens(near_value, near)
    grouped = (batch, groups, heads // groups, -1)
    logits = (query.to(dtype) * call.scaling).reshape(grouped) @ near_key.transpose(-1, -2)
    logits = terms.capped(logits)
    if terms.has_distances:
        logits = logits + terms.by_distance(_step_distances(call, state)).to(dtype).reshape(*logits.shape[:3], -1)
    if not full:
        logits = logits.masked_fill(~near[:, None, None, :], float("-inf"))
    values, scale = call.query_features(query.to(dtype))
    mix = far_mix(call).to(dtype).exp().unsqueeze(-1)
    features = Features((values * mix).reshape(grouped), None if scale is None else scale.reshape(grouped[:-1]))
    columns = [Columns(logits)]
    if terms.sink is not None:
        columns.append(Columns(terms.sink.to(dtype).view(1, groups, -1, 1).expand(batch, -1, -1, -1)))
    if slope is not None:
        features = _decaying(features, columns, 0.0)
    weights, total = _far_and_near(features, columns, far)
    normaliser = torch.cat([*weights, total[..., -1:]], dim=-1).sum(dim=-1)
    out = divide(weights[0] @ near_value + total[..., :-1], normaliser)
    after = far.decayed(None if slope is None else -slope)
    return out.view(batch, heads, 1, -1).to(value.dtype), {**after.state(), **ring, **first}


def _with_oldest(call: WindowedCall, state: State) -> KVState:
    """Return the sums with the oldest key of the ring, which leaves the window, unless it is a sink."""
    dtype = compute_dtype(call.query)
    key, value = (to_dtype(state[name][:, :, :1], dtype) for name in ("ring_key", "ring_value"))
    is_counted = state["ring_mask"][:, :1] & (state["count"].unsqueeze(1) - call.window >= call.sinks)
    features = masked_key_features(call.key_features, key, is_counted, dtype)
    oldest = KVState.of(features, with_ones(mask_tokens(value, is_counted)))
    slope = call.terms.slope
    return KVState.from_state(state).plus(oldest.decayed(None if slope is None else -slope.to(dtype) * call.window))


def _step_distances(call: WindowedCall, state: State) -> Tensor:
    """Return how far the tokens of the ring and then the sinks are before the new token, `[B, 1, w + s]`."""
    count = state["count"].unsqueeze(1)
    ring = torch.arange(call.window - 1, -1, -1, device=count.device).expand(count.shape[0], -1)
    return torch.cat([ring, count - torch.arange(call.sinks, device=count.device)], dim=1).unsqueeze(1)


def inside_window(
    mask: Tensor | None, query: Tensor, key: Tensor, window: int, causal: bool, start: int | None = None
) -> Tensor:
    """Return which keys lie in the window of each query, `[B | 1, 1, L, S]`.

    Queries are the tokens from `start` on (None: the last). Distances are among real tokens (causal, mask `[B, S]`) or
    in the sequence. A full mask may show later keys in a causal call, too: the near ones are inside then.
    """
    position = torch.arange(key.shape[2], device=key.device).unsqueeze(0)
    if causal and mask is not None and mask.dim() == 2:
        position = mask.long().cumsum(dim=1)
    start = key.shape[2] - query.shape[2] if start is None else start
    distance = position[:, None, start : start + query.shape[2], None] - position[:, None, None, :]
    shows_later = not causal or (mask is not None and mask.dim() == 4)
    return (distance.abs() < window) & ((distance >= 0) | shows_later)


def dense_windowed_weights(call: WindowedCall, inside: Tensor, allowed: Tensor, start: int | None = None) -> Tensor:
    """Compute explicit normalised weights `[B, H, L, S]`, for analysis. O(L·S) time and memory.

    Args:
        call: The call, whose window and mask are not read.
        inside: `[B | 1, H | 1, L, S]`, which keys have exact weights.
        allowed: `[B | 1, H | 1, L, S]`, which keys are visible at all.
        start: The position of the first query (None: the queries are the last of the keys).
    """
    call = with_term_features(call)
    query = call.query
    key = call.key
    log_mix = far_mix(call)
    terms = call.terms
    batch, groups = key.shape[:2]
    rows = make_query_rows(query, call.query_features, groups, call.scaling, log_mix)
    rows = QueryRows(rows.query.flatten(2, 3), rows.features.apply(lambda x: x.flatten(2, 3)))
    if not key.shape[2]:
        return rows.query.new_zeros(*query.shape[:3], 0)
    key = mask_tokens(key.to(rows.query.dtype), allowed.any(dim=2).any(dim=1).expand(batch, -1))
    exact, outside = (
        flags.expand(batch, query.shape[1], -1, -1).unflatten(1, (groups, -1)).flatten(2, 3)
        for flags in (inside & allowed, ~inside & allowed)
    )
    logits = capped_products(rows.query, functional.pad(key, (0, 1)), terms)
    outside = outside.to(key.dtype)
    features = terms.placed(call.key_features(key))
    if terms.has_distances:
        distance = distances(query.shape[2], key.shape[2], start, key.device)
        logits = logits + head_rows(terms.by_distance(distance).to(logits.dtype), groups)
        if terms.slope is None:
            outside = outside * head_rows(terms.outside(distance).to(logits.dtype), groups)
    if terms.relative is not None:
        distance = distances(query.shape[2], key.shape[2], start, key.device)
        logits = logits + terms.relative.pairs(rows.query[..., :-1], key, distance)
        behind = features._replace(values=one_direction(features.values, 1))
        other = Columns(torch.full_like(logits, float("-inf")), behind, outside * (distance < 0))
        outside = outside * (distance > 0)
        features = features._replace(values=one_direction(features.values, 0))
    columns = [Columns(logits.masked_fill(~exact, float("-inf")), features, outside)]
    if terms.sink is not None:
        columns.append(_keyless_column(terms.sink, rows, key)[0])
    if terms.relative is not None:
        columns.append(other)
    features = rows.features
    if terms.slope is not None:  # distances are the differences of those to the first key
        log_decay = -terms.slope[:, None].to(key.dtype) * distance[:, 0]
        features = _decaying(features, columns, log_decay)
    parts = [part.reshape(*query.shape[:3], -1) for part in row_weights(features, columns)[0]]
    total = torch.cat(parts, dim=-1).sum(dim=-1)
    keyed = [part for part in parts if part.shape[-1] == key.shape[2]]
    return divide(torch.stack(keyed).sum(dim=0), total)
