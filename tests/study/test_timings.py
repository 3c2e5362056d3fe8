"""What a measurement would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_linear_attn.study import timing


def test_a_measurement_without_enough_memory_or_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At twice the length: 8 (2² · 2 + 2 · 1) s, and 2² · 100 bytes of the larger model, or two caches of 2 · 75."""
    rows = {"exact": {"seconds": 2.0, "peak_memory": 100}, "elu": {"seconds": 1.0}}
    caches = {"exact": {"cache_bytes": 75}, "elu": {"cache_bytes": 75}}
    device = torch.device("cpu")

    def reason(rows: dict[str, Any], free: int | None, seconds: float = 10.0) -> str | None:
        monkeypatch.setattr(timing, "free_memory", lambda device: free)
        quadratic = set() if rows is caches else {"seconds", "peak_memory"}
        return timing.reason_to_skip(rows, 2, seconds, device, quadratic)

    assert reason(rows, 501) is None
    assert reason(rows, 499) == "it would need about 400 B, and 499 B are free"
    assert (reason(caches, 376), reason(caches, 374)) == (None, "it would need about 300 B, and 374 B are free")
    assert reason(rows, None, 0.0) is None
    monkeypatch.setattr(timing, "LONGEST_WAIT", 1.0)
    assert reason(rows, None, 1.0) == "it would take about 80 s"
    assert reason(rows, None, 6.0) is None
