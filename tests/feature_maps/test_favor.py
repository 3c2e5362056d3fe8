"""FAVOR with trigonometric features: the guard of its normaliser, its buffers, its refusals."""

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.favor import FavorFeatureMap, FavorOptions
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops.common import SIGNED_NORMALISER_EPS, divide
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import Snapshot, logits
from tests.inputs import qkv, token_ids
from tests.tiny_models import GPT2, saved_and_loaded


def build(layer_index=1, **options):
    entry = ATTENTIONS.get("favor")
    shape = AttentionShape(4, 2, 6, 6, layer_index=layer_index)
    return entry.factory(shape, build_options(entry, {"num_features": 24, **options}))


def test_the_guard_is_exact_above_and_continuous_through_zero():
    eps = SIGNED_NORMALISER_EPS
    total = torch.tensor([-3.0, -eps, -eps / 2, 0.0, eps / 2, eps, 7.0], dtype=torch.float64)
    out = divide(torch.ones(7, 1, dtype=torch.float64), total, signed=True).squeeze(-1)
    expected = torch.tensor([-1 / 3, -1 / eps, -0.5 / eps, 0.0, 0.5 / eps, 1 / eps, 1 / 7], dtype=torch.float64)
    torch.testing.assert_close(out, expected)


def test_weights_can_be_negative_and_are_not_declared_a_distribution():
    module, (q, k, v) = build(), qkv(40)
    assert not module.distribution
    assert module.feature_map.signed
    weights = module.attention_weights(AttentionInputs(3 * q, 3 * k, v, scaling=0.4, causal=True))
    assert float(weights.min()) < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_any_size_is_finite_and_bounded_by_the_guard(causal, size, dtype):
    module, (q, k, v) = build(), [x.to(dtype) for x in qkv(50)]
    out, _ = module(AttentionInputs(size * q, size * k, v, scaling=0.4, causal=causal))
    assert bool(torch.isfinite(out).all())
    # |Σ w v| <= 50 max|v| and the inverse of the normaliser is at most 1/ε
    assert float(out.abs().max()) <= 50 / SIGNED_NORMALISER_EPS * float(v.abs().max())


def test_equal_values_come_out_nearly_unchanged_where_all_keys_count():
    module, (q, k, v) = build(num_features=512), qkv(30)
    out, _ = module(AttentionInputs(0.3 * q, 0.3 * k, torch.ones_like(v), scaling=0.4, causal=False))
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.slow
@pytest.mark.parametrize("trig", ["sincos", "cos"])
def test_features_come_from_the_seed_and_are_saved(trig, tmp_path):
    model = hla.patch_model(GPT2.build(), "favor", num_features=16, trig=trig, seed=3)
    names = {key.rsplit(".", 1)[-1] for key in model.state_dict() if "linear_attention" in key}
    assert names == ({"weight"} if trig == "sincos" else {"weight", "phase"})
    loaded = saved_and_loaded(model, tmp_path)
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    first, again, other = build(trig=trig), build(trig=trig), build(trig=trig, layer_index=2)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])
        assert not torch.equal(tensor, other.state_dict()[key])


def test_phases_do_not_follow_the_rows():
    """The same seed must not give phases that are a function of the first row's random bits."""
    drawn = [
        FavorFeatureMap(AttentionShape(1, 1, 1, 1), FavorOptions(1, trig="cos", seed=seed, orthogonal=False))
        for seed in range(300)
    ]
    pairs = torch.tensor([[float(phi.weight), float(phi.phase)] for phi in drawn]).T
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / 300**0.5
    assert 0 <= float(pairs[1].min()) < 0.2
    assert 6 < float(pairs[1].max()) < 6.284


@pytest.mark.slow
def test_a_window_refuses_signed_maps_and_changes_nothing():
    model = GPT2.build()
    before = Snapshot.of(copy.deepcopy(model))
    with pytest.raises(ValueError, match="window cannot use 'favor' with these options"):
        hla.patch_model(model, "window", feature_map="favor")
    before.assert_same(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trig": "sin"}, "trig must be one of 'sincos', 'cos', got 'sin'"),
        ({"num_features": 7}, "num_features must be even for trig='sincos', got 7"),
        ({"num_features": 0}, "num_features must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"scaling": "x"}, "scaling must be one of 'chi', 'constant', got 'x'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FavorOptions(**options)
