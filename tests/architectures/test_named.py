"""Named architectures keep every property, refusals name the remedy, and quirks of single architectures."""

import copy

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import IMPLEMENTATION
from hf_linear_attn.integration.discovery import attention_shape, find_attention
from hf_linear_attn.integration.exact import observe_attention
from tests.architectures.inputs import find_inputs, tokens
from tests.architectures.models import Case, architecture_model
from tests.architectures.properties import REFUSED, WORKS, examine, per_token
from tests.slow_cases import slow

ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "modernbert", "esm")
VISION = ("vit", "deit", "clip", "clip_text_model", "clip_vision_model")
SPEECH = ("wav2vec2", "whisper")
#: Towers of composite models, by what they read: patches with their grid, tiles, packed patches, frames, queries.
TOWERS = ("qwen2_5_vl_vision", "mllama_vision_model", "llama4_vision_model", "minicpmv4_6_vision", "gemma4_vision")
TOWERS += ("audioflamingo3_encoder", "qwen2_5_omni_audio_encoder", "blip_2_qformer")
DECODERS = ("gpt2", "opt", "llama", "qwen2", "qwen3", "gemma", "phi")
NAMED = [Case(name) for name in (*ENCODERS, *VISION, *SPEECH, *TOWERS, "bart", *DECODERS)]
NAMED += [Case("bert", decoder=True), Case("gpt_neox", decoder=True)]
#: One of each kind.
QUICK = {"bert", "modernbert", "vit", "whisper", "bart", "gpt2", "llama"}


@pytest.mark.parametrize(
    "case",
    [case for case in NAMED if case.model_type in QUICK]
    + slow(*(case for case in NAMED if case.model_type not in QUICK)),
    ids=str,
)
def test_named_architectures_keep_every_promise(case):
    (result,) = examine(case)
    assert result.outcome == WORKS, result.detail
    assert not result.left_out
    assert result.checks["effect"] == result.checks["unpatch"] == result.checks["save and load"] == "passed"
    if case.model_type in TOWERS:
        assert result.architectures
    if case.model_type in DECODERS or case.decoder:
        assert set(result.checks.values()) == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("xlnet", "outside Transformers' attention interface.*It would need"),
        ("xglm", "outside Transformers' attention interface.*It would need"),
        ("mistral", r"Left exact: 0 \(sliding window of 4\).*if the config says so before.*sliding_window=None"),
        ("doge", "has values other than 0 and a very negative number.*'softmax'"),
        ("diffllama", r"\(in pieces, with a cache\) its outputs differed.*'softmax'"),
        ("hrm_text", r"\(in pieces, with a cache\) raised.*'softmax'"),
        ("zamba", r"\(token by token, with a cache\) raised.*'softmax'"),
        ("zamba2", r"Left exact: 0 \(layer type 'hybrid'\).*keep a state of their mixer beside keys"),
        ("bigbird_pegasus", "from masks that it shares.*It would need to call ALL_ATTENTION_FUNCTIONS"),
    ],
)
def test_refusals_name_the_reason_and_the_remedy(model_type, message):
    (result,) = examine(Case(model_type))
    assert result.outcome == REFUSED, result.detail
    model = architecture_model(model_type)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        hla.patch_model(model, "elu")
    assert not hla.is_patched(model)


def test_mistral_without_its_window():
    model = architecture_model("mistral")
    config = copy.deepcopy(model.config)
    config.sliding_window = None
    report = hla.patch_report(hla.patch_model(type(model)(config), "elu"))
    assert [layer.attention for layer in report.layers] == ["elu", "elu"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "gemma3_text", "lfm2", *slow("qwen3_next", "jamba")])
def test_layers_of_another_kind_keep_it(model_type):
    """State-space, linear, convolution and sliding layers are left, the full ones patched."""
    (result,) = examine(Case(model_type))
    assert result.outcome == WORKS, result.detail
    assert result.layers["linear, causal"] >= 1


# --------------------------------------------------------------------------------------------------------------------
# Quirks


def directions(model_type):
    return [layer.causal for layer in find_attention(architecture_model(model_type)) if not layer.cross]


@pytest.mark.parametrize(
    ("model_type", "causal"),
    [
        ("clip", [True, True, False, False]),  # the text tower passes is_causal=True to layers that say False
        ("clip_vision_model", [False, False]),
        ("pegasus_x", [True, True]),  # the decoder leaves it to its mask; the encoder is outside the interface
        ("align_text_model", [False, False]),  # attention modules without is_causal
        ("bart", [False, False, True, True]),
        ("bert", [False, False]),
    ],
)
def test_the_direction_of_layers_whose_flag_does_not_tell(model_type, causal):
    assert directions(model_type) == causal


def test_a_text_tower_that_is_causal_by_call_refuses_mechanisms_of_encoders():
    with pytest.raises(NotImplementedError, match="'linformer' cannot be causal, and layer 0"):
        hla.patch_model(architecture_model("clip_text_model"), "linformer")
    hla.patch_model(architecture_model("clip_vision_model"), "linformer", max_length=20)


@pytest.mark.parametrize("plan", ["elu", {"0": "elu"}], ids=["linear", "mixed"])
def test_a_decoder_that_leaves_causality_to_its_mask_does_not_look_ahead(plan):
    model = architecture_model("pegasus_x")
    inputs = {**find_inputs(model), "use_cache": False}
    hla.patch_model(model, plan)
    changed = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"].clone()}
    changed["decoder_input_ids"][:, -1] = 7
    torch.testing.assert_close(per_token(model, changed)[:, :-1], per_token(model, inputs)[:, :-1])


@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_without_a_flag_sees_both_sides_in_linear_and_exact_layers(padded):
    exact, linear = architecture_model("align_text_model"), architecture_model("align_text_model")
    hla.patch_model(linear, {"1": "elu"})
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 14, dtype=torch.long)}
    inputs["attention_mask"][1, 9:] = 0 if padded else 1
    with torch.no_grad():
        states = [model(**inputs, output_hidden_states=True).hidden_states for model in (exact, linear)]
    rows = inputs["attention_mask"].bool()
    torch.testing.assert_close(states[1][1][rows], states[0][1][rows])  # layer 0 is exact in both
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][0, -1] = 7
    assert float((per_token(linear, changed)[0, 0] - per_token(linear, inputs)[0, 0]).abs().max()) > 1e-4


def test_a_decoder_may_be_longer_than_what_it_reads():
    """The mask of cross-attention covers the other sequence, not the queries."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=61, **sizes, **heads, max_position_embeddings=64, init_std=0.2)
    model = hla.patch_model(BartForConditionalGeneration(config).eval(), "hedgehog")
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    ids = torch.randint(4, 60, (2, 5))
    with torch.no_grad():
        out = model(ids, attention_mask=mask, decoder_input_ids=torch.full((2, 12), 6)).logits
        unpadded = model(ids[1:, :3], decoder_input_ids=torch.full((1, 12), 6)).logits
    torch.testing.assert_close(out[1:], unpadded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "minicpm3", "gemma4_text"])
def test_head_sizes_that_differ_from_the_config(model_type):
    """Latent attention (`head_dim` is the rotated part), and head sizes that differ by layer."""
    model = architecture_model(model_type)
    for index, layer in enumerate(find_attention(model)):
        if layer.span == "full":
            expected = getattr(layer.module, "qk_head_dim", None) or layer.module.head_dim
            assert attention_shape(layer, index, None).head_dim == expected
    hla.patch_model(model, "elu")
    assert bool(torch.isfinite(model(tokens()).logits).all())


def test_one_bidirectional_pass_may_make_a_cache_but_not_continue_it():
    model = architecture_model("colpali")
    hla.patch_model(model, "elu")
    language = model.vlm.language_model
    with torch.no_grad():
        first = language(tokens(), use_cache=True)
        torch.testing.assert_close(first[0], language(tokens(), use_cache=False)[0])
        with pytest.raises(NotImplementedError, match=r"Bidirectional attention has no state.*Pass use_cache=False"):
            language(tokens(3), **cache_argument(language, output_cache(first)))


def test_refusals_at_run_time_name_the_layer(monkeypatch):
    monkeypatch.setenv("HF_LINEAR_ATTN_SKIP_TRIAL", "1")  # None of its sizes is that of one square image.
    model = hla.patch_model(architecture_model("segformer"), "elu")
    with pytest.raises(ValueError, match=r"\(\S*attention\S*\) attends from 64 queries to 1 keys.*'softmax'"):
        model(torch.randn(1, 3, 32, 32))


@pytest.mark.slow
def test_masks_of_minus_ten_thousand_block():
    model = architecture_model("markuplm")
    hla.patch_model(model, "elu")
    ids, mask = tokens(), torch.ones(2, 14, dtype=torch.long)
    mask[1, 9:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids, attention_mask=mask)[0][1, :9], model(ids[1:, :9])[0][0])


def test_observed_calls_with_a_full_mask_give_the_linear_output():
    model, ids = architecture_model("llama"), tokens()
    mask = torch.ones(14, 14, dtype=torch.bool).tril()[None, None]
    hla.patch_model(model, "elu", layers=[0])
    seen, projected = [], []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
        with observe_attention(model, lambda call: seen.append(call.linear_output())):
            model(ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(seen[0].transpose(1, 2).flatten(2), projected[0])


@pytest.mark.parametrize("model_type", ["clip", "bart", "qwen3"])
def test_unpatching_leaves_no_mark(model_type):
    model = architecture_model(model_type)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hla.unpatch_model(hla.patch_model(model, "elu"))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation != IMPLEMENTATION
