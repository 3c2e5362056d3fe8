"""Nyström attention: the softmax matrix from m landmarks, which are means of segments of the sequence.

    softmax(τ Q Kᵀ) ≈ F A⁺ B      F = softmax(τ Q K̃ᵀ) [L, m]   A = softmax(τ Q̃ K̃ᵀ) [m, m]   B = softmax(τ Q̃ Kᵀ) [m, S]

Q̃ and K̃ are the means of m equal segments of each row's own real tokens. A row of at most m tokens has a landmark for
every token: F = A = B is then its exact softmax matrix, F A⁺ B = F, and the product is not formed at all.

m is `landmarks`; τ and the shapes are those of `AttentionInputs`, with L = S.
"""

import torch
from torch import Tensor

from .calls import AttentionInputs
from .common import block_length, compute_dtype, is_free, mask_tokens, softmax_rows, token_blocks
from .linformer import token_positions


def landmark_pooling(length: int, landmarks: int, mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pooling `[B | 1, m, S]` that averages segments of the real tokens, and their number `[B | 1]`.

    A row of l tokens has `min(m, l)` segments of equal size; a token on a border is shared in proportion. The shares
    are whole numbers of 1/m tokens, so they are exact at any length. Rows past the l-th landmark are zero.
    """
    positions, lengths = token_positions(mask, length, like.device)
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


def nystrom(inputs: AttentionInputs, landmarks: int, iterations: int) -> Tensor:
    """Compute Nyström attention, `[B, H, S, e]` in the dtype of `value`; it is exact for S <= m.

    Time O(S·m·(d + e) + iterations·m³), temporaries O(S·m + m²) per head.
    """
    mask = inputs.mask
    rows, keys, values = (mask_tokens(x.to(compute_dtype(x)), mask) for x in inputs.tensors)
    rows = rows * inputs.scaling
    batch, heads, length, _ = rows.shape
    keys, values = (x.repeat_interleave(heads // keys.shape[1], dim=1) for x in (keys, values))
    allowed = None if mask is None else mask[:, None, None, :]
    if is_free(length) or length > landmarks:
        pooling, lengths = landmark_pooling(length, landmarks, mask, keys)
        pooling = pooling.unsqueeze(1)
        row_means, key_means = pooling @ rows, pooling @ keys
        exists = (torch.arange(landmarks, device=keys.device) < lengths.unsqueeze(1))[:, None, None, :]
        few = (lengths <= landmarks)[:, None, None, None]
        core = softmax_rows(row_means @ key_means.transpose(-1, -2), exists)
        core = torch.where(few, torch.eye(landmarks, dtype=core.dtype, device=core.device), core)
        right = softmax_rows(row_means @ keys.transpose(-1, -2), allowed)
        values = torch.where(few, pooling @ values, iterative_pinv(core, iterations) @ (right @ values))
        keys, allowed = key_means, exists
    outputs = [inputs.value.new_zeros(batch, heads, 0, values.shape[-1])]
    for _, _, _, (block,) in token_blocks(block_length(batch, heads, keys.shape[2], length), None, rows):
        outputs.append((softmax_rows(block @ keys.transpose(-1, -2), allowed) @ values).to(inputs.value.dtype))
    return torch.cat(outputs, dim=2)
