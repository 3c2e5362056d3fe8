"""Exact softmax inside a window, kernelized attention outside it, one normaliser: the fast forms and explicit weights.

    w_ij = exp(τ q_i·k_j - c_i)                 for j inside the window of i
    w_ij = exp(g) φ(q_i)·φ(k_j) · exp(s_ij)     for every other visible j
    o_i  = Σ_j w_ij v_j / Σ_j w_ij

`c_i` is the row's stabiliser, `g` the log mixing weight of the head. For maps that carry a log scale (which estimate
`exp(τ q·k)` itself) `s_ij` is that scale relative to `c_i`, so that exact and estimated weights share one stabiliser;
for other maps it is 0, and `c_i` is the maximum over the window: the kernelized part is then measured against the
strongest token of the window.

Shapes as in `ops.kernelized`; log_mix `[H]`, or row by row `[B | 1, H, L | 1]`; the window is the last `window` tokens
(causal, the token itself included) or the tokens at a distance below `window` (bidirectional). Sinks (`ops.sinks`)
count as inside of every window.

The sequence is split into blocks of tokens (`ops.window_blocks`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .calls import WindowedCall
from .common import Features, KVState, State, compute_dtype, divide, mask_tokens, with_ones
from .disentangled import one_direction
from .graph_nodes import graph_node, places_nodes
from .int8 import append, to_dtype
from .kernelized import masked_key_features
from .sinks import Sinks, attend_from_sinks, end_tokens, first_tokens, take_tokens
from .terms import distances
from .window_blocks import BlockedCall
from .window_tokens import gather_tokens
from .window_weights import (
    Columns,
    QueryRows,
    capped_products,
    decaying,
    far_and_near,
    far_mix,
    head_rows,
    keyless_column,
    make_query_rows,
    row_weights,
    with_term_features,
)


def windowed(call: WindowedCall) -> tuple[Tensor, State | None]:
    """Compute either form; the causal one is continued from `call.state`.

    The kernelized part of the causal form is attention over keys delayed by `window` tokens, so the state consists of
    `kv`, `k_sum` (`log_scale`), a ring of the last `window` keys and values: `ring_key [B, G, w, d]`,
    `ring_value [B, G, w, e]`, `ring_mask [B, w]`, the sinks and the number of tokens. Its windows count real tokens:
    padding anywhere changes nothing. Time O(L·(window + m)·d); temporaries O(group·(window + m)) for a group of blocks,
    and (bidirectional) the sums at each group's end.

    Returns:
        The output `[B, H, L, e]` in the dtype of `call.value`, and the state after the last token (causal).
    """
    state, length = call.state, call.query.shape[2]
    if length == 0:
        return call.value.new_zeros(*call.query.shape[:3], call.value.shape[-1]), state
    if state is not None and length == 1:
        return _step(call, state)
    if call.causal:
        return windowed_causal(call)
    if _becomes_node(call):
        return _node(call, call.key.new_ones(1, length).bool() if call.mask is None else call.mask)[0], None
    sinks = end_tokens(call)
    return attend_from_sinks(windowed_bidirectional(call, sinks), call, sinks), None


def windowed_causal(call: WindowedCall) -> tuple[Tensor, State]:
    """Compute the causal form of at least one token, and the state after it; outputs at padding are zero."""
    length, window = call.query.shape[2], call.window
    call = with_term_features(call)
    inputs, valid, query_index, ring = gather_tokens(call, call.log_mixing_weights())
    sinks, first = first_tokens(call)
    position = torch.arange(-window, length, device=call.query.device)
    far = valid & (position < length - window)  # the others stay in the ring
    if sinks is not None:
        far = far & (position > sinks.position[:, -1:])
    if _becomes_node(call):
        out, *kv = _node(inputs, valid, far[:, :length], *((None,) * 3 if sinks is None else sinks))
        if query_index is not None:
            out = mask_tokens(take_tokens(out, query_index), call.mask)
        return out, {**KVState(kv[0], kv[1] if len(kv) > 1 else None).state(), **ring, **first}
    blocked = BlockedCall(inputs, valid, far, sinks, older=window)
    carried = blocked.nothing if call.state is None else KVState.from_state(call.state)
    parts = []
    slope = blocked.slope
    if slope is not None and call.state is not None and call.mask is not None:  # whose padding comes first
        carried = carried.decayed((~call.mask).sum(dim=1, keepdim=True) * slope)
    for start in blocked.starts:
        count = blocked.group_size(start)
        rows = blocked.rows(start)
        keys = blocked.keys(start)
        before, carried = keys.kv_state.at(slice(0, count)).running(carried, log_decay=blocked.log_decay)
        parts.append(blocked.attend(start, rows, keys, before))
    out = blocked.join(parts)
    if query_index is not None:
        out = mask_tokens(take_tokens(out, query_index), call.mask)
    after = carried.decayed(blocked.log_decay).plus(keys.kv_state.at(-blocked.reach if blocked.free else count))
    if slope is not None:  # relative to the next token
        after = after.decayed(slope * ((blocked.count + 1) * blocked.size - length))
    return out, {**after.state(), **ring, **first}


def windowed_bidirectional(call: WindowedCall, sinks: Sinks | None) -> Tensor:
    """Compute the bidirectional form; outputs at padding mean nothing.

    Sinks (`end_tokens`) are keys only here: `attend_from_sinks` replaces the outputs of their own queries. A call may
    be a part of a sequence: `call.state` then holds the sums over keys that are far from all of its tokens, and `sinks`
    are those of the sequence, at positions relative to the first token of the part.
    """
    positions = torch.arange(call.query.shape[2], device=call.query.device)
    valid = far = torch.ones_like(positions, dtype=torch.bool).unsqueeze(0) if call.mask is None else call.mask
    if sinks is not None:
        far = far & ~(sinks.position.unsqueeze(-1) == positions).any(dim=1)
    masked = with_term_features(call.replace(query=mask_tokens(call.query, call.mask)))
    blocked = BlockedCall(masked, valid, far, sinks)
    carried = blocked.nothing if call.state is None else KVState.from_state(call.state)
    parts = []
    for start, later in zip(blocked.starts, blocked.later_states(), strict=True):
        keys = blocked.keys(start)
        before, carried = keys.kv_state.at(slice(0, blocked.group_size(start))).running(carried)
        behind, _ = keys.kv_state.at(slice(2 * blocked.reach, None)).apply(lambda x: x.flip(0)).running(later)
        behind = behind.apply(lambda x: x.flip(0))
        if call.terms.bias is not None:
            behind = behind._replace(total=behind.total * call.terms.behind[:, None, None].to(behind.total.dtype))
        if call.terms.relative is not None:
            before = before._replace(total=one_direction(before.total, 0, dim=-2))
            behind = behind._replace(total=one_direction(behind.total, 1, dim=-2))
        far_state = before.plus(behind)
        parts.append(blocked.attend(start, blocked.rows(start), keys, far_state))
    return blocked.join(parts)


def _becomes_node(call: WindowedCall) -> bool:
    """Return whether a call becomes one node of the graph that is exported (`ops.graph_nodes`)."""
    served = {"softcap", "sink"} if call.causal else {"softcap"}
    if call.state is not None or not served.issuperset(call.terms.names()):
        return False
    return places_nodes(call.query.shape[2], call.query)


def _node(call: WindowedCall, valid: Tensor, *others: Tensor | None) -> Sequence[Tensor]:
    """Place the node of a call, and return its outputs: those of the queries, and the sums of the causal state.

    `others` are the inputs behind `valid` of the function in `ops.onnx_functions`.
    """
    batch, heads, length, _ = call.query.shape
    groups = call.key.shape[1]
    terms = call.terms
    mix = call.log_mixing_weights()
    keys = call.key_features(call.key[:, :, :length])
    inputs = (call.query, call.key, call.value, *call.query_features(call.query), *keys, mix, valid)
    attributes = {
        "heads": heads,
        "groups": groups,
        "window": call.window,
        "scaling": float(call.scaling),
        "softcap": float(terms.softcap or 0.0),
        "mixes_rows": int(mix.shape[2] != 1),
    }
    width = call.value.shape[3]
    shapes: list[Sequence[int]] = [(batch, heads, length, width)]
    if not call.causal:
        return graph_node("Window", inputs, {**attributes, "sinks": call.sinks}, *shapes)
    shapes.append((batch, groups, keys.values.shape[3], width + 1))
    if keys.log_scale is not None:
        shapes.append((batch, groups))
    return graph_node("CausalWindow", (*inputs, *others, terms.sink), {**attributes, "causal": 1}, *shapes)


def _step(call: WindowedCall, state: State) -> tuple[Tensor, State]:
    """Compute one token after a state in O((window + m)·d), without a loop, and the state after it, written anew.

    The oldest key of the ring moves into `kv` and `k_sum` unless it is a sink, and the new key is appended to the ring.
    Rows whose token is padding have zeros, and the state that they had.
    """
    reads_masks = call.query.device.type == "cpu" and not torch.compiler.is_compiling()
    if call.mask is not None and reads_masks and bool(call.mask.all()):
        call = call.replace(mask=None)
    call = with_term_features(call.replace(query=mask_tokens(call.query, call.mask)))
    query, key, value, terms = call.query, call.key, call.value, call.terms
    dtype = compute_dtype(query)
    slope = None if terms.slope is None else terms.slope.to(dtype)
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    near_key, ring_key = _moved(state["ring_key"], key, call.mask, call.cache_dtype)
    near_value, ring_value = _moved(state["ring_value"], value, call.mask, call.cache_dtype)
    is_token = state["ring_mask"][:, None, :, None]
    near = _moved(is_token, is_token.new_ones(batch, 1, 1, 1), call.mask, None)[0][:, 0, :, 0]
    ring = {"ring_key": ring_key, "ring_value": ring_value, "ring_mask": near}
    sinks, first = first_tokens(call)
    far = _with_oldest(call, state)
    if sinks is not None:
        near_key = torch.cat([near_key, sinks.key], dim=2)
        near_value = torch.cat([near_value, sinks.value], dim=2)
        has_left = torch.arange(call.sinks, device=near.device) <= state["count"].unsqueeze(1) - call.window
        near = torch.cat([near, has_left], dim=1)
    near_key, near_value = near_key.to(dtype), near_value.to(dtype)
    full = reads_masks and bool(near.all())
    if not full and not torch.compiler.is_exporting():  # the ring of a graph has zeros at padding
        near_key = mask_tokens(near_key, near)
        near_value = mask_tokens(near_value, near)
    grouped = (batch, groups, heads // groups, -1)
    logits = (query.to(dtype) * call.scaling).reshape(grouped) @ near_key.transpose(-1, -2)
    logits = terms.capped(logits)
    if terms.has_distances:
        logits = logits + terms.by_distance(_step_distances(call, state)).to(dtype).reshape(*logits.shape[:3], -1)
    if not full:
        logits = logits.masked_fill(~near[:, None, None, :], float("-inf"))
    values, scale = call.query_features(query.to(dtype))
    mix = far_mix(call).to(dtype).exp().unsqueeze(-1)
    features = Features((values * mix).reshape(grouped), None if scale is None else scale.reshape(grouped[:-1]))
    columns = [Columns(logits)]
    if terms.sink is not None:
        columns.append(Columns(terms.sink.to(dtype).view(1, groups, -1, 1).expand(batch, -1, -1, -1)))
    if slope is not None:
        features = decaying(features, columns, 0.0)
    weights, total = far_and_near(features, columns, far)
    normaliser = torch.cat([*weights, total[..., -1:]], dim=-1).sum(dim=-1)
    out = divide(weights[0] @ near_value + total[..., :-1], normaliser).view(batch, heads, 1, -1)
    if slope is not None:
        far = far.decayed(-slope if call.mask is None else -slope * call.mask)
    return mask_tokens(out, call.mask).to(value.dtype), {**far.state(), **ring, **first}


def _moved(ring: Tensor, new: Tensor, mask: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Append a token to a ring without its oldest one, in rows whose token is real, as `append` does."""
    if mask is None:
        return append(ring[:, :, 1:], new, dtype)
    index = torch.arange(ring.shape[2], device=ring.device) + mask.expand(ring.shape[0], -1)
    tokens, stored = append(ring, new, dtype)
    moved = take_tokens(tokens, index)
    return moved, moved if dtype is None else take_tokens(stored, index)


def _with_oldest(call: WindowedCall, state: State) -> KVState:
    """Return the sums with the oldest key of the ring, where it leaves the window and is no sink."""
    dtype = compute_dtype(call.query)
    key, value = (to_dtype(state[name][:, :, :1], dtype) for name in ("ring_key", "ring_value"))
    is_counted = state["ring_mask"][:, :1] & (state["count"].unsqueeze(1) - call.window >= call.sinks)
    is_counted = is_counted if call.mask is None else is_counted & call.mask
    features = masked_key_features(call.key_features, key, is_counted, dtype)
    oldest = KVState.of(features, with_ones(mask_tokens(value, is_counted)))
    slope = call.terms.slope
    return KVState.from_state(state).plus(oldest.decayed(None if slope is None else -slope.to(dtype) * call.window))


def _step_distances(call: WindowedCall, state: State) -> Tensor:
    """Return how far the tokens of the ring and then the sinks are before the new token, `[B, 1, w + s]`."""
    count = state["count"].unsqueeze(1)
    ring = torch.arange(call.window - 1, -1, -1, device=count.device).expand(count.shape[0], -1)
    return torch.cat([ring, count - torch.arange(call.sinks, device=count.device)], dim=1).unsqueeze(1)


def inside_window(
    mask: Tensor | None, query: Tensor, key: Tensor, window: int, causal: bool, start: int | None = None
) -> Tensor:
    """Return which keys lie in the window of each query, `[B | 1, 1, L, S]`.

    Queries are the tokens from `start` on (None: the last). Distances are among real tokens (causal, mask `[B, S]`) or
    in the sequence. A full mask may show later keys in a causal call, too: the near ones are inside then.
    """
    position = torch.arange(key.shape[2], device=key.device).unsqueeze(0)
    if causal and mask is not None and mask.dim() == 2:
        position = mask.long().cumsum(dim=1)
    start = key.shape[2] - query.shape[2] if start is None else start
    distance = position[:, None, start : start + query.shape[2], None] - position[:, None, None, :]
    shows_later = not causal or (mask is not None and mask.dim() == 4)
    return (distance.abs() < window) & ((distance >= 0) | shows_later)


def dense_windowed_weights(call: WindowedCall, inside: Tensor, allowed: Tensor, start: int | None = None) -> Tensor:
    """Compute explicit normalised weights `[B, H, L, S]`, for analysis. O(L·S) time and memory.

    Args:
        call: The call, whose window and mask are not read.
        inside: `[B | 1, H | 1, L, S]`, which keys have exact weights.
        allowed: `[B | 1, H | 1, L, S]`, which keys are visible at all.
        start: The position of the first query (None: the queries are the last of the keys).
    """
    call = with_term_features(call)
    query = call.query
    key = call.key
    log_mix = far_mix(call)
    terms = call.terms
    batch, groups = key.shape[:2]
    rows = make_query_rows(query, call.query_features, groups, call.scaling, log_mix)
    rows = QueryRows(rows.query.flatten(2, 3), rows.features.apply(lambda x: x.flatten(2, 3)))
    if not key.shape[2]:
        return rows.query.new_zeros(*query.shape[:3], 0)
    key = mask_tokens(key.to(rows.query.dtype), allowed.any(dim=2).any(dim=1).expand(batch, -1))
    exact, outside = (
        flags.expand(batch, query.shape[1], -1, -1).unflatten(1, (groups, -1)).flatten(2, 3)
        for flags in (inside & allowed, ~inside & allowed)
    )
    logits = capped_products(rows.query, functional.pad(key, (0, 1)), terms)
    outside = outside.to(key.dtype)
    features = terms.placed(call.key_features(key))
    if terms.has_distances:
        distance = distances(query.shape[2], key.shape[2], start, key.device)
        logits = logits + head_rows(terms.by_distance(distance).to(logits.dtype), groups)
        if terms.slope is None:
            outside = outside * head_rows(terms.outside(distance).to(logits.dtype), groups)
    if terms.relative is not None:
        distance = distances(query.shape[2], key.shape[2], start, key.device)
        logits = logits + terms.relative.pairs(rows.query[..., :-1], key, distance)
        behind = features._replace(values=one_direction(features.values, 1))
        other = Columns(torch.full_like(logits, float("-inf")), behind, outside * (distance < 0))
        outside = outside * (distance > 0)
        features = features._replace(values=one_direction(features.values, 0))
    columns = [Columns(logits.masked_fill(~exact, float("-inf")), features, outside)]
    if terms.sink is not None:
        columns.append(keyless_column(terms.sink, rows, key)[0])
    if terms.relative is not None:
        columns.append(other)
    features = rows.features
    if terms.slope is not None:  # distances are the differences of those to the first key
        log_decay = -terms.slope[:, None].to(key.dtype) * distance[:, 0]
        features = decaying(features, columns, log_decay)
    parts = [part.reshape(*query.shape[:3], -1) for part in row_weights(features, columns)[0]]
    total = torch.cat(parts, dim=-1).sum(dim=-1)
    keyed = [part for part in parts if part.shape[-1] == key.shape[2]]
    return divide(torch.stack(keyed).sum(dim=0), total)
