"""Random feature attention against its definition, with and without the gate."""

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.rfa import RandomFeatureAttention, RFAOptions
from tests.comparing import assert_close, assert_same_function
from tests.inputs import padding_mask, qkv
from tests.reference import naive

FORMS = [(False, False), (True, False), (True, True)]
forms = pytest.mark.parametrize(("causal", "gate"), FORMS, ids=["both", "causal", "gated"])


def module(causal=True, gate=True, groups=2, noise=0.2, **options):
    shape = AttentionShape(4, groups, 6, 5, layer_index=1, causal=causal)
    layer = RandomFeatureAttention(shape, RFAOptions(**{"num_features": 24, "gate": gate, **options})).double()
    for parameter in layer.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    return layer


def definition(layer, q, k, v, causal, mask=None):
    """Only where the normaliser is far from its guard; the guard has tests of its own in tests/ops/test_gated.py."""
    weights = naive.rfa_weights(q, k, layer.weight, layer.sigma)
    if layer.gated:
        gate = torch.sigmoid(0.4**0.5 * k @ layer.gate_weight + layer.gate_bias.unsqueeze(-2)).squeeze(-1)
        weights = naive.gated_weights(weights, gate)
    weights = weights.masked_fill(~naive.visible(mask, q.shape[0], q.shape[2], k.shape[2], causal), 0.0)
    return weights @ naive.repeat_heads(v, 4) / weights.sum(-1, keepdim=True)


def inputs(length, groups=2):
    return [x.double().requires_grad_() for x in qkv(length, groups=groups, value_dim=5)]


@forms
@pytest.mark.parametrize(("length", "groups"), [(1, 2), (2, 1), (17, 2), (40, 4)])
def test_outputs_and_gradients_equal_the_definition(length, groups, causal, gate):
    layer, tensors = module(causal, gate, groups, sigma_init=0.5), inputs(length, groups)
    out, _ = layer(AttentionInputs(*tensors, scaling=0.4, causal=causal))
    expected = definition(layer, *tensors, causal)
    leaves = [*tensors, *layer.parameters()]
    assert_same_function(out, expected, leaves, factor=10, gradient_factor=100, floor=1e-5)


def test_the_estimate_is_unbiased():
    q, k, _ = (x.detach() for x in inputs(6))
    unit = [torch.nn.functional.normalize(x, dim=-1) for x in (q, naive.repeat_heads(k, 4))]
    exact = torch.exp(-0.5 * (unit[0].unsqueeze(3) - unit[1].unsqueeze(2)).square().sum(-1))
    draws = []
    for seed in range(200):
        layer = module(seed=seed, noise=0.0)
        phi_q, phi_k = layer._features(q).values, layer._features(k).values
        draws.append(phi_q @ naive.repeat_heads(phi_k, 4).transpose(-1, -2))
    stacked = torch.stack(draws)
    error = (stacked.mean(0) - exact) / (stacked.std(0) / len(draws) ** 0.5)
    assert float(error.abs().max()) < 5


@forms
def test_lengths_of_queries_and_keys_do_not_matter_for_the_features(causal, gate):
    layer, (q, k, v) = module(causal, gate, noise=0.0), inputs(20)
    first, _ = layer(AttentionInputs(q, k, v, scaling=0.4, causal=causal))
    assert_close(layer(AttentionInputs(3 * q, 7 * k, v, scaling=0.4, causal=causal))[0], first, torch.float64, 10)


def test_the_gate_forgets():
    layer, (q, k, v) = module(noise=0.0, initial_decay=0.5), inputs(30)
    changed = v.detach().clone()
    changed[:, :, :5] += 100.0
    first, second = (layer(AttentionInputs(q, k, x, scaling=0.4, causal=True))[0] for x in (v, changed))
    assert float((first - second)[:, :, -1].abs().max()) < 1e-3


@forms
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding(padding_side, causal, gate):
    layer, tensors, mask = module(causal, gate), inputs(23), padding_mask([23, 9], 23, padding_side)
    out, _ = layer(AttentionInputs(*tensors, scaling=0.4, causal=causal, mask=mask))
    unpadded = [x[1:].transpose(1, 2)[mask[1:]].unsqueeze(0).transpose(1, 2) for x in tensors]
    expected, _ = layer(AttentionInputs(*unpadded, scaling=0.4, causal=causal))
    assert_close(out[1].transpose(0, 1)[mask[1]].transpose(0, 1), expected[0], torch.float64, 10)


def test_only_causal_layers_have_a_gate():
    assert {name for name, _ in module(False).named_parameters()} == {"sigma"}
    assert {name for name, _ in module(True, gate=False).named_parameters()} == {"sigma"}
    assert {name for name, _ in module(True).named_parameters()} == {"sigma", "gate_weight", "gate_bias"}


@pytest.mark.parametrize("gate", [False, True])
def test_state_bytes(gate):
    layer = module(gate=gate).float()
    _, state = layer(
        AttentionInputs(*(x[:1] for x in qkv(9, value_dim=5)), scaling=0.4, causal=True, return_state=True)
    )
    assert layer.state_bytes() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 3}, "num_features must be an even whole number of at least 1, got 3"),
        ({"sigma_init": 0.0}, "sigma_init must be a finite number above 0, got 0.0"),
        ({"initial_decay": 0.7}, "initial_decay must be a finite number above .*, got 0.7"),
        ({"seed": -2}, "seed must be a whole number of at least 0, got -2"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        RFAOptions(**options)
