"""The stages of `convert` and `finetune`: each is measured or trained once, in a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints import copy_companions
from ..data.encoding import row_lengths
from ..data.task_data import TaskData, input_columns, load_splits, load_task_data
from ..measure.embedding import EmbeddingCosine
from ..measure.metric import Metric
from ..measure.recall import RecallMetric
from ..measure.speed import measure_passes
from ..training.calibration import CALIBRATION_LENGTH, CALIBRATION_TOKENS, Calibration, calibrate
from ..training.distillation import DistillationTrainer, FinetuningConfig, FinetuningTrainer
from ..training.options import ConvertConfig, TrainingRunConfig
from ..training.resumable import EpochSampler, InterruptedRunError, InterruptionCallback, SeededCollator
from ..training.sharding import check_sharding, fill_copy, meta_copy, shards_models
from ..training.transfer import exact_length, transfer_attention
from ..utils.environment import has_slow_bfloat16
from ..utils.files import atomic_folder, check_disk_space
from ..utils.formatting import near_matches
from ..utils.models import quiet_transformers
from . import models
from .budgets import budget_of
from .kinds import kind_of
from .run_folder import RESUME, RunFolder, StageLog, format_metrics

if TYPE_CHECKING:
    from datasets import Dataset

#: Stages of gradient steps by a trainer, called as the sections of their options.
TRAINERS: dict[str, type[FinetuningTrainer]] = {
    "train": FinetuningTrainer,
    "teacher": FinetuningTrainer,
    "distill": DistillationTrainer,
}

#: The prompts that a budget is asked about what a model recalls: so many texts, at three depths each.
RECALL_TRIALS = 16

#: Seconds to time one length.
TIMING_SECONDS = 2.0

#: Number of checkpoints of a stage that a run keeps until the stage is finished.
SAVED_CHECKPOINTS = 2


class TrainingRun(RunFolder):
    """A run and its stages.

    `measure` does what is not stored yet, and stores it; `evaluate`, `train` and `transfer` leave that to their caller.

    Raises:
        ValueError: As `RunFolder`; or the `arguments` of a stage are not those of its trainer.
        OSError: As `RunFolder`.
    """

    #: The data of the task, once they are loaded, and the metric of the run, once the exact model is.
    data: TaskData
    metric: Metric

    def __init__(self, config: TrainingRunConfig, tool: str, console: Console | None = None) -> None:
        # What is wrong with the attention or with the budget is an error before there is a folder.
        self.attention = models.read_attention(config)
        self.budget = budget_of(config) if isinstance(config, ConvertConfig) else None
        self.kind = kind_of(config)
        super().__init__(config, tool, console)
        self.trackers = installed_trackers(config.report_to)
        if config.bf16 and has_slow_bfloat16(self.process.device.type):
            self.progress.log(
                "bf16: this processor has no AVX-512 and computes bfloat16 many times slower. Leave it out."
            )
        for section, options in config.stages.items():
            if options.enabled:
                self._stage_arguments(section, section)

    def load_data(self) -> None:
        """Read and encode the data, and say what they are."""
        config, tokenizer = self.config, self._tokenizer()
        max_length, limit = models.row_limit(config, tokenizer)
        with self.progress.working(f"reading {config.data.task or config.data.dataset or 'the data'}"):
            with self.process.main_process_first():
                data_config = models.with_limits(self.kind, replace(config.data, max_length=max_length))
                head = models.head_of(config)
                data = load_task_data(config.task_type, tokenizer, data_config, config.seed, head=head)
            if config.task_type == "classification" and not config.finetunes:
                models.check_head(config)
        for line in data.report(limit):
            self.progress.log(line)
        if self.budget is not None and self.budget.cost == "cache" and self.budget.length > data.longest:
            notice = f"The budget is for {self.budget.length:,} tokens, and no row has more than {data.longest:,}"
            remedy = f"Longer rows: --data.max_length {self.budget.length}."
            self.progress.log(f"{notice}: what the model recalls is measured at {data.longest:,}. {remedy}")
        self.data = data
        self.identify_data(data.facts, data.checksum())

    def _tokenizer(self) -> Any:
        """Return the model's tokenizer, or train one on the training text first and save it in the run's folder."""
        config = self.config
        if config.train_tokenizer is None:
            return models.load_tokenizer(config)
        folder = self.folder / "tokenizer"
        self.prepare_folder()
        if self.is_main_process and not folder.exists():
            columns = input_columns(config.data)
            with self.progress.working("training a tokenizer"):
                rows = load_splits(config.data, columns).splits["train"]
                texts = chain.from_iterable(rows[column] for column in columns)
                tokenizer = models.train_tokenizer(texts, config.train_tokenizer, models.row_limit(config)[0])
            with atomic_folder(folder) as temporary:
                tokenizer.save_pretrained(temporary)
        self.process.wait_for_everyone()
        return models.load_tokenizer(TrainingRunConfig(tokenizer=str(folder)))

    def use_metric(self, exact: PreTrainedModel) -> None:
        """Make the metric of the run, once. It compares embeddings with those of the exact model, which become labels.

        A ValueError if the budget is in points of a metric of which less is better.
        """
        self.metric = self.kind.metric(self.data, exact)
        if self.budget is not None and self.budget.unit is not None:
            self.budget.unit.check_score(self.budget.text, self.metric.score)
        if isinstance(self.metric, EmbeddingCosine):
            self._label_with_embeddings(self.metric.expected)

    def _label_with_embeddings(self, expected: Tensor) -> None:
        """Give the held-out rows the embeddings of the exact model as labels, by which the best step is chosen."""
        data = self.data
        train = data.train.add_column("labels", [0.0] * len(data.train))  # at each step the teacher's, instead
        parts = expected.split([len(rows) for rows in data.held_out.values()])
        held_out = {
            name: rows.add_column("labels", part.tolist())
            for (name, rows), part in zip(data.held_out.items(), parts, strict=True)
        }
        self.data = replace(data, train=train, held_out=held_out)

    def measure(self, stage: str, model: PreTrainedModel) -> dict[str, Any]:
        """Measure a model once, and store what the metric says of it."""
        return self.once(stage, lambda: self.evaluate(stage, model))

    def evaluate(self, stage: str, model: PreTrainedModel) -> dict[str, Any]:
        """Return what the metric says of a model, the same for all processes, and log it as that of a stage."""
        self.prepare_folder()
        model.to(self.process.device)
        with self.progress.working(f"measuring: {stage.replace('_', ' ')}"):
            values: dict[str, Any] = broadcast_object_list([self.metric(model)])[0]
        StageLog(stage, self.log_file).write_measured(values)
        self.progress.log(f"{stage.replace('_', ' ')}: {format_metrics(values)}")
        return values

    def measure_recall(self, name: str, model: PreTrainedModel, *, length: int) -> dict[str, Any]:
        """Measure once what a model recalls of prompts of so many tokens."""

        def measure() -> dict[str, Any]:
            task = self.kind.recall_task
            metric = RecallMetric(self.data.tokenizer, [length], [task], trials=RECALL_TRIALS, seed=self.config.seed)
            with self.progress.working(f"measuring what {name} recalls"):
                model.to(self.process.device)
                return {**metric(model), "task": task, "length": length}

        return self.once(f"recall, {name}", measure)

    def time(self, teacher: PreTrainedModel, student: PreTrainedModel, length: int) -> dict[str, dict[str, Any]]:
        """Time one forward pass (batch 1) of teacher and student, side by side, in the precision of the run."""
        tokens = [int(token) for token in cast(Any, self.data.train)[0]["input_ids"]]
        timed = {"teacher": teacher, "student": student}
        for model in timed.values():
            model.to(self.process.device).eval()
        with self.mixed_precision():
            return measure_passes(timed, tokens, length, baseline="teacher", seconds=TIMING_SECONDS)

    def mixed_precision(self) -> torch.autocast:
        """Return the context in which the run trains."""
        precision = torch.bfloat16 if self.config.bf16 else torch.float16
        return torch.autocast(self.process.device.type, precision, enabled=self.config.bf16 or self.config.fp16)

    def long_rows(self, student: PreTrainedModel) -> Dataset:
        """Return the training rows that the mechanism does not attend to exactly: the others say nothing of it."""
        return self.data.longer_than(self.data.train, exact_length(student))

    def calibrate(self, student: PreTrainedModel) -> Calibration | None:
        """Fit the start of a mechanism, in place, to the first of the rows that say something of it."""
        rows = self.long_rows(student)
        if not len(rows):
            return None
        batches = self.data.leading_batches(rows, CALIBRATION_TOKENS)
        length = 0 if self.budget is None else self.budget.length
        # A budget's length counts where it is beyond those that a calibration has in mind by itself.
        longest = length if length > CALIBRATION_LENGTH else None
        return calibrate(student.to(self.process.device), batches, max_length=longest)

    def train(self, section: str, model: nn.Module, label: str = "", **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Run a stage of gradient steps, from its last checkpoint (in `checkpoints/LABEL`) if the run resumes.

        The section of the options says how to train, and is also the label of the stage where it has no other one.
        Further arguments of the trainer replace those of the data. Returns the model with all of its weights, those of
        the best step, and what `stage_progress` tells.
        """
        self.prepare_folder()
        label, data = label or section, self.data
        if self.is_main_process:
            weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
            trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
            # The checkpoints, one more while the next is written, the best one and the result.
            needed = (SAVED_CHECKPOINTS + 1) * (weights + 8 * trained) + 3 * weights
            remedy = "Free some space, or choose another folder."
            check_disk_space(self.folder, needed, remedy)
        if self.config.gradient_checkpointing:
            base: Any = model
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        best: dict[str, Any] = {}
        if self.config.stages[section].eval_steps:
            best = {
                "save_strategy": "best",
                "load_best_model_at_end": True,
                "metric_for_best_model": data.best_step_metric,
                "greater_is_better": data.greater_is_better,
            }
        arguments = self._stage_arguments(section, label, **best)
        callbacks: list[TrainerCallback] = [
            InterruptionCallback(RESUME),
            StageLog(label, self.log_file, self.progress, save_steps=self.config.save_steps),
        ]
        if arguments.load_best_model_at_end and (patience := self.config.stages[section].patience) is not None:
            callbacks.append(EarlyStoppingCallback(patience))
        with quiet_transformers():
            options = {**data.trainer_arguments(), "train_dataset": data.train, "callbacks": callbacks, **kwargs}
            trainer = TRAINERS[section](model, args=arguments, **options)
            trainer.remove_callback(PrinterCallback)
            folder = Path(str(arguments.output_dir))
            resume = get_last_checkpoint(folder) if self.config.resume and folder.is_dir() else None
            if resume is not None:
                self.progress.log(f"{label}: resumes from {Path(resume).name}")
            trainer.train(resume_from_checkpoint=resume)
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return trainer.complete_model(), stage_progress(trainer, data)

    def transfer(self, model: PreTrainedModel, rows: Dataset, set_aside: Dataset) -> tuple[Any, dict[str, Any]]:
        """Run the attention transfer, from its checkpoint if the run resumes. Returns what `train` does.

        The rows that are set aside choose the best step.
        """
        self.prepare_folder()
        config, section = self.config, self.config.transfer
        folder = self.folder / "checkpoints" / "transfer"
        accelerator = self._accelerator(folder)
        skeleton = meta_copy(model) if shards_models(accelerator) else None
        batch = 2 * section.per_device_train_batch_size
        checkpoint = folder / "state.safetensors"
        if not config.resume and self.is_main_process:
            checkpoint.unlink(missing_ok=True)
        self.process.wait_for_everyone()
        if checkpoint.is_file():
            self.progress.log(f"transfer: resumes from {checkpoint.name}")
        try:
            result = transfer_attention(
                model,
                self._loader(accelerator, rows, section.per_device_train_batch_size, shuffle=True),
                max_steps=section.max_steps,
                learning_rate=section.learning_rate,
                loss=section.loss,
                validation=list(self._loader(accelerator, set_aside, batch)),
                eval_steps=section.eval_steps,
                patience=section.patience,
                gradient_accumulation_steps=section.gradient_accumulation_steps,
                max_grad_norm=section.max_grad_norm,
                checkpoint=checkpoint,
                save_steps=config.save_steps,
                accelerator=accelerator,
                log=self._transfer_log(accelerator),
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(error.where, RESUME, error.number) from None
        finally:
            for tracker in accelerator.trackers:  # Accelerator.end_training would end the process group, too.
                tracker.finish()
        return model if skeleton is None else fill_copy(skeleton, model), {
            "step": result.steps,
            "seconds": result.seconds,
            "tokens": result.tokens,
            "best_step": result.best_step,
            "evaluations": [[step, {"loss": loss}] for step, loss in result.evaluations],
        }

    def _transfer_log(self, accelerator: Accelerator) -> Callable[[dict[str, float]], None]:
        """Return what logs a step or an evaluation of the attention transfer."""
        section, begun = self.config.transfer, False
        log = StageLog("transfer", self.log_file, self.progress, steps=section.max_steps)

        def write(values: dict[str, float]) -> None:
            nonlocal begun
            step = int(values.pop("step"))
            if not begun:
                log.begin(step - 1)
            begun = True
            if "eval_loss" in values or step % section.logging_steps == 0 or step in (1, section.max_steps):
                log.write(step, values)
                accelerator.log(values, step=step)

        return write

    def _accelerator(self, folder: Path) -> Accelerator:
        """Return the accelerator of the attention transfer, with its trackers."""
        half = "fp16" if self.config.fp16 else None
        precision = "bf16" if self.config.bf16 else half
        trackers = [name for name in self.trackers if name in LOGGER_TYPE_TO_CLASS] or None
        accelerator = Accelerator(
            cpu=self.use_cpu, mixed_precision=precision, log_with=trackers, project_dir=str(folder)
        )
        check_sharding(accelerator)
        accelerator.init_trackers("runs")
        return accelerator

    def _loader(self, accelerator: Accelerator, rows: Dataset, batch_size: int, shuffle: bool = False) -> Any:
        """Return a loader with this process's share of the batches of some rows."""
        config, data = self.config, self.data
        lengths = row_lengths(rows)
        step = batch_size * config.transfer.gradient_accumulation_steps * self.process.num_processes
        loader: Any = DataLoader(
            data.inputs(rows),
            batch_size=batch_size,
            sampler=EpochSampler(len(rows), config.seed, lengths, step) if shuffle else None,
            collate_fn=SeededCollator(data.collator, config.seed),
        )
        return accelerator.prepare_data_loader(loader)

    def _stage_arguments(self, section: str, label: str, **best: Any) -> FinetuningConfig:
        """Return the training arguments of a stage, with those by which it chooses its best step."""
        options, config_class = self.config.stages[section], TRAINERS[section].config_class
        names = {entry.name for entry in fields(config_class)}
        chosen = {name: value for name, value in vars(options).items() if name in names}
        values = {
            **self._common_arguments(self.folder / "checkpoints" / label),
            **{name: value for name, value in chosen.items() if value is not None},
            "eval_strategy": "steps" if options.eval_steps else "no",
            "eval_steps": options.eval_steps or None,
            "save_strategy": "no",
            "save_total_limit": SAVED_CHECKPOINTS,
            **best,
        }
        for argument in options.arguments:
            if argument not in names:
                problem = f"TrainingArguments has no field {argument!r}.{near_matches(argument, names)}"
                raise ValueError(f"arguments: {problem}")
            if argument in values or argument in vars(self.config):
                raise ValueError(
                    f"arguments: {argument!r} is an option of its own, or set by this command. Leave it out."
                )
        return config_class(**{"logging_steps": 10, "logging_first_step": True, **values, **options.arguments})

    def _common_arguments(self, folder: Path) -> dict[str, Any]:
        config = self.config
        section = config.train if self.tool == "finetune" else config.distill
        batch = 2 * section.per_device_train_batch_size
        return {
            "output_dir": str(folder),
            "seed": config.seed,
            "use_cpu": self.use_cpu,
            "bf16": config.bf16,
            "fp16": config.fp16,
            "per_device_eval_batch_size": batch,
            "dataloader_pin_memory": self.process.device.type != "cpu",
            "train_sampling_strategy": "group_by_length",
            "report_to": list(self.trackers),
            "include_num_input_tokens_seen": "non_padding",
            "label_names": ["labels"],
            "disable_tqdm": not self.progress.console.is_terminal,
        }

    def save(self, target: Path, model: PreTrainedModel, card: str | None = None) -> None:
        """Write a checkpoint with its tokenizer and card, atomically, from the main process."""
        self.prepare_folder()
        if self.is_main_process:
            with atomic_folder(target) as temporary, quiet_transformers():
                model.save_pretrained(temporary)
                self.data.tokenizer.save_pretrained(temporary)
                if self.data.task_type == "embedding":
                    copy_companions(str(self.config.model), temporary, self.config.revision)
                if card is not None:
                    (temporary / "README.md").write_text(card, encoding="utf-8")
        self.process.wait_for_everyone()


def stage_progress(trainer: FinetuningTrainer, data: TaskData) -> dict[str, Any]:
    """Return what a stage did: `step`, `seconds`, `tokens`, `best_step`, and `evaluations` as (step, metrics)."""
    state = trainer.state
    evaluations: dict[int, dict[str, float]] = {}
    for entry in state.log_history:
        values = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if values:
            evaluations.setdefault(int(entry["step"]), {}).update(data.own_metrics(values))
    return {
        "step": state.global_step,
        "seconds": state.log_history[-1].get("train_runtime"),
        "tokens": state.num_input_tokens_seen,
        "best_step": state.best_global_step,
        "evaluations": [[step, metrics] for step, metrics in evaluations.items()],
    }


def installed_trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the trackers that are installed; an unknown name is a ValueError."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            trackers = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to: Transformers has no tracker {name!r}. It has {trackers}.")
    available = get_available_reporting_integrations()
    return tuple(name for name in names if name in available)
