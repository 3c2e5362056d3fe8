"""Which inputs a conversion trains its attention transfer on, and what it says of those attended to exactly."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.data.task_data import TaskData
from hf_linear_attn.measure.metric import Score
from hf_linear_attn.study import convert as stages
from hf_linear_attn.study import stages as run
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.training.transfer import AttentionTransferLoss
from tests.slow_cases import slow_rows
from tests.training.tiny_runs import convert_config, finetune_config, log_rows, quiet


@pytest.mark.slow
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
    counts = finetune(config, console=Console(file=screen, width=400)).model.beyond_exact
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


@pytest.mark.slow
def test_inputs_that_all_fit_into_the_window_are_not_transferred(folder: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    steps = {"teacher__max_steps": 1, "distill__max_steps": 1, "attention": "window"}
    results = convert(convert_config(*paths, **steps), console=Console(file=screen, width=400))
    assert results.training.transfer["step"] == 0
    assert "of training: 0 steps of attention transfer and 1 of distillation" in screen.getvalue()
    assert not log_rows(paths[2], "transfer")
    exact = results.model.beyond_exact["exact_length"]
    for text in (screen.getvalue(), (paths[2] / "model" / "README.md").read_text(encoding="utf-8")):
        assert f"Attention transfer was skipped: no training input has more than the {exact} tokens" in text


def test_a_transfer_that_harms_is_taken_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of the card are those of the saved model, and not those of the transfer."""
    score = Score("language_model", "loss", "loss", greater_is_better=False)
    assert stages.is_worse(score, {"loss": 2.0}, {"loss": 2.1})
    assert not stages.is_worse(score, {"loss": 2.0}, {"loss": 1.9})
    assert stages.is_worse(score, {"loss": 2.0}, {"loss": None})
    monkeypatch.setattr(stages, "is_worse", lambda score, before, after: True)
    changes = {"teacher__max_steps": None, "distill__max_steps": None, "distill__num_train_epochs": 0.0}
    text = {"task_type": "causal-lm", "data__text_columns": ["text"]}
    config = convert_config(folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", **text, **changes)
    metrics = convert(config, console=quiet())
    assert metrics.scores.converted == metrics.scores.patched != metrics.scores.transferred
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    values = {one["type"]: one["value"] for one in header["model-index"][0]["results"][0]["metrics"]}
    assert values["loss"] == metrics.scores.converted["loss"]
    assert "| as saved, without what harmed |" in card


@pytest.mark.parametrize(
    ("harms", "closed", "stage"),
    [
        (False, False, "transferred"),
        (True, False, "patched"),
        *slow_rows((False, True, "closed"), (True, True, "closed")),
    ],
)
def test_a_distillation_is_compared_with_the_model_that_it_began_with(
    harms: bool, closed: bool, stage: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the transfer has left, or what closed linear parts have."""
    compared: list[Any] = []

    def is_worse(score: Score, before: Any, after: Any) -> bool:
        compared.append(before)
        return harms and len(compared) == 1

    monkeypatch.setattr(stages, "is_worse", is_worse)
    parts = SimpleNamespace(table=pd.DataFrame([{"layer": 0, "worth": 0.0, "kept": not closed}]), loss={})
    monkeypatch.setattr(stages, "close_harmful_parts", lambda model, batches: parts)
    changes = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "speed__lengths": []}
    text = {"task_type": "causal-lm", "data__text_columns": ["text"], "options": {"window_size": 4}}
    config = convert_config(
        folder / "decoder", folder / "text" / "text.txt", tmp_path / "out", attention="window", **text, **changes
    )
    metrics = convert(config, console=quiet())
    assert (metrics.scores.closed is not None) is closed
    assert compared == [metrics.scores.patched, getattr(metrics.scores, stage)]
    assert metrics.scores.converted == metrics.scores.distilled


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distill__lora_rank": 2},
        {"attention": "favor+", "options": {"redraw_every": 2}},
        {"distill__learning_rate": 1e18, "distill__max_steps": 2, "distill__eval_steps": 0},
    ],
    ids=["all weights", "adapters", "features drawn anew", "loss of NaN"],
)
def test_a_distillation_that_harms_is_taken_back(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """With a learning rate that is far too high, the saved model is what it was before the distillation."""
    changes = {"teacher__max_steps": None, "transfer__max_steps": 0, "distill__learning_rate": 20.0, **options}
    text = {"task_type": "causal-lm", "data__text_columns": ["text"]}
    out, screen = tmp_path / "out", io.StringIO()
    config = convert_config(folder / "decoder", folder / "text" / "text.txt", out, **text, **changes)
    metrics = convert(config, console=Console(file=screen, width=200))
    assert "Distillation is taken back: the perplexity is better without it." in screen.getvalue()
    assert metrics.scores.converted == metrics.scores.patched
    assert metrics.scores.distilled["loss"] is None or metrics.scores.distilled["loss"] > metrics.scores.patched["loss"]
    saved, exact = hla.load_pretrained(str(out / "model")), AutoModelForCausalLM.from_pretrained(folder / "decoder")
    for name, parameter in exact.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter)


@pytest.mark.slow
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
    counts = convert(config, console=Console(file=screen, width=400)).model.beyond_exact
    assert 0 < counts["longer"] < counts["inputs"] == 96
    exact = counts["exact_length"]
    assert f"trains on the {counts['longer']} inputs of more than {exact} tokens" in screen.getvalue()
    assert len(lengths) == 4 * 8
    assert min(lengths) > exact


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_transfer_on_a_few_inputs(count: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stages, run):
        monkeypatch.setattr(module, "exact_length", lambda model: 5)
    monkeypatch.setattr(TaskData, "longer_than", lambda self, rows, length: rows.select(range(count)))
    steps = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1}
    results = convert(convert_config(folder / "tuned", folder / "task", tmp_path, **steps), console=quiet())
    assert results.training.transfer["step"] == 1
    assert [step for step, _ in results.training.transfer["evaluations"]] == [0, 1]
