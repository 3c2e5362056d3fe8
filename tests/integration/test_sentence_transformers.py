"""sentence-transformers with a patched encoder inside, through its public functions. It is no dependency."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    PreTrainedModel,
)

import hf_linear_attn as hla
from tests.small import patch_small
from tests.tiny_models import tiny_model

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is no dependency: pip install sentence-transformers"
)

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "ran", "on", "road", "slowly")
SENTENCES = ["the cat sat on the mat", "a dog ran", "the dog ran slowly on a road", "cat"]


def save_exact(folder: Path, model_class: type[PreTrainedModel] = BertModel, **config: Any) -> str:
    """Save a tiny BERT with its tokenizer."""
    (folder / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}), encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=32).save_pretrained(folder / "exact")
    tiny_model("bert", model_class, **config).save_pretrained(folder / "exact")
    return str(folder / "exact")


@pytest.fixture
def encoder(tmp_path):
    """A tiny BERT, to which the library adds mean pooling."""
    return sentence_transformers.SentenceTransformer(save_exact(tmp_path), device="cpu")


def patch(encoder, name):
    patch_small(encoder[0].auto_model, name)
    return encoder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", "favor+", "linformer", "window"])
def test_encodes_the_same_after_saving_and_loading(encoder, name, tmp_path):
    expected = encoder.encode(SENTENCES)
    before = patch(encoder, name).encode(SENTENCES)
    assert np.isfinite(before).all()
    assert not np.array_equal(before, expected)
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True, device="cpu")
    assert hla.is_patched(again[0].auto_model)
    assert np.array_equal(again.encode(SENTENCES), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", "favor+"])
def test_a_sentence_does_not_depend_on_its_batch(encoder, name):
    together = patch(encoder, name).encode(SENTENCES)
    single = np.concatenate([encoder.encode([sentence]) for sentence in SENTENCES])
    assert np.allclose(single, together, rtol=0, atol=1e-5 * np.abs(together).max())


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{}, {"attn_implementation": "sdpa"}], ids=str)
def test_loading_without_trust_does_not_run_softmax_instead(kwargs, encoder, tmp_path):
    patch(encoder, "hedgehog").save_pretrained(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"This checkpoint runs linear attention.*trust_remote_code"):
        sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu", model_kwargs=kwargs)


@pytest.mark.slow
def test_the_card_of_the_exact_model_does_not_stay(encoder, tmp_path):
    exact = (
        "---\nlicense: mit\ntags:\n- sentences\n---\n\n# Exact\n\n    model = SentenceTransformer('someone/exact')\n"
    )
    encoder._model_card_text = exact
    encoder.save_pretrained(str(tmp_path / "exact"))
    assert "someone/exact" in (tmp_path / "exact" / "README.md").read_text()
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "exact"), device="cpu")
    patch(again, "elu").save_pretrained(str(tmp_path / "patched"))
    card = (tmp_path / "patched" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\ntags:\n- sentences\n---\n")
    assert "someone/exact" not in card
    assert "trust_remote_code=True)" in card


@pytest.mark.slow
def test_longer_positions_come_with_the_line_that_uses_them(encoder, caplog):
    limit = encoder[0].auto_model.config.max_position_embeddings
    hla.patch_model(encoder[0].auto_model, "hedgehog", max_length=4 * limit)
    assert f"set encoder.max_seq_length = {4 * limit}." in caplog.text
    text = " ".join(["cat"] * 3 * limit)
    short = encoder.encode(text)
    encoder.max_seq_length = 4 * limit
    assert not np.array_equal(encoder.encode(text), short)


def test_unpatching_restores_the_embeddings(encoder):
    expected = encoder.encode(SENTENCES)
    hla.unpatch_model(patch(encoder, "hedgehog")[0].auto_model)
    assert np.array_equal(encoder.encode(SENTENCES), expected)


@pytest.mark.slow
def test_its_trainer_trains_the_learned_parts(encoder, tmp_path):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason="losses of version 6")
    datasets = pytest.importorskip("datasets", reason="the trainer of sentence-transformers wants datasets")
    patch(encoder, "hedgehog")
    learned = {k: p.detach().clone() for k, p in encoder.named_parameters() if "linear_attention" in k}
    pairs = {"anchor": SENTENCES, "positive": SENTENCES[1:] + SENTENCES[:1]}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True
    )
    arguments.learning_rate = 1e-2
    loss = losses.MultipleNegativesRankingLoss(encoder)
    sentence_transformers.SentenceTransformerTrainer(
        model=encoder, args=arguments, train_dataset=datasets.Dataset.from_dict(pairs), loss=loss
    ).train()
    now = dict(encoder.named_parameters())
    assert learned
    assert all(not torch.equal(now[key], old) for key, old in learned.items())
    assert np.isfinite(encoder.encode(SENTENCES)).all()


def make_trainer(kind: str, folder: Path) -> Any:
    """A trainer of three steps, each of which its evaluator finds worse than the one before."""
    datasets = pytest.importorskip("datasets", reason="the trainers of sentence-transformers want datasets")
    evaluation = pytest.importorskip("sentence_transformers.base.evaluation", reason="the layout of version 6")
    package = pytest.importorskip(f"sentence_transformers.{kind}", reason="the layout of version 6")
    losses = pytest.importorskip(f"sentence_transformers.{kind}.losses", reason="the layout of version 6")
    rows: dict[str, Any] = {"anchor": SENTENCES, "positive": SENTENCES[1:] + SENTENCES[:1]}
    if kind == "sentence_transformer":
        name, source = "SentenceTransformer", save_exact(folder)
        make_loss = losses.MultipleNegativesRankingLoss
    elif kind == "cross_encoder":
        name, source = "CrossEncoder", save_exact(folder, BertForSequenceClassification, num_labels=1)
        make_loss, rows = losses.BinaryCrossEntropyLoss, {**rows, "label": [0.0, 1.0, 0.0, 1.0]}
    else:
        name, source = "SparseEncoder", save_exact(folder, BertForMaskedLM)
        weights = {"query_regularizer_weight": 1e-3, "document_regularizer_weight": 1e-3}

        def make_loss(model: Any) -> Any:
            return losses.SpladeLoss(model, losses.SparseMultipleNegativesRankingLoss(model), **weights)

    encoder = getattr(package, name)(source, device="cpu")
    patch_small(encoder[0].auto_model, "hedgehog")
    arguments = getattr(package, f"{name}TrainingArguments")(
        output_dir=str(folder / "out"),
        max_steps=3,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_score",
        greater_is_better=True,
        report_to="none",
        use_cpu=True,
    )
    scores = iter(range(0, -100, -1))

    class Falling(evaluation.BaseEvaluator):
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"score": float(next(scores))}

    trainer: Any = getattr(package, f"{name}Trainer")(
        model=encoder,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        loss=make_loss(encoder),
        evaluator=Falling(),
    )
    return trainer


KINDS = [
    "sentence_transformer",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cross_encoder", "sparse_encoder")),
]


def saved_tensors_equal(encoder: Any, checkpoint: Path) -> bool:
    saved, now = load_file(checkpoint / "model.safetensors"), encoder[0].auto_model.state_dict()
    assert any("linear_attention" in name for name in saved)
    return all(torch.equal(now[name], tensor) for name, tensor in saved.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_their_trainers_keep_the_best_weights_and_resume(kind, tmp_path):
    trainer = make_trainer(kind, tmp_path)
    trainer.train()
    assert saved_tensors_equal(trainer.model, tmp_path / "out" / "checkpoint-1")
    assert not saved_tensors_equal(trainer.model, tmp_path / "out" / "checkpoint-3")
    (tmp_path / "again").mkdir()
    resumed = make_trainer(kind, tmp_path / "again")
    resumed.args.load_best_model_at_end = False
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert saved_tensors_equal(resumed.model, tmp_path / "out" / "checkpoint-3")


def test_an_encoder_trusts_its_own_checkpoints_while_it_is_patched(encoder):
    model = encoder[0].auto_model
    assert not encoder.trust_remote_code
    hla.patch_model(model, "hedgehog")
    assert encoder.trust_remote_code
    hla.unpatch_model(model)
    assert not encoder.trust_remote_code
    encoder.trust_remote_code = True  # by its user
    hla.unpatch_model(hla.patch_model(model, "hedgehog"))
    assert encoder.trust_remote_code


def test_an_encoder_built_around_a_patched_model_trusts_what_it_saves(tmp_path):
    source = save_exact(tmp_path)
    hla.patch_model(BertModel.from_pretrained(source), "hedgehog").save_pretrained(source)
    package = sentence_transformers.SentenceTransformer
    inner = package(source, trust_remote_code=True, device="cpu")
    encoder = package(modules=list(inner), device="cpu")
    assert not encoder.trust_remote_code
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert encoder.trust_remote_code


def test_code_of_another_repository_is_not_trusted(tmp_path, caplog):
    """A tokenizer that was loaded without trust saves the name of the code that it was not to run."""
    source = save_exact(tmp_path)
    path = Path(source, "tokenizer_config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["auto_map"] = {"AutoTokenizer": [None, "someone/else--tokenization.TheirTokenizer"]}
    path.write_text(json.dumps(fields), encoding="utf-8")
    encoder = sentence_transformers.SentenceTransformer(source, trust_remote_code=False, device="cpu")
    hla.patch_model(encoder[0].auto_model, "hedgehog")
    assert not encoder.trust_remote_code
    assert "name code of their own" in caplog.text
    assert "someone/else--tokenization.TheirTokenizer" in caplog.text
