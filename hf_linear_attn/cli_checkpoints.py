"""The verbs `patch` and `info`: load by config, patch, save, inspect."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .utils.arguments import UsageError, option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .config import LinearAttentionConfig
    from .patching import PatchReport

#: A repository of the Hub: a name, or an owner and a name.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class PatchConfig:
    """Options of `patch`.

    Raises:
        UsageError: Neither or both of `attention` and `plan`.
        ValueError: A value out of range.
    """

    model: str = option(help="a local folder, a Hub repository, or FOLDER/NAME.gguf", common=True)
    output: str = option(help="the folder to write", common=True)
    attention: str | None = option(None, "the mechanism (see `hf-linear-attn list`)", common=True)
    options: dict[str, Any] = option(
        factory=dict,
        help="options of the mechanism: --options.num_features 128 (see `hf-linear-attn list NAME`)",
        common=True,
    )
    layers: tuple[int, ...] | None = option(
        None, "layers to patch, negative ones from the end (default: all)", common=True
    )
    plan: str | None = option(None, "JSON or YAML file with a mechanism for each layer, instead", common=True)
    max_length: int | None = option(
        None,
        "longest input in tokens: learned positions and the tokenizer's limit are extended to it; mechanisms that are "
        "built for a largest length get it as their option",
        common=True,
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "precision of the weights (default: as saved)", common=True
    )
    auto_class: str | None = option(
        None, "class to load, such as AutoModelForCausalLM (default: the one that the config names)"
    )
    revision: str | None = option(None, "branch, tag or commit of a repository on the Hub")
    overwrite: bool = option(False, "replace an earlier result in the output folder", common=True)

    def __post_init__(self) -> None:
        if (self.attention is None) == (self.plan is None):
            raise UsageError("give either --attention NAME or --plan FILE.")
        if self.plan is not None and (self.layers is not None or self.options):
            raise ValueError("--layers and --options belong to --attention. With --plan, write them into the file.")


@dataclass(frozen=True)
class InfoConfig:
    """Options of `info`."""

    model: str = option(help="a local folder or a repository on the Hub", common=True)
    json: bool = option(False, "print JSON", common=True)


def patch(config: PatchConfig) -> None:
    """Load a checkpoint, patch it, and save it to a folder that appears completely or not at all.

    Raises:
        ValueError, NotImplementedError: A plan that does not fit the model, or a folder that must not be replaced;
            before any weight is read.
        OSError: The checkpoint cannot be found.
    """
    from .patching import patch_report
    from .saving import save_checkpoint
    from .utils.files import check_output

    check_output(config.output, ["config.json"], overwrite=config.overwrite, source=config.model)
    plan = read_plan(config)
    model = load_and_patch(config, plan)
    save_checkpoint(model, config.model, config.output, revision=config.revision, overwrite=config.overwrite)
    report = patch_report(model)
    sys.stdout.write(f"{report}\nSaved to {config.output}\n")


def info(config: InfoConfig) -> None:
    """Print what is patched in a checkpoint; only its config is read.

    Raises:
        ValueError, OSError: There is no such checkpoint, or a newer version of the package wrote it.
    """
    facts = inspect_checkpoint(config.model)
    report: PatchReport | None = facts.pop("report")
    if config.json:
        facts["layers"] = [] if report is None else [asdict(layer) for layer in report.layers]
        sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    elif report is None:
        sys.stdout.write(
            f"{config.model}: {facts['model']} without linear attention. "
            f"Patch it with `hf-linear-attn patch {config.model} OUTPUT --attention NAME`.\n"
        )
    else:
        sys.stdout.write(
            f"{report}\n"
            f"{'':>5}  {facts['parameters']:,} parameters in all, saved as {facts['dtype']}; "
            f"{facts['state_bytes']:,} state bytes per sequence\n"
            f"{'':>5}  format {facts['format_version']}, written by hf-linear-attn {facts['package_version']}\n"
        )


def read_plan(config: PatchConfig) -> LinearAttentionConfig:
    """Return what to patch, from the options or from the plan file; checked before any weight is read.

    Raises:
        ValueError: An unknown mechanism or option, or a file that is no plan.
        OSError: The file cannot be read.
    """
    from . import patching  # noqa: F401  (fills the registries)
    from .config import LinearAttentionConfig

    if config.plan is None:
        return LinearAttentionConfig.parse(config.attention or "", config.layers, config.options)
    try:
        return LinearAttentionConfig.from_file(config.plan)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"--plan {error}") from error


def read_config(source: str, revision: str | None = None) -> Any:
    """Return the config of a local folder or a repository on the Hub.

    Raises:
        ValueError: There is no such folder, or it holds no config.json.
        OSError: The Hub does not know the repository, or cannot be reached.
    """
    from transformers import AutoConfig

    from .utils.gguf import split_source

    name, gguf_file = split_source(source)
    folder = Path(name)
    if gguf_file and folder.is_dir():
        if not Path(source).is_file():
            raise ValueError(f"There is no file {source!r}.")
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{source!r} holds no config.json: it is no checkpoint.")
    elif not HUB_NAME.fullmatch(name):
        raise ValueError(f"There is no folder {source!r}. Give a local folder, or a Hub name such as 'org/model'.")
    try:
        return AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=False, **gguf_file)
    except OSError as error:
        raise OSError(f"{source!r} is no local folder, and could not be loaded from the Hub. {error}") from error


def load_and_patch(config: PatchConfig, plan: LinearAttentionConfig) -> PreTrainedModel:
    """Return the patched model, loaded with the class that its config names, or with `auto_class`.

    Raises:
        ValueError, NotImplementedError: A patched checkpoint, an unknown class, a plan that does not fit the model
            (all before any weight is read), or unreadable weights.
        OSError: As `from_pretrained`.
    """
    import torch
    from safetensors import SafetensorError

    from .checkpoints import _model_class
    from .patching import CONFIG_FIELD, patch_model
    from .saving import progress_bars_on_terminals
    from .utils.gguf import dequantized, split_source

    source = config.model
    name, gguf_file = split_source(source)
    auto_class = config.auto_class or ("AutoModelForCausalLM" if gguf_file else None)
    model_config = read_config(source, config.revision)
    if getattr(model_config, CONFIG_FIELD, None) is not None:
        raise ValueError(
            f"{source!r} is patched already (see `hf-linear-attn info {source}`). Give the checkpoint that it was "
            "made from, or load it and call unpatch_model(model)."
        )
    if auto_class is None and not getattr(model_config, "architectures", None):
        raise ValueError(
            f"The config of {source!r} does not name the class that was saved. Pass --auto_class, for example "
            "AutoModelForCausalLM."
        )
    model_class: Any = _model_class(source, model_config, auto_class)
    with torch.device("meta"):
        patch_model(model_class(copy.deepcopy(model_config)), plan, max_length=config.max_length)
    try:
        with progress_bars_on_terminals():
            hub = {"revision": config.revision or "main", **gguf_file}
            model = dequantized(model_class.from_pretrained(name, dtype=config.dtype, **hub))
    except SafetensorError as error:
        raise ValueError(f"The weights in {source!r} cannot be read ({error}): truncated or corrupt.") from error
    return patch_model(model, plan, max_length=config.max_length)


def inspect_checkpoint(source: str) -> dict[str, Any]:
    """Return what the config of a checkpoint says; its model is built without weights (on the meta device).

    Returns:
        `checkpoint`, `model` (its class), `patched`, `report` (None unless patched). Where patched also `parameters`
        (of the whole model), `added_parameters`, `state_bytes`, `dtype`, `format_version` and `package_version`.
    """
    import torch

    from .checkpoints import _model_class
    from .config import LinearAttentionConfig
    from .integration.model_class import linear_attention_class
    from .patching import CONFIG_FIELD, patch_report

    config = read_config(source)
    saved = getattr(config, CONFIG_FIELD, None)
    names = getattr(config, "architectures", None) or [config.model_type]
    facts: dict[str, Any] = {"checkpoint": source, "model": names[0], "patched": saved is not None, "report": None}
    if saved is None:
        return facts
    LinearAttentionConfig.from_dict(saved)
    model_class: Any = linear_attention_class(_model_class(source, config, None))
    with torch.device("meta"):
        model = model_class(config)
    report = patch_report(model)
    dtype = getattr(config, "dtype", None) or torch.float32
    facts.update(
        report=report,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        added_parameters=report.parameters,
        state_bytes=report.state_bytes,
        dtype=str(dtype).removeprefix("torch."),
        format_version=saved["format_version"],
        package_version=saved.get("package_version"),
    )
    return facts
