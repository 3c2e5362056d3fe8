"""BLOOM, MPT and Falcon: slopes, causal masks and kinds of heads; beside the properties of `test_terms`."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
)

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.discovery import self_attention
from hf_linear_attn.integration.exact import exact_attention, observe_attention
from tests.architectures.inputs import tokens
from tests.architectures.models import enlarge_weights
from tests.architectures.properties import relative_difference
from tests.reference import naive
from tests.training.test_head_search import divergence_with_gate

WHOLE = {"attention": "window", "window_size": 64}
FALCON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
FALCON_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}


def build(kind, heads=4, **changes):
    torch.manual_seed(0)
    if kind == "bloom":
        config = BloomConfig(vocab_size=61, hidden_size=8 * heads, n_layer=2, n_head=heads, **changes)
        model = BloomForCausalLM(config)
    elif kind == "mpt":
        model = MptForCausalLM(MptConfig(vocab_size=61, d_model=8 * heads, n_layers=2, n_heads=heads, max_seq_len=64))
    else:
        sizes = {**FALCON, "hidden_size": 8 * heads, "num_attention_heads": heads}
        model = FalconForCausalLM(FalconConfig(**sizes, **changes))
    enlarge_weights(model)
    return model.eval()


def paper_slopes(heads):
    """m_h of Press et al. 2021: the geometric sequence that begins at 2^(-8/n) for n heads, a power of two.

    For other numbers the authors' code appends every second slope of twice the next smaller power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * (heads - power), 2)]


def mpt_slopes(heads):
    """MPT's: those of the next larger power of two, every second one first."""
    power = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads]


@pytest.mark.parametrize("heads", [4, 6])
def test_slopes_are_those_of_the_paper(heads):
    expected = {
        "bloom": paper_slopes(heads),
        "mpt": mpt_slopes(heads),
        # whose bias is in bfloat16, and divided by √d as the products are
        "falcon": [slope / 8**0.5 for slope in torch.tensor(paper_slopes(heads)).bfloat16().tolist()],
    }
    for kind, slopes in expected.items():
        model = hla.patch_model(build(kind, heads, **(FALCON_RW if kind == "falcon" else {})), {"default": WHOLE})
        calls = []
        with torch.no_grad(), observe_attention(model, calls.append):
            model(tokens(9))
        assert len(calls) == 2
        for call in calls:
            torch.testing.assert_close(call.terms.slope, torch.tensor(slopes))


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("way", ["window", "elu", "exact layer", "exact attention"])
def test_no_token_sees_a_later_one(kind, way):
    """BLOOM under another attention function than its own would have no causal mask."""
    plan = {"default": WHOLE if way != "elu" else "elu"}
    if way == "exact layer":
        plan["1"] = "softmax"
    model = hla.patch_model(build(kind, **(FALCON_RW if kind == "falcon" else {})), plan)
    ids = tokens(12)
    moved = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 60], dim=1)
    with torch.no_grad(), exact_attention(model, None if way == "exact attention" else []):
        first, second = model(ids).logits, model(moved).logits
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


KINDS_OF_FALCON = {
    "7b": {},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "all heads": {"multi_query": False},
    "rw": FALCON_RW,
    "multi-query with ALiBi": {"alibi": True},
}


@pytest.mark.parametrize("name", KINDS_OF_FALCON)
def test_every_kind_of_falcon_is_exact_in_a_window_over_the_whole_input(name):
    """The exact model computes by `sdpa`: with ALiBi its eager attention adds the bias twice."""
    model = build("falcon", **KINDS_OF_FALCON[name])
    assert model.config._attn_implementation == "sdpa"
    ids, mask = tokens(30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        exact = model(ids, attention_mask=mask).logits
    patched = hla.patch_model(copy.deepcopy(model), {"default": WHOLE})
    layer = self_attention(patched)[0].module
    groups = {"7b": 1, "40b": 2}.get(name, 4)
    assert layer.linear_attention.shape.num_key_value_heads == groups
    with torch.no_grad():
        actual = patched(ids, attention_mask=mask).logits
        past, parts = None, []
        for start, stop in ((0, 11), (11, 12), (12, 29), (29, 30)):
            out = patched(
                ids[:, start:stop], attention_mask=mask[:, :stop], **cache_argument(patched, past), use_cache=True
            )
            past = output_cache(out)
            parts.append(out.logits)
    assert relative_difference(actual[mask.bool()], exact[mask.bool()]) < 1e-5
    assert relative_difference(torch.cat(parts, dim=1)[mask.bool()], exact[mask.bool()]) < 1e-5
    prompt = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(patched.generate(**prompt), model.generate(**prompt))


def test_falcon_that_was_loaded_with_eager_attention_has_its_bias_once():
    """Transformers' eager attention adds it in the logits and in the mask; a patched model is that of `sdpa`."""
    model, eager = (build("falcon", **FALCON_RW, attn_implementation=name) for name in ("sdpa", "eager"))
    ids = tokens(30)
    with torch.no_grad():
        exact, twice = model(ids).logits, eager(ids).logits
        patched = hla.patch_model(eager, {"default": WHOLE})
        once = patched(ids).logits
        with exact_attention(patched):
            in_torch = patched(ids).logits
    assert relative_difference(twice, exact) > 1e-3
    assert relative_difference(once, exact) < 1e-5
    assert relative_difference(in_torch, exact) < 1e-5


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_beams_are_those_of_the_exact_model(kind):
    model = build(kind, **(FALCON_RW if kind == "falcon" else {}))
    patched = hla.patch_model(copy.deepcopy(model), {"default": {**WHOLE, "exact_heads": [1]}})
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    prompt = {"input_ids": tokens(12), "attention_mask": mask}
    assert torch.equal(patched.generate(**prompt, **settings), model.generate(**prompt, **settings))


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("feature_map", ["vq", "hedgehog"])
def test_outside_of_its_window_a_model_is_the_definition(kind, feature_map):
    """The weights outside are computed pair by pair, `-m (i - j)` from the slopes of the paper."""
    options = {"window_size": 5, "mix_init": 0.3, "saturation": None, "sink_tokens": 2, "feature_map": feature_map}
    model = build(kind, **(FALCON_RW if kind == "falcon" else {}))
    hla.patch_model(model, {"default": {"attention": "window", **options}})
    calls = []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(tokens(70))
    scale = 8**-0.5 if kind == "falcon" else 1.0
    slopes = torch.tensor(mpt_slopes(4) if kind == "mpt" else paper_slopes(4), dtype=torch.float64) * scale
    index = torch.arange(70)
    bias = -slopes[:, None, None] * (index[:, None] - index)
    for call in calls:
        query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
        maps = call.mechanism.feature_map
        features = [part(x, call.scaling) for part, x in ((maps.query, query), (maps.key, key))]
        features = [f.values if f.log_scale is None else f.values * f.log_scale.exp().unsqueeze(-1) for f in features]
        expected = naive.windowed_attention(
            query,
            key,
            value,
            *features,
            naive.visible(None, 2, 70, 70, True),
            window=5,
            causal=True,
            scaling=8**-0.5,
            log_mix=call.mechanism.log_mix.double(),
            relative=feature_map != "vq",
            sinks=2,
            bias=bias,
        )
        torch.testing.assert_close(call.linear_output(), expected.float(), rtol=1e-4, atol=1e-5)


def test_bloom_trains_with_an_adapter_and_is_saved(tmp_path):
    model = hla.patch_model(build("bloom"), {"default": {"attention": "window", "window_size": 8, "mix_init": 0.0}})
    model.save_pretrained(tmp_path / "base")
    base = hla.load_pretrained(tmp_path / "base")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["query_key_value"], r=2, init_lora_weights=False)
    adapted = get_peft_model(base, lora)
    ids = tokens(24)
    adapted.train()
    adapted(ids, labels=ids).loss.backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_" in name]
    assert gradients
    assert all(bool(gradient.abs().max() > 0) for gradient in gradients)
    adapted.eval().save_pretrained(tmp_path / "adapter")
    again = type(adapted).from_pretrained(hla.load_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, adapted(ids).logits)


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_gradient_checkpointing_gives_the_same_gradients(kind):
    model = hla.patch_model(build(kind), {"default": {"attention": "window", "window_size": 8, "mix_init": 0.0}})
    ids, gradients = tokens(24), []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        model(ids, use_cache=False).logits.square().mean().backward()
        gradients.append(next(model.parameters()).grad.clone())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("attention", ["gla", "gated-delta", "rfa", "luna", "linformer-causal"])
def test_mechanisms_that_cannot_decay_refuse_alibi(attention):
    model = build("bloom")
    with pytest.raises(NotImplementedError, match=r"adds ALiBi's linear biases to its logits.*Use 'window'"):
        hla.patch_model(model, attention)
    assert not hla.is_patched(model)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_unpatching_gives_a_model_its_own_methods_again(kind):
    model, ids = build(kind), tokens(12)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        exact = model(ids).logits
        hla.unpatch_model(hla.patch_model(model, {"default": WHOLE}))
        assert torch.equal(model(ids).logits, exact)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


LENGTHS = (5, 9, 1, 20)


def packed_documents():
    ids = torch.cat([tokens(length, batch=1, seed=length) for length in LENGTHS], dim=1)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize("name", ["7b", "rw"])
def test_packed_documents_of_falcon_are_rows_of_their_own(name):
    options = {"attention": "window", "window_size": 4, "mix_init": 0.0, "sink_tokens": 1}
    model = hla.patch_model(build("falcon", **KINDS_OF_FALCON[name]), {"default": options})
    ids, positions = packed_documents()
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        each = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(each, dim=1), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="FalconForCausalLM does not hand cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 5, 35], dtype=torch.int32), use_cache=False)


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_packed_documents_are_refused_where_the_model_drops_their_positions(kind):
    """The models below have no positions to tell, and take the beginnings of documents."""
    options = {"attention": "window", "window_size": 4, "mix_init": 0.0, "sink_tokens": 1}
    model = hla.patch_model(build(kind), {"default": options})
    ids, positions = packed_documents()
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    for where in ({"position_ids": positions}, {"cu_seq_lens_q": starts}):
        with pytest.raises(NotImplementedError, match=r"ForCausalLM does not hand.*Pass padded rows"):
            model(ids, **where, use_cache=False)
    with torch.no_grad():
        packed = model.base_model(ids, position_ids=positions, use_cache=False)[0]
        each = [model.base_model(part, use_cache=False)[0] for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(packed, torch.cat(each, dim=1), rtol=1e-4, atol=1e-5)
    exact = hla.unpatch_model(model)
    with torch.no_grad():
        exact(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("attention", ["window", "hedgehog"])
def test_transfer_brings_a_model_nearer_to_its_exact_attention(attention):
    options = {"window_size": 4, "feature_map": "hedgehog"} if attention == "window" else {}
    model = hla.patch_model(build("bloom"), {"default": {"attention": attention, **options}})
    done = hla.transfer_attention(model, [{"input_ids": tokens(40, seed=seed)} for seed in range(3)], max_steps=20)
    assert sum(done.losses[-3:]) < sum(done.losses[:3])


def test_heads_are_searched_with_their_slopes():
    """What an exact head gains is the derivative of the divergence by its share, slopes of other heads left out."""
    model, ids = build("bloom").double(), tokens(24)
    batch, options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"window_size": 4, "mix_init": -3.0}
    result = hla.find_exact_heads(model, None, [batch], "window", share=0.5, **options)
    assert sum(map(len, result.heads.values())) == 4
    patched = hla.patch_model(model, "window", **options)
    hla.calibrate(patched, [batch])
    for row in result.table.itertuples():
        ends = [divergence_with_gate(patched, batch, row.layer, row.head, gate) for gate in (-3e-4, 3e-4)]
        assert row.gain == pytest.approx((ends[0] - ends[1]) / 6e-4, rel=5e-3, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("attention", ["window", "elu"])
def test_one_graph_serves_every_length(kind, attention):
    options = {"window_size": 4, "mix_init": 0.0, "sink_tokens": 1} if attention == "window" else {}
    exact = build(kind, **(FALCON_RW if kind == "falcon" else {})).base_model
    model = hla.patch_model(exact, {"default": {"attention": attention, **options}})
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=512)}
    example = {"input_ids": tokens(40), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    shapes = {**dict.fromkeys(example, sizes), "use_cache": None}
    graph = torch.export.export(model, (), {**example, "use_cache": False}, dynamic_shapes=shapes).module()
    for length in (7, 64, 200):
        inputs = {"input_ids": tokens(length), "attention_mask": torch.ones(2, length, dtype=torch.long)}
        inputs["attention_mask"][1, :3] = 0
        with torch.no_grad():
            actual, expected = (part(**inputs, use_cache=False)[0] for part in (graph, model))
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
