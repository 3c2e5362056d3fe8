"""A bounded store beside a causal window: exact weights for the keys whose values the linear part recalls worst.

This follows LoLA (McDermott et al. 2025, arXiv:2505.23666). A key that leaves the window has an error,

    e_j = ‖φ(k_j)ᵀ S_j / φ(k_j)ᵀ z_j - v_j‖,

with S_j and z_j the sums over all keys that have left the window until then, itself included. The store holds the n
keys of largest error among them (of equal errors the earlier key). LoLA computes all errors again for each chunk; here
a key keeps its own, so that the store does not depend on how a sequence is split.

The sums contain stored keys, too: `ops.windowed` adds their exact weights and subtracts their estimates (which costs
digits where these are hundreds of times larger). An estimate has a gradient where the sums have that of its key. The
state has `store_key [B, G, n, d]`, `store_value [B, G, n, e]` and `store_error [B, G, n]` (-1: empty), and, where its
sums have a gradient, `store_constant [B, G, n]`: the keys that they hold without one, since an earlier call had none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .calls import KernelizedCall, WindowedCall
from .common import Features, KVState, State, compute_dtype, mask_tokens, with_ones
from .int8 import to_dtype
from .kernelized import causal

#: The error of what may not be stored: empty places, padding and sinks.
NEVER = -1.0

#: An error of at most so much of a value is rounding and counts as none: noise must not rank keys.
ROUNDING = 1e-5


class StoredKeys(NamedTuple):
    """Keys `[B, G, n, d]`, values `[B, G, n, e]` and errors `[B, G, n]`, in the order of the sequence; and which of
    them the sums hold without a gradient, constant `[B, G, n]`."""

    key: Tensor
    value: Tensor
    error: Tensor
    constant: Tensor

    @staticmethod
    def before(call: WindowedCall) -> "StoredKeys":
        """Return the store before the first token of a call."""
        if call.state is not None:
            state = call.state
            size = state["store_key"].shape[2] if "store_key" in state else 0
            if size != call.store:
                raise ValueError(f"The state has a store of {size} keys, not {call.store}: it is of other options.")
            error, has_graph = state["store_error"].to(compute_dtype(call.key)), state["kv"].requires_grad
            constant = state.get("store_constant") if has_graph else None
            if constant is None:
                constant = torch.full_like(error, not has_graph, dtype=torch.bool)
            # What is read from int8 into float32 and stored again stays as it is.
            wide = None if call.cache_dtype is None else error.dtype
            key = to_dtype(state["store_key"], wide or call.key.dtype)
            value = to_dtype(state["store_value"], wide or call.value.dtype)
            return StoredKeys(key, value, error, constant)
        key, value, count = call.key, call.value, call.store
        sizes = key.shape[0], key.shape[1], count
        error = torch.full(sizes, NEVER, dtype=compute_dtype(key), device=key.device)
        constant = torch.zeros_like(error, dtype=torch.bool)
        return StoredKeys(key.new_zeros(*sizes, key.shape[3]), value.new_zeros(*sizes, value.shape[3]), error, constant)

    def state(self, call: WindowedCall, has_graph: bool) -> State:
        """Return the entries of the state after a call, whose sums have a gradient or not."""
        key, value = (
            to_dtype(tensor, call.cache_dtype or new.dtype)
            for tensor, new in ((self.key, call.key), (self.value, call.value))
        )
        stored = self._replace(key=key, value=value)
        entries = {f"store_{name}": tensor.contiguous() for name, tensor in stored._asdict().items()}
        if not has_graph:  # then all keys are constant
            del entries["store_constant"]
        return entries

    def rounding(self, call: WindowedCall) -> KVState:
        """Return what the sums lack for estimates of stored keys to cancel, once these are rounded in the state.

        The sums have taken keys that left the window in the call that brought them as they were. Keys that were rounded
        before stay as they are, and change nothing.
        """
        dtype, is_key = compute_dtype(call.key), (self.error != NEVER).repeat(1, 1, 2)
        pairs = []
        for tensor in (self.key, self.value):
            tensor = tensor.to(dtype)
            pairs.append(torch.cat([to_dtype(to_dtype(tensor, call.cache_dtype), dtype), tensor], dim=2))
        key, value = pairs[0], with_ones(pairs[1]) * is_key.unsqueeze(-1)
        value[:, :, self.key.shape[2] :].neg_()
        values, log_scale = call.key_features(key, 0)
        log_scale = None if log_scale is None else log_scale.masked_fill(~is_key, float("-inf"))
        return KVState.of(Features(values, log_scale), value)

    def at(self, tokens: slice) -> "StoredKeys":
        return StoredKeys(*(tensor[:, :, tokens] for tensor in self))

    def offer(self, new: "StoredKeys") -> tuple["StoredKeys", Tensor, "StoredKeys"]:
        """Let new keys enter one after the other.

        Returns:
            The stored keys and then the new ones, `[B, G, n + N]`; which of them the store holds after each entry,
            `[B, G, N, n + N]`; and the store after the last.
        """
        size, count = self.key.shape[2], new.key.shape[2]
        pool = StoredKeys(*(torch.cat(parts, dim=2) for parts in zip(self, new, strict=True)))
        best = pool.error.sort(dim=-1, descending=True, stable=True).indices
        entered = best.unsqueeze(2) <= torch.arange(size, size + count, device=best.device).unsqueeze(-1)
        is_stored = entered & (entered.cumsum(dim=-1) <= size)  # in the order of `best`
        is_stored = is_stored.gather(3, best.argsort(dim=-1).unsqueeze(2).expand(is_stored.shape))
        is_stored = is_stored & (pool.error != NEVER).unsqueeze(2)
        best = best[..., :size].sort(dim=-1).values
        key, value = (x.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in pool[:2])
        return pool, is_stored, StoredKeys(key, value, *(x.gather(2, best) for x in pool[2:]))


def leaving_keys(call: WindowedCall, key: Tensor, value: Tensor, far: Tensor) -> StoredKeys:
    """Return the keys that leave the window during a call, in order `[B, G, L, d]`, and their values with their errors.

    They are zeros where `far [B, L]` is False: at padding and sinks.
    """
    key, value = mask_tokens(key, far), mask_tokens(value, far)
    maps = (call.key_features, call.key_features, None, call.num_features)
    with torch.no_grad():
        linear_call = KernelizedCall(key, key, value.to(compute_dtype(value)), *maps, True, mask=far, state=call.state)
        recalled, _ = causal(linear_call)
    return with_errors(key, value, recalled, far)


def with_errors(key: Tensor, value: Tensor, recalled: Tensor, far: Tensor) -> StoredKeys:
    """Return keys and values with the errors of what the sums recall for them, `[B, G, L, e]` without a gradient."""
    key, value = mask_tokens(key, far), mask_tokens(value, far)
    exact = value.detach().to(recalled.dtype)
    error = (recalled - exact).norm(dim=-1)
    error = error.masked_fill(error <= ROUNDING * exact.norm(dim=-1), 0.0)
    return StoredKeys(key, value, mask_tokens(error, far, NEVER), torch.zeros_like(error, dtype=torch.bool))
