"""Scatterbrain: exact weights on a sparse support, a kernel estimate everywhere else, one normaliser."""

from typing import Any

from torch import Tensor

from ..feature_maps.base import AttentionShape, FeatureFunctions
from ..feature_maps.random_features import gaussian, layer_seed
from ..ops import buckets, windowed
from ..ops.common import Features, State, mask_tokens, weighted_mean
from ..registry import register_attention
from ..utils.options import option
from .base import AttentionInputs
from .window import HybridAttention, HybridOptions

#: Keeps the hash directions apart from the random features that the same seed gives.
HASH_SEED_OFFSET = 500_009


class ScatterbrainOptions(HybridOptions):
    feature_map: str = option("favor+", "φ, an estimate of exp(τ q·k), outside the support")
    num_hash_buckets: int = option(0, "hash buckets beside the band (0: the band only)", least=0, parity="even")
    hash_rounds: int = option(1, "independent rounds of hashing", least=1)
    bucket_capacity: int = option(16, "keys that a query takes from its bucket in each round", least=1)
    seed: int = option(0, "seed of random features and hash directions; layers draw different ones from it", least=0)


@register_attention(
    "scatterbrain",
    description="exact weights in a band and in hash buckets, random features elsewhere, one normaliser",
    paper="Chen et al. 2021, arXiv:2110.15343",
    options=ScatterbrainOptions,
    learned=False,
    state="constant",
    cost="O(L·(w + m)·d) time, O((w + m)·d) state; buckets add O(L·r·c·m·d) and O(b·r·c·d)",
    recommendation="conversion without any training: better than favor+ alone wherever attention is local",
)
class ScatterbrainAttention(HybridAttention):
    """`w_ij = exp(τ q_i·k_j)` for (i, j) in Ω, `φ(q_i)·φ(k_j)` elsewhere, one normaliser. Chen et al. 2021.

    Ω is a band (the last w tokens, or |i - j| < w) and, with `num_hash_buckets`, the keys that share a hash bucket with
    the query: at most `bucket_capacity` of them in each round, the last ones (causal) or the nearest ones. Each pair
    counts once. Exact and estimated weights share one stabiliser per row. With an unbiased φ the sums are unbiased;
    with everything inside Ω this is exact attention. A map without a log scale counts as an estimate of exp(τ q·k) too.

    State: S, z, a ring buffer of w keys and values; with buckets also the last c keys and values of every bucket and
    round, so that decoding is of constant size. Bucket pairs gather their keys one by one: several times slower than
    the band.
    """

    def __init__(self, shape: AttentionShape, options: ScatterbrainOptions) -> None:
        super().__init__(shape, options)
        #: Buckets rank the keys of a row; with a mask for every query there would be one ranking for each.
        self.dense_masks = options.num_hash_buckets == 0
        if options.num_hash_buckets:
            size = (options.hash_rounds, shape.head_dim, options.num_hash_buckets // 2)
            seed = layer_seed(options.seed + HASH_SEED_OFFSET, shape)
            self.register_buffer("directions", gaussian(*size, seed=seed))

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, State | None]:
        self.begin_forward(inputs)
        call = self._call(inputs, self._log_mix(inputs))
        hashing = self._hashing()
        if hashing is None or inputs.query.shape[2] == 0:
            return windowed.windowed(call)
        after: State | None = None
        if call.causal:
            accumulator, after = windowed.accumulate_causal(call)
        else:
            accumulator = windowed.accumulate_bidirectional(call)
        accumulator, stored = buckets.add_buckets(accumulator, call, hashing, after)
        out = mask_tokens(weighted_mean(accumulator.values), inputs.mask).to(inputs.value.dtype)
        return out, None if after is None else {**after, **stored}

    def _inside(self, inputs: AttentionInputs) -> Tensor:
        """Return Ω, `[B | 1, H | 1, L, S]`."""
        query, key, mask, causal = inputs.query, inputs.key, inputs.mask, inputs.causal
        window, hashing = self.options.window_size, self._hashing()
        band = windowed.inside_window(mask, query, key, window, causal)
        if hashing is None:
            return band
        if mask is not None and mask.dim() == 4:
            raise NotImplementedError(
                "Hash buckets cannot apply a mask [B, H, L, S]. Pass a padding mask [B, S], or set num_hash_buckets=0."
            )
        return band | buckets.bucket_pairs(query, key, hashing, window=window, causal=causal, mask=mask)

    def _hashing(self) -> buckets.Hashing | None:
        if not self.options.num_hash_buckets:
            return None
        directions: Any = self.directions
        return buckets.Hashing(directions, self.options.bucket_capacity)

    def _maps(self, scaling: float) -> FeatureFunctions:
        """Return the maps with a log scale, of zero where they have none: they count as estimates of exp(τ q·k)."""
        query_map, key_map, _ = self.feature_map.functions(scaling)
        return lambda x, start: _with_scale(query_map(x, start)), lambda x, start: _with_scale(key_map(x, start)), None


def _with_scale(features: Features) -> Features:
    """Give features without a log scale one of zero."""
    values, log_scale = features
    return features if log_scale is not None else Features(values, values.new_zeros(values.shape[:-1]))
