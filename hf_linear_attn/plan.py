"""`hf-linear-attn plan`: which layers of a model to convert under a budget, measured, as a plan file and a report."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .config import DEFAULT_ATTENTION

if TYPE_CHECKING:
    from rich.console import Console

    from .evaluation.planner.amounts import Amounts
    from .evaluation.planner.budget import Budget, Kind
    from .evaluation.planner.material import Material

EXTRAS = "pip install 'hf-linear-attn[demo]'"


@dataclass(frozen=True)
class PlanOptions:
    """What to keep, and how thoroughly to look. None: what suits the model, and `quick`."""

    budget: str = field(metadata={"help": "'1% perplexity', '0.05 nats', '0.5 points', '0.02 cosine' or '2x at 4096'"})
    text: str | None = field(
        default=None, metadata={"help": "UTF-8 text file to measure on (default: the documentation within Python)"}
    )
    task: str | None = field(
        default=None, metadata={"help": "or a labelled task, for a classifier fine-tuned on it: sst2, mrpc, imdb, …"}
    )
    folder: str | None = field(default=None, metadata={"help": "folder with the task's files (default: the Hub's)"})
    attention: str | None = field(default=None, metadata={"help": "the mechanism (default: window)"})
    option: tuple[str, ...] | None = field(
        default=None, metadata={"help": "options of the mechanism, KEY=VALUE (default: its own)"}
    )
    steps: int | None = field(
        default=None, metadata={"help": "steps of attention transfer, 0: none (default: 200; quick: 25)"}
    )
    search: Literal["rank", "greedy"] = field(
        default="rank",
        metadata={"help": "order of layers: by what each does alone, or looked at again after each (default: rank)"},
    )
    lengths: tuple[int, ...] | None = field(
        default=None, metadata={"help": "lengths to time, in tokens (default: 1024 and 4096; quick: 1024)"}
    )
    out: str = field(default="plan", metadata={"help": "folder to write to; a run that was stopped there goes on"})
    save_model: str | None = field(
        default=None, metadata={"help": "folder for the checkpoint with the planned layers and what they learned"}
    )
    sequence_length: int | None = field(
        default=None,
        metadata={"help": "longest sequence of training and measuring (default: 512 decoder, 256 encoder)"},
    )
    quick: bool = field(default=False, metadata={"help": "less of everything, for a first look"})
    restart: bool = field(default=False, metadata={"help": "begin anew where the folder holds earlier measurements"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: as torch has it)"})
    device: str = field(default="cpu", metadata={"help": "torch device to run on: cpu, cuda, …"})
    seed: int = field(default=0, metadata={"help": "seed of random features and of the order of sequences"})

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("sequence_length", 16), ("threads", 1), ("seed", 0)):
            given = getattr(self, name)
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {given!r}.")
        if self.lengths is not None and any(length < 16 for length in self.lengths):
            raise ValueError(f"lengths must be numbers of tokens, 16 or more, got {self.lengths!r}.")
        if self.task is not None and self.text is not None:
            raise ValueError("Give text or task, not both: a task brings its own data.")
        if self.folder is not None and self.task is None:
            raise ValueError(f"folder {self.folder!r} is where a task lies: give task too (sst2, mrpc, …).")
        self.mechanism_options()

    def mechanism_options(self) -> dict[str, Any]:
        """`option` as a dict; values are JSON, or else text."""
        found: dict[str, Any] = {}
        for text in self.option or ():
            name, equals, value = text.partition("=")
            if not equals or not name or name in found:
                raise ValueError(f"option must be KEY=VALUE, each key once, such as window_size=64; got {text!r}.")
            try:
                found[name] = json.loads(value)
            except json.JSONDecodeError:
                found[name] = value
        return found


def plan_command(source: str, options: PlanOptions) -> int:
    """The verb `plan`: exit code 1 where the budget is not met."""
    return 0 if run_plan(source, options)["choice"]["met"] else 1


def run_plan(source: str, options: PlanOptions, *, console: Console | None = None) -> dict[str, Any]:
    """Measure, write the plan and its report to `options.out`, show a table, and return the report.

    `report["choice"]["met"]` tells whether the budget is kept, on the data of the choice and on other data. Stopped and
    called again with the same settings, it goes on where it was; another budget uses the same measurements.

    Args:
        source: a local folder or a repository on the Hub: a causal language model, an encoder, or (with a task) a
            fine-tuned classifier.

    Raises:
        ValueError, OSError: settings, a model or data that cannot be served; nothing has been measured then.
        ImportError: matplotlib, jinja2 or rich is missing; with a task, the extra `train`.
    """
    began = time.perf_counter()
    _need_extras()
    from rich.console import Console
    from rich.markup import escape

    from .evaluation.planner.budget import Budget
    from .evaluation.planner.page import show, write_files
    from .evaluation.planner.words import sentences
    from .evaluation.report import check_folder
    from .evaluation.screen import Screen, readable

    console = console or Console()
    budget = Budget.parse(options.budget)
    _check_attention(options.attention)
    if options.save_model is not None:
        _check_target(source, options.save_model)
    name = Path(source).resolve().name if Path(source).is_dir() else source
    console.print(readable(console, f"Loading [bold]{escape(name)}[/] ..."), highlight=False)
    with Screen(console) as screen:
        job = _prepare(source, name, options, budget)
        folder = check_folder(options.out)
        study = job.study(folder, screen)
        record = study.record
        if record.resumed:
            screen.say(f"taken up: {len(record.data['measured'])} measurements of an earlier run")
        record.data.update(job.facts())
        found = study.run()
    record.data.update(found, resumed=record.resumed, seconds=time.perf_counter() - began)
    record.data["verdicts"] = sentences(record.data)
    record.save()
    write_files(record.data, folder)
    show(console, record.data, folder)
    if options.save_model is not None:
        told = _save_if_met(job, found["choice"], source, options.save_model)
        console.print(readable(console, escape(told)), highlight=False, soft_wrap=True)
    return record.data


def _need_extras() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f"plan needs {error.name}, which is not installed: {EXTRAS}") from error


def _check_attention(name: str | None) -> None:
    from .registry import ATTENTIONS, list_attentions

    list_attentions()
    if name is not None:
        ATTENTIONS.get(name)
        if name == "softmax":
            raise ValueError("attention 'softmax' is the exact attention: there is nothing to plan. Name a mechanism.")


# --------------------------------------------------------------------------------------------------------------------
# What to run


@dataclass
class Job:
    """A model with its data, its copies and what the report says of them."""

    name: str
    source: str
    options: PlanOptions
    budget: Budget
    kind: Kind
    amounts: Amounts
    attention: str
    exact: Any
    patched: Any
    timed: Any
    material: Material
    model_facts: dict[str, Any]

    def facts(self) -> dict[str, Any]:
        """What the report says of the run before anything is measured."""
        from .evaluation.measurements import now, plain
        from .evaluation.report import environment
        from .patching import patch_report
        from .registry import ATTENTIONS

        entry = ATTENTIONS.get(self.attention)
        report = patch_report(self.patched)
        settings = {**asdict(self.options), **asdict(self.amounts), "attention": self.attention}
        for place in ("text", "folder", "out", "save_model"):  # where things lay says nothing to a reader
            if settings[place] is not None:
                settings[place] = Path(settings[place]).name
        return plain(
            {
                "created": now(),
                "settings": settings,
                "budget": {"amount": self.budget.amount, "length": self.budget.length},
                **environment(self.exact.device),
                "baseline": self.exact.config._attn_implementation,
                "model": {"name": self.name, "source": self.name, **self.model_facts, "kind": self.kind.name},
                "data": self.material.facts,
                "mechanism": {
                    "name": self.attention,
                    "description": entry.description,
                    "paper": entry.paper,
                    "options": next(layer.options for layer in report.layers if layer.attention == self.attention),
                    "learned_parameters": report.parameters,
                },
            }
        )

    def identity(self) -> dict[str, Any]:
        """What the measurements depend on."""
        from .evaluation.loading import fingerprint
        from .evaluation.report import environment

        amounts = asdict(self.amounts)
        del amounts["lengths"]
        known = environment(self.exact.device)
        where = {name: known["hardware"][name] for name in ("device", "cpu", "threads")}
        return {
            "model": fingerprint(self.exact),
            "data": self.material.facts["sha256"],
            "attention": self.attention,
            "option": self.options.mechanism_options(),
            **amounts,
            **where,
            **{f"version of {name}": known["versions"][name] for name in ("torch", "transformers")},
        }

    def study(self, folder: Path, progress: Any) -> Any:
        from .evaluation.planner.record import Record
        from .evaluation.planner.study import PlanStudy

        return PlanStudy(
            self.exact,
            self.patched,
            self.timed,
            kind=self.kind,
            budget=self.budget,
            material=self.material,
            amounts=self.amounts,
            search=self.options.search,
            record=Record(folder, self.identity(), restart=self.options.restart),
            progress=progress,
        )


def _prepare(source: str, name: str, options: PlanOptions, budget: Budget) -> Job:
    """Load the model and its data, and build the copies."""
    import torch

    from .demo import is_decoder, model_facts, torch_device
    from .evaluation.loading import config_and_tokenizer, load_backbone, load_classifier
    from .evaluation.planner.amounts import amounts_for, timeable
    from .evaluation.planner.budget import KINDS
    from .evaluation.planner.material import task_material, task_problem, text_material
    from .evaluation.speed import shared_copy
    from .evaluation.texts import read_text
    from .integration.discovery import self_attention
    from .patching import patch_model

    config, tokenizer = config_and_tokenizer(source)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = torch_device(options.device)
    kind = KINDS["classifier" if options.task is not None else "decoder" if is_decoder(config) else "encoder"]
    budget.check(kind)
    if options.task is not None:
        amounts = amounts_for(options, config, 128, budget)
        problem = task_problem(tokenizer, options.task, options.folder, amounts)
        exact = load_classifier(source, options.task, problem, device)
        material = task_material(problem, options.task, amounts, exact)
    else:
        text = read_text(options.text)
        amounts = amounts_for(options, config, 512 if kind.name == "decoder" else 256, budget)
        exact = load_backbone(source, "AutoModelForCausalLM" if kind.name == "decoder" else "AutoModel", device)
        material = text_material(text, tokenizer, amounts, exact, decoder=kind.name == "decoder")
        material.facts["source"] = Path(text.source).name if options.text is not None else text.source
    attention = options.attention or DEFAULT_ATTENTION
    amounts = timeable(amounts, exact, budget)
    settings = {**_seed(attention, options.seed), **options.mechanism_options()}
    try:
        patched = patch_model(shared_copy(exact), attention, **settings)
    except NotImplementedError as error:
        raise ValueError(f"{attention!r} cannot be planned on this model: {error}") from error
    facts = model_facts(exact, self_attention(exact)[0].causal, type(exact).__name__)
    timed = _timed(exact, patched, attention, settings, amounts)
    return Job(name, source, options, budget, kind, amounts, attention, exact, patched, timed, material, facts)


def _seed(attention: str, seed: int) -> dict[str, Any]:
    from .evaluation.subject import default_options
    from .registry import ATTENTIONS

    return default_options(ATTENTIONS.get(attention), seed)


def _timed(exact: Any, patched: Any, attention: str, settings: dict[str, Any], amounts: Amounts) -> Any:
    """The copy that is timed: another one where a mechanism is built for a largest length that is too short."""
    from dataclasses import fields

    from .evaluation.speed import shared_copy, timing_options
    from .integration.discovery import longest_input
    from .patching import patch_model
    from .registry import ATTENTIONS

    accepted = [held.name for held in fields(ATTENTIONS.get(attention).options)]
    longest = max(amounts.lengths, default=0)
    changed = timing_options(settings, accepted, longest_input(exact), longest) if longest else settings
    return patched if changed == settings else patch_model(shared_copy(exact), attention, **changed)


def _save_if_met(job: Job, choice: dict[str, Any], source: str, target: str) -> str:
    """Write the planned layers with what they learned, as a checkpoint with its tokenizer; returns what was done."""
    from .evaluation.speed import shared_copy
    from .patching import patch_model, patch_report
    from .saving import save_checkpoint

    if not choice["met"]:
        return "No checkpoint was written: the budget is not met."
    options = next(layer.options for layer in patch_report(job.patched).layers if layer.attention == job.attention)
    model = patch_model(shared_copy(job.exact), job.attention, layers=choice["layers"], **options)
    held = job.patched.state_dict()
    model.load_state_dict({name: held[name] for name in model.state_dict()})
    save_checkpoint(model, source, target, overwrite=_ours(target))
    return f"Checkpoint: {target}"


def _check_target(source: str, target: str) -> None:
    """Before anything is measured: new, empty, or a checkpoint that an earlier plan may have written."""
    from .saving import check_output

    try:
        check_output(source, target, overwrite=_ours(target))
    except ValueError as error:
        raise ValueError(
            f"--save-model {target!r} cannot be written: it holds other files. Name another folder."
        ) from error


def _ours(target: str) -> bool:
    """Whether a folder holds a patched checkpoint, which may be replaced."""
    from .patching import CONFIG_FIELD

    try:
        return CONFIG_FIELD in json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
