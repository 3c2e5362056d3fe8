"""Fine-tuning and distillation: losses and groups of parameters for `transformers.Trainer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.trainer_utils import EvalLoopOutput

from ..data.metrics import loss_with_error
from ..data.task_data import IGNORED
from ..integration.cache_argument import cache_argument, output_cache
from ..integration.context import is_learned
from ..integration.exact import exact_attention
from ..integration.models import checkpoints_gradients
from ..integration.packing import check_exact_packing
from ..mechanisms.base import LinearAttention
from ..utils.models import evaluation_mode, frozen, mean_pooling
from ..utils.options import check_options
from . import losses
from .options import DistillConfig, StageConfig, check_loss_weights
from .resumable import ResumableTrainer
from .sharding import autocast, shard_frozen_model
from .transfer import check_finite_loss

LossTerms = tuple[dict[str, Tensor], dict[str, float], Any]
"""The terms of a loss, each summed over the targets of a batch; the weight of each; and the model's outputs."""


def _as_in(section: Any, name: str) -> Any:
    """A field with the default, the help and the bounds of an option of the command line."""
    entry = section.__dataclass_fields__[name]
    return field(default=entry.default, metadata=entry.metadata)


@dataclass
class FinetuningConfig(TrainingArguments):
    """Arguments of `FinetuningTrainer`: `transformers.TrainingArguments` with a few fields more.

    All fields of `transformers.TrainingArguments` keep their meaning. `logging_nan_inf_filter` has no effect: a loss
    that is not finite is an error.
    """

    learned_lr: float | None = _as_in(StageConfig, "learned_lr")
    disable_dropout: bool = _as_in(StageConfig, "disable_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)


@dataclass
class DistillationConfig(FinetuningConfig):
    """Arguments of `DistillationTrainer`: the weights of the terms of its loss."""

    disable_dropout: bool = _as_in(DistillConfig, "disable_dropout")
    logits_weight: float = _as_in(DistillConfig, "logits_weight")
    temperature: float = _as_in(DistillConfig, "temperature")
    task_weight: float = _as_in(DistillConfig, "task_weight")
    hidden_weight: float = _as_in(DistillConfig, "hidden_weight")
    carried_length: int = _as_in(DistillConfig, "carried_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss_weights(self)
        if self.carried_length and self.gradient_checkpointing:
            raise ValueError("carried_length needs a cache, which gradient_checkpointing excludes. Set one of them.")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context manager of a forward pass that trains without dropout. The model is left in evaluation mode.

    Mechanisms and embeddings stay in training mode: they have no dropout, and only there do mechanisms draw new
    features, and embeddings get the noise of `neftune_noise_alpha`. So do the layers whose activations are recomputed,
    which are not in evaluation mode, but not while they run: some drop activations themselves.
    """
    model.eval()
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    functions = {layer: layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing}
    for layer, function in functions.items():
        layer.training = True
        layer._gradient_checkpointing_func = partial(_checkpointed, layer, function)
    for module in model.modules():
        if isinstance(module, LinearAttention | nn.Embedding):
            module.train()
    try:
        yield
    finally:
        for layer, function in functions.items():
            layer._gradient_checkpointing_func = function


def _checkpointed(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any) -> Any:
    """Call a layer such that its activations are recomputed, both times as in evaluation mode."""

    def evaluated(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args)


class FinetuningTrainer(ResumableTrainer):
    """Trains a model, exact or patched, on the loss of its task. Used as `transformers.Trainer`.

    What it does differently, beside what makes it resumable (see `ResumableTrainer`), and why:

    - The loss is the sum over all targets (rows, or predicted tokens) of an optimizer step, across accumulated batches
      and processes, divided by their number. The Trainer leaves that to the model; classifiers such as BERT ignore the
      number, so that their accumulated gradients come out too large by a factor of `gradient_accumulation_steps`.
    - The auxiliary loss of routers is added where the model returns it (`output_router_logits`).
    - A loss that is infinite or NaN raises a FloatingPointError that names the learning rate.
    - Learned parts of mechanisms have a learning rate of their own and no weight decay.

    Args:
        model: A `PreTrainedModel`, or one with PEFT adapters.
        args: The config.
        kwargs: As of `transformers.Trainer`.

    Raises:
        ValueError: A loss that this trainer does not compute: `label_smoothing_factor`, `compute_loss_func`, the
            regression of several numbers, or `multi_label_classification` with one label.
    """

    config_class: type[FinetuningConfig] = FinetuningConfig
    #: Whether a loss is divided by the number of targets of all accumulated batches. Without labels it is a mean.
    loss_is_scaled_for_ga = True
    #: Whether a batch without labels is an error; otherwise the loss is the model's own.
    needs_labels = False

    args: FinetuningConfig

    def __init__(self, model: nn.Module | None = None, args: FinetuningConfig | None = None, **kwargs: Any) -> None:
        args = self.config_class() if args is None else args
        if not isinstance(args, self.config_class):
            raise TypeError(f"args must be a {self.config_class.__name__}, got a {type(args).__name__}.")
        if args.label_smoothing_factor or kwargs.get("compute_loss_func") is not None:
            name = "label_smoothing_factor" if args.label_smoothing_factor else "compute_loss_func"
            raise ValueError(f"{name}: {type(self).__name__} computes the loss of the task itself. Leave it out.")
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = True  # so that the targets are counted
        # Transformers recognises fewer classes as causal language models (GPT2LMHeadModel is not among them).
        base: Any = self.model
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        names = {cls.__name__ for cls in type(base).__mro__}
        self._loss_shifts_labels = not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        if not names.isdisjoint(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):  # XLM's class is of both kinds
            self._loss_shifts_labels = self._loss_shifts_labels and bool(getattr(base.config, "causal", False))
        problem, count = base.config.problem_type, base.config.num_labels
        if problem == "regression" and count > 1:
            raise ValueError(
                f"problem_type='regression' with {count} labels: {type(self).__name__} fits one number a row. Set "
                "num_labels=1."
            )
        if problem == "multi_label_classification" and count == 1:
            raise ValueError(
                f"problem_type='multi_label_classification' with 1 label: {type(self).__name__} takes one output for a "
                "score. Set num_labels=2 and problem_type='single_label_classification'."
            )
        #: A model without a head learns sentence embeddings.
        has_head = type(base).__name__ not in MODEL_MAPPING_NAMES.values()
        self._task_loss = losses.task_loss if has_head else losses.embedding_loss
        self._loss_parts: dict[str, Tensor] = {}
        self._step_of_loss_parts = 0  # after which these were added
        self._evaluation_totals: list[Tensor] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `ResumableTrainer` does."""
        self._loss_parts.clear()
        return super().train(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of one batch as its share of the loss over all targets of the step (see `Trainer`)."""
        labels = inputs.get("labels")
        training = torch.is_grad_enabled()
        self.loss_is_scaled_for_ga = labels is not None
        if labels is None and self.needs_labels:
            raise ValueError(f"The batch has no labels: {type(self).__name__} needs them. Add a column 'labels'.")
        with without_dropout(self.model) if training and self.args.disable_dropout else nullcontext():
            if labels is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            parts, weights, outputs = self.loss_terms(model, inputs, labels)
        targets = losses.count_targets(labels, self._loss_shifts_labels).sum()
        if training and (router_loss := outputs.get("aux_loss")) is not None:
            parts["router"] = router_loss * targets
            config: Any = self.model.config
            weights["router"] = getattr(config.get_text_config(), "router_aux_loss_coef", 0.0)
        if not training:
            self._count_evaluation(self._predictions(outputs, inputs), labels)
        scale = self._loss_scale(labels, targets, num_items_in_batch)
        if training and len(parts) > 1:
            if not self._loss_parts:
                self._step_of_loss_parts = self.state.global_step
            for name, part in parts.items():
                self._loss_parts[name] = self._loss_parts.get(name, 0.0) + part.detach().float() * scale
        loss = torch.stack([weights[name] * part.float() for name, part in parts.items()]).sum() * scale
        return (loss, outputs) if return_outputs else loss

    def _count_evaluation(self, predictions: Tensor, labels: Tensor) -> None:
        """Keep the loss of each row of a batch of an evaluation, and its number of targets, of all processes."""
        rows = losses.row_losses(predictions, labels, self._loss_shifts_labels, self._task_loss)
        by_row, counts = self.accelerator.gather_for_metrics(rows)
        self._evaluation_totals.append(torch.stack([by_row.double(), counts.double()]).cpu())

    def _loss_scale(self, labels: Tensor, targets: Tensor, num_items_in_batch: Any) -> float:
        """Return the factor of the summed loss of a batch: one over the number of targets of the optimizer step."""
        if num_items_in_batch is None:
            return 1.0 / max(float(targets), 1.0)
        total = torch.as_tensor(num_items_in_batch).flatten()[0]
        if labels.is_floating_point():  # the Trainer counts each number of a row
            total = total / labels[0].numel()
        scale = 1.0 / max(float(total), 1.0)
        if self.args.average_tokens_across_devices:
            scale *= self.accelerator.num_processes // self.get_tp_size()  # gradients are averaged over processes
        return scale

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> LossTerms:
        """Compute the terms of the loss of one batch: of a step of training where gradients are on."""
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
        config: Any = self.model.config
        if config.is_encoder_decoder:
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
            steps = max(self.state.global_step - self._step_of_loss_parts, 1)
            values = torch.stack([part.reshape(()) for part in self._loss_parts.values()])
            means = (self.accelerator.reduce(values, "mean") / steps).tolist()
            logs.update({f"{name}_loss": value for name, value in zip(self._loss_parts, means, strict=True)})
            self._loss_parts.clear()
        super().log(logs, start_time)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as the Trainer does, with the loss averaged over all targets, its error, and each row counted once.

        The Trainer averages the means of batches, of which the last may be smaller or padded with rows of others.
        """
        self._evaluation_totals = []
        output = super().evaluation_loop(*args, **kwargs)
        if self._evaluation_totals:
            by_row, counts = torch.cat(self._evaluation_totals, dim=1)
            if not counts.any():
                raise ValueError("The validation data has no token to predict.")
            assert output.metrics is not None
            loss, error = loss_with_error(by_row, counts)
            prefix = kwargs.get("metric_key_prefix", "eval")
            output.metrics[f"{prefix}_loss"] = loss
            if error is not None:
                output.metrics[f"{prefix}_loss_stderr"] = error
        return output

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return a context of the run's mixed precision, for calls of models outside of training too."""
        return autocast(self.accelerator)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay: matrices only.

        Vectors (biases and the weights of norms, whatever a model calls them) are not decayed; neither are the learned
        parts of a mechanism, whose initial value is not zero.
        """
        return [name for name, value in model.named_parameters() if value.dim() >= 2 and not is_learned(name)]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `args.optim`, with `learned_lr` for the learned parts of mechanisms."""
        if self.optimizer is not None:
            return self.optimizer
        parameters = dict((self.model if model is None else model).named_parameters())
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError(f"{type(self.model).__name__} has no parameter that requires a gradient.")
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        learned = [value for name, value in parameters.items() if is_learned(name) and value.requires_grad]
        if learned and self.args.learned_lr is not None:
            moved = set(map(id, learned))
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            optimizer.add_param_group({"params": learned, "lr": self.args.learned_lr, "weight_decay": 0.0})
        return optimizer


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
    While it trains, the teacher has no gradients, dropout or cache. Under FSDP2 and ZeRO-3 it is sharded, too.

    Args:
        model: The student: a patched model, or one with PEFT adapters around a patched model.
        teacher_model: The exact model. None for a student with adapters: the teacher is then the same weights with the
            adapters off and exact attention on, and no second model is in memory.
        args: The config.
        kwargs: As of `transformers.Trainer`.

    Raises:
        ValueError: There is neither a teacher nor an adapter; in `train`, weights of its own that a student without a
            teacher would change.
    """

    config_class = DistillationConfig
    needs_labels = True
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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `FinetuningTrainer` does. Meanwhile the teacher has no gradients, dropout or cache."""
        config = self.args
        has_head = self._task_loss is losses.task_loss
        if self.teacher is not None:
            self.teacher = shard_frozen_model(self.accelerator, self.teacher)
        elif config.logits_weight or config.hidden_weight or not has_head:
            self._check_own_teacher()
        with nullcontext() if self.teacher is None else frozen(self.teacher):
            return super().train(*args, **kwargs)

    def _check_own_teacher(self) -> None:
        """Raise a ValueError if training changes what the student is with its adapters off: its teacher."""
        student: Any = self.model
        trained = {name for name, value in student.named_parameters() if value.requires_grad and not is_learned(name)}
        with student.disable_adapter():  # in which adapters need no gradient
            left = {name for name, value in student.named_parameters() if value.requires_grad}
        if changed := sorted(name for name in trained & left if not name.startswith("prompt_encoder.")):
            problem = f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else changed[0]
            raise ValueError(
                f"Training would change the teacher, which is this model with its adapters off: {problem} are no "
                "adapters. Freeze them (bias='none' in LoRA), train them by modules_to_save, or pass teacher_model."
            )

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any], labels: Tensor) -> LossTerms:
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
            several = labels.is_floating_point() and rows.shape[-1] > 1
            parts["logits"] = losses.logits_loss(rows, target_rows, config.temperature, several_labels=several)
        if with_hidden:
            if outputs.get("hidden_states") is None or target.get("hidden_states") is None:
                raise NotImplementedError(f"{type(self.model).__name__} has no hidden_states. Set hidden_weight=0.")
            states = [state[:, carried:] for state in target.hidden_states]
            mask = inputs.get("attention_mask")
            errors = losses.hidden_loss(outputs.hidden_states, states, None if mask is None else mask[:, carried:])
            # Weighted by row, so that the sum does not depend on how the rows are spread over processes.
            parts["hidden"] = (errors * losses.count_targets(labels, shift)).sum()
        weights = {"task": config.task_weight, "logits": config.logits_weight, "hidden": config.hidden_weight}
        return parts, weights, outputs

    @torch.no_grad()
    def _carried_state(self, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Read the first `carried_length` tokens; return the inputs of the others, with the state after them."""
        if checkpoints_gradients(model):  # From Transformers 5.24 on only the pass with gradients loses the cache.
            raise ValueError("carried_length needs a cache, which gradient checkpointing excludes. Switch it off.")
        length = self.args.carried_length
        shape = inputs["input_ids"].shape
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        by_token = {name: tensor for name, tensor in tensors.items() if tensor.shape[:2] == shape}
        first = {name: value[:, :length] for name, value in by_token.items()}
        cache = output_cache(model(**inputs | first, use_cache=True))
        torch.clear_autocast_cache()  # Weights that were cast without a gradient would stay without one.
        by_token.pop("attention_mask", None)  # covers what is in the cache, too
        rest = {name: value[:, length:] for name, value in by_token.items()}
        return {**inputs, **rest, **cache_argument(self.model, cache)}

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the batches of a step and the number of their targets: embeddings, or tokens that are not carried."""
        return super().get_batch_samples(map(self._with_targets, epoch_iterator), num_batches, device)

    def _with_targets(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._task_loss is losses.embedding_loss and "labels" in batch:
            batch["labels"] = torch.zeros(len(batch["labels"]))  # One embedding a row, whatever its labels.
        if self.args.carried_length:
            batch["labels"] = batch["labels"].clone()  # may be the input_ids
            batch["labels"][:, : self.args.carried_length + 1] = IGNORED
        return batch

    @torch.no_grad()
    def teacher_outputs(self, inputs: dict[str, Any], output_hidden_states: bool) -> Any:
        """Return the teacher's outputs for a batch without labels."""
        with self.autocast_smart_context_manager():
            if self.teacher is not None:
                check_exact_packing(self.teacher, inputs)
                return self.teacher(**inputs, output_hidden_states=output_hidden_states)
            student: Any = self.model
            with evaluation_mode(student), student.disable_adapter(), exact_attention(student):
                return student(**inputs, output_hidden_states=output_hidden_states)
