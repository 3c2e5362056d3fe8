"""Speed, memory and operations of the variants of a model, side by side, at every length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..measure.inputs import possible_lengths
from ..measure.memory import free_memory
from ..measure.speed import DECODING, FORWARD, PREFILL, TRAINING, measure_decoding, measure_passes
from ..measure.values import Values
from ..utils.formatting import format_bytes
from ..utils.timing import MIN_ROUNDS
from .loading import CheckpointGroup, ExactModel
from .settings import Settings
from .study import Record, Study
from .variants import EXACT_LABEL, WITHOUT_ATTENTION, Variant, timed_variants

#: Seconds that one length may take in any case: without long inputs there is little to see.
LONGEST_WAIT = 120.0

#: The share of the free memory that a measurement may be expected to need.
MEMORY_SHARE = 0.8


def measure_speed(
    study: Study, exact: ExactModel, settings: Settings, groups: Sequence[CheckpointGroup], tokens: Sequence[int]
) -> list[str]:
    """Time all variants of a model at every length; return what was left out, and why.

    One record holds all of them: a speedup is always a ratio within the same rounds. Operations are counted for one
    sequence: a batch has so many times as many, and a prefill as many as a forward pass. Several sequences are timed at
    a few of the lengths, and not in a prefill.
    """
    exact = exact.cast(settings.dtype)
    variants = timed_variants(exact, settings, groups)
    lengths, note = possible_lengths(exact.model, settings.lengths)
    notes = [note] if note else []
    generation = [PREFILL, DECODING] if exact.kind == "decoder" else []
    for measurement in (FORWARD, *([TRAINING] if settings.backward else []), *generation):
        timed = [one for one in variants if measurement != DECODING or one.label != WITHOUT_ATTENTION]
        sweep = partial(_sweep, study, exact, timed, settings, measurement, tokens, notes)
        single = sweep(lengths)
        if settings.throughput_batch_size > 1 and measurement != PREFILL:
            sweep(lengths_to_show(list(single), settings.length), settings.throughput_batch_size, single)
    return notes


def _sweep(
    study: Study,
    exact: ExactModel,
    variants: Sequence[Variant],
    settings: Settings,
    measurement: str,
    tokens: Sequence[int],
    notes: list[str],
    lengths: Sequence[int],
    batch_size: int = 1,
    single: Mapping[int, Record] | None = None,
) -> dict[int, Record]:
    """Measure at each length, unless the last one, or what `single` has of one sequence, predicts too much."""
    done: dict[int, Record] = {}
    name = measurement + (f" with {batch_size} sequences" if batch_size > 1 else "")
    models = {one.label: {"attention": one.attention, **one.options} for one in variants}
    # The time of exact attention grows with the square, and its memory too where all weights are in memory.
    quadratic = {"seconds"} | ({"peak_memory"} if exact.implementation == "eager" else set())
    for index, length in enumerate(lengths):
        conditions = exact.conditions(measurement, length=length, batch_size=batch_size, options=models)
        reason = None
        if study.records.latest(conditions) is None and (single or done):
            last = max(done, default=length)
            known, growth = (single[length], batch_size) if single else (done[last], length / last)
            device = exact.model.device
            reason = reason_to_skip(known.values, growth, settings.seconds, device, set() if single else quadratic)
        if reason is None:
            study.progress.status(f"{name}: {length:,} tokens", index, len(lengths))
            function = partial(_time, variants, settings, measurement, tokens, length, batch_size)
            try:
                done[length] = study.measure(conditions, function)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                reason = "the device has no more memory"
        if reason is not None:
            left = ", ".join(f"{length:,}" for length in lengths[index:])
            notes.append(f"{name} was not timed at {left} tokens: {reason}.")
            break
    return done


def _time(
    variants: Sequence[Variant],
    settings: Settings,
    measurement: str,
    tokens: Sequence[int],
    length: int,
    batch_size: int,
) -> Values:
    """Time all variants in the same rounds; each value says of which one it is."""
    models = {one.label: one.load() for one in variants}
    common: dict[str, Any] = {"baseline": EXACT_LABEL, "batch_size": batch_size}
    if measurement == DECODING:
        results = measure_decoding(models, tokens, length, seconds=settings.seconds / 4, **common)
    else:
        flops = settings.flops and measurement != PREFILL and batch_size == 1
        options: dict[str, Any] = {"measurement": measurement, "memory": True, "flops": flops}
        results = measure_passes(models, tokens, length, seconds=settings.seconds, **common, **options)
    return [{**row, "label": one.label, "attention": one.attention} for one in variants for row in results[one.label]]


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


def lengths_to_show(lengths: Sequence[int], own: int | None) -> list[int]:
    """Return at most five lengths to show: the user's own if measured, and four that are evenly spread."""
    spread = [lengths[index * (len(lengths) - 1) // 3] for index in range(4)] if lengths else []
    return sorted({*spread, *(length for length in lengths if length == own)})
