"""What a measurement would take, and which lengths are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_linear_attn.study import timing
from hf_linear_attn.study.timing import lengths_to_show


def measured(label: str, **metrics: float) -> list[dict[str, Any]]:
    return [{"label": label, "metric": metric, "value": value} for metric, value in metrics.items()]


def test_a_measurement_without_enough_memory_or_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At twice the length: 8 (2² · 2 + 2 · 1) s, and 2² · 100 bytes of the larger model, or two caches of 2 · 75."""
    rows = measured("exact", seconds=2.0, peak_memory=100) + measured("elu", seconds=1.0)
    caches = measured("exact", cache_bytes=75) + measured("elu", cache_bytes=75)
    device = torch.device("cpu")

    def reason(rows: list[dict[str, Any]], free: int | None, seconds: float = 10.0) -> str | None:
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


def test_lengths_to_show_are_spread_and_have_the_own_one() -> None:
    assert lengths_to_show([128, 256, 512, 1024, 2048, 4096, 8192], 1024) == [128, 512, 1024, 2048, 8192]
    assert lengths_to_show([16], 16) == [16]
    assert lengths_to_show([], 16) == []
