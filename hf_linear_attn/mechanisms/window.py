"""Exact softmax in a window, a feature map outside it, one normaliser."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..feature_maps.base import AttentionShape
from ..ops import backends
from ..ops import windowed as ops
from ..ops.common import Features, State, block_length, compute_dtype, mask_tokens
from ..ops.fused import QueryMix, StepMix, WindowedCall
from ..ops.kernelized import dense_weights
from ..ops.window_step import is_decoding_step
from ..registry import FEATURE_MAPS, build_options, register_attention
from .base import AttentionInputs, LinearAttention, visible
from .repeated import remember, repeated

#: Far tokens of a decoder that weigh in full. Without a bound their common weight grows with the length of the input,
#: beyond anything seen in training: a converted Llama (5 layers, w = 64, trained at 256 tokens) had perplexity 9.5 at
#: 512 tokens, 4.9 with a bound of 4 and 5.0 with 16. In encoders, where the whole input is far from nearly everything,
#: it does harm.
CAUSAL_SATURATION = 8

#: Bound of what a query adds to the log mixing weight, either way: a factor of 22,000, and no overflow for any query.
MIX_BOUND = 10.0


@dataclass(frozen=True)
class WindowOptions:
    window_size: int = field(default=64, metadata={"help": "tokens with exact weights: the last w, or |i - j| < w"})
    feature_map: str = field(default="hedgehog", metadata={"help": "feature map outside the window"})
    feature_map_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of that map"})
    mix_init: float = field(
        default=0.0, metadata={"help": "start of the learned log mixing weight of the part outside the window"}
    )
    saturation: int | Literal["auto"] | None = field(
        default="auto",
        metadata={
            "help": "n far tokens weigh as n / (1 + n / saturation), so as no more than so many (null: as n; 'auto': "
            f"{CAUSAL_SATURATION} in decoders, null in encoders)"
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.window_size, int) or self.window_size < 1:
            raise ValueError(f"window_size must be a positive integer, got {self.window_size!r}.")
        bound = self.saturation
        if bound not in (None, "auto") and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
            raise ValueError(f"saturation must be a positive integer, None or 'auto', got {bound!r}.")
        entry = FEATURE_MAPS.get(self.feature_map)
        if entry.cls.uses_positions:
            # Its state delays keys by the window and does not count the tokens before them.
            raise ValueError(f"window cannot use {self.feature_map!r}: this feature map needs the tokens' positions.")
        build_options(entry, dict(self.feature_map_options))


@register_attention(
    "window",
    description="exact softmax in a window, a learned feature map outside it, one normaliser",
    paper="Zhang et al. 2024 (LoLCATs), arXiv:2410.10254",
    options=WindowOptions,
    causal=True,
    bidirectional=True,
    learned=True,
    state="constant",
    cost="O(L·(w + m)·d) time, O((w + m)·d) state",
    recommendation="the default: exact local detail, a constant-size state for the rest; best quality after conversion",
)
class WindowAttention(LinearAttention):
    """`w_ij = exp(τ q·k - c_i)` in the window, `exp(g_i) φ(q_i)·φ(k_j)` outside it, one normaliser over both.

    After LoLCATs (Zhang et al. 2024, arXiv:2410.10254): `c_i` is the largest logit of the row's window. There g is one
    number a head; here `g_i = b + √τ u·q_i` (within `MIX_BOUND` of b), b and u `[d]` learned per head, u = 0 at the
    start: only the query can tell whether what it looks for is near or far. (all-MiniLM-L6-v2 on STS-B, w = 8, after
    300 steps of transfer: correlation .61 with b alone, .71 with u; the exact model has .80.) With everything inside
    the window this is exact attention. The state is S, z and a ring of w keys and values. With a `saturation` N the
    weights outside are divided by `1 + n/N`, n the number of tokens there: together they tend to N times their mean
    instead of growing with the input. The state then counts tokens, `count [B]`.
    """

    dense_masks = True

    def __init__(self, shape: AttentionShape, options: WindowOptions) -> None:
        options = self.resolve_options(shape, options)
        super().__init__(shape, options)
        entry = FEATURE_MAPS.get(options.feature_map)
        self.feature_map = entry.cls(shape, build_options(entry, dict(options.feature_map_options)))
        if self.feature_map.signed:
            raise ValueError(
                f"window cannot use {options.feature_map!r} with these options: its weights can be negative, and one "
                "normaliser over them and the exact weights could cross zero."
            )
        self.log_mix = nn.Parameter(
            torch.full((shape.num_heads,), float(options.mix_init), dtype=torch.float32, device="cpu")
        )
        self.mix_weight = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim, dtype=torch.float32, device="cpu"))

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: WindowOptions) -> WindowOptions:
        if options.saturation != "auto":
            return options
        return replace(options, saturation=CAUSAL_SATURATION if shape.causal else None)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        query, key, value, mask, state = inputs.query, inputs.key, inputs.value, inputs.mask, inputs.state
        scaling, causal, keep_state = inputs.scaling, inputs.causal, inputs.return_state
        if state is None and inputs.first_call:
            self.feature_map.begin_forward()
        inputs.refuse_bidirectional_state()
        if state is None and not keep_state and self._all_inside(query, key, mask):
            return _exact(query, key, value, scaling, causal), None
        log_mix: Tensor | StepMix | QueryMix
        if state is not None and not torch.is_grad_enabled() and is_decoding_step(query, mask, state):
            mask = None
            out = repeated(self, state, query, key, value, scaling)
            if out is not None:
                return out, state
            log_mix = self._step_mix(query, key, scaling, state)
        elif torch.is_grad_enabled() or torch.compiler.is_compiling():
            log_mix = self._log_mix(query, key, scaling, causal, mask, state)
        else:
            log_mix = self._sequence_mix(query, key, scaling, causal, mask, state)
        call = WindowedCall(
            query,
            key,
            value,
            *self._feature_functions(scaling),
            fused=self.feature_map.fused(scaling),
            num_features=self.feature_map.num_features,
            causal=causal,
            window=self.options.window_size,
            scaling=scaling,
            log_mix=log_mix,
            mask=mask,
            state=state,
            return_state=keep_state,
        )
        out, after = backends.attend(call)
        remember(self, scaling, state, after)
        if not keep_state:
            return out, None
        if self.options.saturation is None or after is None or "count" in after:
            return out, after
        if state is not None and mask is None:
            return out, {**after, "count": state["count"] + key.shape[2]}
        return out, {**after, "count": _seen(state) + _new(key, mask)}

    def _all_inside(self, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
        """Whether this is exact attention: no key outside a window, no padding, and no gradient for the learned parts
        (their gradients are zeros then, which exact attention would not make)."""
        if mask is not None or key.shape[2] > self.options.window_size or torch.compiler.is_compiling():
            return False
        if query.shape[2] != key.shape[2] or query.dtype == torch.float16:
            return False
        return not torch.is_grad_enabled() or not any(held.requires_grad for held in self.parameters())

    def dense_forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool, mask: Tensor
    ) -> Tensor:
        self.feature_map.begin_forward()
        return super().dense_forward(query, key, value, scaling=scaling, causal=causal, mask=mask)

    def attention_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        return ops.dense_windowed_weights(
            query,
            key,
            *self._feature_functions(scaling),
            inside=self._inside(query, key, causal, mask),
            allowed=visible(mask, query, key, causal),
            scaling=scaling,
            log_mix=self._log_mix(query, key, scaling, causal, mask, None),
        )

    def _log_mix(
        self, query: Tensor, key: Tensor, scaling: float, causal: bool, mask: Tensor | None, state: State | None
    ) -> Tensor:
        """g, row by row `[B, H, L]`: less `log(1 + n / saturation)` for a row with n tokens outside its window.

        A mask `[B, H, L, S]` has no count of its own: places in the sequence serve.
        """
        padding = None if mask is None or mask.dim() == 4 else mask
        rest = self._rest_mix(query, key, causal, padding, state)
        return rest + self._query_mix(query, scaling, _of_rows(padding, query))

    def _rest_mix(self, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, state: State | None) -> Tensor:
        """What g has besides the query's part: `[1, H, 1]`, or `[B | 1, H, L]` with a saturation."""
        log_mix, length = self.log_mix.to(compute_dtype(query)).view(1, -1, 1), query.shape[2]
        saturation, window = self.options.saturation, self.options.window_size
        if saturation is None:
            return log_mix
        if state is not None and mask is None and length == 1:  # a decoding step: few operations
            before = (state["count"] + (1 - window)).clamp_min(0).to(log_mix.dtype)
            return log_mix - torch.log1p(before / saturation).view(-1, 1, 1)
        far = _far_tokens(key, mask, state, window, causal)
        far = far[:, None, far.shape[1] - length :]
        return log_mix - torch.log1p(far.to(log_mix.dtype) / saturation)

    def _sequence_mix(
        self, query: Tensor, key: Tensor, scaling: float, causal: bool, mask: Tensor | None, state: State | None
    ) -> QueryMix:
        rest = self._rest_mix(query, key, causal, mask, state)
        return QueryMix(
            lambda: rest + self._query_mix(query, scaling, _of_rows(mask, query)), rest, self.mix_weight, MIX_BOUND
        )

    def _step_mix(self, query: Tensor, key: Tensor, scaling: float, state: State) -> StepMix:
        saturation = self.options.saturation
        return StepMix(
            lambda: self._log_mix(query, key, scaling, True, None, state),
            self.log_mix,
            self.mix_weight,
            MIX_BOUND,
            saturation,
            None if saturation is None else state["count"],
        )

    def _query_mix(self, query: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """`clip(√τ u·q_i)` `[B, H, L]`; mask `[B, L]`: NaN in padding reaches neither it nor the gradient of u."""
        if torch.is_grad_enabled() and self.mix_weight.requires_grad:
            query = mask_tokens(query, mask)  # else without this copy of the queries
        # No matrix product: its rounding depends on the rest of the batch. In blocks, so that its room is bounded.
        batch, heads, length, width = query.shape
        dtype = compute_dtype(query)
        blocks = query.split(block_length(batch, heads, width, length), dim=2)
        weight = self.mix_weight.to(dtype).unsqueeze(-2)
        parts = [(block.to(dtype) * weight).sum(-1) for block in blocks]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return (mask_tokens(part, mask) * scaling**0.5).clamp(-MIX_BOUND, MIX_BOUND)

    def separable_queries(self, causal: bool) -> bool:
        return causal

    def branch_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(query)
        outside = visible(mask, query, key, causal) & ~self._inside(query, key, causal, mask)
        features = self.feature_map.query(query.to(dtype), scaling), self.feature_map.key(key.to(dtype), scaling)
        return dense_weights(*features, outside), outside

    def _inside(self, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
        places = ops.window_positions(mask, key.shape[2], causal, key.device)
        return ops.inside_window(places, query.shape[2], self.options.window_size, causal)

    def _feature_functions(self, scaling: float) -> tuple[Any, Any]:
        def query_features(x: Tensor, start: int) -> Features:
            return self.feature_map.query(x, scaling)

        def key_features(x: Tensor, start: int) -> Features:
            return self.feature_map.key(x, scaling)

        return query_features, key_features

    @property
    def exact_length(self) -> int:
        return self.options.window_size

    def state_bytes(self, length: int = 0) -> int:
        shape, window = self.shape, self.options.window_size
        ring = 4 * shape.num_key_value_heads * window * (shape.head_dim + shape.value_dim)
        return self.feature_map.state_bytes() + ring + window + (0 if self.options.saturation is None else 8)

    def extra_repr(self) -> str:
        return f"window_size={self.options.window_size}"


def _exact(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)


def _new(key: Tensor, mask: Tensor | None) -> Tensor:
    """Number of real tokens `[B]`."""
    return mask.sum(dim=1) if mask is not None else torch.full((key.shape[0],), key.shape[2], device=key.device)


def _seen(state: State | None) -> Tensor | int:
    return 0 if state is None else state["count"]


def _of_rows(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The part of a padding mask that belongs to the queries, the last ones of the tokens."""
    return None if mask is None else mask[:, mask.shape[1] - query.shape[2] :]


def _far_tokens(key: Tensor, mask: Tensor | None, state: State | None, window: int, causal: bool) -> Tensor:
    """How many real tokens lie outside the window of each token, `[B | 1, L]`; of earlier ones only where causal."""
    length = key.shape[2]
    real = torch.ones(1, length, dtype=torch.long, device=key.device) if mask is None else mask.long()
    before = real.cumsum(dim=1)
    if causal:
        seen = _seen(state)
        return (before + (seen.unsqueeze(1) if isinstance(seen, Tensor) else seen) - window).clamp_min(0)
    place = torch.arange(length, device=key.device)
    last, first = (place + window - 1).clamp(max=length - 1), place - window
    inside = before[:, last] - before[:, first.clamp_min(0)] * (first >= 0)
    return before[:, -1:] - inside
