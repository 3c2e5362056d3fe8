"""`evaluate`: quality, speed and memory of a model with linear attention, beside its exact attention."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import check_output, open_output
from .config import (
    PYTHON_DOCUMENTATION,
    EvaluateConfig,
    EvaluationData,
    Settings,
    resolve_settings,
    split_task,
    with_options,
)
from .progress import ConsoleProgress, NoProgress, Progress
from .records import LEARNED_FOLDER, RECORDS_FILE, Records

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
) -> Any:
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
    start = time.perf_counter()
    config = with_options(config or EvaluateConfig(), options)
    text = None
    if isinstance(data, EvaluationData):
        config = replace(config, data=data)
    elif isinstance(data, (str, Path)):
        config = replace(config, data=replace(config.data, dataset=str(data)))
    elif data is not None:
        text = list(data)
    _check_names(config)
    if output is not None:
        check_output(output, RESULTS, overwrite=config.overwrite, resume=config.resume)
        config = replace(config, output=str(output))
    evaluators = _prepare_all(model, config, tokenizer, text)
    progress = progress or NoProgress()
    if output is None:
        return _run(evaluators, config, Records(), None, progress, start, timing=timing)
    with open_records(config) as records:
        return _run(evaluators, config, records, Path(output), progress, start, timing=timing)


def run_evaluate(
    config: EvaluateConfig,
    *,
    console: Any = None,
    tool: str = "hf-linear-attn evaluate",
) -> Any:
    """Evaluate, write the report to `config.output`, show the summary, and return the `Evaluation`.

    Args:
        config: The options.
        console: A rich console; None: stdout.
        tool: What the report calls this program.

    Raises:
        ValueError, OSError: Options, a model or data that cannot be used. Nothing has been measured or written then.
        ImportError: A package of the extra `demo` is missing; with a task or STS-B, one of `train`.
    """
    require_packages("pandas", "matplotlib", "jinja2", "tabulate", extra="demo", purpose=f"`{tool}`")
    start = time.perf_counter()
    if config.model is None:
        raise ValueError("No model: give a local folder or a repository on the Hub.")
    screen = ConsoleProgress(console)
    _check_names(config)
    check_output(config.output, RESULTS, overwrite=config.overwrite, resume=config.resume)
    screen.log(f"Loading {config.name or config.model} ...")
    evaluators = _prepare_all(config.model, config, None, None)
    folder = Path(config.output)
    with open_records(config) as records:
        try:
            with screen:
                if len(records):
                    screen.log(f"{len(records)} records of earlier runs are used where they fit.")
                evaluation = _run(evaluators, config, records, folder, screen, start, tool)
        except BaseException:
            if records:
                saved = f"{len(records)} records are saved in {folder / RECORDS_FILE}."
                screen.log(f"{saved} To continue: the same command with --resume.")
            raise
    evaluation.save(folder)
    path = evaluation.report(folder)
    show(evaluation, screen, path)
    return evaluation


def show(evaluation: Any, screen: ConsoleProgress, path: Path) -> None:
    """Print the summary, the conclusions, and where the report is."""
    screen.table(evaluation.summary())
    for conclusion in evaluation.conclusions():
        screen.log(f"• {conclusion.label}: {conclusion.sentence}")
    for line in evaluation.warnings():
        screen.log(f"• {line}")
    screen.log(f"Report: {path}")


@contextmanager
def open_records(config: EvaluateConfig) -> Iterator[Records]:
    """Context manager that opens the records of the output folder, which is removed if an error leaves none in it.

    Raises:
        ValueError: The records in the folder are damaged.
        OSError: The folder cannot be written to.
    """
    folder = Path(config.output)
    with open_output(folder, RESULTS, overwrite=config.overwrite):
        yield Records(folder / RECORDS_FILE, remeasure=config.remeasure)


def _check_names(config: EvaluateConfig) -> None:
    """Raise for unknown mechanisms and tasks and for missing folders, before anything is loaded."""
    from ..data.sources import is_local
    from ..registry import ATTENTIONS, list_attentions

    list_attentions()
    for name in config.attention or ():
        ATTENTIONS.get(name)
        if name == "softmax":
            raise ValueError("attention 'softmax' is the exact attention, which is always measured. Leave it out.")
    if config.data.task is not None:
        from ..data.tasks import get_task

        for entry in config.data.task:
            get_task(split_task(entry)[0])
    if config.data.metrics is not None:
        from ..data.metrics import TaskMetrics

        TaskMetrics(config.data.metrics)  # a metric that cannot be loaded is an error now, not after the transfer
    folders = [(folder, "data.task") for folder in config.data.other_tasks.values()]
    for folder, flag in ((config.data.folder, "data.folder"), (config.data.sts, "data.sts"), *folders):
        if folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(f"There is no folder {folder!r}. Give another with --{flag}.")
    dataset = config.data.dataset
    if dataset not in (None, PYTHON_DOCUMENTATION) and is_local(str(dataset)) and not Path(str(dataset)).exists():
        raise FileNotFoundError(f"There is no file {dataset!r}. Give another with --data.dataset.")


# --------------------------------------------------------------------------------------------------------------------
# Preparation


def _prepare_all(model: Any, config: EvaluateConfig, tokenizer: Any, documents: Sequence[str] | None) -> list[Any]:
    """Return an evaluator of the model, and one of the model of each further task."""
    import torch

    from .models import check_same_shape

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    evaluators = [_prepare(model, config.for_task(None), tokenizer, documents)]
    first = evaluators[0]
    for task, folder in config.data.other_tasks.items():
        other = _prepare(folder, replace(config.for_task(task), name=None), None, None)
        check_same_shape(folder, other.exact.model.config, first.exact.model.config)
        labels = {group.identity: group.label for group in first.groups}
        for group in other.groups:
            if group.identity not in labels:
                raise ValueError(
                    f"{group.checkpoints[0].folder!r}, of the task {task!r}, has layers that no converted checkpoint "
                    "of MODEL has; time is measured on MODEL. Give one converted in the same way: --converted FOLDER."
                )
        other.groups = [replace(group, label=labels[group.identity]) for group in other.groups]
        other.task = task
        evaluators.append(other)
    return evaluators


def _prepare(source: Any, config: EvaluateConfig, tokenizer: Any, documents: Sequence[str] | None) -> Any:
    """Load one model with its data and what it is compared with."""
    import transformers
    from transformers import PreTrainedModel

    from ..data.config import DataConfig
    from ..data.task_data import read_documents
    from ..data.text import text_of
    from ..integration.discovery import longest_input
    from ..integration.inputs import has_position_table
    from ..utils.models import torch_device
    from . import inputs as data
    from . import models
    from .evaluator import Evaluator
    from .metrics import classification_metric, embedding_metric, perplexity_metric, sentence_pair_metric

    device, task = torch_device(config.device), config.data.own_task
    if isinstance(source, PreTrainedModel):
        name = config.name or Path(source.name_or_path or type(source).__name__).name
        model, kind = source.eval(), models.kind_of(source)
        models.check_exact(model, name, kind)
        tokenizer = tokenizer or models.load_tokenizer(str(source.name_or_path))
    else:
        name, kind, loaded = models.describe_source(str(source), task, config.data.dataset)
        name = config.name or name
        model, tokenizer = None, tokenizer or models.load_tokenizer(str(source))
    _check_data(kind, config, name, documents)
    if kind == "classifier" and task is None:
        task = Path(str(config.data.dataset)).name
    model_config = loaded if model is None else model.config
    auto_class = getattr(transformers, models.AUTO_CLASSES[kind])
    groups = models.find_checkpoints(config.converted or (), auto_class, model_config, device, exact=False)
    baselines = models.find_checkpoints(config.baseline or (), auto_class, model_config, device, exact=True)
    if model is None:
        model = models.load_exact(str(source), kind, device, task=task or "")
    table = has_position_table(model)
    settings = resolve_settings(config, kind, longest_input(model), models.dtype_name(model), table=table)
    metrics: list[Any] = []
    if task is not None:
        names = ("folder", "metrics", "max_eval_samples", "text_columns", "label_column")
        chosen: dict[str, Any] = {name: getattr(config.data, name) for name in names}
        chosen["task" if config.data.own_task else "dataset"] = config.data.own_task or config.data.dataset
        inputs = data.task_inputs(DataConfig(**chosen), tokenizer, model.config, settings)
        conditions = {"data": inputs.hash, **inputs.facts["held_out"]}
        options: dict[str, Any] = {"regression": inputs.regression, "task": task, "settings": conditions}
        metrics.append(classification_metric(model, inputs.labeled, inputs.metrics, **options))
    else:
        path = None if config.data.dataset == PYTHON_DOCUMENTATION else config.data.dataset
        if documents is None:
            text = read_documents(DataConfig(dataset=path, text_columns=config.data.text_columns), config.seed)
        else:
            text = text_of(documents, "the given documents")
        inputs = data.text_inputs(text, tokenizer, settings)
    if kind == "decoder":
        windows = {"context": settings.context, "stride": settings.stride, "batch_size": settings.batch_size}
        metrics.append(perplexity_metric(inputs.documents, data=inputs.hash, **windows))
    if config.data.sts is not None:
        pairs = data.sentence_pairs(config.data.sts, tokenizer, settings, config.data.max_eval_samples)
        metrics.append(sentence_pair_metric(pairs))
        inputs.facts["sentence_pairs"] = pairs.source
    if kind == "encoder":
        metrics.append(embedding_metric(model, inputs.test, {"data": inputs.hash, **inputs.facts["held_out"]}))
    exact = models.ExactModel.of(model, tokenizer, kind, name)
    return Evaluator(
        exact, inputs, settings, metrics, Records(), models.label_groups(groups), models.label_groups(baselines)
    )


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
    evaluators: Sequence[Any],
    config: EvaluateConfig,
    records: Records,
    folder: Path | None,
    progress: Progress,
    start: float,
    tool: str = "hf_linear_attn.evaluation.evaluate()",
    *,
    timing: bool = True,
) -> Any:
    from .evaluator import EXACT_LABEL
    from .results import Evaluation
    from .speed import WITHOUT_ATTENTION

    first = evaluators[0]
    _join_earlier_runs(evaluators, config, records)
    _check_mechanisms(first)
    for evaluator in evaluators:
        names = ("attentions", "seeds", "steps")
        shared = {name: getattr(first.settings, name) for name in names}
        evaluator.settings = replace(evaluator.settings, **shared)
        evaluator.records, evaluator.folder, evaluator.progress = records, folder, progress
    surroundings = environment(first.exact.model.device)
    records.start_run(tool, _run_settings(evaluators), surroundings)
    for evaluator in evaluators:
        evaluator.measure_quality()
    if timing:
        first.measure_speed()
    used = set().union(*(evaluator.used for evaluator in evaluators))
    mechanisms = [*first.settings.attentions, *(group.label for group in first.groups)]
    baselines = dict.fromkeys(group.label for evaluator in evaluators for group in evaluator.baselines)
    table = records.to_frame()
    info = {
        "tool": tool,
        "created": utc_now(),
        "seconds": time.perf_counter() - start,
        "model": first.exact.facts(),
        "data": first.inputs.facts,
        "tasks": [{"task": one.task, "model": one.exact.name, **one.inputs.facts} for one in evaluators[1:]],
        "settings": asdict(first.settings),
        "quick": config.quick,
        "environment": surroundings,
        "backend": first.exact.device["backend"],
        "scores": [asdict(score) for evaluator in evaluators for score in evaluator.scores],
        "labels": [EXACT_LABEL, *baselines, *mechanisms, WITHOUT_ATTENTION],
        "mechanisms": mechanisms,
        "checkpoints": [_group_facts(group) for group in (*first.groups, *first.baselines)],
        "notes": first.notes,
        "records": sorted(used),
        "runs": len(records.runs),
    }
    return Evaluation(table[table["id"].isin(used)].reset_index(drop=True), json_safe(info), records)


def _check_mechanisms(evaluator: Any) -> None:
    """Raise for mechanisms that this model cannot have, before anything is measured."""
    from ..patching import patch_model
    from ..registry import ATTENTIONS
    from ..utils.models import shared_copy
    from .models import seed_options

    settings = evaluator.settings
    if not settings.attentions and not evaluator.groups:
        raise ValueError("There is nothing to compare: give --attention or --converted.")
    for name in settings.attentions:
        try:
            options = seed_options(ATTENTIONS.get(name), settings.seed)
            patch_model(shared_copy(evaluator.exact.model), name, **options)
        except NotImplementedError as error:
            raise ValueError(f"{name!r} cannot be measured on this model: {error}") from error


def _identity(evaluator: Any) -> dict[str, Any]:
    """What all records of one model in a folder have in common."""
    exact, settings = evaluator.exact, evaluator.settings
    metrics = {metric.measurement: metric.settings.get("data") for metric in evaluator.metrics}
    identity = {"model": exact.name, "fingerprint": exact.fingerprint, "kind": exact.kind, "data": metrics}
    return json_safe({**identity, **{name: getattr(settings, name) for name in FIXED_SETTINGS}})


def _group_facts(group: Any) -> dict[str, Any]:
    checkpoints = [{"folder": one.folder, "fingerprint": one.fingerprint} for one in group.checkpoints]
    return {
        "label": group.label,
        "attention": group.attention,
        "layers": dict(group.layers),
        "checkpoints": checkpoints,
    }


def _run_settings(evaluators: Sequence[Any]) -> dict[str, Any]:
    """What a run line says: enough to add to the records later."""
    models = []
    for evaluator in evaluators:
        groups = [_group_facts(group) for group in (*evaluator.groups, *evaluator.baselines)]
        models.append({"task": evaluator.task, "identity": _identity(evaluator), "groups": groups})
    return {"models": models, "settings": asdict(evaluators[0].settings)}


def _join_earlier_runs(evaluators: Sequence[Any], config: EvaluateConfig, records: Records) -> None:
    """Add mechanisms, lengths, seeds and checkpoints of earlier runs, so that the report shows all of them, complete.

    Raises:
        ValueError: The records are of another model, other data or other settings.
    """
    runs = [run for run in records.runs.values() if "models" in run.settings]
    if not runs:
        return
    latest = runs[-1].settings
    earlier = {entry["task"]: entry for entry in latest["models"]}
    current = {evaluator.task: evaluator for evaluator in evaluators}
    for task, entry in earlier.items():
        _check_identity(config, task, entry["identity"], current.get(task))
        if task in current:
            _join_groups(current[task], entry["groups"])
    evaluators[0].settings = _joined_settings(evaluators[0].settings, latest["settings"], config)


def _check_identity(config: EvaluateConfig, task: str, earlier: Mapping[str, Any], evaluator: Any) -> None:
    if evaluator is None:
        raise ValueError(
            f"The folder {config.output!r} has records of the task {task!r} with the model {earlier['model']!r}. Give "
            f"it again (--data.task {task}=FOLDER), or another folder with --output."
        )
    identity = _identity(evaluator)
    changed = [name for name in identity if earlier.get(name) != identity[name]]
    if changed:
        details = "; ".join(f"{name}: {earlier.get(name)!r}, now {identity[name]!r}" for name in changed)
        raise ValueError(
            f"The folder {config.output!r} has records of other settings ({details}). Give the same ones, or another "
            "folder with --output."
        )


def _joined_settings(settings: Settings, earlier: Mapping[str, Any], config: EvaluateConfig) -> Settings:
    """The settings with everything that was measured before; options that are not set stay as they were."""
    lengths = settings.lengths if config.speed.lengths else ()
    own = () if config.length is None else (config.length,)
    return replace(
        settings,
        attentions=_union(earlier["attentions"], config.attention or ()),
        lengths=tuple(sorted(_union(earlier["lengths"], (*lengths, *own)))),
        length=config.length or earlier["length"],
        seeds=_union(earlier["seeds"], config.seeds or ()),
        backward=settings.backward or earlier["backward"],
        layer=settings.layer or earlier["layer"],
        throughput_batch_size=config.speed.batch_size or earlier["throughput_batch_size"],
        dtype=config.speed.dtype or earlier["dtype"],
    )


def _join_groups(evaluator: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    from .evaluator import checkpoint_of
    from .models import CheckpointGroup, merge_groups

    groups = [
        CheckpointGroup(entry["attention"], entry["layers"], tuple(map(checkpoint_of, entry["checkpoints"])))
        for entry in entries
    ]
    evaluator.groups = merge_groups([group for group in groups if group.layers], evaluator.groups)
    evaluator.baselines = merge_groups([group for group in groups if not group.layers], evaluator.baselines)


def _union(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([*first, *second]))
