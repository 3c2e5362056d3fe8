"""performer-pytorch: FAVOR+, generalised kernels, causal linear attention."""

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
    HEADS,
    LENGTH,
    SCALING,
    Outputs,
    Package,
    allowed,
    compare,
    elu_definition,
    from_weights,
    inputs,
    kernel_estimates,
    mechanism,
)
from tests.reference import naive
from tests.reference import naive_feature_maps as definitions

PERFORMER = Package("performer-pytorch", "pip install performer-pytorch")
MODULE = "performer_pytorch.performer_pytorch"
FEATURES = 64

EPSILON = "adds 1e-4 to every feature, relative to the largest: all weights are pulled towards equal ones"
FUTURE = (
    "its stabiliser is the maximum over all keys, later ones too: under one long later key the features of the keys "
    "before it sink below the epsilon of 1e-4, and earlier outputs become nearly plain averages"
)
PADDING = "zeroes the values of padding but not its keys, which stay in the normaliser"
CAUSAL_EFFICIENT = (
    "one normaliser for all features instead of a softmax over the keys so far for each; the paper has no causal form"
)
DRAW = (
    "the Q of a QR decomposition is taken without the signs of R's diagonal, so it is not uniformly distributed: "
    "first entries of first rows are never positive, and the estimate of the kernel is biased"
)


def favor_plus(causal: bool) -> Any:
    return mechanism("favor+", causal, num_features=FEATURES)


def favor_plus_definition(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, causal: bool, mask: Any = None) -> Tensor:
    weights = definitions.favor_plus_weights(q.double(), k.double(), rows.double(), SCALING)
    return from_weights(weights, v, causal, mask)


def fast_attention(module: Any, causal: bool, **options: Any) -> Any:
    """Their attention with the projection matrix of ours."""
    from performer_pytorch.performer_pytorch import FastAttention

    built = FastAttention(DIM, nb_features=FEATURES, causal=causal, **options)
    built.projection_matrix.copy_(module.feature_map.weight)
    return built


def kernels(module: Any, q: Tensor, k: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from performer_pytorch.performer_pytorch import softmax_kernel

    rows = module.feature_map.weight
    return tuple(
        softmax_kernel(x, projection_matrix=rows, is_query=is_query, eps=eps) for x, is_query in ((q, True), (k, False))
    )


@compare(PERFORMER, MODULE, mechanism="favor+", case="both directions, same projection, their eps set to 0")
def kernel_without_epsilon() -> Outputs:
    from performer_pytorch.performer_pytorch import linear_attention

    q, k, v = inputs()
    module = favor_plus(False)
    theirs = linear_attention(*kernels(module, q, k, 0.0), v)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False))
    return Outputs(theirs, ours, favor_plus_definition(q, k, v, module.feature_map.weight, False))


@compare(PERFORMER, MODULE, mechanism="favor+", case="both directions, same projection", differs=EPSILON)
def kernel_with_epsilon() -> Outputs:
    q, k, v = inputs()
    module = favor_plus(False)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False))
    definition = favor_plus_definition(q, k, v, module.feature_map.weight, False)
    return Outputs(fast_attention(module, False)(q, k, v), ours, definition)


@compare(PERFORMER, MODULE, mechanism="favor+", case="causal, same projection, both their eps set to 0")
def causal_without_epsilon() -> Outputs:
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    q, k, v = inputs()
    module = favor_plus(True)
    theirs = causal_linear_attention_noncuda(*kernels(module, q, k, 0.0), v, eps=0.0)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    return Outputs(theirs, ours, favor_plus_definition(q, k, v, module.feature_map.weight, True))


def causal_pair(last_key: float) -> Outputs:
    """Outputs of all tokens but the last, whose key is `last_key` times as long as it was; float32."""
    q, k, v = inputs(torch.float32)
    k[:, :, -1] *= last_key
    module = favor_plus(True)
    theirs = fast_attention(module, True)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    definition = favor_plus_definition(q, k, v, module.feature_map.weight, True)
    return Outputs(*(out[:, :, :-1] for out in (theirs(q, k, v), ours, definition)))


@compare(
    PERFORMER,
    MODULE,
    mechanism="favor+",
    case="causal, tokens before a last one whose key is 6 times as long",
    dtype=torch.float32,
    differs=FUTURE,
)
def causal_with_a_long_later_key() -> Outputs:
    return causal_pair(6.0)


def relu_features(causal: bool) -> Any:
    """Their epsilon is added before the factor 1/√m, which cancels, and ours after it."""
    epsilon = 1e-3 / FEATURES**0.5
    return mechanism("performer-relu", causal, num_features=FEATURES, split_scaling=True, epsilon=epsilon)


def relu_definition(q: Tensor, k: Tensor, v: Tensor, module: Any, causal: bool, mask: Any = None) -> Tensor:
    rows, epsilon = module.feature_map.weight.double(), module.options.epsilon
    query, key = (SCALING**0.5 * x for x in (q, k))
    weights = definitions.performer_weights(query, key, rows, lambda x: x.clamp_min(0), epsilon)
    return from_weights(weights, v, causal, mask)


def generalised(causal: bool) -> Outputs:
    from performer_pytorch.performer_pytorch import (
        causal_linear_attention_noncuda,
        generalized_kernel,
        linear_attention,
    )

    q, k, v = inputs()
    module = relu_features(causal)
    features = [generalized_kernel(x, projection_matrix=module.feature_map.weight) for x in (q, k)]
    theirs = causal_linear_attention_noncuda(*features, v, eps=0.0) if causal else linear_attention(*features, v)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal))
    return Outputs(theirs, ours, relu_definition(q, k, v, module, causal))


@compare(PERFORMER, MODULE, mechanism="performer-relu", case="both directions, same projection")
def generalised_both() -> Outputs:
    return generalised(False)


@compare(PERFORMER, MODULE, mechanism="performer-relu", case="causal, same projection, their normaliser's eps set to 0")
def generalised_causal() -> Outputs:
    return generalised(True)


@compare(PERFORMER, MODULE, mechanism="performer-relu", case="a row with padding, `mask` given", differs=PADDING)
def padded_row() -> Outputs:
    """Their whole layer, 12 tokens of padding in the second row; its real tokens are compared."""
    from performer_pytorch.performer_pytorch import SelfAttention

    sizes = {"heads": HEADS, "dim_head": DIM, "nb_features": FEATURES}
    layer = SelfAttention(HEADS * DIM, **sizes, generalized_attention=True).double()
    x = torch.randn(BATCH, LENGTH, HEADS * DIM, dtype=torch.float64)
    mask = padding_mask([LENGTH, LENGTH - 12], LENGTH, "right")
    projections = (layer.to_q, layer.to_k, layer.to_v)
    q, k, v = (project(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for project in projections)
    module = relu_features(False)
    layer.fast_attention.projection_matrix.copy_(module.feature_map.weight)
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=False, mask=mask))
    attended = (ours, relu_definition(q, k, v, module, False, mask))
    projected = (layer.to_out(out.transpose(1, 2).flatten(2)) for out in attended)
    return Outputs(*(out[1, mask[1]] for out in (layer(x, mask=mask), *projected)))


@compare(PERFORMER, MODULE, mechanism="elu", case="their causal sums of elu + 1 features, eps set to 0")
def causal_accumulator() -> Outputs:
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    q, k, v = inputs()
    features = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    theirs = causal_linear_attention_noncuda(*features, v, eps=0.0)
    ours, _ = mechanism("elu", True)(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    return Outputs(theirs, ours, elu_definition(q, k, v, True))


def efficient(causal: bool) -> Outputs:
    q, k, v = inputs()
    module = favor_plus(causal)
    theirs = fast_attention(module, causal, no_projection=True)(q, k, v)
    ours, _ = mechanism("efficient", causal)(AttentionInputs(q, k, v, scaling=SCALING, causal=causal))
    return Outputs(theirs, ours, naive.efficient_attention(q, k, v, allowed(LENGTH, causal), 1.0))


@compare(PERFORMER, MODULE, mechanism="efficient", case="`no_projection`, both directions")
def efficient_both() -> Outputs:
    return efficient(False)


@compare(PERFORMER, MODULE, mechanism="efficient", case="`no_projection`, causal", differs=CAUSAL_EFFICIENT)
def efficient_causal() -> Outputs:
    return efficient(True)


@compare(
    PERFORMER,
    MODULE,
    mechanism="favor+",
    case="mean estimate of the kernel over 10000 draws of 4 orthogonal rows, q and k along the first axis",
    differs=DRAW,
    accuracy=0.025,
)
def drawn_rows() -> Outputs:
    from performer_pytorch.performer_pytorch import gaussian_orthogonal_random_matrix

    return kernel_estimates(
        lambda seed: gaussian_orthogonal_random_matrix(4, 4), lambda seed: gaussian_features(4, 4, seed=seed), torch.exp
    )


def averages(value: Tensor) -> Tensor:
    """What attention with equal weights would give."""
    return naive.normalise(allowed(value.shape[2], True).expand(BATCH, HEADS, -1, -1).double(), value.double())
