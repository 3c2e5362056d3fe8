"""What the verb `evaluate` says to bad input, before anything is written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hf_linear_attn.cli import parse_verb
from hf_linear_attn.evaluation.measurements import NAME
from hf_linear_attn.evaluation.options import EvaluateOptions
from hf_linear_attn.evaluation.runner import run_evaluate
from tests.evaluate_runs import run, save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("evaluate"))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {}, "give a text to judge it on with --text"),
        ("gpt2", {"text": "nowhere.txt"}, r"no text file 'nowhere.txt'"),
        ("gpt2", {"text": "TEXT", "attention": ("nystrom",)}, "cannot be measured on this model"),
        ("gpt2", {"text": "TEXT", "attention": ("hedgehogs",)}, r"'hedgehogs'.*Did you mean 'hedgehog'"),
        ("gpt2", {"text": "TEXT", "attention": ("softmax",)}, "always measured"),
        ("gpt2", {"text": "TEXT", "sts": "GLUE"}, "causal language model"),
        ("gpt2", {"text": "TEXT", "context": 4096}, "beyond the model's 96 positions"),
        ("gpt2", {"text": "TEXT", "sequence_length": 4096}, "beyond the model's 96 positions"),
        ("gpt2", {"text": "TEXT", "device": "toaster"}, "toaster"),
        ("bert", {"context": 16}, "no causal language model"),
        ("bert", {"converted": ("nowhere",)}, "no folder 'nowhere'"),
        ("bert", {"converted": ("CLASSIFIER",)}, "exact attention: nothing was converted"),
        ("bert", {"baseline": ("RUN",)}, "is patched; a baseline has exact attention"),
        ("bert", {"converted": ("HERE",)}, "no config.json"),
        ("gpt2", {"text": "TEXT", "converted": ("RUN",)}, "not made from this model: its model_type is 'bert'"),
        ("bert", {"task": ("sst3",)}, r"'sst3'.*Did you mean 'sst2'"),
        ("bert", {"task": ("sst2",), "data": "nowhere"}, "no folder 'nowhere'"),
        ("bert", {"task": ("sst2",), "data": "GLUE"}, "has no head for the task"),
        ("bert", {"task": ("rte=nowhere",), "data": "GLUE"}, "no folder 'nowhere'.*--task"),
        (
            "gpt2",
            {"text": "TEXT", "task": ("sst2=CLASSIFIER",), "data": "GLUE"},
            "its model_type is 'bert', not 'gpt2'",
        ),
        ("classifier", {"task": ("sst2", "rte=CLASSIFIER"), "data": "GLUE"}, "trained with the labels negative"),
        (
            "bert",
            {"task": ("sst2=CLASSIFIER",), "data": "GLUE", "converted": ("sst2=RUN",)},
            "no converted checkpoint of",
        ),
        ("classifier", {"task": ("sst2",), "data": "GLUE", "metrics": ("acuracy",)}, "Did you mean 'accuracy'"),
        ("classifier", {"task": ("sst2",), "data": "GLUE", "metrics": ("hub:HERE/none",)}, "cannot be loaded"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    folder: Path, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    places = {
        "TEXT": str(folder / "text.txt"),
        "GLUE": str(folder / "glue"),
        "RUN": str(folder / "run0"),
        "CLASSIFIER": str(folder / "classifier"),
        "HERE": str(folder),
    }
    for held in ("task", "converted"):
        if held in changes:
            heads = [one.rpartition("=") for one in changes[held]]
            changes = {**changes, held: tuple(f"{head}{sign}{places.get(end, end)}" for head, sign, end in heads)}
    given = {
        name: tuple(places.get(one, one) for one in value) if isinstance(value, tuple) else places.get(value, value)
        for name, value in changes.items()
    }
    with pytest.raises((ValueError, OSError), match=words):
        run(folder / kind, **{"output": str(tmp_path / "out"), **given})
    assert list(tmp_path.iterdir()) == []


def test_output_folders_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("kept", encoding="utf-8")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    text = str(folder / "text.txt")
    for append in (False, True):
        with pytest.raises(ValueError, match="holds other files"):
            run(folder / "gpt2", text=text, output=str(tmp_path / "mine"), append=append)
    with pytest.raises(NotADirectoryError, match="is a file"):
        run(folder / "gpt2", text=text, output=str(tmp_path / "file"))
    (tmp_path / "mine" / NAME).write_text("{broken\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"jsonl', line 1: no JSON"):
        run(folder / "gpt2", text=text, output=str(tmp_path / "mine"), append=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": -1},
        {"length": 8},
        {"lengths": (8,)},
        {"lengths": (16, 16)},
        {"seeds": (-1,)},
        {"seconds": 0.0},
        {"rows": 1},
        {"batch": 0},
        {"stride": 8, "context": 8},
        {"data": "glue"},
        {"metrics": ("accuracy",)},
        {"task": ("sst2",), "text": "a.txt"},
        {"task": ("sst2", "sst2=other")},
        {"task": ("sst2", "rte")},
        {"metrics": ("accuracy",), "task": ("sst2", "rte=folder")},
        {"dtype": "int8"},
        {"sts": "glue", "task": ("stsb",)},
        {"again": True},
        {"attention": ("elu", "elu")},
    ],
)
def test_bad_options_name_themselves(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EvaluateOptions(**bad)


def test_flags_are_light_and_all_have_a_help_text() -> None:
    words = ["--text", "a.txt", "--lengths", "64", "128", "--seeds", "1", "2", "--backward"]
    words += ["--task", "rte=a", "mrpc=b", "--dtype", "bfloat16", "--converted", "c", "rte=d", "x=y"]
    options = parse_verb("evaluate", words)
    assert (options.own_task, options.other_tasks, options.dtype) == (None, {"rte": "a", "mrpc": "b"}, "bfloat16")
    assert [options.for_task(task).converted for task in (None, "rte", "mrpc")] == [("c", "x=y"), ("d",), None]
    assert (options.lengths, options.seeds, options.backward) == ((64, 128), (1, 2), True)
    for field in fields(EvaluateOptions):
        assert len(field.metadata["help"]) > 10, field.name
    code = (
        "import sys; from hf_linear_attn.cli import main; main(['evaluate', '--help']); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False"


def test_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib.*pip install 'hf-linear-attn\[demo\]'"):
        run_evaluate("gpt2", EvaluateOptions())
