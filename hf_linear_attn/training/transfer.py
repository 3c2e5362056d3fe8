"""Attention transfer: each layer's learned parts are trained to mimic the exact attention that they replace.

The model runs with exact attention, so every layer sees the hidden states of the pretrained model; one forward pass
gives the losses of all layers. q, k, v are shared by the exact and the linear form: no second model is in memory.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..integration.attention import AttentionCall, attention_modules, observe_attention
from ..patching import check_model, is_patched

Batch = Mapping[str, Tensor]
Progress = Callable[[int, int, float], None]

#: Longest input whose losses on weights (quadratic) are computed; longer ones are matched on outputs.
MAX_WEIGHTS_LENGTH = 1024

LOSSES = ("auto", "weights", "outputs")


@dataclass(frozen=True)
class TransferResult:
    """What a transfer did. losses: mean over layers, one a step; held_out: (step, loss) of each evaluation."""

    steps: int
    tokens: int
    seconds: float
    losses: list[float]
    held_out: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None


def transfer_attention(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    steps: int = 200,
    lr: float | None = None,
    loss: str = "auto",
    held_out: Iterable[Batch] | None = None,
    evaluate_every: int = 25,
    patience: int | None = None,
    progress: Progress | None = None,
) -> TransferResult:
    """Train the learned parts of a patched model, in place, to mimic exact attention. Nothing else changes.

    Losses per layer, averaged over heads and real tokens:
        weights: `KL(p_i ‖ w_i)` between exact and implied attention weights of each query (Hedgehog's loss)
        outputs: `‖o_i - ô_i‖² / mean ‖o‖²`
    A hybrid adds the loss of its linear branch by itself (over the keys outside the window): else the window does all
    the work. `loss="auto"` takes weights where the mechanism's weights are a distribution and the input has at most
    `MAX_WEIGHTS_LENGTH` tokens, outputs otherwise.

    Args:
        model: a patched model; its learned parts are found by themselves and trained in float32.
        batches: what the tokenizer gives, as dicts of tensors; a list or a DataLoader is repeated as often as needed.
        steps: optimizer steps (AdamW without decay, one warm-up tenth, then cosine to a tenth).
        lr: peak learning rate (None: what suits each mechanism, 1e-2 for feature maps, 1e-3 for projections).
        held_out: batches to evaluate on before the first step and after every `evaluate_every` steps; the best
            parameters are kept (those of the start where nothing was better), and training stops early after
            `patience` evaluations without a better one.
        progress: called as `progress(step, steps, loss)` after each step.

    Raises:
        TypeError, ValueError: not a patched model, nothing to learn, no batches, bad settings.
        FloatingPointError: the loss became infinite or NaN; the parameters are put back as they were.
    """
    check_model(model)
    _check_settings(steps, lr, loss, evaluate_every, patience)
    modules = _learned(model)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    dtypes = [parameter.dtype for parameter in parameters]
    start_values = [parameter.detach().clone() for parameter in parameters]
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    training = model.training
    source = _repeat(batches)
    kept = None if held_out is None else list(held_out)
    began = time.perf_counter()
    run = _Run(model, loss)
    try:
        model.eval().requires_grad_(False)
        for module in modules:
            module.float().requires_grad_(True)
        groups = [{"params": list(module.parameters()), "lr": lr or module.transfer_lr} for module in modules]
        result = _optimise(run, groups, source, kept, steps, evaluate_every, patience, progress)
    except FloatingPointError:
        for parameter, value in zip(parameters, start_values, strict=True):
            parameter.data.copy_(value)
        raise
    finally:
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(required[name])
        model.train(training)
    losses, evaluations, best = result
    return TransferResult(len(losses), run.tokens, time.perf_counter() - began, losses, evaluations, best)


class _Run:
    """Runs batches through the backbone and collects the layers' losses."""

    def __init__(self, model: PreTrainedModel, loss: str) -> None:
        self.model = model
        # The head (and its logits over a vocabulary) is of no use here.
        self.backbone = model if model.config.is_encoder_decoder else model.base_model
        self.loss = loss
        self.tokens = 0
        self._accepted = set(inspect.signature(self.backbone.forward).parameters)
        self._losses: list[Tensor] = []

    def losses(self, batch: Batch) -> Tensor:
        """Loss of each layer `[layers]`, with gradients for the learned parts only."""
        self._losses = []
        inputs: dict[str, Any] = {
            name: tensor.to(self.model.device) if isinstance(tensor, Tensor) else tensor
            for name, tensor in batch.items()
            if name in self._accepted
        }
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False
        with observe_attention(self.model, self._observe), torch.no_grad():
            self.backbone(**inputs)
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else int(next(iter(inputs.values())).shape[:2].numel())
        return torch.stack(self._losses)

    def _observe(self, call: AttentionCall) -> None:
        weights = self.loss == "weights" or (
            self.loss == "auto" and call.mechanism.distribution and call.key.shape[2] <= MAX_WEIGHTS_LENGTH
        )
        with torch.enable_grad():
            value = weights_loss(call) if weights else outputs_loss(call)
            self._losses.append(value)


def weights_loss(call: AttentionCall) -> Tensor:
    """`Σ_j p_ij log(p_ij / w_ij)`, mean over heads and real queries; for hybrids plus that of the linear branch."""
    with torch.no_grad():
        exact = call.exact_weights()
        rows = call.real_queries()
    total = _kl(exact, call.linear_weights(), rows)
    branch = call.mechanism.branch_weights(
        call.query, call.key, scaling=call.scaling, causal=call.causal, mask=call.padding
    )
    if branch is not None:
        inside, outside = branch
        with torch.no_grad():
            target = exact * outside
            mass = target.sum(dim=-1, keepdim=True)
            target = target / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        total = total + _kl(target, inside, rows & outside.any(dim=-1).expand_as(mass[..., 0]))
    return total


def outputs_loss(call: AttentionCall) -> Tensor:
    """`‖o - ô‖² / ‖o‖²` over real queries, all heads together."""
    rows = call.real_queries().unsqueeze(-1)
    exact = call.output.detach().float()
    error = (exact - call.linear_output().float()).square().masked_fill(~rows, 0.0).sum()
    return error / exact.square().masked_fill(~rows, 0.0).sum().clamp_min(1e-12)


def _kl(exact: Tensor, linear: Tensor, rows: Tensor) -> Tensor:
    """Mean over `rows [B, H, L]` of the divergence between weights `[B, H, L, S]`."""
    floor = torch.finfo(linear.dtype).tiny
    terms = exact * (exact.clamp_min(floor).log() - linear.clamp_min(1e-12).log())
    per_row = terms.sum(dim=-1).masked_fill(~rows, 0.0)
    return per_row.sum() / rows.sum().clamp_min(1)


def _optimise(
    run: _Run,
    groups: list[dict[str, Any]],
    source: Iterator[Batch],
    held_out: list[Batch] | None,
    steps: int,
    evaluate_every: int,
    patience: int | None,
    progress: Progress | None,
) -> tuple[list[float], list[tuple[int, float]], int | None]:
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, steps))
    losses: list[float] = []
    evaluations: list[tuple[int, float]] = []
    best: tuple[float, int, list[Tensor]] | None = None

    def evaluate(step: int) -> None:
        nonlocal best
        with torch.no_grad():
            score = sum(float(run.losses(batch).mean()) for batch in held_out or ()) / max(len(held_out or ()), 1)
        evaluations.append((step, score))
        if best is None or score < best[0]:
            best = (score, step, [parameter.detach().clone() for parameter in parameters])

    if held_out:
        evaluate(0)
    for step in range(1, steps + 1):
        layers = run.losses(next(source))
        value = float(layers.detach().mean())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"The transfer loss became {value} at step {step}. Lower lr (now {groups[0]['lr']})."
            )
        optimizer.zero_grad()
        layers.sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0 * len(layers))
        optimizer.step()
        schedule.step()
        losses.append(value)
        if progress is not None:
            progress(step, steps, value)
        if held_out and (step % evaluate_every == 0 or step == steps):
            evaluate(step)
            if best is not None and patience is not None and step - best[1] >= patience * evaluate_every:
                break
    if best is None:
        return losses, evaluations, None
    with torch.no_grad():
        for parameter, value_ in zip(parameters, best[2], strict=True):
            parameter.copy_(value_)
    return losses, evaluations, best[1]


def _lr_factor(step: int, steps: int) -> float:
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def _learned(model: PreTrainedModel) -> list[nn.Module]:
    if not is_patched(model):
        raise ValueError(f"This {type(model).__name__} is not patched. Call patch_model(model, name) first.")
    modules: list[Any] = [module.linear_attention for module in attention_modules(model)]
    learned = [module for module in modules if any(True for _ in module.parameters())]
    if not learned:
        raise ValueError(
            "None of the patched layers has anything to learn. Attention transfer is for mechanisms with learned parts "
            "(list_attentions() tells which)."
        )
    return learned


def _repeat(batches: Iterable[Batch]) -> Iterator[Batch]:
    if isinstance(batches, (str, bytes, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of dicts of tensors, got {type(batches).__name__}.")

    def forever() -> Iterator[Batch]:
        while True:
            empty = True
            for batch in batches:
                empty = False
                if not isinstance(batch, Mapping):
                    raise TypeError(f"A batch must be a dict of tensors, got {type(batch).__name__}.")
                yield batch
            if empty:
                raise ValueError("batches ran out. Pass a list or a DataLoader, which can be repeated.")

    return forever()


def _check_settings(steps: int, lr: float | None, loss: str, evaluate_every: int, patience: int | None) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, got {steps!r}.")
    if lr is not None and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr!r}.")
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, LOSSES))}, got {loss!r}.")
    if evaluate_every < 1 or (patience is not None and patience < 1):
        raise ValueError(f"evaluate_every and patience must be positive, got {evaluate_every!r} and {patience!r}.")
