"""`hf-linear-attn plan`: runs on tiny checkpoints, their files, resumption, and the command line."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, BertForSequenceClassification, GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn.cli import main, parse_verb
from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.data.config import DataConfig, TimingConfig
from hf_linear_attn.data.text import hold_out
from hf_linear_attn.measure.quality import Assessment, assess
from hf_linear_attn.study import options
from hf_linear_attn.study.options import PlanConfig
from hf_linear_attn.study.plan import plan, prepare_plan
from hf_linear_attn.study.plan_result import PlanResult
from hf_linear_attn.study.prepare import split_halves
from hf_linear_attn.study.study import RECORDS_FILE, Records
from hf_linear_attn.study.variants import Variant
from hf_linear_attn.utils.progress import ConsoleProgress
from tests.training.tiny_runs import save_task

from ..inputs import token_ids
from ..small import attentions
from ..tiny_models import save_checkpoint, tiny_model
from ..tiny_text import TOKENS, sample_text, tiny_tokenizer

FILES = {"plan.json", "plan-report.json", "report.html", "curve.png", "learned", RECORDS_FILE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of three layers, an encoder, a classifier with its task, and a text."""
    folder = tmp_path_factory.mktemp("plan")
    torch.manual_seed(0)
    tiny_model("gpt2", num_hidden_layers=3, max_position_embeddings=192).save_pretrained(folder / "gpt2")
    tiny_tokenizer().save_pretrained(folder / "gpt2")
    save_checkpoint(folder / "bert", "bert")
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    tiny_model("bert", BertForSequenceClassification, **labels).save_pretrained(folder / "classifier")
    tiny_tokenizer().save_pretrained(folder / "classifier")
    (folder / "text.txt").write_text(sample_text(), encoding="utf-8")
    (folder / "SST-2").mkdir()
    for name, count in (("train", 40), ("dev", 24)):
        rows = [
            f"{' '.join(TOKENS[(row * 7 + index) % len(TOKENS)] for index in range(9))}\t{row % 2}"
            for row in range(count)
        ]
        (folder / "SST-2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return folder


def always_informative(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_rule(*scores: float | None, **options: Any) -> Assessment:
        return replace(assess(*scores, **options), valid=True, chance=False)

    monkeypatch.setattr("hf_linear_attn.study.plan.assess", without_rule)


@pytest.fixture(autouse=True)
def _informative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights predict nothing: the exact model may well be no better than the model without attention."""
    always_informative(monkeypatch)


def config_of(folder: Path, model: str, output: Path, **changes: Any) -> PlanConfig:
    data = {"dataset": str(folder / "text.txt"), "max_length": 32, **changes.pop("data", {})}
    settings: dict[str, Any] = {
        "budget": "100000% perplexity",
        "quick": True,
        "steps": 2,
        "speed": TimingConfig(changes.pop("lengths", (32,))),
        "options": {"window_size": 4} if model != "bert" and "attention" not in changes else {},
    }
    return PlanConfig(str(folder / model), output=str(output), data=DataConfig(**data), **{**settings, **changes})


def run(folder: Path, model: str, output: Path, /, **changes: Any) -> PlanResult:
    return plan(config_of(folder, model, output, **changes), console=Console(file=io.StringIO(), width=100))


def report_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "plan-report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanResult]:
    output = tmp_path_factory.mktemp("runs") / "gpt2"
    with pytest.MonkeyPatch.context() as patch:
        always_informative(patch)
        return output, run(folder, "gpt2", output, save_model=str(output.parent / "model"))


def test_files(finished: tuple[Path, PlanResult], folder: Path) -> None:
    output, result = finished
    assert {path.name for path in output.iterdir()} == FILES
    report = report_of(output)
    assert report["result"] == result.to_dict()
    assert report["summary"] == result.summary()
    assert report["transfer"]["steps"] == 2
    page = (output / "report.html").read_text(encoding="utf-8")
    for text in (json.dumps(report), page):
        assert str(folder) not in text
    assert "Each layer by itself" in page
    assert (output / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (result.met, result.layers, result.total) == (True, [0, 1, 2], 3)
    assert set(result.curve[1].speedup) == {"32"}


@pytest.mark.slow
def test_plan_and_checkpoint_are_the_measured_model(finished: tuple[Path, PlanResult], folder: Path) -> None:
    from safetensors.torch import load_file

    output, _ = finished
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    hla.patch_model(model, LinearAttentionConfig.from_file(output / "plan.json"))
    assert attentions(model) == ["window"] * 3
    saved = hla.load_pretrained(str(output.parent / "model")).eval()
    model.load_state_dict(load_file(next((output / "learned").iterdir())), strict=False)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, model(ids).logits)


def without_times(result: PlanResult) -> dict[str, Any]:
    values = result.to_dict()
    rows = [*values["curve"], values["chosen"], values["verified"]]
    for row in rows:
        row.pop("speedup")
        row.pop("unsure", None)
    return values


@pytest.mark.slow
def test_a_stopped_run_is_resumed(
    finished: tuple[Path, PlanResult], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Variant._measured, []

    def stop(self: Any, *arguments: Any) -> Any:
        calls.append(self)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Variant, "_measured", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "gpt2", tmp_path)
    measurements = [record.conditions["measurement"] for record in Records(tmp_path / RECORDS_FILE)]
    assert measurements.count("perplexity") == 5
    assert not (tmp_path / "plan.json").exists()
    monkeypatch.setattr(Variant, "_measured", original)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_linear_attn.study.variants.transfer_attention", lambda *_, **__: pytest.fail("trained"))
        result = run(folder, "gpt2", tmp_path, resume=True)
    assert report_of(tmp_path)["resumed"]
    assert without_times(result) == without_times(finished[1])


@pytest.mark.slow
def test_lost_parameters_are_trained_again(folder: Path, tmp_path: Path) -> None:
    run(folder, "gpt2", tmp_path)
    count = len(Records(tmp_path / RECORDS_FILE))
    shutil.rmtree(tmp_path / "learned")
    with pytest.raises(ValueError, match=r"earlier result: continue it \(--resume\)"):
        run(folder, "gpt2", tmp_path)
    run(folder, "gpt2", tmp_path, resume=True)
    assert len(Records(tmp_path / RECORDS_FILE)) == count + 1
    assert len(list((tmp_path / "learned").iterdir())) == 1


@pytest.mark.slow
def test_another_budget_uses_the_same_measurements(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(folder, "gpt2", tmp_path)
    calls = []
    original = Variant._measured
    monkeypatch.setattr(Variant, "_measured", lambda self, *parts: calls.append(1) or original(self, *parts))
    limit = max(first.curve[1].damage, 0.0) + 1e-9
    second = run(folder, "gpt2", tmp_path, resume=True, budget=f"{limit:.12f}% perplexity")
    assert second.within_budget
    assert second.chosen.damage <= limit
    assert len(calls) <= 1  # the verification of another choice
    run(folder, "gpt2", tmp_path, steps=1, resume=True)
    assert len(calls) > 1
    assert run(folder, "gpt2", tmp_path, steps=0, overwrite=True, attention="elu").attention == "elu"
    assert report_of(tmp_path)["transfer"] == {}


@pytest.mark.slow
def test_no_checkpoint_without_the_budget(folder: Path, tmp_path: Path) -> None:
    options = {"attention": "elu", "steps": 0, "lengths": (), "save_model": str(tmp_path / "model")}
    result = run(folder, "bert", tmp_path / "bert", budget="0.0000001 cosine", **options)
    assert not result.met
    assert not (tmp_path / "model").exists()
    assert LinearAttentionConfig.from_file(tmp_path / "bert" / "plan.json").layers


@pytest.mark.slow
def test_classifier(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    settings: dict[str, Any] = {
        "data": {"dataset": None, "task": "sst2", "folder": str(folder)},
        "budget": "100 points",
    }
    result = run(folder, "classifier", tmp_path, **settings)
    assert result.met
    assert result.score["title"] == "sst2 accuracy"
    assert any("rests on 12 examples" in sentence for sentence in result.summary())
    data = report_of(tmp_path)["data"]
    assert data["choice"]["sequences"] == data["verification"]["sequences"] == 12
    assert data["choice"]["longest"] == 11  # nine words and two special tokens
    with pytest.raises(ValueError, match="no head for the task 'sst2'"):
        run(folder, "bert", tmp_path / "headless", **settings)


@pytest.mark.slow
def test_heads_of_a_mixture_are_searched_and_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"budget": "40% cache at 60", "search": "heads", "lengths": (), "save_model": str(tmp_path / "model")}
    budget |= {"attention": "hedgehog", "options": {"feature_dim": 4}}
    result = run(folder, "gpt2", tmp_path / "out", **budget)
    assert (result.part, result.total) == ("key-value heads", 12)
    assert result.met
    assert [row.count for row in result.curve] == [0, 6, 8, 10, 11, 11, 12]
    assert result.chosen.cache["60"] <= 0.4
    saved = hla.load_pretrained(str(tmp_path / "model")).eval()
    exact = {str(row.index): list(row.exact_heads) for row in hla.patch_report(saved).layers if row.exact_heads}
    assert exact == result.chosen.exact_heads
    assert result.plan["default"]["attention"] == "hedgehog"
    assert {name: entry["exact_heads"] for name, entry in result.plan.items() if name != "default"} == exact
    assert "by 12 of 12" not in result.summary()[0]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Which key-value heads of gpt2" in page
    assert "Each layer by itself" not in page
    monkeypatch.setattr("hf_linear_attn.study.plan.find_exact_heads", None)  # the ranking is in the records
    again = run(folder, "gpt2", tmp_path / "out", **budget | {"save_model": None, "resume": True})
    assert again.curve == result.curve
    with pytest.raises(ValueError, match="'40% cache at 60' is for a causal language model"):
        run(folder, "bert", tmp_path / "bert", attention="elu", budget="40% cache at 60")


@pytest.mark.slow
def test_encoder_longer_than_its_positions(folder: Path, tmp_path: Path) -> None:
    options = {"attention": "linformer", "lengths": (32, 200), "options": {"num_slots": 8}}
    result = run(folder, "bert", tmp_path, budget="2 cosine", **options)
    assert result.met
    assert list(result.chosen.speedup) == ["32", "200"]
    assert result.mechanisms["0"]["num_slots"] == 8
    result = run(folder, "bert", tmp_path, budget="1.01x at 200", overwrite=True, **{**options, "lengths": (32,)})
    assert list(result.chosen.speedup) == ["32", "200"]


@pytest.mark.slow
def test_own_labelled_files(folder: Path, tmp_path: Path) -> None:
    """Labelled rows as `convert` reads them, with the labels as numbers or by name."""
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    rows = (folder / "SST-2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    names = ("negative", "positive")
    cells = [(text, names[int(label)]) for text, label in (row.split("\t") for row in rows)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,mark", *map(",".join, cells)]) + "\n", encoding="utf-8")
    columns = {"text_columns": ("review",), "label_column": "mark", "validation_size": 0.5}
    data = {"dataset": str(tmp_path / "reviews.csv"), **columns}
    result = run(folder, "classifier", tmp_path / "out", data=data, budget="100 points")
    assert result.met
    assert result.score["title"] == "reviews.csv accuracy"
    report = report_of(tmp_path / "out")["data"]
    assert (report["source"], report["choice"]["sequences"]) == ("reviews.csv", 10)
    text = (tmp_path / "reviews.csv").read_text(encoding="utf-8")
    (tmp_path / "reviews.csv").write_text(text.replace("negative", "good").replace("positive", "bad"))
    with pytest.raises(ValueError, match="labels negative, positive, in this order; the data has bad, good"):
        run(folder, "classifier", tmp_path / "other", data=data, budget="100 points")


@pytest.mark.slow
def test_a_column_of_text_for_a_language_model(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra 'train'")
    lines = sample_text().splitlines()
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"story": line}) for line in lines), encoding="utf-8")
    data = {"dataset": str(tmp_path / "text.jsonl"), "text_columns": ("story",), "validation_size": 0.2}
    assert run(folder, "gpt2", tmp_path / "out", data=data, lengths=()).met
    data = report_of(tmp_path / "out")["data"]
    assert data["rows"].startswith("80 documents, packed into rows of")
    held_out, tokenizer = hold_out(lines, 0.2)[1], AutoTokenizer.from_pretrained(folder / "gpt2")
    for part, half in (("choice", held_out[::2]), ("verification", held_out[1::2])):
        tokens = sum(len(tokenizer(line, add_special_tokens=False)["input_ids"]) for line in half)
        assert data[part]["tokens"] == tokens + 1  # and one before the text


@pytest.mark.slow
def test_the_screen_shows_the_rows_the_stages_and_the_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, stages = io.StringIO(), []
    monkeypatch.setattr(ConsoleProgress, "status", lambda self, *stage: stages.append(stage))
    plan(config_of(folder, "gpt2", tmp_path, steps=6), console=Console(file=stream, width=200))
    screen = stream.getvalue()
    assert re.search(
        r"Data: text.txt: running text, packed into rows of 32 tokens; "
        r"\d+ inputs of [\d,]+ tokens \(median 32, longest 32\) for the transfer",
        screen,
    )
    totals = (
        ("attention transfer, loss", 6),
        ("models with one linear layer", 3),
        ("models with linear layers", 3),
        ("speedup at 32 tokens", 3),
    )
    for stage, total in totals:
        assert [done for name, done, every in stages if stage in name and every == total], stage
    assert f"Plan: {tmp_path / 'plan.json'}, with report.html" in screen


def test_halves_share_nothing() -> None:
    assert split_halves(["a", "b", "c"]) == [["a", "c"], ["b"]]
    assert split_halves(["one two three four five"]) == [["one two three"], ["four five"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "much"}, "'2x at 4096'"),
        ({"budget": "0.5 points"}, "is for a classifier with its task"),
        ({"attention": "linformer"}, "'linformer' cannot be planned on this model"),
        ({"attention": "hedgehgo"}, "hedgehog"),
        ({"attention": "softmax"}, "is the exact attention"),
        ({"options": {"windows": 3}}, "windows"),
        ({"steps": -1}, "^steps: must"),
        ({"lengths": (4,)}, "of at least 16"),
        ({"data": {"task": "sst2"}}, "Give only one"),
        ({"data": {"folder": "glue"}}, "give the task, too"),
        ({"data": {"max_length": 1000}}, "^data.max_length: 1000 is beyond the model's"),
        ({"data": {"max_length": 8}}, "^data.max_length: must be a whole number of at least 16"),
        ({"data": {"dataset": "nowhere.txt"}}, "nowhere.txt"),
        ({"data": {"group_by_length": False}}, "^data.group_by_length: is for training"),
        ({"data": {"mlm_probability": 0.3}}, "^data.mlm_probability: is for training"),
        ({"data": {"label_column": "mark"}}, "^data.label_column: is for labelled data"),
        ({"data": {"revision": "main"}}, "^data.revision: is of a data set of the Hub"),
        ({"data": {"dataset_config": "raw"}}, "^data.dataset_config: is of a data set of the Hub"),
        ({"device": "tpux"}, "tpux"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        run(folder, "gpt2", tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_models_that_are_not_supported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be loaded"):
        run(folder, "nothing", tmp_path)
    hla.patch_model(GPT2LMHeadModel.from_pretrained(folder / "gpt2"), "elu").save_pretrained(tmp_path / "patched")
    tiny_tokenizer().save_pretrained(tmp_path / "patched")
    (tmp_path / "text.txt").write_text(sample_text(), encoding="utf-8")
    with pytest.raises(ValueError, match="patched already"):
        run(tmp_path, "patched", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--save_model .* earlier result"):
        run(folder, "gpt2", tmp_path / "out", save_model=str(tmp_path / "full"))


# --------------------------------------------------------------------------------------------------------------------
# The command line


def arguments(folder: Path, output: Path, budget: str, *more: str) -> list[str]:
    flags = ["--data.dataset", str(folder / "text.txt"), "--output", str(output), "--quick", "--steps", "1"]
    flags += ["--data.max_length", "32", "--speed.lengths", "32", *more]
    return ["plan", str(folder / "gpt2"), "--budget", budget, *flags]


@pytest.mark.slow
def test_exit_codes_and_the_plan_patches(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--options.window_size", "8"]
    assert main(arguments(folder, tmp_path / "plan", "1000000% perplexity", *window)) == 0
    assert "is met by 3 of 3 layers as window" in " ".join(capsys.readouterr().out.split())
    assert main(arguments(folder, tmp_path / "plan", "1000x at 32", "--resume", *window)) == 1
    assert "cannot be reached" in " ".join(capsys.readouterr().out.split())
    file, patched = str(tmp_path / "plan" / "plan.json"), str(tmp_path / "patched")
    assert main(["patch", str(folder / "gpt2"), patched, "--plan", file]) == 0
    assert "of 3 self-attention layers are linear" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_planned_where_the_data_cannot_measure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of random weights predicts no better with attention than without."""
    monkeypatch.setattr("hf_linear_attn.study.plan.assess", assess)
    (tmp_path / "plan").mkdir()
    save = ["--save_model", str(tmp_path / "model")]
    assert main(arguments(folder, tmp_path / "plan", "1000000% perplexity", *save)) == 3
    screen = " ".join(capsys.readouterr().out.split())
    assert "cannot be measured on these data, so there is no plan." in screen
    assert "No plan was written." in screen
    assert "★" not in screen
    assert {path.name for path in (tmp_path / "plan").iterdir()} == FILES - {"plan.json"}
    page = (tmp_path / "plan" / "report.html").read_text(encoding="utf-8")
    assert "★" not in page
    assert "The plan</h2>" not in page
    assert report_of(tmp_path / "plan")["result"]["plan"] is None
    assert not (tmp_path / "model").exists()
    # A budget of speed can be measured. Its plan says that quality cannot; another budget takes it away again.
    assert main(arguments(folder, tmp_path / "plan", "1.0001x at 32", "--resume")) in (0, 1)
    assert "says nothing about attention" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "plan" / "plan.json").is_file()
    assert main(arguments(folder, tmp_path / "plan", "1000000% perplexity", "--resume")) == 3
    assert not (tmp_path / "plan" / "plan.json").exists()


@pytest.mark.slow
def test_a_budget_of_recall_measures_recall(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of random weights recalls nothing, or a pair by chance: no share of that is kept for sure."""
    assert main(arguments(folder, tmp_path / "plan", "90% recall at 160")) in (1, 3)
    text = " ".join(capsys.readouterr().out.split())
    assert re.search("'90% recall at 160' (cannot be|is not confirmed)", text)
    records = (tmp_path / "plan" / "records.jsonl").read_text(encoding="utf-8")
    assert '"metric": "recall_at"' in records
    assert '"metric": "perplexity"' not in records


@pytest.mark.parametrize(
    ("budget", "more", "message"),
    [
        ("much", (), "Budgets look like '1% perplexity'"),
        ("0.02 cosine", (), "is for an encoder without a task"),
        ("1% perplexity", ("--attention", "nystrom"), "cannot be planned on this model"),
    ],
)
def test_errors_are_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    budget: str,
    more: tuple[str, ...],
    message: str,
) -> None:
    assert main(arguments(folder, tmp_path / "plan", budget, *more)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_flags() -> None:
    flags = ["gpt2", "--budget", "2x at 64", "--options.a", "1", "--options.b", "x", "--speed.lengths", "64", "128"]
    config = parse_verb("plan", flags)
    assert (config.model, config.options, config.speed.lengths) == ("gpt2", {"a": 1, "b": "x"}, (64, 128))
    assert main(["plan", "gpt2"]) == 2


def test_help_does_not_import_torch() -> None:
    code = "import sys; from hf_linear_attn.study import options; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert options.PlanConfig.__doc__


def test_a_loss_in_points_is_not_that_of_an_error(folder: Path, tmp_path: Path) -> None:
    """A larger error would be shown as a gain, whatever the budget is for."""
    tiny_model("bert", BertForSequenceClassification, num_labels=1).save_pretrained(tmp_path / "scores")
    tiny_tokenizer().save_pretrained(tmp_path / "scores")
    save_task(tmp_path / "task", scores=True)
    data = DataConfig(dataset=str(tmp_path / "task"), text_columns=("sentence",), metrics=("mse", "pearson"))
    config = PlanConfig(str(tmp_path / "scores"), "2x at 32", data=data, quick=True)
    with pytest.raises(ValueError, match="needs a metric of which more is better, not 'task mse'"):
        prepare_plan(config)
