"""Two processes on a CPU (gloo): the losses and metrics of one process with the same global batch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hf_linear_attn.utils.options import to_dict
from tests.subprocesses import run_python, torchrun
from tests.training.tiny_runs import convert_config, forget, log_rows, save_encoder, save_task

pytestmark = pytest.mark.slow


def start(
    settings: Path, processes: int, *flags: str, module: str = "tests.training.checkpoint_worker", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [*torchrun(processes), "-m", module, "convert", "--config", settings, *flags]
    return run_python(*command, timeout=300, **environment)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """What the processes raised, and the end of what they wrote: the first to fail writes first."""
    raised = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    return "\n".join([*raised[:100], "...", done.stderr[-2000:]])


def settings_file(folder: Path, name: str, batch_size: int, **changes: Any) -> Path:
    """Batches of one process. Every step is logged."""
    stages = ("teacher", "transfer", "distill")
    sizes: dict[str, Any] = {f"{stage}__per_device_train_batch_size": batch_size for stage in stages}
    sizes |= {f"{stage}__arguments": {"logging_steps": 1} for stage in ("teacher", "distill")}
    sizes["transfer__logging_steps"] = 1
    changes = {
        "teacher__learning_rate": 3e-4,
        "distill__learning_rate": 3e-4,
        **sizes,
        **changes,
    }
    settings = convert_config(folder / "encoder", folder / "task", folder / name, **changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(to_dict(settings)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with batches of 8, and two with 4 each. 27 validation rows fill no whole number of batches."""
    path = tmp_path_factory.mktemp("processes")
    save_encoder(path / "encoder", hidden_dropout_prob=0.0)
    save_task(path / "task", validation=27)
    for name, batch, processes in (("one", 8, 1), ("two", 4, 2)):
        done = start(settings_file(path, name, batch), processes)
        assert done.returncode == 0, complaint(done)
    return path


def results(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "results.json").read_text(encoding="utf-8"))


def test_two_processes_were_used(folder: Path) -> None:
    assert [results(folder, name)["processes"] for name in ("one", "two")] == [1, 2]


@pytest.mark.parametrize("stage", ["teacher", "distill"])
def test_losses_are_those_of_one_process(stage: str, folder: Path) -> None:
    one, two = ([line["loss"] for line in log_rows(folder / name, stage) if "loss" in line] for name in ("one", "two"))
    assert len(one) >= 2
    # The students begin from attention transfers that differ a little (see below).
    assert two == pytest.approx(one, rel=1e-4 if stage == "teacher" else 2e-3)


def test_transfer_in_two_processes_equals_one(folder: Path) -> None:
    """Looser: the teachers differ by rounding, which Adam makes more of, and a mean of means is not quite the mean."""
    one, two = (
        [(line["step"], line["eval_loss"]) for line in log_rows(folder / name, "transfer") if "eval_loss" in line]
        for name in ("one", "two")
    )
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=0.1)
    assert two[-1][1] < 0.9 * two[0][1]


@pytest.mark.parametrize("stage", ["teacher", "patched", "transferred", "distilled"])
def test_every_validation_row_counts_once(stage: str, folder: Path) -> None:
    """An accuracy over 27 rows is a multiple of 1/27, whatever the processes and the last batch."""
    one, two = (results(folder, name)["scores"][stage]["accuracy"] for name in ("one", "two"))
    assert two * 27 == pytest.approx(round(two * 27), abs=1e-6)
    assert two == pytest.approx(one, abs=1.01 / 27)


def test_both_processes_save_and_resume_together(folder: Path) -> None:
    """The checkpoint of the last distillation step but one is all that is left; the resumed run ends where it did."""
    before = (folder / "two" / "model" / "model.safetensors").read_bytes()
    forget(folder / "two", "distill", "distilled")
    done = start(folder / "two.yaml", 2, "--resume")
    assert done.returncode == 0, complaint(done)
    assert "distill: resumes from checkpoint-4" in done.stderr
    assert (folder / "two" / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the processes would take the GPUs")
def test_processes_find_each_other_without_a_gpu(folder: Path) -> None:
    done = start(settings_file(folder, "unasked", 4, device="auto"), 2)
    assert done.returncode == 0, complaint(done)
    assert results(folder, "unasked")["processes"] == 2


def test_a_mistake_is_reported_and_ends_all_processes(folder: Path) -> None:
    path = settings_file(folder, "bad", 4, attention="hedgehogs")
    done = start(path, 2)
    assert done.returncode != 0
    assert "Did you mean 'hedgehog'" in done.stderr
