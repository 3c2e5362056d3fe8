"""Sentence embeddings of an encoder: how far linear attention moves them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel


@dataclass(frozen=True)
class EmbeddingAgreement:
    """Mean-pooled embeddings of the same passages by two models.

    cosine: mean over passages; cosine_p20: the 20th percentile. same_neighbour: share of passages whose most similar
    other passage is the same one. passages: how many.
    """

    cosine: float
    cosine_p20: float
    same_neighbour: float
    passages: int


@torch.no_grad()
def sentence_embeddings(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
    """Mean over real tokens of the final hidden states, `[passages, width]`, float32 on the CPU."""
    accepted = set(inspect.signature(model.base_model.forward).parameters)
    training = model.training
    model.eval()
    pooled = []
    try:
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name in accepted}
            hidden = model.base_model(**inputs)[0].float()
            mask = batch["attention_mask"].to(hidden.device).unsqueeze(-1).float()
            pooled.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).cpu())
    finally:
        model.train(training)
    return torch.cat(pooled)


def agreement(exact: Tensor, linear: Tensor) -> EmbeddingAgreement:
    """Compare embeddings `[passages, width]` of the same passages."""
    cosine = functional.cosine_similarity(exact, linear, dim=-1)
    same = nearest_neighbours(exact) == nearest_neighbours(linear)
    return EmbeddingAgreement(
        float(cosine.mean()), float(cosine.quantile(0.2)), float(same.double().mean()), len(cosine)
    )


def nearest_neighbours(embeddings: Tensor) -> Tensor:
    """Index of each row's most similar other row, `[passages]`."""
    similarity = pairwise_cosine(embeddings)
    return similarity.fill_diagonal_(-2.0).argmax(dim=-1)


def unrelated_cosine(embeddings: Tensor) -> float:
    """Mean cosine of different passages: what "no relation" looks like for this model."""
    similarity = pairwise_cosine(embeddings)
    count = len(similarity)
    return float((similarity.sum() - similarity.diagonal().sum()) / max(count * (count - 1), 1))


def pairwise_cosine(embeddings: Tensor) -> Tensor:
    """`[passages, passages]`."""
    unit = functional.normalize(embeddings, dim=-1)
    return unit @ unit.T
