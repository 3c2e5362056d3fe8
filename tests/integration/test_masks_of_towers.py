"""Masks of vision and text towers: read outside of the attention interface, or of another direction than the layers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Blip2QFormerConfig,
    Blip2QFormerModel,
    Phi4MultimodalVisionConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalVisionModel

import hf_linear_attn as hla
from hf_linear_attn.integration.discovery import find_attention
from tests.architectures.inputs import find_inputs, random, tokens
from tests.architectures.models import architecture_model, enlarge_weights
from tests.comparing import assert_close
from tests.inputs import token_ids
from tests.small import patched
from tests.tiny_models import LLAMA

SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
#: A window that holds the whole input: the outputs are those of exact attention.
WHOLE = {"window_size": 64}


def outputs(model, **inputs):
    with torch.no_grad():
        return model(**inputs)


def test_the_pooling_head_of_siglip2_gets_a_mask_of_the_form_it_knows():
    """It reads the mask of one probe a row by itself: two rows of different padding would exchange theirs."""
    torch.manual_seed(0)
    config = Siglip2VisionConfig(**SIZES, patch_size=4, num_patches=16)
    model = Siglip2VisionModel(config).eval()
    enlarge_weights(model)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {
        "pixel_values": random(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [2, 4]]),
    }
    exact = outputs(model, **inputs)
    linear = outputs(hla.patch_model(model, "window", **WHOLE), **inputs)
    real = mask.bool()
    assert_close(linear.last_hidden_state[real], exact.last_hidden_state[real])
    assert_close(linear.pooler_output, exact.pooler_output)


@pytest.mark.parametrize("plan", ["window", {"0": {"attention": "window", **WHOLE}}], ids=["linear", "mixed"])
def test_a_padded_image_is_seen_from_both_sides_by_layers_that_are_causal_by_their_flag(plan):
    """The vision tower of Phi-4 makes a bidirectional mask where there is padding, and none elsewhere."""
    torch.manual_seed(0)
    config = Phi4MultimodalVisionConfig(**SIZES, image_size=16, patch_size=4)
    model = Phi4MultimodalVisionModel(config).eval()
    enlarge_weights(model)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, :, 2:] = False
    pixels = random(2, 3, 16, 16)
    exact = [outputs(model, pixel_values=pixels, patch_attention_mask=one)[0] for one in (None, mask)]
    hla.patch_model(model, plan, **(WHOLE if plan == "window" else {}))
    linear = [outputs(model, pixel_values=pixels, patch_attention_mask=one)[0] for one in (None, mask)]
    assert_close(linear[0], exact[0])
    assert_close(linear[1][mask.flatten(1)], exact[1][mask.flatten(1)])


@pytest.mark.parametrize("layers", [None, [0]], ids=str)
def test_a_padded_text_is_causal_in_layers_that_are_bidirectional_by_their_flag(layers):
    """The text tower of AIMv2 makes a causal mask where there is padding."""
    model, ids = architecture_model("aimv2_text_model"), tokens()
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, 9:] = 0
    exact = [outputs(model, input_ids=ids, attention_mask=one)[0] for one in (None, mask)]
    hla.patch_model(model, "window", layers=layers, **WHOLE)
    linear = [outputs(model, input_ids=ids, attention_mask=one)[0] for one in (None, mask)]
    assert_close(linear[0], exact[0])
    assert_close(linear[1][mask.bool()], exact[1][mask.bool()])


def test_a_padded_prompt_of_paligemma_is_causal():
    """Its layers are bidirectional by their config; the mask is causal, and there is one where there is padding."""
    model, ids = architecture_model("paligemma"), tokens()
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, :5] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    exact = outputs(model, **inputs, use_cache=False).logits
    hla.patch_model(model, "window", **WHOLE)
    assert_close(outputs(model, **inputs, use_cache=False).logits[mask.bool()], exact[mask.bool()])
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        model(**inputs, use_cache=True)


def test_a_convolution_reads_the_mask_of_speech():
    model = architecture_model("lasr_encoder")
    inputs = {"input_features": random(2, 64, model.config.num_mel_bins)}
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 43:] = 0
    exact = outputs(model, **inputs, attention_mask=mask)[0]
    linear = outputs(hla.patch_model(model, "window", **WHOLE), **inputs, attention_mask=mask)[0]
    assert_close(linear[0], exact[0])
    assert_close(linear[1, :8], exact[1, :8])


@pytest.mark.parametrize("layers", [None, [0, 2]], ids=str)
def test_moonshine_says_is_causal_false_of_one_token_and_of_a_padded_prompt(layers):
    """Its decoder leaves these to the cache and to its mask."""
    model, prompt = architecture_model("moonshine"), tokens(7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    inputs = {"input_values": random(2, 3200), "decoder_input_ids": prompt, "decoder_attention_mask": mask}

    def run(**options):
        logits = outputs(model, **inputs).logits[mask.bool()]
        options.update(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        return logits, model.generate(inputs["input_values"], **options)

    exact, exact_beams = run(), run(num_beams=2)
    hla.patch_model(model, "window", layers=layers, **WHOLE)
    for linear, expected in ((run(), exact), (run(num_beams=2), exact_beams)):
        assert_close(linear[0], expected[0])
        assert torch.equal(linear[1], expected[1])
    hla.unpatch_model(model)
    hla.patch_model(model, "elu", layers=layers)
    assert torch.equal(run()[1], run(use_cache=False)[1])


@pytest.mark.parametrize(("model_type", "output"), [("bridgetower", "pooler_output"), ("lightglue", "matching_scores")])
def test_layers_that_are_causal_by_their_flag_alone_see_later_tokens(model_type, output):
    """Eager attention reads masks only (BridgeTower has no other), and a full mask shows what it shows (LightGlue)."""
    model = architecture_model(model_type)
    inputs = find_inputs(model)
    exact = outputs(model, **inputs)[output]
    hla.patch_model(model, "window", **WHOLE)
    assert_close(outputs(model, **inputs)[output], exact)


def test_a_full_mask_that_shows_later_tokens_puts_the_near_ones_into_the_window():
    model, ids = patched("window", LLAMA, window_size=4, sink_tokens=0), token_ids(1, 12)
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    mask[:, :, 2:9, 2:9] = True
    seen = []
    with hla.observe_attention(model, lambda call: seen.append(call.outside())):
        outputs(model, input_ids=ids, attention_mask=mask, use_cache=False)
    number = torch.arange(12)
    near = (number[:, None] - number).abs() < 4
    assert all(torch.equal(outside.expand(1, 1, 12, 12), mask & ~near) for outside in seen)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("aimv2", {False, True}),
        ("paligemma", {False, True}),
        ("clip", {False}),
        ("bert", {False}),
        ("llama", {False}),
        ("bart", {False}),
    ],
)
def test_which_masks_are_against_the_flag_of_their_layers(model_type, expected):
    assert {layer.masks_causal for layer in find_attention(architecture_model(model_type))} == expected


def test_a_q_former_attends_to_as_many_patches_as_it_has_queries(monkeypatch):
    """Its cross-attention has the class of its self-attention; of one length, nothing else would tell them apart."""
    monkeypatch.setenv("HF_LINEAR_ATTN_SKIP_TRIAL", "1")  # its inputs are no tokens: a trial cannot make them
    torch.manual_seed(0)
    config = Blip2QFormerConfig(**SIZES, vocab_size=61, encoder_hidden_size=32, cross_attention_frequency=2)
    model = Blip2QFormerModel(config).eval()
    enlarge_weights(model)
    assert [layer.cross for layer in find_attention(model)] == [False, True, False]
    inputs = {"query_embeds": random(2, 6, 32), "encoder_hidden_states": random(2, 6, 32, seed=2)}
    exact = outputs(model, **inputs)[0]
    assert_close(outputs(hla.patch_model(model, "window", **WHOLE), **inputs)[0], exact)
    seen = []
    with hla.observe_attention(model, lambda call: seen.append(call.module)):
        outputs(model, **inputs)
    assert len(seen) == 2


@pytest.mark.parametrize(("model_type", "count"), [("pix2struct", 2), ("kosmos-2", 1), ("sam", 5), ("sam_hq", 5)])
def test_cross_attention_that_only_the_names_around_it_tell(model_type, count):
    assert sum(layer.cross for layer in find_attention(architecture_model(model_type))) == count
