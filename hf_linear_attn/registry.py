"""The registries of attention mechanisms and feature maps: one registration carries all that the rest needs to know.

`register_attention` and `register_feature_map` are the whole extension interface. A package that registers its own
mechanism on import is loaded on the first lookup if it declares the entry point group `hf_linear_attn`. The modules of
this package are loaded in the same way, by name: the registry depends on nothing that they define.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from .utils.formatting import near_matches

ENTRY_POINT_GROUP = "hf_linear_attn"
#: Modules whose import registers the mechanisms and feature maps of this package.
BUILTIN_MODULES = ("hf_linear_attn.feature_maps", "hf_linear_attn.mechanisms")

#: What `list_attentions` shows of an entry, beside its options.
LISTED = ("description", "paper", "causal", "bidirectional", "learned", "state", "cost", "recommendation")

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name; `kind` is what they are, in messages. A name is never replaced silently."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        #: The class that registered classes must inherit from; its own module sets it.
        self.base_class: type | None = None
        self._entries: dict[str, T] = {}
        self._listeners: list[Callable[[str, T], None]] = []
        self._loaded = False

    def add(self, name: str, entry: T) -> None:
        """Add an entry under a name that is a non-empty string (else a TypeError) and not taken (a ValueError)."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"The name of {self.kind} must be a non-empty string, got {name!r}.")
        if name in self._entries:
            raise ValueError(f"{self.kind.capitalize()} {name!r} is already registered. Choose another name.")
        for listener in self._listeners:  # One that raises leaves the registry as it was.
            listener(name, entry)
        self._entries[name] = entry

    def discard(self, name: str) -> None:
        """Remove a name, if it is there (for tests and interactive work)."""
        self._entries.pop(name, None)

    def subscribe(self, listener: Callable[[str, T], None]) -> None:
        """Call `listener(name, entry)` for every entry, present and future."""
        self._listeners.append(listener)
        for name, entry in list(self._entries.items()):
            listener(name, entry)

    def get(self, name: str) -> T:
        """Return the entry of a name; a ValueError that suggests similar ones if it is unknown."""
        if not isinstance(name, str):
            raise TypeError(f"The name of {self.kind} must be a string, got {name!r} ({type(name).__name__}).")
        if name not in self._entries:
            self.load()
        if name not in self._entries:
            names = sorted(self._entries)
            raise ValueError(f"Unknown {self.kind} {name!r}.{near_matches(name, names)} Available: {', '.join(names)}.")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[tuple[str, T]]:
        self.load()
        return iter(list(self._entries.items()))

    def load(self) -> None:
        """Import the built-in modules and those of other packages' entry points, once."""
        if self._loaded:
            return
        self._loaded = True
        for module in BUILTIN_MODULES:
            importlib.import_module(module)
        for point in entry_points(group=ENTRY_POINT_GROUP):
            point.load()


@dataclass(frozen=True)
class AttentionEntry:
    """What is known of one mechanism, or of a feature map and its mechanism, for lists, the command line and tests.

    `factory` makes it from `(shape, options)`, and is most often its class. The other attributes are the arguments of
    `register_attention`.
    """

    name: str
    factory: Any
    options: type
    description: str
    paper: str
    causal: bool
    bidirectional: bool
    learned: bool
    state: str
    cost: str
    recommendation: str
    alternative: str = ""

    def check_direction(self, causal: bool, where: str = "") -> None:
        """Raise a NotImplementedError, which names the alternative, if the mechanism does not serve the direction."""
        if not (self.causal if causal else self.bidirectional):
            direction = "causal" if causal else "bidirectional"
            alternative = f" Use {self.alternative!r}." if self.alternative else ""
            raise NotImplementedError(f"{self.name!r} cannot be {direction}{where}.{alternative}")


ATTENTIONS: Registry[AttentionEntry] = Registry("attention mechanism")
FEATURE_MAPS: Registry[AttentionEntry] = Registry("feature map")


def register_attention(
    name: str,
    *,
    description: str,
    paper: str,
    options: type,
    learned: bool,
    causal: bool = True,
    bidirectional: bool = True,
    state: str = "none",
    cost: str = "",
    recommendation: str = "",
    alternative: str = "",
) -> Callable[[type], type]:
    """Class decorator: make a `LinearAttention` available as `patch_model(model, name)`.

    Args:
        name: The public name.
        description: One line, for lists.
        paper: The source, e.g. `"Author 2020, arXiv:2006.16236"`.
        options: Frozen dataclass of the options with defaults; each field's `metadata["help"]` is shown to users.
        learned: Whether it has parameters that attention transfer can train.
        causal: Whether it can compute causal attention.
        bidirectional: Whether it can compute bidirectional attention.
        state: `"constant"`, `"growing"` or `"none"` (no decoding).
        cost: Time and memory, in the symbols L (length), m (features), d (head size), w (window), k (slots).
        recommendation: When to choose it, one line.
        alternative: The mechanism to name in the error for a direction that is missing.

    Returns:
        The decorator, which returns the class unchanged.

    Raises:
        TypeError: `options` is not a dataclass, or the class is no `LinearAttention`.
        ValueError: The name is taken.
    """
    facts = (description, paper, causal, bidirectional, learned, state, cost, recommendation, alternative)
    return _decorator(ATTENTIONS, name, options, facts)


def register_feature_map(
    name: str,
    *,
    description: str,
    paper: str,
    options: type,
    learned: bool,
    cost: str = "O(L·m·d) time, O(m·d) state",
    recommendation: str = "",
) -> Callable[[type], type]:
    """Class decorator: make a `FeatureMap` available, also as the kernelized attention of the same name.

    A feature map works in both directions and decodes with a constant state. Arguments, decorator and errors are those
    of `register_attention`.
    """
    return _decorator(
        FEATURE_MAPS, name, options, (description, paper, True, True, learned, "constant", cost, recommendation)
    )


def _decorator(
    registry: Registry[AttentionEntry], name: str, options: type, facts: tuple[Any, ...]
) -> Callable[[type], type]:
    """Return what adds a class to a registry; `facts` are the attributes of its entry after `options`, in order."""
    if not (isinstance(options, type) and is_dataclass(options)):
        raise TypeError(f"The options of {name!r} must be a dataclass, got {options!r}.")

    def decorate(cls: type) -> type:
        base = registry.base_class
        if base is None or not (isinstance(cls, type) and issubclass(cls, base)):
            expected = "LinearAttention or FeatureMap" if base is None else base.__name__
            raise TypeError(f"The registration of {name!r} decorates subclasses of {expected}, got {cls!r}.")
        entry = AttentionEntry(name, cls, options, *facts)
        registry.add(name, entry)
        cls.entry = entry  # type: ignore[attr-defined]
        return cls

    return decorate


def seed_options(entry: AttentionEntry, seed: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a mechanism with a seed where it has such an option, or its feature map, and no value."""
    values = dict(options or {})
    names = {item.name for item in fields(entry.options)}
    if "seed" in names:
        return values | ({"seed": seed} if values.get("seed") is None else {})
    if "feature_map_options" in names and str(values.get("feature_map")) in FEATURE_MAPS:
        map_entry = FEATURE_MAPS.get(values["feature_map"])
        map_options = values.get("feature_map_options", {})
        values["feature_map_options"] = seed_options(map_entry, seed, map_options)
    return values


def build_options(entry: AttentionEntry, values: dict[str, Any]) -> Any:
    """Build the options dataclass of a mechanism; a ValueError for an unknown option or a value not allowed."""
    names = [field.name for field in fields(entry.options)]
    for option in values:
        if option not in names:
            raise ValueError(
                f"Unknown option {option!r} for {entry.name!r}.{near_matches(str(option), names)} "
                f"Options: {', '.join(names) if names else 'none'}."
            )
    return entry.options(**values)


def list_attentions() -> dict[str, dict[str, Any]]:
    """List all registered mechanisms.

    Returns:
        For each name a dict of description, paper, causal, bidirectional, learned, state, cost, recommendation and
        options; `options` maps each option to its default and help text.
    """
    listing = {}
    for name, entry in sorted(ATTENTIONS):
        defaults = entry.options()
        listing[name] = {
            **{fact: vars(entry)[fact] for fact in LISTED},
            "options": {
                field.name: {"default": vars(defaults)[field.name], "help": field.metadata.get("help", "")}
                for field in fields(entry.options)
            },
        }
    return listing
