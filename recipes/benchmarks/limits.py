"""What bounds attention on this machine, measured beside it: matrix products alone, and moving the bytes alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .timing import InContext

#: Tokens of a chunk of the causal products.
CHUNK = 128

#: Elements of the features that are stored at once; of more, the same ones stand for every block.
MOST_FEATURES = 1 << 26

#: A backward pass has two products for each one of the forward pass.
BACKWARD_FACTOR = 3.0


def bidirectional_products(key: Tensor, value: Tensor, features: int) -> Callable[[], object]:
    """`S = φ(k)ᵀ v` and `φ(q) S`, nothing else: 4·B·H·L·m·e operations. Features and buffers are made beforehand.

    Shapes, dtype and device are those of key and value `[B, H, L, d]`.
    """
    values, mapped = _random_inputs(key, value, features)
    length, block = values.shape[1], mapped.shape[1]
    state = values.new_zeros(values.shape[0], features, values.shape[2])
    out = torch.empty_like(values)

    def run() -> None:
        if block == length:
            torch.bmm(mapped.transpose(1, 2), values, out=state)
            torch.bmm(mapped, state, out=out)
            return
        for start in range(0, length, block):
            value_block = values[:, start : start + block]
            torch.baddbmm(state, mapped[:, : value_block.shape[1]].transpose(1, 2), value_block, beta=0, out=state)
        for start in range(0, length, block):
            out_block = out[:, start : start + block]
            torch.bmm(mapped[:, : out_block.shape[1]], state, out=out_block)

    return run


def causal_products(key: Tensor, value: Tensor, features: int) -> Callable[[], object]:
    """The four products of each chunk of 128 tokens: weights, weights times values, read the state, add to it.

    B·H·L·(2·128·(m + e) + 4·m·e) operations.
    """
    values, mapped = _random_inputs(key, value, features)
    rows, length, width = values.shape
    chunk, block = min(CHUNK, length), mapped.shape[1]
    weights = values.new_empty(rows, chunk, chunk)
    inner, outer = values.new_empty(rows, chunk, width), values.new_empty(rows, chunk, width)
    state, update = values.new_zeros(rows, features, width), values.new_empty(rows, features, width)

    def run() -> None:
        for start in range(0, length - chunk + 1, chunk):
            offset = start % max(1, block - chunk + 1)
            mapped_chunk, value_chunk = mapped[:, offset : offset + chunk], values[:, start : start + chunk]
            torch.bmm(mapped_chunk, mapped_chunk.transpose(1, 2), out=weights)
            torch.bmm(weights, value_chunk, out=inner)
            torch.bmm(mapped_chunk, state, out=outer)
            torch.bmm(mapped_chunk.transpose(1, 2), value_chunk, out=update)

    return run


def _random_inputs(key: Tensor, value: Tensor, features: int) -> tuple[Tensor, Tensor]:
    """Values `[B·H, L, e]` and random features `[B·H, L or less, m]`."""
    rows, length = key.shape[0] * key.shape[1], key.shape[2]
    block = min(length, max(CHUNK, MOST_FEATURES // (rows * features)))
    mapped = torch.rand(rows, block, features, device=key.device).to(key.dtype)
    return value.reshape(rows, length, -1), mapped


def products(key: Tensor, value: Tensor, features: int, causal: bool) -> Callable[[], object]:
    make = causal_products if causal else bidirectional_products
    return InContext(make(key, value, features), torch.no_grad)


def reference_product(key: Tensor, value: Tensor) -> tuple[Callable[[], object], int]:
    """A product of heads, `[L, d] @ [d, e]` for each, and its operations: the rate at which others' are counted."""
    rows, length, dim = key.shape[0] * key.shape[1], key.shape[2], key.shape[3]
    left, right = key.reshape(rows, length, dim), value.reshape(rows, length, -1)[:, :dim].contiguous()
    if right.shape[1] < dim:
        right = right.new_zeros(rows, dim, right.shape[2])
    out = left.new_empty(rows, length, right.shape[2])

    def run() -> None:
        torch.bmm(left, right, out=out)

    return InContext(run, torch.no_grad), 2 * rows * length * dim * right.shape[2]


def copying(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Read half of `amount` bytes and write the other half."""
    source = torch.zeros(max(1, num_bytes // 2), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return InContext(lambda: target.copy_(source), torch.no_grad)
