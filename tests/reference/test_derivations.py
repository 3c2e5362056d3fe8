"""Independent derivations of definitions whose formula in the paper has another form than `naive`, in NumPy.

`naive` runs recurrences and evaluates kernels directly. Here states are written out as sums over all earlier tokens,
kernels of random features follow from other identities (completing the square, sums of angles), and segments from
their borders: a mistake in a definition would not be repeated here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.inputs import padding_mask
from tests.reference import naive, naive_feature_maps

B, H, G, L, D, E, M = 2, 4, 2, 7, 3, 2, 5
SCALING = 0.4
#: Both are float64, and add in another order.
LIMIT = 1e-10


def each_head(query, key):
    """Row, query head, key-value head."""
    repeats = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            yield b, h, h // repeats


def pairs(query, key, entry):
    """`[B, H, L, S]` of `entry(q_i, k_j, h, g, i, j)`."""
    out = np.zeros((*query.shape[:3], key.shape[2]))
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            for j in range(key.shape[2]):
                out[b, h, i, j] = entry(query[b, h, i], key[b, g, j], h, g, i, j)
    return out


def normalise(weights, value):
    out = np.zeros((*weights.shape[:3], value.shape[-1]))
    for b, h, g in each_head(weights, value):
        for i, row in enumerate(weights[b, h]):
            total = math.fsum(row)
            if total > 0:
                out[b, h, i] = sum(w * v for w, v in zip(row, value[b, g], strict=True)) / total
    return out


def favor_weights(query, key, allowed, rows, scaling, phase=None):
    """By angles' sums: cos(a - b) = cos a cos b + sin a sin b."""
    seen = np.broadcast_to(allowed, (*query.shape[:3], key.shape[2]))
    root, repeats = math.sqrt(scaling), query.shape[1] // key.shape[1]

    def entry(q, k, h, g, i, j):
        a, b = root * rows @ q, root * rows @ k
        if phase is None:
            return np.mean(np.cos(a) * np.cos(b) + np.sin(a) * np.sin(b))
        return np.mean(np.cos(a - b) + np.cos(a + b + 2 * phase))

    out = pairs(query, key, entry)
    sizes = scaling * np.sum(key**2, axis=-1) / 2
    for b, h, i in np.ndindex(*query.shape[:3]):
        scale = np.where(seen[b, h, i], sizes[b, h // repeats], -np.inf)
        top = scale.max(initial=-np.inf)
        out[b, h, i] *= np.exp(scale - (top if np.isfinite(top) else 0.0))
    return out


def favor_plus_weights(query, key, rows, scaling, hyperbolic=False):
    """By completing the square: `e^{w·s - (‖q‖² + ‖k‖²)/2} = e^{q·k} e^{w·s - ‖s‖²/2}` with `s = q + k`."""

    def entry(q, k, *_):
        q, k = math.sqrt(scaling) * q, math.sqrt(scaling) * k
        s = q + k
        f = np.cosh if hyperbolic else np.exp
        return math.exp(q @ k - s @ s / 2) * np.mean(f(rows @ s))

    return pairs(query, key, entry)


def gated_attention(query, key, value, decay, write, mask, guard):
    """As one sum: token j counts `w_j Σ_c φ(q_t)_c φ(k_j)_c Π_{j < u <= t} λ_uc` at t; padding is left out."""
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        for t in range(query.shape[2]):
            js = [j for j in range(t + 1) if mask is None or mask[b, j]]
            weights, scales = [], []
            for j in js:
                decayed = np.ones(query.shape[3])
                for u in js:
                    decayed = decayed * decay[b, g, u] if u > j else decayed
                weights.append(write[b, g, j] * float(np.sum(query[b, h, t] * key[b, g, j] * decayed)))
                scales.append(write[b, g, j] * decayed[0])
            if js and max(scales) > 0:
                total = math.fsum(weights)
                floor = guard * max(scales)
                inverse = 1 / total if abs(total) >= floor else total / floor**2
                out[b, h, t] = inverse * sum(w * value[b, g, j] for w, j in zip(weights, js, strict=True))
    return out


def gated_delta_attention(query, key, value, decay, rate, mask, guard):
    """As one sum of products of matrices: what j has written, times `α_u (I - β_u k_u k_uᵀ)` of every later u."""
    size = query.shape[3]
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        for t in range(query.shape[2]):
            js = [j for j in range(t + 1) if mask is None or mask[b, j]]
            numerator, total, level = np.zeros(value.shape[-1]), 0.0, 0.0
            for j in js:
                through, left = np.eye(size), 1.0
                for u in js:
                    if u > j:
                        k = key[b, g, u]
                        through = decay[b, g, u] * (np.eye(size) - rate[b, g, u] * np.outer(k, k)) @ through
                        left *= decay[b, g, u] * (1 - rate[b, g, u])
                weight = rate[b, g, j] * float(query[b, h, t] @ through @ key[b, g, j])
                numerator = numerator + weight * value[b, g, j]
                total, level = total + weight, level + rate[b, g, j] * left
            if level > 0:
                near = abs(total) < guard * level
                out[b, h, t] = numerator * (total / (guard * level) ** 2 if near else 1 / total)
    return out


def segment_mean(tokens, segments):
    """Segment r covers the tokens' axis from rS/m to (r + 1)S/m; a token counts by the part of it that lies there."""
    length = tokens.shape[2]
    out = np.zeros((*tokens.shape[:2], segments, tokens.shape[3]))
    for r in range(segments):
        low, high = r * length / segments, (r + 1) * length / segments
        for t in range(length):
            share = max(0.0, min(high, t + 1) - max(low, t))
            out[:, :, r] += tokens[:, :, t] * share * segments / length
    return out


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(tensor: Tensor) -> Tensor:
    return tensor / tensor.norm(dim=-1, keepdim=True)


Q, K, V = normal(B, H, L, D), normal(B, G, L, D, seed=1), normal(B, G, L, E, seed=2)
PHI_Q, PHI_K = uniform(B, H, L, M), uniform(B, G, L, M, seed=1)
SIGNED_Q, SIGNED_K = normal(B, H, L, M, seed=10), normal(B, G, L, M, seed=11)
MASK = padding_mask([L, 4], L, "left")
PADDED, BOTH = naive.visible(MASK, B, L, L, True), naive.visible(MASK, B, L, L, False)
NOTHING = PADDED.clone()
NOTHING[0, :, 3] = False
ROWS = normal(M, D, seed=4)
DECAY, WRITE, RATE = 0.5 + uniform(B, G, L, M) / 2, uniform(B, G, L, seed=8), 0.1 + 0.8 * uniform(B, G, L, seed=9)
GATE = 0.5 + uniform(B, G, L, seed=12) / 2

#: Function, arguments, options.
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("favor_weights", (Q, K, PADDED, ROWS, SCALING), {}),
    ("favor_weights", (Q, K, NOTHING, ROWS, SCALING, normal(M, seed=17)), {}),
    ("favor_plus_weights", (Q, K, ROWS, SCALING), {}),
    ("favor_plus_weights", (Q, K, ROWS, SCALING, True), {}),
    ("gated_attention", (PHI_Q, PHI_K, V, DECAY, WRITE, None, 0.0), {}),
    ("gated_attention", (PHI_Q, PHI_K, V, DECAY, WRITE, MASK, 0.0), {}),
    ("gated_attention", (SIGNED_Q, SIGNED_K, V, DECAY[..., :1].expand(-1, -1, -1, M), WRITE, MASK, 0.3), {}),
    ("gated_delta_attention", (unit(PHI_Q), unit(PHI_K), V, GATE, RATE, None, 0.01), {}),
    ("gated_delta_attention", (unit(SIGNED_Q), unit(SIGNED_K), V, GATE, RATE, MASK, 0.3), {}),
    ("segment_mean", (K, 3), {}),
    ("segment_mean", (K, L), {}),
]


def as_arrays(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)])
def test_a_definition_equals_its_derivation(case):
    name, arguments, options = case
    expected = np.asarray(globals()[name](*map(as_arrays, arguments), **options))
    definition = getattr(naive, name, None) or getattr(naive_feature_maps, name)
    actual = np.asarray(definition(*arguments, **options))
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(float) - expected.astype(float)).max() <= LIMIT * max(1.0, np.abs(expected).max())
    assert np.abs(expected.astype(float)).max() > 0, "a case that is zero everywhere shows nothing"


def test_newton_steps_end_at_the_pseudo_inverse_of_numpy():
    matrix = uniform(4, 4) + torch.eye(4, dtype=torch.float64)
    assert np.allclose(naive.newton_pinv(matrix, 12), np.linalg.pinv(matrix.numpy()), rtol=0, atol=1e-9)


def test_softmax_attention_equals_that_of_torch():
    expected = torch.nn.functional.scaled_dot_product_attention(
        Q, K, V, attn_mask=PADDED & MASK[:, None, :, None], scale=SCALING, enable_gqa=True
    )
    real = MASK[:, None].expand(-1, H, -1)
    actual = naive.softmax_attention(Q, K, V, PADDED, SCALING)
    assert float((actual - expected)[real].abs().max()) < LIMIT


def test_a_window_over_everything_is_softmax_attention():
    settings = {"window": L, "causal": True, "scaling": SCALING, "log_mix": normal(H, seed=5)}
    actual = naive.windowed_attention(Q, K, V, PHI_Q, PHI_K, PADDED, **settings)
    assert float((actual - naive.softmax_attention(Q, K, V, PADDED, SCALING)).abs().max()) < LIMIT


def test_a_window_of_nothing_but_the_token_weighs_all_others_by_their_features():
    settings = {"window": 1, "causal": False, "scaling": SCALING, "log_mix": normal(H, seed=5)}
    actual = naive.windowed_attention(Q, K, V, PHI_Q, PHI_K, BOTH, **settings)
    weights = pairs(PHI_Q.numpy(), PHI_K.numpy(), lambda q, k, h, g, i, j: q @ k * math.exp(settings["log_mix"][h]))
    eye = np.eye(L, dtype=bool)
    expected = normalise(np.where(eye, 1.0, weights) * BOTH.numpy(), V.numpy())
    assert np.abs(actual.numpy() - expected).max() < LIMIT
