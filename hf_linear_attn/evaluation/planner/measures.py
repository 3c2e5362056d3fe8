"""What a conversion does to a model as a whole. One class for each kind of model; every result is plain data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data.metrics import TaskMetrics
from ..embeddings import agreement, sentence_embeddings
from ..perplexity import Window, windows
from ..texts import make_batches

Batch = Mapping[str, Tensor]
Measure = Callable[[PreTrainedModel], dict[str, Any]]
"""Measures a model against the exact one on fixed data; always holds the key `divergence`."""

#: Entries of the exact model's log probabilities that are kept between measurements; more are computed each time.
KEPT_ENTRIES = 2**27


class LanguageMeasure:
    """Loss a token, perplexity, and the KL of the next token from the exact model, over strided windows.

    `divergence = mean_t Σ_v p_t(v) log(p_t(v) / q_t(v))` in nats over the predicted tokens, p of the exact model.
    """

    def __init__(
        self, exact: PreTrainedModel, documents: Sequence[Sequence[int]], *, context: int, stride: int, batch_size: int
    ) -> None:
        found = sorted(windows(documents, context, stride), key=lambda window: len(window.tokens))
        if not found:
            raise ValueError("No document has two tokens: there is nothing to predict. Give a longer text.")
        self._exact = exact
        self._parts = [found[start : start + batch_size] for start in range(0, len(found), batch_size)]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        loss, divergence, tokens = 0.0, 0.0, 0
        for reference, (own, targets) in zip(self._reference(), self._log_probabilities(model), strict=True):
            loss -= float(own.gather(-1, targets[:, None]).double().sum())
            divergence += _kl(reference, own)
            tokens += len(targets)
        mean = loss / tokens
        return {
            "divergence": divergence / tokens,
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "tokens": tokens,
        }

    def _reference(self) -> Iterator[Tensor]:
        """The exact model's log probabilities, from memory as far as they fit into it."""
        if self._kept:
            yield from self._kept
            return
        kept: list[Tensor] | None = []
        for own, _ in self._log_probabilities(self._exact):
            if kept is not None:
                kept.append(own)
                if sum(held.numel() for held in kept) > KEPT_ENTRIES:
                    kept = None
            yield own
        self._kept = kept or []

    def _log_probabilities(self, model: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """Log probabilities `[N, V]` and targets `[N]` of the predicted tokens of each batch."""
        for part in self._parts:
            yield _predicted(model, part)


def _kl(exact: Tensor, own: Tensor) -> float:
    """`Σ p log(p / q)` over all rows, from log probabilities; what p rules out counts nothing."""
    p = exact.exp()
    return float(torch.where(p > 0, p * (exact - own), 0.0).double().sum())


def _predicted(model: PreTrainedModel, part: Sequence[Window]) -> tuple[Tensor, Tensor]:
    batch = make_batches([window.tokens for window in part], len(part), 0)[0]
    inputs = {name: held.to(model.device) for name, held in batch.items()}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:]
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    first = torch.tensor([window.first for window in part], device=targets.device)
    counted = (position >= first[:, None]) & inputs["attention_mask"][:, 1:].bool()
    return logits[counted].float().log_softmax(dim=-1), targets[counted]


class ClassifierMeasure:
    """The metrics of a task, and how far the answers move from the exact model's.

    divergence: of classes the mean KL of their probabilities in nats; of scores the mean squared difference, relative
    to the variance of the exact scores. `score` is the main metric.
    """

    def __init__(
        self, exact: PreTrainedModel, batches: Sequence[Batch], metrics: Sequence[str], *, regression: bool
    ) -> None:
        self._batches, self._metrics, self._regression = batches, tuple(metrics), regression
        self._exact: Tensor | None = None
        self._model = exact

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        if self._exact is None:
            self._exact = self._answers(self._model)
        own = self._answers(model)
        labels = torch.cat([batch["labels"] for batch in self._batches])
        metric = TaskMetrics(self._metrics)
        predicted = own.squeeze(-1) if self._regression else own.argmax(dim=-1)
        metric.add_batch(predictions=predicted.numpy(), references=labels.numpy())
        scores = {name: float(value) for name, value in (metric.compute() or {}).items()}
        if self._regression:
            variance = self._exact.double().var(correction=0).clamp_min(1e-12)
            divergence = float((self._exact - own).double().square().mean() / variance)
        else:
            divergence = _kl(self._exact.log_softmax(dim=-1), own.log_softmax(dim=-1)) / len(labels)
        return {"divergence": divergence, "score": scores[self._metrics[0]], **scores, "examples": len(labels)}

    def _answers(self, model: PreTrainedModel) -> Tensor:
        """Logits `[N, classes]`, float32 on the CPU."""
        accepted = set(inspect.signature(model.forward).parameters) - {"labels"}
        found = []
        for batch in self._batches:
            inputs = {name: held.to(model.device) for name, held in batch.items() if name in accepted}
            found.append(model(**inputs).logits.float().cpu())
        return torch.cat(found)


class EncoderMeasure:
    """How far mean-pooled sentence embeddings move: `divergence = 1 - cosine`, mean over passages."""

    def __init__(self, exact: PreTrainedModel, batches: Sequence[Batch]) -> None:
        self._model, self._batches = exact, batches
        self._exact: Tensor | None = None

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        if self._exact is None:
            self._exact = sentence_embeddings(self._model, self._batches)
        found = asdict(agreement(self._exact, sentence_embeddings(model, self._batches)))
        return {"divergence": 1 - found["cosine"], **found}
