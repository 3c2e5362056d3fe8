"""Hash buckets: a few exact weights per query beside a band, in place of their estimates (Chen et al. 2021).

Random projections put queries and keys into buckets, `h(x) = argmax [x R, -x R]`, so that vectors of similar direction
meet. A query takes at most `capacity` keys of its bucket, so that time and memory stay linear:
    causal          the last keys at or before it
    bidirectional   the nearest keys by rank: half of them at or before it, the others after
A pair that several rounds of hashing select, or that lies in the band too, counts once.

The decoding state consists of the last `capacity` keys and values of every bucket and round:
    `bucket_ring_key` `[B, G, rounds, buckets, capacity, d]`, `bucket_ring_value` `[…, e]`,
    `bucket_ring_position` `[B, G, rounds, buckets, capacity]` (the token's position among the real ones; -1: empty)
and, where the sums of the band have a gradient, the keys that they hold without one, since an earlier call had none:
    `bucket_ring_constant` `[B, G, rounds, buckets, capacity]`
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .calls import WindowedCall
from .common import FeatureFunction, State, compute_dtype, mask_tokens, refuse_free_length, with_ones
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

    def bucket(self, x: Tensor) -> Tensor:
        """Return the bucket of each vector in each round: `[B, H, L, d] -> [B, H, rounds, L]`."""
        x = x.to(compute_dtype(x)).unsqueeze(2)
        projected = x @ self.directions.to(x.dtype)
        return torch.cat([projected, -projected], dim=-1).argmax(dim=-1)


class _Pool(NamedTuple):
    """Stored and new keys, with their order in each round when sorted by bucket and position."""

    key: Tensor  # [B, G, N, d]
    value: Tensor  # [B, G, N, e]
    position: Tensor  # [B, G, N]
    constant: Tensor  # [B, G, N]: whether the sums of the band hold the key without a gradient
    order: Tensor  # [B, G, rounds, N]
    code: Tensor  # [B, G, rounds, N], sorted

    def sorted_tokens(self, offsets: Tensor) -> Tensor:
        """Return the index of the tokens at offsets `[B, G, rounds, …]` in the order of each round."""
        flat = offsets.clamp(0, max(self.order.shape[-1] - 1, 0)).flatten(3)
        return self.order.gather(3, flat).view(offsets.shape)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather tokens index `[B, G, …]` of `[B, G, N, w]`."""
    taken = tensor.gather(2, index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, tensor.shape[-1]))
    return taken.view(*index.shape, tensor.shape[-1])


def make_pool(
    key: Tensor, value: Tensor, mask: Tensor | None, hashing: Hashing, state: State | None, window: int = 0
) -> tuple[Tensor, _Pool]:
    """Sort stored and new keys `[B, G, L, d]` by bucket and position; padding and empty entries go to the end.

    The position of each new token among the real ones of its row `[B, L]` is returned before the pool.
    """
    positions = token_numbers(mask, key.shape[0], key.shape[2], key.device) - 1
    bucket = hashing.bucket(key)
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None, None], hashing.buckets)
    if state is not None:
        positions = positions + state["count"].unsqueeze(1)
    position = positions.unsqueeze(1).expand(key.shape[:3])
    constant = torch.zeros_like(position, dtype=torch.bool)
    if state is not None:
        stored, rounds = state["bucket_ring_position"], bucket.shape[2]
        numbers = torch.arange(hashing.buckets, device=key.device).unsqueeze(-1)
        same_round = torch.eye(rounds, dtype=torch.bool, device=key.device)[:, :, None, None]
        in_ring = torch.where(same_round & (stored >= 0).unsqueeze(2), numbers, hashing.buckets)
        bucket = torch.cat([in_ring.flatten(3), bucket], dim=3)
        position = torch.cat([stored.flatten(2), position], dim=2)
        constant = torch.cat([_constant_keys(state, window).flatten(2), constant], dim=2)
        key, value = (
            torch.cat([state[f"bucket_ring_{name}"].flatten(2, 4).to(new.dtype), new], dim=2)
            for name, new in (("key", key), ("value", value))
        )
    code, order = (bucket * MAX_POSITION + position.clamp_min(0).unsqueeze(2)).sort(dim=-1)
    return positions, _Pool(key, value, position, constant, order, code)


def _constant_keys(state: State, window: int) -> Tensor:
    """Return which stored keys the sums of a state hold without a gradient, in the shape of `bucket_ring_position`."""
    stored = state["bucket_ring_position"]
    if state["kv"].requires_grad:
        return state.get("bucket_ring_constant", torch.zeros_like(stored, dtype=torch.bool))
    return stored < (state["count"] - window).view(-1, 1, 1, 1, 1)  # the others are still in the window


def select_keys(
    pool: _Pool, query: Tensor, position: Tensor, hashing: Hashing, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Select keys in every round for queries `[B, G, n, d]` at positions `[B, G, n]`, each far pair once.

    Returns:
        The index of the selected keys `[B, G, n, C]`, and which of them count.
    """
    bucket, here, capacity = hashing.bucket(query), position.unsqueeze(2), hashing.capacity
    first = torch.searchsorted(pool.code, bucket * MAX_POSITION)
    end = end_causal = torch.searchsorted(pool.code, bucket * MAX_POSITION + here, right=True)
    low = end_causal - capacity
    if not causal:
        end = torch.searchsorted(pool.code, (bucket + 1) * MAX_POSITION)
        low = torch.minimum(end_causal - (capacity + 1) // 2, end - capacity)
    offsets = torch.maximum(first, low).unsqueeze(-1) + torch.arange(capacity, device=position.device)
    index, valid = (x.movedim(2, 3).flatten(3) for x in (pool.sorted_tokens(offsets), offsets < end.unsqueeze(-1)))
    of_keys = _take(pool.position.unsqueeze(-1), index).squeeze(-1)
    valid = valid & ((position.unsqueeze(-1) - of_keys).abs() >= window)
    again = (of_keys.unsqueeze(-1) == of_keys.unsqueeze(-2)) & valid.unsqueeze(-2)
    return index, valid & ~again.tril(-1).any(dim=-1)


def _correct(
    rows: QueryRows, base: Accumulator, matches: tuple[Tensor, Tensor], pool: _Pool, key_features: FeatureFunction
) -> Accumulator:
    """Replace estimates by exact weights: rows `[B, G, n, …]`, base sums `[B, G, n, …]`."""
    (index, valid), dtype = matches, rows.query.dtype
    key, value = _take(pool.key, index).to(dtype), with_ones(_take(pool.value, index).to(dtype))
    logit = (key @ rows.query[..., :-1].unsqueeze(-1)).squeeze(-1).masked_fill(~valid, float("-inf"))
    constant = _take(pool.constant.unsqueeze(-1), index).flatten(2)
    features = key_features(key.flatten(2, 3), 0).constant(constant)
    estimate = (features.values.view(*index.shape, -1) @ rows.features.values.unsqueeze(-1)).squeeze(-1)
    assert features.log_scale is not None
    assert rows.features.log_scale is not None
    # At most 0 where it counts: the band's scale bounds every estimate. The clamp is for the others.
    gap = (rows.features.log_scale - base.log_scale).unsqueeze(-1) + features.log_scale.view(index.shape)
    estimate = (estimate * gap.clamp(max=0.0).exp()).masked_fill(~valid, 0.0)
    top = torch.maximum(base.log_scale, logit.detach().amax(dim=-1))
    decay = torch.exp(base.log_scale - top).unsqueeze(-1)
    weights = torch.exp(logit - top.unsqueeze(-1)) - estimate * decay
    return Accumulator(base.values * decay + (weights.unsqueeze(-2) @ value).squeeze(-2), top)


def add_buckets(
    base: Accumulator, call: WindowedCall, hashing: Hashing, after: State | None
) -> tuple[Accumulator, State]:
    """Replace estimates by exact weights for the pairs that hashing selects.

    Time O(L·rounds·capacity·(m·d + e)) and a sort; gathered keys, values and features are bounded by `GATHER_ELEMENTS`.

    Args:
        base: The accumulator `[B, H, L, …]` of the band (`ops.windowed`).
        call: The call of the band; its feature maps must return a log scale, and its state that of the buckets too.
        hashing: Directions and capacity of the buckets.
        after: The state of the band after the call.

    Returns:
        The new accumulator, and the part of the state that belongs to the buckets.
    """
    mask, dtype = call.mask, compute_dtype(call.query)
    batch, heads, length, _ = call.query.shape
    refuse_free_length(length, "Attention with hash buckets")
    groups = call.key.shape[1]
    query, key, value = (mask_tokens(x, mask) for x in (call.query, call.key, call.value))
    positions, pool = make_pool(key, value, mask, hashing, call.state, call.window)
    zero_mix = torch.zeros(1, heads, 1, dtype=dtype, device=key.device)
    width = len(hashing.directions) * hashing.capacity * (key.shape[-1] + value.shape[-1] + 1)
    step = length if torch.compiler.is_compiling() else GATHER_ELEMENTS // max(batch * heads * width, 1)
    parts = [Accumulator(*(x[:, :, :0] for x in base))]
    for start in range(0, length, max(step, 1)):
        now = slice(start, min(start + max(step, 1), length))
        grouped = make_query_rows(query[:, :, now], call.query_features, start, groups, call.scaling, zero_mix)
        rows = QueryRows(grouped.query.flatten(2, 3), grouped.features.apply(lambda x: x.flatten(2, 3)))
        position = positions[:, None, None, now].expand(grouped.query.shape[:-1]).flatten(2)
        hashed = query[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3)
        matches = select_keys(pool, hashed, position, hashing, call.window, call.causal)
        part = Accumulator(*(x[:, :, now].unflatten(1, (groups, -1)).flatten(2, 3) for x in base))
        corrected = _correct(rows, part, matches, pool, call.key_features)
        parts.append(Accumulator(*(x.unflatten(2, (heads // groups, -1)).flatten(1, 2) for x in corrected)))
    return Accumulator(*(torch.cat(x, dim=2) for x in zip(*parts, strict=True))), _store(pool, hashing, after)


def _store(pool: _Pool, hashing: Hashing, band: State | None) -> State:
    """Return the state: the last `capacity` keys and values of every bucket. `band` is that of the band."""
    device, sizes = pool.key.device, pool.code.shape[:3]
    numbers = torch.arange(hashing.buckets + 1, device=device) * MAX_POSITION
    borders = torch.searchsorted(pool.code, numbers.expand(*sizes, -1).contiguous())
    offsets = borders[..., 1:].unsqueeze(-1) + torch.arange(-hashing.capacity, 0, device=device)
    empty = (offsets < borders[..., :-1].unsqueeze(-1)).unsqueeze(-1)
    index = pool.sorted_tokens(offsets)
    stored = {
        "bucket_ring_key": _take(pool.key, index).masked_fill(empty, 0.0),
        "bucket_ring_value": _take(pool.value, index).masked_fill(empty, 0.0),
        "bucket_ring_position": _take(pool.position.unsqueeze(-1), index).masked_fill(empty, -1).squeeze(-1),
    }
    if band is not None and band["kv"].requires_grad:
        stored["bucket_ring_constant"] = _take(pool.constant.unsqueeze(-1), index).squeeze(-1)
    return stored


def bucket_pairs(
    query: Tensor, key: Tensor, hashing: Hashing, *, window: int, causal: bool, mask: Tensor | None
) -> Tensor:
    """Return which pairs the buckets add to the band, `[B, H, L, S]`, for analysis. O(L·S) memory."""
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    dtype = compute_dtype(query)
    query, key = (mask_tokens(x, mask).to(dtype) for x in (query, key))
    positions, pool = make_pool(key, key, mask, hashing, None)
    position = positions[:, None, None, :].expand(batch, groups, heads // groups, length).flatten(2)
    folded = query.reshape(batch, groups, -1, query.shape[-1])
    index, valid = select_keys(pool, folded, position, hashing, window, causal)
    pairs = torch.zeros(batch, groups, folded.shape[2], length, dtype=torch.int8, device=key.device)
    return (pairs.scatter_add_(3, index, valid.to(torch.int8)) > 0).view(batch, heads, length, length)
