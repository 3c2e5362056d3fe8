"""The definitions once more in NumPy: from the formulas, entry by entry, with nothing of the package in them.

Each function bears the name of the one in `hf_linear_attn.ops.naive…` that it is compared with. Where that one runs a
recurrence, this one writes out the sum; where that one has tensors, this one has loops. Heads: `h` of H query heads
reads the key-value head `h // (H / G)`.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def each_head(query: Array, key: Array):
    """Row, query head, key-value head."""
    repeats = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            yield b, h, h // repeats


def pairs(query: Array, key: Array, entry) -> Array:
    """`[B, H, L, S]` of `entry(q_i, k_j, h, g, i, j)`."""
    out = np.zeros((*query.shape[:3], key.shape[2]))
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            for j in range(key.shape[2]):
                out[b, h, i, j] = entry(query[b, h, i], key[b, g, j], h, g, i, j)
    return out


def visible(mask, batch, queries, keys, causal):
    out = np.zeros((batch, 1, queries, keys), dtype=bool)
    for b, i, j in np.ndindex(batch, queries, keys):
        real = mask is None or bool(mask[b, j])
        out[b, 0, i, j] = real and (not causal or j <= i + keys - queries)
    return out


def repeat_heads(tensor, heads):
    return np.stack([tensor[:, h // (heads // tensor.shape[1])] for h in range(heads)], axis=1)


def normalise(weights, value):
    out = np.zeros((*weights.shape[:3], value.shape[-1]))
    for b, h, g in each_head(weights, value):
        for i, row in enumerate(weights[b, h]):
            total = math.fsum(row)
            if total > 0:
                out[b, h, i] = sum(w * v for w, v in zip(row, value[b, g], strict=True)) / total
    return out


def normalise_signed(weights, value, epsilon):
    out = np.zeros((*weights.shape[:3], value.shape[-1]))
    for b, h, g in each_head(weights, value):
        for i, row in enumerate(weights[b, h]):
            total = math.fsum(row)
            out[b, h, i] = (row @ value[b, g]) * total / max(total**2, epsilon**2)
    return out


def _softmax(logits):
    e = np.exp(logits - np.max(logits))
    return e / e.sum()


def softmax_attention(query, key, value, allowed, scaling):
    seen = np.broadcast_to(allowed, (*query.shape[:3], key.shape[2]))
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            js = np.flatnonzero(seen[b, h, i])
            if len(js):
                out[b, h, i] = _softmax(scaling * key[b, g, js] @ query[b, h, i]) @ value[b, g, js]
    return out


def kernelized_attention(query_features, key_features, value, allowed):
    return normalise(pairs(query_features, key_features, lambda q, k, *_: q @ k) * allowed, value)


def windowed_attention(
    query, key, value, query_features, key_features, allowed, *, window, causal, scaling, log_mix, relative=True
):
    shift = key.shape[2] - query.shape[2]
    seen = np.broadcast_to(allowed, (*query.shape[:3], key.shape[2]))
    weights = np.zeros(seen.shape)
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            near = [j for j in range(key.shape[2]) if abs(i + shift - j) < window and (j <= i + shift or not causal)]
            near = [j for j in near if seen[b, h, i, j]]
            logits = {j: scaling * query[b, h, i] @ key[b, g, j] for j in near}
            top = max(logits.values(), default=0.0) if relative else 0.0
            for j in np.flatnonzero(seen[b, h, i]):
                far = math.exp(log_mix[h]) * (query_features[b, h, i] @ key_features[b, g, j])
                weights[b, h, i, j] = math.exp(logits[j] - top) if j in logits else far
    return normalise(weights, value)


def linformer_attention(query, key, value, project_key, project_value, scaling):
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        e, f = project_key[g % len(project_key)], project_value[g % len(project_value)]
        for i in range(query.shape[2]):
            out[b, h, i] = _softmax(scaling * (e @ key[b, g]) @ query[b, h, i]) @ (f @ value[b, g])
    return out


def linformer_causal_attention(query, key, value, project_key, project_value, scaling):
    block = project_key.shape[-1]
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        e, f = project_key[g % len(project_key)], project_value[g % len(project_value)]
        for i in range(query.shape[2]):
            own = (i // block) * block
            slots = [(e @ key[b, g, n : n + block], f @ value[b, g, n : n + block]) for n in range(0, own, block)]
            slots.append((key[b, g, own : i + 1], value[b, g, own : i + 1]))
            seen, held = (np.concatenate(part) for part in zip(*slots, strict=True))
            out[b, h, i] = _softmax(scaling * seen @ query[b, h, i]) @ held
    return out


def efficient_attention(query, key, value, allowed, scale):
    seen = np.broadcast_to(allowed, (*query.shape[:3], key.shape[2]))
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, h, g in each_head(query, key):
        for i in range(query.shape[2]):
            js = np.flatnonzero(seen[b, h, i])
            feature = _softmax(scale * query[b, h, i])
            for c in range(query.shape[3]):
                if len(js):
                    out[b, h, i] += feature[c] * (_softmax(scale * key[b, g, js, c]) @ value[b, g, js])
    return out


# --------------------------------------------------------------------------------------------------------------------
# Weights of feature maps


def t2r_weights(query, key, query_layer, key_layer, scaling, epsilon):
    s = math.sqrt(scaling * query.shape[-1])

    def entry(q, k, h, g, i, j):
        left = np.maximum(s * q @ query_layer[0][h] + query_layer[1][h], 0) + epsilon
        right = np.maximum(s * k @ key_layer[0][g] + key_layer[1][g], 0) + epsilon
        return float(left @ right)

    return pairs(query, key, entry)


def taylor_weights(query, key, scaling, query_weight=None, key_weight=None):
    def entry(q, k, h, g, i, j):
        if query_weight is not None:
            q, k = q @ query_weight[h], k @ key_weight[g]
        s = scaling * float(q @ k)
        return ((1 + s) ** 2 + 1) / 2

    return pairs(query, key, entry)


def dpfp_weights(query, key, scaling, nu, epsilon):
    def features(x):
        r = [math.sqrt(scaling) * max(sign * float(component), 0) for sign in (1, -1) for component in x]
        return [r[i] * r[(i + n) % len(r)] + epsilon for n in range(1, nu + 1) for i in range(len(r))]

    return pairs(query, key, lambda q, k, *_: math.fsum(a * b for a, b in zip(features(q), features(k), strict=True)))


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


def performer_weights(query, key, rows, function, epsilon):
    root = math.sqrt(len(rows))
    return pairs(
        query, key, lambda q, k, *_: (function(rows @ q) / root + epsilon) @ (function(rows @ k) / root + epsilon)
    )


def cosformer_attention(query, key, value, allowed, *, max_length, epsilon=0.0):
    """By positions: `cos(a - b) = cos a cos b + sin a sin b`, which is how the paper makes features of it."""
    angle, shift = math.pi / (2 * max_length), key.shape[2] - query.shape[2]

    def entry(q, k, h, g, i, j):
        a, b = angle * (i + shift), angle * j
        product = (np.maximum(q, 0) + epsilon) @ (np.maximum(k, 0) + epsilon)
        return product * (math.cos(a) * math.cos(b) + math.sin(a) * math.sin(b))

    return normalise(pairs(query, key, entry) * allowed, value)


def rfa_weights(query, key, rows, sigma):
    def entry(q, k, h, g, i, j):
        wave = (rows * sigma[g]) @ (q / np.linalg.norm(q) - k / np.linalg.norm(k))
        return np.mean(np.cos(wave))

    return pairs(query, key, entry)


def gated_weights(weights, gate):
    repeats = weights.shape[1] // gate.shape[1]
    out = np.zeros(weights.shape)
    for b, h, i, j in np.ndindex(*weights.shape):
        if j <= i:
            g = gate[b, h // repeats]
            out[b, h, i, j] = weights[b, h, i, j] * (1 - g[j]) * math.prod(g[j + 1 : i + 1])
    return out
