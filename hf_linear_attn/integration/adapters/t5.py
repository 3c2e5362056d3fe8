"""T5 and its relatives: a bias by buckets of the distance, which the first layer (or each) makes from an embedding.

They pass `[1, H, L, S]` through the interface. Of a patched model it is the bias by distance, `[1, H, 1, 2 D + 1]`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import Adapter, last_bucket, register, remove_method, set_method


def _bias_by_distance(
    module: Any,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int = 0,
) -> Tensor:
    """Return the bias of the distances i - j from -D to D: that of the query in the middle of as many keys."""
    reach = ADAPTER.bias_reach(module)
    bias = type(module).compute_bias(module, 1, 2 * reach + 1, device=device, past_seen_tokens=reach)
    return bias.flip(-1)  # by i - j, where the keys are in the order of j


class _T5(Adapter):
    terms = ("bias",)

    def bias_reach(self, module: nn.Module) -> int:
        values: Any = module
        two_sided = not getattr(module, "is_decoder", True)
        return last_bucket(
            values.relative_attention_num_buckets, values.relative_attention_max_distance, two_sided=two_sided
        )

    def install(self, module: Any, parents: Sequence[Any]) -> None:
        set_method(module, "compute_bias", _bias_by_distance)

    def remove(self, module: Any, parents: Sequence[Any]) -> None:
        remove_method(module, "compute_bias")


ADAPTER = _T5()
register(
    ADAPTER,
    "T5Attention",
    "MT5Attention",
    "UMT5Attention",
    "SwitchTransformersAttention",
    "Pop2PianoAttention",
    "LongT5Attention",
    "Pix2StructTextAttention",
)
