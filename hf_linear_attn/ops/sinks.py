"""Sinks of windowed attention: tokens with exact weights for every query, wherever its window is (Xiao et al. 2023).

In the causal form these are the first n tokens of each row, and the state keeps them from the first chunk on. In the
bidirectional form they are the first n and the last n tokens of each row, and their own queries see every key exactly.
Padding is not counted.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .calls import WindowedCall
from .common import State, mask_tokens
from .int8 import to_dtype
from .terms import attend_with_terms


class Sinks(NamedTuple):
    """key `[B, G, s, d]` and value `[B, G, s, e]`, zeros where a row has fewer tokens.

    position `[B, s]`: among the rows of the call, which begin with the padding if causal; negative in earlier chunks.
    """

    key: Tensor
    value: Tensor
    position: Tensor

    def distance(self, rows: Tensor) -> Tensor:
        """Return how far the sinks are before each row, `[n, c] -> [B, n, c, s]`."""
        return rows[..., None] - self.position[:, None, None, :]

    def outside(self, rows: Tensor, window: int, causal: bool) -> Tensor:
        """Return which sinks are outside the window of each row, and seen by it: rows `[n, c]` -> `[B, n, c, s]`."""
        distance = self.distance(rows)
        return (distance >= window) if causal else (distance.abs() >= window)


def take_tokens(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather tokens `index [B, n]` of `[B, H, L, d]`."""
    batch, heads, length, width = tensor.shape
    if torch.compiler.is_exporting():  # as rows of a table, which runtimes copy whole
        first = torch.arange(batch * heads, device=tensor.device).view(batch, heads, 1) * length
        rows = (first + index[:, None]).flatten()
        return tensor.reshape(-1, width).index_select(0, rows).view(batch, heads, -1, width)
    return tensor.gather(2, index[:, None, :, None].expand(-1, heads, -1, width))


def token_numbers(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """Return how many real tokens there are up to each one, `[B, L]`."""
    if mask is None:
        return torch.arange(1, length + 1, device=device).expand(batch, length)
    return mask.long().cumsum(dim=1).expand(batch, length)


def repeated(index: Tensor) -> Tensor:
    """Return which entries of `[B, n]` equal an earlier one of their row."""
    return (index[:, :, None] == index[:, None, :]).tril(-1).any(dim=-1)


def first_with_number(numbers: Tensor, requested: Tensor) -> Tensor:
    """Return the index of the token with each number `[B, n]`; any index where there is none."""
    if torch.compiler.is_exporting():  # to formats that have no binary search
        return (numbers.unsqueeze(1) < requested.unsqueeze(2)).sum(dim=2).clamp(max=numbers.shape[1] - 1)
    return torch.searchsorted(numbers.contiguous(), requested).clamp(max=numbers.shape[1] - 1)


def first_tokens(call: WindowedCall) -> tuple[Sinks | None, State]:
    """Return the sinks of a causal call with at least one token, and what the state after it keeps of them.

    The state's part is `sink_key [B, G, n, d]`, `sink_value [B, G, n, e]`, and `count [B]`, the tokens so far.
    """
    key, value, state = call.key, call.value, call.state
    batch, _, length, _ = key.shape
    numbers = token_numbers(call.mask, batch, length, key.device)
    before = numbers.new_zeros(batch) if state is None else state["count"]
    count = before + numbers[:, -1]
    if not call.sinks:
        return None, {"count": count}
    order = torch.arange(call.sinks, device=key.device)
    number = order + 1 - before.unsqueeze(1)  # among the new tokens; the state has the earlier ones
    if state is None and call.mask is None and not torch.compiler.is_compiling() and length >= call.sinks:
        key, value = (x[:, :, : call.sinks].clone(memory_format=torch.contiguous_format) for x in (key, value))
    else:
        index = first_with_number(numbers, number.clamp_min(1))
        is_new = (number >= 1) & (number <= numbers[:, -1:])
        key, value = (mask_tokens(take_tokens(tensor, index), is_new) for tensor in (key, value))

    def with_old(tokens: State) -> State:
        if state is None:
            return tokens
        is_old = (number < 1)[:, None, :, None]
        return {name: torch.where(is_old, to_dtype(state[name], new.dtype), new) for name, new in tokens.items()}

    new = {"sink_key": key, "sink_value": value}
    tokens = with_old(new)
    stored = tokens
    if call.cache_dtype is not None:
        stored = with_old({name: to_dtype(token, call.cache_dtype) for name, token in new.items()})
    position = order + (length - count).unsqueeze(1)
    return Sinks(tokens["sink_key"], tokens["sink_value"], position), {**stored, "count": count}


def end_positions(mask: Tensor | None, sinks: int, batch: int, length: int, device: torch.device) -> Tensor:
    """Return the positions `[B, 2 n]` of the first n and the last n tokens; some stand twice in rows of fewer."""
    numbers = token_numbers(mask, batch, length, device)
    order = torch.arange(sinks, device=device).expand(batch, -1)
    last = numbers[:, -1:]
    return first_with_number(numbers, torch.cat([torch.minimum(order + 1, last), (last - order).clamp_min(1)], dim=1))


def end_tokens(call: WindowedCall) -> Sinks | None:
    """Return the sinks of a bidirectional call."""
    batch, _, length, _ = call.key.shape
    if not call.sinks or not length:
        return None
    position = end_positions(call.mask, call.sinks, batch, length, call.key.device)
    key, value = (take_tokens(tensor, position) for tensor in (call.key, call.value))
    if call.mask is not None:  # a row without tokens
        real = call.mask.expand(batch, -1).gather(1, position)
        key, value = mask_tokens(key, real), mask_tokens(value, real)
    return Sinks(key, value, position)


def attend_from_sinks(out: Tensor, call: WindowedCall, sinks: Sinks | None) -> Tensor:
    """Replace the outputs `[B, H, L, e]` of the sinks' queries by those of exact attention; O(n·L·d).

    `out` may be written over where it carries no gradient.
    """
    if sinks is None:
        return out
    query = take_tokens(call.query, sinks.position)
    key = call.key
    value = call.value
    mask = call.mask
    allowed = None
    if mask is not None:
        key, value = mask_tokens(key, mask), mask_tokens(value, mask)
        query = mask_tokens(query, mask.expand(query.shape[0], -1).gather(1, sinks.position))
        allowed = (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]  # a row without tokens: zeros
    if query.dtype == torch.float16:  # whose range is too small for logits
        query, key, value = query.float(), key.float(), value.float()
    if call.terms:
        distance = sinks.position.unsqueeze(2) - torch.arange(key.shape[2], device=key.device)
        exact = attend_with_terms(query, key, value, allowed, call.scaling, call.terms, distance)
    else:
        folded = query.reshape(key.shape[0], key.shape[1], -1, key.shape[3])
        exact = scaled_dot_product_attention(folded, key, value, attn_mask=allowed, scale=call.scaling)
    exact = exact.reshape(*query.shape[:3], -1).to(out.dtype)
    # A token that stands twice gets its gradient once.
    exact = torch.where(repeated(sinks.position)[:, None, :, None], exact.detach(), exact)
    index = sinks.position[:, None, :, None].expand(exact.shape)
    if out.requires_grad or exact.requires_grad:
        return out.scatter(2, index, exact)
    return out.scatter_(2, index, exact)


def sink_pairs(allowed: Tensor, sinks: int, causal: bool, start: int | None = None) -> Tensor:
    """Return which pairs are exact because of sinks, `[B | 1, H | 1, L, S]`, from the visible ones. O(L·S).

    The queries are the tokens from `start` on (None: the last ones). The sinks of a query are the first tokens that it
    sees (and the last ones if bidirectional): with documents packed into a row those of its own document.
    """
    number = allowed.long().cumsum(dim=-1)
    pairs = number <= sinks
    if not causal:
        pairs = pairs | (number > number[..., -1:] - sinks)
        start = allowed.shape[-1] - allowed.shape[-2] if start is None else start
        is_sink = (pairs & allowed).diagonal(start, -2, -1)
        pairs = pairs | is_sink.unsqueeze(-1)
    return pairs & allowed
