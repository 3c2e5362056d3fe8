"""Hash buckets: a few exact weights per query beside a band, in position of their estimates (Chen et al. 2021).

Random projections put queries and keys into buckets, `h(x) = argmax [x R, -x R]`, so that vectors of similar direction
meet. A query takes at most `capacity` keys of its bucket, so that time and memory stay linear:
    causal          the last keys at or before it
    bidirectional   the nearest keys by rank: half of them at or before it, the others after
A pair that several rounds of hashing select, or that lies in the band too, counts once.

The decoding state consists of the last `capacity` keys and values of every bucket and round:
    `bucket_ring_key` `[B, G, rounds, buckets, capacity, d]`, `bucket_ring_value` `[…, e]`,
    `bucket_ring_place` `[B, G, rounds, buckets, capacity]` (the token's position among the real ones; -1: empty)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .common import FeatureFunction, Features, State, compute_dtype, mask_tokens, refuse_free_length, with_ones
from .fused import WindowedCall
from .sinks import token_numbers
from .windowed import Accumulator, QueryRows, make_query_rows

#: Elements of the gathered keys, values and features of one block of queries (16 MB in float32).
GATHER_ELEMENTS = 1 << 22

#: Sorts tokens by bucket, then by position: positions stay below it.
MAX_POSITION = 1 << 40


class Hashing(NamedTuple):
    """directions `[rounds, d, buckets / 2]`; capacity: keys that a query takes from its bucket in each round."""

    directions: Tensor
    capacity: int

    @property
    def buckets(self) -> int:
        return 2 * self.directions.shape[-1]

    def bucket(self, x: Tensor, round_: int) -> Tensor:
        """Return the bucket of each vector: `[B, H, L, d] -> [B, H, L]`."""
        projected = x.to(compute_dtype(x)) @ self.directions[round_].to(compute_dtype(x))
        return torch.cat([projected, -projected], dim=-1).argmax(dim=-1)


class _Pool(NamedTuple):
    """Stored and new keys of one round of hashing, with their order when sorted by bucket and position."""

    key: Tensor  # [B, G, N, d]
    value: Tensor  # [B, G, N, e]
    position: Tensor  # [B, G, N]
    order: Tensor  # [B, G, N]
    code: Tensor  # [B, G, N], sorted

    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Gather tokens index `[B, G, n, C]` of `[B, G, N, …]`."""
        flat = index.flatten(2)
        if tensor.dim() == 3:
            return tensor.gather(2, flat).view(index.shape)
        taken = tensor.gather(2, flat.unsqueeze(-1).expand(*flat.shape, tensor.shape[-1]))
        return taken.view(*index.shape, tensor.shape[-1])


class _Matches(NamedTuple):
    """Keys that one round selects for a block of queries: key_index `[B, G, n, C]`, position, and which are valid."""

    key_index: Tensor
    position: Tensor
    valid: Tensor


def make_pools(
    key: Tensor, value: Tensor, mask: Tensor | None, hashing: Hashing, state: State | None
) -> tuple[Tensor, list[_Pool]]:
    """Sort stored and new keys `[B, G, L, d]` by bucket and position; padding and empty entries go to the end.

    Returns:
        The position of each new token among the real ones of its row `[B, L]`, and the pool of each round.
    """
    positions, pools = token_numbers(mask, key.shape[0], key.shape[2], key.device) - 1, []
    if state is not None:
        positions = positions + state["count"].unsqueeze(1)
    for round_ in range(hashing.directions.shape[0]):
        keys, values, position = key, value, positions.unsqueeze(1).expand(key.shape[:3])
        bucket = hashing.bucket(key, round_)
        if mask is not None:
            bucket = bucket.masked_fill(~mask.unsqueeze(1), hashing.buckets)
        if state is not None:
            stored = state["bucket_ring_place"][:, :, round_]
            numbers = torch.arange(hashing.buckets, device=key.device).view(1, 1, -1, 1).expand(stored.shape)
            bucket = torch.cat([numbers.masked_fill(stored < 0, hashing.buckets).flatten(2), bucket], dim=2)
            position = torch.cat([stored.flatten(2), position], dim=2)
            keys, values = (
                torch.cat([state[f"bucket_ring_{name}"][:, :, round_].flatten(2, 3).to(new.dtype), new], dim=2)
                for name, new in (("key", key), ("value", value))
            )
        code, order = (bucket * MAX_POSITION + position.clamp_min(0)).sort(dim=-1)
        pools.append(_Pool(keys, values, position, order, code))
    return positions, pools


def _select(pool: _Pool, bucket: Tensor, position: Tensor, capacity: int, causal: bool) -> _Matches:
    """Select the keys that queries take from their buckets: bucket, position `[B, G, n]`."""
    first = torch.searchsorted(pool.code, bucket * MAX_POSITION)
    end_causal = torch.searchsorted(pool.code, bucket * MAX_POSITION + position, right=True)
    if causal:
        end = end_causal
        low = torch.maximum(first, end_causal - capacity)
    else:
        end = torch.searchsorted(pool.code, (bucket + 1) * MAX_POSITION)
        low = torch.maximum(first, torch.minimum(end_causal - (capacity + 1) // 2, end - capacity))
    chosen = low.unsqueeze(-1) + torch.arange(capacity, device=position.device)
    index = pool.take(pool.order, chosen.clamp(max=pool.order.shape[-1] - 1))
    return _Matches(index, pool.take(pool.position, index), chosen < end.unsqueeze(-1))


def select_keys(
    pools: list[_Pool], query: Tensor, position: Tensor, hashing: Hashing, window: int, causal: bool
) -> list[_Matches]:
    """Select keys in every round for queries `[B, G, n, d]` at positions `[B, G, n]`, each far pair once."""
    rounds: list[_Matches] = []
    for round_, pool in enumerate(pools):
        matches = _select(pool, hashing.bucket(query, round_), position, hashing.capacity, causal)
        valid = matches.valid & ((position.unsqueeze(-1) - matches.position).abs() >= window)
        for earlier in rounds:
            same = (matches.position.unsqueeze(-1) == earlier.position.unsqueeze(-2)) & earlier.valid.unsqueeze(-2)
            valid = valid & ~same.any(dim=-1)
        rounds.append(matches._replace(valid=valid))
    return rounds


def _dot(rows: Tensor, gathered: Tensor) -> Tensor:
    """`[B, G, n, d] x [B, G, n, C, d] -> [B, G, n, C]`."""
    return (gathered @ rows.unsqueeze(-1)).squeeze(-1)


def _correct(
    rows: QueryRows,
    base: Accumulator,
    matches: list[_Matches],
    pools: list[_Pool],
    key_features: FeatureFunction,
    dtype: torch.dtype,
) -> Accumulator:
    """Replace estimates by exact weights: rows `[B, G, n, …]`, base sums `[B, G, n, …]`."""
    logits, estimates, values = [], [], []
    for match, pool in zip(matches, pools, strict=True):
        key = pool.take(pool.key, match.key_index).to(dtype)
        exact = _dot(rows.query[..., :-1], key)
        logits.append(exact.masked_fill(~match.valid, float("-inf")))
        features = key_features(key.flatten(2, 3), 0)
        estimate = _dot(rows.features.values, features.values.view(*match.key_index.shape, -1))
        assert features.log_scale is not None
        assert rows.features.log_scale is not None
        # At most 0 where it counts: the band's scale bounds every estimate. The clamp is for the others.
        gap = (rows.features.log_scale - base.log_scale).unsqueeze(-1) + features.log_scale.view(match.key_index.shape)
        estimates.append((estimate * gap.clamp(max=0.0).exp()).masked_fill(~match.valid, 0.0))
        values.append(with_ones(pool.take(pool.value, match.key_index).to(dtype)))
    logit, estimate, value = torch.cat(logits, dim=-1), torch.cat(estimates, dim=-1), torch.cat(values, dim=3)
    top = torch.maximum(base.log_scale, logit.detach().amax(dim=-1))
    decay = torch.exp(base.log_scale - top).unsqueeze(-1)
    weights = torch.exp(logit - top.unsqueeze(-1)) - estimate * decay
    return Accumulator(base.values * decay + (weights.unsqueeze(-2) @ value).squeeze(-2), top)


def add_buckets(base: Accumulator, call: WindowedCall, hashing: Hashing) -> tuple[Accumulator, State]:
    """Replace estimates by exact weights for the pairs that hashing selects.

    Time O(L·rounds·capacity·(m·d + e)) and a sort; gathered keys, values and features are bounded by `GATHER_ELEMENTS`.

    Args:
        base: The accumulator `[B, H, L, …]` of the band (`ops.windowed`).
        call: The call of the band; its feature maps must return a log scale, and its state that of the buckets too.
        hashing: Directions and capacity of the buckets.

    Returns:
        The new accumulator, and the part of the state that belongs to the buckets.
    """
    mask, state, dtype = call.mask, call.state, compute_dtype(call.query)
    batch, heads, length, _ = call.query.shape
    refuse_free_length(length, "Attention with hash buckets")
    groups = call.key.shape[1]
    query, key, value = (mask_tokens(x, mask) for x in (call.query, call.key, call.value))
    positions, pools = make_pools(key, value, mask, hashing, state)
    after = _store(pools, hashing)
    zero_mix = torch.zeros(1, heads, 1, dtype=dtype, device=key.device)
    width = len(pools) * hashing.capacity * (key.shape[-1] + value.shape[-1] + 1)
    step = length if torch.compiler.is_compiling() else GATHER_ELEMENTS // max(batch * heads * width, 1)
    values, scales = [base.values[:, :, :0]], [base.log_scale[:, :, :0]]
    for start in range(0, length, max(step, 1)):
        now = slice(start, min(start + max(step, 1), length))
        grouped = make_query_rows(query[:, :, now], call.query_features, start, groups, call.scaling, zero_mix)
        phi, log_scale = grouped.features
        features = Features(phi.flatten(2, 3), None if log_scale is None else log_scale.flatten(2, 3))
        rows = QueryRows(grouped.query.flatten(2, 3), features)
        position = positions[:, None, None, now].expand(grouped.query.shape[:-1]).flatten(2)
        hashed = query[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3)
        matches = select_keys(pools, hashed, position, hashing, call.window, call.causal)
        part = Accumulator(*(x[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3) for x in base))
        corrected = _correct(rows, part, matches, pools, call.key_features, dtype)
        values.append(corrected.values.unflatten(2, (heads // groups, -1)).flatten(1, 2))
        scales.append(corrected.log_scale.unflatten(2, (heads // groups, -1)).flatten(1, 2))
    return Accumulator(torch.cat(values, dim=2), torch.cat(scales, dim=2)), after


def _store(pools: list[_Pool], hashing: Hashing) -> State:
    """Return the state: the last `capacity` keys and values of every bucket."""
    rings: dict[str, list[Tensor]] = {"bucket_ring_key": [], "bucket_ring_value": [], "bucket_ring_place": []}
    batch, groups = pools[0].key.shape[:2]
    device = pools[0].key.device
    numbers = torch.arange(hashing.buckets + 1, device=device) * MAX_POSITION
    for pool in pools:
        borders = torch.searchsorted(pool.code, numbers.expand(batch, groups, -1).contiguous())
        chosen = borders[:, :, 1:].unsqueeze(-1) + torch.arange(-hashing.capacity, 0, device=device)
        empty = chosen < borders[:, :, :-1].unsqueeze(-1)
        index = pool.take(pool.order, chosen.clamp(0, max(pool.order.shape[-1] - 1, 0)))
        rings["bucket_ring_key"].append(pool.take(pool.key, index).masked_fill(empty.unsqueeze(-1), 0.0))
        rings["bucket_ring_value"].append(pool.take(pool.value, index).masked_fill(empty.unsqueeze(-1), 0.0))
        rings["bucket_ring_place"].append(pool.take(pool.position, index).masked_fill(empty, -1))
    return {name: torch.stack(parts, dim=2) for name, parts in rings.items()}


def bucket_pairs(
    query: Tensor, key: Tensor, hashing: Hashing, *, window: int, causal: bool, mask: Tensor | None
) -> Tensor:
    """Return which pairs the buckets add to the band, `[B, H, L, S]`, for analysis. O(L·S) memory."""
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    dtype = compute_dtype(query)
    query, key = (mask_tokens(x, mask).to(dtype) for x in (query, key))
    positions, pools = make_pools(key, key, mask, hashing, None)
    position = positions[:, None, None, :].expand(batch, groups, heads // groups, length).flatten(2)
    folded = query.reshape(batch, groups, -1, query.shape[-1])
    pairs = torch.zeros(batch, groups, folded.shape[2], length, dtype=torch.bool, device=key.device)
    for match in select_keys(pools, folded, position, hashing, window, causal):
        pairs |= (
            torch.zeros_like(pairs, dtype=torch.int8).scatter_add_(3, match.key_index, match.valid.to(torch.int8)) > 0
        )
    return pairs.view(batch, heads, length, length)
