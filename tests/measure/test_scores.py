"""Scores of tasks and of sentence embeddings by hand, and what a score says."""

from __future__ import annotations

import copy
from dataclasses import astuple

import pytest
import torch
from sklearn.metrics import f1_score
from transformers import BertForSequenceClassification

from hf_linear_attn.data.labels import Labels
from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.measure.assessment import assess
from hf_linear_attn.measure.classification import Classification, standard_error
from hf_linear_attn.measure.embedding import EmbeddingCosine, SentencePairs, nearest_neighbors, sentence_embeddings
from tests.tiny_models import VOCABULARY, tiny_model

CLASSES = Labels("single_label_classification", ("a", "b"))


def test_scores_of_a_classifier_by_hand() -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(tiny_model("bert", BertForSequenceClassification))
    model.classifier.weight.data += torch.randn(model.classifier.weight.shape)
    ids = torch.randint(4, VOCABULARY, (6, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 0, 1, 1, 1])}
    metric = Classification({"": [batch]}, ["accuracy", "f1"], CLASSES)
    values = metric(model)
    with torch.no_grad():
        right = (model(ids).logits.argmax(-1) == batch["labels"]).float().mean()
    assert values["accuracy"] == pytest.approx(float(right))
    assert (values["rows"], values["longest_input"]) == (6, 9)
    assert (metric.score.metric, metric.score.constant_answer) == ("accuracy", pytest.approx(4 / 6))
    named = Classification({"matched": [batch], "mismatched": [batch]}, ["accuracy"], CLASSES)
    assert named(model)["mismatched_accuracy"] == named(model)[named.score.metric] == values["accuracy"]


def test_the_classes_of_a_metric_are_those_of_the_data_whatever_the_outputs_of_the_head() -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(tiny_model("bert", BertForSequenceClassification))
    model.classifier.weight.data += torch.randn(model.classifier.weight.shape)
    ids = torch.randint(4, VOCABULARY, (16, 9))
    swapped = Labels("single_label_classification", ("yes", "no"), outputs=(1, 0))  # the data says no, yes
    labels = torch.tensor([0, 1, 1, 1] * 4)
    metric = Classification({"": [{"input_ids": ids, "labels": labels}]}, ["f1", "accuracy"], swapped)
    with torch.no_grad():
        answers = 1 - model(ids).logits.argmax(-1)
    values = metric(model)
    assert values["f1"] == pytest.approx(f1_score(1 - labels, answers))
    assert values["f1"] != pytest.approx(f1_score(labels, 1 - answers))
    assert values["accuracy"] == pytest.approx(float((answers == 1 - labels).float().mean()))


def test_scores_of_several_labels_a_row_by_hand() -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(tiny_model("bert", BertForSequenceClassification, num_labels=3))
    model.classifier.weight.data += torch.randn(model.classifier.weight.shape)
    ids, labels = torch.randint(4, VOCABULARY, (16, 9)), torch.randint(2, (16, 3)).float()
    several = Labels("multi_label_classification", ("a", "b", "c"))
    names = ["f1_micro", "f1_macro", "subset_accuracy"]
    values = Classification({"": [{"input_ids": ids, "labels": labels}]}, names, several)(model)
    with torch.no_grad():
        answers = (model(ids).logits.sigmoid() > 0.5).float()
    assert values["f1_micro"] == pytest.approx(f1_score(labels, answers, average="micro"))
    assert values["f1_macro"] == pytest.approx(f1_score(labels, answers, average="macro"))
    assert values["subset_accuracy"] == pytest.approx(float((answers == labels).all(-1).float().mean()))


def test_scores_that_are_all_the_same_have_no_correlation() -> None:
    """The first token of an encoder without attention sees itself only."""
    torch.manual_seed(0)
    exact = tiny_model("bert", BertForSequenceClassification, num_labels=1)
    ids = torch.randint(4, VOCABULARY, (12, 9))
    ids[:, 0] = 4
    with torch.no_grad():
        labels = exact(ids).logits.squeeze(-1)  # what the exact model says is right
    metric = Classification({"": [{"input_ids": ids, "labels": labels}]}, ["pearson"], Labels("regression"))
    assert metric(exact)["pearson"] == pytest.approx(1)
    assert metric(without_attention(exact).eval())["pearson"] != metric(without_attention(exact).eval())["pearson"]
    assessment = assess(0.5, 1.0, None, greater_is_better=True, constant_answer=metric.score.constant_answer)
    assert (assessment.valid, assessment.below_floor, assessment.floor) == (True, False, 0.0)


@pytest.mark.parametrize(
    ("metric", "value", "rows", "expected"),
    [
        ("accuracy", 0.8, 96, (0.79 * 0.21 / 100) ** 0.5),  # (76.8 + 2) / 100 = 0.788
        ("pearson", 0.5, 101, 0.075),
        ("f1", 0.5, 50, None),
        ("pearson", 0.5, 1, None),
    ],
)
def test_standard_errors(metric: str, value: float, rows: int, expected: float | None) -> None:
    assert standard_error(metric, value, rows) == (None if expected is None else pytest.approx(expected, rel=0.01))


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


def test_embeddings_by_hand() -> None:
    torch.manual_seed(0)
    exact, other = tiny_model("bert").eval(), tiny_model("bert").eval()
    ids = torch.randint(4, VOCABULARY, (6, 7))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    with torch.no_grad():
        a, b = (model(ids)[0].mean(dim=1) for model in (exact, other))
    metric = EmbeddingCosine(batches, sentence_embeddings(exact, batches))
    cosines = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    assert metric(other)["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-6)
    assert metric(exact)["cosine"] == pytest.approx(1)
    # Pairs are the first and the second half of the sentences; three of them in the order of their cosines.
    pairs = torch.nn.functional.cosine_similarity(a[:3], a[3:], dim=-1)
    ranks = pairs.argsort().argsort().tolist()
    assert SentencePairs(batches, ranks)(exact)["spearmanr"] == pytest.approx(1)


def test_nearest_neighbors_by_hand() -> None:
    assert nearest_neighbors(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])).tolist() == [1, 0, 1]
    assert nearest_neighbors(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("score", "exact", "floor", "options", "expected"),
    [
        # valid, worse, below_floor
        (6.0, 5.0, 9.0, {}, (True, True, False)),
        (9.5, 5.0, 9.0, {}, (True, True, True)),
        (4.0, 5.0, 9.0, {}, (True, False, False)),
        # The exact model is worse than the one without attention, or hardly better: nothing can be said.
        (90.0, 110.0, 100.0, {}, (False, False, False)),
        (5.1, 5.0, 5.09, {}, (False, True, False)),
        (6.0, 5.0, 9.0, {"stderr": 2.0}, (False, True, False)),
        (None, 5.0, 9.0, {}, (True, True, False)),
        (6.0, 5.0, None, {}, (False, True, False)),
    ],
)
def test_a_score_is_compared_with_the_exact_model_and_then_with_no_attention(
    score: float | None, exact: float, floor: float | None, options: dict[str, float], expected: tuple[bool, ...]
) -> None:
    assert astuple(assess(score, exact, floor, greater_is_better=False, **options))[:3] == expected
    negative = [None if number is None else -number for number in (score, exact, floor)]
    assert astuple(assess(*negative, greater_is_better=True, **options))[:3] == expected
