"""Models that add terms to their logits: patched, they compute what their exact models do, and nothing is lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    PretrainedConfig,
    T5Config,
    T5EncoderModel,
)

import hf_linear_attn as hla
from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.integration.adapters.base import last_bucket
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.discovery import find_attention, self_attention
from hf_linear_attn.integration.exact import exact_attention, observe_attention
from tests.architectures.inputs import find_inputs, tokens
from tests.architectures.models import Case, architecture_class, architecture_config, enlarge_weights
from tests.architectures.properties import outputs, per_token, relative_difference
from tests.reference import naive
from tests.slow_cases import slow

SINKS = ("gpt_oss", *slow("granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash"))
CAPS = ("gemma2", *slow("vaultgemma", "t5gemma"))
BIASES = ("t5", "mpnet", *slow("mt5", "umt5", "switch_transformers", "pop2piano", "longt5"))
DISENTANGLED = ("deberta-v2", "deberta", "sew-d")
ALIBI = ("bloom", "mpt", "falcon")
EVERY = pytest.mark.parametrize("model_type", [*SINKS, *CAPS, *BIASES, *DISENTANGLED[:2], *ALIBI])
DECODERS = pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", *ALIBI, *slow("flint", "vaultgemma")])
WHOLE = {"window_size": 128}


#: Sizes at which the terms matter for a few tokens: a low cap, and buckets that end at a distance of 4 or 7.
SMALL_TERMS = {
    "attn_logit_softcapping": 0.5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 8,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 16,
    "max_relative_positions": 40,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "alibi": True,
}


def build(model_type):
    """A tiny model whose terms matter: sinks that get attention, logits beyond their cap, biases of distances."""
    case = Case(model_type)
    config = architecture_config(case)
    parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for part in (config, *parts):
        for name, value in SMALL_TERMS.items():
            if hasattr(part, name) and model_type != "mpnet":  # which has 32 buckets whatever its config says
                setattr(part, name, value)
    torch.manual_seed(0)
    model = architecture_class(case, config)(config).float().eval()
    enlarge_weights(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "relative_attention_bias.weight", "rel_embeddings.weight")):
            parameter.data = torch.randn(parameter.shape, generator=generator) + 1
    return model


def inputs_of(model):
    """Inputs that are longer than what is exact in a narrow window, without a cache."""
    if model.config.model_type in ("mpnet", *DISENTANGLED):  # whose windows are at least 91 or 32 wide
        return {"input_ids": tokens(120)}
    return {**find_inputs(model), "use_cache": False}


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
    if model.config.model_type in ALIBI:  # slopes are no parameters
        patched_with(bare, **WHOLE)
        for layer in find_attention(bare):
            layer.module.alibi_slopes = (0.0,) * len(layer.module.alibi_slopes)
    for name, parameter in bare.named_parameters():
        if name.endswith("relative_attention_bias.weight"):
            parameter.data.zero_()
        if name.endswith("rel_embeddings.weight"):
            parameter.data.fill_(1.0)
    return bare


@EVERY
def test_a_window_over_the_whole_input_is_the_exact_model_with_all_gradients(model_type):
    model = build(model_type)
    inputs = inputs_of(model)
    exact, lost = per_token(model, inputs), per_token(without_terms(model), inputs)
    assert relative_difference(lost, exact) > 1e-3  # the terms matter
    patched = patched_with(copy.deepcopy(model), **WHOLE)
    assert relative_difference(per_token(patched, inputs), exact) < 1e-5
    for part in (model, patched):
        part.zero_grad()
        part(**inputs)[0].square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    actual = dict(patched.named_parameters())
    assert any(name.endswith("sinks") for name in gradients) or "sinks" not in str(list(actual))
    # Biases of keys have none but rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        error = float((actual[name].grad - gradient).abs().max())
        assert error < 1e-3 * float(gradient.abs().max()) + 1e-6 * largest, name


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
                **cache_argument(patched, past),
                use_cache=True,
            )
            past, start = output_cache(out), start + size
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
    inputs = inputs_of(model)
    exact = outputs(model, inputs)
    patched = patched_with(model, window_size=2, sink_tokens=0)
    assert relative_difference(per_token(patched, inputs), exact[0]) > 1e-4
    with exact_attention(patched):
        for actual, expected in zip(outputs(patched, inputs), exact, strict=True):
            torch.testing.assert_close(actual, expected)
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


def test_random_features_estimate_the_weights_without_a_cap():
    model = build("gemma2")
    uncapped = copy.deepcopy(model)
    for layer in find_attention(uncapped):
        if layer.span == "full":
            layer.module.attn_logit_softcapping = None
    inputs = inputs_of(model)
    expected, actual = (per_token(hla.patch_model(one, "favor+"), inputs) for one in (uncapped, model))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("attention", ["hedgehog", "vq", *slow("t2r")])
def test_maps_learn_capped_weights(attention):
    model = hla.patch_model(build("gemma2"), attention)
    rows = [{"input_ids": tokens(24, seed=seed)} for seed in range(2)]
    losses = hla.transfer_attention(model, rows, max_steps=12).losses
    assert losses[-1] < losses[0] or losses[-1] < 0.01  # codes are fitted already
    ids = tokens(20)
    whole = per_token(model, {"input_ids": ids, "use_cache": False})
    with torch.no_grad():
        past = output_cache(model(ids[:, :12], use_cache=True))
        rest = model(ids[:, 12:], **cache_argument(model, past), use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 12:], rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------------
# Biases by distance


def t5_inputs(length=24, target=18):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, 15:] = 0
    return {"input_ids": tokens(length), "attention_mask": mask, "decoder_input_ids": tokens(target, seed=2)}


@pytest.mark.parametrize("exact", [(), (0,), (1, 3)], ids=["all linear", "first exact", "others exact"])
def test_t5_decodes_with_a_cache_as_its_exact_model_does(exact):
    """The first layer makes the bias of all others, exact or not."""
    model, inputs = build("t5"), t5_inputs()
    layers = {str(index): "softmax" for index in exact}
    plan = {"default": {"attention": "window", **WHOLE, "exact_heads": [1]}, **layers}
    patched = hla.patch_model(copy.deepcopy(model), plan)
    expected = per_token(model, {**inputs, "use_cache": False})
    assert relative_difference(per_token(patched, {**inputs, "use_cache": False}), expected) < 1e-5
    past, parts, start = None, [], 0
    for size in (1, 5, 1, 1, 8, 1, 1):
        now = {**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, start : start + size]}
        with torch.no_grad():
            out = patched(**now, **cache_argument(patched, past), use_cache=True)
        past, start = output_cache(out), start + size
        parts.append(out.logits)
    assert relative_difference(torch.cat(parts, dim=1), expected) < 1e-5
    settings = {"max_new_tokens": 7, "do_sample": False, "decoder_start_token_id": 1, "num_beams": 2}
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(patched.generate(**prompt, **settings), model.generate(**prompt, **settings))


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_t5_outside_of_its_window_is_the_definition_with_the_bias_of_the_paper(part):
    """The buckets and the weights outside are computed from their formulas, one distance after the other."""
    two_sided, window = part == "encoder", 7
    options = {"window_size": 1, "mix_init": 0.3, "saturation": None, "sink_tokens": 1}
    model = patched_with(build("t5"), feature_map="hedgehog", **options)
    calls = []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(**{**t5_inputs(40, 40), "attention_mask": torch.ones(2, 40, dtype=torch.long)}, use_cache=False)
    table = getattr(model, part).block[0].layer[0].SelfAttention.relative_attention_bias.weight
    bias = torch.zeros(table.shape[1], 40, 40)
    for i in range(40):
        for j in range(40):
            bucket = naive.position_bucket(j - i, bidirectional=two_sided, buckets=8, max_distance=8)
            bias[:, i, j] = table[bucket].detach()
    observed = [call for call in calls if call.causal is not two_sided]
    assert len(observed) == 2
    for call in observed:
        mechanism = call.mechanism
        reach = mechanism.options.window_size
        assert reach <= window
        query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
        features = [
            function(tensor, call.scaling).values
            for function, tensor in ((mechanism.feature_map.query, query), (mechanism.feature_map.key, key))
        ]
        expected = naive.windowed_attention(
            query,
            key,
            value,
            *features,
            naive.visible(None, 2, 40, 40, call.causal),
            window=reach,
            causal=call.causal,
            scaling=1.0,
            log_mix=mechanism.log_mix.double(),
            sinks=1,
            bias=bias.double(),
        )
        torch.testing.assert_close(call.linear_output(), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("buckets", "two_sided", "last"), [(32, True, 91), (32, False, 113), (8, True, 4), (8, False, 7)]
)
def test_the_last_bucket_begins_where_the_formula_says(buckets, two_sided, last):
    distance = 128 if buckets == 32 else 8

    def bucket(far):
        return naive.position_bucket(-far, bidirectional=two_sided, buckets=buckets, max_distance=distance)

    distance_found = last_bucket(buckets, distance, two_sided=two_sided)
    assert distance_found in (last, last + 1)
    assert all(bucket(far) == bucket(10_000) for far in range(distance_found, 500))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and "view" not in str(func) and "expand" not in str(func):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_t5_never_makes_a_bias_of_all_pairs():
    """At 8,192 tokens it would have 4 · 8,192² elements; no tensor has a fiftieth of that."""
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, num_decoder_layers=1, is_decoder=False
    )
    model = hla.patch_model(T5EncoderModel(config).eval(), "window")
    ids = torch.randint(2, 50, (1, 8192), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), LargestTensor() as largest:
        model(input_ids=ids)
    assert largest.elements < 4 * 8192**2 // 50


def test_t5_is_calibrated_saved_and_loaded(tmp_path):
    options = {"window_size": 1, "sink_tokens": 1, "feature_map": "vq"}
    model = patched_with(build("t5"), **options)
    rows = [{**t5_inputs(), "decoder_input_ids": tokens(24, seed=seed)} for seed in range(3)]
    table = hla.calibrate(model, rows, max_length=24).table
    assert sorted(table["layer"].unique()) == [0, 1, 2, 3]
    assert float((table["exact"] - table["calibrated"]).abs().max()) < 0.02
    inputs = {**t5_inputs(), "use_cache": False}
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path, auto_class=AutoModelForSeq2SeqLM)
    torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(model, inputs)[0])


def test_t5_trains_with_gradient_checkpointing():
    model = build("t5")
    inputs = {**t5_inputs(), "use_cache": False}
    patched_with(model, window_size=1, feature_map="hedgehog", mix_init=0.0)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                if isinstance(getattr(module, "dropout", None), float):
                    module.dropout = 0.0
        model(**inputs)[0].square().mean().backward()
        gradients.append(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert float(gradients[0].abs().max()) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_mpnet_outside_of_its_window_is_the_definition_with_the_bias_of_the_paper(padded):
    model = patched_with(build("mpnet"), feature_map="hedgehog", mix_init=0.3, sink_tokens=0)
    mask = torch.ones(2, 120, dtype=torch.long)
    mask[1, 110 if padded else 120 :] = 0
    calls = []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(tokens(120), attention_mask=mask)
    table = model.encoder.relative_attention_bias.weight.detach()
    buckets = [naive.position_bucket(d, bidirectional=True, buckets=32, max_distance=128) for d in range(-119, 120)]
    bias = torch.stack([table[[buckets[j - i + 119] for j in range(120)]].T for i in range(120)], dim=1)
    assert len(calls) == 2
    for call in calls:
        mechanism, allowed = call.mechanism, naive.visible(mask.bool(), 2, 120, 120, False)
        query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
        maps = mechanism.feature_map
        features = maps.query(query, call.scaling).values, maps.key(key, call.scaling).values
        settings = {"window": 91, "causal": False, "scaling": call.scaling, "log_mix": mechanism.log_mix.double()}
        expected = naive.windowed_attention(query, key, value, *features, allowed, **settings, bias=bias.double())
        rows = mask.bool()
        actual = call.linear_output().transpose(1, 2)[rows]
        torch.testing.assert_close(actual, expected.transpose(1, 2)[rows].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share_att_key", [True, False])
@pytest.mark.parametrize("pos_att_type", [["c2p"], ["p2c"], ["c2p", "p2c"]])
@pytest.mark.parametrize("buckets", [16, -1])
def test_every_kind_of_deberta_is_exact_in_a_window_over_the_whole_input(share_att_key, pos_att_type, buckets):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = DebertaV2Config(
        vocab_size=61,
        max_position_embeddings=128,
        relative_attention=True,
        pos_att_type=pos_att_type,
        share_att_key=share_att_key,
        position_buckets=buckets,
        max_relative_positions=40,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
        conv_act="gelu",
        **sizes,
    )
    torch.manual_seed(0)
    model = DebertaV2ForSequenceClassification(config).eval()
    enlarge_weights(model)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, 41:] = 0
    inputs = {"input_ids": tokens(60), "attention_mask": mask}
    exact = outputs(model, inputs)[0]
    patched = hla.patch_model(model, {"default": {"attention": "window", **WHOLE}, "1": "softmax"})
    torch.testing.assert_close(outputs(patched, inputs)[0], exact, rtol=1e-4, atol=1e-5)
    hla.unpatch_model(patched)
    assert torch.equal(outputs(model, inputs)[0], exact)


def test_deberta_makes_nothing_of_the_size_of_all_pairs():
    config = DebertaV2Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        position_biased_input=False,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        share_att_key=True,
        position_buckets=256,
    )
    model = hla.patch_model(DebertaV2Model(config).eval(), "window")
    ids = torch.randint(2, 50, (1, 4096), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), LargestTensor() as largest:
        model(ids)
    assert largest.elements < 4096**2 // 2


def test_deberta_takes_no_distances_of_its_caller_while_it_is_patched():
    model = patched_with(build("deberta-v2"))
    with pytest.raises(NotImplementedError, match="takes no query_states and no relative_pos"):
        model.encoder(torch.randn(1, 9, 64), torch.ones(1, 9), query_states=torch.randn(1, 9, 64))


@pytest.mark.parametrize("feature_map", ["vq", "hedgehog"])
def test_deberta_classifiers_are_calibrated_saved_and_loaded(tmp_path, feature_map):
    model = patched_with(build("deberta-v2"), window_size=32, feature_map=feature_map)
    inputs = inputs_of(model)
    table = hla.calibrate(model, [inputs], max_length=120).table
    assert float((table["exact"] - table["calibrated"]).abs().max()) < 0.02
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path, auto_class=AutoModel)
    torch.testing.assert_close(outputs(loaded, inputs)[0], outputs(model, inputs)[0])


@pytest.mark.parametrize("model_type", ["t5", "umt5", "mpnet", "deberta-v2"])
def test_unpatching_gives_a_model_its_own_methods_again(model_type):
    model = build(model_type)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    inputs = inputs_of(model)
    exact = per_token(model, inputs)
    hla.unpatch_model(patched_with(model))
    assert torch.equal(per_token(model, inputs), exact)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    "model_type", ["mpnet", "deberta-v2", "deberta", "gpt_oss", "gemma2", "bloom", "falcon", "mpt"]
)
def test_without_attention_no_token_sees_another(model_type, caplog):
    model = build(model_type)
    caplog.clear()
    bare = without_attention(model)
    assert not caplog.records
    ids = tokens(20, batch=1).repeat(2, 1)
    ids[1, 3] += 1
    first, second = per_token(bare, {"input_ids": ids})
    changed = (first - second).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == [3]
    first, second = per_token(model, {"input_ids": ids})
    assert int(((first - second).abs().amax(dim=-1) > 0).sum()) > 1
