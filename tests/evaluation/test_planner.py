"""The planner: budgets, measures, search, resumption, and whole runs on tiny models."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import BertForSequenceClassification, GPT2LMHeadModel

import hf_linear_attn as hla
from hf_linear_attn.config import LinearAttentionConfig
from hf_linear_attn.evaluation.measurements import NAME as STORE
from hf_linear_attn.evaluation.measurements import Store
from hf_linear_attn.evaluation.perplexity import measure_perplexity
from hf_linear_attn.evaluation.planner import measures, study
from hf_linear_attn.evaluation.planner.budget import KINDS, UNITS, Budget, damage
from hf_linear_attn.evaluation.planner.material import split_halves
from hf_linear_attn.evaluation.planner.measures import ClassifierMeasure, EncoderMeasure, LanguageMeasure
from hf_linear_attn.evaluation.planner.record import Record
from hf_linear_attn.evaluation.planner.search import effort, greedy, ranked
from hf_linear_attn.evaluation.planner.words import shown_divergence
from hf_linear_attn.plan import PlanOptions, run_plan
from tests.helpers import (
    BERT,
    GPT2,
    WORDS,
    patched,
    sample_text,
    save_checkpoint,
    tiny_model,
    tiny_tokenizer,
    token_ids,
)

# --------------------------------------------------------------------------------------------------------------------
# Budgets


@pytest.mark.parametrize(
    ("text", "unit", "amount", "length"),
    [
        ("1% perplexity", "perplexity", 1.0, None),
        (" .5 % of Perplexity ", "perplexity", 0.5, None),
        ("0.05 nats", "nats", 0.05, None),
        ("0.5 points", "points", 0.5, None),
        ("1pt", "points", 1.0, None),
        ("0.02 cosine", "cosine", 0.02, None),
        ("2x at 4096", None, 2.0, 4096),
        ("1.5× at 4,096 tokens", None, 1.5, 4096),
        ("3x@8k", None, 3.0, 8192),
    ],
)
def test_budgets(text: str, unit: str | None, amount: float, length: int | None) -> None:
    budget = Budget.parse(text)
    assert (budget.unit and budget.unit.name, budget.amount, budget.length) == (unit, amount, length)


@pytest.mark.parametrize("text", ["", "1%", "perplexity", "-1% perplexity", "2x", "fast", "1e3 nats", "2 at 4096"])
def test_what_is_no_budget_is_told_what_one_looks_like(text: str) -> None:
    with pytest.raises(ValueError, match=r"'1% perplexity'.*'0\.5 points'.*'2x at 4096'"):
        Budget.parse(text)


def test_a_budget_of_no_speedup() -> None:
    with pytest.raises(ValueError, match="no speedup"):
        Budget.parse("1x at 4096")
    with pytest.raises(ValueError, match="at 8 tokens"):
        Budget.parse("2x at 8")


@pytest.mark.parametrize(
    ("text", "kind"), [("1% perplexity", "encoder"), ("0.5 points", "decoder"), ("0.1 cosine", "classifier")]
)
def test_a_budget_fits_a_kind_of_model(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is for .*; this is .* Give one such as"):
        Budget.parse(text).check(KINDS[kind])
    Budget.parse("2x at 64").check(KINDS[kind])
    assert Budget.parse("2x at 64").damage_unit(KINDS[kind]).kind == kind


def test_damage() -> None:
    assert damage(UNITS["perplexity"], {"loss": 1.0}, {"loss": 1.0 + math.log(1.02)}) == pytest.approx(2.0)
    assert damage(UNITS["points"], {"score": 0.9}, {"score": 0.85}) == pytest.approx(5.0)
    assert damage(UNITS["points"], {"score": 0.9}, {"score": None}) is None
    assert UNITS["points"].show(None) == "undefined"
    assert (UNITS["points"].show(0.4), UNITS["perplexity"].show(0.4)) == ("-0.40 points", "+0.40% perplexity")
    assert [shown_divergence(value) for value in (None, 0.0, 0.01234, 1.2e-5)] == ["–", "0.0000", "0.0123", "1e-05"]
    assert all(Budget.parse(unit.example).unit is unit for unit in UNITS.values())


# --------------------------------------------------------------------------------------------------------------------
# Search


def test_searches_differ_where_layers_help_each_other() -> None:
    pairs = {(0,): 1.0, (1,): 2.0, (2,): 3.0, (0, 1): 9.0, (0, 2): 4.0, (0, 1, 2): 9.5}
    asked: list[tuple[int, ...]] = []

    def divergence(layers: Any) -> float:
        asked.append(tuple(sorted(layers)))
        return pairs[asked[-1]]

    assert ranked([2, 0, 1], divergence) == [0, 1, 2]
    assert greedy([2, 0, 1], divergence) == [0, 2, 1]
    # the walk adds the end of greedy's path, and for ranked all but the first
    assert len(set(asked[3:])) + 1 == effort("greedy", 3)
    assert effort("rank", 3) == 5
    assert ranked([0, 1], lambda layers: None if layers == [0] else 1.0) == [1, 0]


# --------------------------------------------------------------------------------------------------------------------
# Measures


def test_language_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, linear = GPT2.build(), patched("elu", GPT2)
    documents = [row.tolist() for row in token_ids(5, 30)] + [[3, 4, 5]]
    made = LanguageMeasure(exact, documents, context=16, stride=8, batch_size=3)
    found = made(linear)
    reference = measure_perplexity(linear, documents, context=16, stride=8, batch_size=2)
    assert found["loss"] == pytest.approx(reference.loss, rel=1e-5)
    assert (found["tokens"], found["perplexity"]) == (reference.tokens, pytest.approx(reference.perplexity, rel=1e-5))
    assert made(linear) == found
    assert made(exact)["divergence"] == pytest.approx(0.0, abs=1e-9)
    monkeypatch.setattr(measures, "KEPT_ENTRIES", 0)
    assert LanguageMeasure(exact, documents, context=16, stride=8, batch_size=3)(linear) == found
    with pytest.raises(ValueError, match="longer text"):
        LanguageMeasure(exact, [[1]], context=16, stride=8, batch_size=3)


def test_divergence_of_the_next_token_is_its_definition() -> None:
    exact, linear = GPT2.build(), patched("elu", GPT2)
    ids = token_ids(1, 12)
    found = LanguageMeasure(exact, [ids[0].tolist()], context=12, stride=6, batch_size=1)(linear)
    with torch.no_grad():
        p, q = (model(ids).logits[0, :-1].double().softmax(-1) for model in (exact, linear))
    assert found["divergence"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_encoder_measure() -> None:
    exact, linear = BERT.build(), patched("elu", BERT)
    batches = [{"input_ids": token_ids(4, 12), "attention_mask": torch.ones(4, 12, dtype=torch.long)}]
    made = EncoderMeasure(exact, batches)
    assert made(exact)["divergence"] == pytest.approx(0.0, abs=1e-6)
    found = made(linear)
    assert found["divergence"] == pytest.approx(1 - found["cosine"])
    assert found["passages"] == 4


def test_classifier_measure() -> None:
    pytest.importorskip("evaluate", reason="needs the extra 'train'")
    for regression, metrics in ((False, ("accuracy", "f1")), (True, ("pearson", "spearmanr"))):
        exact = tiny_model("bert", BertForSequenceClassification, num_labels=1 if regression else 2)
        labels = torch.tensor([0.5, 1.0, 2.0, 0.1]) if regression else torch.tensor([0, 1, 1, 0])
        batch = {"input_ids": token_ids(4, 12), "attention_mask": torch.ones(4, 12, dtype=torch.long), "labels": labels}
        linear = BertForSequenceClassification(exact.config).eval()
        linear.load_state_dict(exact.state_dict())
        hla.patch_model(linear, "elu")
        made = ClassifierMeasure(exact, [batch], metrics, regression=regression)
        assert made(exact)["divergence"] == pytest.approx(0.0, abs=1e-7)
        found = made(linear)
        assert found["score"] == found[metrics[0]]
        assert found["divergence"] > 0
        assert found["examples"] == 4


def test_halves_share_nothing() -> None:
    assert split_halves(["a", "b", "c"]) == (["a", "c"], ["b"])
    assert split_halves(["one two three four five"]) == (["one two three"], ["four five"])


# --------------------------------------------------------------------------------------------------------------------
# Records


def test_record(tmp_path: Path) -> None:
    record = Record(tmp_path, {"model": "a", "steps": 1})
    assert record.measured("measured", "0", lambda: {"value": math.nan, "pair": (1, 2)}) == {
        "value": None,
        "pair": [1, 2],
    }
    again = Record(tmp_path, {"model": "a", "steps": 1})
    assert again.resumed
    assert again.measured("measured", "0", lambda: pytest.fail("measured twice"))["pair"] == [1, 2]
    with pytest.raises(ValueError, match=r"other settings \(steps: 1, now 2\).*--restart"):
        Record(tmp_path, {"model": "a", "steps": 2})
    assert not Record(tmp_path, {"model": "a", "steps": 2}, restart=True).resumed
    anew = Record(tmp_path, {"model": "a", "steps": 1}, restart=True)
    assert anew.measured("measured", "0", lambda: {"value": 2.0}) == {"value": 2.0}
    assert Record(tmp_path, {"model": "a", "steps": 1}).data["measured"] == {"0": {"value": 2.0}}
    assert len(Store(tmp_path / STORE)) == 2  # the older one is kept
    (tmp_path / STORE).write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: no JSON"):
        Record(tmp_path, {})


# --------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of three layers, an encoder, a classifier with its task, and a text."""
    made = tmp_path_factory.mktemp("plan")
    torch.manual_seed(0)
    tiny_model("gpt2", GPT2LMHeadModel, n_layer=3).save_pretrained(made / "gpt2")
    tiny_tokenizer().save_pretrained(made / "gpt2")
    save_checkpoint(made / "bert", "bert")
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    tiny_model("bert", BertForSequenceClassification, **labels).save_pretrained(made / "classifier")
    tiny_tokenizer().save_pretrained(made / "classifier")
    (made / "text.txt").write_text(sample_text(), encoding="utf-8")
    (made / "SST-2").mkdir()
    for name, count in (("train", 40), ("dev", 24)):
        rows = [
            f"{' '.join(WORDS[(row * 7 + place) % len(WORDS)] for place in range(9))}\t{row % 2}"
            for row in range(count)
        ]
        (made / "SST-2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    return made


def plan(where: Path, kind: str, out: Path, /, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "budget": "100000% perplexity",
        "text": str(where / "text.txt"),
        "out": str(out),
        "quick": True,
        "steps": 2,
        "lengths": (32,),
        "sequence_length": 32,
        "option": ("window_size=8",),
    }
    if "attention" in changes or kind != "gpt2":
        settings["option"] = None
    options = PlanOptions(**{**settings, **changes})
    return run_plan(str(where / kind), options, console=Console(file=io.StringIO(), width=100))


FILES = {"plan.json", "plan-report.json", "report.html", "curve.png", "learned.safetensors", STORE}


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "gpt2"
    return out, plan(folder, "gpt2", out, save_model=str(out.parent / "model"))


def test_files_and_report(done: tuple[Path, dict[str, Any]], folder: Path) -> None:
    out, report = done
    assert {path.name for path in out.iterdir()} == FILES
    text = (out / "plan-report.json").read_text(encoding="utf-8")
    assert json.loads(text) == report
    page = (out / "report.html").read_text(encoding="utf-8")
    for written in (text, page):
        assert str(folder) not in written
    assert all(f"of {report['model']['layers']}" in row for row in ["3 of 3"])
    assert "Each layer by itself" in page
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert report["choice"]["met"]
    assert report["choice"]["layers"] == [0, 1, 2]
    assert [row["count"] for row in report["curve"]] == [0, 1, 2, 3]
    assert report["curve"][0]["damage"] == 0.0
    assert report["transfer"]["steps"] == 2
    assert set(report["curve"][1]["speedup"]) == {"32"}


def test_the_order_is_that_of_single_damage_and_the_walk_is_measured(done: tuple[Path, dict[str, Any]]) -> None:
    _, report = done
    alone = {row["index"]: row["divergence"] for row in report["layers"]}
    assert report["path"] == sorted(alone, key=lambda layer: alone[layer])
    walked = [row["layers"] for row in report["curve"][1:]]
    assert walked == [sorted(report["path"][:count]) for count in (1, 2, 3)]
    for row in report["curve"][1:]:
        assert report["measured"][",".join(map(str, row["layers"]))]["divergence"] == row["divergence"]


def test_plan_and_checkpoint_are_the_measured_model(done: tuple[Path, dict[str, Any]], folder: Path) -> None:
    out, _ = done
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt2").eval()
    hla.patch_model(model, LinearAttentionConfig.from_file(out / "plan.json"))
    assert [layer.attention for layer in hla.patch_report(model).layers] == ["window"] * 3
    saved = hla.load_pretrained(str(out.parent / "model")).eval()
    learned = study.load_file(out / "learned.safetensors")
    model.load_state_dict(learned, strict=False)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, model(ids).logits)


def measured(report: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    curve = [{key: value for key, value in row.items() if key != "speedup"} for row in report["curve"]]
    return {name: report[name] for name in ("exact", "measured", "verified", "layers", "path")} | {"curve": curve}


def test_a_stopped_run_goes_on(
    done: tuple[Path, dict[str, Any]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = LanguageMeasure.__call__, []

    def stops(self: Any, model: Any) -> Any:
        calls.append(model)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(self, model)

    monkeypatch.setattr(LanguageMeasure, "__call__", stops)
    with pytest.raises(KeyboardInterrupt):
        plan(folder, "gpt2", tmp_path)
    kept = [held.key["measure"]["what"] for held in Store(tmp_path / STORE)]
    assert kept.count("measured") == 2
    assert not (tmp_path / "plan.json").exists()
    monkeypatch.setattr(LanguageMeasure, "__call__", whole)
    monkeypatch.setattr(study, "transfer_attention", lambda *_, **__: pytest.fail("trained twice"))
    report = plan(folder, "gpt2", tmp_path)
    assert report["resumed"]
    assert measured(report) == measured(done[1])


def test_another_budget_uses_what_was_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan(folder, "gpt2", tmp_path, search="greedy")
    assert len(first["measured"]) == effort("greedy", 3)
    row = first["curve"][1]
    asked = []
    whole = LanguageMeasure.__call__
    monkeypatch.setattr(LanguageMeasure, "__call__", lambda self, model: asked.append(1) or whole(self, model))
    limit = max(row["damage"], 0.0) + 1e-9
    second = plan(folder, "gpt2", tmp_path, search="greedy", budget=f"{limit:.12f}% perplexity")
    assert second["choice"]["found"]
    assert len(asked) <= 1  # the verification of another plan
    assert second["choice"]["damage"] <= limit
    with pytest.raises(ValueError, match="steps: 2, now 1"):
        plan(folder, "gpt2", tmp_path, steps=1)
    assert plan(folder, "gpt2", tmp_path, steps=0, restart=True, attention="elu")["transfer"] is None


def test_a_budget_out_of_reach(folder: Path, tmp_path: Path) -> None:
    report = plan(folder, "gpt2", tmp_path, budget="1000x at 64", lengths=())
    assert not report["choice"]["met"]
    assert "cannot be reached" in report["verdicts"][0]
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert list(report["curve"][-1]["speedup"]) == ["64"]
    assert report["choice"]["verified"]["damage"] is not None
    target = tmp_path / "model"
    options = {"attention": "elu", "steps": 0, "lengths": (), "save_model": str(target)}
    report = plan(folder, "bert", tmp_path / "bert", budget="0.0000001 cosine", **options)
    assert not report["choice"]["found"]
    assert report["choice"]["count"] == 1
    assert "keeps to '0.0000001 cosine'" in report["verdicts"][0]
    assert not target.exists()
    assert LinearAttentionConfig.from_file(tmp_path / "bert" / "plan.json").layers


def test_a_plan_that_does_not_hold_elsewhere(folder: Path, tmp_path: Path) -> None:
    report = plan(folder, "gpt2", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / STORE).read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["kind"] == "measurement" and line["key"]["measure"]["what"] == "verified":
            line["value"]["loss"] += 100.0
    (tmp_path / STORE).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    report = plan(folder, "gpt2", tmp_path)
    assert report["choice"]["found"]
    assert not report["choice"]["met"]
    assert "not confirmed" in report["verdicts"][0]


def test_classifier(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("evaluate", reason="needs the extra 'train'")
    settings: dict[str, Any] = {"text": None, "task": "sst2", "folder": str(folder), "budget": "100 points"}
    report = plan(folder, "classifier", tmp_path, **settings)
    assert report["mechanism"]["name"] == "window"
    assert report["choice"]["met"]
    assert report["data"]["metric"] == "accuracy"
    assert any("rests on 12 examples" in line for line in report["verdicts"])
    assert report["data"]["choice"] == report["data"]["verification"] == {"rows": 12}
    with pytest.raises(ValueError, match="no head for the task 'sst2'"):
        plan(folder, "bert", tmp_path / "headless", **settings)


def test_encoder_longer_than_its_positions(folder: Path, tmp_path: Path) -> None:
    report = plan(
        folder, "bert", tmp_path, budget="2 cosine", attention="linformer", lengths=(32, 200), option=("num_slots=8",)
    )
    assert report["choice"]["met"]
    assert list(report["choice"]["speedup"]) == ["32", "200"]
    assert report["mechanism"]["options"]["num_slots"] == 8


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"budget": "much"}, "'2x at 4096'"),
        ({"budget": "0.5 points"}, "is for a classifier and its task"),
        ({"attention": "linformer"}, "'linformer' cannot be planned on this model"),
        ({"attention": "hedgehgo"}, "hedgehog"),
        ({"attention": "softmax"}, "nothing to plan"),
        ({"option": ("window",)}, "KEY=VALUE"),
        ({"option": ("windows=3",)}, "windows"),
        ({"steps": -1}, "steps must be"),
        ({"lengths": (4,)}, "16 or more"),
        ({"task": "sst2"}, "not both"),
        ({"folder": "glue"}, "give task too"),
        ({"sequence_length": 1000}, "beyond the model's"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"device": "tpux"}, "tpux"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    folder: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises((ValueError, OSError), match=complaint.replace("(", r"\(")):
        plan(folder, "gpt2", tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_served(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be loaded"):
        plan(folder, "nothing", tmp_path)
    hla.patch_model(GPT2LMHeadModel.from_pretrained(folder / "gpt2"), "elu").save_pretrained(tmp_path / "patched")
    tiny_tokenizer().save_pretrained(tmp_path / "patched")
    with pytest.raises(ValueError, match="patched already"):
        plan(tmp_path, "patched", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="Name another folder"):
        plan(folder, "gpt2", tmp_path / "out", save_model=str(tmp_path / "full"))
