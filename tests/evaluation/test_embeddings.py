"""Sentence embeddings and how they are compared."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attn.evaluation.embeddings import agreement, nearest_neighbours, sentence_embeddings, unrelated_cosine
from tests.helpers import tiny_model


def test_padding_does_not_count() -> None:
    model = tiny_model("bert").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    alone = sentence_embeddings(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    padded = torch.tensor([[2, 5, 6, 3, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    torch.testing.assert_close(sentence_embeddings(model, [{"input_ids": padded, "attention_mask": mask}]), alone)
    with torch.no_grad():
        direct = model(ids)[0].mean(dim=1)
    torch.testing.assert_close(alone, direct)


def test_agreement_with_itself_is_complete() -> None:
    embeddings = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    found = agreement(embeddings, embeddings)
    assert found.cosine == pytest.approx(1.0)
    assert found.same_neighbour == 1.0
    assert found.passages == 9


def test_agreement_by_hand() -> None:
    exact = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    other = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert nearest_neighbours(exact).tolist() == [1, 0, 1]
    found = agreement(exact, other)
    assert found.cosine == pytest.approx((1 + 0.1 / 1.01**0.5 + 1) / 3)
    assert nearest_neighbours(other).tolist() == [1, 2, 1]
    assert found.same_neighbour == pytest.approx(2 / 3)


def test_unrelated_cosine_leaves_out_the_diagonal() -> None:
    assert unrelated_cosine(torch.eye(4)) == pytest.approx(0.0)
    assert unrelated_cosine(torch.ones(3, 2)) == pytest.approx(1.0)
