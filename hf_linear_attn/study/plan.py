"""`plan`: which layers or key-value heads of a model to convert under a budget, as a study."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..checkpoints import save_checkpoint
from ..integration.discovery import self_attention
from ..measure.quality import Assessment, assess
from ..measure.speed import FORWARD, fill_cache, measure_passes, possible_lengths, timing_options
from ..measure.values import Values, value
from ..mechanisms.softmax import EXACT
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS, seed_options
from ..streaming import cache_bytes
from ..training.calibration import leading_batches
from ..training.head_search import SEARCH_TOKENS, ExactHeads, find_exact_heads
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import check_output
from ..utils.models import shared_copy
from ..utils.options import make_config
from ..utils.progress import ConsoleProgress
from ..utils.timing import is_measurable
from .budgets import DIVERGENCES, Budget
from .options import PlanConfig, PlanSizes, resolve_plan
from .plan_result import PAGE, PLAN, PLOT, REPORT, Candidate, PlanResult, write_plan
from .prepare import (
    HALVES,
    ExactModel,
    PreparedModel,
    check_fits,
    check_mechanism,
    describe_source,
    inputs_text,
    read_inputs,
    read_text,
    recall_measurement,
    row_facts,
    score_of,
)
from .study import RECORDS_FILE, Study, check_study, open_study
from .variants import TRANSFER_OPTIONS, Loader, Variant, references, transferred, with_learned_parts

PLAN_VERSION = 6

#: Shares of the key-value heads that stay exact in a search over heads.
HEAD_SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)


@dataclass(frozen=True, kw_only=True)
class PlannedModel(PreparedModel):
    """A model with its data and its patched copies."""

    resolved: PlanSizes
    budget: Budget
    patched: PreTrainedModel  # a copy that is linear in every layer that may be; `train_patched` trains it
    timed: PreTrainedModel  # another one where a mechanism is built for a too short largest length
    variant: Variant  # what the conditions of all choices have in common; never loaded
    lengths: tuple[int, ...]  # to time, in tokens; `LayerSearch.costs` adds that of a budget of speed or cache
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
    require_packages("jinja2", "matplotlib", extra="demo", purpose="A plan's report")
    where = {"overwrite": config.overwrite, "resume": config.resume}
    check_study(config.output, **where)
    if config.save_model is not None:
        target: dict[str, Any] = {"overwrite": config.overwrite, "source": config.model, "option": "--save_model"}
        check_output(config.save_model, ["config.json"], **target)
    one = prepare_plan(config)
    facts, device, folder = facts_of(one, config), one.exact.model.device, Path(config.output)
    with (
        ConsoleProgress(console) as progress,
        open_study(folder, "plan", facts["settings"], device=device, progress=progress, **where) as study,
    ):
        _log_data(study, facts)
        facts["resumed"] = len(study.records) > 0
        facts["transfer"] = train_patched(study, one)
        heads = head_choices(study, one, config) if config.search == "heads" else ()
        search = LayerSearch(study, one, one.budget, heads)
        result = search.run()
        facts |= {**environment(device), "seconds": time.perf_counter() - started}
        write_plan(result, json_safe(facts), folder)
        progress.table(result.formatted_table())
        for sentence in result.summary():
            progress.log(f"• {sentence}")
        written = f"Plan: {folder / PLAN}, with" if result.plan is not None else f"No plan was written. In {folder}:"
        progress.log(f"{written} {PAGE}, {PLOT} and {REPORT}")
        if config.save_model is not None and result.met and result.plan is not None:
            model = search.convert(one.patched, result.chosen)
            save_checkpoint(model, config.model, config.save_model, overwrite=config.overwrite)
            progress.log(f"Checkpoint: {config.save_model}")
        elif config.save_model is not None:
            progress.log("No checkpoint was written, because the budget is not met.")
    return result


def _log_data(study: Study, facts: dict[str, Any]) -> None:
    model, data = facts["model"], facts["data"]
    study.progress.log(f"Model: {model['name']}, {model['class']}, {model['parameters']:,} parameters")
    uses = {"transfer": "train", "choice": "choice", "verification": "verification"}
    rows = [f"{inputs_text(data[part])} for the {use}" for use, part in uses.items()]
    study.progress.log(f"Data: {data['source']}: {data['rows']}; {', '.join(rows)}")
    assert study.folder is not None
    study.progress.log(f"Records: {study.folder / RECORDS_FILE}; a run that is stopped continues with --resume")


def prepare_plan(config: PlanConfig) -> PlannedModel:
    """Load the model and its data; every error of the input is raised here."""
    budget = Budget.parse(config.budget)
    check_mechanism(config.attention)
    name, kind, _ = describe_source(config.model, config.data.task, config.data.dataset)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    unit = budget.unit_for(kind)
    unused = ("label_column", "metrics", "max_train_samples", "max_eval_samples")
    text = None if kind == "classifier" else read_text(config.data, unused)
    exact = ExactModel.load(config.model, kind, name, None, config.device, config.data.task or "")
    model, resolved = exact.model, resolve_plan(config, kind, exact.positions)
    data = replace(config.data, max_eval_samples=resolved.max_eval_samples)
    inputs = read_inputs(exact, text, data, resolved, HALVES)
    if (score := score_of(inputs.measurements[0][0])) is not None:
        # Damage is shown in this unit, for budgets of speed and of cache, too.
        unit.check_metric(budget.text, score.title, greater_is_better=score.higher_is_better)
    if unit.name == "recall":  # chosen for and verified with prompts of two seeds
        recall = [recall_measurement(exact, [budget.length], config.seed + number) for number in range(len(HALVES))]
        prompts = row_facts([budget.length] * recall[0][0].settings["trials"])
        inputs = replace(inputs, measurements=recall, facts={**inputs.facts, **dict.fromkeys(HALVES, prompts)})
    lengths, note = possible_lengths(model, resolved.lengths)
    if budget.unit is None:
        possible, own_note = possible_lengths(model, [budget.length])
        if budget.length not in possible:
            raise ValueError(f"The budget {budget.text!r} is beyond the model's {exact.positions} positions.")
        note = note or own_note
    entry = ATTENTIONS.get(config.attention)
    options = seed_options(entry, config.seed, config.options)
    patched = check_fits(model, config.attention, "planned", **options)
    longest = max(*lengths, budget.length if budget.unit is None else 1, 1)
    longer = timing_options(entry, options, exact.positions, longest)
    timed = patched if longer == options else patch_model(shared_copy(model), config.attention, **longer)
    transfer = {"data": inputs.hash, **{key: getattr(resolved, key) for key in TRANSFER_OPTIONS}}
    identity: dict[str, Any] = {"seed": config.seed, "options": config.options, "settings": transfer}
    variant = Variant(config.attention, config.attention, lambda: patched, **identity)
    return PlannedModel(
        exact=exact,
        inputs=inputs,
        resolved=resolved,
        budget=budget,
        patched=patched,
        timed=timed,
        variant=variant,
        lengths=tuple(lengths),
        positions_note=note,
    )


def train_patched(study: Study, one: PlannedModel) -> dict[str, Any]:
    """Train the learned parts of all layers of `patched`, once, or load them; return what the report says of it.

    Each layer sees the hidden states of the exact model, whatever the other layers are: one run serves every choice of
    layers.
    """
    if not one.resolved.steps or not ATTENTIONS.get(one.variant.attention).learned:
        return {}
    conditions = one.variant.of(one.exact.conditions("attention_transfer"))
    transferred(one, study, one.patched, conditions)
    record = study.records.latest(conditions)
    assert record is not None
    names = {"steps": "steps", "best_step": "best_step", "seconds": "transfer_seconds"}
    return {key: record.value(metric) for key, metric in names.items()}


def head_choices(study: Study, one: PlannedModel, config: PlanConfig) -> list[ExactHeads]:
    """Return the choices of exact heads to measure, made on training rows (see `find_exact_heads`), once."""
    study.progress.status("the choice of exact heads", 0, 1)

    def rank() -> Values:
        search = find_exact_heads(
            one.exact.model,
            one.exact.tokenizer,
            leading_batches(one.inputs.train, SEARCH_TOKENS),
            config.attention,
            **{"seed": config.seed, **config.options},
        )
        rows = search.table.drop(columns="chosen").melt(["layer", "head"], var_name="metric")
        return rows.to_dict("records")

    record = study.measure(one.variant.of(one.exact.conditions("exact_heads")), rank)
    table = pd.DataFrame(record.values).pivot(index=["layer", "head"], columns="metric", values="value")
    # 0 rows: what is stored says nothing of a choice.
    search = ExactHeads.first_rows(table.reset_index(), 0, {"attention": config.attention, **config.options})
    return [search.with_share(share) for share in HEAD_SHARES]


def facts_of(one: PlannedModel, config: PlanConfig) -> dict[str, Any]:
    """Return what the report says of the run beside its result. Of paths it has the names only."""
    facts, entry = one.inputs.facts, ATTENTIONS.get(config.attention)
    names = ("budget", "attention", "options", "search", "quick", "device", "threads", "seed")
    measured = (*TRANSFER_OPTIONS, "test_sequences", "perplexity_tokens", "seconds")
    settings = {name: getattr(config, name) for name in names} | {"lengths": one.lengths}
    source = facts["source"] if config.data.dataset is None else Path(config.data.dataset).name
    parameters = patch_report(one.patched).parameters
    rows = {name: facts[name] for name in ("rows", "train", *HALVES)}
    return {
        "format_version": PLAN_VERSION,
        "created": utc_now(),
        "model": one.exact.facts(),
        "settings": settings | {name: getattr(one.resolved, name) for name in measured},
        "mechanism": f"{entry.name}: {entry.description}. {entry.paper}. {parameters:,} parameters",
        "data": {"source": source, "sha256": one.inputs.hash, **rows},
    }


def mechanisms_of(patched: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return the mechanism of each linear layer, with its options, by the layer's index."""
    return {
        str(layer.index): {"attention": layer.attention, **layer.options}
        for layer in patch_report(patched).layers
        if layer.attention != EXACT
    }


class LayerSearch:
    """The search for what to convert under a budget of quality (the most) or of speed or cache (the least).

    The layers are ordered by the divergence that each causes by itself; of heads the choices are given. Every model on
    the path from exact to linear is measured as a whole, since the damages of single layers do not add up, and the
    chosen one is verified on other data. A model that scores better than the exact one although it diverges largely is
    never within a budget of quality; and none is unless the exact model is clearly better than the floor (see
    `quality.assess`).

    Args:
        study: Where everything is measured once.
        planned: The model, with its data.
        budget: What the choice has to keep to.
        heads: Choices of exact heads, the most first, of a search over heads.
    """

    def __init__(self, study: Study, planned: PlannedModel, budget: Budget, heads: Sequence[ExactHeads] = ()) -> None:
        self.study, self.planned, self.budget, self.heads = study, planned, budget, heads
        self.measurements = dict(zip(HALVES, planned.inputs.measurements, strict=True))
        self.mechanisms = mechanisms_of(planned.patched)
        self.score = planned.scores[0]
        self.unit = budget.unit_for(planned.exact.kind)

    def run(self) -> PlanResult:
        """Measure, choose and verify."""
        budget, unit, score = self.budget, self.unit, self.score
        reference_values = self.reference_values
        assessments = [self.assess(part, reference_values[part]) for part in self.measurements]
        informative = all(one.valid for one in assessments)
        single_layers = [] if self.heads else self.single_layers()
        path = self.by_heads() if self.heads else self.by_layers(single_layers)
        counted = "key-value heads" if self.heads else "layers"
        measured = []
        for index, one in enumerate(path):
            self.study.progress.status(f"models with linear {counted}", index, len(path))
            measured.append(self.with_quality(one, "choice"))
        costs = self.costs()
        own: dict[str, Any] = {
            name: {str(length): 1.0 for cost, length in costs if cost == name} for name in ("speedup", "cache")
        }
        exact = Candidate(divergence=0.0, score=reference_values["choice"]["score"], damage=0.0, **own)
        for cost, length in costs:
            for index, one in enumerate(measured):
                self.study.progress.status(f"{cost} at {length:,} tokens", index, len(path))
                measured[index] = self.with_cost(one, cost, length, "choice")
        chosen, within_budget = self.best_of(measured, informative)
        self.study.progress.status("verification", 0, 1)
        verified = self.with_quality(replace(chosen, speedup={}, unsure=[]), "verification")
        if budget.cost == "speedup":
            verified = self.with_cost(verified, "speedup", budget.length, "verification")
        return PlanResult(
            budget=budget,
            unit=unit,
            score={"title": score.title, "digits": score.digits, "divergence": DIVERGENCES[unit.measurement]},
            baseline=str(self.planned.exact.model.config._attn_implementation),
            attention=self.planned.variant.attention,
            mechanisms=self.mechanisms,
            part=counted,
            total=len(self.heads[0].table) if self.heads else len(self_attention(self.planned.exact.model)),
            met=within_budget and verified.is_within(budget, informative=informative) and not verified.unsure,
            within_budget=within_budget,
            informative=informative,
            floors=[{"score": one.floor, "name": one.floor_name} for one in assessments],
            curve=[exact, *measured],
            single_layers=single_layers,
            chosen=chosen,
            verified=verified,
            references=reference_values,
            positions_note=self.planned.positions_note,
        )

    @cached_property
    def reference_values(self) -> dict[str, dict[str, Any]]:
        """The values of the exact model and of the model without attention, on both parts of the held-out data."""
        values = {}
        for index, part in enumerate(self.measurements):
            self.study.progress.status("the exact model, and without attention", index, len(self.measurements))
            exact, floor = references(self.planned.exact.model)
            values[part] = self.values(part, "exact", exact.load)
            values[f"{part}, no attention"] = self.values(part, "none", floor.load)
        return values

    def costs(self) -> list[tuple[str, int]]:
        """Return what is measured besides quality: the speedup or the cache at a length, that of the budget too."""
        costs = {("speedup", length) for length in self.planned.lengths}
        if self.budget.unit is None:
            costs.add((self.budget.cost, self.budget.length))
        return sorted(costs, key=lambda one: (one[0] == "cache", one[1]))

    def single_layers(self) -> list[Candidate]:
        """Measure a model for each layer by itself."""
        rows = []
        for index, layer in enumerate(map(int, self.mechanisms)):
            self.study.progress.status("models with one linear layer", index, len(self.mechanisms))
            rows.append(self.with_quality(Candidate(1, [layer], added=layer), "choice"))
        return rows

    def by_layers(self, single_layers: Sequence[Candidate]) -> list[Candidate]:
        """Return models with more and more linear layers, the least harmful first."""
        order = sorted(single_layers, key=lambda one: math.inf if one.divergence is None else one.divergence)
        path = [layer for one in order for layer in one.layers]
        return [Candidate(count, sorted(path[:count]), added=layer) for count, layer in enumerate(path, start=1)]

    def by_heads(self) -> list[Candidate]:
        """Return the models with each choice of exact heads."""
        rows = []
        for choice in self.heads:
            sizes = choice.table.groupby("layer").size()
            linear = {
                layer: int(sizes[layer]) - len(choice.heads.get(layer, ())) for layer in map(int, self.mechanisms)
            }
            layers = [layer for layer, count in linear.items() if count]
            heads = {str(layer): list(choice.heads[layer]) for layer in layers if layer in choice.heads}
            rows.append(Candidate(sum(linear.values()), layers, heads))
        return rows

    def searched(self, part: str, layers: str, load: Loader) -> Variant:
        """Return a model of the search on a part of the held-out data (see `HALVES`).

        `layers` are the linear ones as text, `exact` or `none`.
        """
        settings = {**self.planned.variant.settings, "data_set": part, "layers": layers}
        return replace(self.planned.variant, label=layers, load=load, settings=settings)

    def values(self, part: str, layers: str, load: Loader) -> dict[str, Any]:
        """Return the values of a model's quality, and the standard error of its score."""
        (record,) = self.searched(part, layers, load).measure(self.study, [self.measurements[part]]).values()
        values = {row["metric"]: row["value"] for row in record.values if row.get("position") is None}
        errors = {row["metric"]: row.get("stderr") for row in record.values}
        own = {"score": values[self.score.metric], "stderr": errors[self.score.metric]}
        return {**values, **own, "difference_stderr": errors.get("difference")}

    def assess(self, part: str, values: Mapping[str, Any]) -> Assessment:
        """Apply the rule that `evaluate` shares."""
        exact, floor = self.reference_values[part], self.reference_values[f"{part}, no attention"]
        return assess(
            values["score"],
            exact["score"],
            floor["score"],
            higher_is_better=self.score.higher_is_better,
            most_frequent_answer=exact.get("most_frequent_answer"),
            stderr=floor.get("difference_stderr") or math.hypot(exact["stderr"] or 0.0, floor["stderr"] or 0.0),
            divergence=values["divergence"],
            floor_divergence=floor["divergence"],
        )

    def with_quality(self, one: Candidate, part: str) -> Candidate:
        """Return a candidate with the quality of its model on a part of the held-out data."""
        values = self.values(part, one.name, partial(self.convert, self.planned.patched, one))
        return replace(
            one,
            divergence=values["divergence"],
            score=values["score"],
            damage=self.unit.damage(self.reference_values[part], values),
            chance=self.assess(part, values).chance,
        )

    def with_cost(self, one: Candidate, cost: str, length: int, part: str) -> Candidate:
        """Return a candidate with the speedup of a forward pass (batch 1), or its share of the exact model's cache.

        The speedup of the chosen model is verified three times as long.
        """
        tokens, seconds = self.planned.inputs.tokens, self.planned.resolved.seconds
        seconds *= 3 if part == "verification" else 1

        def measure() -> Values:
            models = {"exact": self.planned.exact.model, "linear": self.convert(self.planned.timed, one)}
            if cost == "speedup":
                return measure_passes(models, tokens, length, baseline="exact", seconds=seconds)["linear"]
            exact, linear = (cache_bytes(fill_cache(model, tokens, length)) for model in models.values())
            return [value(cost, linear / exact)]

        measurement, settings = (FORWARD, {"seconds": seconds}) if cost == "speedup" else (cost, {})
        conditions = self.planned.exact.conditions(measurement, settings=settings, length=length, batch_size=1)
        variant = self.searched(part, one.name, lambda: self.planned.exact.model)  # for its conditions only
        first = self.study.measure(variant.of(conditions), measure, label=variant.label).values[0]
        if cost == "cache":
            return replace(one, cache={**one.cache, str(length): first["value"]})
        unsure = [] if is_measurable(first["speedup_p20"], first["speedup_p80"]) else [str(length)]
        return replace(one, speedup={**one.speedup, str(length): first["speedup"]}, unsure=[*one.unsure, *unsure])

    def convert(self, patched: PreTrainedModel, one: Candidate) -> PreTrainedModel:
        """Return the model of a candidate, with the options and the learned parts of a patched one."""
        return with_learned_parts(self.planned.exact.model, one.plan(mechanisms_of(patched)), patched)

    def best_of(self, rows: Sequence[Candidate], informative: bool) -> tuple[Candidate, bool]:
        """Choose a candidate; where none is within the budget, the nearest one, with False."""
        budget = self.budget
        within = [one for one in rows if one.is_within(budget, informative=informative)]
        if budget.cost == "speedup":
            within = [one for one in within if str(budget.length) not in one.unsure] or within
        if within:
            return within[0 if budget.unit is None else -1], True
        if budget.unit is None:
            sign = 1 if budget.cost == "speedup" else -1
            return max(rows, key=lambda one: sign * one.cost(budget)), False
        comparable = [one for one in rows if one.damage is not None and not one.chance] or rows
        return min(comparable, key=lambda one: one.damage or 0.0), False
