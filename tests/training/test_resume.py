"""Interrupted and resumed conversions beside the one that was not interrupted: the same weights, bit for bit."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from rich.console import Console
from transformers import AutoModelForSequenceClassification

from hf_linear_attn.data.task_data import TaskData
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.study.run_folder import StageLog
from hf_linear_attn.study.stages import TrainingRun
from hf_linear_attn.study.study import Records
from hf_linear_attn.training.distillation import FinetuningTrainer
from hf_linear_attn.training.options import TeacherConfig
from hf_linear_attn.training.resumable import InterruptedRunError
from hf_linear_attn.training.transfer import AttentionTransferLoss
from hf_linear_attn.utils.json_lines import JsonLinesFile
from tests.slow_cases import long, slow_rows
from tests.training.tiny_runs import (
    Killed,
    convert_config,
    finetune_config,
    kill,
    log_rows,
    quiet,
    save_encoder,
    save_task,
    weights,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    save_encoder(root / "encoder")
    save_task(root / "task")
    convert(convert_config(root / "encoder", root / "task", root / "complete"), console=quiet())
    return root


def at_step(monkeypatch: pytest.MonkeyPatch, stage: str, step: int, action: Any) -> None:
    """Call `action` in the middle of a step of a stage."""
    original = FinetuningTrainer.training_step

    def training_step(self: FinetuningTrainer, *args: Any, **kwargs: Any) -> Any:
        if Path(self.args.output_dir).name == stage and self.state.global_step == step:
            action()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(FinetuningTrainer, "training_step", training_step)


@pytest.mark.parametrize(
    ("stage", "step"), [("distill", 3), *slow_rows(("teacher", 5)), *long(("teacher", 0), ("distill", 5))]
)
def test_killed_in_a_step(stage: str, step: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    with monkeypatch.context() as patch:
        at_step(patch, stage, step, kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths), console=quiet())
    results = convert(convert_config(*paths, resume=True), console=quiet())
    assert weights(paths[2]) == weights(folder / "complete")
    assert results.training.distill["step"] == 6
    for name in ("teacher", "distill"):
        resumed, expected = (
            [(row["step"], row.get("loss")) for row in log_rows(out, name)] for out in (paths[2], folder / "complete")
        )
        assert resumed == expected


@pytest.mark.slow
def test_signals_save_and_say_how_to_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(InterruptedRunError, match=r"after step 3 of 6.*--resume") as caught:
            convert(convert_config(*paths), console=quiet())
    assert caught.value.code == 128 + signal.SIGTERM
    assert (paths[2] / "checkpoints" / "distill" / "checkpoint-3").is_dir()
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL
    convert(convert_config(*paths, resume=True), console=quiet())
    assert weights(paths[2]) == weights(folder / "complete")


@pytest.mark.slow
def test_stopped_in_the_last_step(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer itself would take a step more than it was told."""
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(InterruptedRunError, match="after step 6 of 6"):
            convert(convert_config(*paths), console=quiet())
    results = convert(convert_config(*paths, resume=True), console=quiet())
    assert results.training.distill["step"] == 6
    assert weights(paths[2]) == weights(folder / "complete")
    rows = [[row["step"] for row in log_rows(out, "distill")] for out in (paths[2], folder / "complete")]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True], ids=["killed", "signal"])
def test_stopped_in_attention_transfer(
    signalled: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    original = AttentionTransferLoss.__call__

    def call(self: AttentionTransferLoss, batch: Any, step: int | None = None) -> Any:
        if step == 3 and not signalled:
            kill()
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, step)

    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    expected: Any = InterruptedRunError if signalled else Killed
    with monkeypatch.context() as patch:
        patch.setattr(AttentionTransferLoss, "__call__", call)
        with pytest.raises(expected) as caught:
            convert(convert_config(*paths), console=quiet())
    assert signal.signal(signal.SIGTERM, previous) is signal.SIG_DFL
    if signalled:
        assert "after step 3 of 4" in str(caught.value)
        assert "Stored: teacher stage, teacher, calibration, patched in" in str(caught.value)
        assert str(caught.value).endswith("--resume.")
    convert(convert_config(*paths, resume=True), console=quiet())
    assert weights(paths[2]) == weights(folder / "complete")
    resumed, complete = ([row["step"] for row in log_rows(out, "transfer")] for out in (paths[2], folder / "complete"))
    assert resumed == complete


@pytest.mark.slow
def test_killed_after_a_distillation_that_drew_features_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (folder / "encoder", folder / "task")
    options: dict[str, Any] = {"attention": "favor+", "options": {"redraw_every": 2}}
    convert(convert_config(*paths, tmp_path / "whole", **options), console=quiet())
    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.study.convert._save", kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths, tmp_path / "out", **options), console=quiet())
    convert(convert_config(*paths, tmp_path / "out", **options, resume=True), console=quiet())
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_killed_while_the_model_is_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run that has nothing else to do removes what was half written."""
    config = convert_config(folder / "encoder", folder / "task", tmp_path / "out", distill__max_steps=1)
    partial = tmp_path / "out" / ".model.0123abcd.part"

    def die_while_writing(*args: Any) -> None:
        partial.mkdir()
        kill()

    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.study.convert._save", die_while_writing)
        with pytest.raises(Killed):
            convert(config, console=quiet())
    convert(replace(config, resume=True), console=quiet())
    assert not partial.exists()
    assert (tmp_path / "out" / "model" / "README.md").is_file()


@pytest.mark.slow
def test_speed_is_measured_anew_on_another_machine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card says on which one it was measured."""
    changes = {"speed__lengths": [16], "distill__max_steps": 1}
    config = convert_config(folder / "encoder", folder / "task", tmp_path / "out", **changes)
    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.study.convert._save", kill)
        with pytest.raises(Killed):
            convert(config, console=quiet())
    monkeypatch.setattr("hf_linear_attn.utils.environment.cpu_name", lambda: "another")
    monkeypatch.setattr("hf_linear_attn.utils.environment.__version__", "9.9.9")
    screen = io.StringIO()
    convert(replace(config, resume=True), console=Console(file=screen, width=200))
    assert re.search(
        "Finished stages are those of other versions .hf_linear_attn was '.*', now '9.9.9'", screen.getvalue()
    )
    labels = [record.label for record in Records(tmp_path / "out" / "study" / "records.jsonl")]
    assert (labels.count("speed"), labels.count("distill")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3])  # before the first checkpoint adapters are made anew, with the same numbers
def test_killed_while_adapters_are_trained_and_features_drawn_anew(
    step: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (folder / "encoder", folder / "task")
    options: dict[str, Any] = {"attention": "favor+", "options": {"redraw_every": 2}, "distill__lora_rank": 2}
    convert(convert_config(*paths, tmp_path / "whole", **options), console=quiet())
    with monkeypatch.context() as patch:
        at_step(patch, "distill", step, kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths, tmp_path / "out", **options), console=quiet())
    torch.manual_seed(1)  # another process
    convert(convert_config(*paths, tmp_path / "out", **options, resume=True), console=quiet())
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_killed_in_the_control(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion before it is not repeated, and the control ends as the undisturbed one."""
    paths = (folder / "encoder", folder / "task")
    expected = convert(convert_config(*paths, tmp_path / "whole", control=True), console=quiet())
    with monkeypatch.context() as patch:
        at_step(patch, "control distill", 3, kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths, tmp_path / "out", control=True), console=quiet())
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 0, kill)
        config = convert_config(*paths, tmp_path / "out", control=True, resume=True)
        resumed = convert(config, console=quiet())
    assert resumed.scores.control == expected.scores.control
    assert weights(tmp_path / "out") == weights(folder / "complete")


@pytest.mark.slow
def test_killed_before_a_measurement_is_stored(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, add = (folder / "encoder", folder / "task", tmp_path / "out"), Records.add

    def add_or_die(self: Records, *args: Any, label: str = "", **kwargs: Any) -> Any:
        return kill() if label == "teacher" else add(self, *args, label=label, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Records, "add", add_or_die)
        with pytest.raises(Killed):
            convert(convert_config(*paths), console=quiet())
    convert(convert_config(*paths, resume=True), console=quiet())
    resumed, expected = ([row["step"] for row in log_rows(out, "teacher")] for out in (paths[2], folder / "complete"))
    assert resumed == expected
    assert resumed[-1] == 0


def test_a_measurement_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    StageLog("teacher", path).write(3, {"loss": 2.0})
    for stage, value in (("patched", 0.1), ("teacher", 0.2), ("teacher", 0.3)):
        StageLog(stage, path).write_measured({"eval_loss": value})
    rows = [(row["stage"], row["step"], row.get("eval_loss")) for row in JsonLinesFile(path).read()]
    assert rows == [("teacher", 3, None), ("patched", 0, 0.1), ("teacher", 0, 0.3)]


def test_a_run_without_trackers_leaves_no_checkpoints(folder: Path) -> None:
    left = {path.name for path in (folder / "complete").iterdir()}
    assert left == {"model", "teacher", "study", "log.jsonl", "results.json"}


def test_a_finished_run_resumes_to_itself(folder: Path) -> None:
    before = weights(folder / "complete")
    convert(convert_config(folder / "encoder", folder / "task", folder / "complete", resume=True), console=quiet())
    assert weights(folder / "complete") == before


def test_a_run_resumes_with_the_same_folder_in_another_spelling(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "complete", tmp_path / "out")
    (tmp_path / "out" / "results.json").unlink()
    monkeypatch.chdir(folder)
    for model, data in ((Path("encoder"), Path("task")), (folder / "task" / ".." / "encoder", Path("./task"))):
        again = convert_config(model, data, tmp_path / "out", resume=True)
        assert TrainingRun(again.completed("classification"), "convert", quiet()).finished["teacher"]
    other = convert_config(Path("decoder"), Path("task"), tmp_path / "out", resume=True)
    with pytest.raises(ValueError, match="has other options"):
        TrainingRun(other.completed("classification"), "convert", quiet())


@pytest.mark.slow
def test_another_number_of_processes_does_not_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches would be smaller or larger than before, in silence."""
    paths = (folder / "encoder", folder / "task", tmp_path / "out")
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 3, kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths), console=quiet())
    before = {path: path.read_bytes() for path in paths[2].rglob("*") if path.is_file()}
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match=r"was begun with 1 processes, now 2\. .*: resume it with 1"):
        convert(convert_config(*paths, resume=True), console=quiet())
    assert {path: path.read_bytes() for path in paths[2].rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_other_data_do_not_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Path(shutil.copytree(folder / "task", tmp_path / "task"))
    paths = (folder / "encoder", task, tmp_path / "out")
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 3, kill)
        with pytest.raises(Killed):
            convert(convert_config(*paths), console=quiet())
    file = next(path for path in sorted(task.iterdir()) if path.stem == "train")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    shorter, reordered = lines[:-1], [*lines[:-2], lines[-1], lines[-2]]
    for other, message in (
        (shorter, r".*train_rows was \d+, now \d+"),
        (reordered, "as many rows and tokens, but not"),
    ):
        file.write_text("".join(other), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"was begun with other data \({message}"):
            convert(convert_config(*paths, resume=True), console=quiet())


@pytest.mark.slow
def test_another_model_of_the_same_name_does_not_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = save_encoder(tmp_path / "encoder", head=True)
    config = convert_config(encoder, folder / "task", tmp_path / "out")
    config = replace(config, teacher=TeacherConfig(), transfer=replace(config.transfer, max_steps=0))
    with monkeypatch.context() as patch:
        at_step(patch, "distill", 3, kill)
        with pytest.raises(Killed):
            convert(config, console=quiet())
    model = AutoModelForSequenceClassification.from_pretrained(encoder)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    model.save_pretrained(encoder)
    with pytest.raises(ValueError, match="was begun with other weights"):
        convert(replace(config, resume=True), console=quiet())


@pytest.mark.slow
def test_the_weights_of_the_best_step_remain(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are invented; the weights of the result must be those at the best of them."""
    models: list[dict[str, torch.Tensor]] = []
    scores = iter([0.2, 0.7, 0.7, 0.4])
    original = FinetuningTrainer.evaluate

    def evaluate(self: FinetuningTrainer, *args: Any, **kwargs: Any) -> Any:
        models.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        return original(self, *args, **kwargs)

    monkeypatch.setattr(FinetuningTrainer, "evaluate", evaluate)
    monkeypatch.setattr(TaskData, "compute_metrics", lambda self, prediction: {"accuracy": next(scores)})
    config = finetune_config(
        folder / "encoder", folder / "task", tmp_path / "out", train__max_steps=8, train__eval_steps=0.25
    )
    results = finetune(config, console=quiet())
    assert results.training.train["best_step"] == 4
    best = dict(results.training.train["evaluations"])[4]
    assert best == {"accuracy": 0.7}
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in models[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_patience_stops_early(interrupted: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.4, 0.3, 0.9])
    monkeypatch.setattr(TaskData, "compute_metrics", lambda self, prediction: {"accuracy": next(scores)})
    config = finetune_config(
        folder / "encoder",
        folder / "task",
        tmp_path / "out",
        train__max_steps=8,
        train__eval_steps=0.25,
        train__patience=2,
    )
    if interrupted:
        with monkeypatch.context() as patch:
            at_step(patch, "train", 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(InterruptedRunError, match="after step 6 of 8"):
                finetune(config, console=quiet())
    results = finetune(replace(config, resume=interrupted), console=quiet())
    assert results.training.train["step"] == 6
