"""`plan`: which layers or key-value heads of a model to convert under a budget, as a study."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..checkpoints import save_checkpoint
from ..data.task_data import read_documents
from ..measure.inputs import possible_lengths, timing_options
from ..measure.values import Values
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS
from ..training.calibration import leading_batches
from ..training.head_search import SEARCH_TOKENS, ExactHeads, find_exact_heads
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import check_output
from ..utils.models import shared_copy
from ..utils.options import OptionError, make_config
from ..utils.progress import ConsoleProgress
from .budget import Budget
from .inputs import (
    TRANSFER_SETTINGS,
    Inputs,
    inputs_text,
    recall_measurement,
    row_facts,
    task_inputs,
    text_inputs,
    transferred,
)
from .layer_search import LayerSearch, convert_as_planned
from .plan_result import PAGE, PLAN, PLOT, REPORT, PlanResult, write_plan
from .settings import EvaluateConfig, PlanConfig, Settings
from .study import RECORDS_FILE, Study, check_study, open_study
from .variants import ExactModel, Variant, check_fits, check_mechanism, describe_source, seed_options

FORMAT_VERSION = 6

#: Shares of the key-value heads that stay exact in a search over heads.
HEAD_SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)

#: The measurement that chooses the layers of each kind of model.
MEASUREMENTS = {"classifier": "task", "decoder": "perplexity", "encoder": "sentence_embeddings"}

#: What the held-out data are for, half of them each.
HALVES = ("choice", "verification")


@dataclass(frozen=True)
class PlannedModel:
    """A model with its data and its patched copies."""

    exact: ExactModel
    inputs: Inputs
    settings: Settings
    linear: Variant  # the copy that is linear in every layer
    timed: PreTrainedModel  # another one where a mechanism is built for a too short largest length
    lengths: tuple[int, ...]  # to time
    positions_note: str  # about lengths beyond the model's positions


def plan(config: PlanConfig | None = None, *, console: Console | None = None, **options: Any) -> PlanResult:
    """Find which layers or heads to convert under a budget, write the plan and its report, and show a table.

        plan(model="gpt2", budget="2% perplexity", data={"dataset": "wiki.txt"}, output="plan").met

    Where the data cannot measure attention, no plan is written for a budget of quality.

    Args:
        config: What is searched, and how thoroughly.
        console: Where progress and results are shown; None: stdout.
        **options: Fields of `PlanConfig`, which override those of `config`. Sections are mappings, as in YAML.

    Raises:
        ValueError, OSError: Options, a model or data that cannot be used. Nothing has been measured then.
        ImportError: A package of the extra `demo` is missing.
    """
    config = make_config(PlanConfig, config, options)
    started = time.perf_counter()
    require_packages("jinja2", "matplotlib", "pandas", extra="demo", purpose="A plan's report")
    budget, where = Budget.parse(config.budget), {"overwrite": config.overwrite, "resume": config.resume}
    check_mechanism(config.attention)
    check_study(config.output, **where)
    if config.save_model is not None:
        target: dict[str, Any] = {"overwrite": config.overwrite, "source": config.model, "option": "--save_model"}
        check_output(config.save_model, ["config.json"], **target)
    one = prepare(config, budget)
    facts, device, folder = facts_of(one, config), one.exact.model.device, Path(config.output)
    with (
        ConsoleProgress(console) as progress,
        open_study(folder, "plan", facts["settings"], device=device, progress=progress, **where) as study,
    ):
        _log_data(study, facts)
        facts["resumed"] = len(study.records) > 0
        patched, facts["transfer"] = train(study, one)
        result = LayerSearch(
            study,
            one.exact.model,
            patched,
            one.timed,
            dict(zip(HALVES, one.inputs.measurements, strict=True)),
            budget,
            one.linear,
            heads=choose_heads(study, one, config) if config.search == "heads" else (),
            lengths=one.lengths,
            tokens=one.inputs.tokens,
            seconds=one.settings.seconds,
        ).run()
        result = replace(result, positions_note=one.positions_note)
        facts |= {**environment(device), "seconds": time.perf_counter() - started}
        write_plan(result, json_safe(facts), folder)
        progress.table(result.formatted_table())
        for sentence in result.summary():
            progress.log(f"• {sentence}")
        written = f"Plan: {folder / PLAN}, with" if result.plan is not None else f"No plan was written. In {folder}:"
        progress.log(f"{written} {PAGE}, {PLOT} and {REPORT}")
        if config.save_model is not None:
            progress.log(save_planned(result, one, patched, config))
    return result


def _log_data(study: Study, facts: dict[str, Any]) -> None:
    model, data = facts["model"], facts["data"]
    study.progress.log(f"Model: {model['name']}, {model['class']}, {model['parameters']:,} parameters")
    uses = {"transfer": "train", "choice": "choice", "verification": "verification"}
    rows = [f"{inputs_text(data[part])} for the {use}" for use, part in uses.items()]
    study.progress.log(f"Data: {data['source']}: {data['rows']}; {', '.join(rows)}")
    assert study.folder is not None
    study.progress.log(f"Records: {study.folder / RECORDS_FILE}; a run that is stopped continues with --resume")


def prepare(config: PlanConfig, budget: Budget) -> PlannedModel:
    """Load the model and its data; every error of the input is raised here."""
    name, kind, _ = describe_source(config.model, config.data.task, config.data.dataset)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    recalls = budget.unit is not None and budget.unit.name == "recall" and kind != "classifier"
    budget.unit_of("recall" if recalls else MEASUREMENTS[kind])
    text = None if kind == "classifier" else read_documents(config.data)
    data = config.data.task or config.data.dataset or "the data"
    exact = ExactModel.load(config.model, kind, name, None, config.device, data)
    model, settings = exact.model, plan_settings(config, exact)
    if text is None:
        rows = 256 if config.quick and config.data.max_eval_samples is None else config.data.max_eval_samples
        inputs = task_inputs(exact, replace(config.data, max_eval_samples=rows), settings, HALVES)
    else:
        inputs = text_inputs(exact, text, settings, HALVES)
    if recalls:  # chosen for and verified with prompts of two seeds, so many of them for each task and depth
        length = budget.length or 0
        recall = [recall_measurement(exact, [length], config.seed + number) for number in range(len(HALVES))]
        prompts = row_facts([length] * recall[0][0].settings["trials"])
        facts = {**inputs.facts, **dict.fromkeys(HALVES, prompts)}
        inputs = replace(inputs, measurements=tuple(recall), facts=facts)
    usual = (1024,) if config.quick else (1024, 4096)
    lengths, note = possible_lengths(model, usual if config.speed.lengths is None else config.speed.lengths)
    if budget.cost == "cache" and kind != "decoder":
        raise ValueError(f"The budget {budget.text!r} is for a causal language model, whose cache grows.")
    if budget.unit is None:
        possible, own_note = possible_lengths(model, [budget.length or 0])
        if budget.length not in possible:
            raise ValueError(f"The budget {budget.text!r} is beyond the model's {exact.positions} positions.")
        note = note or own_note
    entry = ATTENTIONS.get(config.attention)
    options = {**seed_options(entry, config.seed), **config.options}
    patched = check_fits(model, config.attention, "planned", **options)
    longer = timing_options(entry, options, exact.positions, max(lengths, default=1))
    timed = patched if longer == options else patch_model(shared_copy(model), config.attention, **longer)
    transfer = {"data": inputs.hash, **{key: getattr(settings, key) for key in TRANSFER_SETTINGS}}
    identity: dict[str, Any] = {"seed": config.seed, "options": config.options, "settings": transfer}
    linear = Variant(config.attention, config.attention, cache(lambda: patched), **identity)
    return PlannedModel(exact, inputs, settings, linear, timed, tuple(lengths), note)


def plan_settings(config: PlanConfig, exact: ExactModel) -> Settings:
    """Return how much is measured: more than in an evaluation, because a choice of layers rests on it."""
    limit, quick, length = exact.positions, config.quick, config.data.max_length
    if limit is not None and length is not None and length > limit:
        raise OptionError("data.max_length", f"{length} is beyond the model's {limit} positions. Give {limit} or less.")
    settings = exact.settings(EvaluateConfig(sequence_length=length, quick=quick, seed=config.seed))
    return replace(
        settings,
        attentions=(config.attention,),
        steps=config.steps if config.steps is not None else 25 if quick else 200,
        evaluations=2 if quick else 5,
        validation_sequences=2 * settings.batch_size,
        test_sequences=32 if quick else 256,
        perplexity_tokens=4096 if quick else 32768,
        seconds=0.5 if quick else 2.0,
    )


def train(study: Study, one: PlannedModel) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train the learned parts of all layers, once, or load them; return the model and what the report says of it.

    Each layer sees the hidden states of the exact model, whatever the other layers are: one run serves every choice of
    layers.
    """
    patched, name = one.linear.load(), one.linear.attention
    if not one.settings.steps or not ATTENTIONS.get(name).learned:
        return patched, {}
    conditions = one.linear.of(one.exact.conditions("attention_transfer"))
    patched = transferred(study, patched, one.inputs, one.settings, conditions, label=name)
    record = study.records.latest(conditions)
    assert record is not None
    names = {"steps": "steps", "best_step": "best_step", "seconds": "transfer_seconds"}
    return patched, {key: record.value(metric) for key, metric in names.items()}


def choose_heads(study: Study, one: PlannedModel, config: PlanConfig) -> list[ExactHeads]:
    """Return the choices of exact heads to measure, made on training rows (see `find_exact_heads`), once."""
    import pandas as pd

    study.progress.status("the choice of exact heads", 0, 1)

    def rank() -> Values:
        search = find_exact_heads(
            one.exact.model,
            one.exact.tokenizer,
            leading_batches(one.inputs.train, SEARCH_TOKENS),
            config.attention,
            seed=config.seed,
            **config.options,
        )
        rows = search.table.drop(columns="chosen").melt(["layer", "head"], var_name="metric")
        return rows.to_dict("records")

    record = study.measure(one.linear.of(one.exact.conditions("exact_heads")), rank)
    table = pd.DataFrame(record.values).pivot(index=["layer", "head"], columns="metric", values="value")
    search = ExactHeads.first_rows(table.reset_index(), 0, {"attention": config.attention, **config.options})
    return [search.with_share(share) for share in HEAD_SHARES]


def facts_of(one: PlannedModel, config: PlanConfig) -> dict[str, Any]:
    """Return what the report says of the run beside its result. Of paths it has the names only."""
    facts, entry = one.inputs.facts, ATTENTIONS.get(config.attention)
    names = ("budget", "attention", "options", "search", "quick", "device", "threads", "seed")
    measured = (*TRANSFER_SETTINGS, "test_sequences", "perplexity_tokens", "seconds")
    settings = {name: getattr(config, name) for name in names} | {"lengths": one.lengths}
    source = facts["source"] if config.data.dataset is None else Path(config.data.dataset).name
    parameters = patch_report(one.linear.load()).parameters
    rows = {name: facts[name] for name in ("rows", "train", *HALVES)}
    return {
        "format_version": FORMAT_VERSION,
        "created": utc_now(),
        "model": one.exact.facts(),
        "settings": settings | {name: getattr(one.settings, name) for name in measured},
        "mechanism": f"{entry.name}: {entry.description}. {entry.paper}. {parameters:,} parameters",
        "data": {"source": source, "sha256": one.inputs.hash, **rows},
    }


def save_planned(result: PlanResult, one: PlannedModel, patched: PreTrainedModel, config: PlanConfig) -> str:
    """Write a checkpoint with the planned layers and their learned parts; return a message."""
    assert config.save_model is not None
    if not result.met or result.plan is None:
        return "No checkpoint was written, because the budget is not met."
    model = convert_as_planned(one.exact.model, patched, result.plan)
    save_checkpoint(model, config.model, config.save_model, overwrite=config.overwrite)
    return f"Checkpoint: {config.save_model}"
