"""Losses against their definitions in float64, written out row by row."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from hf_linear_attn.training.objectives import (
    DistillObjective,
    TaskObjective,
    hidden_loss,
    logits_loss,
    split_labels,
    task_loss,
)
from hf_linear_attn.training.options import DistillSettings
from tests.helpers import BERT, GPT2, assert_close, padded_batch, patched, tiny_model, token_ids


class Rows:
    """One label a row, as in classification."""

    def __init__(self, regression=False):
        self.regression = regression

    def predicted(self, logits, labels):
        return logits, labels

    def row_counts(self, labels):
        return torch.ones(labels.shape[0], dtype=torch.long)


class Tokens:
    """One label a token, -100 where none is asked for."""

    regression = False

    def predicted(self, logits, labels):
        kept = labels != -100
        return logits[kept], labels[kept]

    def row_counts(self, labels):
        return (labels != -100).sum(1)


# --------------------------------------------------------------------------------------------------------------------
# Definitions


def log_softmax_of(row):
    shift = max(row)
    total = math.log(sum(math.exp(value - shift) for value in row)) + shift
    return [value - total for value in row]


def cross_entropy_of(rows, targets):
    return sum(-log_softmax_of(row)[target] for row, target in zip(rows, targets, strict=True))


def divergence_of(rows, wanted, temperature):
    total = 0.0
    for row, guide in zip(rows, wanted, strict=True):
        q = log_softmax_of([value / temperature for value in row])
        p = log_softmax_of([value / temperature for value in guide])
        total += sum(math.exp(b) * (b - a) for a, b in zip(q, p, strict=True))
    return temperature**2 * total


def hidden_of(student, teacher, mask):
    """Layers x rows x tokens x width, as nested lists; one error a row."""
    errors = []
    for b, row in enumerate(mask):
        layers = []
        for own, wanted in zip(student[1:], teacher[1:], strict=True):
            difference = norm = 0.0
            for t, real in enumerate(row):
                if real:
                    difference += sum((x - y) ** 2 for x, y in zip(own[b][t], wanted[b][t], strict=True))
                    norm += sum(y**2 for y in wanted[b][t])
            layers.append(difference / norm)
        errors.append(sum(layers) / len(layers))
    return errors


def lists(tensor):
    return tensor.detach().double().tolist()


def close(actual, expected):
    expected = expected if isinstance(expected, list) else [expected]
    assert_close(actual.detach().reshape(-1), torch.tensor(expected, dtype=torch.float64))


def test_cross_entropy():
    rows, targets = torch.randn(5, 7) * 3, torch.tensor([0, 6, 3, 3, 1])
    close(task_loss(rows, targets, False), cross_entropy_of(lists(rows), targets.tolist()))
    assert task_loss(rows[:0], targets[:0], False) == 0


def test_squared_error_of_scores():
    rows, targets = torch.randn(5, 1), torch.randn(5)
    expected = sum((row[0] - target) ** 2 for row, target in zip(lists(rows), lists(targets), strict=True))
    close(task_loss(rows, targets, True), expected)
    close(logits_loss(rows, targets[:, None], 3.0, True), expected)
    close(task_loss(rows[:1], targets[:1], True), (rows[0, 0] - targets[0]).double().item() ** 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 10.0])
def test_divergence_of_outputs(temperature):
    rows, wanted = torch.randn(4, 6) * 2, torch.randn(4, 6) * 2
    close(logits_loss(rows, wanted, temperature, False), divergence_of(lists(rows), lists(wanted), temperature))
    assert logits_loss(rows, rows, temperature, False) == pytest.approx(0, abs=1e-5)
    # A constant added to the outputs of a row changes nothing.
    moved = logits_loss(rows + torch.randn(4, 1), wanted, temperature, False)
    assert_close(moved, logits_loss(rows, wanted, temperature, False))


def test_the_temperature_leaves_the_size_of_gradients():
    """T² makes up for the 1/T² of the gradient of softened outputs (Hinton et al. 2015, section 2.1)."""
    wanted = torch.randn(4, 6) * 0.01
    sizes = []
    for temperature in (10.0, 100.0):
        rows = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 0.01).requires_grad_()
        logits_loss(rows, wanted, temperature, False).backward()
        sizes.append(rows.grad.norm().item())
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states(dtype):
    student = tuple(torch.randn(2, 4, 3).to(dtype) for _ in range(4))
    teacher = tuple(torch.randn(2, 4, 3).to(dtype) for _ in range(4))
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    given = [[lists(layer) for layer in side] for side in (student, teacher)]
    found = hidden_loss(student, teacher, mask)
    assert found.dtype == torch.float32
    assert found.shape == (2,)
    close(found, hidden_of(*given, mask.tolist()))
    close(hidden_loss(student, teacher, mask.bool()), hidden_of(*given, mask.tolist()))
    close(hidden_loss(student, teacher, None), hidden_of(*given, [[1] * 4] * 2))
    assert not hidden_loss(student, student, mask).any()
    # The embeddings, and whatever padding holds, do not count.
    changed = (student[0] + 1, *(layer.clone() for layer in student[1:]))
    changed[2][0, 3], changed[2][1, 0] = float("inf"), float("nan")
    assert_close(hidden_loss(changed, teacher, mask), found)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        hidden_loss(student[:-1], teacher, mask)


def test_labels_are_taken_out():
    batch = {"input_ids": torch.ones(1, 2), "labels": torch.tensor([3])}
    inputs, labels = split_labels(batch)
    assert list(inputs) == ["input_ids"]
    assert labels is batch["labels"]
    assert "labels" in batch


# --------------------------------------------------------------------------------------------------------------------
# Objectives over tiny models

ROWS = [token_ids(1, length, seed=length)[0] for length in (9, 4, 6)]


def classified(num_labels=3):
    labels = torch.tensor([0, 2, 1]) if num_labels > 1 else torch.tensor([0.5, -1.0, 2.0])
    inputs = {name: held for name, held in padded_batch(ROWS, "right").items() if name != "position_ids"}
    return {**inputs, "labels": labels}


def masked():
    inputs = {name: held for name, held in padded_batch(ROWS, "right").items() if name != "position_ids"}
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, 1], labels[0, 5], labels[2, 3] = 7, 8, 9
    return {**inputs, "labels": labels}


def classifier(num_labels=3, seed=0):
    torch.manual_seed(seed)
    return tiny_model("bert", BertForSequenceClassification, num_labels=num_labels)


def outputs(model, batch):
    with torch.no_grad():
        return model(**split_labels(batch)[0], output_hidden_states=True)


@pytest.mark.parametrize("regression", [False, True])
def test_task_of_classification(regression):
    model = classifier(1 if regression else 3)
    batch = classified(1 if regression else 3)
    sums = TaskObjective(Rows(regression))(model, batch)
    rows, labels = lists(outputs(model, batch).logits), batch["labels"].tolist()
    if regression:
        close(sums.loss, sum((row[0] - label) ** 2 for row, label in zip(rows, labels, strict=True)))
    else:
        close(sums.loss, cross_entropy_of(rows, labels))
    assert sums.parts.keys() == {"task"}
    assert not sums.parts["task"].requires_grad
    sums.loss.backward()
    assert model.classifier.weight.grad.abs().sum() > 0


def test_task_of_tokens():
    model, batch = BERT.build(), masked()
    sums = TaskObjective(Tokens())(model, batch)
    rows = lists(outputs(model, batch).logits[batch["labels"] != -100])
    close(sums.loss, cross_entropy_of(rows, [7, 8, 9]))


SETTINGS = DistillSettings(logits=0.7, task=0.3, hidden=1.9, temperature=3.0)


@pytest.mark.parametrize("kind", ["classes", "scores", "tokens"])
def test_distillation_is_its_definition(kind):
    size = 1 if kind == "scores" else 3
    student, teacher = (BERT.build(), BERT.build()) if kind == "tokens" else (classifier(size, 1), classifier(size, 2))
    batch = masked() if kind == "tokens" else classified(size)
    heads = Tokens() if kind == "tokens" else Rows(kind == "scores")
    sums = DistillObjective(heads, teacher, SETTINGS)(student, batch)
    own, guide = outputs(student, batch), outputs(teacher, batch)
    rows, targets = heads.predicted(own.logits, batch["labels"])
    wanted = lists(heads.predicted(guide.logits, batch["labels"])[0])
    rows, targets = lists(rows), targets.tolist()
    if kind == "scores":
        expected = {
            "task": sum((row[0] - label) ** 2 for row, label in zip(rows, targets, strict=True)),
            "logits": sum((row[0] - other[0]) ** 2 for row, other in zip(rows, wanted, strict=True)),
        }
    else:
        expected = {"task": cross_entropy_of(rows, targets), "logits": divergence_of(rows, wanted, 3.0)}
    states = [[lists(layer) for layer in side.hidden_states] for side in (own, guide)]
    errors = hidden_of(*states, batch["attention_mask"].tolist())
    expected["hidden"] = sum(
        error * int(count) for error, count in zip(errors, heads.row_counts(batch["labels"]), strict=True)
    )
    assert sums.parts.keys() == expected.keys()
    for name, value in expected.items():
        close(sums.parts[name], value)
        assert not sums.parts[name].requires_grad
    close(sums.loss, 0.7 * expected["logits"] + 0.3 * expected["task"] + 1.9 * expected["hidden"])


def test_parts_of_weight_zero_are_not_computed():
    student, teacher, batch = classifier(seed=1), classifier(seed=2), classified()
    for name in ("logits", "task", "hidden"):
        weights = {"logits": 0.0, "task": 0.0, "hidden": 0.0, name: 2.0}
        asked = []

        def watched(asked=asked, **inputs):
            asked.append(inputs["output_hidden_states"])
            return teacher(**inputs)

        sums = DistillObjective(Rows(), watched, DistillSettings(**weights))(student, batch)
        assert sums.parts.keys() == {name}
        close(sums.loss, 2 * sums.parts[name].double().item())
        assert asked == ([] if name == "task" else [name == "hidden"])  # a teacher that is not needed costs no time


def test_equal_models_have_nothing_to_learn_from_each_other():
    teacher = classifier()
    settings = DistillSettings(task=0.0)
    sums = DistillObjective(Rows(), teacher, settings)(copy.deepcopy(teacher), classified())
    assert sums.loss.item() == pytest.approx(0, abs=1e-5)
    assert sums.parts["hidden"] == 0


@pytest.mark.parametrize("family", [BERT, GPT2], ids=str)
def test_only_the_student_gets_gradients(family):
    teacher, batch = family.build(), masked()
    student = patched("hedgehog", family)
    sums = DistillObjective(Tokens(), teacher, DistillSettings())(student, batch)
    sums.loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    silent = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert not silent
    learned = [parameter for name, parameter in student.named_parameters() if "linear_attention" in name]
    assert learned
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in student.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in learned)


def test_padding_changes_nothing():
    student, teacher, batch = classifier(seed=1), classifier(seed=2), classified()
    objective = DistillObjective(Rows(), teacher, SETTINGS)
    longer = {
        name: held if name == "labels" else nn.functional.pad(held, (0, 5), value=0) for name, held in batch.items()
    }
    assert_close(objective(student, longer).loss.detach(), objective(student, batch).loss.detach())


def test_sums_of_parts_of_a_batch_add_up():
    """So that accumulation and processes give the gradient of the whole (the hidden states: a mean over tokens)."""
    student, teacher, batch = classifier(seed=1), classifier(seed=2), classified()
    objective = DistillObjective(Rows(), teacher, DistillSettings(hidden=0.0))
    rows = [{name: held[at : at + 1] for name, held in batch.items()} for at in range(3)]
    parts = torch.stack([objective(student, row).loss.detach() for row in rows])
    assert_close(parts.sum(), objective(student, batch).loss.detach())


def test_a_model_without_a_mask():
    states = tuple(torch.randn(2, 4, 3) for _ in range(3))
    logits = torch.randn(2, 5)

    def model(input_ids, output_hidden_states):
        return SimpleNamespace(logits=logits, hidden_states=tuple(layer * 1.5 for layer in states))

    def teacher(input_ids, output_hidden_states):
        return SimpleNamespace(logits=logits, hidden_states=states)

    batch = {"input_ids": torch.ones(2, 4), "labels": torch.tensor([0, 1])}
    sums = DistillObjective(Rows(), teacher, DistillSettings(task=0.0))(model, batch)
    close(sums.parts["hidden"], 2 * 0.25)
