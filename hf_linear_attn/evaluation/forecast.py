"""What a measurement would take, from what a smaller one took, and whether there is time and memory for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .formats import format_bytes
from .resources import free_memory
from .speed import LONGEST_WAIT

#: The share of the free memory that a measurement may be expected to need.
MEMORY_SHARE = 0.8

Growth = Callable[[str], float]
"""By how much the time of a row grows, by its name."""


@dataclass(frozen=True)
class Forecast:
    """seconds: of a warm-up and three rounds of all rows. bytes: of the row that needs most; None where unknown."""

    seconds: float
    bytes: float | None

    def refusal(self, budget: float, device: torch.device) -> tuple[str, str] | None:
        """What is wanting, and by how much; None where there is enough. budget: seconds for one length."""
        free = free_memory(device)
        if self.bytes is not None and free is not None and self.bytes > MEMORY_SHARE * free:
            return "memory", f"it would need about {format_bytes(self.bytes)}, {format_bytes(free)} are free"
        if self.seconds > max(15 * budget, LONGEST_WAIT):
            return "time", f"one length would take ~{self.seconds:.0f} s"
        return None


def forecast(rows: Mapping[str, Mapping[str, Any]], growth: Growth, memory: Growth) -> Forecast:
    """From rows with `median` and, where it was measured, `memory`, which grow by so much."""
    needed = [row["memory"] * memory(name) for name, row in rows.items() if row.get("memory")]
    seconds = 4 * sum(row["median"] * growth(name) for name, row in rows.items())
    return Forecast(seconds, max(needed, default=None))
