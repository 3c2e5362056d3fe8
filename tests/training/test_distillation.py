"""Distillation: adapters with their teacher inside, dropout, and settings that change how it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import hf_linear_attn as hla
from hf_linear_attn.integration.attention import exact_attention
from hf_linear_attn.training.arguments import DistillationConfig
from hf_linear_attn.training.convert import convert
from hf_linear_attn.training.models import add_adapters
from hf_linear_attn.training.options import DistillConfig
from hf_linear_attn.training.trainers import DistillationTrainer
from tests.training.tiny_runs import convert_config, log_rows, quiet, save_encoder, save_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distillation")
    save_encoder(root / "encoder")
    save_task(root / "task")
    return root


def test_adapters_train_and_are_merged(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(
        convert_config(folder / "encoder", folder / "task", out, distill__lora_rank=2, save_steps=0),
        console=quiet(),
    )
    model = hla.load_pretrained(str(out / "model"))
    assert not any("lora" in name for name, _ in model.named_parameters())
    teacher = AutoModelForSequenceClassification.from_pretrained(out / "teacher").state_dict()
    own = model.state_dict()
    weight, bias = "bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.0.intermediate.dense.bias"
    difference = own[weight] - teacher[weight]
    assert 0 < torch.linalg.matrix_rank(difference, rtol=1e-3) <= 2
    assert torch.equal(own[bias], teacher[bias])
    assert torch.equal(own["bert.embeddings.word_embeddings.weight"], teacher["bert.embeddings.word_embeddings.weight"])


def test_the_teacher_within_adapters_is_the_exact_model(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "encoder").eval()
    ids = torch.randint(4, 50, (2, 9))
    expected = model(ids).logits
    hla.patch_model(model, "hedgehog")
    student = add_adapters(model, DistillConfig(lora_rank=2))
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    arguments = DistillationConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = DistillationTrainer(student, args=arguments)
    student.train()
    with torch.no_grad():
        outputs = trainer.teacher_outputs({"input_ids": ids}, output_hidden_states=False)
        assert torch.allclose(outputs.logits, expected, atol=1e-6)
        assert student.training
        student.eval()
        assert not torch.allclose(student(input_ids=ids).logits, expected, atol=1e-3)
        with exact_attention(model):
            assert not torch.allclose(student(input_ids=ids).logits, expected, atol=1e-3)
    assert any(".linear_attention." in name for name, value in student.named_parameters() if value.requires_grad)


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
def test_memory_options(changes: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """They change how it is computed, and the result hardly."""
    losses = []
    for name, options in (("default", {}), ("changed", changes)):
        out = tmp_path / name
        convert(
            convert_config(folder / "encoder", folder / "task", out, distill__learning_rate=1e-4, **options),
            console=quiet(),
        )
        losses.append([row["loss"] for row in log_rows(out, "distill") if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_distillation_without_dropout(gradient_checkpointing: bool, folder: Path, tmp_path: Path) -> None:
    """The default of the stage: the same losses as of a model that has none."""
    assert DistillConfig().disable_dropout
    losses = []
    for name, changes in (("without", {}), ("switched off", {"distill__disable_dropout": True}), ("with", {})):
        source = save_encoder(tmp_path / name, hidden_dropout_prob=0.0 if name == "without" else 0.1)
        config = convert_config(
            source,
            folder / "task",
            tmp_path / f"out {name}",
            teacher__max_steps=1,
            teacher__disable_dropout=True,
            gradient_checkpointing=gradient_checkpointing,
            **changes,
        )
        convert(config, console=quiet())
        losses.append([row["loss"] for row in log_rows(tmp_path / f"out {name}", "distill") if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)
