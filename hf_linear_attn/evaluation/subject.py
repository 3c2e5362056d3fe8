"""The exact model that is measured, the checkpoints converted from it, and the keys of their measurements."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..patching import CONFIG_FIELD, patch_model
from ..registry import AttentionEntry
from .loading import fingerprint
from .measurements import Key, place_of
from .report import environment
from .speed import shared_copy

#: The mechanism of keys that belong to the exact model.
EXACT = "softmax"


@dataclass(frozen=True)
class Subject:
    """kind: decoder, encoder or classifier. baseline: the attention implementation that it was loaded with."""

    model: PreTrainedModel
    kind: str
    name: str
    fingerprint: str
    baseline: str
    place: Mapping[str, Any]

    @classmethod
    def of(cls, model: PreTrainedModel, kind: str, name: str) -> Subject:
        """A loaded model on its device."""
        place = place_of(environment(model.device))
        place["device"].update(dtype=str(model.dtype).removeprefix("torch."), backend=backend_in_use(model.device))
        return cls(model.eval(), kind, name, fingerprint(model), str(model.config._attn_implementation), place)

    def cast(self, dtype: str | None) -> Subject:
        """The same model in another precision, as its keys say: a copy. None: as it is."""
        if dtype in (None, self.place["device"]["dtype"]):
            return self
        model: Any = copy.deepcopy(self.model)
        return replace(self, model=model.to(getattr(torch, str(dtype))), place=self.place_in(dtype))

    def place_in(self, dtype: str | None) -> dict[str, Any]:
        """The place of measurements in this precision (None: the model's)."""
        device = self.place["device"]
        return {**self.place, "device": {**device, "dtype": dtype or device["dtype"]}}

    def key(self, mechanism: Mapping[str, Any], measure: Mapping[str, Any]) -> Key:
        model = {"name": self.name, "fingerprint": self.fingerprint}
        return Key(model, mechanism, measure, self.place["device"], self.place["versions"])


def backend_in_use(device: Any) -> str:
    """The name of the backend that serves kernelized attention here where it can; some calls fall back to torch."""
    from ..ops.backends import get_backend
    from ..ops.native.backend import unavailable_reason

    if get_backend() != "auto":
        return get_backend()
    return "torch" if device.type != "cpu" or unavailable_reason() is not None else "native"


def default_options(entry: AttentionEntry, seed: int) -> dict[str, Any]:
    """The mechanism's defaults, with the study's seed where it has one."""
    return {"seed": seed} if any(field.name == "seed" for field in fields(entry.options)) else {}


# --------------------------------------------------------------------------------------------------------------------
# Converted checkpoints


@dataclass(frozen=True)
class Member:
    """One checkpoint of a group; `load` reads its weights."""

    folder: str
    fingerprint: str
    load: Callable[[], PreTrainedModel]


@dataclass(frozen=True)
class Group:
    """Checkpoints that differ in their weights and seeds only. layers: what is patched, as their config says (empty:
    exact attention); attention: the mechanism of most of them."""

    name: str
    attention: str
    layers: Mapping[str, Any]
    members: tuple[Member, ...]

    @property
    def base_name(self) -> str:
        """The name without a number that tells groups of one mechanism apart."""
        return f"{self.attention} ({'converted' if self.layers else 'tuned'})"

    @property
    def same(self) -> str:
        """Equal for groups that differ in weights and seeds only."""
        return json.dumps(_without_seeds(self.layers), sort_keys=True, default=str)

    @property
    def options(self) -> dict[str, Any]:
        """Of the first layer with the mechanism of most."""
        held = next(one for one in self.layers.values() if one["attention"] == self.attention)
        return dict(held["options"])


def find_groups(folders: Sequence[str], auto_class: Any, subject: Any, device: Any, *, exact: bool) -> list[Group]:
    """The checkpoints in these folders, those with the same layers together. Weights are not read yet.

    Args:
        subject: the config of the exact model.
        exact: whether they hold exact attention (tuned baselines) or linear attention.

    Raises:
        ValueError, OSError: a folder that is missing, no checkpoint, of the wrong kind, or of another architecture.
    """
    found: dict[str, Group] = {}
    for folder in folders:
        config = _config_of(folder)
        saved = getattr(config, CONFIG_FIELD, None)
        if exact and saved is not None:
            raise ValueError(f"{folder!r} is patched; a baseline has exact attention. Give it with --converted.")
        if not exact and saved is None:
            raise ValueError(f"{folder!r} has exact attention: nothing was converted. Give it with --baseline.")
        check_same_model(folder, config, subject)
        layers = {} if saved is None else {str(index): held for index, held in saved["layers"].items()}
        member = Member(Path(folder).name, folder_fingerprint(Path(folder)), _loader(folder, auto_class, exact, device))
        kinds = [held["attention"] for held in layers.values()]
        attention = max(dict.fromkeys(kinds), key=kinds.count) if kinds else EXACT
        group = Group("", attention, layers, (member,))
        known = found.get(group.same)
        found[group.same] = group if known is None else replace(known, members=(*known.members, member))
    return named_apart(list(found.values()))


def named_apart(groups: Sequence[Group]) -> list[Group]:
    """The groups, each with a name of its own."""
    names: dict[str, int] = {}
    apart = []
    for group in groups:
        base = group.base_name
        names[base] = names.get(base, 0) + 1
        apart.append(replace(group, name=base if names[base] == 1 else f"{base} {names[base]}"))
    return apart


def _config_of(folder: str) -> Any:
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"There is no folder {folder!r}. Give one that `hf-linear-attn convert` wrote.")
    if not (path / "config.json").is_file():
        inner = path / "model"
        remedy = f"Give {str(inner)!r}." if (inner / "config.json").is_file() else "Give the folder of a checkpoint."
        raise ValueError(f"{folder!r} holds no config.json: it is no checkpoint. {remedy}")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def check_same_model(folder: str, config: Any, subject: Any) -> None:
    """Whether a checkpoint has the shape of the model. Raises a ValueError that names the difference."""
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        own, wanted = getattr(config, name, None), getattr(subject, name, None)
        if own != wanted:
            raise ValueError(f"{folder!r} was not made from this model: its {name} is {own!r}, not {wanted!r}.")


def _loader(folder: str, auto_class: Any, exact: bool, device: Any) -> Callable[[], PreTrainedModel]:
    def load() -> PreTrainedModel:
        from ..checkpoints import load_pretrained
        from ..utils.models import quiet_transformers

        with quiet_transformers():
            loaded = auto_class.from_pretrained(folder) if exact else load_pretrained(folder, auto_class)
        return loaded.eval().to(device)

    return load


def _without_seeds(layers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        index: {
            **held,
            "options": {name: value for name, value in sorted(held["options"].items()) if name != "seed"},
        }
        for index, held in sorted(layers.items())
    }


def folder_fingerprint(folder: Path) -> str:
    """SHA-256 over a checkpoint's config and weights.

    Raises:
        ValueError: it holds no weights.
    """
    digest = hashlib.sha256()
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{str(folder)!r} holds no weights (*.safetensors). Give a whole checkpoint.")
    for path in (folder / "config.json", *weights):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(2**22):
                digest.update(part)
    return digest.hexdigest()


def longer_layers(layers: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The layers with room for `longest` tokens where a mechanism is built for a largest length."""
    found = {}
    for index, held in layers.items():
        options = dict(held["options"])
        if isinstance(options.get("max_length"), int):
            options["max_length"] = max(options["max_length"], longest)
        found[index] = {**held, "options": options}
    return found


def patched_like(group: Group, exact: PreTrainedModel) -> PreTrainedModel:
    """A copy of the exact model with the group's mechanisms in the same layers, untrained: for what does not depend on
    weights."""
    given = {index: {"attention": held["attention"], **held["options"]} for index, held in group.layers.items()}
    return patch_model(shared_copy(exact), {"default": EXACT, **given})
