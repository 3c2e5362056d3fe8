"""Feature maps, as the attention they make, against explicit weights in float64: every map with several options."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import common
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.reference import naive
from tests.reference import naive_feature_maps as definitions
from tests.slow_cases import slow, slow_rows
from tests.small import mechanism

SCALING = 0.4


def t2r(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    layers = (phi.query_weight, phi.query_bias), (phi.key_weight, phi.key_bias)
    return definitions.t2r_weights(q, k, *layers, SCALING, phi.options.epsilon)


def taylor(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    return definitions.taylor_weights(q, k, SCALING, phi.query_weight, phi.key_weight)


def dpfp(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    return definitions.dpfp_weights(q, k, SCALING, module.options.nu, module.options.epsilon)


def elu(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    scale = SCALING**0.5 if module.options.split_scaling else 1.0
    return definitions.elu_weights(scale * q, scale * k, module.options.alpha)


def hedgehog(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    layers = (phi.query_weight, phi.query_bias), (phi.key_weight, phi.key_bias)
    return definitions.hedgehog_weights(q, k, *layers, SCALING, phi.options.activation)


def vq(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    return definitions.vq_weights(q, k, (phi.query_weight, phi.query_bias), (phi.key_weight, phi.key_bias), SCALING)


def favor(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    return definitions.favor_weights(q, k, allowed, phi.weight, SCALING, phi.phase)


def favor_plus(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    phi = module.feature_map
    return definitions.favor_plus_weights(q, k, phi.weight, SCALING, phi.options.hyperbolic)


def performer(module: Any, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    options, split = module.options, SCALING**0.5 if module.options.split_scaling else 1.0
    rows = module.feature_map.weight
    return definitions.performer_weights(split * q, split * k, rows, lambda x: x.clamp_min(0), options.epsilon)


#: Name, options, and the explicit weights.
CASES: list[tuple[str, dict[str, Any], Callable[..., Tensor]]] = [
    ("t2r", {}, t2r),
    ("vq", {"num_features": 5}, vq),
    ("vq", {}, vq),
    ("t2r", {"num_features": 9, "bias_init": 0.5, "epsilon": 0.0}, t2r),
    ("taylor", {}, taylor),
    ("taylor", {"projection_dim": 3}, taylor),
    ("taylor", {"projection_dim": 10}, taylor),
    ("dpfp", {}, dpfp),
    ("elu", {"alpha": 0.5}, elu),
    ("elu", {"split_scaling": True}, elu),
    *(("hedgehog", {"feature_dim": 7, "activation": f}, hedgehog) for f in ("softmax", "exp", "joint")),
    ("dpfp", {"nu": 3, "epsilon": 0.1}, dpfp),
    ("favor", {"num_features": 48}, favor),
    ("favor", {"num_features": 37, "trig": "cos", "scaling": "constant"}, favor),
    ("favor+", {"num_features": 21, "orthogonal": False}, favor_plus),
    ("favor+", {"num_features": 22, "hyperbolic": True}, favor_plus),
    ("performer-relu", {"num_features": 19}, performer),
    ("performer-relu", {"num_features": 19, "split_scaling": True, "epsilon": 0.1}, performer),
    ("performer-relu", {"num_features": 19, "orthogonal": False}, performer),
    ("performer-relu", {"num_features": 19, "scaling": "constant"}, performer),
]


def label(case: Any) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


every_case = pytest.mark.parametrize("case", CASES, ids=label)
both_directions = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


def build(case: Any, heads: int = 4, groups: int = 2, dim: int = 6, value_dim: int = 6) -> Any:
    name, options, _ = case
    entry = ATTENTIONS.get(name)
    module = entry.factory(AttentionShape(heads, groups, dim, value_dim, layer_index=1), build_options(entry, options))
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return module


def run(module: Any, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **kwargs: Any) -> Any:
    return module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, return_state=causal, **kwargs))


def definition(case: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Any = None) -> Tensor:
    allowed = naive.visible(mask, q.shape[0], q.shape[2], k.shape[2], causal)
    weights = case[2](module, q, k, allowed).masked_fill(~allowed, 0.0)
    if module.feature_map.signed:
        return definitions.normalise_signed(weights, v)
    return naive.normalise(weights, v)


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(weighted_sum(out), leaves)


@both_directions
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim"), [(4, 2, 6, 9), *slow_rows((3, 1, 5, 2), (2, 2, 7, 7))]
)
@every_case
def test_outputs_and_gradients_equal_the_definition(case, heads, groups, dim, value_dim, causal):
    module = build(case, heads, groups, dim, value_dim)
    precise = copy.deepcopy(module).double()
    inputs = qkv(131, heads=heads, groups=groups, dim=dim, value_dim=value_dim)
    mask = padding_mask([131, 70], 131, "left")
    single = [tensor.clone().requires_grad_() for tensor in inputs]
    double = [tensor.double().requires_grad_() for tensor in inputs]
    out, _ = run(module, *single, causal=causal, mask=mask)
    expected = definition(case, precise, *double, causal=causal, mask=mask)
    assert_close(out, expected)
    actual = gradients(out, [*single, *module.parameters()])
    for computed, reference in zip(actual, gradients(expected, [*double, *precise.parameters()]), strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


@both_directions
@pytest.mark.parametrize("length", [1, *slow(0, 2, 17)])
@every_case
def test_short_inputs(case, length, causal):
    module, inputs = build(case), qkv(length)
    out, _ = run(module, *inputs, causal=causal)
    assert_close(out, definition(case, copy.deepcopy(module).double(), *(x.double() for x in inputs), causal=causal))


@both_directions
@every_case
def test_gradcheck(case, causal):
    module = build(case, 2, 1, 3, 2).double()
    inputs = [x.double().requires_grad_() for x in qkv(5, batch=1, heads=2, groups=1, dim=3, value_dim=2)]
    mask = torch.tensor([[False, True, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, *_: run(module, q, k, v, causal=causal, mask=mask)[0],
        (*inputs, *module.parameters()),
        fast_mode=True,
    )


@both_directions
@every_case
def test_blocks_do_not_change_the_result(case, causal, monkeypatch):
    monkeypatch.setattr(common, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(common, "BLOCK_QUANTUM", 16)
    module, inputs = build(case), qkv(49)
    mask = padding_mask([49, 30], 49, "right")
    out, _ = run(module, *inputs, causal=causal, mask=mask)
    precise = copy.deepcopy(module).double()
    assert_close(out, definition(case, precise, *(x.double() for x in inputs), causal=causal, mask=mask))


@pytest.mark.parametrize("splits", [[1] * 9, [4, 1, 130, 7]], ids=str)
@every_case
def test_split_and_resume(case, splits):
    module, inputs = build(case), qkv(sum(splits))
    mask = torch.rand(2, sum(splits), generator=torch.Generator().manual_seed(0)) < 0.8
    full, end = run(module, *inputs, causal=True, mask=mask)
    out, state = in_pieces(partial(run, module, causal=True), inputs, mask, splits)
    assert_close(out, full)
    assert set(state) == set(end)
    for key, tensor in end.items():
        assert_close(state[key].clamp(min=-1e30), tensor.clamp(min=-1e30))
    floats = sum(tensor[0].numel() for tensor in end.values())
    assert module.state_bytes() == 4 * floats


@every_case
def test_a_large_last_token_cannot_change_the_past(case):
    module, (q, k, v) = build(case), qkv(23)
    first, _ = run(module, q, k, v, causal=True)
    for tensor in (q, k, v):
        tensor[:, :, -1] *= 20
    again, _ = run(module, q, k, v, causal=True)
    assert_close(again[:, :, :-1], first[:, :, :-1])
    assert bool(torch.isfinite(again).all())


@both_directions
@every_case
def test_nan_in_padding_and_rows_without_keys(case, causal):
    module, (q, k, v) = build(case), qkv(20)
    mask = padding_mask([20, 11], 20, "left")
    clean, _ = run(module, q, k, v, causal=causal, mask=mask)
    k[1, :, :9] = v[1, :, :9] = float("nan")
    out, state = run(module, q, k, v, causal=causal, mask=mask)
    assert torch.equal(out, clean)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (state or {}).values())
    nothing, _ = run(module, q, k, v, causal=causal, mask=torch.zeros(2, 20, dtype=torch.bool))
    assert not bool(nothing.any())


@pytest.mark.parametrize("name", ["favor+", "hedgehog"])
def test_the_smallest_weights_are_normalised(name):
    """A row that sees one key has its value, in whatever direction the query points from it."""
    module = mechanism(name, causal=True, heads=1, groups=1, dim=64, value_dim=64)
    key = functional.normalize(torch.randn(1, 1, 1, 64), dim=-1) * 30
    value = torch.randn(1, 1, 1, 64)
    out, _ = module(AttentionInputs(-key, key, value, scaling=64**-0.5, causal=True))
    assert_close(out, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@both_directions
@every_case
def test_half_inputs_lose_only_their_own_rounding(case, causal, dtype):
    module, inputs = build(case), [x.to(dtype) for x in qkv(50)]
    out, _ = run(module, *inputs, causal=causal)
    assert out.dtype == dtype
    precise = copy.deepcopy(module).double()
    assert_close(out, definition(case, precise, *(x.double() for x in inputs), causal=causal), dtype)


@both_directions
@every_case
def test_implied_weights_make_the_output(case, causal):
    module, (q, k, v) = build(case), qkv(33)
    mask = padding_mask([33, 20], 33, "right")
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))
    out, _ = run(module, q, k, v, causal=causal, mask=mask)
    assert_close(weights @ v.repeat_interleave(2, dim=1), out)
    if module.distribution:
        assert float(weights.detach().min()) >= 0
        assert_close(weights.sum(dim=-1), torch.ones(2, 4, 33))
