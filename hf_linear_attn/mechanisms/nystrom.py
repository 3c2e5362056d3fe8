"""Nyström attention: the softmax matrix from landmarks. Bidirectional only."""

from torch import Tensor

from ..feature_maps.base import Options
from ..ops import nystrom as ops
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs, LinearAttention


class NystromOptions(Options):
    num_landmarks: int = option(64, "m, the landmarks; shorter inputs are exact", least=1)
    iterations: int = option(6, "steps of the pseudo-inverse; many invert the noise as well", least=1)


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

    The depthwise convolution of the values that the paper adds is left out: a pretrained model knows nothing of it.
    """

    distribution = False  # the pseudo-inverse has negative entries

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        return ops.nystrom(inputs, self.options.num_landmarks, self.options.iterations), None

    @property
    def exact_length(self) -> int:
        return self.options.num_landmarks
