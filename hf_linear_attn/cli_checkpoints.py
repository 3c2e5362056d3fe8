"""What the command line does with checkpoints: load by config, patch, save aside and rename, inspect."""

from __future__ import annotations

import copy
import json
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from .checkpoints import _model_class
from .config import LinearAttentionConfig
from .integration.configs import configs_of
from .integration.model_class import linear_attention_class
from .integration.positions import RECORD, position_limit
from .patching import CONFIG_FIELD, PatchReport, patch_model, patch_report
from .training.saving import replace_folder
from .version import __version__

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

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

REPORTED_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "peft", "numpy", "triton")


def read_plan(
    attention: str | None, plan: str | None, layers: list[int] | None, options: dict[str, Any]
) -> LinearAttentionConfig:
    """What to patch, from the flags or from a JSON or YAML file; checked before any weight is read.

    Raises:
        ValueError: an unknown mechanism or option, or a file that is no such plan.
        OSError: the file cannot be read.
    """
    # Importing `patching` above has filled the registries.
    if plan is None:
        return LinearAttentionConfig.parse(attention or "", layers, options)
    try:
        return LinearAttentionConfig.from_file(plan)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"--plan {error}") from error


def check_target(source: str, target: str, *, force: bool) -> None:
    """Raise a ValueError unless `target` may be written: new, empty, or a checkpoint to replace with `force`."""
    folder = Path(target)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"DST {target!r} is a file. Name a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if Path(source).is_dir() and Path(source).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"DST {target!r} holds SRC {source!r}, which would be lost. Choose another folder.")
    if not force:
        raise ValueError(f"DST {target!r} is not empty. Choose another folder, or pass --force to replace it.")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"DST {target!r} holds files but no config.json: it is no checkpoint, and --force does not replace it. "
            "Choose another folder."
        )


def read_config(source: str, revision: str | None = None) -> Any:
    """The config of a folder or Hub repository.

    Raises:
        ValueError: there is no such folder, or it holds no config.json.
        OSError: the Hub does not know the repository, or cannot be reached.
    """
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{source!r} holds no config.json: it is no checkpoint.")
    elif not HUB_NAME.fullmatch(source):
        raise ValueError(f"There is no folder {source!r}. Give a local folder, or a Hub name such as 'org/model'.")
    try:
        return AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except OSError as error:
        raise OSError(f"{source!r} is no local folder, and could not be loaded from the Hub. {error}") from error


def load_and_patch(
    source: str,
    plan: LinearAttentionConfig,
    *,
    max_length: int | None = None,
    auto_class: str | None,
    dtype: str,
    revision: str | None,
) -> PreTrainedModel:
    """Load a model with the class that its config names, or that of `auto_class`, and patch it.

    Raises:
        ValueError, NotImplementedError: patched already, no class to be found, a plan that does not fit the model (both
            before any weight is read), or unreadable weights.
        OSError: as in `from_pretrained`.
    """
    config = read_config(source, revision)
    if getattr(config, CONFIG_FIELD, None) is not None:
        raise ValueError(
            f"{source!r} is patched already (see `hf-linear-attn info {source}`). Give the checkpoint that it was "
            "made from, or load it and call unpatch_model(model)."
        )
    if auto_class is None and not getattr(config, "architectures", None):
        raise ValueError(
            f"The config of {source!r} does not say which class was saved. Pass --auto-class, for example "
            "AutoModelForCausalLM."
        )
    cls: Any = _model_class(source, config, auto_class)
    with torch.device("meta"):
        patch_model(cls(copy.deepcopy(config)), plan, max_length=max_length)
    try:
        with _bars_on_terminals():
            model = cls.from_pretrained(source, dtype=dtype, revision=revision or "main")
    except SafetensorError as error:
        raise ValueError(f"The weights in {source!r} cannot be read ({error}): truncated or corrupt.") from error
    return patch_model(model, plan, max_length=max_length)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Progress bars where somebody can watch them, and not in a log."""
    quiet = not sys.stderr.isatty() and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet:
            logging.enable_progress_bar()


def save(model: PreTrainedModel, source: str, target: str, *, revision: str | None, force: bool) -> PatchReport:
    """Save a patched model beside `target` and rename: no reader ever sees a part of the folder."""
    folder = Path(target).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        aside.mkdir()
        with _bars_on_terminals():
            model.save_pretrained(aside)
        _copy_companions(source, aside, revision)
        if any(hasattr(config, RECORD) for config in configs_of(model)):
            _raise_token_limits(aside, position_limit(model) or 0)
        check_target(source, target, force=force)  # it may have been filled meanwhile
        replace_folder(folder, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return patch_report(model)


def _copy_companions(source: str, target: Path, revision: str | None) -> None:
    """Copy tokenizer and processor files, byte for byte, where `save_pretrained` has not written its own."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, revision=revision, allow_patterns=list(COMPANION_FILES)))
    for pattern in COMPANION_FILES:
        for path in sorted(folder.glob(pattern)):
            copy = target / path.relative_to(folder)
            if path.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _raise_token_limits(folder: Path, max_length: int) -> None:
    """Let the tokenizer (and sentence-transformers) keep as many tokens as the extended positions take."""
    for pattern, name in TOKEN_LIMITS:
        for path in sorted(folder.glob(pattern)):
            settings = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(settings.get(name), int) and settings[name] < max_length:
                settings[name] = max_length
                path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def inspect_checkpoint(source: str) -> dict[str, Any]:
    """What a checkpoint's config says, its model built without weights (on the meta device).

    Keys: checkpoint, model, patched, report; where patched also parameters (of the whole model), added_parameters,
    state_bytes, dtype, format_version and package_version.
    """
    config = read_config(source)
    saved = getattr(config, CONFIG_FIELD, None)
    names = getattr(config, "architectures", None) or [config.model_type]
    found: dict[str, Any] = {"checkpoint": source, "model": names[0], "patched": saved is not None, "report": None}
    if saved is None:
        return found
    LinearAttentionConfig.from_dict(saved)
    cls: Any = linear_attention_class(_model_class(source, config, None))
    with torch.device("meta"):
        model = cls(config)
    report = patch_report(model)
    dtype = getattr(config, "dtype", None) or torch.float32
    found.update(
        report=report,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        added_parameters=report.parameters,
        state_bytes=report.state_bytes,
        dtype=str(dtype).removeprefix("torch."),
        format_version=saved["format_version"],
        package_version=saved.get("package_version"),
    )
    return found


def environment() -> dict[str, str]:
    """Versions and hardware, as text."""
    known = {"hf-linear-attn": __version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "not installed"
    known["platform"] = platform.platform()
    known["cpu"] = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    known["threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        known["cuda"] = f"{torch.version.cuda}: {', '.join(names)}"
    else:
        known["cuda"] = "not available"
    return known


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()
