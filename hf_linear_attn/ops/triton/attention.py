"""The passes by the Triton kernels: arguments, the division of the work into programs, and the function of autograd."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..calls import FarPass, KernelizedCall
from ..common import DENOMINATOR_EPS, State, first_derivative, parameter_gradient, readable, split_chunks, token_major
from ..formulas import PARTS, FusedMap
from ..window_weights import LARGEST_GAP
from . import interpreted, kernels, power_of_two
from .kernels import ExactArguments
from .maps import MapArguments, Rows, map_gradients, map_tokens

#: Numbers of the state that one program holds at a time: 16 KB in float32.
STATE_BLOCK = 1 << 12

#: Numbers of a state that one program of the scan adds up.
SCAN_BLOCK = 1024

#: A span of the sequence has at least this many tokens: its states are then small beside it.
MIN_SPAN = 256

#: Tokens that one product of the gradient of a projection sums over.
SUMMED_TOKENS = 1024

#: Number of loads in flight while a block is computed. More would not fit into the memory of smaller GPUs.
STAGES = 2

#: Programs per multiprocessor that a sequence is split into; number of multiprocessors assumed by the interpreter.
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED_PROCESSORS = 8

#: Products of features and values: bfloat16 ones as they are, float16 ones with 10 bits of mantissa, which represent
#: them exactly, and float32 ones in three such products, which come near float32, or without tensor cores on other
#: GPUs. Sums are float32.
BFLOAT16_PRECISION, HALF_PRECISION, FULL_PRECISION, IEEE_PRECISION = "bf16", "tf32", "tf32x3", "ieee"


class Blocks(NamedTuple):
    """Sizes of one pass: tokens a block, tokens a span, spans, columns of the value a tile, tiles, warps."""

    tokens: int
    span: int
    spans: int
    columns: int
    tiles: int
    warps: int


Maps = tuple[MapArguments, MapArguments]

NO_EXACT_KEYS = ExactArguments()


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def precision(dtype: torch.dtype, weight: Tensor | None = None) -> str:
    """Return the precision of products of inputs of a dtype, with features or with the weight of a map."""
    if torch.version.hip is not None:
        return IEEE_PRECISION
    exact = weight is None or weight.dtype == torch.bfloat16
    if dtype == torch.bfloat16 and exact and not interpreted():  # NumPy has no bfloat16
        return BFLOAT16_PRECISION
    return FULL_PRECISION if dtype == torch.float32 else HALF_PRECISION


def blocks(x: Tensor, maps: Maps, value_size: int, *, chunked: bool = False) -> Blocks:
    """Split the tokens of `[B, heads, L, d]` so that every processor has work; `chunked`: one block a span."""
    pairs, length = x.shape[0] * x.shape[1], x.shape[2]
    features = max(int(fused_map.parts.value * fused_map.half.value) for fused_map in maps)
    most = 32 if features <= 128 else 16
    columns = min(64, STATE_BLOCK // features)
    warps = 8 if features * columns >= 1 << 12 else 4
    if x.dtype != torch.float32 and length > 1:  # a step computes features, too
        if features <= 128:  # the causal backward pass has twice as many accumulators
            most = 64
            columns = 32 if chunked and features > 64 else 64
            warps = 4
        elif features <= 256:
            most, columns, warps = 32, 64, 8
    columns = max(min(power_of_two(value_size), columns), 16)
    tiles = triton.cdiv(value_size, columns)
    tokens = min(most, power_of_two(length))
    span = tokens
    if not chunked:
        target = max(processors(x.device) * PROGRAMS_PER_PROCESSOR // (pairs * tiles), 1)
        spans = min(triton.cdiv(length, MIN_SPAN), target)
        span = triton.cdiv(triton.cdiv(length, spans), tokens) * tokens
    return Blocks(tokens, span, triton.cdiv(length, span), columns, tiles, warps)


def map_arguments(fused: FusedMap, head_dim: int, dtype: torch.dtype) -> MapArguments:
    """Return the kernels' arguments of a feature map for inputs `[…, head_dim]`."""
    weight, bias = (None if x is None else x.detach() for x in (fused.weight, fused.bias))
    strides = (0, 0, 0) if weight is None else weight.stride()
    width = fused.width(head_dim)
    return MapArguments(
        weight=weight,
        weight_head=0 if weight is None or weight.shape[0] == 1 else strides[0],
        weight_row=strides[1],
        weight_column=strides[2],
        bias=None if bias is None else bias.contiguous(),
        bias_head=0 if bias is None or bias.shape[0] == 1 else bias.shape[1],
        bias_scale=fused.bias_scale,
        log_scale=None,
        scale_batch=0,
        scale_head=0,
        scale_token=0,
        in_scale=fused.in_scale,
        alpha=fused.alpha,
        epsilon=fused.epsilon,
        factor=fused.factor,
        activation=tl.constexpr(fused.activation),
        parts=tl.constexpr(PARTS[fused.activation]),
        width=tl.constexpr(width),
        half=tl.constexpr(power_of_two(width)),
        size_block=tl.constexpr(power_of_two(head_dim)),
        precision=tl.constexpr(precision(dtype, weight)),
    )


def rows(tensor: Tensor, *, reverse: bool = False) -> Rows:
    """Return a tensor `[B, heads, L, width]` with its strides; `reverse`: its last token comes first."""
    batch, head, token = tensor.stride()[:3]
    if reverse:
        tensor, token = tensor[:, :, -1:], -token
    return Rows(tensor, batch, head, token, tensor.shape[3])


def mask_bytes(mask: Tensor | None) -> tuple[Tensor | None, int]:
    """Return the mask as bytes, and its stride from one row of the batch to the next."""
    if mask is None:
        return None, 0
    flags = (mask if mask.stride(1) == 1 else mask.contiguous()).view(torch.uint8)
    return flags, 0 if flags.shape[0] == 1 else flags.stride(0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device current: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = STAGES) -> None:
    """Launch one kernel. All launches go through this function."""
    kernel[grid](*arguments, num_warps=warps, num_stages=stages)


class Forward(NamedTuple):
    """Results of the forward pass: the output, the state, and if they are to be saved the normalisers, the sums over
    all keys (bidirectional), and the log scales of the queries, which the normalisers lack (causal)."""

    out: Tensor
    state: State | None = None
    normaliser: Tensor | None = None
    sums: Tensor | None = None
    row_scale: Tensor | None = None


class Exact(NamedTuple):
    """Softmax attention to other keys `[B, H, n, e]`, the log-sum-exp of its logits `[B, H, n]`, what weights are
    relative to `[B, H, n]`, the `WindowedCall.mixing_formula` with its τ and w + s (`near`), and an integer of each row
    `[B, n]`: those with the bit 2 see no other keys (None: all do)."""

    out: Tensor
    log_sum: Tensor
    top: Tensor
    formula: tuple[Tensor, Tensor | None, float, int | None]
    scaling: float
    near: int
    code: Tensor | None

    def arguments(self, query: Tensor, part: FarPass) -> ExactArguments:
        """Return the kernel's arguments for a pass over some of the queries."""
        batch, heads, length, size = query.shape
        base, weight, bound, saturation = self.formula
        base = base.expand(batch, heads, length)
        code = None if self.code is None else self.code[:, None].expand(batch, 1, length)
        numbers = (x.unsqueeze(-1) for x in (self.log_sum, self.top, base))
        log_sum, top, mixed, tokens = (rows(x[:, :, part.queries], reverse=part.reverse) for x in (*numbers, query))
        assert log_sum[1:] == top[1:]
        data, code_batch, code_token = None, 0, 0
        if code is not None:
            data, code_batch, _, code_token, _ = rows(code.unsqueeze(-1)[:, :, part.queries], reverse=part.reverse)
        return ExactArguments(
            log_sum.data, *top[:4], *mixed[:4], *tokens[:4], data, code_batch, code_token, weight, self.scaling**0.5,
            bound, part.queries.start + 1 - self.near, saturation, LARGEST_GAP, tl.constexpr(size),
            tl.constexpr(power_of_two(size)),
        )  # fmt: skip


Tokens = tuple[Tensor, Tensor, Tensor | None]
"""Inputs of a map, what their features are multiplied by, and a mask."""


def sum_tokens(
    x: Tensor,
    u: Tensor,
    mask: Tensor | None,
    fmap: MapArguments,
    split: Blocks,
    *,
    spans: int | None = None,
    gradient: tuple[Tensor, Tensor] | None = None,
    scaled: bool = False,
    reverse: bool = False,
    other: Tokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute sums over each of the first `spans` spans, `[B·heads, all spans, m·(e + 1)]`, and their log scales.

    reverse: The last token comes first; the mask is in that order already.
    other: Tokens in the reverse order, of the same sizes, whose sums come after those.
    """
    batch, heads, length, _ = x.shape
    flat = int(fmap.parts.value * fmap.width.value) * (u.shape[3] + 1)
    pairs = batch * heads
    programs = pairs if other is None else 2 * pairs
    states = torch.empty(programs, split.spans, flat, device=x.device, dtype=torch.float32)
    tops = torch.empty(programs, split.spans, device=x.device, dtype=torch.float32) if scaled else None
    second: tuple[Any, ...] = (None, None, None, 0)
    if other is not None:
        second = *(rows(tensor, reverse=True) for tensor in other[:2]), *mask_bytes(other[2])
    grid = (programs, split.spans if spans is None else spans, split.tiles)
    launch(
        kernels.sum_tokens, grid, rows(x, reverse=reverse), rows(u, reverse=reverse), *mask_bytes(mask), *second,
        pairs, *(gradient or (None, None)), states, tops, fmap, heads, length, split.span, split.spans, split.columns,
        split.tokens, scaled, warps=split.warps,
    )  # fmt: skip
    return states, tops


def scan(
    states: Tensor,
    value_size: int,
    *,
    tops: Tensor | None = None,
    state: State | None = None,
    repeats: int = 1,
    total: bool = False,
    reverse: bool = False,
) -> Tensor | None:
    """Replace states per span by sums before each span, in place, and return the log scales before each span."""
    pairs, spans, flat = states.shape
    before = None if tops is None else torch.empty_like(tops)
    carried = state or {}
    sum_size = flat // (value_size + 1)
    launch(
        kernels.scan, (pairs // repeats, triton.cdiv(flat, SCAN_BLOCK)), states, tops, before, carried.get("kv"),
        carried.get("k_sum"), carried.get("log_scale"), spans, repeats, flat - sum_size, sum_size, total, reverse,
        SCAN_BLOCK, warps=4,
    )  # fmt: skip
    return before


def is_mapped(fused: FusedMap) -> bool:
    """Return whether features are computed once, before: those of a projection cost more than their memory."""
    return fused.weight is not None or fused.scaled


@functools.cache
def feature_arguments(features: int, dtype: torch.dtype) -> MapArguments:
    """Return the kernels' arguments of features that were computed before, from inputs of a dtype."""
    return map_arguments(FusedMap("relu"), features, dtype)._replace(activation=tl.constexpr("mapped"))


def with_log_scale(arguments: MapArguments, scale: Tensor | None, *, reverse: bool = False) -> MapArguments:
    """Return the arguments of features with their log scale `[B, heads, L]`."""
    if scale is None:
        return arguments
    data, batch, head, token, _ = rows(scale.unsqueeze(-1), reverse=reverse)
    return arguments._replace(log_scale=data, scale_batch=batch, scale_head=head, scale_token=token)


class Projection(NamedTuple):
    """How features are computed before: the kernels' arguments of one part, whether that of -y comes after it, and
    tokens a block."""

    arguments: MapArguments
    both: bool
    tokens: int


def projection(fused: FusedMap, head_dim: int, dtype: torch.dtype) -> Projection:
    """Return how the features of a map are computed before."""
    arguments = map_arguments(fused, head_dim, dtype)
    both = fused.activation == "softmax-pair"
    if both:  # its parts are softmax by themselves: half the products and registers
        arguments = arguments._replace(activation=tl.constexpr("softmax"), parts=tl.constexpr(1))
    return Projection(arguments, both, 64 if int(arguments.parts.value * arguments.half.value) <= 128 else 32)


def mapped(call: KernelizedCall) -> tuple[KernelizedCall, Maps]:
    """Return the call with features in place of queries and of keys, where `is_mapped`, and the maps of what it has."""
    assert call.fused is not None
    tensors: list[Tensor] = []
    maps: list[MapArguments] = []
    launched: list[tuple[Any, ...]] = []
    block, programs, longest, batch = 64, 0, 0, call.query.shape[0]
    for x, fused in zip((call.query, call.key), call.fused, strict=True):
        _, heads, length, size = x.shape
        if not is_mapped(fused):
            arguments = map_arguments(fused, size, x.dtype)
        else:
            part, both, tokens = projection(fused, size, x.dtype)
            width = fused.num_features(size)
            # Small features count where they are all that a row has: float16 would round them to zero.
            stored = torch.float32 if x.dtype == torch.float16 else x.dtype
            out = torch.empty(batch, heads, length, width, dtype=stored, device=x.device)
            scale = torch.empty(batch, heads, length, device=x.device) if fused.scaled else None
            launched.append((rows(x), out, scale, part, heads, length, both))
            block, programs, longest = min(block, tokens), programs + batch * heads, max(longest, length)
            arguments = with_log_scale(feature_arguments(width, x.dtype), scale)
            x = out
        tensors.append(x)
        maps.append(arguments)
    if launched:
        first, second, *_ = *launched, (None, None, None, None, 0, 0, False)
        grid = (programs, triton.cdiv(longest, block))
        launch(map_tokens, grid, *first, *second, batch * first[4], block, warps=4)
    return call.replace(query=tensors[0], key=tensors[1]), (maps[0], maps[1])


def bidirectional(call: KernelizedCall, maps: Maps, *, save: bool) -> Forward:
    """Sum over the keys, then read the sums for the queries. With `save`, normalisers and states are returned."""
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    out = token_major((batch, heads, length, value_size), value.dtype, value.device)
    if not out.numel() or not keys:
        return Forward(out.zero_())
    assert call.fused is not None
    split = blocks(key, maps, value_size)
    scaled = call.fused[1].scaled
    states, tops = sum_tokens(key, value, call.mask, maps[1], split, scaled=scaled)
    if split.spans > 1:
        scan(states, value_size, tops=tops, total=True)
    normaliser = torch.empty(batch, heads, length, device=out.device) if save else None
    reads = blocks(query, maps, value_size)
    launch(
        kernels.attend_bidirectional, (batch * heads, reads.spans, reads.tiles), rows(query), rows(out), states,
        normaliser, maps[0], heads, groups, length, reads.span, split.spans, DENOMINATOR_EPS, reads.columns,
        reads.tokens, warps=reads.warps,
    )  # fmt: skip
    return Forward(out, None, normaliser, states if save else None)


def causal(
    call: KernelizedCall,
    maps: Maps,
    *,
    save: bool,
    out: Tensor | None = None,
    exact: ExactArguments = NO_EXACT_KEYS,
    states: Tensor | None = None,
    reverse: bool = False,
) -> Forward:
    """Compute one pass over chunks; if the sequence is split into spans, the sums before each span are computed first.

    exact: Attention to other keys, whose output `out` this is merged with; the normalisers are then the log-sum-exp of
    both. states: The sums before each span, if they are known. reverse: The last token comes first; the mask is in that
    order already, and so are the results by token.
    """
    query, key, value = call.query, call.key, call.value
    batch, heads, length, _ = query.shape
    groups, value_size = key.shape[1], value.shape[3]
    sizes = batch, heads, length, value_size
    out = token_major(sizes, value.dtype, value.device) if out is None else out
    if not out.numel():
        return Forward(out, call.state)
    assert call.fused is not None
    split = blocks(query, maps, value_size)
    scaled = call.fused[1].scaled
    before: State = {name: tensor.float().contiguous() for name, tensor in (call.state or {}).items()}
    tops = None
    if split.spans > 1 and states is None:
        spans = split.spans - 1
        states, tops = sum_tokens(key, value, call.mask, maps[1], split, spans=spans, scaled=scaled, reverse=reverse)
        tops = scan(states, value_size, tops=tops, state=before)
    after: State = {
        "kv": torch.empty(batch, groups, call.num_features, value_size, device=out.device),
        "k_sum": torch.empty(batch, groups, call.num_features, device=out.device),
    }
    if scaled:
        after["log_scale"] = torch.empty(batch, groups, device=out.device)
    normaliser = torch.empty(batch, heads, length, device=out.device) if save else None
    stages = 1 if query.dtype == torch.float32 else STAGES  # Two blocks of float32 loads do not fit either.
    launch(
        kernels.attend_causal, (batch * heads, split.spans, split.tiles),
        *(rows(x, reverse=reverse) for x in (query, key, value, out)), *mask_bytes(call.mask), states, tops,
        before.get("kv"), before.get("k_sum"), before.get("log_scale"), after["kv"], after["k_sum"],
        after.get("log_scale"), normaliser, exact, *maps, heads, groups, length, split.span, split.spans,
        DENOMINATOR_EPS, split.columns, split.tokens, scaled, warps=split.warps, stages=stages,
    )  # fmt: skip
    scale = maps[0].log_scale
    return Forward(out, after, normaliser, None, None if scale is None else scale.squeeze(-1))


def merge(call: KernelizedCall, exact: Exact, passes: Sequence[FarPass]) -> State | None:
    """Add causal attention in passes to softmax attention to other keys, which is changed in place.

    Args:
        call: Queries and keys of all passes, which begin at the same state. The map of keys has no log scale.
        exact: Attention of all queries.
        passes: One, or one and then one from the end of as many tokens.

    Returns:
        The state after the last pass.
    """
    call = call.replace(query=readable(call.query), key=readable(call.key), value=readable(call.value))
    state = None
    exact = exact._replace(log_sum=exact.log_sum.contiguous(), top=exact.top.contiguous())
    with on_device(call.query.device):
        features, maps = mapped(call)
        parts = [
            features.replace(
                query=features.query[:, :, part.queries], key=features.key[:, :, part.keys],
                value=call.value[:, :, part.keys], mask=part.mask,
            )
            for part in passes
        ]  # fmt: skip
        split = blocks(parts[0].query, maps, call.value.shape[3])
        before: Sequence[Tensor | None] = [None]
        if len(passes) > 1:
            first, second = ((part.key, part.value, part.mask) for part in parts)
            before = [None, None]
            if split.spans > 1:
                states, _ = sum_tokens(*first, maps[1], split, spans=split.spans - 1, other=second)
                scan(states, call.value.shape[3])
                before = states.chunk(2)
        for part, selected, states_before in zip(passes, parts, before, strict=True):
            scale = None if maps[0].log_scale is None else maps[0].log_scale[:, :, part.queries, 0]
            query_map = with_log_scale(maps[0], scale, reverse=part.reverse)
            done = causal(
                selected, (query_map, maps[1]), save=part is not passes[-1], out=exact.out[:, :, part.queries],
                exact=exact.arguments(call.query, part), states=states_before, reverse=part.reverse,
            )  # fmt: skip
            state = done.state
            if done.normaliser is not None:
                exact.log_sum[:, :, part.queries].copy_(done.normaliser)
    return state


def run(call: KernelizedCall) -> tuple[Tensor, State | None]:
    """Compute a call, with gradients where they are needed."""
    call = call.replace(query=readable(call.query), key=readable(call.key), value=readable(call.value))
    if not call.needs_grad():
        return _forward(call, save=False)[:2]
    return _differentiable(call).out, None


def _forward(call: KernelizedCall, *, save: bool) -> Forward:
    assert call.fused is not None
    with on_device(call.query.device):
        if call.causal and call.query.shape[2] == 1 and not save:  # a step of decoding is one kernel
            first, second = (map_arguments(fused, call.query.shape[3], call.query.dtype) for fused in call.fused)
            maps = first, second
        else:
            call, maps = mapped(call)
        return (causal if call.causal else bidirectional)(call, maps, save=save)


def totals(call: KernelizedCall) -> tuple[Tensor, Tensor | None, State | None]:
    """Compute a causal call of at least one token before normalisation: `Σ_j w_ij [v_j, 1]` `[B, H, L, e + 1]`,
    relative to the log scales of the queries `[B, H, L]` (None where they have none), and the state.

    The first e columns are the means in the dtype of the value, times the normaliser.
    """
    call = call.replace(query=readable(call.query), key=readable(call.key), value=readable(call.value))
    result = _differentiable(call) if call.needs_grad() else _forward(call, save=True)
    weight = cast(Tensor, result.normaliser).unsqueeze(-1)
    return torch.cat([result.out * weight, weight], dim=-1), result.row_scale, result.state


def _differentiable(call: KernelizedCall) -> Forward:
    """Return the output, the normalisers (None where there are no keys), with gradients of both, and log scales."""
    assert call.fused is not None
    learned = call.fused[0].weight, call.fused[0].bias, call.fused[1].weight, call.fused[1].bias
    out, normaliser, row_scale = _Attention.apply(call.query, call.key, call.value, *learned, call)
    return Forward(out, normaliser=normaliser, row_scale=row_scale)


class _Attention(torch.autograd.Function):
    """It saves inputs, output and normalisers, `B·H·L` floats, and the sums over the keys (bidirectional).

    Extra memory of the backward pass: `B·H·L` times two floats, for maps with weights the features, their gradients
    and those before the activation (`B·H·L·(m + f)` floats) and the inputs in float32, and for the causal form the sums
    before and after every chunk, `m·(e + 1)` floats for every 64 tokens of a head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        call = rest[4].replace(query=query, key=key, value=value)
        out, _, normaliser, sums, row_scale = _forward(call, save=True)
        ctx.save_for_backward(query, key, value, *rest[:4], out, normaliser, sums, call.mask)
        if row_scale is not None:
            ctx.mark_non_differentiable(row_scale)
        ctx.call = call.replace(query=None, key=None, value=None, mask=None)  # not referenced twice
        ctx.set_materialize_grads(False)
        return out, normaliser, row_scale

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: tuple[Any, ...], *gradients: Any) -> Any:
        query, key, value, *parameters, out, normaliser, states, mask = saved
        call = ctx.call.replace(query=query, key=key, value=value, mask=mask)
        if normaliser is None:  # there are no keys
            tensors = (query, key, value, *parameters)
            return *(None if x is None else torch.zeros_like(x) for x in tensors), None
        to_out, to_normaliser, _ = gradients
        gradient = torch.zeros_like(out) if to_out is None else readable(to_out)
        with on_device(query.device):
            pre_gradients, to_value = _backward(call, gradient, to_normaliser, out, normaliser, states)
        needed = ctx.needs_input_grad[3:7]
        to_query, *query_learned = _through_projection(query, call.fused[0], pre_gradients[0], needed[:2])
        to_key, *key_learned = _through_projection(key, call.fused[1], pre_gradients[1], needed[2:])
        return to_query, to_key, to_value, *query_learned, *key_learned, None


def _through_projection(
    x: Tensor, fused: FusedMap, before: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of x, W and b from that of `y = s x W + c b`; without W it is that of x already."""
    if fused.weight is None:
        return before, None, None
    to_x = ((before @ fused.weight.detach().float().transpose(-1, -2)) * fused.in_scale).to(x.dtype)
    to_weight = to_bias = None
    if needed[0]:
        # Long sums of few numbers: in pieces, so that every processor has one.
        tokens, gradient = (split_chunks(part, SUMMED_TOKENS) for part in (x, before))
        parts = (tokens.float().transpose(-1, -2) @ gradient).sum(dim=2)
        to_weight = parameter_gradient(parts * fused.in_scale, fused.weight)
    if needed[1] and fused.bias is not None:
        to_bias = parameter_gradient(before.sum(dim=2) * fused.bias_scale, fused.bias)
    return to_x, to_weight, to_bias


def _backward(
    call: KernelizedCall,
    gradient: Tensor,
    to_normaliser: Tensor | None,
    out: Tensor,
    normaliser: Tensor,
    states: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the numbers before the activations, of queries and of keys, and that of the value.

    They come from the gradients of the output and (None: zero) of the normalisers. states: the sums over the keys
    (bidirectional).
    """
    assert call.fused is not None
    features, maps = mapped(call)
    query, key, value = features.query, features.key, features.value
    masks = mask_bytes(call.mask)
    batch, heads, length, _ = query.shape
    groups, keys, value_size = key.shape[1], key.shape[2], value.shape[3]
    factors = torch.empty_like(normaliser), torch.empty_like(normaliser)
    launch(
        kernels.normalised, (batch * heads, triton.cdiv(length, 64)), rows(gradient), rows(out), normaliser, *factors,
        heads, length, DENOMINATOR_EPS, min(power_of_two(value_size), 64), 64, warps=4,
    )  # fmt: skip
    if to_normaliser is not None:
        factors[1].add_(to_normaliser)
    before = [
        token_major(x.shape, torch.float32 if is_mapped(fused) else x.dtype, x.device)
        for x, fused in zip((query, key), call.fused, strict=True)
    ]
    to_value = token_major(value.shape, value.dtype, value.device)
    to_query = rows(before[0])
    outputs = (rows(before[1]), rows(to_value))
    split = blocks(query, maps, value_size, chunked=call.causal)
    if states is not None:
        query_states, _ = sum_tokens(query, gradient, None, maps[0], split, gradient=factors)
        scan(query_states, value_size, repeats=heads // groups, total=True)
        key_split = blocks(key, maps, value_size)
        launch(
            kernels.backward_bidirectional, (batch * heads, split.spans), rows(query), rows(gradient), None, 0,
            *factors, states, to_query, None, maps[0], heads, groups, length, split.span, states.shape[1],
            split.columns, split.tokens, warps=8,
        )  # fmt: skip
        launch(
            kernels.backward_bidirectional, (batch * groups, key_split.spans), rows(key), rows(value), *masks, None,
            None, query_states, *outputs, maps[1], groups, groups, keys, key_split.span,
            split.spans * (heads // groups), key_split.columns, key_split.tokens, warps=8,
        )  # fmt: skip
        return _before_maps(call, before), to_value
    inputs = rows(query), rows(key), rows(value), rows(gradient), *masks, *factors
    shape = *maps, heads, groups, length, split.spans, split.columns, split.tokens
    kv_state, _ = sum_tokens(key, value, call.mask, maps[1], split)
    scan(kv_state, value_size)
    launch(kernels.backward_causal_queries, (batch * heads, split.spans), *inputs, kv_state, to_query, *shape, warps=8)
    del kv_state
    kv_state, _ = sum_tokens(query, gradient, None, maps[0], split, gradient=factors)
    scan(kv_state, value_size, repeats=heads // groups, reverse=True)
    # With two stages loads in flight, in a loop within a loop, wrote over what others still read (Triton 3.6, H200).
    grid = batch * groups, split.spans
    launch(kernels.backward_causal_keys, grid, *inputs, kv_state, *outputs, *shape, warps=8, stages=1)
    return _before_maps(call, before), to_value


def _before_maps(call: KernelizedCall, gradients: list[Tensor]) -> list[Tensor]:
    """Turn the gradients of features that were computed before into those of the numbers before the activation."""
    assert call.fused is not None
    results = []
    for x, fused, gradient in zip((call.query, call.key), call.fused, gradients, strict=True):
        if not is_mapped(fused):
            results.append(gradient)
            continue
        batch, heads, length, size = x.shape
        (part, both, tokens) = projection(fused, size, x.dtype)
        width = fused.width(size)
        before = gradient.new_empty(batch, heads, length, width) if both else gradient
        grid = (batch * heads, triton.cdiv(length, tokens // 2))
        arguments = rows(x), rows(gradient), rows(before), part, heads, length, both, tokens // 2
        launch(map_gradients, grid, *arguments, warps=4)
        if not both and PARTS[fused.activation] == 2:
            before = before[..., :width] + before[..., width:]
        results.append(before.to(x.dtype) if fused.weight is None else before)
    return results
