"""`exact_attention(model, layers)`: some layers of a patched model run exactly, as if they had not been patched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, MllamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules, layer_context
from hf_linear_attn.integration.exact import AttentionCall
from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.small import patched
from tests.tiny_models import BERT, GPT2, Family, tiny_model


def part_of(full: Any, name: str, family: Family, layers: list[int]) -> Any:
    """A model with only these layers patched, and the parameters of `whole`."""
    options = hla.patch_report(full).layers[0].options
    part = hla.patch_model(family.build(), name, layers=layers, **options)
    part.load_state_dict({key: tensor for key, tensor in full.state_dict().items() if key in part.state_dict()})
    return part


@torch.no_grad()
@every_pair()
def test_bit_equal_to_a_model_with_the_other_layers_patched(name: str, family: Family) -> None:
    full, ids = patched(name, family), token_ids(3, 23)
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    for linear in (0, 1):
        part = part_of(full, name, family, [linear])
        with hla.exact_attention(full, [1 - linear]):
            assert torch.equal(logits(full, ids), logits(part, ids))
            assert torch.equal(logits(full, ids, attention_mask=mask), logits(part, ids, attention_mask=mask))
    with hla.exact_attention(full, []):
        inside = logits(full, ids)
    assert torch.equal(inside, logits(full, ids))
    with hla.exact_attention(full, [0, -1]):
        inside = logits(full, ids)
    assert torch.equal(inside, logits(hla.unpatch_model(full), ids))


@torch.no_grad()
def test_generation_keeps_keys_and_values_where_a_layer_is_exact() -> None:
    full = patched("hedgehog", GPT2)
    part = part_of(full, "hedgehog", GPT2, [1])
    settings = {"max_new_tokens": 8, "do_sample": False}
    with hla.exact_attention(full, [0]):
        assert torch.equal(full.generate(token_ids(), **settings), part.generate(token_ids(), **settings))


@torch.no_grad()
def test_inside_of_an_observation_and_out_again() -> None:
    model, ids = patched("hedgehog", BERT), token_ids()
    before, calls = logits(model, ids), []
    with hla.observe_attention(model, calls.append):
        with hla.exact_attention(model, [0]):
            logits(model, ids)
        assert len(calls) == 1
        logits(model, ids)
    assert len(calls) == 3
    assert all(isinstance(call, AttentionCall) for call in calls)
    assert all(not layer_context(module).runs_exactly for module in attention_modules(model))
    assert all(layer_context(module).observer is None for module in attention_modules(model))
    assert torch.equal(logits(model, ids), before)


def test_indices_are_checked() -> None:
    model = patched("elu", BERT)
    for wrong, error in ((2, ValueError), (-3, ValueError), (True, TypeError), ("0", TypeError)):
        with pytest.raises(error, match=repr(wrong).strip("'") if error is ValueError else "integers"):
            hla.exact_attention(model, [wrong])


def additive_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """An implementation that adds its mask to the logits and has no `is_causal`, such as FlexAttention's."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    logits = query @ key.transpose(2, 3) * kwargs["scaling"]
    if mask is not None:
        assert mask.shape == (query.shape[0], 1, *logits.shape[2:])
        logits = logits + mask
    return (logits.softmax(-1) @ value).transpose(1, 2), None


@torch.no_grad()
def test_an_implementation_that_adds_its_mask() -> None:
    AttentionInterface.register("additive", additive_attention)
    AttentionMaskInterface.register("additive", eager_mask)
    model = tiny_model("llama", attn_implementation="additive")
    batch = padded_batch([*token_ids(2, 9), token_ids(1, 5)[0]], "left")
    mask = batch["attention_mask"].bool()
    unpadded, padded = model(token_ids()).logits, model(**batch).logits[mask]
    hla.patch_model(model, "elu", layers=[0])
    with hla.exact_attention(model):
        assert_close(model(token_ids()).logits, unpadded)
        assert_close(model(**batch).logits[mask], padded)
    ids, last = token_ids(), token_ids()
    last[:, -1] = 5
    assert torch.equal(model(ids).logits[:, :-1], model(last).logits[:, :-1])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_cross_attention_without_a_flag_stays_what_it_was(implementation: str) -> None:
    """Mllama's modules do not say that they are bidirectional, and may get no mask."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
    rope: Any = {"rope_type": "default", "rope_theta": 10000.0}
    config = MllamaTextConfig(**sizes, cross_attention_layers=[1], rope_parameters=rope)
    torch.manual_seed(0)
    model = MllamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if "gate" in name and parameter.numel() == 1:
            parameter.fill_(1.0)
    inputs = {"input_ids": token_ids(2, 7), "cross_attention_states": torch.randn(2, 11, 32), "use_cache": False}
    expected = model(**inputs).logits
    hla.patch_model(model, "elu")
    with hla.exact_attention(model):
        assert_close(model(**inputs).logits, expected)


@torch.no_grad()
def test_flash_attention_gets_the_padding_of_cross_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("bart"), []

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask[:, None, None, :], **kwargs)

    AttentionInterface.register("flash_stub", flash)
    ids, mask = token_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    hla.patch_model(model, "elu")
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": token_ids(2, 4)}
    expected = model(**inputs)[0]
    for module in model.modules():
        context = layer_context(module)
        if context is not None and context.causal is None:
            monkeypatch.setattr(context, "exact_implementation", "flash_stub")
    assert torch.equal(model(**inputs)[0], expected)
    assert seen
    assert all(torch.equal(padding, mask.bool()) for padding in seen)


@torch.no_grad()
def test_flash_attention_gets_no_mask_of_a_sliding_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes padding only: the mask `[B, 1, L, S]` that the model makes for such a layer goes to sdpa."""
    windows = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    model = tiny_model("qwen2", AutoModelForCausalLM, num_key_value_heads=2, **windows)
    hla.patch_model(model, "elu")
    expected = model(token_ids()).logits
    sliding: Any = model.model.layers[1].self_attn
    monkeypatch.setattr(layer_context(sliding), "exact_implementation", "flash_attention_2")
    assert torch.equal(model(token_ids()).logits, expected)


@torch.no_grad()
def test_flash_attention_reads_its_own_name_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers loads the package or the kernel of that name: it must not be the one that patched models have."""
    seen = []

    def kernel(query: Any, *args: Any, attn_implementation: str, **kwargs: Any) -> Any:
        seen.append(attn_implementation)
        return query

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", kernel)
    model = hla.patch_model(tiny_model("llama"), {"default": "elu", "0": "softmax"})
    exact: Any = model.model.layers[0].self_attn
    monkeypatch.setattr(layer_context(exact), "exact_implementation", "flash_attention_2")
    model(token_ids())
    assert seen == ["flash_attention_2"]
    assert exact.config._attn_implementation == "hf_linear_attn"
