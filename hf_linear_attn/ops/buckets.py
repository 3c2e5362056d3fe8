"""Hash buckets: a few exact weights per query beside a band, in place of their estimates (Chen et al. 2021).

Random projections put queries and keys into buckets, `h(x) = argmax [x R, -x R]`, so that vectors of similar direction
meet. A query takes at most `capacity` keys of its bucket, so that time and memory stay linear:
    causal          the last ones at or before it
    bidirectional   the nearest ones by rank: half of them at or before it, the others after
A pair that several rounds of hashing find, or that lies in the band too, counts once.

The decoding state holds the last `capacity` keys and values of every bucket and round, all a later query can ask for:
    `bucket_ring_key` `[B, G, rounds, buckets, capacity, d]`, `bucket_ring_value` `[…, e]`,
    `bucket_ring_place` `[B, G, rounds, buckets, capacity]` (the token's number among the real ones; -1: empty),
    `bucket_count` `[B]` (real tokens so far)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import FeatureFunction, State, compute_dtype, mask_tokens
from .windowed import Rows, Sums, make_rows, with_ones

#: Elements of the gathered keys, values and features of one block of queries (16 MB in float32).
GATHER_ELEMENTS = 1 << 22

#: Sorts tokens by bucket, then by place: places stay below it.
PLACES = 1 << 40


class Hashing(NamedTuple):
    """directions `[rounds, d, buckets / 2]`; capacity: keys that a query takes from its bucket in each round."""

    directions: Tensor
    capacity: int

    @property
    def buckets(self) -> int:
        return 2 * self.directions.shape[-1]

    def bucket(self, x: Tensor, round_: int) -> Tensor:
        """Bucket of each vector: `[B, H, L, d] -> [B, H, L]`."""
        side = x.to(compute_dtype(x)) @ self.directions[round_].to(compute_dtype(x))
        return torch.cat([side, -side], dim=-1).argmax(dim=-1)


class _Pool(NamedTuple):
    """Keys of one round of hashing, stored ones and new ones, and how they lie when sorted by bucket and place."""

    key: Tensor  # [B, G, N, d]
    value: Tensor  # [B, G, N, e]
    place: Tensor  # [B, G, N]
    order: Tensor  # [B, G, N]
    code: Tensor  # [B, G, N], sorted

    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Tokens index `[B, G, n, C]` of `[B, G, N, …]`."""
        flat = index.flatten(2)
        if tensor.dim() == 3:
            return tensor.gather(2, flat).view(index.shape)
        taken = tensor.gather(2, flat.unsqueeze(-1).expand(*flat.shape, tensor.shape[-1]))
        return taken.view(*index.shape, tensor.shape[-1])


class _Found(NamedTuple):
    """Keys found by one round for a block of queries: which `[B, G, n, C]`, their places, and which of them count."""

    token: Tensor
    place: Tensor
    counts: Tensor


def token_places(mask: Tensor | None, batch: int, length: int, state: State | None, device: torch.device) -> Tensor:
    """Number of each token among the real ones of its row, `[B, L]`."""
    if mask is None:
        places = torch.arange(length, device=device).expand(batch, length)
    else:
        places = mask.long().cumsum(dim=1) - 1
    return places if state is None else places + state["bucket_count"].unsqueeze(1)


def make_pool(
    key: Tensor, value: Tensor, places: Tensor, mask: Tensor | None, hashing: Hashing, round_: int, state: State | None
) -> _Pool:
    """Sort stored and new keys `[B, G, L, d]` by bucket and place; padding and empty places go to the end."""
    place = places.unsqueeze(1).expand(key.shape[:3])
    bucket = hashing.bucket(key, round_)
    if mask is not None:
        bucket = bucket.masked_fill(~mask.unsqueeze(1), hashing.buckets)
    if state is not None:
        stored = state["bucket_ring_place"][:, :, round_]
        numbers = torch.arange(hashing.buckets, device=key.device).view(1, 1, -1, 1).expand(stored.shape)
        bucket = torch.cat([numbers.masked_fill(stored < 0, hashing.buckets).flatten(2), bucket], dim=2)
        place = torch.cat([stored.flatten(2), place], dim=2)
        key = torch.cat([state["bucket_ring_key"][:, :, round_].flatten(2, 3).to(key.dtype), key], dim=2)
        value = torch.cat([state["bucket_ring_value"][:, :, round_].flatten(2, 3).to(value.dtype), value], dim=2)
    code, order = (bucket * PLACES + place.clamp_min(0)).sort(dim=-1)
    return _Pool(key, value, place, order, code)


def _find(pool: _Pool, bucket: Tensor, place: Tensor, capacity: int, causal: bool) -> _Found:
    """The keys that queries take from their buckets: bucket, place `[B, G, n]`."""
    first = torch.searchsorted(pool.code, bucket * PLACES)
    upto = torch.searchsorted(pool.code, bucket * PLACES + place, right=True)
    if causal:
        end = upto
        low = torch.maximum(first, upto - capacity)
    else:
        end = torch.searchsorted(pool.code, (bucket + 1) * PLACES)
        low = torch.maximum(first, torch.minimum(upto - (capacity + 1) // 2, end - capacity))
    chosen = low.unsqueeze(-1) + torch.arange(capacity, device=place.device)
    index = pool.take(pool.order, chosen.clamp(max=pool.order.shape[-1] - 1))
    return _Found(index, pool.take(pool.place, index), chosen < end.unsqueeze(-1))


def find_all(
    pools: list[_Pool], query: Tensor, place: Tensor, hashing: Hashing, window: int, causal: bool
) -> list[_Found]:
    """What every round finds for queries `[B, G, n, d]` at places `[B, G, n]`, each pair outside the band once."""
    rounds: list[_Found] = []
    for round_, pool in enumerate(pools):
        found = _find(pool, hashing.bucket(query, round_), place, hashing.capacity, causal)
        counts = found.counts & ((place.unsqueeze(-1) - found.place).abs() >= window)
        for earlier in rounds:
            same = (found.place.unsqueeze(-1) == earlier.place.unsqueeze(-2)) & earlier.counts.unsqueeze(-2)
            counts = counts & ~same.any(dim=-1)
        rounds.append(_Found(found.token, found.place, counts))
    return rounds


def _dot(rows: Tensor, gathered: Tensor) -> Tensor:
    """`[B, G, n, d] x [B, G, n, C, d] -> [B, G, n, C]`."""
    return (gathered @ rows.unsqueeze(-1)).squeeze(-1)


def _correct(
    rows: Rows, base: Sums, found: list[_Found], pools: list[_Pool], key_features: FeatureFunction, dtype: torch.dtype
) -> Sums:
    """Replace estimates by exact weights: rows `[B, G, n, …]`, base sums `[B, G, n, …]`."""
    logits, estimates, values = [], [], []
    for here, pool in zip(found, pools, strict=True):
        key = pool.take(pool.key, here.token).to(dtype)
        exact = _dot(rows.query[..., :-1], key)
        logits.append(exact.masked_fill(~here.counts, float("-inf")))
        features = key_features(key.flatten(2, 3), 0)
        estimate = _dot(rows.features.values, features.values.view(*here.token.shape, -1))
        assert features.log_scale is not None
        assert rows.features.log_scale is not None
        # At most 0 where it counts: the band's scale covers every estimate. The clamp is for the others.
        gap = (rows.features.log_scale - base.log_scale).unsqueeze(-1) + features.log_scale.view(here.token.shape)
        estimates.append((estimate * gap.clamp(max=0.0).exp()).masked_fill(~here.counts, 0.0))
        values.append(
            with_ones(pool.take(pool.value, here.token).to(dtype).flatten(2, 3)).unflatten(2, here.token.shape[2:])
        )
    logit, estimate, value = torch.cat(logits, dim=-1), torch.cat(estimates, dim=-1), torch.cat(values, dim=3)
    top = torch.maximum(base.log_scale, logit.detach().amax(dim=-1))
    decay = torch.exp(base.log_scale - top).unsqueeze(-1)
    weights = torch.exp(logit - top.unsqueeze(-1)) - estimate * decay
    return Sums(base.values * decay + (weights.unsqueeze(-2) @ value).squeeze(-2), top)


def add_buckets(
    base: Sums,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: FeatureFunction,
    key_features: FeatureFunction,
    hashing: Hashing,
    *,
    window: int,
    scaling: float,
    causal: bool,
    mask: Tensor | None = None,
    state: State | None = None,
) -> tuple[Sums, State]:
    """Exact weights for the pairs found by hashing, on top of the sums `[B, H, L, …]` of a band (see `ops.windowed`).

    The maps must carry a log scale. Returns the new sums and the part of the state that belongs to the buckets. Time
    O(L·rounds·capacity·(m·d + e)) and a sort; gathered keys, values and features are bounded by `GATHER_ELEMENTS`.
    """
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    query, key, value = (mask_tokens(x, mask) for x in (query, key, value))
    places = token_places(mask, batch, length, state, key.device)
    rounds = range(hashing.directions.shape[0])
    pools = [make_pool(key, value, places, mask, hashing, round_, state) for round_ in rounds]
    after = _store(pools, hashing, places, mask, state)
    zero_mix = torch.zeros(1, heads, 1, dtype=dtype, device=key.device)
    width = len(rounds) * hashing.capacity * (key.shape[-1] + value.shape[-1] + 1)
    step = length if torch.compiler.is_compiling() else GATHER_ELEMENTS // max(batch * heads * width, 1)
    values, scales = [base.values[:, :, :0]], [base.log_scale[:, :, :0]]
    for start in range(0, length, max(step, 1)):
        now = slice(start, min(start + max(step, 1), length))
        made = make_rows(query[:, :, now], query_features, start, groups, scaling, zero_mix)
        rows = Rows(made.query.flatten(2, 3), made.features._replace(values=made.features.values.flatten(2, 3)))
        if made.features.log_scale is not None:
            rows = rows._replace(features=rows.features._replace(log_scale=made.features.log_scale.flatten(2, 3)))
        place = places[:, None, None, now].expand(made.query.shape[:-1]).flatten(2)
        hashed = query[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3)
        found = find_all(pools, hashed, place, hashing, window, causal)
        part = Sums(*(held[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3) for held in base))
        sums = _correct(rows, part, found, pools, key_features, dtype)
        values.append(sums.values.unflatten(2, (heads // groups, -1)).flatten(1, 2))
        scales.append(sums.log_scale.unflatten(2, (heads // groups, -1)).flatten(1, 2))
    return Sums(torch.cat(values, dim=2), torch.cat(scales, dim=2)), after


def _store(pools: list[_Pool], hashing: Hashing, places: Tensor, mask: Tensor | None, state: State | None) -> State:
    """The last `capacity` keys and values of every bucket."""
    keys, values, stored = [], [], []
    batch, groups = pools[0].key.shape[:2]
    numbers = torch.arange(hashing.buckets + 1, device=places.device) * PLACES
    for pool in pools:
        borders = torch.searchsorted(pool.code, numbers.expand(batch, groups, -1).contiguous())
        back = torch.arange(-hashing.capacity, 0, device=places.device)
        chosen = borders[:, :, 1:].unsqueeze(-1) + back
        held = chosen >= borders[:, :, :-1].unsqueeze(-1)
        size = pool.order.shape[-1]
        index = pool.take(pool.order, chosen.clamp(0, max(size - 1, 0)))
        keys.append(pool.take(pool.key, index).masked_fill(~held.unsqueeze(-1), 0.0))
        values.append(pool.take(pool.value, index).masked_fill(~held.unsqueeze(-1), 0.0))
        stored.append(pool.take(pool.place, index).masked_fill(~held, -1))
    new = mask.sum(dim=1) if mask is not None else torch.full((batch,), places.shape[1], device=places.device)
    return {
        "bucket_ring_key": torch.stack(keys, dim=2),
        "bucket_ring_value": torch.stack(values, dim=2),
        "bucket_ring_place": torch.stack(stored, dim=2),
        "bucket_count": new if state is None else new + state["bucket_count"],
    }


def bucket_pairs(
    query: Tensor, key: Tensor, hashing: Hashing, *, window: int, causal: bool, mask: Tensor | None
) -> Tensor:
    """Which pairs the buckets add to the band, `[B, H, L, S]`, for study. O(L·S) memory."""
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    dtype = compute_dtype(query)
    query, key = (mask_tokens(x, mask).to(dtype) for x in (query, key))
    places = token_places(mask, batch, length, None, key.device)
    rounds = range(hashing.directions.shape[0])
    pools = [make_pool(key, key, places, mask, hashing, round_, None) for round_ in rounds]
    place = places[:, None, None, :].expand(batch, groups, heads // groups, length).flatten(2)
    folded = query.reshape(batch, groups, -1, query.shape[-1])
    pairs = torch.zeros(batch, groups, folded.shape[2], length, dtype=torch.bool, device=key.device)
    for found in find_all(pools, folded, place, hashing, window, causal):
        pairs |= torch.zeros_like(pairs, dtype=torch.int8).scatter_add_(3, found.token, found.counts.to(torch.int8)) > 0
    return pairs.view(batch, heads, length, length)
