"""Exact softmax in a window, a feature map outside it, one normaliser."""

import warnings
from dataclasses import field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import CacheDtype
from ..feature_maps.base import AttentionShape, FeatureFunctions, FeatureMap, Options, constant_parameter
from ..ops import backends, parallel
from ..ops import windowed as ops
from ..ops.calls import Mix, WindowedCall
from ..ops.common import State, block_length, compute_dtype, mask_tokens, token_blocks
from ..ops.formulas import FusedMap, FusedMaps
from ..ops.int8 import stored_dtype
from ..ops.prepared import prepare, run_prepared
from ..ops.sinks import end_positions, sink_pairs
from ..registry import FEATURE_MAPS, build_options, register_attention, seed_options
from ..utils.options import option
from .base import EVERY_TERM, AttentionInputs, LinearAttention
from .softmax import softmax_attention

# The figures behind these defaults: recipes/results/README.md#defaults.

#: Tokens outside the window of a decoder that weigh in full. Without a bound their common weight grows with the length
#: of the input, beyond anything seen in training. In encoders, where most of the input is outside of each window, it
#: does harm.
CAUSAL_SATURATION = 8

#: Sinks of decoders, and of encoders at either end.
CAUSAL_SINKS, BIDIRECTIONAL_SINKS = 4, 1

#: The log mixing weight that closes the part outside the window: its weights are zero.
CLOSED_MIX = -10_000.0

#: The start of a map that is not fitted to the keys yet: nothing, but for `calibrate` and training to change.
UNFITTED_MIX = -100.0

#: Bound of what a query adds to the log mixing weight, either way: a factor of 22,000, and no overflow for any query.
MIX_BOUND = 10.0


def is_unfitted(mechanism: LinearAttention) -> bool:
    """Return whether a window has a part outside that is closed until `calibrate` fits it."""
    return isinstance(mechanism, WindowAttention) and bool((mechanism.log_mix == UNFITTED_MIX).all())


def is_closed(log_mix: Tensor) -> Tensor:
    """Return where the part outside the window is closed, also if the number was rounded (to bfloat16: -9,984)."""
    return log_mix <= CLOSED_MIX / 2


class NoFeatures(FeatureMap):
    """The map of a layer in which nothing outside of the window is attended to: features of zero.

    They are few, and have a formula, so that kernels run it.
    """

    num_features = 8

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape, None)
        self.register_buffer("weight", torch.zeros(1, shape.head_dim, self.num_features))

    def fused(self, scaling: float) -> FusedMaps:
        formula = FusedMap("relu", self.get_buffer("weight"))
        return formula, formula


class HybridOptions(Options):
    """Options of a window with exact weights, and of the feature map outside it."""

    window_size: int = option(64, "tokens with exact weights: the last w, or |i - j| < w", least=1)
    feature_map: str = option("hedgehog", "feature map outside the window")
    feature_map_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "options of that map"})

    def __post_init__(self) -> None:
        super().__post_init__()
        build_options(FEATURE_MAPS.get(self.feature_map), dict(self.feature_map_options))


class HybridAttention(LinearAttention):
    """Base class of the hybrids. Subclasses implement `forward`, and say which keys have exact weights.

    They serve every term of a model's logits (`ops.terms`). A position bias is constant outside of the window, which is
    therefore at least as wide as the distances at which the bias changes. Where positions have no such end
    (Transformer-XL), nothing outside of the window is attended to.
    """

    served_terms = EVERY_TERM

    def __init__(self, shape: AttentionShape, options: Any) -> None:
        if options.window_size < shape.bias_reach:
            options = replace(options, window_size=shape.bias_reach)
        super().__init__(shape, options)
        entry = FEATURE_MAPS.get(options.feature_map)
        values = dict(options.feature_map_options)
        if (seed := vars(options).get("seed")) is not None:  # of all that the mechanism draws
            values = seed_options(entry, seed, values)
        self.feature_map: FeatureMap = entry.factory(shape, build_options(entry, values))
        if shape.endless_positions:
            self.feature_map = NoFeatures(shape)
        if self.feature_map.signed:
            raise ValueError(
                f"A window cannot use {options.feature_map!r} with these options: its weights can be negative, and one "
                "normaliser over them and the exact weights could cross zero."
            )

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        call = self._call(inputs, self._log_mix(inputs))
        return ops.dense_windowed_weights(call, self._inside(inputs), inputs.visible(), inputs.start)

    def outside(self, inputs: AttentionInputs) -> Tensor:
        return inputs.visible() & ~self._inside(inputs)

    def _call(self, inputs: AttentionInputs, log_mix: Tensor | Mix) -> WindowedCall:
        return WindowedCall(
            *inputs.tensors,
            *self._maps(inputs.scaling),
            self.feature_map.num_features,
            window=self.options.window_size,
            scaling=inputs.scaling,
            log_mix=log_mix,
            **inputs.settings,
        )

    def _maps(self, scaling: float) -> FeatureFunctions:
        return self.feature_map.functions(scaling)

    def _inside(self, inputs: AttentionInputs) -> Tensor:
        """Return which keys a query sees exactly, `[B | 1, H | 1, L, S]`."""
        raise NotImplementedError

    def _log_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return the log mixing weights of the part outside, `[H]` or `[B | 1, H, L | 1]`."""
        return torch.zeros(self.shape.num_heads, dtype=compute_dtype(inputs.query), device=inputs.query.device)

    @property
    def exact_length(self) -> int:
        return self.options.window_size


class WindowOptions(HybridOptions):
    feature_map: str = option("vq", "feature map outside the window")
    mix_init: float | Literal["auto"] = option(
        "auto",
        "start of the learned log mixing weight of the part outside the window ('auto': 0, and with vq "
        f"{UNFITTED_MIX:g}, nothing, until calibrate fits it)",
    )
    saturation: int | Literal["auto"] | None = option(
        "auto",
        "n far tokens weigh as n / (1 + n / saturation), so as no more than so many (null: as n; 'auto': "
        f"{CAUSAL_SATURATION} in decoders, null in encoders and with the feature map 'vq')",
        least=1,
    )
    sink_tokens: int | Literal["auto"] = option(
        "auto",
        "exact outside of the window too: the first n tokens in decoders, the first n and the last n in encoders "
        f"('auto': {CAUSAL_SINKS} and {BIDIRECTIONAL_SINKS}; 0: none)",
        least=0,
    )
    cache_dtype: CacheDtype = option(
        "auto",
        "decoders only: keys and values in the cache, those of exact heads too ('auto': in the model's dtype; 'int8': "
        "rounded, with one scale a token and head)",
    )


@register_attention(
    "window",
    description="exact softmax in a window and for sinks, a learned feature map elsewhere, one normaliser",
    paper="Zhang et al. 2024 (LoLCATs), arXiv:2410.10254",
    options=WindowOptions,
    learned=True,
    state="constant",
    cost="O(L·(w + m)·d) time, O((w + m)·d) state",
    recommendation="the default: exact local detail, a constant-size state for the rest; best quality after conversion",
)
class WindowAttention(HybridAttention):
    """`w_ij = exp(τ q·k - c_i)` in the window, `exp(g_i) φ(q_i)·φ(k_j)` outside it, one normaliser over both.

    This follows LoLCATs (Zhang et al. 2024, arXiv:2410.10254): `c_i` is the largest exact logit of the row. There g is
    one number a head; here `g_i = b + √τ u·q_i` (within `MIX_BOUND` of b), b and u `[d]` learned per head, u = 0 at
    the start: only the query can tell whether what it looks for is near or far.

    Sinks (Xiao et al. 2023, arXiv:2309.17453) count as inside of every window: the first `sink_tokens` tokens of a row
    in decoders; in encoders as many at either end, and these see every key exactly themselves. Pretrained models give
    such tokens much of their attention. A row of at most `exact_length` tokens has exact attention.

    The state is S, z, a ring buffer of w keys and values, the sinks, and the number of tokens, `count [B]`.
    With `cache_dtype` "int8" the keys and values in it, of the ring and the sinks, are `s q` with
    q = round(x/s) in int8 and s = max|x|/127 for each token and head (`ops.int8`); the sums stay in float32. The tokens
    of a call see one another exactly, and those of earlier calls rounded: a prompt in one piece is exact.

    With a `saturation` N the weights outside the window are divided by `1 + n/N`, n the number of tokens there:
    together they tend to N times their mean instead of growing with the input.
    """

    context_parallel = frozenset({True, False})
    dense_masks = True
    separable_queries = True

    def __init__(self, shape: AttentionShape, options: WindowOptions) -> None:
        fitted = FEATURE_MAPS.get(options.feature_map).factory.fits_keys
        automatic = {
            "mix_init": UNFITTED_MIX if fitted else 0.0,
            # Weights of a map that is fitted to the keys grow with the input as exact ones do.
            "saturation": CAUSAL_SATURATION if shape.causal and not fitted else None,
            "sink_tokens": CAUSAL_SINKS if shape.causal else BIDIRECTIONAL_SINKS,
        }
        chosen: dict[str, Any] = {name: x for name, x in automatic.items() if vars(options)[name] == "auto"}
        if shape.endless_positions:
            chosen |= {"mix_init": CLOSED_MIX, "saturation": None}
        options = replace(options, **chosen)
        super().__init__(shape, options)
        if shape.causal:  # in encoders weights are as good for the cosines of embeddings, and better for their ranks
            self.transfer_loss = "outputs"
        self.log_mix = constant_parameter(shape.num_heads, value=float(options.mix_init))
        self.mix_weight = constant_parameter(shape.num_heads, shape.head_dim)
        self._may_warn = options.mix_init == UNFITTED_MIX

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        if (step := run_prepared(self, inputs)) is not None:
            return step
        self.begin_forward(inputs)
        if self._may_warn and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._warn_if_closed()
        if inputs.ranks is None and self._is_within_window(inputs):
            return softmax_attention(*inputs.tensors, None, inputs.scaling, inputs.causal, inputs.terms), None
        if inputs.ranks is not None:
            if not inputs.causal:
                if self.options.saturation is not None:
                    raise NotImplementedError(
                        "A bidirectional window with a saturation counts tokens of other slices. Set saturation to "
                        "null to use context_parallel."
                    )
                call = self._call(inputs, self._log_mix(inputs))
                return parallel.windowed_slice(call, inputs.ranks), None
            # Neither sums nor borders depend on the mixing weights.
            call = self._call(inputs, self.log_mix)
            inputs = replace(inputs, state=parallel.window_before(call, inputs.ranks))
        out, state_after = backends.attend(self._call(inputs, self._mix_of_call(inputs)))
        prepare(self, inputs, state_after)
        return out, state_after if inputs.return_state else None

    def _call(self, inputs: AttentionInputs, log_mix: Tensor | Mix) -> WindowedCall:
        """Return the call with all that is exact beside the window."""
        call = super()._call(inputs, log_mix)
        options = self.options
        call.sinks = options.sink_tokens
        call.cache_dtype = stored_dtype(options.cache_dtype, inputs.key, inputs.value)
        return call

    def _warn_if_closed(self) -> None:
        """Warn once that training does not open a part which was never fitted: no gradient reaches it."""
        if is_unfitted(self):
            warnings.warn(
                "The part outside of the window is closed until it is fitted, and training does not open it. Call "
                "hf_linear_attn.calibrate(model, batches) first, or set mix_init.",
                stacklevel=2,
            )
        self._may_warn = False

    def _is_within_window(self, inputs: AttentionInputs) -> bool:
        """Return whether this is exact attention, which is faster: no key is outside of a window, none is padding.

        The learned parts must not need a gradient: theirs would be zeros, which exact attention would not make.
        """
        query, length = inputs.query, inputs.key.shape[2]
        if inputs.state is not None or inputs.return_state or inputs.mask is not None or torch.compiler.is_compiling():
            return False
        if length > self._exact_length(inputs.causal) or query.shape[2] != length or query.dtype == torch.float16:
            return False
        return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters())

    def _mix_of_call(self, inputs: AttentionInputs) -> Tensor | Mix:
        """Return g as `_log_mix` does, or without a gradient as a formula."""
        if torch.is_grad_enabled():
            return self._log_mix(inputs)
        saturation = self.options.saturation
        is_step = inputs.state is not None and inputs.query.shape[2] == 1
        is_whole = inputs.causal and inputs.state is None and inputs.mask is None
        if saturation is not None and not is_step and not (is_whole and inputs.query.device.type != "cpu"):
            return Mix(lambda: self._log_mix(inputs), self._constant_mix(inputs), self.mix_weight, MIX_BOUND)
        base = self.log_mix.view(1, -1, 1)
        return Mix(lambda: self._log_mix(inputs), base, self.mix_weight, MIX_BOUND, saturation)

    def _log_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return the log mixing weight g of each row, `[B, H, L]`.

        With a saturation it is less by `log(1 + n / saturation)` for a row with n tokens outside its window. Where the
        mask is `[B, H, L, S]`, n counts positions in the sequence.
        """
        return self._constant_mix(inputs) + self._query_mix(inputs)

    def added_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return what a saturation and the query add to the log mixing weight of a head, `[B, H, L]`."""
        return self._log_mix(inputs) - self.log_mix.view(1, -1, 1)

    def _constant_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return the part of g that does not depend on the query: `[1, H, 1]`, with a saturation `[B | 1, H, L]`."""
        query = inputs.query
        log_mix = self.log_mix.to(compute_dtype(query)).view(1, -1, 1)
        saturation = self.options.saturation
        if saturation is None:
            return log_mix
        outside = inputs.of_queries(self._count_outside(inputs)).unsqueeze(1)
        return log_mix - torch.log1p(outside.to(log_mix.dtype) / saturation)

    def _query_mix(self, inputs: AttentionInputs) -> Tensor:
        """Return `clip(√τ u·q_i)`, `[B, H, L]`. NaN in padding reaches neither it nor u's gradient."""
        query = inputs.query
        mask = None if inputs.padding is None else inputs.of_queries(inputs.padding)
        if torch.is_grad_enabled() and self.mix_weight.requires_grad:
            query = mask_tokens(query, mask)  # Without a gradient we save this copy of the queries.
        # This is no matrix product, because the rounding of one depends on the rest of the batch. On a CPU it goes in
        # blocks, which stay in its cache.
        batch, heads, length, width = query.shape
        dtype = compute_dtype(query)
        weight = self.mix_weight.to(dtype).unsqueeze(-2)
        size = block_length(batch, heads, width, length) if query.device.type == "cpu" else max(length, 1)
        blocks = token_blocks(size, None, query)
        parts = [(rows * weight).sum(-1) for _, _, _, (rows,) in blocks]
        part = parts[0] if len(parts) == 1 else torch.cat([weight.new_zeros(batch, heads, 0), *parts], dim=2)
        return (mask_tokens(part, mask) * inputs.scaling**0.5).clamp(-MIX_BOUND, MIX_BOUND)

    def _inside(self, inputs: AttentionInputs) -> Tensor:
        """Return which keys a query sees exactly, `[B | 1, H | 1, L, S]`: in its window, and sinks."""
        sinks = self.options.sink_tokens
        causal = inputs.causal
        start = inputs.start
        inside = ops.inside_window(inputs.mask, inputs.query, inputs.key, self.options.window_size, causal, start)
        return inside | sink_pairs(inputs.visible(), sinks, causal, start) if sinks else inside

    def _count_outside(self, inputs: AttentionInputs) -> Tensor:
        """Return how many tokens, but for sinks, are outside of each one's window, `[B | 1, S]`.

        If causal those are the tokens before it.
        """
        mask = inputs.padding
        window = self.options.window_size
        sinks = self.options.sink_tokens
        length = inputs.key.shape[2]
        device = inputs.key.device
        real = torch.ones(1, length, dtype=torch.long, device=device) if mask is None else mask.long()
        if inputs.causal:
            before = 0 if inputs.state is None else inputs.state["count"].unsqueeze(1)
            return (real.cumsum(dim=1) + before - (window + sinks)).clamp_min(0)
        if sinks and length:
            real = real.scatter(1, end_positions(mask, sinks, real.shape[0], length, device), 0)
        cumulative = real.cumsum(dim=1)
        position = torch.arange(length, device=device)
        last = (position + window - 1).clamp(max=length - 1)
        first = position - window
        inside = cumulative[:, last] - cumulative[:, first.clamp_min(0)] * (first >= 0)
        return cumulative[:, -1:] - inside

    @property
    def exact_length(self) -> int:
        return self._exact_length(self.shape.causal)

    def _exact_length(self, causal: bool) -> int:
        return self.options.window_size + self.options.sink_tokens * (1 if causal else 2)

    def extra_repr(self) -> str:
        options = self.options
        stored = f", cache_dtype={options.cache_dtype}" if options.cache_dtype != "auto" else ""
        return f"window_size={options.window_size}, sink_tokens={options.sink_tokens}{stored}"
