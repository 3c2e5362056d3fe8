"""Sentence embeddings: how near they are to those of the exact model, and how they rank pairs of sentences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from transformers import PreTrainedModel

from ..data.metrics import compute_metrics
from ..utils.models import Batch, evaluation_mode, mean_pooling, model_inputs
from .classification import standard_error
from .metric import Metric, Numbers, Score


class EmbeddingCosine(Metric):
    """The mean cosine of a model's sentence embeddings to those of the exact model, for the same passages.

    `same_neighbor` is the share of the passages whose most similar other passage is the same by both.

    Args:
        batches: Passages.
        expected: The embeddings of the exact model, `[passages, width]`.
    """

    def __init__(self, batches: Sequence[Batch], expected: Tensor) -> None:
        self.batches, self.expected = batches, expected
        title = "cosine to exact embeddings"
        self.score = Score("sentence_embeddings", "cosine", title, digits=4, is_agreement=True)

    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure an encoder."""
        embeddings = sentence_embeddings(model, self.batches)
        cosines = cosine_similarity(self.expected, embeddings, dim=-1).clamp(max=1.0)  # rounded, it may be more
        is_same = nearest_neighbors(self.expected) == nearest_neighbors(embeddings)
        return {
            "cosine": float(cosines.double().mean()),
            "same_neighbor": float(is_same.double().mean()),
            "rows": len(embeddings),
            "longest_input": max(batch["input_ids"].shape[1] for batch in self.batches),
        }


class SentencePairs(Metric):
    """How the cosines of the embeddings of two sentences rank pairs: the correlation with given similarities.

    Args:
        batches: The first sentences of all pairs, and then the second ones.
        similarities: That of each pair.
    """

    def __init__(self, batches: Sequence[Batch], similarities: Sequence[float]) -> None:
        self.batches, self.similarities = batches, [*similarities]
        self.score = Score("sts", "spearmanr", "STS-B Spearman")

    def __call__(self, model: PreTrainedModel) -> Numbers:
        """Measure an encoder."""
        first, second = sentence_embeddings(model, self.batches).chunk(2)
        cosines = cosine_similarity(first, second, dim=-1).double().numpy()
        values: dict[str, Any] = compute_metrics(["spearmanr", "pearson"], cosines, self.similarities)
        error = standard_error("spearmanr", values["spearmanr"], len(cosines))
        longest = max(batch["input_ids"].shape[1] for batch in self.batches)
        return {**values, "spearmanr_stderr": error, "rows": len(cosines), "longest_input": longest}


@torch.no_grad()
def sentence_embeddings(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """Return the mean over real tokens of the final hidden states, `[passages, width]`, float32 on the CPU."""
    pooled = []
    with evaluation_mode(model):
        for batch in batches:
            hidden = model.base_model(**model_inputs(model.base_model, batch))[0]
            pooled.append(mean_pooling(hidden, batch.get("attention_mask")).cpu())
    return torch.cat(pooled)


def nearest_neighbors(embeddings: Tensor) -> Tensor:
    """Return the index of each passage's most similar other passage, from embeddings `[passages, width]`."""
    unit = normalize(embeddings, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2.0).argmax(dim=-1)
