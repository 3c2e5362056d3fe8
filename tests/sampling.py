"""The quick subset of tests that are parametrized over mechanisms and models: a sample of each, marked by collection.

A test over every mechanism and every family has up to a hundred cases, and most of what they find, a few of them find.
`mark_all_but_a_sample` marks the other cases of each test as slow. A hash of a case's name decides, so that the tests
differ in what they keep and together cover every mechanism and every family, and so that a new test leaves the samples
of the others as they are. `pytest -m "slow or not slow"` runs all cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

import pytest

#: A test with at most so many cases keeps all of them.
SMALL = 3


def sample(names: Collection[str], every: int) -> set[str]:
    """The `ceil(len(names) / every)` names with the smallest hashes, or all of a few.

    A further name moves the sample by one name at most, unless it is the one that makes a few names too many.
    """
    count = len(names) if len(names) <= SMALL else -(-len(names) // every)
    return set(sorted(names, key=lambda name: sha256(name.encode()).digest())[:count])


def mark_all_but_a_sample(items: list[pytest.Item], folder: Path, every: int) -> None:
    """Mark as slow all but one in n cases of every test in a folder.

    Args:
        items: All collected tests. Those that are slow or long by themselves are not chosen from.
        folder: The tests to choose from.
        every: n; at least one case of each test stays.
    """
    cases: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if folder in item.path.parents and not any(map(item.get_closest_marker, ("slow", "long"))):
            cases[item.nodeid.partition("[")[0]][item.nodeid] = item
    for group in cases.values():
        for name in group.keys() - sample(group, every):
            group[name].add_marker(pytest.mark.slow)
