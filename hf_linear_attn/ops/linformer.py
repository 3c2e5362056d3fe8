"""Low-rank attention: keys and values are projected along the sequence to a few slots.

Bidirectional (Linformer): `o = softmax(τ q (E K)ᵀ) (F V)` with `E, F [k, S]`. A projection is learned for `n`
positions; `resample_projection` fits it to the true length of each row, so that a short or padded sequence still meets
every slot.

Causal (blocks): a finished block of `c` tokens is compressed to `r` slots; a query sees, in one softmax, the slots of
all finished blocks and the exact tokens up to itself in its own block.
"""

import torch
from torch import Tensor

from .calls import AttentionInputs
from .common import State, compute_dtype, mask_tokens, refuse_free_length


def segment_means(slots: int, length: int) -> Tensor:
    """Return `[slots, length]`, whose row r averages the r-th of `slots` equal segments of the sequence. Rows sum to 1.

    Where a segment's border falls inside a token, the token is shared in proportion.
    """
    edges = torch.arange(slots + 1, dtype=torch.float64, device="cpu") * (length / slots)
    tokens = torch.arange(length, dtype=torch.float64, device="cpu")
    overlap = torch.minimum(edges[1:, None], tokens + 1) - torch.maximum(edges[:-1, None], tokens)
    return (overlap.clamp_min(0) * (slots / length)).float()


def token_positions(mask: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position of each token among the real ones of its row `[B | 1, S]`, and their number `[B | 1]`."""
    if mask is None:
        return torch.arange(length, device=device).unsqueeze(0), torch.full((1,), length, device=device)
    return mask.long().cumsum(dim=1) - 1, mask.sum(dim=1)


def resample_projection(projection: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """Compute columns of `projection [h, k, n]` for tokens at `positions [B, S]` of `lengths [B]`: `[B, h, k, S]`.

    Column p of a row of length l is the integral of the (piecewise constant) projection over the token's share
    `[p·n/l, (p+1)·n/l)` of the n positions. Row sums are preserved, every slot meets the sequence at any length, and
    for l = n the columns are those of `projection`.
    """
    n = projection.shape[-1]
    total = torch.nn.functional.pad(projection.cumsum(dim=-1), (1, 0))  # [h, k, n + 1]
    share = n / lengths.clamp_min(1).to(projection.dtype).unsqueeze(-1)  # [B, 1]
    positions = positions.clamp_min(0).to(projection.dtype)

    def integral(at: Tensor) -> Tensor:  # [B, S] -> [h, k, B, S]
        at = at.clamp(0, n)
        low = at.floor().clamp(max=n - 1)
        left = total[..., low.long()]
        right = total[..., low.long() + 1]
        return left + (right - left) * (at - low)

    return (integral((positions + 1) * share) - integral(positions * share)).permute(2, 0, 1, 3)


def columns(projection: Tensor, length: int, mask: Tensor | None, resample: bool) -> Tensor:
    """Fit the projection to a sequence of `length` tokens, `[B | 1, h, k, S]`, with zero columns for padding."""
    if mask is None and (length == projection.shape[-1] or not resample):
        return projection[..., :length].unsqueeze(0)
    positions, lengths = token_positions(mask, length, projection.device)
    if resample:
        fitted = resample_projection(projection, positions, lengths)
    else:
        fitted = projection[..., positions.clamp_min(0)].permute(2, 0, 1, 3)
    return fitted if mask is None else fitted.masked_fill(~mask[:, None, None, :], 0.0)


def low_rank_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Compute `softmax(τ q Kᵀ) V`: query `[B, H, L, d]`, key `[B, G, k, d]`, value `[B, G, k, e]` -> `[B, H, L, e]`."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    folded = (query * scaling).reshape(batch, groups, heads // groups * length, width)
    weights = torch.softmax(folded @ key.transpose(-1, -2), dim=-1)
    return (weights @ value).view(batch, heads, length, value.shape[-1])


def causal_blocks(inputs: AttentionInputs, project_key: Tensor, project_value: Tensor) -> tuple[Tensor, State | None]:
    """Compute block-causal compressed attention, continued from `inputs.state`, and the state if it is asked for.

    Blocks count real tokens only, so padding on either side changes nothing. The state consists of the slots of
    finished blocks `slot_key [B, G, N, d]`, `slot_value`, their number `slot_count [B]`, and the open block
    `open_key [B, G, c, d]`, `open_value`, `open_count [B]`. Time O(L·(c + L·r/c)·d), state O(L·r/c).

    project_key and project_value are `[h, r, c]` with h = G or 1; the output has the dtype of `value`.
    """
    (query, key, value), mask = inputs.tensors, inputs.mask
    dtype = compute_dtype(query)
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    block = project_key.shape[-1]
    slots = project_key.shape[1]
    refuse_free_length(length, "Block-causal low-rank attention", "Its state grows by blocks")
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    past = inputs.state if inputs.state is not None else _empty_blocks(key, value, block, dtype)
    # Of each token, counted from the open block.
    index = past["open_count"][:, None] + token_positions(mask, length, key.device)[0]
    blocks = max(-(-(length + block - 1) // block), 1)  # for at most block - 1 open tokens and the new ones
    capacity = blocks * block
    index = torch.where(mask, index, capacity)  # padding goes to one extra position, dropped below
    keys, values = (
        _scatter(past[name], mask_tokens(new.to(dtype), mask), index, capacity).unflatten(2, (blocks, block))
        for name, new in (("open_key", key), ("open_value", value))
    )
    queries = _scatter(query[:, :, :0].to(dtype), query.to(dtype) * inputs.scaling, index, capacity)
    new_slots = _compress(project_key, keys), _compress(project_value, values)

    before = past["slot_key"].shape[2]
    is_finished = torch.arange(before, device=key.device) < past["slot_count"][:, None]
    slot_keys, slot_values = (
        torch.cat([past[name], new], dim=2) for name, new in zip(("slot_key", "slot_value"), new_slots, strict=True)
    )
    future = torch.ones(block, block, dtype=torch.bool, device=key.device).triu(1)
    outputs = []
    for number in range(blocks):
        rows = queries[:, :, number * block : (number + 1) * block].reshape(batch, groups, -1, width)
        done = before + number * slots
        allowed = torch.nn.functional.pad(is_finished, (0, number * slots), value=True)[:, None, None, :]
        far = (rows @ slot_keys[:, :, :done].transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
        near = (rows @ keys[:, :, number].transpose(-1, -2)).view(batch, groups, -1, block, block)
        near = near.masked_fill(future, float("-inf")).view(batch, groups, -1, block)
        weights = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
        out = weights[..., :done] @ slot_values[:, :, :done] + weights[..., done:] @ values[:, :, number]
        outputs.append(out.view(batch, heads, block, -1))
    compact = torch.nn.functional.pad(torch.cat(outputs, dim=2), (0, 0, 0, 1))  # the extra position reads zeros
    out = compact.gather(2, index[:, None, :, None].expand(batch, heads, length, compact.shape[-1])).to(value.dtype)
    if not inputs.return_state:
        return out, None
    return out, _close_blocks(past, (keys, values), new_slots, past["open_count"] + mask.sum(dim=1))


def _empty_blocks(key: Tensor, value: Tensor, block: int, dtype: torch.dtype) -> State:
    count = torch.zeros(key.shape[0], dtype=torch.long, device=key.device)
    state = {"slot_count": count, "open_count": count}
    for name, new in (("key", key), ("value", value)):
        state[f"slot_{name}"] = new[:, :, :0].to(dtype)
        state[f"open_{name}"] = new.new_zeros(*new.shape[:2], block, new.shape[3], dtype=dtype)
    return state


def _scatter(opened: Tensor, new: Tensor, index: Tensor, capacity: int) -> Tensor:
    """Write new tokens `[B, G, L, d]` at their positions after the open block: `[B, G, capacity, d]`."""
    target = torch.nn.functional.pad(opened, (0, 0, 0, capacity + 1 - opened.shape[2]))
    return target.scatter(2, index[:, None, :, None].expand(new.shape), new)[:, :, :capacity]


def _compress(projection: Tensor, blocks: Tensor) -> Tensor:
    """Compress every block to its slots: `[h, r, c] x [B, G, n, c, d] -> [B, G, n·r, d]`."""
    return (projection.to(blocks.dtype).unsqueeze(1) @ blocks).flatten(2, 3)


def _close_blocks(
    past: State, tokens: tuple[Tensor, Tensor], new_slots: tuple[Tensor, Tensor], counts: Tensor
) -> State:
    """Move the finished blocks of each row to its slots; rows may have different numbers of tokens."""
    blocks, block = tokens[0].shape[2:4]
    slots = new_slots[0].shape[2] // blocks
    device = counts.device
    finished, opened = counts // block, counts % block
    slot_count = past["slot_count"] + finished * slots
    capacity = max(int(slot_count.max()), past["slot_key"].shape[2]) if slot_count.numel() else 0
    order = torch.arange(blocks * slots, device=device)
    target = torch.where(order < finished[:, None] * slots, past["slot_count"][:, None] + order, capacity)
    last = finished.clamp(max=blocks - 1)[:, None, None, None, None]
    inside = torch.arange(block, device=device)[None, None, :, None] < opened[:, None, None, None]
    after = {"slot_count": slot_count, "open_count": opened}
    for name, new, slot in zip(("key", "value"), tokens, new_slots, strict=True):
        last_block = new.gather(2, last.expand(-1, new.shape[1], 1, block, new.shape[-1])).squeeze(2)
        after[f"open_{name}"] = last_block.masked_fill(~inside, 0.0)
        after[f"slot_{name}"] = _scatter(past[f"slot_{name}"], slot, target, capacity)
    return after
