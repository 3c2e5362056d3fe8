"""Exact softmax in a window, a feature map outside it, one normaliser."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureMap, constant_parameter
from ..ops import backends
from ..ops import windowed as ops
from ..ops.common import State, block_length, compute_dtype, mask_tokens
from ..ops.fused import QueryMix, StepMix, WindowedCall
from ..ops.kernelized import dense_weights
from ..ops.sinks import end_positions, sink_pairs
from ..ops.window_step import is_decoding_step
from ..registry import FEATURE_MAPS, build_options, register_attention
from .base import AttentionInputs, LinearAttention, visible
from .softmax import softmax_attention

#: Tokens outside the window of a decoder that weigh in full. Without a bound their common weight grows with the length
#: of the input, beyond anything seen in training: a converted Llama (5 layers, w = 64, trained at 256 tokens) had
#: perplexity 9.5 at 512 tokens, 4.9 with a bound of 4 and 5.0 with 16. In encoders, where most of the input is outside
#: of each window, it does harm.
CAUSAL_SATURATION = 8

#: Sinks of decoders, and of encoders at either end. Exact weights for them, and nothing else, bring SmolLM2-135M with a
#: window of 64 from perplexity 92 to 39 (1 sink: 39.5), and MiniLM's embeddings from a cosine of .88 to .954.
CAUSAL_SINKS, BIDIRECTIONAL_SINKS = 4, 1

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
    sink_tokens: int | Literal["auto"] = field(
        default="auto",
        metadata={
            "help": "exact outside of the window too: the first n tokens in decoders, the first n and the last n in "
            f"encoders ('auto': {CAUSAL_SINKS} and {BIDIRECTIONAL_SINKS}; 0: none)",
            "before": 0,
        },
    )

    def __post_init__(self) -> None:
        if not isinstance(self.window_size, int) or self.window_size < 1:
            raise ValueError(f"window_size must be a positive integer, got {self.window_size!r}.")
        bound = self.saturation
        if bound not in (None, "auto") and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
            raise ValueError(f"saturation must be a positive integer, None or 'auto', got {bound!r}.")
        sinks = self.sink_tokens
        if sinks != "auto" and (not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0):
            raise ValueError(f"sink_tokens must be a non-negative integer or 'auto', got {sinks!r}.")
        entry = FEATURE_MAPS.get(self.feature_map)
        if entry.factory.uses_positions:
            # The state of the window delays keys, and does not count the tokens before them.
            raise ValueError(f"window cannot use {self.feature_map!r}: this feature map needs the tokens' positions.")
        build_options(entry, dict(self.feature_map_options))


@register_attention(
    "window",
    description="exact softmax in a window and for sinks, a learned feature map elsewhere, one normaliser",
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

    This follows LoLCATs (Zhang et al. 2024, arXiv:2410.10254): `c_i` is the largest exact logit of the row. There g is
    one number a head; here `g_i = b + √τ u·q_i` (within `MIX_BOUND` of b), b and u `[d]` learned per head, u = 0 at
    the start: only the query can tell whether what it looks for is near or far. (all-MiniLM-L6-v2 on STS-B, w = 8,
    after 300 steps of transfer: correlation .61 with b only, .71 with u; the exact model has .80.)

    Sinks (Xiao et al. 2023, arXiv:2309.17453) count as inside of every window: the first `sink_tokens` tokens of a row
    in decoders; in encoders as many at either end, and these see every key exactly themselves. Pretrained models give
    such tokens much of their attention. A row of at most `exact_length` tokens has exact attention.

    The state is S, z, a ring buffer of w keys and values, the sinks, and the number of tokens, `count [B]`. With a
    `saturation` N the weights outside the window are divided by `1 + n/N`, n the number of tokens there: together they
    tend to N times their mean instead of growing with the input.
    """

    dense_masks = True

    def __init__(self, shape: AttentionShape, options: WindowOptions) -> None:
        options = self.resolve_options(shape, options)
        super().__init__(shape, options)
        entry = FEATURE_MAPS.get(options.feature_map)
        self.feature_map: FeatureMap = entry.factory(shape, build_options(entry, dict(options.feature_map_options)))
        if self.feature_map.signed:
            raise ValueError(
                f"window cannot use {options.feature_map!r} with these options: its weights can be negative, and one "
                "normaliser over them and the exact weights could cross zero."
            )
        self.log_mix = constant_parameter(shape.num_heads, value=options.mix_init)
        self.mix_weight = constant_parameter(shape.num_heads, shape.head_dim)

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: WindowOptions) -> WindowOptions:
        if options.saturation == "auto":
            options = replace(options, saturation=CAUSAL_SATURATION if shape.causal else None)
        if options.sink_tokens == "auto":
            options = replace(options, sink_tokens=CAUSAL_SINKS if shape.causal else BIDIRECTIONAL_SINKS)
        return options

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        query, key, value, mask, state = inputs.query, inputs.key, inputs.value, inputs.mask, inputs.state
        scaling, causal = inputs.scaling, inputs.causal
        if state is None and inputs.first_call:
            self.feature_map.begin_forward()
        inputs.refuse_bidirectional_state()
        if state is None and not inputs.return_state and self._is_within_window(query, key, mask, causal):
            return softmax_attention(query, key, value, None, scaling, causal), None
        log_mix: Tensor | StepMix | QueryMix
        if state is not None and not torch.is_grad_enabled() and is_decoding_step(query, mask, state):
            mask = None
            log_mix = self._step_mix(query, key, scaling, state)
        elif torch.is_grad_enabled() or torch.compiler.is_compiling():
            log_mix = self._log_mix(query, key, scaling, causal, mask, state)
        else:
            log_mix = self._sequence_mix(query, key, scaling, causal, mask, state)
        call = WindowedCall(
            query,
            key,
            value,
            *self.feature_map.functions(scaling),
            num_features=self.feature_map.num_features,
            causal=causal,
            window=self.options.window_size,
            scaling=scaling,
            log_mix=log_mix,
            mask=mask,
            state=state,
            return_state=inputs.return_state,
            sinks=self.options.sink_tokens,
        )
        out, state_after = backends.attend(call)
        return out, state_after if inputs.return_state else None

    def _is_within_window(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> bool:
        """Return whether this is exact attention, which is faster: no key is outside of a window, none is padding.

        The learned parts must not need a gradient: theirs would be zeros, which exact attention would not make.
        """
        if mask is not None or key.shape[2] > self._exact_length(causal) or torch.compiler.is_compiling():
            return False
        if query.shape[2] != key.shape[2] or query.dtype == torch.float16:
            return False
        return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters())

    def attention_weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        start: int | None = None,
    ) -> Tensor:
        return ops.dense_windowed_weights(
            query,
            key,
            *self.feature_map.functions(scaling)[:2],
            inside=self._inside(query, key, causal, mask, start),
            allowed=visible(mask, query, key, causal),
            scaling=scaling,
            log_mix=self._log_mix(query, key, scaling, causal, mask, None, start),
        )

    def _log_mix(
        self,
        query: Tensor,
        key: Tensor,
        scaling: float,
        causal: bool,
        mask: Tensor | None,
        state: State | None,
        start: int | None = None,
    ) -> Tensor:
        """Return the log mixing weight g of each row, `[B, H, L]`.

        With a saturation it is less by `log(1 + n / saturation)` for a row with n tokens outside its window. Where the
        mask is `[B, H, L, S]`, n counts positions in the sequence.
        """
        padding = None if mask is None or mask.dim() == 4 else mask
        constant = self._constant_mix(query, key, causal, padding, state, start)
        return constant + self._query_mix(query, scaling, _of_queries(padding, query, start))

    def _constant_mix(
        self,
        query: Tensor,
        key: Tensor,
        causal: bool,
        mask: Tensor | None,
        state: State | None,
        start: int | None = None,
    ) -> Tensor:
        """Return the part of g that does not depend on the query: `[1, H, 1]`, with a saturation `[B | 1, H, L]`."""
        log_mix, length = self.log_mix.to(compute_dtype(query)).view(1, -1, 1), query.shape[2]
        saturation, window, sinks = self.options.saturation, self.options.window_size, self.options.sink_tokens
        if saturation is None:
            return log_mix
        if state is not None and mask is None and length == 1:  # A decoding step takes fewer operations this way.
            outside = (state["count"] + (1 - window - sinks)).clamp_min(0).to(log_mix.dtype)
            return log_mix - torch.log1p(outside / saturation).view(-1, 1, 1)
        outside = _of_queries(_count_outside(key, mask, state, window, sinks, causal), query, start)
        return log_mix - torch.log1p(outside.unsqueeze(1).to(log_mix.dtype) / saturation)

    def _sequence_mix(
        self, query: Tensor, key: Tensor, scaling: float, causal: bool, mask: Tensor | None, state: State | None
    ) -> QueryMix:
        constant = self._constant_mix(query, key, causal, mask, state)
        return QueryMix(
            lambda: constant + self._query_mix(query, scaling, _of_queries(mask, query)),
            constant,
            self.mix_weight,
            MIX_BOUND,
        )

    def _step_mix(self, query: Tensor, key: Tensor, scaling: float, state: State) -> StepMix:
        return StepMix(
            lambda: self._log_mix(query, key, scaling, True, None, state),
            self.log_mix,
            self.mix_weight,
            MIX_BOUND,
            self.options.saturation,
            state["count"],
        )

    def _query_mix(self, query: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
        """Return `clip(√τ u·q_i)`, `[B, H, L]`. NaN in padding (mask `[B, L]`) reaches neither it nor u's gradient."""
        if torch.is_grad_enabled() and self.mix_weight.requires_grad:
            query = mask_tokens(query, mask)  # Without a gradient we save this copy of the queries.
        # This is no matrix product, because the rounding of one depends on the rest of the batch. It goes in blocks, so
        # that its memory is bounded.
        batch, heads, length, width = query.shape
        dtype = compute_dtype(query)
        blocks = query.split(block_length(batch, heads, width, length), dim=2)
        weight = self.mix_weight.to(dtype).unsqueeze(-2)
        parts = [(block.to(dtype) * weight).sum(-1) for block in blocks]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return (mask_tokens(part, mask) * scaling**0.5).clamp(-MIX_BOUND, MIX_BOUND)

    def separable_queries(self, causal: bool) -> bool:
        return True

    def branch_weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        start: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(query)
        outside = visible(mask, query, key, causal) & ~self._inside(query, key, causal, mask, start)
        features = self.feature_map.query(query.to(dtype), scaling), self.feature_map.key(key.to(dtype), scaling)
        return dense_weights(*features, outside), outside

    def _inside(
        self, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, start: int | None = None
    ) -> Tensor:
        """Return which keys a query sees exactly, `[B | 1, H | 1, L, S]`: those in its window, and sinks."""
        if start is not None:
            return self._inside(key, key, causal, mask)[..., start : start + query.shape[2], :]
        inside = ops.inside_window(mask, query, key, self.options.window_size, causal)
        if not self.options.sink_tokens:
            return inside
        return inside | sink_pairs(visible(mask, query, key, causal), self.options.sink_tokens, causal)

    @property
    def exact_length(self) -> int:
        return self._exact_length(self.shape.causal)

    def _exact_length(self, causal: bool) -> int:
        return self.options.window_size + self.options.sink_tokens * (1 if causal else 2)

    def state_bytes(self, length: int = 0) -> int:
        shape, window = self.shape, self.options.window_size
        token = 4 * shape.num_key_value_heads * (shape.head_dim + shape.value_dim)
        return self.feature_map.state_bytes() + (window + self.options.sink_tokens) * token + window + 8

    def extra_repr(self) -> str:
        return f"window_size={self.options.window_size}, sink_tokens={self.options.sink_tokens}"


def _of_queries(values: Tensor | None, query: Tensor, start: int | None = None) -> Any:
    """Return the part of `values [B, S]` that belongs to the queries: from `start`, or the last ones of the tokens."""
    if values is None:
        return None
    first = values.shape[1] - query.shape[2] if start is None else start
    return values[:, first : first + query.shape[2]]


def _count_outside(
    key: Tensor, mask: Tensor | None, state: State | None, window: int, sinks: int, causal: bool
) -> Tensor:
    """Return how many tokens, sinks aside, are outside the window of each token, `[B | 1, L]`; if causal before it."""
    length = key.shape[2]
    real = torch.ones(1, length, dtype=torch.long, device=key.device) if mask is None else mask.long()
    if causal:
        cumulative = real.cumsum(dim=1) - (window + sinks)
        return (cumulative if state is None else cumulative + state["count"].unsqueeze(1)).clamp_min(0)
    if sinks and length:
        real = real.scatter(1, end_positions(mask, sinks, len(real), length, key.device), 0)
    cumulative = real.cumsum(dim=1)
    position = torch.arange(length, device=key.device)
    last, first = (position + window - 1).clamp(max=length - 1), position - window
    inside = cumulative[:, last] - cumulative[:, first.clamp_min(0)] * (first >= 0)
    return cumulative[:, -1:] - inside
