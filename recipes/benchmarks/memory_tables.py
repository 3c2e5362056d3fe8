"""Tables of memory."""

from __future__ import annotations

from typing import Any

from .tables import Table, amount, grid, kinds, times


def memory_tables(report: dict[str, Any]) -> list[Table]:
    found = []
    for kind, rows in kinds(report["sections"]["memory"], "what", "shape", "direction", "pass").items():
        told = f"{kind[0]}, {kind[2]}, {kind[3].replace('+', ' + ')}, float32 ({kind[1]})"
        found.append(
            grid(
                f"Peak extra memory: {told}",
                rows,
                "length",
                lambda row: f"{amount(row['bytes'])} ({times(row['to_output'])})",
                caption="Beyond what was held before the call, the output included; in brackets: over the bytes of the "
                "output. What is smaller than a few hundred kilobytes is noise.",
                section="memory",
            )
        )
    return found
