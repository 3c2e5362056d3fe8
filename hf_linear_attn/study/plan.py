"""The run of `hf-linear-attn plan`: a checkpoint and its data, attention transfer, the layer search, and the files."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..checkpoints import read_tokenizer, save_checkpoint
from ..data.task_data import read_documents
from ..data.text import Text, cut_text, packed_rows, pad_token, padded_batches, text_rows
from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from ..measure.inputs import possible_lengths, timing_options
from ..measure.quality import QualityMetric, classification_metric, embedding_metric, perplexity_metric
from ..measure.recall import recall_metric
from ..measure.values import Values
from ..patching import patch_model, patch_report
from ..registry import ATTENTIONS
from ..training.head_search import ExactHeads, find_exact_heads, leading_batches
from ..utils.environment import environment, json_safe, utc_now
from ..utils.extras import require_packages
from ..utils.files import atomic_write, check_output, open_output, write_json
from ..utils.models import shared_copy, torch_device
from ..utils.options import OptionError
from ..utils.progress import ConsoleProgress, Progress
from .evaluator import TRANSFER_SETTINGS, Evaluator
from .inputs import EvaluationInputs, inputs_text, row_lengths, task_inputs, text_inputs
from .layer_search import Budget, LayerSearch, LayerSearchResult, convert_as_planned
from .loading import ExactModel, check_mechanism, describe_source, dtype_name, load_exact, seed_options
from .plots import STYLE, new_figure, png
from .records import RECORDS_FILE, RESULTS, Records
from .report import page_template
from .settings import EvaluateConfig, Settings, resolve_settings

if TYPE_CHECKING:
    from ..plan import PlanConfig

PLAN, REPORT, PAGE, PLOT = "plan.json", "plan-report.json", "report.html", "curve.png"

FORMAT_VERSION = 5

#: Shares of the key-value heads that stay exact in a search over heads.
HEAD_SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.0)

#: The measurement that chooses the layers of each kind of model.
MEASUREMENTS = {"classifier": "task", "decoder": "perplexity", "encoder": "sentence_embeddings"}

#: What the held-out data are for, half of them each.
HALVES = ("choice", "verification")


def plan_layers(config: PlanConfig, console: Console | None = None) -> LayerSearchResult:
    """Search, write the plan and its report, and show a table. See `hf_linear_attn.plan.plan_command`."""
    started = time.perf_counter()
    require_packages("jinja2", "matplotlib", "pandas", extra="demo", purpose="A plan's report")
    budget, folder, overwrite = Budget.parse(config.budget), Path(config.output), config.overwrite
    check_mechanism(config.attention)
    check_output(folder, RESULTS, overwrite=overwrite, resume=config.resume)
    if config.save_model is not None:
        names = ["config.json"]
        check_output(config.save_model, names, overwrite=overwrite, source=config.model, option="--save_model")
    run = _Run(config, budget)
    with open_output(folder, RESULTS, overwrite=overwrite), ConsoleProgress(console) as progress:
        facts, surroundings = run.facts(), environment(run.exact.model.device)
        model, data = facts["model"], facts["data"]
        progress.log(f"Model: {model['name']}, {model['class']}, {model['parameters']:,} parameters")
        uses = {"transfer": "train", "choice": "choice", "verification": "verification"}
        rows = [f"{inputs_text(data[part])} for the {use}" for use, part in uses.items()]
        progress.log(f"Data: {data['source']}: {data['rows']}; {', '.join(rows)}")
        progress.log(f"Records: {folder / RECORDS_FILE}; a run that is stopped continues with --resume")
        records, conditions = Records(folder / RECORDS_FILE), run.exact.conditions(config.attention, "", **run.identity)
        resumed = any(record.conditions["settings"] == json_safe(conditions.settings) for record in records)
        records.start_run("hf-linear-attn plan", facts["settings"], surroundings)
        facts |= {**surroundings, "resumed": resumed, "transfer": run.transfer(records, progress)}
        search = LayerSearch(
            exact=run.exact.model,
            patched=run.patched,
            timed=run.timed,
            metrics=dict(zip(HALVES, run.metrics, strict=True)),
            budget=budget,
            records=records,
            conditions=conditions,
            heads=run.heads(records, progress) if config.search == "heads" else (),
            lengths=run.lengths,
            tokens=run.inputs.tokens,
            seconds=run.settings.seconds,
            progress=progress,
        )
        result = search.run()
        facts["seconds"] = time.perf_counter() - started
        _write(result, json_safe(facts), folder, progress)
        if config.save_model is not None:
            progress.log(run.save(result, config.save_model))
    return result


class _Run:
    """A model with its data and its patched copies, loaded and checked before anything is measured."""

    def __init__(self, config: PlanConfig, budget: Budget) -> None:
        self.config = config
        name, kind, _ = describe_source(config.model, config.data.task, config.data.dataset)
        tokenizer = read_tokenizer(config.model)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = torch_device(config.device)
        recalls = budget.unit is not None and budget.unit.name == "recall" and kind != "classifier"
        budget.unit_of("recall" if recalls else MEASUREMENTS[kind])
        text = None if kind == "classifier" else read_documents(config.data)
        model = load_exact(config.model, kind, device, task=config.data.task or config.data.dataset or "the data")
        self.exact = ExactModel.of(model, tokenizer, kind, name)
        self.settings = plan_settings(config, kind, model)
        self.inputs, self.metrics = (
            self._read_rows() if text is None else self._read_text(text, budget.length if recalls else None)
        )
        self._patch(budget)
        settings = {"data": self.inputs.hash, **{name: getattr(self.settings, name) for name in TRANSFER_SETTINGS}}
        #: What all measurements depend on.
        self.identity: dict[str, Any] = {"seed": config.seed, "options": config.options, "settings": settings}

    def _read_text(self, text: Text, recall_length: int | None) -> tuple[EvaluationInputs, list[QualityMetric]]:
        """The train part of a text is for the transfer, half of its held-out part each to choose and to verify.

        Recall is chosen for and verified with prompts of two seeds instead.
        """
        tokenizer, settings, model = self.exact.tokenizer, self.settings, self.exact.model
        inputs = text_inputs(text, tokenizer, settings, causal=self.exact.kind == "decoder")
        size = settings.batch_size
        metrics = []
        for seed, (name, half) in enumerate(zip(HALVES, split_halves(text.held_out), strict=True)):
            if recall_length is not None:
                metric = recall_metric(model, tokenizer, [recall_length], seed=self.config.seed + seed)
                # For the facts: this many prompts of this length for each task and depth.
                rows = [[0] * recall_length] * metric.settings["trials"]
                metrics.append(metric)
            elif self.exact.kind == "decoder":
                rows = packed_rows(tokenizer, half, settings.perplexity_tokens)[:1]
                windows: dict[str, Any] = {"context": settings.context, "stride": settings.stride, "batch_size": size}
                metrics.append(perplexity_metric(rows, exact=model, **windows))
            else:
                rows = text_rows(tokenizer, half, settings.sequence_length, settings.test_sequences, causal=False)
                metrics.append(embedding_metric(model, padded_batches(rows, size, pad_token(tokenizer))))
            inputs.facts[name] = row_lengths([{"input_ids": row} for row in rows])
            if inputs.facts[name]["tokens"] < 2:
                raise ValueError(f"{text.source!r} gives nothing for the {name}. Give a longer text.")
        return inputs, metrics

    def _read_rows(self) -> tuple[EvaluationInputs, list[QualityMetric]]:
        """Training rows are for the transfer, every second validation row to choose, the others to verify."""
        data, model = self.config.data, self.exact.model
        if self.config.quick and data.max_eval_samples is None:
            data = replace(data, max_eval_samples=256)
        inputs = task_inputs(data, self.exact.tokenizer, model.config, self.settings, parts=HALVES)
        options: dict[str, Any] = {"regression": inputs.regression, "task": data.task or Path(str(data.dataset)).name}
        halves = [{"": inputs.labeled[name]} for name in HALVES]
        return inputs, [classification_metric(model, half, inputs.metrics, **options) for half in halves]

    def _patch(self, budget: Budget) -> None:
        """Build the patched copy, and another one to time where a mechanism is built for a too short largest length."""
        attention, model, limit = self.config.attention, self.exact.model, longest_input(self.exact.model)
        lengths, usual = self.config.speed.lengths, (1024,) if self.config.quick else (1024, 4096)
        self.lengths = possible_lengths(model, usual if lengths is None else lengths)[0]
        if budget.cost == "cache" and self.exact.kind != "decoder":
            raise ValueError(f"The budget {budget.text!r} is for a causal language model, whose cache grows.")
        if budget.unit is None and budget.length not in possible_lengths(model, [budget.length or 0])[0]:
            raise ValueError(f"The budget {budget.text!r} is beyond the model's {limit} positions.")
        entry = ATTENTIONS.get(attention)
        options = {**seed_options(entry, self.config.seed), **self.config.options}
        try:
            self.patched = patch_model(shared_copy(model), attention, **options)
        except NotImplementedError as error:
            raise ValueError(f"{attention!r} cannot be planned on this model: {error}") from error
        longer = timing_options(entry, options, limit, max(self.lengths, default=1))
        self.timed = self.patched if longer == options else patch_model(shared_copy(model), attention, **longer)

    def transfer(self, records: Records, progress: Progress) -> dict[str, Any]:
        """Train the learned parts of all layers, once, or load them; return what the report says of it.

        Each layer sees the hidden states of the exact model, whatever the other layers are: one run serves every choice
        of layers.
        """
        attention = self.config.attention
        if not self.settings.steps or not ATTENTIONS.get(attention).learned:
            return {}
        evaluator = Evaluator(self.exact, self.inputs, self.settings, [], records=records, progress=progress)
        evaluator.transferred(attention, self.config.seed, self.patched, self.identity)
        record = records.latest(self.exact.conditions(attention, "attention_transfer", **self.identity))
        assert record is not None
        names = {"steps": "steps", "best_step": "best_step", "seconds": "transfer_seconds"}
        return {name: record.value(metric) for name, metric in names.items()}

    def heads(self, records: Records, progress: Progress) -> list[ExactHeads]:
        """Return the choices of exact heads to measure, made on training rows (see `find_exact_heads`), once."""
        import pandas as pd

        progress.status("the choice of exact heads", 0, 1)
        config = self.config

        def rank() -> Values:
            search = find_exact_heads(
                self.exact.model,
                self.exact.tokenizer,
                leading_batches(self.inputs.train),
                config.attention,
                seed=config.seed,
                **config.options,
            )
            rows = search.table.drop(columns="chosen").melt(["layer", "head"], var_name="metric")
            return rows.to_dict("records")

        record = records.measure(self.exact.conditions(config.attention, "exact_heads", **self.identity), rank)
        table = pd.DataFrame(record.values).pivot(index=["layer", "head"], columns="metric", values="value")
        attention = {"attention": config.attention, **config.options}
        search = ExactHeads.first_rows(table.reset_index(), 0, attention)
        return [search.with_share(share) for share in HEAD_SHARES]

    def facts(self) -> dict[str, Any]:
        """What the report says of the run beside its result. Of paths it has the names only."""
        config, facts, entry = self.config, self.inputs.facts, ATTENTIONS.get(self.config.attention)
        names = ("budget", "attention", "options", "search", "quick", "device", "threads", "seed")
        measured = (*TRANSFER_SETTINGS, "test_sequences", "perplexity_tokens", "seconds")
        settings = {name: getattr(config, name) for name in names} | {"lengths": self.lengths}
        source = facts["source"] if config.data.dataset is None else Path(config.data.dataset).name
        parameters = patch_report(self.patched).parameters
        return {
            "format_version": FORMAT_VERSION,
            "created": utc_now(),
            "model": self.exact.facts(),
            "settings": settings | {name: getattr(self.settings, name) for name in measured},
            "mechanism": f"{entry.name}: {entry.description}. {entry.paper}. {parameters:,} parameters",
            "data": {"source": source, "sha256": self.inputs.hash}
            | {name: facts[name] for name in ("rows", "train", *HALVES)},
        }

    def save(self, result: LayerSearchResult, target: str) -> str:
        """Write a checkpoint with the planned layers and their learned parts; returns a message."""
        if not result.met:
            return "No checkpoint was written, because the budget is not met."
        model = convert_as_planned(self.exact.model, self.patched, result.plan)
        save_checkpoint(model, self.config.model, target, overwrite=self.config.overwrite)
        return f"Checkpoint: {target}"


def plan_settings(config: PlanConfig, kind: str, model: PreTrainedModel) -> Settings:
    """Return how much is measured: more than in an evaluation, because a choice of layers rests on it."""
    limit, quick, length = longest_input(model), config.quick, config.data.max_length
    if limit is not None and length is not None and length > limit:
        raise OptionError("data.max_length", f"{length} is beyond the model's {limit} positions. Give {limit} or less.")
    options = EvaluateConfig(sequence_length=length, quick=quick, seed=config.seed)
    settings = resolve_settings(options, kind, limit, dtype_name(model), table=has_position_table(model))
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


def split_halves(documents: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split into every second document and the others; a single document into its first and second half."""
    if len(documents) > 1:
        return documents[::2], documents[1::2]
    first, second = cut_text(documents[0], 0.5)
    return [first], [second]


def _write(result: LayerSearchResult, facts: dict[str, Any], folder: Path, progress: ConsoleProgress) -> None:
    plot = draw_curve(result, facts["model"]["name"])
    embedded, plan = base64.b64encode(plot).decode(), json.dumps(result.plan, indent=1, ensure_ascii=False)
    template = page_template("layer_search.html")
    page = template.render(result=result, plot=embedded, plan=plan, inputs_text=inputs_text, **facts)
    write_json(folder / REPORT, {**facts, "result": result.to_dict(), "summary": result.summary()})
    write_json(folder / PLAN, result.plan)
    atomic_write(folder / PLOT, plot)
    atomic_write(folder / PAGE, page)
    progress.table(result.formatted_table())
    for sentence in result.summary():
        progress.log(f"• {sentence}")
    progress.log(f"Plan: {folder / PLAN}, with {PAGE}, {PLOT} and {REPORT}")


def draw_curve(result: LayerSearchResult, model_name: str) -> bytes:
    """Return a PNG of the damage, and of the speed and the cache where measured, by the number of converted parts."""
    import matplotlib

    budget, table = result.budget, result.table.set_index("converted")
    limited = budget.cost or "damage"
    titles = {
        "damage": f"loss of quality, {'% ' if result.unit.relative else ''}{result.unit.name}",
        "speedup": f"times as fast as {result.baseline}",
        "cache": "share of the exact model's cache",
    }
    panels = [name for name in titles if name == "damage" or result.curve[0][name]]
    with matplotlib.rc_context(STYLE):
        figure, grid = new_figure(2.8 * len(panels), len(panels), sharex=True, squeeze=False)
        figure.suptitle(model_name)
        for name, axes in zip(panels, grid[:, 0], strict=True):
            axes.set_ylabel(titles[name])
            if name == "damage":
                axes.plot(table["damage"], marker="o", label="on the data of the choice")
                verified = {"marker": "X", "markersize": 9, "linestyle": "none"}
                point = [result.chosen["count"]], [result.verified["damage"]]
                axes.plot(*point, **verified, label="the plan, verified on other data")
            else:
                axes.axhline(1.0, color="#767676", linewidth=1, label=result.baseline)
                for length in result.curve[0][name]:
                    axes.plot(table[f"{name}_at_{length}"], marker="s", label=f"{int(length):,} tokens")
            if name == limited:
                limit = budget.limit / (100 if name == "cache" else 1)
                axes.axhline(limit, color="black", linestyle="--", label=f"budget: {budget.text}")
            axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel(f"{result.part} converted to {result.attention} (of {result.total})")
        return png(figure)
