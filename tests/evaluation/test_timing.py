"""Speedup, crossover, ceiling: on made-up numbers. Nothing here is timed."""

from __future__ import annotations

import math

import pytest

from hf_linear_attn.evaluation.timing import (
    SpeedTable,
    amdahl_ceiling,
    amdahl_share,
    crossover,
    interleaved,
    percentile,
    summarise,
)


def test_percentile_interpolates_between_order_statistics() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.2) == pytest.approx(2.0)
    assert percentile([7.0], 0.8) == 7.0


def test_speedup_is_the_median_of_paired_ratios() -> None:
    """A slow moment that strikes a whole round leaves the ratio alone."""
    timing = summarise([1.0, 10.0, 1.0], baseline=[2.0, 20.0, 2.0])
    assert timing.speedup == timing.speedup_p20 == timing.speedup_p80 == 2.0
    assert timing.median == 1.0
    assert timing.rounds == 3


def test_crossover_is_exact_on_power_laws() -> None:
    """Quadratic c·L² against linear a·L cross at a/c, between whatever lengths were measured."""
    lengths = [128, 512, 2048, 8192]
    quadratic, linear = 1e-9, 1e-6
    speedups = [quadratic * length**2 / (linear * length) for length in lengths]
    found = crossover(lengths, speedups)
    assert found.relation == "at"
    assert found.length == pytest.approx(linear / quadratic)


def test_crossover_counts_only_what_lasts() -> None:
    found = crossover([100, 200, 400, 800], [1.5, 0.5, 2.0, 4.0])
    assert found.length == pytest.approx(200 * math.sqrt(2))


@pytest.mark.parametrize(
    ("speedups", "length", "relation"),
    [
        ([1.1, 2.0], 100.0, "at or under"),
        ([0.5, 0.9], None, "none"),
        ([2.0, 0.9], None, "none"),
        ([0.5, 1.0], None, "none"),
    ],
)
def test_crossover_outside_the_measured_lengths(speedups: list[float], length: float | None, relation: str) -> None:
    found = crossover([100, 200], speedups)
    assert (found.length, found.relation) == (length, relation)


def test_crossover_of_nothing() -> None:
    assert crossover([], []).relation == "none"


def test_amdahl() -> None:
    """A model of 10 s that spends 4 s elsewhere gains at most 2.5; 60 % of it is attention."""
    ceiling = amdahl_ceiling(10.0, 4.0)
    assert ceiling == 2.5
    assert amdahl_share(ceiling) == pytest.approx(0.6)
    assert amdahl_share(0.98) == 0.0


def test_interleaved_runs_everything_in_every_round() -> None:
    calls: list[str] = []
    functions = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    timings = interleaved(functions, baseline="a", budget=0.0, min_rounds=3)
    assert {timing.rounds for timing in timings.values()} == {3}
    assert timings["a"].speedup == 1.0
    assert set(calls) == {"a", "b", "c"}


def test_interleaved_keeps_to_its_rounds() -> None:
    timings = interleaved({"a": lambda: None}, baseline="a", budget=1e9, max_rounds=4)
    assert timings["a"].rounds == 4


def test_speed_table_collects_rows() -> None:
    table = SpeedTable("exact")
    for length, ratio in ((100, 0.5), (400, 2.0)):
        table.add(length, {"exact": summarise([1.0], [1.0]), "fast": summarise([1.0], [ratio])})
    assert table.lengths == [100, 400]
    assert table.crossover("fast").length == pytest.approx(200.0)
