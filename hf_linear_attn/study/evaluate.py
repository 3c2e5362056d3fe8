"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
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
from ..measure.quality import QualityMetric, classification_metric, embedding_metric, perplexity_metric
from ..measure.recall import recall_metric
from ..patching import patch_model
from ..registry import ATTENTIONS
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import check_output, open_output
from ..utils.models import shared_copy, torch_device
from ..utils.options import OptionError
from ..utils.progress import ConsoleProgress, Progress
from . import loading as models
from .evaluator import Evaluator, measure_speed
from .inputs import inputs_text, sentence_pair_metric, task_inputs, text_inputs
from .records import RECORDS_FILE, RESULTS, Records
from .results import Evaluation
from .settings import PYTHON_DOCUMENTATION, EvaluateConfig, EvaluationData, resolve_settings, split_task, with_options

Examples = Callable[[Evaluator], Mapping[str, Any]]
"""Data frames by title, from the exact and the converted models of an evaluator."""


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
        examples: Makes tables for a person to read, for the end of screen and report.
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
    for name in config.attention or ():
        models.check_mechanism(name)
    for entry in config.data.task or ():
        TASKS.get(split_task(entry)[0])
    path = None if output is None else Path(output) / RECORDS_FILE
    if path is not None:
        check_output(path.parent, RESULTS, overwrite=config.overwrite, resume=config.resume)
    progress.log(f"Loading {config.name or getattr(model, 'name_or_path', model)} ...")
    evaluators = _prepare_all(model, config, tokenizer, text)
    with nullcontext() if path is None else open_output(path.parent, RESULTS, overwrite=config.overwrite):
        records = Records(path)
        for evaluator in evaluators:
            facts = evaluator.inputs.facts
            counts = f"{inputs_text(facts['train'])} to train on, {inputs_text(facts['held_out'])} held out"
            progress.log(f"Data: {facts['source']}: {facts['rows']}; {counts}")
        if len(records):
            progress.log(f"{len(records)} records of earlier runs are used where they fit.")
        try:
            info = _run(evaluators, config, records, progress, timing=timing)
            tables = examples(evaluators[0]) if examples is not None else {}
        except BaseException:
            if path is not None and len(records):
                progress.log(f"{len(records)} records are in {path}. To continue: the same command with --resume.")
            raise
    info["examples"] = {title: frame.reset_index().to_dict("list") for title, frame in tables.items()}
    info |= {"created": utc_now(), "seconds": time.perf_counter() - start}
    return Evaluation(records.to_frame(records.used), json_safe(info), records)


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
    screen.table(evaluation.summary())
    conclusions = (f"{one.label}: {one.sentence}" for one in evaluation.conclusions())
    for line in (*conclusions, *evaluation.warnings()):
        screen.log(f"• {line}")
    for title, frame in evaluation.examples().items():
        screen.log(title)
        screen.table(frame)
    screen.log(f"Report: {path}")
    return evaluation


def _prepare_all(model: Any, config: EvaluateConfig, tokenizer: Any, text: Text | None) -> list[Evaluator]:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    first = _prepare(model, config.for_task(None), tokenizer, text)
    evaluators = [first]
    for task, folder in config.data.other_tasks.items():
        other = _prepare(folder, replace(config.for_task(task), name=None), None, None)
        models.check_same_shape(folder, other.exact.model.config, first.exact.model.config)
        identities = [group.identity for group in first.groups]
        for group in other.groups:
            if group.layers and group.identity not in identities:
                problem = f"of the task {task!r}, has layers that no converted checkpoint of MODEL has"
                remedy = "Give one converted in the same way: --converted FOLDER."
                raise ValueError(f"{', '.join(group.folders)}, {problem}; time is measured on MODEL. {remedy}")
        other.task = task
        evaluators.append(other)
    return evaluators


def _prepare(source: Any, config: EvaluateConfig, tokenizer: Any, text: Text | None) -> Evaluator:
    device, task, path = torch_device(config.device), config.data.own_task, config.data.dataset
    loaded = isinstance(source, PreTrainedModel)
    if loaded:
        name, kind, model_config = Path(source.name_or_path).name, models.kind_of(source), source.config
        models.check_exact(source, name, kind)
    else:
        name, kind, model_config = models.describe_source(str(source), task, path)
    name = config.name or name or type(source).__name__
    tokenizer = tokenizer or read_tokenizer(str(getattr(source, "name_or_path", source)))
    _check_data(kind, config, name, text)
    groups = models.find_checkpoints(config.converted or (), config.baseline or (), model_config)
    if text is None and kind != "classifier":
        dataset = None if path == PYTHON_DOCUMENTATION else path
        columns, documents = config.data.text_columns, config.data.documents
        text = read_documents(DataConfig(dataset=dataset, text_columns=columns, documents=documents))
    title = task or Path(str(path)).name
    model = source.eval() if loaded else models.load_exact(str(source), kind, device, task=title)
    table = has_position_table(model)
    settings = resolve_settings(config, kind, longest_input(model), models.dtype_name(model), table=table)
    metrics: list[QualityMetric] = []
    if kind == "classifier":
        options = {**vars(config.data), "task": task}
        del options["sts"]
        inputs = task_inputs(DataConfig(**options), tokenizer, model.config, settings)
        options = {"regression": inputs.regression, "task": title}
        options["settings"] = {"data": inputs.hash, **inputs.facts["held_out"]}
        metrics.append(classification_metric(model, inputs.labeled, inputs.metrics, **options))
    else:
        assert text is not None
        inputs = text_inputs(text, tokenizer, settings, causal=kind == "decoder")
    if kind == "decoder":
        windows = {"context": settings.context, "stride": settings.stride, "batch_size": settings.batch_size}
        metrics.append(perplexity_metric(inputs.documents, data=inputs.hash, exact=model, **windows))
    if config.data.sts is not None:
        metrics.append(sentence_pair_metric(config.data.sts, tokenizer, settings, config.data.max_eval_samples))
        inputs.facts["sentence_pairs"] = f"STS-B validation, {Path(config.data.sts).name}"
    if kind == "encoder":
        metrics.append(embedding_metric(model, inputs.test, {"data": inputs.hash, **inputs.facts["held_out"]}))
    if config.recall_lengths:
        metrics.append(recall_metric(model, tokenizer, config.recall_lengths, seed=config.seed))
    exact = models.ExactModel.of(model, tokenizer, kind, name)
    return Evaluator(exact, inputs, settings, metrics, groups=groups)


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


def _run(
    evaluators: Sequence[Evaluator], config: EvaluateConfig, records: Records, progress: Progress, *, timing: bool
) -> dict[str, Any]:
    """Measure; return what the report says of it."""
    first = evaluators[0]
    _check_mechanisms(first)
    labels: dict[str, str] = {}
    folders: dict[str, list[str]] = {}
    for evaluator in evaluators:
        for group in evaluator.groups:  # those of equal identity have equal labels, such as "hedgehog (converted)"
            base = f"{group.attention} ({group.state})"
            names = itertools.chain([base], (f"{base} {number}" for number in itertools.count(2)))
            label = labels.setdefault(group.identity, next(name for name in names if name not in labels.values()))
            folders.setdefault(label, []).extend(Path(folder).name for folder in group.folders)
        evaluator.groups = [replace(group, label=labels[group.identity]) for group in evaluator.groups]
        shared = {name: getattr(first.settings, name) for name in ("attentions", "seeds", "steps")}
        evaluator.settings = replace(evaluator.settings, **shared)
        evaluator.records, evaluator.progress = records, progress
    surroundings, settings = environment(first.exact.model.device), asdict(first.settings)
    records.start_run("evaluate", settings, surroundings)
    for evaluator in evaluators:
        evaluator.measure_quality()
    if timing and first.settings.lengths:
        measure_speed(first)
    return {
        "model": first.exact.facts(),
        "data": first.inputs.facts,
        "tasks": [{"task": one.task, "model": one.exact.name, **one.inputs.facts} for one in evaluators[1:]],
        "settings": settings,
        "quick": config.quick,
        "environment": surroundings,
        "backend": first.exact.device["backend"],
        "scores": [asdict(score) for evaluator in evaluators for score in evaluator.scores],
        "checkpoints": folders,
        "notes": first.notes,
        "records": records.used,
        "runs": len(records.runs),
    }


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
