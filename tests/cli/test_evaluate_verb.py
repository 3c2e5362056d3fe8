"""The verb `evaluate` on the command line: its arguments, a complete run, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attn import Evaluation
from hf_linear_attn.cli import main, parse_verb
from tests.tiny_models import save_checkpoint
from tests.tiny_text import sample_text


def test_arguments() -> None:
    arguments = ["gpt2", "--data.dataset", "a.txt", "--speed.lengths", "64", "128", "--seeds", "1", "2"]
    arguments += ["--speed.dtype", "bfloat16", "--converted", "c", "--speed.backward"]
    config = parse_verb("evaluate", arguments)
    assert (config.model, config.data.dataset, config.seeds) == ("gpt2", "a.txt", (1, 2))
    assert (config.speed.lengths, config.speed.dtype, config.speed.backward) == ((64, 128), "bfloat16", True)
    assert (config.converted, config.attention) == (("c",), None)


@pytest.mark.slow
def test_a_complete_run_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "gpt2", "gpt2")
    (tmp_path / "text.txt").write_text(sample_text(), encoding="utf-8")
    arguments = ["evaluate", str(tmp_path / "gpt2"), "--data.dataset", str(tmp_path / "text.txt"), "--attention", "elu"]
    arguments += ["--quick", "--speed.lengths", "16", "--speed.seconds", "1e-9", "--steps", "0"]
    arguments += ["--speed.batch_size", "1", "--data.max_length", "32", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "Report:" in capsys.readouterr().out
    assert Evaluation.load(tmp_path / "out").mechanisms == ["elu"]
    assert main(arguments) == 1
    assert "continue it (--resume)" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", "--quick"]) == 2
    assert "model: is missing" in capsys.readouterr().err


def test_reading_arguments_is_light() -> None:
    code = "import sys; from hf_linear_attn.cli import parse_verb; parse_verb('evaluate', ['gpt2']); "
    code += "parse_verb('demo', []); print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "False"
