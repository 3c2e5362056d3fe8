"""`hf-linear-attn plan`: find which layers or heads of a checkpoint to convert, and write a plan file and a report."""

from dataclasses import dataclass
from typing import Any, Literal

from .config import DEFAULT_ATTENTION
from .data.config import DataConfig, TimingConfig
from .utils.options import check_exclusive, check_options, option


@dataclass(frozen=True)
class PlanTimingConfig(TimingConfig):
    """At which lengths the planned layers are timed."""

    lengths: tuple[int, ...] | None = option(
        None, "lengths to time, in tokens (default: 1024 and 4096; quick: 1024)", least=16, common=True
    )


@dataclass(frozen=True)
class PlanConfig:
    """What `plan_command` searches, and how thoroughly. None stands for what suits the model and `quick`."""

    model: str = option(help="a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2", common=True)
    budget: str = option(
        help="'1% perplexity', '0.05 nats', '0.5 points', '0.02 cosine', '90% recall at 2048', '2x at 4096' or "
        "'25% cache at 8192'",
        common=True,
    )
    output: str = option("plan", "folder for the plan and its report", common=True)
    attention: str = option(DEFAULT_ATTENTION, "the mechanism", common=True)
    options: dict[str, Any] = option(factory=dict, help="options of the mechanism, such as --options.window_size 64")
    data: DataConfig = option(factory=DataConfig)
    steps: int | None = option(
        None, "steps of attention transfer, 0: none (default: 200; quick: 25)", least=0, common=True
    )
    search: Literal["layers", "heads"] = option("layers", "what becomes linear: layers or heads", common=True)
    speed: PlanTimingConfig = option(factory=PlanTimingConfig)
    save_model: str | None = option(
        None, "folder for a checkpoint with the planned layers and what they learned", common=True
    )
    resume: bool = option(False, "continue, or use the measurements in the output folder", common=True)
    overwrite: bool = option(False, "replace earlier results in the output folder and in save_model", common=True)
    quick: bool = option(False, "less of everything, for a first look", common=True)
    threads: int | None = option(None, "CPU threads (default: as torch has it)", least=1)
    device: str = option("cpu", "torch device: cpu, cuda, …", common=True)
    seed: int = option(0, "seed of random features and of the order of sequences", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_exclusive(self, "resume", "overwrite")


def plan_command(config: PlanConfig) -> int:
    """Search the layers or heads, write the plan and its report, and show a table; return 0 if the budget is met."""
    from .study.plan import plan_layers

    return 0 if plan_layers(config).met else 1
