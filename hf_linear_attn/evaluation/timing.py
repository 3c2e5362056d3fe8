"""Timing side by side, and what follows from the times: speedup, crossover, ceiling."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

#: A measurement shorter than this is repeated within one sample, so that the clock and the call do not show.
MIN_SAMPLE_SECONDS = 0.004

MIN_ROUNDS = 3
MAX_ROUNDS = 25


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and 20th and 80th percentile over `rounds`.

    speedup: baseline / this one, the median of the ratios of each round (1 for the baseline itself); both are timed in
    every round, so that a slower moment of the machine strikes both.
    """

    median: float
    p20: float
    p80: float
    rounds: int
    speedup: float
    speedup_p20: float
    speedup_p80: float


@dataclass(frozen=True)
class Crossover:
    """From which length on a mechanism is faster than the baseline, at every longer measured length too.

    relation: "at" (between two measured lengths, interpolated), "at or under" (already at the shortest), "none" (slower
    at the longest measured length; `length` is None).
    """

    length: float | None
    relation: str


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; `share` in [0, 1]."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    budget: float,
    device: torch.device | None = None,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
) -> dict[str, Timing]:
    """Time functions in turns: each round runs every one once, beginning with another one each time.

    Args:
        functions: name -> call without arguments.
        baseline: the name that speedups are relative to.
        budget: seconds to spend; between `min_rounds` and `max_rounds` rounds are run. One warm-up call of each comes
            before.
        device: synchronised around each sample if it is a GPU.
    """
    calls = {name: _repeats(function, device) for name, function in functions.items()}
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for turn in range(max_rounds):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            samples[name].append(_sample(functions[name], calls[name], device))
        if turn + 1 >= min_rounds and time.perf_counter() - began > budget:
            break
    return {name: summarise(samples[name], samples[baseline]) for name in names}


def summarise(seconds: Sequence[float], baseline: Sequence[float]) -> Timing:
    """Median, percentiles, and those of the ratios of paired rounds."""
    ratios = [base / own for base, own in zip(baseline, seconds, strict=True)]
    return Timing(
        statistics.median(seconds),
        percentile(seconds, 0.2),
        percentile(seconds, 0.8),
        len(seconds),
        statistics.median(ratios),
        percentile(ratios, 0.2),
        percentile(ratios, 0.8),
    )


def _repeats(function: Callable[[], object], device: torch.device | None) -> int:
    """Warm up, and find how many calls fill a sample."""
    once = _sample(function, 1, device)
    if once < 0.1:
        once = _sample(function, 1, device)  # the first call allocates; it says too much of a short function
    return max(1, min(200, math.ceil(MIN_SAMPLE_SECONDS / max(once, 1e-7))))


def _sample(function: Callable[[], object], repeats: int, device: torch.device | None) -> float:
    clock = clock_of(device)
    began = clock()
    for _ in range(repeats):
        function()
    return (clock() - began) / repeats


def clock_of(device: torch.device | None) -> Callable[[], float]:
    """The clock of torch.utils.benchmark, which waits for a GPU before it looks; on a CPU there is nothing to wait for.

    Its `Timer` is of no use here: it warms up before every sample and times one function at a time, while speedups need
    paired samples of several.
    """
    if device is None or device.type == "cpu":
        return time.perf_counter
    from torch.utils.benchmark.utils.timer import timer

    return timer


def crossover(lengths: Sequence[int], speedups: Sequence[float]) -> Crossover:
    """Where the speedup passes 1 for good; between two lengths linear in log(length) and log(speedup)."""
    if not lengths or speedups[-1] <= 1:
        return Crossover(None, "none")
    last_slower = next((index for index in reversed(range(len(lengths))) if speedups[index] <= 1), None)
    if last_slower is None:
        return Crossover(float(lengths[0]), "at or under")
    low, high = math.log(speedups[last_slower]), math.log(speedups[last_slower + 1])
    share = -low / (high - low)
    span = math.log(lengths[last_slower + 1] / lengths[last_slower])
    return Crossover(lengths[last_slower] * math.exp(share * span), "at")


def amdahl_ceiling(baseline: float, without_attention: float) -> float:
    """The speedup that a free attention would give: `t / t₀`, with t₀ the time of the model without its attention."""
    return baseline / without_attention


def amdahl_share(ceiling: float) -> float:
    """The share of the baseline's time that is attention: `1 - 1 / ceiling`, at least 0."""
    return max(0.0, 1 - 1 / ceiling)


@dataclass
class SpeedTable:
    """Times at several lengths: `rows[name][i]` belongs to `lengths[i]`; `notes` say what was left out and why."""

    baseline: str
    lengths: list[int] = field(default_factory=list)
    rows: dict[str, list[Timing]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, length: int, timings: Mapping[str, Timing]) -> None:
        self.lengths.append(length)
        for name, timing in timings.items():
            self.rows.setdefault(name, []).append(timing)

    def crossover(self, name: str) -> Crossover:
        return crossover(self.lengths, [timing.speedup for timing in self.rows[name]])
