"""Nyström attention: the softmax matrix from m landmarks, which are means of segments of the sequence.

    softmax(τ Q Kᵀ) ≈ F A⁺ B      F = softmax(τ Q K̃ᵀ) [L, m]   A = softmax(τ Q̃ K̃ᵀ) [m, m]   B = softmax(τ Q̃ Kᵀ) [m, S]

Q̃ and K̃ are the means of m equal segments of each row's own real tokens. A row of at most m tokens has a landmark for
every token: F = A = B is then its exact softmax matrix, F A⁺ B = F, and the product is not formed at all.

τ is `scaling`, m `landmarks`. Shapes: query `[B, H, S, d]`, key `[B, G, S, d]`, value `[B, G, S, e]` with `H = G·R`
query heads for G key-value heads; a mask `[B, S]` is True for tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .common import block_length, compute_dtype, is_free, mask_tokens, softmax_rows, token_blocks
from .linformer import token_positions


def landmark_pooling(length: int, landmarks: int, mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pooling `[B | 1, m, S]` that averages segments of the real tokens, and their number `[B | 1]`.

    A row of l tokens has `min(m, l)` segments of equal size; a token on a border is shared in proportion. The shares
    are whole numbers of 1/m tokens, so they are exact at any length. Rows past the l-th landmark are zero.
    """
    if mask is None:
        positions = torch.arange(length, device=like.device).unsqueeze(0)
        lengths = torch.full((1,), length, device=like.device)
    else:
        positions, lengths = token_positions(mask)
    used = lengths.clamp(max=landmarks)[:, None, None]
    size = lengths[:, None, None]
    edges = torch.arange(landmarks, device=like.device)[None, :, None] * size  # in units of 1/used tokens
    first = positions[:, None, :] * used
    overlap = torch.minimum(edges + size, first + used) - torch.maximum(edges, first)
    pooling = overlap.clamp_min(0).to(compute_dtype(like)) / size.clamp_min(1)
    return (pooling if mask is None else pooling.masked_fill(~mask[:, None, :], 0.0)), lengths


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Invert `[…, m, m]` by `Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z)))/4`, `Z₀ = Aᵀ/(‖A‖₁ ‖A‖_∞)`.

    The order of convergence is 3: with a residual R = I - A Z one step leaves (3R³ + R⁴)/4. A singular value σ of A
    enters with `A Z₀ ~ σ²/(‖A‖₁ ‖A‖_∞)` and grows by 13/4 a step until it is near 1, so few iterations invert the large
    singular values and leave out the small ones, which would amplify noise.
    """
    norms = matrix.abs().sum(dim=-2).amax(dim=-1) * matrix.abs().sum(dim=-1).amax(dim=-1)
    inverse = matrix.transpose(-1, -2) / norms[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inner = product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ (15 * identity - inner)) / 4
    return inverse


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """`[B, H, n, d] x [B, G, S, d] -> [B, H, n, S]` without repeating the keys."""
    batch, heads, size, width = rows.shape
    groups = keys.shape[1]
    folded = rows.reshape(batch, groups, heads // groups * size, width)
    return (folded @ keys.transpose(-1, -2)).view(batch, heads, size, keys.shape[2])


def _landmark_values(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, landmarks: int, iterations: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return landmark keys `[B, G, m, d]`, which of them exist `[B | 1, 1, 1, m]`, and `A⁺ B V` `[B, H, m, x]`.

    query and key are zero at padding; value V `[B | 1, G | 1, S, x]` holds values, or the identity.
    """
    heads, groups = query.shape[1], key.shape[1]
    pooling, lengths = landmark_pooling(key.shape[2], landmarks, mask, key)
    pooling = pooling.unsqueeze(1)
    query_means, key_means = (pooling @ query) * scaling, pooling @ key
    exists = (torch.arange(landmarks, device=key.device) < lengths.unsqueeze(1))[:, None, None, :]
    few = (lengths <= landmarks)[:, None, None, None]
    core = softmax_rows(_products(query_means, key_means), exists)
    core = torch.where(few, torch.eye(landmarks, dtype=core.dtype, device=core.device), core)
    allowed = None if mask is None else mask[:, None, None, :]
    right = softmax_rows(_products(query_means, key), allowed)
    repeats = heads // groups if value.shape[1] == groups else heads
    value = value.repeat_interleave(repeats, dim=1)
    solved = iterative_pinv(core, iterations) @ (right @ value)
    return key_means, exists, torch.where(few, pooling @ value, solved)


def nystrom(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    landmarks: int,
    iterations: int,
    scaling: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute Nyström attention; it is exact for S <= m.

    Time O(S·m·(d + e) + iterations·m³), temporaries O(S·m + m²) per head.

    Returns:
        The output `[B, H, S, e]` in the dtype of `value`.
    """
    dtype = compute_dtype(query)
    batch, heads, length, _ = query.shape
    query, key, masked_value = (mask_tokens(x.to(dtype), mask) for x in (query, key, value))
    keys, values, allowed = key, masked_value.repeat_interleave(heads // key.shape[1], dim=1), None
    if is_free(length) or length > landmarks:
        keys, allowed, values = _landmark_values(
            query, key, masked_value, mask, landmarks=landmarks, iterations=iterations, scaling=scaling
        )
    elif mask is not None:
        allowed = mask[:, None, None, :]
    outputs = [value.new_zeros(batch, heads, 0, value.shape[-1])]
    for _, _, _, (rows,) in token_blocks(block_length(batch, heads, keys.shape[2], length), None, query):
        outputs.append((softmax_rows(_products(rows * scaling, keys), allowed) @ values).to(value.dtype))
    return torch.cat(outputs, dim=2)


def depthwise_skip(value: Tensor, kernel: Tensor, mask: Tensor | None) -> Tensor:
    """Compute `Σ_t w_t v_{i+t-c}` per head, c the middle of the kernel: `[B, G, S, e]`, `[H, k]` -> `[B, H, S, e]`."""
    heads, size = kernel.shape
    values = mask_tokens(value.to(compute_dtype(value)), mask).repeat_interleave(heads // value.shape[1], dim=1)
    weight = kernel.to(values.dtype)[:, None, :, None]
    return functional.conv2d(values, weight, padding=(size // 2, 0), groups=heads)
