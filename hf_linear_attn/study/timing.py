"""How fast the variants of a model are: all of them in the same rounds, at every length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..measure.speed import DECODING, FORWARD, PREFILL, TRAINING, measure_decoding, measure_passes, possible_lengths
from ..utils.formatting import format_bytes
from ..utils.memory import free_memory
from ..utils.timing import MIN_ROUNDS
from .evaluated_model import EvaluatedModel
from .study import Record, Study
from .variants import EXACT_LABEL, WITHOUT_ATTENTION, Variant

#: Seconds that one length may take in any case: without long inputs there is little to see.
LONGEST_WAIT = 120.0

#: The share of the free memory that a measurement may be expected to need.
MEMORY_SHARE = 0.8


@dataclass
class SpeedStudy:
    """The variants of a model that are timed. One record holds all of them: a speedup is a ratio within its rounds."""

    study: Study
    evaluated: EvaluatedModel
    variants: Sequence[Variant]
    seconds: float  # to spend on each length
    flops: bool  # whether to count operations, in another pass of each model
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, and why

    def measure(self, lengths: Sequence[int], *, backward: bool, batch_size: int) -> None:
        """Time all variants at every length, and some of the lengths with several sequences at once.

        Operations are counted for one sequence: a batch has so many times as many, and a prefill as many as a forward
        pass. A prefill is not timed with several sequences.
        """
        lengths, note = possible_lengths(self.evaluated.model, lengths)
        generation = [PREFILL, DECODING] if self.evaluated.kind.is_causal else []
        for measurement in (FORWARD, *([TRAINING] if backward else []), *generation):
            single = self.sweep(measurement, lengths)
            if batch_size > 1 and measurement != PREFILL:
                timed = list(single)
                spread = [timed[index * (len(timed) - 1) // 3] for index in range(4)] if timed else []
                self.sweep(measurement, sorted({*spread}), batch_size, single)
        if note:
            self.notes.append(note)

    def of(self, measurement: str) -> dict[str, Variant]:
        """Return the variants by their label. A model without attention has nothing to decode from."""
        left_out = WITHOUT_ATTENTION if measurement == DECODING else None
        return {variant.label: variant for variant in self.variants if variant.label != left_out}

    def sweep(
        self, measurement: str, lengths: Sequence[int], batch_size: int = 1, single: Mapping[int, Record] | None = None
    ) -> dict[int, Record]:
        """Measure at each length, unless the last one, or what `single` has of one sequence, predicts too much."""
        done: dict[int, Record] = {}
        study, device = self.study, self.evaluated.model.device
        name = measurement + (f" with {batch_size} sequences" if batch_size > 1 else "")
        of = {
            label: {"attention": variant.attention, **variant.options}
            for label, variant in self.of(measurement).items()
        }
        # The time of exact attention grows with the square, and its memory too where all weights are in memory.
        is_eager = self.evaluated.model.config._attn_implementation == "eager"
        quadratic = {"seconds", "peak_memory"} if is_eager else {"seconds"}
        for index, length in enumerate(lengths):
            settings = {"seconds": self.seconds, "flops": self.flops}
            sizes = {"length": length, "batch_size": batch_size}
            conditions = self.evaluated.conditions(measurement, **sizes, options=of, settings=settings)
            reason = None
            if study.records.latest(conditions) is None and (single or done):
                last = max(done, default=length)
                before, growth = (single[length], batch_size) if single else (done[last], length / last)
                reason = reason_to_skip(before.numbers, growth, self.seconds, device, set() if single else quadratic)
            if reason is None:
                study.progress.status(f"{name}: {length:,} tokens", index, len(lengths))
                try:
                    done[length] = study.measure(conditions, partial(self.time_all, measurement, length, batch_size))
                    self.records.append(done[length])
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    reason = "the device has no more memory"
            if reason is not None:
                left = ", ".join(f"{length:,}" for length in lengths[index:])
                self.notes.append(f"{name} was not timed at {left} tokens: {reason}.")
                break
        return done

    def time_all(self, measurement: str, length: int, batch_size: int) -> dict[str, Any]:
        """Time all variants in the same rounds; return the numbers of each by its label."""
        models = {label: variant.load() for label, variant in self.of(measurement).items()}
        common: dict[str, Any] = {"baseline": EXACT_LABEL, "batch_size": batch_size}
        tokens = self.evaluated.tokens
        if measurement == DECODING:
            return measure_decoding(models, tokens, length, seconds=self.seconds / 4, **common)
        counts = self.flops and measurement != PREFILL and batch_size == 1
        common |= {"measurement": measurement, "seconds": self.seconds, "flops": counts, "memory": True}
        return measure_passes(models, tokens, length, **common)


def reason_to_skip(
    measured: Mapping[str, Mapping[str, Any]], growth: float, seconds: float, device: torch.device, quadratic: set[str]
) -> str | None:
    """Return why a measurement of `growth` times as many tokens would need too much memory or time; None: it would not.

    Args:
        measured: The numbers of all variants. A new measurement takes a warm-up and the least rounds of all of them,
            the memory of the one that needs most, and the caches of all.
        growth: By how much time and memory grow.
        seconds: The time that is meant for one length. 15 times as much is too long, but not below `LONGEST_WAIT`.
        device: Whose free memory counts.
        quadratic: The numbers that grow with the square in the exact model.
    """

    def expected(metric: str) -> list[float]:
        powers = {label: 2 if label == EXACT_LABEL and metric in quadratic else 1 for label in measured}
        return [(numbers.get(metric) or 0.0) * growth ** powers[label] for label, numbers in measured.items()]

    needed = max(expected("peak_memory"), default=0.0) + sum(expected("cache_bytes"))
    free = free_memory(device)
    if free is not None and needed > MEMORY_SHARE * free:
        return f"it would need about {format_bytes(needed)}, and {format_bytes(free)} are free"
    duration = (1 + MIN_ROUNDS) * sum(expected("seconds"))
    if duration > max(15 * seconds, LONGEST_WAIT):
        return f"it would take about {duration:.0f} s"
    return None
