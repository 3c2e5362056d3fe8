"""Windowed attention in ONNX operators (`ops.windowed`): blocks of queries and their neighbours.

What depends on lengths and padding alone is computed once for all layers, which have the same nodes. A `Scan` goes over
groups of blocks, so that what a group needs stays in a core's cache. `op` is the builder of the function
(`ops.onnx_functions`), and `n` the number of blocks of c tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .common import DENOMINATOR_EPS
from .onnx_sums import END, FLOAT, INT64, constant, joined, running_sums, swapped, within
from .window_blocks import BLOCKED, MAX_BLOCK, MIN_BLOCK
from .window_weights import FLOOR, LARGEST_GAP

#: Most blocks of rows handled at once.
GROUP = 8


def window(
    op: Any,
    query: Any,
    key: Any,
    value: Any,
    query_values: Any,
    query_scale: Any,
    key_values: Any,
    key_scale: Any,
    log_mix: Any,
    valid: Any,
    far: Any,
    sink_key: Any = None,
    sink_value: Any = None,
    sink_position: Any = None,
    model_sink: Any = None,
    *,
    heads: int,
    groups: int,
    window: int,
    scaling: float,
    causal: int,
    softcap: float,
    mixes_rows: int,
) -> Sequence[Any]:
    """Compute `ops.windowed` of whole sequences: the output `[B, H, L, e]`, and the causal state after them.

    Args:
        op: The builder of the function.
        query: `[B, H, L, d]`.
        key, value: `[B, G, S, d]` and `[B, G, S, e]`; in the causal form `window` older tokens come first.
        query_values, query_scale: The features `[B, H, L, m]`, and their log scale `[B, H, L]` or None.
        key_values, key_scale: Those of the first L keys.
        log_mix: `[B | 1, H, L | 1]`.
        valid: `[B | 1, S]`, False for padding.
        far: `[B | 1, L]`, False for padding too, and for keys that are far from no query.
        sink_key, sink_value, sink_position: `[B, G, s, d]`, `[B, G, s, e]`, `[B, s]` (`ops.sinks`); or None.
        model_sink: The logit without a key `[H]`, or None.
        heads, groups: H and G.
        window, scaling, causal: As in `WindowedCall`.
        softcap: The bound of the logits; 0 for none.
        mixes_rows: Whether `log_mix` differs from token to token.
    """
    import onnx_ir as ir

    size = min(max(window, MIN_BLOCK), MAX_BLOCK)
    reach = -(-window // size)
    older = window if causal else 0
    near = _NearKeys(size, reach, 0 if causal else reach, window, bool(causal))
    repeats = heads // groups
    length = op.Shape(query, start=2, end=3)
    count = op.Div(op.Add(length, [size - 1]), [size])
    far_value = op.Pad(op.Slice(value, [0], length, [2]), [0] * 7 + [1], 1.0)
    far_value = op.Mul(far_value, op.Unsqueeze(op.Cast(far, to=FLOAT), [1, 3]))
    key_scale = None if key_scale is None else op.Where(op.Unsqueeze(far, [1]), key_scale, -np.inf)
    front = reach * size - window if causal else None
    far_states, after = _far_sums(op, key_values, key_scale, far_value, count, size, reach, front)

    # What depends on lengths and padding alone, which all layers share: k groups of b blocks.
    numbers = _groups(op, count)
    starts = op.Unsqueeze(op.Mul(numbers, size), [2])  # [k, b, 1]
    positions = op.Add(starts, constant(op, np.arange(size)))
    row_index, _ = within(op, positions, length)  # [k, b, c]
    near_index, exists = within(op, op.Add(starts, constant(op, near.offsets + older)), op.Shape(key, start=2, end=3))
    shown = op.Transpose(op.Gather(valid, near_index, axis=1), perm=[1, 0, 2, 3])  # [k, B | 1, b, T]
    shown = op.And(op.Unsqueeze(op.And(shown, op.Unsqueeze(exists, [1])), [2, 4, 5]), constant(op, near.inside))
    bias = op.Where(shown, 0.0, -np.inf)  # [k, B | 1, 1, b, 1, c, T]
    edge_index, exists = within(op, op.Add(starts, constant(op, near.edge_offsets + older)), length)
    outside = op.And(op.Unsqueeze(exists, [2, 3]), constant(op, near.outside))  # [k, b, 1, c, E]
    outside = op.Cast(outside, to=FLOAT) if key_scale is None else op.Where(outside, 0.0, -np.inf)
    geometry = [row_index, near_index, bias, edge_index, outside, op.Min(numbers, op.Sub(count, [1]))]
    if sink_key is not None:
        distance = op.Sub(op.Unsqueeze(positions, [1, 4]), op.Unsqueeze(sink_position, [0, 2, 3]))  # [k, B, b, c, s]
        distance = distance if causal else op.Abs(distance)
        hidden = op.Where(op.GreaterOrEqual(distance, window), 0.0, -np.inf)
        geometry.append(op.Unsqueeze(hidden, [2, 4]))
        sink_key, sink_value = (op.Unsqueeze(tensor, [2]) for tensor in (sink_key, sink_value))

    def grouped(tensor: Any) -> Any:
        """Split the heads of `[B, H, L, x]`."""
        shape = op.Concat([0, groups, repeats], op.Shape(tensor, start=2), axis=0)
        return tensor if repeats == 1 else op.Reshape(tensor, shape)

    query, query_values = grouped(query), grouped(query_values)
    query_scale = None if query_scale is None else grouped(op.Unsqueeze(query_scale, [3]))
    mixed = op.Unsqueeze(log_mix, [3])
    mixed = grouped(mixed) if mixes_rows else op.Reshape(mixed, [0, groups, 1, repeats, 1, 1])

    def attend(
        op: Any, rows_at: Any, keys_at: Any, bias: Any, edge_at: Any, outside: Any, numbers: Any, sink_bias: Any = None
    ) -> Any:
        """Compute the outputs of one group `[B, G, R, b, c, e]`."""

        def rows_of(tensor: Any) -> Any:
            """Gather rows `[B, G, b, R·c, x]`."""
            if repeats == 1:
                return op.Gather(tensor, rows_at, axis=2)
            rows = op.Transpose(op.Gather(tensor, rows_at, axis=3), perm=[0, 1, 3, 2, 4, 5])
            return op.Reshape(rows, [0, 0, 0, repeats * size, -1])

        def folded(tensor: Any) -> Any:
            return op.Reshape(tensor, [0, 0, 0, repeats * size, -1])

        def unfolded(tensor: Any) -> Any:
            return op.Reshape(tensor, [0, 0, 0, repeats, size, -1])

        def logits_of(keys: Any, bias: Any) -> Any:
            logits = unfolded(op.MatMul(rows, swapped(op, keys, 5)))
            return op.Add(_capped(op, logits, softcap), bias)

        # Exact logits: the window, and the sinks.
        rows = op.Mul(rows_of(query), scaling)
        columns = [(logits_of(op.Gather(key, keys_at, axis=2), bias), op.Gather(value, keys_at, axis=2))]
        if sink_bias is not None:
            columns.append((logits_of(sink_key, sink_bias), sink_value))
        top = op.Max(*(op.ReduceMax(logits, [-1]) for logits, _ in columns), FLOOR)
        if model_sink is not None:
            model_logits = op.Reshape(model_sink, [1, groups, 1, repeats, 1, 1])
            top = op.Max(top, model_logits)

        # What is outside: keys of the blocks near the rows, and sums over all others.
        features = rows_of(query_values)
        edge_keys = op.Gather(key_values, edge_at, axis=2)
        weights = unfolded(op.MatMul(features, swapped(op, edge_keys, 5)))
        carried = op.MatMul(features, op.Gather(far_states[0], numbers, axis=2))
        factor = unfolded(rows_of(mixed)) if mixes_rows else mixed
        exponent = None if query_scale is None else unfolded(rows_of(query_scale))
        if key_scale is None:
            weights = op.Mul(weights, outside)
        else:
            before = op.Unsqueeze(op.Gather(far_states[1], numbers, axis=2), [3, 4, 5])
            scale = op.Add(op.Unsqueeze(op.Gather(key_scale, edge_at, axis=2), [3, 4]), outside)  # [B, G, b, 1, c, E]
            far_scale = op.Max(op.ReduceMax(scale, [-1]), before)
            floor = op.Max(far_scale, FLOOR)
            weights = op.Mul(weights, op.Exp(op.Sub(scale, floor)))
            carried = folded(op.Mul(unfolded(carried), op.Exp(op.Sub(before, floor))))
            exponent = op.Add(exponent, far_scale)
            top = op.Max(top, exponent)
        far = op.Add(op.MatMul(folded(weights), op.Gather(far_value, edge_at, axis=2)), carried)

        # All of it relative to one stabiliser.
        if exponent is not None:
            factor = op.Add(factor, op.Min(op.Sub(exponent, top), LARGEST_GAP))
        total = op.Mul(unfolded(far), op.Exp(factor))
        numerator = op.Slice(total, [0], [-1], [5])
        normaliser = op.Slice(total, [-1], [END], [5])
        for logits, values in columns:
            weights = op.Exp(op.Sub(logits, top))
            numerator = op.Add(numerator, unfolded(op.MatMul(folded(weights), values)))
            normaliser = op.Add(normaliser, op.ReduceSum(weights, [-1]))
        if model_sink is not None:
            normaliser = op.Add(normaliser, op.Exp(op.Sub(model_logits, top)))
        out = op.Div(numerator, op.Max(normaliser, DENOMINATOR_EPS))
        return op.Transpose(out, perm=[0, 1, 3, 2, 4, 5])

    names = ("rows_at", "keys_at", "bias", "edge_at", "outside", "numbers", "sink_bias")[: len(geometry)]
    types = [ir.DataType.FLOAT if name in ("bias", "outside", "sink_bias") else ir.DataType.INT64 for name in names]
    body = op.builder.subgraph(
        attend,
        [ir.val(name, dtype) for name, dtype in zip(names, types, strict=True)],
        [ir.val("out", ir.DataType.FLOAT)],
        name="attend",
    )
    out = op.Scan(*geometry, body=body, num_scan_inputs=len(geometry), scan_output_axes=[3])  # [B, G, R, k, b, c, e]
    out = op.Reshape(out, op.Concat([0, heads, -1], op.Shape(out, start=6), axis=0))
    return (op.Slice(out, [0], length, [2]), *after)


def bidirectional_window(op: Any, *inputs: Any, sinks: int, **attributes: Any) -> Any:
    """Compute `window` of an encoder, which has the first and the last `sinks` tokens of each row as sinks.

    Inputs are those of `window` up to `valid`.
    """
    query, key, value, *_, valid = inputs
    heads, groups = attributes["heads"], attributes["groups"]
    compute: Any = window
    if not sinks:
        return compute(op, *inputs, valid, causal=0, **attributes)
    rows = op.Shape(query, end=1)

    def taken(tensor: Any, count: int) -> Any:
        """Gather the sinks of `[B, count, L, x]`."""
        index = op.Unsqueeze(position, [1, 3])
        sizes = op.Concat(rows, [count, 2 * sinks], op.Shape(tensor, start=3), axis=0)
        return op.GatherElements(tensor, op.Expand(index, sizes), axis=2)

    # The n-th token of a row stands behind all places with fewer tokens up to them.
    numbers = op.CumSum(op.Cast(valid, to=INT64), 1)
    last = op.ReduceMax(numbers, [1])
    order = constant(op, np.arange(sinks)[None])
    requested = op.Concat(op.Min(op.Add(order, 1), last), op.Max(op.Sub(last, order), 1), axis=1)
    is_before = op.Less(op.Unsqueeze(numbers, [1]), op.Unsqueeze(requested, [2]))
    position = op.ReduceSum(op.Cast(is_before, to=INT64), [2], keepdims=0)
    position = op.Min(position, op.Sub(op.Shape(query, start=2, end=3), [1]))
    position = op.Expand(position, op.Concat(rows, [1], axis=0))
    places = op.Range(0, op.Squeeze(op.Shape(query, start=2, end=3)), 1)
    is_sink = op.ReduceMax(op.Cast(op.Equal(op.Unsqueeze(position, [2]), places), to=INT64), [1], keepdims=0)
    far = op.And(valid, op.Equal(is_sink, 0))
    sink_inputs = (taken(key, groups), taken(value, groups), position)
    (out,) = compute(op, *inputs, far, *sink_inputs, causal=0, **attributes)
    # The sinks themselves see every key.
    grouped = op.Concat([0, groups, -1], op.Shape(query, start=3), axis=0)
    queries = op.Reshape(op.Mul(taken(query, heads), attributes["scaling"]), grouped)
    logits = op.MatMul(queries, swapped(op, key))
    logits = _capped(op, logits, attributes["softcap"])
    logits = op.Add(logits, op.Unsqueeze(op.Where(valid, 0.0, BLOCKED), [1, 2]))
    exact = op.MatMul(op.Softmax(logits, axis=-1), value)
    exact = op.Reshape(exact, op.Concat([0, heads, 2 * sinks], op.Shape(value, start=3), axis=0))
    index = op.Expand(op.Unsqueeze(position, [1, 3]), op.Shape(exact))
    return op.ScatterElements(out, index, exact, axis=2)


def _capped(op: Any, logits: Any, softcap: float) -> Any:
    return op.Mul(op.Tanh(op.Div(logits, softcap)), softcap) if softcap else logits


class _NearKeys:
    """The keys near a block of rows: constants of every block.

    Attributes:
        offsets: Where they are relative to the first row, `[T]`.
        inside: Which are in the window of each row, `[c, T]`.
        edge_offsets: Those that are outside of the window of a row, `[E]`.
        outside: Which of these are seen by each row outside of its window, `[c, E]`.
    """

    def __init__(self, size: int, reach: int, ahead: int, window: int, causal: bool) -> None:
        self.offsets = np.arange(-reach * size, (ahead + 1) * size)
        distance = np.arange(size)[:, None] - self.offsets
        self.inside = (distance < window) & (distance >= (0 if causal else 1 - window))
        outside = distance >= window if causal else ~self.inside
        edge = outside.any(axis=0)
        self.edge_offsets, self.outside = self.offsets[edge], outside[:, edge]


def _groups(op: Any, count: Any) -> Any:
    """Return the numbers of blocks in k groups of b, `[k, b]`: from 0 on, and at least as many as there are."""
    parts = op.Div(op.Add(count, [GROUP - 1]), [GROUP])
    blocks = op.Div(op.Sub(op.Add(count, parts), [1]), parts)
    numbers = op.Range(0, op.Squeeze(op.Mul(parts, blocks)), 1)
    return op.Reshape(numbers, op.Concat(parts, blocks, axis=0))


def _far_sums(
    op: Any,
    key_values: Any,
    key_scale: Any,
    value: Any,
    count: Any,
    size: int,
    reach: int,
    front: int | None,
) -> tuple[tuple[Any, Any], Sequence[Any]]:
    """Return the sums over keys far from each block of rows, `[B, G, n, m, e + 1]` and `[B, G, n]`.

    And the sums over all keys, which are the causal state. `front` is where the first key stands in its block;
    None in the bidirectional form.
    """
    import onnx_ir as ir

    length = op.Shape(key_values, start=2, end=3)
    numbers = _groups(op, count if front is None else op.Add(count, [1]))
    index = op.Add(op.Unsqueeze(op.Mul(numbers, size), [2]), constant(op, np.arange(size) - (front or 0)))
    index, exists = within(op, index, length)  # [k, b, c]

    def add_up(op: Any, tokens: Any, exists: Any) -> Sequence[Any]:
        """Return the sums over each block of a group, `[B, G, b, m, e + 1]` and `[B, G, b]`."""
        features = op.Gather(key_values, tokens, axis=2)
        values = op.Mul(op.Gather(value, tokens, axis=2), op.Unsqueeze(op.Cast(exists, to=FLOAT), [2]))
        tops = []
        if key_scale is not None:
            scale = op.Where(exists, op.Gather(key_scale, tokens, axis=2), -np.inf)
            tops.append(op.ReduceMax(scale, [3], keepdims=0))
            difference = op.Sub(scale, op.Max(op.Unsqueeze(tops[0], [3]), FLOOR))
            features = op.Mul(features, op.Unsqueeze(op.Exp(difference), [4]))
        # In this order the wider tensor is none that is transposed.
        total = op.MatMul(swapped(op, values, 5), features)
        return swapped(op, total, 5), *tops

    outputs = 1 if key_scale is None else 2
    body = op.builder.subgraph(
        add_up,
        [ir.val("tokens", ir.DataType.INT64), ir.val("exists", ir.DataType.BOOL)],
        [ir.val(name, ir.DataType.FLOAT) for name in ("total", "scale")[:outputs]],
        name="add_up",
    )
    added = op.Scan(index, exists, body=body, num_scan_inputs=2, scan_output_axes=[2] * outputs, _outputs=outputs)
    scale = None
    if key_scale is not None:
        added, scale = added
        scale = op.Reshape(scale, [0, 0, -1])
    added = op.Reshape(added, op.Concat([0, 0, -1], op.Shape(added, start=4), axis=0))
    if front is not None:
        before, before_scale, total, total_scale = running_sums(op, added, scale)
        if scale is not None:
            before_scale = op.Slice(before_scale, [0], count, [2])
        state = (total,) if scale is None else (total, total_scale)
        return (op.Slice(before, [0], count, [2]), before_scale), state
    # Sums before a block are those of the blocks up to `reach` before it: blocks without keys come before and after.
    added = op.Pad(added, [0, 0, reach, 0, 0, 0, 0, reach, 0, 0])
    scale = None if scale is None else op.Pad(scale, [0, 0, reach, 0, 0, reach], -np.inf)
    before, before_scale, *_ = running_sums(op, added, scale)
    behind, behind_scale, *_ = running_sums(op, added, scale, reverse=True)
    before = op.Slice(before, [0], count, [2])
    behind = op.Slice(behind, [2 * reach], op.Add(count, [2 * reach]), [2])
    if scale is None:
        return (op.Add(before, behind), None), ()
    before_scale = op.Slice(before_scale, [0], count, [2])
    behind_scale = op.Slice(behind_scale, [2 * reach], op.Add(count, [2 * reach]), [2])
    return joined(op, (before, before_scale), (behind, behind_scale)), ()
