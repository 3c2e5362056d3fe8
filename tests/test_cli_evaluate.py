"""The verb `evaluate`: whole runs on tiny models, taken up and added to; and what it says to bad input."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import BertForSequenceClassification, GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn.cli import build_parser, main
from hf_linear_attn.cli_fields import from_arguments
from hf_linear_attn.evaluation import study
from hf_linear_attn.evaluation.measurements import NAME, Store
from hf_linear_attn.evaluation.options import EvaluateOptions
from hf_linear_attn.evaluation.perplexity import measure_perplexity
from hf_linear_attn.evaluation.preparing import Plan, prepare
from hf_linear_attn.evaluation.runner import run_evaluate
from hf_linear_attn.evaluation.texts import read_text

from .evaluation.models import WORDS, save_checkpoint, some_text, tiny_tokenizer
from .helpers import bert_config

SMALL: dict[str, Any] = {"quick": True, "lengths": (16, 24), "length": 32, "seconds": 0.01, "steps": 1}

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
    """Checkpoints of each kind, with converted and tuned ones, a text, a task, sentence pairs."""
    made = tmp_path_factory.mktemp("evaluate")
    for kind in ("bert", "gpt2"):
        save_checkpoint(made / kind, kind)
    (made / "text.txt").write_text(some_text(), encoding="utf-8")
    _classifiers(made)
    rows = [" ".join(WORDS[(place * 7 + step) % len(WORDS)] for step in range(8)) for place in range(60)]
    (made / "glue" / "SST-2").mkdir(parents=True)
    (made / "glue" / "STS-B").mkdir()
    for name, part in (("train.tsv", rows[:40]), ("dev.tsv", rows[40:])):
        lines = [f"{text}\t{index % 2}" for index, text in enumerate(part)]
        (made / "glue" / "SST-2" / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    (made / "glue" / "RTE").mkdir()
    for name, part in (("train.tsv", rows[:40]), ("dev.tsv", rows[40:])):
        labels = ("entailment", "not_entailment")
        lines = [f"{index}\t{text}\t{rows[index]}\t{labels[index % 2]}" for index, text in enumerate(part)]
        lines = ["index\tsentence1\tsentence2\tlabel", *lines]
        (made / "glue" / "RTE" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name in ("sts-train.csv", "sts-dev.csv"):
        lines = [
            f"g\tf\t2030\t{index}\t{index % 5}.0\t{text}\t{rows[index // 2]}" for index, text in enumerate(rows[:20])
        ]
        (made / "glue" / "STS-B" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made


def _classifiers(made: Path) -> None:
    """Two tasks: a fine-tuned classifier, two conversions that differ in their weights, and a tuned exact model."""
    torch.manual_seed(0)
    _save_conversions(made, "", {0: "negative", 1: "positive"})
    _save_conversions(made, "rte-", {0: "entailment", 1: "not_entailment"})


def _save_conversions(made: Path, task: str, labels: dict[int, str]) -> None:
    model = BertForSequenceClassification(bert_config(id2label=labels))
    for kind, attention in (("classifier", None), ("run0", "elu"), ("run1", "elu"), ("tuned", None)):
        name = f"{task}{kind}"
        model.classifier.weight.data += 0.5 * torch.randn(model.classifier.weight.shape)
        if attention is not None:
            hla.patch_model(model, attention)
        model.save_pretrained(made / name)
        tiny_tokenizer().save_pretrained(made / name)
        if attention is not None:
            hla.unpatch_model(model)


def run(source: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The report and the screen."""
    stream = io.StringIO()
    report = run_evaluate(str(source), EvaluateOptions(**{**SMALL, **changes}), console=Console(file=stream, width=180))
    return report, stream.getvalue()


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


# --------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {}, "give a text to judge it on with --text"),
        ("gpt2", {"text": "nowhere.txt"}, r"no text file 'nowhere.txt'"),
        ("gpt2", {"text": "TEXT", "attention": ("nystrom",)}, "cannot be measured on this model"),
        ("gpt2", {"text": "TEXT", "attention": ("hedgehogs",)}, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ("gpt2", {"text": "TEXT", "attention": ("softmax",)}, "always measured"),
        ("gpt2", {"text": "TEXT", "sts": "GLUE"}, "causal language model"),
        ("gpt2", {"text": "TEXT", "context": 4096}, "beyond the model's 96 positions"),
        ("gpt2", {"text": "TEXT", "sequence_length": 4096}, "beyond the model's 96 positions"),
        ("gpt2", {"text": "TEXT", "device": "toaster"}, "toaster"),
        ("bert", {"context": 16}, "no causal language model"),
        ("bert", {"converted": ("nowhere",)}, "no folder 'nowhere'"),
        ("bert", {"converted": ("CLASSIFIER",)}, "exact attention: nothing was converted"),
        ("bert", {"baseline": ("RUN",)}, "is patched; a baseline has exact attention"),
        ("bert", {"converted": ("HERE",)}, "no config.json"),
        ("gpt2", {"text": "TEXT", "converted": ("RUN",)}, "not made from this model: its model_type is 'bert'"),
        ("bert", {"task": ("sst3",)}, r"'sst3'.*Did you mean 'sst2'"),
        ("bert", {"task": ("sst2",), "data": "nowhere"}, "no folder 'nowhere'"),
        ("bert", {"task": ("sst2",), "data": "GLUE"}, "has no head for the task"),
        ("bert", {"task": ("rte=nowhere",), "data": "GLUE"}, "no folder 'nowhere'.*--task"),
        (
            "gpt2",
            {"text": "TEXT", "task": ("sst2=CLASSIFIER",), "data": "GLUE"},
            "its model_type is 'bert', not 'gpt2'",
        ),
        ("classifier", {"task": ("sst2", "rte=CLASSIFIER"), "data": "GLUE"}, "trained with the labels negative"),
        (
            "bert",
            {"task": ("sst2=CLASSIFIER",), "data": "GLUE", "converted": ("sst2=RUN",)},
            "no converted checkpoint of",
        ),
        ("classifier", {"task": ("sst2",), "data": "GLUE", "metrics": ("acuracy",)}, "Did you mean 'accuracy'"),
        ("classifier", {"task": ("sst2",), "data": "GLUE", "metrics": ("hub:HERE/none",)}, "cannot be loaded"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    folder: Path, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    places = {
        "TEXT": str(folder / "text.txt"),
        "GLUE": str(folder / "glue"),
        "RUN": str(folder / "run0"),
        "CLASSIFIER": str(folder / "classifier"),
        "HERE": str(folder),
    }
    for held in ("task", "converted"):
        if held in changes:
            heads = [one.rpartition("=") for one in changes[held]]
            changes = {**changes, held: tuple(f"{head}{sign}{places.get(end, end)}" for head, sign, end in heads)}
    given = {
        name: tuple(places.get(one, one) for one in value) if isinstance(value, tuple) else places.get(value, value)
        for name, value in changes.items()
    }
    with pytest.raises((ValueError, OSError), match=words):
        run(folder / kind, **{"output": str(tmp_path / "out"), **given})
    assert list(tmp_path.iterdir()) == []


def test_output_folders_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("kept", encoding="utf-8")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    text = str(folder / "text.txt")
    for append in (False, True):
        with pytest.raises(ValueError, match="holds other files"):
            run(folder / "gpt2", text=text, output=str(tmp_path / "mine"), append=append)
    with pytest.raises(NotADirectoryError, match="is a file"):
        run(folder / "gpt2", text=text, output=str(tmp_path / "file"))
    (tmp_path / "mine" / NAME).write_text("{broken\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"jsonl', line 1: no JSON"):
        run(folder / "gpt2", text=text, output=str(tmp_path / "mine"), append=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": -1},
        {"length": 8},
        {"lengths": (8,)},
        {"lengths": (16, 16)},
        {"seeds": (-1,)},
        {"seconds": 0.0},
        {"rows": 1},
        {"batch": 0},
        {"stride": 8, "context": 8},
        {"data": "glue"},
        {"metrics": ("accuracy",)},
        {"task": ("sst2",), "text": "a.txt"},
        {"task": ("sst2", "sst2=other")},
        {"task": ("sst2", "rte")},
        {"metrics": ("accuracy",), "task": ("sst2", "rte=folder")},
        {"dtype": "int8"},
        {"sts": "glue", "task": ("stsb",)},
        {"again": True},
        {"attention": ("elu", "elu")},
    ],
)
def test_bad_options_name_themselves(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EvaluateOptions(**bad)


def test_flags_are_light_and_all_have_a_help_text() -> None:
    words = ["evaluate", "gpt2", "--text", "a.txt", "--lengths", "64", "128", "--seeds", "1", "2", "--backward"]
    words += ["--task", "rte=a", "mrpc=b", "--dtype", "bfloat16", "--converted", "c", "rte=d", "x=y"]
    options = from_arguments(EvaluateOptions, build_parser().parse_args(words))
    assert (options.own_task, options.other_tasks, options.dtype) == (None, {"rte": "a", "mrpc": "b"}, "bfloat16")
    assert [options.for_task(task).converted for task in (None, "rte", "mrpc")] == [("c", "x=y"), ("d",), None]
    assert (options.lengths, options.seeds, options.backward) == ((64, 128), (1, 2), True)
    for field in fields(EvaluateOptions):
        assert len(field.metadata["help"]) > 10, field.name
    code = "import sys; from hf_linear_attn.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hf-linear-attn\[demo\]'"):
        run_evaluate("gpt2", EvaluateOptions())
