"""The registries of attention mechanisms and feature maps: one registration carries all that the rest needs to know.

`register_attention` and `register_feature_map` are the whole extension interface. A package that registers its own
mechanism on import can be found without being imported by hand, through the entry point group `hf_linear_attn`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from .feature_maps.base import AttentionShape, FeatureMap
    from .mechanisms.base import LinearAttention

ENTRY_POINT_GROUP = "hf_linear_attn"

T = TypeVar("T")


def near_matches(name: str, names: list[str]) -> str:
    """A sentence that suggests close names, or an empty string."""
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in found)}?" if found else ""


class Registry(Generic[T]):
    """Name -> entry. Unknown names raise a ValueError with near matches; a name is never replaced silently."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._entry_points_loaded = False

    def add(self, name: str, entry: T) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"The name of {self.kind} must be a non-empty string, got {name!r}.")
        if name in self._entries:
            raise ValueError(f"{self.kind.capitalize()} {name!r} is already registered. Choose another name.")
        self._entries[name] = entry

    def discard(self, name: str) -> None:
        """Take a name out again (for tests and interactive work)."""
        self._entries.pop(name, None)

    def get(self, name: str) -> T:
        if not isinstance(name, str):
            raise TypeError(f"The name of {self.kind} must be a string, got {name!r} ({type(name).__name__}).")
        if name not in self._entries:
            self._load_entry_points()
        if name not in self._entries:
            known = sorted(self._entries)
            raise ValueError(f"Unknown {self.kind} {name!r}.{near_matches(name, known)} Available: {', '.join(known)}.")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[tuple[str, T]]:
        self._load_entry_points()
        return iter(list(self._entries.items()))

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = True
        _load_builtin()  # settings may be read before anything else of the package is imported
        for point in entry_points(group=ENTRY_POINT_GROUP):
            point.load()


@dataclass(frozen=True)
class AttentionEntry:
    """What is known of one mechanism. It feeds `list_attentions()`, the command line, the README's table, the tests."""

    name: str
    factory: Callable[..., LinearAttention]
    options: type
    description: str
    paper: str
    causal: bool
    bidirectional: bool
    learned: bool
    state: str
    cost: str
    advice: str
    #: What to use instead, for the direction that is missing.
    alternative: str = ""


@dataclass(frozen=True)
class FeatureMapEntry:
    """What is known of one feature map."""

    name: str
    cls: type[FeatureMap]
    options: type
    description: str
    paper: str
    learned: bool


ATTENTIONS: Registry[AttentionEntry] = Registry("attention mechanism")
FEATURE_MAPS: Registry[FeatureMapEntry] = Registry("feature map")


def register_attention(
    name: str,
    *,
    description: str,
    paper: str,
    options: type,
    causal: bool,
    bidirectional: bool,
    learned: bool,
    state: str = "none",
    cost: str = "",
    advice: str = "",
    alternative: str = "",
) -> Callable[[type], type]:
    """Class decorator: make a `LinearAttention` available as `patch_model(model, name)`.

    Args:
        name: the public name.
        description: one line, for lists.
        paper: reference, e.g. `"Author 2020, arXiv:2006.16236"`.
        options: frozen dataclass of the options with defaults; each field's `metadata["help"]` is shown to users.
        causal, bidirectional: the directions that it can compute.
        learned: whether it has parameters that attention transfer can train.
        state: `"constant"`, `"growing"` or `"none"` (no decoding).
        cost: time and memory, in the symbols L (length), m (features), d (head size), w (window), k (slots).
        advice: when to choose it, one line.
        alternative: the mechanism to name in the error for a direction that is missing.

    Raises:
        TypeError: `options` is not a dataclass, or the class is no `LinearAttention`.
        ValueError: the name is taken.
    """
    _check_options(options, name)

    def decorate(cls: type) -> type:
        from .mechanisms.base import LinearAttention

        if not issubclass(cls, LinearAttention):
            raise TypeError(f"register_attention({name!r}) decorates subclasses of LinearAttention, got {cls!r}.")
        ATTENTIONS.add(
            name,
            AttentionEntry(
                name, cls, options, description, paper, causal, bidirectional, learned, state, cost, advice, alternative
            ),
        )
        return cls

    return decorate


def register_feature_map(
    name: str,
    *,
    description: str,
    paper: str,
    options: type,
    learned: bool,
    cost: str = "O(L·m·d) time, O(m·d) state",
    advice: str = "",
) -> Callable[[type], type]:
    """Class decorator: make a `FeatureMap` available, also as the kernelized attention of the same name.

    Arguments as in `register_attention`. A feature map works in both directions and decodes with a constant state.
    """
    _check_options(options, name)

    def decorate(cls: type) -> type:
        from .feature_maps.base import FeatureMap

        if not issubclass(cls, FeatureMap):
            raise TypeError(f"register_feature_map({name!r}) decorates subclasses of FeatureMap, got {cls!r}.")
        if name in ATTENTIONS:
            raise ValueError(f"Attention mechanism {name!r} is already registered. Choose another name.")
        FEATURE_MAPS.add(name, FeatureMapEntry(name, cls, options, description, paper, learned))
        factory = partial(_kernelized, feature_map=cls)
        ATTENTIONS.add(
            name,
            AttentionEntry(name, factory, options, description, paper, True, True, learned, "constant", cost, advice),
        )
        return cls

    return decorate


def _kernelized(shape: AttentionShape, options: Any, feature_map: type[FeatureMap]) -> LinearAttention:
    from .mechanisms.kernelized import KernelizedAttention

    return KernelizedAttention(shape, options, feature_map)


def _check_options(options: type, name: str) -> None:
    if not (isinstance(options, type) and is_dataclass(options)):
        raise TypeError(f"The options of {name!r} must be a dataclass, got {options!r}.")


def build_options(entry: AttentionEntry | FeatureMapEntry, given: dict[str, Any]) -> Any:
    """The options dataclass of a mechanism from a dict; unknown names raise a ValueError with near matches."""
    known = [field.name for field in fields(entry.options)]
    for option in given:
        if option not in known:
            raise ValueError(
                f"Unknown option {option!r} for {entry.name!r}.{near_matches(str(option), known)} "
                f"Options: {', '.join(known) if known else 'none'}."
            )
    return entry.options(**given)


def list_attentions() -> dict[str, dict[str, Any]]:
    """All registered mechanisms, by name.

    Each holds description, paper, causal, bidirectional, learned, state, cost, advice and options.

    `options` maps each option to its default and help text.
    """
    _load_builtin()
    listing = {}
    for name, entry in sorted(ATTENTIONS):
        defaults = entry.options()
        listing[name] = {
            "description": entry.description,
            "paper": entry.paper,
            "causal": entry.causal,
            "bidirectional": entry.bidirectional,
            "learned": entry.learned,
            "state": entry.state,
            "cost": entry.cost,
            "advice": entry.advice,
            "options": {
                field.name: {"default": getattr(defaults, field.name), "help": field.metadata.get("help", "")}
                for field in fields(entry.options)
            },
        }
    return listing


def _load_builtin() -> None:
    from . import feature_maps, mechanisms  # noqa: F401  (registration happens on import)
