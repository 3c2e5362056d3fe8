"""The verb `plan` of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attn.cli import main, parse_verb
from tests.helpers import sample_text, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    save_checkpoint(made / "gpt2", "gpt2")
    (made / "text.txt").write_text(sample_text(), encoding="utf-8")
    return made


def run(folder: Path, out: Path, budget: str, *more: str) -> int:
    words = [
        "--text",
        str(folder / "text.txt"),
        "--out",
        str(out),
        "--quick",
        "--steps",
        "1",
        "--sequence-length",
        "32",
    ]
    return main(["plan", str(folder / "gpt2"), "--budget", budget, "--lengths", "32", *words, *more])


def test_exit_codes_and_the_plan_is_one_for_patch(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "plan", "1000000% perplexity", "--option", "window_size=8") == 0
    shown = capsys.readouterr().out
    assert "is met by 2 of 2 layers as window" in " ".join(shown.split())
    assert run(folder, tmp_path / "plan", "1000x at 32", "--option", "window_size=8") == 1
    assert "cannot be reached" in " ".join(capsys.readouterr().out.split())
    plan, patched = str(tmp_path / "plan" / "plan.json"), str(tmp_path / "patched")
    assert main(["patch", str(folder / "gpt2"), patched, "--plan", plan]) == 0
    assert "of 2 self-attention layers are linear" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("budget", "more", "complaint"),
    [
        ("much", (), "Budgets look like '1% perplexity'"),
        ("0.02 cosine", (), "is for an encoder without --task"),
        ("1% perplexity", ("--attention", "nystrom"), "cannot be planned on this model"),
    ],
)
def test_errors_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str, more: tuple[str, ...], complaint: str
) -> None:
    assert run(folder, tmp_path / "plan", budget, *more) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error


def test_flags() -> None:
    words = ["--budget", "2x at 64", "--option", "a=1", "--option", "b=x", "--lengths", "64", "128"]
    options = parse_verb("plan", words)
    assert options.mechanism_options() == {"a": 1, "b": "x"}
    assert options.lengths == (64, 128)
    assert main(["plan", "gpt2"]) == 2


def test_flags_are_light() -> None:
    code = "import sys; from hf_linear_attn.cli import main; main(['plan', '--help']); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False"
