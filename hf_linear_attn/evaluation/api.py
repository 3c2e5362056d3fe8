"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..data.config import DataConfig
from ..data.task_data import read_documents
from ..data.tasks import TASKS
from ..data.text import Text, text_of
from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from ..patching import patch_model
from ..registry import ATTENTIONS, list_attentions
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import check_output, open_output
from ..utils.models import shared_copy, torch_device
from . import models
from .config import (
    PYTHON_DOCUMENTATION,
    EvaluateConfig,
    EvaluationData,
    Settings,
    resolve_settings,
    split_task,
    with_options,
)
from .evaluator import Evaluator, measure_speed
from .inputs import sentence_pair_metric, task_inputs, text_inputs
from .metrics import QualityMetric, classification_metric, embedding_metric, perplexity_metric
from .progress import ConsoleProgress, Progress
from .records import LEARNED_FOLDER, RECORDS_FILE, Records
from .results import Evaluation

Examples = Callable[[Evaluator], Mapping[str, Any]]
"""Data frames by title, from the exact and the converted models of an evaluator."""

#: A folder with one of these holds a result of `evaluate`.
RESULTS = (RECORDS_FILE, LEARNED_FOLDER)

#: What all records of a folder have in common; another value needs another folder.
FIXED_SETTINGS = ("steps", "sequence_length", "seed", "context", "stride")


def evaluate(
    model: Any,
    data: Any = None,
    *,
    tokenizer: Any = None,
    output: str | Path | None = None,
    progress: Progress | None = None,
    config: EvaluateConfig | None = None,
    timing: bool = True,
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
        **options: Fields of `EvaluateConfig` and of its sections `data` and `speed`, such as `attention`, `steps`,
            `seeds`, `lengths`, `task`, `quick`.

    Returns:
        An `Evaluation`.

    Raises:
        ValueError, TypeError, OSError: Options, a model or data that cannot be used. Nothing has been measured then.
        ImportError: pandas is missing; with a task or STS-B, a package of the extra `train`.
    """
    require_packages("pandas", extra="demo", purpose="evaluate")
    config, documents = with_options(config or EvaluateConfig(), options), None
    if isinstance(data, EvaluationData):
        config = replace(config, data=data)
    elif isinstance(data, (str, Path)):
        config = replace(config, data=replace(config.data, dataset=str(data)))
    elif data is not None:
        documents = list(data)
    folder = None if output is None else Path(output)
    tool = "hf_linear_attn.evaluation.evaluate()"
    return _evaluate(model, config, folder, progress or Progress(), tool, tokenizer, documents, timing=timing)


def run_evaluate(
    config: EvaluateConfig,
    *,
    console: Any = None,
    tool: str = "hf-linear-attn evaluate",
    examples: Examples | None = None,
) -> Evaluation:
    """Evaluate, write the report to `config.output`, show the summary, and return the `Evaluation`.

    Args:
        config: The options.
        console: A rich console; None: stdout.
        tool: What the report calls this program.
        examples: Tables for a person to read, by their titles, for the end of screen and report.

    Raises:
        ValueError, OSError: Options, a model or data that cannot be used. Nothing has been measured or written then.
        ImportError: A package of the extra `demo` is missing; with a task or STS-B, one of `train`.
    """
    require_packages("pandas", "matplotlib", "jinja2", "tabulate", extra="demo", purpose=f"`{tool}`")
    if config.model is None:
        raise ValueError("No model: give a local folder or a repository on the Hub.")
    folder = Path(config.output)
    with ConsoleProgress(console) as screen:
        evaluation = _evaluate(config.model, config, folder, screen, tool, examples=examples)
    evaluation.save(folder)
    path = evaluation.report(folder)
    screen.table(evaluation.summary())
    conclusions = (f"{one.label}: {one.sentence}" for one in evaluation.conclusions())
    for line in (*conclusions, *evaluation.warnings()):
        screen.log(f"• {line}")
    for title, frame in evaluation.examples().items():
        screen.log(title)
        screen.table(frame)
    screen.log(f"Report: {path}")
    return evaluation


def _evaluate(
    model: Any,
    config: EvaluateConfig,
    folder: Path | None,
    progress: Progress,
    tool: str,
    tokenizer: Any = None,
    documents: Sequence[str] | None = None,
    *,
    timing: bool = True,
    examples: Examples | None = None,
) -> Evaluation:
    """Check and load everything, and then measure; with a folder, every record is in it as soon as it is known."""
    start = time.perf_counter()
    list_attentions()
    for name in config.attention or ():
        models.check_mechanism(name)
    for entry in config.data.task or ():
        TASKS.get(split_task(entry)[0])
    if folder is not None:
        check_output(folder, RESULTS, overwrite=config.overwrite, resume=config.resume)
        config = replace(config, output=str(folder))
    progress.log(f"Loading {config.name or getattr(model, 'name_or_path', model)} ...")
    evaluators = _prepare_all(model, config, tokenizer, documents)
    with nullcontext() if folder is None else open_output(folder, RESULTS, overwrite=config.overwrite):
        records = Records(None if folder is None else folder / RECORDS_FILE, remeasure=config.remeasure)
        if len(records):
            progress.log(f"{len(records)} records of earlier runs are used where they fit.")
        try:
            return _run(evaluators, config, records, progress, start, tool, timing=timing, examples=examples)
        except BaseException:
            if records.path is not None and len(records):
                saved = f"{len(records)} records are saved in {records.path}."
                progress.log(f"{saved} To continue: the same command with --resume.")
            raise


# --------------------------------------------------------------------------------------------------------------------
# Preparation


def _prepare_all(
    model: Any, config: EvaluateConfig, tokenizer: Any, documents: Sequence[str] | None
) -> list[Evaluator]:
    """Return an evaluator of the model, and one of the model of each further task."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    first = _prepare(model, config.for_task(None), tokenizer, documents)
    evaluators = [first]
    for task, folder in config.data.other_tasks.items():
        other = _prepare(folder, replace(config.for_task(task), name=None), None, None)
        models.check_same_shape(folder, other.exact.model.config, first.exact.model.config)
        identities = [group.identity for group in first.groups]
        for group in other.groups:
            if group.layers and group.identity not in identities:
                raise ValueError(
                    f"{', '.join(group.folders)}, of the task {task!r}, has layers that no converted checkpoint of "
                    "MODEL has; time is measured on MODEL. Give one converted in the same way: --converted FOLDER."
                )
        other.task = task
        evaluators.append(other)
    return evaluators


def _prepare(source: Any, config: EvaluateConfig, tokenizer: Any, documents: Sequence[str] | None) -> Evaluator:
    """Load one model with its data and what it is compared with."""
    device, task, path = torch_device(config.device), config.data.own_task, config.data.dataset
    loaded = isinstance(source, PreTrainedModel)
    if loaded:
        name, kind, model_config = Path(source.name_or_path).name, models.kind_of(source), source.config
        models.check_exact(source, name, kind)
    else:
        name, kind, model_config = models.describe_source(str(source), task, path)
    name = config.name or name or type(source).__name__
    tokenizer = tokenizer or models.load_tokenizer(str(getattr(source, "name_or_path", source)))
    _check_data(kind, config, name, documents)
    groups = models.find_checkpoints(config.converted or (), config.baseline or (), model_config)
    text = None if kind == "classifier" else _text(config, documents)
    title = task or Path(str(path)).name
    model = source.eval() if loaded else models.load_exact(str(source), kind, device, task=title)
    table = has_position_table(model)
    settings = resolve_settings(config, kind, longest_input(model), models.dtype_name(model), table=table)
    metrics: list[QualityMetric] = []
    if text is not None:
        inputs = text_inputs(text, tokenizer, settings)
    else:
        names = ("folder", "metrics", "max_eval_samples", "text_columns", "label_column")
        chosen: dict[str, Any] = {name: getattr(config.data, name) for name in names}
        chosen["task" if task else "dataset"] = task or path
        inputs = task_inputs(DataConfig(**chosen), tokenizer, model.config, settings)
    data = {"data": inputs.hash, **inputs.facts["held_out"]}
    if kind == "classifier":
        options: dict[str, Any] = {"regression": inputs.regression, "task": title, "settings": data}
        metrics.append(classification_metric(model, inputs.labeled, inputs.metrics, **options))
    elif kind == "decoder":
        windows = {"context": settings.context, "stride": settings.stride, "batch_size": settings.batch_size}
        metrics.append(perplexity_metric(inputs.documents, data=inputs.hash, exact=model, **windows))
    elif config.data.sts is not None:
        metrics.append(sentence_pair_metric(config.data.sts, tokenizer, settings, config.data.max_eval_samples))
        inputs.facts["sentence_pairs"] = f"STS-B validation, {Path(config.data.sts).name}"
    if kind == "encoder":
        metrics.append(embedding_metric(model, inputs.test, data))
    exact = models.ExactModel.of(model, tokenizer, kind, name)
    return Evaluator(exact, inputs, settings, metrics, groups=groups)


def _text(config: EvaluateConfig, documents: Sequence[str] | None) -> Text:
    if documents is not None:
        return text_of(documents, "the given documents")
    path = None if config.data.dataset == PYTHON_DOCUMENTATION else config.data.dataset
    return read_documents(DataConfig(dataset=path, text_columns=config.data.text_columns), config.seed)


def _check_data(kind: str, config: EvaluateConfig, name: str, documents: Sequence[str] | None) -> None:
    if kind == "decoder" and config.data.dataset is None and documents is None:
        raise ValueError(f"{name!r} is a causal language model: give a text to measure it on with --data.dataset FILE.")
    if kind == "classifier" and config.data.own_task is None and config.data.dataset is None:
        raise ValueError(
            f"{name!r} is a classifier: give the task that it was fine-tuned for with --data.task, or your own "
            "labelled data with --data.dataset."
        )
    if kind != "encoder" and config.data.sts is not None:
        raise ValueError(f"data.sts needs an encoder without a head; {name!r} is a {kind}. Leave it out.")
    if kind != "decoder" and (config.context or config.stride):
        raise ValueError("context and stride are those of a perplexity, and this is no causal language model.")


# --------------------------------------------------------------------------------------------------------------------
# The run


def _run(
    evaluators: Sequence[Evaluator],
    config: EvaluateConfig,
    records: Records,
    progress: Progress,
    start: float,
    tool: str,
    *,
    timing: bool,
    examples: Examples | None = None,
) -> Evaluation:
    first = evaluators[0]
    run_settings = _join_earlier_runs(evaluators, config, records)
    _check_mechanisms(first)
    for evaluator in evaluators:
        shared = {name: getattr(first.settings, name) for name in ("attentions", "seeds", "steps")}
        evaluator.settings = replace(evaluator.settings, **shared)
        evaluator.records, evaluator.progress = records, progress
    surroundings = environment(first.exact.model.device)
    records.start_run(tool, run_settings, surroundings)
    for evaluator in evaluators:
        evaluator.measure_quality()
    if timing and first.settings.lengths:
        measure_speed(first)
    tables = examples(first) if examples is not None else {}
    used, left_out = _current_records(records, first)
    if left_out:
        first.notes.append(f"{left_out} records of another device or other versions are not shown. Measure them again.")
    info = {
        "tool": tool,
        "created": utc_now(),
        "seconds": time.perf_counter() - start,
        "model": first.exact.facts(),
        "data": first.inputs.facts,
        "tasks": [{"task": one.task, "model": one.exact.name, **one.inputs.facts} for one in evaluators[1:]],
        "settings": run_settings["settings"],
        "quick": config.quick,
        "environment": surroundings,
        "backend": first.exact.device["backend"],
        "scores": [asdict(score) for evaluator in evaluators for score in evaluator.scores],
        "checkpoints": run_settings["checkpoints"],
        "notes": first.notes,
        "records": sorted(used),
        "examples": {title: frame.reset_index().to_dict("list") for title, frame in tables.items()},
        "runs": len(records.runs),
    }
    return Evaluation(records.to_frame(used), json_safe(info), records)


def _current_records(records: Records, evaluator: Evaluator) -> tuple[set[str], int]:
    """Return the ids of the records to show, and how many were made on another device or with other versions.

    Of a value that was measured under several conditions, such as with another time per length, the newest counts.
    """
    exact, newest, left_out = evaluator.exact, {}, 0
    for record in sorted(records, key=lambda record: record.time):
        conditions = record.conditions
        dtype = exact.device["dtype"] if conditions["batch_size"] is None else evaluator.settings.dtype
        if conditions["device"] != {**exact.device, "dtype": dtype} or conditions["versions"] != exact.versions:
            left_out += 1
            continue
        names = ("measurement", "state", "seed", "task", "length", "batch_size")
        newest[(record.label, conditions["settings"].get("checkpoint"), *map(conditions.get, names))] = record.id
    return set(newest.values()), left_out


def _check_mechanisms(evaluator: Evaluator) -> None:
    """Raise for mechanisms that this model cannot have, before anything is measured."""
    settings = evaluator.settings
    if not settings.attentions and not any(group.layers for group in evaluator.groups):
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    for name in settings.attentions:
        try:
            options = models.seed_options(ATTENTIONS.get(name), settings.seed)
            patch_model(shared_copy(evaluator.exact.model), name, **options)
        except NotImplementedError as error:
            raise ValueError(f"{name!r} cannot be measured on this model: {error}") from error


def _join_earlier_runs(evaluators: Sequence[Evaluator], config: EvaluateConfig, records: Records) -> dict[str, Any]:
    """Add mechanisms, lengths and seeds of earlier runs, so that the report shows all of them, and label checkpoints.

    Returns:
        The settings of this run: what its records have in common, and what it measures.

    Raises:
        ValueError: The records are of another model, other data or other settings.
    """
    first = evaluators[0]
    runs = [run.settings for run in records.runs.values() if "identities" in run.settings]
    earlier: Mapping[str, Any] = runs[-1] if runs else {"identities": {}, "labels": {}, "checkpoints": {}}
    identities = {evaluator.task: _identity(evaluator) for evaluator in evaluators}
    for task, known in earlier["identities"].items():
        if task not in identities:
            raise ValueError(
                f"The folder {config.output!r} has records of the task {task!r} with the model {known['model']!r}. "
                f"Give it again (--data.task {task}=FOLDER), or another folder with --output."
            )
        changed = [name for name, value in identities[task].items() if known.get(name) != value]
        if changed:
            details = "; ".join(f"{name}: {known.get(name)!r}, now {identities[task][name]!r}" for name in changed)
            raise ValueError(
                f"The folder {config.output!r} has records of other settings ({details}). Give the same ones, or "
                "another folder with --output."
            )
    if runs:
        first.settings = _joined_settings(first.settings, earlier["settings"], config)
    labels, folders = dict(earlier["labels"]), dict(earlier["checkpoints"])
    for evaluator in evaluators:
        evaluator.groups = models.label_groups(evaluator.groups, labels)
        for group in evaluator.groups:
            names = [*folders.get(group.label, ()), *(Path(folder).name for folder in group.folders)]
            folders[group.label] = list(dict.fromkeys(names))
    settings = asdict(first.settings)
    return {"identities": identities, "labels": labels, "checkpoints": folders, "settings": settings}


def _identity(evaluator: Evaluator) -> dict[str, Any]:
    """What all records of one model in a folder have in common."""
    exact, settings = evaluator.exact, evaluator.settings
    metrics = {metric.measurement: metric.settings.get("data") for metric in evaluator.metrics}
    identity = {"model": exact.name, "fingerprint": exact.fingerprint, "kind": exact.kind, "data": metrics}
    return json_safe({**identity, **{name: getattr(settings, name) for name in FIXED_SETTINGS}})


def _joined_settings(settings: Settings, earlier: Mapping[str, Any], config: EvaluateConfig) -> Settings:
    """The settings with everything that was measured before; options that are not set stay as they were."""
    lengths = (*(config.speed.lengths or ()), *(() if config.length is None else (config.length,)))
    added = {"attentions": config.attention, "seeds": config.seeds, "lengths": lengths}
    joined: dict[str, Any] = {name: tuple(dict.fromkeys([*earlier[name], *(added[name] or ())])) for name in added}
    set_now = {
        "length": config.length,
        "backward": config.speed.backward,
        "throughput_batch_size": config.speed.batch_size,
        "dtype": config.speed.dtype,
    }
    joined |= {name: value or earlier[name] for name, value in set_now.items()}
    return replace(settings, **{**joined, "lengths": tuple(sorted(joined["lengths"]))})
