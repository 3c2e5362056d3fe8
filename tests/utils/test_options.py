"""The check of options: types, bounds, and the option that an error names."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from hf_linear_attn.utils.options import (
    OptionError,
    check_exclusive,
    check_options,
    check_value,
    flatten,
    make_config,
    option,
)


@dataclass(frozen=True)
class Options:
    count: int = option(1, "a count", least=1)
    share: float = option(0.5, "a share", above=0, below=1)
    rate: float | None = option(None, "a rate", above=0)
    name: str | None = option(None, "a name")
    mode: Literal["a", "b"] = option("a", "a mode")
    lengths: tuple[int, ...] = option((1, 2), "lengths", least=1)
    fast: bool = option(False, "fast")
    settings: dict[str, Any] = option(factory=dict, help="settings")
    other: int = field(default=-1, metadata={"help": "a field of another library, which is not checked"})

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 0, "must be a whole number of at least 1, got 0."),
        ("count", 1.5, "must be a whole number of at least 1, got 1.5."),
        ("count", True, "must be a whole number of at least 1, got True."),
        ("count", None, "must be a whole number of at least 1, got None."),
        ("share", 1, "must be a finite number above 0 and below 1, got 1."),
        ("share", math.nan, "must be a finite number above 0 and below 1, got nan."),
        ("rate", math.inf, "must be a finite number above 0, got inf."),
        ("rate", "fast", "must be a finite number above 0, got 'fast'."),
        ("name", 3, "must be text, got 3."),
        ("mode", "c", "must be one of 'a', 'b', got 'c'."),
        ("lengths", 3, "must be a list, each entry a whole number of at least 1, got 3."),
        ("lengths", "12", "must be a list, each entry a whole number of at least 1, got '12'."),
        ("lengths", (3, 0), "must be a list, each entry a whole number of at least 1, got (3, 0)."),
        ("lengths", (3, 3), "has an entry twice: 3, 3."),
        ("fast", 1, "must be true or false, got 1."),
        ("settings", "a", "must be a mapping such as {key: value}, got 'a'."),
    ],
)
def test_a_bad_value_is_an_error_of_its_option(name, value, text):
    with pytest.raises(OptionError) as caught:
        Options(**{name: value})
    assert (caught.value.field, caught.value.text) == (name, text)
    assert str(caught.value) == f"{name}: {text}"


def test_good_values():
    Options(count=np.int64(3), share=np.float32(0.25), rate=2, name=Path("a"), lengths=[5, 6], settings={"a": 1})
    check_value("steps", None, int | None, least=1)
    with pytest.raises(OptionError, match=r"^steps: "):
        check_value("steps", 0, int | None, least=1)


def test_exclusive():
    check_exclusive(Options(), "fast", "name")
    with pytest.raises(OptionError, match=r"^fast: excludes name\. Give only one of them\."):
        check_exclusive(Options(fast=True, name="a"), "fast", "name")


def test_an_error_survives_another_process():
    error = pickle.loads(pickle.dumps(OptionError("data.task", "is unknown.")))
    assert (type(error), error.field, str(error)) == (OptionError, "data.task", "data.task: is unknown.")


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {"a.b.c": 1, "a.d": {}, "e": [2]}


@dataclass(frozen=True)
class MoreOptions(Options):
    more: int = option(1, "an option of the subclass")


def test_a_config_of_a_subclass_gives_what_it_shares() -> None:
    config = make_config(Options, MoreOptions(count=3, more=2), {"share": 0.25})
    assert config == Options(count=3, share=0.25)


def test_a_path_is_text() -> None:
    assert make_config(Options, None, {"name": Path("a") / "b"}).name == "a/b"
    assert make_config(Options, Options(name=Path("a")), {"count": 2}).name == "a"  # type: ignore[arg-type]


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"no option 'cuont'. Did you mean 'count'\?"):
        make_config(Options, None, {"cuont": 2})
