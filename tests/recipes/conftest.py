"""The tests of this folder need the repository's recipes, which an installed package does not have."""

from __future__ import annotations

from pathlib import Path

if not (Path(__file__).resolve().parents[2] / "recipes").is_dir():
    collect_ignore_glob = ["test_*.py"]
