"""What to patch and how: parsed, checked, and saved in `config.json`."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .registry import ATTENTIONS, build_options
from .version import __version__

#: Version of the saved form. Raised when an older package could misread a newer checkpoint.
FORMAT_VERSION = 1

DEFAULT_KEY = "default"
#: The mechanism where none is named: what keeps most of a pretrained model, in both directions.
DEFAULT_ATTENTION = "window"


@dataclass(frozen=True)
class LayerConfig:
    """One layer's mechanism: its registered name and its options (missing ones take their defaults)."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        build_options(ATTENTIONS.get(self.attention), dict(self.options))

    @classmethod
    def parse(cls, given: str | Mapping[str, Any] | LayerConfig) -> LayerConfig:
        """From a name, from `{"attention": name, **options}`, or from the saved `{"attention", "options"}`."""
        if isinstance(given, LayerConfig):
            return given
        if isinstance(given, str):
            return cls(given)
        if isinstance(given, Mapping):
            if "attention" not in given:
                raise ValueError(f"A layer's settings need the key 'attention', got {dict(given)!r}.")
            options = {key: value for key, value in given.items() if key not in ("attention", "options")}
            return cls(given["attention"], {**given.get("options", {}), **options})
        raise TypeError(
            f"A layer's attention must be a name or a dict like {{'attention': 'favor+', 'num_features': 256}}, "
            f"got {given!r} ({type(given).__name__})."
        )


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Which mechanism runs in which self-attention layer.

    default: the mechanism of every layer that `layers` does not name; None leaves those layers exact.
    layers:  overrides. A key is a layer index (`"0"`, `"-1"`), a module name (`"encoder.layer.3.attention.self"`) or a
             pattern on module names (`"decoder.*"`). Index beats name beats pattern beats default.

    Raises:
        ValueError: an unknown mechanism or option, with near matches.
        TypeError: a value of the wrong type.
    """

    default: LayerConfig | None = None
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        given: str | Mapping[str, Any] | LinearAttentionConfig,
        layers: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LinearAttentionConfig:
        """From what `patch_model` accepts: a name (with layers and options), a dict per layer, or a config."""
        if isinstance(given, (LinearAttentionConfig, Mapping)) and (layers is not None or options):
            extra = [*(["layers"] if layers is not None else []), *(options or {})]
            raise ValueError(
                f"{', '.join(extra)}: cannot be combined with a {type(given).__name__}. Put the layers and their "
                "options into it, for example {'0': {'attention': 'favor+', 'num_features': 256}}."
            )
        if isinstance(given, LinearAttentionConfig):
            return given
        if isinstance(given, str):
            layer = LayerConfig(given, dict(options or {}))
            if layers is None:
                return cls(layer)
            return cls(None, {str(index): layer for index in _check_indices(layers)})
        if isinstance(given, Mapping):
            if "format_version" in given:
                return cls.from_dict(given)
            if not given:
                raise ValueError("The dict of layers is empty: name at least one layer, or 'default'.")
            parsed = {str(key): LayerConfig.parse(value) for key, value in given.items()}
            return cls(parsed.pop(DEFAULT_KEY, None), parsed)
        raise TypeError(
            "attention must be a name, a dict of layers or a LinearAttentionConfig, "
            f"got {given!r} ({type(given).__name__})."
        )

    @classmethod
    def from_file(cls, path: str | Path) -> LinearAttentionConfig:
        """Read a plan from a JSON or YAML file: the dict that `patch_model` takes, or the saved form.

            default: hedgehog
            0: softmax
            -1: {attention: window, window_size: 128}

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not `.json`, `.yaml` or `.yml`; not such a dict; a key given twice; an unknown mechanism or
                option; a value of the wrong type. The message names the file.
            ImportError: a YAML file, and PyYAML is not installed.
        """
        path = Path(path)
        readers = {".json": _read_json, ".yaml": _read_yaml, ".yml": _read_yaml}
        if path.suffix.lower() not in readers:
            raise ValueError(f"{str(path)!r}: a plan is a file that ends in {', '.join(readers)}.")
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r}: there is no such file.")
        try:
            held = readers[path.suffix.lower()](path.read_text(encoding="utf-8"))
            if not isinstance(held, Mapping):
                raise ValueError(
                    'the file must hold an object such as {"default": "hedgehog", "0": "softmax"}, '
                    f"got {type(held).__name__}."
                )
            return cls.parse(held)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from error

    def resolve(self, names: Sequence[str]) -> list[LayerConfig | None]:
        """The mechanism of each layer, given the module names in order; None where nothing is said.

        Raises:
            ValueError: an index out of range, a name or pattern that matches nothing, an index given twice.
        """
        by_index: dict[int, LayerConfig] = {}
        by_name: dict[str, LayerConfig] = {}
        patterns: list[tuple[str, LayerConfig]] = []
        for key, layer in self.layers.items():
            index = _as_index(key)
            if index is not None:
                if not -len(names) <= index < len(names):
                    raise ValueError(
                        f"Layer index {index} is out of range: the model has {len(names)} self-attention layers "
                        f"(0 to {len(names) - 1}, or -{len(names)} to -1)."
                    )
                if index % len(names) in by_index:
                    raise ValueError(f"Layer {index % len(names)} is named twice (as {key!r} too).")
                by_index[index % len(names)] = layer
            elif key in names:
                by_name[key] = layer
            elif any(fnmatch.fnmatchcase(name, key) for name in names):
                patterns.append((key, layer))
            else:
                raise ValueError(
                    f"{key!r} matches no self-attention layer. Use an index from 0 to {len(names) - 1}, a module name "
                    f"such as {names[0]!r}, or a pattern on such names."
                )
        resolved = []
        for index, name in enumerate(names):
            matching = [layer for pattern, layer in patterns if fnmatch.fnmatchcase(name, pattern)]
            found = by_index.get(index) or by_name.get(name) or (matching[-1] if matching else self.default)
            resolved.append(found)
        return resolved

    def has_option(self, name: str) -> bool:
        """Whether a mechanism of the plan has an option of this name."""
        default = () if self.default is None else (self.default,)
        return any(_has_option(layer, name) for layer in (*self.layers.values(), *default))

    def with_default(self, name: str, value: Any) -> LinearAttentionConfig:
        """The plan with a value for an option, wherever a mechanism has that option and none is given (or None)."""

        def chosen(layer: LayerConfig) -> LayerConfig:
            if not _has_option(layer, name) or layer.options.get(name) is not None:
                return layer
            return LayerConfig(layer.attention, {**layer.options, name: value})

        default = None if self.default is None else chosen(self.default)
        return LinearAttentionConfig(default, {key: chosen(layer) for key, layer in self.layers.items()})

    def to_dict(self) -> dict[str, Any]:
        """The saved form (JSON)."""
        return {
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            DEFAULT_KEY: None if self.default is None else _layer_dict(self.default),
            "layers": {key: _layer_dict(layer) for key, layer in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LinearAttentionConfig:
        """Read the saved form.

        Raises:
            ValueError: written by a newer version of the package, or not in this form.
        """
        version = saved.get("format_version")
        if not isinstance(version, int):
            raise ValueError(f"Not the settings of linear attention: format_version is {version!r}, not a number.")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"These settings have format {version}, written by hf-linear-attn {saved.get('package_version')}; "
                f"hf-linear-attn {__version__} reads formats up to {FORMAT_VERSION}. "
                "Upgrade with `pip install -U hf-linear-attn`."
            )
        unknown = set(saved) - {"format_version", "package_version", DEFAULT_KEY, "layers"}
        if unknown or not isinstance(saved.get("layers", {}), Mapping):
            raise ValueError(f"Not the settings of linear attention: {sorted(unknown) or saved.get('layers')!r}.")
        default = saved.get(DEFAULT_KEY)
        return cls(
            None if default is None else LayerConfig.parse(default),
            {str(key): LayerConfig.parse(layer) for key, layer in saved.get("layers", {}).items()},
        )


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"the file is not JSON ({error}).") from error


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("Plans in YAML need PyYAML: pip install pyyaml. Or write the plan in JSON.") from error

    class Loader(yaml.SafeLoader):
        """The safe loader, which by itself lets the last of two equal keys win."""

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        return _unique(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the file is not YAML ({' '.join(str(error).split())}).") from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A dict with string keys (YAML reads `0:` as a number); a key given twice is an error, not an override."""
    held: dict[str, Any] = {}
    for key, value in pairs:
        if str(key) in held:
            raise ValueError(f"{str(key)!r} is named twice.")
        held[str(key)] = value
    return held


def _has_option(layer: LayerConfig, name: str) -> bool:
    return any(option.name == name for option in fields(ATTENTIONS.get(layer.attention).options))


def _layer_dict(layer: LayerConfig) -> dict[str, Any]:
    options = asdict(build_options(ATTENTIONS.get(layer.attention), dict(layer.options)))
    return {"attention": layer.attention, "options": options}


def _as_index(key: str) -> int | None:
    try:
        return int(key)
    except ValueError:
        return None


def _check_indices(layers: Iterable[int]) -> list[int]:
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a list of layer indices, got {layers!r} ({type(layers).__name__}).")
    indices = list(layers)
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"layers must hold integers, got {index!r} ({type(index).__name__}).")
    if not indices:
        raise ValueError("layers is empty: nothing would be patched. Leave it out to patch every layer.")
    return indices
