"""Calls timed in turns, of which some take microseconds and others minutes: the raw samples, and their ratios."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch

from hf_linear_attn.utils.timing import MIN_SAMPLE_SECONDS, device_clock

MIN_ROUNDS = 3
MAX_ROUNDS = 15

#: A call of so many seconds is timed once, cold: what a first call allocates does not show in it.
SLOW = 1.0

Context = Callable[[], AbstractContextManager[object]]

Samples = dict[str, list[float]]
"""Seconds of one call, by name and round. Slow calls take part in the first rounds only."""


class InContext:
    """A call inside contexts, such as a backend or `torch.no_grad`: a sample of many calls enters them once."""

    def __init__(self, call: Callable[[], object], *contexts: Context) -> None:
        self._call, self._contexts = call, contexts

    def __call__(self) -> object:
        with ExitStack() as entered:
            return self.enter(entered)()

    def enter(self, entered: ExitStack) -> Callable[[], object]:
        """What to call inside."""
        for context in self._contexts:
            entered.enter_context(context())
        return _without_contexts(self._call, entered)


def _without_contexts(call: Callable[[], object], entered: ExitStack) -> Callable[[], object]:
    return call.enter(entered) if isinstance(call, InContext) else call


def sample_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    device: torch.device | None = None,
    slow: float = SLOW,
) -> Samples:
    """Time calls in turns: each round runs every one that still has time, beginning with another one each time.

    seconds: for each call, beside a warm-up; at least `MIN_ROUNDS` rounds of it (one if it is slow), at most
    `MAX_ROUNDS`. What takes microseconds is repeated within a sample. slow: seconds of a call that is timed once.
    """
    clock = device_clock(device)

    def sample(call: Callable[[], object], repeats: int) -> float:
        with ExitStack() as entered:
            inside = _without_contexts(call, entered)
            began = clock()
            for _ in range(repeats):
                inside()
            return (clock() - began) / repeats

    samples: Samples = {}
    repeats: dict[str, int] = {}
    rounds: dict[str, int] = {}
    for name, call in calls.items():
        once = sample(call, 1)
        samples[name] = [once] if once >= slow else []
        if once < 0.1:
            once = sample(call, 1)
        repeats[name] = max(1, min(200, math.ceil(MIN_SAMPLE_SECONDS / max(once, 1e-7))))
        num_rounds = seconds / (repeats[name] * max(once, 1e-7))
        rounds[name] = 1 if once >= slow else int(min(MAX_ROUNDS, max(MIN_ROUNDS, num_rounds)))
    names = list(calls)
    for turn in range(max(rounds.values(), default=0)):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            if len(samples[name]) <= turn < rounds[name]:
                samples[name].append(sample(calls[name], repeats[name]))
    return samples


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 20th and 80th percentile, and of how many rounds."""
    return {
        "median": statistics.median(values),
        "p20": float(np.quantile(values, 0.2)),
        "p80": float(np.quantile(values, 0.8)),
        "rounds": len(values),
    }


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """`over / under` round by round, so that a slower moment of the machine strikes both; one that was timed in fewer
    rounds stands with its last one."""
    rounds = max(len(over), len(under))
    pairs = [(over[min(turn, len(over) - 1)], under[min(turn, len(under) - 1)]) for turn in range(rounds)]
    return {**spread([first / second for first, second in pairs]), "rounds": min(len(over), len(under))}


def once(call: Callable[[], object]) -> float:
    """Seconds of a single call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
