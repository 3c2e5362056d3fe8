"""Folders that appear whole or not at all, after a crash at any step."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_linear_attn.training import saving
from hf_linear_attn.training.saving import (
    check_space,
    check_writable,
    clear_leftovers,
    replace_folder,
    training_bytes,
    whole_folder,
    without_shared,
    write_json,
    write_whole,
)
from tests.helpers import BERT, GPT2


class Killed(BaseException):
    """The process ends here: nothing after it runs."""


def kill(monkeypatch, owner, name, call=1):
    """Let the process die at the `call`-th use of a function, before its work; every later use finds it dead too."""
    real, seen = getattr(owner, name), []

    def broken(*args, **kwargs):
        seen.append(args)
        if len(seen) < call:
            return real(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(owner, name, broken)


def folder_with(path, text):
    path.mkdir(parents=True)
    (path / "a.txt").write_text(text)
    (path / "b.txt").write_text(text)
    return path


def content(path):
    return sorted((held.name, held.read_text()) for held in path.iterdir())


OLD, NEW = ([(name, text) for name in ("a.txt", "b.txt")] for text in ("old", "new"))


def write_new(target):
    with whole_folder(target) as aside:
        (aside / "a.txt").write_text("new")
        (aside / "b.txt").write_text("new")


@pytest.mark.parametrize("exists", [False, True])
def test_a_whole_folder(tmp_path, exists):
    target = tmp_path / "deep" / "model"
    if exists:
        folder_with(target, "old")
    with whole_folder(target) as aside:
        assert aside.parent == target.parent
        assert aside.name.startswith(".")
        (aside / "a.txt").write_text("new")
        assert target.exists() is exists
        (aside / "b.txt").write_text("new")
    assert content(target) == NEW
    assert [held.name for held in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_error_while_writing_leaves_what_was_there(tmp_path, exists, error):
    target = folder_with(tmp_path / "model", "old") if exists else tmp_path / "model"

    def broken_off():
        with whole_folder(target) as aside:
            (aside / "a.txt").write_text("new")
            raise error

    with pytest.raises(error):
        broken_off()
    assert [held.name for held in tmp_path.iterdir()] == (["model"] if exists else [])
    assert not exists or content(target) == OLD


@pytest.mark.parametrize("call", [1, 2])
def test_a_rename_that_fails_leaves_what_was_there(tmp_path, monkeypatch, call):
    """Of the two renames the first moves the old content away, the second the new one in."""
    target = folder_with(tmp_path / "model", "old")
    real, seen = Path.rename, []

    def failing(self, other):
        seen.append(self)
        if len(seen) == call:
            raise OSError("the disk is gone")
        return real(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        write_new(target)
    assert content(target) == OLD
    assert [held.name for held in tmp_path.iterdir()] == ["model"]


def replace_killed(tmp_path, monkeypatch, step):
    """`replace_folder` in a process that dies: no rename works from then on, that of an error handler neither."""
    target = folder_with(tmp_path / "model", "old")
    aside = folder_with(tmp_path / ".model.0123abcd.part", "new")

    def half(path, **kwargs):
        (path / "a.txt").unlink()
        raise Killed

    with monkeypatch.context() as patch:
        if step == "removed half":
            patch.setattr(saving.shutil, "rmtree", half)
        else:
            owner, name, call = {
                "nothing": (Path, "rename", 1),
                "old away": (Path, "rename", 2),
                "new in place": (saving.shutil, "rmtree", 1),
            }[step]
            kill(patch, owner, name, call)
        with pytest.raises(Killed):
            replace_folder(target, aside)
    return target


@pytest.mark.parametrize(
    ("step", "expected"), [("nothing", OLD), ("old away", OLD), ("new in place", NEW), ("removed half", NEW)]
)
def test_a_process_killed_while_replacing(tmp_path, monkeypatch, step, expected):
    target = replace_killed(tmp_path, monkeypatch, step)
    assert target.exists() is (step != "old away")
    assert not target.exists() or content(target) == expected
    clear_leftovers(tmp_path)
    assert content(target) == expected
    assert [held.name for held in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_clearing_can_be_killed_and_repeated(tmp_path, monkeypatch, call):
    folder_with(tmp_path / ".model.0123abcd.old", "old")
    folder_with(tmp_path / ".model.89abcdef.part", "new")
    folder_with(tmp_path / "best", "new")
    folder_with(tmp_path / ".best.0123abcd.old", "old")
    (tmp_path / ".state.json.0123abcd.part").write_text("{")
    with monkeypatch.context() as patch:
        kill(patch, saving.shutil, "rmtree", call)
        if call < 3:
            with pytest.raises(Killed):
                clear_leftovers(tmp_path)
    clear_leftovers(tmp_path)
    assert sorted(held.name for held in tmp_path.iterdir()) == ["best", "model"]
    assert content(tmp_path / "model") == OLD
    assert content(tmp_path / "best") == NEW


def test_a_new_folder_after_a_crash_wins_over_the_old_one(tmp_path, monkeypatch):
    target = replace_killed(tmp_path, monkeypatch, "old away")
    write_new(target)
    clear_leftovers(tmp_path)
    assert content(target) == NEW
    assert [held.name for held in tmp_path.iterdir()] == ["model"]


def test_clearing_leaves_what_is_somebody_elses(tmp_path):
    for name in (".bashrc.old", ".model.old", "model.0123abcd.old", ".hidden"):
        (tmp_path / name).write_text("mine")
    folder_with(tmp_path / ".settings.mine.old", "mine")
    before = sorted(tmp_path.rglob("*"))
    clear_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    clear_leftovers(tmp_path / "nowhere")


def test_names_with_dots_come_back(tmp_path):
    folder_with(tmp_path / ".step-1.5.x.0123abcd.old", "old")
    clear_leftovers(tmp_path)
    assert content(tmp_path / "step-1.5.x") == OLD


def test_an_old_folder_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch):
    target = folder_with(tmp_path / "model", "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("busy")))
        write_new(target)
    assert content(target) == NEW
    clear_leftovers(tmp_path)
    assert [held.name for held in tmp_path.iterdir()] == ["model"]


# --------------------------------------------------------------------------------------------------------------------
# Files


def test_a_whole_file(tmp_path):
    path = tmp_path / "deep" / "state.json"
    write_json(path, {"a": [1, "ü"]})
    write_json(path, {"a": 2})
    assert path.read_text(encoding="utf-8") == '{\n "a": 2\n}\n'
    write_whole(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    assert [held.name for held in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize(("owner", "name", "half"), [(Path, "write_text", True), (os, "replace", False)])
def test_an_error_while_writing_a_file(tmp_path, monkeypatch, owner, name, half):
    path = tmp_path / "state.json"
    write_json(path, 1)

    def failing(self, *args, **kwargs):
        if half:
            self.write_bytes(b"{")
        raise OSError("no space left")

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, 2)
    assert json.loads(path.read_text()) == 1
    assert [held.name for held in tmp_path.iterdir()] == ["state.json"]


# --------------------------------------------------------------------------------------------------------------------
# The disk


def test_a_folder_that_can_be_written_to(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert [*(tmp_path / "a" / "b").iterdir()] == []


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("x")
    for folder in (file, file / "below"):
        with pytest.raises(OSError, match=rf"Cannot write to '{folder}' \(.*\). Choose another folder"):
            check_writable(folder)

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"\(No space left on device\). Choose another folder"):
        check_writable(tmp_path / "out")
    assert [*(tmp_path / "out").iterdir()] == []


def test_space(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: usage(0, 0, 3_000_000_000))
    check_space(tmp_path, 3_000_000_000)
    with pytest.raises(
        OSError, match=rf"'{tmp_path}' has 3.00 GB free; .* need about 4.50 GB. Free some space.*run.keep"
    ):
        check_space(tmp_path, 4_500_000_000)


def test_bytes_of_training():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    model[0].requires_grad_(False)
    # 110 + 20 weights and 20 statistics of 4 bytes, and a counter of 8; AdamW has two numbers for each of 20 weights.
    weights = 4 * 150 + 8
    assert training_bytes(model, keep=2) == 3 * (weights + 8 * 20) + 3 * weights
    tied = GPT2.build()
    stored = sum(held.numel() for held in without_shared(tied.state_dict()).values())
    assert training_bytes(tied, keep=1) >= 4 * stored * (2 * 3 + 3)


# --------------------------------------------------------------------------------------------------------------------
# State dicts


@pytest.mark.parametrize("family", [GPT2, BERT], ids=str)
def test_tied_weights_are_kept_once(tmp_path, family):
    model = family.build()
    state = model.state_dict()
    kept = without_shared(state)
    missing = set(state) - set(kept)
    assert len({id(parameter) for parameter in model.parameters()}) == len(
        [name for name in kept if name in dict(model.named_parameters())]
    )
    assert missing
    save_file(kept, str(tmp_path / "model.safetensors"))
    other = family.build()
    assert not torch.equal(next(other.parameters()), next(model.parameters()))
    lost, unexpected = other.load_state_dict(load_file(str(tmp_path / "model.safetensors")), strict=False)
    assert set(lost) == missing
    assert not unexpected
    assert all(torch.equal(held, state[name]) for name, held in other.state_dict().items())


def test_parts_of_a_tensor_are_copied(tmp_path):
    whole = torch.arange(12.0)
    state = {
        "whole": whole,
        "again": whole,
        "begin": whole[:6],
        "end": whole[6:],
        "turned": whole.view(3, 4).t(),
        "reshaped": whole.view(3, 4),
        "spread": whole[:1].expand(5),
        "every second": whole[::2],
        "empty": torch.empty(0, 3),
        "none": torch.empty(0, 3),
        "number": torch.tensor(3),
        "trained": torch.ones(2, requires_grad=True),
    }
    kept = without_shared(state)
    assert set(state) - set(kept) == {"again"}
    assert all(held.is_contiguous() and not held.requires_grad for held in kept.values())
    save_file(kept, str(tmp_path / "state.safetensors"))
    held = load_file(str(tmp_path / "state.safetensors"))
    assert all(torch.equal(held[name], state[name]) for name in kept)
