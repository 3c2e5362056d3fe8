"""Conversion and fine-tuning from settings to a checkpoint, on tiny models."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BartForConditionalGeneration

import hf_linear_attn as hla
from hf_linear_attn.study import choose
from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.study.convert import convert, finetune
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import convert_config, finetune_config, log_rows, quiet


@pytest.mark.slow
def test_the_teacher_learns_and_the_student_keeps_it(converted: tuple[Path, ConversionResult, str]) -> None:
    _, results, _ = converted
    stages = results
    assert stages.scores.teacher["accuracy"] >= 0.9
    assert stages.scores.distilled["accuracy"] >= stages.scores.teacher["accuracy"] - 0.12
    assert None not in (stages.scores.patched, stages.scores.transferred, stages.speed)
    assert None not in (stages.training.transfer, stages.training.distill)


def test_the_result_is_a_checkpoint_that_gives_the_reported_metric(
    converted: tuple[Path, ConversionResult, str], folder: Path
) -> None:
    import csv

    out, results, _ = converted
    model = hla.load_pretrained(str(out / "model"), AutoModelForSequenceClassification).eval()
    assert type(model).__name__ == "BertForSequenceClassification"
    assert {layer.attention for layer in hla.patch_report(model).layers} == {"hedgehog"}
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    with (folder / "task" / "validation.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with torch.no_grad():
        logits = [model(**tokenizer(row["sentence"], return_tensors="pt")).logits[0] for row in rows]
    answers = [model.config.id2label[int(row.argmax())] for row in logits]
    right = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True)) / len(rows)
    assert right == pytest.approx(results.scores.distilled["accuracy"])
    labels = [row["label"] for row in rows]
    assert results.score.constant_answer == pytest.approx(max(map(labels.count, labels)) / len(labels))


def test_the_card_holds_the_numbers(converted: tuple[Path, ConversionResult, str]) -> None:
    out, results, screen = converted
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "transformers"
    assert "linear-attention" in header["tags"]
    for stage in ("teacher", "patched", "transferred", "distilled"):
        accuracy = getattr(results.scores, stage)["accuracy"]
        share = (accuracy * 27 + 2) / 31  # 27 validation rows
        stderr = (share * (1 - share) / 31) ** 0.5
        assert f"{accuracy:.2f} ± {stderr:.2f}" in card
    assert "| 16 |" in card
    assert "load_pretrained" in card
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert settings["distill"] == {**settings["distill"], "max_steps": 40, "learning_rate": 0.003}
    assert (settings["data"]["dataset"], "output" in settings) == ("task", False)
    (result,) = header["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": results.scores.distilled["accuracy"]}]
    assert header["pipeline_tag"] == "text-classification"
    assert f"Result: {out / 'model'}" in screen
    assert ConversionResult.load(out / "results.json") == results


def test_trackers_hold_every_stage(converted: tuple[Path, ConversionResult, str]) -> None:
    out, _, _ = converted
    assert [row["step"] for row in log_rows(out, "distill") if "loss" in row] == [1, 10, 20, 30, 40]
    assert {"loss", "task_loss", "logits_loss", "hidden_loss", "learning_rate"} <= set(log_rows(out, "distill")[0])
    assert log_rows(out, "transfer")
    assert list((out / "checkpoints" / "distill").rglob("events.out.tfevents.*"))


def test_a_finished_run_leaves_models_and_reports(converted: tuple[Path, ConversionResult, str]) -> None:
    out, _, _ = converted
    reports = {"study", "log.jsonl", "results.json"}
    assert {path.name for path in out.iterdir()} == {*reports, "model", "teacher", "checkpoints"}
    assert [path.name for path in (out / "study").iterdir()] == ["records.jsonl"]
    files = [path.name for path in (out / "checkpoints").rglob("*") if path.is_file()]
    assert files
    assert all(name.startswith("events.out.tfevents.") for name in files)
    assert not [path for pattern in ("*.part", "*.old") for path in out.rglob(pattern)]


@pytest.mark.slow
def test_transfer_touches_nothing_but_the_learned_parts(folder: Path, tmp_path: Path) -> None:
    results = convert(
        convert_config(
            folder / "encoder", folder / "task", tmp_path / "out", distill__num_train_epochs=0, distill__max_steps=None
        ),
        console=quiet(),
    )
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    teacher = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "teacher")
    state = model.state_dict()
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert results.scores.distilled is None
    assert results.scores.transferred


@pytest.mark.slow
def test_the_control_stands_beside_the_conversion(folder: Path, tmp_path: Path) -> None:
    """It is the teacher after the same distillation with exact attention; `exact_share` counts for the student."""
    screen = io.StringIO()
    changes = {"teacher__max_steps": None, "attention": "window", "options": {"window_size": 2}, "exact_share": 0.4}
    paths = (folder / "tuned", folder / "task")
    config = convert_config(*paths, tmp_path / "out", control=True, **changes)
    results = convert(config, console=Console(file=screen, width=200))
    stages = results
    assert stages.training.control["step"] == stages.training.distill["step"] == 6
    assert [row["step"] for row in log_rows(tmp_path / "out", "control distill") if "train_loss" in row] == [6]
    layers = hla.patch_report(hla.load_pretrained(str(tmp_path / "out" / "model"))).layers
    assert sum(len(layer.exact_heads) for layer in layers) == 3  # of 8
    # The same as a run of the exact model alone.
    single = convert(
        convert_config(*paths, tmp_path / "alone", teacher__max_steps=None, attention=None), console=quiet()
    )
    assert single.scores.distilled == stages.scores.control
    assert not hasattr(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "alone" / "model").config, "linear_attention"
    )
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    for text in (card, screen.getvalue()):
        for title in ("the teacher", "the control"):
            assert f"({title}) | " in text
        assert "| after distillation | " in text


@pytest.mark.slow
def test_data_that_cannot_measure_attention(folder: Path, tmp_path: Path) -> None:
    """A decoder that was not trained is no better with its attention than without it.

    Its task type is that of the model where none is given.
    """
    screen = io.StringIO()
    options = {"data__text_columns": ["text"], "teacher__max_steps": None, "attention": "elu"}
    config = convert_config(folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", **options)
    stages = convert(config, console=Console(file=screen, width=400))
    assert "the model is taken for a causal language model: causal-lm" in screen.getvalue()
    assert stages.config["task_type"] == "causal-lm"
    assert stages.scores.without_attention["loss"] == pytest.approx(stages.scores.teacher["loss"], rel=0.02)
    for text in (screen.getvalue(), (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")):
        assert "These data cannot measure attention: the teacher's perplexity" in text
        assert "better than the teacher" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "attention"),
    [
        ("tuned", "classification", "hedgehog"),
        ("decoder", "causal-lm", "elu"),
        ("encoder", "masked-lm", "hedgehog"),
        ("bart", "seq2seq-lm", "hedgehog"),
    ],
)
def test_the_snippet_of_the_card_runs(
    model: str, task: str, attention: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"classification": ["sentence"], "seq2seq-lm": ["sentence", "label"]}.get(task, ["text"])
    text = {"data__text_columns": columns, "task_type": task}
    if model == "bart":
        save_checkpoint(folder / "bart", "bart", BartForConditionalGeneration, seed=1)
    config = convert_config(
        folder / model,
        folder / "text" / "text.txt" if columns == ["text"] else folder / "task",
        tmp_path / "out",
        **text,
        **{"teacher__max_steps": None, "attention": attention, "transfer__max_steps": 1, "distill__max_steps": 1},
    )
    if task == "masked-lm":  # a head is missing, which a fine-tuning brings
        config = replace(config, teacher=replace(config.teacher, max_steps=1))
    convert(config, console=quiet())
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path / "out" / "model")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code[1], {})
    assert printed.getvalue().strip() if model == "bart" else "{'" in printed.getvalue()


@pytest.mark.slow
def test_fine_tuned_models_need_no_teacher_stage(
    converted: tuple[Path, ConversionResult, str], folder: Path, tmp_path: Path
) -> None:
    out, results, _ = converted
    again = convert(
        convert_config(out / "teacher", folder / "task", tmp_path / "out", teacher__max_steps=None), console=quiet()
    )
    assert again.scores.teacher == results.scores.teacher
    assert not (tmp_path / "out" / "teacher").exists()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["elu", "linformer", "window"])
def test_other_mechanisms(attention: str, folder: Path, tmp_path: Path) -> None:
    changes = {"attention": attention, "teacher__max_steps": None, "distill__max_steps": 2, "transfer__max_steps": 2}
    if attention == "window":
        changes["options"] = {"window_size": 4}
    results = convert(convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes), console=quiet())
    assert (results.scores.transferred is not None) is (attention != "elu")
    assert {layer["attention"] for layer in results.model.layers} == {attention}


@pytest.mark.slow
def test_scores_are_regressed(folder: Path, tmp_path: Path) -> None:
    results = convert(
        convert_config(
            folder / "encoder",
            folder / "scores",
            tmp_path / "out",
            teacher__max_steps=60,
            distill__max_steps=2,
            save_steps=0,
            data__metrics=["spearmanr", "pearson"],
        ),
        console=quiet(),
    )
    assert results.score.metric == "spearmanr"
    assert results.scores.teacher["spearmanr"] > 0.5
    assert hla.load_pretrained(str(tmp_path / "out" / "model")).config.num_labels == 1


def test_causal_language_model(folder: Path, tmp_path: Path) -> None:
    results = convert(
        convert_config(
            folder / "decoder",
            folder / "text" / "text.txt",
            tmp_path / "out",
            task_type="causal-lm",
            data__text_columns=["text"],
            attention="window",
            options={"window_size": 4},
            distill__max_steps=12,
            teacher__max_steps=None,
        ),
        console=quiet(),
    )
    stages = results
    assert stages.scores.distilled["loss"] < stages.scores.teacher["loss"]
    assert stages.scores.distilled["perplexity"] == pytest.approx(
        torch.tensor(stages.scores.distilled["loss"]).exp().item()
    )
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_some_heads_stay_exact(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"task_type": "causal-lm", "data__text_columns": ["text"], "teacher__max_steps": None}
    untrained = {"transfer__max_steps": 0, "distill__max_steps": None, "distill__num_train_epochs": 0.0}
    config = convert_config(
        folder / kind,
        folder / "text" / "text.txt" if kind == "decoder" else folder / "task",
        tmp_path / "out",
        **(text if kind == "decoder" else {}),
        **untrained,
        attention="window",
        options={"window_size": 2},
        exact_share=0.4,
    )
    results = convert(config, console=quiet())
    layers = hla.patch_report(hla.load_pretrained(str(tmp_path / "out" / "model"))).layers
    heads = {layer.index: layer.exact_heads for layer in layers if layer.exact_heads}
    assert sum(len(numbers) for numbers in heads.values()) == 3  # of 8
    chosen = results.choice
    assert ("score" in chosen.heads[0]) is (kind == "decoder")
    assert {(row["layer"], row["head"]) for row in chosen.heads if row["chosen"]} == {
        (layer, head) for layer, numbers in heads.items() for head in numbers
    }
    # A resumed run takes the recorded heads.
    monkeypatch.setattr(choose, "find_exact_heads", None)
    (tmp_path / "out" / "results.json").unlink()
    assert convert(replace(config, resume=True), console=quiet()).choice == chosen


@pytest.mark.slow
def test_masked_language_model(folder: Path, tmp_path: Path) -> None:
    results = finetune(
        finetune_config(
            folder / "encoder",
            folder / "text" / "text.txt",
            tmp_path / "out",
            task_type="masked-lm",
            data__text_columns=["text"],
            attention="hedgehog",
            train__max_steps=80,
            train__eval_steps=0.25,
            save_steps=0,
        ),
        console=quiet(),
    )
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert f"| after fine-tuning | {results.scores.trained['loss']:.2f} ± " in card
    first, *_, last = (metrics["loss"] for _, metrics in results.training.train["evaluations"])
    assert last < first
    assert hla.load_pretrained(str(tmp_path / "out" / "model")).config.architectures == ["BertForMaskedLM"]


def test_pretraining_from_a_config(folder: Path, tmp_path: Path) -> None:
    results = finetune(
        finetune_config(
            folder / "decoder",
            folder / "text" / "text.txt",
            tmp_path / "out",
            task_type="causal-lm",
            data__text_columns=["text"],
            from_config=True,
            config_overrides={"n_layer": 1},
        ),
        console=quiet(),
    )
    assert results.scores.trained["loss"] > 0
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["n_layer"] == 1
