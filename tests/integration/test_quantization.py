"""int8 weights: quantized before patching, after it, and while a patched checkpoint is loaded."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BitsAndBytesConfig, TorchAoConfig

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.small import open_far_part, patched
from tests.tiny_models import BERT, LLAMA

#: int8 keeps 7 bits of each weight; random weights magnify what that changes (favor up to 0.44, the others up to 0.1).
TOLERANCE = 0.5
FAMILIES = (BERT, LLAMA)
AUTO = {BERT: AutoModelForMaskedLM, LLAMA: AutoModelForCausalLM}


def torchao_config(name):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao, from the extra 'torchao'")
    return getattr(quantization, f"Int8{name}Config")()


def quantize_in_memory(kind, model):
    """Quantize the linear layers of a model with the default filter of each library."""
    if kind == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It is deprecated.
            return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    config = torchao_config(kind)
    from torchao.quantization import quantize_

    quantize_(model, config)
    return model


def difference(model, other):
    """`|a - b| / |b|` of the outputs."""
    expected = logits(other, token_ids())
    return ((logits(model, token_ids()) - expected).norm() / expected.norm()).item()


def loading_config(kind):
    if kind == "bitsandbytes":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
        return BitsAndBytesConfig(load_in_8bit=True)
    return TorchAoConfig(torchao_config(kind))


IN_MEMORY = pytest.mark.parametrize("kind", ["WeightOnly", "DynamicActivationInt8Weight", "torch"])
WHILE_LOADED = pytest.mark.parametrize("kind", ["WeightOnly", "DynamicActivationInt8Weight", "bitsandbytes"])
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)


@every_pair(FAMILIES, quick=[("window", LLAMA), ("linformer", BERT)])
@IN_MEMORY
def test_patched_then_quantized(name, family, kind):
    """The parts of linear attention stay as they are: none of them is an `nn.Linear`."""
    model = patched(name, family)
    quantized = quantize_in_memory(kind, copy.deepcopy(model))
    expected, left = (
        {name: part for name, part in m.state_dict().items() if "linear_attention" in name} for m in (model, quantized)
    )
    assert list(expected) == list(left)
    assert all(torch.equal(expected[name], left[name]) for name in expected)
    assert 0 < difference(quantized, model) < TOLERANCE
    if family.causal and kind == "WeightOnly":  # The others round each input by its largest number.
        cache = output_cache(quantized(token_ids()[:, :9], use_cache=True))
        continued = logits(quantized, token_ids()[:, 9:], **cache_argument(quantized, cache))
        assert_close(continued, logits(quantized, token_ids())[:, 9:])


@EVERY_FAMILY
@IN_MEMORY
def test_what_was_quantized_in_memory_is_not_saved(kind, family, tmp_path):
    quantized = quantize_in_memory(kind, patched("window", family))
    with pytest.raises(NotImplementedError, match=r"was quantized in memory.*load_pretrained\(path, quantization_con"):
        quantized.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_integers_in_a_layer_of_ones_own_are_not_saved(tmp_path):
    """bitsandbytes' and other libraries' layers hold integers, with the scales beside them."""
    model = patched("window", LLAMA)
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_buffer("scale", projection.weight.detach().abs().amax() / 127)
    weight = (projection.weight / projection.scale).round().to(torch.int8)
    projection.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(NotImplementedError, match="was quantized in memory"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@EVERY_FAMILY
@WHILE_LOADED
def test_quantized_then_patched_saved_and_unpatched(kind, family, tmp_path):
    config = loading_config(kind)
    family.build().save_pretrained(tmp_path / "exact")
    model = AUTO[family].from_pretrained(tmp_path / "exact", quantization_config=config)
    before = logits(model, token_ids())
    open_far_part(hla.patch_model(model, "window", window_size=4))
    weights = [weight for name, weight in model.named_parameters() if "linear_attention" in name]
    assert {weight.dtype for weight in weights} == {torch.float32}
    model.save_pretrained(tmp_path / "patched")
    expected = logits(model, token_ids())
    assert torch.equal(logits(hla.load_pretrained(str(tmp_path / "patched")), token_ids()), expected)
    assert torch.equal(logits(hla.unpatch_model(model), token_ids()), before)


@pytest.mark.slow
@EVERY_FAMILY
@WHILE_LOADED
def test_a_patched_checkpoint_is_quantized_while_it_is_loaded(kind, family, tmp_path):
    config, model = loading_config(kind), patched("window", family)
    model.save_pretrained(tmp_path / "float")
    quantized = hla.load_pretrained(str(tmp_path / "float"), quantization_config=config)
    assert 0 < difference(quantized, model) < TOLERANCE
    quantized.save_pretrained(tmp_path / "int8")
    again = hla.load_pretrained(str(tmp_path / "int8"))
    assert torch.equal(logits(again, token_ids()), logits(quantized, token_ids()))


def test_attention_transfer_in_a_quantized_model():
    """The learned parts are trained in float32 against the exact attention of the quantized model."""
    model = quantize_in_memory("WeightOnly", BERT.build())
    hla.patch_model(model, "hedgehog")
    frozen = model.bert.encoder.layer[0].attention.self.query.weight
    before = frozen.dequantize().clone()
    losses = hla.transfer_attention(model, [{"input_ids": token_ids()}] * 4, max_steps=10).losses
    assert losses[-1] < losses[0]
    assert torch.equal(frozen.dequantize(), before)
