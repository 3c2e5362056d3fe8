"""The definitions, with explicit L x S weights: slow, plain, and independent of the fast forms.

Every function works head by head with broadcasting and no blocks, in the dtype of its inputs (tests use float64).
`allowed` is a boolean tensor that broadcasts to `[B, H, L, S]`: True where query i may see key j.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Give each of `heads` query heads its own copy of its key-value head: `[B, G, S, d] -> [B, H, S, d]`."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def visible(mask: Tensor | None, batch: int, queries: int, keys: int, causal: bool) -> Tensor:
    """`allowed [B, 1, L, S]` from a key padding mask `[B, S]`; query i is the token `S - L + i`."""
    allowed = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, None, :]
    if causal:
        allowed = allowed & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return allowed


def normalise(weights: Tensor, value: Tensor) -> Tensor:
    """`Σ_j w_ij v_j / Σ_j w_ij`, zeros where a row has no weight."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0) @ repeat_heads(
        value, weights.shape[1]
    )


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float) -> Tensor:
    """`o_i = Σ_j exp(τ q_i·k_j) v_j / Σ_j exp(τ q_i·k_j)` over the allowed keys."""
    logits = query @ repeat_heads(key, query.shape[1]).transpose(-1, -2) * scaling
    logits = logits.masked_fill(~allowed, float("-inf"))
    top = logits.amax(dim=-1, keepdim=True)
    return normalise(torch.exp(logits - torch.where(top.isinf(), 0.0, top)), value)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """`cap tanh(l / cap)`, or l itself without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def attention_with_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    scaling: float,
    *,
    sink: Tensor | None = None,
    cap: float | None = None,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """`o_i = Σ_j exp(l_ij) v_j / (exp(s) + Σ_j exp(l_ij))`, `l_ij = cap tanh(τ q_i·k_j / cap) + b_ij`."""
    heads = query.shape[1]
    logits = capped(query @ repeat_heads(key, heads).transpose(-1, -2) * scaling, cap) + bias
    weights = torch.where(allowed, logits.exp(), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0) @ repeat_heads(value, heads)


def log_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """DeBERTa's bucket of the distance i - j (He et al. 2021, arXiv:2111.09543): itself up to half of the buckets of a
    side, then `ceil` of its logarithm, so that `max_distance - 1` has the last one."""
    middle, size = buckets // 2, abs(distance)
    if size <= middle:
        return distance
    bucket = math.ceil(math.log(size / middle) / math.log((max_distance - 1) / middle) * (middle - 1)) + middle
    return bucket if distance > 0 else -bucket


def disentangled_bias(
    query: Tensor, key: Tensor, query_table: Tensor, key_table: Tensor, row: Callable[[int], int], scaling: float
) -> Tensor:
    """`τ (q_i·A[t(i - j)] + k_j·B[t(i - j)])`, `[B, H, L, L]`, one distance after the other."""
    length = query.shape[2]
    bias = query.new_zeros(*query.shape[:3], length)
    for i in range(length):
        for j in range(length):
            t = row(i - j)
            of_query = (query[:, :, i] * query_table[:, t]).sum(-1)
            bias[:, :, i, j] = scaling * (of_query + (key[:, :, j] * key_table[:, t]).sum(-1))
    return bias


def position_bucket(relative: int, *, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """T5's bucket of the distance j - i (Raffel et al. 2020, arXiv:1910.10683): one a distance up to half of the
    buckets of a side, then logarithmically wider ones up to `max_distance`, and the last one for all beyond."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact))
    return first + min(exact + steps, buckets - 1)


def kernelized_attention(query_features: Tensor, key_features: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """`o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)` over the allowed keys, from the features themselves."""
    weights = query_features @ repeat_heads(key_features, query_features.shape[1]).transpose(-1, -2)
    return normalise(weights.masked_fill(~allowed, 0.0), value)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    allowed: Tensor,
    *,
    window: int,
    causal: bool,
    scaling: float,
    log_mix: Tensor,
    relative: bool = True,
    sinks: int = 0,
    model_sink: Tensor | None = None,
    cap: float | None = None,
    bias: Tensor | float = 0.0,
    far_bias: Tensor | None = None,
) -> Tensor:
    """Exact weights inside the window, `exp(g) φ(q)·φ(k)` outside it, one normaliser.

    With `relative` (maps whose features carry no scale of their own) the exact weights are `exp(τ q·k - c_i)`, c_i the
    largest logit of the window; otherwise both are absolute estimates of `exp(τ q·k)`. Sinks are exact for all queries:
    the first tokens of each row (causal), or the first and the last, which then see all keys exactly themselves.

    The terms of a model are those of `attention_with_terms`: the weights outside are multiplied by `exp(b_ij)` (or by
    that of `far_bias`), and c_i may be the logit of the model's sink.
    """
    heads, length, keys = query.shape[1], query.shape[2], key.shape[2]
    distance = (keys - length) + torch.arange(length)[:, None] - torch.arange(keys)[None, :]
    inside = (distance.abs() < window) & ((distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool))
    inside = inside.expand(query.shape[0], 1, -1, -1).clone()
    for row in range(query.shape[0] if sinks else 0):
        tokens = allowed[row, 0].any(dim=0).nonzero()[:, 0].tolist()
        chosen = tokens[:sinks] if causal else tokens[:sinks] + tokens[-sinks:]
        inside[row, :, :, chosen] = True
        if not causal:
            inside[row, :, chosen] = True
    inside = inside & allowed
    logits = capped(query @ repeat_heads(key, heads).transpose(-1, -2) * scaling, cap) + bias
    logits = logits.masked_fill(~inside, float("-inf"))
    column = torch.full_like(logits[..., :1], float("-inf"))
    if model_sink is not None:
        column = model_sink[:, None, None].expand_as(column)
    if relative:
        top = torch.maximum(logits.amax(dim=-1, keepdim=True), column)
        top = torch.where(top.isinf(), 0.0, top)
        logits, column = logits - top, column - top
    linear = query_features @ repeat_heads(key_features, heads).transpose(-1, -2)
    linear = linear * log_mix.exp()[None, :, None, None]
    if isinstance(bias, Tensor):
        linear = linear * (bias if far_bias is None else far_bias).exp()
    weights = torch.where(inside, logits.exp(), torch.where(allowed, linear, 0.0))
    nothing = value.new_zeros(*value.shape[:2], 1, value.shape[3])
    return normalise(torch.cat([weights, column.exp()], dim=-1), torch.cat([value, nothing], dim=2))


def linformer_attention(
    query: Tensor, key: Tensor, value: Tensor, project_key: Tensor, project_value: Tensor, scaling: float
) -> Tensor:
    """`softmax(τ q (E K)ᵀ) (F V)` for one row without padding, projections `[h, k, S]` already fitted to S."""
    heads = query.shape[1]
    slots = repeat_heads(project_key @ key, heads)
    weights = torch.softmax(query @ slots.transpose(-1, -2) * scaling, dim=-1)
    return weights @ repeat_heads(project_value @ value, heads)


def linformer_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, project_key: Tensor, project_value: Tensor, scaling: float
) -> Tensor:
    """One softmax over the slots of finished blocks and the tokens `<= i` of the own block, token by token."""
    heads, length, block = query.shape[1], query.shape[2], project_key.shape[-1]
    outputs = []
    for i in range(length):
        done = i // block
        keys, values = [], []
        for number in range(done):
            part = slice(number * block, (number + 1) * block)
            keys.append(project_key @ key[:, :, part])
            values.append(project_value @ value[:, :, part])
        keys.append(key[:, :, done * block : i + 1])
        values.append(value[:, :, done * block : i + 1])
        seen, tensor = repeat_heads(torch.cat(keys, dim=2), heads), repeat_heads(torch.cat(values, dim=2), heads)
        outputs.append(torch.softmax(query[:, :, i : i + 1] @ seen.transpose(-1, -2) * scaling, dim=-1) @ tensor)
    return torch.cat(outputs, dim=2)


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """`o_i = Σ_c softmax(s q_i)_c Σ_j softmax_j(s k_jc) v_j`, the softmax over j in the keys allowed to i."""
    heads = query.shape[1]
    features = torch.softmax(query * scale, dim=-1)
    keys, values = repeat_heads(key * scale, heads), repeat_heads(value, heads)
    batch, _, length, _ = query.shape
    allowed = allowed.expand(batch, heads, length, key.shape[2])
    out = value.new_zeros(batch, heads, length, value.shape[-1])
    for i in range(length):
        shown = allowed[:, :, i].unsqueeze(-1)
        share = torch.softmax(keys.masked_fill(~shown, float("-inf")), dim=2)  # [B, H, S, d], over the sequence
        share = torch.where(shown, share, 0.0)
        weights = (share * features[:, :, i : i + 1]).sum(dim=-1)
        out[:, :, i] = (weights.unsqueeze(-1) * values).sum(dim=2)
    return out


def rfa_weights(query: Tensor, key: Tensor, rows: Tensor, sigma: Tensor) -> Tensor:
    """`(2/m) Σ_r cos((w_r ⊙ σ)·(q̂_i - k̂_j))`, r = 1 … m/2: `[B, H, L, S]`. rows `[m/2, d]`, sigma `[G, d]`."""
    heads = query.shape[1]
    unit = [x / x.square().sum(-1, keepdim=True).sqrt() for x in (query, repeat_heads(key, heads))]
    difference = unit[0].unsqueeze(3) - unit[1].unsqueeze(2)
    scaled = sigma.repeat_interleave(heads // sigma.shape[0], dim=0)[:, None, None, :] * difference
    return torch.stack([torch.cos(scaled @ row) for row in rows]).mean(0)


def gated_weights(weights: Tensor, gate: Tensor) -> Tensor:
    """`w_ij (1 - g_j) Π_{j < t <= i} g_t` for j <= i, else 0; gate `[B, G, L]`."""
    gate = repeat_heads(gate.unsqueeze(-1), weights.shape[1]).squeeze(-1)
    tensor = torch.zeros_like(weights)
    for i in range(weights.shape[2]):
        for j in range(i + 1):
            tensor[:, :, i, j] = weights[:, :, i, j] * (1 - gate[:, :, j]) * gate[:, :, j + 1 : i + 1].prod(dim=-1)
    return tensor


def gated_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor, mask: Tensor | None, guard: float
) -> Tensor:
    """`S_t = Λ_t S_{t-1} + w_t φ(k_t) v_tᵀ`, `z_t = Λ_t z_{t-1} + w_t φ(k_t)`, `o_t = S_tᵀ φ(q_t) / z_t·φ(q_t)`.

    query `[B, H, L, m]`, key `[B, G, L, m]` (features), decay `[B, G, L, m]`, write `[B, G, L]`. Where the normaliser,
    relative to the largest decayed w, is smaller than `guard`, the division is by its square over the guard's.
    """
    heads, outputs = query.shape[1], []
    key, value, decay = (repeat_heads(x, heads) for x in (key, value, decay))
    write = repeat_heads(write.unsqueeze(-1), heads)
    state, total = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3]), torch.zeros_like(query[:, :, 0])
    largest = query.new_zeros(*query.shape[:2], 1)
    for t in range(query.shape[2]):
        now = torch.ones(len(query), dtype=torch.bool) if mask is None else mask[:, t]
        decayed = torch.where(now[:, None, None], decay[:, :, t], 1.0)
        added = torch.where(now[:, None, None], write[:, :, t] * key[:, :, t], 0.0)
        state = decayed.unsqueeze(-1) * state + added.unsqueeze(-1) * value[:, :, t].nan_to_num().unsqueeze(-2)
        total = decayed * total + added
        largest = torch.maximum(largest * decayed[..., :1], torch.where(now[:, None, None], write[:, :, t], 0.0))
        normaliser = (query[:, :, t] * total).sum(-1, keepdim=True)
        seen = largest > 0
        scale = torch.where(seen, largest, 1.0)
        safe = torch.where(seen & ((normaliser / scale).abs() >= guard), normaliser, 1.0)
        inverse = 1 / safe
        if guard:
            inverse = torch.where((normaliser / scale).abs() >= guard, inverse, normaliser / (guard * scale) ** 2)
        outputs.append(torch.where(seen, (query[:, :, t].unsqueeze(-2) @ state).squeeze(-2) * inverse, 0.0))
    return torch.stack(outputs, dim=2)


def gated_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, mask: Tensor | None, guard: float
) -> Tensor:
    """`S_t = α_t S_{t-1} - β_t k_t (α_t k_tᵀ S_{t-1}) + β_t k_t [v_t, 1]ᵀ`, `[n, D] = S_tᵀ q_t`, output `n / D`.

    query `[B, H, L, m]`, key `[B, G, L, m]` (features of length one), decay α and rate β `[B, G, L]`. Where |D| is
    smaller than `guard` times `c_t = α_t (1 - β_t) c_{t-1} + β_t`, the output is `n D / (guard c_t)²`.
    """
    heads, outputs = query.shape[1], []
    value = torch.cat([value.nan_to_num(), torch.ones_like(value[..., :1])], dim=-1)
    key, value, decay, rate = (repeat_heads(x, heads) for x in (key, value, decay.unsqueeze(-1), rate.unsqueeze(-1)))
    state = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3])
    level = query.new_zeros(*query.shape[:2], 1)
    for t in range(query.shape[2]):
        k, beta = key[:, :, t].unsqueeze(-1), rate[:, :, t].unsqueeze(-1)
        now = torch.ones(len(query), dtype=torch.bool) if mask is None else mask[:, t]
        decayed = decay[:, :, t].unsqueeze(-1) * state
        new = decayed - beta * k @ (k.transpose(-1, -2) @ decayed) + beta * k @ value[:, :, t].unsqueeze(-2)
        state = torch.where(now[:, None, None, None], new, state)
        filled = decay[:, :, t] * (1 - rate[:, :, t]) * level + rate[:, :, t]
        level = torch.where(now[:, None, None], filled, level)
        totals = (query[:, :, t].unsqueeze(-2) @ state).squeeze(-2)
        total, floor = totals[..., -1:], guard * level
        near = (total.abs() < floor) | (level == 0)
        inverse = torch.where(near, total / torch.where(level > 0, floor, 1.0) ** 2, 1 / torch.where(near, 1.0, total))
        outputs.append(torch.where(level > 0, totals[..., :-1] * inverse, 0.0))
    return torch.stack(outputs, dim=2)


def luna_attention(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, scaling: float) -> Tensor:
    """`softmax(τ Q K̃ᵀ) Ṽ` with `K̃ = softmax(τ P Kᵀ) K`, `Ṽ = softmax(τ P Kᵀ) V`; packed `[G, l, d]`, no padding."""
    heads = query.shape[1]
    packing = torch.softmax(scaling * torch.einsum("gld,bgsd->bgls", packed, key), dim=-1)
    slots, tensor = repeat_heads(packing @ key, heads), repeat_heads(packing @ value, heads)
    return torch.softmax(scaling * query @ slots.transpose(-1, -2), dim=-1) @ tensor


def luna_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Tensor,
    activation: Callable[[Tensor], Tensor],
    scaling: float,
    query_scale: float,
) -> Tensor:
    """`u_i = softmax((1/i) Σ_{j<=i} (s q_i·k_j) a_j)`, `o_i = (1/i) Σ_{j<=i} (u_i·a_j) v_j`, token by token."""
    heads = query.shape[1]
    features = repeat_heads(activation(scaling * torch.einsum("bgsd,gld->bgsl", key, packed)), heads)
    keys, values = repeat_heads(key, heads), repeat_heads(value, heads)
    outputs = [value.new_zeros(query.shape[0], heads, 0, value.shape[-1])]
    for i in range(query.shape[2]):
        seen = slice(0, i + 1)
        products = query_scale * (query[:, :, i : i + 1] * keys[:, :, seen]).sum(dim=-1, keepdim=True)
        mixture = torch.softmax((products * features[:, :, seen]).sum(dim=2) / (i + 1), dim=-1)
        weights = (mixture.unsqueeze(2) * features[:, :, seen]).sum(dim=-1, keepdim=True) / (i + 1)
        outputs.append((weights * values[:, :, seen]).sum(dim=2, keepdim=True))
    return torch.cat(outputs, dim=2)


def segment_mean(tokens: Tensor, segments: int) -> Tensor:
    """Means of equal segments `[B, H, S, d] -> [B, H, segments, d]`, by way of `segments` copies of every token."""
    length = tokens.shape[2]
    copies = tokens.repeat_interleave(segments, dim=2)
    return torch.stack([copies[:, :, r * length : (r + 1) * length].mean(dim=2) for r in range(segments)], dim=2)


def newton_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """`Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z)))/4` from `Aᵀ/(‖A‖₁ ‖A‖_∞)`, for one matrix `[m, m]`."""
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, float("inf")))
    for _ in range(iterations):
        az = matrix @ z
        z = 0.25 * z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az)))
    return z


def nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, iterations: int, scaling: float
) -> Tensor:
    """`softmax(τ Q K̃ᵀ) softmax(τ Q̃ K̃ᵀ)⁺ softmax(τ Q̃ Kᵀ) V`; exact attention for at most `landmarks` tokens."""
    heads = query.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    if query.shape[2] <= landmarks:
        return torch.softmax(scaling * query @ key.transpose(-1, -2), dim=-1) @ value
    query_means, key_means = segment_mean(query, landmarks), segment_mean(key, landmarks)
    left = torch.softmax(scaling * query @ key_means.transpose(-1, -2), dim=-1)
    core = torch.softmax(scaling * query_means @ key_means.transpose(-1, -2), dim=-1)
    right = torch.softmax(scaling * query_means @ key.transpose(-1, -2), dim=-1)
    inverses = torch.stack([torch.stack([newton_pinv(matrix, iterations) for matrix in row]) for row in core])
    return left @ inverses @ right @ value


def scatterbrain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_features: Tensor,
    key_features: Tensor,
    allowed: Tensor,
    support: Tensor,
    scaling: float,
) -> Tensor:
    """`w_ij = exp(τ q_i·k_j)` in Ω, `φ(q_i)·φ(k_j)` elsewhere, divided by their sum. Features with their scale."""
    heads = query.shape[1]
    exact = torch.exp(query @ repeat_heads(key, heads).transpose(-1, -2) * scaling)
    estimate = query_features @ repeat_heads(key_features, heads).transpose(-1, -2)
    return normalise(torch.where(support, exact, estimate).masked_fill(~allowed, 0.0), value)
