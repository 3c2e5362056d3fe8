"""Conversion and fine-tuning from settings to a checkpoint, on tiny models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.data.config import DataConfig, TimingConfig
from hf_linear_attn.data.recall_prompts import PromptMaker
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.study import convert as stages
from hf_linear_attn.study import stages as study_stages
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.study.study import check_study
from hf_linear_attn.training.options import ConvertConfig, DistillConfig
from hf_linear_attn.training.resumable import InterruptedRunError
from hf_linear_attn.training.transfer import AttentionTransferLoss
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import (
    convert_config,
    finetune_config,
    log_rows,
    quiet,
    save_decoder,
    save_encoder,
    save_task,
    save_text,
    weights,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training")
    save_encoder(root / "encoder")
    save_encoder(root / "tuned", head=True)
    save_decoder(root / "decoder")
    save_task(root / "task")
    save_task(root / "scores", scores=True)
    save_text(root / "text")
    return root


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One conversion that learns its task, its results, and what it said."""
    out = tmp_path_factory.mktemp("converted") / "out"
    screen = io.StringIO()
    config = convert_config(
        folder / "encoder",
        folder / "task",
        out,
        teacher__max_steps=60,
        distill__max_steps=40,
        save_steps=20,
        speed__lengths=[16, 32],
        report_to=["tensorboard"],
    )
    return out, convert(config, console=Console(file=screen, width=200)), screen.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# The whole way


def test_the_teacher_learns_and_the_student_keeps_it(converted: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = converted
    stages = results["stages"]
    assert stages["teacher"]["accuracy"] >= 0.9
    assert stages["distilled"]["accuracy"] >= stages["teacher"]["accuracy"] - 0.12
    assert {"patched", "transferred", "transfer", "distill", "speed"} <= set(stages)


def test_the_result_is_a_checkpoint_that_gives_the_reported_metric(
    converted: tuple[Path, dict[str, Any], str], folder: Path
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
    assert right == pytest.approx(results["stages"]["distilled"]["accuracy"])
    labels = [row["label"] for row in rows]
    assert results["most_frequent_answer"] == pytest.approx(max(map(labels.count, labels)) / len(labels))


def test_the_card_holds_the_numbers(converted: tuple[Path, dict[str, Any], str]) -> None:
    out, results, screen = converted
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "transformers"
    assert "linear-attention" in header["tags"]
    for stage in ("teacher", "patched", "transferred", "distilled"):
        accuracy = results["stages"][stage]["accuracy"]
        share = (accuracy * 27 + 2) / 31  # 27 validation rows
        stderr = (share * (1 - share) / 31) ** 0.5
        assert f"{accuracy:.2f} ± {stderr:.2f}" in card
    assert "| 16 |" in card
    assert "load_pretrained" in card
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert settings["distill"] == {**settings["distill"], "max_steps": 40, "learning_rate": 0.003}
    assert (settings["data"]["dataset"], "output" in settings) == ("task", False)
    (result,) = header["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": results["stages"]["distilled"]["accuracy"]}]
    assert header["pipeline_tag"] == "text-classification"
    assert f"Result: {out / 'model'}" in screen
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["stages"] == json.loads(
        json.dumps(results["stages"])
    )


def test_trackers_hold_every_stage(converted: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = converted
    assert [row["step"] for row in log_rows(out, "distill") if "loss" in row] == [1, 10, 20, 30, 40]
    assert {"loss", "task_loss", "logits_loss", "hidden_loss", "learning_rate"} <= set(log_rows(out, "distill")[0])
    assert log_rows(out, "transfer")
    assert list((out / "checkpoints" / "distill").rglob("events.out.tfevents.*"))


def test_a_finished_run_leaves_models_and_reports(converted: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = converted
    reports = {"study", "log.jsonl", "results.json"}
    assert {path.name for path in out.iterdir()} == {*reports, "model", "teacher", "checkpoints"}
    assert [path.name for path in (out / "study").iterdir()] == ["records.jsonl"]
    files = [path.name for path in (out / "checkpoints").rglob("*") if path.is_file()]
    assert files
    assert all(name.startswith("events.out.tfevents.") for name in files)
    assert not [path for pattern in ("*.part", "*.old") for path in out.rglob(pattern)]


def test_transfer_touches_nothing_but_the_learned_parts(folder: Path, tmp_path: Path) -> None:
    results = convert(
        convert_config(
            folder / "encoder", folder / "task", tmp_path / "out", distill__num_train_epochs=0, distill__max_steps=None
        ),
        console=quiet(),
    )
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    teacher = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "teacher")
    own = model.state_dict()
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(own[name], tensor), name
    assert "distilled" not in results["stages"]
    assert results["stages"]["transferred"]


def test_the_control_stands_beside_the_conversion(folder: Path, tmp_path: Path) -> None:
    """It is the teacher after the same distillation with exact attention; `exact_share` counts for the student."""
    screen = io.StringIO()
    changes = {"teacher__max_steps": None, "attention": "window", "options": {"window_size": 2}, "exact_share": 0.4}
    paths = (folder / "tuned", folder / "task")
    config = convert_config(*paths, tmp_path / "out", control=True, **changes)
    results = convert(config, console=Console(file=screen, width=200))
    stages = results["stages"]
    assert stages["control distill"]["step"] == stages["distill"]["step"] == 6
    assert [row["step"] for row in log_rows(tmp_path / "out", "control distill") if "train_loss" in row] == [6]
    layers = hla.patch_report(hla.load_pretrained(str(tmp_path / "out" / "model"))).layers
    assert sum(len(layer.exact_heads) for layer in layers) == 3  # of 8
    # The same as a run of the exact model alone.
    alone = convert(
        convert_config(*paths, tmp_path / "alone", teacher__max_steps=None, attention=None), console=quiet()
    )
    assert alone["stages"]["distilled"] == stages["control"]
    assert not hasattr(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "alone" / "model").config, "linear_attention"
    )
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    for text in (card, screen.getvalue()):
        for title in ("the teacher", "the control"):
            assert f"({title}) | " in text
        assert "| after distillation | " in text


def test_data_that_cannot_judge_attention(folder: Path, tmp_path: Path) -> None:
    """A decoder that was not trained is no better with its attention than without it."""
    screen = io.StringIO()
    options = {"task_type": "causal-lm", "data__text_columns": ["text"], "teacher__max_steps": None, "attention": "elu"}
    config = convert_config(folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", **options)
    stages = convert(config, console=Console(file=screen, width=400))["stages"]
    assert stages["no attention"]["loss"] == pytest.approx(stages["teacher"]["loss"], rel=0.02)
    for text in (screen.getvalue(), (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")):
        assert "These data cannot measure attention: the teacher's loss" in text
        assert "better than the teacher" not in text


@pytest.mark.parametrize(
    ("model", "task", "attention"),
    [("tuned", "classification", "hedgehog"), ("decoder", "causal-lm", "elu"), ("encoder", "masked-lm", "hedgehog")],
)
def test_the_snippet_of_the_card_runs(
    model: str, task: str, attention: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {} if task == "classification" else {"data__text_columns": ["text"], "task_type": task}
    config = convert_config(
        folder / model,
        folder / "task" if task == "classification" else folder / "text" / "text.txt",
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
    assert "{'" in printed.getvalue()


def test_a_missing_head_is_found_before_rows_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(stages, "load_task_data", read)
    config = convert_config(folder / "encoder", folder / "task", tmp_path / "out", teacher__max_steps=None)
    with pytest.raises(ValueError, match=r"no head for this task \(it is a BertModel\).*num_train_epochs 3"):
        convert(config, console=quiet())


@pytest.mark.parametrize("moment", ["load_task_data", "_speed", "model_card"])
def test_a_signal_in_any_stage_says_what_is_stored(
    moment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reading, timing or writing there is no checkpoint: what was finished before is kept."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    changes = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "speed__lengths": [16]}
    config = convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(stages, moment, lambda *args: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(InterruptedRunError, match=r"Interrupted while \w+.*Stored: .*--resume") as caught:
            convert(config, console=quiet())
    assert signal.signal(signal.SIGTERM, previous) is signal.SIG_DFL
    assert caught.value.code == 128 + signal.SIGTERM
    if moment == "load_task_data":
        assert "no finished stage" in str(caught.value)
        assert not (tmp_path / "out").exists()
        return
    assert "transfer, transferred, distill, distilled" in str(caught.value)
    screen = io.StringIO()
    convert(replace(config, resume=True), console=Console(file=screen, width=200))
    assert "distill: step" not in screen.getvalue()
    assert (tmp_path / "out" / "model" / "README.md").is_file()


def test_a_long_stage_says_so_every_minute(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_stages, "PROGRESS_SECONDS", 0.1)
    original = stages._speed

    def slow(*args: Any) -> Any:
        time.sleep(2.5)
        return original(*args)

    monkeypatch.setattr(stages, "_speed", slow)
    screen = io.StringIO()
    changes = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "speed__lengths": [16]}
    config = convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes)
    convert(config, console=Console(file=screen, width=200))
    assert "\n... measuring speed, for 0 min\n" in screen.getvalue()
    assert re.search(r"About \d+ s of training: 1 steps of attention transfer and 1 of distillation", screen.getvalue())


def test_fine_tuned_models_need_no_teacher_stage(
    converted: tuple[Path, dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    out, results, _ = converted
    again = convert(
        convert_config(out / "teacher", folder / "task", tmp_path / "out", teacher__max_steps=None), console=quiet()
    )
    assert again["stages"]["teacher"] == results["stages"]["teacher"]
    assert not (tmp_path / "out" / "teacher").exists()


@pytest.mark.parametrize("attention", ["elu", "linformer", "window"])
def test_other_mechanisms(attention: str, folder: Path, tmp_path: Path) -> None:
    changes = {"attention": attention, "teacher__max_steps": None, "distill__max_steps": 2, "transfer__max_steps": 2}
    if attention == "window":
        changes["options"] = {"window_size": 4}
    results = convert(convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes), console=quiet())
    assert ("transferred" in results["stages"]) is (attention != "elu")
    assert {layer["attention"] for layer in results["layers"]} == {attention}


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
    assert results["goal"]["metric"] == "spearmanr"
    assert results["stages"]["teacher"]["spearmanr"] > 0.5
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
    stages = results["stages"]
    assert stages["distilled"]["loss"] < stages["teacher"]["loss"]
    assert stages["distilled"]["perplexity"] == pytest.approx(torch.tensor(stages["distilled"]["loss"]).exp().item())
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize("budget", ["30% cache at 2000", "100000% perplexity", "1.0000001x at 4000"])
def test_a_budget_needs_no_other_option(budget: str, folder: Path, tmp_path: Path) -> None:
    config = ConvertConfig(
        model=str(folder / "decoder"),
        output=str(tmp_path / "out"),
        budget=budget,
        data=DataConfig(dataset=str(folder / "text" / "text.txt")),
        distill=DistillConfig(max_steps=2, per_device_train_batch_size=1),
        speed=TimingConfig(()),
    )
    results = convert(config, console=quiet())
    stages = results["stages"]
    assert config.task_type == "causal-lm"
    assert "distilled" in stages
    assert "transfer" not in stages
    model = hla.load_pretrained(str(tmp_path / "out" / "model"))
    kept = [layer.state_bytes for layer in hla.patch_report(model).layers]
    assert kept
    if "cache" in budget:
        # Counted in the cache itself, after as many tokens as the budget says.
        layers, width = model.config.n_layer, model.config.n_embd
        exact = layers * 2000 * 2 * width * 4
        mechanisms = [module.linear_attention for module in attention_modules(model)]
        state = sum(mechanism.state_bytes(2000) for mechanism in mechanisms)
        state += (layers - len(mechanisms)) * exact // layers
        assert state <= 0.3 * exact
    elif "perplexity" in budget:
        assert "0% exact heads" in stages  # the first choice that was measured is within so wide a budget


@pytest.mark.parametrize("row_length", [256, 160])
def test_a_budget_of_recall_is_measured_and_verified(row_length: int, folder: Path, tmp_path: Path) -> None:
    """A model of random weights that is taken for one that answers, by a score that is replaced."""
    words = [" ".join(["alpha", "beta", "gamma"] * 60)] * 20
    (tmp_path / "text.txt").write_text("\n\n".join(words))
    save_checkpoint(tmp_path / "decoder", "llama", max_position_embeddings=512)
    data = DataConfig(dataset=str(tmp_path / "text.txt"), max_length=row_length)
    options: dict[str, Any] = {"model": str(tmp_path / "decoder"), "data": data, "speed": TimingConfig(())}
    training = {"distill": DistillConfig(max_steps=1, per_device_train_batch_size=1)}
    with pytest.raises(ValueError, match="'90% recall at 200' cannot be measured: the exact model recalls nothing"):
        convert(ConvertConfig(output=str(tmp_path / "none"), budget="90% recall at 200", **options, **training))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptMaker, "score", lambda maker, prompt, output: float(prompt.depth < 0.6))
        config = ConvertConfig(output=str(tmp_path / "out"), budget="90% recall at 200", **options, **training)
        results = convert(config, console=quiet())
    stages = results["stages"]
    expected = {"prompts": 48, "recall": pytest.approx(2 / 3), "length": 200, "low": ANY, "high": ANY}
    assert stages["recall, teacher"] == stages["recall, 0% exact heads"] == stages["recall, this model"] == expected
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "| this model | 200 | 48 | 0.67 | 0.53 to 0.78 |" in card


def test_a_budget_that_cannot_be_used_is_an_error_before_any_work(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(folder / "decoder"), "output": str(tmp_path / "out")}
    options["data"] = {"dataset": str(folder / "text" / "text.txt")}
    with pytest.raises(ValueError, match="cannot be read"):
        convert(**options, budget="much")
    with pytest.raises(ValueError, match="exact_share: is chosen by the budget"):
        convert(**options, budget="1% perplexity", exact_share=0.1)
    with pytest.raises(ValueError, match=r"options.window_size: is chosen by the budget"):
        convert(**options, budget="1% perplexity", options={"window_size": 32})
    with pytest.raises(ValueError, match="language models"):
        convert(**options, budget="1% perplexity", task_type="embedding")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="windows of 64 tokens take"):
        convert(**options, budget="1% cache at 100", speed={"lengths": []})


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
    chosen = results["stages"]["exact_heads"]
    assert ("score" in chosen["heads"][0]) is (kind == "decoder")
    assert {(row["layer"], row["head"]) for row in chosen["heads"] if row["chosen"]} == {
        (layer, head) for layer, numbers in heads.items() for head in numbers
    }
    # A resumed run takes the recorded heads.
    monkeypatch.setattr(stages, "find_exact_heads", None)
    (tmp_path / "out" / "results.json").unlink()
    assert convert(replace(config, resume=True), console=quiet())["stages"]["exact_heads"] == chosen


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("window", {}, "Inputs of up to 66 tokens are attended to exactly; of 96 training inputs 0 are longer."),
        ("window", {"window_size": 2}, None),
        ("linformer", {}, None),
    ],
)
def test_data_that_train_little_of_the_mechanism(
    attention: str, options: dict[str, int], message: str | None, folder: Path, tmp_path: Path
) -> None:
    screen = io.StringIO()
    config = finetune_config(
        folder / "encoder",
        folder / "task",
        tmp_path / "out",
        attention=attention,
        options=options,
        train__max_steps=1,
    )
    counts = finetune(config, console=Console(file=screen, width=400))["beyond_exact"]
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert ("narrow what is exact" in screen.getvalue()) is (message is not None)
    if message is not None:
        assert message in screen.getvalue()
        assert message in card
    if options:
        assert counts["longer"] == counts["inputs"]
    if attention == "linformer":
        assert counts is None
        assert "attended to exactly" not in card


def test_inputs_that_all_fit_into_the_window_are_not_transferred(folder: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    steps = {"teacher__max_steps": 1, "distill__max_steps": 1, "attention": "window"}
    results = convert(convert_config(*paths, **steps), console=Console(file=screen, width=400))
    assert results["stages"]["transfer"]["step"] == 0
    assert not log_rows(paths[2], "transfer")
    exact = results["beyond_exact"]["exact_length"]
    for text in (screen.getvalue(), (paths[2] / "model" / "README.md").read_text(encoding="utf-8")):
        assert f"Attention transfer was skipped: no training input has more than the {exact} tokens" in text


def test_a_transfer_that_harms_is_taken_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of the card are those of the saved model, and not those of the transfer."""
    before = SimpleNamespace(state={"patched": {"loss": 2.0}, "transferred": {"loss": 2.1}}, data=SimpleNamespace())
    for names, harms in (((), True), (("accuracy",), False)):
        before.data.metric_names = names
        assert stages._transfer_harms(before) is harms  # type: ignore[arg-type]
    monkeypatch.setattr(stages, "_transfer_harms", lambda run: True)
    changes = {"teacher__max_steps": None, "distill__max_steps": None, "distill__num_train_epochs": 0.0}
    text = {"task_type": "causal-lm", "data__text_columns": ["text"]}
    config = convert_config(folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", **text, **changes)
    metrics = convert(config, console=quiet())["stages"]
    assert metrics["converted"] == metrics["patched"] != metrics["transferred"]
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    values = {one["type"]: one["value"] for one in header["model-index"][0]["results"][0]["metrics"]}
    assert values["loss"] == metrics["converted"]["loss"]
    assert "| without what harmed of these (as saved) |" in card


def test_transfer_draws_the_inputs_beyond_the_window(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    original = AttentionTransferLoss.__call__

    def call(self: AttentionTransferLoss, batch: Any, step: int | None = None) -> Any:
        if step is not None:
            lengths.extend(batch["attention_mask"].sum(1).tolist())
        return original(self, batch, step)

    monkeypatch.setattr(AttentionTransferLoss, "__call__", call)
    screen = io.StringIO()
    steps = {"teacher__max_steps": 1, "distill__max_steps": 1}
    config = convert_config(
        folder / "encoder", folder / "task", tmp_path, attention="window", options={"window_size": 6}, **steps
    )
    counts = convert(config, console=Console(file=screen, width=400))["beyond_exact"]
    assert 0 < counts["longer"] < counts["inputs"] == 96
    exact = counts["exact_length"]
    assert f"trains on the {counts['longer']} inputs of more than {exact} tokens" in screen.getvalue()
    assert len(lengths) == 4 * 8
    assert min(lengths) > exact


@pytest.mark.parametrize("count", [1, 2])
def test_transfer_on_a_few_inputs(count: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "exact_length", lambda model: 5)
    monkeypatch.setattr(stages, "row_lengths", lambda rows: [9] * count + [1] * (len(rows) - count))
    steps = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1}
    results = convert(convert_config(folder / "tuned", folder / "task", tmp_path, **steps), console=quiet())
    assert results["stages"]["transfer"]["step"] == 1
    assert [step for step, _ in results["stages"]["transfer"]["evaluations"]] == [0, 1]


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
    assert f"| after fine-tuning | {results['stages']['trained']['loss']:.2f} ± " in card
    first, *_, last = (metrics["loss"] for _, metrics in results["stages"]["train"]["evaluations"])
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
    assert results["stages"]["trained"]["loss"] > 0
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["n_layer"] == 1


# --------------------------------------------------------------------------------------------------------------------
# Bad input: told before anything is trained


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention": "hedgehogs"}, ValueError, "Did you mean 'hedgehog'"),
        ({"attention": "linformer-causal"}, NotImplementedError, "Use 'linformer'"),
        ({"options": {"feature_dims": 3}}, ValueError, "feature_dim"),
        ({"model": "nowhere/at-all"}, OSError, "nowhere/at-all"),
        ({"model": None}, ValueError, "There is no model"),
        ({"config_overrides": {"n_layers_": 2}}, ValueError, "'n_layers_'"),
        ({"teacher__max_steps": None}, ValueError, r"teacher\.num_train_epochs 3"),
        ({"data__text_columns": ["sentense"]}, ValueError, "sentence"),
        ({"data__dataset": "nowhere.csv"}, OSError, "nowhere.csv"),
        ({"data__dataset": None}, ValueError, r"data\.task"),
        ({"data__label_column": "lable"}, ValueError, "label"),
        ({"output": None}, ValueError, "Give one with --output"),
        ({"report_to": ["tensorbord"]}, ValueError, "tensorboard"),
        (
            {"task_type": "causal-lm", "data__text_columns": ["sentence"]},
            ValueError,
            "masked-lm",
        ),
    ],
)
def test_bad_options_are_errors_before_training(
    changes: dict[str, Any], error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    config = convert_config(folder / "encoder", folder / "task", tmp_path / "out", **changes)
    with pytest.raises(error, match=message):
        convert(config, console=quiet())
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_run_that_was_refused_can_be_used(folder: Path, tmp_path: Path) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    with pytest.raises(ValueError, match="hedgehogs"):
        convert(convert_config(*paths, attention="hedgehogs"), console=quiet())
    steps = {"teacher__max_steps": 1, "transfer__max_steps": 1, "distill__max_steps": 1}
    assert convert(convert_config(*paths, **steps), console=quiet())["stages"]["distilled"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimm": "adafactor"}, "has no field 'optimm'. Did you mean 'optim'"),
        ({"seed": 3}, "'seed' is an option of its own"),
    ],
)
def test_further_training_arguments(arguments: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(
            convert_config(folder / "encoder", folder / "task", tmp_path / "out", distill__arguments=arguments),
            console=quiet(),
        )
    config = finetune_config(
        folder / "encoder", folder / "task", tmp_path / "tuned", train__arguments={"optim": "sgd", "adam_beta1": 0.5}
    )
    assert finetune(config, console=quiet())["stages"]["trained"]


def test_a_used_folder_is_not_overwritten(converted: tuple[Path, dict[str, Any], str], folder: Path) -> None:
    out, _, _ = converted
    before = weights(out)
    with pytest.raises(ValueError, match=r"has an earlier result.*--resume.*--overwrite"):
        convert(convert_config(folder / "encoder", folder / "task", out), console=quiet())
    with pytest.raises(ValueError, match=r"distill\.max_steps was 40, now 6.*the same version"):
        convert(convert_config(folder / "encoder", folder / "task", out, resume=True), console=quiet())
    misspelt = convert_config(folder / "encoder", folder / "task", out, data__dataset="nowhere.csv", overwrite=True)
    with pytest.raises(OSError, match="nowhere"):
        convert(misspelt, console=quiet())
    assert weights(out) == before


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_bf16_without_a_gpu_needs_no_further_option(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"device": "auto", "bf16": True, "train__max_steps": 1}
    finetune(finetune_config(folder / "encoder", folder / "task", tmp_path / "out", **changes), console=quiet())
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_runs_of_one_process_may_differ_in_precision(folder: Path, tmp_path: Path) -> None:
    """accelerate remembers the precision of the first one; no state of the process is reset here."""
    steps = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "device": "auto"}
    for name, half in (("full", False), ("half", True), ("again", False)):
        config = convert_config(folder / "tuned", folder / "task", tmp_path / name, bf16=half, **steps)
        assert convert(config, console=quiet())["stages"]["distilled"]
    assert weights(tmp_path / "full") == weights(tmp_path / "again") != weights(tmp_path / "half")


def test_an_overwritten_run_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    finetune(finetune_config(*paths, train__max_steps=1), console=quiet())
    (paths[2] / "notes.txt").write_text("of the first run", encoding="utf-8")
    finetune(finetune_config(*paths, train__max_steps=2, overwrite=True), console=quiet())
    assert [row["step"] for row in log_rows(paths[2], "train") if "train_loss" in row] == [2]
    assert not (paths[2] / "notes.txt").exists()


def test_another_command_does_not_replace_a_conversion(converted: tuple[Path, dict[str, Any], str]) -> None:
    out, _, _ = converted
    with pytest.raises(ValueError, match="not a result of this command"):
        check_study(out, overwrite=True)


def test_a_foreign_folder_is_not_touched(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="not a result of this command"):
            convert(
                convert_config(folder / "encoder", folder / "task", tmp_path, overwrite=overwrite),
                console=quiet(),
            )
    assert (tmp_path / "letter.txt").read_text(encoding="utf-8") == "dear"


def test_a_patched_model_is_not_a_teacher(
    converted: tuple[Path, dict[str, Any], str], folder: Path, tmp_path: Path
) -> None:
    out, _, _ = converted
    with pytest.raises(ValueError, match="patched already"):
        convert(convert_config(out / "model", folder / "task", tmp_path / "out"), console=quiet())


def test_a_full_disk_is_an_error_before_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(OSError, match=r"GB free.*save_total_limit"):
        convert(convert_config(folder / "encoder", folder / "task", tmp_path / "out"), console=quiet())
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------------
# The Hub


def test_the_result_is_pushed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **settings: Any) -> None:
            calls.append(("create", {"name": name, **settings}))

        def upload_folder(self, **settings: Any) -> None:
            names = {path.name for path in Path(settings["folder_path"]).iterdir()}
            calls.append(("upload", {"repo_id": settings["repo_id"], "files": names}))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    changes = {"hub_model_id": "me/linear", "hub_private_repo": True, "attention": "elu", "train__max_steps": 1}
    finetune(finetune_config(folder / "encoder", folder / "task", tmp_path / "out", **changes), console=quiet())
    assert [name for name, _ in calls] == ["create", "upload"]
    assert calls[0][1] == {"name": "me/linear", "private": True, "exist_ok": True}
    assert calls[1][1]["repo_id"] == "me/linear"
    assert {"README.md", "config.json", "model.safetensors", "modeling_hf_linear_attn.py"} <= calls[1][1]["files"]
