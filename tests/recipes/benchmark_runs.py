"""Small runs of the benchmark, for its tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.benchmarks.options import BenchmarkOptions
from recipes.benchmarks.runner import run_benchmark

SMALL: dict[str, Any] = {
    "quick": True,
    "heads": 2,
    "head_dim": 8,
    "seconds": 0.001,
    "lengths": (16, 24),
    "contexts": (16, 24),
    "model_lengths": (16,),
    "memory_lengths": (64,),
    "attention": ("elu", "linformer"),
    "peers": False,
}


def run(output: Path, width: int = 180, model: Path | None = None, **changes: Any) -> tuple[dict[str, Any], str, int]:
    """The report, the screen, the exit code. model: a checkpoint in place of the shapes."""
    stream = io.StringIO()
    options = BenchmarkOptions(**{**SMALL, "output": str(output), **changes})
    report, code = run_benchmark(
        options, None if model is None else str(model), console=Console(file=stream, width=width)
    )
    return report, stream.getvalue(), code
