"""The limits that the fields of options carry."""

from __future__ import annotations

import re
from typing import Literal

import pytest

from hf_linear_attn.feature_maps.base import Options, option


class Example(Options):
    count: int = option(1, "a positive integer", least=1)
    size: int | None = option(None, "an integer from 0 on", least=0)
    pairs: int = option(2, "an even number", least=0, parity="even")
    share: float = option(0.5, "a half-open interval", within="[0, 1)")
    decay: float = option(0.5, "open at the other end", within="(0, 1]")
    scale: float | None = option(None, "positive", within="(0, inf)")
    bias: float = option(0.0, "finite", within="(-inf, inf)")
    kind: Literal["a", "b", "c"] = option("a", "one of three")
    other: Literal["a", "b"] = option("a", "one of two")


def test_the_ends_of_the_intervals():
    assert Example(count=1, size=0, share=0, decay=1, scale=1e-9, bias=-3, kind="c", other="b").decay == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be a positive integer, got 0."),
        ("count", True, "count must be a positive integer, got True."),
        ("count", None, "count must be a positive integer, got None."),
        ("size", -1, "size must be a non-negative integer or None, got -1."),
        ("pairs", 3, "pairs must be a non-negative even integer, got 3."),
        ("share", 1, "share must lie in [0, 1), got 1."),
        ("share", "half", "share must lie in [0, 1), got 'half'."),
        ("share", float("nan"), "share must lie in [0, 1), got nan."),
        ("decay", 0, "decay must lie in (0, 1], got 0."),
        ("scale", 0.0, "scale must be positive or None, got 0.0."),
        ("bias", float("inf"), "bias must be finite, got inf."),
        ("kind", "d", "kind must be 'a', 'b' or 'c', got 'd'."),
        ("other", "c", "other must be 'a' or 'b', got 'c'."),
    ],
)
def test_values_outside_of_the_limits(name, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Example(**{name: value})
