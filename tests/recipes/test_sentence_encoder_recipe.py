"""The recipe of sentence encoders on a tiny one: the conversion, both tables, and a second call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_linear_attn as hla
from hf_linear_attn.cli.running import exit_code
from recipes import sentence_encoder
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import save_text


def main(arguments: list[str]) -> int:
    return exit_code(lambda: sentence_encoder.main(arguments))


def arguments_of(folder: Path) -> list[str]:
    text = save_text(folder / "text")
    small = {
        "model": save_checkpoint(folder / "model", "bert"),
        "data.dataset": text,
        "test_text": text,
        "output": folder / "out",
        "options": "{window_size: 4}",
        "exact_share": "0.25",
        "data.max_length": "24",
        "transfer.max_steps": "2",
        "distill.max_steps": "2",
        "passages": "6",
        "documents": "4",
        "document_length": "96",
        "question_length": "14",
        "depths": "[0.0, 0.5]",
        "device": "cpu",
    }
    return [f"--{name}={value}" for name, value in small.items()]


@pytest.mark.slow
def test_an_encoder_is_converted_and_searched_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.sentence_encoder.PIECES", (16, 24))
    assert main(arguments_of(tmp_path)) == 0
    out = tmp_path / "out"
    results = json.loads((out / "results.json").read_text())
    assert [row["model"] for row in results["embeddings"]] == [
        "window, calibrated",
        "25 % of the heads exact, calibrated",
        "converted",
    ]
    assert all(0 < row["cosine"] < 1.001 for row in results["embeddings"])
    recall = {row["way"]: row["recall"] for row in results["search"]}
    assert len(recall) == 8
    assert all(row["documents"] == 4 for row in results["search"])
    # The first sentence is the whole first piece of its document.
    assert recall["exact, pieces of 16, the most similar"]["0.0"] == recall["exact, cut after 16"]["0.0"] == 1
    report = (out / "report.md").read_text()
    assert all(f"| {name} " in report for name in recall)
    assert hla.is_patched(hla.load_pretrained(str(out / "converted" / "model")))

    written = (out / "converted" / "results.json").stat().st_mtime_ns
    assert main(arguments_of(tmp_path)) == 0
    assert (out / "converted" / "results.json").stat().st_mtime_ns == written


def test_wrong_options_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert "test_text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
