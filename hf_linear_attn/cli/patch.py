"""`hf-linear-attn patch`."""

import copy
import sys
from dataclasses import dataclass
from typing import Any, Literal

from ..config import LinearAttentionConfig, saved_settings
from ..utils.files import check_output
from ..utils.options import OptionError, check_options, option
from .verb import Verb


@dataclass(frozen=True)
class PatchConfig:
    """Options of `patch`."""

    model: str = option(help="a local folder, a Hub repository, FOLDER/NAME.gguf, or smollm2")
    output: str = option(help="the folder to write")
    attention: str | None = option(None, "the mechanism (see `hf-linear-attn list`)")
    options: dict[str, Any] = option(factory=dict, help="its options, such as --options.num_features 128")
    layers: tuple[int, ...] | None = option(None, "layers, negative ones from the end (default: all)")
    plan: str | None = option(None, "JSON or YAML file with a mechanism for each layer, instead")
    max_length: int | None = option(
        None, "longest input in tokens: learned positions and the tokenizer's limit are extended", least=1
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "precision of the weights (default: as saved)"
    )
    auto_class: str | None = option(None, "class to load, such as AutoModelForCausalLM (default: that of the config)")
    revision: str | None = option(None, "branch, tag or commit of a repository on the Hub")
    overwrite: bool = option(False, "replace an earlier result in the output folder")

    def __post_init__(self) -> None:
        check_options(self)
        if (self.attention is None) == (self.plan is None):
            raise OptionError("attention", "give either attention (a name) or plan (a file).")
        if self.plan is not None and (self.layers is not None or self.options):
            raise OptionError("plan", "layers and options belong to attention. With a plan, write them into the file.")


def run(config: PatchConfig) -> None:
    """Load a checkpoint, patch it, and save it to a folder that appears completely or not at all.

    A patched checkpoint, an unknown class or a plan that does not fit is an error before any weight is read.
    """
    source = config.model
    check_output(config.output, ["config.json"], overwrite=config.overwrite, source=source)
    if config.plan is None:
        plan = LinearAttentionConfig.parse(config.attention or "", config.layers, config.options)
    else:
        plan = LinearAttentionConfig.from_file(config.plan)

    import torch
    from safetensors import SafetensorError

    from ..checkpoints import model_class, read_config, save_checkpoint
    from ..patching import patch_model, patch_report
    from ..utils.gguf import dequantized, split_source
    from ..utils.models import hidden_progress_bars

    name, gguf_file = split_source(source)
    model_config = read_config(source, config.revision)
    if saved_settings(model_config) is not None:
        raise ValueError(
            f"{source!r} is patched already (see `hf-linear-attn info {source}`). Give the checkpoint that it was "
            "made from, or load it and call unpatch_model(model)."
        )
    auto_class = config.auto_class or ("AutoModelForCausalLM" if gguf_file else None)
    own_class: Any = model_class(source, model_config, auto_class)
    with torch.device("meta"):
        patch_model(own_class(copy.deepcopy(model_config)), plan, max_length=config.max_length)
    try:
        with hidden_progress_bars(not sys.stderr.isatty()):
            hub = {"revision": config.revision or "main", **gguf_file}
            model = dequantized(own_class.from_pretrained(name, dtype=config.dtype, **hub))
    except SafetensorError as error:
        raise ValueError(f"The weights in {source!r} cannot be read ({error}): truncated or corrupt.") from error
    patch_model(model, plan, max_length=config.max_length)
    save_checkpoint(model, source, config.output, revision=config.revision, overwrite=config.overwrite)
    sys.stdout.write(f"{patch_report(model)}\nSaved to {config.output}\n")


VERB = Verb(
    "replace the attention of a checkpoint and save it, with its tokenizer",
    PatchConfig,
    run,
    ("model", "output"),
    """\
hf-linear-attn patch ./bert out --attention hedgehog
hf-linear-attn patch ./bert out --attention favor+ --options.num_features 128 --options.seed 1
hf-linear-attn patch ./llama out --attention window --layers 0 1 -1 --dtype bfloat16
hf-linear-attn patch ./llama out --plan plan.json
hf-linear-attn patch ./bert out --attention hedgehog --max_length 4096

plan.json (or plan.yaml) names the mechanism of each layer, for example
  {"default": "hedgehog", "0": "softmax", "-1": {"attention": "window", "window_size": 128}}

The output folder appears completely or not at all. load_pretrained("out") loads it.""",
)
