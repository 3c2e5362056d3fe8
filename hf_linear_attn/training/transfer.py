"""Attention transfer: each layer's learned parts are trained to mimic the exact attention that they replace.

The model runs with exact attention, so every layer sees the hidden states of the pretrained model, and one forward pass
gives the losses of all layers. The exact and the linear form share q, k and v: no second model is in memory.
"""

import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator, skip_first_batches
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ..data.task_data import IGNORED
from ..integration.context import attention_modules
from ..integration.exact import AttentionCall, observe_attention
from ..integration.models import check_patched
from ..mechanisms.base import LinearAttention
from ..utils.files import atomic_write
from ..utils.models import Batch, frozen, model_inputs, refuse_single_batch
from ..utils.options import check_options, option
from .calibration import calibrate_untrained
from .losses import layer_loss
from .options import AttentionLoss
from .resumable import InterruptedRunError, SignalWatch
from .sharding import autocast, reshard, shard_frozen_model, shards_models

ProgressFunction = Callable[[int, int, float], None]
LogFunction = Callable[[dict[str, float]], None]


@runtime_checkable
class HasEpoch(Protocol):
    """A loader, sampler or collator of data whose order or randomness depends on the epoch."""

    def set_epoch(self, epoch: int) -> None: ...


#: More layers than any model has: the seeds of the layers of one step lie this far from those of the next one.
MAX_LAYERS = 10_000


@dataclass
class TransferResult:
    """The course of an attention transfer.

    Attributes:
        steps: Optimizer steps that were taken; fewer than asked for where `patience` ended the run.
        tokens: Real tokens that this process has seen, evaluations included.
        seconds: Wall-clock time.
        losses: The loss of each step, averaged over layers.
        evaluations: `(step, loss)` of each evaluation on the validation batches.
        best_step: The step whose parameters the model has now; None without validation batches: the last one.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None

    def __repr__(self) -> str:
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
        lines = [f"attention transfer: {self.steps} steps, {self.tokens:,} tokens, {self.seconds:.1f} s{rate}"]
        lines += [f"{name:<34}  {value}" for name, value in self._rows()]  # the longest name has 34 characters
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in self._rows())
        return f"<table><caption>{repr(self).splitlines()[0]}</caption>{rows}</table>"

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.losses:
            rows.append(("training loss, first and last step", f"{self.losses[0]:.4g} → {self.losses[-1]:.4g}"))
        if self.evaluations:
            _, first = self.evaluations[0]
            best = dict(self.evaluations)[self.best_step or 0]
            rows.append(("validation loss, before and best", f"{first:.4g} → {best:.4g} (step {self.best_step})"))
        return rows


def transfer_attention(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    max_steps: int = 200,
    learning_rate: float | None = None,
    loss: AttentionLoss = "auto",
    validation: Iterable[Batch] | None = None,
    eval_steps: int = 25,
    patience: int | None = None,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float = 1.0,
    checkpoint: str | Path | None = None,
    save_steps: int = 0,
    accelerator: Accelerator | None = None,
    progress: ProgressFunction | None = None,
    log: LogFunction | None = None,
) -> TransferResult:
    """Train the learned parts of a patched model, in place, to mimic exact attention. Nothing else changes.

    Mechanisms that have learned nothing yet begin from what `calibrate` finds on the first of the batches.

    The loss of a layer, averaged over heads and real tokens, is one of:

    - weights: `KL(p_i ‖ w_i)` between exact and implied attention weights of each query (Zhang et al. 2024,
      arXiv:2402.04347). Of rows of more than 64 tokens each step draws 64 queries (32 of up to 512), anew in every
      layer: in expectation this is the loss of all queries, at a fraction of its cost;
    - outputs: `Σ ‖o_i - ô_i‖² / Σ ‖o_i‖²`, of as many queries for `gla` and `rfa`, of all for others.

    For weights, a hybrid adds the loss of its linear branch by itself, over the keys outside the window.

    In a distributed run every process passes its own batches, and gradients are averaged. The losses are differentiated
    inside the model's forward pass, one block of queries after another, which bounds their memory. Wrappers that reduce
    gradients in a backward pass of the whole model have no part in that: the learned parts, a small share of the
    weights, are replicated. Where the accelerator is configured for FSDP2 or ZeRO-3, all other parameters are sharded,
    in place; the model must then be called as a whole.

    Args:
        model: A patched model. Its learned parts are trained in float32. If it has none, there are no steps.
        batches: What the model is called with, as a tokenizer or a collator makes it: dicts of tensors `[B, L]`;
            repeated as often as needed. Those without an input beyond what the mechanism attends to exactly are left
            out; without any other there are no steps, and a warning. A loader that has a `set_epoch`, or whose sampler
            or collator has one, is told the epoch.
        max_steps: Optimizer steps of AdamW without decay. The learning rate rises for a tenth of them, and then falls
            as a cosine to a tenth of its peak.
        learning_rate: Its peak; None for what suits each mechanism (1e-2 for feature maps, 1e-3 for projections).
        loss: `"weights"`, `"outputs"` or `"auto"`: outputs for `gla` and for `window` in decoders, weights for others
            whose weights are a distribution and known for some of the queries, outputs otherwise.
        validation: Batches to evaluate on before the first step and after every `eval_steps` steps. The parameters
            of the best evaluation remain, those of the start if nothing was better. The loss is the mean over batches,
            weighted by their real tokens.
        eval_steps: Steps between two evaluations.
        patience: End after so many evaluations in a row without a better one; None: never.
        gradient_accumulation_steps: Batches of one step. Each weighs the same, whatever its tokens; so do those of the
            processes of a distributed run.
        max_grad_norm: Largest norm of the gradient of all layers together, divided by their number; 0: no limit.
        checkpoint: A file that holds the state of the run, written by the first process. If it exists, the run goes on
            from there, and ends on a CPU with the same bits as an undisturbed one, given the same batches and number of
            threads. SIGINT and SIGTERM write it and raise an `InterruptedRunError`.
        save_steps: Steps between two writings of the checkpoint; 0: only when interrupted, and at the end.
        accelerator: Says on which device and in which mixed precision to train, and what to shard. None: the model
            stays where it is.
        progress: Called as `progress(step, steps, loss)` after each step.
        log: Called with the `step` and `loss`, `grad_norm`, `learning_rate` of each step, and with the `step` and
            `eval_loss` of each evaluation. The `grad_norm` is that of all layers together, before it is limited.

    Returns:
        The losses and the step whose parameters remain.

    Raises:
        TypeError: `model` is no `PreTrainedModel`, a batch is no dict, or `batches` can be read once only.
        ValueError: The model is not patched, there are no batches, an option is invalid, or the checkpoint was written
            with other options.
        InterruptedRunError: A signal; the checkpoint has been written.
        FloatingPointError: The loss became infinite or NaN. The parameters are restored.
    """
    options = _LoopOptions(
        max_steps, learning_rate, loss, eval_steps, patience, gradient_accumulation_steps, max_grad_norm, save_steps
    )
    for name, value in (("batches", batches), ("validation", validation)):
        refuse_single_batch(value, name)
    if isinstance(batches, Iterator):
        remedy = "Pass a list, a DataLoader, or another iterable that begins anew each time."
        raise TypeError(f"batches is a {type(batches).__name__}, which can be read once only. {remedy}")
    check_patched(model)
    if not any(map(_has_parameters, _mechanisms(model))):
        return TransferResult()
    objective = AttentionTransferLoss(model, loss, whole_model=accelerator is not None and shards_models(accelerator))
    # In several processes each has batches of its own, and all must take the same steps.
    beyond = 0 if torch.distributed.is_initialized() else exact_length(model)
    stream = _Stream(batches, beyond)
    if stream.is_empty():
        reason = f"All inputs have at most {beyond} tokens, which the mechanism attends to exactly"
        remedy = "Pass longer inputs, or narrow what is exact."
        warnings.warn(f"{reason}: attention transfer is skipped. {remedy}", stacklevel=2)
        return TransferResult()
    if accelerator is not None:
        model = shard_frozen_model(accelerator, model)
    long_validation = [batch for batch in validation or () if longest_row(batch) > beyond]
    if checkpoint is None or not Path(checkpoint).is_file():
        calibrate_untrained(model, (batch for batch in batches if longest_row(batch) > beyond))
    with objective.training():
        run = _Run(objective, stream, long_validation, options, accelerator, progress, log)
        return run.train(None if checkpoint is None else Path(checkpoint))


@dataclass(frozen=True)
class _LoopOptions:
    """Arguments of `transfer_attention`."""

    max_steps: int = option(least=1)
    learning_rate: float | None = option(above=0)
    loss: AttentionLoss = option()
    eval_steps: int = option(least=1)
    patience: int | None = option(least=1)
    gradient_accumulation_steps: int = option(least=1)
    max_grad_norm: float = option(least=0)
    save_steps: int = option(least=0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
class _Run:
    """The loop of an attention transfer."""

    objective: "AttentionTransferLoss"
    stream: "_Stream"
    validation: list[Batch]
    options: _LoopOptions
    accelerator: Accelerator | None
    progress: ProgressFunction | None
    log: LogFunction | None

    def __post_init__(self) -> None:
        self.parameters = self.objective.parameters
        self.optimizer = self.objective.optimizer(self.options.learning_rate)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.result = TransferResult()
        self.best = list[Tensor]()
        distributed = torch.distributed.is_initialized()
        self.is_main_process = not distributed or torch.distributed.get_rank() == 0
        #: What a run must have in common with the one that it goes on with.
        self.conditions = {
            **{name: value for name, value in vars(self.options).items() if name != "save_steps"},
            "processes": torch.distributed.get_world_size() if distributed else 1,
            "shapes": [list(parameter.shape) for parameter in self.parameters],
        }

    def train(self, checkpoint: Path | None) -> TransferResult:
        """Train to the end, from the checkpoint if there is one, and leave the best parameters in the model."""
        steps = self.options.max_steps
        result = self.result
        watch = SignalWatch()
        if checkpoint is not None and checkpoint.is_file():
            self._load(checkpoint)
        elif self.validation:
            self._evaluate()
        started, before = time.perf_counter(), result.seconds
        if checkpoint is not None:
            watch.start()
        try:
            while result.steps < steps and not self._is_out_of_patience():
                self._step()
                if self.validation and (result.steps % self.options.eval_steps == 0 or result.steps == steps):
                    self._evaluate()
                result.seconds = before + time.perf_counter() - started
                if checkpoint is not None:
                    self._save_if_due(checkpoint, watch)
        finally:
            watch.stop()
        for parameter, value in zip(self.parameters, self.best or self.parameters, strict=True):
            parameter.data.copy_(value.data)
        return result

    def _step(self) -> None:
        result, options = self.result, self.options
        factor = transfer_lr_factor(result.steps, options.max_steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        result.steps += 1
        self.optimizer.zero_grad()
        batches = itertools.islice(self.stream, options.gradient_accumulation_steps)
        losses = torch.stack([self._loss(batch, result.steps) for batch in batches])
        value = float(losses.mean())
        check_finite_loss(value, result.steps, self.rates[0], "Lower learning_rate")
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _average(parameter.grad)
            parameter.grad /= len(losses)
        largest = options.max_grad_norm * losses.shape[1] or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, largest)
        self.optimizer.step()
        result.losses.append(value)
        if self.progress is not None:
            self.progress(result.steps, options.max_steps, value)
        self._log(loss=value, grad_norm=float(norm), learning_rate=factor * self.rates[0])

    def _loss(self, batch: Batch, step: int | None = None) -> Tensor:
        with autocast(self.accelerator):
            losses = self.objective(batch, step)
        self.result.tokens += self.objective.tokens
        return losses

    def _evaluate(self) -> None:
        """Evaluate on the validation batches, each by its tokens; keep the parameters if they are the best so far."""
        result = self.result
        total = torch.zeros(2, dtype=torch.float64, device=self.parameters[0].device)
        for batch in self.validation:
            loss = self._loss(batch).double().mean()
            total += torch.stack([loss, torch.ones_like(loss)]) * self.objective.tokens
        summed, count = _average(total).tolist()
        score = summed / count
        remedy = "Look for NaN in validation and weights, or lower learning_rate"
        check_finite_loss(score, result.steps, self.rates[0], remedy)
        if result.best_step is None or score < dict(result.evaluations)[result.best_step]:
            result.best_step = result.steps
            self.best = [parameter.detach().clone() for parameter in self.parameters]
        result.evaluations.append((result.steps, score))
        self._log(eval_loss=score)

    def _log(self, **values: float) -> None:
        if self.log is not None:
            self.log({"step": self.result.steps, **values})

    def _is_out_of_patience(self) -> bool:
        patience = self.options.patience
        best = self.result.best_step or 0
        return patience is not None and sum(step > best for step, _ in self.result.evaluations) >= patience

    def _save_if_due(self, checkpoint: Path, watch: SignalWatch) -> None:
        step = self.result.steps
        steps = self.options.max_steps
        every = self.options.save_steps
        number = watch.received_anywhere(self.parameters[0].device)
        ends = step == steps or self._is_out_of_patience()
        if number is not None or ends or (every and step % every == 0):
            self._save(checkpoint)
        if number is not None:
            where = f"after step {step} of {steps}; a checkpoint is in {str(checkpoint)!r}"
            raise InterruptedRunError(where, "Call it again with the same arguments to go on.", number)

    def _save(self, checkpoint: Path) -> None:
        if self.is_main_process:
            tensors: dict[str, Tensor] = {}
            for index, moments in self.optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
            for kind, parameters in (("learned", self.parameters), ("best", self.best)):
                tensors |= {f"{kind}.{index}": value.detach() for index, value in enumerate(parameters)}
            state = {**vars(self.result), "epoch": self.stream.epoch, "index": self.stream.index}
            state["step"] = state.pop("steps")
            texts = {"conditions": json.dumps(self.conditions), "state": json.dumps(state)}
            contiguous = {name: value.cpu().contiguous() for name, value in tensors.items()}
            atomic_write(checkpoint, save(contiguous, metadata=texts))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()

    def _load(self, checkpoint: Path) -> None:
        with safe_open(checkpoint, "pt", device=str(self.parameters[0].device)) as file:
            texts = {name: json.loads(text) for name, text in file.metadata().items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        before = texts["conditions"]
        changed = [name for name, value in self.conditions.items() if before.get(name) != value]
        if changed:
            changes = "; ".join(f"{name} was {before.get(name)!r}, now {self.conditions[name]!r}" for name in changed)
            remedy = "Use the same options, or another file."
            raise ValueError(f"checkpoint {str(checkpoint)!r} is of a run with other options ({changes}). {remedy}")
        state = texts["state"]
        self.stream.seek(state.pop("epoch"), state.pop("index"))
        state["evaluations"] = [(step, score) for step, score in state["evaluations"]]  # JSON has no tuples
        vars(self.result).update(state, steps=state.pop("step"))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, index, *rest = name.split(".")
            if kind == "optimizer":
                moments.setdefault(int(index), {})[rest[0]] = value
            elif kind == "learned":
                self.parameters[int(index)].data.copy_(value)
        self.best = [tensors[f"best.{index}"] for index in range(len(self.parameters)) if "best.0" in tensors]
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})


class AttentionTransferLoss:
    """The losses of all layers of a patched model, from one forward pass with exact attention.

    A model that is sharded must be called as a whole (`whole_model`), with its head. `tokens` are the real tokens of
    the last batch.

    Raises:
        ValueError: The model is not patched, or none of its mechanisms has anything to learn.
    """

    def __init__(self, model: PreTrainedModel, kind: str = "auto", whole_model: bool = False) -> None:
        check_patched(model)
        #: The mechanisms with learned parts.
        self.learned = list(filter(_has_parameters, _mechanisms(model)))
        if not self.learned:
            raise ValueError("None of the patched layers has anything to learn (list_attentions() says which have).")
        self.model = model
        self.kind = kind
        self.tokens = 0
        # The head and its logits over a vocabulary are of no use here.
        self.backbone = model if whole_model or model.config.is_encoder_decoder else model.base_model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The learned parts; one that several layers share is listed once."""
        return list(itertools.chain.from_iterable(map(_own_parameters, self.learned)))

    def optimizer(self, lr: float | None) -> torch.optim.AdamW:
        """Return the optimizer: a group of parameters per layer, with `lr` or the mechanism's own rate."""
        groups = [
            {"params": parameters, "lr": lr or module.transfer_lr, "weight_decay": 0.0}
            for module in self.learned
            if (parameters := _own_parameters(module))
        ]
        return torch.optim.AdamW(groups)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager in which only the learned parts require gradients, in float32, and dropout is off.

        Types, flags and the mode of the model are restored at the end, the parameters after a FloatingPointError.
        """
        initial = [parameter.detach().clone() for parameter in self.parameters]
        with frozen(self.model):
            try:
                for module in self.learned:
                    module.float().requires_grad_(True)
                yield
            except FloatingPointError:
                for parameter, value in zip(self.parameters, initial, strict=True):
                    parameter.data.copy_(value)
                raise
            finally:
                reshard(self.model)
                for parameter, value in zip(self.parameters, initial, strict=True):
                    parameter.grad = None
                    parameter.data = parameter.data.to(value.dtype)

    def __call__(self, batch: Batch, step: int | None = None) -> Tensor:
        """Return the loss of each layer, `[layers]`, and with a step (from 1) add gradients to the learned parts.

        What the model does not take of the batch, such as labels for a backbone, is left out.
        """
        losses: list[Tensor] = []
        inputs = model_inputs(self.backbone, batch)

        def observe(call: AttentionCall) -> None:
            # Every step draws other queries in each layer. An evaluation draws the same ones every time.
            seed = (step or 0) * MAX_LAYERS + len(losses)
            if not losses:
                self.tokens = int(call.real_queries()[:, 0].sum())
            with torch.autocast(call.query.device.type, enabled=False):  # half precision is for the model
                losses.append(layer_loss(call, self.kind, backward=step is not None, seed=seed))

        with observe_attention(self.model, observe), torch.no_grad():
            self.backbone(**inputs)
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


def _own_parameters(module: Any) -> list[nn.Parameter]:
    """Return the parameters of a mechanism without those that it shares with an earlier layer, which trains them."""
    return [parameter for name, parameter in module.named_parameters() if name not in module.tied_parameters]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _mechanisms(model: nn.Module) -> list[Any]:
    return [module.linear_attention for module in attention_modules(model)]


def check_finite_loss(value: float, step: int, lr: float, remedy: str) -> None:
    """Raise a FloatingPointError that names the learning rate if the loss of a step is infinite or NaN."""
    if not math.isfinite(value):
        raise FloatingPointError(f"The loss became {value} at step {step}. {remedy} (now {lr:g}).")


def exact_length(model: nn.Module) -> int:
    """Return the longest input in tokens that every learned mechanism attends to exactly; 0 where one never does."""
    modules = [module for module in model.modules() if isinstance(module, LinearAttention)]
    learned = list(filter(_has_parameters, modules))
    return min((module.exact_length for module in learned or modules), default=0)


def longest_row(batch: Batch) -> int:
    """Return the tokens of the longest row of a batch, of the encoder or the decoder; `sys.maxsize` for images, whose
    tokens only the model knows."""
    decoded = batch.get("decoder_input_ids", batch.get("labels"))
    mask = batch.get("attention_mask")
    is_sequence = isinstance(decoded, Tensor) and decoded.dim() == 2 and not decoded.is_floating_point()
    # Labels of a model that is a decoder only are no longer than its inputs.
    least = int((decoded != IGNORED).sum(1).max()) if is_sequence else 0
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return max(int(mask.sum(1).max()), least)
    rows = batch.get("input_ids", batch.get("inputs_embeds"))
    return sys.maxsize if rows is None else max(int(rows.shape[1]), least)


class _Stream(Iterator[Batch]):
    """The batches with an input of more than `beyond` tokens, again and again; nothing if there is none."""

    def __init__(self, batches: Iterable[Batch], beyond: int) -> None:
        self.batches, self.beyond = batches, beyond
        self._items = self._repeat(0, 0)
        #: How often the batches have been repeated, and how many of them have been read since.
        self.epoch = self.index = 0

    def is_empty(self) -> bool:
        """Whether there is no batch. The first one is not lost."""
        first = list(itertools.islice(self._items, 1))
        self._items = itertools.chain(first, self._items)
        return not first

    def seek(self, epoch: int, index: int) -> None:
        """Go on after so many repetitions and batches."""
        self._items = self._repeat(epoch, index)

    def __next__(self) -> Batch:
        return next(self._items)

    def _repeat(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            parts: list[Any] = [self.batches]
            if isinstance(self.batches, DataLoader):
                parts += [self.batches.sampler, self.batches.collate_fn]
            for part in parts:
                if isinstance(part, HasEpoch):
                    part.set_epoch(epoch)
            count, useful = start, start
            for batch in self._skip(start):
                count += 1
                if not isinstance(batch, Mapping):
                    raise TypeError(f"batches must be dicts of tensors, got a {type(batch).__name__}.")
                if longest_row(batch) > self.beyond:
                    useful += 1
                    self.epoch, self.index = epoch, count
                    yield batch
            if not count:
                raise ValueError("There are no batches to train on.")
            if not useful:
                return
            epoch, start = epoch + 1, 0

    def _skip(self, count: int) -> Iterable[Batch]:
        if count and isinstance(self.batches, DataLoader):
            return skip_first_batches(self.batches, count)  # does not make the batches that it skips
        return itertools.islice(self.batches, count, None)
