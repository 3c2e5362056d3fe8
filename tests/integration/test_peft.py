"""PEFT around patched models, through its public functions. (The round trip of every pair: tests/matrix.)"""

from __future__ import annotations

import copy
import functools
import json
from contextlib import nullcontext

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.integration import attention
from tests.comparing import Snapshot, logits
from tests.inputs import token_ids
from tests.small import patched
from tests.tiny_models import BERT, FAMILIES, LLAMA, saved_and_loaded, tiny_model

#: Learned features for both directions; random buffers; parts of the mechanism itself.
PAIRS = [(name, family) for name in ("hedgehog", "favor+", "window") for family in FAMILIES] + [("linformer", BERT)]
every_case = pytest.mark.parametrize(("name", "family"), PAIRS, ids=[f"{name}-{family}" for name, family in PAIRS])


def lora(family, **changes) -> LoraConfig:
    settings = {"r": 2, "modules_to_save": ["linear_attention"], "init_lora_weights": False}
    fan_in = {"fan_in_fan_out": "c_attn" in family.projections}
    return LoraConfig(target_modules=list(family.projections), **{**settings, **fan_in, **changes})


def adapted(model, family, **changes) -> PeftModel:
    """A model with an adapter that changes something, in the projections and in the learned parts."""
    made = get_peft_model(model, lora(family, **changes))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "modules_to_save" in key:
                parameter += 0.1
    return made.eval()


@pytest.mark.slow
@every_case
def test_disabling_the_adapter_brings_the_patched_model_back(name, family):
    model = patched(name, family)
    before = logits(model, token_ids())
    made = adapted(model, family)
    with_adapter = logits(made, token_ids())
    assert not torch.equal(with_adapter, before)
    with made.disable_adapter():
        assert torch.equal(logits(made, token_ids()), before)
    assert torch.equal(logits(made, token_ids()), with_adapter)


@every_case
def test_merged_model_is_a_patched_model(name, family, tmp_path):
    made = adapted(patched(name, family), family)
    expected = logits(made, token_ids())
    merged = made.merge_and_unload()
    assert hla.is_patched(merged)
    assert not [key for key in merged.state_dict() if "lora" in key or "modules_to_save" in key]
    assert torch.allclose(logits(merged, token_ids()), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    loaded = saved_and_loaded(merged, tmp_path)
    assert list(loaded.state_dict()) == list(merged.state_dict())
    assert torch.equal(logits(loaded, token_ids()), logits(merged, token_ids()))
    hla.unpatch_model(merged)
    assert merged.config._attn_implementation == family.build().config._attn_implementation


@every_case
def test_unloading_restores_the_patched_model(name, family):
    model = patched(name, family)
    before = Snapshot.of(model)
    before.assert_same(adapted(model, family, modules_to_save=None).unload())


def test_unloading_keeps_trained_copies_as_peft_does_for_every_module():
    model = patched("hedgehog", LLAMA)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    after = adapted(model, LLAMA).unload().state_dict()
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if "linear_attention" in key}


@every_case
def test_adapter_file_holds_the_learned_parts_and_no_base_weights(name, family, tmp_path):
    made = adapted(patched(name, family), family)
    made.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as opened:
        keys = set(opened.keys())
    learned = {key for key, _ in patched(name, family).named_parameters() if "linear_attention" in key}
    assert {key.removeprefix("base_model.model.") for key in keys if "linear_attention" in key} >= learned
    assert all("lora_" in key or "linear_attention" in key for key in keys)


@pytest.fixture
def exact_checkpoint(tmp_path):
    LLAMA.build().save_pretrained(tmp_path / "exact")
    return str(tmp_path / "exact")


@pytest.mark.slow
@pytest.mark.parametrize("load", [AutoPeftModelForCausalLM, AutoModelForCausalLM], ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_does_not_name_the_exact_checkpoint_as_its_base(load, exact_checkpoint, tmp_path):
    model = hla.patch_model(AutoModelForCausalLM.from_pretrained(exact_checkpoint), "elu")
    assert model.name_or_path == exact_checkpoint
    adapted(model, LLAMA, task_type="CAUSAL_LM").save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        OSError, match=r"exact patched by hf_linear_attn.*call PeftModel\.from_pretrained\(base, adapter"
    ):
        load.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("load", [AutoPeftModelForCausalLM, AutoModelForCausalLM], ids=lambda cls: cls.__name__)
def test_an_adapter_of_a_base_without_a_checkpoint_says_what_is_missing(load, tmp_path):
    model = LLAMA.build()
    hla.patch_model(model.model, "elu")  # The whole is no plain model then.
    assert model.name_or_path == ""
    adapted(model, LLAMA, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"was patched in memory.*call PeftModel\.from_pretrained\(base, adapter"):
        load.from_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_a_patched_checkpoint_needs_trust(tmp_path):
    patched("hedgehog", LLAMA).save_pretrained(tmp_path / "base")
    made = adapted(hla.load_pretrained(str(tmp_path / "base")), LLAMA, task_type="CAUSAL_LM")
    made.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="This checkpoint runs linear attention"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="sdpa")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", trust_remote_code=True)
    assert torch.equal(logits(again, token_ids()), logits(made, token_ids()))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_without_a_task_type_says_which_one_is_missing(tmp_path):
    """PEFT takes the model's own class then, which loads exact models, whatever it is passed."""
    patched("hedgehog", LLAMA).save_pretrained(tmp_path / "base")
    base = hla.load_pretrained(str(tmp_path / "base"))
    made = adapted(base, LLAMA)
    made.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="if the config of the adapter has a task_type"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", trust_remote_code=True)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task_type": "CAUSAL_LM"}))
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", trust_remote_code=True)
    assert torch.equal(logits(again, token_ids()), logits(made, token_ids()))


def test_unpatching_restores_the_name_of_the_checkpoint(exact_checkpoint):
    model = hla.unpatch_model(hla.patch_model(AutoModelForCausalLM.from_pretrained(exact_checkpoint), "elu"))
    assert vars(model)["name_or_path"] == exact_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", "gla", "favor+"])
def test_generation_with_an_adapter_equals_that_without_a_cache(name):
    made = adapted(patched(name, LLAMA), LLAMA)
    settings = {"max_new_tokens": 10, "do_sample": False}
    cached = made.generate(input_ids=token_ids(), **settings)
    assert torch.equal(cached, made.generate(input_ids=token_ids(), use_cache=False, **settings))


@pytest.mark.slow
def test_two_adapters_on_one_model_do_not_mix():
    made = adapted(patched("hedgehog", LLAMA), LLAMA)
    first = logits(made, token_ids())
    made.add_adapter("second", lora(LLAMA))
    made.set_adapter("second")
    second = logits(made, token_ids())
    assert not torch.equal(second, first)
    made.set_adapter("default")
    assert torch.equal(logits(made, token_ids()), first)


def test_rows_with_adapters_of_their_own_share_the_learned_parts():
    model = hla.patch_model(tiny_model("llama"), "hedgehog")
    ids = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    for saved in ([], ["linear_attention"]):
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=saved)
        adapted = get_peft_model(copy.deepcopy(model), config).eval()
        adapted.add_adapter("other", config)
        with pytest.raises(TypeError, match="Mixed batching is only supported for") if saved else nullcontext():
            adapted(**ids, adapter_names=["default", "other"])


def test_without_modules_to_save_the_learned_parts_are_frozen():
    made = adapted(patched("hedgehog", LLAMA), LLAMA, modules_to_save=None)
    made(token_ids()).logits.square().mean().backward()
    learned = [p for key, p in made.named_parameters() if "linear_attention" in key]
    assert learned
    assert all(not p.requires_grad and p.grad is None for p in learned)


@pytest.mark.parametrize("modules_to_save", [None, ["linear_attention"]], ids=str)
def test_new_draws_that_an_adapter_does_not_hold_are_warned_of(modules_to_save, tmp_path, caplog):
    attention.logger.warning_once.cache_clear()
    base = patched("favor+", LLAMA, redraw_every=2)
    made = adapted(copy.deepcopy(base), LLAMA, modules_to_save=modules_to_save).train()
    for _ in range(3):
        made(token_ids(), use_cache=False)
    made.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    saves_mechanisms = modules_to_save is not None
    assert torch.equal(logits(loaded, token_ids()), logits(made, token_ids())) is saves_mechanisms
    assert ("draws new features in the base model of an adapter" in caplog.text) is not saves_mechanisms


def test_patching_below_an_adapter_that_cannot_hold_it_is_warned_of(tmp_path, caplog):
    made = adapted(LLAMA.build(), LLAMA, modules_to_save=None)
    hla.patch_model(made.get_base_model(), "hedgehog")
    assert "has an adapter already, whose file will hold neither 'linear_attention'" in caplog.text
    made.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "linear_attention" in key]  # noqa: SIM118
    caplog.clear()
    merged = made.merge_and_unload()
    hla.patch_model(hla.unpatch_model(merged), "hedgehog")
    assert not caplog.text


@functools.cache
def generation_reads_a_prefix() -> bool:
    """Whether `generate` of an exact model does: PEFT 0.21 passes it by a name that Transformers 5.24 leaves out."""
    model = get_peft_model(LLAMA.build(), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()
    for name, parameter in model.named_parameters():
        if "prompt" in name:
            torch.nn.init.normal_(parameter, std=3.0)
    settings = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    with_prefix = model.generate(input_ids=token_ids(), **settings).scores[0]
    with model.disable_adapter():
        return (with_prefix - model.generate(input_ids=token_ids(), **settings).scores[0]).abs().max().item() > 1e-3


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes it
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_prefix_tuning_is_refused_in_every_mode(family, padded):
    """Its prefix are keys and values of exact attention, which no state holds."""
    task = "CAUSAL_LM" if family.causal else "FEATURE_EXTRACTION"
    model = get_peft_model(patched("hedgehog", family), PrefixTuningConfig(num_virtual_tokens=4, task_type=task))
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0 if padded else 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    for training in (False, True):
        for settings in ({}, {"use_cache": False}) if family.causal else ({},):
            with pytest.raises(ValueError, match="PEFT's prefix tuning"):
                model.train(training)(**inputs, **settings)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with pytest.raises(ValueError, match=r"Gradient checkpointing keeps the cache .* the 4 tokens that it holds"):
            model.train()(**inputs)
        with pytest.raises(ValueError, match="PEFT's prefix tuning"):
            model.eval()(**inputs)
    model.gradient_checkpointing_disable()
    if family.causal:
        if generation_reads_a_prefix():
            with pytest.raises(ValueError, match="PEFT's prefix tuning"):
                model.generate(**inputs, max_new_tokens=2)
        with model.disable_adapter():
            assert bool(torch.isfinite(logits(model, ids)).all())


@pytest.mark.slow
def test_gradient_checkpointing_with_an_adapter_gives_the_same_gradients():
    made = adapted(patched("hedgehog", LLAMA), LLAMA).train()
    trained = [p for p in made.parameters() if p.requires_grad]

    def gradients():
        return torch.autograd.grad(made(token_ids(), use_cache=False).logits.square().mean(), trained)

    base = gradients()
    made.enable_input_require_grads()
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(torch.allclose(new, other, rtol=1e-4, atol=1e-7) for new, other in zip(gradients(), base, strict=True))
