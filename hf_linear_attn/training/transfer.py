"""Attention transfer: each layer's learned parts are trained to mimic the exact attention that they replace.

The model runs with exact attention, so every layer sees the hidden states of the pretrained model; one forward pass
gives the losses of all layers. q, k, v are shared by the exact and the linear form: no second model is in memory.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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

#: Entries of one block of weights `[rows, H, queries, S]`. A block is differentiated before the next one is computed:
#: this bounds the memory of the losses on weights, whatever the batch, the length and the number of layers.
BLOCK_ENTRIES = 2**24


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
    branch_first: float = 0.0,
    window_dropout: float = 0.0,
    progress: Progress | None = None,
) -> TransferResult:
    """Train the learned parts of a patched model, in place, to mimic exact attention. Nothing else changes.

    Losses per layer, averaged over heads and real tokens:
        weights: `KL(p_i ‖ w_i)` between exact and implied attention weights of each query (Hedgehog's loss)
        outputs: `‖o_i - ô_i‖² / mean ‖o‖²`
    A hybrid adds the loss of its linear branch by itself (over the keys outside the window): else the window would do
    all the work. With `branch_first` that branch is trained alone at the beginning, with `window_dropout` in some later
    steps (LoLCATs' two phases); beside the joint loss neither helped where it was measured. `loss="auto"` takes
    weights where the mechanism's weights are a distribution and the input has at most `MAX_WEIGHTS_LENGTH` tokens,
    outputs otherwise. In a distributed run every process passes its own batches; gradients are averaged.

    Args:
        model: a patched model; its learned parts are found by themselves and trained in float32.
        batches: what the tokenizer gives, as dicts of tensors; a list or a DataLoader is repeated as often as needed.
        steps: optimizer steps (AdamW without decay, one warm-up tenth, then cosine to a tenth).
        lr: peak learning rate (None: what suits each mechanism, 1e-2 for feature maps, 1e-3 for projections).
        held_out: batches to evaluate on before the first step and after every `evaluate_every` steps; the best
            parameters are kept (those of the start where nothing was better), and training stops early after
            `patience` evaluations without a better one.
        branch_first: share of the steps in which a hybrid's linear branch is trained by itself, at the beginning.
        window_dropout: share of the later steps in which it is again.
        progress: called as `progress(step, steps, loss)` after each step.

    Raises:
        TypeError, ValueError: not a patched model, nothing to learn, no batches, bad settings.
        FloatingPointError: the loss became infinite or NaN; the parameters are put back as they were.
    """
    check_model(model)
    _check_settings(steps, lr, loss, evaluate_every, patience)
    _check_shares(branch_first=branch_first, window_dropout=window_dropout)
    modules = _learned(model)
    own = {id(module): _own_parameters(module) for module in modules}
    parameters = [parameter for held in own.values() for parameter in held]
    dtypes = [parameter.dtype for parameter in parameters]
    start_values = [parameter.detach().clone() for parameter in parameters]
    required = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    training = model.training
    source = _repeat(batches)
    kept = None if held_out is None else list(held_out)
    began = time.perf_counter()
    run = _Run(model, loss, _branch_steps(steps, branch_first, window_dropout))
    try:
        model.eval().requires_grad_(False)
        for module in modules:
            module.float().requires_grad_(True)
        groups = [{"params": own[id(module)], "lr": lr or module.transfer_lr} for module in modules if own[id(module)]]
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

    def __init__(self, model: PreTrainedModel, loss: str, branch_steps: frozenset[int]) -> None:
        self.model = model
        # The head (and its logits over a vocabulary) is of no use here.
        self.backbone = model if model.config.is_encoder_decoder else model.base_model
        self.loss = loss
        self.branch_steps = branch_steps
        self.tokens = 0
        self._accepted = set(inspect.signature(self.backbone.forward).parameters)

    def losses(self, batch: Batch, step: int | None = None) -> Tensor:
        """Loss of each layer `[layers]`. In a training step its gradients are added to those of the learned parts."""
        found: list[Tensor] = []
        inputs: dict[str, Any] = {
            name: tensor.to(self.model.device) if isinstance(tensor, Tensor) else tensor
            for name, tensor in batch.items()
            if name in self._accepted
        }
        if "use_cache" in self._accepted:
            inputs["use_cache"] = False

        def observe(call: AttentionCall) -> None:
            found.append(self._layer_loss(call, step))

        with observe_attention(self.model, observe), torch.no_grad():
            self.backbone(**inputs)
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else int(next(iter(inputs.values())).shape[:2].numel())
        return torch.stack(found)

    def _layer_loss(self, call: AttentionCall, step: int | None) -> Tensor:
        weights = self.loss == "weights" or (
            self.loss == "auto" and call.mechanism.distribution and call.key.shape[2] <= MAX_WEIGHTS_LENGTH
        )
        total = torch.zeros((), device=call.query.device)
        if not weights:
            return total + _differentiate(step, lambda: outputs_loss(call))
        queries = call.real_queries()
        count = queries.sum().clamp_min(1)
        branch_only = step in self.branch_steps
        for part, rows in _blocks(call, queries):
            share = rows.sum() / count

            def block_loss(part: AttentionCall = part, rows: Tensor = rows, share: Tensor = share) -> Tensor:
                return share * weights_loss(part, rows, branch_only=branch_only)

            total = total + _differentiate(step, block_loss)
        return total


def _differentiate(step: int | None, loss: Callable[[], Tensor]) -> Tensor:
    """The value of a loss; in a training step its gradients are added up at once, and what they needed is freed."""
    if step is None:
        return loss().detach()
    with torch.enable_grad():
        value = loss()
        value.backward()
    return value.detach()


def _blocks(call: AttentionCall, rows: Tensor) -> Iterator[tuple[AttentionCall, Tensor]]:
    """Parts of a call, with their real queries, whose weights have at most `BLOCK_ENTRIES` entries (or one query)."""
    batch, heads, length, _ = call.query.shape
    keys = call.key.shape[2]
    size = max(1, BLOCK_ENTRIES // (heads * length * keys))
    per_query = call.mechanism.separable_queries(call.causal) and length == keys
    queries = length if not per_query else max(1, min(length, BLOCK_ENTRIES // (heads * keys)))
    for first in range(0, batch, size):
        some = slice(first, first + size)
        part = replace(
            call,
            query=call.query[some],
            key=call.key[some],
            value=call.value[some],
            output=call.output[some],
            padding=None if call.padding is None else call.padding[some],
            allowed=call.allowed if call.allowed.shape[0] == 1 else call.allowed[some],
        )
        for start in range(0, length, queries):
            stop = min(start + queries, length)
            yield _some_queries(part, start, stop), rows[some, :, start:stop]


def _some_queries(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """The call for queries `start` to `stop`; causal ones are then the last of the keys that they see."""
    length = call.query.shape[2]
    if stop - start == length:
        return call
    keys = stop if call.causal else length
    padding = call.padding
    return replace(
        call,
        query=call.query[:, :, start:stop],
        key=call.key[:, :, :keys],
        value=call.value[:, :, :keys],
        output=call.output[:, :, start:stop],
        padding=None if padding is None else padding[:, :keys],
        allowed=call.allowed[:, :, start:stop, :keys],
    )


def weights_loss(call: AttentionCall, rows: Tensor | None = None, *, branch_only: bool = False) -> Tensor:
    """`Σ_j p_ij log(p_ij / w_ij)`, mean over heads and real queries; for hybrids plus that of the linear branch.

    rows `[B, H, L]`: the queries that count (None: those that are real tokens). branch_only: of a hybrid the linear
    branch by itself.
    """
    with torch.no_grad():
        exact = call.exact_weights()
        rows = call.real_queries() if rows is None else rows
    branch = call.mechanism.branch_weights(
        call.query, call.key, scaling=call.scaling, causal=call.causal, mask=call.padding
    )
    if branch is None:
        return _kl(exact, call.linear_weights(), rows)
    inside, outside = branch
    with torch.no_grad():
        target = exact * outside
        mass = target.sum(dim=-1, keepdim=True)
        target = target / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    # Where no key lies outside of the window there is nothing to match: these rows count with a divergence of zero.
    total = _kl(target, inside, rows)
    return total if branch_only else total + _kl(exact, call.linear_weights(), rows)


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
        score = _average(score, parameters[0].device)
        evaluations.append((step, score))
        if best is None or score < best[0]:
            best = (score, step, [parameter.detach().clone() for parameter in parameters])

    if held_out:
        evaluate(0)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        layers = run.losses(next(source), step)
        value = float(layers.mean())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"The transfer loss became {value} at step {step}. Lower lr (now {groups[0]['lr']})."
            )
        _average_gradients(parameters)
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


def _average_gradients(parameters: list[Tensor]) -> None:
    """Of all processes of a distributed run, each with batches of its own."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def _average(value: float, device: torch.device) -> float:
    """The mean over all processes: they must agree on the best step."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    held = torch.tensor(value, device=device, dtype=torch.float32)
    torch.distributed.all_reduce(held)
    return float(held) / torch.distributed.get_world_size()


def _branch_steps(steps: int, first: float, dropout: float) -> frozenset[int]:
    """The steps (from 1) in which a hybrid trains its linear branch by itself."""
    alone = round(first * steps)
    generator = torch.Generator().manual_seed(steps)
    dropped = (torch.rand(steps, generator=generator) < dropout).tolist()
    return frozenset(step for step in range(1, steps + 1) if step <= alone or dropped[step - 1])


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {share!r}.")


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


def _own_parameters(module: Any) -> list[nn.Parameter]:
    """Those that are not another layer's, and trained there."""
    return [parameter for name, parameter in module.named_parameters() if name not in module.tied_parameters]


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
