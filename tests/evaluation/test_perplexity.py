"""Perplexity against a direct computation, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2LMHeadModel

from hf_linear_attn.evaluation.perplexity import measure_perplexity, windows
from tests.helpers import MAX_LENGTH, VOCABULARY, tiny_model

DOCUMENTS = [list(range(1, 40)), [5, 9, 3], [7], list(range(60, 20, -1))]


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return tiny_model("gpt2", GPT2LMHeadModel)


def direct(model: GPT2LMHeadModel, documents: list[list[int]], context: int, stride: int) -> tuple[float, int]:
    """Sum of the losses by the definition: token i is predicted in the first window that reaches it."""
    total, count = 0.0, 0
    for document in documents:
        for place in range(1, len(document)):
            start = 0
            while start + context <= place:
                start += stride
            with torch.no_grad():
                logits = model(torch.tensor([document[start:place]])).logits[0, -1].double()
            total -= float(logits.log_softmax(dim=-1)[document[place]])
            count += 1
    return total, count


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 15), (7, 1), (96, 48)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_equals_the_definition(model: GPT2LMHeadModel, context: int, stride: int, batch_size: int) -> None:
    total, count = direct(model, DOCUMENTS, context, stride)
    found = measure_perplexity(model, DOCUMENTS, context=context, stride=stride, batch_size=batch_size)
    assert found.tokens == count == sum(len(document) - 1 for document in DOCUMENTS)
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = tiny_model("gpt2", GPT2LMHeadModel)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = measure_perplexity(model, DOCUMENTS, context=MAX_LENGTH, stride=8)
    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-5)


def test_loss_by_position_adds_up(model: GPT2LMHeadModel) -> None:
    found = measure_perplexity(model, [list(range(1, 33))], context=32, stride=16)
    assert len(found.by_position) == 8
    # Positions 1-3 in the first eighth, four in every other.
    weights = [3, *[4] * 7]
    total = sum(weight * loss for weight, loss in zip(weights, found.by_position, strict=True) if loss is not None)
    assert total / 31 == pytest.approx(found.loss)


def test_windows_count_each_token_once() -> None:
    for context, stride in ((4, 2), (5, 4), (3, 1)):
        counted = []
        for window in windows([list(range(23))], context, stride):
            counted += window.tokens[window.first :]
            assert len(window.tokens) <= context
        assert counted == list(range(1, 23))


def test_model_mode_is_kept(model: GPT2LMHeadModel) -> None:
    model.train()
    measure_perplexity(model, DOCUMENTS, context=16, stride=8)
    assert model.training
    model.eval()


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (8, 0), (8, 8)])
def test_refuses_impossible_windows(model: GPT2LMHeadModel, context: int, stride: int) -> None:
    with pytest.raises(ValueError, match="context"):
        measure_perplexity(model, DOCUMENTS, context=context, stride=stride)


def test_refuses_nothing_to_predict(model: GPT2LMHeadModel) -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        measure_perplexity(model, [[3]], context=8, stride=4)
