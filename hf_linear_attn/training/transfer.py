"""Attention transfer: each layer's learned parts are trained to mimic the exact attention that they replace.

The model runs with exact attention, so every layer sees the hidden states of the pretrained model, and one forward pass
gives the losses of all layers. The exact and the linear form share q, k and v: no second model is in memory.
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..integration.context import attention_modules
from ..integration.exact import AttentionCall, observe_attention
from ..integration.models import check_model, check_patched
from ..mechanisms.base import LinearAttention
from ..utils.arguments import check_positive
from ..utils.models import Batch, evaluation_mode, model_inputs
from .arguments import AttentionTransferConfig
from .losses import layer_loss
from .options import check_attention_loss
from .sharding import meta_copy, reshard, shard_frozen_model
from .trainers import LEARNED_FILE, FinetuningTrainer, check_finite_loss

ProgressFunction = Callable[[int, int, float], None]

#: More layers than any model has: the seeds of the layers of one step lie this far from those of the next one.
MAX_LAYERS = 10_000

#: In a checkpoint of `AttentionTransferTrainer`: what precedes the names of the best parameters so far.
BEST_PREFIX = "best:"


@dataclass(frozen=True)
class TransferResult:
    """The course of an attention transfer.

    Attributes:
        steps: Optimizer steps that were taken.
        tokens: Real tokens that this process has seen, evaluations included.
        seconds: Wall-clock time.
        losses: The loss of each step, averaged over layers.
        evaluations: `(step, loss)` of each evaluation on the validation batches.
        best_step: The step whose parameters the model has now; None without validation batches: the last one.
    """

    steps: int
    tokens: int
    seconds: float
    losses: list[float]
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None


def transfer_attention(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    steps: int = 200,
    lr: float | None = None,
    loss: str = "auto",
    validation: Iterable[Batch] | None = None,
    evaluate_every: int = 25,
    progress: ProgressFunction | None = None,
) -> TransferResult:
    """Train the learned parts of a patched model, in place, to mimic exact attention. Nothing else changes.

    This is the short form for a few batches in memory. `AttentionTransferTrainer` minimises the same losses in the same
    way on a data set, with checkpoints, trackers, sharding and early stopping.

    The loss of a layer, averaged over heads and real tokens, is one of:

    - weights: `KL(p_i ‖ w_i)` between exact and implied attention weights of each query (Zhang et al. 2024,
      arXiv:2402.04347). Of rows of more than 64 tokens each step draws 64 queries, in one or two runs, anew in every
      layer: in expectation this is the loss of all queries, at a fraction of its cost;
    - outputs: `Σ ‖o_i - ô_i‖² / Σ ‖o_i‖²`, of as many queries for `gla` and `rfa`, of all for others.

    For weights, a hybrid adds the loss of its linear branch by itself, over the keys outside the window; otherwise the
    window would do all the work. In a distributed run every process passes its own batches, and gradients are averaged.

    Args:
        model: A patched model. Its learned parts are trained in float32.
        batches: What the tokenizer returns, as dicts of tensors `[B, L]`; repeated as often as needed. Those without
            an input beyond what the mechanism attends to exactly are left out; without any other there are no steps,
            and a warning.
        steps: Optimizer steps of AdamW without decay. The learning rate rises for a tenth of them, and then falls as a
            cosine to a tenth of its peak.
        lr: Peak learning rate; None for what suits each mechanism (1e-2 for feature maps, 1e-3 for projections).
        loss: `"weights"`, `"outputs"` or `"auto"`: outputs for `gla` and for `window` in decoders, weights for others
            whose weights are a distribution and known for some of the queries, outputs otherwise.
        validation: Batches to evaluate on before the first step and after every `evaluate_every` steps. The parameters
            of the best evaluation remain.
        evaluate_every: Steps between two evaluations.
        progress: Called as `progress(step, steps, loss)` after each step.

    Returns:
        The losses and the step whose parameters remain.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, or a batch is no dict.
        ValueError: The model is not patched or has nothing to learn, there are no batches, or an option is invalid.
        FloatingPointError: The loss became infinite or NaN. The parameters are restored.
    """
    options = SimpleNamespace(steps=steps, lr=lr, evaluate_every=evaluate_every, loss=loss)
    check_positive("", options, "steps", "lr", "evaluate_every")
    check_attention_loss("", options)
    objective = AttentionTransferLoss(model, loss)
    # In several processes each has batches of its own, and all must take the same steps.
    beyond = 0 if torch.distributed.is_initialized() else exact_length(model)
    source = _repeat(batches, beyond)
    first = next(source, None)
    if first is None:
        reason = f"All inputs have at most {beyond} tokens, which the mechanism attends to exactly"
        remedy = "Pass longer inputs, or narrow what is exact."
        warnings.warn(f"{reason}: attention transfer is skipped. {remedy}", stacklevel=2)
        return TransferResult(0, 0, 0.0, [])
    source = itertools.chain([first], source)
    held_out = [batch for batch in validation or () if longest_row(batch) > beyond]
    parameters = objective.parameters
    optimizer, schedule = objective.optimizer(lr, steps)
    losses: list[float] = []
    evaluations: list[tuple[int, float]] = []
    best: tuple[float, int, list[Tensor]] | None = None
    started = time.perf_counter()
    with objective.training():
        for step in range(steps + 1):
            if step:
                optimizer.zero_grad()
                layers = objective(next(source), step)
                losses.append(float(layers.mean()))
                check_finite_loss(losses[-1], step, float(schedule.base_lrs[0]), "Lower lr")
                average_gradients(parameters)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0 * len(layers))
                optimizer.step()
                schedule.step()
                if progress is not None:
                    progress(step, steps, losses[-1])
            if held_out and (step % evaluate_every == 0 or step == steps):
                total = torch.stack([objective(batch).mean() for batch in held_out]).mean()
                score = float(_average(total))
                evaluations.append((step, score))
                if best is None or score < best[0]:
                    best = (score, step, [parameter.detach().clone() for parameter in parameters])
        for parameter, value in zip(parameters, best[2] if best else parameters, strict=True):
            parameter.data.copy_(value.data)
    seconds = time.perf_counter() - started
    return TransferResult(steps, objective.tokens, seconds, losses, evaluations, best[1] if best else None)


class AttentionTransferLoss:
    """The losses of all layers of a patched model, from one forward pass with exact attention.

    A model that is sharded must be called as a whole (`whole_model`), with its head. `tokens` counts the real tokens
    seen so far.

    Raises:
        ValueError: The model is not patched, or none of its mechanisms has anything to learn.
    """

    def __init__(self, model: PreTrainedModel, kind: str = "auto", whole_model: bool = False) -> None:
        check_patched(model)
        mechanisms: list[Any] = [module.linear_attention for module in attention_modules(model)]
        #: The mechanisms with learned parts.
        self.learned = [mechanism for mechanism in mechanisms if list(mechanism.parameters())]
        if not self.learned:
            raise ValueError("None of the patched layers has anything to learn (list_attentions() tells which have).")
        self.model = model
        self.kind = kind
        self.tokens = 0
        # The head and its logits over a vocabulary are of no use here.
        self.backbone = model if whole_model or model.config.is_encoder_decoder else model.base_model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The learned parts; one that several layers share is listed once."""
        return [parameter for module in self.learned for parameter in _own_parameters(module)]

    def optimizer(self, lr: float | None, steps: int) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """Return optimizer and schedule: a group of parameters per layer, with `lr` or the mechanism's own rate."""
        groups = [
            {"params": parameters, "lr": lr or module.transfer_lr, "weight_decay": 0.0}
            for module in self.learned
            if (parameters := _own_parameters(module))
        ]
        optimizer = torch.optim.AdamW(groups)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: transfer_lr_factor(step, steps))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager in which only the learned parts require gradients, in float32, and dropout is off.

        Types, flags and the mode of the model are restored at the end, the parameters after a FloatingPointError.
        """
        model, parameters = self.model, self.parameters
        dtypes = [parameter.dtype for parameter in parameters]
        initial = [parameter.detach().clone() for parameter in parameters]
        required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        try:
            model.requires_grad_(False)
            for module in self.learned:
                module.float().requires_grad_(True)
            with evaluation_mode(model):
                yield
        except FloatingPointError:
            for parameter, value in zip(self.parameters, initial, strict=True):
                parameter.data.copy_(value)
            raise
        finally:
            reshard(model)
            for parameter, dtype in zip(self.parameters, dtypes, strict=True):
                parameter.grad, parameter.data = None, parameter.data.to(dtype)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(required[name])

    def __call__(self, batch: Batch, step: int | None = None) -> Tensor:
        """Return the loss of each layer, `[layers]`, and with a step (from 1) add gradients to the learned parts.

        What the model does not take of the batch, such as labels for a backbone, is left out.
        """
        losses: list[Tensor] = []
        inputs = model_inputs(self.backbone, batch)

        def observe(call: AttentionCall) -> None:
            # Every step draws other queries in each layer. An evaluation draws the same ones every time.
            seed = (step or 0) * MAX_LAYERS + len(losses)
            training = step is not None
            with torch.autocast(call.query.device.type, enabled=False):  # half precision is for the model
                losses.append(layer_loss(call, self.kind, backward=training, seed=seed))

        with observe_attention(self.model, observe), torch.no_grad():
            self.backbone(**inputs)
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else int(next(iter(inputs.values())).shape[:2].numel())
        return torch.stack(losses)


def transfer_lr_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate in a step, from 0: a warm-up of a tenth, then a cosine to 0.1."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def _average(tensor: Tensor) -> Tensor:
    """Average a tensor over the processes of a distributed run, in place."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(tensor)
        tensor /= torch.distributed.get_world_size()
    return tensor


def average_gradients(parameters: Iterable[nn.Parameter], batches: int = 1) -> None:
    """Average the gradients of replicated parameters over accumulated batches and over processes, in place."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _average(parameter.grad)
        parameter.grad /= batches


def _own_parameters(module: Any) -> list[nn.Parameter]:
    """Return the parameters of a mechanism without those that it shares with an earlier layer, which trains them."""
    return [parameter for name, parameter in module.named_parameters() if name not in module.tied_parameters]


def exact_length(model: nn.Module) -> int:
    """Return the longest input in tokens that every learned mechanism attends to exactly; 0 where one never does."""
    modules = [module for module in model.modules() if isinstance(module, LinearAttention)]
    learned = [module for module in modules if any(True for _ in module.parameters())]
    return min((module.exact_length for module in learned or modules), default=0)


def longest_row(batch: Batch) -> int:
    """Return the tokens of the longest input of a batch."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int(mask.sum(1).max())
    return max(value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1)


def _repeat(batches: Iterable[Batch], beyond: int) -> Iterator[Batch]:
    """Yield the batches with an input of more than `beyond` tokens, again and again; nothing if there is none."""
    while True:
        count = useful = 0
        for batch in batches:
            count += 1
            if not isinstance(batch, Mapping):
                raise TypeError(f"batches must be dicts of tensors, got a {type(batch).__name__}.")
            if longest_row(batch) > beyond:
                useful += 1
                yield batch
        if not count:
            raise ValueError("batches ran out. Pass a list or a DataLoader, which can be repeated.")
        if not useful:
            return


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
        self._shards: bool = self._is_sharded()
        self.objective: AttentionTransferLoss = AttentionTransferLoss(self.model, config.loss, whole_model=self._shards)
        # From here on the trainer sees to the shards itself.
        self.is_fsdp_enabled = self.is_deepspeed_enabled = False
        self._best_parameters: dict[str, Tensor] = {}
        if self.eval_dataset is not None and config.eval_strategy == "no":
            raise ValueError("There is an eval_dataset, and eval_strategy is 'no'. Set eval_strategy='steps'.")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `FinetuningTrainer.train` does. After a FloatingPointError the parameters are restored."""
        self._best_parameters = {}
        # A resumed run has the evaluation of its start in the checkpoint.
        self.args.eval_on_start = self.args.eval_strategy != "no" and not resume_from_checkpoint
        with self.objective.training():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self.model.load_state_dict(self._best_parameters, strict=False)
        return output

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._shards and self._skeleton is None:
            self._skeleton = meta_copy(self.model)
        self.model = shard_frozen_model(self.accelerator, self.model)
        self.model_wrapped = self.model
        self.optimizer, self.lr_scheduler = self.objective.optimizer(self.args.learning_rate, max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of one batch to those of the learned parts. Returns the loss, averaged over layers."""
        step = self.state.global_step + 1
        with self.autocast_smart_context_manager():
            losses = self.objective(self._prepare_inputs(inputs), step)
        loss = losses.mean() / self.current_gradient_accumulation_steps
        assert self.lr_scheduler is not None
        check_finite_loss(float(loss), step, float(self.lr_scheduler.base_lrs[0]), "Lower learning_rate")
        if self.accelerator.sync_gradients:
            average_gradients(self.objective.parameters, self.current_gradient_accumulation_steps)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        largest = self.args.max_grad_norm * len(self.objective.learned)
        return torch.nn.utils.clip_grad_norm_(self.objective.parameters, largest)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        gradients = [parameter.grad for parameter in self.objective.parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if grad_norm is None else grad_norm

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch, averaged over layers."""
        with self.autocast_smart_context_manager():
            return self.objective(self._prepare_inputs(inputs)).mean(), None, None

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super()._evaluate(*args, **kwargs)
        state, loss = self.state, metrics["eval_loss"]
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric, state.best_global_step = loss, state.global_step
            self._best_parameters = {name: value.clone() for name, value in self.learned_state_dict().items()}
        patience, since = self.args.patience, state.global_step - (state.best_global_step or 0)
        if patience is not None and since >= patience * state.eval_steps:
            self.control.should_training_stop = True
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return self.state.best_global_step == self.state.global_step or self.control.should_save

    def learned_state_dict(self) -> dict[str, Tensor]:
        """Return the learned parts by the names of their parameters."""
        learned = {id(parameter) for parameter in self.objective.parameters}
        return {name: value.detach() for name, value in self.model.named_parameters() if id(value) in learned}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; in a checkpoint, the learned parts and their best values so far."""
        if not _internal_call:
            super().save_model(output_dir)
        elif self.args.should_save:
            folder = Path(str(output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            best = {BEST_PREFIX + name: value for name, value in self._best_parameters.items()}
            tensors = {name: value.cpu().contiguous() for name, value in (self.learned_state_dict() | best).items()}
            save_file(tensors, str(folder / LEARNED_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        tensors = load_file(str(Path(resume_from_checkpoint) / LEARNED_FILE))
        best = [name for name in tensors if name.startswith(BEST_PREFIX)]
        self._best_parameters = {name.removeprefix(BEST_PREFIX): tensors.pop(name) for name in best}
        self.model.load_state_dict(tensors, strict=False)
