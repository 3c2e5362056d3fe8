"""Checkpoints and plans that were changed, cut short, or written by somebody else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hf_linear_attn as hla
from hf_linear_attn.config import FORMAT_VERSION, LinearAttentionConfig
from tests.faults.trying import fault, told
from tests.helpers import BERT, logits, patched, token_ids

WEIGHTS = "model.safetensors"
LEARNED = "bert.encoder.layer.1.attention.self.linear_attention.feature_map.query_weight"


def saved(place: Path) -> Path:
    patched("hedgehog", BERT).save_pretrained(place)
    return place


def loading(place: Path) -> Callable[[], Any]:
    return lambda: hla.load_pretrained(str(place))


def with_weights(place: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    held = load_file(saved(place) / WEIGHTS)
    change(held)
    save_file(held, place / WEIGHTS, metadata={"format": "pt"})
    return place


def with_config(place: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = saved(place) / "config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    change(held)
    path.write_text(json.dumps(held), encoding="utf-8")
    return place


@fault("checkpoint", "the weights file is empty", "refused, named as cut short")
def empty_weights(place: Path) -> str:
    (saved(place) / WEIGHTS).write_bytes(b"")
    return told(loading(place), ValueError, str(place), "truncated or corrupt")


@fault("checkpoint", "the weights file ends half-way", "refused, named as cut short")
def half_weights(place: Path) -> str:
    path = saved(place) / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return told(loading(place), ValueError, str(place), "truncated or corrupt")


@fault("checkpoint", "the header of the weights file is noise", "refused, named as corrupt")
def corrupt_header(place: Path) -> str:
    path = saved(place) / WEIGHTS
    data = bytearray(path.read_bytes())
    data[8:72] = os.urandom(64)
    path.write_bytes(bytes(data))
    return told(loading(place), ValueError, str(place), "truncated or corrupt")


@fault("checkpoint", "the header asks for 2^60 bytes", "refused, and no memory is taken for it")
def huge_header(place: Path) -> str:
    path = saved(place) / WEIGHTS
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    return told(loading(place), ValueError, str(place), "truncated or corrupt")


@fault("checkpoint", "the weights file is missing", "an OSError that names the folder")
def no_weights(place: Path) -> str:
    (saved(place) / WEIGHTS).unlink()
    return told(loading(place), OSError, str(place), WEIGHTS)


@fault("checkpoint", "a learned weight is missing", "refused, the weight named")
def missing_weight(place: Path) -> str:
    return told(loading(with_weights(place, lambda held: held.pop(LEARNED))), ValueError, "missing", LEARNED)


@fault("checkpoint", "a learned weight has another shape", "refused, the weight named")
def wrong_shape(place: Path) -> str:
    return told(loading(with_weights(place, lambda held: held.update({LEARNED: torch.ones(3)}))), ValueError, LEARNED)


@fault("checkpoint", "a weight of the original model has another shape", "refused, the weight named")
def wrong_shape_elsewhere(place: Path) -> str:
    name = "bert.embeddings.LayerNorm.bias"
    return told(loading(with_weights(place, lambda held: held.update({name: torch.ones(3)}))), ValueError, name)


@fault("checkpoint", "settings of a newer format", "refused, with the upgrade as the remedy")
def from_the_future(place: Path) -> str:
    change = {"format_version": FORMAT_VERSION + 1, "package_version": "9.0"}
    with_config(place, lambda held: held["linear_attention"].update(change))
    return told(loading(place), ValueError, "9.0", "pip install -U hf-linear-attn")


@fault("checkpoint", "settings name an unknown mechanism", "refused, with near matches")
def unknown_mechanism(place: Path) -> str:
    with_config(place, lambda held: held["linear_attention"]["layers"]["0"].update(attention="hedgehogg"))
    return told(loading(place), ValueError, "hedgehogg", "Did you mean")


@fault("checkpoint", "config.json ends half-way", "an error that names the file")
def half_config(place: Path) -> str:
    path = saved(place) / "config.json"
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    return told(loading(place), OSError, "config.json")


@fault("checkpoint", "weights as a pickle instead of safetensors", "what it holds is not run")
def pickled_weights(place: Path) -> str:
    (saved(place) / WEIGHTS).unlink()
    torch.save({"weight": Evil(str(place / "ran"))}, place / "pytorch_model.bin")
    message = told(loading(place), Exception)
    assert not (place / "ran").exists(), "the pickle was run"
    return message


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@fault("checkpoint", "the index of the shards names a file outside of the folder", "refused, the file named")
def escaping_index(place: Path) -> str:
    model = patched("hedgehog", BERT)
    folder = place / "inside"
    model.save_pretrained(folder)
    (folder / WEIGHTS).rename(place / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), "../outside.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return told(loading(folder), ValueError, "../outside.safetensors")


@fault("checkpoint", "the folder is read while it is replaced", "the old model or the new one, never a mixture")
def replaced_while_read(place: Path) -> str:
    from hf_linear_attn.training.saving import whole_folder

    target = place / "model"
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = patched("hedgehog", BERT)
        outputs.append(logits(model, token_ids()))
        with whole_folder(target) as aside:
            model.save_pretrained(aside)
            if seed:
                assert torch.equal(logits(hla.load_pretrained(str(target)), token_ids()), outputs[0])
    assert torch.equal(logits(hla.load_pretrained(str(target)), token_ids()), outputs[1])
    return "the old one until the rename, then the new one"


# --------------------------------------------------------------------------------------------------------------------
# Plans


@fault("plan file", "YAML that would make an object", "refused; nothing is run")
def yaml_object(place: Path) -> str:
    path = place / "plan.yaml"
    path.write_text(f"default: !!python/object/apply:os.system ['touch {place / 'ran'}']\n", encoding="utf-8")
    message = told(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "not YAML")
    assert not (place / "ran").exists()
    return message


@fault("plan file", "a layer given twice", "refused, the layer named")
def twice(place: Path) -> str:
    path = place / "plan.json"
    path.write_text('{"0": "hedgehog", "0": "elu"}', encoding="utf-8")
    return told(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "named twice")


@fault("plan file", "an option of the wrong type", "refused, file and value named")
def wrong_type(place: Path) -> str:
    path = place / "plan.json"
    path.write_text('{"default": {"attention": "window", "window_size": "wide"}}', encoding="utf-8")
    return told(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "wide")


@fault("plan file", "bytes that are no text", "refused, the file named")
def no_text(place: Path) -> str:
    path = place / "plan.json"
    path.write_bytes(b"\xff\xfe\x00{")
    return told(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path))
