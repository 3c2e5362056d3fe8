"""Budgets of the cache: exact heads and windows that `choose` chooses, counted in the states of the mechanisms."""

from __future__ import annotations

from typing import Any

import pytest

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.measure.metric import Score
from hf_linear_attn.study.budgets import DAMAGE_UNITS, Budget
from hf_linear_attn.study.choose import choose_by_cache, choose_by_measuring, quarter_window
from tests.slow_cases import slow
from tests.tiny_models import tiny_model

LAYERS, HEADS, WIDTH = 3, 4, 64


@pytest.mark.parametrize("options", [{}, *slow({"cache_dtype": "int8"})], ids=str)
@pytest.mark.parametrize(("percent", "length"), [(25, 8192), (37, 4096), (12, 9000), (150, 4000)])
def test_a_choice_is_within_the_budget(percent: int, length: int, options: dict[str, Any]) -> None:
    model = tiny_model("gpt2", num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=WIDTH)
    choice = choose_by_cache(Budget.parse(f"{percent}% cache at {length}"), model, 1024, options)
    count = round(choice.share * LAYERS * HEADS)
    assert 0 < count < LAYERS * HEADS
    # The first heads are exact: where that is all of a layer, it has an ordinary cache, or one in int8.
    whole = {"attention": "softmax", **options} if "cache_dtype" in options else "softmax"
    plan: dict[str, Any] = {"default": {"attention": "window", "window_size": choice.window, **options}}
    for layer in range(LAYERS):
        exact = list(range(min(max(count - layer * HEADS, 0), HEADS)))
        if exact:
            plan[str(layer)] = whole if len(exact) == HEADS else {"exact_heads": exact}
    cache = 2 * length * WIDTH * 4
    mechanisms = [module.linear_attention for module in attention_modules(hla.patch_model(model, plan))]
    state = sum(mechanism.state_bytes(length) for mechanism in mechanisms) + (LAYERS - len(mechanisms)) * cache
    assert state <= percent / 100 * LAYERS * cache
    if options.get("cache_dtype") and percent == 12:
        float32 = choose_by_cache(Budget.parse(f"{percent}% cache at {length}"), model, 1024)
        assert choice.share > 2 * float32.share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "longest", "choice"),
    [
        ("25% cache at 8192", 1024, (2 / 3, 512, "int8")),  # a head in float32 takes a third of the cache
        ("8% cache at 8192", 1024, (0.0, 512, "auto")),  # one in int8 takes 9 %
        ("8% cache at 8192", 4096, (0.0, 512, "auto")),
        ("8% cache at 8192", 512, (0.0, 256, "auto")),
        ("8% cache at 8192", 100, (0.0, 64, "auto")),
    ],
)
def test_where_no_head_fits_caches_are_in_int8_or_windows_take_the_budget(
    budget: str, longest: int, choice: tuple[float, int, str]
) -> None:
    model = tiny_model("llama", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, hidden_size=256)
    chosen = choose_by_cache(Budget.parse(budget), model, longest)
    assert (chosen.share, chosen.window, chosen.cache_dtype) == choice
    options = {"window_size": chosen.window, "cache_dtype": chosen.cache_dtype}
    whole = {"attention": "softmax", "cache_dtype": "int8"}
    layers = {str(layer): whole for layer in range(round(3 * chosen.share))}
    hla.patch_model(model, {"default": {"attention": "window", **options}, **layers})
    state = sum(module.linear_attention.state_bytes(8192) for module in attention_modules(model))
    assert state <= float(budget.partition("%")[0]) / 100 * 3 * 8192 * 2 * 64 * 4


def test_where_no_untrained_choice_keeps_the_quality_the_best_is_trained() -> None:
    damage = {0.0: 0.4, 0.05: 0.3, 0.1: 0.25, 0.2: 0.2, 0.35: 0.05, 0.5: 0.06}
    choice = choose_by_measuring(Budget.parse("0.01 nats"), quarter_window(512), lambda share: damage[share])
    assert (choice.share, choice.window) == (0.35, 128)
    assert choice.reason.startswith("untrained none is within 0.01 nats, and training has to do the rest: +0.4000 nats")
    with pytest.raises(ValueError, match=r"No choice is within the budget '2x at 512': 1\.10x with 50% exact heads"):
        choose_by_measuring(Budget.parse("2x at 512"), quarter_window(512), lambda share: 1.1)


def test_points_of_an_error_are_no_budget() -> None:
    points, perplexity = DAMAGE_UNITS["points"], DAMAGE_UNITS["perplexity"]
    points.check_score("0.5 points", Score("task", "accuracy", "accuracy"))
    with pytest.raises(ValueError, match=r"'0\.5 points' needs a metric of which more is better, not 'mse'"):
        points.check_score("0.5 points", Score("task", "mse", "mse", greater_is_better=False))
    perplexity.check_score("1% perplexity", Score("", "perplexity", "perplexity", greater_is_better=False))


@pytest.mark.parametrize(("correct", "rows"), [(201, 400), (300, 600), (501, 1000)])
def test_a_loss_of_just_the_limit_is_within_the_budget(correct: int, rows: int) -> None:
    # In binary 100 times the difference of such scores is now and then a little more than 0.5.
    points = Budget.parse("0.5 points")
    exact, unit = {"score": correct / rows}, points.unit
    assert unit is not None
    assert points.is_met(unit.damage(exact, {"score": (correct - rows // 200) / rows}, "score"))
    assert not points.is_met(unit.damage(exact, {"score": (correct - rows // 200 - 1) / rows}, "score"))
    recall = Budget.parse("90% recall at 2048")
    assert recall.unit is not None
    assert recall.is_met(recall.unit.damage({"recall": 40 / 48}, {"recall": 36 / 48}))
    assert not recall.is_met(recall.unit.damage({"recall": 40 / 48}, {"recall": 35 / 48}))
    assert Budget.parse("7% cache at 2048").is_met(7 / 100)
    assert not Budget.parse("7% cache at 2048").is_met(0.0701)


def test_a_choice_says_that_its_share_is_one_of_float32() -> None:
    # In bfloat16 the exact cache is half as large, and one in int8 takes twice the share of it.
    model = tiny_model("gpt2", num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=WIDTH)
    choice = choose_by_cache(Budget.parse("15% cache at 600"), model, 1024)
    assert choice.reason.startswith("in float32 window of 64 tokens and ")


def test_int8_meets_what_windows_in_float32_do_not() -> None:
    model = tiny_model("gpt2", num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=WIDTH)
    budget = Budget.parse("15% cache at 600")
    assert choose_by_cache(budget, model, 1024).cache_dtype == "int8"
    with pytest.raises(ValueError, match=r"cannot be met: windows of 64 tokens, stored in int8, take 14\.\d%"):
        choose_by_cache(Budget.parse("14% cache at 600"), model, 1024)


def test_layers_with_windows_of_their_own_do_not_count() -> None:
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model("ministral", num_attention_heads=2, num_key_value_heads=1, head_dim=64, **layers)
    choice = choose_by_cache(Budget.parse("40% cache at 2000"), model, 1024)
    assert choice.reason.endswith("% of the cache of the layers that see the whole text at 2,000 tokens")


@pytest.mark.parametrize(
    ("unit", "damage", "expected"),
    [
        ("perplexity", -0.001, "+0.00% perplexity"),
        ("perplexity", -0.4, "-0.40% perplexity"),
        ("points", 0.001, "+0.00 points"),
        ("cosine", -1e-6, "0.0000 from cosine 1"),
        ("recall", 0.3, "+0% recall"),
    ],
)
def test_what_rounds_to_zero_has_no_minus(unit: str, damage: float, expected: str) -> None:
    assert DAMAGE_UNITS[unit].format(damage) == expected
