"""The tokens of a call of windowed attention (`ops.windowed`): those of its ring, then the new ones, padding first."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .calls import WindowedCall
from .common import State, mask_tokens
from .int8 import to_dtype
from .sinks import take_tokens


def pad_tokens(tensor: Tensor, before: int, after: int) -> Tensor:
    """Add tokens of zeros before and after those of `[B, H, L, d]`; a negative number removes tokens."""
    if torch.compiler.is_compiling():  # torch traces the result as contiguous, also where nothing is added
        tensor = tensor.contiguous()
    return functional.pad(tensor, (0, 0, before, after))


class Gathered(NamedTuple):
    """`window` older tokens, and the new ones after them.

    Attributes:
        call: The call with these queries, keys, values and log_mix `[B | 1, H, L | 1]`.
        valid: Which keys are tokens `[B, window + L]`.
        query_index: The index of each new token among the queries `[B, L]` (None: its own).
        ring: The last `window` tokens, which later tokens see exactly, as entries of the state.
    """

    call: WindowedCall
    valid: Tensor
    query_index: Tensor | None
    ring: State


def gather_tokens(call: WindowedCall, log_mix: Tensor) -> Gathered:
    """Put `window` older tokens before the new ones, and padding first, so that windows count real tokens."""
    key = call.key
    value = call.value
    mask = call.mask
    state = call.state
    window = call.window
    batch, length = key.shape[0], key.shape[2]
    valid = torch.ones(batch, length, dtype=torch.bool, device=key.device) if mask is None else mask.expand(batch, -1)
    if state is None:
        key, value = pad_tokens(key, window, 0), pad_tokens(value, window, 0)
        valid = functional.pad(valid, (window, 0), value=False)
    else:
        key = torch.cat([to_dtype(state["ring_key"], key.dtype), key], dim=2)
        value = torch.cat([to_dtype(state["ring_value"], value.dtype), value], dim=2)
        valid = torch.cat([state["ring_mask"], valid], dim=1)
    if mask is None:  # a ring has its padding first already
        gathered = call.replace(key=key, value=value, log_mix=log_mix)
        return Gathered(gathered, valid, None, make_ring(gathered, valid, length))
    real = valid.long().cumsum(dim=1)
    missing = (~valid).long().cumsum(dim=1)
    inverse = torch.where(valid, real + missing[:, -1:], missing) - 1  # where each token goes
    positions = torch.arange(inverse.shape[1], device=inverse.device).expand_as(inverse)
    order = torch.zeros_like(inverse).scatter(1, inverse, positions)
    rows = (order[:, window:] - window).clamp_min(0)
    if log_mix.shape[2] > 1:
        log_mix = take_tokens(log_mix.expand(batch, -1, -1).unsqueeze(-1), rows).squeeze(-1)
    query = take_tokens(mask_tokens(call.query, mask), rows)
    key, value = take_tokens(key, order), take_tokens(value, order)
    index = (inverse[:, window:] - window).clamp_min(0)
    gathered = call.replace(query=query, key=key, value=value, log_mix=log_mix)
    valid = valid.gather(1, order)
    return Gathered(gathered, valid, index, make_ring(gathered, valid, length, order[:, length:]))


def make_ring(call: WindowedCall, valid: Tensor, start: int, order: Tensor | None = None) -> State:
    """Copy the last `window` tokens, from `start` on, for the state. (A view would retain all tokens in memory.)

    Padding is zeros there, whatever it holds.

    order: `[B, window]`, where they stood among the tokens of the former ring and the new ones; None: where they are.
    """
    mask = None if call.mask is None else valid[:, start:]
    last = {"ring_key": call.key[:, :, start:], "ring_value": call.value[:, :, start:]}
    ring = {name: mask_tokens(tokens, mask) for name, tokens in last.items()}
    if call.cache_dtype is not None:
        ring = {name: to_dtype(tokens, call.cache_dtype) for name, tokens in ring.items()}
        if call.state is not None:  # what was rounded once stays as it is
            if order is None:
                order = torch.arange(start, start + call.window, device=valid.device).expand(valid.shape[0], -1)
            is_old = (order < call.window)[:, None, :, None]
            index = order.clamp(max=call.window - 1)
            for name, tokens in ring.items():
                old = take_tokens(to_dtype(call.state[name], call.cache_dtype), index)
                ring[name] = torch.where(is_old, old, tokens)
    ring["ring_mask"] = valid[:, start:]
    return {name: part.clone(memory_format=torch.contiguous_format) for name, part in ring.items()}
