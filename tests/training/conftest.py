"""Shared by the tests of training."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hf_linear_attn.study.conversion_result import ConversionResult
from hf_linear_attn.study.convert import convert
from tests.training.tiny_runs import convert_config, save_encoder, save_inputs, save_task


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_inputs(tmp_path_factory.mktemp("training"))
    save_encoder(root / "tuned", head=True)
    save_task(root / "scores", scores=True)
    return root


@pytest.fixture(scope="session")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ConversionResult, str]:
    """One conversion that learns its task, its results, and what it said."""
    out = tmp_path_factory.mktemp("converted") / "out"
    screen = io.StringIO()
    config = convert_config(
        folder / "encoder",
        folder / "task",
        out,
        teacher__max_steps=60,
        distill__max_steps=40,
        save_steps=20,
        speed__lengths=[16, 32],
        report_to=["tensorboard"],
    )
    return out, convert(config, console=Console(file=screen, width=200)), screen.getvalue()
