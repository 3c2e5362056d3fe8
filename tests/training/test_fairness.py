"""What would make a reported number unfair is an error, or is corrected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BertForSequenceClassification

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


@pytest.mark.parametrize("labels", [["warm", "cold"], ["cold", "mild", "warm"]])
def test_a_head_for_other_labels_is_refused(labels: list[str], folder: Path, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", labels)
    with pytest.raises(ValueError, match=f"labels {', '.join(labels)}, in this order; the data has cold, warm"):
        convert(convert_config(model, folder / "task", tmp_path / "out", teacher__max_steps=None), console=quiet())


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
        load_task_data("classification", tiny_tokenizer(mask=True), config.data, seed).validation[""]["labels"][:]
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
