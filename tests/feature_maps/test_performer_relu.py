"""The generalised kernel of Performers: what relu estimates, and its options."""

import math

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.performer_relu import PerformerReluFeatureMap, PerformerReluOptions
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from tests.small import feature_map


def build(dim=6, **options):
    return PerformerReluFeatureMap(AttentionShape(4, 2, dim, dim, layer_index=1), PerformerReluOptions(**options))


def attention(**options):
    return KernelizedAttention(AttentionShape(4, 2, 6, 6), PerformerReluOptions(**options), PerformerReluFeatureMap)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_relu_estimates_the_arc_cosine_kernel(orthogonal):
    phi, (q, k) = build(num_features=60_000, epsilon=0.0, orthogonal=orthogonal), torch.randn(2, 1, 1, 7, 6)
    estimate = (phi.query(q, 1.0).values * phi.key(k, 1.0).values).sum(dim=-1)
    lengths = q.norm(dim=-1) * k.norm(dim=-1)
    angle = torch.arccos((q * k).sum(dim=-1) / lengths)
    kernel = lengths * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    torch.testing.assert_close(estimate, kernel, rtol=0.05, atol=0.02)


def test_without_epsilon_relu_is_not_declared_a_distribution():
    assert not attention(epsilon=0.0).distribution


@pytest.mark.parametrize("scaling", ["chi", "constant"])
def test_lengths_of_the_rows(scaling):
    lengths = feature_map("performer-relu", num_features=30, scaling=scaling).weight.norm(dim=1)
    same = torch.allclose(lengths, torch.full((30,), 6**0.5))
    assert same is (scaling == "constant")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.5}, r"epsilon must be a finite number of at least 0 and below 1, got 1.5"),
        ({"num_features": -4}, "num_features must be a whole number of at least 1, got -4"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PerformerReluOptions(**options)
