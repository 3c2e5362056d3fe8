"""What the kernel of windows takes of the terms of a model's logits: position biases, row by row or by distance."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..calls import WindowedCall
from ..common import mask_tokens
from ..disentangled import Disentangled
from ..sinks import end_tokens
from ..terms import Terms
from . import binding
from .binding import Tensors

#: Numbers before and behind the biases of windows, which vectors of the kernel may touch.
MARGIN = 64


def term_inputs(call: WindowedCall) -> Tensors:
    """Return the tensors of the kernel, and as `mix` what is added to the log mixing weights, `[B | 1, H, L | 1]`."""
    inputs: Tensors = {}
    if call.terms.bias is not None:
        inputs = _bias_inputs(call, call.terms, call.terms.bias.float())
    if call.terms.relative is not None:
        query, key = (mask_tokens(tensor, call.mask).float() for tensor in (call.query, call.key))
        inputs = _relative_inputs(call, call.terms.relative, query * call.scaling, key)
    if call.terms.sink is not None:
        inputs["model_sink"] = call.terms.sink.float()
    for name in ("near_bias", "sink_bias"):
        if name in inputs:
            inputs[name] = inputs[name].expand(*call.query.shape[:3], -1)
    return inputs


def _bias_inputs(call: WindowedCall, terms: Terms, bias: Tensor) -> Tensors:
    """Return the inputs of a bias by distance `[H, 2 D + 1]`, which is the same for all rows."""
    batch, heads, length, _ = call.query.shape
    distance = torch.arange(call.window - 1, -call.window, -1)
    near = terms.by_distance(distance.unsqueeze(0)).float()  # [H, 1, 2 w - 1]
    inputs = {"near_bias": _with_margins(near.unsqueeze(0)), "mix": terms.far.float().view(1, -1, 1)}
    if call.causal:
        if call.sinks:
            inputs["sink_bias"] = _in_vectors(terms.far.float().view(1, -1, 1, 1).expand(-1, -1, -1, call.sinks))
        return inputs
    if (sinks := end_tokens(call)) is not None:
        distance = torch.arange(length).view(1, -1, 1) - sinks.position.unsqueeze(1)
        inputs["sink_bias"] = _in_vectors(terms.by_distance(distance).float())
    return {**inputs, "row_behind": terms.behind.float().view(1, -1, 1).expand(batch, heads, length)}


def _relative_inputs(call: WindowedCall, relative: Disentangled, query: Tensor, key: Tensor) -> Tensors:
    """Return the inputs of disentangled attention, for queries τ q."""
    rows, keys = (
        relative.exponents(tensor, call.window, keys=is_keys, scaling=1.0)
        for tensor, is_keys in ((query, False), (key, True))
    )
    inputs = {
        "near_bias": _near(relative, relative.moved(query), key, call.window),
        "mix": rows[..., 0],
        "row_behind": (rows[..., 1] - rows[..., 0]).exp(),
        "key_before": keys[..., 0].exp(),
        "key_behind": keys[..., 1].exp(),
    }
    if (sinks := end_tokens(call)) is not None:
        distance = torch.arange(query.shape[2]).view(1, -1, 1) - sinks.position.unsqueeze(1)
        inputs["sink_bias"] = _in_vectors(relative.pairs(query, sinks.key.float(), distance))
    return inputs


def _near(relative: Disentangled, query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return the biases of a window, `[B, H, L, 2 w - 1]`, in memory with margins; head by head, in a small buffer."""
    queries, keys = relative.near_tables(window)
    width, (batch, heads, length, _) = 2 * window - 1, query.shape
    near = _between_margins(batch, heads, length, width)
    products = query.new_zeros(length + width - 1, width)  # of keys, with those before and behind the sequence
    # Of the key at distance d before row i, number w - 1 + d: one key further has the number before.
    skewed = products.as_strided((length, width), (width, width - 1), width - 1)
    for row, head in itertools.product(range(batch), range(heads)):
        if queries is None:
            near[row, head] = 0.0
        else:
            torch.mm(query[row, head], queries[head].float().mT, out=near[row, head])
        if keys is not None:
            torch.mm(key[row, head], keys[head].float().mT, out=products[window - 1 : length + window - 1])
            near[row, head] += skewed
    return near


def _between_margins(*sizes: int) -> Tensor:
    """Allocate a tensor in float32 with margins, whose numbers the kernel does not use, before and behind it."""
    count = math.prod(sizes)
    return binding.empty(count + 2 * MARGIN)[MARGIN : MARGIN + count].view(sizes)


def _with_margins(near: Tensor) -> Tensor:
    return _between_margins(*near.shape).copy_(near)


def _in_vectors(tensor: Tensor) -> Tensor:
    return pad(tensor, (0, -tensor.shape[-1] % binding.lanes()))
