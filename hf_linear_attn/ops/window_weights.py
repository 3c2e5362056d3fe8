"""Weights of some rows of windowed attention (`ops.windowed`): exact ones beside those of a feature map.

Some keys of every row are `Columns`; all others, farther away, are sums. What belongs to one row shares a stabiliser.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .calls import WindowedCall
from .common import FeatureFunction, Features, KVState, compute_dtype, group_heads, is_free, with_ones
from .terms import Terms

#: Lower bound of a row's stabiliser: a row that sees no key gets `exp(BLOCKED - FLOOR) = 0` everywhere, not `exp(0)`.
FLOOR = -1e20

#: Largest exponent of a linear part relative to the exact one.
LARGEST_GAP = 60.0


def far_mix(call: WindowedCall) -> Tensor:
    """Return the log mixing weights `[B | 1, H, L | 1]` with the bias of keys far before the query."""
    log_mix, terms = call.log_mixing_weights(), call.terms
    return log_mix if terms.bias is None else log_mix + terms.far.unsqueeze(-1).to(log_mix.dtype)


def capped_products(rows: Tensor, key: Tensor, terms: Terms) -> Tensor:
    """Return the logits of rows `[τ q, 1]` and keys `[k, 0]`, of which the last number is no part of a capped logit."""
    if terms.softcap is None:
        return rows @ key.transpose(-1, -2)
    logits = terms.capped(rows[..., :-1] @ key[..., :-1].transpose(-1, -2))
    return logits + key[..., -1].unsqueeze(-2)


def with_term_features(call: WindowedCall) -> WindowedCall:
    """Return a call whose features are such as its terms need.

    They are doubled where a term distinguishes keys on either side. Those of keys have a log scale where sums decay.
    """
    if call.terms.slope is not None:
        if not call.causal:
            raise NotImplementedError("ALiBi is for decoders: in a bidirectional layer no sums decay.")
        key_features = call.key_features
        return call.replace(key_features=lambda x: key_features(x).scaled())
    if call.terms.relative is None:
        return call
    if call.causal or is_free(call.query.shape[2]):
        raise NotImplementedError("Disentangled attention is for encoders, and no graph of a free length has it.")
    doubled = partial(call.terms.relative.sided, window=call.window, scaling=call.scaling)
    query_features = doubled(call.query_features, keys=False)
    key_features = doubled(call.key_features, keys=True)
    return call.replace(query_features=query_features, key_features=key_features)


def head_rows(tensor: Tensor, groups: int) -> Tensor:
    """Turn `[…, H, c, p]` into the rows of blocks, `[…, G, R·c, p]`."""
    return tensor.unflatten(-3, (groups, -1)).flatten(-3, -2)


class QueryRows(NamedTuple):
    """Queries `[B, G, R, n, …]`: `[τ q, 1]`, and their features with the mixing weight multiplied in."""

    query: Tensor
    features: Features


def make_query_rows(
    query: Tensor, query_features: FeatureFunction, groups: int, scaling: float, log_mix: Tensor
) -> QueryRows:
    """Prepare a block of queries `[B, H, n, d]`; log_mix `[B | 1, H, n | 1]`."""
    block = query.to(compute_dtype(query))
    values, log_scale = query_features(block)
    values = values * log_mix.to(block.dtype).exp().unsqueeze(-1)
    features = Features(values, log_scale).apply(lambda x: x.unflatten(1, (groups, -1)))
    return QueryRows(group_heads(with_ones(block * scaling), groups), features)


class Columns(NamedTuple):
    """Some keys of every row: logits `[…, n, p]`, `-inf` outside of the window, the keys' features `[…, p, m]`, and 1
    where the feature map gives the weight, 0 elsewhere `[…, n, p]` (None: nowhere).

    Selecting by arithmetic takes a CPU a fifth of the time of where and masked_fill. It is safe, as everything is
    finite.
    """

    logits: Tensor
    keys: Features | None = None
    outside: Tensor | None = None


def _largest(columns: Sequence[Columns]) -> Tensor:
    """Return the largest logit of each row `[…, n]`."""
    return reduce(torch.maximum, (part.logits.amax(dim=-1) for part in columns)).clamp_min(FLOOR)


def decaying(rows: Features, columns: Sequence[Columns], log_decay: Tensor | float) -> Features:
    """Return features of rows whose weights outside of the window are multiplied by `exp(log_decay)`, `[…, n]`.

    Those without a log scale are measured against the largest exact weight, as they are without a decay.
    """
    scale = _largest(columns) if rows.log_scale is None else rows.log_scale
    return rows._replace(log_scale=scale + log_decay)


def row_weights(
    rows: Features, columns: Sequence[Columns], far_scale: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the weights of all columns and the stabilisers c `[…, n]`; far_scale: the log scale of all other keys."""
    top = _largest(columns)
    if rows.log_scale is not None:  # everything is relative to the row's largest exponent, which then has no gradient
        scales = [] if far_scale is None else [far_scale]
        for part in columns:
            if part.outside is not None and part.keys is not None and part.keys.log_scale is not None:
                scale = part.keys.log_scale.detach().unsqueeze(-2)
                scales.append(scale.masked_fill(part.outside == 0, float("-inf")).amax(dim=-1))
        top = reduce(torch.maximum, (rows.log_scale.detach() + scale.detach() for scale in scales), top.detach())
    weights = []
    for part in columns:
        weight = (part.logits - top.unsqueeze(-1)).exp_()
        if part.outside is not None and part.keys is not None:
            values = rows.values
            if rows.log_scale is not None and part.keys.log_scale is None:
                values = values * _far_scale(rows.log_scale, None, top)
            # Keys come first, so that the gradient of their features is contiguous.
            estimate = (part.keys.values @ values.transpose(-1, -2)).transpose(-1, -2)
            if rows.log_scale is not None and part.keys.log_scale is not None:
                gap = (rows.log_scale - top).unsqueeze(-1) + part.keys.log_scale.unsqueeze(-2)
                # It is at most 0 wherever it is used, but for rounding, which must not take its gradient away.
                estimate = estimate * (gap - gap.detach().clamp_min(0.0)).exp()
            weight = torch.addcmul(weight, estimate, part.outside)
        weights.append(weight)
    return weights, top


def _far_scale(log_scale: Tensor, key_scale: Tensor | None, top: Tensor) -> Tensor:
    """Return `exp(log_scale + key_scale - top)` `[…, n, 1]`, for rows relative to `exp(top)`.

    Keys without a log scale have no part in `top`: where the exponent exceeds 60, exact weights are lost in rounding.
    """
    exponent = (log_scale - top).clamp(max=LARGEST_GAP) if key_scale is None else log_scale + key_scale - top
    return exponent.exp().unsqueeze(-1)


def far_and_near(rows: Features, columns: Sequence[Columns], far: KVState) -> tuple[list[Tensor], Tensor]:
    """Return the weights of the columns, and the far keys' `Σ w [v, 1]` `[…, n, e + 1]`, relative to one stabiliser."""
    far_scale = None if far.log_scale is None else far.log_scale.unsqueeze(-1)
    weights, top = row_weights(rows, columns, far_scale)
    total = rows.values @ far.total
    if rows.log_scale is not None:
        total = total * _far_scale(rows.log_scale, far_scale, top)
    return weights, total


def keyless_column(sink: Tensor, rows: QueryRows, values: Tensor) -> tuple[Columns, Tensor]:
    """Return the sink of the model `[H]` as a column of rows `[…, G, R·c, d + 1]`, and its value `[0, 1]`."""
    groups, size = rows.query.shape[-3:-1]
    logits = sink.to(rows.query.dtype).view(groups, -1, 1, 1).expand(-1, -1, size * groups // len(sink), -1)
    column = logits.flatten(1, 2).expand(*rows.query.shape[:-1], 1)
    return Columns(column), functional.pad(values.new_zeros(1, values.shape[-1] - 1), (0, 1), value=1.0)
