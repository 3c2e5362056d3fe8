"""Speedup and crossover on fixed numbers, and the order of interleaved calls. Nothing here is timed."""

from __future__ import annotations

import math

import pytest

from hf_linear_attn.utils.timing import MIN_ROUNDS, crossover, is_measurable, summarize_samples, time_interleaved


def test_speedup_is_the_median_of_paired_ratios() -> None:
    """A slow moment that affects a whole round leaves the ratio as it is."""
    timing = summarize_samples([1.0, 10.0, 1.0], baseline=[2.0, 20.0, 2.0])
    assert timing.speedup == timing.speedup_p20 == timing.speedup_p80 == 2.0
    assert timing.median == 1.0
    assert timing.rounds == 3


def test_the_interval_covers_the_ratio_of_the_medians() -> None:
    """Who divides the two times of a table finds a ratio within the interval beside it."""
    timing = summarize_samples([1.0, 2.0, 4.0], baseline=[3.0, 1.0, 4.0])
    assert timing.speedup == 1.0
    assert timing.speedup_p20 <= 3.0 / 2.0 <= timing.speedup_p80
    assert not is_measurable(timing.speedup_p20, timing.speedup_p80)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.2, 3.0, True), (0.5, 0.9, True), (0.97, 1.04, True), (0.8, 1.3, False), (0.99, 1.2, False)],
)
def test_a_spread_wider_than_the_effect_says_nothing(low: float, high: float, expected: bool) -> None:
    assert is_measurable(low, high) is expected


def test_crossover_is_exact_on_power_laws() -> None:
    """Quadratic c·L² against linear a·L cross at a/c, between whatever lengths were measured."""
    lengths = [128, 512, 2048, 8192]
    quadratic, linear = 1e-9, 1e-6
    speedups = [quadratic * length**2 / (linear * length) for length in lengths]
    result = crossover(lengths, speedups)
    assert result.relation == "="
    assert result.length == pytest.approx(linear / quadratic)
    assert str(result) == "~ 1,000"


def test_crossover_counts_only_what_lasts() -> None:
    assert crossover([100, 200, 400, 800], [1.5, 0.5, 2.0, 4.0]).length == pytest.approx(200 * math.sqrt(2))


@pytest.mark.parametrize(
    ("speedups", "text"),
    [([1.1, 2.0], "≤ 100"), ([0.5, 0.9], "> 2,000"), ([2.0, 0.9], "> 2,000"), ([0.5, 1.0], "> 2,000")],
)
def test_crossover_outside_the_measured_lengths(speedups: list[float], text: str) -> None:
    """Nothing is said about lengths that were not measured: "> 2,000" and not "never"."""
    assert str(crossover([100, 2000], speedups)) == text


def test_every_function_runs_in_every_round_in_rotating_order() -> None:
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    timings = time_interleaved(functions, baseline="a", seconds=0.0, min_rounds=3, repeat=False)
    assert {timing.rounds for timing in timings.values()} == {3}
    assert timings["a"].speedup == 1.0
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"  # a warm-up, then three rounds


def test_rounds_are_limited() -> None:
    assert time_interleaved({"a": lambda: None}, baseline="a", seconds=0.0)["a"].rounds == MIN_ROUNDS >= 7
    timings = time_interleaved({"a": lambda: None}, baseline="a", seconds=1e9, max_rounds=4)
    assert timings["a"].rounds == 4
