"""Shared by the tests of training."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _freeze_imported_objects() -> Iterator[None]:
    """The Trainer collects garbage at the end of each training. Looking through all of torch would take most of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
