"""Random features as estimators of the softmax kernel: bias, published variance, orthogonality, which is best where."""

import json
from functools import lru_cache

import pytest
import torch

from recipes.benchmarks import random_feature_statistics
from recipes.benchmarks.random_features import (
    FORMS,
    kernel_estimates,
    kernel_variance,
    orthogonal_gain,
    pairs_at,
)

DIM, FEATURES, DRAWS = 8, 8, 4000
LENGTHS = torch.tensor([0.2, 0.6, 1.0])

every_form = pytest.mark.parametrize("form", sorted(FORMS))


@lru_cache
def sample(form, orthogonal):
    """Errors of the estimate `[draws, pairs]`, relative to the kernel, and the relative published variance."""
    query, key = pairs_at(LENGTHS, 0.6, DIM)
    truth = (query * key).sum(dim=-1).exp()
    drawn = kernel_estimates(form, query, key, FEATURES, draws=DRAWS, orthogonal=orthogonal)
    return drawn / truth - 1, kernel_variance(form, query, key, FEATURES) / truth.square()


def mean_square(errors):
    """Mean of the squares, and the standard error of that mean."""
    squares = errors.square()
    return squares.mean(dim=0), squares.std(dim=0) / len(squares) ** 0.5


@pytest.mark.parametrize("orthogonal", [True, False], ids=["orthogonal", "independent"])
@every_form
def test_estimates_are_unbiased(form, orthogonal):
    errors, _ = sample(form, orthogonal)
    standard_error = errors.std(dim=0) / DRAWS**0.5
    assert bool((errors.mean(dim=0).abs() < 4 * standard_error).all())
    assert float(standard_error.max()) < 0.02


@every_form
def test_the_variance_of_independent_features_is_the_published_one(form):
    errors, published = sample(form, False)
    measured, standard_error = mean_square(errors)
    assert bool(((measured - published).abs() < 4 * standard_error).all())
    assert bool((standard_error < 0.1 * published).all())


@every_form
def test_orthogonal_features_are_never_worse_and_often_much_better(form):
    errors, published = sample(form, True)
    measured, standard_error = mean_square(errors)
    assert bool((measured < published + 3 * standard_error).all())
    # Orthogonality fixes even orders of the error: cos and cosh have no others. A random phase adds noise of its own.
    best = float((measured / published).min())
    assert best < {"sin and cos": 0.75, "hyperbolic": 0.75, "positive": 0.9, "cos with phase": 0.98}[form]


def test_orthogonal_positive_features_gain_what_the_theorem_promises():
    errors, published = sample("positive", True)
    query, key = pairs_at(LENGTHS, 0.6, DIM)
    promised = orthogonal_gain(query, key, FEATURES) / (query * key).sum(dim=-1).exp().square()
    measured, standard_error = mean_square(errors)
    assert bool((measured < published - promised + 3 * standard_error).all())
    assert float(promised[-1] / published[-1]) > 0.05


def test_positive_features_win_where_the_kernel_is_small_and_lose_where_it_is_large():
    """At equal size m: `‖q + k‖` small means opposite q and k, hence a small kernel."""
    query, key = pairs_at(torch.linspace(0.01, 1.99, 40), 1.0, DIM)
    relative = {form: kernel_variance(form, query, key, 64) / (query * key).sum(-1).exp().square() for form in FORMS}
    positive, waves, hyperbolic = relative["positive"], relative["sin and cos"], relative["hyperbolic"]
    assert bool((positive.diff() > 0).all())
    assert bool((waves.diff() < 0).all())
    assert float(positive[0]) < 1e-3 * float(waves[0])
    assert float(waves[-1]) < 1e-3 * float(positive[-1])
    assert bool((hyperbolic < positive).all())
    measured = {}
    for form in ("positive", "sin and cos"):
        ends = [query[[0, 25]], key[[0, 25]]]
        truth = (ends[0] * ends[1]).sum(dim=-1).exp()
        measured[form] = (kernel_estimates(form, *ends, 16, draws=500) / truth - 1).square().mean(dim=0)
    assert float(measured["positive"][0]) < 0.1 * float(measured["sin and cos"][0])


def test_pairs_have_the_requested_norms():
    lengths = torch.tensor([0.0, 0.5, 2.0])
    query, key = pairs_at(lengths, 1.0, 5)
    torch.testing.assert_close((query + key).norm(dim=1), lengths.double())
    torch.testing.assert_close(torch.cat([query, key]).norm(dim=1), torch.ones(6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"lengths in \[0, 2.0\]"):
        pairs_at(torch.tensor([2.5]), 1.0, 5)


def test_the_recipe_writes_its_results(tmp_path):
    assert random_feature_statistics.main(["--draws", "20", "--dim", "4", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "random-features.json").read_text(encoding="utf-8"))
    assert report["settings"]["draws"] == 20
    assert {row["form"] for row in report["by_length"]} == set(FORMS)
    assert (tmp_path / "random-features.png").read_bytes()[:4] == b"\x89PNG"
