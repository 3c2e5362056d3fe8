"""A model whose attention is switched off: what remains when no token sees another."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..utils.models import shared_copy

NO_ATTENTION_IMPLEMENTATION = "hf_linear_attn_no_attention"


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy, with shared weights, whose attention returns each token's own value.

    Its time is that of the rest of the model, and its quality is the floor that attention must exceed.
    """
    AttentionInterface.register(NO_ATTENTION_IMPLEMENTATION, _own_value)
    AttentionMaskInterface.register(NO_ATTENTION_IMPLEMENTATION, lambda *args, **kwargs: None)
    copied = shared_copy(model)
    copied.set_attn_implementation(NO_ATTENTION_IMPLEMENTATION)
    return copied


def _own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    values = value[:, :, -query.shape[2] :].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return values.transpose(1, 2).contiguous(), None
