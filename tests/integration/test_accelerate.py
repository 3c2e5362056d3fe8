"""accelerate around patched models, through its public functions: training state, saved weights, offloaded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_submodules
from safetensors import safe_open

import hf_linear_attn as hla
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_pair
from tests.comparing import logits
from tests.inputs import token_ids
from tests.small import open_far_part, patch_small, patched, small_options
from tests.tiny_models import DECODERS, LLAMA

CPU = torch.device("cpu")
#: One with random buffers, one with learned features, one with learned parts of the mechanism itself.
KINDS = ("favor+", "hedgehog", "gla", "window")


def step(model, optimizer, seed: int, backward) -> None:
    optimizer.zero_grad()
    backward(model(token_ids(seed=seed)).logits.square().mean())
    optimizer.step()


@pytest.mark.parametrize("name", KINDS)
def test_prepared_model_is_unwrapped_as_it_was(name):
    model = patched(name, LLAMA)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    assert hla.is_patched(accelerator.unwrap_model(prepared))
    assert torch.equal(logits(prepared, token_ids()), logits(model, token_ids()))
    assert hla.unpatch_model(accelerator.unwrap_model(prepared)) is model


@pytest.mark.parametrize("name", KINDS)
def test_resumed_training_equals_uninterrupted_training(name, tmp_path):
    accelerator = Accelerator(cpu=True)
    start = patched(name, LLAMA)
    model, optimizer = copy.deepcopy(start), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    step(model, optimizer, 0, accelerator.backward)
    accelerator.save_state(str(tmp_path / "state"))
    step(model, optimizer, 1, accelerator.backward)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    other = Accelerator(cpu=True)
    again = copy.deepcopy(start)
    again, optimizer = other.prepare(again, torch.optim.AdamW(again.parameters(), lr=0.01))
    other.load_state(str(tmp_path / "state"))
    step(again, optimizer, 1, other.backward)
    assert list(again.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_state_is_safetensors_with_the_learned_parts(name, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(patched(name, LLAMA))
    accelerator.save_model(model, str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert set(model.state_dict()) == set(opened.keys())


@every_pair()
def test_offloaded_weights_are_brought_for_each_call(name, family, tmp_path):
    """A feature map has no forward that accelerate's hooks could surround: nothing may read weights that are away."""
    model = patched(name, family)
    expected = logits(model, token_ids())
    away = cpu_offload(copy.deepcopy(model), execution_device=CPU, offload_buffers=True)
    assert all(parameter.is_meta for parameter in away.parameters())
    for _ in range(2):
        assert torch.equal(logits(away, token_ids()), expected)
        assert all(parameter.is_meta for parameter in away.parameters())
    remove_hook_from_submodules(away)
    on_disk = disk_offload(copy.deepcopy(model), str(tmp_path), execution_device=CPU, offload_buffers=True)
    assert torch.equal(logits(on_disk, token_ids()), expected)


@pytest.mark.parametrize("family", DECODERS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_offloaded_models_generate(name, family):
    model = patched(name, family)
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(token_ids(), **settings)
    away = cpu_offload(copy.deepcopy(model), execution_device=CPU, offload_buffers=True)
    assert torch.equal(away.generate(token_ids(), **settings), expected)


@pytest.mark.parametrize("name", KINDS)
def test_attention_weights_of_an_offloaded_model(name):
    model = patched(name, LLAMA)
    away = cpu_offload(copy.deepcopy(model), execution_device=CPU)
    with torch.no_grad():
        expected = model(token_ids(), output_attentions=True, use_cache=False).attentions
        actual = away(token_ids(), output_attentions=True, use_cache=False).attentions
    assert all(torch.equal(computed, other) for computed, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", ["hedgehog", "window"])
def test_offloaded_weights_beside_exact_heads(name):
    """The feature map lies two levels below the mixture of heads."""
    model = patched(name, LLAMA, exact_heads=[1])
    away = cpu_offload(copy.deepcopy(model), execution_device=CPU, offload_buffers=True)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(away.generate(token_ids(), **settings), model.generate(token_ids(), **settings))
    with torch.no_grad():
        one, other = (each(token_ids(), output_attentions=True, use_cache=False) for each in (model, away))
    assert all(
        torch.equal(computed, expected) for computed, expected in zip(other.attentions, one.attentions, strict=True)
    )
    assert all(parameter.is_meta for parameter in away.parameters())


def test_weights_come_back_where_a_call_fails():
    away = cpu_offload(patched("hedgehog", LLAMA), execution_device=CPU)
    with pytest.raises(ValueError, match="attention mask"):
        logits(away, token_ids(), attention_mask=torch.ones(2, 5, dtype=torch.long))
    assert all(parameter.is_meta for parameter in away.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_dispatched_over_devices_and_disk(name, tmp_path):
    model = patched(name, LLAMA)
    expected = logits(model, token_ids())
    devices = {"model": "disk", "lm_head": "cpu"}
    spread = dispatch_model(
        copy.deepcopy(model), devices, main_device="cpu", offload_dir=str(tmp_path), offload_buffers=True
    )
    assert torch.equal(logits(spread, token_ids()), expected)


@pytest.mark.parametrize("name", KINDS)
def test_loaded_with_a_device_map(name, tmp_path):
    model = patched(name, LLAMA)
    model.save_pretrained(tmp_path / "model")
    devices = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    devices |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    for device_map in ("cpu", devices):
        folder = {"offload_folder": str(tmp_path / "away"), "offload_buffers": True}
        loaded = hla.load_pretrained(str(tmp_path / "model"), device_map=device_map, **folder)
        assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_patched_without_memory_and_filled_from_a_checkpoint(name, tmp_path):
    model = patched(name, LLAMA)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = hla.patch_model(LLAMA.build(), model.config.linear_attention)
    assert all(p.is_meta for key, p in empty.named_parameters() if "linear_attention" not in key)
    filled = load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"}).eval()
    assert not any(tensor.is_meta for tensor in filled.state_dict().values())
    assert torch.equal(logits(filled, token_ids()), logits(model, token_ids()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [{"default": {"attention": "window", "window_size": 4}}, {"default": "hedgehog", "0": "softmax"}],
    ids=["linear", "mixture"],
)
def test_a_checkpoint_larger_than_memory(plan, tmp_path):
    """Built without memory, then read from its files in shards: half of it stays on the disk, buffers too."""
    model = open_far_part(hla.patch_model(LLAMA.build(), plan))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    with init_empty_weights():
        empty = hla.patch_model(LLAMA.build(), model.config.linear_attention)
    devices = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    devices |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "disk"}
    spread = load_checkpoint_and_dispatch(
        empty,
        str(tmp_path / "model"),
        device_map=devices,
        offload_folder=str(tmp_path / "disk"),
        offload_buffers=True,
        no_split_module_classes=empty._no_split_modules,
    ).eval()
    assert any(parameter.is_meta for parameter in spread.model.layers[1].parameters())
    assert torch.equal(logits(spread, token_ids()), logits(model, token_ids()))
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(spread.generate(token_ids(), **settings), model.generate(token_ids(), **settings))


def test_random_features_are_the_same_without_memory():
    options = small_options(ATTENTIONS.get("favor+").options)
    with init_empty_weights(include_buffers=True):
        empty = hla.patch_model(LLAMA.build(), "favor+", **options)
    buffers = dict(patch_small(LLAMA.build(), "favor+").named_buffers())
    for key, buffer in empty.named_buffers():
        assert buffer.is_meta or "linear_attention" not in key or torch.equal(buffer, buffers[key])
