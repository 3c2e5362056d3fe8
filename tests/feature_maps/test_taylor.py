"""Taylor: the packed second-order features, the projection, the options."""

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.feature_maps.taylor import TaylorFeatureMap, TaylorOptions, pair_products
from hf_linear_attn.measure.fidelity import measure_fidelity
from hf_linear_attn.training.transfer import transfer_attention
from tests.comparing import assert_close
from tests.inputs import token_ids
from tests.tiny_models import BERT


def build(heads=4, groups=2, dim=6, **options):
    return TaylorFeatureMap(AttentionShape(heads, groups, dim, dim, layer_index=2), TaylorOptions(**options))


def test_a_half_projection_is_rounded_and_its_features_are_not():
    phi, x = build(projection_dim=3).bfloat16(), torch.randn(2, 4, 5, 6)
    expected = copy.deepcopy(phi).double().query(x.double(), 0.4).values
    assert_close(phi.query(x, 0.4).values, expected, factor=10)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 64])
def test_pair_products_are_half_the_square_of_the_inner_product(size):
    x, y = torch.randn(2, 5, size, dtype=torch.float64)
    packed = (pair_products(x) * pair_products(y)).sum(dim=-1)
    torch.testing.assert_close(packed, (x * y).sum(dim=-1).square() / 2)
    assert pair_products(x).shape[-1] == size * (size // 2 + 1)


def test_size():
    assert build(dim=64).num_features == 2177
    assert build(dim=64, projection_dim=16).num_features == 1 + 16 + 16 * 9


def test_small_logits_are_softmax_to_third_order():
    phi, (q, k) = build(1, 1, 8), torch.randn(2, 1, 1, 40, 8, dtype=torch.float64)
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    weights = phi.query(q, 0.3).values @ phi.key(k, 0.3).values.transpose(-1, -2)
    exact = torch.exp(q @ k.transpose(-1, -2) * 0.3)
    assert float((weights - exact).abs().max()) < 0.3**3 / 6 * 1.1


def test_projection_starts_near_the_inner_product():
    """Orthonormal columns times √(d/d'), the same on both sides."""
    phi = build(dim=12, projection_dim=4)
    assert torch.equal(phi.query_weight[0], phi.key_weight[0])
    gram = phi.query_weight[0].T @ phi.query_weight[0]
    torch.testing.assert_close(gram, 3 * torch.eye(4), atol=1e-5, rtol=0)
    assert not list(build().parameters())


@pytest.mark.slow
def test_projection_learns_in_transfer():
    model = hla.patch_model(BERT.build(), "taylor", projection_dim=5)
    batches = [{"input_ids": token_ids(4, 20, seed=seed)} for seed in range(3)]
    before = measure_fidelity(model, batches).kl
    transfer_attention(model, batches, max_steps=30)
    assert measure_fidelity(model, batches).kl < before


def test_bad_options():
    for wrong in (0, -3, 2.0):
        with pytest.raises(ValueError, match=f"projection_dim must be a whole number of at least 1, got {wrong}"):
            TaylorOptions(projection_dim=wrong)
