"""The gated delta rule: a state that is decayed and, along the new key, corrected instead of added to.

    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ      o_t = S_tᵀ q_t      ‖k_t‖ = 1, 0 < β_t <= 1

In chunks (Yang et al. 2024): with `u_t = β_t (v_t - α_t S_{t-1}ᵀ k_t)` the rule is `S_t = α_t S_{t-1} + k_t u_tᵀ`, and
for the sums G of log α within the chunk, S_0 the state before it,

    (I + A) U = β (V - exp(G) K S_0)    A_tj = β_t exp(G_t - G_j) k_t·k_j for j < t    (one triangular system)
    O = exp(G) Q S_0 + tril(Q Kᵀ ⊙ exp(G_i - G_j)) U    S_C = exp(G_C) S_0 + Σ_j exp(G_C - G_j) k_j u_jᵀ

No exponent is above 0, for any decay. Values carry a column of ones: it gives each query the total weight D of its
values. D can come near zero, or cross it, where corrections overshoot. It is guarded relative to c, the value of D if
all keys were the query, `c_t = α_t (1 - β_t) c_{t-1} + β_t`: `1/D` becomes `D / max(D², (ε c)²)`.

Shapes as in `ops.kernelized`; padding neither decays nor writes. State: `kv [B, G, m, e]`, `k_sum [B, G, m]`, and
`level [B, G]` (c).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .calls import GatedCall
from .common import (
    Features,
    KVState,
    State,
    block_length,
    group_heads,
    mask_tokens,
    refuse_free_length,
    token_blocks,
    with_ones,
)
from .gated import sums_node
from .graph_nodes import graph_node, places_nodes

#: Tokens per chunk.
CHUNK = 64

#: ε of the normaliser, as a share of c.
NORMALISER_EPS = 0.1

#: Smallest square of ε c: a query that sees no key gets zeros.
SMALLEST = 1e-30


class DeltaKeys(NamedTuple):
    """Keys of length one `[B, G, L, m]`, log α `[B, G, L]` and β `[B, G, L]`."""

    values: Tensor
    log_decay: Tensor
    rate: Tensor


def delta_causal(call: GatedCall) -> tuple[Tensor, State | None]:
    """Compute the output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token.

    `call.key_features` returns `DeltaKeys`. Time O(L·(chunk + m)·(m + e)); temporaries O(block·m).
    """
    value, groups = call.value, call.key.shape[1]
    batch, heads, length, _ = call.query.shape
    if places_nodes(None, call.query):  # of one token, too: ONNX has no triangular systems
        return _node(call)
    refuse_free_length(length, "The gated delta rule")
    step = block_length(batch, heads, max(call.num_features, value.shape[-1], CHUNK), length)
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    after = call.state
    for _, _, part, (query, key, values) in token_blocks(step, call.mask, call.query, call.key, value):
        rows = group_heads(call.query_features(query).values, groups)
        keys = DeltaKeys(*(mask_tokens(x, part) for x in call.key_features(key)))  # padding: no decay, no rate
        values = with_ones(values)
        if after is None:
            kv = values.new_zeros(batch, groups, keys.values.shape[-1], values.shape[-1])
            level = values.new_zeros(batch, groups)
        else:
            kv = KVState.from_state(after).total
            level = after["level"]
        for low in range(0, values.shape[2], CHUNK):
            size = slice(low, low + CHUNK)
            chunk = DeltaKeys(*(tensor[:, :, size] for tensor in keys))
            out, kv = _chunk(rows[:, :, :, size], chunk, values[:, :, size], kv)
            levels = _levels(chunk, level)
            level = levels[..., -1]
            outputs.append(normalise(out, levels).flatten(1, 2).to(value.dtype))
        after = {**KVState(kv, None).state(), "level": level}
    return torch.cat(outputs, dim=2), after


def _node(call: GatedCall) -> tuple[Tensor, State]:
    """Place the nodes of a call: one of its sums, and one of `c`, a state of one feature."""
    groups = call.key.shape[1]
    values = with_ones(mask_tokens(call.value, call.mask))
    rows = call.query_features(call.query).values
    keys = DeltaKeys(*(mask_tokens(x, call.mask) for x in call.key_features(mask_tokens(call.key, call.mask))))
    kv = None if call.state is None else KVState.from_state(call.state).total
    rate = keys.rate.unsqueeze(-1)
    inputs = (rows, keys.values, values, keys.log_decay.exp().unsqueeze(-1), rate, kv)
    sizes = (*rows.shape[:3], values.shape[3]), (*values.shape[:2], rows.shape[3], values.shape[3])
    totals, kv = graph_node("CausalDelta", inputs, {"groups": groups}, *sizes)
    before = None if call.state is None else KVState(call.state["level"][..., None, None], None)
    ones = torch.ones_like(rate)
    levels, after = sums_node(ones, Features(rate), ones, (keys.log_decay + remaining(keys)).unsqueeze(-1), before)
    out = normalise(group_heads(totals, groups), levels.squeeze(-1)).flatten(1, 2)
    return out, {**KVState(kv, None).state(), "level": after.total[..., 0, 0]}


def remaining(keys: DeltaKeys) -> Tensor:
    """Return `log(1 - β)` `[B, G, n]`.

    A rate of 1 would erase everything before it: a share of ε remains, as infinite logarithms would differ by NaN.
    """
    return (1 - keys.rate).clamp_min(torch.finfo(keys.rate.dtype).eps).log()


def normalise(numerator: Tensor, levels: Tensor) -> Tensor:
    """Turn `Σ w [v, 1]` `[B, G, R, n, e + 1]` into the weighted mean of v; levels c `[B, G, n]`."""
    total = numerator[..., -1:]
    floor = (NORMALISER_EPS * levels).square()[:, :, None, :, None]
    return numerator[..., :-1] * (total / torch.maximum(total.square(), floor).clamp_min(SMALLEST))


def _levels(keys: DeltaKeys, before: Tensor) -> Tensor:
    """Return `c` of each token `[B, G, n]`, continued from `before [B, G]`."""
    total = (keys.log_decay + remaining(keys)).cumsum(dim=-1)
    return (_decays(total) @ keys.rate.unsqueeze(-1)).squeeze(-1) + total.exp() * before.unsqueeze(-1)


def _decays(total: Tensor) -> Tensor:
    """Return `exp(G_i - G_j)` for j <= i and 0 above the diagonal: `[B, G, n] -> [B, G, n, n]`."""
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp(max=0.0).exp().tril()


def _chunk(rows: Tensor, keys: DeltaKeys, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk: rows `[B, G, R, n, m]`, keys and values `[B, G, n, …]`, state `[B, G, m, e + 1]`."""
    total = keys.log_decay.cumsum(dim=-1)
    decays = _decays(total)
    decay = total.exp().unsqueeze(-1)
    expected = decay * (keys.values @ state)
    target = keys.rate.unsqueeze(-1) * (value - expected)
    system = (keys.values @ keys.values.transpose(-1, -2) * decays * keys.rate.unsqueeze(-1)).tril(-1)
    writes = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    weights = (rows @ keys.values.unsqueeze(2).transpose(-1, -2)) * decays.unsqueeze(2)
    out = (rows * decay.unsqueeze(2)) @ state.unsqueeze(2) + weights @ writes.unsqueeze(2)
    remaining = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, decay[..., -1:, :] * state + (keys.values * remaining).transpose(-1, -2) @ writes
