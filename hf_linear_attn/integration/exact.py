"""Exact layers of a patched model: the model's former attention, with the mask in the form that it expects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..mechanisms.softmax import softmax_weights
from .mask import exact_mask, full_mask_to_bool


def run_exact(
    module: nn.Module,
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    causal: bool,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run the model's former implementation, with the mask in the form that it expects."""
    length, keys = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 4:
        full: Tensor | None = mask
    elif implementation.startswith("flash"):
        full = mask
    elif mask is None and causal and length == keys and implementation != "eager":
        full = None
    else:
        full = exact_mask(None if mask is None else mask[:, :keys], length, keys, causal, query.device)
    if implementation == "eager":
        if full is not None and full.dtype == torch.bool:
            blocked = torch.zeros(full.shape, dtype=query.dtype, device=query.device)
            full = blocked.masked_fill(~full, torch.finfo(query.dtype).min)
        function: Any = eager_function(module)
    else:
        function = ALL_ATTENTION_FUNCTIONS[implementation]
    if is_causal is None and full is None and causal != getattr(module, "is_causal", True):
        is_causal = causal  # the exact function would go by the module's flag
    if is_causal is not None and implementation != "eager":
        kwargs = {**kwargs, "is_causal": is_causal}
    out, weights = function(module, query, key, value, full, dropout=dropout, scaling=scaling, **kwargs)
    if weights is None and weights_wanted(kwargs):
        allowed = exact_mask(mask, length, keys, causal, query.device) if mask is None or mask.dim() == 2 else full
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        weights = softmax_weights(query, key, full_mask_to_bool(allowed), scaling).to(value.dtype)
    return out, weights


def eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of the module's own modeling file."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(
        f"The modeling file of {type(module).__name__} has no eager_attention_forward. Load the model with "
        "attn_implementation='sdpa'."
    )


def observed_masks(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> tuple[Tensor | None, Tensor]:
    length, keys = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 4:
        allowed = full_mask_to_bool(mask)
        return allowed, allowed
    allowed_or_none = exact_mask(mask, length, keys, causal, query.device)
    if allowed_or_none is None:
        allowed_or_none = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device)
    return mask, allowed_or_none


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for `output_attentions`."""
    if kwargs.get("output_attentions"):
        return True
    collector = output_capturing._active_collector
    active = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return active is not None and any("attentions" in name for name in active)
