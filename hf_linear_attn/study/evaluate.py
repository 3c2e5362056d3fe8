"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention.

An evaluation is a list of variants of a model and a list of metrics. Each pair is measured once, by a `Study`; of
times, all variants together at each length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.config import DataConfig
from ..data.text import evenly_spread
from ..measure.fidelity import FidelityMetric
from ..measure.metric import Metric
from ..mechanisms.softmax import EXACT
from ..registry import ATTENTIONS
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.formatting import fixed
from ..utils.options import OptionError
from ..utils.progress import ConsoleProgress, Progress
from .checkpoint_groups import CheckpointGroup, find_checkpoints
from .evaluated_model import EvaluatedModel, load_evaluated_model
from .evaluation import Evaluation, Measured
from .kinds import held_out_batches
from .options import (
    DECODER_ATTENTIONS,
    ENCODER_ATTENTIONS,
    QUICK_ATTENTIONS,
    QUICK_LENGTHS,
    USUAL_LENGTHS,
    EvaluateConfig,
    with_options,
)
from .study import Study, check_study, open_study
from .timing import SpeedStudy
from .variants import Variant, check_fits, timed_variants, variants_of

Examples = Callable[[EvaluatedModel, Mapping[str, Callable[[], PreTrainedModel]]], Mapping[str, Any]]
"""Data frames by title, from the exact model and loaders of linear ones by their label."""

#: Batches that the fidelity is measured on, evenly spread: rows are sorted, and a window attends to short ones exactly.
FIDELITY_BATCHES = 4


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

        evaluation = evaluate("gpt2", "mine.txt", attention=["hedgehog", "window"], max_length=1024)
        evaluation.summary()      # one row per mechanism
        evaluation.table          # every number, one row per measurement
        evaluation.conclusions()  # one sentence per mechanism
        evaluation.report("out")  # a page with plots

    The model stays as it is: mechanisms are patched into copies that share its weights. The rows that it is measured on
    are those of `convert` with the same data, unless it is `quick`, and so are the numbers.

    Args:
        model: A folder or a repository on the Hub, or a loaded model with exact attention: a causal language model, an
            encoder, or (with a task) a fine-tuned classifier.
        data: The path of a text file, a list of documents, or a `DataConfig`. None is enough for an encoder, which is
            then measured on the documentation that comes with Python.
        tokenizer: The tokenizer of a loaded model; None: the one that its `name_or_path` leads to.
        output: A folder where every record is stored as soon as it is known. With `resume=True` an interrupted
            evaluation continues there. None: in memory.
        progress: Told what is being done.
        config: All options at once, but for `model` and `output`, which are arguments here.
        timing: Whether to measure speed and memory, too.
        examples: Makes tables for a person to read, which come first in the report.
        **options: Fields of `EvaluateConfig` and of its sections `data` and `speed`, such as `attention`, `steps`,
            `seeds`, `lengths`, `task`, `quick`.

    Raises:
        ValueError, TypeError, OSError: Options, a model or data that cannot be used. Nothing has been measured then.
        ImportError: A package of the extra `train` is missing.
    """
    start = time.perf_counter()
    progress, documents = progress or Progress(), None
    if data is not None and not isinstance(data, (str, Path, DataConfig)):
        data, documents = None, list(data)
    config = with_options(config or EvaluateConfig(), options, data)
    reopening: dict[str, Any] = {"resume": config.resume, "overwrite": config.overwrite}
    check_study(output, **reopening)
    for name in config.attention or ():
        check_mechanism(name)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    source = model.name_or_path if isinstance(model, PreTrainedModel) else model
    progress.log(f"Loading {config.name or source} ...")
    evaluated = load_evaluated_model(model, config, tokenizer, documents)
    groups = find_checkpoints(config.converted, config.baseline, evaluated.model.config)
    attentions = chosen_attentions(config, evaluated, groups)
    settings = completed_settings(config, attentions)
    steps, lengths = settings["steps"], settings["lengths"]
    device = evaluated.model.device
    with open_study(output, "evaluate", settings, device=device, progress=progress, **reopening) as study:
        task_data = evaluated.data
        for line in task_data.report(evaluated.limit):
            progress.log(line)
        measured, linear = measure_quality(
            study, evaluated, variants_of(evaluated, study, attentions, config.seeds, steps, groups)
        )
        notes: list[str] = []
        if evaluated.data.is_encoder_decoder:
            notes.append("Encoder-decoders are not timed: their time depends on two lengths.")
        elif timing:
            exact = evaluated.cast(config.speed.dtype)
            timed = timed_variants(exact, attentions, config.seeds[0], groups, max(lengths))
            speed = SpeedStudy(study, exact, timed, settings["seconds"], flops=not config.quick)
            speed.measure(lengths, backward=config.speed.backward, batch_size=config.speed.batch_size)
            measured += [*map(Measured.of_times, speed.records)]
            notes += speed.notes
        tables = examples(evaluated, linear) if examples is not None else {}
    return Evaluation(
        model=evaluated.facts(),
        data={"source": task_data.name, "rows": task_data.row_summary, **task_data.held_out_facts, **task_data.facts},
        settings=json_safe(settings),
        environment=environment(device),
        backend=evaluated.hardware["backend"],
        scores=tuple(metric.score for metric in evaluated.metrics.values()),
        measured=tuple(chain.from_iterable(measured)),
        checkpoints={group.label: [Path(folder).name for folder in group.folders] for group in groups},
        notes=tuple(notes),
        examples={title: json_safe(frame.reset_index().to_dict("list")) for title, frame in tables.items()},
        created=utc_now(),
        seconds=time.perf_counter() - start,
    )


def chosen_attentions(
    config: EvaluateConfig, evaluated: EvaluatedModel, groups: Sequence[CheckpointGroup]
) -> tuple[str, ...]:
    """Return the mechanisms to compare, by default the usual ones; a ValueError if one does not fit, or if none is."""
    attentions = config.attention or ()
    if config.attention is None and not config.converted:
        usual = DECODER_ATTENTIONS if evaluated.kind.is_causal else ENCODER_ATTENTIONS
        attentions = QUICK_ATTENTIONS if config.quick else usual
    for name in attentions:
        check_fits(evaluated.model, name, config.seeds[0])
    if not attentions and not any(group.layers for group in groups):
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    return attentions


def completed_settings(config: EvaluateConfig, attentions: Sequence[str]) -> dict[str, Any]:
    """Return all options, with what they leave open: the steps of transfers, and what is timed for how long."""
    usual_steps, usual_seconds = (25, 1.5) if config.quick else (100, 12.0)
    usual_lengths = QUICK_LENGTHS if config.quick else USUAL_LENGTHS
    return {
        **asdict(config),
        "attention": attentions,
        "steps": usual_steps if config.steps is None else config.steps,
        "lengths": sorted({*(config.speed.lengths or usual_lengths), *filter(None, [config.data.max_length])}),
        "seconds": config.speed.seconds or usual_seconds,
    }


def run_evaluate(config: EvaluateConfig, *, console: Any = None, examples: Examples | None = None) -> Evaluation:
    """Evaluate, write the report to `config.output`, show the summary, and return the `Evaluation`.

    It raises as `evaluate` does, and an ImportError where a package of the extra `demo` is missing.
    """
    require_packages("matplotlib", "jinja2", extra="demo", purpose="A report")
    if config.model is None:
        raise OptionError("model", "is missing: give a local folder or a repository on the Hub.")
    with ConsoleProgress(console) as screen:
        evaluation = evaluate(config.model, output=config.output, progress=screen, config=config, examples=examples)
    evaluation.save(config.output)
    path = evaluation.report(config.output)
    for title, frame in evaluation.example_tables().items():
        screen.log(title)
        screen.table(frame)
    screen.table(evaluation.summary())
    screen.table(evaluation.quality_table())
    conclusions = [f"{conclusion.label}: {conclusion.sentence}" for conclusion in evaluation.conclusions()]
    for line in (*conclusions, *evaluation.warnings()):
        screen.log(f"• {line}")
    screen.log(f"Report: {path}")
    return evaluation


def measure_quality(
    study: Study, evaluated: EvaluatedModel, variants_by_row: Iterable[Sequence[Variant]]
) -> tuple[list[list[Measured]], dict[str, Callable[[], PreTrainedModel]]]:
    """Measure every variant of a model, by rows of the summary.

    Returns the numbers, and a loader of the last linear one of each label.
    """
    fidelity: dict[str, Metric] = {}
    if not evaluated.data.is_encoder_decoder:
        batches = held_out_batches(evaluated.data)
        fidelity["fidelity"] = FidelityMetric(evenly_spread(batches, FIDELITY_BATCHES))
    measured: list[list[Measured]] = []
    linear: dict[str, Callable[[], PreTrainedModel]] = {}
    for variants in variants_by_row:
        label = variants[0].label
        texts: dict[str, list[str]] = {name: [] for name in evaluated.metrics}
        for variant in variants:
            metrics = {**evaluated.metrics, **fidelity} if variant.is_linear else evaluated.metrics
            records = variant.measure(study, evaluated, metrics)
            measured.append([Measured.of(record, label) for record in records.values()])
            for name, metric in evaluated.metrics.items():
                number = records[name].numbers.get(metric.score.metric)
                texts[name].append("–" if number is None else fixed(number, metric.score.digits))
            if variant.is_linear:
                linear[label] = variant.load
        results = [f"{evaluated.metrics[name].score.title} " + " → ".join(part) for name, part in texts.items()]
        study.progress.log(f"{label}: {', '.join(results)}")
    return measured, linear


def check_mechanism(name: str) -> None:
    """Raise a ValueError for an unknown mechanism, and for exact attention, which others are compared with."""
    ATTENTIONS.get(name)
    if name == EXACT:
        raise ValueError(f"attention {name!r} is the exact attention, which is always measured. Name another one.")
