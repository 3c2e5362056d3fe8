"""Options of `hf-linear-attn convert` and `finetune`. Reading them loads neither torch nor transformers.

Options of the stages are called as in `transformers.TrainingArguments` where they mean the same.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from ..config import DEFAULT_ATTENTION
from ..data.config import BUDGETS, DataConfig, TaskType, TimingConfig
from ..utils.options import OptionError, check_exclusive, check_options, default_of, option

#: Tokens of the inputs that are timed after a training.
TIMED_LENGTHS = (512, 2048)

AttentionLoss = Literal["auto", "weights", "outputs"]


def check_loss_weights(config: Any) -> None:
    """Raise an OptionError if no term of a distillation's loss has a weight."""
    if not (config.logits_weight or config.task_weight or config.hidden_weight):
        raise OptionError(
            "logits_weight",
            "is 0, as are task_weight and hidden_weight: there is no loss to minimise. Set one of them.",
        )


@dataclass(frozen=True)
class StageConfig:
    """One stage of gradient steps. `arguments` takes any further field of `transformers.TrainingArguments`."""

    num_train_epochs: float = option(3.0, "passes over the training data", least=0)
    max_steps: int | None = option(None, "optimizer steps, instead of epochs", least=1)
    per_device_train_batch_size: int = option(32, "rows of one forward pass on one device", least=1)
    gradient_accumulation_steps: int = option(1, "forward passes of one optimizer step", least=1)
    learning_rate: float = option(5e-5, "peak learning rate", above=0)
    learned_lr: float | None = option(
        None, "learning rate of mechanisms' learned parts (default: learning_rate)", above=0
    )
    weight_decay: float = option(0.01, "AdamW's weight decay, of matrices only", least=0)
    warmup_steps: float = option(
        0.06, "steps in which the learning rate rises; below 1, their share of all steps", least=0
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", "how the learning rate falls afterwards"
    )
    max_grad_norm: float = option(1.0, "largest norm of the gradient; 0: no limit", least=0)
    disable_dropout: bool = option(False, "train without the model's dropout")
    eval_steps: float = option(
        0.25, "steps between evaluations; below 1, a share of all; 0: none; the best is kept", least=0
    )
    patience: int | None = option(None, "stop after this number of evaluations without a better one", least=1)
    arguments: dict[str, Any] = option(factory=dict, help="further fields of TrainingArguments: arguments.optim sgd")

    def __post_init__(self) -> None:
        check_options(self)
        if self.patience is not None and not self.eval_steps:
            raise OptionError("patience", "counts evaluations: give eval_steps, too.")

    @property
    def enabled(self) -> bool:
        """Whether the stage has any steps."""
        return self.max_steps is not None or self.num_train_epochs != 0  # None: those of `ConvertConfig.completed`


@dataclass(frozen=True)
class TeacherConfig(StageConfig):
    """Stage 0: fine-tuning of the exact model, where it is not fine-tuned yet."""

    num_train_epochs: float = option(0.0, "passes over the training data; 0: the model is fine-tuned", least=0)


@dataclass(frozen=True)
class TransferConfig:
    """Stage 1: attention transfer (see `transfer_attention`)."""

    max_steps: int | None = option(None, "optimizer steps; 0: none (default: 200, or a budget's)", least=0)
    per_device_train_batch_size: int | None = option(
        None, "rows of one forward pass on one device (default: 32, or a budget's)", least=1
    )
    gradient_accumulation_steps: int = option(1, "forward passes of one optimizer step", least=1)
    learning_rate: float | None = option(
        None, "peak learning rate (default: the mechanism's, 1e-2 for feature maps)", above=0
    )
    loss: AttentionLoss = option("auto", "what to match: attention weights, outputs, or whichever suits the mechanism")
    max_grad_norm: float = option(
        1.0, "largest norm of the gradient of all layers, divided by their number; 0: no limit", least=0
    )
    eval_steps: int = option(50, "steps between evaluations on training rows that are set aside", least=1)
    patience: int | None = option(None, "stop after this number of evaluations without a better one", least=1)
    logging_steps: int = option(10, "steps between lines in log.jsonl and the trackers", least=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class DistillConfig(StageConfig):
    """Stages 2 and 3: the model learns from its teacher and from the labels (see `DistillationConfig`)."""

    num_train_epochs: float | None = option(  # type: ignore[assignment]
        None, "passes over the training data (default: 3)", least=0
    )
    per_device_train_batch_size: int | None = option(  # type: ignore[assignment]
        None, "rows of one forward pass on one device (default: 32, or a budget's)", least=1
    )
    learning_rate: float | None = option(  # type: ignore[assignment]
        None, "peak learning rate (default: 5e-5, or a budget's)", above=0
    )
    disable_dropout: bool = option(True, "train without the model's dropout, which is noise beside the teacher")
    logits_weight: float = option(1.0, "weight of KL(teacher || student) of the outputs", least=0)
    temperature: float = option(2.0, "temperature of both distributions in that divergence", above=0)
    task_weight: float = option(1.0, "weight of the task's own loss", least=0)
    hidden_weight: float = option(
        1.0, "weight of the relative error of the hidden states, layer by layer (0 for seq2seq-lm)", least=0
    )
    carried_length: int = option(
        0, "tokens at the start of rows: the rest begins with their state, without a gradient", least=0
    )
    lora_rank: int = option(0, "rank of LoRA adapters to train; 0: all weights", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss_weights(self)


@dataclass(frozen=True)
class TrainingRunConfig:
    """What `convert` and `finetune` have in common. Values that are out of range or exclude each other are errors."""

    #: Pretraining without a checkpoint: options of `FinetuneConfig`.
    train_tokenizer: ClassVar[int | None] = None
    model_type: ClassVar[str | None] = None
    from_config: ClassVar[bool] = False
    config_overrides: ClassVar[dict[str, Any]] = {}

    model: str | None = option(None, "a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2")
    attention: str | None = option(DEFAULT_ATTENTION, "mechanism (see `hf-linear-attn list`); null: exact")
    options: dict[str, Any] = option(factory=dict, help="mechanism's options: --options.window_size 32")
    plan: str | None = option(None, "JSON or YAML file with a mechanism for each layer, instead")
    task_type: TaskType | None = option(
        None,
        "what is learned; classification includes regression (default: the kind of the model; classification in "
        "finetune, and where the teacher is fine-tuned)",
    )
    output: str | None = option(None, "folder of the result")
    data: DataConfig = option(factory=DataConfig)

    max_length: int | None = option(
        None,
        "longest input of the model in tokens: adds learned positions (teacher's, too); data.max_length only cuts rows",
        least=1,
    )
    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    tokenizer: str | None = option(None, "folder or repository of the tokenizer (default: the model's)")
    seed: int = option(0, "seed of data order, dropout, random features and new heads", least=0)
    device: Literal["auto", "cpu"] = option("auto", "cpu: leave a GPU alone")
    threads: int | None = option(None, "CPU threads (default: torch's)", least=1)
    bf16: bool = option(False, "mixed precision in bfloat16")
    fp16: bool = option(False, "mixed precision in float16")
    gradient_checkpointing: bool = option(False, "less memory for more time")
    resume: bool = option(False, "continue a run with the same options where it stopped")
    overwrite: bool = option(False, "replace an earlier result in the output folder")
    save_steps: int = option(500, "steps between checkpoints; 0: only when interrupted", least=0)
    report_to: tuple[str, ...] = option(("tensorboard",), "the Trainer's trackers besides log.jsonl, if installed")
    speed: TimingConfig = option(factory=lambda: TimingConfig(TIMED_LENGTHS))

    def __post_init__(self) -> None:
        check_options(self)
        check_exclusive(self, "resume", "overwrite")
        check_exclusive(self, "bf16", "fp16")
        if self.plan is not None and self.options:
            raise OptionError("plan", "says what every layer gets. Write options into it, or leave it out.")
        if self.attention is None and self.plan is None and self.options:
            raise OptionError("options", "is for a mechanism: give attention, too.")
        kinds = {"mlm_probability": "masked-lm", "metrics": "classification", "label_column": "classification"}
        for name, kind in kinds.items():
            if vars(self.data)[name] != default_of(DataConfig, name) and self.task_type not in (None, kind):
                raise OptionError(f"data.{name}", f"is for {kind} (task_type), not {self.task_type}.")

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The sections of the stages of gradient steps by the Trainer, by their names."""
        return {}

    @property
    def finetunes(self) -> bool:
        """Whether the model is fine-tuned on the task first, and may get a new head for it."""
        return "teacher" not in self.stages or self.stages["teacher"].enabled

    def completed(self, task_type: TaskType) -> Self:
        """Return these options for a task type, with the timed lengths where they leave them open. The last step: what
        is changed afterwards does not change these."""
        speed = TimingConfig(TIMED_LENGTHS) if self.speed.lengths is None else self.speed  # null in YAML
        return replace(self, task_type=task_type, speed=speed)


@dataclass(frozen=True)
class FinetuneConfig(TrainingRunConfig):
    """Options of `finetune`: one stage on the task's own loss, with exact or with linear attention."""

    attention: str | None = option(None, "mechanism (see `hf-linear-attn list`); null: exact")
    train: StageConfig = option(factory=StageConfig, help="the training", brief=True)
    train_tokenizer: int | None = option(  # type: ignore[misc]
        None, "size of a byte-level BPE tokenizer to train on the training text", least=257
    )
    model_type: str | None = option(None, "pretraining without a checkpoint: a type such as gpt2, llama or bert")  # type: ignore[misc]
    from_config: bool = option(False, "pretraining with random weights and the config of the model")  # type: ignore[misc]
    config_overrides: dict[str, Any] = option(factory=dict, help="changes of the config: --config_overrides.n_layer 2")  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train.enabled:
            raise OptionError("train.num_train_epochs", "is 0 without train.max_steps: there is nothing to train.")
        if self.task_type == "embedding":
            raise OptionError("task_type", "embedding learns from the exact model: use convert.")
        if self.tokenizer is not None and self.train_tokenizer is not None:
            raise OptionError("train_tokenizer", "trains one, and tokenizer names another. Leave out one of them.")
        if self.max_length is not None and (self.from_config or self.model_type is not None):
            remedy = f"config_overrides {{max_position_embeddings: {self.max_length}}}"
            raise OptionError("max_length", f"extends positions that were trained. With random weights, give {remedy}.")

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The only one."""
        return {"train": self.train}


#: The training of every conversion.
USUAL_TRAINING = (
    TransferConfig(max_steps=200, per_device_train_batch_size=32),
    DistillConfig(num_train_epochs=3.0, per_device_train_batch_size=32, learning_rate=5e-5),
)

#: That with a budget, minutes on two CPU cores for 100 million parameters; of classifiers the usual one.
BUDGET_TRAINING: dict[str, tuple[TransferConfig, DistillConfig]] = {
    "causal-lm": (
        TransferConfig(max_steps=0, per_device_train_batch_size=32),
        DistillConfig(max_steps=80, per_device_train_batch_size=1, learning_rate=5e-5),
    ),
    "embedding": (
        TransferConfig(max_steps=120, per_device_train_batch_size=8),
        DistillConfig(max_steps=60, per_device_train_batch_size=16, learning_rate=1e-4),
    ),
    "classification": USUAL_TRAINING,
}


def _filled_in(section: Any, training: Any) -> Any:
    """Return the user's section, with the options of a training where it has its defaults; epochs replace steps."""
    default = vars(type(section)())
    changed = {name: value for name, value in vars(section).items() if value != default[name]}
    if "num_train_epochs" in changed:
        training = replace(training, max_steps=None)
    return replace(training, **changed)


@dataclass(frozen=True)
class ConvertConfig(TrainingRunConfig):
    """Options of `convert`: (teacher) -> attention transfer -> distillation -> a measured linear model."""

    exact_share: float = option(0.0, "share of the key-value heads that stay exact", least=0, below=1)
    budget: str | None = option(None, f"{BUDGETS}: heads, windows and training are chosen for it")
    control: bool = option(
        False, "also train the teacher as long, with exact attention: what is lost to training and what to attention"
    )
    teacher: TeacherConfig = option(
        factory=TeacherConfig, help="fine-tuning of the exact model first, by default none", brief=True
    )
    transfer: TransferConfig = option(
        factory=TransferConfig, help="attention transfer, 200 steps by default", brief=True
    )
    distill: DistillConfig = option(
        factory=DistillConfig, help="distillation of all weights, 3 epochs by default", brief=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None:
            self._check_budget()
        if self.exact_share and (self.attention is None or self.plan is not None):
            raise OptionError("exact_share", "chooses heads in all layers: give attention, and leave plan out.")
        if self.control and not (self.distill.enabled and (self.attention is not None or self.plan is not None)):
            raise OptionError("control", "is trained beside a linear model by distillation: give attention and steps.")
        carried, longest = self.distill.carried_length, self.data.max_length
        if carried and (self.task_type not in (None, "causal-lm") or self.gradient_checkpointing):
            raise OptionError("distill.carried_length", "needs task_type causal-lm and no gradient_checkpointing.")
        if carried and longest is not None and longest < carried + 2:
            raise OptionError(
                "distill.carried_length",
                f"leaves no token to predict in rows of {longest}, got {carried}.",
            )
        if self.task_type == "embedding" and self.teacher.enabled:
            raise OptionError("task_type", "embedding has no labels to fine-tune a teacher on: leave out that section.")

    def _check_budget(self) -> None:
        chosen = {"attention": DEFAULT_ATTENTION, "exact_share": 0.0, "plan": None}
        for name, value in chosen.items():
            if vars(self)[name] != value:
                raise OptionError(name, "is chosen by the budget: leave it out.")
        if "window_size" in self.options:
            raise OptionError("options.window_size", "is chosen by the budget: leave it out.")
        if self.task_type not in (None, *BUDGET_TRAINING):
            raise OptionError("budget", f"is for {', '.join(BUDGET_TRAINING)} (task_type), not {self.task_type}.")

    @property
    def stages(self) -> dict[str, StageConfig]:
        """Stage 0 and the last one; attention transfer has no Trainer."""
        return {"teacher": self.teacher, "distill": self.distill}

    def completed(self, task_type: TaskType) -> Self:
        """Return these options for a task type, with the timed lengths and the training that they leave open.

        An OptionError if an option, or the budget, is for other task types.
        """
        config = super().completed(task_type)
        training = USUAL_TRAINING if self.budget is None else BUDGET_TRAINING[task_type]
        transfer = _filled_in(self.transfer, training[0])
        distill = _filled_in(self.distill, training[1])
        if task_type == "seq2seq-lm":  # whose encoder and decoder have states of different lengths
            distill = replace(distill, hidden_weight=0.0)
        return replace(config, transfer=transfer, distill=distill)
