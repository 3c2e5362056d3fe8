"""`hf-linear-attn plan`: find which layers of a checkpoint to convert, and write a plan file and a report."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import DEFAULT_ATTENTION
from .data.config import DataConfig
from .utils.arguments import check_not_negative, check_positive, option

if TYPE_CHECKING:
    from rich.console import Console

    from .evaluation.layer_search import Budget, LayerSearchResult
    from .evaluation.metrics import QualityMetric
    from .evaluation.records import Conditions, Records

PLAN, REPORT, PAGE, PLOT = "plan.json", "plan-report.json", "report.html", "curve.png"
LEARNED = "learned.safetensors"
FORMAT_VERSION = 2

Progress = Callable[[str, int, int], None]
"""Called with a description, the steps done, and all steps."""


@dataclass(frozen=True)
class PlanConfig:
    """What `run_plan` searches, and how thoroughly. None stands for what suits the model and `quick`."""

    model: str = option(help="local folder or repository on the Hub", common=True)
    budget: str = option(help="'1% perplexity', '0.05 nats', '0.5 points', '0.02 cosine' or '2x at 4096'", common=True)
    output: str = option("plan", "folder to write to; a stopped run in it is resumed", common=True)
    attention: str = option(DEFAULT_ATTENTION, "the mechanism", common=True)
    options: dict[str, Any] = option(factory=dict, help="options of the mechanism, such as --options.window_size 64")
    data: DataConfig = option(factory=DataConfig)
    steps: int | None = option(None, "steps of attention transfer, 0: none (default: 200; quick: 25)", common=True)
    search: Literal["rank", "greedy"] = option("rank", "order of layers: measured once, or again after each layer")
    lengths: tuple[int, ...] | None = option(
        None, "lengths to time, in tokens (default: 1024 and 4096; quick: 1024)", common=True
    )
    save_model: str | None = option(
        None, "folder for a checkpoint with the planned layers and what they learned", common=True
    )
    quick: bool = option(False, "less of everything, for a first look", common=True)
    restart: bool = option(False, "measure again what the output folder holds already")
    threads: int | None = option(None, "CPU threads (default: as torch has it)")
    device: str = option("cpu", "torch device: cpu, cuda, …", common=True)
    seed: int = option(0, "seed of random features and of the order of sequences")

    def __post_init__(self) -> None:
        check_not_negative("", self, "steps", "seed")
        check_positive("", self, "threads")
        if any(length < 16 for length in self.lengths or ()):
            raise ValueError(f"lengths must be numbers of tokens, 16 or more, got {self.lengths!r}.")


@dataclass(frozen=True)
class _Sizes:
    """How much is measured; tokens, passages and rows each for the choice and for the verification."""

    sequence_length: int
    batch_size: int
    steps: int
    evaluations: int
    train_sequences: int
    validation_sequences: int
    tokens: int
    passages: int
    rows: int | None
    seconds: float

    @classmethod
    def of(cls, config: PlanConfig, model_config: Any, default_length: int) -> _Sizes:
        limit = getattr(model_config.get_text_config(decoder=False), "max_position_embeddings", None)
        length = config.data.max_length or min(default_length, limit or default_length)
        if isinstance(limit, int) and length > limit:
            raise ValueError(f"data.max_length {length} is beyond the model's {limit} positions. Use {limit} or less.")
        quick = config.quick
        batch_size = max(1, min(32, 1024 // length))
        return cls(
            sequence_length=length,
            batch_size=batch_size,
            steps=config.steps if config.steps is not None else 25 if quick else 200,
            evaluations=2 if quick else 5,
            train_sequences=batch_size * (26 if quick else 120),
            validation_sequences=batch_size * 2,
            tokens=4096 if quick else 32768,
            passages=32 if quick else 256,
            rows=128 if quick else None,
            seconds=0.5 if quick else 2.0,
        )


#: Of these, what the measurements depend on; the metrics and timings name the others in their own settings.
TRANSFER_SETTINGS = ("steps", "evaluations", "batch_size", "sequence_length", "train_sequences", "validation_sequences")


@dataclass(frozen=True)
class _Data:
    """Batches for the transfer, the metrics on separate data, tokens to time on, and what a report says of them."""

    train: list[Any]
    validation: list[Any]
    choice: QualityMetric
    verification: QualityMetric
    tokens: list[int]
    facts: dict[str, Any]


def plan_command(config: PlanConfig) -> int:
    """The verb `plan`: returns 0 if the budget is met, else 1."""
    return 0 if run_plan(config).met else 1


def run_plan(config: PlanConfig, *, console: Console | None = None) -> LayerSearchResult:
    """Search the layers of a checkpoint, write the plan and its report to `config.output`, and show a table.

    A stopped run with the same settings is resumed; another budget uses the same measurements.

    Raises:
        ValueError, OSError: Settings, a model or data that cannot be used. Nothing has been measured then.
        ImportError: An optional package is missing.
    """
    from rich.console import Console

    from .evaluation.layer_search import Budget, search_layers
    from .evaluation.records import RECORDS_FILE, Records
    from .utils.extras import require_packages
    from .utils.files import check_writable

    started = time.perf_counter()
    require_packages("jinja2", "matplotlib", extra="demo", purpose="A plan's report")
    console = console or Console()
    budget = Budget.parse(config.budget)
    _check_attention(config.attention)
    if config.save_model is not None:
        _check_target(config.model, config.save_model)
    run = _Run(config, budget)
    check_writable(Path(config.output))
    records = Records(Path(config.output) / RECORDS_FILE, remeasure=config.restart)
    resumed = any(record.conditions["settings"] == run.settings for record in records)
    records.start_run("hf-linear-attn plan", run.config_facts(), run.environment)
    with _progress(console) as on_progress:
        run.transfer(records, on_progress)
        result = search_layers(
            run.exact,
            run.patched,
            run.data.choice,
            run.data.verification,
            budget=budget,
            search=config.search,
            lengths=run.lengths,
            tokens=run.data.tokens,
            seconds=run.sizes.seconds,
            timed=run.timed,
            records=records,
            conditions=run.conditions,
            on_progress=on_progress,
        )
    facts = {**run.facts(), "seconds": time.perf_counter() - started, "resumed": resumed}
    _write(result, facts, Path(config.output), console)
    if config.save_model is not None:
        console.print(run.save(result, config.save_model), highlight=False, soft_wrap=True, markup=False)
    return result


class _Run:
    """A model with its data and its patched copies, loaded and checked before anything is measured."""

    def __init__(self, config: PlanConfig, budget: Budget) -> None:
        import torch

        from .evaluation.models import is_decoder, load_config, load_exact, load_tokenizer
        from .utils.environment import environment
        from .utils.models import torch_device

        self.config = config
        self.name = Path(config.model).resolve().name if Path(config.model).is_dir() else config.model
        model_config, tokenizer = load_config(config.model), load_tokenizer(config.model)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = torch_device(config.device)
        task = config.data.task is not None
        self.kind = "classifier" if task else "decoder" if is_decoder(model_config) else "encoder"
        measurements = {"classifier": "task", "decoder": "perplexity", "encoder": "sentence_embeddings"}
        budget.check_measurement(measurements[self.kind])
        default_length = {"classifier": 128, "decoder": 512, "encoder": 256}[self.kind]
        self.sizes = _Sizes.of(config, model_config, default_length)
        if task:
            self.exact, self.data = _load_task(config, tokenizer, self.sizes, device)
        else:
            self.exact = load_exact(config.model, self.kind, device)
            self.data = _text_data(config, tokenizer, self.sizes, self.exact, decoder=self.kind == "decoder")
        self.lengths = self._lengths(budget)
        self._patch()
        self.environment = environment(device)
        self.transfer_facts: dict[str, Any] = {}

    def _lengths(self, budget: Budget) -> list[int]:
        """The lengths to time that the model can take."""
        from .integration.discovery import longest_input
        from .integration.inputs import accepts_longer_inputs

        lengths = self.config.lengths
        if lengths is None:
            lengths = (1024,) if self.config.quick else (1024, 4096)
        limit = longest_input(self.exact)
        if limit is None or accepts_longer_inputs(self.exact):
            return list(lengths)
        if budget.length is not None and budget.length > limit:
            raise ValueError(
                f"The budget {budget.text!r} is beyond the model's {limit} positions. Give a length up to {limit}."
            )
        return [length for length in lengths if length <= limit] or [limit]

    def _patch(self) -> None:
        """Build the patched copy, and another one to time where a mechanism is built for a too short largest length."""
        from .evaluation.speed import timing_options
        from .integration.discovery import longest_input
        from .patching import patch_model
        from .registry import ATTENTIONS
        from .utils.models import shared_copy

        attention = self.config.attention
        accepted = [entry.name for entry in fields(ATTENTIONS.get(attention).options)]
        options = {**({"seed": self.config.seed} if "seed" in accepted else {}), **self.config.options}
        try:
            self.patched = patch_model(shared_copy(self.exact), attention, **options)
        except NotImplementedError as error:
            raise ValueError(f"{attention!r} cannot be planned on this model: {error}") from error
        longest = max(self.lengths, default=0)
        for_timing = timing_options(options, accepted, longest_input(self.exact), longest) if longest else options
        same = for_timing == options
        self.timed = self.patched if same else patch_model(shared_copy(self.exact), attention, **for_timing)

    @property
    def conditions(self) -> Conditions:
        """What all measurements depend on."""
        from .evaluation.models import weights_fingerprint
        from .evaluation.records import Conditions

        hardware, versions = self.environment["hardware"], self.environment["versions"]
        return Conditions(
            model=self.name,
            fingerprint=weights_fingerprint(self.exact),
            attention=self.config.attention,
            measurement="",
            seed=self.config.seed,
            options=self.config.options,
            settings=self.settings,
            device={name: hardware[name] for name in ("device", "cpu", "threads")},
            versions={name: versions[name] for name in ("torch", "transformers")},
        )

    @property
    def settings(self) -> dict[str, Any]:
        sizes = asdict(self.sizes)
        return {"data": self.data.facts["sha256"], **{name: sizes[name] for name in TRANSFER_SETTINGS}}

    def transfer(self, records: Records, on_progress: Progress) -> None:
        """Train the learned parts of all layers, once.

        Each layer sees the hidden states of the exact model, whatever the other layers are: one run serves every choice
        of layers.
        """
        import torch
        from safetensors.torch import load_file, save

        from .integration.attention import SUBMODULE
        from .training.transfer import transfer_attention
        from .utils.files import atomic_write

        path, steps = Path(self.config.output) / LEARNED, self.sizes.steps
        if not steps or not any(f".{SUBMODULE}." in f".{name}" for name, _ in self.patched.named_parameters()):
            return
        conditions = replace(self.conditions, measurement="transfer")
        record = records.known(conditions)
        if record is not None and _metadata(path).get("record") == f"{record.run} {record.id}":
            self.patched.load_state_dict(load_file(path), strict=False)
        else:
            records.remeasure = True  # What was measured belongs to parameters that are lost.
            torch.manual_seed(self.config.seed)
            done = transfer_attention(
                self.patched,
                self.data.train,
                steps=steps,
                validation=self.data.validation,
                evaluate_every=max(steps // self.sizes.evaluations, 1),
                progress=lambda step, total, loss: on_progress(f"attention transfer, loss {loss:.3f}", step, total),
            )
            losses: list[dict[str, Any]] = []
            losses += [
                {"metric": "loss", "value": loss, "step": step} for step, loss in enumerate(done.losses, start=1)
            ]
            losses += [{"metric": "held_out_loss", "value": loss, "step": step} for step, loss in done.evaluations]
            totals = {"steps": done.steps, "best_step": done.best_step, "seconds": done.seconds}
            values = [*({"metric": name, "value": value} for name, value in totals.items()), *losses]
            record = records.add(conditions, values)
            state = self.patched.state_dict().items()
            tensors = {name: value.contiguous().cpu() for name, value in state if f".{SUBMODULE}." in f".{name}"}
            atomic_write(path, save(tensors, {"record": f"{record.run} {record.id}"}))
        self.transfer_facts = {name: record.value(name) for name in ("steps", "best_step", "seconds")}

    def config_facts(self) -> dict[str, Any]:
        """The settings of the run. Paths are shortened to names: where files were says nothing to a reader."""
        settings = {**asdict(self.config), **asdict(self.sizes), "model": self.name, "lengths": self.lengths}
        for values, name in (
            (settings, "output"),
            (settings, "save_model"),
            (settings["data"], "dataset"),
            (settings["data"], "folder"),
        ):
            values[name] = values[name] and Path(values[name]).name
        return settings

    def facts(self) -> dict[str, Any]:
        """What the report says of the run beside its result."""
        from .evaluation.models import model_facts
        from .patching import patch_report
        from .registry import ATTENTIONS
        from .utils.environment import json_safe, utc_now

        entry, report = ATTENTIONS.get(self.config.attention), patch_report(self.patched)
        shape = model_facts(self.exact)
        return json_safe(
            {
                "format_version": FORMAT_VERSION,
                "created": utc_now(),
                "settings": self.config_facts(),
                **self.environment,
                "model": {**shape, "name": self.name, "kind": self.kind},
                "mechanism": f"{entry.name}: {entry.description}. {entry.paper}. {report.parameters:,} parameters",
                "data": self.data.facts,
                "transfer": self.transfer_facts,
            }
        )

    def save(self, result: LayerSearchResult, target: str) -> str:
        """Write a checkpoint with the planned layers and their learned parts; returns a message."""
        from .patching import patch_model
        from .saving import save_checkpoint
        from .utils.models import shared_copy

        if not result.met:
            return "No checkpoint was written, because the budget is not met."
        model = patch_model(shared_copy(self.exact), result.plan)
        state = self.patched.state_dict()
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        save_checkpoint(model, self.config.model, target, overwrite=_is_patched_checkpoint(target))
        return f"Checkpoint: {target}"


# --------------------------------------------------------------------------------------------------------------------
# Data


def _text_data(config: PlanConfig, tokenizer: Any, sizes: _Sizes, exact: Any, *, decoder: bool) -> _Data:
    """The train part of a text for the transfer, and half of its held-out part each to choose and to verify."""
    from .data.text import pad_token, padded_batches, read_text, token_documents, token_passages
    from .evaluation.layer_search import LanguageModelMetric
    from .evaluation.metrics import EmbeddingMetric

    text = read_text(config.data.dataset)
    length, pad = sizes.sequence_length, pad_token(tokenizer)
    train = token_passages(tokenizer, text.train, length, sizes.train_sequences + sizes.validation_sequences)
    halves = split_halves(text.held_out)
    sequences = [token_passages(tokenizer, half, length, sizes.passages) for half in halves]
    if len(train) < 4 or min(map(len, sequences)) < 2:
        raise ValueError(
            f"{text.source!r} gives {len(train)} sequences of up to {length} tokens to train on, {len(sequences[0])} "
            f"to choose with and {len(sequences[1])} to verify with; 4, 2 and 2 are needed. Give a longer text."
        )
    random.Random(config.seed).shuffle(train)
    split = max(1, min(sizes.validation_sequences, len(train) // 4))
    source = text.source if config.data.dataset is None else Path(text.source).name
    facts: dict[str, Any] = _transfer_facts(source, text.sha256, length, len(train), split)
    metrics: list[QualityMetric] = []
    for name, half, rows in zip(("choice", "verification"), halves, sequences, strict=True):
        if decoder:
            documents, stride = token_documents(tokenizer, half, sizes.tokens), max(length // 2, 1)
            metrics.append(
                LanguageModelMetric(exact, documents, context=length, stride=stride, batch_size=sizes.batch_size)
            )
            facts[name] = {"documents": len(documents), "tokens": sum(map(len, documents)), "stride": stride}
        else:
            metrics.append(EmbeddingMetric(exact, padded_batches(rows, sizes.batch_size, pad)))
            facts[name] = {"passages": len(rows), "tokens": sum(map(len, rows))}
    return _Data(
        padded_batches(train[split:], sizes.batch_size, pad),
        padded_batches(train[:split], sizes.batch_size, pad),
        metrics[0],
        metrics[1],
        [token for row in sequences[0] for token in row],
        facts,
    )


def _transfer_facts(source: str, sha256: str, length: int, count: int, split: int) -> dict[str, Any]:
    return {
        "source": source,
        "sha256": sha256,
        "sequence_length": length,
        "train_sequences": count - split,
        "validation_sequences": split,
    }


def split_halves(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into every second document and the others; a single document into its first and second half."""
    if len(documents) > 1:
        return list(documents[::2]), list(documents[1::2])
    middle = documents[0].find(" ", len(documents[0]) // 2)
    middle = middle if middle > 0 else len(documents[0]) // 2
    return [documents[0][:middle].strip()], [documents[0][middle:].strip()]


def _load_task(config: PlanConfig, tokenizer: Any, sizes: _Sizes, device: Any) -> tuple[Any, _Data]:
    """The classifier and its data: training rows for the transfer (without labels), every second validation row to
    choose, the others to verify."""

    from .data.task_data import load_task_data
    from .data.tasks import get_task
    from .evaluation.inputs import check_labels
    from .evaluation.metrics import ClassificationMetric
    from .evaluation.models import load_exact

    task = str(config.data.task)
    data = DataConfig(
        task=task,
        folder=config.data.folder,
        max_length=sizes.sequence_length,
        max_train_samples=sizes.train_sequences + sizes.validation_sequences,
    )
    problem: Any = load_task_data("classification", tokenizer, data, config.seed)
    exact = load_exact(config.model, "classifier", device, task=task)
    check_labels(get_task(task), exact.config)
    train = [row for row in problem.train if row["input_ids"]]
    rows = [row for split in problem.validation.values() for row in split]
    halves = [rows[::2][: sizes.rows], rows[1::2][: sizes.rows]]
    if len(train) < 4 or min(map(len, halves)) < 2:
        raise ValueError(f"Task {task!r} has {len(train)} rows to train on and {len(rows)} to measure on: too few.")
    split = max(1, min(sizes.validation_sequences, len(train) // 4))
    content = repr([(row["input_ids"], row["labels"]) for row in [*train, *rows]])

    def batches(rows: list[Any]) -> list[Any]:
        starts = range(0, len(rows), sizes.batch_size)
        return [problem.collator(rows[start : start + sizes.batch_size]) for start in starts]

    choice, verification = (
        ClassificationMetric(
            exact, {"": batches(half)}, problem.metric_names, regression=problem.labels is None, task=task
        )
        for half in halves
    )
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    facts = _transfer_facts(f"task {task}", sha256, sizes.sequence_length, len(train), split)
    facts |= {"choice": {"rows": len(halves[0])}, "verification": {"rows": len(halves[1])}}
    tokens = [token for row in halves[0] for token in row["input_ids"]]
    return exact, _Data(batches(train[split:]), batches(train[:split]), choice, verification, tokens, facts)


# --------------------------------------------------------------------------------------------------------------------
# Files and terminal


def _write(result: LayerSearchResult, facts: dict[str, Any], folder: Path, console: Console) -> None:
    """Write the plan, the report and the plot, and show the table."""
    from .evaluation.layer_search_report import draw_curve, render_page, show
    from .utils.files import atomic_write, write_json

    plot = draw_curve(result, facts["model"]["name"])
    write_json(folder / REPORT, {**facts, "result": result.to_dict(), "summary": result.summary()})
    write_json(folder / PLAN, result.plan)
    atomic_write(folder / PLOT, plot)
    atomic_write(folder / PAGE, render_page(result, facts, plot))
    show(console, result, f"{facts['model']['name']}: from exact to {result.attention}")
    files = f"Plan: {folder / PLAN}, with {PAGE}, {PLOT} and {REPORT}"
    console.print(files, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Context manager: a function `(description, done, total)` that updates a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading")
        yield lambda description, done, total: bar.update(task, description=description, completed=done, total=total)


def _check_attention(name: str) -> None:
    from .registry import ATTENTIONS, list_attentions

    list_attentions()
    ATTENTIONS.get(name)
    if name == "softmax":
        raise ValueError("attention 'softmax' is the exact attention: there is nothing to plan. Name a mechanism.")


def _check_target(source: str, target: str) -> None:
    from .saving import check_output

    try:
        check_output(source, target, overwrite=_is_patched_checkpoint(target))
    except ValueError as error:
        raise ValueError(f"save_model {target!r} holds other files. Name another folder.") from error


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if there is no such file, or it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _is_patched_checkpoint(folder: str) -> bool:
    """Whether a folder holds a patched checkpoint, which an earlier plan may have written."""
    from .patching import CONFIG_FIELD

    try:
        return CONFIG_FIELD in json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
