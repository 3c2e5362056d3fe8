"""DPFP: sparse products of rectified entries, and the options."""

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.dpfp import DpfpFeatureMap, DpfpOptions


def build(dim=6, **options):
    return DpfpFeatureMap(AttentionShape(2, 2, dim, dim), DpfpOptions(**options))


def test_features_of_two_coordinates():
    """r = [2, 0, 0, 3] for x = (2, -3): only neighbours that are both positive make a feature."""
    phi = build(dim=2, epsilon=0.0)
    values = phi.query(torch.tensor([2.0, -3.0]).view(1, 1, 1, 2), 1.0).values.flatten()
    assert sorted(values.tolist()) == [0.0, 0.0, 0.0, 6.0]


@pytest.mark.parametrize("nu", [1, 2, 5, 11])
def test_size(nu):
    phi = build(nu=nu)
    assert phi.num_features == 12 * nu
    assert phi.query(torch.randn(1, 2, 3, 6), 0.5).values.shape == (1, 2, 3, 12 * nu)


def test_without_epsilon_the_weights_are_not_declared_a_distribution():
    assert build().distribution
    assert not build(epsilon=0.0).distribution


def test_nu_beyond_the_head_size_is_refused():
    with pytest.raises(ValueError, match=r"nu must be at most 2·head_dim - 1 = 11 .* got 12"):
        build(nu=12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nu": 0}, "nu must be a whole number of at least 1, got 0"),
        ({"epsilon": 1.0}, r"epsilon must be a finite number of at least 0 and below 1, got 1.0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DpfpOptions(**options)
