"""What `hf-linear-attn evaluate` can be asked for. Light: reading flags loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

#: Whole numbers with the least that they may be.
LEAST = {
    "steps": 0,
    "length": 16,
    "context": 2,
    "stride": 1,
    "sequence_length": 16,
    "rows": 2,
    "batch": 1,
    "threads": 1,
    "seed": 0,
}

#: Precisions that speed can be measured in.
SpeedDtype = Literal["float32", "bfloat16", "float16"]


def about(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class EvaluateOptions:
    """What to measure, on which data, and how thoroughly. None: what suits the model, and `quick`."""

    attention: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "mechanisms to patch in, measured untrained and after attention transfer (default, without --converted: "
            "elu, favor+, hedgehog, a Linformer, window)"
        ),
    )
    converted: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "checkpoints made from this model by `convert`; those that differ in seed only give a spread "
            "(NAME=FOLDER: of a task's model)"
        ),
    )
    baseline: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "checkpoints with exact attention to compare the quality with (default: the model itself; NAME=FOLDER: of "
            "a task's model)"
        ),
    )
    task: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "labelled tasks: NAME (sst2, mrpc, imdb, …) where MODEL is a classifier for it, NAME=FOLDER for a further "
            "fine-tuned model of the same shape: a head answers one task only"
        ),
    )
    data: str | None = field(default=None, metadata=about("folder with the tasks' files (default: the Hub's)"))
    metrics: tuple[str, ...] | None = field(
        default=None,
        metadata=about("metrics of the task, the first decides (default: the task's own); hub:NAME is the Hub's"),
    )
    text: str | None = field(
        default=None,
        metadata=about("UTF-8 text file to measure on (encoders' default: the documentation within Python)"),
    )
    sts: str | None = field(
        default=None, metadata=about("folder with STS-B, to judge the sentence embeddings of an encoder by")
    )
    length: int | None = field(
        default=None, metadata=about("length of your own inputs, in tokens, for the verdict (default: at most 2048)")
    )
    lengths: tuple[int, ...] | None = field(
        default=None, metadata=about("lengths to time, in tokens (default: 128 to 8192; quick: 128 to 4096)")
    )
    dtype: SpeedDtype | None = field(
        default=None,
        metadata=about("precision of the speed measurements; quality is that of the model as loaded (default: as it)"),
    )
    batch: int | None = field(
        default=None,
        metadata=about("sequences at once where throughput is timed, as far as memory goes; 1: none (default: 8)"),
    )
    steps: int | None = field(
        default=None, metadata=about("steps of attention transfer, 0: none (default: 100; quick: 25)")
    )
    seeds: tuple[int, ...] | None = field(
        default=None, metadata=about("seeds of transfer and random features; several give a spread (default: --seed)")
    )
    context: int | None = field(default=None, metadata=about("tokens of a window of the perplexity"))
    stride: int | None = field(default=None, metadata=about("tokens between windows (default: half a context)"))
    sequence_length: int | None = field(
        default=None,
        metadata=about("longest sequence of transfer and fidelity (default: 512 decoder, 256 encoder, 128 task)"),
    )
    rows: int | None = field(
        default=None, metadata=about("labelled rows or sentence pairs to measure on, at most (default: all)")
    )
    backward: bool = field(default=False, metadata=about("also time forward and backward together, as in training"))
    seconds: float | None = field(
        default=None, metadata=about("time to spend on each timed length (default: 12; quick: 1.5)")
    )
    quick: bool = field(default=False, metadata=about("less of everything, for a first look"))
    name: str | None = field(
        default=None, metadata=about("what the report calls the model (default: its folder's name)")
    )
    output: str = field(default="report", metadata=about("folder for the report and its measurements"))
    append: bool = field(
        default=False, metadata=about("add to the measurements in the folder, or go on where a run was stopped")
    )
    again: bool = field(
        default=False, metadata=about("measure anew what is there; both are kept, the newer is shown (with --append)")
    )
    threads: int | None = field(default=None, metadata=about("CPU threads, for all alike (default: as torch has it)"))
    device: str = field(default="cpu", metadata=about("torch device to run on: cpu, cuda, …"))
    seed: int = field(default=0, metadata=about("seed of random features, of the order of sequences, of timed inputs"))

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            _check_whole(name, getattr(self, name), least)
        for name, least in (("lengths", 16), ("seeds", 0)):
            for given in getattr(self, name) or ():
                _check_whole(name, given, least)
        for name in ("attention", "converted", "baseline", "lengths", "seeds"):
            given = getattr(self, name)
            if given is not None and len(set(given)) < len(given):
                raise ValueError(f"{name} names something twice: {', '.join(map(str, given))}.")
        if self.dtype is not None and self.dtype not in get_args(SpeedDtype):
            raise ValueError(f"dtype must be one of {', '.join(get_args(SpeedDtype))}, got {self.dtype!r}.")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds!r}.")
        self._check_tasks()
        if self.metrics is not None and self.task is None:
            raise ValueError(f"metrics {', '.join(self.metrics)} are those of a task: give task too (sst2, mrpc, …).")
        if self.data is not None and self.task is None:
            raise ValueError(f"data {self.data!r} is where a task lies: give task too (sst2, mrpc, …).")
        if self.context is not None and self.stride is not None and self.stride >= self.context:
            raise ValueError(f"stride ({self.stride}) must be smaller than context ({self.context}).")
        if self.again and not self.append:
            raise ValueError("again goes with append: it measures anew what a folder holds already.")

    def _check_tasks(self) -> None:
        if isinstance(self.task, str):
            raise TypeError(f"task must be a tuple of names, got {self.task!r}.")
        names = [task_of(given)[0] for given in self.task or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"task names something twice: {', '.join(names)}.")
        own = [name for name, folder in map(task_of, self.task or ()) if folder is None]
        if len(own) > 1:
            raise ValueError(
                f"task: one model has one head, and cannot answer {' and '.join(own)}. Give all but one with the "
                f"folder of a model that was fine-tuned for it: --task {own[0]} {own[1]}=FOLDER."
            )
        if self.metrics is not None and len(names) > 1:
            raise ValueError(f"metrics are those of one task; there are {len(names)}. Leave metrics or tasks out.")
        for name, what in (("text", "a task brings its own data"), ("sts", "sts judges an encoder without a head")):
            if own and getattr(self, name) is not None:
                raise ValueError(
                    f"Give {name}, or task {own[0]!r} with a folder (--task {own[0]}=FOLDER): MODEL is either a "
                    f"classifier or none, and {what}."
                )

    @property
    def own_task(self) -> str | None:
        """The task that MODEL itself is a classifier for."""
        return next((name for name, folder in map(task_of, self.task or ()) if folder is None), None)

    @property
    def other_tasks(self) -> dict[str, str]:
        """Further tasks, with the folders of their models."""
        return {name: folder for name, folder in map(task_of, self.task or ()) if folder is not None}

    def for_task(self, task: str | None) -> EvaluateOptions:
        """What concerns one model: that of a further task, or (None) MODEL itself."""
        known = self.other_tasks
        own: dict[str, Any] = {}
        for name in ("converted", "baseline"):
            split = [(given, *task_of(given)) for given in getattr(self, name) or ()]
            folders = [(head, folder) if head in known else (None, given) for given, head, folder in split]
            own[name] = tuple(str(folder) for head, folder in folders if head == task) or None
        if task is not None:
            rest: dict[str, Any] = {"task": (task,), "text": None, "sts": None, "context": None, "stride": None}
        else:
            rest = {"task": None if self.own_task is None else (self.own_task,)}
            if self.own_task is None:
                rest.update(data=None, metrics=None)
        return replace(self, **rest, **own)


def task_of(given: str) -> tuple[str, str | None]:
    """`NAME` or `NAME=FOLDER`."""
    name, sign, folder = given.partition("=")
    return name, folder if sign else None


def _check_whole(name: str, given: object, least: int) -> None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {given!r}.")
