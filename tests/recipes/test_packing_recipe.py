"""The recipe that measures what packing saves."""

import json

import pytest

from recipes.benchmarks import packing as recipe


def test_both_forms_compute_the_same(tmp_path):
    documents = [
        " ".join(f"word{k}" for k in range(start, start + (3, 40, 12, 80, 7, 25)[start % 6])) for start in range(90)
    ]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(documents), encoding="utf-8")
    small = ["--max-length", "64", "--batch-size", "4", "--batches", "2", "--attention", "elu", "linformer-causal"]
    with pytest.raises(NotImplementedError, match="cannot be bidirectional"):
        recipe.main(["--text", str(tmp_path / "text.txt"), *small, "--out", str(tmp_path / "no.json")])
    assert recipe.main(["--text", str(tmp_path / "text.txt"), *small[:-1], "--out", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["tokens"]["packed"] < report["tokens"]["padded"]
    assert [row["direction"] for row in report["rows"]] == ["both", "causal"]
    assert all(row["difference"] < 2e-5 for row in report["rows"])
    assert report["text"]["source"] == "text.txt"
