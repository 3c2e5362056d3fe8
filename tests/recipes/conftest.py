"""The tests of this folder need the repository's recipes, which an installed package does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_linear_attn.registry import ATTENTIONS, FEATURE_MAPS

if (Path(__file__).resolve().parents[2] / "recipes").is_dir():
    from recipes import helix  # noqa: F401

    # Other tests are of the mechanisms of the package.
    HELIX = FEATURE_MAPS.get("helix")
    for _registry in (FEATURE_MAPS, ATTENTIONS):
        _registry.discard("helix")
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def with_helix() -> Iterator[None]:
    """Let the map of `recipes/helix.py` be registered."""
    FEATURE_MAPS.add("helix", HELIX)
    yield
    for registry in (FEATURE_MAPS, ATTENTIONS):
        registry.discard("helix")
