"""The settings of fine-tuning and of conversion, section by section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import DEFAULT_ATTENTION

Kind = Literal["classification", "causal-lm", "masked-lm"]


def about(text: str) -> dict[str, str]:
    return {"help": text}


def _section(settings: object) -> str:
    """The name of a section, from that of its class: `TrainSettings` is `train`."""
    return type(settings).__name__.removesuffix("Settings").lower()


def _positive(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise ValueError(f"{_section(settings)}.{name} must be positive, got {value!r}.")


def _not_negative(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{_section(settings)}.{name} must not be negative, got {value!r}.")


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and the mechanism that it is given."""

    source: str | None = field(default=None, metadata=about("a local folder, or a repository on the Hub"))
    attention: str | None = field(
        default=DEFAULT_ATTENTION,
        metadata=about("mechanism of all layers (see `hf-linear-attn list`); null: exact attention"),
    )
    options: dict[str, Any] = field(default_factory=dict, metadata=about("options of the mechanism, e.g. {seed: 1}"))
    layers: tuple[int, ...] | None = field(default=None, metadata=about("layers to patch (default: all)"))
    plan: str | None = field(default=None, metadata=about("JSON or YAML file with a mechanism a layer, instead"))
    max_length: int | None = field(
        default=None,
        metadata=about("longest input in tokens: learned positions, teacher's and student's, are extended to it"),
    )
    revision: str | None = field(default=None, metadata=about("branch, tag or commit of a repository on the Hub"))
    from_config: bool = field(default=False, metadata=about("random weights from the config: pretraining"))
    type: str | None = field(
        default=None, metadata=about("pretraining without a checkpoint: a model type such as gpt2, llama or bert")
    )
    overrides: dict[str, Any] = field(
        default_factory=dict, metadata=about("changes to the config, e.g. {hidden_dropout_prob: 0.0, n_layer: 4}")
    )
    tokenizer: str | None = field(default=None, metadata=about("another folder or repository for the tokenizer"))
    train_tokenizer: int | None = field(
        default=None, metadata=about("train a byte-level BPE tokenizer of so many tokens on the training text, instead")
    )

    def __post_init__(self) -> None:
        _positive(self, "max_length")
        if self.max_length is not None and (self.from_config or self.type is not None):
            raise ValueError(
                f"model.max_length ({self.max_length}) extends positions that were trained. With random weights, set "
                f"their number: model.overrides {{max_position_embeddings: {self.max_length}}}."
            )


@dataclass(frozen=True)
class DataSettings:
    """Which data, and how it is cut."""

    task: str | None = field(default=None, metadata=about("a known task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, …"))
    folder: str | None = field(default=None, metadata=about("folder with the task's files (default: the Hub's)"))
    source: str | None = field(
        default=None,
        metadata=about("or your own: csv, tsv, json, parquet, text, a folder, a save_to_disk folder, a Hub data set"),
    )
    config: str | None = field(default=None, metadata=about("configuration of a Hub data set"))
    revision: str | None = field(default=None, metadata=about("revision of a Hub data set"))
    text: tuple[str, ...] = field(default=("text",), metadata=about("text column of your own data, or two of a pair"))
    label: str = field(default="label", metadata=about("label column of your own data"))
    metrics: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "metrics, the first decides (default: the task's; else accuracy, of scores pearson); hub:NAME is the Hub's"
        ),
    )
    max_length: int = field(default=128, metadata=about("longest sequence, or block of a language model, in tokens"))
    max_train: int | None = field(
        default=None, metadata=about("train on so many examples or blocks, drawn by the seed")
    )
    max_validation: int | None = field(
        default=None, metadata=about("evaluate on so many, drawn once for all; of blocks the first")
    )
    validation_share: float = field(
        default=0.1, metadata=about("share of the training data to evaluate on where there is no validation split")
    )
    group_by_length: bool = field(
        default=True, metadata=about("batches of rows of alike length: the same rows an epoch, with less padding")
    )
    mask_probability: float = field(default=0.15, metadata=about("share of tokens to predict, for masked-lm"))

    def __post_init__(self) -> None:
        _positive(self, "max_length", "max_train", "max_validation")
        if not 0 < self.validation_share < 1:
            raise ValueError(f"data.validation_share must lie between 0 and 1, got {self.validation_share!r}.")
        if not 0 < self.mask_probability < 1:
            raise ValueError(f"data.mask_probability must lie between 0 and 1, got {self.mask_probability!r}.")
        if self.task is not None and self.source is not None:
            raise ValueError("Give data.task or data.source, not both.")


@dataclass(frozen=True)
class TrainSettings:
    """One stage of gradient steps over the model's weights."""

    epochs: float = field(default=3.0, metadata=about("passes over the training data"))
    steps: int | None = field(default=None, metadata=about("optimizer steps, instead of epochs"))
    batch_size: int = field(default=32, metadata=about("examples of one forward pass on one process"))
    accumulation: int = field(default=1, metadata=about("forward passes for one optimizer step"))
    lr: float = field(default=5e-5, metadata=about("peak learning rate"))
    learned_lr: float | None = field(
        default=None, metadata=about("learning rate of the mechanisms' learned parts (default: as lr)")
    )
    weight_decay: float = field(default=0.01, metadata=about("AdamW's, not on biases and norms"))
    warmup: float = field(default=0.06, metadata=about("share of the steps in which the learning rate rises"))
    schedule: Literal["linear", "cosine", "constant"] = field(
        default="linear", metadata=about("how the learning rate falls afterwards")
    )
    clip: float | None = field(default=1.0, metadata=about("largest norm of the gradient; null: none"))
    dropout: bool = field(default=True, metadata=about("the model's own dropout while it trains"))
    evaluations: int = field(default=4, metadata=about("how often to evaluate, the end included; 0: never"))
    patience: int | None = field(default=None, metadata=about("stop after so many evaluations without a better one"))

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch_size", "accumulation", "lr", "learned_lr", "clip", "patience")
        _not_negative(self, "epochs", "weight_decay", "evaluations")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"{_section(self)}.warmup must lie in [0, 1), got {self.warmup!r}.")


@dataclass(frozen=True)
class TeacherSettings(TrainSettings):
    """Stage 0: fine-tune the exact model first (`epochs: 0` where the model given is fine-tuned already)."""

    epochs: float = field(default=0.0, metadata=about("passes over the training data; 0: the model is fine-tuned"))


@dataclass(frozen=True)
class TransferSettings:
    """Stage 1: attention transfer. `steps: 0` leaves it out."""

    steps: int = field(default=200, metadata=about("optimizer steps; 0: no attention transfer"))
    batch_size: int = field(default=32, metadata=about("examples of one step on one process"))
    lr: float | None = field(default=None, metadata=about("learning rate (default: what suits the mechanism)"))
    loss: Literal["auto", "weights", "outputs"] = field(default="auto", metadata=about("what to match"))
    evaluate_every: int = field(default=50, metadata=about("steps between looks at held-out data"))
    patience: int | None = field(default=None, metadata=about("stop after so many looks without a better one"))

    def __post_init__(self) -> None:
        _positive(self, "batch_size", "lr", "evaluate_every", "patience")
        _not_negative(self, "steps")


@dataclass(frozen=True)
class DistillSettings(TrainSettings):
    """Stages 2 and 3 in one: the model learns from its teacher and from the labels. `epochs: 0` leaves it out."""

    dropout: bool = field(
        default=False,
        metadata=about("the model's own dropout while it trains: noise beside a teacher that has none"),
    )
    logits: float = field(default=1.0, metadata=about("weight of KL(teacher || student) of the outputs"))
    temperature: float = field(default=2.0, metadata=about("softens the outputs of that loss"))
    task: float = field(default=1.0, metadata=about("weight of the task's own loss"))
    hidden: float = field(
        default=1.0, metadata=about("weight of the relative error of the hidden states, layer by layer")
    )
    lora_rank: int = field(
        default=0, metadata=about("train LoRA adapters of this rank, not all weights; 0: all weights")
    )
    lora_alpha: int | None = field(default=None, metadata=about("LoRA's alpha (default: twice the rank)"))
    lora_targets: tuple[str, ...] | None = field(
        default=None, metadata=about("modules that get adapters (default: all linear layers)")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "temperature", "lora_alpha")
        _not_negative(self, "logits", "task", "hidden", "lora_rank")
        if not self.logits and not self.task and not self.hidden:
            raise ValueError("distill.logits, distill.task and distill.hidden are all 0: there is no loss to minimise.")


@dataclass(frozen=True)
class RunSettings:
    """How it runs and what it leaves behind."""

    output: str | None = field(default=None, metadata=about("folder of the result"))
    resume: bool = field(default=False, metadata=about("go on where a run with the same settings stopped"))
    overwrite: bool = field(default=False, metadata=about("replace the result of another run in `output`"))
    seed: int = field(default=0, metadata=about("order of the data, dropout, random features, fresh heads"))
    precision: Literal["no", "bf16", "fp16"] = field(default="no", metadata=about("mixed precision"))
    gradient_checkpointing: bool = field(default=False, metadata=about("less memory for more time"))
    checkpoint_every: int = field(default=500, metadata=about("steps between checkpoints; 0: only when interrupted"))
    keep: int = field(default=2, metadata=about("checkpoints to keep"))
    trackers: tuple[str, ...] = field(
        default=("tensorboard",), metadata=about("accelerate trackers besides log.jsonl, where installed")
    )
    evaluation_batch_size: int | None = field(default=None, metadata=about("default: twice the batch size"))
    workers: int = field(default=0, metadata=about("processes that prepare batches"))
    cpu: bool = field(default=False, metadata=about("run on the CPU even where there is a GPU"))
    control: bool = field(
        default=False, metadata=about("the softmax control: the same stages and steps with exact attention")
    )
    speed_lengths: tuple[int, ...] = field(
        default=(512, 2048), metadata=about("lengths at which the result is timed against its teacher; empty: none")
    )
    push_to_hub: str | None = field(default=None, metadata=about("repository to push the result to"))
    private: bool = field(default=False, metadata=about("make that repository private"))

    def __post_init__(self) -> None:
        _positive(self, "keep", "evaluation_batch_size")
        _not_negative(self, "seed", "checkpoint_every", "workers")
        if not all(length > 0 for length in self.speed_lengths):
            raise ValueError(f"run.speed_lengths must be positive, got {self.speed_lengths!r}.")
        if self.resume and self.overwrite:
            raise ValueError("run.resume and run.overwrite exclude each other.")


@dataclass(frozen=True)
class FinetuneSettings:
    """`hf-linear-attn finetune`: one stage on the task's own loss, with exact or with linear attention."""

    kind: Kind = field(default="classification", metadata=about("classification (or regression), causal-lm, masked-lm"))
    model: ModelSettings = field(default_factory=lambda: ModelSettings(attention=None))
    data: DataSettings = field(default_factory=DataSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        if not (self.train.steps or self.train.epochs):
            raise ValueError("train.epochs is 0 and train.steps is not given: there is nothing to train.")


@dataclass(frozen=True)
class ConvertSettings:
    """`hf-linear-attn convert`: (teacher) -> attention transfer -> distillation -> a linear model, measured."""

    kind: Kind = field(default="classification", metadata=about("classification (or regression), causal-lm, masked-lm"))
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    run: RunSettings = field(default_factory=RunSettings)
