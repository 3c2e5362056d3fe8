"""FAVOR+: positive orthogonal random features."""

import torch
from torch import Tensor

from ..ops.formulas import FusedMap, FusedMaps
from ..registry import register_feature_map
from ..utils.options import option
from .base import AttentionShape, FeatureMap
from .random_features import RandomFeatureOptions

#: Spreads the seeds of successive draws of one layer.
REDRAW_SEED_STRIDE = 1_000_000_000_039


class FavorPlusOptions(RandomFeatureOptions):
    num_features: int = option(256, "number of features m; 'hyperbolic' makes two of each random row (m even)", least=1)
    hyperbolic: bool = option(False, "[exp(Wx), exp(-Wx)] with m/2 rows: less variance")
    redraw_every: int | None = option(
        None,
        "draw new features after so many training forward passes of the layer (None: never; never in eval)",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hyperbolic and self.num_features % 2:
            raise ValueError(f"num_features must be even for hyperbolic=True, got {self.num_features!r}.")


@register_feature_map(
    "favor+",
    description="positive orthogonal random features, unbiased for exp(τ q·k)",
    paper="Choromanski et al. 2020, arXiv:2009.14794",
    options=FavorPlusOptions,
    learned=False,
    recommendation="needs no training data at all; error grows quickly with the size of q and k",
)
class FavorPlusFeatureMap(FeatureMap):
    """`φ(x) = exp(W x' - ‖x'‖²/2) / √m` with `x' = √τ x` and rows of W ~ N(0, I). Choromanski et al., arXiv:2009.14794.

    With `hyperbolic` `φ(x) = [exp(W x'), exp(-W x')] exp(-‖x'‖²/2) / √m`, W `[m/2, d]`.

    `E[φ(q)·φ(k)] = exp(τ q·k)` over the draw of W. The largest exponent over the features of each token leaves as its
    log scale, so nothing overflows in any precision; the causal form carries the running maximum over keys j <= i and
    never looks ahead. W is a persistent buffer, drawn from `seed` and the layer's index.

    New draws. `redraw(seed)` replaces W at once. With `redraw_every=n` the layer counts its own forward passes in
    training mode, in the persistent buffer `passes`, and draws number `passes // n` takes over before the pass that
    follows every n-th. Not counted: eval mode, passes that go on from a state, observed (exact) passes, and the second
    run of gradient checkpointing. With gradient accumulation over a steps, n optimizer steps are a·n passes. W is
    replaced, not overwritten: a graph that waits for its backward pass keeps its own. Reading the count waits for the
    device, and breaks the graph of torch.compile: there, leave `redraw_every` out and call `redraw` between steps.
    """

    weight: Tensor
    passes: Tensor

    serves_caps = True

    def __init__(self, shape: AttentionShape, options: FavorPlusOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        self.register_buffer("weight", self._rows(options.seed))
        if options.redraw_every is not None:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64, device="cpu"))

    def _rows(self, seed: int) -> Tensor:
        count = self.num_features // 2 if self.options.hyperbolic else self.num_features
        return self.options.draw(count, self.shape, seed)

    def redraw(self, seed: int) -> None:
        """Replace W by the rows that a layer with this `seed` starts with."""
        self.weight = self._rows(seed).to(self.weight)

    @property
    def redraws(self) -> bool:
        every = self.options.redraw_every
        return every is not None and (passes := int(self.passes)) > 0 and passes % every == 0

    def begin_forward(self) -> None:
        every = self.options.redraw_every
        if every is None or not self.training:
            return
        if torch.compiler.is_compiling():
            # An error with fullgraph=True, with this message; otherwise the count runs outside the graph.
            torch._dynamo.graph_break(
                "redraw_every counts forward passes, which cannot be compiled. Patch with redraw_every=None and call "
                "the feature map's redraw(seed) between steps."
            )
        if torch._C._current_graph_task_id() != -1:
            return  # Inside a backward pass: gradient checkpointing runs this pass again and must see the same W.
        if self.redraws:
            self.redraw(self.options.seed + REDRAW_SEED_STRIDE * (int(self.passes) // every))
        self.passes = self.passes + 1

    def fused(self, scaling: float) -> FusedMaps | None:
        formula = FusedMap(
            "positive-pair" if self.options.hyperbolic else "positive",
            self.weight.T.unsqueeze(0),
            in_scale=scaling**0.5,
            factor=self.num_features**-0.5,
        )
        return formula, formula
