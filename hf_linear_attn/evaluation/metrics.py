"""Quality of a model: perplexity, scores of labelled tasks, sentence embeddings, similarity of sentence pairs.

Each metric is an object that is called with a model and returns values for a record. Its `settings` say what the values
depend on besides the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import PreTrainedModel

from ..data.metrics import HUB_PREFIX, METRICS, TaskMetrics, compute_metrics
from ..data.text import padded_batches
from .fidelity import measure_fidelity

Batch = Mapping[str, Tensor]
Values = list[dict[str, Any]]

#: Resamples of the bootstrap (Efron 1979) behind the standard error of a score.
BOOTSTRAP_SAMPLES = 200

#: The context is divided into this many parts, for the loss by position.
POSITION_BINS = 8

#: The model without attention must be worse than the exact one by this share of its score, and by this number of
#: standard errors. Else the data say nothing about attention.
MIN_GAP, MIN_GAP_ERRORS = 0.02, 3.0

#: A model whose divergence from the exact one exceeds this share of that of a model without any attention is another
#: model: if it scores better than the exact one, that is chance.
LARGE_DIVERGENCE = 0.25


@dataclass(frozen=True)
class Score:
    """The value of a metric that stands for the quality of a model.

    Attributes:
        measurement: The measurement in the records.
        metric: The metric in its values.
        title: Its name in tables and plots.
        higher_is_better: The direction.
        digits: Decimals to show.
        agreement: Whether it compares with the exact model, whose value is then 1 by definition.
        task: The labelled task, or an empty string.
    """

    measurement: str
    metric: str
    title: str
    higher_is_better: bool = True
    digits: int = 3
    agreement: bool = False
    task: str = ""

    @property
    def key(self) -> str:
        """A name that can be a part of a file name."""
        return f"{self.measurement}-{self.task}" if self.task else self.measurement


PERPLEXITY = Score("perplexity", "perplexity", "perplexity", higher_is_better=False, digits=2)
SENTENCE_PAIRS = Score("sts", "spearmanr", "STS-B Spearman")
SENTENCE_EMBEDDINGS = Score("sentence_embeddings", "cosine", "cosine to exact embeddings", agreement=True)


@dataclass(frozen=True)
class Assessment:
    """What a score says about a mechanism.

    Attributes:
        valid: Whether the data can judge attention: the model without attention is clearly worse than the exact one.
        worse: Whether the score is worse than the exact model's.
        below_floor: Whether it is worse than without attention, too.
        chance: Whether it is better than the exact model's although the outputs differ largely, which is no success.
    """

    valid: bool
    worse: bool
    below_floor: bool
    chance: bool


def assess(
    own: float | None,
    exact: float | None,
    floor: float | None,
    *,
    higher_is_better: bool,
    stderr: float = 0.0,
    divergence: float | None = None,
    floor_divergence: float | None = None,
) -> Assessment:
    """Compare a score with the exact model's first, and then with that of the model without attention.

    Args:
        own, exact, floor: The scores; None where one is not defined.
        higher_is_better: The direction.
        stderr: Standard error of the difference of `exact` and `floor`.
        divergence, floor_divergence: Those of the outputs from the exact model's, where they are known.
    """
    sign = 1 if higher_is_better else -1
    gap = 0.0 if exact is None or floor is None else sign * (exact - floor)
    valid = gap > max(MIN_GAP * abs(exact or 0.0), MIN_GAP_ERRORS * stderr)
    if own is None or exact is None:
        return Assessment(valid, worse=True, below_floor=False, chance=False)
    gain = sign * (own - exact)
    scale = floor_divergence or math.inf
    large = divergence is not None and divergence > LARGE_DIVERGENCE * scale
    return Assessment(valid, gain < 0, valid and gain < -gap, gain > 0 and large)


class QualityMetric(Protocol):
    """A metric of a model as a whole."""

    @property
    def score(self) -> Score | None:
        """The value that counts, or None for a metric that is only informative."""

    @property
    def measurement(self) -> str:
        """The name of the measurement in the records."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that the values depend on besides the model."""

    def __call__(self, model: PreTrainedModel) -> Values:
        """Measure a model."""


def value(metric: str, number: float | None, **columns: Any) -> dict[str, Any]:
    """Return one value of a record."""
    return {"metric": metric, "value": number, **columns}


# --------------------------------------------------------------------------------------------------------------------
# Perplexity


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a causal language model.

    Attributes:
        perplexity: `exp(loss)`.
        loss: Nats per token, mean over the predicted tokens of all documents.
        stderr: Standard error of the loss, from its variation between windows.
        tokens: Number of predicted tokens.
        context: Longest window in tokens.
        stride: Distance between windows.
        longest_window: Tokens of the longest window that occurred.
        by_position: Mean loss over each eighth of the context (None where no token was predicted there).
    """

    perplexity: float
    loss: float
    stderr: float
    tokens: int
    context: int
    stride: int
    longest_window: int
    by_position: list[float | None]


@dataclass(frozen=True)
class Window:
    """Tokens of one forward pass. The tokens from index `first` on are predicted and counted."""

    tokens: Sequence[int]
    first: int


def strided_windows(documents: Sequence[Sequence[int]], context: int, stride: int) -> list[Window]:
    """Return windows of at most `context` tokens, `stride` apart. Each token but a document's first is counted once."""
    windows = []
    for document in documents:
        counted = 1
        for start in range(0, max(len(document) - 1, 0), stride):
            stop = min(start + context, len(document))
            if stop <= counted:
                break
            windows.append(Window(document[start:stop], counted - start))
            counted = stop
    return windows


@torch.no_grad()
def measure_perplexity(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    *,
    context: int,
    stride: int,
    batch_size: int = 8,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Perplexity:
    """Measure `exp(-Σ log p(token | earlier tokens of its window) / tokens)`.

    Args:
        model: A causal language model.
        documents: Token ids of each document; no window crosses from one to the next.
        context: Longest window in tokens.
        stride: Distance between windows; every counted token but those of a first window sees at least
            `context - stride` earlier tokens.
        batch_size: Windows per forward pass.
        observe: Called with the index of each of `perplexity_batches` and the log probabilities `[N, vocabulary]` where
            its tokens are predicted.

    Raises:
        ValueError: Context or stride is out of range, or there is nothing to predict.
    """
    batches = perplexity_batches(documents, context, stride, batch_size)
    bins = torch.zeros(2, POSITION_BINS, dtype=torch.float64)  # sums of losses, counts
    per_window: list[tuple[float, int]] = []
    with _EvaluationMode(model):
        for number, windows in enumerate(batches):
            logits, targets, predicted = predictions(model, windows)
            if observe is not None:
                observe(number, logits[predicted].float().log_softmax(dim=-1))
            losses = cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").double().cpu()
            counted = predicted.cpu()
            positions = torch.arange(1, losses.shape[1] + 1).expand_as(losses)[counted]
            index = (positions * POSITION_BINS // context).clamp_max(POSITION_BINS - 1)
            bins[0].index_add_(0, index, losses[counted])
            bins[1].index_add_(0, index, torch.ones_like(losses[counted]))
            totals = losses.masked_fill(~counted, 0.0).sum(dim=1)
            per_window += list(zip(totals.tolist(), counted.sum(dim=1).tolist(), strict=True))
    tokens = int(bins[1].sum())
    loss = float(bins[0].sum()) / tokens
    stderr = math.sqrt(sum((total - loss * count) ** 2 for total, count in per_window)) / tokens
    means = [float(total / count) if count else None for total, count in zip(*bins, strict=True)]
    longest = len(batches[-1][-1].tokens)
    return Perplexity(math.exp(min(loss, 700.0)), loss, stderr, tokens, context, stride, longest, means)


def perplexity_batches(
    documents: Sequence[Sequence[int]], context: int, stride: int, batch_size: int
) -> list[list[Window]]:
    """Return the windows of `strided_windows` in batches, short ones first, so that they need little padding.

    Raises:
        ValueError: Context or stride is out of range, or there is nothing to predict.
    """
    if context < 2 or not 1 <= stride <= context - 1:
        raise ValueError(f"context must be at least 2 and stride from 1 to context - 1, got {context} and {stride}.")
    windows = sorted(strided_windows(documents, context, stride), key=lambda window: len(window.tokens))
    if not windows:
        raise ValueError("No document has two tokens: there is nothing to predict. Give a longer text.")
    return [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]


def predictions(model: PreTrainedModel, windows: Sequence[Window]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[windows, length - 1, vocabulary]`, targets and whether they are counted, `[windows, length - 1]`."""
    batch = padded_batches([window.tokens for window in windows], len(windows), 0)[0]
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:]
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    first = torch.tensor([window.first for window in windows], device=targets.device)
    return logits, targets, (position >= first[:, None]) & inputs["attention_mask"][:, 1:].bool()


class PerplexityMetric:
    """Perplexity over strided windows of documents.

    Args:
        documents: Token ids of each document.
        context, stride: Tokens of a window, and between windows.
        batch_size: Windows per forward pass.
        data: A hash of the data.
    """

    score: Score | None = PERPLEXITY
    measurement = "perplexity"

    def __init__(
        self, documents: Sequence[Sequence[int]], *, context: int, stride: int, batch_size: int, data: str = ""
    ) -> None:
        self._documents, self._batch_size = documents, batch_size
        self.context, self.stride, self.data = context, stride, data

    @property
    def settings(self) -> dict[str, Any]:
        tokens = sum(map(len, self._documents))
        return {"data": self.data, "tokens": tokens, "context": self.context, "stride": self.stride}

    def __call__(self, model: PreTrainedModel, observe: Callable[[int, Tensor], None] | None = None) -> Values:
        windows: dict[str, Any] = {"context": self.context, "stride": self.stride, "batch_size": self._batch_size}
        result = measure_perplexity(model, self._documents, **windows, observe=observe)
        width = self.context / POSITION_BINS
        positions = [value("loss_at", loss, position=int(i * width)) for i, loss in enumerate(result.by_position)]
        return [
            value("perplexity", result.perplexity, stderr=result.perplexity * result.stderr),
            value("loss", result.loss, unit="nats per token", stderr=result.stderr),
            value("tokens", result.tokens),
            value("longest_input", result.longest_window, unit="tokens"),
            *positions,
        ]


def kl_divergence(exact: Tensor, own: Tensor) -> float:
    """Return `Σ p log(p / q)` over all rows, from log probabilities. A term with p = 0 is 0."""
    p = exact.exp()
    return float(torch.where(p > 0, p * (exact - own), 0.0).double().sum())


# --------------------------------------------------------------------------------------------------------------------
# Labelled tasks


class ClassificationMetric:
    """The metrics of a labelled task, and how far the answers move from the exact model's.

    `divergence`: of classes the mean KL of their probabilities in nats; of scores the mean squared difference, relative
    to the variance of the exact scores. Of several validation sets (MNLI) each has a suffix; the first one decides.

    Args:
        exact: The exact model.
        batches: Suffix of a validation set -> its batches, with `labels`.
        metrics: Names of `data.metrics`; the first one decides.
        regression: Whether the model gives one score.
        task: The name of the task.
        settings: What the values depend on besides the model.
    """

    measurement = "task"

    def __init__(
        self,
        exact: PreTrainedModel,
        batches: Mapping[str, Sequence[Batch]],
        metrics: Sequence[str],
        *,
        regression: bool,
        task: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._exact, self._batches, self._regression = exact, batches, regression
        self.metrics, self.task = tuple(metrics), task
        self._settings = dict(settings or {})
        self._exact_logits: dict[str, Tensor] = {}

    @property
    def score(self) -> Score:
        name = self.metrics[0]
        higher = METRICS.get(name).higher_is_better if name in METRICS else True
        return Score("task", "score", f"{self.task} {name}".strip(), higher, task=self.task)

    @property
    def settings(self) -> dict[str, Any]:
        return {**self._settings, "metrics": list(self.metrics)}

    def __call__(self, model: PreTrainedModel) -> Values:
        values: Values = []
        rows = 0
        for suffix in self._batches:
            result = self.measure(model, suffix)
            rows += result["rows"]
            if not values:
                values.append(value("score", result[self.metrics[0]], stderr=result["stderr"]))
                values.append(value("divergence", result["divergence"]))
            values += [value(name + suffix, result[name]) for name in self.metrics]
        return [*values, value("rows", rows)]

    @torch.no_grad()
    def measure(self, model: PreTrainedModel, suffix: str = "") -> dict[str, Any]:
        """Return the metrics of one validation set, with `divergence`, `stderr` (of the first metric) and `rows`."""
        if suffix not in self._exact_logits:
            self._exact_logits[suffix] = classifier_logits(self._exact, self._batches[suffix])
        exact = self._exact_logits[suffix]
        own = exact if model is self._exact else classifier_logits(model, self._batches[suffix])
        labels = torch.cat([batch["labels"] for batch in self._batches[suffix]]).numpy()
        predictions = (own.squeeze(-1) if self._regression else own.argmax(dim=-1)).numpy()
        scores = compute_metrics(self.metrics, predictions, labels)
        if self._regression:
            variance = exact.double().var(correction=0).clamp_min(1e-12)
            divergence = float((exact - own).double().square().mean() / variance)
        else:
            divergence = kl_divergence(exact.log_softmax(dim=-1), own.log_softmax(dim=-1)) / len(labels)
        stderr = bootstrap_stderr(self.metrics[0], predictions, labels)
        return {**scores, "divergence": divergence, "stderr": stderr, "rows": len(labels)}


def classifier_logits(model: PreTrainedModel, batches: Iterable[Batch]) -> Tensor:
    """Return the logits `[N, classes]` of a sequence classifier, float32 on the CPU."""
    accepted = set(inspect.signature(model.forward).parameters) - {"labels"}
    logits = []
    with _EvaluationMode(model):
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name in accepted}
            logits.append(model(**inputs).logits.float().cpu())
    return torch.cat(logits)


def bootstrap_stderr(metric: str, predictions: Any, references: Any) -> float | None:
    """Return the standard error of a metric by resampling rows; None for `hub:` metrics, which may be slow."""
    import numpy as np

    if metric.startswith(HUB_PREFIX):
        return None
    generator = np.random.default_rng(0)
    metrics = TaskMetrics([metric])
    scores = []
    for _ in range(BOOTSTRAP_SAMPLES):
        rows = generator.integers(0, len(references), len(references))
        scores.append(metrics.compute(predictions=predictions[rows], references=references[rows])[metric])
    return float(np.nanstd(scores, ddof=1)) if np.isfinite(scores).any() else None


# --------------------------------------------------------------------------------------------------------------------
# Sentence embeddings


@dataclass(frozen=True)
class EmbeddingAgreement:
    """Mean-pooled embeddings of the same passages by two models.

    Attributes:
        cosine: Mean over the passages.
        cosine_p20: The 20th percentile over the passages.
        same_neighbor: Share of passages whose most similar other passage is the same one.
        passages: Number of passages.
    """

    cosine: float
    cosine_p20: float
    same_neighbor: float
    passages: int


@torch.no_grad()
def sentence_embeddings(model: PreTrainedModel, batches: Iterable[Batch]) -> Tensor:
    """Return the mean over real tokens of the final hidden states, `[passages, width]`, float32 on the CPU."""
    accepted = set(inspect.signature(model.base_model.forward).parameters)
    pooled = []
    with _EvaluationMode(model):
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name in accepted}
            hidden = model.base_model(**inputs)[0].float()
            mask = batch["attention_mask"].to(hidden.device).unsqueeze(-1).float()
            pooled.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).cpu())
    return torch.cat(pooled)


def embedding_agreement(exact: Tensor, linear: Tensor) -> EmbeddingAgreement:
    """Compare embeddings `[passages, width]` of the same passages."""
    cosine = cosine_similarity(exact, linear, dim=-1)
    same = nearest_neighbors(exact) == nearest_neighbors(linear)
    mean, p20 = float(cosine.mean()), float(cosine.quantile(0.2))
    return EmbeddingAgreement(mean, p20, float(same.double().mean()), len(cosine))


def nearest_neighbors(embeddings: Tensor) -> Tensor:
    """Return the index of each row's most similar other row, `[passages]`."""
    return pairwise_cosine(embeddings).fill_diagonal_(-2.0).argmax(dim=-1)


def unrelated_cosine(embeddings: Tensor) -> float:
    """Return the mean cosine of different passages: what "unrelated" looks like for this model."""
    similarity = pairwise_cosine(embeddings)
    count = len(similarity)
    return float((similarity.sum() - similarity.diagonal().sum()) / max(count * (count - 1), 1))


def pairwise_cosine(embeddings: Tensor) -> Tensor:
    """Return the cosine of all pairs of rows, `[passages, passages]`."""
    unit = normalize(embeddings, dim=-1)
    return unit @ unit.T


class EmbeddingMetric:
    """Mean-pooled embeddings of passages, compared with those of the exact model.

    Args:
        exact: The exact model.
        batches: The passages.
        settings: What the values depend on besides the model.
        score: The score that it gives (None: it is only informative).
    """

    measurement = "sentence_embeddings"

    def __init__(
        self,
        exact: PreTrainedModel,
        batches: Sequence[Batch],
        settings: Mapping[str, Any] | None = None,
        *,
        score: Score | None = SENTENCE_EMBEDDINGS,
    ) -> None:
        self._exact, self._batches, self._settings = exact, batches, dict(settings or {})
        self.score = score
        self._embeddings: Tensor | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    def agreement(self, model: PreTrainedModel) -> EmbeddingAgreement:
        """Compare a model's embeddings with the exact model's."""
        exact = self._exact_embeddings()
        return embedding_agreement(exact, exact if model is self._exact else sentence_embeddings(model, self._batches))

    def __call__(self, model: PreTrainedModel) -> Values:
        result = self.agreement(model)
        values = [
            value("cosine", result.cosine),
            value("cosine_p20", result.cosine_p20),
            value("same_neighbor", result.same_neighbor, unit="share"),
            value("passages", result.passages),
            value("longest_input", max(batch["input_ids"].shape[1] for batch in self._batches), unit="tokens"),
        ]
        if model is self._exact:
            values.append(value("unrelated_cosine", unrelated_cosine(self._exact_embeddings())))
        return values

    def _exact_embeddings(self) -> Tensor:
        if self._embeddings is None:
            self._embeddings = sentence_embeddings(self._exact, self._batches)
        return self._embeddings


@dataclass(frozen=True)
class SentencePairs:
    """Pairs of sentences with a score of their similarity.

    Attributes:
        batches: All sentences, short ones first.
        order: Where each sentence of the batches belongs: first sentences, then second ones.
        scores: The similarity of each pair.
        data: A hash of the pairs.
        source: Where they are from.
        longest: Tokens of the longest sentence.
    """

    batches: list[dict[str, Tensor]]
    order: list[int]
    scores: list[float]
    data: str
    source: str
    longest: int


class SentencePairMetric:
    """How well the cosine of mean-pooled embeddings ranks pairs of sentences (STS-B): Spearman and Pearson."""

    score: Score | None = SENTENCE_PAIRS
    measurement = "sts"

    def __init__(self, pairs: SentencePairs) -> None:
        self._pairs = pairs

    @property
    def settings(self) -> dict[str, Any]:
        return {"data": self._pairs.data, "pairs": len(self._pairs.scores)}

    def __call__(self, model: PreTrainedModel) -> Values:
        import numpy as np

        pooled = sentence_embeddings(model, self._pairs.batches)
        embeddings = torch.empty_like(pooled)
        embeddings[torch.tensor(self._pairs.order)] = pooled
        count = len(self._pairs.scores)
        similarity = cosine_similarity(embeddings[:count], embeddings[count:], dim=-1).double().numpy()
        references = np.asarray(self._pairs.scores)
        scores = compute_metrics(["spearmanr", "pearson"], similarity, references)
        stderr = bootstrap_stderr("spearmanr", similarity, references)
        return [
            value("spearmanr", scores["spearmanr"], stderr=stderr),
            value("pearson", scores["pearson"]),
            value("pairs", count),
            value("longest_input", self._pairs.longest, unit="tokens"),
        ]


# --------------------------------------------------------------------------------------------------------------------
# Fidelity


class FidelityMetric:
    """How near each head of a patched model comes to its own exact attention, without labels."""

    score: Score | None = None
    measurement = "fidelity"

    def __init__(self, batches: Sequence[Batch], settings: Mapping[str, Any] | None = None) -> None:
        self._batches, self._settings = batches, dict(settings or {})

    @property
    def settings(self) -> dict[str, Any]:
        return self._settings

    def __call__(self, model: PreTrainedModel) -> Values:
        result = measure_fidelity(model, self._batches)
        values = [
            value("kl", result.kl, unit="nats"),
            value("output_error", result.output_error),
            value("final_cosine", result.final_cosine),
            value("tokens", result.tokens),
        ]
        for layer in result.layers:
            columns = {"layer": layer.index}
            for head, error in enumerate(layer.output_error):
                values.append(value("output_error", error, **columns, head=head))
                if layer.kl is not None:
                    values.append(value("kl", layer.kl[head], unit="nats", **columns, head=head))
        return values


class _EvaluationMode:
    """Context manager: the model in evaluation mode, and afterwards as it was."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._training = model, model.training

    def __enter__(self) -> None:
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        self._model.train(self._training)
