"""The measures at sizes that take seconds. `python -m recipes.quality_assurance.endurance` takes them to the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.endurance import measures
from tests.helpers import BERT, LLAMA, every_mechanism, every_pair

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason=f"{sys.platform} does not tell the memory of a process in /proc"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_mechanism(causal=True)
def test_errors_do_not_grow_along_a_stream(name: str, dtype: torch.dtype) -> None:
    found = measures.drift(name, dtype, 8 * measures.PIECE)
    assert found["kept"], found


@needs_proc
@pytest.mark.parametrize("name", ["hedgehog", "window", "gla"])
def test_decoding_keeps_no_memory(name: str) -> None:
    for found in measures.decoding(name, 300, 50):
        assert found["kept"], found


@needs_proc
@pytest.mark.parametrize("name", ["hedgehog", "favor+", "linformer"])
def test_patching_and_unpatching_keeps_no_memory(name: str) -> None:
    for found in measures.rounds(name, 50):
        assert found["kept"], found


@pytest.mark.parametrize("name", ["favor+", "hedgehog"])
def test_the_same_numbers_in_another_process(name: str) -> None:
    found = measures.in_other_processes(name, 1)
    assert found["kept"], found


@every_pair((BERT, LLAMA))
def test_rows_do_not_depend_on_their_batch(name: str, family: measures.Family) -> None:
    found = measures.batches(name, family)
    assert found["kept"], found


def test_two_models_in_two_threads() -> None:
    found = measures.threads("hedgehog", "window", 3)
    assert found["kept"], found


@every_mechanism(causal=True)
def test_deterministic_algorithms_are_enough(name: str) -> None:
    """Nothing that torch has only a non-deterministic form of is used, forward or backward."""
    assert measures.trained_bytes(name, deterministic=True) == measures.trained_bytes(name)
