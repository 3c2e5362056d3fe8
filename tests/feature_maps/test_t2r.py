"""T2R: the start and the options."""

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.t2r import T2RFeatureMap, T2ROptions


def build(heads=4, groups=2, dim=6, **options):
    return T2RFeatureMap(AttentionShape(heads, groups, dim, dim, layer_index=2), T2ROptions(**options))


@pytest.mark.parametrize("count", [1, 2, 5, 12, 24, 25])
def test_starts_at_unit_rows_and_their_negatives(count):
    weight = build(num_features=count).query_weight[0].T
    assert weight.shape == (count, 6)
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(count))
    pairs = count // 2
    assert torch.equal(weight[count - pairs :], -weight[:pairs])


def test_queries_and_keys_of_all_heads_start_equal():
    phi = build()
    assert phi.num_features == 24
    assert phi.query_weight.shape == (4, 6, 24)
    assert phi.key_weight.shape == (2, 6, 24)
    assert all(torch.equal(weight, phi.query_weight[0]) for weight in [*phi.query_weight, *phi.key_weight])


def test_untrained_weights_grow_with_the_logits():
    """Over random q and k, implied weights and q·k rise and fall together."""
    phi, x = build(16, 16, 32), torch.randn(2, 1, 16, 200, 32)
    with torch.no_grad():
        weights = (phi.query(x[0], 32**-0.5).values @ phi.key(x[1], 32**-0.5).values.transpose(-1, -2)).flatten()
    logits = (x[0] @ x[1].transpose(-1, -2)).flatten()
    assert float(torch.corrcoef(torch.stack([weights, logits]))[0, 1]) > 0.65


def test_without_epsilon_the_weights_are_not_declared_a_distribution():
    assert build().distribution
    assert not build(epsilon=0.0).distribution


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features must be a whole number of at least 1, got 0"),
        ({"num_features": 2.5}, "got 2.5"),
        ({"bias_init": float("nan")}, "bias_init must be a finite number, got nan"),
        ({"epsilon": -0.1}, r"epsilon must be a finite number of at least 0 and below 1, got -0.1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        T2ROptions(**options)
