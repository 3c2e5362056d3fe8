"""Random features: statistics of the estimate, orthogonality, seeds, and numbers that would overflow."""

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.random_features import gaussian_features
from hf_linear_attn.integration.context import attention_modules
from tests.comparing import TOLERANCE, assert_close, relative_error
from tests.inputs import qkv
from tests.ops.test_kernelized import SCALING, fast
from tests.small import feature_map
from tests.tiny_models import LLAMA

DIM, DRAWS = 8, 400


def positive_features(x, weight):
    return torch.exp(x @ weight.double().T - x.square().sum(-1, keepdim=True) / 2) / weight.shape[0] ** 0.5


def estimates(count, **options):
    """`φ(q)·φ(k)` for many draws of the features, for a few pairs of known product: `[draws, pairs]`, and the truth."""
    generator = torch.Generator().manual_seed(3)
    q, k = (0.35 * torch.randn(5, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = [gaussian_features(count, DIM, seed=seed, **options) for seed in range(DRAWS)]
    drawn = [(positive_features(q, weight) * positive_features(k, weight)).sum(dim=-1) for weight in weights]
    return torch.stack(drawn), torch.exp((q * k).sum(dim=-1))


@pytest.mark.parametrize("orthogonal", [True, False], ids=["orthogonal", "independent"])
def test_the_estimate_of_the_kernel_is_unbiased(orthogonal):
    drawn, truth = estimates(16, orthogonal=orthogonal)
    standard_error = drawn.std(dim=0) / DRAWS**0.5
    assert bool(((drawn.mean(dim=0) - truth).abs() < 4 * standard_error).all())
    assert bool((standard_error < 0.1 * truth).all())


def test_the_map_itself_estimates_the_softmax_kernel():
    q, k, _ = qkv(3, batch=1, heads=1, groups=1, dim=6)
    built = feature_map("favor+", 1, 1, num_features=20_000)
    products = []
    for features in (built.query(q, SCALING), built.key(k, SCALING)):
        products.append(features.values * features.log_scale.exp().unsqueeze(-1))
    estimate = products[0] @ products[1].transpose(-1, -2)
    assert relative_error(estimate, torch.exp(SCALING * q @ k.transpose(-1, -2))) < 0.1


def squared_error(function, truth, dim=16, draws=1000, **options):
    """Mean squared error of `mean_r f(w_r·z)` over draws of `dim` rows w, for a few z of length 1."""
    z = torch.randn(dim, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = z / z.norm(dim=0)
    weights = torch.stack([gaussian_features(dim, dim, seed=seed, **options) for seed in range(draws)]).double()
    return float((function(weights @ z).mean(dim=1) - truth).square().mean())


@pytest.mark.parametrize(
    ("function", "sign", "margin"), [(torch.exp, 1, 0.9), (torch.cosh, 1, 0.5), (torch.cos, -1, 0.3)]
)
def test_orthogonal_features_have_a_smaller_error(function, sign, margin):
    # E f(w·z) = exp(±‖z‖²/2). Orthogonality fixes the terms of even order: exp has odd ones as well and gains least.
    truth = torch.exp(torch.tensor(sign * 0.5))
    orthogonal, independent = (squared_error(function, truth, orthogonal=choice) for choice in (True, False))
    assert orthogonal < margin * independent


def test_orthogonal_blocks_are_orthogonal():
    rows = gaussian_features(2 * DIM + 3, DIM, seed=0).double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    for start in (0, DIM, 2 * DIM):
        block = unit[start : start + DIM]
        assert float((block @ block.T - torch.eye(len(block), dtype=torch.float64)).abs().max()) < 1e-6
    assert float((unit[:DIM] @ unit[DIM : 2 * DIM].T).abs().max()) > 0.1


def test_row_norms():
    constant = gaussian_features(64, DIM, seed=0, scaling="constant").norm(dim=1)
    assert_close(constant, torch.full((64,), DIM**0.5))
    chi = torch.cat([gaussian_features(64, DIM, seed=seed, scaling="chi") for seed in range(100)]).double()
    # ‖w‖² of a Gaussian row has mean d and variance 2d.
    squares = chi.square().sum(dim=1)
    assert abs(float(squares.mean()) - DIM) < 4 * (2 * DIM / len(squares)) ** 0.5
    assert 0.9 < float(squares.var()) / (2 * DIM) < 1.1


def test_rows_have_the_mean_and_covariance_of_a_gaussian():
    rows = torch.cat([gaussian_features(DIM, DIM, seed=seed) for seed in range(1500)]).double()
    assert float(rows.mean(dim=0).abs().max()) < 0.05
    assert float((rows.T @ rows / len(rows) - torch.eye(DIM, dtype=torch.float64)).abs().max()) < 0.06


@pytest.mark.parametrize("options", [{}, {"orthogonal": False}, {"scaling": "constant"}], ids=str)
def test_features_are_a_function_of_the_seed_by_itself(options):
    torch.manual_seed(1)
    first = gaussian_features(20, DIM, seed=5, **options)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(gaussian_features(20, DIM, seed=5, **options), first)
    assert not torch.equal(gaussian_features(20, DIM, seed=6, **options), first)
    torch.manual_seed(1)
    gaussian_features(20, DIM, seed=5, **options)
    assert torch.equal(torch.get_rng_state(), state)


def layer_features(seed):
    model = hla.patch_model(LLAMA.build(), "favor+", num_features=16, seed=seed)
    return [module.linear_attention.feature_map.weight for module in attention_modules(model)]


@pytest.mark.slow
def test_layers_and_seeds_differ_and_the_buffer_is_saved():
    first, second = layer_features(0)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(layer_features(0), (first, second), strict=True))
    assert not torch.equal(layer_features(1)[0], first)
    assert "weight" in feature_map("favor+").state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e2])
def test_extreme_sizes_are_finite_and_stream_like_the_parallel_form(size, dtype):
    built = feature_map("favor+")
    q, k, v = qkv(140)
    inputs = [(size * q).to(dtype), (size * k).to(dtype), v.to(dtype)]
    parallel, _ = fast(built, *inputs, causal=True)
    both, _ = fast(built, *inputs, causal=False)
    state, steps = None, []
    for t in range(140):
        out, state = fast(built, *(x[:, :, t : t + 1] for x in inputs), causal=True, state=state)
        steps.append(out)
    assert bool(torch.isfinite(both).all())
    # exponents of 1e4 are rounded to 1e-3 in float32: what is left of the tolerance is lost there
    factor = 50.0 if size > 1 else 1.0
    assert_close(torch.cat(steps, dim=2), parallel, dtype, factor=min(factor, 1e-2 / TOLERANCE[dtype]))


def test_growing_keys_rescale_the_state():
    built = feature_map("favor+")
    q, k, v = qkv(200)
    k = k * torch.linspace(0.01, 30, 200)[None, None, :, None]
    parallel, _ = fast(built, q, k, v, causal=True)
    state, steps = None, []
    for t in range(200):
        out, state = fast(built, *(x[:, :, t : t + 1] for x in (q, k, v)), causal=True, state=state)
        steps.append(out)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
    assert_close(torch.cat(steps, dim=2), parallel, factor=10)


def test_a_later_huge_key_does_not_change_earlier_outputs():
    built = feature_map("favor+")
    q, k, v = qkv(40)
    first, _ = fast(built, q, k, v, causal=True)
    k[:, :, -1] *= 100
    v[:, :, -1] *= 100
    assert_close(fast(built, q, k, v, causal=True)[0][:, :, :-1], first[:, :, :-1])
