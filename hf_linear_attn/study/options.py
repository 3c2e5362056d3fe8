"""The options of `evaluate` and `plan`. Reading them loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from ..data.config import BUDGETS, DataConfig, TaskType
from ..utils.options import OptionError, check_exclusive, check_options, make_config, option, to_dict

#: Mechanisms that are measured where none is named.
ENCODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer", "window")
DECODER_ATTENTIONS = ("elu", "favor+", "hedgehog", "linformer-causal", "window")

#: The same with `quick`.
QUICK_ATTENTIONS = ("favor+", "hedgehog", "window")

#: Lengths that are timed where none is named.
USUAL_LENGTHS, QUICK_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192), (128, 512, 2048)


@dataclass(frozen=True)
class SpeedConfig:
    """What `evaluate` times, and for how long."""

    lengths: tuple[int, ...] | None = option(
        None, "tokens of the timed inputs (default: 128 to 8192; quick: to 2048)", least=16
    )
    batch_size: int = option(8, "sequences of the timed throughput; 1: none", least=1)
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "precision of the timed models")
    backward: bool = option(False, "also time forward and backward together, as in training")
    seconds: float | None = option(None, "time to spend on each timed length (default: 12; quick: 1.5)", above=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.lengths == ():
            raise OptionError("lengths", "is empty: give at least one entry, or leave it out.")


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of `hf-linear-attn evaluate`. None means: what suits the model, and `quick`."""

    model: str | None = option(None, "a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2")
    attention: tuple[str, ...] | None = option(
        None, "mechanisms to compare (default: elu, favor+, hedgehog, Linformer, window; quick: three)"
    )
    converted: tuple[str, ...] = option((), "checkpoints that `convert` made from MODEL, of several seeds")
    baseline: tuple[str, ...] = option((), "checkpoints with exact attention, tuned as the converted ones")
    task_type: TaskType | None = option(None, "the kind of model (default: that of its config)")
    data: DataConfig = option(factory=DataConfig, help="what to evaluate on")
    sts: str | None = option(None, "folder with STS-B, to evaluate the sentence embeddings of an encoder")
    speed: SpeedConfig = option(factory=SpeedConfig, help="what to time")
    steps: int | None = option(None, "steps of attention transfer (default: 100; quick: 25)", least=0)
    seeds: tuple[int, ...] = option((0,), "seeds of transfer and random features; several give a spread", least=0)
    recall_lengths: tuple[int, ...] = option((), "tokens of the prompts that measure recall", least=32)
    quick: bool = option(False, "less of everything, for a first look")
    name: str | None = option(None, "what the report calls the model (default: the name of its folder)")
    output: str = option("report", "folder for the report and its records")
    resume: bool = option(False, "measure only what the output folder lacks")
    overwrite: bool = option(False, "replace an earlier result in the output folder")
    threads: int | None = option(None, "CPU threads, for all alike (default: torch's)", least=1)
    device: str = option("cpu", "torch device to run on: cpu, cuda, …")

    def __post_init__(self) -> None:
        check_options(self)
        check_exclusive(self, "resume", "overwrite")
        for name, entries in (("attention", self.attention), ("seeds", self.seeds)):
            if entries == ():
                raise OptionError(name, "is empty: give at least one entry, or leave it out.")


def with_options(config: EvaluateConfig, options: Mapping[str, Any], data: Any = None) -> EvaluateConfig:
    """Return the config with options by name, and data: a `DataConfig`, a path, or None.

    Options of the sections `data` and `speed` are given by their names, too, or as mappings. Errors as `make_config`.
    """
    changes = dict(options)
    if data is not None:
        changes["data"] = data if isinstance(data, DataConfig) else {"dataset": str(data)}
    for section, kind in (("data", DataConfig), ("speed", SpeedConfig)):
        part = changes.get(section, {})
        names = {item.name for item in fields(kind)} & changes.keys()
        values = {name: changes.pop(name) for name in names}
        changes[section] = {**(to_dict(part) if is_dataclass(part) else part), **values}
    return make_config(type(config), config, changes)


@dataclass(frozen=True)
class PlanConfig:
    """Options of `plan`, which chooses as `convert` does with a budget, and trains nothing."""

    model: str = option(help="a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2")
    budget: str = option(help=BUDGETS)
    output: str = option("plan", "folder for plan.json and its table")
    options: dict[str, Any] = option(factory=dict, help="options of the mechanism: --options.sink_tokens 8")
    task_type: TaskType | None = option(None, "the kind of model (default: that of its config)")
    data: DataConfig = option(factory=DataConfig)
    resume: bool = option(False, "continue an interrupted plan")
    overwrite: bool = option(False, "replace an earlier result in the output folder")
    threads: int | None = option(None, "CPU threads (default: torch's)", least=1)
    device: Literal["auto", "cpu"] = option("auto", "cpu: leave a GPU alone")
    seed: int = option(0, "seed of random features and of prompts", least=0)

    def __post_init__(self) -> None:
        check_options(self)
