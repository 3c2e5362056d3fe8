"""Fixtures of the evaluation's tests."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import pandas as pd  # noqa: F401
import pytest

from hf_linear_attn.study import evaluate, report  # noqa: F401
from hf_linear_attn.utils import timing


@pytest.fixture(scope="session", autouse=True)
def coarse_plots() -> Iterator[None]:
    """Nobody looks at the plots of a test, and their pixels take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "DPI", 30)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_timings() -> Iterator[None]:
    """No test reads a time, so the fewest rounds that a summary needs are enough, of one call each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MIN_SAMPLE_SECONDS", 0.0)
        patch.setitem(timing.sample_interleaved.__kwdefaults__, "max_rounds", timing.MIN_ROUNDS)
        yield
