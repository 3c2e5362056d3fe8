"""What to patch and how: parsed, checked, and saved in `config.json`."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from .registry import ATTENTIONS, build_options, seed_options
from .utils.options import check_argument
from .version import __version__

#: Version of the saved form. It goes up when an older package could misread a newer checkpoint.
FORMAT_VERSION = 1

#: Field of a patched model's `config.json` that holds the saved form.
CONFIG_FIELD = "linear_attention"

PLAN_SUFFIXES = (".json", ".yaml", ".yml")
DEFAULT_KEY = "default"
#: What a layer's dict may hold besides the options of its mechanism.
LAYER_KEYS = ("attention", "options", "exact_heads")
#: Mechanisms and feature maps that this version no longer has.
RETIRED = frozenset({"cosformer"})
#: Options that it no longer has, by mechanism or feature map: the value under which each did nothing, or `...` where
#: any value leaves a checkpoint as it is.
RETIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"store_size": 0},
    "scatterbrain": {"num_hash_buckets": 0, "hash_rounds": ..., "bucket_capacity": ...},
    "performer-relu": {"kernel": "relu"},
    "luna": {"activation": "elu", "scale_query": False, "init_scale": ...},
    "nystrom": {"conv_kernel": None},
    "linformer": {"projection": "linear"},
}
#: The last version that had all of these.
RETIRED_AFTER = "0.1.0"
CacheDtype = Literal["auto", "int8"]
"""How a cache stores the keys and values of single tokens: in the model's dtype, or rounded (see `ops.int8`)."""
#: The mechanism where none is named: it preserves most of a pretrained model, in both directions.
DEFAULT_ATTENTION = "window"


def without_retired(name: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mechanism or a feature map without those that are gone, which change nothing.

    Raises:
        ValueError: The mechanism or the feature map is gone, or an option that is gone has a value that did something.
    """
    remaining = dict(options)
    remedy = f"hf-linear-attn {RETIRED_AFTER} was the last version to have it, and reads it."
    if str(name) in RETIRED:
        raise ValueError(f"{name!r} is gone: {remedy}")
    for option, unused in RETIRED_OPTIONS.get(str(name), {}).items():
        value = remaining.pop(option, unused)
        if unused is not ... and value != unused:
            raise ValueError(f"The option {option}={value!r} of {name!r} is gone: {remedy}")
    if isinstance(remaining.get("feature_map_options"), Mapping):
        options = without_retired(remaining.get("feature_map"), remaining["feature_map_options"])
        remaining["feature_map_options"] = options
    return remaining


@dataclass(frozen=True)
class LayerConfig:
    """One layer's mechanism.

    Attributes:
        attention: Its registered name.
        options: Its options; missing ones take their defaults. With exact heads there may be a `cache_dtype` (a
            `CacheDtype`) for these where the mechanism has no such option.
        exact_heads: The key-value heads whose attention stays exact, by index, with the query heads that share them.

    Raises:
        ValueError: The mechanism or an option is unknown (the message suggests similar names), or a value is wrong.
        TypeError: `exact_heads` is not a list of integers.
    """

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)
    exact_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        exact_heads = check_integers(self.exact_heads, "exact_heads", "key-value head")
        object.__setattr__(self, "exact_heads", tuple(sorted(set(exact_heads))))
        self.build_options()
        if self.exact_heads and self.attention == "softmax":
            raise ValueError(f"exact_heads={list(self.exact_heads)}: every head of a 'softmax' layer is exact.")

    def build_options(self) -> tuple[Any, CacheDtype]:
        """Return the options of the mechanism, and the `cache_dtype` of exact heads, which it may have as an option."""
        entry = ATTENTIONS.get(self.attention)
        values = dict(self.options)
        if self._mechanism_stores_tokens:
            options = build_options(entry, values)
            return options, options.cache_dtype
        cache_dtype: CacheDtype = values.pop("cache_dtype", "auto") if self.exact_heads else "auto"
        check_argument("cache_dtype", cache_dtype, CacheDtype)
        return build_options(entry, values), cache_dtype

    @property
    def _mechanism_stores_tokens(self) -> bool:
        """Whether the mechanism stores keys and values of single tokens, and has an option for how."""
        return any(option.name == "cache_dtype" for option in fields(ATTENTIONS.get(self.attention).options))

    @property
    def stores_tokens(self) -> bool:
        """Whether the layer stores keys and values of single tokens: those of a window, or of exact heads."""
        return self._mechanism_stores_tokens or bool(self.exact_heads)

    def with_cache_dtype(self, cache_dtype: CacheDtype) -> LayerConfig:
        """Return the settings with another `cache_dtype`, or the same where nothing of single tokens is stored."""
        if not self.stores_tokens:
            return self
        return replace(self, options={**self.options, "cache_dtype": cache_dtype})

    @property
    def stores_int8(self) -> bool:
        """Whether the cache has keys and values of the layer in int8."""
        return self.options.get("cache_dtype") == "int8"

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | LayerConfig) -> LayerConfig:
        """Read a name, a dict `{"attention": name, **options}`, or the saved `{"attention": …, "options": …}`.

        Each dict may have a key `"exact_heads"` too.

        Raises:
            ValueError: A dict has no key "attention".
            TypeError: The value is none of these.
        """
        if isinstance(value, LayerConfig):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping):
            if "attention" not in value:
                raise ValueError(f"A layer's settings need the key 'attention', got {dict(value)!r}.")
            attention = value["attention"]
            options = {key: x for key, x in value.items() if key not in LAYER_KEYS}
            options = without_retired(attention, {**value.get("options", {}), **options})
            return cls(attention, options, value.get("exact_heads", ()))
        raise TypeError(
            f"A layer's attention must be a name or a dict like {{'attention': 'favor+', 'num_features': 256}}, "
            f"got {value!r} ({type(value).__name__})."
        )


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Which mechanism runs in which self-attention layer: a plan.

    Attributes:
        default: The mechanism of every layer that `layers` does not name; None leaves those layers exact.
        layers: Overrides. A key is a layer index (`"0"`, `"-1"`), a module name (`"encoder.layer.3.attention.self"`) or
            a pattern on module names (`"decoder.*"`). Index beats name beats pattern beats default.
    """

    default: LayerConfig | None = None
    layers: Mapping[str, LayerConfig] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        value: str | Mapping[str, Any] | LinearAttentionConfig,
        layers: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LinearAttentionConfig:
        """Read what `patch_model` accepts.

        Args:
            value: A name, a dict per layer, or a config.
            layers: With a name, the indices of the layers.
            options: With a name, the options.

        Raises:
            ValueError: A mechanism or an option is unknown, the dict is empty, or `layers` or `options` come with a
                dict or a config.
            TypeError: A value has the wrong type.
        """
        if isinstance(value, (LinearAttentionConfig, Mapping)) and (layers is not None or options):
            names = [*(["layers"] if layers is not None else []), *(options or {})]
            raise ValueError(
                f"{', '.join(names)}: cannot be combined with a {type(value).__name__}. Put the layers and their "
                "options into it, for example {'0': {'attention': 'favor+', 'num_features': 256}}."
            )
        if isinstance(value, LinearAttentionConfig):
            return value
        if isinstance(value, str):
            layer = LayerConfig.parse({"attention": value, **(options or {})})
            if layers is None:
                return cls(layer)
            indices = check_integers(layers, "layers", "layer")
            if not indices:
                raise ValueError("layers is empty: nothing would be patched. Leave it out to patch every layer.")
            return cls(None, {str(index): layer for index in indices})
        if isinstance(value, Mapping):
            if "format_version" in value:
                return cls.from_dict(value)
            if not value:
                raise ValueError("The dict of layers is empty: name at least one layer, or 'default'.")
            default = LayerConfig.parse(value[DEFAULT_KEY]) if DEFAULT_KEY in value else None
            overrides = {}
            for key, layer in value.items():
                if default is not None and isinstance(layer, Mapping) and set(layer) == {"exact_heads"}:
                    overrides[str(key)] = replace(default, exact_heads=layer["exact_heads"])
                elif key != DEFAULT_KEY:
                    overrides[str(key)] = LayerConfig.parse(layer)
            return cls(default, overrides)
        raise TypeError(
            "attention must be a name, a dict of layers or a LinearAttentionConfig, "
            f"got {value!r} ({type(value).__name__})."
        )

    @classmethod
    def from_file(cls, path: str | Path) -> LinearAttentionConfig:
        """Read a plan from a JSON or YAML file: the dict that `patch_model` takes, or the saved form.

            default: hedgehog
            0: softmax
            -1: {attention: window, window_size: 128}

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file does not end in `.json`, `.yaml` or `.yml`, or holds no such dict; a key stands twice;
                a mechanism or an option is unknown; a value has the wrong type. The message names the file.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in PLAN_SUFFIXES:
            raise ValueError(f"{str(path)!r}: a plan is a file that ends in {', '.join(PLAN_SUFFIXES)}.")
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r}: there is no such file.")
        try:
            plan = _read(path.read_text(encoding="utf-8"), "JSON" if suffix == ".json" else "YAML")
            if not isinstance(plan, Mapping):
                raise ValueError(
                    'the file must contain an object such as {"default": "hedgehog", "0": "softmax"}, '
                    f"got {type(plan).__name__}."
                )
            return cls.parse(plan)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from error

    def resolve(self, names: Sequence[str]) -> list[LayerConfig | None]:
        """Return the mechanism of each layer, by the names of the self-attention modules; None where it stays exact.

        Raises:
            ValueError: An index is out of range or stands twice, or a name or pattern matches nothing.
        """
        indices: set[int] = set()
        matches: list[tuple[int, list[int], LayerConfig]] = []  # precedence, layers, mechanism
        for key, layer in self.layers.items():
            if re.fullmatch(r"[+-]?\d+", key):
                index = layer_number(int(key), len(names))
                if index in indices:
                    raise ValueError(f"Layer {index} is named twice (as {key!r} too).")
                indices.add(index)
                matches.append((2, [index], layer))
            elif key in names:
                matches.append((1, [names.index(key)], layer))
            elif matching := [number for number, name in enumerate(names) if fnmatch.fnmatchcase(name, key)]:
                matches.append((0, matching, layer))
            else:
                raise ValueError(
                    f"{key!r} matches no self-attention layer. Use an index from 0 to {len(names) - 1}, a module name "
                    f"such as {names[0]!r}, or a pattern on such names."
                )
        resolved = [self.default] * len(names)
        for _, numbers, layer in sorted(matches, key=lambda match: match[0]):  # of several patterns, the last one
            for number in numbers:
                resolved[number] = layer
        return resolved

    def with_default(self, name: str, value: Any) -> LinearAttentionConfig:
        """Return the plan with a value for an option, wherever a mechanism has it and its value is missing or None."""

        def filled(layer: LayerConfig) -> LayerConfig:
            names = [option.name for option in fields(ATTENTIONS.get(layer.attention).options)]
            if name not in names or layer.options.get(name) is not None:
                return layer
            return replace(layer, options={**layer.options, name: value})

        return self._mapped(filled)

    def with_seed(self, seed: int) -> LinearAttentionConfig:
        """Return the plan with a seed for every mechanism that draws, or whose feature map does, and has none."""
        return self._mapped(
            lambda layer: replace(layer, options=seed_options(ATTENTIONS.get(layer.attention), seed, layer.options))
        )

    def with_cache_dtype(self, cache_dtype: CacheDtype) -> LinearAttentionConfig:
        """Return the plan with another way to store the keys and values of single tokens, wherever a layer does."""
        return self._mapped(lambda layer: layer.with_cache_dtype(cache_dtype))

    def _mapped(self, change: Callable[[LayerConfig], LayerConfig]) -> LinearAttentionConfig:
        default = None if self.default is None else change(self.default)
        return LinearAttentionConfig(default, {key: change(layer) for key, layer in self.layers.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the saved form, which is compatible with JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            DEFAULT_KEY: None if self.default is None else _layer_dict(self.default),
            "layers": {key: _layer_dict(layer) for key, layer in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> LinearAttentionConfig:
        """Read the saved form; a ValueError if a newer version of the package has written it, or it has another."""
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


def _read(text: str, kind: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, which by itself lets the last of two equal keys win."""

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        return _unique_keys(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=_unique_keys)
        return yaml.load(text, Loader)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the file is not {kind} ({' '.join(str(error).split())}).") from error


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a dict with string keys (YAML reads `0:` as a number); a key that stands twice is an error."""
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if str(key) in unique:
            raise ValueError(f"{str(key)!r} is named twice.")
        unique[str(key)] = value
    return unique


def _layer_dict(layer: LayerConfig) -> dict[str, Any]:
    saved = {"attention": layer.attention, "options": {**layer.options, **asdict(layer.build_options()[0])}}
    return {**saved, "exact_heads": list(layer.exact_heads)} if layer.exact_heads else saved


def saved_settings(model_config: Any) -> dict[str, Any] | None:
    """Return the saved form that the config of a patched model carries; None from the config of any other model."""
    return getattr(model_config, CONFIG_FIELD, None)


def check_integers(values: Any, name: str, kind: str) -> list[int]:
    """Raise a TypeError unless `values` is a list of integers; the message says the indices of what it must hold."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {kind} indices, got {values!r} ({type(values).__name__}).")
    indices = list(values)
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"{name} must contain integers, got {index!r} ({type(index).__name__}).")
    return indices


def layer_number(index: int, count: int) -> int:
    """Return the index of a layer from the front; a ValueError if it is none of `count` self-attention layers."""
    if not -count <= index < count:
        raise ValueError(
            f"Layer index {index} is out of range: the model has {count} self-attention layers "
            f"(0 to {count - 1}, or -{count} to -1)."
        )
    return index % count
