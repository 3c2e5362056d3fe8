"""Loading patched checkpoints. Saving is the model's own `save_pretrained` (and `push_to_hub`)."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedModel

from .config import LinearAttentionConfig
from .integration.context import CONFIG_FIELD
from .integration.model_class import linear_attention_class, transformers_class

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def class_by_name(name: str) -> type:
    """Return the patched counterpart of a Transformers class (the code file beside a checkpoint calls this)."""
    return linear_attention_class(transformers_class(name))


def load_pretrained(path_or_repo: str, auto_class: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint that was saved from a patched model; bit-equal to the model that was saved.

    Args:
        path_or_repo: A local folder or a repository on the Hub.
        auto_class: Which head to load, as an `AutoModel…` class, a model class (patched or not), or the name of one of
            them. By default the class that was saved.
        kwargs: Everything that `from_pretrained` takes: `dtype`, `device_map`, `revision`, `token`, …

    Returns:
        The patched model.

    Raises:
        ValueError: It is not a patched checkpoint, was written by a newer version, or its weights do not match its
            config.
        OSError: There is no such folder or repository.
    """
    hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    config = kwargs.get("config")
    if config is None:
        config = AutoConfig.from_pretrained(path_or_repo, trust_remote_code=False, **hub_arguments)
    saved = getattr(config, CONFIG_FIELD, None)
    if saved is None:
        raise ValueError(
            f"{path_or_repo!r} holds no linear attention (its config.json has no {CONFIG_FIELD!r}). Load it with "
            "AutoModel….from_pretrained() and call patch_model(model, name)."
        )
    LinearAttentionConfig.from_dict(saved)
    cls = _model_class(path_or_repo, config, auto_class)
    # The class reads its config again, because it applies settings among the kwargs (num_labels=, …) to it.
    return linear_attention_class(cls).from_pretrained(path_or_repo, **kwargs)  # type: ignore[attr-defined]


def _model_class(path: str, config: Any, auto_class: Any) -> type:
    if auto_class is None:
        names = getattr(config, "architectures", None) or []
        if not names:
            raise ValueError(
                f"The config of {path!r} does not say which class was saved. Pass auto_class=AutoModelForCausalLM, …"
            )
        return transformers_class(names[0])
    if isinstance(auto_class, str):
        import transformers

        named_class = getattr(transformers, auto_class, None)
        if named_class is None:
            raise ValueError(f"Transformers has no class {auto_class!r}.")
        auto_class = named_class
    mapping = getattr(auto_class, "_model_mapping", None)
    if mapping is None:
        if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
            return auto_class
        raise TypeError(f"auto_class must be an AutoModel… class, a model class, or a name, got {auto_class!r}.")
    if type(config) not in mapping:
        raise ValueError(f"{auto_class.__name__} has no class for model type {config.model_type!r}.")
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, (list, tuple)) else classes
