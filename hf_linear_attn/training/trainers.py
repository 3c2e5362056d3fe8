"""Trainers built on `transformers.Trainer`: fine-tuning and distillation."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint, rotate_checkpoints

from ..data.task_data import IGNORED
from ..integration.context import SUBMODULE
from ..integration.exact import exact_attention
from ..utils.files import remove_partial_files, replace_folder
from ..utils.models import evaluation_mode, mean_pooling
from . import losses
from .arguments import DistillationConfig, FinetuningConfig
from .resumable import EpochSampler, InterruptionCallback, SeededCollator
from .sharding import autocast, check_sharding, fill_copy, meta_copy, name_layers, release, reshard, shard_frozen_model
from .transfer import check_finite_loss

#: In a checkpoint: parameters that neither PEFT's adapter file nor a frozen base holds.
LEARNED_FILE = "linear_attention.safetensors"


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

    def __init__(self, model: nn.Module | None = None, args: FinetuningConfig | None = None, **kwargs: Any) -> None:
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"args must be a {self.config_class.__name__}, got a {type(args).__name__}.")
        super().__init__(model, args, **kwargs)
        check_sharding(self.accelerator)
        self._output_folder = Path(str(args.output_dir))
        self.model_accepts_loss_kwargs = True  # so that the targets are counted
        # Transformers recognises fewer classes as causal language models (GPT2LMHeadModel is not among them).
        base: Any = self.model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._loss_shifts_labels = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        #: A model without a head learns sentence embeddings.
        has_head = type(base).__name__ not in MODEL_MAPPING_NAMES.values()
        self._task_loss = losses.task_loss if has_head else losses.embedding_loss
        self.data_collator = SeededCollator(self.data_collator, args.seed)
        self._sampler: EpochSampler | None = None
        self._skeleton: Any = None
        self._partial_folder: Path | None = None
        self._loss_parts: dict[str, Tensor] = {}
        self._evaluation_totals: list[Tensor] = []
        self._last_logged_step = 0
        if not self._interruption_callbacks():
            self.add_callback(InterruptionCallback())

    def _interruption_callbacks(self) -> list[InterruptionCallback]:
        return [item for item in self.callback_handler.callbacks if isinstance(item, InterruptionCallback)]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one batch as its share of the loss over all targets of the step (see `Trainer`)."""
        labels = inputs.get("labels")
        if labels is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        training = torch.is_grad_enabled()
        if training and self.args.disable_dropout:
            self.model.eval()
            for module in self.model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True  # Activations are recomputed in training mode only.
        parts, weights, outputs = self.loss_terms(model, inputs, labels)
        if not training:
            predictions = self._predictions(outputs, inputs)
            rows = losses.row_losses(predictions, labels, self._loss_shifts_labels, self._task_loss)
            by_row, counts = self.accelerator.gather_for_metrics(rows)
            self._evaluation_totals.append(torch.stack([by_row.double().sum(), counts.sum().double()]).cpu())
        loss = torch.stack([weights[name] * part.float() for name, part in parts.items()]).sum()
        if num_items_in_batch is None:
            total: Any = losses.count_targets(labels, self._loss_shifts_labels).sum()
        else:
            total = torch.as_tensor(num_items_in_batch).flatten()[0]
        scale = 1.0 / max(float(total), 1.0)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            scale *= self.accelerator.num_processes // self.get_tp_size()  # gradients are averaged over processes
        if training and len(parts) > 1:
            for name, part in parts.items():
                self._loss_parts[name] = self._loss_parts.get(name, 0.0) + part.detach().float() * scale
        loss = loss * scale
        return (loss, outputs) if return_outputs else loss

    def loss_terms(
        self, model: nn.Module, inputs: dict[str, Any], labels: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, float], Any]:
        """Compute the terms of the loss of one batch: of a step of training where gradients are on.

        Returns:
            The terms, each summed over the targets of the batch; the weight of each; and the model's outputs.
        """
        outputs = model(**self._forward_arguments(inputs))
        predictions = self._predictions(outputs, inputs)
        loss = self._task_loss(*losses.select_targets(predictions, labels, self._loss_shifts_labels))
        return {"task": loss}, {"task": 1.0}, outputs

    def _predictions(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the logits, or the sentence embeddings of a model without a head."""
        if self._task_loss is losses.task_loss:
            return outputs.logits
        return mean_pooling(outputs.last_hidden_state, inputs.get("attention_mask"))

    def _forward_arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the batch without labels, unless the model makes its decoder's inputs of them."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            return inputs
        return {name: value for name, value in inputs.items() if name != "labels"}

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of one batch; a FloatingPointError if the loss is infinite or NaN."""
        loss = super().training_step(model, inputs, num_items_in_batch)
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

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as the Trainer does, with the loss averaged over all targets, and each row counted once.

        The Trainer averages the means of batches, of which the last may be smaller or padded with rows of others.
        """
        self._evaluation_totals = []
        output = super().evaluation_loop(*args, **kwargs)
        if self._evaluation_totals:
            loss, count = torch.stack(self._evaluation_totals).sum(0).tolist()
            if not count:
                raise ValueError("The validation data has no token to predict.")
            assert output.metrics is not None
            output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_loss"] = loss / count
        return output

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return a context of the run's mixed precision, for calls of models outside of training too."""
        return autocast(self.accelerator)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay: matrices only.

        Vectors (biases and the weights of norms, whatever a model calls them) are not decayed; neither are the learned
        parts of a mechanism, whose initial value is not zero.
        """
        return [name for name, value in model.named_parameters() if value.dim() >= 2 and not _is_learned(name)]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `args.optim`, with `learned_lr` for the learned parts of mechanisms."""
        if self.optimizer is not None:
            return self.optimizer
        parameters = dict((self.model if model is None else model).named_parameters())
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError(f"{type(self.model).__name__} has no parameter that requires a gradient.")
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        learned = [value for name, value in parameters.items() if _is_learned(name) and value.requires_grad]
        if learned and self.args.learned_lr is not None:
            moved = set(map(id, learned))
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            optimizer.add_param_group({"params": learned, "lr": self.args.learned_lr, "weight_decay": 0.0})
        return optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler: Any = super()._get_train_sampler(train_dataset)
        if sampler is None or self.args.train_sampling_strategy not in ("random", "group_by_length"):
            return sampler
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * max(self.args.world_size, 1)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._sampler = EpochSampler(len(sampler), seed, getattr(sampler, "lengths", None), rows)
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
            self._sampler.epoch = epoch
        super()._run_epoch(model, epoch, *args, **kwargs)

    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def complete_model(self) -> Any:
        """Return the model that was passed, or, where training has sharded it, a complete copy on the CPU.

        Every process must call it.
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
        position = {id(parameter): index for index, parameter in enumerate(self.model.parameters())}
        groups = self.create_optimizer().param_groups
        positions = [[position[id(parameter)] for parameter in group["params"]] for group in groups]
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        # accelerate finds the shard of a parameter by its address, which empty shards do not have: the optimizer of a
        # model that has been sharded before would get others.
        shards = list(self.model.parameters())
        for group, expected in zip(self.create_optimizer().param_groups, positions, strict=True):
            group["params"] = [shards[index] for index in expected]
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint, self.model_wrapped)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, optionally from a checkpoint (see `Trainer.train`).

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
            resume_from_checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no checkpoint to resume from in {str(folder)!r}.")
        checkpoint, processes = Path(str(resume_from_checkpoint)), self.args.world_size
        before = len(list(checkpoint.glob("rng_state_*.pth"))) or 1
        if (checkpoint / "trainer_state.json").is_file() and before != processes:
            counts = f"was written by {before} process(es), and this run has {processes}"
            remedy = "Resume with as many as before."
            raise ValueError(f"{str(checkpoint)!r} {counts}: the order of the data would change. {remedy}")
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if not self._is_sharded():
                # accelerate wraps the forward pass of the model itself in mixed precision, for good.
                self.accelerator.unwrap_model(self.model_wrapped, keep_fp32_wrapper=False)
            for callback in self._interruption_callbacks():
                callback.watch.stop()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        result = super()._init_training_state(*args, **kwargs)
        self._last_logged_step = self.state.global_step
        self._loss_parts.clear()
        best = self._output_folder / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_model_checkpoint is None and best.is_dir():
            # The output folder has been moved since the checkpoint was written.
            self.state.best_model_checkpoint = str(best)
        return result

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # save_strategy="best" withdraws a callback's request to save in a step whose evaluation is not the best.
        return super()._determine_best_metric(metrics, trial) or self.control.should_save

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        partial = folder / f".{name}.part"
        self._partial_folder = partial
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._partial_folder = None
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder / name)  # and not where it was written
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / "trainer_state.json"))
            replace_folder(folder / name, partial / name)
            partial.rmdir()
            rotate_checkpoints(
                output_dir=str(folder),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(folder / name))

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._partial_folder is None else str(self._partial_folder)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: a checkpoint is pushed once it has its name."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if hasattr(self.model, "peft_config") and self.args.should_save and not self._is_sharded():
            learned = {  # PEFT saves what it has been told to save, and its adapters.
                name: parameter.detach().cpu().contiguous()
                for name, parameter in self.model.named_parameters()
                if _is_learned(name) and parameter.requires_grad and "modules_to_save" not in name
            }
            save_file(learned, str((Path(output_dir) if output_dir else self._output_folder) / LEARNED_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_learned(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_learned(Path(str(self.state.best_model_checkpoint)))

    def _load_learned(self, folder: Path) -> None:
        if (folder / LEARNED_FILE).is_file():
            self.model.load_state_dict(load_file(str(folder / LEARNED_FILE)), strict=False)


class DistillationTrainer(FinetuningTrainer):
    """Trains a student to match its teacher and the labels of a task.

    The loss, summed over all targets of a step and divided by their number, is

        `a T² KL(p_T ‖ q_T) + b task + c Σ_l ‖h_l - h'_l‖² / ‖h'_l‖² / layers`

    where p_T and q_T are the outputs of teacher and student at temperature T (Hinton et al. 2015, arXiv:1503.02531; for
    scores: their squared difference), and h, h' are the hidden states of student and teacher after each layer, over
    real tokens; each row counts there with its number of targets. The weights a, b, c are `logits_weight`,
    `task_weight` and `hidden_weight` of the config. The loss of an evaluation is the task's alone.

    With `carried_length` a decoder reads so many tokens of a row without a gradient, and the loss is that of the rest,
    which starts from the state (or the keys) after them ("state passing", arXiv:2507.02782). The teacher sees all.

    A model without a head learns the mean-pooled embeddings of its teacher, whatever the labels of its training rows.
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
        model: nn.Module | None = None,
        teacher_model: PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if teacher_model is None and not hasattr(model, "disable_adapter"):
            remedy = "Pass teacher_model, or a model with PEFT adapters."
            raise ValueError(f"{type(model).__name__} has no teacher. {remedy}")
        super().__init__(model, args, **kwargs)
        if self.args.carried_length and not self._loss_shifts_labels:
            raise ValueError(f"carried_length is for causal language models, not {type(model).__name__}. Set it to 0.")
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
        if not torch.is_grad_enabled():
            return super().loss_terms(model, inputs, labels)
        arguments = self._forward_arguments(inputs)
        with_hidden = config.hidden_weight > 0
        has_head = self._task_loss is losses.task_loss
        with_logits = config.logits_weight > 0 and has_head
        needs_teacher = with_hidden or with_logits or not has_head
        target: Any = self.teacher_outputs(arguments, with_hidden) if needs_teacher else None
        carried = config.carried_length
        if carried:
            labels = labels[:, carried:]
            if not (labels[:, 1:] != IGNORED).any():
                length = inputs["input_ids"].shape[1]
                raise ValueError(f"carried_length={carried} leaves no token to predict in rows of {length}. Lower it.")
            arguments = self._carried_state(model, arguments)
        outputs = model(**arguments, output_hidden_states=with_hidden)
        labels = labels if has_head else self._predictions(target, inputs)
        rows, classes = losses.select_targets(self._predictions(outputs, inputs), labels, shift)
        parts = {}
        if config.task_weight:
            parts["task"] = self._task_loss(rows, classes)
        if with_logits:
            expected = target.logits[:, carried:] if carried else target.logits
            target_rows, _ = losses.select_targets(expected, labels, shift)
            parts["logits"] = losses.logits_loss(rows, target_rows, config.temperature)
        if with_hidden:
            if outputs.hidden_states is None or target.hidden_states is None:
                raise NotImplementedError(f"{type(self.model).__name__} has no hidden_states. Set hidden_weight=0.")
            states, mask = [state[:, carried:] for state in target.hidden_states], inputs.get("attention_mask")
            errors = losses.hidden_loss(outputs.hidden_states, states, None if mask is None else mask[:, carried:])
            # Weighted by row, so that the sum does not depend on how the rows are spread over processes.
            parts["hidden"] = (errors * losses.count_targets(labels, shift)).sum()
        weights = {"task": config.task_weight, "logits": config.logits_weight, "hidden": config.hidden_weight}
        return parts, weights, outputs

    @torch.no_grad()
    def _carried_state(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Read the first `carried_length` tokens; return the inputs of the others, with the state after them."""
        length, shape = self.args.carried_length, inputs["input_ids"].shape
        by_token = {name: value for name, value in inputs.items() if getattr(value, "shape", ())[:2] == shape}
        cache = model(
            **inputs | {name: value[:, :length] for name, value in by_token.items()}, use_cache=True
        ).past_key_values
        if cache is None:
            raise ValueError("carried_length needs a cache, which gradient checkpointing excludes. Switch it off.")
        torch.clear_autocast_cache()  # Weights that were cast without a gradient would stay without one.
        by_token.pop("attention_mask", None)  # covers what is in the cache, too
        rest = {name: value[:, length:] for name, value in by_token.items()}
        return {**inputs, **rest, "past_key_values": cache}

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        if self.args.carried_length:
            for batch in batch_samples:
                batch["labels"] = batch["labels"].clone()  # may be the input_ids
                batch["labels"][:, : self.args.carried_length + 1] = IGNORED
        return super()._get_num_items_in_batch(batch_samples, device)

    @torch.no_grad()
    def teacher_outputs(self, inputs: dict[str, Any], output_hidden_states: bool) -> Any:
        """Return the teacher's outputs for a batch without labels."""
        with self.autocast_smart_context_manager():
            if self.teacher is not None:
                return self.teacher(**inputs, output_hidden_states=output_hidden_states)
            student: Any = self.model
            with evaluation_mode(student), student.disable_adapter(), exact_attention(student):
                return student(**inputs, output_hidden_states=output_hidden_states)


def _is_learned(name: str) -> bool:
    return f".{SUBMODULE}." in f".{name}"
