"""Options of `hf-linear-attn convert` and `finetune`. Reading them loads neither torch nor transformers.

Options of the stages are called as in `transformers.TrainingArguments` where they mean the same.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ..config import DEFAULT_ATTENTION
from ..data.config import DataConfig, TimingConfig
from ..utils.arguments import check_exclusive, check_not_negative, check_positive, option

TaskType = Literal["classification", "causal-lm", "masked-lm", "embedding"]
AttentionLoss = Literal["auto", "weights", "outputs"]


def check_attention_loss(section: str, config: Any) -> None:
    """Raise a ValueError for an unknown loss of an attention transfer."""
    losses = get_args(AttentionLoss)
    if config.loss not in losses:
        raise ValueError(f"{section}loss must be one of {', '.join(map(repr, losses))}, got {config.loss!r}.")


def check_loss_weights(section: str, config: Any) -> None:
    """Raise a ValueError for a temperature or a weight of a distillation's loss out of range, or for no loss at all."""
    weights = ("logits_weight", "task_weight", "hidden_weight")
    check_positive(section, config, "temperature")
    check_not_negative(section, config, *weights, "carried_length")
    if not any(getattr(config, name) for name in weights):
        raise ValueError(f"{section}{', '.join(weights)} are all 0: there is no loss to minimise. Set one of them.")


@dataclass(frozen=True)
class StageConfig:
    """One stage of gradient steps. `arguments` takes any further field of `transformers.TrainingArguments`."""

    section: ClassVar[str] = "train."

    num_train_epochs: float = option(3.0, "passes over the training data", common=True)
    max_steps: int | None = option(None, "optimizer steps, instead of epochs")
    per_device_train_batch_size: int = option(32, "rows of one forward pass on one device")
    gradient_accumulation_steps: int = option(1, "forward passes of one optimizer step")
    learning_rate: float = option(5e-5, "peak learning rate", common=True)
    learned_lr: float | None = option(None, "learning rate of mechanisms' learned parts (default: learning_rate)")
    weight_decay: float = option(0.01, "AdamW's weight decay, of matrices only")
    warmup_steps: float = option(0.06, "steps in which the learning rate rises; below 1, their share of all steps")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "linear", "how the learning rate falls afterwards"
    )
    max_grad_norm: float = option(1.0, "largest norm of the gradient; 0: no limit")
    disable_dropout: bool = option(False, "train without the model's dropout")
    eval_steps: float = option(0.25, "steps between evaluations; below 1, a share of all; 0: none; the best is kept")
    patience: int | None = option(None, "stop after this number of evaluations without a better one")
    arguments: dict[str, Any] = option(factory=dict, help="further fields of TrainingArguments: arguments.optim sgd")

    def __post_init__(self) -> None:
        check_positive(self.section, self, "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        check_positive(self.section, self, "learning_rate", "learned_lr", "patience")
        check_not_negative(self.section, self, "num_train_epochs", "weight_decay", "warmup_steps", "max_grad_norm")
        check_not_negative(self.section, self, "eval_steps")

    @property
    def enabled(self) -> bool:
        """Whether the stage has any steps."""
        return bool(self.max_steps or self.num_train_epochs)


@dataclass(frozen=True)
class TeacherConfig(StageConfig):
    """Stage 0: fine-tuning of the exact model, where it is not fine-tuned yet."""

    section: ClassVar[str] = "teacher."

    num_train_epochs: float = option(0.0, "passes over the training data; 0: the model is fine-tuned", common=True)


@dataclass(frozen=True)
class TransferConfig:
    """Stage 1: attention transfer (see `transfer_attention`)."""

    max_steps: int = option(200, "optimizer steps; 0: no attention transfer", common=True)
    per_device_train_batch_size: int = option(32, "rows of one forward pass on one device")
    gradient_accumulation_steps: int = option(1, "forward passes of one optimizer step")
    learning_rate: float | None = option(None, "peak learning rate (default: the mechanism's, 1e-2 for feature maps)")
    loss: AttentionLoss = option("auto", "what to match: attention weights, outputs, or whichever suits the mechanism")
    max_grad_norm: float = option(1.0, "largest norm of the gradient, per layer; 0: no limit")
    eval_steps: int = option(50, "steps between evaluations on held-out rows")
    patience: int | None = option(None, "stop after this number of evaluations without a better one")
    logging_steps: int = option(10, "steps between lines in log.jsonl and the trackers")

    def __post_init__(self) -> None:
        check_positive("transfer.", self, "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate")
        check_positive("transfer.", self, "eval_steps", "patience", "logging_steps")
        check_not_negative("transfer.", self, "max_steps", "max_grad_norm")
        check_attention_loss("transfer.", self)


@dataclass(frozen=True)
class DistillConfig(StageConfig):
    """Stages 2 and 3: the model learns from its teacher and from the labels (see `DistillationConfig`)."""

    section: ClassVar[str] = "distill."

    disable_dropout: bool = option(True, "train without the model's dropout, which is noise beside the teacher")
    logits_weight: float = option(1.0, "weight of KL(teacher || student) of the outputs")
    temperature: float = option(2.0, "temperature of both distributions in that divergence")
    task_weight: float = option(1.0, "weight of the task's own loss")
    hidden_weight: float = option(1.0, "weight of the relative error of the hidden states, layer by layer")
    carried_length: int = option(0, "tokens at the start of rows: the rest begins with their state, without a gradient")
    lora_rank: int = option(0, "rank of LoRA adapters to train instead of all weights; 0: all weights", common=True)
    lora_alpha: int | None = option(None, "LoRA's alpha (default: twice the rank)")
    lora_target_modules: tuple[str, ...] | None = option(
        None, "modules that get adapters (default: all linear layers of the model's body)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("distill.", self, "lora_alpha")
        check_not_negative("distill.", self, "lora_rank")
        check_loss_weights("distill.", self)


@dataclass(frozen=True)
class TrainingRunConfig:
    """What `convert` and `finetune` have in common. Values that are out of range or exclude each other are errors."""

    model: str | None = option(None, "a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2", common=True)
    attention: str | None = option(DEFAULT_ATTENTION, "mechanism (see `hf-linear-attn list`); null: exact", common=True)
    options: dict[str, Any] = option(factory=dict, help="mechanism's options: --options.window_size 32", common=True)
    layers: tuple[int, ...] | None = option(None, "layers to patch, negative ones from the end (default: all)")
    plan: str | None = option(None, "JSON or YAML file with a mechanism for each layer, instead")
    task_type: TaskType = option(
        "classification", "classification stands for regression, too; embedding: of sentences", common=True
    )
    output: str | None = option(None, "folder of the result", common=True)
    data: DataConfig = option(factory=DataConfig)

    max_length: int | None = option(None, "longest input in tokens; learned positions (teacher's, too) are extended")
    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    tokenizer: str | None = option(None, "folder or repository of the tokenizer (default: the model's)")
    train_tokenizer: int | None = option(None, "size of a byte-level BPE tokenizer to train on the training text")
    model_type: str | None = option(None, "pretraining without a checkpoint: a type such as gpt2, llama or bert")
    from_config: bool = option(False, "pretraining with random weights and the config of the model")
    config_overrides: dict[str, Any] = option(factory=dict, help="changes of the config: --config_overrides.n_layer 2")

    seed: int = option(0, "seed of data order, dropout, random features and new heads")
    device: Literal["auto", "cpu"] = option("auto", "cpu: leave a GPU alone")
    threads: int | None = option(None, "CPU threads (default: torch's)")
    bf16: bool = option(False, "mixed precision in bfloat16", common=True)
    fp16: bool = option(False, "mixed precision in float16")
    gradient_checkpointing: bool = option(False, "less memory for more time")
    per_device_eval_batch_size: int | None = option(None, "default: twice the batch size of training")
    dataloader_num_workers: int = option(0, "processes that prepare batches")
    resume: bool = option(False, "continue a run with the same options where it stopped", common=True)
    overwrite: bool = option(False, "replace an earlier result in the output folder", common=True)
    save_steps: int = option(500, "steps between checkpoints; 0: only when interrupted")
    save_total_limit: int = option(2, "number of checkpoints of a stage to keep; a finished run keeps none")
    report_to: tuple[str, ...] = option(("tensorboard",), "the Trainer's trackers besides log.jsonl, if installed")
    control: bool = option(False, "the softmax control: the same stages and steps with exact attention")
    speed: TimingConfig = option(factory=lambda: TimingConfig((512, 2048)))
    hub_model_id: str | None = option(None, "repository on the Hub to push the result to")
    hub_private_repo: bool = option(False, "make that repository private")

    def __post_init__(self) -> None:
        check_positive("", self, "max_length", "threads", "per_device_eval_batch_size", "save_total_limit")
        check_not_negative("", self, "seed", "save_steps", "dataloader_num_workers")
        check_exclusive(self, "resume", "overwrite")
        check_exclusive(self, "bf16", "fp16")
        if self.plan is not None and (self.layers is not None or self.options):
            raise ValueError("plan says what every layer gets. Leave layers and options out, or write them into it.")
        if self.max_length is not None and (self.from_config or self.model_type is not None):
            remedy = f"config_overrides {{max_position_embeddings: {self.max_length}}}"
            raise ValueError(f"max_length extends positions that were trained. With random weights, give {remedy}.")


@dataclass(frozen=True)
class FinetuneConfig(TrainingRunConfig):
    """Options of `finetune`: one stage on the task's own loss, with exact or with linear attention."""

    attention: str | None = option(None, "mechanism (see `hf-linear-attn list`); null: exact", common=True)
    train: StageConfig = option(factory=StageConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.train.enabled:
            raise ValueError("train.num_train_epochs is 0 and train.max_steps is not given: there is nothing to train.")
        if self.task_type == "embedding":
            raise ValueError("task_type embedding learns from the exact model: use convert.")
        if self.control and (self.attention or self.plan):
            raise ValueError("control trains the exact model: leave attention and plan out.")


@dataclass(frozen=True)
class ConvertConfig(TrainingRunConfig):
    """Options of `convert`: (teacher) -> attention transfer -> distillation -> a measured linear model."""

    exact_share: float = option(
        0.0, "share of the key-value heads that stay exact (see `find_exact_heads`)", common=True
    )
    teacher: TeacherConfig = option(factory=TeacherConfig)
    transfer: TransferConfig = option(factory=TransferConfig)
    distill: DistillConfig = option(factory=DistillConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.exact_share < 1:
            raise ValueError(f"exact_share must lie in 0 to 1, got {self.exact_share!r}.")
        if self.exact_share and (self.attention is None or self.plan is not None or self.layers is not None):
            raise ValueError("exact_share chooses heads in all layers. Give attention, and leave plan and layers out.")
        carried, longest = self.distill.carried_length, self.data.max_length
        if carried and (self.task_type != "causal-lm" or self.gradient_checkpointing):
            raise ValueError("distill.carried_length needs task_type causal-lm and no gradient_checkpointing.")
        if carried and longest is not None and longest < carried + 2:
            raise ValueError(f"distill.carried_length {carried} leaves no token to predict in rows of {longest}.")
        if self.task_type == "embedding" and self.teacher.enabled:
            raise ValueError("task_type embedding has no labels to fine-tune a teacher on: leave out that section.")
