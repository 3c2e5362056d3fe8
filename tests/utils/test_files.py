"""Atomic files and folders, and JSON lines that survive a killed process."""

from __future__ import annotations

import os

import pytest

from hf_linear_attn.utils.environment import json_safe
from hf_linear_attn.utils.extras import require_packages
from hf_linear_attn.utils.files import (
    atomic_folder,
    atomic_write,
    check_disk_space,
    check_output,
    open_output,
    remove_partial_files,
)
from hf_linear_attn.utils.formatting import fixed, format_bytes, format_flops, format_seconds, near_matches
from hf_linear_attn.utils.json_lines import JsonLinesFile


def test_folder_appears_completely(tmp_path):
    target = tmp_path / "out"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    with atomic_folder(target) as folder:
        (folder / "b").write_text("2")
        assert (target / "a").exists()
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_write_keeps_previous_content(tmp_path):
    target = tmp_path / "out"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(RuntimeError, match="no"), atomic_folder(target) as folder:
        raise RuntimeError("no")
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_rename_keeps_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def refuse(*args):
        raise OSError("no")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="no"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_partial_files_are_removed_and_backups_restored(tmp_path):
    (tmp_path / ".model.0123abcd.old").mkdir()
    (tmp_path / ".model.0123abcd.old" / "weights").write_text("w")
    (tmp_path / ".other.0123abcd.part").mkdir()
    (tmp_path / ".log.0123abcd.part").write_text("half")
    (tmp_path / ".unrelated.old").write_text("stays")
    remove_partial_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".unrelated.old", "model"]
    assert (tmp_path / "model" / "weights").read_text() == "w"


def test_folder_checks_name_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*Choose another folder"), open_output(tmp_path / "file" / "inner", []):
        pass
    check_disk_space(tmp_path, 1)
    with pytest.raises(OSError, match="Delete something"):
        check_disk_space(tmp_path, 10**18, remedy="Delete something.")


def test_the_rule_of_output_folders(tmp_path):
    out = tmp_path / "new" / "out"
    check_output(out, ["result"])
    assert not out.parent.exists()
    out.mkdir(parents=True)
    check_output(out, ["result"])
    (out / "diary").write_text("mine")
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ValueError, match=r"--output '.*out' has files that are not a result .*\(diary\)"):
            check_output(out, ["result"], **flags)
    (out / "result").write_text("1")
    with pytest.raises(ValueError, match=r"earlier result: replace it \(--overwrite\), or name a new folder"):
        check_output(out, ["result", "other"])
    with pytest.raises(ValueError, match=r"--save_model.*: continue it \(--resume\), replace it \(--overwrite\)"):
        check_output(out, ["result"], resume=False, option="--save_model")
    check_output(out, ["result"], resume=True)
    check_output(out, ["result"], overwrite=True)
    with pytest.raises(ValueError, match=r"contains the model .* would be lost"):
        check_output(tmp_path / "new", ["out"], overwrite=True, source=str(out))
    for path, message in ((out / "diary", "is a file"), (out / "diary" / "below", "not a writable folder")):
        with pytest.raises(OSError, match=message):
            check_output(path, ["result"])


def test_a_failure_without_a_result_leaves_no_folder(tmp_path):
    out = tmp_path / "new" / "out"

    def fail(name):
        with open_output(out, ["result"]):
            (out / name).mkdir()
            raise KeyError

    with pytest.raises(KeyError):
        fail("part")
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError):
        fail("result")
    assert os.listdir(out) == ["result"]
    with open_output(out, ["result"]):
        assert os.listdir(out) == ["result"]
    with open_output(out, ["result"], overwrite=True):
        assert os.listdir(out) == []
    with pytest.raises(KeyError):
        fail("part")
    assert os.listdir(out) == [], "the folder was there before"
    (out / "earlier").mkdir()
    with pytest.raises(KeyError):
        fail("part")
    assert sorted(os.listdir(out)) == ["earlier", "part"], "what was there before stays"


def test_json_lines_drop_an_incomplete_last_line(tmp_path):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    assert file.read() == []
    file.append({"a": "x\u2028y"}, {"b": [1, None]})
    with file.path.open("ab") as handle:
        handle.write(b'{"c": ' + b" " * 200_000)
    assert file.read() == [{"a": "x\u2028y"}, {"b": [1, None]}]
    file.append({"d": 1})
    assert file.read() == [{"a": "x\u2028y"}, {"b": [1, None]}, {"d": 1}]
    file.remove(lambda row: "b" in row)
    assert file.read() == [{"a": "x\u2028y"}, {"d": 1}]


def test_json_lines_only_incomplete(tmp_path):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    file.path.write_bytes(b'{"a"')
    file.append({"a": 1})
    assert file.path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.parametrize("line", [b"not json", b"[1]"])
def test_json_lines_name_file_and_line(tmp_path, line):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    file.path.write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl', line 2"):
        file.read()


def test_json_lines_refuse_nan(tmp_path):
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append({"a": float("nan")})
    assert not file.path.exists()
    file.append(json_safe({"a": float("nan"), "b": (1, 2), 3: "c"}))
    assert file.read() == [{"a": None, "b": [1, 2], "3": "c"}]


def test_missing_package_names_the_extra():
    require_packages("json", extra="demo", purpose="The demo")
    with pytest.raises(ImportError, match=r"The demo needs no_such_module.*hf-linear-attn\[demo\]"):
        require_packages("json", "no_such_module", extra="demo", purpose="The demo")


def test_numbers_as_text():
    assert fixed(-0.001, 2) == "0.00"
    assert [format_seconds(value) for value in (1.234, 0.035, 8e-5)] == ["1.23 s", "35 ms", "80 µs"]
    assert [format_bytes(value) for value in (640, 12_000, 3.1e6)] == ["640 B", "12 kB", "3.1 MB"]
    assert [format_flops(value) for value in (640, 1.23e7)] == ["640 FLOP", "12.3 MFLOP"]
    assert near_matches("hedgehgo", ["hedgehog", "elu"]) == " Did you mean 'hedgehog'?"
    assert near_matches("zzz", ["hedgehog"]) == ""
