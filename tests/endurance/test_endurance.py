"""What must not grow, drift or differ: at sizes that take seconds, and at full length under the marker `long`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import every_mechanism, every_pair
from tests.endurance import measures
from tests.slow_cases import long, slow
from tests.tiny_models import BERT, LLAMA

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason=f"{sys.platform} has no memory of processes in /proc"
)

#: The state of linformer-causal grows by declaration, and its time with it.
MAX_TOKENS = {"linformer-causal": 16 * measures.CHUNK}

Check = Callable[..., None]


def sizes(short: int, full: int) -> Any:
    """Parametrize a test over `size`: a short one and the full one, which takes minutes."""
    return pytest.mark.parametrize("size", [short, pytest.param(full, marks=pytest.mark.long)])


@pytest.fixture
def check(record_property: Any) -> Check:
    """Record rows for the table of `recipes.quality_assurance.marked_tests endurance`, and require their limits."""

    def check_rows(*rows: measures.Row) -> None:
        for row in rows:
            record_property("row", json.dumps(row))
        assert all(row["within_limit"] for row in rows), rows

    return check_rows


@sizes(8 * measures.CHUNK, 100 * measures.CHUNK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_mechanism(causal=True)
def test_errors_do_not_grow_along_a_stream(name: str, dtype: torch.dtype, size: int, check: Check) -> None:
    check(measures.drift(name, dtype, min(size, MAX_TOKENS.get(name, size))))


@needs_proc
@sizes(300, 10_000)
@pytest.mark.parametrize("name", ["window", *slow("hedgehog", "gla")])
def test_decoding_leaves_no_memory(name: str, size: int, check: Check) -> None:
    check(*measures.decoding(name, size, 50))


@pytest.mark.slow
@needs_proc
@sizes(50, 1_000)
@pytest.mark.parametrize("name", ["hedgehog", *long("favor+", "linformer")])
def test_patching_and_unpatching_leaves_no_memory(name: str, size: int, check: Check) -> None:
    check(*measures.rounds(name, size))


@sizes(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", *long("favor+", "hedgehog", "gla")])
def test_the_same_numbers_in_another_process(name: str, size: int, check: Check) -> None:
    check(measures.in_other_processes(name, size))


@sizes(8, 32)
@every_pair((BERT, LLAMA))
def test_rows_do_not_depend_on_their_batch(name: str, family: measures.Family, size: int, check: Check) -> None:
    check(measures.batches(name, family, size))


@pytest.mark.slow
@sizes(3, 20)
def test_two_models_in_two_threads(size: int, check: Check) -> None:
    check(measures.threads("hedgehog", "window", size))


@every_mechanism(causal=True)
def test_deterministic_algorithms_are_enough(name: str) -> None:
    """Nothing that torch has only a non-deterministic form of is used, forward or backward."""
    assert measures.trained_bytes(name, deterministic=True) == measures.trained_bytes(name)
