"""Small runs of the benchmarks, for their tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.benchmarks.__main__ import benchmark_of
from recipes.benchmarks.runner import run_benchmark

#: The shape of attention by itself.
SMALL: dict[str, Any] = {"heads": 2, "head_dim": 8}


def rows_of(name: str, output: Path, /, **options: Any) -> list[dict[str, Any]]:
    """Run a benchmark in a folder and return its rows."""
    return run_benchmark(name, benchmark_of(name), options, output)["rows"]
