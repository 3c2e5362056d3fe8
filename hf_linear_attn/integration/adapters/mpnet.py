"""MPNet: T5's bias by buckets of the distance, which the encoder makes once for all layers."""

from typing import Any, ClassVar

from torch import Tensor, nn

from .base import OutsideAdapter, call_interface, last_bucket, register

#: What MPNet's encoder takes, whatever its config says.
BUCKETS, MAX_DISTANCE = 32, 128


def _bias_by_distance(encoder: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the bias of the distances i - j from -D to D, `[1, H, 1, 2 D + 1]`: that of the middle one of as many."""
    reach = ADAPTER.bias_reach(encoder)
    tokens = hidden_states.new_empty(1, 2 * reach + 1)
    bias = type(encoder).compute_position_bias(encoder, tokens, *args, **kwargs)
    return bias[:, :, reach : reach + 1].flip(-1)


def _forward(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    shape = (*hidden_states.shape[:-1], module.num_attention_heads, module.attention_head_size)
    tensors = [part(hidden_states).view(shape).transpose(1, 2) for part in (module.q, module.k, module.v)]
    out, weights = call_interface(
        module,
        *tensors,
        attention_mask,
        dropout=module.dropout.p if module.training else 0.0,
        scaling=module.attention_head_size**-0.5,
        position_bias=position_bias,
        output_attentions=output_attentions,
    )
    out = module.o(out.flatten(2))
    return (out,) if weights is None or not output_attentions else (out, weights)


class _MPNet(OutsideAdapter):
    terms = ("bias",)
    forward = staticmethod(_forward)
    methods_around: ClassVar = {"compute_position_bias": _bias_by_distance}

    def bias_reach(self, module: nn.Module) -> int:
        return last_bucket(BUCKETS, MAX_DISTANCE, two_sided=True)


ADAPTER = _MPNet()
register(ADAPTER, "MPNetSelfAttention")
