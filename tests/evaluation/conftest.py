"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Measuring memory collects garbage each time, which is slow unless what the modules hold is left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
