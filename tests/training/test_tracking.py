"""The log of a run, what a resumed run does with it, and who else is told."""

from __future__ import annotations

import io
import json

import pytest
from accelerate import Accelerator
from rich.console import Console

from hf_linear_attn.training import tracking
from hf_linear_attn.training.tracking import JsonLinesTracker, Reporter, installed_trackers, short


def lines(path):
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def tracker(folder, resume=False):
    return JsonLinesTracker(folder / "log.jsonl", resume=resume)


def test_one_line_a_report(tmp_path):
    log = tracker(tmp_path)
    log.store_init_configuration({"a": 1})
    log.log({"stage": "train", "loss": 0.5}, step=1)
    log.log({"stage": "train", "note": "über"})
    assert lines(log.path) == [
        {"step": 1, "stage": "train", "loss": 0.5},
        {"step": None, "stage": "train", "note": "über"},
    ]
    assert log.tracker == log.path


def test_a_new_run_begins_a_new_log_and_a_resumed_one_goes_on(tmp_path):
    tracker(tmp_path).log({"a": 1}, step=1)
    tracker(tmp_path, resume=True).log({"a": 2}, step=2)
    assert [held["step"] for held in lines(tmp_path / "log.jsonl")] == [1, 2]
    tracker(tmp_path)
    assert not (tmp_path / "log.jsonl").exists()
    tracker(tmp_path / "not yet there")


def test_accelerate_writes_to_it(tmp_path):
    log = tracker(tmp_path)
    accelerator = Accelerator(cpu=True, log_with=[log], project_dir=str(tmp_path))
    accelerator.init_trackers("run", config={"lr": "1"})
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert lines(log.path) == [{"step": 3, "loss": 1.0}]


def filled(folder):
    log = tracker(folder)
    for stage, step in (("teacher", 0), ("teacher", 5), ("train", 1), ("train", 10), ("train", 20), ("note", None)):
        log.log({"stage": stage}, step=step)
    return log.path


@pytest.mark.parametrize(
    ("stage", "step", "left"),
    [
        ("train", 10, [0, 5, 1, 10, None]),
        ("train", 0, [0, 5, None]),
        ("train", 99, [0, 5, 1, 10, 20, None]),
        ("teacher", 0, [0, 1, 10, 20, None]),
        ("note", 0, [0, 5, 1, 10, 20, None]),
        ("other", 0, [0, 5, 1, 10, 20, None]),
    ],
)
def test_rewind(tmp_path, stage, step, left):
    path = filled(tmp_path)
    log = tracker(tmp_path, resume=True)
    log.rewind(stage, step)
    assert [held["step"] for held in lines(path)] == left
    log.log({"stage": stage}, step=step + 1)
    assert [held["step"] for held in lines(path)] == [*left, step + 1]
    assert [held.name for held in tmp_path.iterdir()] == ["log.jsonl"]


def test_rewind_without_a_log(tmp_path):
    tracker(tmp_path, resume=True).rewind("train", 0)
    assert [*tmp_path.iterdir()] == []


TORN = ['{"step": 30, "stage": "tra', '{"step": 30, "note": "ü', "{", '{"step": 30}']


@pytest.mark.parametrize("torn", [text.encode() for text in TORN] + ['{"note": "ü'.encode()[:-1]])
@pytest.mark.parametrize("rewound", [False, True])
def test_a_torn_last_line_is_dropped(tmp_path, torn, rewound):
    """A killed process may stop in the middle of a line, even of a letter."""
    path = filled(tmp_path)
    with path.open("ab") as file:
        file.write(torn)
    log = tracker(tmp_path, resume=True)
    if rewound:
        log.rewind("train", 10)
    log.log({"stage": "train"}, step=11)
    assert [held["step"] for held in lines(path)] == [0, 5, 1, 10, *([] if rewound else [20]), None, 11]


def test_only_a_torn_line(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step"')
    log = tracker(tmp_path, resume=True)
    log.rewind("train", 0)
    assert lines(log.path) == []
    log.log({}, step=1)
    assert lines(log.path) == [{"step": 1}]


def test_what_is_no_line_of_ours_is_dropped(tmp_path):
    path = filled(tmp_path)
    path.write_text("nonsense\n[1]\n5\n" + path.read_text())
    tracker(tmp_path, resume=True).rewind("train", 10)
    assert [held["step"] for held in lines(path)] == [0, 5, 1, 10, None]


def test_line_separators_of_unicode_are_text(tmp_path):
    log = tracker(tmp_path)
    log.log({"stage": "a", "note": "one\u2028two\x85three"}, step=1)
    log.rewind("b", 0)
    assert [held["note"] for held in lines(log.path)] == ["one\u2028two\x85three"]


# --------------------------------------------------------------------------------------------------------------------
# Trackers, progress


def test_trackers(monkeypatch):
    assert installed_trackers(()) == ()
    with pytest.raises(
        ValueError, match=r"run.trackers: accelerate knows no tracker 'tensorbord'. Known: .*tensorboard"
    ):
        installed_trackers(("tensorbord",))
    with pytest.raises(ValueError, match="knows no tracker 'jsonl'"):
        installed_trackers(("tensorboard", "jsonl"))
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb"])
    assert installed_trackers(("tensorboard", "wandb")) == ("wandb",)


def test_the_installed_tensorboard_is_found():
    pytest.importorskip("tensorboard")
    assert installed_trackers(("tensorboard",)) == ("tensorboard",)


def reporter(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return Reporter(Accelerator(cpu=True), console), console.file


def test_lines_where_there_is_no_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    told, file = reporter(False)
    told.start("train", 50)
    for step in range(1, 5):
        now[0] += tracking.QUIET_SECONDS / 2
        told.update(step, "loss [0.5]")
    told.stop()
    told.say("done [bold]")
    expected = ["train: step 2 of 50, loss [0.5]", "train: step 4 of 50, loss [0.5]", "done [bold]"]
    assert file.getvalue().splitlines() == expected


def test_a_bar_on_a_terminal():
    told, file = reporter(True)
    told.start("train [x]", 50, done=3)
    told.update(4, "loss [red]1[/red]")
    told.say("a line [that] stays")
    told.stop()
    told.stop()
    shown = file.getvalue()
    assert "train [x]" in shown
    assert "loss [red]1[/red]" in shown
    assert "4/50" in shown
    assert "a line [that] stays" in shown


def test_other_processes_are_silent():
    told, file = reporter(False)
    told.active = False
    told.start("train", 5)
    told.update(1, "x")
    told.say("y")
    told.stop()
    assert file.getvalue() == ""


def test_short():
    assert short({"accuracy": 0.123456, "steps": 3}) == "accuracy 0.1235, steps 3"
