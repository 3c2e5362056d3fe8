"""Conversion and fine-tuning on inputs that are longer than the pretrained positions."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.data.config import DataConfig
from hf_linear_attn.integration.positions import position_limit
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.study.models import row_limit
from hf_linear_attn.training.options import ConvertConfig, FinetuneConfig
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import convert_config, finetune_config, quiet, save_encoder, save_task

LONG = 120  # the tiny encoder takes 96 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder, and a task whose word that counts stands behind 100 others."""
    root = tmp_path_factory.mktemp("long")
    save_encoder(root / "encoder")
    save_task(root / "task", rows=32, validation=8)
    for path in (root / "task").glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["sentence", "label"])
            writer.writeheader()
            for row in rows:
                padding = " ".join([row["sentence"].split()[0]] * 100)
                writer.writerow({"sentence": f"{padding} {row['sentence']}", "label": row["label"]})
    return root


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["hedgehog", "linformer"])
def test_teacher_and_student_take_long_inputs(folder: Path, tmp_path: Path, attention: str) -> None:
    changes = {"attention": attention, "max_length": LONG, "data__max_length": LONG}
    steps = {"teacher__max_steps": 2, "transfer__max_steps": 2, "distill__max_steps": 2}
    convert(convert_config(folder / "encoder", folder / "task", tmp_path / "out", **changes, **steps), console=quiet())
    teacher = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "teacher")
    student = hla.load_pretrained(str(tmp_path / "out" / "model"))
    for model in (teacher, student):
        assert position_limit(model) == LONG
        assert bool(torch.isfinite(model(torch.full((1, LONG), 5)).logits).all())
    for name in ("teacher", "model"):
        assert AutoTokenizer.from_pretrained(tmp_path / "out" / name).model_max_length == LONG
    options = student.config.linear_attention["layers"]["0"]["options"]
    assert options.get("max_length") == (LONG if attention == "linformer" else None)
    # The positions belong to the model that was trained: exact attention keeps them.
    assert position_limit(hla.unpatch_model(student)) == LONG


@pytest.mark.slow
def test_the_exact_baseline_takes_them_too(folder: Path, tmp_path: Path) -> None:
    config = finetune_config(
        folder / "encoder",
        folder / "task",
        tmp_path / "out",
        max_length=LONG,
        data__max_length=LONG,
        train__max_steps=2,
    )
    finetune(config, console=quiet())
    assert position_limit(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")) == LONG


def test_a_model_that_takes_more_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    config = finetune_config(
        folder / "encoder",
        folder / "task",
        tmp_path / "out",
        max_length=50,
        attention="hedgehog",
        data__max_length=50,
        train__max_steps=2,
    )
    finetune(config, console=quiet())
    assert position_limit(hla.load_pretrained(str(tmp_path / "out" / "model"))) == 96


def test_rows_without_positions_are_an_error_before_training(folder: Path, tmp_path: Path) -> None:
    config = finetune_config(folder / "encoder", folder / "task", tmp_path / "out", data__max_length=LONG)
    with pytest.raises(ValueError, match=r"longest row has 1\d\d tokens, .* has positions for 96\. .*finetune"):
        finetune(config, console=quiet())
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_what_is_cut_is_said(folder: Path, tmp_path: Path) -> None:
    """Each row has 100 words before its own 3 to 10, and two special tokens."""
    screen = io.StringIO()
    config = finetune_config(
        folder / "encoder", folder / "task", tmp_path / "out", data__max_length=None, train__max_steps=1
    )
    facts = finetune(config, console=Console(file=screen, width=400)).data
    share = 100 * facts["train_dropped_tokens"] / (facts["train_dropped_tokens"] + 32 * 96)
    limit = "the model's limit; patch, convert and finetune add positions with --max_length"
    assert (
        f"32 of 32 training rows are cut to 96 tokens ({limit}); they lose {share:.1f} % of all tokens."
        in screen.getvalue()
    )
    assert 5 < share < 20
    assert "7 of 8 held-out rows are in the training data, too: their scores" in screen.getvalue()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "llama"}, 1024),
        ({"model_type": "roberta", "config_overrides": {"max_position_embeddings": 514}}, 512),
        ({"model_type": "bert", "data": DataConfig(max_length=48)}, 48),
        ({"model": "any", "max_length": 4096}, 4096),
    ],
)
def test_the_longest_row_is_the_models(options: dict[str, Any], length: int) -> None:
    assert row_limit(FinetuneConfig(**options))[0] == length


def test_the_longest_row_of_a_patched_checkpoint(tmp_path: Path) -> None:
    hla.patch_model(tiny_model("bert", max_position_embeddings=77), "elu").save_pretrained(tmp_path)
    assert row_limit(ConvertConfig(model=str(tmp_path)))[0] == 77
