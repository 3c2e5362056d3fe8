"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention.

An evaluation is a list of variants of a model and a list of measurements. Each pair is measured once, by a `Study`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints import read_tokenizer
from ..data.config import DataConfig
from ..data.task_data import read_documents
from ..data.tasks import TASKS
from ..data.text import Text, text_of
from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from ..measure.fidelity import measure_fidelity
from ..measure.quality import Score
from ..measure.values import Values, value
from ..patching import patch_report
from ..registry import ATTENTIONS
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.formatting import fixed
from ..utils.models import torch_device
from ..utils.options import OptionError
from ..utils.progress import ConsoleProgress, Progress, report_batches
from . import loading
from .inputs import (
    Inputs,
    Measurement,
    inputs_text,
    recall_measurement,
    score_of,
    sentence_pairs,
    task_inputs,
    text_inputs,
)
from .results import Evaluation
from .settings import (
    PYTHON_DOCUMENTATION,
    EvaluateConfig,
    EvaluationData,
    Settings,
    resolve_settings,
    split_task,
    with_options,
)
from .study import Study, check_study, open_study
from .timings import measure_speed
from .variants import Loader, Variant, checkpoints, mechanism_stages, references

Examples = Callable[[loading.ExactModel, Mapping[str, Loader]], Mapping[str, Any]]
"""Data frames by title, from the exact model and from converted ones by their label."""


@dataclass(frozen=True)
class Evaluated:
    """One model with all that is measured of it."""

    exact: loading.ExactModel
    inputs: Inputs
    settings: Settings
    measurements: tuple[Measurement, ...]  # of every variant
    groups: tuple[loading.CheckpointGroup, ...]  # checkpoints, with labels
    task: str = ""  # a further task that this model is for; only its scores are measured then

    @property
    def scores(self) -> list[Score]:
        """The scores, the most important first."""
        return [score for conditions, _ in self.measurements if (score := score_of(conditions)) is not None]

    def of_mechanisms(self) -> list[Measurement]:
        """Return what is measured of linear attention only: how near each head comes to exact attention, and sizes."""

        def fidelity(model: PreTrainedModel, on_batch: Callable[[int, int], None]) -> Values:
            return measure_fidelity(model, report_batches(self.inputs.fidelity, on_batch)).values()

        def parameters(model: PreTrainedModel, _: Any) -> Values:
            return [value("learned_parameters", patch_report(model).parameters)]

        data = {"data": self.inputs.hash, **self.inputs.facts["fidelity"]}
        conditions = self.exact.conditions
        return [(conditions("fidelity", settings=data), fidelity), (conditions("parameters"), parameters)]

    def rows(self, study: Study) -> Iterator[tuple[Iterable[Variant], bool]]:
        """Yield the variants of each row of the summary, and whether they are linear."""
        for reference in references(self.exact.model):
            yield [reference], False
        for name in self.settings.attentions:
            for seed in self.settings.seeds:
                yield mechanism_stages(study, self.exact, self.inputs, self.settings, name, seed), True
        for group in self.groups:
            for variant in checkpoints(self.exact, group):
                yield [variant], bool(group.layers)


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
    config, progress, text = with_options(config or EvaluateConfig(), options), progress or Progress(), None
    if isinstance(data, EvaluationData):
        config = replace(config, data=data)
    elif isinstance(data, (str, Path)):
        config = replace(config, data=replace(config.data, dataset=str(data)))
    elif data is not None:
        text = text_of(list(data), "the given documents")
    where: dict[str, Any] = {"resume": config.resume, "overwrite": config.overwrite}
    check_study(output, **where)
    progress.log(f"Loading {config.name or getattr(model, 'name_or_path', model)} ...")
    models = prepare(model, config, tokenizer, text)
    first, device = models[0], models[0].exact.model.device
    with open_study(output, "evaluate", asdict(first.settings), device=device, progress=progress, **where) as study:
        for one in models:
            facts = one.inputs.facts
            counts = f"{inputs_text(facts['train'])} to train on, {inputs_text(facts['held_out'])} held out"
            study.progress.log(f"Data: {facts['source']}: {facts['rows']}; {counts}")
        converted = [measure_quality(study, one) for one in models]
        notes: list[str] = []
        if timing and first.settings.lengths:
            notes = measure_speed(study, first.exact, first.settings, first.groups, first.inputs.tokens)
        tables = examples(first.exact, converted[0]) if examples is not None else {}
    info = {
        **facts_of(models),
        "quick": config.quick,
        "notes": notes,
        "records": study.records.used,
        "runs": len(study.records.runs),
        "examples": {title: frame.reset_index().to_dict("list") for title, frame in tables.items()},
        "created": utc_now(),
        "seconds": time.perf_counter() - start,
    }
    return Evaluation(study.records.to_frame(study.records.used), json_safe(info), study.records)


def facts_of(models: Sequence[Evaluated]) -> dict[str, Any]:
    """Return what a report says of the models, their data and the machine."""
    first = models[0]
    groups = [group for one in models for group in one.groups]
    return {
        "model": first.exact.facts(),
        "data": first.inputs.facts,
        "tasks": [{"task": one.task, "model": one.exact.name, **one.inputs.facts} for one in models[1:]],
        "settings": asdict(first.settings),
        "environment": environment(first.exact.model.device),
        "backend": first.exact.device["backend"],
        "scores": [asdict(score) for one in models for score in one.scores],
        "checkpoints": {group.label: [Path(folder).name for folder in group.folders] for group in groups},
    }


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


def measure_quality(study: Study, one: Evaluated) -> dict[str, Loader]:
    """Measure every variant of a model; return the converted ones, by their label."""
    converted: dict[str, Loader] = {}
    rows = list(one.rows(study))
    measurements = {False: [*one.measurements], True: [*one.measurements, *([] if one.task else one.of_mechanisms())]}
    task = f"{one.task}: " if one.task else ""
    for number, (variants, linear) in enumerate(rows, start=1):
        texts: dict[str, list[str]] = {score.title: [] for score in one.scores}
        label = ""
        for variant in variants:
            label = variant.label
            status = f"{task}{label} ({number} of {len(rows)})"
            records = variant.measure(study, measurements[linear], status)
            for score in one.scores:
                result = records[score.measurement].value(score.metric)
                texts[score.title] += [] if result is None else [fixed(result, score.digits)]
            if linear:
                converted[label] = variant.load
        if label:
            results = ", ".join(f"{title} " + " → ".join(part) for title, part in texts.items())
            study.progress.log(f"{task}{label}: {results}")
    return converted


def prepare(model: Any, config: EvaluateConfig, tokenizer: Any = None, text: Text | None = None) -> list[Evaluated]:
    """Load the model, and those of further tasks, with their data; every error of the input is raised here."""
    for name in config.attention or ():
        loading.check_mechanism(name)
    for entry in config.data.task or ():
        TASKS.get(split_task(entry)[0])
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    first = _prepare(model, config.for_task(None), tokenizer, text)
    _check_mechanisms(first)
    models = [first]
    for task, folder in config.data.other_tasks.items():
        models.append(_prepare(folder, replace(config.for_task(task), name=None), None, None, first))
    labels: dict[str, str] = {}  # groups of equal identity have equal labels, such as "hedgehog (converted)"
    for group in itertools.chain.from_iterable(one.groups for one in models):
        base = f"{group.attention} ({group.state})"
        names = itertools.chain([base], (f"{base} {number}" for number in itertools.count(2)))
        labels.setdefault(group.identity, next(name for name in names if name not in labels.values()))
    return [
        replace(one, groups=tuple(replace(group, label=labels[group.identity]) for group in one.groups))
        for one in models
    ]


def _prepare(
    source: Any, config: EvaluateConfig, tokenizer: Any, text: Text | None, first: Evaluated | None = None
) -> Evaluated:
    """Load one model with its data. That of a further task has the mechanisms, seeds and steps of the `first`."""
    device, task, path = torch_device(config.device), config.data.own_task, config.data.dataset
    loaded = isinstance(source, PreTrainedModel)
    if loaded:
        name, kind, model_config = Path(source.name_or_path).name, loading.kind_of(source), source.config
        loading.check_exact(source, name, kind)
    else:
        name, kind, model_config = loading.describe_source(str(source), task, path)
    name = config.name or name or type(source).__name__
    tokenizer = tokenizer or read_tokenizer(str(getattr(source, "name_or_path", source)))
    _check_data(kind, config, name, text)
    groups = loading.find_checkpoints(config.converted or (), config.baseline or (), model_config)
    if text is None and kind != "classifier":
        dataset = None if path == PYTHON_DOCUMENTATION else path
        columns, documents = config.data.text_columns, config.data.documents
        text = read_documents(DataConfig(dataset=dataset, text_columns=columns, documents=documents))
    title = task or Path(str(path)).name
    model = source if loaded else loading.load_exact(str(source), kind, device, task=title)
    table = has_position_table(model)
    settings = resolve_settings(config, kind, longest_input(model), loading.dtype_name(model), table=table)
    if first is not None:
        settings = replace(settings, **{key: getattr(first.settings, key) for key in ("attentions", "seeds", "steps")})
        _check_like_first(str(source), task, model, groups, first)
    exact = loading.ExactModel.of(model, tokenizer, kind, name)
    if text is None or kind == "classifier":
        options = {**vars(config.data), "task": task}
        del options["sts"]
        inputs = task_inputs(exact, DataConfig(**options), settings)
    else:
        inputs = text_inputs(exact, text, settings)
    measurements = [*inputs.measurements]
    if config.data.sts is not None:
        measurements.insert(0, sentence_pairs(exact, config.data.sts, settings, config.data.max_eval_samples))
        inputs.facts["sentence_pairs"] = f"STS-B validation, {Path(config.data.sts).name}"
    if config.recall_lengths:
        measurements.append(recall_measurement(exact, config.recall_lengths, config.seed))
    return Evaluated(exact, inputs, settings, tuple(measurements), tuple(groups), task or "" if first else "")


def _check_like_first(
    source: str, task: str | None, model: PreTrainedModel, groups: Sequence[loading.CheckpointGroup], first: Evaluated
) -> None:
    """Raise a ValueError where the model of a further task is not made as the first one: time is measured on that."""
    loading.check_same_shape(source, model.config, first.exact.model.config)
    identities = [group.identity for group in first.groups]
    for group in groups:
        if group.layers and group.identity not in identities:
            problem = f"of the task {task!r}, has layers that no converted checkpoint of MODEL has"
            remedy = "Give one converted in the same way: --converted FOLDER."
            raise ValueError(f"{', '.join(group.folders)}, {problem}; time is measured on MODEL. {remedy}")


def _check_data(kind: str, config: EvaluateConfig, name: str, text: Text | None) -> None:
    if kind == "decoder" and config.data.dataset is None and text is None:
        raise ValueError(f"{name!r} is a causal language model: give a text to measure it on with --data.dataset FILE.")
    if kind == "classifier" and config.data.own_task is None and config.data.dataset is None:
        raise ValueError(f"{name!r} is a classifier: give its task (--data.task) or labelled data (--data.dataset).")
    if kind != "encoder" and config.data.sts is not None:
        raise OptionError("data.sts", f"needs an encoder without a head; {name!r} is a {kind}. Leave it out.")
    if kind == "classifier" and config.recall_lengths:
        raise ValueError(f"recall_lengths are for decoders and for encoders without a head; {name!r} is a classifier.")
    if kind != "decoder" and (config.context or config.stride):
        raise ValueError("context and stride are those of a perplexity, and this is no causal language model.")


def _check_mechanisms(one: Evaluated) -> None:
    """Raise for mechanisms that this model cannot have, before anything is measured."""
    settings = one.settings
    if not settings.attentions and not any(group.layers for group in one.groups):
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    for name in settings.attentions:
        options = loading.seed_options(ATTENTIONS.get(name), settings.seed)
        loading.check_fits(one.exact.model, name, "measured", **options)
