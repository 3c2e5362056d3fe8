"""Models whose layers keep exact attention in some key-value heads: everything that a patched model can."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import DynamicCache, PreTrainedModel

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.integration.context import attention_modules
from hf_linear_attn.mechanisms.base import AttentionInputs
from tests.cases import every_pair
from tests.comparing import Snapshot, assert_close, logits
from tests.inputs import padded_batch, token_ids
from tests.integration.packed import as_ids, packed, unpacked_logits
from tests.integration.test_peft import lora
from tests.slow_cases import long
from tests.small import open_far_part, patch_small, randomize_learned
from tests.tiny_models import BERT, DECODERS, FAMILIES, LLAMA, Family, saved_and_loaded

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)
EACH_DECODER = pytest.mark.parametrize("family", DECODERS, ids=str)


def mixed(family: Family, name: str = "window") -> PreTrainedModel:
    return patch_small(family.build(), name, exact_heads=[1])


@EACH_FAMILY
def test_heads_return_in_their_order(family: Family) -> None:
    """Where the mechanism is exact too, the model is the unpatched one."""
    model = family.build()
    expected = logits(model, token_ids())
    hla.patch_model(model, "window", exact_heads=[1], window_size=64)  # a window of 64 holds the whole input
    assert_close(logits(model, token_ids()), expected)


@every_pair()
def test_linear_heads_take_over_what_a_whole_layer_has_learned(name: str, family: Family) -> None:
    models = patch_small(family.build(), name), patch_small(family.build(), name, exact_heads=[1])
    whole, mixture = (next(attention_modules(model)).linear_attention.eval() for model in models)
    mixture.load_heads(whole)
    shape, generator = whole.shape, torch.Generator().manual_seed(0)
    heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    tensors = [torch.randn(2, count, 12, shape.head_dim, generator=generator) for count in heads]
    inputs = AttentionInputs(*tensors, shape.head_dim**-0.5, family.causal, None)
    with torch.no_grad():
        expected, out = (mechanism(inputs)[0].chunk(heads[1], dim=1) for mechanism in (whole, mixture))
    for head in {*range(heads[1])} - {1}:
        assert_close(out[head], expected[head])


@EACH_FAMILY
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding(family: Family, padding_side: str) -> None:
    model = mixed(family)
    rows = [token_ids(1, length, seed=length)[0] for length in (3, 17, 12)]
    batch = padded_batch(rows, padding_side)
    together = logits(model, **{"ids": batch.pop("input_ids"), **batch})
    for row, tokens in enumerate(rows):
        assert_close(together[row][batch["attention_mask"][row].bool()], logits(model, tokens[None])[0])


@EACH_DECODER
@pytest.mark.parametrize("name", ["window", "hedgehog", "linformer-causal"])
def test_decoding_equals_the_full_forward(family: Family, name: str) -> None:
    model, ids = mixed(family, name), token_ids(2, 19)
    full, cache = logits(model, ids), DynamicCache(config=model.config)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 19)):
        with torch.no_grad():
            out = model(ids[:, start:stop], **cache_argument(model, cache))
        assert_close(out.logits, full[:, start:stop])
    layer: Any = cache.layers[0]
    assert layer.state["exact_key"].shape[1:3] == (1, 19)


@EACH_DECODER
@pytest.mark.parametrize("exact", [{"exact_heads": [1]}, {"layers": [1]}], ids=str)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_model_that_changes_its_precision_continues_from_its_cache(
    family: Family, exact: dict[str, Any], before: torch.dtype, after: torch.dtype
) -> None:
    """Its outputs are those of the whole, in float64, but for rounding."""
    model, ids = patch_small(family.build(), "window", **exact), token_ids(2, 30)
    whole = logits(copy.deepcopy(model).double(), ids)
    cache = DynamicCache(config=model.config)
    model.to(before)(ids[:, :20], **cache_argument(model, cache))
    model.to(after)
    for tokens in (slice(20, 28), slice(28, 29), slice(29, 30)):
        coarse = min(before, after, key=lambda dtype: dtype.itemsize)
        assert_close(logits(model, ids[:, tokens], **cache_argument(model, cache)), whole[:, tokens], coarse, factor=4)


@EACH_DECODER
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=["greedy", "beams", "chunked", "static"],
)
def test_generate(family: Family, settings: dict[str, Any]) -> None:
    model, ids = mixed(family), token_ids(2, 9)
    options = {key: value for key, value in settings.items() if key.startswith("num_")}
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, **options)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **settings), expected)


@EACH_DECODER
def test_assisted_decoding_takes_tokens_back(family: Family) -> None:
    model, ids = mixed(family), token_ids(1, 9)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    assisted = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=family.build())
    assert torch.equal(assisted, expected)


@EACH_FAMILY
def test_packed_documents(family: Family) -> None:
    model = mixed(family)
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))


@EACH_FAMILY
def test_saved_loaded_copied_and_unpatched(family: Family, tmp_path: Any) -> None:
    model = family.build()
    exact = logits(model, token_ids())
    randomize_learned(
        hla.patch_model(model, {"default": {"attention": "window", "window_size": 4}, "1": {"exact_heads": [0]}})
    )
    expected = logits(model, token_ids())
    loaded = saved_and_loaded(model, tmp_path)
    assert torch.equal(logits(loaded, token_ids()), expected)
    assert loaded.config.linear_attention["layers"]["1"]["exact_heads"] == [0]
    assert "exact_heads" not in loaded.config.linear_attention["layers"]["0"]
    assert torch.equal(logits(copy.deepcopy(model), token_ids()), expected)
    assert torch.equal(logits(hla.unpatch_model(model), token_ids()), exact)


def test_the_report_names_exact_heads_and_counts_their_cache() -> None:
    model = hla.patch_model(LLAMA.build(), {"default": {"attention": "hedgehog"}, "0": {"exact_heads": [1]}})
    first, second = hla.patch_report(model).layers
    assert (first.exact_heads, first.state) == ((1,), "growing")
    assert (second.exact_heads, second.state) == ((), "constant")
    # Half of the linear state, and keys and values of 8 numbers for one of two heads.
    assert first.state_bytes == second.state_bytes // 2 + 1024 * 2 * 8 * 4
    assert "hedgehog, exact heads 1" in str(hla.patch_report(model))


@EACH_FAMILY
def test_adapters(family: Family, tmp_path: Any) -> None:
    base = family.build()
    weights = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    settings = {"window_size": 4, "exact_heads": [1]}
    model = get_peft_model(open_far_part(hla.patch_model(base, "window", **settings)), lora(family))
    expected = logits(model.eval(), token_ids())
    model.save_pretrained(tmp_path)
    other = family.build()
    other.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(hla.patch_model(other, "window", **settings), tmp_path).eval()
    assert torch.equal(logits(loaded, token_ids()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", [LLAMA, *long(BERT)], ids=str)
def test_compiles_without_graph_breaks(family: Family) -> None:
    model = mixed(family)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (9, 12):
        assert_close(logits(compiled, token_ids(2, length)), logits(model, token_ids(2, length)))


@pytest.mark.parametrize(
    ("attention", "error", "message"),
    [
        ({"default": "window", "0": {"exact_heads": [4]}}, ValueError, r"exact_heads=\[4\]: layer 0 has 4 key-value"),
        ({"0": {"exact_heads": [1]}}, ValueError, "need the key 'attention'"),
        ({"default": {"attention": "window", "exact_heads": "1"}}, TypeError, "must be a list of key-value head"),
        ({"default": {"attention": "softmax", "exact_heads": [1]}}, ValueError, "every head of a 'softmax' layer"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(attention: Any, error: type[Exception], message: str) -> None:
    model = BERT.build()
    before = Snapshot.of(model)
    with pytest.raises(error, match=message):
        hla.patch_model(model, attention)
    before.assert_same(model)


def test_autocast_to_bfloat16() -> None:
    """Rotary positions leave queries and keys in float32, and values are in bfloat16."""
    model, ids = mixed(LLAMA), token_ids(2, 20)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = model(ids).logits
    assert_close(out.float(), logits(model, ids), torch.bfloat16, factor=4.0)
