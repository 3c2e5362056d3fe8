"""Parameters of tests that only the slow or the long suite runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Mark values of a parametrized test as slow: the quick suite runs the other values."""
    return [pytest.param(value, marks=pytest.mark.slow, id=str(value)) for value in values]


def slow_rows(*rows: tuple[Any, ...]) -> list[Any]:
    """Mark rows of several parameters as slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def long(*rows: Any) -> list[Any]:
    """Mark values, or rows of several parameters, as long."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]
