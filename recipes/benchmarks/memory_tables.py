"""Tables of memory."""

from __future__ import annotations

from typing import Any

from .tables import Table, grid, kinds, optional_bytes, times


def memory_tables(report: dict[str, Any]) -> list[Table]:
    tables = []
    for kind, rows in kinds(report["sections"]["memory"], "what", "shape", "direction", "pass").items():
        setting = f"{kind[0]}, {kind[2]}, {kind[3].replace('+', ' + ')}, float32 ({kind[1]})"
        tables.append(
            grid(
                f"Peak extra memory: {setting}",
                rows,
                "length",
                lambda row: f"{optional_bytes(row['bytes'])} ({times(row['to_output'])})",
                caption="Beyond what was held before the call, the output included; in brackets: over the bytes of the "
                "output. What is smaller than a few hundred kilobytes is noise.",
                section="memory",
            )
        )
    return tables
