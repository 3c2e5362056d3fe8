"""The options of an evaluation, and how much is measured. Reading them loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from ..config import DEFAULT_ATTENTION
from ..data.config import BUDGETS, PYTHON_DOCUMENTATION, DataConfig, TimingConfig
from ..data.files import Documents
from ..utils.options import (
    OptionError,
    check_exclusive,
    check_options,
    check_value,
    default_of,
    make_config,
    option,
    to_dict,
)

Dtype = Literal["float32", "bfloat16", "float16"]

#: Mechanisms that are measured where none is named.
ENCODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer", "window")
DECODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer-causal", "window")

#: The same with `quick`.
QUICK_ATTENTIONS = ("favor+", "hedgehog", "window")

#: Sequences at once where throughput is timed.
THROUGHPUT_BATCH_SIZE = 8


@dataclass(frozen=True)
class EvaluationData:
    """What a model is evaluated on: a text, or labelled tasks, and sentence pairs.

    Raises:
        ValueError: Options that do not go together.
    """

    dataset: str | None = option(
        None, f"text file or {PYTHON_DOCUMENTATION} (default of encoders); labelled data of a classifier", common=True
    )
    task: tuple[str, ...] | None = option(
        None, "labelled tasks: NAME (sst2, …) of MODEL itself, NAME=FOLDER of another model of its shape", common=True
    )
    text_columns: tuple[str, ...] = option(("text",), "text column of your own labelled data, or two for pairs")
    label_column: str = option("label", "label column of your own labelled data")
    documents: Documents = option("auto", "documents of a text file: auto, paragraphs or lines, as for `convert`")
    folder: str | None = option(None, "folder with the tasks' files (default: from the Hub)")
    metrics: tuple[str, ...] | None = option(
        None, "metrics of the task, the first decides; hub:NAME: one of the Hub (hub:-NAME: less is better)"
    )
    sts: str | None = option(None, "folder with STS-B, to evaluate the sentence embeddings of an encoder")
    max_eval_samples: int | None = option(None, "labelled rows or sentence pairs to measure on (default: all)", least=2)

    def __post_init__(self) -> None:
        check_options(self)
        _check_not_empty(self)
        entries = [split_task(entry) for entry in self.task or ()]
        names, own = [name for name, _ in entries], [name for name, folder in entries if folder is None]
        others = "Give all but one with the folder of a model that was fine-tuned for it: NAME NAME=FOLDER."
        alternative = f"Leave it out, or give the task a folder ({self.own_task}=FOLDER): MODEL has one head or none."
        for wrong, name, text in (
            (len(set(names)) < len(names), "task", f"has an entry twice: {', '.join(names)}."),
            (len(own) > 1, "task", f"one model has one head, and cannot answer {' and '.join(own)}. {others}"),
            (self.folder and not self.task, "folder", "belongs to a task. Give the task too (sst2, mrpc, …)."),
            (self.metrics and not (self.task or self.dataset), "metrics", "belongs to a task or a dataset. Give one."),
            (self.metrics and len(names) > 1, "metrics", f"are those of one task; there are {len(names)}."),
            (own and self.dataset, "dataset", f"a task has its own data. {alternative}"),
            (own and self.sts, "sts", f"needs an encoder without a head. {alternative}"),
        ):
            if wrong:
                raise OptionError(name, text)

    @property
    def for_model(self) -> DataConfig:
        """What is read for MODEL itself."""
        names = {item.name for item in fields(self)} - {"dataset", "task", "sts"}
        dataset = None if self.dataset == PYTHON_DOCUMENTATION else self.dataset
        return DataConfig(dataset=dataset, task=self.own_task, **{name: getattr(self, name) for name in names})

    @property
    def tasks(self) -> dict[str, str | None]:
        """The tasks, each with the folder of its model (None: MODEL itself)."""
        return dict(map(split_task, self.task or ()))

    @property
    def own_task(self) -> str | None:
        """The task that MODEL itself is a classifier for."""
        return next((name for name, folder in self.tasks.items() if folder is None), None)

    @property
    def other_tasks(self) -> dict[str, str]:
        """Further tasks, with the folders of their models."""
        return {name: folder for name, folder in self.tasks.items() if folder is not None}


@dataclass(frozen=True)
class SpeedConfig:
    """What `evaluate` times, and for how long (`plan` and `convert` have `TimingConfig`).

    Raises:
        ValueError: A value is out of range.
    """

    lengths: tuple[int, ...] | None = option(
        None, "tokens of the timed inputs (default: 128 to `length`, or to 8192; quick: to 2048)", least=16, common=True
    )
    batch_size: int | None = option(None, "sequences of the timed throughput; 1: none (default: 8)", least=1)
    dtype: Dtype | None = option(None, "precision of the timed models, not of the quality (default: as loaded)")
    backward: bool = option(False, "also time forward and backward together, as in training")
    seconds: float | None = option(None, "time to spend on each timed length (default: 12; quick: 1.5)", above=0)

    def __post_init__(self) -> None:
        check_options(self)
        _check_not_empty(self)


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of `hf-linear-attn evaluate`. None means: what suits the model, and `quick`.

    Raises:
        ValueError: A value is out of range, or options do not go together.
    """

    model: str | None = option(None, "a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2", common=True)
    attention: tuple[str, ...] | None = option(
        None,
        "mechanisms to compare (default: elu, favor+, hedgehog, Linformer, window; quick: three)",
        common=True,
    )
    converted: tuple[str, ...] | None = option(
        None,
        "checkpoints made from MODEL by `convert`, of several seeds (TASK=FOLDER: from a task's model)",
        common=True,
    )
    baseline: tuple[str, ...] | None = option(
        None, "checkpoints with exact attention, tuned as the converted ones (TASK=FOLDER: of a task's model)"
    )
    data: EvaluationData = option(factory=EvaluationData, help="what to evaluate on")
    length: int | None = option(
        None,
        "tokens of your own inputs (default: the longest of speed.lengths, else at most 2048)",
        least=16,
        common=True,
    )
    speed: SpeedConfig = option(factory=SpeedConfig, help="what to time")
    steps: int | None = option(None, "steps of attention transfer (default: 100; quick: 25)", least=0, common=True)
    seeds: tuple[int, ...] | None = option(
        None, "seeds of transfer and random features; several give a spread (default: seed)", least=0, common=True
    )
    recall_lengths: tuple[int, ...] | None = option(
        None, "tokens of the prompts that measure recall (default: not measured)", least=32, common=True
    )
    context: int | None = option(None, "tokens of a window of the perplexity (default: sequence_length)", least=2)
    stride: int | None = option(None, "tokens between windows (default: half a context)", least=1)
    sequence_length: int | None = option(
        None, "longest sequence of transfer and fidelity (default: decoders 512, encoders 256, tasks 128)", least=16
    )
    quick: bool = option(False, "less of everything, for a first look", common=True)
    name: str | None = option(None, "what the report calls the model (default: the name of its folder)")
    output: str = option("report", "folder for the report and its records", common=True)
    resume: bool = option(False, "measure only what the output folder lacks", common=True)
    overwrite: bool = option(False, "replace an earlier result in the output folder", common=True)
    threads: int | None = option(None, "CPU threads, for all alike (default: torch's)", least=1)
    device: str = option("cpu", "torch device to run on: cpu, cuda, …")
    seed: int = option(0, "seed of the order of sequences, of recall prompts, and of `seeds` by default", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        _check_not_empty(self)
        if self.context is not None and self.stride is not None and self.stride >= self.context:
            raise OptionError("stride", f"must be smaller than the context of {self.context}, got {self.stride}.")
        if self.context is not None and self.stride is None and self.context < 4:
            raise OptionError("context", f"{self.context} is too short for a stride of half of it: give stride too.")
        check_exclusive(self, "resume", "overwrite")

    def for_model(self) -> EvaluateConfig:
        """Return what concerns MODEL itself."""
        own = self.data.own_task
        only_others = self.data.other_tasks and own is None  # then the folder and the metrics are theirs
        unused: dict[str, Any] = {"folder": None, "metrics": None} if only_others else {}
        return replace(self, data=replace(self.data, task=(own,) if own else None, **unused), **self._folders(None))

    def for_other_task(self, task: str) -> EvaluateConfig:
        """Return what concerns the model of another task."""
        data = replace(self.data, task=(task,), dataset=None, sts=None)
        return replace(self, data=data, context=None, stride=None, **self._folders(task))

    def _folders(self, task: str | None) -> dict[str, Any]:
        """Return the models to compare of a task, given as `TASK=FOLDER`, or of MODEL itself (None)."""
        folders: dict[str, Any] = {}
        for name in ("converted", "baseline"):
            entries = [(*split_task(entry), entry) for entry in getattr(self, name) or ()]
            owned = [
                (head, folder) if head in self.data.other_tasks else (None, entry) for head, folder, entry in entries
            ]
            folders[name] = tuple(str(folder) for head, folder in owned if head == task) or None
        return folders


def split_task(entry: str) -> tuple[str, str | None]:
    """Return the parts of `NAME` or `NAME=FOLDER`."""
    name, sign, folder = entry.partition("=")
    return name, folder if sign else None


def with_options(config: EvaluateConfig, options: Mapping[str, Any], data: Any = None) -> EvaluateConfig:
    """Return the config with options by name, and data: an `EvaluationData`, a path, or None.

    Options of the sections `data` and `speed` are given by their names, too, or as mappings. Errors as `make_config`.
    """
    changes = dict(options)
    if data is not None:
        changes["data"] = data if isinstance(data, EvaluationData) else {"dataset": str(data)}
    for section in ("data", "speed"):
        part = changes.get(section, {})
        names = {item.name for item in fields(getattr(config, section))} & changes.keys()
        own = {name: changes.pop(name) for name in names}
        changes[section] = {**(to_dict(part) if is_dataclass(part) else part), **own}
    return make_config(type(config), config, changes)


def _check_not_empty(config: Any) -> None:
    for item in fields(config):
        if getattr(config, item.name) == ():
            raise OptionError(item.name, "is empty: give at least one entry, or leave it out.")


@dataclass(frozen=True)
class PlanConfig:
    """Options of `plan`: what is searched, and how thoroughly. None stands for what suits the model and `quick`."""

    model: str = option(help="a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2", common=True)
    budget: str = option(help=BUDGETS, common=True)
    output: str = option("plan", "folder for the plan and its report", common=True)
    attention: str = option(DEFAULT_ATTENTION, "the mechanism", common=True)
    options: dict[str, Any] = option(factory=dict, help="options of the mechanism, such as --options.window_size 64")
    data: DataConfig = option(factory=DataConfig)
    steps: int | None = option(None, "steps of attention transfer (default: 200; quick: 25)", least=0, common=True)
    search: Literal["layers", "heads"] = option("layers", "what becomes linear: layers or heads", common=True)
    speed: TimingConfig = option(factory=TimingConfig)
    save_model: str | None = option(None, "folder for a checkpoint of the planned model", common=True)
    resume: bool = option(False, "continue, or use the measurements in the output folder", common=True)
    overwrite: bool = option(False, "replace earlier results in the output folder and in save_model", common=True)
    quick: bool = option(False, "less of everything, for a first look", common=True)
    threads: int | None = option(None, "CPU threads (default: as torch has it)", least=1)
    device: str = option("cpu", "torch device: cpu, cuda, …", common=True)
    seed: int = option(0, "seed of random features and of the order of sequences", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_value("data.max_length", self.data.max_length, int | None, least=16)
        check_exclusive(self, "resume", "overwrite")
        if not self.data.group_by_length:
            raise OptionError("data.group_by_length", "is for training: plan takes rows in their order. Leave it out.")
        if self.data.mlm_probability != default_of(DataConfig, "mlm_probability"):
            raise OptionError("data.mlm_probability", "is for training (masked-lm). Leave it out.")


@dataclass(frozen=True)
class DataSizes:
    """How much of its data a model is trained and measured on, with all defaults filled in."""

    steps: int  # of attention transfer
    sequence_length: int  # the longest of transfer and fidelity in tokens: `sequence_length`, of plan `data.max_length`
    batch_size: int  # sequences in one step of transfer
    evaluations: int  # how often the validation sequences are evaluated during a transfer, to keep its best step
    train_sequences: int
    validation_sequences: int
    test_sequences: int  # for embeddings, timing, and to draw those of the fidelity from
    fidelity_sequences: int
    perplexity_tokens: int
    context: int  # tokens of a window of the perplexity
    stride: int  # tokens between windows
    seed: int  # of the data's order


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(DataSizes):
    """How much `evaluate` measures on a model: its options with all defaults filled in."""

    attentions: tuple[str, ...]  # mechanisms to patch in
    lengths: tuple[int, ...]  # to time
    length: int  # of the user's inputs, one of `lengths`
    seconds: float  # to spend on each timed length
    seeds: tuple[int, ...]  # of transfer and random features; each gives a conversion of its own
    throughput_batch_size: int  # sequences at once where throughput is timed (1: it is not)
    dtype: str  # of the timed models
    backward: bool  # whether to time forward and backward together
    flops: bool  # whether to count operations, in another pass of each model


@dataclass(frozen=True, kw_only=True)
class PlanSizes(DataSizes):
    """How much `plan` measures on a model, with all defaults filled in."""

    max_eval_samples: int | None  # labelled rows to measure on (None: all)
    lengths: tuple[int, ...]  # to time
    seconds: float  # to spend on each timed length


def _data_sizes(name: str, length: int | None, kind: str, limit: int | None, *, quick: bool, seed: int) -> DataSizes:
    """Return the sizes of an evaluation for the longest sequence, the option `name`; None: that of the kind."""
    usual = {"decoder": 512, "encoder": 256, "classifier": 128}[kind]
    length = length or min(usual, limit or usual)
    _check_positions(name, length, limit)
    batch_size = max(1, min(32, 1024 // length))  # the same number of tokens in a step, whatever the length
    return DataSizes(
        steps=25 if quick else 100,
        sequence_length=length,
        batch_size=batch_size,
        evaluations=2 if quick else 4,
        train_sequences=batch_size * (26 if quick else 120),
        validation_sequences=batch_size * (1 if quick else 2),
        test_sequences=max(24 if quick else 128, batch_size),
        fidelity_sequences=max(4 if quick else 24, batch_size),
        perplexity_tokens=4096 if quick else 16384,
        context=length,
        stride=max(length // 2, 1),
        seed=seed,
    )


def _check_positions(name: str, length: int | None, limit: int | None) -> None:
    if length is not None and limit is not None and length > limit:
        raise OptionError(name, f"{length} is beyond the model's {limit} positions. Give {limit} or less.")


def resolve_options(
    config: EvaluateConfig, kind: str, limit: int | None, dtype: str, *, table: bool
) -> ResolvedOptions:
    """Return how much to measure on a model of a kind (`decoder`, `encoder` or `classifier`).

    `limit` is the number of its positions, and `table` says whether they are looked up in a table of limited size.

    Raises:
        ValueError: A sequence length or a context is beyond the model's positions.
    """
    quick = config.quick
    sizes = _data_sizes("sequence_length", config.sequence_length, kind, limit, quick=quick, seed=config.seed)
    _check_positions("context", config.context, limit if table else None)
    context = config.context or sizes.context
    own = {
        "steps": sizes.steps if config.steps is None else config.steps,
        "context": context,
        "stride": config.stride or max(context // 2, 1),
    }
    default = QUICK_ATTENTIONS if quick else DECODER_ATTENTIONS if kind == "decoder" else ENCODER_ATTENTIONS
    length = config.length or max(config.speed.lengths or (min(limit or 2048, 2048),))
    usual = (128, 512, 2048) if quick else (128, 256, 512, 1024, 2048, 4096, 8192)
    shortest = (limit,) if limit is not None and 16 <= limit < 128 else ()
    within = [one for one in usual if config.length is None or one <= config.length]
    return ResolvedOptions(
        **{**vars(sizes), **own},
        attentions=config.attention or (() if config.converted else default),
        lengths=tuple(sorted({*(config.speed.lengths or (*shortest, *within)), length})),
        length=length,
        seconds=config.speed.seconds or (1.5 if quick else 12.0),
        seeds=config.seeds or (config.seed,),
        throughput_batch_size=config.speed.batch_size or THROUGHPUT_BATCH_SIZE,
        dtype=config.speed.dtype or dtype,
        backward=config.speed.backward,
        flops=not quick,
    )


def resolve_plan(config: PlanConfig, kind: str, limit: int | None) -> PlanSizes:
    """Return how much `plan` measures: more than an evaluation, because a choice of layers rests on it.

    It raises as `resolve_options`.
    """
    quick = config.quick
    sizes = _data_sizes("data.max_length", config.data.max_length, kind, limit, quick=quick, seed=config.seed)
    own = {
        "steps": config.steps if config.steps is not None else 25 if quick else 200,
        "evaluations": 2 if quick else 5,
        "validation_sequences": 2 * sizes.batch_size,
        "test_sequences": 32 if quick else 256,
        "perplexity_tokens": 4096 if quick else 32768,
    }
    rows, lengths = config.data.max_eval_samples, config.speed.lengths
    return PlanSizes(
        **{**vars(sizes), **own},
        max_eval_samples=256 if quick and rows is None else rows,
        lengths=((1024,) if quick else (1024, 4096)) if lengths is None else lengths,
        seconds=0.5 if quick else 2.0,
    )
