"""How fast the variants of a model are: all of them in the same rounds, at every length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..measure.speed import (
    DECODING,
    FORWARD,
    PREFILL,
    TRAINING,
    measure_decoding,
    measure_passes,
    possible_lengths,
)
from ..measure.values import Values
from ..utils.formatting import format_bytes
from ..utils.memory import free_memory
from ..utils.timing import MIN_ROUNDS
from .prepare import EvaluatedModel, ExactModel
from .study import Record, Study
from .variants import EXACT_LABEL, WITHOUT_ATTENTION, Variant, timed_variants

#: Seconds that one length may take in any case: without long inputs there is little to see.
LONGEST_WAIT = 120.0

#: The share of the free memory that a measurement may be expected to need.
MEMORY_SHARE = 0.8


def measure_speed(study: Study, one: EvaluatedModel) -> list[str]:
    """Time all variants of a model at every length; return what was left out, and why.

    Operations are counted for one sequence: a batch has so many times as many, and a prefill as many as a forward pass.
    Several sequences are timed at a few of the lengths, and not in a prefill.
    """
    resolved, exact = one.resolved, one.exact.cast(one.resolved.dtype)
    timed = TimedVariants(study, one, exact, timed_variants(exact, resolved, one.groups))
    lengths, note = possible_lengths(exact.model, resolved.lengths)
    notes: list[str] = []
    longest = 0  # that was timed
    generation = [PREFILL, DECODING] if exact.kind == "decoder" else []
    for measurement in (FORWARD, *([TRAINING] if resolved.backward else []), *generation):
        single, left_out = timed.sweep(measurement, lengths)
        notes, longest = [*notes, *left_out], max(longest, *single, 0)
        if resolved.throughput_batch_size > 1 and measurement != PREFILL:
            some = lengths_to_show(list(single), resolved.length)
            notes += timed.sweep(measurement, some, resolved.throughput_batch_size, single)[1]
    if lengths == list(resolved.lengths):  # the note is about those that were really timed
        note = possible_lengths(exact.model, [longest])[1]
    return [*filter(None, [note]), *notes]


@dataclass(frozen=True)
class TimedVariants:
    """The variants of a model that are timed. One record holds all of them: a speedup is a ratio within its rounds."""

    study: Study
    one: EvaluatedModel
    exact: ExactModel
    variants: Sequence[Variant]

    def of(self, measurement: str) -> dict[str, Variant]:
        """Return the variants by their label. A model without attention has nothing to decode from."""
        return {one.label: one for one in self.variants if measurement != DECODING or one.label != WITHOUT_ATTENTION}

    def sweep(
        self, measurement: str, lengths: Sequence[int], batch_size: int = 1, single: Mapping[int, Record] | None = None
    ) -> tuple[dict[int, Record], list[str]]:
        """Measure at each length, unless the last one, or what `single` has of one sequence, predicts too much.

        Returns:
            The records by length, and what was left out.
        """
        done: dict[int, Record] = {}
        study, resolved, device = self.study, self.one.resolved, self.exact.model.device
        name = measurement + (f" with {batch_size} sequences" if batch_size > 1 else "")
        models = {label: {"attention": one.attention, **one.options} for label, one in self.of(measurement).items()}
        # The time of exact attention grows with the square, and its memory too where all weights are in memory.
        quadratic = {"seconds"} | ({"peak_memory"} if self.exact.implementation == "eager" else set())
        for index, length in enumerate(lengths):
            given = {"seconds": resolved.seconds, "flops": resolved.flops}
            sizes = {"length": length, "batch_size": batch_size}
            conditions = self.exact.conditions(measurement, **sizes, options=models, settings=given)
            reason = None
            if study.records.latest(conditions) is None and (single or done):
                last = max(done, default=length)
                known, growth = (single[length], batch_size) if single else (done[last], length / last)
                reason = reason_to_skip(known.values, growth, resolved.seconds, device, set() if single else quadratic)
            if reason is None:
                study.progress.status(f"{name}: {length:,} tokens", index, len(lengths))
                try:
                    done[length] = study.measure(conditions, partial(self.time_all, measurement, length, batch_size))
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    reason = "the device has no more memory"
            if reason is not None:
                left = ", ".join(f"{length:,}" for length in lengths[index:])
                return done, [f"{name} was not timed at {left} tokens: {reason}."]
        return done, []

    def time_all(self, measurement: str, length: int, batch_size: int) -> Values:
        """Time all variants in the same rounds; each value says of which one it is."""
        resolved, timed = self.one.resolved, self.of(measurement)
        loaded, tokens = {label: one.load() for label, one in timed.items()}, self.one.inputs.tokens
        common: dict[str, Any] = {"baseline": EXACT_LABEL, "batch_size": batch_size}
        if measurement == DECODING:
            results = measure_decoding(loaded, tokens, length, seconds=resolved.seconds / 4, **common)
        else:
            common |= {"flops": resolved.flops and measurement != PREFILL and batch_size == 1, "memory": True}
            common |= {"measurement": measurement, "seconds": resolved.seconds}
            results = measure_passes(loaded, tokens, length, **common)
        rows = ((row, one) for label, one in timed.items() for row in results[label])
        return [{**row, "label": one.label, "attention": one.attention} for row, one in rows]


def reason_to_skip(
    known: Values, growth: float, seconds: float, device: torch.device, quadratic: set[str]
) -> str | None:
    """Return why a measurement of `growth` times as many tokens would need too much memory or time; None: it would not.

    Args:
        known: The values of all variants. A new measurement takes a warm-up and the least rounds of all of them, the
            memory of the one that needs most, and the caches of all.
        growth: By how much time and memory grow.
        seconds: The time that is meant for one length. 15 times as much is too long, but not below `LONGEST_WAIT`.
        device: Whose free memory counts.
        quadratic: The metrics that grow with the square in the exact model.
    """

    def expected(metric: str) -> list[float]:
        rows = [row for row in known if row["metric"] == metric]
        powers = [2 if row["label"] == EXACT_LABEL and metric in quadratic else 1 for row in rows]
        return [(row["value"] or 0.0) * growth**power for row, power in zip(rows, powers, strict=True)]

    needed, free = max(expected("peak_memory"), default=0.0) + sum(expected("cache_bytes")), free_memory(device)
    if free is not None and needed > MEMORY_SHARE * free:
        return f"it would need about {format_bytes(needed)}, and {format_bytes(free)} are free"
    duration = (1 + MIN_ROUNDS) * sum(expected("seconds"))
    return f"it would take about {duration:.0f} s" if duration > max(15 * seconds, LONGEST_WAIT) else None


def lengths_to_show(lengths: Sequence[int], own: int) -> list[int]:
    """Return at most five lengths to show: the user's own if measured, and four that are evenly spread."""
    spread = [lengths[index * (len(lengths) - 1) // 3] for index in range(4)] if lengths else []
    return sorted({*spread, *(length for length in lengths if length == own)})
