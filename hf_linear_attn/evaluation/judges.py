"""What a model as a whole is worth: one class a measure, each with what its value depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..integration.discovery import longest_input
from .embeddings import agreement, sentence_embeddings, unrelated_cosine
from .fidelity import measure_fidelity
from .metrics import ClassificationMetric
from .perplexity import measure_perplexity
from .preparing import Data, Pairs, Plan


class Judge(Protocol):
    """A measure of quality."""

    @property
    def measure(self) -> Mapping[str, Any]:
        """The part `measure` of a key: `what`, and all that the value depends on besides the model."""

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        """A part of the report's quality, such as `{"perplexity": {...}}`."""


class PerplexityJudge:
    """Perplexity over strided windows, with the loss by position."""

    def __init__(self, model: PreTrainedModel, data: Data, plan: Plan) -> None:
        limit = longest_input(model) or plan.sequence_length
        self.context = plan.context or min(plan.sequence_length, limit)
        self.stride = plan.stride or max(self.context // 2, 1)
        self._data, self._batch_size = data, plan.batch_size

    @property
    def measure(self) -> dict[str, Any]:
        tokens = sum(map(len, self._data.documents))
        windows = {"context": self.context, "stride": self.stride}
        return {"what": "perplexity", "data": self._data.facts["sha256"], "tokens": tokens, **windows}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        settings = {"context": self.context, "stride": self.stride, "batch_size": self._batch_size}
        return {"perplexity": asdict(measure_perplexity(model, self._data.documents, **settings))}


class SentenceJudge:
    """Mean-pooled embeddings of held-out passages beside those of the exact model."""

    def __init__(self, exact: PreTrainedModel, data: Data) -> None:
        self._exact, self._data = exact, data
        self._embeddings: Tensor | None = None

    @property
    def measure(self) -> dict[str, Any]:
        facts = self._data.facts
        passages = {"passages": facts["held_out_sequences"], "length": facts["sequence_length"]}
        return {"what": "sentences", "data": facts["sha256"], **passages}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        if self._embeddings is None:
            self._embeddings = sentence_embeddings(self._exact, self._data.held_out)
        own = self._embeddings if model is self._exact else sentence_embeddings(model, self._data.held_out)
        found: dict[str, Any] = {"sentences": asdict(agreement(self._embeddings, own))}
        if model is self._exact:
            found["unrelated_cosine"] = unrelated_cosine(own)
        return found


class SimilarityJudge:
    """How well the cosine of mean-pooled embeddings ranks pairs of sentences (STS-B): Spearman and Pearson."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    @property
    def measure(self) -> dict[str, Any]:
        return {"what": "sts", "data": self._pairs.sha256, "pairs": len(self._pairs.scores)}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        from ..data.metrics import TaskMetrics

        pooled = sentence_embeddings(model, self._pairs.batches)
        embeddings = torch.empty_like(pooled)
        embeddings[torch.tensor(self._pairs.order)] = pooled
        count = len(self._pairs.scores)
        similarity = torch.nn.functional.cosine_similarity(embeddings[:count], embeddings[count:], dim=-1)
        metric = TaskMetrics(["spearmanr", "pearson"])
        metric.add_batch(predictions=similarity.tolist(), references=self._pairs.scores)
        return {"sts": {**{name: float(held) for name, held in (metric.compute() or {}).items()}, "pairs": count}}


class TaskJudge:
    """The metrics of a labelled task; of several validation sets (MNLI) each has a suffix, and the first decides."""

    def __init__(self, exact: PreTrainedModel, data: Data, *, regression: bool) -> None:
        self._data = data
        self._parts = {
            suffix: ClassificationMetric(exact, {"": batches}, data.facts["metrics"], regression=regression)
            for suffix, batches in data.labelled.items()
        }

    @property
    def measure(self) -> dict[str, Any]:
        facts = self._data.facts
        what = {"task": facts["task"], "rows": facts["rows"], "length": facts["sequence_length"]}
        return {"what": "task", "data": facts["sha256"], **what}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        found: dict[str, Any] = {"examples": 0}
        for suffix, part in self._parts.items():
            measured = part.measure(model)
            found["examples"] += measured["rows"]
            found.setdefault("score", measured[part.metrics[0]])
            found.setdefault("divergence", measured["divergence"])
            for name in self._data.facts["metrics"]:
                found[name + suffix] = measured[name]
        return {"task": found}


class FidelityJudge:
    """How near each head of a patched model comes to its own exact attention, without labels."""

    def __init__(self, data: Data) -> None:
        self._data = data

    @property
    def measure(self) -> dict[str, Any]:
        facts = self._data.facts
        size = {"sequences": facts["fidelity_sequences"], "length": facts["sequence_length"]}
        return {"what": "fidelity", "data": facts["sha256"], **size}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        found = measure_fidelity(model, self._data.fidelity)
        return {
            "kl": found.kl,
            "output_error": found.output_error,
            "final_cosine": found.final_cosine,
            "tokens": found.tokens,
            "layers": [asdict(layer) for layer in found.layers],
        }


def judges_for(
    kind: str, model: PreTrainedModel, data: Data, plan: Plan, pairs: Pairs | None = None, *, regression: bool = False
) -> list[Judge]:
    """The measures of one kind of model: decoder, encoder or classifier."""
    makers: dict[str, Callable[[], Judge]] = {
        "decoder": lambda: PerplexityJudge(model, data, plan),
        "encoder": lambda: SentenceJudge(model, data),
        "classifier": lambda: TaskJudge(model, data, regression=regression),
    }
    return [makers[kind](), *([] if pairs is None else [SimilarityJudge(pairs)])]
