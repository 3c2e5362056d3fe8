"""Perplexity of a causal language model, token-weighted, over strided windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .texts import make_batches


@dataclass(frozen=True)
class Perplexity:
    """`exp(loss)`; loss in nats a token, mean over `tokens` predicted tokens of all documents.

    by_position: mean loss over each eighth of the context (None where no token was predicted there).
    """

    perplexity: float
    loss: float
    tokens: int
    context: int
    stride: int
    by_position: list[float | None]


@dataclass(frozen=True)
class Window:
    """Tokens of one forward pass; those from `first` on are predicted and counted."""

    tokens: Sequence[int]
    first: int


def windows(documents: Sequence[Sequence[int]], context: int, stride: int) -> list[Window]:
    """Windows of at most `context` tokens, `stride` apart. Each token but a document's first is counted once."""
    found = []
    for document in documents:
        counted = 1
        for start in range(0, max(len(document) - 1, 0), stride):
            stop = min(start + context, len(document))
            if stop <= counted:
                break
            found.append(Window(document[start:stop], counted - start))
            counted = stop
    return found


@torch.no_grad()
def measure_perplexity(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    *,
    context: int,
    stride: int,
    batch_size: int = 8,
) -> Perplexity:
    """`exp(-Σ log p(token | tokens before it in its window) / tokens)`.

    Args:
        documents: token ids of each document; no window crosses from one to the next.
        context: longest window in tokens.
        stride: distance of windows; every counted token but those of a first window sees at least `context - stride`
            tokens before it.

    Raises:
        ValueError: context or stride out of range, or nothing to predict.
    """
    if context < 2 or not 1 <= stride <= context - 1:
        raise ValueError(f"context must be at least 2 and stride from 1 to context - 1, got {context} and {stride}.")
    found = windows(documents, context, stride)
    if not found:
        raise ValueError("No document has two tokens: there is nothing to predict.")
    sums = torch.zeros(8, dtype=torch.float64)
    counts = torch.zeros(8, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        # Windows of like length together: little padding.
        ordered = sorted(found, key=lambda window: len(window.tokens))
        for start in range(0, len(ordered), batch_size):
            part = ordered[start : start + batch_size]
            losses, where = _losses(model, part)
            bins = (where * 8 // context).clamp_max(7)
            sums.index_add_(0, bins, losses)
            counts.index_add_(0, bins, torch.ones_like(losses))
    finally:
        model.train(training)
    loss = float(sums.sum() / counts.sum())
    means = [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]
    return Perplexity(math.exp(min(loss, 700.0)), loss, int(counts.sum()), context, stride, means)


def _losses(model: PreTrainedModel, part: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Loss of each counted token, float64 on the CPU, and its position in the window."""
    batch = make_batches([window.tokens for window in part], len(part), 0)[0]
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    targets = inputs["input_ids"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device).expand_as(targets)
    first = torch.tensor([window.first for window in part], device=targets.device)
    counted = (position >= first[:, None]) & inputs["attention_mask"][:, 1:].bool()
    return losses[counted].double().cpu(), position[counted].cpu()
