"""Distillation: adapters with their teacher inside, dropout, and settings that change how it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import hf_linear_attn as hla
from hf_linear_attn.integration.exact import exact_attention
from hf_linear_attn.study.convert import convert
from hf_linear_attn.study.models import add_adapters
from hf_linear_attn.training.distillation import DistillationConfig, DistillationTrainer
from hf_linear_attn.training.options import DistillConfig
from tests.training.tiny_runs import convert_config, log_rows, quiet


def distilled_losses(teacher: Path, folder: Path, out: Path, **changes: Any) -> list[float]:
    """The losses of a distillation from a model as it is, without attention transfer before it."""
    changes = {"teacher__max_steps": None, "transfer__max_steps": 0, "distill__learning_rate": 1e-4, **changes}
    convert(convert_config(teacher, folder / "task", out, **changes), console=quiet())
    return [row["loss"] for row in log_rows(out, "distill") if "loss" in row]


@pytest.fixture(scope="module")
def default_losses(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return distilled_losses(folder / "tuned", folder, tmp_path_factory.mktemp("default") / "out")


@pytest.mark.slow
def test_adapters_train_and_are_merged(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(
        convert_config(folder / "encoder", folder / "task", out, distill__lora_rank=2, save_steps=0),
        console=quiet(),
    )
    model = hla.load_pretrained(str(out / "model"))
    assert not any("lora" in name for name, _ in model.named_parameters())
    teacher = AutoModelForSequenceClassification.from_pretrained(out / "teacher").state_dict()
    state = model.state_dict()
    weight, bias = "bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.0.intermediate.dense.bias"
    difference = state[weight] - teacher[weight]
    assert 0 < torch.linalg.matrix_rank(difference, rtol=1e-3) <= 2
    assert torch.equal(state[bias], teacher[bias])
    embeddings = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(state[embeddings], teacher[embeddings])


def test_the_teacher_within_adapters_is_the_exact_model(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "encoder").eval()
    ids = torch.randint(4, 50, (2, 9))
    expected = model(ids).logits
    hla.patch_model(model, "hedgehog")
    student = add_adapters(model, 2)
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


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
def test_memory_options(changes: dict[str, Any], folder: Path, tmp_path: Path, default_losses: list[float]) -> None:
    """They change how it is computed, and the result hardly."""
    losses = distilled_losses(folder / "tuned", folder, tmp_path / "out", **changes)
    assert losses == pytest.approx(default_losses, rel=0.05)


@pytest.mark.slow
def test_dropout_can_be_switched_off(folder: Path, tmp_path: Path, default_losses: list[float]) -> None:
    assert DistillConfig().disable_dropout
    losses = distilled_losses(folder / "tuned", folder, tmp_path / "out", distill__disable_dropout=True)
    assert losses != pytest.approx(default_losses, rel=1e-3)
