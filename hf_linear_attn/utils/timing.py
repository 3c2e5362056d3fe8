"""Timing of several functions side by side, and what follows from the times: speedups and the crossover length."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: A call shorter than this is repeated within one sample, so that the clock and the call's overhead do not show.
MIN_SAMPLE_SECONDS = 0.004

#: Fewer paired rounds do not show how much the ratio of two times varies.
MIN_ROUNDS = 7
MAX_ROUNDS = 25

#: Two times whose ratio lies between these are equal.
EQUAL, FASTER = 0.95, 1.05


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the 20th and 80th percentile over `rounds` rounds.

    `speedup` is the time of the baseline divided by this one's: the median of the ratios of each round (1 for the
    baseline itself). Both are timed in every round, so that a slower moment of the machine affects both. Its interval
    covers the ratio of the medians, too.
    """

    median: float
    p20: float
    p80: float
    rounds: int
    speedup: float
    speedup_p20: float
    speedup_p80: float


def is_measurable(low: float, high: float) -> bool:
    """Return whether a speedup between `low` and `high` says which of two is faster, or that they are equal.

    It does not where the spread is wider than the effect: the machine is too busy, or the call too short.
    """
    return low > 1 or high < 1 or (low >= EQUAL and high <= FASTER)


def time_interleaved(
    functions: Mapping[str, Callable[[], object]], *, baseline: str, seconds: float, **options: Any
) -> dict[str, Timing]:
    """Time functions side by side (see `sample_interleaved`); return their times and their ratios to the baseline's."""
    samples = sample_interleaved(functions, seconds=seconds, **options)
    return {name: summarize_samples(samples[name], samples[baseline]) for name in functions}


def sample_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    device: torch.device | None = None,
    repeat: bool = True,
    warmup: int = 1,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of one call of each function in every round. A round runs every one once, in rotating order.

    Args:
        functions: Name -> function without arguments.
        seconds: Time to spend; between `min_rounds` and `max_rounds` rounds are run.
        device: A GPU is synchronised around each sample.
        repeat: Whether a short function is called several times in one sample. A function that changes its own state,
            such as a decoding step, must not be.
        warmup: Calls of each function before the first sample.
        min_rounds, max_rounds: How many rounds are run at least and at most.
        clock: Returns seconds, such as `time.process_time`; None: wall time, after a GPU is done.
    """
    clock = clock or device_clock(device)

    def sample(function: Callable[[], object], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            function()
        return (clock() - start) / calls

    calls = {}
    for name, function in functions.items():
        once = min(sample(function, 1) for _ in range(warmup))
        if repeat and once < 0.1:
            once = sample(function, 1)  # the first call allocates memory, which would count too much
        calls[name] = max(1, min(200, math.ceil(MIN_SAMPLE_SECONDS / max(once, 1e-7)))) if repeat else 1
    order = deque(functions)
    samples: dict[str, list[float]] = {name: [] for name in order}
    start = time.perf_counter()
    for round_index in range(max_rounds):
        for name in order:
            samples[name].append(sample(functions[name], calls[name]))
        order.rotate(-1)
        if round_index + 1 >= min_rounds and time.perf_counter() - start > seconds:
            break
    return samples


def summarize_samples(seconds: Sequence[float], baseline: Sequence[float]) -> Timing:
    """Return the median and percentiles of samples, and those of their ratios to the baseline's, round by round."""
    shares = (0.5, 0.2, 0.8)
    median, p20, p80 = np.quantile(seconds, shares).tolist()
    speedup, speedup_p20, speedup_p80 = np.quantile(np.divide(baseline, seconds), shares).tolist()
    of_medians = float(np.median(baseline)) / median  # a reader divides the times beside the speedup
    low = min(speedup_p20, of_medians)
    high = max(speedup_p80, of_medians)
    return Timing(median, p20, p80, len(seconds), speedup, low, high)


def device_clock(device: torch.device | None) -> Callable[[], float]:
    """Return a clock in seconds, which waits for a GPU before it is read.

    `torch.utils.benchmark.Timer` times one function at a time, while speedups need paired samples.
    """
    if device is None or device.type == "cpu":
        return time.perf_counter
    from torch.utils.benchmark.utils.timer import timer

    return timer


@dataclass(frozen=True)
class Crossover:
    """The length from which a mechanism is faster than the baseline, at every longer measured length too."""

    length: float  # in tokens
    #: "=" for a length between two measured ones (interpolated), "<=" where the shortest measured length is faster
    #: already, ">" where the longest measured one is not faster (nothing is known about longer ones then).
    relation: str

    def __str__(self) -> str:
        """Return it as text: `~ 640`, `≤ 128`, `> 8,192`. An interpolated length has two significant digits."""
        if self.relation == "=":
            return f"~ {int(float(format(self.length, '.2g'))):,}"
        return f"{'≤' if self.relation == '<=' else '>'} {self.length:,.0f}"


def crossover(lengths: Sequence[int], speedups: Sequence[float]) -> Crossover:
    """Return the length where the speedup passes 1 for good, by the speedups at ascending lengths, at least one.

    Between two lengths the speedup is interpolated linearly in log(length) and log(speedup).
    """
    if speedups[-1] <= 1:
        return Crossover(float(lengths[-1]), ">")
    if min(speedups) > 1:
        return Crossover(float(lengths[0]), "<=")
    last = max(index for index, speedup in enumerate(speedups) if speedup <= 1)
    low = math.log(speedups[last])
    high = math.log(speedups[last + 1])
    log_ratio = math.log(lengths[last + 1] / lengths[last])
    return Crossover(lengths[last] * math.exp(-low / (high - low) * log_ratio), "=")
