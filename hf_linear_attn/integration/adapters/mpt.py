"""MPT: ALiBi with slopes of its own where the number of heads is no power of two."""

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cache_argument import find_cache
from .alibi import AlibiAdapter, slopes_of
from .base import call_interface, register

MODEL_TYPE = "mpt"


def all_real(batch: int, length: int, device: torch.device) -> Tensor:
    """Return a mask `[B, S]` that says by its strides that every token is real: the model converts any that it gets."""
    return torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch, length)


def _no_bias(model: Any, *args: Any, **kwargs: Any) -> None:
    """Return no bias of the keys: each module knows its slopes."""


def _forward(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    projected = module.Wqkv(hidden_states)
    if module.clip_qkv:
        projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = projected.unflatten(-1, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    if (cache := find_cache(kwargs.values())) is not None:
        key, value = cache.update(key, value, module.layer_idx)
    out, weights = call_interface(
        module,
        query,
        key,
        value,
        None if attention_mask is None or attention_mask.stride() == (0, 0) else attention_mask,
        dropout=module.attn_dropout_p if module.training else 0.0,
        scaling=module.softmax_scale,
        alibi_slopes=slopes_of(module, query.device),
    )
    return module.out_proj(out.flatten(2)), weights


class _Mpt(AlibiAdapter):
    forward = staticmethod(_forward)
    methods_around: ClassVar = {"build_mpt_alibi_tensor": _no_bias}

    @staticmethod
    def slopes(module: Any) -> Tensor:
        modeling: Any = sys.modules[type(module).__module__]
        return -modeling.build_mpt_alibi_tensor(module.n_heads, 2, device="cpu")[:, 0, 0]


register(_Mpt(), "MptAttention")
