"""Fine-tuning, and conversion of a fine-tuned model to a linear one, from options to a measured checkpoint."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.text import standard_library_documents, text_rows
from ..integration.ablation import without_attention
from ..integration.context import is_learned, is_patched, saved_tensors
from ..integration.discovery import longest_input
from ..measure.metric import Numbers, Score
from ..measure.speed import possible_lengths
from ..patching import patch_report
from ..training.options import ConvertConfig, FinetuneConfig, TrainingRunConfig
from ..training.resumable import local_seed
from ..training.selection import close_harmful_parts
from ..training.sharding import is_sharded
from ..training.transfer import exact_length
from ..utils.environment import environment, json_safe, utc_now
from ..utils.models import Batch, evaluation_mode, model_inputs, shared_copy
from ..utils.options import make_config, to_dict
from . import models
from .card import exactness, model_card, result_lines
from .choose import choose_heads, plan_of
from .conversion_result import ConversionResult, HeadChoice, ModelFacts, RecallPair, Scores, SpeedPair, Trainings
from .run_folder import RESULTS_FILE
from .stages import TrainingRun

#: A run warns if a smaller share of them is longer, because the data then train little of the mechanism.
MIN_LONGER_SHARE = 0.05

#: Number of batches that attention transfer does not train on, to choose its best step.
SET_ASIDE_BATCHES = 2

#: Tokens of held-out rows that decide which linear parts remain.
SELECTION_TOKENS = 4096

#: Documents of the standard library, text of another kind, that one more row is made of.
OTHER_DOCUMENTS = 50

#: Forward passes that a step takes: of attention transfer, and of distillation with its teacher's.
TRANSFER_COST, DISTILLATION_COST = 2.0, 4.0

#: What a run stores a training under, by its name in `Trainings`.
TRAININGS = {
    "teacher": "teacher stage",
    "calibration": "calibration",
    "transfer": "transfer",
    "distill": "distill",
    "control": "control distill",
    "train": "train",
}


def finetune(
    config: FinetuneConfig | None = None, *, console: Console | None = None, **options: Any
) -> ConversionResult:
    """Train a model, exact or patched, on the loss of a task; otherwise as `convert`, with a `FinetuneConfig`."""
    return execute(make_config(FinetuneConfig, config, options), console, "finetune", _finetune)


def convert(config: ConvertConfig | None = None, *, console: Console | None = None, **options: Any) -> ConversionResult:
    """Convert a fine-tuned model: (teacher) -> attention transfer -> distillation -> a measured checkpoint.

    The run reports its progress on the console, by default stderr. In the output folder `model/` is the checkpoint with
    its card, and `results.json` has the result: the metric of the teacher, of the model patched and calibrated, before
    any training, after attention transfer and after distillation, and its speed beside the teacher's. With `control`
    the teacher is trained as long, with exact attention, and its metric stands beside those. With a `budget` the exact
    heads and windows are chosen for it, and a short training (of classifiers the usual one) is set where no other is.

        result = convert(model="./bert-sst2", output="out", attention="hedgehog", data={"task": "sst2"})
        result.scores.teacher["accuracy"], result.final["accuracy"]
        convert(model="gpt2", output="out", budget="25% cache at 8192", data={"dataset": "text.txt"})

    Args:
        config: All options at once.
        console: Where progress is shown.
        **options: Fields of `ConvertConfig`, which override those of `config`. Sections are mappings, as in YAML.

    Raises:
        ValueError, OSError, ImportError: Options, data or folders that cannot be used; before any training.
        InterruptedRunError: SIGINT or SIGTERM. What is finished is stored.
    """
    config = make_config(ConvertConfig, config, options)
    return execute(config, console, "convert", _convert)


def execute(
    config: TrainingRunConfig, console: Console | None, tool: str, stages: Callable[[TrainingRun], ConversionResult]
) -> ConversionResult:
    """Open a run, and go through its stages unless it has ended before; show its result."""
    task_type = config.task_type or models.default_task_type(config)
    run = TrainingRun(config.completed(task_type), tool, console)
    if config.task_type is None and not config.finetunes:
        run.progress.log(f"Without --task_type the model is taken for {run.kind.noun}: {task_type}.")
    path = run.folder / RESULTS_FILE
    with run.interruptible():
        if config.resume and path.is_file():
            result = ConversionResult.load(path)
        else:
            with run.opened():
                run.load_data()
                result = stages(run)
                if run.is_main_process:
                    result.save(path)
        run.remove_checkpoints()
        for line in result_lines(result):
            run.progress.log(line)
        model = run.folder / "model"
        run.progress.log(f"Result: {model if model.is_dir() else run.folder}")
    return result


def _finetune(run: TrainingRun) -> ConversionResult:
    config = run.config
    torch.manual_seed(config.seed)
    model, _ = models.load_model(config, run.data)
    if not is_patched(model):
        models.patch_as_configured(model, config, run.attention)
    run.use_metric(model)
    facts = _facts(run, model)
    _warn_of_exact_inputs(run, facts)
    if "trained" not in run.finished:
        model, progress = run.train("train", model)
        run.record("train", progress)
        scores = run.evaluate("trained", model)
        _save(run, model, _result(run, facts, {**run.finished, "trained": scores}))
        run.record("trained", scores)
    return _result(run, facts, run.finished)


def _convert(run: TrainingRun) -> ConversionResult:
    """Run all stages, and save the model with its card."""
    config = run.config
    teacher, student, facts, scores = prepare_student(run)
    if is_patched(student):
        _estimate(run, teacher, config.transfer.max_steps if facts.can_learn else 0)
        if facts.learned_parameters:
            student, scores = _transfer(run, student, scores)
            student, scores = _close_harmful_parts(run, student, scores)
    if config.distill.enabled:
        # Distillation may shard its teacher; the control and the timing need complete models.
        control = copy.deepcopy(teacher) if config.control and is_patched(student) else None
        before = _copies(student)
        student, distilled = _distill(run, teacher, student, "distill", "distilled")
        scores = _keep_better(run, student, before, scores, distilled, "distilled")
        if control is not None:
            _distill(run, teacher, control, "control distill", "control")
    result = result_of(run, teacher, student, facts, scores)
    _save(run, student, result)
    return result


def prepare_student(
    run: TrainingRun,
) -> tuple[PreTrainedModel, PreTrainedModel, ModelFacts, Numbers]:
    """Return the exact model, the patched and calibrated one, what that is, and its scores; both are measured.

    There are no scores with `attention: null`, which is never taken back.
    """
    config = run.config
    teacher = load_teacher(run)
    run.use_metric(teacher.to(run.process.device))
    run.measure("teacher", teacher)
    if run.kind.is_language_model:
        run.measure("without_attention", without_attention(teacher))
    student = copy.deepcopy(teacher)
    models.patch_as_configured(student, config, plan_of(choose_heads(run, teacher)) or run.attention)
    facts = _facts(run, student)
    _warn_of_exact_inputs(run, facts)
    if not is_patched(student):
        return teacher, student, facts, {}
    if facts.can_learn:
        student = _calibrate(run, student)
    return teacher, student, facts, run.measure("patched", student)


def result_of(
    run: TrainingRun,
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    facts: ModelFacts,
    scores: Numbers,
) -> ConversionResult:
    """Return the result of a run whose student has these scores, with its speed and what it recalls."""
    if scores:
        run.once("converted", lambda: scores)
    lengths = _timed_lengths(run)
    if is_sharded(teacher) and (lengths or run.budget is not None):
        teacher = load_teacher(run)
    if lengths:

        def time_both() -> dict[str, Any]:
            with run.progress.working("measuring speed"):
                return asdict(_speed(run, teacher, student, lengths))

        run.once("speed", time_both)
    _verify_recall(run, teacher, student)
    return _result(run, facts, run.finished)


def _result(run: TrainingRun, facts: ModelFacts, state: Mapping[str, Any]) -> ConversionResult:
    """Return the result of what the stages of a run have stored."""
    choice, speed, parts = (state.get(name) for name in ("exact_heads", "speed", "linear parts"))
    exact, linear = (state.get(f"recall, {name}") for name in ("teacher", "this model"))
    recall = RecallPair(exact["task"], exact["length"], exact, linear) if exact and linear else None
    return ConversionResult(
        config=to_dict(run.config),
        model=ModelFacts(**json_safe(asdict(facts))),
        score=run.metric.score,
        data=run.data.facts,
        environment=environment(run.process.device),
        scores=Scores(**{name: state.get(name) for name in Scores.__dataclass_fields__}),
        training=Trainings(**{name: state.get(stage) for name, stage in TRAININGS.items()}),
        choice=HeadChoice(**choice) if choice else None,
        linear_parts=parts["layers"] if parts else None,
        recall=recall,
        speed=SpeedPair(**speed) if speed else None,
        processes=run.process.num_processes,
        created=utc_now(),
    )


def _save(run: TrainingRun, model: PreTrainedModel, result: ConversionResult) -> None:
    """Write the model with its card."""
    with run.progress.working("writing the model"):
        run.save(run.folder / "model", model, model_card(run.config, result))


def load_teacher(run: TrainingRun) -> PreTrainedModel:
    """Load the exact model that is converted, fine-tuned first if the config says so.

    A mechanism that does not fit the model is an error before any training.
    """
    config, data, folder = run.config, run.data, run.folder / "teacher"
    if "teacher stage" in run.finished:
        model, _ = models.load_model(config, data, str(folder))
    else:
        torch.manual_seed(config.seed)
        model, new_parameters = models.load_model(config, data)
        if is_patched(model):
            raise ValueError(f"{config.model!r} is patched already. Give the exact model that it was made from.")
        models.patch_as_configured(shared_copy(model), config, run.attention)
        if config.teacher.enabled:
            model, progress = run.train("teacher", model)
            run.save(folder, model)
            run.record("teacher stage", progress)
        elif new_parameters:
            raise models.missing_head(config, f"{new_parameters[0]} is missing")
        else:
            run.identify_model(models.weights_fingerprint(model))
    return model


def _verify_recall(run: TrainingRun, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Measure what teacher and student recall, where the model can take such prompts.

    They are as long as a budget of recall says, and for other budgets no longer than the training rows. A classifier
    recalls nothing.
    """
    budget, length = run.budget, run.data.longest
    if budget is None or not run.kind.recall_task:
        return
    if budget.length:
        length = min(budget.length, length) if budget.unit is None else budget.length
    try:
        for name, model in (("teacher", teacher), ("this model", student)):
            run.measure_recall(name, model, length=length)
    except ValueError as error:
        run.progress.log(f"Recall was not measured: {error}")


@torch.no_grad()
def _estimate(run: TrainingRun, teacher: PreTrainedModel, transfer_steps: int) -> None:
    """Say how long so many steps of attention transfer and distillation will take, by the time of one forward pass."""
    config, data = run.config, run.data
    rows: Any = data.train
    count = min(config.distill.per_device_train_batch_size, len(rows))
    batch = model_inputs(teacher.to(run.process.device), data.collator([rows[row] for row in range(count)]))
    seconds = []
    with evaluation_mode(teacher), run.mixed_precision():
        for _ in range(2):  # the first one allocates memory
            started = time.perf_counter()
            float(teacher(**batch)[0].float().sum())
            seconds.append(time.perf_counter() - started)
    transfer, distill = config.transfer, config.distill
    rows_per_step = distill.gradient_accumulation_steps * count * run.process.num_processes
    steps = distill.max_steps or round(distill.num_train_epochs * len(rows) / rows_per_step)
    share = transfer.per_device_train_batch_size * transfer.gradient_accumulation_steps / count
    passes = TRANSFER_COST * transfer_steps * share * ("transfer" not in run.finished)
    for stage in ("distill", *(["control distill"] if config.control else [])):
        passes += DISTILLATION_COST * steps * distill.gradient_accumulation_steps * (stage not in run.finished)
    minutes = passes * seconds[-1] / 60
    text = f"{minutes:.0f} min" if minutes >= 2 else f"{60 * minutes:.0f} s"
    stages = f"{transfer_steps} steps of attention transfer and {steps} of distillation"
    run.progress.log(f"About {text} of training: {stages}, by the time of one forward pass ({seconds[-1]:.2g} s).")


def _calibrate(run: TrainingRun, student: PreTrainedModel) -> PreTrainedModel:
    """Calibrate the student."""

    def fit() -> tuple[PreTrainedModel, dict[str, Any]]:
        with run.progress.working("calibrating"):
            calibration = run.calibrate(student)
        within = None if calibration is None or not len(calibration.table) else calibration.within()
        return student, {"step": 0, "within_factor_2": within}

    return cast(PreTrainedModel, run.trained("calibration", student, fit, is_learned))


def _close_harmful_parts(
    run: TrainingRun, student: PreTrainedModel, scores: Numbers
) -> tuple[PreTrainedModel, Numbers]:
    """Close the linear parts that the model is better without, on held-out rows and, but for a task, other text."""
    data, limit = run.data, exact_length(student)
    long = [*chain.from_iterable(data.longer_than(rows, limit) for rows in data.held_out.values())]
    if not limit or not long:
        return student, scores

    def close() -> tuple[PreTrainedModel, dict[str, Any]]:
        student.to(run.process.device)
        batches = data.leading_batches(long, SELECTION_TOKENS)
        if run.kind.is_of_text:
            length = max(batch["input_ids"].shape[1] for batch in batches)
            batches += _other_text(run, length)
        with run.progress.working("measuring what linear parts are worth"):
            parts = close_harmful_parts(student, batches)
        rows = parts.table.to_dict("records")
        return student, {"step": 0, "layers": rows, **{f"loss, {name}": value for name, value in parts.loss.items()}}

    student = run.trained("linear parts", student, close, is_learned)
    layers = run.finished["linear parts"]["layers"]
    if closed := sum(not row["kept"] for row in layers):
        run.progress.log(
            f"Closed, since the model is better without: the linear part of {closed} of {len(layers)} layers."
        )
        scores = run.measure("closed", student)
    return student, scores


def _other_text(run: TrainingRun, length: int) -> list[Batch]:
    """Return text of another kind than that of the training: a row for a decoder, passages for an encoder."""
    documents = standard_library_documents()[:OTHER_DOCUMENTS]
    causal = bool(run.kind.is_causal)
    # The loss of a passage's embedding is one number, that of a decoder's row one for each token.
    count = 1 if causal else SELECTION_TOKENS // length
    rows = text_rows(run.data.tokenizer, documents, length, max(count, 1), causal=causal)
    return [{"input_ids": torch.tensor([row])} for row in rows]


def _transfer(run: TrainingRun, student: PreTrainedModel, scores: Numbers) -> tuple[PreTrainedModel, Numbers]:
    """Attention transfer, on the rows that the mechanism does not attend to exactly: the others have no loss."""
    config, data = run.config, run.data
    if not config.transfer.max_steps:
        return student, scores
    rows, limit = run.long_rows(student), exact_length(student)
    if not len(rows):
        reason = f"Attention transfer was skipped: no training input has more than the {limit:,} tokens that are exact."
        run.progress.log(reason)
        run.once("transfer", lambda: {"step": 0, "skipped": reason})
        return student, scores
    if len(rows) < len(data.train) and "transfer" not in run.finished:
        run.progress.log(f"transfer: trains on the {len(rows):,} inputs of more than {limit:,} tokens.")
    # At least one row is set aside, which is trained on as well if it is the only one.
    count = max(min(SET_ASIDE_BATCHES * config.transfer.per_device_train_batch_size, len(rows) // 5), 1)
    train = rows.select(range(max(len(rows) - count, 1)))
    set_aside = rows.select(range(len(rows) - count, len(rows)))
    before = _copies(student, is_learned)
    student = run.trained("transfer", student, partial(run.transfer, student, train, set_aside), is_learned)
    transferred = run.measure("transferred", student)
    return student, _keep_better(run, student, before, scores, transferred, "transferred")


def _distill(run: TrainingRun, teacher: Any, student: Any, stage: str, result: str) -> tuple[PreTrainedModel, Numbers]:
    """Distillation. Returns the student with the best step's weights and merged adapters, and its scores."""
    config = run.config

    def train() -> tuple[nn.Module, dict[str, Any]]:
        if not config.distill.lora_rank:
            return run.train("distill", student, stage, teacher_model=teacher)
        with local_seed(config.seed + 1):  # other numbers than those of the data and of random features
            adapted = models.add_adapters(student, config.distill.lora_rank)
        model, progress = run.train("distill", adapted, stage)
        return model.merge_and_unload(), progress

    student = run.trained(stage, student, train).eval()
    return student, run.measure(result, student)


def _copies(model: nn.Module, which: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return copies of the tensors that a stage may change (see `saved_tensors`)."""
    return {name: value.detach().clone() for name, value in saved_tensors(model, which).items()}


def _keep_better(
    run: TrainingRun, student: nn.Module, before: dict[str, Tensor], scores: Numbers, after: Numbers, result: str
) -> Numbers:
    """Give a student the tensors from before a stage that ended worse than it began; return the scores that it has.

    The metric of a task, of which one row more or less is a large step, is too coarse to tell of a transfer.
    """
    score = run.metric.score
    is_too_coarse = result == "transferred" and bool(run.data.metric_names)
    if is_too_coarse or not is_worse(score, scores, after):
        return after
    stage = {"transferred": "Attention transfer", "distilled": "Distillation"}[result]
    run.progress.log(f"{stage} is taken back: the {score.metric} is better without it.")
    student.load_state_dict(before, strict=False)
    return scores


def is_worse(score: Score, before: Numbers, after: Numbers) -> bool:
    """Return whether a score is worse than before, or no number any more: NaN or infinite."""
    first, second = before.get(score.metric), after.get(score.metric)
    if first is None:
        return False
    if second is None:
        return True
    return bool(second < first if score.greater_is_better else second > first)


def _timed_lengths(run: TrainingRun) -> list[int]:
    """Return the lengths of the config, and that of a budget of speed, which is to be verified."""
    if run.data.is_encoder_decoder:  # whose time depends on two lengths
        return []
    lengths = {*run.config.speed.lengths}
    if run.budget is not None and run.budget.cost == "speedup":
        lengths.add(run.budget.length)
    return sorted(lengths)


def _speed(run: TrainingRun, teacher: PreTrainedModel, student: PreTrainedModel, requested: list[int]) -> SpeedPair:
    """Time one forward pass of teacher and student (batch 1), side by side, in the precision of the run."""
    lengths, note = possible_lengths(teacher, requested)
    if lengths != requested:  # where all are timed, the table marks those beyond the model's positions
        run.progress.log(note)
    speed = SpeedPair(longest_input=longest_input(teacher))
    for length in lengths:
        try:
            times = run.time(teacher, student, length)
        except ValueError as error:
            # A mechanism that is built for a largest length, such as Linformer, cannot be timed beyond it.
            run.progress.log(f"{length:,} tokens were not timed: {error}")
            continue
        speed.lengths.append(length)
        speed.teacher.append(times["teacher"])
        speed.student.append(times["student"])
    return speed


def _facts(run: TrainingRun, model: PreTrainedModel) -> ModelFacts:
    report = patch_report(model) if is_patched(model) else None
    limit = exact_length(model)
    counts = {"exact_length": limit, "inputs": len(run.data.train), "longer": len(run.long_rows(model))}
    return ModelFacts(
        class_name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        learned_parameters=report.parameters if report else 0,
        layers=[asdict(layer) for layer in report.layers] if report else [],
        beyond_exact=counts if limit else None,
    )


def _warn_of_exact_inputs(run: TrainingRun, facts: ModelFacts) -> None:
    """Log a warning if hardly any training input is longer than what the mechanism attends to exactly."""
    counts = facts.beyond_exact
    if counts and facts.learned_parameters and counts["longer"] < MIN_LONGER_SHARE * counts["inputs"]:
        share = "little" if counts["longer"] else "nothing"
        remedy = "Give longer inputs, or narrow what is exact (--options.window_size or --options.block_size)."
        run.progress.log(f"{exactness(counts)} So these data train {share} of the mechanism. {remedy}")
