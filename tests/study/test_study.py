"""A study: what was measured or trained once is looked up afterwards, in a folder and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_linear_attn.study.study import LEARNED_FOLDER, RECORDS_FILE, Conditions, check_study, open_study
from hf_linear_attn.utils.progress import Progress

TRAINING, LOSS = Conditions(measurement="training", seed=1), Conditions(measurement="loss")
FOLDERS = pytest.mark.parametrize("in_folder", [True, False], ids=["folder", "memory"])


class Trainer:
    """Counts how often it trains; each time it learns other parameters."""

    calls = 0

    def __call__(self) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        self.calls += 1
        return [{"metric": "steps", "value": 3}], {"weight": torch.full((2, 3), float(self.calls)).T}


@FOLDERS
def test_measured_and_trained_once(tmp_path: Path, in_folder: bool) -> None:
    train, calls = Trainer(), []
    with open_study(tmp_path / "out" if in_folder else None, "test", {}) as study:
        for _ in range(2):
            record = study.measure(LOSS, lambda: calls.append(1) or {"loss": 0.5}, label="elu")
            learned = study.learned(TRAINING, train)
            assert torch.equal(learned["weight"], torch.ones(3, 2))
            assert record.numbers["loss"] == 0.5
        assert study.records.latest(TRAINING).numbers["steps"] == 3
        other = study.learned(Conditions(measurement="training", seed=2), train)
        assert torch.equal(other["weight"], torch.full((3, 2), 2.0))
    assert (calls, train.calls) == ([1], 2)


def test_a_stopped_study_resumes(tmp_path: Path) -> None:
    lines: list[str] = []

    class Screen(Progress):
        def log(self, message: str) -> None:
            lines.append(message)

    train = Trainer()

    def stopped() -> None:
        with open_study(tmp_path / "out", "test", {}, progress=Screen()) as study:
            study.learned(TRAINING, train)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert "1 records are in" in lines[-1]
    assert "--resume" in lines[-1]
    with pytest.raises(ValueError, match=r"continue it \(--resume\), replace it \(--overwrite\)"):
        check_study(tmp_path / "out")
    with open_study(tmp_path / "out", "test", {}, resume=True) as study:
        assert torch.equal(study.learned(TRAINING, train)["weight"], torch.ones(3, 2))
        assert train.calls == 1
        next((tmp_path / "out" / LEARNED_FOLDER).iterdir()).unlink()  # lost: it is trained again
        assert torch.equal(study.learned(TRAINING, train)["weight"], torch.full((3, 2), 2.0))
    with open_study(tmp_path / "out", "test", {}, overwrite=True) as study:
        assert not len(study.records)
        assert not list((tmp_path / "out").iterdir())


def test_a_resumed_study_removes_what_a_killed_process_left_half_written(tmp_path: Path) -> None:
    with open_study(tmp_path, "test", {}) as study:
        study.learned(TRAINING, Trainer())
    partial = [tmp_path / ".plan.json.0123abcd.part", tmp_path / LEARNED_FOLDER / ".1.safetensors.0123abcd.part"]
    for path in partial:
        path.write_text("half")
    with open_study(tmp_path, "test", {}, resume=True) as study:
        assert not any(path.exists() for path in partial)
        assert study.records.latest(TRAINING) is not None


def test_a_study_without_a_result_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_study(tmp_path / "new" / "out", "test", {}):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_parameters_are_stored_before_their_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two, the study trains again."""
    train = Trainer()

    def killed(*args: Any, **kwargs: Any) -> None:
        raise OSError("full")

    with open_study(tmp_path, "test", {}) as study:
        monkeypatch.setattr(study.records, "add", killed)
        with pytest.raises(OSError, match="full"):
            study.learned(TRAINING, train)
    assert [path.name for path in tmp_path.iterdir()] == [LEARNED_FOLDER]
    with open_study(tmp_path, "test", {}, resume=True) as study:
        study.learned(TRAINING, train)
        assert (train.calls, (tmp_path / RECORDS_FILE).is_file()) == (2, True)
