"""Loading patched checkpoints, and saving them with the files that belong to them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from .config import CONFIG_FIELD, CacheDtype, LinearAttentionConfig, saved_settings
from .integration.model_class import auto_mapping, linear_attention_class, transformers_class
from .integration.models import all_configs
from .integration.positions import EXTENDED_FROM, position_limit
from .utils.files import atomic_folder, check_output
from .utils.gguf import dequantized, split_source
from .utils.models import hidden_progress_bars, quiet_transformers
from .utils.sources import loading_errors

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

#: What belongs to a checkpoint besides config and weights: tokenizer, processor, chat template, sentence-transformers.
COMPANION_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/*",
)

#: Files among them that limit the number of tokens, and under which key.
TOKEN_LIMITS = (("tokenizer_config.json", "model_max_length"), ("sentence_*_config.json", "max_seq_length"))


def class_by_name(name: str) -> type:
    """Return the patched counterpart of a Transformers class (the code file beside a checkpoint calls this)."""
    return linear_attention_class(transformers_class(name))


def load_pretrained(
    path_or_repo: str, auto_class: Any = None, *, cache_dtype: CacheDtype | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load a checkpoint that was saved from a patched model; bit-equal to the model that was saved.

        load_pretrained("out/model", cache_dtype="int8")  # the same weights, and a quarter of the cache

    Args:
        path_or_repo: A local folder or a repository on the Hub.
        auto_class: Which head to load, as an `AutoModel…` class, a model class (patched or not), or the name of one of
            them. By default the class that was saved.
        cache_dtype: How caches store the keys and values of single tokens, of windows and exact heads: "auto" (in the
            dtype of the model) or "int8". None: as the checkpoint says.
        kwargs: Everything that `from_pretrained` takes: `dtype`, `device_map`, `revision`, `token`, …

    Returns:
        The patched model.

    Raises:
        ValueError: It is not a patched checkpoint, was written by a newer version, or its weights do not match its
            config; or `cache_dtype` is given, and it stores no keys and values of single tokens.
        OSError: There is no such folder or repository.
    """
    hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    config = kwargs.get("config") or read_config(path_or_repo, **hub_arguments)
    saved = saved_settings(config)
    if saved is None:
        remedy = "Load it with AutoModel….from_pretrained() and call patch_model(model, name)."
        raise ValueError(f"{path_or_repo!r} has no linear attention (no {CONFIG_FIELD!r} in config.json). {remedy}")
    plan = LinearAttentionConfig.from_dict(saved)
    if cache_dtype is not None:
        kwargs[CONFIG_FIELD] = _stored_as(plan, cache_dtype).to_dict()
    cls = model_class(path_or_repo, config, auto_class)
    # The class reads its config again, because it applies settings among the kwargs (num_labels=, …) to it.
    return linear_attention_class(cls).from_pretrained(path_or_repo, **kwargs)  # type: ignore[attr-defined]


def _stored_as(plan: LinearAttentionConfig, cache_dtype: CacheDtype) -> LinearAttentionConfig:
    """Return a plan whose layers store keys and values so; a ValueError if no layer stores any of single tokens."""
    layers = [layer for layer in (plan.default, *plan.layers.values()) if layer is not None]
    if not any(layer.stores_tokens for layer in layers):
        names = ", ".join(sorted({layer.attention for layer in layers}))
        problem = f"{names} stores no keys and values of single tokens, and no head is exact"
        raise ValueError(f"cache_dtype={cache_dtype!r}: {problem}. Leave it out.")
    return plan.with_cache_dtype(cache_dtype)


def load_checkpoint(source: str, auto_class: Any, **kwargs: Any) -> tuple[PreTrainedModel, list[str]]:
    """Load a checkpoint, patched or not, of any source that `split_source` knows, while Transformers is quiet.

    Returns the model, and the sorted names of its parameters that the checkpoint lacks, such as those of a new head. It
    raises as `load_pretrained` for a patched checkpoint, and else an OSError.
    """
    name, gguf_file = split_source(source)
    config = kwargs.get("config") or read_config(source, kwargs.get("revision"))
    if saved_settings(config) is not None:
        with quiet_transformers():
            return load_pretrained(name, auto_class, **kwargs), []
    with loading_errors(f"The model {source!r}"), quiet_transformers():
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **gguf_file, **kwargs)
    return dequantized(model), sorted(info["missing_keys"])


def model_without_weights(source: str, config: Any, auto_class: Any = None) -> Any:
    """Return the model of a config on the meta device, patched where the config is (see `model_class`)."""
    with torch.device("meta"):
        return linear_attention_class(model_class(source, config, auto_class))(config)


def model_class(path: str, config: Any, auto_class: Any) -> type:
    """Return the class that `auto_class` (see `load_pretrained`) has for a config, by default the class it names."""
    if auto_class is None:
        if not config.architectures:
            raise ValueError(f"The config of {path!r} names no class. Pass auto_class=AutoModelForCausalLM, …")
        return transformers_class(config.architectures[0])
    named: Any = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    mapping = auto_mapping(named)
    if mapping is not None:
        if type(config) not in mapping:
            raise ValueError(f"{named.__name__} has no class for model type {config.model_type!r}.")
        classes = mapping[type(config)]
        return classes[0] if isinstance(classes, (list, tuple)) else classes
    if isinstance(auto_class, str):
        return transformers_class(auto_class)
    if not (isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel)):
        raise TypeError(f"auto_class must be an AutoModel… class, a model class, or a name, got {auto_class!r}.")
    return auto_class


def save_checkpoint(
    model: PreTrainedModel, source: str, output: str, *, revision: str | None = None, overwrite: bool = False
) -> None:
    """Save a patched model with the tokenizer files of the checkpoint that it was made from, its source.

    The output folder appears completely or not at all. Raises as `utils.files.check_output`.
    """
    with atomic_folder(Path(output).absolute()) as temporary:
        with hidden_progress_bars(not sys.stderr.isatty()):
            model.save_pretrained(temporary)
        copy_companions(source, temporary, revision)
        if any(EXTENDED_FROM in vars(part) for part in all_configs(model)):
            _raise_token_limits(temporary, position_limit(model) or 0)
        # The folder may have been filled in the meantime.
        check_output(output, [CONFIG_NAME], overwrite=overwrite, source=source)


def read_config(source: str, revision: str | None = None, **changes: Any) -> Any:
    """Return the config of a folder, Hub repository or GGUF file, with changes; an OSError if it cannot be loaded."""
    with loading_errors(f"The model {source!r}"):
        name, gguf_file = split_source(source)
        options = {**gguf_file, **changes}
        return AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=False, **options)


def read_tokenizer(source: str, revision: str | None = None, **remedy: str) -> Any:
    """Return the tokenizer of a checkpoint; an OSError, with a remedy, if it cannot be loaded."""
    with loading_errors(f"The tokenizer of {source!r}", **remedy):
        name, gguf_file = split_source(source)
        return AutoTokenizer.from_pretrained(name, revision=revision or "main", **gguf_file)


def optional_file(source: str, name: str, revision: str | None) -> str | None:
    """Return the path of a file of a checkpoint, which is fetched from the Hub; None where it has no such file."""
    optional: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    optional |= {"_raise_exceptions_for_connection_errors": False, "_raise_exceptions_for_gated_repo": False}
    return cached_file(source, name, revision=revision, **optional)


def copy_companions(source: str, target: Path, revision: str | None) -> None:
    """Copy tokenizer and processor files, byte for byte, where `save_pretrained` has not written its own."""
    if split_source(source)[1]:
        read_tokenizer(source, revision).save_pretrained(target)
        return
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(COMPANION_FILES)))
    for pattern in COMPANION_FILES:
        for path in sorted(folder.glob(pattern)):
            copied = target / path.relative_to(folder)
            if path.is_file() and not copied.exists():
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copied)


def _raise_token_limits(folder: Path, max_length: int) -> None:
    """Let the tokenizer (and sentence-transformers) keep as many tokens as the extended positions allow."""
    for pattern, key in TOKEN_LIMITS:
        for path in sorted(folder.glob(pattern)):
            settings = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(settings.get(key), int) and settings[key] < max_length:
                settings[key] = max_length
                path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
