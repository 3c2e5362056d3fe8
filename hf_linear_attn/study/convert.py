"""Fine-tuning, and conversion of a fine-tuned model to a linear one, from options to a measured checkpoint."""

import copy
import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from ..config import DEFAULT_ATTENTION, LinearAttentionConfig
from ..data.task_data import TaskData, load_splits, load_task_data, row_lengths
from ..data.text import packed_rows, standard_library_documents
from ..feature_maps.base import AttentionShape
from ..integration.ablation import without_attention
from ..integration.context import SUBMODULE
from ..integration.discovery import attention_shape, longest_input, self_attention
from ..measure.recall import measure_recall
from ..measure.speed import measure_passes, possible_lengths
from ..measure.values import Values
from ..mechanisms.window import WindowAttention, WindowOptions
from ..patching import is_patched, patch_model, patch_report
from ..registry import ATTENTIONS, build_options
from ..training import models
from ..training.calibration import CALIBRATION_LENGTH, CALIBRATION_TOKENS, calibrate, leading_batches
from ..training.head_search import SEARCH_TOKENS, ExactHeads, find_exact_heads
from ..training.options import ConvertConfig, FinetuneConfig, TrainingRunConfig
from ..training.selection import close_harmful_parts
from ..training.sharding import is_sharded
from ..training.transfer import exact_length
from ..utils.environment import environment, json_safe, utc_now
from ..utils.files import atomic_folder, open_output, write_json
from ..utils.models import evaluation_mode, mean_pooling, model_inputs, shared_copy
from ..utils.options import make_config, to_dict
from .card import exactness, model_card, recall_table, results_table, speed_table
from .plan_result import Budget
from .stages import LOG_FILE, RESULTS_FILE, Run, best_metrics

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

#: What is asked of a model that is converted for a budget, and the texts it is asked about, at three depths each.
RECALL_TASK, RECALL_TRIALS = "niah_multikey_1", 16

#: Widths of windows that are considered, and shares of exact heads for a budget of quality.
WINDOWS, SHARES = (64, 128, 256, 384, 512, 768, 1024), (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)

#: Share of the allowed cache that windows and sums may take: with a fifth of SmolLM2's heads exact and windows of 384
#: tokens, a quarter of its cache at 8,192 tokens, they take 0.2 of it.
WINDOW_SHARE = 0.2

#: Seconds to time one length.
TIMING_SECONDS = 2.0

#: Forward passes that a step takes: of attention transfer, and of distillation with its teacher's.
TRANSFER_COST, DISTILLATION_COST = 2.0, 4.0


def finetune(config: FinetuneConfig | None = None, *, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Train a model, exact or patched, on the loss of a task; otherwise as `convert`, with a `FinetuneConfig`."""
    return _execute(make_config(FinetuneConfig, config, options), console, _finetune)


def convert(config: ConvertConfig | None = None, *, console: Console | None = None, **options: Any) -> dict[str, Any]:
    """Convert a fine-tuned model: (teacher) -> attention transfer -> distillation -> a measured checkpoint.

    The run reports its progress on the console, by default stderr. In the output folder `model/` is the checkpoint with
    its card, and `results.json`, whose content is returned, has the metrics of the teacher, of the patched model before
    any training, after attention transfer and after distillation, and its speed beside the teacher's. With `control`
    the teacher is trained as long, with exact attention, and its metrics stand beside those. With a `budget` the
    exact heads and windows of a decoder are chosen for it, and a short training is set where no other is.

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
        Budget.parse(config.budget)  # an error before any work
    return _execute(config, console, _convert)


def _execute(config: Any, console: Console | None, train: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Open a run, and train unless it has ended before; show its results and push its model."""
    models.read_attention(config)
    run = Run(config, train.__name__.strip("_"), console)
    path = run.folder / RESULTS_FILE
    with run.interruptible():
        if config.resume and path.is_file():
            results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        else:
            # A run that fails before it has trained anything leaves no folder.
            with open_output(run.folder, (LOG_FILE,)) if run.is_main_process else nullcontext():
                run.process.wait_for_everyone()
                run.data = _load_data(run)
                facts = train(run)
                times = {"format_version": 2, "created": utc_now()}
                results = {**times, "config": to_dict(config), **facts, "stages": run.state}
                if run.is_main_process:
                    write_json(path, json_safe(results))
        run.remove_checkpoints()
        for table in (
            results_table(results, results["stages"]),
            recall_table(results["stages"]),
            speed_table(results["stages"]),
        ):
            for line in (*table, "") if table else ():
                run.say(line)
        run.say(f"Result: {run.folder / 'model'}")
        run.push(run.folder / "model")
    return results


def _finetune(run: Run) -> dict[str, Any]:
    config = run.config
    torch.manual_seed(config.seed)
    model, _ = models.load_model(config, run.data)
    if not is_patched(model):
        models.patch_as_configured(model, config)
    facts = _facts(run, model)
    if "trained" not in run.state:
        model, progress = run.train("train", model)
        run.record("train", progress)
        metrics = best_metrics(progress) or run.measure("final", model)
        _save(run, model, facts, {**run.state, "trained": metrics})
        run.record("trained", metrics)
    return facts


def _convert(run: Run) -> dict[str, Any]:
    config = run.config
    teacher = _teacher(run)
    if config.task_type == "embedding":
        with run.working("computing the teacher's embeddings"):
            _label_with_embeddings(run.data, teacher.to(run.process.device))
    run.measure("teacher", teacher)
    if config.task_type in ("causal-lm", "masked-lm"):
        run.measure("no attention", without_attention(teacher))
    student = copy.deepcopy(teacher)
    models.patch_as_configured(student, config, _choose_heads(run, teacher))
    facts = _facts(run, student)
    if is_patched(student):
        student = _calibrate(run, student)
        run.measure("patched", student)
        _estimate(run, teacher)
        student = _close_harmful_parts(run, _transfer(run, student))
        parts = run.state.get("linear parts", {}).get("layers", ())
        if not config.distill.enabled and (_transfer_harms(run) or not all(part["kept"] for part in parts)):
            run.measure("converted", student)
    # Distillation may shard its teacher; the control and the timing need complete models.
    control = copy.deepcopy(teacher) if config.control and is_patched(student) and config.distill.enabled else None
    student = _distill(run, teacher, student, "distill", "distilled")
    if control is not None:
        _distill(run, teacher, control, "control distill", "control")
    if config.speed.lengths and "speed" not in run.state:
        if is_sharded(teacher):
            teacher = _teacher(run)
        with run.working("measuring speed"):
            run.record("speed", _speed(run, teacher, student))
    if config.budget is not None:
        _verify_recall(run, _teacher(run) if is_sharded(teacher) else teacher, student)
    _save(run, student, facts, run.state)
    return facts


def _save(run: Run, model: PreTrainedModel, facts: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the model with its card."""
    with run.working("writing the model"):
        run.save(run.folder / "model", model, model_card(run.config, facts, state))


def _load_data(run: Run) -> TaskData:
    config, tokenizer = run.config, _tokenizer(run)
    max_length, reason = models.longest_row(config, tokenizer)
    with run.working(f"reading {config.data.task or config.data.dataset}"):
        if config.task_type == "classification" and isinstance(config, ConvertConfig) and not config.teacher.enabled:
            models.check_head(config)
        with run.process.main_process_first():
            data = load_task_data(config.task_type, tokenizer, replace(config.data, max_length=max_length), config.seed)
    facts = data.facts
    held_out = sum(len(cast(Any, rows)) for rows in data.validation.values())
    train = f"{facts['train_rows']:,} rows of {facts['train_tokens']:,} tokens to train on"
    run.say(f"Data: {data.rows}; {train}, {held_out:,} to validate on")
    if facts["train_truncated"]:
        share = facts["train_dropped_tokens"] / (facts["train_dropped_tokens"] + facts["train_tokens"])
        cut = f"{facts['train_truncated']:,} of {facts['train_rows']:,} training rows are cut"
        run.say(f"{cut} to {max_length:,} tokens ({reason}); they lose {100 * share:.1f} % of all tokens.")
    return data


def _tokenizer(run: Run) -> Any:
    """The model's tokenizer, or one that is trained on the training text first and saved in the run's folder."""
    config = run.config
    if config.train_tokenizer is None:
        return models.load_tokenizer(config)
    folder = run.folder / "tokenizer"
    run.prepare_folder()
    if run.is_main_process and not folder.exists():
        column = config.data.text_columns[0]
        with run.working("training a tokenizer"):
            rows = load_splits(config.data, (column,))["train"]
            longest = models.longest_row(config)[0]
            tokenizer = models.train_tokenizer(iter(rows[column]), config.train_tokenizer, longest)
        with atomic_folder(folder) as temporary:
            tokenizer.save_pretrained(temporary)
    run.process.wait_for_everyone()
    return models.load_tokenizer(TrainingRunConfig(tokenizer=str(folder)))


def _teacher(run: Run) -> PreTrainedModel:
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
        return model
    model, progress = run.train("teacher", model)
    run.save(folder, model)
    run.record("teacher stage", progress)
    return model


def _choose_heads(run: Run, teacher: PreTrainedModel) -> LinearAttentionConfig | None:
    """The plan with the key-value heads that stay exact, chosen once, on the first training rows; None without any."""
    config, data = run.config, run.data
    if not config.exact_share and config.budget is None:
        return None
    if "exact_heads" not in run.state:
        batches = leading_batches((data.collator([row]) for row in data.train), SEARCH_TOKENS)
        options = {"share": config.exact_share or SEARCH_SHARE, "seed": config.seed, **config.options}
        with run.working("choosing the heads that stay exact"):
            search = find_exact_heads(teacher, data.tokenizer, batches, config.attention, **options)
        chosen = config.options
        if config.budget is not None:
            choice = _choice(run, teacher, search)
            search, chosen = search.with_share(choice.share), {**config.options, "window_size": choice.window}
            run.say(f"For the budget {config.budget}: {choice.reason}.")
        plan = search.plan({"attention": config.attention, **chosen})  # with a seed of the mechanism, too
        run.record("exact_heads", {"plan": plan, "heads": search.table.to_dict("records")})
        heads = ", ".join(f"{layer}: {list(numbers)}" for layer, numbers in sorted(search.heads.items()))
        run.say(f"Exact heads by layer: {heads}")
    return LinearAttentionConfig.parse(run.state["exact_heads"]["plan"]).with_default("seed", config.seed)


@dataclass(frozen=True)
class Choice:
    """The share of the key-value heads that stay exact, the windows of all others in tokens, and why."""

    share: float
    window: int
    reason: str


def choose(
    budget: Budget,
    model: PreTrainedModel,
    longest: int,
    measure: Callable[[float, int], float | None],
    options: Mapping[str, Any] | None = None,
) -> Choice:
    """Choose exact heads and windows for a budget.

    A budget of cache is met by arithmetic: the widest windows that take `WINDOW_SHARE` of it, and as many exact heads
    as the rest holds. For the others the shares of `SHARES` are measured in turn, with windows of a quarter of the
    rows and before any training: for a budget of quality from none on until the damage is within it, for one of speed
    from the largest share down until the model is fast enough.

    Args:
        budget: Of cache, of speed, or of lost perplexity, nats or recall.
        model: The exact decoder.
        longest: Tokens of the longest training row.
        measure: Returns the damage of a share and a window in the budget's unit, or its speed relative to the exact
            model; None where it is undefined.
        options: Options of the windows, beside their width.

    Raises:
        ValueError: The budget is of another kind, cannot be measured, or no choice meets it.
    """
    if budget.cost == "cache" and budget.length is not None:
        window_options: WindowOptions = build_options(ATTENTIONS.get(DEFAULT_ATTENTION), dict(options or {}))
        return _by_cache(model, budget.limit / 100, budget.length, window_options)
    unit = budget.unit
    if unit is not None and unit.measurement not in ("perplexity", "recall"):
        remedy = "Give a budget such as '25% cache at 8192', '2x at 4096', '2% perplexity' or '90% recall at 2048'."
        raise ValueError(f"The budget {budget.text!r} is not for a language model. {remedy}")
    window = max([width for width in WINDOWS if 4 * width <= longest], default=WINDOWS[0])
    tried = []
    for share in SHARES if unit is not None else reversed(SHARES):
        value = measure(share, window)
        if value is None:
            raise ValueError(f"The budget {budget.text!r} cannot be measured: the exact model recalls nothing there.")
        tried.append(f"{f'{value:.2f}x' if unit is None else unit.format(value)} with {share:.0%} exact heads")
        if value >= budget.limit if unit is None else value <= budget.limit:
            return Choice(share, window, f"untrained, the first choice within {budget.text}: {', '.join(tried)}")
    raise ValueError(f"No choice is within the budget {budget.text!r}: {', '.join(tried)}. Allow more, or use plan.")


def _by_cache(model: PreTrainedModel, limit: float, length: int, options: WindowOptions) -> Choice:
    """Choose by the bytes of caches and states after `length` tokens in float32, relative to exact attention.

    Exact heads count as in float32 also where the option `cache_dtype` is int8: a layer of nothing else ignores it.
    Layers that see a sliding window only keep their caches, and do not count.
    """
    layers = [(index, layer) for index, layer in enumerate(self_attention(model)) if layer.span == "full"]
    # The index of a layer changes no size.
    shapes = [replace(attention_shape(layer, index, None), layer_index=0) for index, layer in layers]
    whole = length * sum(shape.token_bytes for shape in shapes)

    @cache
    def state_bytes(shape: AttentionShape, width: int) -> int:
        return WindowAttention(shape, replace(options, window_size=width)).state_bytes()

    states = {width: sum(state_bytes(shape, width) for shape in shapes) / whole for width in WINDOWS}
    fitting = [width for width, share in states.items() if share <= limit]
    if not fitting:
        least = f"windows of {WINDOWS[0]} tokens take {states[WINDOWS[0]]:.1%} of the cache at {length:,} tokens"
        raise ValueError(f"The budget of {limit:.0%} cannot be met: {least}. Allow more, or count longer inputs.")
    window = max([width for width in fitting if states[width] <= WINDOW_SHARE * limit], default=fitting[0])
    # As many heads as fit are exact: of share s they and the others take s + (1 - s) state <= limit.
    heads, state = sum(shape.num_key_value_heads for shape in shapes), states[window]
    share = min(int(heads * (limit - state) / (1 - state)), heads - 1) / heads
    reason = f"{share + (1 - share) * state:.1%} of the cache at {length:,} tokens"
    return Choice(share, window, f"{DEFAULT_ATTENTION} of {window} tokens and {share:.1%} exact heads take {reason}")


def _choice(run: Run, teacher: PreTrainedModel, heads: ExactHeads) -> Choice:
    """Choose exact heads and windows for the budget of the run."""
    config, data = run.config, run.data
    budget, longest = Budget.parse(str(config.budget)), max(row_lengths(data.train))
    exact = run.state["teacher"]
    rows = leading_batches((data.collator([row]) for row in data.train), CALIBRATION_TOKENS)

    def measure(share: float, window: int) -> float | None:
        options = {**config.options, "window_size": window}
        plan = heads.with_share(share).plan({"attention": config.attention, **options})
        student = patch_model(shared_copy(teacher), plan)
        if budget.unit is None:
            return _timings(run, teacher, student, budget.length or longest)["student"][0]["speedup"]
        calibrate(student, rows, max_length=_calibrated_length(run))
        name = f"{share:.0%} exact heads"
        if budget.unit.name == "recall":
            lost = _recall(run, "teacher", teacher, budget.length), _recall(run, name, student, budget.length)
            return budget.unit.damage(*lost)
        return budget.unit.damage(exact, run.measure(name, student))

    return choose(budget, teacher, longest, measure, config.options)


def _recall(run: Run, name: str, model: PreTrainedModel, length: int | None) -> dict[str, Any]:
    """Measure once what a model recalls of prompts of so many tokens (None: of the longest training row)."""
    stage = f"recall, {name}"
    if stage not in run.state:
        length = length or max(row_lengths(run.data.train))
        with run.working(f"measuring what {name} recalls"):
            model.to(run.process.device)
            options: dict[str, Any] = {"tasks": [RECALL_TASK], "lengths": [length], "trials": RECALL_TRIALS}
            result = measure_recall(model, run.data.tokenizer, **options, seed=run.config.seed)
        (row,) = result.summary().to_dict("records")
        values = {"recall": row.pop("score"), **row, "length": length}
        run.record(stage, values)
    return run.state[stage]


def _verify_recall(run: Run, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Measure what teacher and student recall, where the model can take such prompts.

    They are as long as a budget of recall says, and for other budgets no longer than the training rows.
    """
    budget, length = Budget.parse(str(run.config.budget)), max(row_lengths(run.data.train))
    if budget.length is not None:
        length = min(budget.length, length) if budget.unit is None else budget.length
    try:
        for name, model in (("teacher", teacher), ("this model", student)):
            _recall(run, name, model, length)
    except ValueError as error:
        run.say(f"Recall was not measured: {error}")


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
def _estimate(run: Run, teacher: PreTrainedModel) -> None:
    """Say how long attention transfer and distillation will take, from the time of one forward pass."""
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
    updates = distill.gradient_accumulation_steps * count * run.process.num_processes
    steps = distill.max_steps or round(distill.num_train_epochs * len(rows) / updates)
    share = transfer.per_device_train_batch_size * transfer.gradient_accumulation_steps / count
    passes = TRANSFER_COST * transfer.max_steps * share * ("transfer" not in run.state)
    for stage in ("distill", *(["control distill"] if config.control else [])):
        passes += DISTILLATION_COST * steps * distill.gradient_accumulation_steps * (stage not in run.state)
    minutes = passes * seconds[-1] / 60
    text = f"{minutes:.0f} min" if minutes >= 2 else f"{60 * minutes:.0f} s"
    stages = f"{transfer.max_steps} steps of attention transfer and {steps} of distillation"
    run.say(f"About {text} of training: {stages}, by the time of one forward pass ({seconds[-1]:.2g} s).")


def _long_rows(run: Run, student: PreTrainedModel) -> Any:
    """The training rows that the mechanism does not attend to exactly: the others say nothing of it."""
    rows: Any = run.data.train
    limit = exact_length(student)
    return rows.select([row for row, length in enumerate(row_lengths(rows)) if length > limit]) if limit else rows


def _calibrated_length(run: Run) -> int | None:
    """Return the length of the budget where it is beyond those that a calibration has in mind by itself."""
    length = Budget.parse(run.config.budget).length if run.config.budget else None
    return length if length and length > CALIBRATION_LENGTH else None


def _calibrate(run: Run, student: PreTrainedModel) -> PreTrainedModel:
    """Fit the start of the mechanism to the first training rows."""
    rows = _long_rows(run, student)
    if not len(rows) or not patch_report(student).parameters:
        return student

    def fit() -> tuple[PreTrainedModel, dict[str, Any]]:
        student.to(run.process.device)
        batches = (run.data.collator([row]) for row in rows)
        with run.working("calibrating"):
            chosen = leading_batches(batches, CALIBRATION_TOKENS)
            result = calibrate(student, chosen, max_length=_calibrated_length(run))
        return student, {"step": 0, "within_factor_2": result.within() if len(result.table) else None}

    return cast(PreTrainedModel, run.learned("calibration", student, fit, f".{SUBMODULE}."))


def _close_harmful_parts(run: Run, student: PreTrainedModel) -> PreTrainedModel:
    """Close the linear parts that the model is better without, on held-out rows and, for a decoder, other text."""
    data, limit = run.data, exact_length(student)
    held_out = [row for rows in data.validation.values() for row in cast(Any, rows)]
    long = [row for row in held_out if len(row["input_ids"]) > limit]
    if not limit or not long or not patch_report(student).parameters:
        return student

    def close() -> tuple[PreTrainedModel, dict[str, Any]]:
        student.to(run.process.device)
        batches = leading_batches((data.collator([row]) for row in long), SELECTION_TOKENS)
        if run.config.task_type == "causal-lm":
            length = max(batch["input_ids"].shape[1] for batch in batches)
            documents = standard_library_documents()[:OTHER_DOCUMENTS]
            batches += [{"input_ids": torch.tensor([packed_rows(data.tokenizer, documents, length)[0]])}]
        with run.working("measuring what linear parts are worth"):
            parts = close_harmful_parts(student, batches)
        rows = parts.table.to_dict("records")
        return student, {"step": 0, "layers": rows, **{f"loss, {name}": value for name, value in parts.loss.items()}}

    student = run.learned("linear parts", student, close, f".{SUBMODULE}.")
    layers = run.state["linear parts"]["layers"]
    if closed := sum(not row["kept"] for row in layers):
        run.say(f"Closed, since the model is better without: the linear part of {closed} of {len(layers)} layers.")
    return student


def _transfer(run: Run, student: PreTrainedModel) -> PreTrainedModel:
    """Attention transfer, on the rows that the mechanism does not attend to exactly: the others have no loss.

    What it has learned is taken back if the loss of the model is higher than before.
    """
    config, data = run.config, run.data
    if not config.transfer.max_steps or not patch_report(student).parameters:
        return student
    rows, limit = _long_rows(run, student), exact_length(student)
    if not len(rows):
        reason = f"Attention transfer was skipped: no training input has more than the {limit:,} tokens that are exact."
        run.say(reason)
        run.record("transfer", {"step": 0, "skipped": reason})
        return student
    if len(rows) < len(data.train) and "transfer" not in run.state:
        run.say(f"transfer: trains on the {len(rows):,} inputs of more than {limit:,} tokens.")
    # At least one row, which is trained on as well if it is the only one.
    count = max(min(VALIDATION_BATCHES * config.transfer.per_device_train_batch_size, len(rows) // 5), 1)
    train, validation = rows.select(range(max(len(rows) - count, 1))), rows.select(range(len(rows) - count, len(rows)))
    learn = partial(run.transfer, student, train, validation)
    parameters = student.named_parameters()
    before = {name: value.detach().clone() for name, value in parameters if f".{SUBMODULE}." in name}
    student = run.learned("transfer", student, learn, f".{SUBMODULE}.")
    run.measure("transferred", student)
    if _transfer_harms(run):
        run.say("Attention transfer is taken back: the loss is lower without it.")
        student.load_state_dict(before, strict=False)
    return student


def _transfer_harms(run: Run) -> bool:
    """Whether the loss is higher after attention transfer. Metrics of a task are too coarse to tell."""
    before, after = (run.state.get(stage, {}) for stage in ("patched", "transferred"))
    losses = [name for name in after if name.endswith("loss") and not run.data.metric_names]
    return sum(after[name] - before[name] for name in losses) > 0


def _distill(run: Run, teacher: Any, student: Any, stage: str, result: str) -> PreTrainedModel:
    """Distillation. Returns the student with the best step's weights and merged adapters.

    What the student has learned is taken back if it is worse than before, by the metric that chooses the best step.
    """
    config = run.config
    if not config.distill.enabled:
        return cast(PreTrainedModel, student)

    def train() -> tuple[nn.Module, dict[str, Any]]:
        if not config.distill.lora_rank:
            return run.train("distill", student, stage, teacher_model=teacher)
        model, progress = run.train("distill", models.add_adapters(student, config.distill), stage)
        return model.merge_and_unload(), progress

    saved = student.named_parameters() if result == "distilled" else ()  # the control is not taken back
    before = {name: value.detach().clone() for name, value in saved}
    student = run.learned(stage, student, train, "").eval()
    if result not in run.state:
        run.record(result, best_metrics(run.state[stage]) or run.measure(result, student))
    if result == "distilled" and _distillation_harms(run):
        run.say(f"Distillation is taken back: the {run.data.metric} is better without it.")
        student.load_state_dict(before, strict=False)
        run.measure("converted", student)
    return cast(PreTrainedModel, student)


def _distillation_harms(run: Run) -> bool:
    """Whether the metric of the data is worse than before the distillation."""
    stage = "patched" if _transfer_harms(run) or "transferred" not in run.state else "transferred"
    before, after = (run.state.get(name, {}).get(run.data.metric) for name in (stage, "distilled"))
    if before is None or after is None:
        return False
    return bool(after < before if run.data.greater_is_better else after > before)


def _speed(run: Run, teacher: PreTrainedModel, student: PreTrainedModel) -> dict[str, Any]:
    """Time one forward pass of teacher and student (batch 1), side by side, in the precision of the run."""
    lengths, _ = possible_lengths(teacher, run.config.speed.lengths)
    rows: dict[str, list[dict[str, Any]]] = {"teacher": [], "student": []}
    try:
        for length in lengths:
            values = _timings(run, teacher, student, length)
            for name, own in rows.items():
                own.append(values[name][0])
    except ValueError as error:
        # A mechanism that is built for a largest length, such as Linformer, cannot be timed beyond it.
        return {"skipped": str(error)}
    return {"baseline": "teacher", "lengths": lengths, "rows": rows, "longest_input": longest_input(teacher)}


def _timings(run: Run, teacher: PreTrainedModel, student: PreTrainedModel, length: int) -> dict[str, Values]:
    tokens = [int(token) for token in cast(Any, run.data.train)[0]["input_ids"]]
    models = {name: model.to(run.process.device).eval() for name, model in (("teacher", teacher), ("student", student))}
    with _mixed_precision(run):
        return measure_passes(models, tokens, length, baseline="teacher", seconds=TIMING_SECONDS)


def _mixed_precision(run: Run) -> torch.autocast:
    """Return the context in which the run trains."""
    precision = torch.bfloat16 if run.config.bf16 else torch.float16
    return torch.autocast(run.process.device.type, precision, enabled=run.config.bf16 or run.config.fp16)


def _facts(run: Run, model: PreTrainedModel) -> dict[str, Any]:
    data, report = run.data, patch_report(model) if is_patched(model) else None
    limit, lengths = exact_length(model), row_lengths(data.train)
    counts = {"exact_length": limit, "inputs": len(lengths), "longer": sum(length > limit for length in lengths)}
    if limit and report and report.parameters and counts["longer"] < MIN_LONGER_SHARE * len(lengths):
        share = "little" if counts["longer"] else "nothing"
        remedy = "Give longer inputs, or narrow what is exact (options.window_size, store_size or block_size)."
        run.say(f"{exactness(counts)} So these data train {share} of the mechanism. {remedy}")
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "learned_parameters": report.parameters if report else 0,
        "layers": [asdict(layer) for layer in report.layers] if report else [],
        # How many training inputs are longer than what all layers attend to exactly; None if a layer does so never.
        "beyond_exact": counts if limit else None,
        "data": data.facts,
        "goal": {"metric": data.metric, "greater_is_better": data.greater_is_better},
        "most_frequent_answer": data.most_frequent_answer(),
        "processes": run.process.num_processes,
        "environment": environment(run.process.device),
    }
