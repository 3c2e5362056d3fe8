"""Luna: attention through a short learned sequence."""

import torch
from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, Options
from ..feature_maps.random_features import gaussian, layer_seed
from ..ops import luna as ops
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention

#: Standard deviations of P at the start, measured on pretrained models. Bidirectional: each row of P should find a few
#: keys of its own. Causal: nothing normalises a_j, and P = 0 is the mean of the values; a small P stays near it.
BIDIRECTIONAL_INIT = 2.0
CAUSAL_INIT = 0.1


class LunaOptions(Options):
    num_packed: int = option(64, "l, the length of the learned sequence P", least=1)
    seed: int = option(0, "seed of the start of P; layers draw different ones from it", least=0)


@register_attention(
    "luna",
    description="attention through a learned sequence of l vectors",
    paper="Ma et al. 2021, arXiv:2106.01540",
    options=LunaOptions,
    learned=True,
    state="constant",
    cost="O(L·l·d) time, O(l·d) state",
    recommendation="encoders of any length: linformer whose slots follow the content; decoders only from scratch",
)
class LunaAttention(LinearAttention):
    """`O = softmax(τ Q K̃ᵀ) Ṽ` with `K̃ = A K`, `Ṽ = A V`, `A = softmax(τ P Kᵀ)`. Ma et al. 2021, arXiv:2106.01540.

    P `[l, d]` is learned, one for each key-value head. Its weights are a distribution over the keys.

    Causal, with `a_j = elu(τ P k_j) + 1` (the authors' code):
    `u_i = softmax((1/n_i) Σ_{j<=i} (q_i·k_j) a_j)`, `o_i = (1/n_i) Σ_{j<=i} (u_i·a_j) v_j`, n_i the real tokens up to
    i. Two running sums `Σ a_j k_jᵀ`, `Σ a_j v_jᵀ` and the count are the state. The weights `(u_i·a_j)/n_i` are
    positive, but nothing makes them sum to 1: a freshly patched decoder is far from the original.

    P starts from Gaussian vectors, or by `start_from_queries` from real queries, which is nearer to exact attention.
    """

    def __init__(self, shape: AttentionShape, options: LunaOptions) -> None:
        super().__init__(shape, options)
        self.distribution = not shape.causal
        # The causal sums are a function of the visible keys of each query; the bidirectional slots serve all queries.
        self.dense_masks = shape.causal
        self.transfer_lr = 5e-2 if shape.causal else 1e-2
        size = (shape.num_key_value_heads, options.num_packed, shape.head_dim)
        scale = CAUSAL_INIT if shape.causal else BIDIRECTIONAL_INIT
        self.packed = nn.Parameter(scale * gaussian(*size, seed=layer_seed(options.seed, shape)))

    @torch.no_grad()
    def start_from_queries(self, query: Tensor, real: Tensor | None = None) -> None:
        """Start P from queries of calibration text, drawn from the seed.

        Use it with `observe_attention`: `lambda call: call.mechanism.start_from_queries(call.query, call.padding)`.
        With fewer queries than l, some are taken more than once. Queries are `[B, H, L, d]`; `real` `[B, L]` is False
        where they are padding.
        """
        groups, slots, _ = self.packed.shape
        rows = query.permute(0, 2, 1, 3)  # [B, L, H, d]
        rows = rows.flatten(0, 1) if real is None else rows[real]
        rows = rows.unflatten(1, (groups, query.shape[1] // groups)).transpose(1, 2).flatten(0, 1)  # [n·R, G, d]
        if not rows.shape[0]:
            raise ValueError("start_from_queries needs at least one query that is not padding.")
        generator = torch.Generator(device="cpu").manual_seed(self.options.seed)
        order = torch.randperm(rows.shape[0], generator=generator, device="cpu")
        chosen = order.repeat(-(-slots // len(order)))[:slots]
        self.packed.copy_(rows[chosen.to(rows.device)].transpose(0, 1))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        if not inputs.causal:
            return ops.bidirectional(inputs, self.packed), None
        return ops.causal(inputs, self.packed)

    def attention_weights(self, inputs: AttentionInputs) -> Tensor:
        if not inputs.causal:
            return super().attention_weights(inputs)
        return ops.dense_causal_weights(inputs, self.packed)
