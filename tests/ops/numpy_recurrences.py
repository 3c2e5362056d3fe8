"""The definitions of gated states, Luna, Nyström and Scatterbrain in NumPy: see `numpy_definitions.py`."""

from __future__ import annotations

import math

import numpy as np

from tests.ops.numpy_definitions import each_head, normalise, pairs

Array = np.ndarray


def gated_attention(query, key, value, decay, write, mask, guard):
    """As one sum: token j counts `w_j Σ_c φ(q_t)_c φ(k_j)_c Π_{j < u <= t} λ_uc` at t; padding is left out."""
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        for t in range(query.shape[2]):
            js = [j for j in range(t + 1) if mask is None or mask[b, j]]
            weights, scales = [], []
            for j in js:
                kept = np.ones(query.shape[3])
                for u in js:
                    kept = kept * decay[b, g, u] if u > j else kept
                weights.append(write[b, g, j] * float(np.sum(query[b, h, t] * key[b, g, j] * kept)))
                scales.append(write[b, g, j] * kept[0])
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


def _softmax_rows(logits: Array) -> Array:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def luna_attention(query, key, value, packed, scaling):
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        packing = _softmax_rows(scaling * packed[g] @ key[b, g].T)
        out[b, h] = _softmax_rows(scaling * query[b, h] @ (packing @ key[b, g]).T) @ (packing @ value[b, g])
    return out


def luna_causal_attention(query, key, value, packed, activation, scaling, query_scale):
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        features = activation(scaling * key[b, g] @ packed[g].T)
        for i in range(query.shape[2]):
            mixture = np.zeros(packed.shape[1])
            for j in range(i + 1):
                mixture += query_scale * float(query[b, h, i] @ key[b, g, j]) * features[j] / (i + 1)
            u = np.exp(mixture - mixture.max())
            u /= u.sum()
            out[b, h, i] = sum(float(u @ features[j]) * value[b, g, j] for j in range(i + 1)) / (i + 1)
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


def newton_pinv(matrix, iterations):
    identity = np.eye(len(matrix))
    z = matrix.T / (np.abs(matrix).sum(axis=0).max() * np.abs(matrix).sum(axis=1).max())
    for _ in range(iterations):
        az = matrix @ z
        z = z @ (13 * identity - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z


def nystrom_attention(query, key, value, *, landmarks, iterations, scaling):
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    exact = query.shape[2] <= landmarks
    query_means, key_means = segment_mean(query, landmarks), segment_mean(key, landmarks)
    for b, h, g in each_head(query, key):
        if exact:
            out[b, h] = _softmax_rows(scaling * query[b, h] @ key[b, g].T) @ value[b, g]
            continue
        left = _softmax_rows(scaling * query[b, h] @ key_means[b, g].T)
        core = newton_pinv(_softmax_rows(scaling * query_means[b, h] @ key_means[b, g].T), iterations)
        out[b, h] = left @ core @ _softmax_rows(scaling * query_means[b, h] @ key[b, g].T) @ value[b, g]
    return out


def hash_bucket(x, directions):
    return int(np.argmax(np.concatenate([x @ directions, -x @ directions])))


def support(query, key, allowed, directions, *, window, capacity, causal):
    out = np.zeros((*query.shape[:3], key.shape[2]), dtype=bool)
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            seen = [j for j in range(key.shape[2]) if allowed[b, 0, i, j]]
            for columns in directions if directions is not None else ():
                mine = hash_bucket(query[b, h, i], columns)
                same = [j for j in seen if hash_bucket(key[b, g, j], columns) == mine]
                for j in taken(same, i, capacity, causal):
                    out[b, h, i, j] = True
            for j in seen:
                out[b, h, i, j] |= abs(i - j) < window
    return out


def taken(same, i, capacity, causal):
    """The nearest up to i; both ways half of them on each side, and more of one where the other lacks some."""
    before, after = [j for j in same if j <= i], [j for j in same if j > i]
    if causal:
        return before[-capacity:]
    left = min((capacity + 1) // 2, len(before))
    right = min(capacity - left, len(after))
    left = min(capacity - right, len(before))
    return before[len(before) - left :] + after[:right]


def scatterbrain_attention(query, key, value, query_features, key_features, allowed, support, scaling):
    exact = pairs(query, key, lambda q, k, *_: math.exp(scaling * (q @ k)))
    estimate = pairs(query_features, key_features, lambda q, k, *_: q @ k)
    return normalise(np.where(support, exact, estimate) * allowed, value)
