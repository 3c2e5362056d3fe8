"""sentence-transformers with a patched encoder inside, through its public functions. It is no dependency."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hf_linear_attn as hla
from tests.small import patch_small
from tests.tiny_models import tiny_model

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is no dependency: pip install sentence-transformers"
)

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "dog", "sat", "ran", "on", "road", "slowly")
SENTENCES = ["the cat sat on the mat", "a dog ran", "the dog ran slowly on a road", "cat"]


@pytest.fixture
def encoder(tmp_path):
    """A tiny BERT, to which the library adds mean pooling."""
    from transformers import BertModel, BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32}), encoding="utf-8")
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=32).save_pretrained(tmp_path / "exact")
    tiny_model("bert", BertModel).save_pretrained(tmp_path / "exact")
    return sentence_transformers.SentenceTransformer(str(tmp_path / "exact"), device="cpu")


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
