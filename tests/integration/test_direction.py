"""Which way a layer sees: its flag and its config decide, when the model is patched and at every call alike."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.context import attention_modules
from tests.architectures.models import architecture_model
from tests.comparing import Snapshot, assert_close, logits
from tests.inputs import padding_mask, token_ids
from tests.small import patch_small
from tests.tiny_models import BERT, DECODERS, LLAMA, saved_and_loaded, tiny_model

EACH_DECODER = pytest.mark.parametrize("family", DECODERS, ids=str)
SAID_BY = pytest.mark.parametrize("said_by", ["flag", "config"])


def make_bidirectional(model: PreTrainedModel, said_by: str, causal: bool = False) -> PreTrainedModel:
    if said_by == "config":
        model.config.is_causal = causal
    else:
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = causal
    return model


@EACH_DECODER
@SAID_BY
def test_a_decoder_made_bidirectional_gets_the_mechanism_of_an_encoder(family, said_by):
    """Its window holds the whole input here, so that its outputs are those of the exact bidirectional model."""
    ids, mask = token_ids(2, 14), padding_mask([14, 9], 14, "right")
    model = family.build()
    exact_model = make_bidirectional(copy.deepcopy(model), "config")
    exact, exact_padded = logits(exact_model, ids), logits(exact_model, ids, attention_mask=mask.long())
    make_bidirectional(model, said_by)
    hla.patch_model(model, "window")
    of_encoder = next(attention_modules(hla.patch_model(BERT.build(), "window"))).linear_attention.options
    for module in attention_modules(model):
        assert not module.linear_attention.shape.causal
        assert module.linear_attention.options == of_encoder
    for settings in ({}, {"use_cache": False}):
        assert_close(logits(model, ids, **settings), exact)
        assert_close(logits(model, ids, attention_mask=mask.long(), **settings)[mask], exact_padded[mask])


@EACH_DECODER
@pytest.mark.parametrize("name", ["window", "hedgehog", "linformer", "nystrom"])
def test_flag_and_config_say_the_same(family, name):
    model = family.build()
    first, second = (
        patch_small(make_bidirectional(copy.deepcopy(model), said_by), name) for said_by in ("flag", "config")
    )
    assert torch.equal(logits(first, token_ids()), logits(second, token_ids()))
    changed = token_ids()
    changed[:, -1] = changed[:, -1] % 50 + 2
    assert bool((logits(first, changed)[:, 0] != logits(first, token_ids())[:, 0]).any())


@SAID_BY
def test_mechanisms_of_decoders_are_refused_when_it_is_patched(said_by):
    model = make_bidirectional(LLAMA.build(), said_by)
    before = Snapshot.of(model)
    with pytest.raises(NotImplementedError, match="'gla' cannot be bidirectional, and layer 0"):
        hla.patch_model(model, "gla")
    before.assert_same(model)


@SAID_BY
def test_full_masks_are_those_of_an_encoder(said_by):
    """The slots of a bidirectional Luna serve all queries, those of a causal one a query each."""
    mask = torch.ones(2, 1, 14, 14, dtype=torch.bool)
    for model, refuses in ((make_bidirectional(LLAMA.build(), said_by), True), (LLAMA.build(), False)):
        patch_small(model, "luna")
        if refuses:
            with pytest.raises(NotImplementedError, match="cannot apply a 4D attention mask"):
                model(token_ids(2, 14), attention_mask=mask, use_cache=False)
        else:
            logits(model, token_ids(2, 14), attention_mask=mask.tril(), use_cache=False)


@EACH_DECODER
@SAID_BY
@pytest.mark.parametrize("layers", [None, [1]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_change_after_patching_is_refused(family, said_by, layers, causal):
    """Exact layers of a patched model went the old way too."""
    model, ids = make_bidirectional(family.build(), said_by, causal), token_ids()
    exact = logits(make_bidirectional(copy.deepcopy(model), said_by, not causal), ids, use_cache=False)
    hla.patch_model(model, "window", layers=layers)
    expected = logits(model, ids)
    make_bidirectional(model, said_by, not causal)
    with pytest.raises(ValueError, match=rf"was {'causal' if causal else 'bidirectional'} when .* and patch again"):
        model(ids)
    make_bidirectional(model, said_by, causal)
    assert torch.equal(logits(model, ids), expected)
    make_bidirectional(hla.unpatch_model(model), said_by, not causal)
    assert torch.equal(logits(model, ids, use_cache=False), exact)
    assert_close(logits(hla.patch_model(model, "window"), ids, use_cache=False), exact)


def test_a_call_in_the_other_direction_is_refused():
    model = hla.patch_model(LLAMA.build(), "window")
    with pytest.raises(ValueError, match=r"was causal when .* the argument is_causal False"):
        model(token_ids(), is_causal=False)


@EACH_DECODER
@SAID_BY
def test_flags_that_no_checkpoint_holds_are_named(family, said_by, caplog):
    hla.patch_model(make_bidirectional(family.build(), said_by), "window")
    assert ("Set config.is_causal = False before patching, which is saved." in caplog.text) == (said_by == "flag")


@pytest.mark.parametrize("model_type", ["paligemma", "aimv2_text_model"])
def test_a_flag_that_class_or_config_sets_is_there_again_in_a_loaded_model(model_type, tmp_path, caplog):
    model, inputs = architecture_model(model_type), {"input_ids": token_ids(2, 14)}
    if model.can_generate():
        inputs["use_cache"] = False
    loaded = saved_and_loaded(patch_small(model, "window"), tmp_path)
    assert "is_causal" not in caplog.text
    with torch.no_grad():
        assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "gpt2", "llama", "bart", "opt"])
def test_models_as_they_are_give_no_warning(architecture, caplog):
    hla.patch_model(tiny_model(architecture), "window")
    assert "is_causal" not in caplog.text


@EACH_DECODER
def test_a_bidirectional_config_is_saved(family, tmp_path):
    model = hla.patch_model(make_bidirectional(family.build(), "config"), "window", window_size=4)
    loaded = saved_and_loaded(model, tmp_path)
    assert not any(module.linear_attention.shape.causal for module in attention_modules(loaded))
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
