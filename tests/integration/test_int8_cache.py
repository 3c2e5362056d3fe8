"""`cache_dtype="int8"` in whole models: every mode of decoding, where the rounding loses nothing and where it does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache, cache_utils

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.ops.native.backend import unavailable_reason
from hf_linear_attn.streaming import cache_bytes, read_stream
from tests.comparing import NEW, assert_close, generate, logits, relative_error
from tests.inputs import padded_batch, token_ids
from tests.slow_cases import long
from tests.small import on_the_grid, open_far_part, randomize_learned
from tests.tiny_models import BERT, GPT2, LLAMA, Family

EITHER = pytest.mark.parametrize("family", [LLAMA, GPT2], ids=str)


def build(family: Family, **options: Any) -> Any:
    """One layer is a mixture of exact and linear heads, the last one exact in all of them."""
    chosen = {"cache_dtype": "int8", "exact_heads": [1], "window_size": 4, "sink_tokens": 2, **options}
    plan = {
        "default": {"attention": "window", "mix_init": 0.0, **chosen},
        "-1": {"attention": "softmax", "cache_dtype": "int8"},
    }
    return randomize_learned(hla.patch_model(family.build(), plan))


@torch.no_grad()
def fill(model: Any, ids: torch.Tensor) -> Any:
    return output_cache(model(ids, use_cache=True))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@EITHER
def test_generation_is_that_without_a_cache(family: Family, settings: dict[str, Any]) -> None:
    model, ids, tokens = on_the_grid(build(family)), token_ids(1, 9), []
    ids = torch.cat([ids, ids], dim=1) if "prompt_lookup_num_tokens" in settings else token_ids(2, 17)
    for use_cache in (True, "prompt_lookup_num_tokens" in settings):
        torch.manual_seed(5)
        tokens.append(generate(model, ids, use_cache=use_cache, **settings))
        settings = {name: value for name, value in settings.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(*tokens)
    assert not torch.equal(generate(model, ids), generate(model, ids.flip(1)))


@pytest.mark.slow
@EITHER
def test_generation_in_pieces_with_an_assistant_and_with_padding(family: Family) -> None:
    model, ids = on_the_grid(build(family)), token_ids(1, 17)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, prefill_chunk_size=5), expected)
    assert torch.equal(generate(model, ids, assistant_model=family.build()), expected)
    rows = [token_ids(1, length, seed=length)[0] for length in (3, 11, 18)]
    batch = padded_batch(rows, "left")
    together = generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for row, tokens in enumerate(rows):
        assert torch.equal(together[row, -NEW:], generate(model, tokens[None])[0, -NEW:])


@EITHER
def test_decoding_is_the_prompt_up_to_the_rounding(family: Family) -> None:
    model, exact, ids = build(family), build(family, cache_dtype="auto"), token_ids(2, 60)
    exact.load_state_dict(model.state_dict())
    assert torch.equal(logits(model, ids), logits(exact, ids))
    cache, steps = fill(model, ids[:, :20]), []
    for index in range(20, 60):
        steps.append(logits(model, ids[:, index : index + 1], **cache_argument(model, cache)))
    error = relative_error(torch.cat(steps, dim=1), logits(exact, ids)[:, 20:])
    assert 1e-4 < error < 5e-2
    whole = cache.layers[1]
    assert whole.state.keys() == {"exact_key", "exact_value"}
    assert whole.state["exact_key"].dtype is torch.int8
    if unavailable_reason() is None:
        assert [type(step).__name__ for step in whole.state.prepared.kernels] == ["ExactStep"]


@pytest.mark.slow
def test_exact_attention_alone_with_its_cache_in_int8(tmp_path: Any) -> None:
    model, ids = LLAMA.build(), token_ids(2, 40)
    expected = logits(model, ids)
    hla.patch_model(model, "softmax", cache_dtype="int8")
    assert "(growing)" in str(hla.patch_report(model))
    assert_close(logits(model, ids), expected)
    cache = fill(model, ids[:, :20])
    steps = [logits(model, ids[:, index : index + 1], **cache_argument(model, cache)) for index in range(20, 40)]
    assert 1e-4 < relative_error(torch.cat(steps, dim=1), expected[:, 20:]) < 5e-2
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path)
    assert torch.equal(generate(loaded, ids), generate(model, ids))
    with pytest.raises(ValueError, match="Every layer is 'softmax'"):
        hla.patch_model(BERT.build(), "softmax", cache_dtype="int8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_in_a_file_continues_bit_equally(dtype: torch.dtype, tmp_path: Any) -> None:
    model = build(LLAMA).to(dtype)
    cache = fill(model, token_ids(2, 19))
    logits(model, token_ids(2, 1, seed=2), **cache_argument(model, cache))
    hla.save_state(model, cache, tmp_path / "state")
    again = copy.deepcopy(model)
    loaded = hla.load_state(again, tmp_path / "state")
    assert loaded.layers[0].state["exact_key"].dtype is loaded.layers[0].state["ring_key"].dtype is torch.int8
    for seed, length in enumerate((3, 1, 1, 12)):
        ids = token_ids(2, length, seed=10 + seed)
        expected = logits(model, ids, **cache_argument(model, cache))
        assert torch.equal(logits(again, ids, **cache_argument(again, loaded)), expected)
    with pytest.raises(ValueError, match="another linear attention"):
        hla.load_state(build(LLAMA, cache_dtype="auto").to(dtype), tmp_path / "state")


@pytest.mark.slow
@EITHER
def test_streams_and_unpatching(family: Family) -> None:
    model, ids = family.build(), token_ids(1, 50)
    expected = logits(model, ids)
    open_far_part(hla.patch_model(model, "window", window_size=4, exact_heads=[1], cache_dtype="int8"))
    losses = [piece.output.logits for piece in read_stream(model, ids[0].tolist(), chunk_length=8)]
    assert relative_error(torch.cat(losses, dim=1), logits(model, ids)) < 5e-2
    # In float32 a key between two numbers of the grid may round to the other one in a piece of another length.
    rounded = on_the_grid(build(family).double())
    losses = [piece.output.logits for piece in read_stream(rounded, ids[0].tolist(), chunk_length=8)]
    assert_close(torch.cat(losses, dim=1), logits(rounded, ids))
    assert torch.equal(logits(hla.unpatch_model(model), ids), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reported_bytes_are_those_of_the_cache(dtype: torch.dtype) -> None:
    length = 40
    model = build(LLAMA).to(dtype)
    cache = fill(model, token_ids(1, length))
    mechanisms = [module.linear_attention for module in model.modules() if hasattr(module, "linear_attention")]
    assert cache_bytes(cache) == sum(mechanism.state_bytes(length) for mechanism in mechanisms)
    assert hla.patch_report(model).state_bytes == sum(mechanism.state_bytes(1024) for mechanism in mechanisms)
    for index in range(20):
        logits(model, token_ids(1, 1, seed=index), **cache_argument(model, cache))
    tensors = [tensor for layer in cache.layers for tensor in layer.state.values()]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert cache_bytes(cache) == sum(stored.values())


@pytest.mark.slow
def test_other_caches() -> None:
    """Static layers give way to ours, and exact layers of a mixture refuse them, as without int8."""
    model, ids = on_the_grid(build(LLAMA)), token_ids(2, 9)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, cache_implementation="static"), expected)
    cache = StaticCache(model.config, max_cache_len=32)
    assert torch.equal(generate(model, ids, **cache_argument(model, cache)), expected)
    assert torch.equal(generate(model, ids, **cache_argument(model, DynamicCache(config=model.config))), expected)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the other backends are packages of their own"
)
def test_a_quantized_cache_of_transformers_rounds_the_layers_that_are_exact_as_a_whole(tmp_path: Any) -> None:
    plan = {"default": {"attention": "window", "window_size": 4, "cache_dtype": "int8"}, "0": "softmax"}
    model, ids = open_far_part(hla.patch_model(LLAMA.build(), plan)), token_ids(2, 40)
    expected = logits(model, ids)
    cache, start = QuantizedCache("fp8", model.config), 0
    for length in (20, 6, *[1] * 14):
        new = logits(model, ids[:, start : start + length], **cache_argument(model, cache))
        assert relative_error(new, expected[:, start : start + length]) < 0.4  # float8 has three bits after the point
        start += length
    exact, linear = cache.layers
    assert type(exact).__name__ == "Fp8QuantizedLayer"
    assert linear.state["ring_key"].dtype is torch.int8
    size = (
        exact._quantized_keys[0].shape.numel() * 2 + 2 * 4
    )  # numbers, and a scale for all keys and one for all values
    assert cache_bytes(cache) == linear.nbytes() + size
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    for beams in (1, 3):
        assert generate(model, ids, num_beams=beams, **settings).shape == (2, 40 + NEW)
    with pytest.raises(NotImplementedError, match="a cache with a Fp8QuantizedLayer cannot be saved"):
        hla.save_state(model, cache, tmp_path / "state")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", *long("torch")])
def test_compiled_steps(backend: str) -> None:
    torch.compiler.reset()
    model, ids = build(LLAMA), token_ids(1, 30)
    expected, outputs = fill(model, ids[:, :20]), []
    cache = copy.deepcopy(expected)
    compiled = torch.compile(model, backend="aot_eager")
    with hla.use_backend(backend):
        for index in range(20, 24):
            part = ids[:, index : index + 1]
            outputs.append(
                [
                    logits(run, part, **cache_argument(model, past))
                    for run, past in ((compiled, cache), (model, expected))
                ]
            )
    for actual, other in outputs:
        assert_close(actual, other)
    assert cache.layers[0].state["exact_key"].dtype is torch.int8
    assert torch.equal(cache.layers[0].state["exact_key"][..., :8], expected.layers[0].state["exact_key"][..., :8])
    torch.compiler.reset()


def test_a_checkpoint_is_loaded_with_another_cache(tmp_path: Any) -> None:
    model = build(LLAMA, cache_dtype="auto")
    model.save_pretrained(tmp_path)
    as_saved, rounded = hla.load_pretrained(str(tmp_path)), hla.load_pretrained(str(tmp_path), cache_dtype="int8")
    ids = token_ids(1, 30)
    assert torch.equal(logits(rounded, ids), logits(as_saved, ids))  # a single call rounds nothing
    assert cache_bytes(fill(rounded, ids)) == cache_bytes(fill(build(LLAMA), ids)) < cache_bytes(fill(as_saved, ids))
    rounded.save_pretrained(tmp_path / "again")
    again = hla.load_pretrained(str(tmp_path / "again"))
    assert cache_bytes(fill(again, ids)) == cache_bytes(fill(rounded, ids))
    unrounded = hla.load_pretrained(str(tmp_path / "again"), cache_dtype="auto")
    assert cache_bytes(fill(unrounded, ids)) > cache_bytes(fill(model, ids))  # of the last layer, too


@pytest.mark.parametrize(
    ("attention", "cache_dtype", "message"),
    [("hedgehog", "int8", "hedgehog stores no keys"), ("window", "int4", "cache_dtype")],
)
def test_a_cache_that_a_checkpoint_cannot_have(attention: str, cache_dtype: Any, message: str, tmp_path: Any) -> None:
    hla.patch_model(LLAMA.build(), attention).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hla.load_pretrained(str(tmp_path), cache_dtype=cache_dtype)
