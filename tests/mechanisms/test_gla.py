"""Gated linear attention as a mechanism: its start, its gates, its errors. (Its sums: tests/ops/test_gated.py.)"""

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.hedgehog import SMALL_HEAD_ROWS
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.gla import GatedLinearAttention, GLAOptions
from tests.comparing import assert_close
from tests.inputs import qkv
from tests.reference import naive
from tests.small import mechanism


def module(**options):
    return GatedLinearAttention(AttentionShape(4, 2, 6, 5, layer_index=1, causal=True), GLAOptions(**options))


def test_output_equals_the_definition():
    layer = module(gate_rank=3).double()
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    q, k, v = (x.double() for x in qkv(70, value_dim=5))
    gate = torch.sigmoid(0.4**0.5 * k @ layer.gate_down @ layer.gate_up + layer.gate_bias.unsqueeze(-2))
    features = layer.feature_map.query(q, 0.4).values, layer.feature_map.key(k, 0.4).values
    expected = naive.gated_attention(*features, v, torch.exp(-gate), torch.ones_like(k[..., 0]), None, 0.0)
    assert_close(layer(AttentionInputs(q, k, v, scaling=0.4, causal=True))[0], expected, torch.float64)


@torch.no_grad()
def test_without_forgetting_the_start_is_hedgehog():
    inputs = qkv(60, value_dim=5)
    gla = module(initial_decay=1e-7, feature_dim=SMALL_HEAD_ROWS)
    start, _ = gla(AttentionInputs(*inputs, scaling=0.4, causal=True))
    hedgehog = mechanism("hedgehog", True, value_dim=5)
    hedgehog.feature_map.load_state_dict(gla.feature_map.state_dict())
    assert_close(start, hedgehog(AttentionInputs(*inputs, scaling=0.4, causal=True))[0], factor=5)


@pytest.mark.parametrize("initial", [1e-4, 0.01, 0.5])
def test_the_initial_decay_is_what_a_token_forgets(initial):
    layer = module(initial_decay=initial)
    keys = layer._keys(qkv(5)[1], 0.4)
    assert_close(1 - keys.log_decay.exp(), torch.full((2, 2, 5, 12), initial), factor=50)


def test_state_bytes():
    layer = module()
    _, state = layer(
        AttentionInputs(*(x[:1] for x in qkv(9, value_dim=5)), scaling=0.4, causal=True, return_state=True)
    )
    assert layer.state_bytes() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_rank": 0}, "gate_rank must be a whole number of at least 1, got 0"),
        ({"initial_decay": 0.6}, "initial_decay must be a finite number above .*, got 0.6"),
        ({"activation": "exp"}, "activation must be one of 'softmax', 'joint', got 'exp'"),
        ({"feature_dim": -1}, "feature_dim must be a whole number of at least 1, got -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GLAOptions(**options)


def test_a_bidirectional_layer_is_refused():
    with pytest.raises(NotImplementedError, match="Use 'hedgehog'"):
        module()(AttentionInputs(*qkv(4, value_dim=5), scaling=0.4, causal=False))
