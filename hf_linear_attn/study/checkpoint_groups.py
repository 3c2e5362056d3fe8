"""Checkpoints that an evaluation compares with the exact model, grouped by how they were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..config import saved_settings
from ..measure.speed import timing_options
from ..mechanisms.softmax import EXACT
from ..registry import ATTENTIONS
from ..utils.sources import loading_errors


@dataclass(frozen=True)
class CheckpointGroup:
    """Checkpoints that differ in their weights and seeds only: converted ones, or tuned ones with exact attention."""

    attention: str  # the mechanism of most layers (`softmax` for exact attention)
    layers: Mapping[str, Any]  # the config of each patched layer; empty for exact attention
    folders: Mapping[str, str]  # with the fingerprint of each
    label: str = ""  # which no other group has

    @property
    def state(self) -> str:
        return "converted" if self.layers else "tuned"

    @property
    def identity(self) -> str:
        """A text that is equal for groups which differ in weights and seeds only."""
        layers = {index: {**layer, "options": _without_seeds(layer["options"])} for index, layer in self.layers.items()}
        return json.dumps(layers, sort_keys=True, default=str)

    def sized(self, *longest: Any) -> CheckpointGroup:
        """Return the group as it is timed with inputs up to a length (the last arguments of `timing_options`)."""
        layers = {
            index: {**layer, "options": timing_options(ATTENTIONS.get(layer["attention"]), layer["options"], *longest)}
            for index, layer in self.layers.items()
        }
        return replace(self, layers=layers)


def _without_seeds(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mechanism without its seed and that of its feature map."""
    return {
        name: _without_seeds(item) if isinstance(item, Mapping) else item
        for name, item in options.items()
        if name != "seed"
    }


def find_checkpoints(converted: Sequence[str], baseline: Sequence[str], exact_config: Any) -> list[CheckpointGroup]:
    """Group checkpoints, tuned ones with exact attention first, by their layers. Weights are not loaded yet.

    Raises:
        ValueError, OSError: A folder is missing, no checkpoint, of the wrong kind, or of another architecture than the
            exact model's config.
    """
    groups: dict[str, CheckpointGroup] = {}
    for folder in (*baseline, *converted):
        with loading_errors(f"The checkpoint {folder!r}"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        saved = saved_settings(config)
        if folder in baseline and saved is not None:
            raise ValueError(f"{folder!r} is patched; a baseline has exact attention. Give it with --converted.")
        if folder in converted and saved is None:
            raise ValueError(f"{folder!r} has exact attention: nothing was converted. Give it with --baseline.")
        check_same_shape(folder, config, exact_config)
        layers = {} if saved is None else {str(index): layer for index, layer in saved["layers"].items()}
        names = [layer["attention"] for layer in layers.values()] or [EXACT]
        group = CheckpointGroup(max(dict.fromkeys(names), key=names.count), layers, {})
        group = groups.get(group.identity, group)
        folders = {**group.folders, folder: folder_fingerprint(Path(folder))}
        groups[group.identity] = replace(group, folders=folders)
    labelled: list[CheckpointGroup] = []
    for group in groups.values():
        base = f"{group.attention} ({group.state})"
        count = sum(other.label.startswith(base) for other in labelled)
        labelled.append(replace(group, label=f"{base} {count + 1}" if count else base))
    return labelled


def check_same_shape(folder: str, config: Any, exact_config: Any) -> None:
    """Raise a ValueError if a checkpoint does not have the shape of the exact model."""
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        value = getattr(config, name, None)
        expected = getattr(exact_config, name, None)
        if value != expected:
            raise ValueError(f"{folder!r} was not made from this model: its {name} is {value!r}, not {expected!r}.")


def folder_fingerprint(folder: Path) -> str:
    """Return the SHA-256 over a checkpoint's config and weights. Raises a ValueError if it has no weights."""
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{str(folder)!r} has no weights (*.safetensors). Give a complete checkpoint.")
    for path in (folder / "config.json", *weights):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
