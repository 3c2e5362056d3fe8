"""A conversion as a process: signals, progress, precision, and the upload of its result."""

from __future__ import annotations

import io
import os
import platform
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_linear_attn.study import convert as stages
from hf_linear_attn.study import stages as run
from hf_linear_attn.study.convert import convert, finetune
from hf_linear_attn.training.resumable import InterruptedRunError
from hf_linear_attn.utils import progress
from tests.training.tiny_runs import convert_config, finetune_config, quiet, weights


@pytest.mark.parametrize("moment", ["load_task_data", "_speed", "model_card"])
def test_a_signal_in_any_stage_says_what_is_stored(
    moment: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reading, timing or writing there is no checkpoint: what was finished before is kept."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    changes = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "speed__lengths": [16]}
    config = convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes)
    with monkeypatch.context() as patch:
        module = run if moment == "load_task_data" else stages
        patch.setattr(module, moment, lambda *args, **options: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(InterruptedRunError, match=r"Interrupted while \w+.*Stored: .*--resume") as caught:
            convert(config, console=quiet())
    assert signal.signal(signal.SIGTERM, previous) is signal.SIG_DFL
    assert caught.value.code == 128 + signal.SIGTERM
    if moment == "load_task_data":
        assert "no finished stage" in str(caught.value)
        assert not (tmp_path / "out").exists()
        return
    assert "transfer, transferred, distill, distilled" in str(caught.value)
    screen = io.StringIO()
    convert(replace(config, resume=True), console=Console(file=screen, width=200))
    assert "distill: step" not in screen.getvalue()
    assert (tmp_path / "out" / "model" / "README.md").is_file()


@pytest.mark.slow
def test_a_long_stage_says_so_every_minute(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    original = stages._speed

    def slow(*args: Any) -> Any:
        time.sleep(2.5)
        return original(*args)

    monkeypatch.setattr(stages, "_speed", slow)
    screen = io.StringIO()
    changes = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "speed__lengths": [16]}
    config = convert_config(folder / "tuned", folder / "task", tmp_path / "out", **changes)
    convert(config, console=Console(file=screen, width=200))
    assert "\n... measuring speed, for 0 min\n" in screen.getvalue()
    assert re.search(r"About \d+ s of training: 1 steps of attention transfer and 1 of distillation", screen.getvalue())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize(("capability", "is_slow"), [("AVX2", True), ("AVX512", False)])
def test_bf16_without_a_gpu_needs_no_further_option(
    capability: str, is_slow: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    changes: dict[str, Any] = {"device": "auto", "bf16": True, "train__max_steps": 1}
    screen = io.StringIO()
    config = finetune_config(folder / "encoder", folder / "task", tmp_path / "out", **changes)
    finetune(config, console=Console(file=screen, width=200))
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert ("bf16: this processor has no AVX-512" in screen.getvalue()) == is_slow


@pytest.mark.slow
def test_runs_of_one_process_may_differ_in_precision(folder: Path, tmp_path: Path) -> None:
    """accelerate remembers the precision of the first one; no state of the process is reset here."""
    steps = {"teacher__max_steps": None, "transfer__max_steps": 1, "distill__max_steps": 1, "device": "auto"}
    for name, half in (("full", False), ("half", True), ("again", False)):
        config = convert_config(folder / "tuned", folder / "task", tmp_path / name, bf16=half, **steps)
        assert convert(config, console=quiet()).scores.distilled
    assert weights(tmp_path / "full") == weights(tmp_path / "again") != weights(tmp_path / "half")
