"""The benchmark of decoding, whole models and memory; what the READMEs show of it. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.benchmarks import workloads
from recipes.benchmarks.headline import forward_tables, headline
from tests.recipes.benchmark_runs import run
from tests.tiny_models import save_checkpoint, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models instead of BERT-base and GPT-2 small."""
    from recipes.benchmarks import generate, model, shapes

    small = shapes.small_decoder(2, 16, 2, 32)
    decoders = (
        shapes.Decoder("tiny", small, batches=(1,)),
        shapes.Decoder("images", small, contexts=(16, 24), batches=(2,), headline=True),
    )
    models = (
        shapes.Shape("encoder", lambda longest: tiny_model("bert", max_position_embeddings=max(96, longest))),
        shapes.Shape("decoder", small),
    )
    monkeypatch.setattr(generate, "DECODERS", decoders)
    monkeypatch.setattr("recipes.benchmarks.decode_tables.DECODERS", decoders)
    monkeypatch.setattr(model, "MODELS", models)


@pytest.mark.usefixtures("tiny")
def test_decoding(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"attention": ("elu", "linformer-causal", "linformer"), "backend": ("torch",)}
    # What is no quick run also has the published comparisons.
    settings = {"dtypes": ("float32",), "batches": (2,), "quick": False}
    report, screen, _ = run(tmp_path / "out", section=("decode",), **chosen, **settings)
    rows = report["sections"]["decode"]
    steps = [row for row in rows if row["what"] == "step"]
    names = {"growing cache", "preallocated cache", "elu [torch]", "linformer-causal"}
    assert {(row["name"], row["context"]) for row in steps} == {
        (name, context) for name in names for context in (16, 24)
    }
    bytes_of = {(row["name"], row["context"]): row["bytes"] for row in steps}
    assert bytes_of["growing cache", 24] == 2 * 2 * 2 * 24 * 8 * 4
    assert bytes_of["elu [torch]", 16] == bytes_of["elu [torch]", 24] == 2 * 2 * (8 * 8 + 8) * 4
    assert all(("over_floor" in row) is (row["name"] == "elu [torch]") for row in steps)
    models = [row for row in rows if row.get("model") == "tiny"]
    expected = {"sdpa, cache", "eager, cache", "sdpa, no cache", "no attention", "elu", "linformer-causal"}
    assert {row["name"] for row in models} == expected
    assert {row["name"] for row in models if "growth" in row} == {"elu"}
    assert "Generating 3,072 tokens: images, batch 2" in screen
    text = (tmp_path / "out" / "benchmark.md").read_text(encoding="utf-8")
    assert "Bytes of state and cache" in text


@pytest.mark.usefixtures("tiny")
def test_whole_models(tmp_path: Path) -> None:
    report, screen, _ = run(tmp_path / "out", section=("model",), model_lengths=(16, 128))
    rows = report["sections"]["model"]
    assert {(row["model"], row["name"]) for row in rows} == {
        ("encoder", "sdpa"),
        ("encoder", "no attention"),
        ("encoder", "elu"),
        ("encoder", "linformer"),
        ("decoder", "sdpa"),
        ("decoder", "no attention"),
        ("decoder", "elu"),
    }
    assert {row["length"] for row in rows} == {16, 128}
    for row in rows:
        if row["name"] == "no attention":
            assert row["ceiling_share"]["median"] == 1.0
            assert row["ceiling"] == row["speedup"]
    assert "Share of the ceiling reached" in screen


def test_checkpoints_replace_shapes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "gpt2", "gpt2")
    save_checkpoint(tmp_path / "bert", "bert")
    for name, section in (("gpt2", ("decode", "model")), ("bert", ("model",))):
        report, _, _ = run(tmp_path / f"out-{name}", 160, tmp_path / name, section=section)
        rows = [row for section in report["sections"].values() for row in section]
        assert {row["model"] for row in rows} == {name}
        assert "elu" in {row["name"] for row in rows}


def test_bad_checkpoints_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for section, source, complaint in (
        (("model",), "no-such-folder", "cannot be loaded"),
        (("decode",), "bert", "is no causal language model"),
        (("ops",), "bert", "sections decode and model"),
    ):
        save_checkpoint(tmp_path / "bert", "bert")
        with pytest.raises((ValueError, OSError), match=complaint):
            run(tmp_path / "out", model=tmp_path / source, section=section)
        assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of the resident set takes Linux")
def test_memory_of_a_fresh_process(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"section": ("memory",), "heads": 4, "head_dim": 32, "backend": ("torch",)}
    report, screen, _ = run(tmp_path / "out", memory_lengths=(2048,), direction=("causal",), **chosen)
    peaks = {(row["name"], row["pass"]): row["bytes"] for row in report["sections"]["memory"]}
    assert {name for name, _ in peaks} == {"sdpa", "eager", "elu [torch]"}
    weights = 4 * 2048 * 2048 * 4
    assert peaks["eager", "forward"] > 1.5 * weights
    assert peaks["elu [torch]", "forward"] < 0.5 * weights
    assert "Peak extra memory: attention, causal" in screen


def test_worker_says_what_went_wrong() -> None:
    from recipes.benchmarks.memory_worker import _answer

    request = {
        "what": "attention",
        "direction": "causal",
        "pass": "forward",
        "length": 64,
        "batch": 1,
        "heads": 2,
        "head_dim": 8,
        "name": "nystrom",
        "mechanism": "nystrom",
        "backend": workloads.OWN,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
    }
    assert "error" in json.loads(_answer(json.dumps(request)))


def test_total_of_times() -> None:
    from recipes.benchmarks.generate import total_seconds

    assert total_seconds([10, 20], [1.0, 3.0], 20) == 10 * 1.0 + 10 * 2.0
    assert total_seconds([10, 20], [1.0, 3.0], 15) == 10 * 1.0 + 5 * 1.5
    assert total_seconds([10], [2.0], 5) == 10.0


@pytest.mark.usefixtures("tiny")
def test_headline(tmp_path: Path) -> None:
    """The parts of the READMEs, from whichever sections there are."""
    whole, _, _ = run(tmp_path / "out", section=("ops", "decode", "model"), backend=("torch",))
    report = {**whole, "sections": {"ops": whole["sections"]["ops"]}}
    text = headline(report)
    assert "bidirectional, 24 tokens" in text
    assert "| `elu` |" in text
    assert "sdpa |" not in text
    assert "Time over limit: causal, float32, forward (1×2×8)" in forward_tables(report)
    assert "backward" not in forward_tables(report)
    assert "decoding step after 24" in headline(whole)
    assert "- encoder at 16 tokens: `elu" in headline(whole)
    assert headline({**report, "sections": {}})
