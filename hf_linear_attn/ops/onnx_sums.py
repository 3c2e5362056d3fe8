"""Sums over keys in ONNX operators: running ones over blocks, and the causal forms of mechanisms with a state.

Causal forms go from chunk to chunk (`Scan`), which takes a time linear in the length, and hold one chunk in a core's
cache. `op` is the builder of the function (`ops.onnx_functions`), `n` the number of blocks or chunks of c tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .common import DENOMINATOR_EPS
from .window_weights import FLOOR

#: Tokens of a chunk; where each feature decays, where each has a log scale, and where each token corrects the state.
CHUNK, FEATURE_CHUNK, PIECE, STEP = 64, 32, 8, 1

#: Where `Slice` ends at the latest.
END = np.iinfo(np.int64).max

#: Types of `Cast`.
FLOAT, INT64 = 1, 7


def constant(op: Any, array: np.ndarray) -> Any:
    import onnx_ir as ir

    return op.Constant(value=ir.tensor(array))


def within(op: Any, index: Any, length: Any) -> tuple[Any, Any]:
    """Return the index of tokens `[n, T]` within a length `[1]`, and which of them exist."""
    last = op.Sub(length, [1])
    exists = op.And(op.GreaterOrEqual(index, 0), op.LessOrEqual(index, last))
    return op.Min(op.Max(index, 0), last), exists


def joined(op: Any, first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    """Add sums `[…, m, x]` with log scales `[…]`, relative to the larger one."""
    top = op.Max(first[1], second[1])
    floor = op.Max(top, FLOOR)
    terms = [op.Mul(total, op.Unsqueeze(op.Exp(op.Sub(scale, floor)), [-1, -2])) for total, scale in (first, second)]
    return op.Add(*terms), top


def running_sums(op: Any, added: Any, scale: Any, *, reverse: bool = False) -> tuple[Any, Any, Any, Any]:
    """Return the sums `[B, G, n, m, x]` and log scales `[B, G, n]` before each block, and those of all blocks.

    With `reverse` they are those behind each block. Without scales all of it is one cumulative sum.
    """
    if scale is None:
        before = op.CumSum(added, 2, exclusive=1, reverse=int(reverse))
        return before, None, op.ReduceSum(added, [2], keepdims=0), None
    import onnx_ir as ir

    first = op.ReduceSum(op.Slice(added, [0], [0], [2]), [2], keepdims=0)  # over no block: zeros
    first_scale = op.Add(op.ReduceSum(op.Slice(added, [0], [0], [2]), [2, 3, 4], keepdims=0), -np.inf)

    def step(op: Any, total: Any, top: Any, new: Any, new_top: Any) -> Sequence[Any]:
        after, after_top = joined(op, (total, top), (new, new_top))
        return after, after_top, op.Identity(total), op.Identity(top)

    names = ("total", "scale", "added", "added_scale")
    body = op.builder.subgraph(
        step,
        [ir.val(name, ir.DataType.FLOAT) for name in names],
        [ir.val(f"{name}_out", ir.DataType.FLOAT) for name in (*names[:2], "before", "before_scale")],
        name="running_sums",
    )
    total, top, before, before_scale = op.Scan(
        first,
        first_scale,
        added,
        scale,
        body=body,
        num_scan_inputs=2,
        scan_input_axes=[2, 2],
        scan_input_directions=[int(reverse)] * 2,
        scan_output_axes=[2, 2],
        scan_output_directions=[int(reverse)] * 2,
        _outputs=4,
    )
    return before, before_scale, total, top


def _scan_chunks(
    op: Any, step: Callable[..., Sequence[Any]], size: int, length: Any, start: Sequence[Any]
) -> Sequence[Any]:
    """Go over the chunks of L tokens: return the outputs of all `[B, G, R, L, x]`, and the state after the last.

    `step(op, tokens, exists, *state)` gets the places of its tokens `[c]`, which of them exist, and the state before
    them; it returns the state after them, and the outputs `[B, G, R, c, x]`.
    """
    import onnx_ir as ir

    count = op.Div(op.Add(length, [size - 1]), [size])
    starts = op.Unsqueeze(op.Mul(op.Range(0, op.Squeeze(count), 1), size), [1])
    index, exists = within(op, op.Add(starts, constant(op, np.arange(size))), length)

    def body(op: Any, *inputs: Any) -> Sequence[Any]:
        *state, tokens, exists = inputs
        return step(op, tokens, exists, *state)

    names = [f"state_{number}" for number in range(len(start))]
    inputs = [ir.val(name, ir.DataType.FLOAT) for name in names]
    inputs += [ir.val("tokens", ir.DataType.INT64), ir.val("exists", ir.DataType.BOOL)]
    outputs = [ir.val(name, ir.DataType.FLOAT) for name in (*(f"{name}_after" for name in names), "rows")]
    graph = op.builder.subgraph(body, inputs, outputs, name="chunk")
    axes = {"scan_output_axes": [3], "num_scan_inputs": 2}
    *after, out = op.Scan(*start, index, exists, body=graph, **axes, _outputs=len(start) + 1)  # [B, G, R, n, c, x]
    out = op.Reshape(out, op.Concat([0, 0, 0, -1], op.Shape(out, start=5), axis=0))
    return op.Slice(out, [0], length, [3]), *after


def _grouped(op: Any, tensor: Any, groups: int) -> Any:
    """View `[B, H, L, x]` as `[B, G, R, L, x]`."""
    shape = op.Shape(tensor)
    repeats = op.Div(op.Slice(shape, [1], [2], [0]), [groups])
    return op.Reshape(tensor, op.Concat([0, groups], repeats, op.Slice(shape, [2], [4], [0]), axis=0))


def _float(value: float) -> Any:
    import onnx_ir as ir

    return ir.tensor(np.array([value], np.float32))


def _zeros(op: Any, *tensors: Any, value: float = 0.0) -> Any:
    """Return zeros with the sizes of tensors `[B, G, L, x]`: the first two, and x of each."""
    sizes = [op.Shape(tensors[0], start=0, end=2), *(op.Shape(tensor, start=3) for tensor in tensors)]
    return op.ConstantOfShape(op.Concat(*sizes, axis=0), value=_float(value))


def swapped(op: Any, tensor: Any, rank: int = 4) -> Any:
    """Transpose the last two dimensions."""
    return op.Transpose(tensor, perm=[*range(rank - 2), rank - 1, rank - 2])


def causal_sums(
    op: Any,
    query: Any,
    key: Any,
    value: Any,
    key_scale: Any = None,
    log_decay: Any = None,
    total: Any = None,
    total_scale: Any = None,
    *,
    groups: int,
    by_feature: int,
) -> Sequence[Any]:
    """Compute `Σ_{j<=i} w_ij v_j` of `ops.gated`, relative to the row's largest key scale, and the state after them.

    Args:
        op: The builder of the function.
        query: Features `[B, H, L, m]`.
        key, value: Features `[B, G, L, m]`, zeros for padding, and what is summed `[B, G, L, x]`.
        key_scale: The log scale of the keys `[B, G, L]`, `-inf` for padding.
        log_decay: `[B, G, L, 1 | m]`, 0 for padding; without a log scale where each feature decays.
        total, total_scale: The state before the first token, `[B, G, m, x]` and `[B, G]`; None for zeros.
        groups: G.
        by_feature: Whether each feature decays by itself.
    """
    length = op.Shape(key, start=2, end=3)
    size = FEATURE_CHUNK if by_feature else CHUNK
    rows = _grouped(op, query, groups)
    lower = constant(op, np.tri(size, dtype=np.float32))
    start = [_zeros(op, key, value) if total is None else total]
    if key_scale is not None:
        nothing = op.ConstantOfShape(op.Shape(key, start=0, end=2), value=_float(-np.inf))
        start.append(nothing if total_scale is None else total_scale)

    def step(op: Any, tokens: Any, exists: Any, total: Any, top: Any = None) -> Sequence[Any]:
        exist = op.Unsqueeze(op.Cast(exists, to=FLOAT), [1])
        features, values = op.Gather(key, tokens, axis=2), op.Mul(op.Gather(value, tokens, axis=2), exist)
        queries = op.Gather(rows, tokens, axis=3)
        decay = last = None
        if log_decay is not None:  # G_i, [B, G, c, 1 | m], and that of the last token
            decay = op.CumSum(op.Mul(op.Gather(log_decay, tokens, axis=2), exist), 2)
            last = op.Slice(decay, [-1], [size], [2])

        def products(queries: Any, features: Any) -> Any:
            return op.MatMul(queries, op.Unsqueeze(swapped(op, features), [2]))

        def gaps(column: Any, row: Any) -> Any:
            return op.Unsqueeze(op.Exp(op.Min(op.Sub(column, row), 0.0)), [2])

        if key_scale is not None:
            offset = op.Where(exists, op.Gather(key_scale, tokens, axis=2), -np.inf)  # [B, G, c]
            offset = offset if decay is None else op.Sub(offset, op.Squeeze(decay, [3]))
            seen = op.Where(op.Greater(lower, 0.0), op.Unsqueeze(offset, [2]), -np.inf)
            before = op.Unsqueeze(top, [2])
            largest = op.Max(op.ReduceMax(seen, [3], keepdims=0), before, FLOOR)
            weights = op.Mul(products(queries, features), gaps(op.Unsqueeze(offset, [2]), op.Unsqueeze(largest, [3])))
            past = op.Mul(queries, op.Unsqueeze(op.Exp(op.Sub(before, largest)), [2, 4]))
            after = op.Max(op.ReduceMax(offset, [2], keepdims=0), top)
            floor = op.Unsqueeze(op.Max(after, FLOOR), [2])
            decay_factor = op.Unsqueeze(op.Exp(op.Sub(before, floor)), [3])
            written = op.Mul(features, op.Unsqueeze(op.Exp(op.Sub(offset, floor)), [3]))
            state = [after if last is None else op.Add(after, op.Squeeze(last, [2, 3]))]
        else:
            decay_factor = None if decay is None else op.Exp(swapped(op, last))
            written = features if decay is None else op.Mul(features, op.Exp(op.Sub(last, decay)))
            past = queries if decay is None else op.Mul(queries, op.Unsqueeze(op.Exp(decay), [2]))
            if by_feature:
                middle = op.Slice(decay, [size // 2], [size // 2 + 1], [2])
                queries = op.Mul(queries, op.Unsqueeze(op.Exp(op.Sub(decay, middle)), [2]))
                weights = products(queries, op.Mul(features, op.Exp(op.Sub(middle, decay))))
            else:
                weights = products(queries, features)
                weights = weights if decay is None else op.Mul(weights, gaps(decay, swapped(op, decay)))
            state = []
        out = op.MatMul(op.Mul(weights, lower), op.Unsqueeze(values, [2]))
        out = op.Add(out, op.MatMul(past, op.Unsqueeze(total, [2])))
        total = total if decay_factor is None else op.Mul(total, decay_factor)
        return op.Add(total, op.MatMul(swapped(op, written), values)), *state, out

    out, *after = _scan_chunks(op, step, size, length, start)
    return _joined_heads(op, out), *after


def _joined_heads(op: Any, tensor: Any) -> Any:
    """View `[B, G, R, L, x]` as `[B, H, L, x]`."""
    shape = op.Shape(tensor)
    heads = op.Mul(op.Slice(shape, [1], [2], [0]), op.Slice(shape, [2], [3], [0]))
    return op.Reshape(tensor, op.Concat([0], heads, op.Slice(shape, [3], [5], [0]), axis=0))


def causal_efficient(
    op: Any, query: Any, key: Any, value: Any, total: Any = None, top: Any = None, *, groups: int
) -> Sequence[Any]:
    """Compute the causal form of `ops.efficient`: the output `[B, H, L, e]`, and the state after it.

    Args:
        op: The builder of the function.
        query: `softmax(q)` `[B, H, L, d]`.
        key: The logits of the keys `[B, G, L, d]`, `-inf` for padding.
        value: `[v, 1]` `[B, G, L, e + 1]`.
        total, top: The state before the first token, `[B, G, d, e + 1]` and `[B, G, d]`; None for no key.
        groups: G.
    """
    length = op.Shape(key, start=2, end=3)
    rows = _grouped(op, query, groups)
    lower = constant(op, np.tri(PIECE, dtype=bool)[:, :, None])  # [t, s, 1]
    start = [_zeros(op, key, value), _zeros(op, key, value=-np.inf)] if total is None else [total, top]

    def step(op: Any, tokens: Any, exists: Any, total: Any, top: Any) -> Sequence[Any]:
        logits = op.Gather(key, tokens, axis=2)
        logits = op.Where(op.Unsqueeze(exists, [1]), logits, -np.inf)  # [B, G, t, d]
        values = op.Gather(value, tokens, axis=2)
        seen = op.Where(lower, op.Unsqueeze(logits, [2]), -np.inf)  # [B, G, t, s, d]
        before = op.Unsqueeze(top, [2])
        running = op.Max(op.ReduceMax(seen, [3], keepdims=0), before, FLOOR)
        inside = op.Exp(op.Sub(seen, op.Unsqueeze(running, [3])))
        past = op.Exp(op.Sub(before, running))
        ones = swapped(op, op.Slice(total, [-1], [END], [3]))
        normaliser = op.Add(op.ReduceSum(inside, [3], keepdims=0), op.Mul(past, ones))
        shares = op.Div(op.Gather(rows, tokens, axis=3), op.Unsqueeze(op.Max(normaliser, DENOMINATOR_EPS), [2]))
        weights = op.MatMul(op.Unsqueeze(shares, [4]), op.Unsqueeze(swapped(op, inside, 5), [2]))
        numerators = op.Unsqueeze(op.Slice(total, [0], [-1], [3]), [2])
        out = op.MatMul(op.Squeeze(weights, [4]), op.Unsqueeze(op.Slice(values, [0], [-1], [3]), [2]))
        out = op.Add(out, op.MatMul(op.Mul(shares, op.Unsqueeze(past, [2])), numerators))
        after = op.Max(op.ReduceMax(logits, [2], keepdims=0), top)
        floor = op.Max(after, FLOOR)
        rescaled = op.Mul(total, op.Unsqueeze(op.Exp(op.Sub(top, floor)), [3]))
        written = op.Exp(op.Sub(logits, op.Unsqueeze(floor, [2])))
        return op.Add(rescaled, op.MatMul(swapped(op, written), values)), after, out

    out, *after = _scan_chunks(op, step, PIECE, length, start)
    return _joined_heads(op, out), *after


def causal_delta(
    op: Any, query: Any, key: Any, value: Any, decay: Any, rate: Any, total: Any = None, *, groups: int
) -> Sequence[Any]:
    """Compute the sums of `ops.gated_delta`, `S_tᵀ q_t` `[B, H, L, e + 1]`, and the state after them, token by token.

    Args:
        op: The builder of the function.
        query: Features `[B, H, L, m]`.
        key, value: Features `[B, G, L, m]` and `[v, 1]` `[B, G, L, e + 1]`.
        decay, rate: α and β `[B, G, L, 1]`; 1 and 0 for padding.
        total: The state before the first token `[B, G, m, e + 1]`; None for zeros.
        groups: G.
    """
    rows = _grouped(op, query, groups)
    start = [_zeros(op, key, value) if total is None else total]

    def step(op: Any, tokens: Any, exists: Any, total: Any) -> Sequence[Any]:
        features, target = op.Gather(key, tokens, axis=2), op.Gather(value, tokens, axis=2)
        total = op.Mul(total, op.Gather(decay, tokens, axis=2))
        write = op.Mul(op.Sub(target, op.MatMul(features, total)), op.Gather(rate, tokens, axis=2))
        total = op.Add(total, op.MatMul(swapped(op, features), write))
        return total, op.MatMul(op.Gather(rows, tokens, axis=3), op.Unsqueeze(total, [2]))

    out, *after = _scan_chunks(op, step, STEP, op.Shape(key, start=2, end=3), start)
    return _joined_heads(op, out), *after
