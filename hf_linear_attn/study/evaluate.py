"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention.

An evaluation is a list of variants of a model and a list of measurements. Each pair is measured once, by a `Study`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.text import text_of
from ..measure.fidelity import measure_fidelity
from ..measure.speed import (
    DECODING,
    FORWARD,
    PREFILL,
    TRAINING,
    free_memory,
    measure_decoding,
    measure_passes,
    possible_lengths,
)
from ..measure.values import Values, value
from ..patching import patch_report
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.formatting import fixed, format_bytes
from ..utils.progress import ConsoleProgress, Progress, report_batches
from ..utils.timing import MIN_ROUNDS
from .options import EvaluateConfig, EvaluationData, with_options
from .prepare import ExactModel, Measurement, PreparedModel, inputs_text, prepare
from .results import Evaluation
from .study import Record, Study, check_study, open_study
from .variants import EXACT_LABEL, WITHOUT_ATTENTION, Loader, timed_variants, variants_of

#: Seconds that one length may take in any case: without long inputs there is little to see.
LONGEST_WAIT = 120.0

#: The share of the free memory that a measurement may be expected to need.
MEMORY_SHARE = 0.8

Examples = Callable[[ExactModel, Mapping[str, Loader]], Mapping[str, Any]]
"""Data frames by title, from the exact model and from converted ones by their label."""


def evaluate(
    model: Any,
    data: Any = None,
    *,
    tokenizer: Any = None,
    output: str | Path | None = None,
    progress: Progress | None = None,
    config: EvaluateConfig | None = None,
    timing: bool = True,
    examples: Examples | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate mechanisms on a model: quality before and after attention transfer, speed, memory, operations.

        evaluation = evaluate("gpt2", "mine.txt", attention=["hedgehog", "window"], length=4096)
        evaluation.summary()      # one row per mechanism
        evaluation.table          # tidy records: one row per value
        evaluation.conclusions()  # one sentence per mechanism
        evaluation.report("out")  # a page with plots

    The model stays as it is: mechanisms are patched into copies that share its weights.

    Args:
        model: A folder or a repository on the Hub, or a loaded model with exact attention: a causal language model, an
            encoder, or (with a task) a fine-tuned classifier.
        data: The path of a text file, a list of documents, or an `EvaluationData`. None is enough for an encoder, which
            is then measured on the documentation that comes with Python.
        tokenizer: The tokenizer of a loaded model; None: the one that its `name_or_path` leads to.
        output: A folder where every record is stored as soon as it is known. With `resume=True` an interrupted
            evaluation continues there. None: in memory.
        progress: Told what is being done.
        config: All options at once.
        timing: Whether to measure speed and memory, too.
        examples: Makes tables for a person to read, which come first in the report.
        **options: Fields of `EvaluateConfig` and of its sections `data` and `speed`, such as `attention`, `steps`,
            `seeds`, `lengths`, `task`, `quick`.

    Returns:
        An `Evaluation`.

    Raises:
        ValueError, TypeError, OSError: Options, a model or data that cannot be used. Nothing has been measured then.
        ImportError: pandas is missing; with a task or STS-B, a package of the extra `train`.
    """
    start = time.perf_counter()
    require_packages("pandas", extra="demo", purpose="evaluate")
    progress, text = progress or Progress(), None
    if data is not None and not isinstance(data, (str, Path, EvaluationData)):
        data, text = None, text_of(list(data), "the given documents")
    config = with_options(config or EvaluateConfig(), options, data)
    where: dict[str, Any] = {"resume": config.resume, "overwrite": config.overwrite}
    check_study(output, **where)
    progress.log(f"Loading {config.name or getattr(model, 'name_or_path', model)} ...")
    models = prepare(model, config, tokenizer, text)
    first, device = models[0], models[0].exact.model.device
    with open_study(output, "evaluate", asdict(first.resolved), device=device, progress=progress, **where) as study:
        for one in models:
            facts = one.inputs.facts
            counts = f"{inputs_text(facts['train'])} to train on, {inputs_text(facts['held_out'])} held out"
            study.progress.log(f"Data: {facts['source']}: {facts['rows']}; {counts}")
        converted = [measure_quality(study, one) for one in models]
        notes: list[str] = []
        if timing:
            notes = measure_speed(study, first)
        tables = examples(first.exact, converted[0]) if examples is not None else {}
    groups = [group for one in models for group in one.groups]
    info = {
        "model": first.exact.facts(),
        "data": first.inputs.facts,
        "tasks": [{"task": one.task, "model": one.exact.name, **one.inputs.facts} for one in models[1:]],
        "settings": asdict(first.resolved),
        "environment": environment(device),
        "backend": first.exact.device["backend"],
        "scores": [asdict(score) for one in models for score in one.scores],
        "checkpoints": {group.label: [Path(folder).name for folder in group.folders] for group in groups},
        "quick": config.quick,
        "notes": notes,
        "records": study.records.used,
        "runs": len(study.records.runs),
        "examples": {title: frame.reset_index().to_dict("list") for title, frame in tables.items()},
        "created": utc_now(),
        "seconds": time.perf_counter() - start,
    }
    return Evaluation(study.records.to_frame(study.records.used), json_safe(info), study.records)


def run_evaluate(config: EvaluateConfig, *, console: Any = None, examples: Examples | None = None) -> Evaluation:
    """Evaluate, write the report to `config.output`, show the summary, and return the `Evaluation`.

    It raises as `evaluate` does, and an ImportError where a package of the extra `demo` is missing.
    """
    require_packages("pandas", "matplotlib", "jinja2", "tabulate", extra="demo", purpose="A report")
    if config.model is None:
        raise ValueError("No model: give a local folder or a repository on the Hub.")
    with ConsoleProgress(console) as screen:
        evaluation = evaluate(config.model, output=config.output, progress=screen, config=config, examples=examples)
    evaluation.save(config.output)
    path = evaluation.report(config.output)
    for title, frame in evaluation.examples().items():
        screen.log(title)
        screen.table(frame)
    screen.table(evaluation.summary())
    screen.table(evaluation.quality_table())
    conclusions = (f"{one.label}: {one.sentence}" for one in evaluation.conclusions())
    for line in (*conclusions, *evaluation.warnings()):
        screen.log(f"• {line}")
    screen.log(f"Report: {path}")
    return evaluation


def of_mechanisms(one: PreparedModel) -> list[Measurement]:
    """Return what is measured of linear attention only: how near each head comes to exact attention, and sizes."""

    def fidelity(model: PreTrainedModel, on_batch: Callable[[int, int], None]) -> Values:
        return measure_fidelity(model, report_batches(one.inputs.fidelity, on_batch)).values()

    def parameters(model: PreTrainedModel, _: Any) -> Values:
        return [value("learned_parameters", patch_report(model).parameters)]

    data = {"data": one.inputs.hash, **one.inputs.facts["fidelity"]}
    conditions = one.exact.conditions
    return [(conditions("fidelity", settings=data), fidelity), (conditions("parameters"), parameters)]


def measure_quality(study: Study, one: PreparedModel) -> dict[str, Loader]:
    """Measure every variant of a model; return the converted ones, by their label."""
    converted: dict[str, Loader] = {}
    rows = list(variants_of(one, study))
    of_linear = [*one.inputs.measurements, *(() if one.task else of_mechanisms(one))]
    task = f"{one.task}: " if one.task else ""
    for number, variants in enumerate(rows, start=1):
        texts: dict[str, list[str]] = {score.title: [] for score in one.scores}
        label = ""
        for variant in variants:
            label = variant.label
            status = f"{task}{label} ({number} of {len(rows)})"
            measurements = of_linear if variant.is_linear else one.inputs.measurements
            records = variant.measure(study, measurements, status)
            for score in one.scores:
                result = records[score.measurement].value(score.metric)
                texts[score.title] += [] if result is None else [fixed(result, score.digits)]
            if variant.is_linear:
                converted[label] = variant.load
        if label:
            results = ", ".join(f"{title} " + " → ".join(part) for title, part in texts.items())
            study.progress.log(f"{task}{label}: {results}")
    return converted


def measure_speed(study: Study, one: PreparedModel) -> list[str]:
    """Time all variants of a model at every length; return what was left out, and why.

    One record holds all of them: a speedup is always a ratio within the same rounds. Operations are counted for one
    sequence: a batch has so many times as many, and a prefill as many as a forward pass. Several sequences are timed at
    a few of the lengths, and not in a prefill.
    """
    resolved, tokens, exact = one.resolved, one.inputs.tokens, one.exact.cast(one.resolved.dtype)
    variants = timed_variants(exact, resolved, one.groups)
    lengths, note = possible_lengths(exact.model, resolved.lengths)
    notes = [note] if note else []
    # The time of exact attention grows with the square, and its memory too where all weights are in memory.
    quadratic = {"seconds"} | ({"peak_memory"} if exact.implementation == "eager" else set())

    def sweep(
        measurement: str, lengths: Sequence[int], batch_size: int = 1, single: Mapping[int, Record] | None = None
    ) -> dict[int, Record]:
        """Measure at each length, unless the last one, or what `single` has of one sequence, predicts too much."""
        done: dict[int, Record] = {}
        name = measurement + (f" with {batch_size} sequences" if batch_size > 1 else "")
        timed = {item.label: item for item in variants if measurement != DECODING or item.label != WITHOUT_ATTENTION}
        models = {label: {"attention": item.attention, **item.options} for label, item in timed.items()}

        def time_all(length: int) -> Values:
            """Time all variants in the same rounds; each value says of which one it is."""
            loaded = {label: item.load() for label, item in timed.items()}
            common: dict[str, Any] = {"baseline": EXACT_LABEL, "batch_size": batch_size}
            if measurement == DECODING:
                results = measure_decoding(loaded, tokens, length, seconds=resolved.seconds / 4, **common)
            else:
                common |= {"flops": resolved.flops and measurement != PREFILL and batch_size == 1, "memory": True}
                common |= {"measurement": measurement, "seconds": resolved.seconds}
                results = measure_passes(loaded, tokens, length, **common)
            rows = ((row, timed[label]) for label in timed for row in results[label])
            return [{**row, "label": item.label, "attention": item.attention} for row, item in rows]

        for index, length in enumerate(lengths):
            given = {"seconds": resolved.seconds, "flops": resolved.flops}
            sizes = {"length": length, "batch_size": batch_size}
            conditions = exact.conditions(measurement, **sizes, options=models, settings=given)
            reason = None
            if study.records.latest(conditions) is None and (single or done):
                last = max(done, default=length)
                known, growth = (single[length], batch_size) if single else (done[last], length / last)
                powers = set() if single else quadratic
                reason = reason_to_skip(known.values, growth, resolved.seconds, exact.model.device, powers)
            if reason is None:
                study.progress.status(f"{name}: {length:,} tokens", index, len(lengths))
                try:
                    done[length] = study.measure(conditions, partial(time_all, length))
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    reason = "the device has no more memory"
            if reason is not None:
                left = ", ".join(f"{length:,}" for length in lengths[index:])
                notes.append(f"{name} was not timed at {left} tokens: {reason}.")
                break
        return done

    generation = [PREFILL, DECODING] if exact.kind == "decoder" else []
    for measurement in (FORWARD, *([TRAINING] if resolved.backward else []), *generation):
        single = sweep(measurement, lengths)
        if resolved.throughput_batch_size > 1 and measurement != PREFILL:
            sweep(measurement, lengths_to_show(list(single), resolved.length), resolved.throughput_batch_size, single)
    return notes


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
