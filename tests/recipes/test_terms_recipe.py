"""The recipe of tiny models with terms in their logits, from scratch to its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import terms
from recipes.result_files import read_json
from tests.tiny_models import save_checkpoint


@pytest.mark.slow
def test_every_run_is_trained_converted_and_measured(tmp_path: Path) -> None:
    tokenizer = save_checkpoint(tmp_path / "bert", "bert", mask=True)
    task = tmp_path / "glue" / "SST-2"
    task.mkdir(parents=True)
    for name in ("train", "dev"):
        sentence = " ".join(["red cat"] * 24)  # beyond the window of 32 tokens
        rows = "\n".join(f"{sentence} {number}\t{number % 2}" for number in range(24))
        (task / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}\n", encoding="utf-8")
    arguments = ["--folder", str(task.parent), "--tokenizer", str(tokenizer), "--texts", "32", "--steps", "2"]
    terms.main([*arguments, "--output", str(tmp_path / "out")])
    results = read_json(tmp_path / "out" / "results.json")
    assert [row["name"] for row in results["rows"]] == ["deberta", "t5", "t5-window-alone"]
    for row in results["rows"]:
        stages = ["teacher", "patched", "transferred", "converted"]
        stages += [] if row["name"] == "t5-window-alone" else ["control"]
        assert all(row["metric"] in row[stage] for stage in stages)
    assert str(tmp_path) not in (tmp_path / "out" / "results.json").read_text(encoding="utf-8")
