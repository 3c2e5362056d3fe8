"""Command-line flags from a dataclass, and the demo's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hf_linear_attn.cli import main
from hf_linear_attn.cli_fields import add_flags, from_arguments


@dataclass(frozen=True)
class Options:
    output: Path = field(default=Path("report"), metadata={"help": "folder, 100 % yours"})
    steps: int = field(default=10, metadata={"help": "steps"})
    rate: float | None = field(default=None, metadata={"help": "rate"})
    quick: bool = field(default=False, metadata={"help": "quick"})
    plots: bool = field(default=True, metadata={"help": "plots"})
    mode: Literal["a", "b"] = field(default="a", metadata={"help": "mode"})
    lengths: tuple[int, ...] = field(default=(1, 2), metadata={"help": "lengths"})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be positive, got {self.steps}.")


def test_flags_from_a_dataclass() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    shown = " ".join(parser.format_help().split())
    assert "folder, 100 % yours (default: report)" in shown
    assert "default: None" not in shown
    assert from_arguments(Options, parser.parse_args([])) == Options()
    given = [
        "--output",
        "x",
        "--steps",
        "3",
        "--rate",
        "0.5",
        "--quick",
        "--no-plots",
        "--mode",
        "b",
        "--lengths",
        "4",
        "5",
        "6",
    ]
    expected = Options(Path("x"), 3, 0.5, True, False, "b", (4, 5, 6))
    assert from_arguments(Options, parser.parse_args(given)) == expected
    with pytest.raises(ValueError, match="steps must be positive"):
        from_arguments(Options, parser.parse_args(["--steps", "0"]))


def test_demo_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    demo = pytest.importorskip("hf_linear_attn.demo")
    seen = []
    monkeypatch.setattr(demo, "run_demo", seen.append)
    assert main(["demo"]) == 0
    assert seen == [demo.DemoOptions()]
    assert main(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in cli_fields_of(demo.DemoOptions):
        assert f"--{option.replace('_', '-')}" in shown


def cli_fields_of(options: type) -> list[str]:
    return [name for name, entry in options.__dataclass_fields__.items() if entry.init]
