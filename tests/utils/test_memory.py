"""Memory at its peak against what was allocated, and what is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hf_linear_attn.utils import memory
from hf_linear_attn.utils.memory import free_memory, peak_memory

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells of peaks on Linux only")
@pytest.mark.parametrize("megabytes", [20, 80])
def test_peak_is_what_was_allocated_and_passed_back(megabytes: int) -> None:
    count = megabytes * 10**6 // 4

    def call() -> None:
        buffer = torch.ones(count)
        buffer.add_(1)

    for _ in range(2):  # a second call finds no freed memory to hide in
        result = peak_memory(call, CPU)
        if result is None:
            pytest.skip("/proc/self/clear_refs cannot be written here")
        assert result == pytest.approx(megabytes * 10**6, rel=0.15)


@pytest.mark.slow
def test_peak_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_peak", lambda: False)
    assert peak_memory(lambda: None, CPU) is None


def test_free_memory_is_what_the_system_or_the_group_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  5 kB\n")
    for name, text in (("max", "6000"), ("current", "4000"), ("stat", "anon 1\ninactive_file 500\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path / "none")
    assert free_memory(CPU) == 5 * 1024
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    assert free_memory(CPU) == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == 5 * 1024
    (tmp_path / "meminfo").unlink()
    assert free_memory(CPU) is None
