"""The order in which layers are converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Divergence = Callable[[Sequence[int]], float | None]
"""How far the outputs move from the exact model's if these layers are converted; None: not a number."""


def ranked(layers: Sequence[int], divergence: Divergence) -> list[int]:
    """By the damage that each layer does alone, the least first. `n` measurements."""
    return sorted(layers, key=lambda layer: (_value(divergence([layer])), layer))


def greedy(layers: Sequence[int], divergence: Divergence) -> list[int]:
    """Next is always the layer that does the least damage beside those converted already. `n(n + 1) / 2` measured."""
    path: list[int] = []
    left = sorted(layers)
    while left:
        # Nothing is to be decided about the last one.
        best = left[0] if len(left) == 1 else min(left, key=lambda layer: (_value(divergence([*path, layer])), layer))
        path.append(best)
        left.remove(best)
    return path


SEARCHES: dict[str, Callable[[Sequence[int], Divergence], list[int]]] = {"rank": ranked, "greedy": greedy}


def effort(search: str, count: int) -> int:
    """Measurements that a search makes of `count` layers, the walk along its path included."""
    return 2 * count - 1 if search == "rank" else count * (count + 1) // 2


def _value(divergence: float | None) -> float:
    return math.inf if divergence is None or math.isnan(divergence) else divergence
