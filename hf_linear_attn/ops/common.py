"""Constants, states, features and helpers that all operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

#: Smallest value a normaliser may take. It is a floor, not an addend: a query whose keys are all masked gets 0/EPS = 0,
#: and other queries are left unchanged. The largest feature of a key and of a query is about one after stabilisation,
#: but where they point in opposite directions the sum of products may be as small as this. (With a smaller floor the
#: products with its inverse, in gradients, could overflow.)
DENOMINATOR_EPS = 1e-30

#: Where features are signed the normaliser D can come near zero or cross it. 1/D becomes `D / max(D², ε²)` with this ε:
#: exactly 1/D where |D| >= ε, and below that a straight line through zero, so that neither the value (at most 1/ε) nor
#: its sign jumps. D is measured against the largest key scale that the query sees: one key of weight 1 alone has D = 1.
#: (The scale is then part of the result, and gradients flow through it.) The estimate of one weight from 128 random
#: waves has a standard deviation of 0.06: sums below a few times that are mostly noise.
SIGNED_NORMALISER_EPS = 0.3

#: Largest number of float elements of one block of features, per batch of heads (about 1 MB in float32: the
#: temporaries then stay in a core's own cache at any sequence length).
BLOCK_ELEMENTS = 1 << 18

#: Block lengths are multiples of this.
BLOCK_QUANTUM = 128

#: Attribute of a module that holds accelerate's hook: `pre_forward` loads its tensors, `post_forward` offloads them.
ACCELERATE_HOOK = "_hf_hook"

P = ParamSpec("P")
T = TypeVar("T")

State = dict[str, Tensor]
"""A recurrent state: named tensors whose first dimension is the batch."""


class InPlaceState(dict[str, Tensor]):
    """A state that has no other owner and is not read again, so that the next state may be written over it.

    Decoding then touches half as much memory. Any other state that a call receives stays as it is. Copies and pickles
    are ordinary dictionaries.

    Attributes:
        memory: The memory of entries that move on or grow in it: each is a part of the tensor of its name.
        launch: What a kernel has just run with, for whoever prepares the next step.
        prepared: The next step (see `ops.prepared`).
    """

    def __init__(self, entries: State) -> None:
        super().__init__(entries)
        self.memory: State = {}
        self.launch: Any = None
        self.prepared: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: tensor.clone() if name in self.memory else tensor for name, tensor in self.items()},)


def capacity_for(tokens: int) -> int:
    """Return for how many tokens to allocate memory, so that copying it when it is full costs little a token."""
    return tokens + max(tokens // 8, 16)


class Features(NamedTuple):
    """Features of queries or keys, `φ = exp(log_scale) · values`.

    values:    `[B, H, L, m]`
    log_scale: `[B, H, L]`, or None where it is zero (maps that need no stabiliser).
    """

    values: Tensor
    log_scale: Tensor | None = None

    def apply(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Apply a function of the leading dimensions to both tensors."""
        return Features(function(self.values), None if self.log_scale is None else function(self.log_scale))

    def scaled(self) -> Features:
        """Return features with a log scale: zero where there was none."""
        if self.log_scale is not None:
            return self
        return Features(self.values, self.values.new_zeros(self.values.shape[:-1]))


class KVState(NamedTuple):
    """The sums over some keys, `exp(-log_scale) Σ_j φ(k_j) [v_j, 1]`: `[…, m, e + 1]` and `[…]` (or None)."""

    total: Tensor
    log_scale: Tensor | None

    @staticmethod
    def of(keys: Features, value: Tensor, *, signed: bool = False) -> KVState:
        """Sum keys `[…, l, m]` with values `[v, 1]` `[…, l, e + 1]`; `signed`: with a gradient through the scale."""
        values, log_scale = keys
        if log_scale is None:
            return KVState(values.transpose(-1, -2) @ value, None)
        top = (log_scale if signed else log_scale.detach()).amax(dim=-1)
        values = values * torch.exp(log_scale - finite_or_zero(top).unsqueeze(-1)).unsqueeze(-1)
        return KVState(values.transpose(-1, -2) @ value, top)

    @staticmethod
    def from_state(state: State) -> KVState:
        """Read the entries `kv`, `k_sum` and `log_scale` of a state."""
        return KVState(torch.cat([state["kv"], state["k_sum"].unsqueeze(-1)], dim=-1), state.get("log_scale"))

    @staticmethod
    def stack(parts: list[KVState], dim: int = 0) -> KVState:
        """Join sums along a new dimension."""
        scales = [part.log_scale for part in parts if part.log_scale is not None]
        return KVState(torch.stack([part.total for part in parts], dim), torch.stack(scales, dim) if scales else None)

    def apply(self, function: Callable[[Tensor], Tensor]) -> KVState:
        """Apply a function of the leading dimensions to both tensors."""
        return KVState(function(self.total), None if self.log_scale is None else function(self.log_scale))

    def at(self, index: int | slice, dim: int = 0) -> KVState:
        """Return one entry of a dimension, or a part of them."""
        return self.apply(lambda tensor: tensor[(slice(None),) * dim + (index,)])

    def decayed(self, log_decay: Tensor | None) -> KVState:
        """Multiply sums that have a log scale by `exp(log_decay)`; None: as they are."""
        if log_decay is None or self.log_scale is None:
            return self
        return self._replace(log_scale=self.log_scale + log_decay)

    def plus(self, other: KVState) -> KVState:
        """Add two sums, relative to the larger of their scales."""
        if self.log_scale is None or other.log_scale is None:
            return KVState(self.total + other.total, None)
        top = torch.maximum(self.log_scale, other.log_scale)
        floor = finite_or_zero(top)
        decay, other_decay = ((scale - floor).exp()[..., None, None] for scale in (self.log_scale, other.log_scale))
        return KVState(self.total * decay + other.total * other_decay, top)

    def running(self, start: KVState, dim: int = 0, log_decay: Tensor | None = None) -> tuple[KVState, KVState]:
        """Add up the n entries of a dimension, from `start` on: return the n sums before each entry, and the last.

        With `log_decay`, of sums that have a log scale, each entry follows a decay of all that is before it.
        """
        if not is_free(self.total.shape[dim]):
            before = [start]
            for index in range(self.total.shape[dim]):
                before.append(before[-1].decayed(log_decay).plus(self.at(index, dim)))
            return KVState.stack(before[:-1], dim), before[-1]
        total = torch.cat([start.total.unsqueeze(dim), self.total], dim)
        if self.log_scale is None or start.log_scale is None:
            states = KVState(total.cumsum(dim), None)
        else:  # n² weights, for a graph of one operation whatever n
            scales = torch.cat([start.log_scale.unsqueeze(dim), self.log_scale], dim).movedim(dim, -1)
            if log_decay is not None:
                decays = log_decay.unsqueeze(-1) * torch.arange(scales.shape[-1], device=scales.device)
                scales = scales - decays
            seen = earlier(scales)
            top = seen.amax(dim=-1)
            weights = (seen - finite_or_zero(top).unsqueeze(-1)).exp()
            joined = (weights @ total.movedim(dim, -3).flatten(-2)).unflatten(-1, total.shape[-2:])
            top = top if log_decay is None else top + decays
            states = KVState(joined.movedim(-3, dim), top.movedim(-1, dim))
        return states.at(slice(0, self.total.shape[dim]), dim), states.at(-1, dim)

    def state(self) -> State:
        """Return the entries of a state."""
        entries = {"kv": self.total[..., :-1], "k_sum": self.total[..., -1]}
        return entries if self.log_scale is None else {**entries, "log_scale": self.log_scale}


FeatureFunction = Callable[[Tensor], Features]
"""Maps queries or keys `[B, H, L, d]` to their features."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of features and states: float32, or float64 for float64 inputs."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


#: Most tokens of a block. A matrix product adds them up one after the other, which rounds more than adding up blocks.
MAX_BLOCK_LENGTH = 1024


def block_length(batch: int, heads: int, width: int, length: int) -> int:
    """Return how many tokens' features fit into `BLOCK_ELEMENTS`; all of them under torch.compile, which fuses."""
    if torch.compiler.is_compiling():
        return max(length, 1)
    tokens = min(BLOCK_ELEMENTS // max(batch * heads * width, 1), MAX_BLOCK_LENGTH)
    return max(tokens // BLOCK_QUANTUM, 1) * BLOCK_QUANTUM


def token_blocks(
    step: int, mask: Tensor | None, *tensors: Tensor
) -> Iterator[tuple[int, int, Tensor | None, tuple[Tensor, ...]]]:
    """Yield blocks of `step` tokens of `[B, H, L, d]`, in the dtype of features and zero at padding.

    Yields:
        The first position, the position after the last, the block's mask, and the block of each tensor.
    """
    length = tensors[0].shape[2]
    single = is_free(length) or (torch.compiler.is_compiling() and length > 0)  # a loop would fix the length of a graph
    for start in (0,) if single else range(0, length, step):
        stop = length if single else min(start + step, length)
        part = None if mask is None else mask[:, start:stop]
        yield start, stop, part, tuple(mask_tokens(x[:, :, start:stop].to(compute_dtype(x)), part) for x in tensors)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph of what runs on a device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def may_read(tensor: Tensor) -> bool:
    """Return whether the host may read numbers of a tensor: in no graph that torch.compile or CUDA records."""
    return not torch.compiler.is_compiling() and not is_capturing(tensor.device)


def is_free(length: int) -> bool:
    """Return whether a length is free in the graph that is being exported. Nothing may branch on it or loop over it."""
    return torch.compiler.is_exporting() and not isinstance(length, int)


def refuse_free_length(length: int, mechanism: str, remedy: str = "Export it to ONNX") -> None:
    """Raise where a graph with a free length cannot be exported: its loops over chunks have no other form here."""
    if is_free(length):
        raise NotImplementedError(
            f"{mechanism} cannot be exported with a free length. {remedy}, export it with fixed sizes (of 1 token for "
            "decoding steps), or patch with a kernelized mechanism or 'window'."
        )


def chunk_order(count: int, size: int, length: int, first: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of chunks in an order that `unflatten(dim, (size, count))` splits, for exported graphs.

    Padding and slices of a free length, and a split into a free number of chunks, would fix the length.

    Returns:
        The index of the i-th token of all chunks, then that of the next, `[size·count]`, within `length` tokens, and
        where this is padding. Chunk 0 begins at the token `first`.
    """
    index = (torch.arange(size, device=device)[:, None] + torch.arange(count, device=device) * size + first).flatten()
    return index.clamp(0, length - 1), (index < 0) | (index >= length)


def split_chunks(tensor: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Split `[…, L, w]` into chunks `[…, n, c, w]`, the last of them padded with `value`."""
    length = tensor.shape[-2]
    if not is_free(length):
        size = min(size, length)
        return functional.pad(tensor, (0, 0, 0, -length % size), value=value).unflatten(-2, (-1, size))
    count = (length + size - 1) // size + 1  # one more than needed: a dimension that may be 1 fixes the length
    index, padding = chunk_order(count, size, length, 0, tensor.device)
    tokens = tensor.index_select(-2, index).masked_fill(padding.unsqueeze(-1), value)
    return tokens.unflatten(-2, (size, count)).transpose(-2, -3)


def join_chunks(tensor: Tensor, length: int, dim: int) -> Tensor:
    """Join the chunks `[…, n, c, …]` of dimensions `dim` and `dim + 1`, without what lies behind `length` tokens."""
    joined = tensor.flatten(dim, dim + 1)
    if is_free(length):
        return joined.index_select(dim, torch.arange(length, device=tensor.device))
    return joined.narrow(dim, 0, length)


def mask_tokens(tensor: Tensor, mask: Tensor | None, value: float = 0.0) -> Tensor:
    """Write `value` at masked tokens of `[B, H, L, …]`; mask `[B | 1, L]`, True for tokens.

    This is a selection and not a product, so that NaN in padding does not spread.
    """
    if mask is None:
        return tensor
    shape = (mask.shape[0], 1, mask.shape[1]) + (1,) * (tensor.dim() - 3)
    return tensor.masked_fill(~mask.view(shape), value)


def with_ones(value: Tensor) -> Tensor:
    """Append a column of ones to `[…, e]`: one product then gives the numerator and the normaliser."""
    return functional.pad(value, (0, 1), value=1.0)


def earlier(log_scale: Tensor) -> Tensor:
    """Return the entries up to each one, `[…, n] -> […, n, n]`, and `-inf` for the later ones."""
    order = torch.arange(log_scale.shape[-1], device=log_scale.device)
    return log_scale.unsqueeze(-2).masked_fill(order > order.unsqueeze(-1), float("-inf"))


def finite_or_zero(log_scale: Tensor) -> Tensor:
    """Replace `-inf` (the maximum over no keys) by 0, so that `exp(-inf - log_scale)` is 0 and not NaN."""
    return log_scale.masked_fill(log_scale == float("-inf"), 0.0)


def divide(numerator: Tensor, denominator: Tensor, *, signed: bool = False) -> Tensor:
    """Divide `[…, e]` by `[…]` with the floor `DENOMINATOR_EPS`, or guarded by `SIGNED_NORMALISER_EPS` if `signed`."""
    if signed:
        inverse = denominator / denominator.square().clamp_min(SIGNED_NORMALISER_EPS**2)
        return numerator * inverse.unsqueeze(-1)
    return numerator / denominator.clamp_min(DENOMINATOR_EPS).unsqueeze(-1)


def weighted_mean(totals: Tensor, *, signed: bool = False) -> Tensor:
    """Turn `Σ w [v, 1]` `[…, e + 1]` into the weighted mean of v `[…, e]`, as `divide`."""
    return divide(totals[..., :-1], totals[..., -1], signed=signed)


def softmax_rows(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Apply softmax over the last dimension to the allowed entries; rows without any are zero."""
    if allowed is None:
        return torch.softmax(logits, dim=-1)
    weights = torch.softmax(logits.masked_fill(~allowed, torch.finfo(logits.dtype).min), dim=-1)
    return weights.masked_fill(~allowed, 0.0)


def group_heads(tensor: Tensor, groups: int) -> Tensor:
    """View `[B, H, L, m]` as `[B, G, R, L, m]` with `H = G·R`: the R query heads that share a key-value head."""
    batch, heads, length, width = tensor.shape
    return tensor.view(batch, groups, heads // groups, length, width)


def readable(tensor: Tensor) -> Tensor:
    """Copy a tensor that kernels cannot read: a negative view, or numbers of a token that are not contiguous."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def token_major(sizes: Iterable[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Allocate `[B, H, L, e]` with the memory layout `[B, L, H, e]`, the order in which a model uses it."""
    batch, heads, length, width = sizes
    if length == 1:
        return torch.empty((batch, heads, 1, width), dtype=dtype, device=device)
    return torch.empty((batch, length, heads, width), dtype=dtype, device=device).transpose(1, 2)


def parameter_gradient(parts: Tensor, parameter: Tensor) -> Tensor:
    """Sum gradients `[B, H, …]` over the batch, and over the heads where they share the parameter."""
    total = parts.sum(dim=0)
    return (total.sum(dim=0, keepdim=True) if parameter.shape[0] == 1 else total).to(parameter.dtype)


def constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function of constants whose result is one where torch.compile traces a call, and return it.

    This is `torch.compiler.assume_constant_result`, which imports the compiler, as long as torch itself takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Underivable(torch.autograd.Function):
    """The first tensors as a function of all, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "The fused kernels of hf_linear_attn have first derivatives only. Compute this model with "
            "hf_linear_attn.use_backend('torch')."
        )


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward(ctx, saved_tensors, *gradients)` of a kernel: differentiating it in turn is an error.

    The error of `torch.autograd.function.once_differentiable` is missed by `torch.autograd.grad`, which leaves out all
    that does not lead to the tensors it is asked for.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors  # read once, because recomputed activations are freed by the first access
        with torch.no_grad():
            outputs = backward(ctx, saved, *gradients)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return outputs
        sources = [tensor for tensor in (*gradients, *saved) if tensor is not None and tensor.requires_grad]
        results = [output.detach() for output in outputs if isinstance(output, Tensor)]
        linked = iter(_Underivable.apply(len(results), *results, *sources))
        return tuple(next(linked) if isinstance(output, Tensor) else output for output in outputs)

    return wrapper
