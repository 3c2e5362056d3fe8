"""Checkpoints and plans that were changed, cut short, or written by somebody else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_linear_attn as hla
from hf_linear_attn.config import FORMAT_VERSION, LinearAttentionConfig
from tests.comparing import logits
from tests.faults.checks import CreatesFileWhenUnpickled, Observed, error_message
from tests.inputs import token_ids
from tests.small import patched
from tests.tiny_models import BERT

WEIGHTS = "model.safetensors"
LEARNED = "bert.encoder.layer.1.attention.self.linear_attention.feature_map.query_weight"


def saved(tmp_path: Path) -> Path:
    patched("hedgehog", BERT).save_pretrained(tmp_path)
    return tmp_path


def loading(tmp_path: Path) -> Callable[[], Any]:
    return lambda: hla.load_pretrained(str(tmp_path))


def with_weights(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(saved(tmp_path) / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    return tmp_path


def with_config(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = saved(tmp_path) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="the weights file is empty", expected="refused, named as cut short")
def test_empty_weights(tmp_path: Path, observed: Observed) -> None:
    (saved(tmp_path) / WEIGHTS).write_bytes(b"")
    observed(error_message(loading(tmp_path), ValueError, str(tmp_path), "truncated or corrupt"))


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="the weights file ends half-way", expected="refused, named as cut short")
def test_half_weights(tmp_path: Path, observed: Observed) -> None:
    path = saved(tmp_path) / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    observed(error_message(loading(tmp_path), ValueError, str(tmp_path), "truncated or corrupt"))


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint", what="the header of the weights file is noise", expected="refused, named as corrupt"
)
def test_corrupt_header(tmp_path: Path, observed: Observed) -> None:
    path = saved(tmp_path) / WEIGHTS
    data = bytearray(path.read_bytes())
    data[8:72] = os.urandom(64)
    path.write_bytes(bytes(data))
    observed(error_message(loading(tmp_path), ValueError, str(tmp_path), "truncated or corrupt"))


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint", what="the header asks for 2^60 bytes", expected="refused, and no memory is taken for it"
)
def test_huge_header(tmp_path: Path, observed: Observed) -> None:
    path = saved(tmp_path) / WEIGHTS
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    observed(error_message(loading(tmp_path), ValueError, str(tmp_path), "truncated or corrupt"))


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="the weights file is missing", expected="an OSError that names the folder")
def test_no_weights(tmp_path: Path, observed: Observed) -> None:
    (saved(tmp_path) / WEIGHTS).unlink()
    observed(error_message(loading(tmp_path), OSError, str(tmp_path), WEIGHTS))


@pytest.mark.fault(group="checkpoint", what="a learned weight is missing", expected="refused, the weight named")
def test_missing_weight(tmp_path: Path, observed: Observed) -> None:
    observed(
        error_message(
            loading(with_weights(tmp_path, lambda tensors: tensors.pop(LEARNED))), ValueError, "missing", LEARNED
        )
    )


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="a learned weight has another shape", expected="refused, the weight named")
def test_wrong_shape(tmp_path: Path, observed: Observed) -> None:
    observed(
        error_message(
            loading(with_weights(tmp_path, lambda tensors: tensors.update({LEARNED: torch.ones(3)}))),
            ValueError,
            LEARNED,
        )
    )


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint", what="a weight of the original model has another shape", expected="refused, the weight named"
)
def test_wrong_shape_elsewhere(tmp_path: Path, observed: Observed) -> None:
    name = "bert.embeddings.LayerNorm.bias"
    observed(
        error_message(
            loading(with_weights(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))), ValueError, name
        )
    )


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint", what="settings of a newer format", expected="refused, with the upgrade as the remedy"
)
def test_from_the_future(tmp_path: Path, observed: Observed) -> None:
    change = {"format_version": FORMAT_VERSION + 1, "package_version": "9.0"}
    with_config(tmp_path, lambda config: config["linear_attention"].update(change))
    observed(error_message(loading(tmp_path), ValueError, "9.0", "pip install -U hf-linear-attn"))


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="settings name an unknown mechanism", expected="refused, with near matches")
def test_unknown_mechanism(tmp_path: Path, observed: Observed) -> None:
    with_config(tmp_path, lambda config: config["linear_attention"]["layers"]["0"].update(attention="hedgehogg"))
    observed(error_message(loading(tmp_path), ValueError, "hedgehogg", "Did you mean"))


@pytest.mark.slow
@pytest.mark.fault(group="checkpoint", what="config.json ends half-way", expected="an error that names the file")
def test_half_config(tmp_path: Path, observed: Observed) -> None:
    path = saved(tmp_path) / "config.json"
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    observed(error_message(loading(tmp_path), OSError, "config.json"))


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint", what="weights as a pickle instead of safetensors", expected="what it holds is not run"
)
def test_pickled_weights(tmp_path: Path, observed: Observed) -> None:
    (saved(tmp_path) / WEIGHTS).unlink()
    torch.save({"weight": CreatesFileWhenUnpickled(str(tmp_path / "ran"))}, tmp_path / "pytorch_model.bin")
    message = error_message(loading(tmp_path), Exception)
    assert not (tmp_path / "ran").exists(), "the pickle was run"
    observed(message)


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint",
    what="the index of the shards names a file outside of the folder",
    expected="refused, the file named",
)
def test_escaping_index(tmp_path: Path, observed: Observed) -> None:
    model = patched("hedgehog", BERT)
    folder = tmp_path / "inside"
    model.save_pretrained(folder)
    (folder / WEIGHTS).rename(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), "../outside.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    observed(error_message(loading(folder), ValueError, "../outside.safetensors"))


@pytest.mark.slow
@pytest.mark.fault(
    group="checkpoint",
    what="the folder is read while it is replaced",
    expected="the old model or the new one, never a mixture",
)
def test_replaced_while_read(tmp_path: Path, observed: Observed) -> None:
    from hf_linear_attn.utils.files import atomic_folder

    target = tmp_path / "model"
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = patched("hedgehog", BERT)
        outputs.append(logits(model, token_ids()))
        with atomic_folder(target) as temporary:
            model.save_pretrained(temporary)
            if seed:
                assert torch.equal(logits(hla.load_pretrained(str(target)), token_ids()), outputs[0])
    assert torch.equal(logits(hla.load_pretrained(str(target)), token_ids()), outputs[1])
    observed("the old one until the rename, then the new one")


# --------------------------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.fault(group="plan file", what="YAML that would make an object", expected="refused; nothing is run")
def test_yaml_object(tmp_path: Path, observed: Observed) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(f"default: !!python/object/apply:os.system ['touch {tmp_path / 'ran'}']\n", encoding="utf-8")
    message = error_message(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "not YAML")
    assert not (tmp_path / "ran").exists()
    observed(message)


@pytest.mark.fault(group="plan file", what="a layer given twice", expected="refused, the layer named")
def test_twice(tmp_path: Path, observed: Observed) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"0": "hedgehog", "0": "elu"}', encoding="utf-8")
    observed(error_message(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "named twice"))


@pytest.mark.fault(group="plan file", what="an option of the wrong type", expected="refused, file and value named")
def test_wrong_type(tmp_path: Path, observed: Observed) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"default": {"attention": "window", "window_size": "wide"}}', encoding="utf-8")
    observed(error_message(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path), "wide"))


@pytest.mark.fault(group="plan file", what="bytes that are no text", expected="refused, the file named")
def test_no_text(tmp_path: Path, observed: Observed) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00{")
    observed(error_message(lambda: LinearAttentionConfig.from_file(path), ValueError, str(path)))
