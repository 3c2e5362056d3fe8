"""Perplexity against a direct computation token by token, embeddings by hand, and standard errors."""

from __future__ import annotations

import copy
import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.measure.quality import (
    assess,
    bootstrap_stderr,
    classification_measure,
    embedding_measure,
    measure_perplexity,
    nearest_neighbors,
    perplexity_measure,
    sentence_embeddings,
    strided_windows,
)
from tests.tiny_models import MAX_LENGTH, VOCABULARY, tiny_model

DOCUMENTS = [list(range(1, 40)), [5, 9, 3], [7], list(range(60, 20, -1))]


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return tiny_model("gpt2", GPT2LMHeadModel)


def direct(model: GPT2LMHeadModel, documents: list[list[int]], context: int, stride: int) -> tuple[float, int]:
    """Sum of the losses by the definition: token i is predicted in the first window that reaches it."""
    total, count = 0.0, 0
    for document in documents:
        for position in range(1, len(document)):
            start = 0
            while start + context <= position:
                start += stride
            with torch.no_grad():
                logits = model(torch.tensor([document[start:position]])).logits[0, -1].double()
            total -= float(logits.log_softmax(dim=-1)[document[position]])
            count += 1
    return total, count


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 15), (7, 1), (96, 48)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_equals_the_definition(model: GPT2LMHeadModel, context: int, stride: int, batch_size: int) -> None:
    total, count = direct(model, DOCUMENTS, context, stride)
    result = measure_perplexity(model, DOCUMENTS, context=context, stride=stride, batch_size=batch_size)
    assert result.tokens == count == sum(len(document) - 1 for document in DOCUMENTS)
    assert result.loss == pytest.approx(total / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = tiny_model("gpt2", GPT2LMHeadModel)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    result = measure_perplexity(model, DOCUMENTS, context=MAX_LENGTH, stride=8)
    assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-5)


def test_loss_by_position_adds_up(model: GPT2LMHeadModel) -> None:
    result = measure_perplexity(model, [list(range(1, 33))], context=32, stride=16)
    assert len(result.by_position) == 8
    # Positions 1-3 in the first eighth, four in every other.
    weights = [3, *[4] * 7]
    total = sum(weight * loss for weight, loss in zip(weights, result.by_position, strict=True) if loss is not None)
    assert total / 31 == pytest.approx(result.loss)


def test_windows_count_each_token_once() -> None:
    for context, stride in ((4, 2), (5, 4), (3, 1)):
        counted = []
        for tokens, first in strided_windows([list(range(23))], context, stride):
            counted += tokens[first:]
            assert len(tokens) <= context
        assert counted == list(range(1, 23))


def test_model_mode_is_restored(model: GPT2LMHeadModel) -> None:
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


def test_standard_error_shrinks_with_the_data(model: GPT2LMHeadModel) -> None:
    """That of the loss is the spread of the windows' means, for windows of equal size."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(1, VOCABULARY, (12, 17), generator=generator).tolist()
    result = measure_perplexity(model, documents, context=17, stride=16)
    means = torch.tensor([measure_perplexity(model, [one], context=17, stride=16).loss for one in documents])
    assert result.stderr == pytest.approx(float(means.std(correction=0)) / 12**0.5, rel=1e-4)
    assert result.longest_window == 17


def test_the_difference_from_the_exact_model_is_paired(model: GPT2LMHeadModel) -> None:
    """Both predict the same windows: what makes a window hard for both is no error of their difference."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(1, VOCABULARY, (12, 17), generator=generator).tolist()
    other = without_attention(model)
    windows: dict[str, int] = {"context": 17, "stride": 16}
    result = measure_perplexity(other, documents, **windows, exact=model)
    means = [[measure_perplexity(one, [row], **windows).loss for row in documents] for one in (other, model)]
    losses = torch.tensor(means, dtype=torch.float64)
    own, exact = losses.mean(dim=1).exp().tolist()
    assert result.difference == pytest.approx(own - exact, rel=1e-5)
    expected = float((own * losses[0] - exact * losses[1]).std(correction=0)) / 12**0.5
    assert result.difference_stderr == pytest.approx(expected, rel=1e-4)
    assert measure_perplexity(model, documents, **windows, exact=model).difference_stderr == 0.0
    calls: list[int] = []
    with_hook = model.register_forward_hook(lambda *_: calls.append(1))
    measure_perplexity(model, documents, **windows, batch_size=12, exact=model)
    with_hook.remove()
    assert len(calls) == 1


def test_one_window_or_row_has_no_standard_error(model: GPT2LMHeadModel) -> None:
    assert math.isnan(measure_perplexity(model, [[5, 9, 3]], context=8, stride=4).stderr)
    assert bootstrap_stderr("accuracy", np.zeros(1, int), np.zeros(1, int)) is None


def test_values_of_a_record(model: GPT2LMHeadModel) -> None:
    metric = perplexity_measure(DOCUMENTS, context=16, stride=8, batch_size=4)
    values = {(row["metric"], row.get("position")): row["value"] for row in metric(model)}
    expected = measure_perplexity(model, DOCUMENTS, context=16, stride=8)
    assert values["loss", None] == pytest.approx(expected.loss)
    assert values["longest_input", None] == 16
    assert [values["loss_at", position] for position in range(0, 16, 2)] == pytest.approx(expected.by_position)


# --------------------------------------------------------------------------------------------------------------------
# Tasks


def test_bootstrap_of_an_accuracy_is_its_binomial_error() -> None:
    generator = np.random.default_rng(1)
    references = np.zeros(400, dtype=int)
    predictions = (generator.random(400) < 0.3).astype(int)
    share = predictions.mean()
    expected = (share * (1 - share) / 400) ** 0.5
    assert bootstrap_stderr("accuracy", predictions, references) == pytest.approx(expected, rel=0.2)
    assert bootstrap_stderr("hub:anything", predictions, references) is None


def test_scores_and_divergence_of_a_classifier() -> None:
    torch.manual_seed(0)
    exact = tiny_model("bert", BertForSequenceClassification)
    other = copy.deepcopy(exact)
    other.classifier.weight.data += torch.randn(other.classifier.weight.shape)
    ids = torch.randint(4, VOCABULARY, (6, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 0, 1, 1, 0])}
    metric = classification_measure(exact, {"": [batch]}, ["accuracy", "f1"], regression=False)
    values = {row["metric"]: row["value"] for row in metric(other)}
    with torch.no_grad():
        p, q = (model(ids).logits.log_softmax(dim=-1) for model in (exact, other))
    assert values["divergence"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    right = (q.argmax(-1) == batch["labels"]).float().mean()
    assert values["score"] == values["accuracy"] == pytest.approx(float(right))
    assert values["rows"] == 6
    assert {row["metric"]: row["value"] for row in metric(exact)}["divergence"] == pytest.approx(0.0, abs=1e-6)


def test_scores_that_are_all_the_same_without_attention_have_a_floor() -> None:
    """The first token of an encoder sees itself only, so that its scores are constant and have no correlation."""
    torch.manual_seed(0)
    exact = tiny_model("bert", BertForSequenceClassification, num_labels=1)
    ids = torch.randint(4, VOCABULARY, (12, 9))
    ids[:, 0] = 4
    with torch.no_grad():
        labels = exact(ids).logits.squeeze(-1)  # what the exact model says is right
    metric = classification_measure(exact, {"": [{"input_ids": ids, "labels": labels}]}, ["pearson"], regression=True)
    own, without = (
        {row["metric"]: row["value"] for row in metric(one)} for one in (exact, without_attention(exact).eval())
    )
    assert math.isnan(without["score"])
    assessment = assess(
        0.5, own["score"], None, higher_is_better=True, most_frequent_answer=own["most_frequent_answer"]
    )
    assert (assessment.valid, assessment.below_floor, assessment.floor) == (True, False, 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Sentence embeddings


def test_padding_does_not_count() -> None:
    model = tiny_model("bert").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    unpadded = sentence_embeddings(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    padded = torch.tensor([[2, 5, 6, 3, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    torch.testing.assert_close(sentence_embeddings(model, [{"input_ids": padded, "attention_mask": mask}]), unpadded)
    with torch.no_grad():
        direct = model(ids)[0].mean(dim=1)
    torch.testing.assert_close(unpadded, direct)


def test_cosine_to_the_exact_embeddings() -> None:
    torch.manual_seed(0)
    exact, other = tiny_model("bert").eval(), tiny_model("bert").eval()
    ids = torch.randint(4, VOCABULARY, (5, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    values = {row["metric"]: row["value"] for row in embedding_measure(exact, [batch])(other)}
    with torch.no_grad():
        a, b = (model(ids)[0].mean(dim=1) for model in (exact, other))
    expected = float(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).mean())
    assert values["cosine"] == pytest.approx(expected, abs=1e-6)
    assert values["divergence"] == pytest.approx(1 - expected, abs=1e-6)
    assert {row["metric"]: row["value"] for row in embedding_measure(exact, [batch])(exact)}["cosine"] == pytest.approx(
        1
    )


@pytest.mark.parametrize(
    ("score", "exact", "floor", "options", "expected"),
    [
        # valid, worse, below_floor, chance
        (6.0, 5.0, 9.0, {}, (True, True, False, False)),
        (9.5, 5.0, 9.0, {}, (True, True, True, False)),
        (4.0, 5.0, 9.0, {"divergence": 0.84, "floor_divergence": 2.0}, (True, False, False, True)),
        (4.9, 5.0, 9.0, {"divergence": 0.03, "floor_divergence": 2.0}, (True, False, False, False)),
        # The exact model is worse than the one without attention, or hardly better: nothing can be said.
        (90.0, 110.0, 100.0, {}, (False, False, False, False)),
        (5.1, 5.0, 5.09, {}, (False, True, False, False)),
        (6.0, 5.0, 9.0, {"stderr": 2.0}, (False, True, False, False)),
        (None, 5.0, 9.0, {}, (True, True, False, False)),
        (6.0, 5.0, None, {}, (False, True, False, False)),
    ],
)
def test_a_score_is_compared_with_the_exact_model_and_then_with_no_attention(
    score: float | None, exact: float, floor: float | None, options: dict[str, float], expected: tuple[bool, ...]
) -> None:
    assert astuple(assess(score, exact, floor, higher_is_better=False, **options))[:4] == expected
    negative = [None if one is None else -one for one in (score, exact, floor)]
    assert astuple(assess(*negative, higher_is_better=True, **options))[:4] == expected


def test_nearest_neighbors_by_hand() -> None:
    assert nearest_neighbors(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])).tolist() == [1, 0, 1]
    assert nearest_neighbors(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])).tolist() == [1, 2, 1]
