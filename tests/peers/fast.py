"""pytorch-fast-transformers: linear attention with elu + 1 and with random features. Built from source on install."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.feature_maps.random_features import gaussian_features
from hf_linear_attn.mechanisms import AttentionInputs
from tests.inputs import padding_mask
from tests.peers.comparing import (
    BATCH,
    DIM,
    LENGTH,
    SCALING,
    Outputs,
    Package,
    by_token,
    compare,
    elu_definition,
    from_weights,
    inputs,
    kernel_estimates,
    mechanism,
)
from tests.reference import naive_feature_maps as definitions

FAST = Package("pytorch-fast-transformers", "pip install --no-build-isolation pytorch-fast-transformers")
MODULE = "fast_transformers.attention"
FEATURES = 64

EPSILON = "adds 1e-6 to every normaliser"
STABILIZE = (
    "`stabilize` divides features by e^{max ‖x‖²} of the sequence, later tokens included, and the 1e-6 added to the "
    "normaliser is then no longer small beside it: outputs shrink"
)
UNDERFLOW = "exp(w·x - ‖x‖²/2) is 0 in float32 for every feature of a long token, and the output with it"
DRAW = "orthogonal directions are scaled by row norms of the same matrix that they come from, and depend on them"
GAUSSIAN = "a Gaussian kernel by design: without the factor e^{‖k‖²/2} that makes it softmax"


def attend(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, lengths: list[int] | None = None
) -> Tensor:
    from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    seen = TriangularCausalMask(LENGTH) if causal else FullMask(LENGTH, LENGTH)
    real = LengthMask(torch.tensor([LENGTH] * BATCH if lengths is None else lengths), max_len=LENGTH)
    return attention(*by_token(q, k, v), seen, real, real).transpose(1, 2)


def elu(causal: bool, eps: float, dtype: torch.dtype, lengths: list[int] | None = None) -> Outputs:
    from fast_transformers.attention import CausalLinearAttention, LinearAttention

    q, k, v = inputs(dtype)
    mask = None if lengths is None else padding_mask(lengths, LENGTH, "right")
    theirs = attend((CausalLinearAttention if causal else LinearAttention)(DIM, eps=eps), q, k, v, causal, lengths)
    ours, _ = mechanism("elu", causal)(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))
    outputs = Outputs(theirs, ours, elu_definition(q, k, v, causal, mask))
    return outputs if mask is None else Outputs(*(out.transpose(1, 2)[mask] for out in outputs))


@compare(FAST, MODULE, mechanism="elu", case="both directions, their eps set to 0")
def elu_both() -> Outputs:
    return elu(False, 0.0, torch.float64)


@compare(FAST, MODULE, mechanism="elu", case="both directions, rows with padding, their eps set to 0")
def elu_padded() -> Outputs:
    return elu(False, 0.0, torch.float64, [LENGTH, LENGTH - 12])


@compare(FAST, MODULE, mechanism="elu", case="causal (their compiled sums are float32)", dtype=torch.float32)
def elu_causal() -> Outputs:
    return elu(True, 1e-6, torch.float32)


@compare(FAST, MODULE, mechanism="elu", case="causal, rows with padding", dtype=torch.float32)
def elu_causal_padded() -> Outputs:
    return elu(True, 1e-6, torch.float32, [LENGTH, LENGTH - 12])


@compare(FAST, MODULE, mechanism="elu", case="both directions, q and k 6 below zero", differs=EPSILON)
def elu_with_epsilon() -> Outputs:
    """Features of about e^-6, whose sums are small."""
    from fast_transformers.attention import LinearAttention

    q, k, v = inputs()
    q, k = q - 6, k - 6
    ours, _ = mechanism("elu", False)(AttentionInputs(q, k, v, scaling=SCALING, causal=False))
    return Outputs(attend(LinearAttention(DIM), q, k, v), ours, elu_definition(q, k, v, False))


def random_features(
    kind: str, module: Any, size: float, dtype: torch.dtype, eps: float, one_length: bool = False, **options: Any
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Their linear attention over their random features with the rows of ours, ours, and the inputs in float64."""
    from fast_transformers import feature_maps
    from fast_transformers.attention import LinearAttention

    factory = getattr(feature_maps, kind).factory(deterministic_eval=True, **options)
    attention = LinearAttention(DIM, factory, eps=eps).eval()
    attention.feature_map.omega = module.feature_map.weight.T.to(dtype)
    q, k, v = inputs(dtype, size=size)
    if one_length:
        k = k / k.norm(dim=-1, keepdim=True)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False))
    return attend(attention, q, k, v), ours, (q.double(), k.double(), v)


def favor_plus(size: float, dtype: torch.dtype, eps: float, stabilize: bool = False) -> Outputs:
    """Theirs is the hyperbolic form: exp(Wx) and exp(-Wx)."""
    module = mechanism("favor+", False, num_features=FEATURES, hyperbolic=True)
    theirs, ours, (q, k, v) = random_features("Favor", module, size, dtype, eps, n_dims=FEATURES, stabilize=stabilize)
    weights = definitions.favor_plus_weights(q, k, module.feature_map.weight.double(), SCALING, hyperbolic=True)
    return Outputs(theirs, ours, from_weights(weights, v, False))


@compare(FAST, MODULE, mechanism="favor+", case="hyperbolic, same rows, their eps set to 0")
def favor_plus_without_epsilon() -> Outputs:
    return favor_plus(1.0, torch.float64, 0.0)


@compare(FAST, MODULE, mechanism="favor+", case="hyperbolic, same rows, `stabilize=True`", differs=STABILIZE)
def favor_plus_stabilized() -> Outputs:
    return favor_plus(1.0, torch.float64, 1e-6, stabilize=True)


@compare(
    FAST,
    MODULE,
    mechanism="favor+",
    case="hyperbolic, same rows, entries of q and k 6 times as large",
    dtype=torch.float32,
    differs=UNDERFLOW,
)
def favor_plus_large() -> Outputs:
    return favor_plus(6.0, torch.float32, 1e-6)


@compare(FAST, MODULE, mechanism="performer-relu", case="same rows, no epsilon on either side")
def generalised() -> Outputs:
    module = mechanism("performer-relu", False, num_features=FEATURES, epsilon=0.0)
    theirs, ours, (q, k, v) = random_features(
        "GeneralizedRandomFeatures", module, 1.0, torch.float64, 0.0, n_dims=FEATURES
    )
    rows = module.feature_map.weight.double()
    weights = definitions.performer_weights(q, k, rows, lambda x: x.clamp_min(0), 0.0)
    return Outputs(theirs, ours, from_weights(weights, v, False))


def fourier(one_length: bool) -> Outputs:
    """Short q and k, for which our guard of small normalisers is at rest."""
    module = mechanism("favor", False, num_features=2 * FEATURES)
    theirs, ours, (q, k, v) = random_features(
        "RandomFourierFeatures", module, 0.5, torch.float64, 0.0, one_length=one_length, n_dims=2 * FEATURES
    )
    rows = module.feature_map.weight.double()
    every = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    return Outputs(theirs, ours, from_weights(definitions.favor_weights(q, k, every, rows, SCALING), v, False))


@compare(FAST, MODULE, mechanism="favor", case="`RandomFourierFeatures`, same rows, keys of one length")
def fourier_one_length() -> Outputs:
    return fourier(True)


@compare(FAST, MODULE, mechanism="favor", case="`RandomFourierFeatures`, same rows", differs=GAUSSIAN)
def fourier_any_length() -> Outputs:
    return fourier(False)


@compare(
    FAST,
    MODULE,
    mechanism="favor+",
    case="hyperbolic, mean estimate of the kernel over 10000 draws of 4 orthogonal rows, q and k along the first axis",
    differs=DRAW,
    accuracy=0.015,
)
def drawn_rows() -> Outputs:
    from fast_transformers.feature_maps.fourier_features import orthogonal_random_matrix_

    def drawn(seed: int) -> Tensor:
        columns = torch.zeros(4, 4)
        orthogonal_random_matrix_(columns)
        return columns.T

    return kernel_estimates(drawn, lambda seed: gaussian_features(4, 4, seed=seed), torch.cosh)
