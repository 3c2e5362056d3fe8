"""DeBERTa, all versions: learned vectors for each distance, which queries and keys are multiplied by.

The encoder's mask and indices of all pairs of tokens, `[L, L]`, are not made while a model is patched.
"""

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.common import may_read
from ...ops.disentangled import Disentangled
from .base import LEAST_WINDOW, OutsideAdapter, call_interface, register


def _padding_mask(encoder: Any, attention_mask: Tensor) -> Tensor | None:
    """Return a mask `[B, 1, 1, L]` of real tokens, None where all are; that of all pairs for one of them."""
    if attention_mask.dim() > 2:
        return type(encoder).get_attention_mask(encoder, attention_mask)
    if may_read(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None, :]


def _no_distances(encoder: Any, *args: Any, **kwargs: Any) -> None:
    """Return no table of the distances of all pairs."""


def _span(module: Any) -> int:
    """Return how many embeddings there are of the distances of a side."""
    buckets = getattr(module, "position_buckets", -1)
    return buckets if buckets > 0 else module.max_relative_positions


def _rows(module: Any, device: torch.device) -> Tensor:
    """Return the row of the embeddings for each distance i - j from -D to D, `[2 D + 1]`; it is constant beyond."""
    last, span = module.max_relative_positions + 1, _span(module)
    distance = torch.arange(-last, last + 1, device=device)
    if span < module.max_relative_positions:
        modeling: Any = sys.modules[type(module).__module__]
        distance = modeling.make_log_bucket_position(distance, span, module.max_relative_positions).long()
    return (distance + span).clamp(0, 2 * span - 1)


def _tables(module: Any, embeddings: Tensor, scaling: float) -> Disentangled:
    """Return the vectors of the distances by the module's own projections of their embeddings `[K, width]`."""
    embeddings = module.pos_dropout(embeddings)[: 2 * _span(module)]
    if hasattr(module, "in_proj"):
        names = "pos_proj", "pos_q_proj"
    else:
        names = ("key_proj", "query_proj") if module.share_att_key else ("pos_key_proj", "pos_query_proj")
    tables = []
    for kind, name in zip(("c2p", "p2c"), names, strict=True):
        table = None
        if kind in module.pos_att_type:
            table = getattr(module, name)(embeddings).unflatten(-1, (module.num_attention_heads, -1)).transpose(0, 1)
        tables.append(table)
    query_table, key_table = tables
    return Disentangled(
        query_table, None if key_table is None else key_table * scaling, _rows(module, embeddings.device)
    )


def _projections(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """Return queries, keys and values `[B, H, L, d]`."""
    heads = module.num_attention_heads
    if not hasattr(module, "in_proj"):
        parts = (module.query_proj, module.key_proj, module.value_proj)
        return [part(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts]
    query, key, value = module.in_proj(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    query_bias, value_bias = (bias.view(heads, 1, -1) for bias in (module.q_bias, module.v_bias))
    return [query + query_bias, key, value + value_bias]


def _forward(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if query_states is not None or relative_pos is not None:
        raise NotImplementedError(
            "A patched DeBERTa takes no query_states and no relative_pos: its queries are those of its own tokens, at "
            "the distances of their order."
        )
    query, key, value = _projections(module, hidden_states)
    scaling = (query.shape[-1] * (1 + len(module.pos_att_type))) ** -0.5
    relative = None
    if module.relative_attention and module.pos_att_type and rel_embeddings is not None:
        relative = _tables(module, rel_embeddings, scaling)
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.dropout.p if module.training else 0.0,
        scaling=scaling,
        disentangled=relative,
        output_attentions=output_attentions,
    )
    return out.flatten(2), weights if output_attentions else None


class _Deberta(OutsideAdapter):
    forward = staticmethod(_forward)
    methods_around: ClassVar = {"get_attention_mask": _padding_mask, "get_rel_pos": _no_distances}

    def obstacle(self, module: Any) -> str:
        return "mixes its heads (talking_head)" if getattr(module, "talking_head", False) else ""

    def terms_of(self, module: Any) -> tuple[str, ...]:
        return ("relative",) if module.relative_attention and module.pos_att_type else ()

    def bias_reach(self, module: nn.Module) -> int:
        return LEAST_WINDOW if self.terms_of(module) else 0


register(_Deberta(), "DisentangledSelfAttention")
