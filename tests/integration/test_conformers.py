"""Conformers: exact in the window, nothing outside of it where positions have no end, and no bias of all pairs."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModel,
    ParakeetEncoderConfig,
    SeamlessM4Tv2Config,
    Wav2Vec2BertConfig,
    Wav2Vec2BertModel,
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerModel,
)
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoder
from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2SpeechEncoder

import hf_linear_attn as hla
from hf_linear_attn.integration.exact import exact_attention, observe_attention
from tests.architectures.models import architecture_model, enlarge_weights
from tests.architectures.properties import relative_difference
from tests.integration.test_terms import LargestTensor
from tests.reference import naive

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
SHORT = {"left_max_position_embeddings": 20, "right_max_position_embeddings": 6}
FRAMES = 70


def parakeet():
    config = ParakeetEncoderConfig(
        **SIZES, num_mel_bins=16, subsampling_factor=2, subsampling_conv_channels=8, dropout_positions=0.0
    )
    return ParakeetEncoder(config)


def wav2vec2_conformer():
    convolutions = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (4,), "num_feat_extract_layers": 1}
    return Wav2Vec2ConformerModel(
        Wav2Vec2ConformerConfig(
            **SIZES, **convolutions, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0
        )
    )


def wav2vec2_bert(kind="relative_key"):
    config = Wav2Vec2BertConfig(
        **SIZES, **SHORT, feature_projection_input_dim=16, position_embeddings_type=kind, mask_time_prob=0.0
    )
    return Wav2Vec2BertModel(config)


def seamless():
    sizes = {"speech_encoder_layers": 2, "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 40}
    return SeamlessM4Tv2SpeechEncoder(
        SeamlessM4Tv2Config(**SHORT, **sizes, hidden_size=32, feature_projection_input_dim=16, add_adapter=False)
    )


KINDS = {
    "parakeet": parakeet,
    "wav2vec2-conformer": wav2vec2_conformer,
    "wav2vec2-bert": wav2vec2_bert,
    "wav2vec2-bert, without end": lambda: wav2vec2_bert("relative"),
    "seamless-m4t-v2": seamless,
}
WITHOUT_END = {"parakeet", "wav2vec2-conformer", "wav2vec2-bert, without end"}
EVERY = pytest.mark.parametrize("kind", KINDS)


def build(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    enlarge_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias_u", "bias_v", "distance_embedding.weight")):
            torch.nn.init.normal_(parameter)
    return model


def inputs_of(model, frames=FRAMES, padding=0):
    """Two sounds of so many frames, the second one padded on the right."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, frames, dtype=torch.long)
    mask[1, frames - padding :] = 0
    sizes, factor = (16,), 1
    if isinstance(model, Wav2Vec2ConformerModel):
        sizes, factor = (), 4
    elif isinstance(model, ParakeetEncoder):
        factor = 2
    sounds = {model.main_input_name: torch.randn(2, factor * frames, *sizes, generator=generator)}
    return {**sounds, "attention_mask": mask.repeat_interleave(factor, dim=1)} if padding else sounds


def run(model, inputs):
    return model(**inputs)[0]


def patched_with(model, **options):
    return hla.patch_model(model, {"default": {"attention": "window", **options}})


@EVERY
@pytest.mark.parametrize("padding", [0, 17])
def test_a_window_over_the_whole_input_is_the_exact_model_with_all_gradients(kind, padding):
    if padding and kind == "wav2vec2-conformer":
        pytest.skip("its convolutions read what stands at padding")
    model = build(kind)
    inputs = inputs_of(model, padding=padding)
    patched = patched_with(copy.deepcopy(model), window_size=128)
    real = torch.ones(2, FRAMES, dtype=torch.bool)
    real[1, FRAMES - padding :] = False
    outputs = []
    for part in (model, patched):
        out = run(part, inputs)
        assert out.shape[:2] == (2, FRAMES)
        outputs.append(out[real].detach())
        out[real].square().mean().backward()
    assert relative_difference(outputs[1], outputs[0]) < 1e-5
    actual = dict(patched.named_parameters())
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    names = ("bias_v", "pos_bias_v", "distance_embedding.weight")
    assert any(name.endswith(names) and float(gradient.abs().max()) > 0 for name, gradient in gradients.items())
    for name, gradient in gradients.items():
        error = float((actual[name].grad - gradient).abs().max())
        assert error < 1e-3 * float(gradient.abs().max()) + 1e-6 * largest, name


def positions_of(kind, module, query):
    """The logits of positions `[B, H, L, L]` by their formulas, in float64, of queries as they are handed on."""
    length, heads = query.shape[2], query.shape[1]
    if kind in WITHOUT_END:
        parts = (module.bias_u, module.bias_v) if kind == "parakeet" else (module.pos_bias_u, module.pos_bias_v)
        content, position = (part.double()[:, None] for part in parts)
        projection = module.relative_k_proj if kind == "parakeet" else module.linear_pos
        width = SIZES["hidden_size"]
        logits = torch.zeros(*query.shape[:3], length, dtype=torch.float64)
        for distance in range(1 - length, length):
            angles = distance / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
            sinusoid = torch.stack([angles.sin(), angles.cos()], dim=1).flatten()
            vector = (projection.weight.double() @ sinusoid).view(heads, 1, -1)
            products = ((query - content + position) * vector).sum(-1)  # [B, H, L]
            for i in range(max(distance, 0), min(length + distance, length)):
                logits[:, :, i, i - distance] = products[:, :, i]
        return logits
    table, left, right = module.distance_embedding.weight.double(), *SHORT.values()
    rows = [[min(max(j - i, -left), right) + left for j in range(length)] for i in range(length)]
    return torch.einsum("bhid,ijd->bhij", query, table[torch.tensor(rows)])


@EVERY
@pytest.mark.parametrize("padding", [0, 17])
def test_outside_of_its_window_a_layer_is_the_definition(kind, padding):
    model = patched_with(build(kind), window_size=32, feature_map="hedgehog", mix_init=0.3, saturation=None)
    inputs = inputs_of(model, padding=padding)
    calls = []
    with torch.no_grad(), observe_attention(model, calls.append):
        run(model, inputs)
    assert len(calls) == 2
    for call in calls:
        mask = torch.ones(2, FRAMES, dtype=torch.bool)
        mask[1, FRAMES - padding :] = False
        query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
        mechanism = call.mechanism
        features, log_mix = (torch.zeros_like(query), torch.zeros_like(key)), torch.zeros(4, dtype=torch.float64)
        if kind not in WITHOUT_END:
            maps = mechanism.feature_map
            features = maps.query(query, call.scaling).values, maps.key(key, call.scaling).values
            log_mix = mechanism.log_mix.double()
        assert mechanism.options.window_size == 32
        expected = naive.windowed_attention(
            query,
            key,
            value,
            *features,
            naive.visible(mask, 2, FRAMES, FRAMES, False),
            window=32,
            causal=False,
            scaling=call.scaling,
            log_mix=log_mix,
            sinks=1,
            bias=positions_of(kind, call.module, query) * call.scaling,
        )
        with torch.no_grad():
            native = call.linear_output()
            with hla.use_backend("torch"):
                in_torch = call.linear_output()
            weights = call.linear_weights()
        for actual in (native, in_torch, (weights.double() @ value).float()):
            torch.testing.assert_close(
                actual.transpose(1, 2)[mask], expected.transpose(1, 2)[mask].float(), rtol=1e-4, atol=1e-5
            )


def test_reports_say_where_nothing_outside_of_a_window_is_attended_to():
    report = hla.patch_report(patched_with(build("parakeet")))
    assert report.windows_only == (0, 1)
    assert not report.unfitted
    assert "In 2 layers nothing is attended to outside of the window and its sinks" in str(report)
    report = hla.patch_report(patched_with(build("wav2vec2-bert")))
    assert report.windows_only == ()
    assert report.unfitted == (0, 1)


@EVERY
def test_exact_heads_layers_and_attention_keep_the_positions(kind):
    model = build(kind)
    inputs = inputs_of(model, padding=17)
    with torch.no_grad():
        exact = run(model, inputs)[0]
        plan = {"0": "softmax", "1": {"attention": "window", "window_size": 128, "exact_heads": [0, 2]}}
        patched = hla.patch_model(model, plan)
        assert relative_difference(run(patched, inputs)[0], exact) < 1e-5
        hla.unpatch_model(patched)
        narrow = patched_with(model, window_size=32)
        assert relative_difference(run(narrow, inputs)[0], exact) > 1e-3
        with exact_attention(narrow):
            assert relative_difference(run(narrow, inputs)[0], exact) < 1e-5
        hla.unpatch_model(narrow)
        assert torch.equal(run(model, inputs)[0], exact)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "seamless-m4t-v2"])  # a part, saved with the whole
def test_saved_models_are_loaded_with_what_they_learned(kind, tmp_path):
    model = patched_with(build(kind), window_size=32)
    inputs = inputs_of(model, padding=17)
    hla.calibrate(model, [inputs])
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path, auto_class=AutoModel)
    with torch.no_grad():
        torch.testing.assert_close(run(loaded, inputs), run(model, inputs))


@pytest.mark.parametrize("kind", ["parakeet", "wav2vec2-conformer", "wav2vec2-bert", "seamless-m4t-v2"])
def test_nothing_of_the_size_of_all_pairs_is_made(kind):
    frames = 4096
    model = patched_with(build(kind))
    with torch.no_grad(), LargestTensor() as largest:
        run(model, inputs_of(model, frames))
    assert largest.elements < 4 * frames**2 // 8  # the positions of all pairs have 4 L² elements for each sound


def test_mechanisms_that_cannot_leave_the_rest_out_refuse_positions_without_end():
    model = build("parakeet")
    reasons = {"scatterbrain": "change at every distance.*Use 'window'", "elu": "vectors of distances"}
    for attention, reason in reasons.items():
        with pytest.raises(NotImplementedError, match=reason):
            hla.patch_model(model, attention)
        assert not hla.is_patched(model)


def test_models_that_are_linear_already_stay_as_they_are():
    for model_type, reason in (("granite_speech5_encoder", "blocks of"), ("phi4_multimodal_audio", "blocks of 500")):
        with pytest.raises(ValueError, match=reason):
            hla.patch_model(architecture_model(model_type))


def test_positions_of_boxes_on_a_page_are_refused():
    with pytest.raises(NotImplementedError, match="places of two boxes"):
        hla.patch_model(architecture_model("layoutlmv3"))
