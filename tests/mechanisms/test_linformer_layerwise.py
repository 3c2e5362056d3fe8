"""Linformer's layerwise sharing: one projection for all layers, tied for good."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import BertForMaskedLM, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.install import is_untrained
from hf_linear_attn.training.transfer import transfer_attention
from tests.comparing import logits
from tests.inputs import token_ids
from tests.tiny_models import tiny_model

OPTIONS: dict[str, Any] = {"sharing": "layerwise", "num_slots": 6}


def modules(model: PreTrainedModel) -> list[Any]:
    return [module.linear_attention for module in model.modules() if hasattr(module, "linear_attention")]


def shared(model: PreTrainedModel) -> bool:
    return len({id(module.project_key) for module in modules(model)}) == 1


@pytest.fixture
def model() -> PreTrainedModel:
    return hla.patch_model(tiny_model("bert", BertForMaskedLM, num_hidden_layers=3), "linformer", **OPTIONS)


@pytest.mark.slow
def test_one_projection_serves_keys_and_values_of_all_layers(model: PreTrainedModel) -> None:
    assert shared(model)
    assert all(module.project_value is None for module in modules(model))
    assert [layer.parameters for layer in hla.patch_report(model).layers] == [6 * 96, 0, 0]
    untied = hla.patch_model(
        tiny_model("bert", BertForMaskedLM, num_hidden_layers=3), "linformer", num_slots=6, sharing="kv"
    )
    untied.load_state_dict(model.state_dict())
    ids = token_ids()
    assert torch.equal(logits(model, ids), logits(untied, ids))


@pytest.mark.slow
def test_other_options_are_another_projection() -> None:
    plan = {
        "default": {"attention": "linformer", **OPTIONS},
        "1": {"attention": "linformer", **OPTIONS, "num_slots": 7},
    }
    model = hla.patch_model(tiny_model("bert", BertForMaskedLM, num_hidden_layers=3), plan)
    first, second, third = modules(model)
    assert first.project_key is third.project_key
    assert second.project_key is not first.project_key


@pytest.mark.slow
def test_saved_once_and_tied_again(model: PreTrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        modules(model)[0].project_key.normal_()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sum("project_key" in name for name in file.keys()) == 1  # noqa: SIM118  (not a mapping)
    for loaded in (hla.load_pretrained(str(tmp_path)), hla.load_pretrained(str(tmp_path), dtype=torch.bfloat16)):
        assert shared(loaded)
    loaded = hla.load_pretrained(str(tmp_path)).eval()
    ids = token_ids()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert (
        json.loads((tmp_path / "config.json").read_text())["linear_attention"]["layers"]["2"]["options"]["sharing"]
        == "layerwise"
    )


@pytest.mark.slow
def test_ties_outlast_copies_casts_and_retying(model: PreTrainedModel) -> None:
    copied = copy.deepcopy(model)
    assert shared(copied)
    assert modules(copied)[0].project_key is not modules(model)[0].project_key
    assert shared(model.to(torch.float64))
    model.tie_weights()
    assert shared(model)
    model.resize_token_embeddings(70)
    assert shared(model)


@pytest.mark.slow
def test_trained_once(model: PreTrainedModel) -> None:
    ids = token_ids()
    done = transfer_attention(
        model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], max_steps=12, learning_rate=1e-2
    )
    assert done.losses[-1] < done.losses[0]
    assert shared(model)


@pytest.mark.slow
def test_unpatched_without_a_trace(model: PreTrainedModel) -> None:
    fresh = tiny_model("bert", BertForMaskedLM, num_hidden_layers=3)
    hla.unpatch_model(model)
    assert model.all_tied_weights_keys == fresh.all_tied_weights_keys
    assert shared(hla.patch_model(model, "linformer", **OPTIONS))


@pytest.mark.slow
def test_peft_trains_untied_copies_and_brings_them_back(model: PreTrainedModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["linear_attention"])
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1 * (1 + len(name) % 3))
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    ids = token_ids()
    assert torch.allclose(logits(again, ids), logits(adapted, ids), atol=1e-6)


@pytest.mark.slow
def test_layers_of_random_projections_are_untrained() -> None:
    """Calibration may fit what nothing has trained, and only that: each layer is built anew to compare with."""
    model = hla.patch_model(tiny_model("bert"), "linformer", init="gaussian", **OPTIONS)
    assert is_untrained(model)
    with torch.no_grad():
        modules(model)[0].project_key.add_(1)
    assert not is_untrained(model)
