"""What is timed, not how long it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.integration.cache_argument import cache_argument, find_cache
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.measure.speed import (
    accepts_longer_inputs,
    fill_cache,
    measure_decoding,
    measure_passes,
    position_inputs,
    synthetic_inputs,
    timing_options,
)
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.streaming import cache_bytes
from hf_linear_attn.study.variants import WITHOUT_ATTENTION
from hf_linear_attn.utils.models import shared_copy
from tests.cases import every_mechanism
from tests.small import patch_small
from tests.tiny_models import MAX_LENGTH, tiny_model

TOKENS = list(range(1, 30))


def test_a_shared_copy_holds_the_same_tensors_and_is_patched_single() -> None:
    model = tiny_model("bert").eval()
    copied = patch_small(shared_copy(model), "hedgehog")
    assert not hla.is_patched(model)
    names = dict(copied.named_parameters())
    for name, parameter in model.named_parameters():
        assert names[name].data_ptr() == parameter.data_ptr(), name


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_without_attention_no_token_sees_another(kind: str) -> None:
    model = tiny_model(kind).eval()
    bare = without_attention(model)
    ids = torch.tensor([TOKENS, TOKENS])
    ids[1, 3] = 40
    with torch.no_grad():
        first, second = bare.base_model(ids)[0]
        exact = model.base_model(ids)[0]
    changed = (first - second).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == [3]
    assert not torch.allclose(exact[0], first)
    assert model.config._attn_implementation == "sdpa"


def test_without_attention_a_decoder_sees_nothing_of_an_encoder() -> None:
    bare = without_attention(tiny_model("bart"))
    decoded = torch.tensor([TOKENS[:9], TOKENS[:9]])
    decoded[1, 3] = 40
    with torch.no_grad():
        longer, shorter, same = (
            bare(input_ids=torch.tensor([tokens] * 2), decoder_input_ids=decoded).logits
            for tokens in (TOKENS[:20], TOKENS[:5], TOKENS[9:18])
        )
    assert torch.equal(longer, shorter)
    assert torch.equal(longer, same)
    changed = (longer[0] - longer[1]).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == [3]
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    first, second = (bare.generate(torch.tensor([tokens]), **settings) for tokens in (TOKENS[:20], TOKENS[:5]))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("kind", "beyond"), [("bert", True), ("gpt2", True), ("llama", False)])
def test_positions_start_again_where_a_table_ends(kind: str, beyond: bool) -> None:
    model = tiny_model(kind).eval()
    assert position_inputs(model, MAX_LENGTH) == {}
    inputs = position_inputs(model, 8, MAX_LENGTH - 3)
    assert bool(inputs) is beyond
    assert accepts_longer_inputs(model)
    if beyond:
        expected = [*range(MAX_LENGTH - 3, MAX_LENGTH), 0, 1, 2, 3, 4]
        assert inputs["position_ids"].tolist() == [expected]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_long_inputs_run_and_are_not_read_as_packed_documents(kind: str) -> None:
    """Beyond the table, the first positions of a causal model see what they see in a short input."""
    model = tiny_model(kind).eval()
    inputs = synthetic_inputs(model, TOKENS, 3 * MAX_LENGTH)
    assert inputs["input_ids"].shape == (1, 3 * MAX_LENGTH)
    with torch.no_grad():
        out = model.base_model(**inputs)[0]
        changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
        changed["input_ids"][0, 0] = 41
        other = model.base_model(**changed)[0]
    # The last token sees the first: one document, not several.
    assert (out[0, -1] - other[0, -1]).abs().max() > 0


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_several_sequences_are_rows_of_the_same_tokens(kind: str) -> None:
    model = tiny_model(kind).eval()
    inputs = synthetic_inputs(model, TOKENS, 2 * MAX_LENGTH, 3)
    assert {tensor.shape for tensor in inputs.values()} == {(3, 2 * MAX_LENGTH)}
    assert inputs["input_ids"].flatten()[: len(TOKENS)].tolist() == TOKENS
    with torch.no_grad():
        out = model.base_model(**inputs)[0]
        single = model.base_model(**{name: tensor[1:2] for name, tensor in inputs.items()})[0]
    torch.testing.assert_close(out[1:2], single, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_passes_with_several_sequences_and_a_prefill(kind: str) -> None:
    """The prefill of a patched model builds states, that of the exact one a cache; one without attention has none."""
    model = tiny_model(kind).eval()
    elu = hla.patch_model(shared_copy(model), "elu")
    models = {"exact": model, "elu": elu, WITHOUT_ATTENTION: without_attention(model)}
    caches: dict[str, list[Any]] = {name: [] for name in models}
    for name, one in models.items():
        one.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: caches[name].append(find_cache(kwargs.values())), with_kwargs=True
        )
    options: dict[str, Any] = {"baseline": "exact", "seconds": 1e-9}
    rows = measure_passes(models, TOKENS, 2 * MAX_LENGTH, measurement="prefill", memory=True, **options)
    assert caches[WITHOUT_ATTENTION] == [None] * len(caches[WITHOUT_ATTENTION])
    for name in ("exact", "elu"):
        assert len(set(map(id, caches[name]))) == len(caches[name])  # a new one in each call
        assert caches[name][0].get_seq_length() == 2 * MAX_LENGTH
    assert cache_bytes(caches["elu"][0]) < cache_bytes(caches["exact"][0])
    assert {"seconds", "tokens_per_second", "peak_memory"} <= rows["elu"].keys()
    for batch_size, length in ((1, 2 * MAX_LENGTH), (3, 16)):
        if batch_size > 1:
            rows = measure_passes(models, TOKENS, length, batch_size=batch_size, **options)
        for values in rows.values():
            assert values["p20"] <= values["seconds"] <= values["p80"]
            assert values["tokens_per_second"] == pytest.approx(batch_size * length / values["seconds"])


def test_only_mechanisms_with_a_largest_length_get_one() -> None:
    sized, other = ATTENTIONS.get("linformer"), ATTENTIONS.get("elu")
    assert timing_options(sized, {"seed": 1}, 512, 8192) == {"seed": 1, "max_length": 8192}
    assert timing_options(sized, {}, None, 100) == {"max_length": 100}
    assert timing_options(sized, {}, 512, 512) == {}
    assert timing_options(sized, {"max_length": 1024}, 512, 1000) == {"max_length": 1024}
    assert timing_options(other, {"seed": 1}, 512, 8192) == {"seed": 1}


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def test_bytes_of_a_growing_cache() -> None:
    """Two tensors `[1, G, n, d]` of float32 a layer."""
    model = tiny_model("llama").eval()
    cache = fill_cache(model, TOKENS, 50)
    assert cache_bytes(cache) == 2 * 2 * (2 * 50 * 8) * 4
    assert cache_bytes(DynamicCache()) == 0


@every_mechanism(causal=True)
def test_bytes_of_a_state_are_those_that_the_mechanism_states(name: str) -> None:
    model = patch_small(tiny_model("llama").eval(), name)
    cache = fill_cache(model, TOKENS, 64)
    modules: list[Any] = list(attention_modules(model))
    stated = sum(module.linear_attention.state_bytes(64) for module in modules)
    assert cache_bytes(cache) == pytest.approx(stated, rel=0.15)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_prefill_in_pieces_is_one_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_linear_attn.measure.speed.PREFILL_CHUNK", 7)
    model = tiny_model(kind).eval()
    full = DynamicCache()
    with torch.no_grad():
        model.base_model(torch.tensor([TOKENS]), **cache_argument(model.base_model, full), use_cache=True)
    pieces = fill_cache(model, TOKENS, len(TOKENS))
    torch.testing.assert_close(pieces.layers[-1].keys, full.layers[-1].keys, rtol=1e-4, atol=1e-5)


def test_decoding() -> None:
    model = tiny_model("gpt2").eval()
    models = {"exact": model, "elu": hla.patch_model(shared_copy(model), "elu")}
    options: dict[str, Any] = {"baseline": "exact", "seconds": 0.0}

    def sizes(context: int, batch_size: int = 1) -> dict[str, int]:
        rows = measure_decoding(models, TOKENS, context, batch_size=batch_size, **options)
        return {name: values["cache_bytes"] for name, values in rows.items()}

    short, long = sizes(10), sizes(2 * MAX_LENGTH)
    assert short["elu"] == long["elu"]
    assert long["exact"] == short["exact"] * 2 * MAX_LENGTH // 10
    assert sizes(2 * MAX_LENGTH, 3) == {name: 3 * size for name, size in long.items()}
