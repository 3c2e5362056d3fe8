"""The values of a measurement: rows of a tidy table."""

from collections.abc import Callable
from typing import Any

Values = list[dict[str, Any]]
"""Rows with `metric`, `value` and perhaps other columns, such as `stderr` or `layer`."""

Measure = Callable[..., Values]
"""`measure(model, on_batch=report_nothing)` measures a model; `on_batch` is called with the rows done and all rows."""


def value(metric: str, number: float | None, **columns: Any) -> dict[str, Any]:
    """Return one row."""
    return {"metric": metric, "value": number, **columns}
