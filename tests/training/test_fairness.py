"""What would make a reported number unfair is an error, or is corrected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from sklearn import metrics
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import BertConfig, BertForSequenceClassification

from hf_linear_attn.data.task_data import load_task_data
from hf_linear_attn.study.convert import convert, finetune
from tests.tiny_models import tiny_config
from tests.tiny_text import tiny_tokenizer
from tests.training.tiny_runs import convert_config, finetune_config, quiet, save_task


def save_classifier(folder: Path, labels: list[str]) -> Path:
    config = tiny_config(
        "bert", id2label=dict(enumerate(labels)), label2id={name: index for index, name in enumerate(labels)}
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer(mask=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("labels", [["hot", "cold"], ["LABEL_0", "LABEL_1", "LABEL_2"]])
def test_a_head_for_other_labels_is_refused(labels: list[str], folder: Path, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", labels)
    with pytest.raises(ValueError, match=f"labels {', '.join(labels)}; the data has cold, warm"):
        convert(convert_config(model, folder / "task", tmp_path / "out", teacher__max_steps=None), console=quiet())


def answers(model: Path, sentences: list[str]) -> Any:
    tokenizer, classifier = tiny_tokenizer(mask=True), BertForSequenceClassification.from_pretrained(model).eval()
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        return classifier(**inputs).logits


#: What converts a model at all, and no more.
SHORT = {"teacher__max_steps": None, "distill__max_steps": 1, "distill__eval_steps": 0, "transfer__max_steps": 0}


def test_labels_are_those_of_the_head_by_name(folder: Path, tmp_path: Path) -> None:
    """Whatever their order: the alphabet is that of the data, and here not that of the model."""
    model = save_classifier(tmp_path / "model", ["warm", "mild", "cold"])
    rows = pandas.read_csv(folder / "task" / "validation.csv")
    logits = answers(model, list(rows["sentence"]))
    expected = [["warm", "mild", "cold"][index] for index in logits.argmax(-1)] == rows["label"]
    results = convert(convert_config(model, folder / "task", tmp_path / "out", **SHORT), console=quiet())
    assert results.scores.teacher["accuracy"] == pytest.approx(expected.mean())
    assert BertConfig.from_pretrained(tmp_path / "out" / "model").id2label == {0: "warm", 1: "mild", 2: "cold"}


def save_tags(folder: Path, sentences: list[str]) -> list[list[str]]:
    """Rows with the list of those words of three that a sentence has."""
    tags = [[word for word in ("red", "blue", "alpha") if word in sentence.split()] for sentence in sentences]
    rows = [{"sentence": text, "label": labels} for text, labels in zip(sentences, tags, strict=True)]
    folder.mkdir()
    for name in ("train", "validation"):
        pandas.DataFrame(rows).to_json(folder / f"{name}.jsonl", orient="records", lines=True)
    return tags


def test_several_labels_a_row_stay_several(folder: Path, tmp_path: Path) -> None:
    model, outputs = tmp_path / "model", ["red", "alpha", "blue"]
    save_classifier(model, outputs)
    config = BertConfig.from_pretrained(model)
    config.problem_type = "multi_label_classification"
    config.save_pretrained(model)
    sentences = list(pandas.read_csv(folder / "task" / "validation.csv")["sentence"])
    tags = save_tags(tmp_path / "data", sentences)
    references = MultiLabelBinarizer(classes=outputs).fit_transform(tags)
    predictions = (answers(model, sentences).sigmoid() > 0.5).int().numpy()
    results = convert(convert_config(model, tmp_path / "data", tmp_path / "out", **SHORT), console=quiet())
    names = ("f1_micro", "f1_macro", "subset_accuracy")
    assert {name: results.scores.teacher[name] for name in names} == {
        "f1_micro": pytest.approx(metrics.f1_score(references, predictions, average="micro")),
        "f1_macro": pytest.approx(metrics.f1_score(references, predictions, average="macro", zero_division=0)),
        "subset_accuracy": pytest.approx((references == predictions).all(1).mean()),
    }
    saved = tmp_path / "out" / "model"
    assert BertConfig.from_pretrained(saved).problem_type == "multi_label_classification"
    assert "subset_accuracy" in (saved / "README.md").read_text(encoding="utf-8")


def test_a_new_head_for_several_labels_learns_them(folder: Path, tmp_path: Path) -> None:
    sentences = list(pandas.read_csv(folder / "task" / "train.csv")["sentence"])
    save_tags(tmp_path / "data", sentences)
    steps = {"train__max_steps": 60, "train__learning_rate": 3e-3, "train__eval_steps": 0}
    config = finetune_config(folder / "encoder", tmp_path / "data", tmp_path / "out", **steps)
    assert finetune(config, console=quiet()).final["f1_micro"] > 0.9


@pytest.mark.parametrize("labels", [["Cold", "WARM"], ["LABEL_0", "LABEL_1"]])
def test_the_same_labels_in_other_letters_are_not(labels: list[str], folder: Path, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", labels)
    steps = {"teacher__max_steps": None, "distill__max_steps": 1, "transfer__max_steps": 0}
    config = convert_config(model, folder / "task", tmp_path / "out", **steps)
    assert convert(config, console=quiet()).scores.teacher


def test_a_part_of_sorted_validation_data_holds_all_labels(tmp_path: Path) -> None:
    save_task(tmp_path / "task", validation=60)
    path = tmp_path / "task" / "validation.csv"
    first, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([first, *sorted(rows, key=lambda row: row.rpartition(",")[2])]) + "\n", encoding="utf-8")
    config = convert_config(tmp_path, tmp_path / "task", tmp_path / "out", data__max_eval_samples=15)
    labels = [
        load_task_data("classification", tiny_tokenizer(mask=True), config.data, seed).held_out[""]["labels"][:]
        for seed in (0, 1)
    ]
    assert set(labels[0]) == {0, 1}
    assert labels[0] == labels[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "plan.json", "options": {"seed": 1}}, "plan: says what every layer gets"),
    ],
)
def test_options_that_would_be_ignored_are_errors(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        finetune(finetune_config(folder / "encoder", folder / "task", tmp_path / "out", **changes), console=quiet())


def test_without_evaluations_the_end_is_measured(folder: Path, tmp_path: Path) -> None:
    config = finetune_config(folder / "encoder", folder / "task", tmp_path / "out", train__eval_steps=0)
    assert "accuracy" in finetune(config, console=quiet()).scores.trained
