"""Falcon: rotary positions, or ALiBi (Falcon-RW), whose bias is divided by √d as the products are."""

import sys
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .alibi import AlibiAdapter, slopes_of
from .base import call_interface, register


def _forward(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Cache | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    # Of each key-value head: its queries, its key and its value.
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
    parts = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in parts)
    slopes = slopes_of(module, query.device)
    if slopes is None:
        assert position_embeddings is not None
        modeling: Any = sys.modules[type(module).__module__]
        query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
    else:  # sums of keys decay by the slope of a query's head
        key, value = (x.repeat_interleave(len(slopes) // x.shape[1], dim=1) for x in (key, value))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.attention_dropout.p if module.training and slopes is not None else 0.0,
        scaling=module.inv_norm_factor,
        alibi_slopes=slopes,
        output_attentions=output_attentions,
    )
    return module.dense(out.flatten(2)), weights


class _Falcon(AlibiAdapter):
    forward = staticmethod(_forward)

    @staticmethod
    def slopes(module: Any) -> Tensor:
        return AlibiAdapter.slopes(module) * module.inv_norm_factor

    def terms_of(self, module: Any) -> tuple[str, ...]:
        return self.terms if module.config.alibi else ()

    def key_value_heads(self, module: Any) -> int:
        return module.num_heads if module.config.alibi else module.num_kv_heads


register(_Falcon(), "FalconAttention", "FalconFlashAttention2")
