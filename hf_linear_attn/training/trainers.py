"""Trainers of patched models, built on `transformers.Trainer`: fine-tuning, distillation and attention transfer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint, rotate_checkpoints

from ..integration.context import SUBMODULE
from ..integration.exact import exact_attention
from ..patching import check_model
from ..utils.files import remove_partial_files, replace_folder
from .arguments import AttentionTransferConfig, DistillationConfig, FinetuningConfig
from .callbacks import InterruptionCallback
from .losses import count_targets, hidden_loss, logits_loss, row_losses, select_targets, task_loss, weighted_sum
from .reproducible import EpochSampler, SeededCollator
from .sharding import (
    autocast,
    check_sharding,
    fill_copy,
    meta_copy,
    name_layers,
    release,
    reshard,
    shard_frozen_model,
)
from .transfer import (
    AttentionTransferLoss,
    average_gradients,
    branch_steps,
    check_finite_loss,
    transfer_lr_factor,
)

#: In a checkpoint: parameters that neither PEFT's adapter file nor a frozen base holds.
LEARNED_FILE = "linear_attention.safetensors"
BEST_PREFIX = "best:"


class FinetuningTrainer(Trainer):
    """Trains a model, exact or patched, on the loss of its task. Used as `transformers.Trainer`.

    What it does differently, and why:

    - The loss is the sum over all targets (rows, or predicted tokens) of an optimizer step, across accumulated batches
      and processes, divided by their number. The Trainer leaves that to the model; classifiers such as BERT ignore the
      number, so that their accumulated gradients come out too large by a factor of `gradient_accumulation_steps`.
    - A checkpoint is written to a hidden folder and then renamed. The Trainer writes in place: a process that is killed
      meanwhile leaves a folder from which it cannot resume.
    - A resumed run sees the batches of the undisturbed one, and ends on a CPU with the same bits, given the same number
      of threads (see `EpochSampler` and `SeededCollator`; a data set whose rows are random themselves is beyond that).
    - SIGINT and SIGTERM write a checkpoint and raise an `InterruptedRunError`, unless `callbacks` has an
      `InterruptionCallback` of its own.
    - A loss that is infinite or NaN raises a FloatingPointError that names the learning rate.
    - Learned parts of mechanisms have a learning rate of their own and no weight decay, and are saved beside PEFT's
      adapters, which would leave them out of a checkpoint.

    Args:
        model: A `PreTrainedModel`, or one with PEFT adapters.
        args: The config.
        kwargs: As of `transformers.Trainer`.
    """

    config_class: type[FinetuningConfig] = FinetuningConfig
    #: Each loss is divided by the number of targets of all accumulated batches.
    loss_is_scaled_for_ga = True

    args: FinetuningConfig
    model: nn.Module
    data_collator: SeededCollator

    def __init__(
        self, model: PreTrainedModel | nn.Module | None = None, args: FinetuningConfig | None = None, **kwargs: Any
    ) -> None:
        if args is None:
            args = self.config_class()
        if not isinstance(args, self.config_class):
            raise TypeError(
                f"args of a {type(self).__name__} must be a {self.config_class.__name__}, got a {type(args).__name__}."
            )
        super().__init__(model, args, **kwargs)
        check_sharding(self.accelerator)
        self.model_accepts_loss_kwargs = True  # so that the targets are counted
        self._loss_shifts_labels = _predicts_next_token(self.model)
        self.data_collator = SeededCollator(self.data_collator, args.seed)
        self._sampler: EpochSampler | None = None
        self._skeleton: Any = None
        self._partial_folder: Path | None = None
        self._loss_parts: dict[str, Tensor] = {}
        self._in_training_step = False
        self._evaluation_totals: Tensor | None = None
        self._last_logged_step = self._last_saved_step = 0
        interruption = next(
            (item for item in self.callback_handler.callbacks if isinstance(item, InterruptionCallback)), None
        )
        if interruption is None:
            interruption = InterruptionCallback()
            self.add_callback(interruption)
        self._interruption = interruption

    # ---------------------------------------------------------------------------------------------- the loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one batch as its share of the loss over all targets of the step (see `Trainer`)."""
        labels = inputs.get("labels")
        if labels is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._in_training_step and self.args.disable_dropout:
            _disable_dropout(self.model)
        parts, weights, outputs = self.loss_terms(model, inputs, labels)
        if not self._in_training_step:
            self._add_evaluation_loss(outputs.logits, labels)
        loss = weighted_sum(parts, weights)
        if num_items_in_batch is None:
            total: Any = count_targets(labels, self._loss_shifts_labels).sum()
        else:
            total = torch.as_tensor(num_items_in_batch).flatten()[0]
        scale = 1.0 / max(float(total), 1.0)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            scale *= self.accelerator.num_processes // self.get_tp_size()  # gradients are averaged over processes
        if self._in_training_step and len(parts) > 1:
            for name, part in parts.items():
                self._loss_parts[name] = self._loss_parts.get(name, 0.0) + part.detach().float() * scale
        loss = loss * scale
        return (loss, outputs) if return_outputs else loss

    def loss_terms(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float], Any]:
        """Compute the terms of the loss of one batch.

        Args:
            model: The model, prepared for training.
            inputs: The batch.
            labels: Its labels.

        Returns:
            The terms, each summed over the targets of the batch; the weight of each; and the model's outputs.
        """
        outputs = model(**self._forward_arguments(inputs))
        return (
            {"task": task_loss(*select_targets(outputs.logits, labels, self._loss_shifts_labels))},
            {"task": 1.0},
            outputs,
        )

    def _forward_arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the batch without labels, unless the model makes its decoder's inputs of them."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            return inputs
        return {name: value for name, value in inputs.items() if name != "labels"}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of one batch.

        Raises:
            FloatingPointError: The loss is infinite or NaN.
        """
        self._in_training_step = True
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._in_training_step = False
        remedy = "Lower the learning rate" + (" or train without fp16" if self.args.fp16 else "")
        check_finite_loss(float(loss), self.state.global_step + 1, self._get_learning_rate(), remedy)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the terms of the loss beside it, averaged over steps and processes."""
        if "loss" in logs and self._loss_parts:
            steps = max(self.state.global_step - self._last_logged_step, 1)
            values = torch.stack([part.reshape(()) for part in self._loss_parts.values()])
            means = (self.accelerator.reduce(values, "mean") / steps).tolist()
            logs.update({f"{name}_loss": value for name, value in zip(self._loss_parts, means, strict=True)})
            self._loss_parts.clear()
        self._last_logged_step = self.state.global_step
        super().log(logs, start_time)

    @torch.no_grad()
    def _add_evaluation_loss(self, logits: Tensor, labels: Tensor) -> None:
        losses, counts = row_losses(logits, labels, self._loss_shifts_labels)
        losses, counts = self.accelerator.gather_for_metrics((losses, counts))
        totals = torch.stack([losses.double().sum(), counts.sum().double()]).cpu()
        self._evaluation_totals = totals if self._evaluation_totals is None else self._evaluation_totals + totals

    def evaluation_loop(
        self,
        dataloader: torch.utils.data.DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as the Trainer does, with the loss averaged over all targets, and each row counted once.

        The Trainer averages the means of batches, of which the last may be smaller or padded with rows of others.
        """
        self._evaluation_totals = None
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._evaluation_totals is not None:
            loss, count = self._evaluation_totals.tolist()
            if not count:
                raise ValueError("The validation data has no token to predict.")
            assert output.metrics is not None
            output.metrics[f"{metric_key_prefix}_loss"] = loss / count
        return output

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return a context of the run's mixed precision, which holds in evaluations after training too."""
        return autocast(self.accelerator)

    # ---------------------------------------------------------------------------------------------- optimizer, data

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `args.optim`: weight decay on matrices only, and `learned_lr` for learned parts.

        Vectors (biases and the weights of norms, whatever a model calls them) are not decayed; neither are the learned
        parts of a mechanism, whose initial value is not zero.

        Raises:
            ValueError: No parameter requires a gradient.
        """
        model = self.model if model is None else model
        if self.optimizer is not None:
            return self.optimizer
        optimizer_class, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, cast(PreTrainedModel, model)
        )
        if {"params", "model", "optimizer_dict"} & options.keys() or not isinstance(optimizer_class, type):
            return super().create_optimizer(model)  # an optimizer that chooses its parameters itself
        groups = parameter_groups(model, self.args)
        if not groups:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
        self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        sampler = super()._get_train_sampler(dataset)
        lengths = getattr(sampler, "lengths", None)
        if sampler is None or not (isinstance(sampler, torch.utils.data.RandomSampler) or lengths is not None):
            return sampler
        if self.args.train_sampling_strategy not in ("random", "group_by_length"):
            return sampler
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * max(self.args.world_size, 1)
        assert self.args.data_seed is not None  # The config sets it.
        self._sampler = EpochSampler(len(dataset), self.args.data_seed, lengths, rows)
        return self._sampler

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of a validation set. What is random in its batches is the same in every evaluation."""
        training_collator = self.data_collator
        self.data_collator = SeededCollator(training_collator.collator, self.args.seed)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = training_collator

    def _run_epoch(self, model: nn.Module, epoch: int, *args: Any, **kwargs: Any) -> None:
        self.data_collator.set_epoch(epoch)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)
        super()._run_epoch(model, epoch, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------- sharding

    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def complete_model(self) -> Any:
        """Return the trained model with all of its weights. Every process must call it.

        Returns:
            The model that was passed, or, where training has sharded it, a complete copy on the CPU.
        """
        if self._skeleton is None:
            return self.accelerator.unwrap_model(self.model)
        reshard(self.model)
        return fill_copy(self._skeleton, self.accelerator.unwrap_model(self.model_wrapped))

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        release(self.model)
        self._skeleton = meta_copy(self.accelerator.unwrap_model(self.model)) if self._is_sharded() else None
        if not self.is_fsdp_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        name_layers(self.accelerator, self.model)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        # accelerate finds the shard of a parameter by its address, which empty shards do not have: the optimizer of a
        # model that has been sharded before would get others.
        assert self.optimizer is not None
        for group, expected in zip(self.optimizer.param_groups, parameter_groups(self.model, self.args), strict=True):
            group["params"] = expected["params"]
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, optionally from a checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the last one in `output_dir`.
            args: As of `Trainer.train`.
            kwargs: As of `Trainer.train`.

        Raises:
            InterruptedRunError: SIGINT or SIGTERM; a checkpoint has been written.
            FloatingPointError: The loss is infinite or NaN.
            ValueError: There is no checkpoint, or it was written by another number of processes.
        """
        folder = self._output_folder
        if self.is_world_process_zero() and folder.is_dir():
            remove_partial_files(folder)
        self.accelerator.wait_for_everyone()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.last_checkpoint()
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no checkpoint to resume from in {str(folder)!r}.")
        if resume_from_checkpoint:
            _check_processes(Path(str(resume_from_checkpoint)), self.args.world_size)
        self._last_logged_step = 0
        self._loss_parts.clear()
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
                # accelerate wraps the forward pass of the model itself in mixed precision, for good.
                self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=False)
            self._interruption.restore_handlers()

    @property
    def _output_folder(self) -> Path:
        assert self.args.output_dir is not None  # TrainingArguments sets it.
        return Path(self.args.output_dir)

    def last_checkpoint(self) -> str | None:
        """Return the folder of the last checkpoint in `output_dir`, or None."""
        folder = self._output_folder
        return get_last_checkpoint(folder) if folder.is_dir() else None

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        result = super()._init_training_state(*args, **kwargs)
        self._last_logged_step = self.state.global_step
        if self.state.best_global_step and self.state.best_model_checkpoint is None:
            # The output folder may have been moved since the checkpoint was written.
            best = self._output_folder / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.is_dir() else None
        return result

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        requested, step = self.control.should_save, self.state.global_step
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if requested and not self.control.should_save and self._last_saved_step != step:
            # save_strategy="best" withdraws a callback's request in a step whose evaluation is not the best.
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_folder = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        partial = run_folder / f".{name}.part"
        if self.args.should_save:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._partial_folder = partial
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._partial_folder = None
        best = run_folder / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step and (best.is_dir() or best.name == name):
            self.state.best_model_checkpoint = str(best)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / "trainer_state.json"))
            replace_folder(run_folder / name, partial / name)
            shutil.rmtree(partial, ignore_errors=True)
            rotate_checkpoints(
                output_dir=str(run_folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        self._last_saved_step = self.state.global_step
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(run_folder / name))

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._partial_folder is None else str(self._partial_folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: a checkpoint is pushed once it has its name."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        learned = {} if self.is_fsdp_enabled or self.is_deepspeed_enabled else _outside_adapters(self.model)
        if learned and self.args.should_save:
            folder = Path(output_dir) if output_dir else self._output_folder
            tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in learned.items()}
            save_file(tensors, str(folder / LEARNED_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_learned(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_learned(Path(str(self.state.best_model_checkpoint)))

    def _load_learned(self, folder: Path) -> None:
        if (folder / LEARNED_FILE).is_file():
            _copy_parameters(self.model, load_file(str(folder / LEARNED_FILE)))


class DistillationTrainer(FinetuningTrainer):
    """Trains a student to match its teacher and the labels of a task.

    The loss, summed over all targets of a step and divided by their number, is

        `a T² KL(p_T ‖ q_T) + b task + c Σ_l ‖h_l - h'_l‖² / ‖h'_l‖² / layers`

    where p_T and q_T are the outputs of teacher and student at temperature T (Hinton et al. 2015, arXiv:1503.02531; for
    scores: their squared difference), and h, h' are the hidden states of student and teacher after each layer, over
    real tokens; each row counts there with its number of targets. The weights a, b, c are `logits_weight`,
    `task_weight` and `hidden_weight` of the config. The loss of an evaluation is the task's alone.

    The teacher has no gradients and no dropout. Under FSDP2 and ZeRO-3 it is sharded as the student is.

    Args:
        model: The student: a patched model, or one with PEFT adapters around a patched model.
        teacher_model: The exact model. None for a student with adapters: the teacher is then the same weights with the
            adapters off and exact attention on, and no second model is in memory.
        args: The config.
        kwargs: As of `transformers.Trainer`.

    Raises:
        ValueError: There is neither a teacher nor an adapter.
    """

    config_class = DistillationConfig
    args: DistillationConfig

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        teacher_model: PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if teacher_model is None and not hasattr(model, "disable_adapter"):
            raise ValueError(
                f"This {type(model).__name__} has no teacher. Pass teacher_model, or a model with PEFT adapters, whose "
                "base weights are the teacher."
            )
        super().__init__(model, args, **kwargs)
        self.teacher = teacher_model
        if teacher_model is not None:
            teacher_model.eval().requires_grad_(False)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.teacher is not None:
            self.teacher = shard_frozen_model(self.accelerator, self.teacher)
        return super()._prepare_for_training(*args, **kwargs)

    def loss_terms(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float], Any]:
        """Compute the terms of the loss of one batch: `task`, `logits` and `hidden`."""
        config, shift = self.args, self._loss_shifts_labels
        if not self._in_training_step:
            return super().loss_terms(model, inputs, labels)
        arguments = self._forward_arguments(inputs)
        with_hidden = config.hidden_weight > 0
        needs_teacher = with_hidden or config.logits_weight > 0
        target: Any = self.teacher_outputs(arguments, with_hidden) if needs_teacher else None
        outputs = model(**arguments, output_hidden_states=with_hidden)
        rows, classes = select_targets(outputs.logits, labels, shift)
        parts, weights = {}, {}
        if config.task_weight:
            parts["task"], weights["task"] = task_loss(rows, classes), config.task_weight
        if config.logits_weight:
            target_rows, _ = select_targets(target.logits, labels, shift)
            parts["logits"] = logits_loss(rows, target_rows, config.temperature)
            weights["logits"] = config.logits_weight
        if with_hidden:
            if outputs.hidden_states is None or target.hidden_states is None:
                raise NotImplementedError(
                    f"{type(self.model).__name__} does not return hidden_states. Set hidden_weight=0."
                )
            errors = hidden_loss(outputs.hidden_states, target.hidden_states, inputs.get("attention_mask"))
            # Weighted by row, so that the sum does not depend on how the rows are spread over processes.
            parts["hidden"] = (errors * count_targets(labels, shift)).sum()
            weights["hidden"] = config.hidden_weight
        return parts, weights, outputs

    @torch.no_grad()
    def teacher_outputs(self, inputs: dict[str, Any], output_hidden_states: bool) -> Any:
        """Return the teacher's outputs for a batch without labels."""
        with autocast(self.accelerator):
            if self.teacher is not None:
                return self.teacher(**inputs, output_hidden_states=output_hidden_states)
            student: Any = self.model
            modes = {module: module.training for module in student.modules()}
            student.eval()
            try:
                with student.disable_adapter(), exact_attention(student):
                    return student(**inputs, output_hidden_states=output_hidden_states)
            finally:
                for module, mode in modes.items():
                    module.training = mode


class AttentionTransferTrainer(FinetuningTrainer):
    """Trains the learned parts of a patched model to mimic the softmax attention that they replace, layer by layer.

    The losses are those of `transfer_attention`, and so are optimizer, schedule and the largest norm per layer. Only
    the learned parts are trained, in float32; all other parameters and the mode of the model are left as they are.
    With an `eval_dataset` the loss is evaluated before the first step and every `eval_steps` steps, and the parameters
    of the best evaluation remain, those of the start if nothing was better.

    The layers' losses are differentiated inside the model's forward pass, one block of queries after another, which
    bounds their memory. Wrappers that reduce gradients in a backward pass of the whole model (DDP, the engines of
    DeepSpeed) have no part in that: the learned parts, a small share of the weights, are replicated, and the trainer
    averages their gradients itself. FSDP2 and ZeRO-3 shard all other parameters. Checkpoints hold the learned parts
    only; `save_model` writes the whole model.

    Args:
        model: A patched model.
        args: The config.
        kwargs: As of `transformers.Trainer`.

    Raises:
        ValueError: The model is not patched, or none of its mechanisms has anything to learn.

    Attributes:
        best_step: The step whose parameters the model has after training; None without evaluations.
    """

    config_class = AttentionTransferConfig
    args: AttentionTransferConfig
    model: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel | None = None, args: AttentionTransferConfig | None = None, **kwargs: Any
    ) -> None:
        check_model(model)
        super().__init__(model, args, **kwargs)
        config = self.args
        steps = branch_steps(config.max_steps, config.branch_first, config.window_dropout)
        self._shards = self._is_sharded()
        self.objective: AttentionTransferLoss = AttentionTransferLoss(
            self.model,
            config.loss,
            steps,
            whole_model=self._shards,
        )
        # From here on the trainer sees to the shards itself.
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        self._best: tuple[float, int, dict[str, Tensor]] | None = None
        if self.eval_dataset is not None and config.eval_strategy == "no":
            raise ValueError("There is an eval_dataset, and eval_strategy is 'no'. Set eval_strategy='steps'.")

    @property
    def best_step(self) -> int | None:
        return None if self._best is None else self._best[1]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `FinetuningTrainer.train` does. After a FloatingPointError the parameters are restored."""
        self._best = None
        # A resumed run has the evaluation of its start in the checkpoint.
        self.args.eval_on_start = self.args.eval_strategy != "no" and not resume_from_checkpoint
        with self.objective.training():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            if self._best is not None:
                _copy_parameters(self.model, self._best[2])
        return output

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._shards and self._skeleton is None:
            self._skeleton = meta_copy(self.model)
        self.model = shard_frozen_model(self.accelerator, self.model)
        self.model_wrapped = self.model
        self.optimizer = torch.optim.AdamW(self.objective.parameter_groups(self.args.learning_rate))
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: transfer_lr_factor(step, max_steps)
        )
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of one batch to those of the learned parts. Returns the loss, averaged over layers."""
        step = self.state.global_step + 1
        losses = self.objective(self._prepare_inputs(inputs), step)
        loss = losses.mean() / self.current_gradient_accumulation_steps
        assert self.lr_scheduler is not None
        check_finite_loss(float(loss), step, float(self.lr_scheduler.base_lrs[0]), "Lower learning_rate")
        if self.accelerator.sync_gradients:
            average_gradients(self.objective.parameters)
            for gradient in self._gradients():
                gradient /= self.current_gradient_accumulation_steps
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        largest = self.args.max_grad_norm * len(self.objective.learned)
        return torch.nn.utils.clip_grad_norm_(self.objective.parameters, largest)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return torch.nn.utils.get_total_norm(self._gradients()) if grad_norm is None else grad_norm

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.objective.parameters if parameter.grad is not None]

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch, averaged over layers."""
        return self.objective(self._prepare_inputs(inputs)).mean(), None, None

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super()._evaluate(*args, **kwargs)
        loss, step = metrics["eval_loss"], self.state.global_step
        if self._best is None or loss < self._best[0]:
            self._best = (loss, step, {name: value.clone() for name, value in self.learned_state_dict().items()})
        patience = self.args.patience
        if patience is not None and step - self._best[1] >= patience * self.state.eval_steps:
            self.control.should_training_stop = True
        return metrics

    def learned_state_dict(self) -> dict[str, Tensor]:
        """Return the learned parts by the names of their parameters."""
        learned = {id(parameter) for parameter in self.objective.parameters}
        return {name: value.detach() for name, value in self.model.named_parameters() if id(value) in learned}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; in a checkpoint, the learned parts and their best values so far."""
        if not _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        state = self.learned_state_dict()
        if not self.args.should_save:
            return
        folder = Path(output_dir) if output_dir else self._output_folder
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in state.items()}
        metadata = {}
        if self._best is not None:
            tensors |= {BEST_PREFIX + name: value.cpu() for name, value in self._best[2].items()}
            metadata = {"best_loss": repr(self._best[0]), "best_step": str(self._best[1])}
        save_file(tensors, str(folder / LEARNED_FILE), metadata)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = str(Path(resume_from_checkpoint) / LEARNED_FILE)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        best = {
            name.removeprefix(BEST_PREFIX): value for name, value in tensors.items() if name.startswith(BEST_PREFIX)
        }
        current = {name: value for name, value in tensors.items() if not name.startswith(BEST_PREFIX)}
        _copy_parameters(self.model, current)
        if best:
            self._best = (float(metadata["best_loss"]), int(metadata["best_step"]), best)


def parameter_groups(model: nn.Module, config: FinetuningConfig) -> list[dict[str, Any]]:
    """Return groups of the trainable parameters, with learning rate and weight decay (see
    `FinetuningTrainer.create_optimizer`)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            learned = f".{SUBMODULE}." in f".{name}"
            groups.setdefault((learned, parameter.dim() >= 2 and not learned), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": (config.learned_lr or config.learning_rate) if learned else config.learning_rate,
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for (learned, decayed), parameters in groups.items()
    ]


def _predicts_next_token(model: Any) -> bool:
    """Whether the loss of a model is that of a causal language model: token i predicts the label of token i + 1."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _disable_dropout(model: nn.Module) -> None:
    """Put the model into eval mode, except for layers that recompute their activations, which ask for training mode."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _outside_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learned parts of a model with PEFT adapters that PEFT does not save with these."""
    if not hasattr(model, "peft_config"):
        return {}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if f".{SUBMODULE}." in f".{name}" and parameter.requires_grad and "modules_to_save" not in name
    }


def _copy_parameters(model: nn.Module, values: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in values.items():
        parameters[name].data.copy_(value)


def _check_processes(checkpoint: Path, processes: int) -> None:
    """Raise a ValueError if a checkpoint was written by another number of processes."""
    before = len(list(checkpoint.glob("rng_state_*.pth"))) or 1
    if (checkpoint / "trainer_state.json").is_file() and before != processes:
        raise ValueError(
            f"{str(checkpoint)!r} was written by {before} process(es), and this run has {processes}: the order of the "
            "data would change. Resume with as many as before."
        )
