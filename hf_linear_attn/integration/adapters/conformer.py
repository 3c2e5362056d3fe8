"""Conformers: vectors of the distances that queries are multiplied by, as in Transformer-XL or within a maximum.

Transformer-XL (Dai et al. 2019, arXiv:1901.02860) has a sinusoid for each distance, without end; the maximum (Shaw et
al. 2018, arXiv:1803.02155) is the last distance with a vector of its own on either side.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.disentangled import Disentangled
from .base import LEAST_WINDOW, OutsideAdapter, call_interface, register


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Split `[…, L, H d]` into heads, `[…, H, L, d]`."""
    return tensor.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _sinusoids(module: Any, projected: Tensor, content_bias: Tensor, position_bias: Tensor) -> Disentangled:
    """Return the vectors of the distances from L - 1 to 1 - L, `[2 L - 1, H d]`, with what is added to queries.

    Those have the bias u of contents already, and need v in its place.
    """
    rows = torch.arange(len(projected) - 1, -1, -1, device=projected.device)
    offset = (position_bias - content_bias) * module.scaling
    return Disentangled(_by_head(projected, len(offset)), None, rows, offset)


def _parakeet(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    heads = module.config.num_attention_heads
    query = _by_head(module.q_proj(hidden_states), heads) + module.bias_u.unsqueeze(1)
    key, value = (
        _by_head(part(hidden_states), module.config.num_key_value_heads) for part in (module.k_proj, module.v_proj)
    )
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    if attention_mask is not None:  # of the pairs of real tokens
        attention_mask = attention_mask.diagonal(dim1=2, dim2=3).unsqueeze(2)
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        disentangled=_sinusoids(module, module.relative_k_proj(position_embeddings[0]), module.bias_u, module.bias_v),
        **kwargs,
    )
    return module.o_proj(out.flatten(2)), weights


def _wav2vec2(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    relative_position_embeddings: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    parts = module.linear_q, module.linear_k, module.linear_v
    query, key, value = (_by_head(part(hidden_states), module.num_heads) for part in parts)
    if module.position_embeddings_type == "relative":
        assert relative_position_embeddings is not None
        query = query + module.pos_bias_u.unsqueeze(1)
        projected = module.linear_pos(relative_position_embeddings[0])
        positions = _sinusoids(module, projected, module.pos_bias_u, module.pos_bias_v)
    else:
        table = module.distance_embedding.weight.expand(module.num_heads, -1, -1)
        positions = Disentangled(table, None, _rows_within(module, table.device))
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=module.dropout.p if module.training else 0.0,
        scaling=module.scaling,
        disentangled=positions,
        **kwargs,
    )
    return module.linear_out(out.flatten(2)), weights


def _rows_within(module: Any, device: torch.device) -> Tensor:
    """Return the row of each distance i - j from -D to D: there is one for each j - i within the maxima."""
    last, left = _last_distance(module), module.left_max_position_embeddings
    behind = torch.arange(last, -last - 1, -1, device=device)
    return behind.clamp(-left, module.right_max_position_embeddings) + left


def _last_distance(module: Any) -> int:
    return max(module.left_max_position_embeddings, module.right_max_position_embeddings)


def _chunk_mask(encoder: Any, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """Return the mask of tokens where all of them are in one chunk, else that of all pairs."""
    if hidden_states.shape[1] > encoder.config.speech_encoder_chunk_size:
        return type(encoder)._apply_chunk_attention(encoder, attention_mask, hidden_states)
    return attention_mask


class _Parakeet(OutsideAdapter):
    terms = ("relative",)
    forward = staticmethod(_parakeet)

    def bias_reach(self, module: nn.Module) -> int:
        return LEAST_WINDOW

    def endless_positions(self, module: Any) -> bool:
        return True

    def key_value_heads(self, module: Any) -> int:
        return module.config.num_attention_heads


class _Wav2Vec2(OutsideAdapter):
    terms = ("relative",)
    forward = staticmethod(_wav2vec2)
    methods_around: ClassVar = {"_apply_chunk_attention": _chunk_mask}

    def applies(self, module: Any) -> bool:
        return module.position_embeddings_type in ("relative", "relative_key")

    def bias_reach(self, module: Any) -> int:
        if self.endless_positions(module):
            return LEAST_WINDOW
        return max(LEAST_WINDOW, _last_distance(module))

    def endless_positions(self, module: Any) -> bool:
        return module.position_embeddings_type == "relative"


register(_Parakeet(), "ParakeetEncoderAttention")
register(
    _Wav2Vec2(),
    "Wav2Vec2ConformerSelfAttention",
    "Wav2Vec2BertSelfAttention",
    "SeamlessM4TConformerSelfAttention",
    "SeamlessM4Tv2ConformerSelfAttention",
)
