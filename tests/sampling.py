"""The quick subset of tests that are parametrized over mechanisms and models: a sample of each, marked by collection.

A test over every mechanism and every family has up to a hundred cases, and most of what they find, a few of them find.
`mark_all_but_a_sample` marks the other cases of each test as slow. Which ones stay rotates from test to test, so that
together they cover every mechanism and every family. `pytest -m "slow or not slow"` runs all of them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

#: A test with at most so many cases keeps all of them.
SMALL = 3


def mark_all_but_a_sample(items: list[pytest.Item], folder: Path, every: int) -> None:
    """Mark as slow all but each n-th case of every test in a folder.

    Args:
        items: All collected tests.
        folder: The tests to choose from.
        every: n; at least one case of each test stays.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if folder in item.path.parents:
            cases[item.nodeid.partition("[")[0]].append(item)
    for number, name in enumerate(cases):
        group = cases[name]
        if len(group) <= SMALL:
            continue
        step = min(every, len(group))
        for index, item in enumerate(group):
            if index % step != number % step:
                item.add_marker(pytest.mark.slow)
