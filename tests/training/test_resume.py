"""Interrupted and resumed runs, against the run that was not: the same weights, bit for bit."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_linear_attn.training import convert as stages
from hf_linear_attn.training import loop as loops
from hf_linear_attn.training.convert import convert, finetune
from hf_linear_attn.training.loop import Goal, InterruptedRunError, Loop, evaluation_steps, hash_seed
from tests.training.made_up import convert_settings, finetune_settings, lines, save_encoder, save_task, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("resume")
    save_encoder(place / "encoder")
    save_task(place / "task")
    convert(convert_settings(place / "encoder", place / "task", place / "whole"), console=quiet())
    return place


def quiet() -> Console:
    return Console(file=io.StringIO())


class Killed(BaseException):
    """Stands for the death of the process: nothing gets to clean up after it that a dead process could not."""


def die_at(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """End the run in the middle of a step of a stage."""
    original = Loop._backward

    def backward(self: Loop, group: Any) -> Any:
        if self.name == stage and self.progress.step == step:
            raise Killed
        return original(self, group)

    monkeypatch.setattr(Loop, "_backward", backward)


@pytest.mark.parametrize(
    ("stage", "step"), [("teacher", 0), ("teacher", 5), ("teacher", 7), ("distill", 0), ("distill", 3), ("distill", 5)]
)
def test_killed_in_a_step(stage: str, step: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        die_at(patched, stage, step)
        with pytest.raises(Killed):
            convert(convert_settings(folder / "encoder", folder / "task", out), console=quiet())
    results = convert(convert_settings(folder / "encoder", folder / "task", out, run__resume=True), console=quiet())
    assert weights(out) == weights(folder / "whole")
    assert results["stages"]["distill"]["step"] == 6
    for name in ("teacher", "distill"):
        own = [(line["step"], line.get("train/loss")) for line in lines(out, name)]
        assert own == [(line["step"], line.get("train/loss")) for line in lines(folder / "whole", name)]


def test_killed_in_attention_transfer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def die(*args: Any, **settings: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(stages, "transfer_attention", die)
        with pytest.raises(Killed):
            convert(convert_settings(folder / "encoder", folder / "task", out), console=quiet())
    convert(convert_settings(folder / "encoder", folder / "task", out, run__resume=True), console=quiet())
    assert weights(out) == weights(folder / "whole")


@pytest.mark.parametrize("moment", ["save_state", "rename"])
def test_killed_while_saving(moment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before stays whole, and is the one that the resumed run takes."""
    out = tmp_path / "out"
    original = Loop.save_checkpoint

    def save(self: Loop) -> None:
        if self.name == "distill" and self.progress.step == 4:
            if moment == "rename":
                patched.setattr(Path, "rename", die)
            else:
                patched.setattr(self.accelerator, "save_state", die)
        original(self)

    def die(*args: Any, **settings: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "save_checkpoint", save)
        with pytest.raises(Killed):
            convert(convert_settings(folder / "encoder", folder / "task", out), console=quiet())
    assert [path.name for path in (out / "checkpoints" / "distill").glob("step-*")] == ["step-00000002"]
    convert(convert_settings(folder / "encoder", folder / "task", out, run__resume=True), console=quiet())
    assert weights(out) == weights(folder / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_say_how_to_go_on(
    number: signal.Signals, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    original = Loop._after_step
    mine = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    theirs = signal.signal(number, mine)  # a job in the background is started with SIGINT ignored

    def after(self: Loop) -> None:
        if self.name == "distill" and self.progress.step == 3:
            os.kill(os.getpid(), number)
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_after_step", after)
        with pytest.raises(InterruptedRunError, match=r"after step 3 of 6.*run\.resume true") as told:
            convert(convert_settings(folder / "encoder", folder / "task", out), console=quiet())
    assert told.value.code == 128 + number
    assert (out / "checkpoints" / "distill" / "step-00000003" / "progress.json").exists()
    assert signal.signal(number, theirs) is mine
    convert(convert_settings(folder / "encoder", folder / "task", out, run__resume=True), console=quiet())
    assert weights(out) == weights(folder / "whole")


def test_a_finished_run_resumes_to_itself(folder: Path) -> None:
    before = weights(folder / "whole")
    convert(convert_settings(folder / "encoder", folder / "task", folder / "whole", run__resume=True), console=quiet())
    assert weights(folder / "whole") == before


def test_accumulated_passes_are_one_large_batch(folder: Path, tmp_path: Path) -> None:
    plain = save_encoder(tmp_path / "encoder", hidden_dropout_prob=0.0)
    losses = {}
    for batch, accumulation in ((8, 1), (2, 4)):
        out = tmp_path / f"{batch}"
        finetune(
            finetune_settings(
                plain, folder / "task", out, train__batch_size=batch, train__accumulation=accumulation, train__lr=1e-4
            ),
            console=quiet(),
        )
        losses[batch] = torch.tensor([line["train/loss"] for line in lines(out, "train") if "train/loss" in line])
    assert torch.allclose(losses[8], losses[2], rtol=1e-5)


def test_workers_change_nothing(folder: Path, tmp_path: Path) -> None:
    for workers in (0, 2):
        finetune(
            finetune_settings(folder / "encoder", folder / "task", tmp_path / f"{workers}", run__workers=workers),
            console=quiet(),
        )
    assert weights(tmp_path / "0") == weights(tmp_path / "2")


def test_the_best_step_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are made up; the weights of the result must be those at the best of them."""
    seen: list[dict[str, torch.Tensor]] = []
    scores = iter([0.2, 0.7, 0.7, 0.4])

    def evaluate(self: Any, model: torch.nn.Module, accelerator: Any, batch_size: int) -> dict[str, float]:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return {"accuracy": next(scores)}

    from hf_linear_attn.training.problems import Classification

    monkeypatch.setattr(Classification, "evaluate", evaluate)
    results = finetune(
        finetune_settings(folder / "encoder", folder / "task", tmp_path / "out", train__steps=8, train__evaluations=4),
        console=quiet(),
    )
    assert results["stages"]["train"]["best_step"] == 4
    assert results["stages"]["trained"] == {"accuracy": 0.7}
    from transformers import AutoModelForSequenceClassification

    kept = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in seen[1].items())


def test_patience_stops_early(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_linear_attn.training.problems import Classification

    scores = iter([0.5, 0.4, 0.3, 0.9])
    monkeypatch.setattr(Classification, "evaluate", lambda *args: {"accuracy": next(scores)})
    results = finetune(
        finetune_settings(
            folder / "encoder",
            folder / "task",
            tmp_path / "out",
            train__steps=8,
            train__evaluations=4,
            train__patience=2,
        ),
        console=quiet(),
    )
    assert results["stages"]["train"]["step"] == 6
    assert results["stages"]["trained"] == {"accuracy": 0.5}


def test_a_loss_that_is_no_number_stops_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "lr_factor", lambda *args: 1e30)
    with pytest.raises(FloatingPointError, match=r"train became (nan|inf) at step \d+. Lower the learning rate"):
        finetune(finetune_settings(folder / "encoder", folder / "task", tmp_path / "out"), console=quiet())


def test_goal_ignores_what_is_no_number() -> None:
    higher, lower = Goal("score", True), Goal("loss", False)
    assert higher.better({"score": 0.1}, None)
    assert not higher.better({"score": float("nan")}, None)
    assert higher.better({"score": 0.1}, {"score": float("nan")})
    assert lower.better({"loss": 0.1}, {"loss": 0.2})
    assert not lower.better({"loss": 0.2}, {"loss": 0.2})


def test_evaluations_are_spread_and_end_at_the_end() -> None:
    assert evaluation_steps(10, 4) == {2, 5, 8, 10}
    assert evaluation_steps(3, 10) == {1, 2, 3}


def test_seeds_differ_by_step_and_process() -> None:
    seeds = {hash_seed(seed, step, process) for seed in range(5) for step in range(50) for process in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
