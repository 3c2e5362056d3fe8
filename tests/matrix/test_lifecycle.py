"""Every mechanism in every family: saving, copying, taking out again, adapters, and models that must not notice."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import hf_linear_attn as hla
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_pair
from tests.comparing import Snapshot, config_dict, logits
from tests.inputs import token_ids
from tests.small import patch_small, patched, small_options
from tests.tiny_models import saved_and_loaded


@every_pair()
def test_saved_and_loaded_bit_equal(name, family, tmp_path):
    model = patched(name, family)
    loaded = saved_and_loaded(model, tmp_path)
    assert type(loaded).__name__ == type(model).__name__
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert loaded.config.linear_attention == model.config.linear_attention
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


@every_pair()
def test_every_tensor_is_contiguous(name, family):
    """As safetensors wants what it writes, when it is called without Transformers."""
    model = patched(name, family)
    assert [key for key, tensor in model.state_dict().items() if not tensor.is_contiguous()] == []


@every_pair()
def test_unpatching_restores_everything(name, family):
    model = family.build()
    before = Snapshot.of(model)
    patch_small(model, name)
    assert hla.is_patched(model)
    assert hla.unpatch_model(model) is model
    assert not hla.is_patched(model)
    before.assert_same(model)


@every_pair()
def test_patching_again_after_unpatching(name, family):
    model = family.build()
    options = small_options(ATTENTIONS.get(name).options)
    first = logits(hla.patch_model(model, name, **options), token_ids())
    hla.patch_model(hla.unpatch_model(model), name, **options)
    assert torch.equal(logits(model, token_ids()), first)


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@every_pair()
def test_copies_are_equal_and_independent(name, family, copier):
    model = patched(name, family)
    before = logits(model, token_ids())
    other = copier(model)
    assert hla.is_patched(other)
    assert type(other) is type(model)
    assert torch.equal(logits(other, token_ids()), before)
    hla.unpatch_model(other)
    assert torch.equal(logits(model, token_ids()), before)


@every_pair()
def test_state_dict_round_trip(name, family):
    model, other = patched(name, family), patched(name, family)
    assert not torch.equal(logits(model, token_ids()), logits(other, token_ids()))
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(logits(model, token_ids()), logits(other, token_ids()))


@every_pair()
def test_a_model_sharing_the_config_does_not_notice(name, family):
    teacher = family.build()
    student = type(teacher)(teacher.config).eval()
    assert student.config is teacher.config
    before = Snapshot.of(teacher)
    patch_small(student, name)
    before.assert_same(teacher)
    hla.unpatch_model(student)
    before.assert_same(teacher)


@every_pair()
def test_a_patched_model_is_still_its_class(name, family):
    model = family.build()
    patched_class = type(model)
    patch_small(model, name)
    assert isinstance(model, patched_class)
    assert (type(model).__name__, type(model).__module__) == (patched_class.__name__, patched_class.__module__)
    assert "linear_attention" in repr(model)
    assert hla.unpatch_model(model).config.architectures == patched_class(model.config).config.architectures


@every_pair()
def test_the_report_tells_parameters_and_state(name, family):
    model = patched(name, family)
    report, entry = hla.patch_report(model), ATTENTIONS.get(name)
    added = sum(p.numel() for key, p in model.named_parameters() if "linear_attention" in key)
    assert report.parameters == added
    assert [layer.attention for layer in report.layers] == [name, name]
    assert bool(report.parameters) is entry.learned
    assert bool(report.state_bytes) is (family.causal and entry.state != "none")
    assert name in str(report)


@every_pair()
def test_lora_round_trip(name, family, tmp_path):
    base = family.build()
    weights = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    options = small_options(ATTENTIONS.get(name).options)
    lora = LoraConfig(
        r=2,
        target_modules=list(family.projections),
        modules_to_save=["linear_attention"],
        fan_in_fan_out="c_attn" in family.projections,
        init_lora_weights=False,
    )
    model = get_peft_model(hla.patch_model(base, name, **options), lora)
    untrained = logits(model, token_ids())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(token_ids()).logits.square().mean().backward()
    optimizer.step()
    expected = logits(model.eval(), token_ids())
    assert not torch.equal(expected, untrained)
    model.save_pretrained(tmp_path)

    other = family.build()
    other.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(hla.patch_model(other, name, **options), tmp_path).eval()
    assert torch.equal(logits(loaded, token_ids()), expected)


@every_pair()
def test_lora_trains_the_learned_parts_too(name, family):
    lora = LoraConfig(
        target_modules=list(family.projections),
        modules_to_save=["linear_attention"],
        fan_in_fan_out="c_attn" in family.projections,
    )
    model = get_peft_model(patched(name, family), lora)
    model(token_ids()).logits.square().mean().backward()
    learned = [p for key, p in model.named_parameters() if "linear_attention" in key and p.requires_grad]
    assert bool(learned) is ATTENTIONS.get(name).learned
    assert all(float(p.grad.abs().max()) > 0 for p in learned)


@every_pair()
def test_config_dict_is_json_and_reads_back(name, family):
    model = patched(name, family)
    saved = model.config.linear_attention
    assert hla.LinearAttentionConfig.from_dict(saved).to_dict() == saved
    assert config_dict(model)["_attn_implementation"] == "hf_linear_attn"
    other = hla.patch_model(family.build(), saved)
    assert other.config.linear_attention == saved
