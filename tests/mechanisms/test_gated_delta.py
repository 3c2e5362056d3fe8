"""The gated delta rule as a mechanism: its start, its gates, its errors. (Its sums: tests/ops/test_gated_delta.py.)"""

import pytest
import torch
from torch.nn import functional

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.gated_delta import GatedDeltaAttention, GatedDeltaOptions
from tests.comparing import assert_close, relative_error
from tests.inputs import qkv
from tests.reference import naive


def module(**options):
    return GatedDeltaAttention(AttentionShape(4, 2, 6, 5, layer_index=1, causal=True), GatedDeltaOptions(**options))


def features(layer, q, k):
    maps = layer.feature_map.query(q, 0.4).values, layer.feature_map.key(k, 0.4).values
    return [functional.normalize(x, dim=-1) for x in maps]


def test_output_equals_the_definition():
    layer = module(initial_rate=0.3).double()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    q, k, v = (x.double() for x in qkv(80, value_dim=5))
    gates = 0.4**0.5 * k @ layer.gate_weight + layer.gate_bias.unsqueeze(-2)
    rate = 1e-4 + (1 - 1e-4) * torch.sigmoid(gates[..., 1])
    decay = torch.sigmoid(gates[..., 0])
    expected = naive.gated_delta_attention(*features(layer, q, k), v, decay, rate, None, 0.1)
    assert_close(layer(AttentionInputs(q, k, v, scaling=0.4, causal=True))[0], expected, torch.float64, 10)


@torch.no_grad()
def test_with_small_rates_and_no_forgetting_it_is_kernelized_attention():
    layer = module(initial_rate=1.01e-4, initial_decay=1e-6).double()
    q, k, v = (x.double() for x in qkv(30, value_dim=5))
    allowed = naive.visible(None, 2, 30, 30, True)
    expected = naive.kernelized_attention(*features(layer, q, k), v, allowed)
    assert relative_error(layer(AttentionInputs(q, k, v, scaling=0.4, causal=True))[0], expected) < 2e-3


@torch.no_grad()
def test_a_rate_of_one_replaces_the_value_of_a_key():
    layer = module(initial_rate=1 - 1e-6, initial_decay=1e-6).double()
    q, k, v = (x.double() for x in qkv(2, value_dim=5))
    k[:, :, 1] = k[:, :, 0]
    q[:] = k.repeat_interleave(2, dim=1)
    out, _ = layer(AttentionInputs(q, k, v, scaling=0.4, causal=True))
    assert_close(out[:, :, 1], v.repeat_interleave(2, dim=1)[:, :, 1], factor=10)


def test_state_bytes():
    layer = module()
    _, state = layer(
        AttentionInputs(*(x[:1] for x in qkv(9, value_dim=5)), scaling=0.4, causal=True, return_state=True)
    )
    assert layer.state_bytes() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_rate": 1.0}, "initial_rate must be a finite number above .*, got 1.0"),
        ({"initial_decay": 0}, "initial_decay must be a finite number above .*, got 0"),
        ({"feature_dim": 0}, "feature_dim must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GatedDeltaOptions(**options)


def test_a_bidirectional_layer_is_refused():
    with pytest.raises(NotImplementedError, match="Use 'hedgehog'"):
        module()(AttentionInputs(*qkv(4, value_dim=5), scaling=0.4, causal=False))
