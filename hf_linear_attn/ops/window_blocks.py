"""Windowed attention (`ops.windowed`) in blocks of tokens: their neighbours, and sums over all that is farther.

The window of a block of c tokens lies within itself and the `reach` blocks before it (bidirectional: and after it).
Everything farther comes from running sums over blocks, which are added up from the beginning (and from the end) and
never subtracted, so that no digits cancel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .calls import WindowedCall
from .common import (
    Features,
    KVState,
    chunk_order,
    compute_dtype,
    is_free,
    join_chunks,
    mask_tokens,
    weighted_mean,
    with_ones,
)
from .disentangled import one_direction, shifted
from .sinks import Sinks
from .terms import Terms
from .window_tokens import pad_tokens
from .window_weights import (
    Columns,
    QueryRows,
    capped_products,
    decaying,
    far_and_near,
    far_mix,
    head_rows,
    keyless_column,
    make_query_rows,
)

#: Smallest and largest block: those of narrower windows have the smallest one.
MIN_BLOCK, MAX_BLOCK = 32, 64

#: Elements of one c x c matrix of weights over all heads and blocks that are handled at once (2 MB in float32).
GROUP_ELEMENTS = 1 << 19

#: Smallest number of blocks handled at once: the features of the neighbours of a group are computed again.
MIN_GROUP = 4

#: Added to the logits of padding, as one more column of q and k: their exponentials are exactly zero.
BLOCKED = -1e30


def split_blocks(tensor: Tensor, size: int, count: int, dim: int = 2) -> Tensor:
    """Split tokens into blocks: a new first dimension of blocks, and tokens at `dim + 1`.

    Tokens of a free length are in the order of `chunk_order`.
    """
    if is_free(count):
        return tensor.unflatten(dim, (size, count)).movedim(dim + 1, 0)
    return tensor.unflatten(dim, (count, size)).movedim(dim, 0).contiguous()


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


class BlockedCall:
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
            pairs.append(keyless_column(terms.sink, rows, keys.value))
        columns, values = zip(*pairs, strict=True)
        if self.slope is not None:
            features = decaying(features, columns, -self.slope[:, None] * self._index())
        weights, total = far_and_near(features, columns, far)
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
