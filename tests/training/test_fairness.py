"""What would make a reported number unfair, or a resumed run another one: told, or put right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

from hf_linear_attn.training import loop as loops
from hf_linear_attn.training.convert import convert, finetune
from hf_linear_attn.training.loop import Loop
from hf_linear_attn.training.problems import Classification, build_problem
from tests.helpers import tiny_config, tiny_tokenizer
from tests.training.made_up import (
    convert_settings,
    finetune_settings,
    quiet,
    save_encoder,
    save_task,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fairness")
    save_encoder(place / "encoder")
    save_task(place / "task")
    return place


def save_classifier(place: Path, labels: list[str]) -> Path:
    config = tiny_config(
        "bert", id2label=dict(enumerate(labels)), label2id={name: index for index, name in enumerate(labels)}
    )
    BertForSequenceClassification(config).save_pretrained(place)
    tiny_tokenizer(mask=True).save_pretrained(place)
    return place


@pytest.mark.parametrize("labels", [["warm", "cold"], ["cold", "mild", "warm"]])
def test_a_head_for_other_labels_is_refused(labels: list[str], folder: Path, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", labels)
    with pytest.raises(ValueError, match=f"labels {', '.join(labels)}, in this order; the data has cold, warm"):
        convert(convert_settings(model, folder / "task", tmp_path / "out", teacher__steps=None), console=quiet())


@pytest.mark.parametrize("labels", [["Cold", "WARM"], ["LABEL_0", "LABEL_1"]])
def test_the_same_labels_in_other_letters_are_not(labels: list[str], folder: Path, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", labels)
    settings = convert_settings(
        model, folder / "task", tmp_path / "out", teacher__steps=None, distill__steps=1, transfer__steps=1
    )
    assert convert(settings, console=quiet())["stages"]["teacher"]


def test_a_part_of_sorted_validation_data_holds_all_labels(tmp_path: Path) -> None:
    save_task(tmp_path / "task", validation=60)
    path = tmp_path / "task" / "validation.csv"
    first, *rows = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([first, *sorted(rows, key=lambda row: row.rpartition(",")[2])]) + "\n", encoding="utf-8")
    settings = convert_settings(tmp_path, tmp_path / "task", tmp_path / "out", data__max_validation=15)
    held = [
        build_problem("classification", tiny_tokenizer(mask=True), settings.data, seed).validation[""]["labels"]
        for seed in (0, 1)
    ]
    assert set(held[0]) == {0, 1}
    assert held[0] == held[1]


def test_the_best_weights_of_a_checkpoint_outlast_a_better_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after a better step, resumed where that step is no longer better: the older best one is still there."""
    scores = {"first": iter([0.5, 0.9]), "second": iter([0.4, 0.3, 0.2])}
    run = "first"
    original = Loop._backward

    def die(self: Loop, group: Any) -> Any:
        if run == "first" and self.progress.step == 5:
            raise KeyboardInterrupt
        return original(self, group)

    monkeypatch.setattr(Classification, "evaluate", lambda *args: {"accuracy": next(scores[run])})
    monkeypatch.setattr(Loop, "_backward", die)
    given: dict[str, Any] = {"train__steps": 8, "train__evaluations": 4, "run__checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        finetune(finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", **given), console=quiet())
    run = "second"
    again = finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", **given, run__resume=True)
    results = finetune(again, console=quiet())
    assert results["stages"]["train"]["best_step"] == 2
    assert results["stages"]["trained"] == {"accuracy": 0.5}


def test_another_number_of_processes_cannot_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(loops, "lr_factor", lambda step, *rest: 1e30 if step == 4 else 0.1)
        with pytest.raises(FloatingPointError):
            finetune(finetune_settings(folder / "encoder", folder / "task", tmp_path / "out"), console=quiet())
    path = tmp_path / "out" / "checkpoints" / "train" / "step-00000004" / "progress.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["processes"] == 1
    path.write_text(json.dumps({**held, "processes": 2}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"written by 2 process\(es\), and this run has 1"):
        finetune(
            finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", run__resume=True), console=quiet()
        )


def test_the_result_is_not_left_in_mixed_precision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.nn.Module] = []
    original = Loop.__init__

    def remember(self: Loop, name: str, model: torch.nn.Module, *args: Any, **given: Any) -> None:
        seen.append(model)
        original(self, name, model, *args, **given)

    monkeypatch.setattr(Loop, "__init__", remember)
    convert(
        convert_settings(folder / "encoder", folder / "task", tmp_path / "out", run__precision="bf16"), console=quiet()
    )
    for model in seen:
        with torch.no_grad():
            assert model(torch.randint(4, 50, (1, 5))).logits.dtype == torch.float32
        assert "forward" not in vars(model) or not hasattr(model.forward, "__wrapped__")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run__control": True, "model__attention": "hedgehog"}, "run.control is the exact model"),
        ({"model__plan": "plan.json", "model__options": {"seed": 1}}, r"model\.plan says what every layer gets"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    changes: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        finetune(finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", **changes), console=quiet())


def test_without_evaluations_the_end_is_measured(folder: Path, tmp_path: Path) -> None:
    settings = finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", train__evaluations=0)
    assert "accuracy" in finetune(settings, console=quiet())["stages"]["trained"]
