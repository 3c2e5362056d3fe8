"""flash-linear-attention: the plain-torch references beside its Triton kernels, and its feature maps.

Importing `fla.ops` needs Triton, the references do not: they are loaded from their files. The recurrent ones compute in
float32. The gated ones have no normaliser: it is read from a column of ones among the values.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.gated_delta import NORMALISER_EPS
from tests.peers.comparing import (
    DIM,
    SCALING,
    Outputs,
    Package,
    by_token,
    compare,
    divided,
    elu_definition,
    from_features,
    from_weights,
    inputs,
    mechanism,
    with_ones,
)
from tests.reference import naive
from tests.reference import naive_feature_maps as definitions

FLA = Package("flash-linear-attention", "pip install --no-deps flash-linear-attention fla-core einops")
MAPS = Package("flash-linear-attention", "pip install --no-deps flash-linear-attention fla-core einops triton")
NEEDS = ("fla", "einops")
FLOAT32 = torch.float32

#: What an epsilon of 1e-6 in a normaliser of about 1 or more may change.
SMALL = 5e-6

#: Their chunked reference of linear attention takes whole chunks of 64 only, that of Based whole chunks of `CHUNK`.
WHOLE, CHUNK = 128, 16


def reference(operation: str) -> Any:
    """The module `fla/ops/<operation>/naive.py`, without the package around it."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"flash-linear-attention is missing: {FLA.install}.")
    path = Path(spec.submodule_search_locations[0]) / "ops" / operation / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spread(module: Any) -> Any:
    """Learned parameters moved off their start, so that gates depend on the keys."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


@compare(FLA, *NEEDS, mechanism="gla", case="`naive_recurrent_gla`", dtype=FLOAT32)
def gated() -> Outputs:
    q, k, v = inputs()
    module = spread(mechanism("gla", True).double())
    query, keys = module.feature_map.query(q, SCALING).values, module._keys(k, SCALING)
    theirs, _ = reference("gla").naive_recurrent_gla(*by_token(query, keys.values, with_ones(v), keys.log_decay))
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    definition = naive.gated_attention(
        query, keys.values, v, keys.log_decay.exp(), torch.ones_like(q[..., 0]), None, 0.0
    )
    return Outputs(divided(theirs).transpose(1, 2), ours, definition)


def gated_delta(function: str) -> Outputs:
    """Short q and k, for which our guard of small normalisers is at rest."""
    q, k, v = inputs(length=100, size=0.5)
    module = mechanism("gated-delta", True, initial_rate=0.05).double()
    module.gate_weight.data += 0.2 * torch.randn(module.gate_weight.shape, dtype=torch.float64)
    query, keys = functional.normalize(module.feature_map.query(q, SCALING).values, dim=-1), module._keys(k, SCALING)
    tensors = by_token(query, keys.values, with_ones(v), keys.log_decay, keys.rate)
    names = ("q", "k", "v", "g", "beta")
    theirs, _ = getattr(reference("gated_delta_rule"), function)(**dict(zip(names, tensors, strict=True)))
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    definition = naive.gated_delta_attention(
        query, keys.values, v, keys.log_decay.exp(), keys.rate, None, NORMALISER_EPS
    )
    return Outputs(divided(theirs).transpose(1, 2), ours, definition)


@compare(FLA, *NEEDS, mechanism="gated-delta", case="short q and k, `naive_recurrent_gated_delta_rule`", dtype=FLOAT32)
def gated_delta_recurrent() -> Outputs:
    return gated_delta("naive_recurrent_gated_delta_rule")


@compare(FLA, *NEEDS, mechanism="gated-delta", case="short q and k, `naive_chunk_gated_delta_rule`", dtype=FLOAT32)
def gated_delta_chunk() -> Outputs:
    return gated_delta("naive_chunk_gated_delta_rule")


def linear(function: str) -> Any:
    q, k, v = inputs(length=WHOLE)
    tensors = by_token(functional.elu(q) + 1, functional.elu(k) + 1, v)
    return getattr(reference("linear_attn"), function)(*tensors, normalize=True)


def elu(theirs: Tensor) -> Outputs:
    q, k, v = inputs(length=WHOLE)
    ours, _ = mechanism("elu", True)(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    return Outputs(theirs.transpose(1, 2), ours, elu_definition(q, k, v, True))


@compare(FLA, *NEEDS, mechanism="elu", case="`naive_recurrent_linear_attn`, elu + 1 features", dtype=FLOAT32)
def linear_recurrent() -> Outputs:
    return elu(linear("naive_recurrent_linear_attn")[0])


@compare(FLA, *NEEDS, mechanism="elu", case="`naive_chunk_linear_attn`, elu + 1 features")
def linear_chunk() -> Outputs:
    return elu(linear("naive_chunk_linear_attn"))


def taylor(theirs: Tensor) -> Outputs:
    q, k, v = inputs(length=CHUNK * 3)
    ours, _ = mechanism("taylor", True)(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    return Outputs(theirs, ours, from_weights(definitions.taylor_weights(q, k, SCALING), v, True))


@compare(FLA, *NEEDS, mechanism="taylor", case="`naive_parallel_based` (1e-6 in its normaliser)", accuracy=SMALL)
def based_parallel() -> Outputs:
    return taylor(reference("based").naive_parallel_based(*inputs(length=CHUNK * 3)))


@compare(FLA, *NEEDS, mechanism="taylor", case="`naive_chunk_based` (1e-6 in its normaliser)", accuracy=SMALL)
def based_chunk() -> Outputs:
    return taylor(reference("based").naive_chunk_based(*inputs(length=CHUNK * 3), chunk_size=CHUNK))


def mapped(theirs: Any, module: Any) -> tuple[Tensor, Tensor]:
    """Attention with their features, by the definition, and ours; theirs are given q and k times √τ."""
    q, k, v = inputs()
    ours, _ = module(AttentionInputs(q, k, v, scaling=SCALING, causal=True))
    query, key = (theirs(SCALING**0.5 * x) for x in (q, k))
    return from_features(query, key, v, True), ours


def joint_softmax(x: Tensor) -> Tensor:
    """`softmax([2√τ x, -2√τ x])` over the features."""
    exponents = torch.cat([2 * SCALING**0.5 * x, -2 * SCALING**0.5 * x], dim=-1).exp()
    return exponents / exponents.sum(dim=-1, keepdim=True)


@compare(MAPS, "fla.modules.feature_map", mechanism="dpfp", case="`DPFPFeatureMap(nu=3)`, ours with epsilon=0")
def dpfp_map() -> Outputs:
    from fla.modules.feature_map import DPFPFeatureMap

    q, k, v = inputs()
    outputs = mapped(DPFPFeatureMap(DIM, nu=3), mechanism("dpfp", True, nu=3, epsilon=0.0))
    return Outputs(*outputs, from_weights(definitions.dpfp_weights(q, k, SCALING, 3, 0.0), v, True))


@compare(MAPS, "fla.modules.feature_map", mechanism="hedgehog", case="`HedgehogFeatureMap` at its start, ours 'joint'")
def hedgehog_map() -> Outputs:
    from fla.modules.feature_map import HedgehogFeatureMap

    q, k, v = inputs()
    module = mechanism("hedgehog", True, activation="joint", temperature=SCALING**0.5)
    outputs = mapped(HedgehogFeatureMap(DIM).double(), module)
    return Outputs(*outputs, from_features(joint_softmax(q), joint_softmax(k), v, True))
