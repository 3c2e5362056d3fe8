"""The machinery of the architecture sweep: results on disk at once, crashes and time limits, resumption, files."""

import csv
import json
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_linear_attn.evaluation import sweep_pool
from hf_linear_attn.evaluation.sweep import REFUSED, UNBUILT, WORKS, WRONG, Result, sweep_case
from hf_linear_attn.evaluation.sweep_checks import CHECKS, relative_difference
from hf_linear_attn.evaluation.sweep_pool import read_journal, run_sweep
from hf_linear_attn.evaluation.sweep_report import markdown, reason, write_report
from hf_linear_attn.evaluation.tiny import CannotBuildError, Case, every_case, sharpen, tiny_config, tiny_model
from tests.helpers import load_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quality_assurance" / "sweep.py"
fork_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="stand-ins reach the processes by fork only")


def recipe():
    return load_script(RECIPE)


def test_every_model_type_is_a_case():
    cases = list(every_case())
    assert len(cases) == len(set(cases)) > 600
    assert {Case("bert"), Case("bert", decoder=True), Case("clip_text_model"), Case("whisper")} <= set(cases)
    assert Case("llama", decoder=True) not in cases


def test_a_tiny_config_keeps_what_makes_the_architecture():
    config = tiny_config(Case("qwen3_next"))
    assert {"linear_attention", "full_attention"} <= set(config.layer_types)
    assert len(config.layer_types) == config.num_hidden_layers <= 6
    llama = tiny_config(Case("mistral"))
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.vocab_size) == (4, 2, 99)


def test_what_cannot_be_built_says_why():
    with pytest.raises(CannotBuildError, match="config: KeyError: 'no_such_type'"):
        tiny_config(Case("no_such_type"))
    with pytest.raises(CannotBuildError, match="no model class belongs to SamMaskDecoderConfig"):
        tiny_model(Case("sam_mask_decoder"))
    result = sweep_case(Case("sam_mask_decoder"))
    assert (result.outcome, result.checks) == (UNBUILT, {})


def test_tiny_models_are_the_same_every_time_and_their_attention_is_not_uniform():
    first, second = (tiny_model(Case("llama")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    weight = nn.Linear(8, 8)
    nn.init.constant_(weight.weight, float("nan"))
    sharpen(weight)
    assert bool(torch.isfinite(weight.weight).all())
    assert 0.05 < float(tiny_model(Case("bert")).encoder.layer[0].attention.self.query.weight.detach().std()) < 0.5


def test_differences():
    one = torch.tensor([1.0, float("nan")])
    assert relative_difference(one, one) == 0
    assert relative_difference(torch.tensor([1.0, 1.0]), one) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert relative_difference(torch.tensor([3.0]), torch.tensor([2.0])) == 0.5


@pytest.mark.parametrize("check", ["padding right", "causality", "decode by token"])
def test_a_check_that_fails_makes_a_case_wrong(monkeypatch, check):
    def broken(model, inputs):
        return 1.0 if any("linear_attention" in name for name, _ in model.named_modules()) else 0.0

    monkeypatch.setitem(CHECKS, check, broken)
    result = sweep_case(Case("llama"))
    assert result.outcome == WRONG
    assert result.detail.startswith(f"{check} failed: differs by 1.0e+00")


def test_what_the_exact_model_does_not_keep_is_not_demanded(monkeypatch):
    monkeypatch.setitem(CHECKS, "causality", lambda model, inputs: 1.0)
    result = sweep_case(Case("llama"))
    assert result.outcome == WORKS
    assert result.checks["causality"] == "n/a: the exact model differs by 1.0e+00"


def stand_in(case, attention):
    if case.model_type == "bart":
        os._exit(11)
    if case.model_type == "vit":
        time.sleep(30)
    return Result(str(case), attention, WORKS)


@fork_only
def test_a_crash_or_an_endless_case_does_not_lose_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_pool, "sweep_case", stand_in)
    cases = [(Case(name), "elu") for name in ("bart", "vit", "bert", "gpt2")]
    seen = []
    results = run_sweep(cases, tmp_path / "journal", seconds=1.0, on_result=seen.append)
    outcomes = {result.case: (result.outcome, result.detail) for result in results}
    assert outcomes["bart"] == (WRONG, "the process ended with exit code 11")
    assert outcomes["vit"] == (UNBUILT, "takes longer than 1 s")
    assert outcomes["bert"][0] == outcomes["gpt2"][0] == WORKS
    assert seen == results == read_journal(tmp_path / "journal")


@fork_only
def test_an_interrupted_run_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_pool, "sweep_case", stand_in)
    journal = tmp_path / "journal"
    run_sweep([(Case("bert"), "elu")], journal)
    with journal.open("a") as file:
        file.write('{"case": "gpt2", "attent')  # cut off
    new = []
    results = run_sweep([(Case(name), "elu") for name in ("bert", "gpt2")], journal, on_result=new.append)
    assert [result.case for result in results] == ["bert", "gpt2"]
    assert [result.case for result in new] == ["gpt2"]
    assert len(read_journal(journal)) == 2


def test_the_recipe_writes_its_files(tmp_path):
    arguments = ["--only", "bert", "t5", "sam_mask_decoder", "--attention", "elu", "hedgehog", "--out", str(tmp_path)]
    assert recipe().main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.csv", "sweep.json", "sweep.md"]
    report = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert report["counts"]["elu"] == {WORKS: 2, REFUSED: 1, UNBUILT: 1, WRONG: 0}
    assert report["counts"]["hedgehog"] == {WORKS: 2, REFUSED: 0, UNBUILT: 0, WRONG: 0}
    assert report["environment"]["versions"]["transformers"]
    with (tmp_path / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == [
        "bert",
        "bert",
        "bert (decoder)",
        "bert (decoder)",
        "sam_mask_decoder",
        "t5",
    ]
    text = (tmp_path / "sweep.md").read_text(encoding="utf-8")
    assert "| `bert (decoder)` | BertLMHeadModel | 2 linear, causal |" in text
    assert "A layer adds a relative position bias" in text


def test_an_unknown_type_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe().main(["--only", "bertt", "--out", str(tmp_path)])
    assert "Transformers has no model type bertt" in capsys.readouterr().err


def test_like_refusals_are_counted_together(tmp_path):
    first = Result("a", "elu", REFUSED, "Layer 3 (x.y, AAttention) adds 2 things. AModel cannot.", "AModel")
    second = Result("b", "elu", REFUSED, "Layer 0 (z, BAttention) adds 7 things. BModel cannot.", "BModel")
    assert reason(first) == reason(second) == "A layer adds N things. The model cannot."
    write_report([first, second], tmp_path, {"attention": ["elu"]})
    report = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert "| 2 | A layer adds N things. The model cannot. | `a`, `b` |" in markdown(report, [first, second])
