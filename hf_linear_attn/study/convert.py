"""Fine-tuning, and conversion of a fine-tuned model to a linear one, from options to a measured checkpoint."""

import copy
import json
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import LinearAttentionConfig
from ..data.encoding import row_lengths
from ..data.task_data import KINDS, TaskData, load_splits, load_task_data
from ..data.text import packed_rows, standard_library_documents
from ..integration.ablation import without_attention
from ..integration.context import is_learned, saved_tensors
from ..integration.discovery import longest_input
from ..measure.recall import RETRIEVAL, measure_recall
from ..measure.speed import measure_passes, possible_lengths
from ..measure.values import Values
from ..patching import is_patched, patch_model, patch_report
from ..training import models
from ..training.calibration import CALIBRATION_LENGTH, CALIBRATION_TOKENS, Calibration, calibrate, leading_batches
from ..training.head_search import SEARCH_TOKENS, ExactHeads, find_exact_heads
from ..training.options import ConvertConfig, FinetuneConfig, TrainingRunConfig
from ..training.resumable import local_seed
from ..training.selection import close_harmful_parts
from ..training.sharding import is_sharded
from ..training.transfer import exact_length
from ..utils.environment import environment, json_safe, utc_now
from ..utils.files import atomic_folder, open_output, write_json
from ..utils.models import evaluation_mode, mean_pooling, model_inputs, shared_copy
from ..utils.options import make_config, to_dict
from ..utils.timing import is_measurable
from .budgets import Budget, Choice, choose_by_cache, choose_by_measuring, quarter_window, scored
from .card import budget_lines, exactness, model_card, recall_table, results_table, speed_table
from .prepare import weights_fingerprint
from .stages import LOG_FILE, RESULTS_FILE, TrainingRun, best_metrics
from .variants import with_learned_parts

Metrics = dict[str, Any]

#: A run warns if a smaller share of them is longer, because the data then train little of the mechanism.
MIN_LONGER_SHARE = 0.05

#: Number of batches that attention transfer does not train on, to choose its best step.
VALIDATION_BATCHES = 2

#: Tokens of held-out rows that decide which linear parts remain.
SELECTION_TOKENS = 4096

#: Documents of the standard library, text of another kind, that one more row is made of.
OTHER_DOCUMENTS = 50

#: Share of heads that a search for a budget chooses; the ranking that it leaves serves any share.
SEARCH_SHARE = 0.2

#: What a model that is converted for a budget is asked, and the texts that it is asked about, at three depths each.
RECALL_TASKS, RECALL_TRIALS = {"causal-lm": "niah_multikey_1", "embedding": RETRIEVAL}, 16

#: Seconds to time one length.
TIMING_SECONDS = 2.0

#: Forward passes that a step takes: of attention transfer, and of distillation with its teacher's.
TRANSFER_COST, DISTILLATION_COST = 2.0, 4.0


def finetune(config: FinetuneConfig | None = None, *, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Train a model, exact or patched, on the loss of a task; otherwise as `convert`, with a `FinetuneConfig`."""
    return _execute(make_config(FinetuneConfig, config, options), console, "finetune", _finetune)


def convert(config: ConvertConfig | None = None, *, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Convert a fine-tuned model: (teacher) -> attention transfer -> distillation -> a measured checkpoint.

    The run reports its progress on the console, by default stderr. In the output folder `model/` is the checkpoint with
    its card, and `results.json`, whose content is returned, has the metrics of the teacher, of the model patched and
    calibrated, before any training, after attention transfer and after distillation, and its speed beside the
    teacher's. With `control` the teacher is trained as long, with exact attention, and its metrics stand beside those.
    With a `budget` the exact heads and windows are chosen for it, and a short training (of classifiers the usual
    one) is set where no other is.

        convert(model="./bert-sst2", output="out", attention="hedgehog", data={"task": "sst2"})
        convert(model="gpt2", output="out", budget="25% cache at 8192", data={"dataset": "text.txt"})

    Args:
        config: All options at once.
        console: Where progress is shown.
        **options: Fields of `ConvertConfig`, which override those of `config`. Sections are mappings, as in YAML.

    Returns:
        What `results.json` has.

    Raises:
        ValueError, OSError, ImportError: Options, data or folders that cannot be used; before any training.
        InterruptedRunError: SIGINT or SIGTERM. What is finished is stored.
    """
    config = make_config(ConvertConfig, config, options)
    if config.budget is not None:
        _check_budget_fits_task(config, Budget.parse(config.budget))  # before any work
    return _execute(config, console, "convert", _convert)


def _check_budget_fits_task(config: ConvertConfig, budget: Budget) -> None:
    try:
        budget.unit_for(KINDS[config.resolved_task_type])
    except ValueError as error:
        default = (
            f"task_type is {config.resolved_task_type} by default here: give that of your model, if it is another."
        )
        raise ValueError(str(error) if config.task_type else f"{error} ({default})") from None


def _execute(
    config: Any, console: Console | None, tool: str, stages: Callable[[TrainingRun], dict[str, Any]]
) -> dict[str, Any]:
    """Open a run, and go through its stages unless it has ended before; show its results."""
    config = config.completed()
    models.read_attention(config)  # an error before the folder is opened
    run = TrainingRun(config, tool, console)
    path = run.folder / RESULTS_FILE
    with run.interruptible():
        if config.resume and path.is_file():
            results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        else:
            # `log.jsonl` appears with the first measured stage: a run that fails before it leaves no folder.
            with open_output(run.folder, (LOG_FILE,)) if run.is_main_process else nullcontext():
                run.process.wait_for_everyone()
                run.use_data(_load_data(run))
                facts = stages(run)
                times = {"format_version": 2, "created": utc_now()}
                results = {**times, "config": to_dict(config), **facts, "stages": run.state}
                if run.is_main_process:
                    write_json(path, json_safe(results))
        run.remove_checkpoints()
        for table in (
            budget_lines(config, results, results["stages"]),
            results_table(results, results["stages"]),
            recall_table(results["stages"]),
            speed_table(results["stages"]),
        ):
            for line in (*table, "") if table else ():
                run.progress.log(line)
        run.progress.log(f"Result: {run.folder / 'model'}")
    return results


def _finetune(run: TrainingRun) -> dict[str, Any]:
    config = run.config
    torch.manual_seed(config.seed)
    model, _ = models.load_model(config, run.data)
    if not is_patched(model):
        models.patch_as_configured(model, config)
    facts = _facts(run, model)
    _warn_of_exact_inputs(run, facts)
    if "trained" not in run.state:
        model, progress = run.train("train", model)
        run.record("train", progress)
        metrics = best_metrics(progress) or run.evaluate("trained", model)
        _save(run, model, facts, {**run.state, "trained": metrics})
        run.record("trained", metrics)
    return facts


def _convert(run: TrainingRun) -> dict[str, Any]:
    """Run all stages, whose metrics are in `run.state`; return what else `results.json` has."""
    config, budget = run.config, run.budget
    if budget is not None and budget.unit is not None:
        budget.unit.check_metric(budget.text, run.data.metric, greater_is_better=run.data.greater_is_better)
    teacher = _teacher(run)
    if config.task_type == "embedding":
        with run.progress.working("computing the teacher's embeddings"):
            _label_with_embeddings(run.data, teacher.to(run.process.device))
    run.measure("teacher", teacher)
    if config.task_type in ("causal-lm", "masked-lm"):
        run.measure("no attention", without_attention(teacher))
    student = copy.deepcopy(teacher)
    models.patch_as_configured(student, config, _plan_of_exact_heads(run, teacher))
    facts = _facts(run, student)
    _warn_of_exact_inputs(run, facts)
    metrics: Metrics = {}  # of the student as it is; none with `attention: null`, which nothing is taken back from
    if is_patched(student):
        learns, counts = facts["learned_parameters"] > 0, facts["beyond_exact"]
        if learns:
            student = _calibrate(run, student)
        metrics = run.measure("patched", student)
        transfers = learns and (counts is None or counts["longer"])
        _estimate(run, teacher, config.transfer.max_steps if transfers else 0)
        if learns:
            student, metrics = _transfer(run, student, metrics)
            student, metrics = _close_harmful_parts(run, student, metrics)
    if config.distill.enabled:
        # Distillation may shard its teacher; the control and the timing need complete models.
        control = copy.deepcopy(teacher) if config.control and is_patched(student) else None
        before = _copies(student)
        student = _distill(run, teacher, student, "distill", "distilled")
        metrics = _keep_better(run, student, before, metrics, "distilled")
        if control is not None:
            _distill(run, teacher, control, "control distill", "control")
    if metrics:
        run.once("converted", lambda: metrics)
    if is_sharded(teacher) and (_timed_lengths(run) or budget is not None):
        teacher = _teacher(run)
    if _timed_lengths(run):

        def time_both() -> dict[str, Any]:
            with run.progress.working("measuring speed"):
                return _speed(run, teacher, student)

        run.once("speed", time_both)
    if budget is not None:
        _verify_recall(run, teacher, student)
    _save(run, student, facts, run.state)
    return facts


def _save(run: TrainingRun, model: PreTrainedModel, facts: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the model with its card."""
    with run.progress.working("writing the model"):
        run.save(run.folder / "model", model, model_card(run.config, facts, state))


def _load_data(run: TrainingRun) -> TaskData:
    config, tokenizer = run.config, _tokenizer(run)
    max_length, reason = models.row_limit(config, tokenizer)
    with run.progress.working(f"reading {config.data.task or config.data.dataset or 'the data'}"):
        if config.task_type == "classification" and isinstance(config, ConvertConfig) and not config.teacher.enabled:
            models.check_head(config)
        with run.process.main_process_first():
            data = load_task_data(config.task_type, tokenizer, replace(config.data, max_length=max_length), config.seed)
    facts = data.facts
    held_out = sum(len(cast(Any, rows)) for rows in data.validation.values())
    train = f"{facts['train_rows']:,} rows of {facts['train_tokens']:,} tokens to train on"
    run.progress.log(f"Data: {data.rows}; {train}, {held_out:,} to validate on")
    if facts["train_truncated"]:
        share = facts["train_dropped_tokens"] / (facts["train_dropped_tokens"] + facts["train_tokens"])
        cut = f"{facts['train_truncated']:,} of {facts['train_rows']:,} training rows are cut"
        run.progress.log(f"{cut} to {max_length:,} tokens ({reason}); they lose {100 * share:.1f} % of all tokens.")
    if repeated := facts["validation_repeated"]:
        rows = f"{repeated:,} of {held_out:,} validation rows are in the training data, too"
        run.progress.log(f"{rows}: their scores say little of new inputs.")
    return data


def _tokenizer(run: TrainingRun) -> Any:
    """The model's tokenizer, or one that is trained on the training text first and saved in the run's folder."""
    config = run.config
    if config.train_tokenizer is None:
        return models.load_tokenizer(config)
    folder = run.folder / "tokenizer"
    run.prepare_folder()
    if run.is_main_process and not folder.exists():
        columns = config.data.text_columns
        with run.progress.working("training a tokenizer"):
            rows = load_splits(config.data, columns)["train"]
            texts = (text for column in columns for text in rows[column])
            tokenizer = models.train_tokenizer(texts, config.train_tokenizer, models.row_limit(config)[0])
        with atomic_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
    run.process.wait_for_everyone()
    return models.load_tokenizer(TrainingRunConfig(tokenizer=str(folder)))


def _teacher(run: TrainingRun) -> PreTrainedModel:
    """The exact model that is converted, fine-tuned first if the config says so."""
    config, data, folder = run.config, run.data, run.folder / "teacher"
    if "teacher stage" in run.state:
        return models.load_model(config, data, str(folder))[0]
    torch.manual_seed(config.seed)
    model, new_parameters = models.load_model(config, data)
    if is_patched(model):
        raise ValueError(f"{config.model!r} is patched already. Give the exact model that it was made from.")
    # A mechanism that does not fit the model is an error before any training.
    models.patch_as_configured(shared_copy(model), config)
    if not config.teacher.enabled:
        if new_parameters:
            raise models.missing_head(config, f"{new_parameters[0]} is missing")
        run.use_model(weights_fingerprint(model))
        return model
    model, progress = run.train("teacher", model)
    run.save(folder, model)
    run.record("teacher stage", progress)
    return model


def _plan_of_exact_heads(run: TrainingRun, teacher: PreTrainedModel) -> LinearAttentionConfig | None:
    """The plan with the key-value heads that stay exact, chosen once, on training rows; None if none are asked for."""
    config, budget = run.config, run.budget
    if not config.exact_share and budget is None:
        return None

    def choose() -> dict[str, Any]:
        if budget is None:
            heads, options, reason = _ranked_heads(run, teacher, config.options), config.options, ""
        else:
            heads, choice = _meet_budget(run, teacher, budget)
            options, reason = {**config.options, **choice.options}, choice.reason
            run.progress.log(f"For the budget {config.budget}: {reason}.")
        listed = ", ".join(f"{layer}: {list(numbers)}" for layer, numbers in sorted(heads.heads.items()))
        run.progress.log(f"Exact heads by layer: {listed}")
        plan = heads.plan({"attention": config.attention, **options})  # a seed among the options stays
        return {"plan": plan, "reason": reason, "heads": heads.table.to_dict("records")}

    return LinearAttentionConfig.parse(run.once("exact_heads", choose)["plan"])


def _ranked_heads(run: TrainingRun, teacher: PreTrainedModel, options: dict[str, Any]) -> ExactHeads:
    """Return the choice of exact heads where all others have a mechanism with these options."""
    config, data = run.config, run.data
    batches = leading_batches((data.collator([row]) for row in data.train), SEARCH_TOKENS)
    own = {"share": config.exact_share or SEARCH_SHARE, "seed": config.seed, **options}
    with run.progress.working("choosing the heads that stay exact"):
        return find_exact_heads(teacher, data.tokenizer, batches, config.attention, **own)


def _meet_budget(run: TrainingRun, teacher: PreTrainedModel, budget: Budget) -> tuple[ExactHeads, Choice]:
    """Choose for a budget. Heads are ranked where the others have the windows that they are going to have."""
    longest, options = run.data.longest, run.config.options
    if budget.cost == "cache":
        choice = choose_by_cache(budget, teacher, longest, options)
        heads = _ranked_heads(run, teacher, {**options, **choice.options})
    else:
        window = quarter_window(longest)
        options = {**options, "window_size": window}
        heads = _ranked_heads(run, teacher, options)
        fitted = cache(partial(_fitted_to_rows, run, teacher, options))
        choice = choose_by_measuring(budget, window, partial(_measure_choice, run, teacher, fitted, heads, options))
    return heads.with_share(choice.share), choice


def _fitted_to_rows(run: TrainingRun, teacher: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    """Return the teacher with a mechanism in all heads, calibrated as the student is going to be."""
    student, config = shared_copy(teacher), run.config
    models.patch_as_configured(student, config, LinearAttentionConfig.parse(config.attention, None, options))
    if len(rows := _long_rows(run, student)):
        _fit(run, student, rows)
    return student


def _measure_choice(
    run: TrainingRun,
    teacher: PreTrainedModel,
    fitted: Callable[[], PreTrainedModel],
    heads: ExactHeads,
    options: dict[str, Any],
    share: float,
) -> float | None:
    """Return the speedup of a share of exact heads with a mechanism for the others, or what it loses untrained.

    `fitted` returns the calibrated model with this mechanism in all heads. A calibration fits each head by itself.
    """
    config, data, budget = run.config, run.data, cast(Budget, run.budget)
    plan = heads.with_share(share).plan({"attention": config.attention, **options})
    if budget.unit is None:
        (timed, *_) = _timings(run, teacher, patch_model(shared_copy(teacher), plan), budget.length)["student"]
        # What varies more from round to round than it differs from 1 is no speedup.
        known = is_measurable(float(timed["speedup_p20"]), float(timed["speedup_p80"]))
        return float(timed["speedup"]) if known else min(float(timed["speedup"]), 1.0)
    student, name = with_learned_parts(teacher, plan, fitted()), f"{share:.0%} exact heads"
    if budget.unit.name != "recall":
        metrics = (run.state["teacher"], run.measure(name, student))
        return budget.unit.damage(*(scored(values, _goal(data)["metric"]) for values in metrics))
    return budget.unit.damage(*(_recall(run, *one, budget.length) for one in (("teacher", teacher), (name, student))))


def _recall(run: TrainingRun, name: str, model: PreTrainedModel, length: int) -> dict[str, Any]:
    """Measure once what a model recalls of prompts of so many tokens."""

    def measure() -> dict[str, Any]:
        with run.progress.working(f"measuring what {name} recalls"):
            model.to(run.process.device)
            tasks = [RECALL_TASKS[run.config.task_type]]
            options: dict[str, Any] = {"tasks": tasks, "lengths": [length], "trials": RECALL_TRIALS}
            result = measure_recall(model, run.data.tokenizer, **options, seed=run.config.seed)
        (row,) = result.summary().to_dict("records")
        return {"recall": row.pop("score"), **row, "task": tasks[0], "length": length}

    return run.once(f"recall, {name}", measure)


def _verify_recall(run: TrainingRun, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Measure what teacher and student recall, where the model can take such prompts.

    They are as long as a budget of recall says, and for other budgets no longer than the training rows. A classifier
    recalls nothing.
    """
    if run.config.task_type not in RECALL_TASKS:
        return
    length, budget = run.data.longest, cast(Budget, run.budget)
    if budget.length:
        length = min(budget.length, length) if budget.unit is None else budget.length
    try:
        for name, model in (("teacher", teacher), ("this model", student)):
            _recall(run, name, model, length)
    except ValueError as error:
        run.progress.log(f"Recall was not measured: {error}")


@torch.no_grad()
def _label_with_embeddings(data: TaskData, teacher: PreTrainedModel) -> None:
    teacher.eval()

    def embed(rows: dict[str, Any]) -> dict[str, Any]:
        batch = data.collator([{"input_ids": ids} for ids in rows["input_ids"]])
        inputs = {name: tensor.to(teacher.device) for name, tensor in batch.items()}
        hidden = teacher(**inputs).last_hidden_state
        return {"labels": mean_pooling(hidden, inputs["attention_mask"]).cpu().numpy()}

    def labelled(rows: Any) -> Any:
        return rows.map(embed, batched=True, batch_size=32, keep_in_memory=True, new_fingerprint=uuid.uuid4().hex)

    data.train = data.train.add_column("labels", [0.0] * len(data.train))  # at each step the teacher's, instead
    data.validation = {name: labelled(rows) for name, rows in data.validation.items()}


@torch.no_grad()
def _estimate(run: TrainingRun, teacher: PreTrainedModel, transfer_steps: int) -> None:
    """Say how long so many steps of attention transfer and distillation will take, by the time of one forward pass."""
    config, data = run.config, run.data
    rows: Any = data.train
    count = min(config.distill.per_device_train_batch_size, len(rows))
    batch = model_inputs(teacher.to(run.process.device), data.collator([rows[row] for row in range(count)]))
    seconds = []
    with evaluation_mode(teacher), _mixed_precision(run):
        for _ in range(2):  # the first one allocates memory
            started = time.perf_counter()
            float(teacher(**batch)[0].float().sum())
            seconds.append(time.perf_counter() - started)
    transfer, distill = config.transfer, config.distill
    rows_per_step = distill.gradient_accumulation_steps * count * run.process.num_processes
    steps = distill.max_steps or round(distill.num_train_epochs * len(rows) / rows_per_step)
    share = transfer.per_device_train_batch_size * transfer.gradient_accumulation_steps / count
    passes = TRANSFER_COST * transfer_steps * share * ("transfer" not in run.state)
    for stage in ("distill", *(["control distill"] if config.control else [])):
        passes += DISTILLATION_COST * steps * distill.gradient_accumulation_steps * (stage not in run.state)
    minutes = passes * seconds[-1] / 60
    text = f"{minutes:.0f} min" if minutes >= 2 else f"{60 * minutes:.0f} s"
    stages = f"{transfer_steps} steps of attention transfer and {steps} of distillation"
    run.progress.log(f"About {text} of training: {stages}, by the time of one forward pass ({seconds[-1]:.2g} s).")


def _long_rows(run: TrainingRun, student: PreTrainedModel) -> Any:
    """The training rows that the mechanism does not attend to exactly: the others say nothing of it."""
    rows: Any = run.data.train
    limit = exact_length(student)
    return rows.select([row for row, length in enumerate(row_lengths(rows)) if length > limit]) if limit else rows


def _calibrated_length(run: TrainingRun) -> int | None:
    """Return the length of the budget where it is beyond those that a calibration has in mind by itself."""
    length = 0 if run.budget is None else run.budget.length
    return length if length > CALIBRATION_LENGTH else None


def _fit(run: TrainingRun, student: PreTrainedModel, rows: Any) -> Calibration:
    """Fit the start of the mechanism to the first of some training rows."""
    batches = leading_batches((run.data.collator([row]) for row in rows), CALIBRATION_TOKENS)
    return calibrate(student.to(run.process.device), batches, max_length=_calibrated_length(run))


def _calibrate(run: TrainingRun, student: PreTrainedModel) -> PreTrainedModel:
    """Calibrate the student, unless no row says anything of its mechanism."""
    rows = _long_rows(run, student)
    if not len(rows):
        return student

    def fit() -> tuple[PreTrainedModel, dict[str, Any]]:
        with run.progress.working("calibrating"):
            result = _fit(run, student, rows)
        return student, {"step": 0, "within_factor_2": result.within() if len(result.table) else None}

    return cast(PreTrainedModel, run.learned("calibration", student, fit, is_learned))


def _close_harmful_parts(
    run: TrainingRun, student: PreTrainedModel, metrics: Metrics
) -> tuple[PreTrainedModel, Metrics]:
    """Close the linear parts that the model is better without, on held-out rows and, for a decoder, other text."""
    data, limit = run.data, exact_length(student)
    held_out = [row for rows in data.validation.values() for row in cast(Any, rows)]
    long = [row for row in held_out if len(row["input_ids"]) > limit]
    if not limit or not long:
        return student, metrics

    def close() -> tuple[PreTrainedModel, dict[str, Any]]:
        student.to(run.process.device)
        batches = leading_batches((data.collator([row]) for row in long), SELECTION_TOKENS)
        if run.config.task_type == "causal-lm":
            length = max(batch["input_ids"].shape[1] for batch in batches)
            documents = standard_library_documents()[:OTHER_DOCUMENTS]
            batches += [{"input_ids": torch.tensor([packed_rows(data.tokenizer, documents, length)[0]])}]
        with run.progress.working("measuring what linear parts are worth"):
            parts = close_harmful_parts(student, batches)
        rows = parts.table.to_dict("records")
        return student, {"step": 0, "layers": rows, **{f"loss, {name}": value for name, value in parts.loss.items()}}

    student = run.learned("linear parts", student, close, is_learned)
    layers = run.state["linear parts"]["layers"]
    if closed := sum(not row["kept"] for row in layers):
        run.progress.log(
            f"Closed, since the model is better without: the linear part of {closed} of {len(layers)} layers."
        )
        metrics = run.measure("closed", student)
    return student, metrics


def _transfer(run: TrainingRun, student: PreTrainedModel, metrics: Metrics) -> tuple[PreTrainedModel, Metrics]:
    """Attention transfer, on the rows that the mechanism does not attend to exactly: the others have no loss."""
    config, data = run.config, run.data
    if not config.transfer.max_steps:
        return student, metrics
    rows, limit = _long_rows(run, student), exact_length(student)
    if not len(rows):
        reason = f"Attention transfer was skipped: no training input has more than the {limit:,} tokens that are exact."
        run.progress.log(reason)
        run.once("transfer", lambda: {"step": 0, "skipped": reason})
        return student, metrics
    if len(rows) < len(data.train) and "transfer" not in run.state:
        run.progress.log(f"transfer: trains on the {len(rows):,} inputs of more than {limit:,} tokens.")
    # At least one row, which is trained on as well if it is the only one.
    count = max(min(VALIDATION_BATCHES * config.transfer.per_device_train_batch_size, len(rows) // 5), 1)
    train, validation = rows.select(range(max(len(rows) - count, 1))), rows.select(range(len(rows) - count, len(rows)))
    before = _copies(student, is_learned)
    student = run.learned("transfer", student, partial(run.transfer, student, train, validation), is_learned)
    run.measure("transferred", student)
    return student, _keep_better(run, student, before, metrics, "transferred")


def _distill(run: TrainingRun, teacher: Any, student: Any, stage: str, result: str) -> PreTrainedModel:
    """Distillation. Returns the student with the best step's weights and merged adapters."""
    config = run.config

    def train() -> tuple[nn.Module, dict[str, Any]]:
        if not config.distill.lora_rank:
            return run.train("distill", student, stage, teacher_model=teacher)
        with local_seed(config.seed + 1):  # other numbers than those of the data and of random features
            adapted = models.add_adapters(student, config.distill.lora_rank)
        model, progress = run.train("distill", adapted, stage)
        return model.merge_and_unload(), progress

    student = run.learned(stage, student, train).eval()
    run.once(result, lambda: best_metrics(run.state[stage]) or run.evaluate(result, student))
    return cast(PreTrainedModel, student)


def _copies(model: nn.Module, which: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return copies of the tensors that a stage may change (see `saved_tensors`)."""
    return {name: value.detach().clone() for name, value in saved_tensors(model, which).items()}


def _keep_better(
    run: TrainingRun, student: nn.Module, before: dict[str, Tensor], metrics: Metrics, result: str
) -> Metrics:
    """Give a student the tensors from before a stage that ended worse than it began; return the metrics that it has."""
    after = run.state[result]
    if not _is_worse(run.data, metrics, after, result):
        return after
    stage = {"transferred": "Attention transfer", "distilled": "Distillation"}[result]
    run.progress.log(f"{stage} is taken back: the {run.data.metric} is better without it.")
    student.load_state_dict(before, strict=False)
    return metrics


def _is_worse(data: TaskData, before: Metrics, after: Metrics, result: str) -> bool:
    """Whether a model is worse after the attention transfer or the distillation than before it.

    What counts is the metric of the task, which is too coarse to tell of a transfer, or the losses of all other data.
    """
    if result == "transferred" and data.metric_names:
        return False
    names = [data.metric] if data.metric_names else [name for name in after if name.endswith("loss")]
    known = [name for name in names if name in after and before.get(name) is not None]
    if any(after[name] is None for name in known):  # no number any more: NaN or infinite
        return True
    change = sum(after[name] - before[name] for name in known)
    return bool(change < 0 if data.greater_is_better else change > 0)


def _timed_lengths(run: TrainingRun) -> list[int]:
    """Return the lengths of the config, and that of a budget of speed, which is to be verified."""
    own = [run.budget.length] if run.budget is not None and run.budget.cost == "speedup" else []
    return sorted({*run.config.speed.lengths, *own})


def _speed(run: TrainingRun, teacher: PreTrainedModel, student: PreTrainedModel) -> dict[str, Any]:
    """Time one forward pass of teacher and student (batch 1), side by side, in the precision of the run."""
    rows: dict[str, list[dict[str, Any]]] = {"teacher": [], "student": []}
    timed, asked = [], _timed_lengths(run)
    lengths, note = possible_lengths(teacher, asked)
    if lengths != asked:  # where all are timed, the table marks those beyond the model's positions
        run.progress.log(note)
    for length in lengths:
        try:
            values = _timings(run, teacher, student, length)
        except ValueError as error:
            # A mechanism that is built for a largest length, such as Linformer, cannot be timed beyond it.
            run.progress.log(f"{length:,} tokens were not timed: {error}")
            continue
        timed.append(length)
        for name, own in rows.items():
            own.append(values[name][0])
    return {"baseline": "teacher", "lengths": timed, "rows": rows, "longest_input": longest_input(teacher)}


def _timings(run: TrainingRun, teacher: PreTrainedModel, student: PreTrainedModel, length: int) -> dict[str, Values]:
    tokens = [int(token) for token in cast(Any, run.data.train)[0]["input_ids"]]
    models = {name: model.to(run.process.device).eval() for name, model in (("teacher", teacher), ("student", student))}
    with _mixed_precision(run):
        return measure_passes(models, tokens, length, baseline="teacher", seconds=TIMING_SECONDS)


def _mixed_precision(run: TrainingRun) -> torch.autocast:
    """Return the context in which the run trains."""
    precision = torch.bfloat16 if run.config.bf16 else torch.float16
    return torch.autocast(run.process.device.type, precision, enabled=run.config.bf16 or run.config.fp16)


def _goal(data: TaskData) -> dict[str, Any]:
    """Return the metric that says how good a model is: of embeddings not the loss, which is 1 minus the cosine."""
    if data.task_type == "embedding":
        return {"metric": "cosine", "greater_is_better": True}
    return {"metric": data.metric, "greater_is_better": data.greater_is_better}


def _facts(run: TrainingRun, model: PreTrainedModel) -> dict[str, Any]:
    data, report = run.data, patch_report(model) if is_patched(model) else None
    limit, lengths = exact_length(model), row_lengths(data.train)
    counts = {"exact_length": limit, "inputs": len(lengths), "longer": sum(length > limit for length in lengths)}
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "learned_parameters": report.parameters if report else 0,
        "layers": [asdict(layer) for layer in report.layers] if report else [],
        # How many training inputs are longer than what all layers attend to exactly; None if a layer does so never.
        "beyond_exact": counts if limit else None,
        "data": data.facts,
        "goal": _goal(data),
        "most_frequent_answer": data.constant_answer_score(),
        "processes": run.process.num_processes,
        "environment": environment(run.process.device),
    }


def _warn_of_exact_inputs(run: TrainingRun, facts: dict[str, Any]) -> None:
    """Log a warning if hardly any training input is longer than what the mechanism attends to exactly."""
    counts = facts["beyond_exact"]
    if counts and facts["learned_parameters"] and counts["longer"] < MIN_LONGER_SHARE * counts["inputs"]:
        share = "little" if counts["longer"] else "nothing"
        remedy = "Give longer inputs, or narrow what is exact (options.window_size or block_size)."
        run.progress.log(f"{exactness(counts)} So these data train {share} of the mechanism. {remedy}")
