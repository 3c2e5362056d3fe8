"""What every feature map owes: sizes, dtype; and the formulas of single maps."""

import copy

import pytest
import torch

from hf_linear_attn.registry import FEATURE_MAPS
from tests.cases import every_feature_map
from tests.comparing import assert_close
from tests.inputs import qkv
from tests.small import feature_map

SCALING = 0.4


@every_feature_map()
def test_features_have_the_declared_size(name):
    built, (q, k, _) = feature_map(name), qkv(7)
    for features, x in ((built.query(q, SCALING), q), (built.key(k, SCALING), k)):
        assert features.values.shape == (*x.shape[:3], built.num_features)
        assert features.log_scale is None or features.log_scale.shape == x.shape[:3]
    assert "num_features" in repr(built)


@every_feature_map()
def test_parameters_are_as_declared(name):
    assert bool(list(feature_map(name).parameters())) is FEATURE_MAPS.get(name).learned


@every_feature_map()
def test_float64_inputs_stay_float64(name):
    built, (q, _, _) = feature_map(name).double(), qkv(7)
    assert built.query(q.double(), SCALING).values.dtype == torch.float64


@every_feature_map()
def test_a_token_is_mapped_by_itself(name):
    built, (q, _, _) = feature_map(name), qkv(7)
    full, part = built.query(q, SCALING), built.query(q[:, :, 2:4], SCALING)
    assert_close(part.values, full.values[:, :, 2:4])


@every_feature_map()
def test_half_parameters_are_rounded_and_what_is_made_of_them_is_not(name):
    built, (q, _, _) = feature_map(name).bfloat16(), qkv(7)
    expected = copy.deepcopy(built).double().query(q.double(), SCALING)
    actual = built.query(q, SCALING)
    assert actual.values.dtype == torch.float32
    assert_close(actual.values, expected.values, factor=10)


@every_feature_map()
def test_made_on_the_meta_device_a_map_has_its_values(name):
    """Transformers builds models there; what a checkpoint lacks would be left as raw memory."""
    before = {key: tensor.clone() for key, tensor in fresh(name).state_dict().items()}
    with torch.device("meta"):
        made = fresh(name)
    assert all(torch.equal(tensor, before[key]) for key, tensor in made.state_dict().items())


@every_feature_map()
def test_the_formula_for_kernels_has_as_many_features(name):
    built = feature_map(name)
    for fused_map in built.fused(SCALING) or ():
        assert fused_map.num_features(6) == built.num_features


def fresh(name):
    built = feature_map(name)
    return type(built)(built.shape, built.options)


def test_elu_formula():
    x = torch.tensor([-2.0, 0.0, 3.0]).view(1, 1, 1, 3)
    for alpha in (1.0, 0.1):
        expected = torch.where(x > 0, x, alpha * (x.exp() - 1)) + 1
        assert_close(feature_map("elu", 1, 1, 3, alpha=alpha).query(x, SCALING).values, expected)
    split = feature_map("elu", 1, 1, 3, split_scaling=True).query(x, SCALING).values
    assert_close(split, feature_map("elu", 1, 1, 3).query(x * SCALING**0.5, SCALING).values)


def hedgehog_logits(built, x):
    weight, bias = built.query_weight, built.query_bias
    return (torch.einsum("bhld,hdf->bhlf", x, weight) + bias[:, None]) * (SCALING * x.shape[-1]) ** 0.5


def test_hedgehog_formulas():
    x = qkv(5)[0]
    built = feature_map("hedgehog")
    y = hedgehog_logits(built, x)
    assert_close(built.query(x, SCALING).values, torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1))
    built = feature_map("hedgehog", activation="joint")
    y = hedgehog_logits(built, x)
    assert_close(built.query(x, SCALING).values, torch.cat([2 * y, -2 * y], dim=-1).softmax(-1))
    built = feature_map("hedgehog", activation="exp")
    y, features = hedgehog_logits(built, x), built.query(x, SCALING)
    assert_close(features.values * features.log_scale.exp()[..., None], torch.cat([y.exp(), (-y).exp()], dim=-1))


@pytest.mark.parametrize("rows", [1, 6, 15])
def test_hedgehog_starts_at_the_identity_continued_by_unit_rows(rows):
    built = feature_map("hedgehog", feature_dim=rows)
    assert built.num_features == 2 * rows
    fresh = type(built)(built.shape, built.options)
    assert_close(fresh.query_weight[0, :, :6], torch.eye(6)[:, :rows])
    assert_close(fresh.query_weight.norm(dim=1), torch.ones(4, rows))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("elu", {"alpha": 0}, r"alpha must be a finite number above 0 and of at most 1.*got 0"),
        ("elu", {"alpha": 1.5}, r"alpha must be a finite number above 0 and of at most 1.*got 1.5"),
        ("favor+", {"num_features": 0}, "num_features must be a whole number of at least 1, got 0"),
        ("favor+", {"num_features": 2.5}, "num_features must be a whole number of at least 1, got 2.5"),
        ("favor+", {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ("favor+", {"scaling": "chl"}, "scaling must be one of 'chi', 'constant', got 'chl'"),
        ("hedgehog", {"feature_dim": 0}, "feature_dim must be a whole number of at least 1, got 0"),
        ("hedgehog", {"activation": "relu"}, "activation must be .* got 'relu'"),
        ("hedgehog", {"temperature": -1.0}, "temperature must be a finite number above 0, got -1.0"),
        ("hedgehog", {"temperature": 0}, "temperature must be a finite number above 0, got 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        FEATURE_MAPS.get(name).options(**options)
