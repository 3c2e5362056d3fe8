"""The class of a patched model: the original class, with loading, saving and caches that know of linear attention.

A patched model gets a subclass made on the fly, of the same name and module, so that it still is a `BertModel` for
`isinstance`, for `config.architectures`, for pipelines and for the Trainer. `from_pretrained` on that class builds the
linear attention before the weights are read, so every option of `from_pretrained` works.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from ..mechanisms.base import LinearAttention
from .attention import IMPLEMENTATION, OBSERVER, SUBMODULE, attention_modules
from .cache import adopt
from .disk import writing

#: Name of the small module that is written beside the weights, and that `auto_map` points at.
CODE_FILE = "modeling_hf_linear_attn.py"
AUTO_MAP_MARK = CODE_FILE.removesuffix(".py")

CODE = '''"""Loads this checkpoint with its linear attention. Written by hf-linear-attn."""

try:
    from hf_linear_attn.checkpoints import class_by_name
except ImportError as error:
    raise ImportError(
        "This checkpoint runs linear attention and needs the package hf-linear-attn: pip install hf-linear-attn"
    ) from error


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return class_by_name(name)
'''


class MismatchedSizesError(ValueError, RuntimeError):
    """Weights of other sizes than the model's: a RuntimeError in Transformers, whose callers may catch that."""


class LinearAttentionModelMixin:
    """What a patched model does differently. Never instantiated by itself."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from ..patching import CONFIG_FIELD, patch_model

        saved = getattr(config, CONFIG_FIELD, None)
        if saved is not None and config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation = None  # the exact layers' own choice, made by the base class
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.__class__ = base_class(type(self))
        if saved is not None:
            patch_model(self, saved)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in Transformers. Also refuses a checkpoint whose weights do not match its linear attention.

        Weights are read from safetensors only, unless `use_safetensors=False` asks for another format.
        """
        if pretrained_model_name_or_path is not None:
            kwargs.setdefault("use_safetensors", True)
            check_index(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        try:
            # Mismatched sizes are reported by `check_loading`, which can say what they mean.
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"The weights in {str(pretrained_model_name_or_path)!r} cannot be read ({error}): a file is truncated "
                "or corrupt. Copy or download the checkpoint again."
            ) from error
        check_loading(pretrained_model_name_or_path, info, ignore_mismatched_sizes)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, with the small module beside the weights that `trust_remote_code=True` runs."""
        is_main = kwargs.get("is_main_process", args[0] if args else True)
        if is_main and not os.path.isfile(save_directory):
            write_code_file(Path(save_directory))
        with writing(save_directory):
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refused: it would silently bring softmax attention back."""
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"set_attn_implementation({attn_implementation!r}): this model runs linear attention. Call "
                "unpatch_model(model) first; to choose how exact layers are computed, load the model with "
                "attn_implementation= before patching."
            )

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            for module in attention_modules(self):  # type: ignore[arg-type]
                if getattr(module, OBSERVER, None) is not None:
                    continue  # it runs exactly for now, and needs keys and values
                if getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", True):
                    adopt(cache, int(module.layer_idx))  # type: ignore[arg-type]
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return prepared

    def get_expanded_tied_weights_keys(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """As in Transformers, with the parameters that layers of linear attention share."""
        own = super().get_expanded_tied_weights_keys(*args, **kwargs)  # type: ignore[misc]
        return {**own, **shared_parameters(self)}  # type: ignore[arg-type]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: `auto_map` and the code file are written by `save_pretrained`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is not to be found by its name: pickle the original class and remake ours.
        return _blank, (base_class(type(self)),), self.__dict__


def shared_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Name of a parameter that a linear attention shares -> name of the one that is saved for it."""
    owners: dict[int, str] = {}
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, LinearAttention):
            continue
        for own, parameter in module.named_parameters():
            place = f"{name}.{own}"
            if own in module.tied_parameters and id(parameter) in owners:
                found[place] = owners[id(parameter)]
            else:  # its own, or no longer tied: PEFT trains copies
                owners[id(parameter)] = place
    return found


def _blank(base: type) -> Any:
    return object.__new__(linear_attention_class(base))


@functools.cache
def linear_attention_class(base: type) -> type:
    """The patched counterpart of a model class."""
    return type(
        base.__name__,
        (LinearAttentionModelMixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__},
    )


def base_class(cls: type) -> type:
    """The original class of a patched model; any other class is returned as it is."""
    if issubclass(cls, LinearAttentionModelMixin):
        return cls.__mro__[cls.__mro__.index(LinearAttentionModelMixin) + 1]
    return cls


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """`AutoModel…` -> class, for every auto class that knows this model type."""
    model_type = model.config.model_type
    found = {}
    for name in dir(modeling_auto):
        mapping = getattr(getattr(modeling_auto, name), "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None:
            continue
        classes = mapping._model_mapping.get(model_type)
        names = (classes,) if isinstance(classes, str) else tuple(classes or ())
        own = base_class(type(model)).__name__
        if names:
            found[name] = f"{AUTO_MAP_MARK}.{own if own in names else names[0]}"
    return found


def write_code_file(folder: Path) -> None:
    """Write the code file, aside first: a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", suffix=".py", delete=False, encoding="utf-8") as file:
        file.write(CODE)
    os.chmod(file.name, 0o644)
    os.replace(file.name, folder / CODE_FILE)


def check_index(folder: Path) -> None:
    """Raise a ValueError where the index of a sharded checkpoint names a file that is not in its folder."""
    for path in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]):
        try:
            names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{str(path)!r} is no index of weights ({type(error).__name__}: {error}). Copy or download the "
                "checkpoint again."
            ) from error
        outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
        if outside:
            raise ValueError(
                f"{str(path)!r} names {outside[0]!r}, which is no file of its folder. Do not trust this checkpoint."
            )


def check_loading(path: Any, info: dict[str, Any], ignore_mismatched_sizes: bool = False) -> None:
    """Raise a ValueError where the weights of the linear attention do not fit the config, or others differ in size.

    `path` is None for weights that were given as `state_dict=`.
    """
    place = "the given state_dict" if path is None else repr(str(path))
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = [key if isinstance(key, str) else key[0] for key in info.get(kind, ())]
        keys = sorted(key for key in keys if f".{SUBMODULE}." in f".{key}")
        if keys:
            problems.append(f"{kind.removesuffix('_keys')}: {', '.join(keys[:3])}" + (" …" if len(keys) > 3 else ""))
    if problems:
        raise ValueError(
            f"The weights in {place} do not match the linear attention of its config.json "
            f"({'; '.join(problems)}). "
            "The checkpoint was changed after it was saved, or belongs to another config: save it again from the "
            "patched model."
        )
    others = sorted(key if isinstance(key, str) else key[0] for key in info.get("mismatched_keys", ()))
    if others and not ignore_mismatched_sizes:
        raise MismatchedSizesError(
            f"The weights in {place} have other sizes than the model of its config: {', '.join(others[:3])}"
            + (" …" if len(others) > 3 else "")
            + ". Give the config that belongs to them, or pass ignore_mismatched_sizes=True to start these anew."
        )


def transformers_class(name: str) -> type:
    """A model class of Transformers by its name."""
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
        raise ValueError(f"Transformers {transformers.__version__} has no model class {name!r}.")
    return cls
