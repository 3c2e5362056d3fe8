"""A model whose attention is switched off: what remains when no token sees another."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..utils.models import shared_copy
from .discovery import find_attention
from .mask import all_real_mask

NO_ATTENTION_IMPLEMENTATION = "hf_linear_attn_no_attention"
#: Name of the attribute of modules that attend to another sequence.
CROSS = "_hf_linear_attn_cross"


def without_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy, with shared weights, whose attention returns each token's own value, and cross-attention zeros.

    Its time is that of the rest of the model, and its quality is the floor that attention must exceed.
    """
    AttentionInterface.register(NO_ATTENTION_IMPLEMENTATION, _own_value)
    AttentionMaskInterface.register(NO_ATTENTION_IMPLEMENTATION, all_real_mask)
    copied = shared_copy(model)
    for layer in find_attention(copied):
        setattr(layer.module, CROSS, layer.cross)
        if not layer.cross and layer.adapter is not None:
            layer.adapter.install(layer.module, [*layer.parents.values()])
        # Transformers' own method sets nothing in models that compute their attention outside of the interface.
        for config in (layer.config, *(around.config for around in layer.models.values())):
            config._attn_implementation_internal = NO_ATTENTION_IMPLEMENTATION
    return copied


def _own_value(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if vars(module)[CROSS]:
        return value.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]), None
    values = value[:, :, -query.shape[2] :].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return values.transpose(1, 2).contiguous(), None
