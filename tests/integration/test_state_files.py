"""Decoding states in files: what is read again continues bit-equally, in the model that wrote it and in no other."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, StaticCache

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from tests.cases import every_pair
from tests.comparing import logits
from tests.inputs import padded_batch, token_ids
from tests.small import open_far_part, patch_small, patched, randomize_learned
from tests.tiny_models import BERT, DECODERS, GPT2, LLAMA, tiny_model


@torch.no_grad()
def prompt_cache(model, ids, **kwargs):
    return output_cache(model(ids, use_cache=True, **kwargs))


def assert_continues_equally(model, again, cache, loaded):
    assert loaded.get_seq_length() == cache.get_seq_length()
    for seed, length in enumerate((3, 1, 1, 12)):  # A piece of a prompt, steps, and a longer piece.
        ids = token_ids(2, length, seed=10 + seed)
        expected = logits(model, ids, **cache_argument(model, cache))
        assert torch.equal(logits(again, ids, **cache_argument(again, loaded)), expected)


@every_pair(DECODERS)
def test_a_saved_state_continues_bit_equally(name, family, tmp_path):
    model = patched(name, family)
    cache = prompt_cache(model, token_ids(2, 19))
    # A step may leave its state in another layout.
    logits(model, token_ids(2, 1, seed=2), **cache_argument(model, cache))
    hla.save_state(model, cache, tmp_path / "state.safetensors")
    again = copy.deepcopy(model)
    loaded = hla.load_state(again, tmp_path / "state.safetensors")
    assert_continues_equally(model, again, cache, loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


PLANS = {
    "mixture": {"default": {"attention": "window", "window_size": 4}, "0": "softmax"},
    "exact heads": {"default": {"attention": "window", "window_size": 4, "exact_heads": [1]}},
    "mixture in reverse": {"default": "hedgehog", "1": "softmax"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_exact_layers_and_heads(plan, dtype, tmp_path):
    model = randomize_learned(hla.patch_model(LLAMA.build(), plan)).to(dtype)
    cache = prompt_cache(model, token_ids(2, 19))
    hla.save_state(model, cache, str(tmp_path / "state"))
    assert_continues_equally(model, model, cache, hla.load_state(model, str(tmp_path / "state")))


@pytest.mark.parametrize("length", [4, 19], ids=["short", "long"])
def test_layers_of_a_sliding_window(length, tmp_path):
    windows = {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    model = hla.patch_model(tiny_model("qwen2", AutoModelForCausalLM, **windows), "hedgehog")
    cache = prompt_cache(model, token_ids(2, length))
    hla.save_state(model, cache, tmp_path / "state")
    assert_continues_equally(model, model, cache, hla.load_state(model, tmp_path / "state"))


def test_generation_from_a_file_and_rows_of_their_own(tmp_path):
    """One prompt, read once; three rows go on from it."""
    model = patched("window", LLAMA)
    prompt, settings = token_ids(1, 20), {"max_new_tokens": 6, "do_sample": False}
    hla.save_state(model, prompt_cache(model, prompt), tmp_path / "prompt")
    rows = torch.cat([prompt.expand(3, -1), token_ids(3, 4, seed=5)], dim=1)
    cache = hla.load_state(model, tmp_path / "prompt")
    cache.batch_repeat_interleave(3)
    assert torch.equal(
        model.generate(rows, **cache_argument(model, cache), **settings), model.generate(rows, **settings)
    )


def test_a_generated_cache_of_a_padded_batch(tmp_path):
    window = {"attention": "window", "window_size": 4}
    model = open_far_part(hla.patch_model(GPT2.build(), {"default": window, "0": "softmax"}))
    batch = padded_batch([token_ids(1, 5)[0], token_ids(1, 9)[0]], "left")
    settings = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    out = model.generate(**inputs, **settings)
    hla.save_state(model, output_cache(out), tmp_path / "state")
    inputs = {
        "input_ids": torch.cat([out.sequences, token_ids(2, 2, seed=3)], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, 5, dtype=torch.long)], dim=1),
    }
    expected = model.generate(**inputs, **cache_argument(model, output_cache(out)), **settings).sequences
    loaded = hla.load_state(model, tmp_path / "state")
    assert torch.equal(model.generate(**inputs, **cache_argument(model, loaded), **settings).sequences, expected)


@pytest.fixture
def saved(tmp_path):
    """A model, and the file of a state of it."""
    model = patched("hedgehog", LLAMA)
    hla.save_state(model, prompt_cache(model, token_ids(2, 9)), tmp_path / "state")
    return model, tmp_path / "state"


def test_another_model_is_refused(saved):
    model, path = saved
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight *= 1.01
    with pytest.raises(ValueError, match=r"saved by another model.*1 weights differ.*up_proj"):
        hla.load_state(other, path)
    with pytest.raises(ValueError, match="another linear attention"):
        hla.load_state(patched("window", LLAMA), path)
    with pytest.raises(ValueError, match="another class"):
        hla.load_state(patched("hedgehog", GPT2), path)
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    scaled = patch_small(tiny_model("llama", AutoModelForCausalLM, rope_parameters=scaling), "hedgehog")
    with pytest.raises(ValueError, match="another rotary scaling"):
        hla.load_state(scaled, path)
    with pytest.raises(ValueError, match="weights differ"):
        hla.load_state(copy.deepcopy(model).bfloat16(), path)
    with pytest.raises(ValueError, match="is not patched"):
        hla.load_state(LLAMA.build(), path)


def test_files_that_are_no_states_are_refused(saved):
    model, path = saved
    save_file({"a": torch.zeros(2)}, path.with_name("other"))
    with pytest.raises(ValueError, match="no decoding state"):
        hla.load_state(model, path.with_name("other"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        hla.load_state(model, path)
    with pytest.raises(OSError, match="missing"):
        hla.load_state(model, path.with_name("missing"))


@pytest.mark.slow
def test_caches_that_cannot_be_saved(saved, tmp_path):
    model, path = saved
    before = path.read_bytes()
    exact = LLAMA.build()
    mixture = hla.patch_model(LLAMA.build(), {"default": "hedgehog", "0": "softmax"})
    cases = (
        (exact, prompt_cache(exact, token_ids()), "is not patched"),
        (model, DynamicCache(config=model.config), "has no tokens"),
        (model, prompt_cache(exact, token_ids()), "layer 0 of the cache was not filled by this"),
        (mixture, prompt_cache(model, token_ids()), "layer 0 of the cache was not filled by this"),
    )
    for own, cache, message in cases:
        with pytest.raises(ValueError, match=message):
            hla.save_state(own, cache, path)
    caches = EncoderDecoderCache(DynamicCache(), DynamicCache()), StaticCache(model.config, max_cache_len=8)
    for cache in caches:
        with pytest.raises(NotImplementedError, match=r"cannot be saved\. Use the default"):
            hla.save_state(model, cache, path)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        hla.save_state("model", caches[0], path)
    assert path.read_bytes() == before


def test_a_static_cache_that_is_linear_throughout(tmp_path):
    model = patched("window", LLAMA)
    out = model.generate(
        token_ids(2, 9), max_new_tokens=3, cache_implementation="static", return_dict_in_generate=True, do_sample=False
    )
    hla.save_state(model, output_cache(out), tmp_path / "state")
    assert_continues_equally(model, model, copy.deepcopy(output_cache(out)), hla.load_state(model, tmp_path / "state"))


def test_encoders_have_no_state(tmp_path):
    with pytest.raises(ValueError, match="has no tokens"):
        hla.save_state(patched("hedgehog", BERT), DynamicCache(), tmp_path / "state")
