"""The limits that the fields of options carry."""

from __future__ import annotations

import re
from typing import Literal

import pytest

from hf_linear_attn.feature_maps.base import Options
from hf_linear_attn.utils.options import option


class Example(Options):
    count: int = option(1, "a positive integer", least=1)
    size: int | None = option(None, "an integer from 0 on", least=0)
    pairs: int = option(2, "an even number", least=0, parity="even")
    share: float = option(0.5, "a half-open interval", least=0, below=1)
    decay: float = option(0.5, "open at the other end", above=0, most=1)
    scale: float | None = option(None, "positive", above=0)
    bias: float = option(0.0, "finite")
    kind: Literal["a", "b", "c"] = option("a", "one of three")
    other: Literal["a", "b"] = option("a", "one of two")


def test_the_ends_of_the_intervals():
    assert Example(count=1, size=0, share=0, decay=1, scale=1e-9, bias=-3, kind="c", other="b").decay == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "count must be a whole number of at least 1, got 0."),
        ("count", True, "count must be a whole number of at least 1, got True."),
        ("count", None, "count must be a whole number of at least 1, got None."),
        ("size", -1, "size must be a whole number of at least 0, got -1."),
        ("pairs", 3, "pairs must be an even whole number of at least 0, got 3."),
        ("share", 1, "share must be a finite number of at least 0 and below 1, got 1."),
        ("share", "half", "share must be a finite number of at least 0 and below 1, got 'half'."),
        ("share", float("nan"), "share must be a finite number of at least 0 and below 1, got nan."),
        ("decay", 0, "decay must be a finite number above 0 and of at most 1, got 0."),
        ("scale", 0.0, "scale must be a finite number above 0, got 0.0."),
        ("bias", float("inf"), "bias must be a finite number, got inf."),
        ("kind", "d", "kind must be one of 'a', 'b', 'c', got 'd'."),
        ("other", "c", "other must be one of 'a', 'b', got 'c'."),
    ],
)
def test_values_outside_of_the_limits(name, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Example(**{name: value})
