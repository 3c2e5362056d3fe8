"""A causal relative of Linformer: finished blocks are compressed to a few slots."""

from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, Options
from ..ops import linformer as ops
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class LinformerCausalOptions(Options):
    block_size: int = option(64, "c, the tokens of a block", least=1)
    slots_per_block: int = option(4, "r, the slots that a finished block leaves", least=1)
    per_head: bool = option(False, "separate projections for each key-value head")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots_per_block > self.block_size:
            raise ValueError(
                f"slots_per_block={self.slots_per_block} exceeds block_size={self.block_size}: nothing is compressed."
            )


@register_attention(
    "linformer-causal",
    description="finished blocks of c tokens compressed to r slots, own block exact, one softmax",
    paper="after Wang et al. 2020, arXiv:2006.04768 (block-causal form)",
    options=LinformerCausalOptions,
    bidirectional=False,
    learned=True,
    state="growing",
    cost="O(L·(c + L·r/c)·d) time, O((c + L·r/c)·d) state",
    recommendation="decoders where a cache c/r times smaller is enough; quadratic, with a small constant",
    alternative="linformer",
)
class LinformerCausalAttention(LinearAttention):
    """One softmax over the slots of all finished blocks and the exact tokens <= i of the own block.

    A block of c tokens leaves r slots `E K_block`, `F V_block` with `E, F [r, c]` that start as segment means. Blocks
    count real tokens, so padding does not move their borders. The state is the slots and the open block: it grows by
    r slots every c tokens.
    """

    distribution = False  # trained projections may be negative
    transfer_lr = 1e-3

    def __init__(self, shape: AttentionShape, options: LinformerCausalOptions) -> None:
        super().__init__(shape, options)
        heads = shape.num_key_value_heads if options.per_head else 1
        start = ops.segment_means(options.slots_per_block, options.block_size)
        self.project_key = nn.Parameter(start.repeat(heads, 1, 1))
        self.project_value = nn.Parameter(start.repeat(heads, 1, 1))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        return ops.causal_blocks(inputs, self.project_key, self.project_value)

    @property
    def exact_length(self) -> int:
        return self.options.block_size

    def state_bytes(self, length: int = 0) -> int:
        block = self.options.block_size
        return (block + length // block * self.options.slots_per_block) * self.shape.token_bytes
