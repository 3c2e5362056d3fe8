"""Efficient attention: queries normalised over the features, keys normalised per feature over the sequence.

    w_ij = Σ_c a_ic exp(k_jc) / Σ_{j' visible to i} exp(k_j'c)      a_i = softmax(q_i)

Every feature has a normaliser of its own, which in the causal form grows from token to token. q and k are multiplied by
`scale` first. All sums are float32 (float64 for float64 inputs).

Shapes: query `[B, H, L, d]`, key `[B, G, S, d]`, value `[B, G, S, e]` with `H = G·R` query heads for G key-value heads;
a mask `[B, S]` is True for tokens.

The state holds, with c the running maximum of each feature over the keys so far:
    `kv`        `[B, G, d, e]`   Σ_j exp(k_j - c) v_jᵀ
    `k_sum`     `[B, G, d]`      Σ_j exp(k_j - c)
    `log_scale` `[B, G, d]`      c; `-inf` before the first key
"""

import torch
from torch import Tensor
from torch.nn import functional

from .common import (
    DENOMINATOR_EPS,
    State,
    block_length,
    compute_dtype,
    finite_or_zero,
    group_heads,
    mask_tokens,
    refuse_free_length,
    token_blocks,
)

#: Tokens per chunk of the causal form, and per piece of a chunk: inside a piece the factors `exp(k_jc - c_ic)` are
#: explicit for every pair of tokens and feature, because the maximum of a chunk would depend on later tokens.
CHUNK = 128
PIECE = 8

#: Largest number of elements of the explicit weights' temporaries.
DENSE_ELEMENTS = 1 << 22


def _no_keys(batch: int, groups: int, width: int, value: Tensor) -> State:
    dtype = compute_dtype(value)
    return {
        "kv": value.new_zeros(batch, groups, width, value.shape[-1], dtype=dtype),
        "k_sum": value.new_zeros(batch, groups, width, dtype=dtype),
        "log_scale": value.new_full((batch, groups, width), float("-inf"), dtype=dtype),
    }


def _add_keys(state: State, logits: Tensor, value: Tensor) -> State:
    """Add keys `[B, G, l, d]` (masked: `-inf`) and values `[B, G, l, e]` (masked: 0) to the state.

    The ratio of the sums does not depend on c, so no gradient flows through it.
    """
    top = torch.maximum(logits.detach().amax(dim=2), state["log_scale"])
    base = finite_or_zero(top)
    weights = torch.exp(logits - base.unsqueeze(2))
    decay = torch.exp(state["log_scale"] - base)
    return {
        "kv": state["kv"] * decay.unsqueeze(-1) + weights.transpose(-1, -2) @ value,
        "k_sum": state["k_sum"] * decay + weights.sum(dim=2),
        "log_scale": top,
    }


def bidirectional(query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """Compute the bidirectional form. Time O((L + S)·d·e); temporaries O(block·d).

    Returns:
        The output `[B, H, L, e]` in the dtype of `value`.
    """
    batch, heads, length, width = query.shape
    groups, keys, size = key.shape[1], key.shape[2], max(width, value.shape[-1])
    state = _no_keys(batch, groups, width, value)
    for _, _, part, (logits, values) in token_blocks(block_length(batch, groups, size, keys), mask, key, value):
        state = _add_keys(state, mask_tokens(logits * scale, part, float("-inf")), values)
    table = state["kv"] / state["k_sum"].clamp_min(DENOMINATOR_EPS).unsqueeze(-1)
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for _, _, _, (rows,) in token_blocks(block_length(batch, heads, size, length), None, query):
        folded = torch.softmax(rows * scale, dim=-1).reshape(batch, groups, -1, width)
        outputs.append((folded @ table).view(batch, heads, rows.shape[2], -1).to(value.dtype))
    return torch.cat(outputs, dim=2)


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """Compute the same with sums over `j <= i`, continued from `state`.

    Time O(L·d·(PIECE + e)); temporaries O(CHUNK·PIECE·d + CHUNK/PIECE·d·e) per head. One token: O(d·e).

    Returns:
        The output `[B, H, L, e]` in the dtype of `value`, and the state after the last token.
    """
    batch, heads, length, width = query.shape
    refuse_free_length(length, "Causal efficient attention")
    groups = key.shape[1]
    state = _no_keys(batch, groups, width, value) if state is None else state
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for start, stop, part, (keys, values) in token_blocks(CHUNK, mask, key, value):
        features = torch.softmax(query[:, :, start:stop].to(keys.dtype) * scale, dim=-1)
        logits = mask_tokens(keys * scale, part, float("-inf"))
        out, state = _causal_chunk(group_heads(features, groups), logits, values, state)
        outputs.append(out.flatten(1, 2).to(value.dtype))
    return torch.cat(outputs, dim=2), state


def _causal_chunk(features: Tensor, logits: Tensor, value: Tensor, state: State) -> tuple[Tensor, State]:
    """One chunk of n tokens: features `[B, G, R, n, d]`, logits `[B, G, n, d]`, value `[B, G, n, e]`.

    Row i is relative to its own running maximum c_i. Keys of its piece enter with the explicit `exp(k_j - c_i)`, older
    ones with the sums up to the end of the piece before, relative to the maximum there: both factors are at most 1.
    """
    length = logits.shape[2]
    size = min(PIECE, length)
    count = -(-length // size)
    padding = count * size - length
    logits = functional.pad(logits, (0, 0, 0, padding), value=float("-inf")).unflatten(2, (count, size))
    value = functional.pad(value, (0, 0, 0, padding)).unflatten(2, (count, size))
    features = functional.pad(features, (0, 0, 0, padding)).unflatten(3, (count, size))

    carried = state["log_scale"].unsqueeze(2)  # [B, G, 1, d]
    running = logits.detach().flatten(2, 3).cummax(dim=2).values
    running = torch.maximum(running, carried).unflatten(2, (count, size))
    rows = finite_or_zero(running)
    prefix, tops = _piece_states(logits, value, running[:, :, :, -1], state)

    order = torch.arange(size, device=logits.device)
    later = (order > order.unsqueeze(-1)).unsqueeze(-1)  # [t, s, 1]
    inside = (logits.unsqueeze(3) - rows.unsqueeze(4)).masked_fill(later, float("-inf")).exp()  # [B, G, N, t, s, d]
    past = torch.exp(tops[:, :, :-1, None] - rows)  # [B, G, N, t, d]
    total = inside.sum(dim=4) + past * prefix["k_sum"][:, :, :-1, None]
    shares = features / total.clamp_min(DENOMINATOR_EPS).unsqueeze(2)  # [B, G, R, N, t, d]
    weights = torch.einsum("bgrntd,bgntsd->bgrnts", shares, inside)
    out = weights @ value.unsqueeze(2) + (shares * past.unsqueeze(2)) @ prefix["kv"][:, :, None, :-1]
    last = {"kv": prefix["kv"][:, :, -1], "k_sum": prefix["k_sum"][:, :, -1], "log_scale": tops[:, :, -1]}
    after = {name: tensor.clone() for name, tensor in last.items()}  # a view would retain the states of all pieces
    return out.flatten(3, 4)[:, :, :, :length], after


def _piece_states(logits: Tensor, value: Tensor, ends: Tensor, state: State) -> tuple[State, Tensor]:
    """Compute the states after each of N pieces, continued from `state`.

    logits `[B, G, N, t, d]`, value `[B, G, N, t, e]`, ends `[B, G, N, d]` (the maximum up to each piece's end) ->
    `kv [B, G, N + 1, d, e]`, `k_sum [B, G, N + 1, d]` and the maxima `[B, G, N + 1, d]` that they are relative to.
    """
    weights = torch.exp(logits - finite_or_zero(ends).unsqueeze(3))
    key_value = torch.cat([state["kv"].unsqueeze(2), weights.transpose(-1, -2) @ value], dim=2)
    key_sum = torch.cat([state["k_sum"].unsqueeze(2), weights.sum(dim=3)], dim=2)
    tops = torch.cat([state["log_scale"].unsqueeze(2), ends], dim=2)
    order = torch.arange(tops.shape[2], device=tops.device)
    later = (order > order.unsqueeze(-1)).unsqueeze(-1)  # [p, s, 1]
    gap = tops.unsqueeze(2) - finite_or_zero(tops).unsqueeze(3)  # [B, G, p, s, d]
    decay = gap.masked_fill(later, float("-inf")).exp()
    return {
        "kv": torch.einsum("bgpsd,bgsde->bgpde", decay, key_value),
        "k_sum": torch.einsum("bgpsd,bgsd->bgpd", decay, key_sum),
    }, tops


def dense_weights(query: Tensor, key: Tensor, allowed: Tensor, *, scale: float) -> Tensor:
    """Compute explicit weights `[B, H, L, S]`, for analysis; allowed `[B | 1, H | 1, L, S]`. O(L·S·d) time."""
    dtype = compute_dtype(query)
    batch, heads, length, width = query.shape
    keys = key.shape[2]
    features = torch.softmax(query.to(dtype) * scale, dim=-1)
    logits = (key.to(dtype) * scale).repeat_interleave(heads // key.shape[1], dim=1).unsqueeze(2)
    step = max(DENSE_ELEMENTS // max(batch * heads * keys * width, 1), 1)
    blocks = [features.new_zeros(batch, heads, 0, keys)]
    for start in range(0, length, step):
        rows = slice(start, start + step)
        visible = logits.masked_fill(~allowed[:, :, rows].unsqueeze(-1), float("-inf"))  # [B, H, r, S, d]
        if keys:
            visible = (visible - finite_or_zero(visible.detach().amax(dim=3, keepdim=True))).exp()
        shares = features[:, :, rows] / visible.sum(dim=3).clamp_min(DENOMINATOR_EPS)
        blocks.append((visible @ shares.unsqueeze(-1)).squeeze(-1))
    return torch.cat(blocks, dim=2)
