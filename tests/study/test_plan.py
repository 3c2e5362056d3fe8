"""`hf-linear-attn plan`: what it chooses, writes and concludes, on tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.cli import main
from hf_linear_attn.measure.assessment import Assessment, assess
from hf_linear_attn.study.budgets import Budget
from hf_linear_attn.study.choose import SHARES
from hf_linear_attn.study.plan import plan
from tests.slow_cases import slow
from tests.tiny_models import save_checkpoint
from tests.training.tiny_runs import quiet, save_encoder, save_task, save_text, stored


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    save_checkpoint(root / "decoder", "gpt2", max_position_embeddings=192)
    save_encoder(root / "tuned", head=True)
    save_encoder(root / "encoder")
    save_task(root / "task")
    save_text(root / "text")
    return root


def options_of(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    data = {"dataset": str(folder / "text" / "text.txt"), "max_length": 64, **changes.pop("data", {})}
    return {"model": str(folder / "decoder"), "output": str(output), "data": data, "device": "cpu", **changes}


def always_informative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights predict nothing: the exact model may well be no better than the model without attention."""

    def without_rule(*scores: float | None, **options: Any) -> Assessment:
        return replace(assess(*scores, **options), valid=True)

    monkeypatch.setattr("hf_linear_attn.study.card.assess", without_rule)


def test_a_budget_of_cache_is_counted_and_patch_takes_the_plan(folder: Path, tmp_path: Path) -> None:
    result = plan(**options_of(folder, tmp_path / "out", budget="60% cache at 1000"), console=quiet())
    assert (result.met, result.exit_code) == (True, 0)
    saved = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert saved == result.plan
    model = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    hla.patch_model(model, saved)
    exact = 2 * 1000 * model.config.n_embd * 4
    state = sum(layer.state_bytes for layer in hla.patch_report(model).layers)
    assert state <= 0.6 * exact * model.config.n_layer
    table = (tmp_path / "out" / "plan.md").read_text(encoding="utf-8")
    assert "| exact attention (the teacher) |" in table
    assert "| patched, nothing trained |" in table
    assert str(folder) not in table
    assert not (tmp_path / "out" / "model").exists()
    arguments = ["patch", str(folder / "decoder"), str(tmp_path / "patched"), "--plan"]
    assert main([*arguments, str(tmp_path / "out" / "plan.json")]) == 0
    assert hla.is_patched(hla.load_pretrained(str(tmp_path / "patched")))


@pytest.mark.parametrize("code", [*slow(0), 1])
def test_a_budget_of_quality_is_met_or_not(
    code: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_informative(monkeypatch)
    monkeypatch.setattr(Budget, "is_met", lambda self, value: code == 0)
    result = plan(**options_of(folder, tmp_path / "out", budget="1% perplexity"), console=quiet())
    scores = result.measured.scores
    assert scores.teacher is not None
    assert scores.patched == scores.converted
    if code:
        # The share that loses least is taken.
        assert "training has to do the rest" in result.choice.reason
        tried = {share: stored(tmp_path / "out", f"{share:.0%} exact heads")["perplexity"] for share in SHARES}
        least = min(tried, key=tried.__getitem__)
        exact = sum(head["chosen"] for head in result.choice.heads)
        assert exact == round(least * len(result.choice.heads))
    assert result.exit_code == code
    assert (tmp_path / "out" / "plan.json").is_file()


def test_data_that_cannot_measure_a_budget_give_no_plan(folder: Path, tmp_path: Path) -> None:
    """An untrained decoder is no better with its attention than without it."""
    result = plan(**options_of(folder, tmp_path / "out", budget="1% perplexity"), console=quiet())
    assert (result.exit_code, result.plan, result.met) == (3, None, False)
    assert "These data cannot measure attention" in result.problem
    assert not (tmp_path / "out" / "plan.json").exists()


@pytest.mark.slow
def test_a_finished_plan_is_read_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(folder, tmp_path / "out", budget="60% cache at 1000")
    first = plan(**options, console=quiet())
    with pytest.raises(ValueError, match=r"continue it \(--resume\)"):
        plan(**options, console=quiet())
    monkeypatch.setattr("hf_linear_attn.study.choose.find_exact_heads", None)
    assert plan(**options, resume=True, console=quiet()) == first
    (tmp_path / "out" / "results.json").unlink()
    again = plan(**options, resume=True, console=quiet())
    assert (again.choice, again.measured.scores) == (first.choice, first.measured.scores)


@pytest.mark.slow
def test_classifiers_and_encoders_have_budgets_of_their_own(folder: Path, tmp_path: Path) -> None:
    task = {"dataset": str(folder / "task"), "text_columns": ["sentence"], "max_length": 16}
    options = options_of(folder, tmp_path / "task", model=str(folder / "tuned"), data=task)
    result = plan(**options, budget="100 points", task_type="classification", console=quiet())
    assert result.measured.score.metric == "accuracy"
    options = options_of(folder, tmp_path / "encoder", model=str(folder / "encoder"))
    result = plan(**options, budget="1.9 cosine", task_type="embedding", console=quiet())
    assert result.met


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "much"}, "cannot be read"),
        ({"budget": "0.5 points"}, "is for a classifier; this is a causal language model"),
        ({"budget": "1% perplexity", "data": {"dataset": "nowhere.txt"}}, "nowhere.txt"),
        ({"budget": "1% perplexity", "model": "nowhere"}, "cannot be loaded"),
        ({"budget": "1% perplexity", "options": {"window_size": 8}}, "is chosen by the budget"),
    ],
)
def test_wrong_input_is_an_error_before_anything_is_written(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        plan(**options_of(folder, tmp_path / "out", **changes), console=quiet())
    assert list(tmp_path.iterdir()) == []
