"""The float64 definitions against NumPy, which shares no line with them, and against public functions of others."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.common import SIGNED_NORMALISER_EPS
from tests.helpers import mechanism, padding_mask
from tests.ops import numpy_definitions, numpy_recurrences
from tests.reference import naive, naive_feature_maps

B, H, G, L, D, E, M = 2, 4, 2, 7, 3, 2, 5
SCALING = 0.4
#: Both are float64; they add in another order, and Newton's steps multiply what they round.
LIMIT = 1e-10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def share(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(tensor: Tensor) -> Tensor:
    return tensor / tensor.norm(dim=-1, keepdim=True)


Q, K, V = normal(B, H, L, D), normal(B, G, L, D, seed=1), normal(B, G, L, E, seed=2)
SHORT = Q[:, :, :4]  # fewer queries than keys: they are the last tokens
PHI_Q, PHI_K = share(B, H, L, M), share(B, G, L, M, seed=1)
WEIGHTS = normal(B, H, L, L, seed=3)
MASK = padding_mask([L, 4], L, "left")
ROWS = normal(M, D, seed=4)
CAUSAL, PADDED = naive.visible(None, B, L, L, True), naive.visible(MASK, B, L, L, True)
BOTH = naive.visible(MASK, B, L, L, False)
NOTHING = PADDED.clone()
NOTHING[0, :, 3] = False
LAYERS = [(normal(n, D, M, seed=n), normal(n, M, seed=n + 1)) for n in (H, G)]
WINDOW = (Q, K, V, PHI_Q, PHI_K)
MIX = {"scaling": SCALING, "log_mix": normal(H, seed=5)}
E_SHARED, F_SHARED, E_OWN, F_OWN = (normal(n, 3, s, seed=n + s) for n, s in ((1, L), (1, L), (G, L), (G, L)))
BLOCK_E, BLOCK_F = normal(1, 2, 3, seed=6), normal(G, 2, 3, seed=7)
DECAY, WRITE, RATE = 0.5 + share(B, G, L, M) / 2, share(B, G, L, seed=8), 0.1 + 0.8 * share(B, G, L, seed=9)
SIGNED_Q, SIGNED_K = normal(B, H, L, M, seed=10), normal(B, G, L, M, seed=11)
GATE = 0.5 + share(B, G, L, seed=12) / 2
PACKED = normal(G, 4, D, seed=13)
DIRECTIONS = normal(2, D, 2, seed=14)
SUPPORT = share(B, H, L, L, seed=15) < 0.4
LONG = [normal(B, n, 11, w, seed=16 + n + w) for n, w in ((H, D), (G, D), (G, E))]


def relu(x: Any) -> Any:
    return x.clamp_min(0) if isinstance(x, Tensor) else np.maximum(x, 0)


def positive(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, Tensor) else np.exp(x)


#: Function, arguments, options.
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("repeat_heads", (K, H), {}),
    ("visible", (None, B, 4, L, True), {}),
    ("visible", (MASK, B, L, L, True), {}),
    ("visible", (MASK, B, 3, L, False), {}),
    ("normalise", (WEIGHTS.abs() * CAUSAL, V), {}),
    ("normalise", (WEIGHTS.abs() * NOTHING, V), {}),
    ("normalise_signed", (0.2 * WEIGHTS, V), {}),
    ("softmax_attention", (Q, K, V, BOTH, SCALING), {}),
    ("softmax_attention", (Q, K, V, NOTHING, SCALING), {}),
    ("softmax_attention", (SHORT, K, V, naive.visible(MASK, B, 4, L, True), SCALING), {}),
    ("kernelized_attention", (PHI_Q, PHI_K, V, BOTH), {}),
    ("kernelized_attention", (PHI_Q, PHI_K, V, NOTHING), {}),
    ("windowed_attention", (*WINDOW, CAUSAL), {"window": 2, "causal": True, **MIX}),
    ("windowed_attention", (*WINDOW, BOTH), {"window": 3, "causal": False, **MIX}),
    ("windowed_attention", (*WINDOW, NOTHING), {"window": 3, "causal": True, **MIX}),
    ("windowed_attention", (*WINDOW, PADDED), {"window": 2, "causal": True, "relative": False, **MIX}),
    ("linformer_attention", (Q, K, V, E_SHARED, F_SHARED, SCALING), {}),
    ("linformer_attention", (Q, K, V, E_OWN, F_OWN, SCALING), {}),
    ("linformer_causal_attention", (Q, K, V, BLOCK_E, BLOCK_F, SCALING), {}),
    ("efficient_attention", (Q, K, V, NOTHING, 0.8), {}),
    ("efficient_attention", (Q, K, V, BOTH, 1.3), {}),
    ("t2r_weights", (Q, K, *LAYERS, SCALING, 0.01), {}),
    ("taylor_weights", (Q, K, SCALING), {}),
    ("taylor_weights", (Q, K, SCALING, LAYERS[0][0], LAYERS[1][0]), {}),
    ("dpfp_weights", (Q, K, SCALING, 1, 0.0), {}),
    ("dpfp_weights", (Q, K, SCALING, 3, 0.1), {}),
    ("favor_weights", (Q, K, PADDED, ROWS, SCALING), {}),
    ("favor_weights", (Q, K, NOTHING, ROWS, SCALING, normal(M, seed=17)), {}),
    ("favor_plus_weights", (Q, K, ROWS, SCALING), {}),
    ("favor_plus_weights", (Q, K, ROWS, SCALING, True), {}),
    ("performer_weights", (Q, K, ROWS, relu, 0.1), {}),
    ("performer_weights", (Q, K, ROWS, positive, 0.0), {}),
    ("cosformer_attention", (Q, K, V, PADDED), {"max_length": 16}),
    ("cosformer_attention", (SHORT, K, V, naive.visible(None, B, 4, L, True)), {"max_length": 9, "epsilon": 0.1}),
    ("rfa_weights", (Q, K, ROWS, share(G, D) + 0.5), {}),
    ("gated_weights", (WEIGHTS, GATE), {}),
    ("gated_attention", (PHI_Q, PHI_K, V, DECAY, WRITE, None, 0.0), {}),
    ("gated_attention", (PHI_Q, PHI_K, V, DECAY, WRITE, MASK, 0.0), {}),
    ("gated_attention", (SIGNED_Q, SIGNED_K, V, DECAY[..., :1].expand(-1, -1, -1, M), WRITE, MASK, 0.3), {}),
    ("gated_delta_attention", (unit(PHI_Q), unit(PHI_K), V, GATE, RATE, None, 0.01), {}),
    ("gated_delta_attention", (unit(SIGNED_Q), unit(SIGNED_K), V, GATE, RATE, MASK, 0.3), {}),
    ("luna_attention", (Q, K, V, PACKED, SCALING), {}),
    ("luna_causal_attention", (Q, K, V, PACKED, positive, SCALING, 1.0), {}),
    ("luna_causal_attention", (Q, K, V, PACKED, relu, SCALING, SCALING), {}),
    ("segment_mean", (K, 3), {}),
    ("segment_mean", (K, L), {}),
    ("newton_pinv", (share(4, 4), 6), {}),
    ("nystrom_attention", tuple(LONG), {"landmarks": 4, "iterations": 6, "scaling": SCALING}),
    ("nystrom_attention", tuple(LONG), {"landmarks": 11, "iterations": 6, "scaling": SCALING}),
    *(("hash_bucket", (Q[0, 0, i], DIRECTIONS[0]), {}) for i in range(L)),
    ("support", (Q, K, PADDED, DIRECTIONS), {"window": 2, "capacity": 2, "causal": True}),
    ("support", (Q, K, BOTH, DIRECTIONS), {"window": 1, "capacity": 3, "causal": False}),
    ("support", (Q, K, BOTH, None), {"window": 3, "capacity": 3, "causal": False}),
    ("scatterbrain_attention", (Q, K, V, PHI_Q, PHI_K, NOTHING, SUPPORT, SCALING), {}),
]


def definitions() -> dict[str, Any]:
    """Every function of the modules of definitions."""
    found: dict[str, Any] = {}
    for module in (naive, naive_feature_maps):
        own = inspect.getmembers(module, inspect.isfunction)
        found |= {name: f for name, f in own if f.__module__ == module.__name__}
    return found


def as_arrays(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(as_arrays(item) for item in value)
    return value.numpy() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)])
def test_a_definition_equals_numpy(case):
    name, arguments, options = case
    theirs = getattr(numpy_definitions, name, None) or getattr(numpy_recurrences, name)
    # What a signed sum is guarded with is a constant of the package.
    given = (*arguments, SIGNED_NORMALISER_EPS) if name == "normalise_signed" else arguments
    expected = np.asarray(theirs(*as_arrays(given), **{key: as_arrays(value) for key, value in options.items()}))
    actual = np.asarray(definitions()[name](*arguments, **options))
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(float) - expected.astype(float)).max() <= LIMIT * max(1.0, np.abs(expected).max())
    if name != "hash_bucket":  # the first bucket is 0
        assert np.abs(expected.astype(float)).max() > 0, "a case that is zero everywhere shows nothing"


def test_every_definition_is_compared():
    assert set(definitions()) == {case[0] for case in CASES}


def test_the_cases_reach_the_guard_of_signed_sums():
    total = (0.2 * WEIGHTS).sum(dim=-1).abs()
    assert 0 < (total < SIGNED_NORMALISER_EPS).double().mean() < 1


def test_newton_steps_end_at_the_pseudo_inverse_of_numpy():
    matrix = share(4, 4) + torch.eye(4, dtype=torch.float64)
    assert np.allclose(naive.newton_pinv(matrix, 12), np.linalg.pinv(matrix.numpy()), rtol=0, atol=1e-9)


def test_softmax_attention_equals_that_of_torch():
    expected = torch.nn.functional.scaled_dot_product_attention(
        Q, K, V, attn_mask=PADDED & MASK[:, None, :, None], scale=SCALING, enable_gqa=True
    )
    real = MASK[:, None].expand(-1, H, -1)
    actual = naive.softmax_attention(Q, K, V, PADDED, SCALING)
    assert float((actual - expected)[real].abs().max()) < LIMIT


def elu_features(x, *_):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def hedgehog_features(x, weight, bias):
    """Both softmaxes of `s (xW + b)`, a head at a time."""
    out = []
    for head in range(x.shape[1]):
        y = np.sqrt(SCALING * x.shape[-1]) * (x[:, head] @ weight[head] + bias[head])
        parts = [np.exp(sign * y) for sign in (1, -1)]
        out.append(np.concatenate([part / part.sum(axis=-1, keepdims=True) for part in parts], axis=-1))
    return np.stack(out, axis=1)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
@torch.no_grad()
def test_maps_without_a_definition_of_their_own(name, causal):
    """Their formulas are tests of the features; here the whole attention, from q, k and v to the output."""
    module = mechanism(name, causal, dim=D, value_dim=E).double()
    phi, features = module.feature_map, elu_features if name == "elu" else hedgehog_features
    layers = [
        [as_arrays(p) for p in pair]
        for pair in (
            [(phi.query_weight, phi.query_bias), (phi.key_weight, phi.key_bias)] if name == "hedgehog" else [(), ()]
        )
    ]
    allowed = numpy_definitions.visible(MASK.numpy(), B, L, L, causal)
    expected = numpy_definitions.kernelized_attention(
        features(Q.numpy(), *layers[0]), features(K.numpy(), *layers[1]), V.numpy(), allowed
    )
    actual, _ = module(AttentionInputs(Q, K, V, scaling=SCALING, causal=causal, mask=MASK))
    assert np.abs(actual.numpy() - expected).max() < LIMIT
