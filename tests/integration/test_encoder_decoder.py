"""A tiny BART: self-attention patched on both sides, cross-attention exact."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.utils import ModelOutput

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import entries, serves
from tests.comparing import Snapshot, assert_close, relative_error
from tests.inputs import token_ids
from tests.small import attentions, randomize_learned, small_options
from tests.tiny_models import MAX_LENGTH, SIZES, saved_and_loaded

BOTH = [entry.name for entry in entries() if entry.causal and entry.bidirectional]
ENCODER = [entry.name for entry in entries() if not entry.causal]


def bart():
    sizes = {"d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    rest = {"init_std": SIZES["initializer_range"], "dropout": 0.0, "max_position_embeddings": MAX_LENGTH}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = BartConfig(vocab_size=SIZES["vocab_size"], **sizes, **heads, **rest, **tokens, forced_eos_token_id=None)
    return BartForConditionalGeneration(config).eval()


def options(name):
    return {"attention": name, **small_options(ATTENTIONS.get(name).options)}


def outputs(model):
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, 9:] = 0
    with torch.no_grad():
        return model(token_ids(2, 15), attention_mask=mask, decoder_input_ids=token_ids(2, 8, seed=1)).logits


def generated(model, **settings):
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[1, 9:] = 0
    return model.generate(
        token_ids(2, 15), attention_mask=mask, max_new_tokens=8, do_sample=False, min_new_tokens=8, **settings
    )


def linear_modules(model):
    return [name for name, module in model.named_modules() if name.endswith("linear_attention")]


@pytest.mark.parametrize("name", BOTH)
def test_self_attention_is_patched_and_cross_attention_stays_exact(name):
    model = bart()
    before, exact = Snapshot.of(model), outputs(model)
    hla.patch_model(model, **options(name))
    patched = linear_modules(model)
    assert len(patched) == 4
    assert all(".self_attn." in f".{module_name}" for module_name in patched)
    assert relative_error(outputs(model), exact) > 1e-3
    hla.unpatch_model(model)
    before.assert_same(model)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", BOTH)
def test_generation_equals_use_cache_false(name, settings):
    model = randomize_learned(hla.patch_model(bart(), **options(name)))
    assert torch.equal(generated(model, **settings), generated(model, use_cache=False, **settings))


@pytest.mark.parametrize("name", ENCODER)
def test_an_encoder_mechanism_is_for_the_encoder_only(name, tmp_path):
    model = randomize_learned(hla.patch_model(bart(), {"model.encoder.*": options(name)}))
    assert linear_modules(model) == [f"model.encoder.layers.{i}.self_attn.linear_attention" for i in range(2)]
    assert torch.equal(generated(model), generated(model, use_cache=False))
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path)), outputs(model))


def test_cross_attention_sees_what_it_saw_before():
    model, seen = bart(), []
    cross = model.model.decoder.layers[0].encoder_attn
    hla.patch_model(model, {"model.decoder.*": "hedgehog"})
    cross.register_forward_hook(lambda module, args, kwargs, out: seen.append(out[0]), with_kwargs=True)
    outputs(model)
    linear = seen.pop()
    with hla.exact_attention(model):
        outputs(model)
    assert not torch.equal(seen.pop(), linear)  # its queries come from the patched self-attention
    assert not any("linear_attention" in name for name, _ in cross.named_modules())


@pytest.mark.slow
def test_encoder_and_decoder_may_have_different_mechanisms(tmp_path):
    plan = {"model.encoder.*": options("linformer"), "model.decoder.*": options("hedgehog"), "-1": "softmax"}
    model = randomize_learned(hla.patch_model(bart(), plan))
    assert attentions(model) == ["linformer", "linformer", "hedgehog", "softmax"]
    assert torch.equal(generated(model), generated(model, use_cache=False))
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path)), outputs(model))


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 15])
def test_fidelity_is_that_of_the_decoder_over_its_real_tokens(length):
    """Whatever is padding in the encoder, of another length or of the same."""
    model = hla.patch_model(bart(), "hedgehog")
    mask, decoder_mask = torch.ones(2, 15, dtype=torch.long), torch.ones(2, length, dtype=torch.long)
    mask[1, 9:], decoder_mask[0, 6:] = 0, 0
    batch = {"input_ids": token_ids(2, 15), "attention_mask": mask, "decoder_input_ids": token_ids(2, length, seed=1)}
    for own in ({}, {"decoder_attention_mask": decoder_mask}):
        fidelity = hla.measure_fidelity(model, [{**batch, **own}])
        with torch.no_grad():
            linear = model.model(**batch, **own).last_hidden_state
            with hla.exact_attention(model):
                exact = model.model(**batch, **own).last_hidden_state
        real = own.get("decoder_attention_mask", torch.ones_like(decoder_mask)).bool()
        cosine = torch.nn.functional.cosine_similarity(exact.double(), linear.double(), dim=-1)[real]
        assert fidelity.tokens == int(real.sum())
        assert fidelity.final_cosine == pytest.approx(float(cosine.mean()), rel=1e-5)


def test_an_encoder_mechanism_everywhere_is_refused():
    for name in ENCODER:
        model = bart()
        before = Snapshot.of(model)
        with pytest.raises(NotImplementedError, match=f"{name!r} cannot be causal, and layer 2"):
            hla.patch_model(model, **options(name))
        before.assert_same(model)


def test_padding_of_the_encoder_does_not_matter():
    model = hla.patch_model(bart(), "hedgehog")
    with torch.no_grad():
        unpadded = model(token_ids(2, 15)[1:, :9], decoder_input_ids=token_ids(2, 8, seed=1)[1:]).logits
    assert_close(outputs(model)[1:], unpadded)


def test_serving_is_declared():
    assert all(serves(ATTENTIONS.get(name), causal) for name in BOTH for causal in (False, True))


def test_a_cache_for_self_attention_alone_is_refused():
    """That of cross-attention would come into it, as in the exact model, whose outputs are wrong then."""
    model = hla.patch_model(bart(), "hedgehog")
    inputs = {"input_ids": token_ids(2, 15), "decoder_input_ids": token_ids(2, 8, seed=1)}
    with pytest.raises(ValueError, match=r"Pass the model EncoderDecoderCache\(DynamicCache\(\), DynamicCache\(\)\)"):
        model(**inputs, **cache_argument(model, DynamicCache()), use_cache=True)
    with torch.no_grad():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cached = model(**inputs, **cache_argument(model, cache), use_cache=True).logits
        assert_close(cached, model(**inputs, use_cache=False).logits)


@pytest.fixture
def whisper():
    sizes = {"vocab_size": 80, "d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    rest = {"init_std": 0.25, "dropout": 0.0, "max_source_positions": 30, "max_target_positions": 40}
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens, **rest)).eval()
    suppressed = {"suppress_tokens": None, "begin_suppress_tokens": None, "no_timestamps_token_id": 70}
    vars(model.generation_config).update(alignment_heads=[[0, 0], [1, 1]], is_multilingual=False, **suppressed)
    return model


FEATURES = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(0))
AUDIO = {"input_features": FEATURES, "attention_mask": torch.ones(2, 60, dtype=torch.long)}
TIMED = {"return_token_timestamps": True, "return_dict_in_generate": True, "max_new_tokens": 10, "do_sample": False}


@pytest.mark.filterwarnings("ignore")
def test_timestamps_of_tokens_for_which_whisper_sets_eager_attention(whisper):
    def timed():
        result = whisper.generate(**AUDIO, **TIMED)
        return result["sequences"], result["token_timestamps"]

    exact = timed()
    hla.patch_model(whisper.model.encoder, "hedgehog")
    with hla.exact_attention(whisper):
        assert all(map(torch.equal, timed(), exact))
    without = whisper.generate(**AUDIO, max_new_tokens=10, do_sample=False)
    assert torch.equal(timed()[0][:, 2:], without)  # without the two tokens that start every text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("plan", ["hedgehog", {"default": "hedgehog", "-1": "softmax"}], ids=["linear", "mixture"])
def test_timestamps_of_a_patched_decoder_are_those_of_its_exact_cross_attention(plan, settings, whisper):
    """The weights of each layer, by the formula in float64, from what its cross-attention reads in one pass."""
    exact_class = type(whisper)
    randomize_learned(hla.patch_model(whisper.model.decoder, plan))
    result = whisper.generate(**AUDIO, **TIMED, **settings)
    sequences, inputs = result["sequences"], {}
    layers = whisper.model.decoder.layers

    def keep(module, args, kwargs):
        inputs[module] = (args[0] if args else kwargs["hidden_states"]).double(), kwargs["key_value_states"].double()

    for layer in layers:
        layer.encoder_attn.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        whisper(AUDIO["input_features"], decoder_input_ids=sequences[:, :-1], use_cache=False)
    expected = []
    for module in (layer.encoder_attn for layer in layers):
        hidden, encoded = inputs[module]
        query = (hidden @ module.q_proj.weight.double().T + module.q_proj.bias.double()).unflatten(-1, (4, 8))
        key = (encoded @ module.k_proj.weight.double().T).unflatten(-1, (4, 8))
        expected.append((torch.einsum("blhd,bshd->bhls", query, key) / 8**0.5).softmax(-1).detach())
    if "num_beams" not in settings:  # those of beams are in the order of each step
        actual = [torch.cat(steps, dim=2) for steps in zip(*result["cross_attentions"], strict=True)]
        for weights, formula in zip(actual, expected, strict=True):
            assert_close(weights.double(), formula)
    of_one_pass = ModelOutput(cross_attentions=(tuple(x.float() for x in expected),), sequences=sequences)
    times = exact_class._extract_token_timestamps(
        whisper, of_one_pass, whisper.generation_config.alignment_heads, num_frames=60, num_input_ids=2
    )
    assert torch.equal(result["token_timestamps"], times)
    assert result["token_timestamps"].unique().numel() > 1


@pytest.mark.filterwarnings("ignore")
def test_weights_of_self_attention_are_still_refused_beside_a_cache(whisper):
    hla.patch_model(whisper.model.decoder, "hedgehog")
    whisper.generate(**AUDIO, **TIMED)
    settings = {**TIMED, "return_token_timestamps": False, "output_attentions": True}
    with pytest.raises(NotImplementedError, match="which a recurrent state has summed up"):
        whisper.generate(**AUDIO, **settings)
    whisper.generate(**AUDIO, max_new_tokens=3)  # The error has left nothing behind.
