"""Conversion of a sentence encoder: its embeddings are the labels, and it loads in sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn.measure import embedding
from hf_linear_attn.study.convert import convert
from hf_linear_attn.training.losses import embedding_loss
from hf_linear_attn.utils.models import mean_pooling
from tests.training.tiny_runs import convert_config, finetune_config, log_rows, quiet, save_encoder, save_text

SENTENCES = ["red green blue one two three", "one", "two blue green"]


def config_of(folder: Path, out: Path, **changes: Any) -> Any:
    options = {"data__text_columns": ["text"], "data__max_length": 24, "teacher__max_steps": None, **changes}
    return convert_config(folder / "encoder", folder / "text" / "text.txt", out, task_type="embedding", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedding")
    save_encoder(root / "encoder", initializer_range=0.5)
    (root / "encoder" / "1_Pooling").mkdir()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (root / "encoder" / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": AutoModel.from_pretrained(root / "encoder").config.hidden_size}
    (root / "encoder" / "1_Pooling" / "config.json").write_text(
        json.dumps({**pooling, "pooling_mode_mean_tokens": True})
    )
    save_text(root / "text")
    return root


@pytest.mark.slow
def test_pooling_and_loss_are_their_definitions() -> None:
    hidden, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    pooled = mean_pooling(hidden, mask)
    assert torch.allclose(pooled, torch.stack([hidden[0, :2].mean(0), hidden[1].mean(0)]))
    assert torch.allclose(mean_pooling(hidden, None), hidden.mean(1))
    other = torch.randn(2, 3)
    expected = sum(1 - float(a @ b / (a.norm() * b.norm())) for a, b in zip(pooled, other, strict=True))
    assert float(embedding_loss(pooled, other)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sentence_encoder_comes_nearer_to_its_exact_embeddings(folder: Path, tmp_path: Path, lora: int) -> None:
    changes = {"disable_dropout": True, "learning_rate": 1e-3, "max_steps": 30, "lora_rank": lora}
    config = config_of(folder, tmp_path / "out", **{f"distill__{name}": value for name, value in changes.items()})
    stages = convert(config, console=quiet())
    assert stages.scores.teacher["cosine"] == pytest.approx(1, abs=1e-5)
    assert stages.scores.patched["cosine"] < stages.scores.distilled["cosine"] < 1
    assert log_rows(tmp_path / "out", "distill")[0].keys() >= {"task_loss", "hidden_loss"}
    model = hla.load_pretrained(str(tmp_path / "out" / "model"), AutoModel).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = mean_pooling(model(**batch).last_hidden_state, batch["attention_mask"])
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    encoder = library.SentenceTransformer(str(tmp_path / "out" / "model"), trust_remote_code=True, device="cpu")
    assert hla.is_patched(encoder[0].auto_model)
    assert torch.allclose(torch.tensor(encoder.encode(SENTENCES)), expected, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(folder: Path, tmp_path: Path) -> None:
    results = convert(config_of(folder, tmp_path / "out"), console=quiet())
    again = convert(config_of(folder, tmp_path / "out", resume=True), console=quiet())
    assert again == results


def test_inputs_that_a_window_holds_say_nothing_of_linear_attention(folder: Path, tmp_path: Path) -> None:
    """Their cosine is 1 whatever the mechanism; and two words are no data at all."""
    changes = {"attention": "window", "data__documents": "lines", "transfer__max_steps": 0, "distill__max_steps": 1}
    result = convert(config_of(folder, tmp_path / "out", **changes), console=quiet())
    assert result.final["cosine"] == pytest.approx(1)
    assert result.final["cosine"] <= 1
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "tokens that are exact, so nothing can be said about linear attention" in card
    assert "100.0 %" not in card
    (tmp_path / "words.txt").write_text("alpha beta")
    with pytest.raises(ValueError, match=r"words.txt gives 1 rows to train on and 1 held out. At least 2 of each"):
        convert(config_of(folder, tmp_path / "other", data__dataset=str(tmp_path / "words.txt")), console=quiet())


def test_a_teacher_that_is_loaded_again_adds_no_labels_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where distillation has sharded it, and a complete one is timed."""
    monkeypatch.setattr("hf_linear_attn.study.convert.is_sharded", lambda model: True)
    changes = {"transfer__max_steps": 0, "distill__max_steps": 1, "speed__lengths": [16]}
    result = convert(config_of(folder, tmp_path / "out", **changes), console=quiet())
    assert result.speed is not None
    assert result.speed.lengths == [16]


def test_cosines_are_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.rand(4096, 5, generator=torch.Generator().manual_seed(0))
    cosines = torch.nn.functional.cosine_similarity(vectors, vectors, dim=-1)
    rounded_up = vectors[cosines > 1]
    assert len(rounded_up) > 10
    monkeypatch.setattr(embedding, "sentence_embeddings", lambda *_: rounded_up)
    metric = embedding.EmbeddingCosine([{"input_ids": torch.zeros(1, 1)}], rounded_up)
    assert metric(None)["cosine"] == 1.0  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no labels to fine-tune a teacher"):
        config_of(folder, tmp_path / "out", teacher__max_steps=2)
    with pytest.raises(ValueError, match="use convert"):
        finetune_config(folder / "encoder", folder / "text", tmp_path / "out", task_type="embedding")
    other = tmp_path / "other"
    save_encoder(other)
    (other / "1_Pooling").mkdir()
    (other / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    config = convert_config(
        other,
        folder / "text" / "text.txt",
        tmp_path / "out",
        task_type="embedding",
        data__text_columns=["text"],
        teacher__max_steps=None,
    )
    config = replace(config, teacher=type(config.teacher)())
    with pytest.raises(ValueError, match="pooling_mode_cls_token"):
        convert(config, console=quiet())
    assert not (tmp_path / "out").exists()


def test_parts_of_an_encoder_are_closed_by_two_kinds_of_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By held-out rows of the training's text, and by passages of the standard library's documentation."""
    tokenizer, seen = AutoTokenizer.from_pretrained(folder / "encoder"), []

    def record(model: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
        seen.extend(tokenizer.decode(row) for batch in batches for row in batch["input_ids"])
        assert all(batch["input_ids"].shape[1] <= 24 for batch in batches)
        return hla.close_harmful_parts(model, batches)

    monkeypatch.setattr("hf_linear_attn.study.convert.close_harmful_parts", record)
    monkeypatch.setattr("hf_linear_attn.study.convert.standard_library_documents", lambda: ["seven " * 60])
    stages = {"transfer__max_steps": 0, "distill__max_steps": 1, "speed__lengths": []}
    options = {"attention": "window", "options": {"window_size": 2}}
    convert(config_of(folder, tmp_path / "out", **stages, **options), console=quiet())
    other = ["seven" in text for text in seen]
    assert any(other)
    assert not all(other)
