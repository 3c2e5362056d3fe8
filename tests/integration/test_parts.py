"""A part of a model is patched: the whole knows, saves and loads it, in whichever order they came together."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    BartForConditionalGeneration,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    VisionTextDualEncoderModel,
    ViTModel,
)

import hf_linear_attn as hla
from tests.comparing import assert_close
from tests.inputs import token_ids
from tests.small import attentions, patch_small, randomize_learned
from tests.tiny_models import STANDARD_SIZES, saved_and_loaded, tiny_config, tiny_model

IMAGES = {"image_size": 16, "patch_size": 4}
IMAGE_TOKEN = 60


def classifier():
    return tiny_model("bert", BertForSequenceClassification, num_labels=3)


def encoder_decoder():
    decoder = tiny_config("bert", is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(tiny_config("bert"), decoder)
    return EncoderDecoderModel(config).eval()


def bart():
    return tiny_model("bart")


def clip():
    text, vision = tiny_config("clip_text_model"), tiny_config("clip_vision_model", **IMAGES)
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)).eval()


def llava():
    vision = CLIPVisionConfig(**{**STANDARD_SIZES, **IMAGES})
    settings = {"image_token_index": IMAGE_TOKEN, "image_seq_length": 16, "vision_feature_layer": -1}
    config = LlavaConfig(vision_config=vision, text_config=tiny_config("llama"), **settings)
    return LlavaForConditionalGeneration(config).eval()


#: Model, its part, and a pattern that names the part's layers in the model.
PARTS = {
    "classifier": (classifier, "bert", "bert.*"),
    "encoder-decoder": (encoder_decoder, "encoder", "encoder.*"),
    "base-of-the-decoder": (encoder_decoder, "decoder.bert", "decoder.*"),
    "bart-encoder": (bart, "model.encoder", "model.encoder.*"),
    "bart-decoder": (bart, "model.decoder", "model.decoder.*"),
    "vision-tower": (clip, "vision_model", "vision_model.*"),
    "language-model": (llava, "model.language_model", "model.language_model.*"),
}
every_part = pytest.mark.parametrize("case", PARTS)


def outputs(model):
    """The first output on rows with padding."""
    ids = token_ids(2, 15).clamp(max=IMAGE_TOKEN - 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 9:] = 0
    if isinstance(model, (CLIPModel, VisionTextDualEncoderModel)):
        inputs["pixel_values"] = torch.linspace(-2, 2, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()
    if isinstance(model, LlavaForConditionalGeneration):
        images = torch.full((2, 16), IMAGE_TOKEN)
        pixels = torch.linspace(-2, 2, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()
        inputs = {"input_ids": torch.cat([images, ids], dim=1), "pixel_values": pixels}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = token_ids(2, 8, seed=1)
    with torch.no_grad():
        return model(**inputs)[0]


def config_fields(config):
    """What is saved of a config, without what `save_pretrained` writes into any."""
    passing = ("architectures", "dtype", "_name_or_path")
    return {
        key: config_fields(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in passing
    }


@pytest.mark.parametrize("name", ["elu", "hedgehog"])
@every_part
def test_the_whole_is_the_model_with_those_layers_patched(case, name, tmp_path):
    make, path, pattern = PARTS[case]
    model = make()
    expected = hla.patch_model(copy.deepcopy(model), {pattern: name})
    hla.patch_model(model.get_submodule(path), name)
    assert torch.equal(outputs(model), outputs(expected))
    assert hla.patch_report(model) == hla.patch_report(expected)
    assert attentions(model.get_submodule(path)) == [name] * 2
    with pytest.raises(ValueError, match=rf"already patched \({name} in 2 layers\)"):
        hla.patch_model(model, "elu")
    with pytest.raises(ValueError, match="unpatch_model"):
        model.set_attn_implementation("sdpa")
    before = outputs(randomize_learned(model))
    loaded = saved_and_loaded(model, tmp_path)
    assert torch.equal(outputs(loaded), before)
    assert hla.patch_report(loaded) == hla.patch_report(model)
    with pytest.raises(ValueError, match="This checkpoint runs linear attention"):
        type(make()).from_pretrained(tmp_path, attn_implementation="sdpa")


@every_part
def test_the_part_of_a_patched_model_saves_as_a_patched_model(case, tmp_path):
    make, path, pattern = PARTS[case]
    model = randomize_learned(hla.patch_model(make(), {pattern: "hedgehog"}))
    part = model.get_submodule(path)
    before = config_fields(model.config.to_dict())
    loaded = saved_and_loaded(part, tmp_path, auto_class=type(part))
    assert config_fields(model.config.to_dict()) == before
    assert attentions(loaded) == attentions(part)
    saved, again = part.state_dict(), loaded.state_dict()
    assert all(torch.equal(again[key], saved[key]) for key in saved)
    with pytest.raises(ValueError, match="This checkpoint runs linear attention"):
        make().get_submodule(path).__class__.from_pretrained(tmp_path, attn_implementation="sdpa")


@pytest.mark.parametrize("outer", [True, False], ids=["outer", "part"])
@every_part
def test_unpatching_either_restores_both(case, outer, tmp_path):
    make, path, _ = PARTS[case]
    model = make()
    exact, config = outputs(model), config_fields(model.config.to_dict())
    classes = {name: type(module) for name, module in model.named_modules()}
    hla.patch_model(model.get_submodule(path), "hedgehog")
    hla.unpatch_model(model if outer else model.get_submodule(path))
    assert torch.equal(outputs(model), exact)
    assert not hla.is_patched(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert config_fields(model.config.to_dict()) == config
    assert not any(hasattr(part.config, "linear_attention") for part in model.modules() if hasattr(part, "config"))
    model.get_submodule(path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"linear_attention", "auto_map", "fusion_config", "experts_implementation"} & set(saved)
    model.set_attn_implementation("eager")
    assert model.get_submodule(path).config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "linformer"])
def test_a_patched_encoder_is_put_into_an_encoder_decoder(name, tmp_path):
    encoder = randomize_learned(patch_small(tiny_model("bert", BertModel), name))
    weights = {key: tensor.clone() for key, tensor in encoder.state_dict().items()}
    decoder = tiny_model("bert", BertLMHeadModel, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.encoder.state_dict().items())
    loaded = saved_and_loaded(model, tmp_path)
    assert attentions(loaded) == [name] * 2 + ["softmax"] * 2
    assert_close(outputs(loaded), outputs(model))


def test_a_patched_base_is_put_under_a_head_and_taken_out_again(tmp_path):
    base = randomize_learned(hla.patch_model(tiny_model("bert", BertModel), "hedgehog"))
    model = classifier()
    exact = model.bert
    model.bert = base
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path / "patched")), outputs(model))
    model.bert = exact
    assert not hla.is_patched(model)
    model.save_pretrained(tmp_path / "exact")
    assert torch.equal(outputs(BertForSequenceClassification.from_pretrained(tmp_path / "exact")), outputs(model))


def test_two_parts_one_after_the_other(tmp_path):
    model = VisionTextDualEncoderModel(
        vision_model=hla.patch_model(tiny_model("vit", ViTModel, **IMAGES), "elu"),
        text_model=randomize_learned(hla.patch_model(tiny_model("bert", BertModel), "hedgehog")),
    ).eval()
    assert attentions(model) == ["elu", "elu", "hedgehog", "hedgehog"]
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path / "two")), outputs(model))
    hla.unpatch_model(model.vision_model)
    assert attentions(model) == ["softmax", "softmax", "hedgehog", "hedgehog"]
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path / "one")), outputs(model))
    hla.unpatch_model(model)
    assert type(model) is VisionTextDualEncoderModel


def test_parts_that_share_a_config_are_patched_and_unpatched_by_themselves(tmp_path):
    model = bart()
    exact = outputs(model)
    assert model.model.encoder.config is model.model.decoder.config
    hla.patch_model(model.model.encoder, "elu")
    with_encoder = outputs(model)
    hla.patch_model(model.model.decoder, "hedgehog")
    assert attentions(model) == ["elu", "elu", "hedgehog", "hedgehog"]
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path)), outputs(model))
    hla.unpatch_model(model.model.decoder)
    assert torch.equal(outputs(model), with_encoder)
    assert attentions(model) == ["elu", "elu", "softmax", "softmax"]
    hla.unpatch_model(model.model.encoder)
    assert torch.equal(outputs(model), exact)
    assert type(model) is BartForConditionalGeneration


class Tagger(PreTrainedModel):
    """A model of one's own, which holds another one in a container."""

    config_class = BertModel.config_class
    _supports_sdpa = True

    def __init__(self, config, inner=None):
        super().__init__(config)
        self.blocks = nn.ModuleList([inner or BertModel(config)])
        self.head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return (self.head(self.blocks[0](input_ids, attention_mask=attention_mask)[0]),)


@pytest.mark.parametrize("first", [True, False], ids=["patched-before", "patched-inside"])
def test_a_model_of_ones_own(first, tmp_path):
    base = tiny_model("bert", BertModel)
    if first:
        hla.patch_model(base, "hedgehog")
    model = Tagger(base.config, base).eval()
    if not first:
        hla.patch_model(base, "hedgehog")
    assert torch.equal(outputs(saved_and_loaded(model, tmp_path, auto_class=Tagger)), outputs(model))
    with pytest.raises(ValueError, match="This checkpoint runs linear attention"):
        Tagger.from_pretrained(tmp_path)


def test_another_model_of_the_same_config_stays_exact():
    config = tiny_config("bert")
    model, other = BertForSequenceClassification(config).eval(), BertForSequenceClassification(config).eval()
    expected = outputs(other)
    hla.patch_model(model.bert, "elu")
    assert torch.equal(outputs(other), expected)
    assert type(other) is BertForSequenceClassification
    assert not hasattr(other.config, "linear_attention")


def test_positions_that_share_their_limit_with_others_are_not_extended():
    model, message = bart(), r"model\.decoder\.embed_positions.*extend_positions\(model"
    with pytest.raises(NotImplementedError, match=message):
        hla.patch_model(model.model.encoder, "elu", max_length=200)
    with pytest.raises(NotImplementedError, match=message):
        hla.extend_positions(model.model.encoder, 200)
    head = classifier()
    hla.patch_model(head.bert, "elu", max_length=200)
    assert head.config.max_position_embeddings == 200


@pytest.mark.parametrize("kwargs", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}], ids=str)
def test_a_config_of_a_patched_checkpoint_builds_no_exact_model(kwargs, tmp_path):
    hla.patch_model(classifier().bert, "elu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"This checkpoint runs linear attention\. Load it with hf_linear_attn"):
        AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), **kwargs)
    with pytest.raises(ValueError, match=r"This checkpoint runs linear attention\. Load it with hf_linear_attn"):
        BertForSequenceClassification(AutoConfig.from_pretrained(tmp_path, **kwargs))
    made = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), trust_remote_code=True, **kwargs)
    assert attentions(made) == ["elu", "elu"]
