"""Several conversions that differ in their seed: mean and spread of what was measured on each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def mean_of(found: Sequence[Any]) -> Any:
    """Nested data of one shape, number by number: the mean; of anything else the first. None where one is None."""
    first = found[0]
    if len(found) == 1:
        return first
    if isinstance(first, Mapping):
        return {name: mean_of([held[name] for held in found]) for name in first}
    if isinstance(first, list):
        return [mean_of(list(held)) for held in zip(*found, strict=True)]
    if any(held is None for held in found):
        return None
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return first if all(held == first for held in found) else statistics.fmean(found)
    return first


def spread_of(found: Sequence[Any]) -> Any:
    """The same shape with sample standard deviations (`n - 1`), without lists and what is no number; None for one."""
    first = found[0]
    if len(found) < 2:
        return None
    if isinstance(first, Mapping):
        spreads = {name: spread_of([held[name] for held in found]) for name in first}
        return {name: held for name, held in spreads.items() if held is not None}
    if any(isinstance(held, bool) or not isinstance(held, (int, float)) for held in found):
        return None
    return statistics.stdev(found)
