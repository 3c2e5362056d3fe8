"""The quick subset of this folder (see `tests/sampling.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import mark_all_but_a_sample


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_all_but_a_sample(items, Path(__file__).parent, every=6)
