"""`hf-linear-attn info`."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ..config import CONFIG_FIELD, LinearAttentionConfig, saved_settings
from ..utils.options import option
from ..utils.sources import read_config_file
from .verb import Verb


@dataclass(frozen=True)
class InfoConfig:
    """Options of `info`."""

    model: str = option(help="a local folder or a repository on the Hub")
    json: bool = option(False, "print JSON")


def run(config: InfoConfig) -> None:
    """Print what is patched in a checkpoint. Only its config is read; its model is built on the meta device."""
    saved = read_config_file(config.model)
    if not saved:  # a GGUF file
        from ..checkpoints import read_config

        saved = read_config(config.model).to_dict()
    patched = saved.get(CONFIG_FIELD) is not None
    name = (saved.get("architectures") or [saved.get("model_type")])[0]
    facts: dict[str, Any] = {"checkpoint": config.model, "model": name, "patched": patched, "layers": []}
    text = (
        f"{config.model}: {name} without linear attention. "
        f"Patch it with `hf-linear-attn patch {config.model} OUTPUT --attention NAME`.\n"
    )
    if patched:
        LinearAttentionConfig.from_dict(saved[CONFIG_FIELD])
        more, text = _describe_patched(config.model)
        facts.update(more)
    sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n" if config.json else text)


def _describe_patched(name: str) -> tuple[dict[str, Any], str]:
    """Return what is patched in a checkpoint, as facts and as text, from its model on the meta device."""
    from ..checkpoints import model_without_weights, read_config
    from ..patching import patch_report

    model_config = read_config(name)
    saved = saved_settings(model_config)
    assert saved is not None
    model = model_without_weights(name, model_config)
    report = patch_report(model)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "added_parameters": report.parameters,
        "state_bytes": report.state_bytes,
        "dtype": str(model_config.dtype or "float32").removeprefix("torch."),
        "format_version": saved["format_version"],
        "package_version": saved.get("package_version"),
        "layers": [asdict(layer) for layer in report.layers],
    }
    return facts, (
        f"{report}\n"
        f"{'':>5}  {facts['parameters']:,} parameters in all, saved as {facts['dtype']}; "
        f"{facts['state_bytes']:,} state bytes per sequence in float32\n"
        f"{'':>5}  format {facts['format_version']}, written by hf-linear-attn {facts['package_version']}\n"
    )


VERB = Verb(
    "show the linear attention of a checkpoint, layer by layer, without loading its weights",
    InfoConfig,
    run,
    ("model",),
    "hf-linear-attn info out --json",
)
