"""Models that add terms to their logits: patched, they compute what their exact models do, and nothing is lost."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration.discovery import find_attention, self_attention
from hf_linear_attn.integration.exact import exact_attention, observe_attention
from tests.architectures.inputs import find_inputs, tokens
from tests.architectures.models import architecture_model
from tests.architectures.properties import outputs, per_token, relative_difference
from tests.slow_cases import slow

SINKS = ("gpt_oss", *slow("granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash"))
CAPS = ("gemma2", *slow("vaultgemma", "t5gemma"))
EVERY = pytest.mark.parametrize("model_type", [*SINKS, *CAPS])
DECODERS = pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", *slow("flint", "vaultgemma")])
WHOLE = {"window_size": 64}


def build(model_type):
    """A tiny model whose terms matter: sinks that get attention, logits beyond their cap."""
    model = architecture_model(model_type)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = torch.randn(parameter.shape, generator=generator) + 1
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 0.5
    return model


def patched_with(model, **options):
    return hla.patch_model(model, {"default": {"attention": "window", **options}})


def full_layers(model):
    """The indices of the layers of full attention."""
    return [index for index, layer in enumerate(self_attention(model)) if layer.span == "full"]


def without_terms(model):
    """The same model, whose layers of full attention have lost their terms."""
    bare = copy.deepcopy(model)
    for layer in find_attention(bare):
        if getattr(layer.module, "sinks", None) is not None:
            layer.module.sinks.data.fill_(-100.0)
        if getattr(layer.module, "attn_logit_softcapping", None):
            layer.module.attn_logit_softcapping = 1e4
    return bare


@EVERY
def test_a_window_over_the_whole_input_is_the_exact_model_with_all_gradients(model_type):
    model = build(model_type)
    inputs = {**find_inputs(model), "use_cache": False}
    exact, lost = per_token(model, inputs), per_token(without_terms(model), inputs)
    assert relative_difference(lost, exact) > 1e-3  # the terms matter
    patched = patched_with(copy.deepcopy(model), **WHOLE)
    assert relative_difference(per_token(patched, inputs), exact) < 1e-5
    for part in (model, patched):
        part.zero_grad()
        part(**inputs)[0].square().mean().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    actual = dict(patched.named_parameters())
    assert any(name.endswith("sinks") for name in wanted) or "sinks" not in str(list(actual))
    for name, gradient in wanted.items():
        assert relative_difference(actual[name].grad, gradient) < 1e-3, name


@DECODERS
@pytest.mark.parametrize("plan", ["linear", "exact heads", "int8"])
def test_tokens_pieces_and_left_padding_are_those_of_the_exact_model(model_type, plan):
    model = build(model_type)
    config = dict(WHOLE)
    if plan == "exact heads":
        config["exact_heads"] = [0]
    if plan == "int8":
        config["cache_dtype"] = "int8"
    patched = patched_with(copy.deepcopy(model), **config)
    ids, mask = tokens(20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        exact = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        past, parts, start = None, [], 0
        for size in (1, 7, 1, 1, 8, 1, 1):
            now = slice(start, start + size)
            out = patched(
                ids[:, now],
                attention_mask=mask[:, : start + size],
                position_ids=positions[:, now],
                past_key_values=past,
                use_cache=True,
            )
            past, start = out.past_key_values, start + size
            parts.append(out.logits)
    actual = torch.cat(parts, dim=1)
    tolerance = 0.05 if plan == "int8" else 1e-5
    assert relative_difference(actual[mask.bool()], exact[mask.bool()]) < tolerance
    prompt = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if plan != "int8":
        assert torch.equal(patched.generate(**prompt), model.generate(**prompt))


@EVERY
def test_exact_layers_and_exact_attention_keep_the_terms(model_type):
    model = build(model_type)
    inputs = {**find_inputs(model), "use_cache": False}
    exact = outputs(model, inputs)
    patched = patched_with(model, window_size=2, sink_tokens=0)
    assert relative_difference(per_token(patched, inputs), exact[0]) > 1e-4
    with exact_attention(patched):
        for actual, wanted in zip(outputs(patched, inputs), exact, strict=True):
            torch.testing.assert_close(actual, wanted)
    calls = []
    with torch.no_grad(), observe_attention(patched, calls.append):
        patched(**inputs)
    assert len(calls) == len(full_layers(patched))
    for call in calls:
        values = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)
        torch.testing.assert_close(call.exact_weights() @ values, call.output, rtol=1e-4, atol=1e-5)


@DECODERS
def test_calibrated_codes_get_the_attention_that_their_keys_have_beside_the_terms(model_type):
    """With as many codes as keys, and without positions outside of the codes, nothing is approximated."""
    model = patched_with(build(model_type), window_size=4, sink_tokens=1)
    rows = [{"input_ids": tokens(24, seed=seed)} for seed in range(3)]
    result = hla.calibrate(model, rows, max_length=24)
    table = result.table
    assert len(table)
    assert float((table["exact"] - table["calibrated"]).abs().max()) < 0.02


@DECODERS
def test_saved_models_are_loaded_with_their_terms(model_type, tmp_path):
    model = patched_with(build(model_type), window_size=4, mix_init=0.0)
    if hasattr(model.config, "attn_logit_softcapping"):
        model.config.attn_logit_softcapping = 0.5
    inputs = {"input_ids": tokens(20), "use_cache": False}
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path)
    torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(model, inputs)[0])


@pytest.mark.parametrize("attention", ["elu", "gla", "luna"])
@pytest.mark.parametrize(("model_type", "term"), [("gpt_oss", "attention sinks"), ("gemma2", "a cap of the logits")])
def test_mechanisms_that_cannot_apply_a_term_refuse_it_before_anything_is_changed(model_type, term, attention):
    model = build(model_type)
    with pytest.raises(NotImplementedError, match=rf"adds {term} to its logits.*Use 'window'"):
        hla.patch_model(model, attention)
    assert not hla.is_patched(model)
