"""Efficient attention: queries normalised over the features, keys normalised per feature over the sequence.

    w_ij = Σ_c a_ic exp(k_jc) / Σ_{j' visible to i} exp(k_j'c)      a_i = softmax(q_i)

Every feature has a normaliser of its own, which in the causal form grows from token to token. q and k are multiplied by
`scale` first. All sums are float32 (float64 for float64 inputs).

Shapes are those of `AttentionInputs`, with `H = G·R` query heads for G key-value heads.

The state holds, with c the running maximum of each feature over the keys so far:
    `kv`        `[B, G, d, e]`   Σ_j exp(k_j - c) v_jᵀ
    `k_sum`     `[B, G, d]`      Σ_j exp(k_j - c)
    `log_scale` `[B, G, d]`      c; `-inf` before the first key
"""

import torch
from torch import Tensor

from .calls import AttentionInputs
from .common import (
    DENOMINATOR_EPS,
    KVState,
    State,
    block_length,
    compute_dtype,
    finite_or_zero,
    group_heads,
    mask_tokens,
    refuse_free_length,
    split_chunks,
    token_blocks,
    weighted_mean,
    with_ones,
)
from .graph_nodes import graph_node, places_nodes

#: Tokens per chunk of the causal form, and per piece of a chunk: inside a piece the factors `exp(k_jc - c_ic)` are
#: explicit for every pair of tokens and feature, because the maximum of a chunk would depend on later tokens.
CHUNK = 128
PIECE = 8

#: Largest number of elements of the explicit weights' temporaries.
DENSE_ELEMENTS = 1 << 22


def _no_keys(key: Tensor, value: Tensor) -> KVState:
    """Return the sums over no key: `[B, G, d, e + 1]`, here with a log scale `[B, G, d]` for every feature."""
    batch, groups, _, width = key.shape
    total = value.new_zeros(batch, groups, width, value.shape[-1] + 1, dtype=compute_dtype(value))
    return KVState(total, torch.full_like(total[..., 0], float("-inf")))


def bidirectional(inputs: AttentionInputs, scale: float) -> Tensor:
    """Compute the bidirectional form, in the dtype of `value`. Time O((L + S)·d·e); temporaries O(block·d)."""
    query, key, value = inputs.tensors
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    keys = key.shape[2]
    size = max(width, value.shape[-1])
    total, top = _no_keys(key, value)
    assert top is not None
    for _, _, part, (logits, values) in token_blocks(block_length(batch, groups, size, keys), inputs.mask, key, value):
        logits = mask_tokens(logits * scale, part, float("-inf"))
        before = top
        top = torch.maximum(logits.detach().amax(dim=2), before)  # cancels in the table, so that it has no gradient
        base = finite_or_zero(top)
        weights = torch.exp(logits - base.unsqueeze(2)).transpose(-1, -2)
        total = total * torch.exp(before - base).unsqueeze(-1) + weights @ with_ones(values)
    table = weighted_mean(total)
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for _, _, _, (rows,) in token_blocks(block_length(batch, heads, size, length), None, query):
        folded = torch.softmax(rows * scale, dim=-1).reshape(batch, groups, -1, width)
        outputs.append((folded @ table).view(batch, heads, rows.shape[2], -1).to(value.dtype))
    return torch.cat(outputs, dim=2)


def causal(inputs: AttentionInputs, scale: float) -> tuple[Tensor, State]:
    """Compute the same with sums over `j <= i`, continued from `inputs.state`, and the state after the last token.

    Time O(L·d·(PIECE + e)); temporaries O(CHUNK·PIECE·d + CHUNK/PIECE·d·e) per head. One token: O(d·e).
    """
    query, key, value = inputs.tensors
    batch, heads, length, _ = query.shape
    if places_nodes(None, query):  # of one token, too: ONNX has no running maximum
        rows = torch.softmax(query * scale, dim=-1)
        logits = mask_tokens(key * scale, inputs.mask, float("-inf"))
        values = with_ones(mask_tokens(value, inputs.mask))
        before = (None, None) if inputs.state is None else KVState.from_state(inputs.state)
        head_sizes = (*key.shape[:2], key.shape[3])
        shapes = ((*query.shape[:3], value.shape[3]), (*head_sizes, values.shape[3]), head_sizes)
        node_inputs = (rows, logits, values, *before)
        out, total, top = graph_node("CausalEfficient", node_inputs, {"groups": key.shape[1]}, *shapes)
        return out, KVState(total, top).state()
    refuse_free_length(length, "Causal efficient attention")
    state = _no_keys(key, value) if inputs.state is None else KVState.from_state(inputs.state)
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for start, stop, part, (keys, values) in token_blocks(CHUNK, inputs.mask, key, value):
        features = torch.softmax(query[:, :, start:stop].to(keys.dtype) * scale, dim=-1)
        logits = mask_tokens(keys * scale, part, float("-inf"))
        out, state = _causal_chunk(group_heads(features, key.shape[1]), logits, with_ones(values), state)
        outputs.append(out.flatten(1, 2).to(value.dtype))
    return torch.cat(outputs, dim=2), state.state()


def _causal_chunk(features: Tensor, logits: Tensor, value: Tensor, before: KVState) -> tuple[Tensor, KVState]:
    """Compute one chunk of n tokens: features `[B, G, R, n, d]`, logits `[B, G, n, d]`, `[v, 1]` `[B, G, n, e + 1]`.

    Row i is relative to its own running maximum c_i. Keys of its piece enter with the explicit `exp(k_j - c_i)`, older
    ones with the sums up to the end of the piece before, relative to the maximum there: both factors are at most 1.
    """
    length = logits.shape[2]
    logits = split_chunks(logits, PIECE, float("-inf"))
    value = split_chunks(value, PIECE)
    features = split_chunks(features, PIECE)
    assert before.log_scale is not None
    running = logits.detach().flatten(2, 3).cummax(dim=2).values
    running = torch.maximum(running, before.log_scale.unsqueeze(2)).unflatten(2, logits.shape[2:4])
    rows = finite_or_zero(running)
    states, tops = _piece_state(logits, value, running[:, :, :, -1], before)

    order = torch.arange(logits.shape[3], device=logits.device)
    later = (order > order.unsqueeze(-1)).unsqueeze(-1)  # [t, s, 1]
    inside = (logits.unsqueeze(3) - rows.unsqueeze(4)).masked_fill(later, float("-inf")).exp()  # [B, G, N, t, s, d]
    past = torch.exp(tops[:, :, :-1, None] - rows)  # [B, G, N, t, d]
    total = inside.sum(dim=4) + past * states[:, :, :-1, None, :, -1]
    shares = features / total.clamp_min(DENOMINATOR_EPS).unsqueeze(2)  # [B, G, R, N, t, d]
    weights = torch.einsum("bgrntd,bgntsd->bgrnts", shares, inside)
    out = weights @ value[..., :-1].unsqueeze(2) + (shares * past.unsqueeze(2)) @ states[:, :, None, :-1, :, :-1]
    # A view would retain the sums of all pieces.
    return out.flatten(3, 4)[:, :, :, :length], KVState(states[:, :, -1].clone(), tops[:, :, -1].clone())


def _piece_state(logits: Tensor, value: Tensor, ends: Tensor, before: KVState) -> tuple[Tensor, Tensor]:
    """Compute the sums before each of N pieces and after the last: `[B, G, N + 1, d, e + 1]`.

    logits `[B, G, N, t, d]`, value `[B, G, N, t, e + 1]`, ends `[B, G, N, d]` (the maximum up to each piece's end). The
    second result are the maxima `[B, G, N + 1, d]` that the sums are relative to.
    """
    assert before.log_scale is not None
    weights = torch.exp(logits - finite_or_zero(ends).unsqueeze(3))
    states = torch.cat([before.total.unsqueeze(2), weights.transpose(-1, -2) @ value], dim=2)
    tops = torch.cat([before.log_scale.unsqueeze(2), ends], dim=2)
    order = torch.arange(tops.shape[2], device=tops.device)
    later = (order > order.unsqueeze(-1)).unsqueeze(-1)  # [p, s, 1]
    gap = tops.unsqueeze(2) - finite_or_zero(tops).unsqueeze(3)  # [B, G, p, s, d]
    return torch.einsum("bgpsd,bgsde->bgpde", gap.masked_fill(later, float("-inf")).exp(), states), tops


def dense_weights(inputs: AttentionInputs, scale: float) -> Tensor:
    """Compute explicit weights `[B, H, L, S]`, for analysis. O(L·S·d) time."""
    query = inputs.query
    key = inputs.key
    allowed = inputs.visible()
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
