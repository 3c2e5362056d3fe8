"""Quality of a model: perplexity, scores of labelled tasks, sentence embeddings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import PreTrainedModel

from ..data.tasks import HUB_PREFIX, METRICS, compute_metrics, constant_answer_score, likeliest_classes, perplexity
from ..data.text import padded_batches
from ..utils.models import Batch, evaluation_mode, mean_pooling, model_inputs
from ..utils.progress import OnBatch, report_batches, report_nothing
from .values import Measure, Values, value

#: Resamples of the bootstrap (Efron 1979) behind the standard error of a score.
BOOTSTRAP_SAMPLES = 200

NATS = "nats per token"

#: The context is divided into this many parts, for the loss by position.
POSITION_BINS = 8

#: The exact model must be better than the floor by this share of its score, and by this number of standard errors. Else
#: the data say nothing about attention.
MIN_GAP, MIN_GAP_ERRORS = 0.02, 3.0

#: A model whose divergence from the exact one exceeds this share of that of a model without any attention is another
#: model: if it scores better than the exact one, that is chance.
LARGE_DIVERGENCE = 0.25

#: Number of log probabilities of the exact model that stay in memory; a larger set is computed for each measurement.
MAX_CACHED_VALUES = 2**27


@dataclass(frozen=True)
class Score:
    """The value of a metric that stands for the quality of a model."""

    measurement: str  # in the records
    metric: str  # in the values of the measurement
    title: str  # in tables and plots
    higher_is_better: bool = True
    digits: int = 3  # decimals to show
    agreement: bool = False  # whether it compares with the exact model, whose value is then 1 by definition
    task: str = ""  # the labelled task


PERPLEXITY = Score("perplexity", "perplexity", "perplexity", higher_is_better=False, digits=2)
SENTENCE_PAIRS = Score("sts", "spearmanr", "STS-B Spearman")
SENTENCE_EMBEDDINGS = Score("sentence_embeddings", "cosine", "cosine to exact embeddings", agreement=True)


@dataclass(frozen=True)
class Assessment:
    """What a score says about a mechanism."""

    valid: bool  # the data can judge attention: the floor is clearly worse than the exact model
    worse: bool  # than the exact model
    below_floor: bool  # worse than the floor, too
    chance: bool  # better than the exact model although the outputs differ largely, which is no success
    floor: float | None  # the score without attention, or of a constant answer where that is not worse
    floor_name: str  # whose it is


def assess(
    score: float | None,
    exact: float | None,
    floor: float | None,
    *,
    higher_is_better: bool,
    most_frequent_answer: float | None = None,
    stderr: float = 0.0,
    divergence: float | None = None,
    floor_divergence: float | None = None,
) -> Assessment:
    """Compare a score with the exact model's first, and then with the floor.

    `floor` is the score of the model without attention (None: undefined); of a classifier, that of always giving the
    same answer (`constant_answer_score`) takes its place where it is not worse. `stderr` is that of the difference of
    `exact` and `floor`; divergences are those from the exact model's outputs.
    """
    sign, name = 1 if higher_is_better else -1, "without attention"
    if most_frequent_answer is not None and (floor is None or sign * (most_frequent_answer - floor) >= 0):
        floor, name = most_frequent_answer, "always giving the same answer"
    gap = 0.0 if exact is None or floor is None else sign * (exact - floor)
    valid = gap > max(MIN_GAP * abs(exact or 0.0), MIN_GAP_ERRORS * stderr)
    if score is None or exact is None:
        return Assessment(valid, True, False, False, floor, name)
    gain = sign * (score - exact)
    scale = floor_divergence or math.inf
    large = divergence is not None and divergence > LARGE_DIVERGENCE * scale
    return Assessment(valid, gain < 0, valid and gain < -gap, gain > 0 and large, floor, name)


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a causal language model."""

    perplexity: float  # `exp(loss)`
    loss: float  # nats per token, mean over the predicted tokens of all documents
    stderr: float  # standard error of the loss, from its variation between windows (NaN: there is one only)
    tokens: int  # predicted ones
    context: int  # longest window in tokens
    stride: int  # distance between windows
    longest_window: int  # tokens of the longest window that occurred
    by_position: list[float | None]  # mean loss over each eighth of the context (None: no token was predicted there)
    divergence: float | None = None  # `mean_t Σ_v p_t(v) log(p_t(v) / q_t(v))` in nats, p of the exact model
    difference: float | None = None  # from the perplexity of the exact model
    difference_stderr: float | None = None  # its standard error, from the same windows of both


Window = tuple[Sequence[int], int]
"""Tokens of one forward pass, and the index of the first one that is predicted and counted."""


def strided_windows(documents: Sequence[Sequence[int]], context: int, stride: int) -> list[Window]:
    """Return windows of at most `context` tokens, `stride` apart. Each token but a document's first is counted once."""
    windows = []
    for document in documents:
        counted = 1
        for start in range(0, max(len(document) - 1, 0), stride):
            stop = min(start + context, len(document))
            if stop <= counted:
                break
            windows.append((document[start:stop], counted - start))
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
    exact: PreTrainedModel | None = None,
    known: dict[int, Tensor] | None = None,
    on_batch: OnBatch = report_nothing,
) -> Perplexity:
    """Measure `exp(-Σ log p(token | earlier tokens of its window) / tokens)`.

    Args:
        model: A causal language model.
        documents: Token ids of each document; no window crosses from one to the next.
        context: Longest window in tokens.
        stride: Distance between windows; every counted token but those of a first window sees at least
            `context - stride` earlier tokens.
        batch_size: Windows per forward pass.
        exact: The exact model, for the divergence from its predictions.
        known: Where these predictions stay for further calls with the same windows, as far as memory allows.
        on_batch: Called with the windows done and all windows.

    Raises:
        ValueError: Context or stride is out of range, or there is nothing to predict.
    """
    if context < 2 or not 1 <= stride <= context - 1:
        raise ValueError(f"context must be at least 2 and stride from 1 to context - 1, got {context} and {stride}.")
    # Windows of similar length are batched together, which needs little padding.
    windows = sorted(strided_windows(documents, context, stride), key=lambda window: len(window[0]))
    if not windows:
        raise ValueError("No document has two tokens, so there is nothing to predict. Give a longer text.")
    batches = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    parts: list[tuple[Tensor, ...]] = []  # loss, exact loss, window and position of each predicted token
    divergence = 0.0
    known = {} if known is None else known
    with evaluation_mode(model), evaluation_mode(exact or model):
        for index, batch in enumerate(report_batches(batches, on_batch)):
            log_probabilities, targets, (row, position) = _predictions(model, batch)
            reference = log_probabilities
            if exact is not None:
                if index in known:
                    reference = known[index]
                elif exact is not model:
                    reference = _predictions(exact, batch)[0]
                if sum(one.numel() for one in known.values()) + reference.numel() <= MAX_CACHED_VALUES:
                    known[index] = reference
                divergence += kl_divergence(reference, log_probabilities)
            both = (-one.gather(-1, targets[:, None])[:, 0].double().cpu() for one in (log_probabilities, reference))
            parts.append((*both, index * batch_size + row, position))
    losses, exact_losses, window, position = map(torch.cat, zip(*parts, strict=True))
    tokens, loss, exact_loss = len(losses), float(losses.mean()), float(exact_losses.mean())
    own, others = perplexity(loss), perplexity(exact_loss)

    def error_of_mean(values: Tensor) -> float:
        return float(window.bincount(values - values.mean()).norm()) / tokens if len(windows) > 1 else math.nan

    position_bin = (position * POSITION_BINS // context).clamp_max(POSITION_BINS - 1)
    bins = zip(position_bin.bincount(losses, POSITION_BINS), position_bin.bincount(None, POSITION_BINS), strict=True)
    return Perplexity(
        perplexity=own,
        loss=loss,
        stderr=error_of_mean(losses),
        tokens=tokens,
        context=context,
        stride=stride,
        longest_window=len(windows[-1][0]),
        by_position=[float(total / count) if count else None for total, count in bins],
        divergence=None if exact is None else divergence / tokens,
        difference=None if exact is None else own - others,
        difference_stderr=None if exact is None else error_of_mean(own * losses - others * exact_losses),
    )


def _predictions(model: PreTrainedModel, windows: Sequence[Window]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Log probabilities `[N, vocabulary]` and targets `[N]` of the counted tokens; on the CPU, window and position."""
    batch = padded_batches([tokens for tokens, _ in windows], len(windows), 0)[0]
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    logits, targets = model(**inputs, use_cache=False).logits[:, :-1], inputs["input_ids"][:, 1:]
    position = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    first = torch.tensor([first for _, first in windows], device=targets.device)
    counted = (position >= first[:, None]) & inputs["attention_mask"][:, 1:].bool()
    row, column = counted.cpu().nonzero(as_tuple=True)
    return logits[counted].float().log_softmax(dim=-1), targets[counted], (row, column + 1)


def kl_divergence(exact: Tensor, student: Tensor) -> float:
    """Return `Σ p log(p / q)` over all rows, from log probabilities. A term with p = 0 is 0."""
    p = exact.exp()
    return float(torch.where(p > 0, p * (exact - student), 0.0).double().sum())


def perplexity_measure(
    documents: Sequence[Sequence[int]],
    *,
    context: int,
    stride: int,
    batch_size: int,
    exact: PreTrainedModel | None = None,
) -> Measure:
    """Return `measure_perplexity` as a measure: the perplexity over strided windows, and the loss by position."""
    known: dict[int, Tensor] = {}
    windows: dict[str, Any] = {"context": context, "stride": stride, "batch_size": batch_size}

    def measure(model: PreTrainedModel, on_batch: OnBatch = report_nothing) -> Values:
        result = measure_perplexity(model, documents, **windows, exact=exact, known=known, on_batch=on_batch)
        from_exact = [
            value("divergence", result.divergence, unit=NATS),
            value("difference", result.difference, stderr=result.difference_stderr),
        ]
        return [
            value("perplexity", result.perplexity, stderr=result.perplexity * result.stderr),
            value("loss", result.loss, unit=NATS, stderr=result.stderr),
            value("tokens", result.tokens),
            value("longest_input", result.longest_window, unit="tokens"),
            *(
                value("loss_at", loss, position=index * context // POSITION_BINS)
                for index, loss in enumerate(result.by_position)
            ),
            *(from_exact if exact is not None else ()),
        ]

    return measure


def classification_measure(
    exact: PreTrainedModel,
    batches: Mapping[str, Sequence[Batch]],
    metrics: Sequence[str],
    *,
    regression: bool,
) -> Measure:
    """Return the measure of a labelled task: its scores, and how far the answers move from the exact model's.

    `divergence`: of classes the mean KL of their probabilities in nats; of scores the mean squared difference, relative
    to the variance of the exact scores. Of several validation sets (MNLI) each has a suffix, by which `batches` names
    them. The first set and the first metric decide.
    """
    exact_logits = {suffix: cache(partial(classifier_logits, exact, part)) for suffix, part in batches.items()}

    def answer_divergence(reference: Tensor, answers: Tensor) -> float:
        if regression:
            variance = reference.double().var(correction=0).clamp_min(1e-12)
            return float((reference - answers).double().square().mean() / variance)
        return kl_divergence(reference.log_softmax(dim=-1), answers.log_softmax(dim=-1)) / len(answers)

    def measure(model: PreTrainedModel, on_batch: OnBatch = report_nothing) -> Values:
        values: Values = []
        for suffix, part in batches.items():
            reference = exact_logits[suffix]()
            answers = reference if model is exact else classifier_logits(model, part, on_batch)
            labels = torch.cat([batch["labels"] for batch in part]).numpy()
            predictions = (answers.squeeze(-1) if regression else likeliest_classes(answers)).numpy()
            scores = compute_metrics(metrics, predictions, labels)
            if not values:
                stderr = bootstrap_stderr(metrics[0], predictions, labels)
                values.append(value("score", scores[metrics[0]], stderr=stderr))
                values.append(value("divergence", answer_divergence(reference, answers)))
                if metrics[0] in METRICS:
                    values.append(value("most_frequent_answer", constant_answer_score(metrics[0], labels)))
            values += [value(name + suffix, scores[name]) for name in metrics]
        shapes = [batch["input_ids"].shape for part in batches.values() for batch in part]
        rows, longest = sum(rows for rows, _ in shapes), max(length for _, length in shapes)
        return [*values, value("rows", rows), value("longest_input", longest, unit="tokens")]

    return measure


@torch.no_grad()
def classifier_logits(model: PreTrainedModel, batches: Sequence[Batch], on_batch: OnBatch = report_nothing) -> Tensor:
    """Return the logits `[N, classes]` of a sequence classifier, float32 on the CPU."""
    with evaluation_mode(model):
        reported = report_batches(batches, on_batch)
        return torch.cat([model(**model_inputs(model, batch)).logits.float().cpu() for batch in reported])


def bootstrap_stderr(metric: str, predictions: Any, references: Any) -> float | None:
    """Return the standard error of a metric by resampling rows; None for one row, and for `hub:` metrics (slow)."""
    if metric.startswith(HUB_PREFIX) or len(references) < 2:
        return None
    generator = np.random.default_rng(0)
    samples = (generator.integers(0, len(references), len(references)) for _ in range(BOOTSTRAP_SAMPLES))
    scores = [compute_metrics([metric], predictions[rows], references[rows])[metric] for rows in samples]
    return float(np.nanstd(scores, ddof=1)) if np.isfinite(scores).any() else None


@torch.no_grad()
def sentence_embeddings(model: PreTrainedModel, batches: Sequence[Batch], on_batch: OnBatch = report_nothing) -> Tensor:
    """Return the mean over real tokens of the final hidden states, `[passages, width]`, float32 on the CPU."""
    pooled = []
    with evaluation_mode(model):
        for batch in report_batches(batches, on_batch):
            hidden = model.base_model(**model_inputs(model.base_model, batch))[0]
            pooled.append(mean_pooling(hidden, batch["attention_mask"]).cpu())
    return torch.cat(pooled)


def nearest_neighbors(embeddings: Tensor) -> Tensor:
    """Return the index of each passage's most similar other passage, from embeddings `[passages, width]`."""
    unit = normalize(embeddings, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2.0).argmax(dim=-1)


def embedding_measure(exact: PreTrainedModel, batches: Sequence[Batch]) -> Measure:
    """Return the measure that compares mean-pooled embeddings of passages with those of the exact model."""
    exact_embeddings = cache(partial(sentence_embeddings, exact, batches))

    def measure(model: PreTrainedModel, on_batch: OnBatch = report_nothing) -> Values:
        reference = exact_embeddings()
        new = reference if model is exact else sentence_embeddings(model, batches, on_batch)
        cosine = float(cosine_similarity(reference, new, dim=-1).mean())
        longest = max(batch["input_ids"].shape[1] for batch in batches)
        return [
            value("cosine", cosine),
            value("divergence", 1 - cosine),
            value("same_neighbor", float((nearest_neighbors(reference) == nearest_neighbors(new)).double().mean())),
            value("passages", len(new)),
            value("longest_input", longest, unit="tokens"),
        ]

    return measure


def sentence_pair_measure(
    rows: Sequence[Sequence[int]], references: Sequence[float], *, batch_size: int, pad: int = 0
) -> Measure:
    """Return the measure that ranks pairs by the cosine of their mean-pooled embeddings: Spearman and Pearson.

    Args:
        rows: Token ids of the first sentences, and then of the second ones.
        references: How similar the sentences of each pair are.
        batch_size: Sentences of one forward pass.
        pad: The token of padding.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # similar lengths need less padding
    batches = padded_batches([rows[index] for index in order], batch_size, pad)
    expected = np.array(references, dtype=float)

    def measure(model: PreTrainedModel, on_batch: OnBatch = report_nothing) -> Values:
        embeddings = sentence_embeddings(model, batches, on_batch)[torch.tensor(order).argsort()]
        first, second = embeddings.chunk(2)
        similarity = cosine_similarity(first, second, dim=-1).double().numpy()
        scores = compute_metrics(["spearmanr", "pearson"], similarity, expected)
        return [
            value("spearmanr", scores["spearmanr"], stderr=bootstrap_stderr("spearmanr", similarity, expected)),
            value("pearson", scores["pearson"]),
            value("pairs", len(expected)),
            value("longest_input", max(map(len, rows)), unit="tokens"),
        ]

    return measure
