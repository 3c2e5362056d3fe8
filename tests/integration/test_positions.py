"""Longer inputs for learned absolute positions: tables, buffers and configs of every family, exact and patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EsmConfig,
    EsmForMaskedLM,
    GPTNeoConfig,
    GPTNeoModel,
    OPTConfig,
    OPTForCausalLM,
    ProphetNetConfig,
    ProphetNetModel,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

import hf_linear_attn as hla
from hf_linear_attn.integration.exact import observe_attention
from hf_linear_attn.integration.positions import (
    EXTENDED_FROM,
    METHODS,
    find_tables,
    position_limit,
    rotary_frequencies,
)
from hf_linear_attn.utils.models import shared_copy
from tests.comparing import Snapshot, assert_close
from tests.inputs import padding_mask, token_ids
from tests.tiny_models import BERT, GPT2, LLAMA, SIZES, saved_and_loaded, tiny_config, tiny_model

SHORT = 40  # tokens that every family takes
LONG = 100

ENCODER = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
PADDED = {**ENCODER, "pad_token_id": 1, "max_position_embeddings": SHORT + 2}
SEQ2SEQ = {
    "vocab_size": 61,
    "init_std": 0.25,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "pad_token_id": 1,
}
OPT = {"vocab_size": 61, "init_std": 0.25, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DISTIL = {"vocab_size": 61, "initializer_range": 0.25, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40}
GRID = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}

#: Family -> (a tiny model for 40 tokens, rows of its table before the first position).
FAMILIES = {
    "bert": (lambda: BERT.build(max_position_embeddings=SHORT), 0),
    "roberta": (lambda: RobertaForMaskedLM(RobertaConfig(**PADDED)), 2),
    "xlm-roberta": (lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**PADDED)), 2),
    "esm": (lambda: EsmForMaskedLM(EsmConfig(**PADDED, position_embedding_type="absolute", mask_token_id=3)), 2),
    "electra": (
        lambda: ElectraForMaskedLM(ElectraConfig(**ENCODER, embedding_size=16, max_position_embeddings=SHORT)),
        0,
    ),
    "albert": (
        lambda: AlbertForMaskedLM(AlbertConfig(**ENCODER, embedding_size=16, max_position_embeddings=SHORT)),
        0,
    ),
    "distilbert": (lambda: DistilBertForMaskedLM(DistilBertConfig(**DISTIL, max_position_embeddings=SHORT)), 0),
    "gpt2": (lambda: GPT2.build(n_positions=SHORT), 0),
    "opt": (
        lambda: OPTForCausalLM(OPTConfig(**OPT, ffn_dim=40, word_embed_proj_dim=32, max_position_embeddings=SHORT)),
        2,
    ),
    "bart": (lambda: BartForConditionalGeneration(BartConfig(**SEQ2SEQ, max_position_embeddings=SHORT)), 2),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_way = pytest.mark.parametrize("how", METHODS)


def build(family):
    return FAMILIES[family][0]().eval()


def ids(length, batch=2):
    return token_ids(batch, length).clamp(min=4)


@torch.no_grad()
def outputs(model, prompt, mask=None):
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt) if mask is None else mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt
    return model(**inputs)[0]


# --------------------------------------------------------------------------------------------------------------------
# Every family


@every_family
def test_tables_buffers_and_config(family):
    model, reserved = build(family), FAMILIES[family][1]
    before = {table.name: table.module.weight.clone() for table in find_tables(model)}
    old_parameters = [parameter.shape for parameter in model.parameters()]
    assert position_limit(model) == SHORT
    assert hla.extend_positions(model, LONG) is model
    assert position_limit(model) == LONG
    tables = find_tables(model)
    assert len(tables) == len(before) == (2 if family == "bart" else 1)
    for table in tables:
        old, new = before[table.name], table.module.weight
        assert len(new) - table.limit == reserved
        assert torch.equal(new[: len(old)], old)
        for row in range(LONG):
            assert torch.equal(new[reserved + row], old[reserved + row % SHORT])
        assert new.requires_grad
    assert len(old_parameters) == len(list(model.parameters()))
    # As large as a model that is built for that length.
    twin = type(model)(model.config)
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        extended = dict([*model.named_parameters(), *model.named_buffers()])[name]
        assert extended.shape == tensor.shape, name
        if "_ids" in name:
            assert torch.equal(extended, tensor), name
    for module in model.modules():
        assert getattr(module, "max_source_positions", LONG) == getattr(module, "max_target_positions", LONG) == LONG


@every_family
@pytest.mark.parametrize("patch", [False, True], ids=["exact", "patched"])
def test_short_inputs_give_bit_equal_outputs_and_long_ones_run(family, patch):
    model = build(family)
    if patch:
        hla.patch_model(model, "favor+", num_features=8)
    before = outputs(model, ids(SHORT))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        outputs(model, ids(SHORT + 1))
    hla.extend_positions(model, LONG)
    assert torch.equal(outputs(model, ids(SHORT)), before)
    long = outputs(model, ids(LONG))
    assert bool(torch.isfinite(long).all())
    assert long.shape[1] == LONG
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        outputs(model, ids(LONG + 1))


@every_family
@every_way
def test_saving_and_loading_are_bit_equal(family, how, tmp_path):
    model = hla.extend_positions(build(family), LONG, how)
    prompt = ids(LONG)
    exact = outputs(model, prompt)
    model.save_pretrained(tmp_path / "exact")
    loaded = type(model).from_pretrained(tmp_path / "exact").eval()
    assert torch.equal(outputs(loaded, prompt), exact)
    hla.patch_model(model, "favor+", num_features=8)
    linear = outputs(model, prompt)
    loaded = saved_and_loaded(model, tmp_path / "linear").eval()
    assert torch.equal(outputs(loaded, prompt), linear)
    for patched_model in (model, loaded):
        hla.unpatch_model(patched_model)
        assert position_limit(patched_model) == LONG
        assert torch.equal(outputs(patched_model, prompt), exact)


@every_family
def test_patching_with_a_length_and_back(family, tmp_path):
    model = build(family)
    reference = copy.deepcopy(model)
    before = Snapshot.of(model, **snapshot_inputs(model))
    hla.patch_model(model, "hedgehog", max_length=LONG)
    assert position_limit(model) == LONG
    prompt = ids(LONG)
    linear = outputs(model, prompt)
    loaded = saved_and_loaded(copy.deepcopy(model), tmp_path).eval()  # (saving writes into the config)
    assert torch.equal(outputs(loaded, prompt), linear)
    for patched_model in (model, loaded):
        hla.unpatch_model(patched_model)
        assert position_limit(patched_model) == SHORT
        assert not hasattr(patched_model.config, EXTENDED_FROM)
    before.assert_same(model, **snapshot_inputs(model))
    assert torch.equal(outputs(loaded, ids(SHORT)), outputs(reference, ids(SHORT)))
    # Exact attention on the same positions: what the patched model imitates.
    hla.extend_positions(reference, LONG)
    hla.patch_model(hla.extend_positions(model, LONG), "hedgehog")
    assert torch.equal(outputs(model, prompt), linear)


def snapshot_inputs(model):
    prompt = {"input_ids": ids(20)}
    return {**prompt, "decoder_input_ids": ids(20)} if model.config.is_encoder_decoder else prompt


@every_family
@pytest.mark.parametrize("name", [None, "hedgehog", "window"])
def test_padding_changes_nothing_at_long_lengths(family, name):
    model = build(family)
    hla.extend_positions(model, LONG)
    if name is not None:
        hla.patch_model(model, name)
    prompt, lengths = ids(LONG), [LONG, 71]
    mask = padding_mask(lengths, LONG, "right")
    prompt = prompt.masked_fill(~mask, model.config.pad_token_id)
    both = outputs(model, prompt, mask.long())
    for row, length in enumerate(lengths):
        # (In an encoder-decoder the decoder reads the same ids, without a mask of its own: it is causal.)
        assert_close(both[row, :length], outputs(model, prompt[row : row + 1, :length])[0], factor=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "hedgehog", "window", "linformer-causal"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_generation_continues_past_the_old_limit(family, name):
    model = hla.extend_positions(build(family), LONG)
    if name is not None:
        hla.patch_model(model, name)
    settings = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = ids(SHORT - 10)
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert tokens.shape == (2, SHORT + 40)
    again = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings, use_cache=False)
    assert torch.equal(tokens, again)


# --------------------------------------------------------------------------------------------------------------------
# Ways


def test_interpolation_is_linear_and_keeps_the_ends():
    model = build("roberta")
    old = model.roberta.embeddings.position_embeddings.weight.clone()
    hla.extend_positions(model, 2 * SHORT - 1, "interpolate")
    new = model.roberta.embeddings.position_embeddings.weight
    assert torch.equal(new[:2], old[:2])
    assert torch.equal(new[2::2], old[2:])
    assert_close(new[3::2], (old[2:-1] + old[3:]) / 2)


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_preserved(how, dtype):
    model = build("gpt2").to(dtype)
    first = model.transformer.wpe.weight[0].clone()
    table = hla.extend_positions(model, LONG, how).transformer.wpe.weight
    assert table.dtype == dtype
    assert torch.equal(table[0], first)
    assert bool(torch.isfinite(table).all())


def test_a_table_of_one_row():
    for how in METHODS:
        model = GPT2.build(n_positions=1)
        table = hla.extend_positions(model, 3, how).transformer.wpe.weight
        assert torch.equal(table, table[:1].expand(3, -1))


def test_a_frozen_table_stays_frozen_and_a_meta_model_works():
    model = build("bert").requires_grad_(False)
    hla.extend_positions(model, LONG)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.device("meta"):
        model = build("bert")
    hla.patch_model(model, "hedgehog", max_length=LONG)
    assert model.bert.embeddings.position_embeddings.weight.shape == (LONG, 32)


def test_no_random_numbers_are_drawn():
    model = build("bert")
    state = torch.get_rng_state()
    hla.extend_positions(model, LONG)
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------------------------------------------
# Together with patching


@pytest.mark.slow
def test_extending_a_patched_model_lasts():
    model = hla.patch_model(build("bert"), "hedgehog", max_length=60)
    hla.extend_positions(model, LONG)
    assert hla.is_patched(model)
    hla.unpatch_model(model)
    assert position_limit(model) == LONG
    hla.unpatch_model(hla.patch_model(model, "elu", max_length=2 * LONG))
    assert position_limit(model) == LONG


def test_unpatching_keeps_what_was_trained_of_the_old_positions():
    model = hla.patch_model(build("bert"), "hedgehog", max_length=LONG)
    table = model.bert.embeddings.position_embeddings
    table.weight.data.add_(1.0)
    trained = table.weight[:SHORT].clone()
    assert torch.equal(hla.unpatch_model(model).bert.embeddings.position_embeddings.weight, trained)


def test_other_models_are_not_touched():
    teacher = build("bert")
    student = shared_copy(teacher)
    before = Snapshot.of(teacher)
    hla.patch_model(student, "hedgehog", max_length=LONG)
    before.assert_same(teacher)
    twin = type(teacher)(teacher.config).eval()
    hla.extend_positions(twin, LONG)
    before.assert_same(teacher)
    hla.extend_positions(copy.deepcopy(student), 2 * LONG)
    assert position_limit(student) == LONG


@pytest.mark.slow
def test_mechanisms_for_a_largest_length_get_it():
    name = "linformer"
    for prompt in (name, {"default": name, "0": "hedgehog"}):
        model = hla.patch_model(build("roberta"), prompt, max_length=LONG)
        assert model.config.linear_attention["layers"]["1"]["options"]["max_length"] == LONG
        assert bool(torch.isfinite(outputs(model, ids(LONG))).all())
    model = hla.patch_model(
        build("roberta"), {"default": name, "0": {"attention": name, "max_length": 50}}, max_length=60
    )
    max_lengths = [layer["options"]["max_length"] for layer in model.config.linear_attention["layers"].values()]
    assert max_lengths == [50, 60]
    # Shorter than the positions, or no positions at all: the option only.
    assert position_limit(hla.patch_model(build("roberta"), name, max_length=10)) == SHORT


def test_a_rotary_model_takes_it_as_an_option_only():
    model = hla.patch_model(tiny_model("esm", position_embedding_type="rotary"), "linformer", max_length=300)
    assert model.config.linear_attention["layers"]["0"]["options"]["max_length"] == 300
    assert model.config.max_position_embeddings == 96


def test_the_present_length_is_nothing_to_do():
    model = hla.patch_model(build("bert"), "hedgehog", max_length=SHORT)
    assert not hasattr(model.config, EXTENDED_FROM)
    assert position_limit(hla.extend_positions(model, SHORT)) == SHORT


# --------------------------------------------------------------------------------------------------------------------
# Models of several parts


@pytest.mark.slow
def test_encoder_and_decoder_of_different_lengths():
    configs = (tiny_config("bert", max_position_embeddings=30), tiny_config("bert", max_position_embeddings=80))
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*configs)).eval()
    limits = lambda: [table.limit for table in find_tables(model)]  # noqa: E731
    hla.extend_positions(model, 50)
    assert limits() == [50, 80]
    hla.patch_model(model, "elu", max_length=LONG)
    assert limits() == [LONG, LONG]
    assert model.config.encoder.max_position_embeddings == model.config.decoder.max_position_embeddings == LONG
    hla.unpatch_model(model)
    assert limits() == [50, 80]


@pytest.mark.parametrize("window", [8, 40])
def test_masks_that_a_model_keeps_grow_with_it(window):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": window}
    kinds = {"attention_types": [[["global", "local"], 1]]}
    model = GPTNeoModel(GPTNeoConfig(**sizes, **kinds, max_position_embeddings=48)).eval()
    hla.extend_positions(model, LONG)
    twin = GPTNeoModel(model.config)
    buffers = dict(twin.named_buffers())
    assert sum(name.endswith("bias") for name in buffers) == 2
    for name, tensor in model.named_buffers():
        assert torch.equal(tensor, buffers[name])
    assert model(ids(LONG)).last_hidden_state.shape == (2, LONG, 32)


def test_limits_and_configs_that_parts_keep_of_their_own(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "ngram": 2}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
    model = ProphetNetModel(ProphetNetConfig(**sizes, **layers, **heads, max_position_embeddings=SHORT)).eval()
    hla.extend_positions(model, LONG)
    limits = {table.module.max_length for table in find_tables(model)}
    assert limits == {model.config.max_position_embeddings} == {LONG + 1}  # the padding's row
    model.save_pretrained(tmp_path)
    loaded = ProphetNetModel.from_pretrained(tmp_path)
    assert [table.module.weight.shape for table in find_tables(loaded)] == [(LONG + 1, 32)] * 2


def test_the_text_tower_of_two(tmp_path):
    tower = {**GRID, "vocab_size": 61, "max_position_embeddings": SHORT}
    config = CLIPConfig(text_config=tower, vision_config={**GRID, "image_size": 16, "patch_size": 4})
    model = CLIPModel(config).eval()
    images = torch.randn(1, 3, 16, 16)
    before = model.get_image_features(pixel_values=images)[0]
    hla.extend_positions(model, LONG)
    assert model.config.text_config.max_position_embeddings == LONG
    assert torch.equal(model.get_image_features(pixel_values=images)[0], before)
    model.save_pretrained(tmp_path)
    prompt = ids(LONG)
    features = model.get_text_features(input_ids=prompt)[0]
    assert torch.equal(CLIPModel.from_pretrained(tmp_path).eval().get_text_features(input_ids=prompt)[0], features)


def halves(base: float, size: int) -> list[float]:
    return 2 * [base ** (-2 * index / size) for index in range(size // 2)]


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("llama", {}, [halves(10_000, 8)]),
        ("modernbert", {"layer_types": ["full_attention"] * 2}, [halves(160_000, 8)]),
        ("cohere", {}, [sorted(halves(500_000, 8), reverse=True)]),
        ("glm", {"head_dim": 16}, [[*sorted(halves(10_000, 8), reverse=True), *[0.0] * 8]]),
        ("gpt_neox", {"hidden_size": 64, "intermediate_size": 64}, [[*halves(10_000, 4), *[0.0] * 12]]),
        ("gemma3_text", {"head_dim": 8, "layer_types": ["full_attention"] * 2}, [halves(1_000_000, 8)]),
        ("smollm3", {"no_rope_layers": [1, 0]}, [halves(2_000_000, 8), None]),
    ],
)
def test_rotary_frequencies_are_inferred_from_keys(
    architecture: str, config: dict[str, Any], expected: list[list[float] | None]
) -> None:
    keys: list[Tensor] = []
    model = hla.patch_model(tiny_model(architecture, pad_token_id=0, **config), "window")
    with torch.no_grad(), observe_attention(model, lambda call: keys.append(call.key)):
        for first in (0, 3):
            model(token_ids(1, 12), position_ids=first + torch.arange(12).unsqueeze(0))
    layers = len(keys) // 2
    assert layers == 2
    for layer in range(layers):
        frequencies = rotary_frequencies(model, keys[layer], keys[layers + layer], 3)
        values = expected[layer % len(expected)]
        assert frequencies is None if values is None else frequencies.tolist() == pytest.approx(values, rel=1e-4)


def test_keys_that_no_rotation_explains_have_no_frequencies() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, later = torch.randn(2, 4, 12, 8, generator=generator)
    assert rotary_frequencies(LLAMA.build(), keys, later, 3) is None
    assert rotary_frequencies(GPT2.build(), keys, later, 3) is None
