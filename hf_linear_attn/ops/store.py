"""A bounded store beside a causal window: exact weights for the keys whose values the linear part recalls worst.

This follows LoLA (McDermott et al. 2025, arXiv:2505.23666). A key that leaves the window has an error,

    e_j = ‖φ(k_j)ᵀ S_j / φ(k_j)ᵀ z_j - v_j‖,

with S_j and z_j the sums over all keys that have left the window until then, itself included. It halves with every
`HALF_LIFE` tokens, and the store holds the n keys of largest error among them: those of largest rank

    r_j = log₂ e_j + j / HALF_LIFE,

which never changes. LoLA computes all errors again for each chunk, without a decay; here the store does not depend on
how a sequence is split.

The sums contain stored keys, too: `ops.windowed` adds their exact weights and subtracts their estimates (which costs
digits where these are hundreds of times larger). The state has `store_key [B, G, n, d]`, `store_value [B, G, n, e]` and
`store_rank [B, G, n]` (`-inf`: empty).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .common import Features, KVState, State, compute_dtype, mask_tokens, weighted_mean
from .fused import KernelizedCall, WindowedCall
from .kernelized import causal

#: Tokens after which an error counts half. SmolLM2-135M without exact heads, untrained, windows of 256 and 128 stored
#: keys, perplexity at 8,192 tokens: 18.95 without a decay, 18.46 with 3,000, 18.50 with 1,024, 18.81 with 256.
HALF_LIFE = 2048

#: The rank of what may not be stored: empty entries, padding and sinks.
NEVER = float("-inf")

#: An error of at most so much of a value is rounding, and counts as none, `LEAST`: noise must not rank keys.
ROUNDING, LEAST = 1e-5, 2.0**-126


class StoredKeys(NamedTuple):
    """Keys `[B, G, n, d]`, values `[B, G, n, e]` and ranks `[B, G, n]`, in the order of the sequence."""

    key: Tensor
    value: Tensor
    rank: Tensor

    @staticmethod
    def before(call: WindowedCall) -> "StoredKeys":
        """Return the store before the first token of a call."""
        if call.state is not None:
            size = call.state["store_key"].shape[2] if "store_key" in call.state else 0
            if size != call.store:
                raise ValueError(f"The state has a store of {size} keys, not {call.store}: it is of other options.")
            return StoredKeys(*(call.state[f"store_{name}"] for name in StoredKeys._fields))
        key, value, count = call.key, call.value, call.store
        sizes = key.shape[0], key.shape[1], count
        rank = torch.full(sizes, NEVER, dtype=compute_dtype(key), device=key.device)
        return StoredKeys(key.new_zeros(*sizes, key.shape[3]), value.new_zeros(*sizes, value.shape[3]), rank)

    def state(self) -> State:
        return {f"store_{name}": tensor.contiguous() for name, tensor in self._asdict().items()}

    def at(self, tokens: slice) -> "StoredKeys":
        return StoredKeys(*(tensor[:, :, tokens] for tensor in self))

    def offer(self, new: "StoredKeys") -> tuple["StoredKeys", Tensor, "StoredKeys"]:
        """Let new keys enter one after the other.

        Returns:
            The stored keys and then the new ones, `[B, G, n + N]`; which of them the store holds after each entry,
            `[B, G, N, n + N]`; and the store after the last.
        """
        size, count = self.key.shape[2], new.key.shape[2]
        pool = StoredKeys(*(torch.cat([old.to(own.dtype), own], dim=2) for old, own in zip(self, new, strict=True)))
        best = pool.rank.sort(dim=-1, descending=True, stable=True).indices
        entered = best.unsqueeze(2) <= torch.arange(size, size + count, device=best.device).unsqueeze(-1)
        is_stored = entered & (entered.cumsum(dim=-1) <= size)  # in the order of `best`
        is_stored = is_stored.gather(3, best.argsort(dim=-1).unsqueeze(2).expand(is_stored.shape))
        is_stored = is_stored & (pool.rank != NEVER).unsqueeze(2)
        best = best[..., :size].sort(dim=-1).values
        key, value = (x.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in pool[:2])
        return pool, is_stored, StoredKeys(key, value, pool.rank.gather(2, best))


def leaving_keys(call: WindowedCall, key: Tensor, value: Tensor, far: Tensor, position: Tensor) -> StoredKeys:
    """Return the keys that leave the window during a call with their ranks, and zeros where `far [B, L]` is False.

    Args:
        call: The call, with the state before it.
        key: The keys that leave, in order `[B, G, L, d]`.
        value: Their values.
        far: Which of them count; the others are padding or sinks.
        position: Their positions among the real tokens of their rows `[B, L]`.
    """
    key, value = mask_tokens(key, far), mask_tokens(value, far)
    maps = (call.key_features, call.key_features, None, call.num_features)
    with torch.no_grad():
        own = KernelizedCall(key, key, value.to(compute_dtype(value)), *maps, True, mask=far, state=call.state)
        return _ranked(key, value, causal(own)[0], far, position)


def leaving_positions(count: Tensor, window: int, length: int, keys: int) -> Tensor:
    """Return the positions of the keys that leave a window with each of `length` tokens, `[B, keys]`.

    Args:
        count: The real tokens of each row so far, these included `[B]`; padding precedes real tokens.
        window: Tokens of the window.
        length: The new tokens.
        keys: How many to number, from the one that leaves first.
    """
    return torch.arange(keys, device=count.device) + (count - window - length).unsqueeze(1)


def leaving_key(
    key: Tensor, value: Tensor, features: Features, sums: KVState, far: Tensor, position: Tensor
) -> StoredKeys:
    """Return the same for one key with its features, given the sums that contain it; far and position `[B, 1]`."""
    with torch.no_grad():
        recalled = weighted_mean(features.values @ sums.total)
        return _ranked(mask_tokens(key, far), mask_tokens(value, far), recalled, far, position)


def _ranked(key: Tensor, value: Tensor, recalled: Tensor, far: Tensor, position: Tensor) -> StoredKeys:
    expected = value.to(recalled.dtype)
    error = (recalled - expected).norm(dim=-1)
    error = error.masked_fill(error <= ROUNDING * expected.norm(dim=-1), LEAST).clamp_min(LEAST)
    rank = error.log2() + (position.to(error.dtype) / HALF_LIFE).unsqueeze(1)
    return StoredKeys(key, value, mask_tokens(rank, far, NEVER))
