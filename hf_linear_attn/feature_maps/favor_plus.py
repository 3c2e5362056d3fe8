"""FAVOR+: positive orthogonal random features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..ops.common import Features, exponential
from ..ops.fused import FusedMap
from ..registry import register_feature_map
from .base import AttentionShape, FeatureMap

#: Spreads the seeds of neighbouring layers, so that no two layers of a model share their features.
LAYER_SEED_STRIDE = 1_000_003

#: Spreads the seeds of successive draws of one layer.
REDRAW_SEED_STRIDE = 1_000_000_000_039


def gaussian_features(
    count: int, dim: int, *, seed: int, orthogonal: bool = True, scaling: Literal["chi", "constant"] = "chi"
) -> Tensor:
    """Rows for random features, `[count, dim]`, float32 on the CPU, from a generator of their own.

    Independent: rows are N(0, I). Orthogonal: ⌈count/dim⌉ blocks, each the Q of the QR decomposition of a Gaussian
    matrix with the signs of R's diagonal multiplied in (Haar-distributed); rows are rescaled by the norms of
    independent Gaussian rows (`scaling="chi"`: each row is N(0, I)) or by √dim (`"constant"`).
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")

    if not orthogonal:
        return normal(count).float()
    blocks = []
    for _ in range(math.ceil(count / dim)):
        q, r = torch.linalg.qr(normal(dim))
        blocks.append((q * torch.sign(torch.diagonal(r))).T)
    rows = torch.cat([*blocks, torch.empty(0, dim, dtype=torch.float64, device="cpu")])[:count]
    norms = normal(count).norm(dim=1, keepdim=True) if scaling == "chi" else math.sqrt(dim)
    return (rows * norms).float()


def check_random_options(options: Any) -> None:
    """Raise a ValueError for bad `num_features`, `seed` or `scaling`."""
    if not isinstance(options.num_features, int) or options.num_features < 1:
        raise ValueError(f"num_features must be a positive integer, got {options.num_features!r}.")
    if not isinstance(options.seed, int) or options.seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {options.seed!r}.")
    if options.scaling not in ("chi", "constant"):
        raise ValueError(f"scaling must be 'chi' or 'constant', got {options.scaling!r}.")


@dataclass(frozen=True)
class FavorPlusOptions:
    num_features: int = field(
        default=256, metadata={"help": "number of features m; 'hyperbolic' makes two of each random row (m even)"}
    )
    seed: int = field(default=0, metadata={"help": "seed of the random features; layers draw different ones from it"})
    orthogonal: bool = field(default=True, metadata={"help": "orthogonal blocks instead of independent rows"})
    scaling: Literal["chi", "constant"] = field(
        default="chi",
        metadata={"help": "row norms of orthogonal features: 'chi' (as Gaussian rows) or 'constant' (√d)"},
    )
    hyperbolic: bool = field(default=False, metadata={"help": "[exp(Wx), exp(-Wx)] with m/2 rows: less variance"})
    redraw_every: int | None = field(
        default=None,
        metadata={
            "help": "draw new features after so many training forward passes of the layer (None: never; never in eval)"
        },
    )

    def __post_init__(self) -> None:
        check_random_options(self)
        if self.hyperbolic and self.num_features % 2:
            raise ValueError(f"num_features must be even for hyperbolic=True, got {self.num_features!r}.")
        if self.redraw_every is not None and (not isinstance(self.redraw_every, int) or self.redraw_every < 1):
            raise ValueError(f"redraw_every must be a positive integer or None, got {self.redraw_every!r}.")


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

    def __init__(self, shape: AttentionShape, options: FavorPlusOptions) -> None:
        super().__init__(shape, options)
        self.num_features = options.num_features
        self.register_buffer("weight", self._rows(options.seed))
        if options.redraw_every is not None:
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64, device="cpu"))

    def _rows(self, seed: int) -> Tensor:
        options = self.options
        return gaussian_features(
            options.num_features // 2 if options.hyperbolic else options.num_features,
            self.shape.head_dim,
            seed=seed + LAYER_SEED_STRIDE * self.shape.layer_index,
            orthogonal=options.orthogonal,
            scaling=options.scaling,
        )

    def redraw(self, seed: int) -> None:
        """Replace W by the rows that a layer with this `seed` starts with."""
        self.weight = self._rows(seed).to(self.weight)

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
        passes = int(self.passes)
        if passes and passes % every == 0:
            self.redraw(self.options.seed + REDRAW_SEED_STRIDE * (passes // every))
        self.passes = self.passes + 1

    def query(self, x: Tensor, scaling: float) -> Features:
        x = x * scaling**0.5
        projected = x @ self.weight.to(x.dtype).T
        if self.options.hyperbolic:
            projected = torch.cat([projected, -projected], dim=-1)
        half = x.square().sum(dim=-1, keepdim=True) / 2
        # The maximum is a constant of the sum: it is divided out here and multiplied back by whoever reads log_scale.
        if torch.is_grad_enabled() and projected.requires_grad:
            exponent = projected - half
            top = exponent.detach().amax(dim=-1, keepdim=True)
            return Features(exponential(exponent - top) * self.num_features**-0.5, top.squeeze(-1))
        largest = projected.amax(dim=-1, keepdim=True)  # without a gradient half cancels, and the factor moves inside
        values = exponential(projected.sub_(largest + math.log(self.num_features) / 2))
        return Features(values, (largest - half).squeeze(-1))

    def fused(
        self, scaling: float, query_positions: Tensor | None = None, key_positions: Tensor | None = None
    ) -> tuple[FusedMap, FusedMap] | None:
        formula = FusedMap(
            "positive-pair" if self.options.hyperbolic else "positive",
            self.weight.T.unsqueeze(0),
            in_scale=scaling**0.5,
            factor=self.num_features**-0.5,
        )
        return formula, formula
