"""`saturation` of hybrids: the part outside the window no longer grows with the number of tokens there."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS

BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def build(causal, **options):
    entry = ATTENTIONS.get("window")
    return entry.factory(AttentionShape(2, 2, 8, 8, causal=causal), entry.options(window_size=4, **options))


@BOTH
@pytest.mark.parametrize("sinks", [0, 3])
def test_far_weights_follow_the_formula(causal, sinks):
    """Against a window alone and the same map without saturation, row by row from the explicit weights."""
    length, window, saturation = 40, 4, 10
    query, key = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    inputs = AttentionInputs(query, key, torch.zeros_like(key), scaling=0.35, causal=causal)
    unbounded = build(causal, saturation=None, sink_tokens=sinks).attention_weights(inputs)
    bounded = build(causal, saturation=saturation, sink_tokens=sinks).attention_weights(inputs)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    inside = (distance.abs() < window) & ((distance >= 0) | (not causal))
    inside[:, :sinks] = distance[:, :sinks] >= 0 if causal else True
    if sinks and not causal:
        inside[:, -sinks:] = inside[:sinks] = inside[-sinks:] = True
    far = ((distance >= 0) | (not causal)) & ~inside
    ratio = {name: (w * far).sum(-1) / (w * inside).sum(-1) for name, w in (("plain", unbounded), ("bounded", bounded))}
    expected = ratio["plain"] / (1 + far.sum(-1) / saturation)
    assert torch.allclose(ratio["bounded"], expected, rtol=1e-4, atol=1e-6)


@BOTH
def test_what_is_far_weighs_no_more_at_ten_times_the_length(causal):
    """All keys alike: the share of the far part then shows the number of tokens alone."""
    shares = []
    for length in (200, 2000):
        query, key = torch.ones(1, 2, length, 8), torch.ones(1, 2, length, 8)
        inputs = AttentionInputs(query[:, :, -1:] if causal else query, key, key, scaling=0.35, causal=causal)
        weights = build(causal, saturation=16).attention_weights(inputs)
        shares.append(float(weights[0, 0, -1, : length - 4].sum().detach()))
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_padding_is_not_counted():
    mechanism = build(True, saturation=5)
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    unpadded, _ = mechanism(AttentionInputs(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], scaling=0.35, causal=True))
    mask = torch.ones(1, 30, dtype=torch.bool)
    mask[:, :10] = False
    padded, _ = mechanism(AttentionInputs(q, k, v, scaling=0.35, causal=True, mask=mask))
    assert torch.allclose(padded[:, :, 10:], unpadded, atol=1e-5)


@pytest.mark.parametrize("value", [0, -3, 1.5, "many"])
def test_a_bad_value_is_named(value):
    with pytest.raises(ValueError, match="saturation must be a whole number of at least 1 or 'auto'"):
        ATTENTIONS.get("window").options(saturation=value)


def test_auto_is_settled_by_the_direction_and_saved():
    assert build(True).options.saturation is None  # the weights of codes grow with the input as exact ones do
    assert build(True, feature_map="hedgehog").options.saturation == 8
    assert build(False).options.saturation is None
