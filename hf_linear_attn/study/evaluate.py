"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention.

An evaluation is a list of variants of a model and a list of measurements. Each pair is measured once, by a `Study`; of
times, all variants together at each length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..data.text import text_of
from ..measure.fidelity import measure_fidelity
from ..measure.values import Values, value
from ..patching import patch_report
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.formatting import fixed
from ..utils.progress import ConsoleProgress, Progress, report_batches
from .options import EvaluateConfig, EvaluationData, with_options
from .prepare import EvaluatedModel, ExactModel, Measurement, inputs_text, prepare
from .results import Evaluation
from .study import Study, check_study, open_study
from .timing import measure_speed
from .variants import Loader, variants_of

Examples = Callable[[ExactModel, Mapping[str, Loader]], Mapping[str, Any]]
"""Data frames by title, from the exact model and loaders of linear ones by their label."""


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
        config: All options at once, but for `model` and `output`, which are arguments here.
        timing: Whether to measure speed and memory, too.
        examples: Makes tables for a person to read, which come first in the report.
        **options: Fields of `EvaluateConfig` and of its sections `data` and `speed`, such as `attention`, `steps`,
            `seeds`, `lengths`, `task`, `quick`.

    Returns:
        An `Evaluation`.

    Raises:
        ValueError, TypeError, OSError: Options, a model or data that cannot be used. Nothing has been measured then.
        ImportError: With a task or STS-B, a package of the extra `train` is missing.
    """
    start = time.perf_counter()
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
        linear = [measure_quality(study, one) for one in models]
        notes = measure_speed(study, first) if timing else []
        tables = examples(first.exact, linear[0]) if examples is not None else {}
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
    require_packages("matplotlib", "jinja2", "tabulate", extra="demo", purpose="A report")
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


def of_mechanisms(one: EvaluatedModel) -> list[Measurement]:
    """Return what is measured of linear attention only: how near each head comes to exact attention, and sizes."""

    def fidelity(model: PreTrainedModel, on_batch: Callable[[int, int], None]) -> Values:
        return measure_fidelity(model, report_batches(one.inputs.fidelity, on_batch)).values()

    def parameters(model: PreTrainedModel, _: Any) -> Values:
        return [value("learned_parameters", patch_report(model).parameters)]

    data = {"data": one.inputs.hash, **one.inputs.facts["fidelity"]}
    conditions = one.exact.conditions
    return [(conditions("fidelity", settings=data), fidelity), (conditions("parameters"), parameters)]


def measure_quality(study: Study, one: EvaluatedModel) -> dict[str, Loader]:
    """Measure every variant of a model; return a loader of the last one with linear attention of each label."""
    linear: dict[str, Loader] = {}
    rows = [row for row in variants_of(one, study) if row]
    of_linear = [*one.inputs.measurements, *(() if one.task else of_mechanisms(one))]
    task = f"{one.task}: " if one.task else ""
    for number, variants in enumerate(rows, start=1):
        texts: dict[str, list[str]] = {score.title: [] for score in one.scores}
        label = variants[0].label
        for variant in variants:
            status = f"{task}{label} ({number} of {len(rows)})"
            measurements = of_linear if variant.is_linear else one.inputs.measurements
            records = variant.measure(study, measurements, status)
            for score in one.scores:
                result = records[score.measurement].value(score.metric)
                texts[score.title] += [] if result is None else [fixed(result, score.digits)]
            if variant.is_linear:
                linear[label] = variant.load
        results = ", ".join(f"{title} " + " → ".join(part) for title, part in texts.items())
        study.progress.log(f"{task}{label}: {results}")
    return linear
