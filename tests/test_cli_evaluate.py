"""The verb `evaluate`: whole runs on tiny models, taken up and added to."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.evaluation import study
from hf_linear_attn.evaluation.measurements import NAME, Store
from hf_linear_attn.evaluation.perplexity import measure_perplexity
from hf_linear_attn.evaluation.preparing import Plan, prepare
from hf_linear_attn.evaluation.texts import read_text
from tests.evaluate_runs import run, save_folder
from tests.helpers import tiny_tokenizer

#: A metric of evaluate, as anybody may write one.
MODULE = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="right rows", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"right": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> tuple[dict[str, Any], str, Path]:
    out = folder / "out-decoder"
    text = str(folder / "text.txt")
    chosen = {"sequence_length": 32, "attention": ("elu", "window"), "backward": True, "batch": 3, "output": str(out)}
    return *run(folder / "gpt2", text=text, **chosen), out


# --------------------------------------------------------------------------------------------------------------------
# Whole runs


def test_decoder_report(decoder: tuple[dict[str, Any], str, Path]) -> None:
    report, screen, out = decoder
    assert json.loads((out / "report.json").read_text(encoding="utf-8")) == report
    whole = report["speed"]["model"]
    assert whole["lengths"] == [16, 24, 32]
    assert set(whole["rows"]) == {"sdpa", "elu", "window", "no attention"}
    for rows in (*whole["rows"].values(), *report["speed"]["training"]["rows"].values()):
        for row, length in zip(rows, whole["lengths"], strict=True):
            assert row["p20"] <= row["median"] <= row["p80"]
            assert row["tokens_per_second"] == pytest.approx(length / row["median"])
            assert row["flops"] > 0
    assert report["advice"]["length"] == 32
    assert [held["name"] for held in report["advice"]["verdicts"]] == ["elu", "window"]
    assert "/".join(str(len(report[name] or [])) for name in ("mechanisms", "decode")) == "2/5"
    for name in ("elu: ", "window: ", "report.html"):
        assert name in screen
    for name, single in (("throughput", "model"), ("training_throughput", "training"), ("prefill", "model")):
        table, batch = report["speed"][name], report["speed"][name].get("batch", 1)
        assert batch == (1 if name == "prefill" else 3)
        assert set(table["rows"]) == set(report["speed"][single]["rows"])
        for rows in table["rows"].values():
            rates = [batch * length / row["median"] for row, length in zip(rows, table["lengths"], strict=True)]
            assert [row["tokens_per_second"] for row in rows] == pytest.approx(rates)
    streams = report["decode"]["throughput"]
    assert streams["batch"] == 3
    places = [report["decode"]["contexts"].index(context) for context in streams["contexts"]]
    for name, rows in streams["rows"].items():
        alone = [report["decode"]["rows"][name][place]["cache_bytes"] for place in places]
        assert [row["cache_bytes"] for row in rows] == [3 * held for held in alone]
    batches = {one.key["measure"].get("batch") for one in Store(out / NAME)}
    assert {1, 3} <= batches
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Is it worth it at 32 tokens?" in page
    held = Store(out / NAME)
    ids = {one.id for one in held}
    assert report["mechanisms"][1]["trained"]["measurements"]["perplexity"] in ids
    rows = list(csv.DictReader(io.StringIO((out / "measurements.csv").read_text(encoding="utf-8"))))
    assert {row["id"] for row in rows} == ids


def test_numbers_are_what_a_fresh_measurement_gives(folder: Path, decoder: tuple[dict[str, Any], str, Path]) -> None:
    report = decoder[0]
    settings = report["settings"]
    plan = Plan(**{field.name: settings[field.name] for field in fields(Plan)})
    data = prepare(read_text(str(folder / "text.txt")), tiny_tokenizer(), plan)
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    window = {"context": 32, "stride": 16}
    exact = measure_perplexity(model, data.documents, **window)
    assert report["exact"]["perplexity"]["loss"] == pytest.approx(exact.loss, rel=1e-5)
    linear = measure_perplexity(hla.patch_model(model, "elu"), data.documents, **window)
    assert report["mechanisms"][0]["untrained"]["perplexity"]["loss"] == pytest.approx(linear.loss, rel=1e-5)


def test_an_appended_run_measures_only_what_is_missing(
    folder: Path, decoder: tuple[dict[str, Any], str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in (NAME, "report.json"):
        (out / name).write_bytes((decoder[2] / name).read_bytes())
    settings = {"text": str(folder / "text.txt"), "sequence_length": 32, "output": str(out), "append": True}
    before = len(Store(out / NAME))
    same, _ = run(folder / "gpt2", attention=("elu", "window"), **settings)
    assert len(Store(out / NAME)) == before
    assert same["mechanisms"] == decoder[0]["mechanisms"]
    assert same["speed"] == decoder[0]["speed"]
    more, _ = run(folder / "gpt2", attention=("efficient",), **settings)
    assert [held["name"] for held in more["mechanisms"]] == ["elu", "window", "efficient"]
    store = Store(out / NAME)
    repeated = {one.key["mechanism"]["name"] for one in store if len(store.history(_key(one))) > 1}
    assert repeated == {"softmax", "no attention"}  # timed again beside the new one
    assert more["speed"]["model"]["rows"]["sdpa"][0]["repeats"] == 2
    assert more["store"]["measurements"] == len(store)
    with pytest.raises(ValueError, match=r"other settings \(steps: 1, now 2\)"):
        run(folder / "gpt2", attention=("elu",), **settings, **{"steps": 2})


def test_throughput_takes_no_more_memory_than_there_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 8 sequences do not fit, the report says so and goes on."""
    for module in ("forecast", "speed_study"):
        monkeypatch.setattr(f"hf_linear_attn.evaluation.{module}.free_memory", lambda device: 1000)
    report, _ = run(
        folder / "gpt2",
        text=str(folder / "text.txt"),
        attention=("elu",),
        sequence_length=32,
        lengths=(16,),
        length=16,
        output=str(tmp_path / "out"),
    )
    streams = report["decode"]["throughput"]
    assert streams["contexts"] == []
    assert "Not timed, for want of memory: a context of 16 tokens (the caches would hold" in streams["notes"][0]
    (note,) = report["speed"]["throughput"]["notes"] or [""]
    if report["speed"]["model"]["rows"]["sdpa"][0]["memory"]:  # too small a pass may need no page at all
        assert "Not timed, for want of memory: 16 tokens (it would need about" in note
    assert "want of memory" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def _key(held: Any) -> Any:
    from hf_linear_attn.evaluation.measurements import Key

    return Key(**held.key)


def test_a_killed_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the timing: what was trained is not trained again, and the numbers are the same."""
    out = tmp_path / "out"
    words = ["evaluate", str(folder / "gpt2"), "--text", str(folder / "text.txt"), "--attention", "window", "--quick"]
    words += ["--lengths", "16", "--length", "16", "--seconds", "0.01", "--steps", "1", "--sequence-length", "32"]
    words += ["--output", str(out)]

    def stop(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.evaluation.speed_study.length_rows", stop)
        assert main(words) == 130
    told = " ".join(capsys.readouterr().out.split())
    assert "measurements are kept in" in told
    assert "the same command with --append" in told
    kept = {one.id: one.value for one in Store(out / NAME)}
    assert kept
    assert main(words) == 1
    assert "holds measurements already. Pass --append" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(study, "transfer_attention", stop)
    assert main([*words, "--append"]) == 0
    after = {one.id: one.value for one in Store(out / NAME)}
    assert kept.items() <= after.items()
    assert (out / "report.html").is_file()


def test_classifier_with_conversions_and_a_tuned_baseline(folder: Path, tmp_path: Path) -> None:
    report, screen = run(
        folder / "classifier",
        task=("sst2",),
        data=str(folder / "glue"),
        converted=(str(folder / "run0"), str(folder / "run1")),
        baseline=(str(folder / "tuned"),),
        output=str(tmp_path / "out"),
    )
    (held,) = report["mechanisms"]
    assert (held["name"], held["attention"], held["untrained"]) == ("elu (converted)", "elu", None)
    scores = [one["trained"]["task"]["score"] for one in held["runs"]]
    assert held["trained"]["task"]["score"] == pytest.approx(sum(scores) / 2)
    assert held["trained_spread"]["task"]["score"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert report["exact"]["task"]["examples"] == 20
    assert report["reference"]["name"] == "softmax (tuned)"
    share = held["trained"]["task"]["score"] / report["reference"]["quality"]["task"]["score"]
    assert report["advice"]["verdicts"][0]["kept"] == pytest.approx(share)
    assert "elu (converted)" in screen
    more, _ = run(
        folder / "classifier",
        task=("sst2",),
        data=str(folder / "glue"),
        attention=("hedgehog",),
        seeds=(0, 1),
        output=str(tmp_path / "out"),
        append=True,
    )
    assert [one["name"] for one in more["mechanisms"]] == ["hedgehog", "elu (converted)"]
    assert [one["seed"] for one in more["mechanisms"][0]["runs"]] == [0, 1]
    assert "task" in more["mechanisms"][0]["trained_spread"]


def test_a_metric_of_ones_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "share.py").write_text(MODULE)
    name = f"hub:{tmp_path / 'share'}"
    report, _ = run(
        folder / "classifier",
        task=("sst2",),
        data=str(folder / "glue"),
        metrics=(name, "accuracy"),
        attention=("elu",),
        output=str(tmp_path / "out"),
    )
    exact = report["exact"]["task"]
    assert exact["score"] == exact[name] == pytest.approx(exact["accuracy"])


def test_several_tasks_have_a_model_each(folder: Path, tmp_path: Path) -> None:
    """The scores of the further task are those of its own model, exact and converted, seed by seed."""
    settings: dict[str, Any] = {"data": str(folder / "glue"), "output": str(tmp_path / "out"), "batch": 1}
    checkpoints = (("", "run0"), ("", "run1"), ("rte=", "rte-run1"), ("rte=", "rte-run0"))
    report, screen = run(
        folder / "classifier",
        task=("sst2", f"rte={folder / 'rte-classifier'}"),
        converted=tuple(f"{task}{folder / name}" for task, name in checkpoints),
        baseline=(f"rte={folder / 'rte-tuned'}",),
        **settings,
    )
    assert "throughput" not in report["speed"]
    assert [held["task"] for held in report["tasks"]] == ["rte"]
    (held,) = report["mechanisms"]
    alone, _ = run(
        folder / "rte-classifier",
        task=("rte",),
        converted=tuple(str(folder / f"rte-run{seed}") for seed in (1, 0)),
        baseline=(str(folder / "rte-tuned"),),
        **{**settings, "output": str(tmp_path / "alone")},
    )
    (other,) = alone["mechanisms"]
    assert report["exact"]["task:rte"] == alone["exact"]["task"]
    assert report["control"]["task:rte"] == alone["control"]["task"]
    assert report["reference"]["quality"]["task:rte"] == alone["reference"]["quality"]["task"]
    assert held["trained"]["task:rte"] == other["trained"]["task"]
    assert [one["trained"]["task:rte"] for one in held["runs"]] == [one["trained"]["task"] for one in other["runs"]]
    (axis,) = report["advice"]["others"]
    assert axis["title"] == "rte accuracy"
    assert axis["verdicts"][0]["kept"] == alone["advice"]["verdicts"][0]["kept"]
    (mean,) = report["advice"]["recovered"]
    assert mean["shares"] == [report["advice"]["verdicts"][0]["kept"], axis["verdicts"][0]["kept"]]
    assert mean["mean"] == pytest.approx(sum(mean["shares"]) / 2)
    assert mean["spread"] is not None
    assert {"pareto-task-rte.png", "task-rte.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "kept, mean" in " ".join(screen.split())
    with pytest.raises(ValueError, match=r"of the task 'rte' with the model 'rte-classifier'\. Give the same"):
        run(folder / "classifier", task=("sst2",), append=True, **settings)


def test_encoder_with_sentence_pairs_and_a_task_timed_in_half_precision(folder: Path, tmp_path: Path) -> None:
    report, _ = run(
        folder / "bert",
        text=str(folder / "text.txt"),
        sts=str(folder / "glue"),
        task=(f"rte={folder / 'rte-classifier'}",),
        data=str(folder / "glue"),
        sequence_length=32,
        attention=("elu",),
        dtype="bfloat16",
        output=str(tmp_path / "out"),
    )
    exact = report["exact"]
    assert [one["title"] for one in report["advice"]["others"]] == ["rte accuracy", "sentence cosine"]
    assert report["advice"]["recovered"] == []
    timed = {one.key["device"]["dtype"] for one in Store(tmp_path / "out" / NAME) if "median" in one.value}
    judged = {one.key["device"]["dtype"] for one in Store(tmp_path / "out" / NAME) if "median" not in one.value}
    assert (timed, judged) == ({"bfloat16"}, {"float32"})
    assert report["store"]["elsewhere"] == 0
    assert "Times are those of bfloat16; quality was measured in float32." in report["verdicts"]
    assert exact["sts"]["pairs"] == 20
    assert -1 <= exact["sts"]["spearmanr"] <= 1
    assert report["advice"]["points"][0]["score"] == exact["sts"]["spearmanr"]
    assert report["text"]["pairs"] == "STS-B validation, glue"
    assert (tmp_path / "out" / "sts.png").is_file()
