"""Masks: what the model builds once per forward, and what the layers make of it.

Our mask function returns the padding mask wherever the pattern is simply causal, `[B, S]`, or bidirectional, as a view
`[B, 1, L, S]` (which modules outside of Transformers' attention interface may read, too), or None: memory stays O(S).
Every other pattern (packed documents, sliding windows, prefixes, a caller's own overlay) is returned in full,
`[B, 1, L, S]`; a linear layer then either applies it in its quadratic form or refuses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ..ops.common import may_read
from .adapters import mpt
from .context import ModelRun, forward_context
from .packing import MASK_BOUNDARIES, document_numbers

MaskFunction = Callable[..., Any]
"""Whether a query sees a key: (batch, head, query, key), all indices, -> bool, as in Transformers."""

SIMPLE_PATTERNS = (causal_mask_function, bidirectional_mask_function)

#: An additive mask blocks a key from here down: `exp` of it is 0 in every dtype. (Older models write -10,000, which is
#: this in bfloat16.)
BLOCKED = -9_984.0


def linear_attention_mask(**arguments: Any) -> Tensor | None:
    """Return the mask of a forward pass; registered with `AttentionMaskInterface`.

    Returns:
        `[B, S]` True for real tokens (if bidirectional a view `[B, 1, L, S]` of it), a full mask `[B, 1, L, S]`, or
        None where every token is real (see `all_real_mask`). The mask of a packed batch carries the boundaries of its
        documents.
    """
    run = forward_context.packed_run()
    sizes = (arguments.get("batch_size"), arguments.get("q_length"), arguments.get("kv_length"))
    if run is not None and sizes == (*run.shape, run.shape[1]):
        return _packed_mask(run, arguments)
    mask = _mask(**arguments)
    return all_real_mask(**arguments) if mask is None else mask


def all_real_mask(**arguments: Any) -> Tensor | None:
    """Return what says that every token is real: None, but in MPT a mask, since it converts any that it gets."""
    if getattr(arguments.get("config"), "model_type", None) == mpt.MODEL_TYPE:
        return mpt.all_real(arguments["batch_size"], arguments["kv_length"], arguments["device"])
    return None


@torch.compiler.disable
def _packed_mask(run: ModelRun, arguments: dict[str, Any]) -> Tensor:
    assert run.boundaries is not None
    function = arguments.get("mask_function", causal_mask_function)
    if function not in SIMPLE_PATTERNS:
        # The same pattern inside of each document: positions count from its first token.
        documents = document_numbers(run.boundaries, run.shape)
        tokens = torch.arange(documents.numel(), device=documents.device).view(run.shape)
        positions = tokens - run.boundaries[documents]

        def inside(batch: Any, head: Any, query: Any, key: Any) -> Any:
            same = documents[batch, query] == documents[batch, key]
            return same & function(batch, head, positions[batch, query], positions[batch, key])

        arguments["mask_function"] = inside
    mask = _mask(**arguments)
    if mask is None:
        mask = torch.ones(run.shape, dtype=torch.bool, device=run.boundaries.device)
    setattr(mask, MASK_BOUNDARIES, run.boundaries)
    return mask


def _mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    if mask_function in SIMPLE_PATTERNS:
        if attention_mask is None:
            return None
        causal = mask_function is causal_mask_function
        if causal:
            check_length(attention_mask, kwargs.get("q_offset", 0), kwargs.get("q_length"))
        mask = attention_mask.to(torch.bool)[:, : kv_offset + kv_length]
        missing = kv_offset + kv_length - mask.shape[1]
        if missing > 0:
            mask = torch.nn.functional.pad(mask, (0, missing), value=False)
        mask = mask[:, kv_offset:]
        # In cross-attention the queries are another sequence. If this is no cross-attention, the layer will object.
        queries: Any = kwargs.get("q_length")
        same_sequence = causal or mask.shape[1] == queries
        # Reading the values would break a graph; outside of one it saves every layer a pass over its keys and values.
        if same_sequence and may_read(mask) and bool(mask.all()):
            return None
        if causal:
            return mask
        # A graph would store what is a view here.
        return mask[:, None, None, :].expand(-1, 1, 1 if torch.compiler.is_exporting() else queries, -1)
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(
        kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )


def check_length(mask: Tensor, seen: Any, new: Any) -> None:
    """Raise on a mask `[B, S]` of fewer or more tokens than there are. (Lengths may be tensors in a graph.)"""
    if isinstance(seen, int) and isinstance(new, int) and (mask.dim() != 2 or mask.shape[1] != seen + new):
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}; it must cover all {seen + new} tokens seen so far "
            f"({seen} in the cache and {new} new ones) and no others. Pass a mask [batch, {seen + new}]; if it has "
            "columns for tokens before these, pass their cache, too."
        )


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Return the padding mask `[B, S]` of a boolean `[B, 1, L, S]` whose queries all see the same keys by its shape or
    strides, as `linear_attention_mask` makes it, and of an additive `[B, 1, 1, S]`; any other mask as it is."""
    if mask is None or mask.dim() != 4 or mask.shape[1] != 1:
        return mask
    if mask.is_floating_point() and mask.shape[2] == 1:
        mask = full_mask_to_bool(mask)
    if mask.dtype != torch.bool:
        return mask
    return mask[:, 0, 0] if mask.stride(2) == 0 or mask.shape[2] == 1 else mask


def full_mask_to_bool(mask: Tensor, layer: str = "the layer") -> Tensor:
    """Return a boolean, integer or additive mask `[B | 1, H | 1, L, S]` as booleans, True where a query sees a key.

    A NotImplementedError if it is an additive bias, which holds anything but 0 and a very negative number; or integers
    other than 0 and 1.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        visible = mask > BLOCKED
        expected = "0 and a very negative number"
        is_mask = (~visible | (mask == 0)).all()
    else:
        visible, expected = mask != 0, "0 and 1"
        is_mask = (mask == visible).all()
    text = (
        f"The attention mask of {layer} has values other than {expected}. An additive bias cannot be expressed by "
        "linear attention: give the layer 'softmax', or pass a boolean mask."
    )
    if torch.compiler.is_compiling():
        torch._assert_async(is_mask, text)
    elif not bool(is_mask):
        raise NotImplementedError(text)
    return visible
