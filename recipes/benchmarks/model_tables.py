"""Tables of whole models."""

from __future__ import annotations

from typing import Any

from .bench import BASELINE
from .options import FREE
from .tables import Row, Table, grid, kinds, seconds, times


def model_tables(report: dict[str, Any]) -> list[Table]:
    tables = []
    for kind, rows in kinds(report["sections"]["model"], "model", "dtype").items():
        setting = f"{kind[0]}, {kind[1]}, forward, batch 1"
        tables.append(
            grid(
                f"Speedup over {BASELINE}: {setting}",
                rows,
                "length",
                _speedup,
                caption=f"The row {BASELINE} shows times; {FREE}: the model without attention, the highest speedup.",
                section="model",
            )
        )
        tables.append(
            grid(
                f"Share of the ceiling reached: {setting}",
                [row for row in rows if row["name"] != FREE],
                "length",
                lambda row: f"{100 * row['ceiling_share']['median']:.0f} %",
                section="model",
            )
        )
    return tables


def _speedup(row: Row) -> str:
    if row["name"] == BASELINE:
        return seconds(row["seconds"]["median"])
    value = row["speedup"]["median"]
    return f"{value:.2f}" if value < 9.95 else times(value)
