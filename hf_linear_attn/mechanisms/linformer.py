"""Linformer: keys and values projected along the sequence to a fixed number of slots. Bidirectional only."""

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, Options
from ..feature_maps.random_features import gaussian
from ..ops import linformer as ops
from ..ops.common import State, compute_dtype, mask_tokens
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class LinformerOptions(Options):
    num_slots: int = option(128, "k, the number of projected keys and values", least=1)
    max_length: int | None = option(None, "n_max, the longest input (None: the model's own limit)", least=1)
    sharing: Literal["none", "headwise", "kv", "layerwise"] = option(
        "headwise",
        "'none': E, F per head; 'headwise': E, F shared by the heads; 'kv': E = F as well; 'layerwise': "
        "one E for all layers of the model that have these options",
    )
    init: Literal["segment-mean", "gaussian"] = option(
        "segment-mean", "start of E and F: segment means, or the paper's N(0, 1/k)"
    )
    fit: Literal["resample", "truncate"] = option(
        "resample", "shorter inputs: resample E to the true length, or take its first columns"
    )
    seed: int = option(0, "seed of the gaussian start")


@register_attention(
    "linformer",
    description="keys and values projected along the sequence to k slots",
    paper="Wang et al. 2020, arXiv:2006.04768",
    options=LinformerOptions,
    causal=False,
    learned=True,
    cost="O(L·k·d) time, O(L·k) memory, h·k·n_max parameters",
    recommendation="encoders with inputs of similar length; not for generation",
    alternative="linformer-causal",
)
class LinformerAttention(LinearAttention):
    """`o = softmax(τ q (E K)ᵀ) (F V)`, `E, F [k, n_max]`. Wang et al. 2020, arXiv:2006.04768.

    E and F start as segment means, so that an untrained patch pools the sequence. Each row of a batch gets E and F
    fitted to its own number of real tokens (`fit="resample"`, see `ops.linformer.resample_projection`), which makes a
    row's result independent of the padding around it. Inputs longer than n_max raise a ValueError.
    The implied weights are `softmax(τ q (E K)ᵀ) F`, whose rows need not sum to 1 once F is trained.

    `sharing="layerwise"` ties one E over all layers that are patched with the same options, in checkpoints as well.
    (PEFT's `modules_to_save` copies each layer's module: adapted that way they are no longer tied.)
    """

    distribution = False  # trained projections may be negative
    transfer_lr = 1e-3

    def __init__(self, shape: AttentionShape, options: LinformerOptions) -> None:
        options = replace(options, max_length=options.max_length or shape.max_length)
        super().__init__(shape, options)
        if options.max_length is None:
            raise ValueError("linformer needs max_length, the longest input: this model's config states no limit.")
        heads = shape.num_key_value_heads if options.sharing == "none" else 1
        self.project_key = self._initial(heads, 2 * shape.layer_index)
        has_own_values = options.sharing in ("none", "headwise")
        self.project_value = self._initial(heads, 2 * shape.layer_index + 1) if has_own_values else None

    def share_with(self, first: LinearAttention) -> None:
        if self.options.sharing == "layerwise" and isinstance(first.project_key, nn.Parameter):
            self.project_key = first.project_key
            self._tied_weights_keys = {"project_key": "project_key"}

    def _initial(self, heads: int, stream: int) -> nn.Parameter:
        """Return the start of E or F, `[heads, k, n_max]`."""
        slots, length = self.options.num_slots, self.options.max_length
        if self.options.init == "segment-mean":
            return nn.Parameter(ops.segment_means(slots, length).repeat(heads, 1, 1))
        start = gaussian(heads, slots, length, seed=self.options.seed * 1_000_003 + stream)
        return nn.Parameter(start / slots**0.5)

    def _columns(self, parameter: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return E or F fitted to the keys, `[B | 1, heads, k, S]`."""
        return ops.columns(parameter.to(compute_dtype(key)), key.shape[2], mask, self.options.fit == "resample")

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        (query, key, value), mask = inputs.tensors, inputs.mask
        if key.shape[2] > self.options.max_length:
            raise ValueError(
                f"The input has {key.shape[2]} tokens, but linformer was built for "
                f"max_length={self.options.max_length}. "
                f"Shorten the input, or patch again with max_length={key.shape[2]} or more."
            )
        dtype = compute_dtype(query)
        project_key = self._columns(self.project_key, key, mask)
        project_value = project_key
        if self.project_value is not None:
            project_value = self._columns(self.project_value, key, mask)
        key_slots = project_key @ mask_tokens(key.to(dtype), mask)
        value_slots = project_value @ mask_tokens(value.to(dtype), mask)
        # A NaN in a padded query would meet a zero gradient, and spread through the slots.
        query = mask_tokens(query.to(dtype), mask)
        return ops.low_rank_attention(query, key_slots, value_slots, inputs.scaling).to(value.dtype), None
