"""BLOOM: ALiBi, in logits that the module computes by itself. Its causal mask is the attention function's."""

from typing import Any

from torch import Tensor
from torch.nn.functional import dropout
from transformers.cache_utils import Cache

from .alibi import AlibiAdapter, slopes_of
from .base import call_interface, register


def _forward(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Cache | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.attention_dropout.p if module.training else 0.0,
        scaling=module.inv_norm_factor,
        alibi_slopes=slopes_of(module, query.device),
        output_attentions=output_attentions,
    )
    out = dropout(module.dense(out.flatten(2)), module.hidden_dropout, module.training)
    return residual + out, weights


class _Bloom(AlibiAdapter):
    forward = staticmethod(_forward)


register(_Bloom(), "BloomAttention")
