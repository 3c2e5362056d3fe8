"""Losses of fine-tuning, distillation, attention transfer and the choices of heads and parts."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..data.task_data import IGNORED
from ..integration.discovery import predicts_next_tokens
from ..integration.exact import AttentionCall, exact_attention
from ..utils.models import mean_pooling

#: Queries of a row that the loss on weights draws at each step, where a row has more; half as many of rows of up to
#: `SHORT_ROW` tokens. At 1,024 tokens all of them cost 7 to 14 forward passes of a language model of 30 layers, and so
#: many 0.3 (hedgehog) to 0.5 (window) of one.
SAMPLED_QUERIES, SHORT_ROW = 64, 512

#: Length of the runs of neighbouring causal queries that are drawn; bidirectional ones are drawn in one run. Each run
#: computes the features of all its keys again: with runs of 8 a step of all-MiniLM-L6-v2 took twice the time and came
#: as near to exact attention (cosine 0.985 after 60).
RUN_LENGTH = 32

#: Largest number of attention weights `[rows, H, queries, S]` in memory at a time. Each block is differentiated before
#: the next one is computed, so this bounds the memory for any batch size, length and number of layers.
BLOCK_ENTRIES = 2**24

#: Targets whose losses are computed in one piece.
TARGETS = 256


def select_targets(logits: Tensor, labels: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """Return the logits of all targets and their labels.

    Args:
        logits: `[B, C]`, or `[B, L, C]` for one label per token.
        labels: `[B]` or `[B, L]`, with -100 where nothing is to be predicted; or numbers, `[B]` or `[B, C]`.
        shift: Whether token i predicts the label of token i + 1, as in causal language models.

    Returns:
        Logits `[N, C]` and labels `[N]` of the N targets.
    """
    if logits.dim() < 3 and labels.is_floating_point():
        return logits, labels
    if shift and logits.dim() > 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    selected = labels != IGNORED
    return logits[selected], labels[selected]


def count_targets(labels: Tensor, shift: bool) -> Tensor:
    """Return the number of targets of each row of a batch, `[B]`, for labels as in `select_targets`."""
    if labels.is_floating_point():
        return torch.ones(labels.shape[0], dtype=torch.long, device=labels.device)
    if labels.dim() < 2:
        return (labels != IGNORED).long()
    return ((labels[:, 1:] if shift else labels) != IGNORED).sum(1)


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of N targets, summed.

    Args:
        logits: `[N, C]`.
        labels: Classes `[N]` for a cross-entropy; scores `[N]` for the squared error, if C is 1; or zeros and ones
            `[N, C]` in floating point for the binary cross-entropy of several labels, averaged over these.
    """
    if logits.shape[-1] == 1:
        return (logits.float().squeeze(-1) - labels.float().reshape(-1)).square().sum()
    if labels.is_floating_point():
        losses = functional.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        return losses.mean(-1).sum()
    return _summed(_cross_entropy, logits, labels)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def embedding_loss(embeddings: Tensor, expected: Tensor) -> Tensor:
    """Return `Σ (1 - cos(e, e'))` over N embeddings `[N, D]` and those that are expected."""
    return (1 - functional.cosine_similarity(embeddings.float(), expected.float(), dim=-1)).sum()


def row_losses(
    logits: Tensor, labels: Tensor, shift: bool, loss: Callable[[Tensor, Tensor], Tensor] = task_loss
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of a batch, summed over its targets, and the number of these; both `[B]`.

    The loss of an evaluation is their sum over all rows divided by that of the numbers, however the rows are batched
    and padded. The arguments are those of `select_targets`, and the loss of targets, summed.
    """
    counts = count_targets(labels, shift)
    # One row at a time, because the logits in float32 would take twice the memory of those in bfloat16.
    rows = (slice(row, row + 1) for row in range(len(counts)))
    return torch.stack([loss(*select_targets(logits[row], labels[row], shift)) for row in rows]), counts


def logits_loss(student: Tensor, teacher: Tensor, temperature: float, *, several_labels: bool = False) -> Tensor:
    """Return `T² Σ KL(softmax(teacher / T) ‖ softmax(student / T))` over the logits `[N, C]` of N targets.

    The factor T² keeps the size of the gradient independent of the temperature T (Hinton et al. 2015,
    arXiv:1503.02531). Scores (C = 1) have no distribution: their loss is the squared difference. Where a row has
    `several_labels`, each logit z is the distribution sigmoid(z), 1 - sigmoid(z), and the mean over them counts.
    """
    if several_labels:
        count = student.shape[-1]
        student, teacher = (torch.stack([torch.zeros_like(x), x], dim=-1).flatten(0, 1) for x in (student, teacher))
        return logits_loss(student, teacher, temperature) / count
    return _summed(lambda logits, targets: _logits_losses(logits, targets, temperature).sum(), student, teacher)


def _summed(loss: Callable[[Tensor, Tensor], Tensor], student: Tensor, expected: Tensor) -> Tensor:
    """Return a loss that is a sum over targets. What it keeps for gradients is computed again, piece by piece.

    The logits of a language model may be the largest tensors of a step, and a loss makes several of their size.
    """
    if len(student) <= TARGETS:
        return loss(student, expected)
    pieces = zip(student.split(TARGETS), expected.split(TARGETS), strict=True)
    losses = [checkpoint(loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(losses).sum()


def _logits_losses(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the loss of the logits `[N, C]` of each target, `[N]`."""
    if student.shape[-1] == 1:
        return (student.float() - teacher.float()).square().squeeze(-1)
    log_q = functional.log_softmax(student.float() / temperature, dim=-1)
    log_p = functional.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@torch.no_grad()
def exact_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Any | None:
    """Return the outputs with exact attention that `model_losses` compares with; None where it reads the next tokens.

    A causal language model has these, unless it is called with `inputs_embeds` alone.
    """
    if predicts_next_tokens(model) and "input_ids" in inputs:
        return None
    with exact_attention(model):
        return model(**inputs)


def model_losses(
    outputs: Any, inputs: Mapping[str, Tensor], exact: Any | None, problem_type: str | None = None
) -> Tensor:
    """Return the loss of each next token, or the divergence of each output from that of exact attention if given.

    The divergence is that of logits in nats, one for each row or real token, or `1 - cosine` of mean-pooled embeddings.
    The `problem_type` of the model's config says what logits are: of `multi_label_classification` each is a
    distribution of its own, and of `regression` a number, whose squared differences are summed.
    """
    if exact is None:
        return _next_token_losses(outputs.logits, inputs)
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    if "logits" not in outputs:
        if "last_hidden_state" not in outputs:
            raise NotImplementedError(f"{type(outputs).__name__} has neither logits nor last_hidden_state to compare.")
        embeddings, targets = (mean_pooling(part.last_hidden_state, mask) for part in (outputs, exact))
        return 1 - functional.cosine_similarity(embeddings, targets, dim=-1)
    output, target = outputs.logits, exact.logits
    if output.dim() == 3:
        real = (torch.ones_like(output[..., 0]) if mask is None else mask).bool()
        output, target = output[real], target[real]
    if problem_type == "multi_label_classification":
        output, target = (torch.stack([torch.zeros_like(part), part], dim=-1) for part in (output, target))
    else:
        dim = -1 if problem_type == "regression" else -2
        output, target = output.unsqueeze(dim), target.unsqueeze(dim)
    return _logits_losses(output, target, 1.0).sum(-1)


def _next_token_losses(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of each next token of inputs, given the logits `[B, L, C]`; padding has none."""
    labels = inputs["input_ids"][:, 1:]
    if "attention_mask" in inputs:
        real = inputs["attention_mask"].bool()
        labels = labels.masked_fill(~(real[:, :-1] & real[:, 1:]), IGNORED)  # What precedes it may be padding, too.
    labels = labels.flatten()
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="none")
    return losses[labels != IGNORED]


def hidden_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
    """Return `‖h - h'‖² / ‖h'‖²` over the real tokens of each row, averaged over layers.

    This guides the student along the teacher's trajectory, which Linformer-like students need.

    Args:
        student: Hidden states h `[B, L, D]`: the embeddings, which are left out, and the output of each layer.
        teacher: Hidden states h' `[B, L, D]`, likewise.
        attention_mask: `[B, L]`, nonzero for real tokens; None if there is no padding.

    Returns:
        The loss of each row, `[B]`.
    """
    errors = []
    for hidden, target in zip(student[1:], teacher[1:], strict=True):
        hidden, target = hidden.float(), target.float()
        sizes = torch.stack([(hidden - target).square().sum(-1), target.square().sum(-1)])
        if attention_mask is not None:
            sizes = sizes.masked_fill(~attention_mask.bool(), 0.0)
        difference, norm = sizes.sum(-1)
        errors.append(difference / norm.clamp_min(1e-12))
    return torch.stack(errors).mean(0)


def attention_weights_loss(call: AttentionCall, rows: Tensor) -> Tensor:
    """Return `KL(p_i ‖ w_i) = Σ_j p_ij log(p_ij / w_ij)`, averaged over heads and queries i.

    p are the exact attention weights, w those that the mechanism implies (Zhang et al. 2024, arXiv:2402.04347).

    A hybrid of a window and a linear branch adds the same divergence of its linear branch by itself, over the keys
    outside the window; otherwise the window would do all the work.

    Args:
        call: A call of a layer's attention, with exact outputs.
        rows: `[B, H, L]`, true for the queries i that count.
    """
    with torch.no_grad():
        exact, outside = call.exact_weights(), call.outside()
    weights = call.linear_weights()
    loss = _mean_divergence(exact, weights, rows)
    if outside is None:
        return loss
    # A query without keys outside the window has nothing to match: its row of the target is zero, and so is its loss.
    target, branch = (part * outside for part in (exact, weights))
    tiny = torch.finfo(weights.dtype).tiny
    target, branch = (part / part.sum(dim=-1, keepdim=True).clamp_min(tiny) for part in (target, branch))
    return loss + _mean_divergence(target, branch, rows)


def attention_outputs_loss(call: AttentionCall, rows: Tensor | None = None, norm: Tensor | None = None) -> Tensor:
    """Return `Σ ‖o_i - ô_i‖² / Σ ‖o_i‖²` over heads and queries i, for exact outputs o and the mechanism's ô.

    Args:
        call, rows: As for `attention_weights_loss`; by default all rows that are real tokens.
        norm: What to divide by; None for `Σ ‖o_i‖²`.
    """
    rows = call.real_queries() if rows is None else rows
    exact = call.output.detach().float()
    norm = _squared_norm(exact, rows) if norm is None else norm
    return _squared_norm(exact - call.linear_output().float(), rows) / norm


def _squared_norm(outputs: Tensor, rows: Tensor) -> Tensor:
    """Return `Σ ‖o_i‖²` of outputs `[B, H, L, e]` over `rows [B, H, L]`."""
    return outputs.square().masked_fill(~rows.unsqueeze(-1), 0.0).sum().clamp_min(1e-12)


def _mean_divergence(exact: Tensor, linear: Tensor, rows: Tensor) -> Tensor:
    """Return the divergence between weights `[B, H, L, S]`, averaged over `rows [B, H, L]`."""
    terms = functional.kl_div(linear.clamp_min(1e-12).log(), exact, reduction="none")
    per_row = terms.sum(dim=-1).masked_fill(~rows, 0.0)
    return per_row.sum() / rows.sum().clamp_min(1)


def layer_loss(call: AttentionCall, kind: str, *, backward: bool, seed: int | None = None) -> Tensor:
    """Return the loss of one layer's attention, without a gradient; optionally add the gradients of the learned parts.

    Args:
        kind: `"weights"`, `"outputs"` or `"auto"`: the mechanism's `transfer_loss`, but outputs where its weights are
            no distribution, or known for all queries at once only (`gla`, `luna`: 5 to 7 forward passes a step).
        backward: Whether to add gradients to the `.grad` of the learned parts.
        seed: With a seed, the loss on weights, and that on the outputs of mechanisms with `sampled_outputs`, takes
            `SAMPLED_QUERIES` queries of a long row (half of them up to `SHORT_ROW` tokens), drawn from this seed: in
            expectation over seeds, loss and gradients are those of all queries. None takes all.
    """
    mechanism = call.mechanism
    queries = call.real_queries()
    length = call.query.shape[2]
    full = length == call.key.shape[2]
    sampled = mechanism.separable_queries and full
    if kind == "auto":
        kind = mechanism.transfer_loss if mechanism.distribution and sampled else "outputs"
    loss: Callable[..., Tensor] = attention_weights_loss
    if kind == "outputs":
        sampled = mechanism.sampled_outputs and full and (call.padding is None or call.padding.dim() == 2)
        loss = partial(attention_outputs_loss, norm=_squared_norm(call.output.detach().float(), queries))
    ranges = query_ranges(call, seed) if sampled else [(0, length, 1)]
    size, count = len(queries), queries.sum().clamp_min(1)
    if kind != "outputs":
        longest = max(stop - start for start, stop, _ in ranges)
        size = max(1, BLOCK_ENTRIES // (call.query.shape[1] * longest * call.key.shape[2]))
    total = torch.zeros((), device=call.query.device)
    for row, (start, stop, factor) in itertools.product(range(0, len(queries), size), ranges):
        index = slice(row, row + size)
        block = query_block(call, index, start, stop)
        rows = queries[index, :, start:stop]
        with torch.set_grad_enabled(backward):
            part = loss(block, rows) * (factor if kind == "outputs" else factor * rows.sum() / count)
            if backward:  # The graph of the block is freed at once.
                part.backward()
        total = total + part.detach()
    return total


def query_ranges(call: AttentionCall, seed: int | None) -> list[tuple[int, int, int]]:
    """Return ranges of queries, `(start, stop, factor)`: the loss is the sum of theirs, each times its factor.

    A sample draws one run of neighbouring queries, which stands for `factor` runs, from each of some equal parts.
    """
    _, heads, length, _ = call.query.shape
    if seed is None or length <= SAMPLED_QUERIES:
        size = max(1, min(length, BLOCK_ENTRIES // (heads * call.key.shape[2])))
        return [(start, min(start + size, length), 1) for start in range(0, length, size)]
    generator = torch.Generator().manual_seed(seed)
    drawn = SAMPLED_QUERIES // 2 if length <= SHORT_ROW else SAMPLED_QUERIES
    size = RUN_LENGTH if call.causal else drawn
    runs = -(-length // size)
    parts = max(drawn // size, 1)
    ranges = []
    for part in range(parts):
        first = part * runs // parts
        last = (part + 1) * runs // parts
        start = size * int(torch.randint(first, last, (), generator=generator, device="cpu"))
        ranges.append((start, min(start + size, length), last - first))
    return ranges


def query_block(call: AttentionCall, index: slice, start: int, stop: int) -> AttentionCall:
    """Return the call for some rows and queries. Causal queries are then the last of the keys that they see.

    With a full mask they may look ahead, and all keys remain.
    """
    has_full_mask = call.padding is not None and call.padding.dim() == 4
    keys = stop if call.causal and not has_full_mask else call.query.shape[2]
    allowed = (call.allowed if call.allowed.shape[0] == 1 else call.allowed[index])[:, :, start:stop, :keys]
    padding = call.padding
    if padding is not None:
        padding = padding[index, :keys] if padding.dim() == 2 else allowed
    return replace(
        call,
        query=call.query[index, :, start:stop],
        key=call.key[index, :, :keys],
        value=call.value[index, :, :keys],
        output=call.output[index, :, start:stop],
        padding=padding,
        allowed=allowed,
        start=None if keys == stop else start,
    )
