"""Linformer: keys and values projected along the sequence to a fixed number of slots. Bidirectional only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape
from ..ops import linformer as ops
from ..ops.common import State, compute_dtype, mask_tokens
from ..registry import register_attention
from .base import LinearAttention


@dataclass(frozen=True)
class LinformerOptions:
    num_slots: int = field(default=128, metadata={"help": "k, the number of projected keys and values"})
    max_length: int | None = field(
        default=None, metadata={"help": "n_max, the longest input (None: the model's own limit)"}
    )
    sharing: Literal["none", "headwise", "kv"] = field(
        default="headwise",
        metadata={"help": "'none': E, F per head; 'headwise': E, F shared by the heads; 'kv': E = F as well"},
    )
    init: Literal["segment-mean", "gaussian"] = field(
        default="segment-mean", metadata={"help": "start of E and F: segment means, or the paper's N(0, 1/k)"}
    )
    fit: Literal["resample", "truncate"] = field(
        default="resample",
        metadata={"help": "shorter inputs: resample E to the true length, or take its first columns"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the gaussian start"})

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_length"):
            given = getattr(self, name)
            if not (given is None and name == "max_length") and (not isinstance(given, int) or given < 1):
                raise ValueError(f"{name} must be a positive integer, got {given!r}.")
        for name, choices in (
            ("sharing", ("none", "headwise", "kv")),
            ("init", ("segment-mean", "gaussian")),
            ("fit", ("resample", "truncate")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}.")


@register_attention(
    "linformer",
    description="keys and values projected along the sequence to k slots",
    paper="Wang et al. 2020, arXiv:2006.04768",
    options=LinformerOptions,
    causal=False,
    bidirectional=True,
    learned=True,
    cost="O(L·k·d) time, O(L·k) memory, h·k·n_max parameters",
    advice="encoders with inputs of similar length; not for generation",
    alternative="linformer-causal",
)
class LinformerAttention(LinearAttention):
    """`o = softmax(τ q (E K)ᵀ) (F V)`, `E, F [k, n_max]`. Wang et al. 2020, arXiv:2006.04768.

    E and F start as segment means, so that an untrained patch pools the sequence. Each row of a batch gets E and F
    fitted to its own number of real tokens (`fit="resample"`, see `ops.linformer.resample_projection`), which makes a
    row's result independent of the padding around it. Inputs longer than n_max raise a ValueError.
    """

    distribution = False  # trained projections may be negative
    transfer_lr = 1e-3

    def __init__(self, shape: AttentionShape, options: LinformerOptions) -> None:
        super().__init__(shape, options)
        if options.max_length is None:
            raise ValueError("linformer needs max_length, the longest input: this model's config states no limit.")
        heads = shape.num_key_value_heads if options.sharing == "none" else 1
        self.project_key = nn.Parameter(self._initial(heads, 2 * shape.layer_index))
        self.project_value = (
            self.project_key
            if options.sharing == "kv"
            else nn.Parameter(self._initial(heads, 2 * shape.layer_index + 1))
        )

    @classmethod
    def resolve_options(cls, shape: AttentionShape, options: LinformerOptions) -> LinformerOptions:
        return replace(options, max_length=shape.max_length) if options.max_length is None else options

    def _initial(self, heads: int, stream: int) -> Tensor:
        slots, length = self.options.num_slots, self.options.max_length
        if self.options.init == "segment-mean":
            return ops.segment_means(slots, length).repeat(heads, 1, 1)
        generator = torch.Generator(device="cpu").manual_seed(self.options.seed * 1_000_003 + stream)
        return torch.randn(heads, slots, length, generator=generator, device="cpu") / slots**0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        causal: bool,
        mask: Tensor | None = None,
        state: State | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        self._check(key, causal)
        dtype = compute_dtype(query)
        slots = self._columns(self.project_key, key, mask) @ mask_tokens(key.to(dtype), mask)
        held = self._columns(self.project_value, key, mask) @ mask_tokens(value.to(dtype), mask)
        out, _ = ops.low_rank_attention(query.to(dtype), slots, held, scaling)
        return out.to(value.dtype), None

    def attention_weights(
        self, query: Tensor, key: Tensor, *, scaling: float, causal: bool, mask: Tensor | None = None
    ) -> Tensor:
        """`softmax(τ q (E K)ᵀ) F`: what multiplies the values. Rows need not sum to 1 once F is trained."""
        self._check(key, causal)
        dtype = compute_dtype(query)
        slots = self._columns(self.project_key, key, mask) @ mask_tokens(key.to(dtype), mask)
        _, weights = ops.low_rank_attention(query.to(dtype), slots, slots, scaling)
        held = self._columns(self.project_value, key, mask)
        return weights @ held.repeat_interleave(weights.shape[1] // held.shape[1], dim=1)

    def _columns(self, projection: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        resample = self.options.fit == "resample"
        return ops.columns(projection.to(compute_dtype(key)), key.shape[2], mask, resample)

    def _check(self, key: Tensor, causal: bool) -> None:
        if causal:
            raise NotImplementedError(
                "linformer mixes future tokens into every slot and cannot be causal. "
                "Use 'linformer-causal' on decoders."
            )
        if key.shape[2] > self.options.max_length:
            raise ValueError(
                f"The input has {key.shape[2]} tokens, but linformer was built for "
                f"max_length={self.options.max_length}. "
                f"Shorten the input, or patch again with max_length={key.shape[2]} or more."
            )

    def extra_repr(self) -> str:
        return f"num_slots={self.options.num_slots}, max_length={self.options.max_length}"
