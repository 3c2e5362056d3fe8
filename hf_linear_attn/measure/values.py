"""The values of a measurement: rows of a tidy table."""

from typing import Any

Values = list[dict[str, Any]]
"""Rows with `metric`, `value` and perhaps other columns, such as `stderr` or `layer`."""


def value(metric: str, number: float | None, **columns: Any) -> dict[str, Any]:
    """Return one row."""
    return {"metric": metric, "value": number, **columns}
