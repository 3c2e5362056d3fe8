"""The sample of the quick suite: its share of every test, and what may move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import entries, serves
from tests.sampling import SMALL, mark_all_but_a_sample, sample
from tests.tiny_models import FAMILIES

FOLDER = Path("tests/matrix")
NAMES = st.sets(st.text("abcdefgh-", min_size=1, max_size=12), min_size=1, max_size=60)


class Case:
    """As much of a `pytest.Item` as the sampler reads."""

    def __init__(self, name: str, folder: Path = FOLDER, slow: bool = False) -> None:
        self.nodeid, self.path = f"{folder}/test_it.py::{name}", folder / "test_it.py"
        self.markers = ["slow"] * slow

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(name=name) if name in self.markers else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker.name)


def quick(cases: Sequence[Any], every: int = 4) -> list[str]:
    mark_all_but_a_sample(list(cases), FOLDER, every)
    return [case.nodeid for case in cases if not case.markers]


def a_test(name: str, count: int) -> list[Case]:
    return [Case(f"{name}[{index}]") for index in range(count)]


@given(NAMES, st.integers(1, 20))
def test_the_share_is_the_requested_one_and_never_zero(names, every):
    chosen = sample(names, every)
    assert chosen <= names
    assert chosen
    if len(names) <= SMALL:
        assert chosen == names
    else:
        assert len(names) / every <= len(chosen) < len(names) / every + 1


@given(NAMES, st.text("ijk", min_size=1), st.integers(1, 20))
def test_a_new_case_moves_the_sample_of_its_test_by_one_case_at_most(names, new, every):
    before, after = sample(names, every), sample(names | {new}, every)
    if len(names) != SMALL:  # with one more, it is no longer kept whole
        assert len(before - after) <= 1
        assert len(after - before) <= 1


def test_each_test_has_its_share_and_keeps_it_when_tests_are_added_or_reordered():
    tests: list[Callable[[], list[Case]]] = [lambda n=n: a_test(f"test_{n}", n) for n in (1, 3, 4, 12, 13, 100)]
    single = [quick(test()) for test in tests]
    assert [len(chosen) for chosen in single] == [1, 3, 1, 3, 4, 25]
    together = quick([case for test in reversed(tests) for case in reversed(test())])
    assert sorted(together) == sorted(name for chosen in single for name in chosen)


def test_the_sample_is_the_same_in_every_process():
    """By `printf NAME | sha256sum`, sorted."""
    assert quick(a_test("test_it", 12)) == [f"tests/matrix/test_it.py::test_it[{index}]" for index in (0, 3, 10)]


def test_cases_that_are_slow_by_themselves_do_not_stand_for_a_test():
    cases = [Case(f"test_it[{index}]", slow=index != 7) for index in range(9)]
    assert quick(cases) == [cases[7].nodeid]


def test_other_folders_are_not_sampled():
    cases = [Case(f"test_it[{index}]", Path("tests/ops")) for index in range(9)]
    assert quick(cases) == [case.nodeid for case in cases]


def test_the_samples_of_some_tests_cover_every_mechanism_and_family():
    """Forty tests over every pair, of which each keeps one pair in twelve."""
    pairs = {(entry.name, str(family)) for entry in entries() for family in FAMILIES if serves(entry, family.causal)}
    chosen: set[str] = set()
    for test in range(40):
        chosen |= {name.partition("[")[2] for name in sample([f"{test}[{name} {family}" for name, family in pairs], 12)}
    assert {name.split()[0] for name in chosen} == {name for name, _ in pairs}
    assert {name.split()[1] for name in chosen} == {family for _, family in pairs}
