"""Scatterbrain: exact weights in a band, a kernel estimate everywhere else, one normaliser."""

from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureFunctions
from ..ops import windowed
from ..ops.common import State
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs
from .window import HybridAttention, HybridOptions


class ScatterbrainOptions(HybridOptions):
    feature_map: str = option("favor+", "φ, an estimate of exp(τ q·k), outside the band")
    seed: int = option(0, "seed of random features; layers draw different ones from it", least=0)


@register_attention(
    "scatterbrain",
    description="exact weights in a band, random features elsewhere, one normaliser",
    paper="Chen et al. 2021, arXiv:2110.15343",
    options=ScatterbrainOptions,
    learned=False,
    state="constant",
    cost="O(L·(w + m)·d) time, O((w + m)·d) state",
    recommendation="conversion without any training: better than favor+ alone wherever attention is local",
)
class ScatterbrainAttention(HybridAttention):
    """`w_ij = exp(τ q_i·k_j)` for (i, j) in the band, `φ(q_i)·φ(k_j)` elsewhere, one normaliser. Chen et al. 2021.

    The band, which is the sparse support of the paper, holds the last w tokens, or `|i - j| < w`. Exact and estimated
    weights share one stabiliser per row. With an unbiased φ the sums are unbiased; with everything inside the band this
    is exact attention. A map without a log scale counts as an estimate of exp(τ q·k) too.

    The paper also puts keys that share a hash bucket with the query into the support. The state is S, z and a ring
    buffer of w keys and values.
    """

    dense_masks = True

    def __init__(self, shape: AttentionShape, options: ScatterbrainOptions) -> None:
        if shape.endless_positions:
            raise NotImplementedError(
                f"The positions of layer {shape.layer_index} change at every distance, and no estimate of weights "
                "outside of a band has them. Use 'window', which leaves these out."
            )
        super().__init__(shape, options)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        return windowed.windowed(self._call(inputs, self._log_mix(inputs)))

    def _inside(self, inputs: AttentionInputs) -> Tensor:
        """Return the band, `[B | 1, 1, L, S]`."""
        window = self.options.window_size
        return windowed.inside_window(inputs.mask, inputs.query, inputs.key, window, inputs.causal)

    def _maps(self, scaling: float) -> FeatureFunctions:
        """Return the maps with a log scale, of zero where they have none: they count as estimates of exp(τ q·k)."""
        query_map, key_map, _ = self.feature_map.functions(scaling)
        return lambda x: query_map(x).scaled(), lambda x: key_map(x).scaled(), None
