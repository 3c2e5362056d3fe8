"""What is timed, not how long it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.evaluation import forecast
from hf_linear_attn.evaluation.decoding import cache_bytes, decode_speed, prefill
from hf_linear_attn.evaluation.speed import (
    FREE,
    layer_speed,
    length_rows,
    long_inputs,
    model_speed,
    position_inputs,
    shared_copy,
    timing_options,
    without_attention,
)
from hf_linear_attn.integration.attention import attention_modules
from tests.helpers import MAX_LENGTH, every_mechanism, patch_small, tiny_model

TOKENS = list(range(1, 30))


def silent(done: int, note: str) -> None:
    return None


def test_a_shared_copy_holds_the_same_tensors_and_is_patched_alone() -> None:
    model = tiny_model("bert").eval()
    copied = patch_small(shared_copy(model), "hedgehog")
    assert not hla.is_patched(model)
    names = dict(copied.named_parameters())
    for name, parameter in model.named_parameters():
        assert names[name].data_ptr() == parameter.data_ptr(), name


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_without_attention_no_token_sees_another(kind: str) -> None:
    model = tiny_model(kind).eval()
    free = without_attention(model)
    ids = torch.tensor([TOKENS, TOKENS])
    ids[1, 3] = 40
    with torch.no_grad():
        first, second = free.base_model(ids)[0]
        exact = model.base_model(ids)[0]
    changed = (first - second).abs().amax(dim=-1) > 0
    assert changed.nonzero().flatten().tolist() == [3]
    assert not torch.allclose(exact[0], first)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kind", "beyond"), [("bert", True), ("gpt2", True), ("llama", False)])
def test_positions_begin_again_where_a_table_ends(kind: str, beyond: bool) -> None:
    model = tiny_model(kind).eval()
    assert position_inputs(model, MAX_LENGTH) == {}
    found = position_inputs(model, 8, MAX_LENGTH - 3)
    assert bool(found) is beyond
    if beyond:
        expected = [*range(MAX_LENGTH - 3, MAX_LENGTH), 0, 1, 2, 3, 4]
        assert found["position_ids"].tolist() == [expected]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_long_inputs_run_and_are_not_read_as_packed_documents(kind: str) -> None:
    """Beyond the table, the first positions of a causal model see what they see in a short input."""
    model = tiny_model(kind).eval()
    inputs = long_inputs(model, TOKENS, 3 * MAX_LENGTH)
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
    inputs = long_inputs(model, TOKENS, 2 * MAX_LENGTH, 3)
    assert {held.shape for held in inputs.values()} == {(3, 2 * MAX_LENGTH)}
    assert inputs["input_ids"].flatten()[: len(TOKENS)].tolist() == TOKENS
    with torch.no_grad():
        out = model.base_model(**inputs)[0]
        alone = model.base_model(**{name: held[1:2] for name, held in inputs.items()})[0]
    torch.testing.assert_close(out[1:2], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rows_of_passes_with_several_sequences_and_of_a_prefill(kind: str) -> None:
    """The prefill of a patched model builds states, that of the exact one a cache; one without attention keeps none."""
    model = tiny_model(kind).eval()
    models = {"sdpa": model, "elu": hla.patch_model(shared_copy(model), "elu"), FREE: without_attention(model)}
    seen: dict[str, list[Any]] = {name: [] for name in models}
    for name, held in models.items():
        held.register_forward_pre_hook(
            lambda module, args, given, name=name: seen[name].append(given.get("past_key_values")), with_kwargs=True
        )
    settings: dict[str, Any] = {"baseline": "sdpa", "budget": 1e-9, "resources": ("memory",)}
    rows = length_rows(models, TOKENS, 2 * MAX_LENGTH, what="prefill", **settings)
    assert seen[FREE] == [None] * len(seen[FREE])
    for name in ("sdpa", "elu"):
        assert len(set(map(id, seen[name]))) == len(seen[name])  # a new one in each call
        assert seen[name][0].get_seq_length() == 2 * MAX_LENGTH
    assert cache_bytes(seen["elu"][0]) < cache_bytes(seen["sdpa"][0])
    assert rows["elu"]["tokens_per_second"] == pytest.approx(2 * MAX_LENGTH / rows["elu"]["median"])
    several = length_rows(models, TOKENS, 16, batch=3, **settings)
    assert several["elu"]["tokens_per_second"] == pytest.approx(48 / several["elu"]["median"])
    assert set(several["elu"]) - set(rows["elu"]) == set()


def test_only_mechanisms_with_a_largest_length_get_one() -> None:
    assert timing_options({"a": 1}, ["a", "max_length"], 512, 8192) == {"a": 1, "max_length": 8192}
    assert timing_options({}, ["max_length"], None, 100) == {"max_length": 100}
    assert timing_options({}, ["max_length"], 512, 512) == {}
    assert timing_options({"a": 1}, ["a"], 512, 8192) == {"a": 1}


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_speed_tables_have_a_row_for_each_model_and_length(kind: str) -> None:
    model = tiny_model(kind).eval()
    models = {"sdpa": model, "elu": hla.patch_model(shared_copy(model), "elu")}
    lengths = [16, 2 * MAX_LENGTH]
    free = {FREE: without_attention(model)}
    whole = model_speed({**models, **free}, TOKENS, lengths, baseline="sdpa", budget=0.01, announce=silent)
    layer = layer_speed(models, lengths, baseline="sdpa", budget=0.01, seed=0, announce=silent)
    assert list(whole.rows) == ["sdpa", "elu", FREE]
    assert list(layer.rows) == ["sdpa", "elu"]
    for table in (whole, layer):
        assert table.lengths[:1] == [16]
        assert all(len(rows) == len(table.lengths) for rows in table.rows.values())
        assert all(timing.median > 0 and timing.rounds >= 3 for rows in table.rows.values() for timing in rows)


def test_lengths_that_would_take_too_long_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_linear_attn.evaluation.speed.LONGEST_WAIT", 0.0)
    models = {"sdpa": tiny_model("bert").eval()}
    table = model_speed(models, TOKENS, [16, 90], baseline="sdpa", budget=1e-9, announce=silent)
    assert table.lengths == [16]
    assert "90 tokens" in table.notes[0]


# --------------------------------------------------------------------------------------------------------------------
# Decoding


def test_bytes_of_a_growing_cache() -> None:
    """Two tensors `[1, G, n, d]` of float32 a layer."""
    model = tiny_model("llama").eval()
    cache = prefill(model, TOKENS, 50)
    assert cache_bytes(cache) == 2 * 2 * (2 * 50 * 8) * 4
    assert cache_bytes(DynamicCache()) == 0


@every_mechanism(causal=True)
def test_bytes_of_a_state_are_those_that_the_mechanism_states(name: str) -> None:
    model = patch_small(tiny_model("llama").eval(), name)
    cache = prefill(model, TOKENS, 64)
    modules: list[Any] = list(attention_modules(model))
    stated = sum(module.linear_attention.state_bytes(64) for module in modules)
    assert cache_bytes(cache) == pytest.approx(stated, rel=0.15)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_prefill_in_pieces_is_one_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_linear_attn.evaluation.decoding.PREFILL_CHUNK", 7)
    model = tiny_model(kind).eval()
    whole = DynamicCache()
    with torch.no_grad():
        model.base_model(torch.tensor([TOKENS]), past_key_values=whole, use_cache=True)
    pieces = prefill(model, TOKENS, len(TOKENS))
    torch.testing.assert_close(pieces.layers[-1].keys, whole.layers[-1].keys, rtol=1e-4, atol=1e-5)


def test_decoding_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2").eval()
    models = {"sdpa": model, "elu": hla.patch_model(shared_copy(model), "elu")}
    contexts = [10, 2 * MAX_LENGTH]
    rows = decode_speed(models, TOKENS, contexts, baseline="sdpa", budget=0.0, announce=silent)
    assert [row.context for row in rows["elu"]] == contexts
    assert rows["elu"][0].cache_bytes == rows["elu"][1].cache_bytes
    assert rows["sdpa"][1].cache_bytes == rows["sdpa"][0].cache_bytes * 2 * MAX_LENGTH // 10
    streams = decode_speed(models, TOKENS, contexts[1:], baseline="sdpa", budget=0.0, announce=silent, batch=3)
    assert {name: row[0].cache_bytes for name, row in streams.items()} == {
        name: 3 * row[1].cache_bytes for name, row in rows.items()
    }


# --------------------------------------------------------------------------------------------------------------------
# What there is no room for


def test_a_forecast_is_refused_for_want_of_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"sdpa": {"median": 2.0, "memory": 100}, "elu": {"median": 1.0, "memory": None}}
    found = forecast.forecast(rows, lambda name: 4 if name == "sdpa" else 2, lambda name: 3)
    assert found == forecast.Forecast(40.0, 300)
    assert forecast.forecast({"sdpa": {"median": 1.0}}, lambda name: 1, lambda name: 1).bytes is None
    device = torch.device("cpu")
    for free, budget, wanting in ((1000, 1.0, None), (None, 1.0, None), (1000, 1e-9, None), (300, 9.0, "memory")):
        monkeypatch.setattr(forecast, "free_memory", lambda device, free=free: free)
        refused = found.refusal(budget, device)
        assert (refused and refused[0]) == wanting
    monkeypatch.setattr(forecast, "LONGEST_WAIT", 1.0)
    monkeypatch.setattr(forecast, "free_memory", lambda device: None)
    assert found.refusal(1.0, device) == ("time", "one length would take ~40 s")
    assert found.refusal(3.0, device) is None
