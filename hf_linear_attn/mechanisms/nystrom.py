"""Nyström attention: the softmax matrix from landmarks. Bidirectional only."""

from torch import Tensor, nn

from ..feature_maps.base import AttentionShape, Options, constant_parameter
from ..ops import nystrom as ops
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class NystromOptions(Options):
    num_landmarks: int = option(64, "m, the landmarks; shorter inputs are exact", least=1)
    iterations: int = option(6, "steps of the pseudo-inverse; many invert the noise as well", least=1)
    conv_kernel: int | None = option(
        None,
        "odd size of a learned depthwise convolution of the values, added to the output (None: off)",
        least=1,
        parity="odd",
    )


@register_attention(
    "nystrom",
    description="softmax matrix from m landmarks with an iterative pseudo-inverse, nothing learned",
    paper="Xiong et al. 2021, arXiv:2102.03902",
    options=NystromOptions,
    causal=False,
    learned=False,
    cost="O(L·m·d + m³) time, O(L·m) memory",
    recommendation="encoders without any training: near to exact attention; inputs up to m tokens are exact",
    alternative="window",
)
class NystromAttention(LinearAttention):
    """`o = softmax(τ Q K̃ᵀ) softmax(τ Q̃ K̃ᵀ)⁺ softmax(τ Q̃ Kᵀ) V`. Xiong et al. 2021, arXiv:2102.03902.

    Q̃ and K̃ are means of m equal segments of each row's real tokens: a row in a padded batch equals the row alone, and
    a row of at most m tokens is exact attention. The pseudo-inverse takes `iterations` steps of third order (see
    `ops.nystrom.iterative_pinv`), each matrix scaled by its own norms. 4 to 8 are best: fewer leave out what matters,
    and the complete inverse of a nearly singular matrix is large and noisy. The implied weights can be negative.

    The paper adds a depthwise convolution of the values (`conv_kernel`, 33 or so), for training from scratch. It is off
    by default: a pretrained model knows nothing of it. Its kernel starts at zero, one per head. It is the one part that
    sees padding between real tokens.
    """

    distribution = False  # the pseudo-inverse has negative entries

    def __init__(self, shape: AttentionShape, options: NystromOptions) -> None:
        super().__init__(shape, options)
        self.kernel: nn.Parameter | None = None
        if options.conv_kernel is not None:
            self.kernel = constant_parameter(shape.num_heads, options.conv_kernel)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        out = ops.nystrom(inputs, self.options.num_landmarks, self.options.iterations)
        if self.kernel is not None:
            out = (out + ops.depthwise_skip(inputs.value, self.kernel, inputs.mask)).to(out.dtype)
        return out, None

    @property
    def exact_length(self) -> int:
        return self.options.num_landmarks if self.kernel is None else 0
