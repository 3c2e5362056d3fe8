"""The recipe of SmolLM2 on a tiny decoder: variants, measurements, report, and a second call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_linear_attn as hla
from hf_linear_attn.cli.running import exit_code
from recipes import smollm2
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import save_text


def main(arguments: list[str]) -> int:
    return exit_code(lambda: smollm2.main(arguments))


def arguments_of(folder: Path, *more: str) -> list[str]:
    model = save_checkpoint(folder / "model", "llama", eos=True, num_hidden_layers=3, vocab_size=64)
    text = save_text(folder / "text")
    paths = [
        "--model",
        str(model),
        "--data.dataset",
        str(text),
        "--test_text",
        str(text),
        "--output",
        str(folder / "out"),
    ]
    small = {
        "data.max_length": "48",
        "options": "{window_size: 8}",
        "transfer.max_steps": "2",
        "distill.max_steps": "2",
        "contexts": "[24, 48]",
        "test_tokens": "48",
        "recall_lengths": "[160]",
        "recall_trials": "1",
        "recall_tasks": "niah_multikey_1",
        "decoding_contexts": "[16]",
        "probe_length": "80",
        "search_length": "48",
        "bf16": "false",
        "device": "cpu",
    }
    return [*paths, *(f"--{name}={value}" for name, value in small.items()), *more]


@pytest.mark.slow
def test_variants_are_converted_measured_and_compared(tmp_path: Path) -> None:
    variants = ["--variants", "mixture", "int8", "control", "near", "probe", "random", "window", "linear"]
    assert main(arguments_of(tmp_path, *variants, "--exact_share=0.34")) == 0
    out = tmp_path / "out"
    results = json.loads((out / "results.json").read_text())
    assert sum(row["chosen"] for row in results["heads"]["scores"]) == 2
    assert {"exact", "mixture", "int8", "control", "near", "probe", "random", "window", "linear"} <= results.keys()
    plans = {name: json.loads((out / "plans" / f"{name}.json").read_text()) for name in ("mixture", "near", "window")}
    assert plans["near"] == {**plans["mixture"], "default": {**plans["mixture"]["default"], "mix_init": -10_000.0}}
    assert list(plans["window"]) == ["default"]
    assert hla.is_patched(hla.load_pretrained(str(out / "mixture" / "model")))
    report = (out / "report.md").read_text()
    assert all(f"| {name} " in report for name in ("exact", "mixture", "control", "linear"))

    records = (out / "records.jsonl").read_bytes()
    assert main(arguments_of(tmp_path / "again", *variants, f"--output={out}", "--exact_share=0.34")) == 0
    assert (out / "records.jsonl").read_bytes() == records
    # What depends on another option is measured anew, and nothing else.
    others = ("--variants=mixture", "--exact_share=0.34", "--test_tokens=96")
    assert main(arguments_of(tmp_path, *others)) == 0
    added = (out / "records.jsonl").read_bytes()[len(records) :].decode().splitlines()
    new = [record["conditions"] for record in map(json.loads, added) if record["kind"] == "record"]
    assert [(one["attention"], one["measurement"]) for one in new] == [
        ("exact", "perplexity"),
        ("mixture", "perplexity"),
    ]
    assert "| near " not in (out / "report.md").read_text()


@pytest.mark.slow
def test_what_was_trained_with_other_options_is_not_measured_as_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments_of(tmp_path, "--variants", "mixture", "window", "--exact_share=0.34")) == 0
    records = (tmp_path / "out" / "records.jsonl").read_text()
    assert main(arguments_of(tmp_path, "--variants=mixture", "--exact_share=0.67")) == 1
    assert "was trained by another plan" in capsys.readouterr().err
    assert main(arguments_of(tmp_path, "--variants=window", "--exact_share=0.34", "--distill.max_steps=3")) == 1
    assert "distill.max_steps was 2, now 3" in capsys.readouterr().err
    added = (tmp_path / "out" / "records.jsonl").read_text().removeprefix(records).splitlines()
    assert all(json.loads(line)["conditions"]["attention"] == "exact" for line in added if '"kind": "record"' in line)


def test_wrong_options_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, message in {"--variants=best": "'best'", "--exact_share=1.5": "1.5"}.items():
        assert main(arguments_of(tmp_path, wrong)) == 2
        assert message in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert "test_text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
