"""generate() in every mode: the tokens are those of use_cache=False."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPT2LMHeadModel, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument
from tests.cases import every_pair
from tests.comparing import NEW, assert_close, generate, logits
from tests.inputs import padded_batch, padding_mask, token_ids
from tests.small import patched
from tests.tiny_models import DECODERS, LLAMA, tiny_model

EITHER = pytest.mark.parametrize("family", DECODERS, ids=str)


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@every_pair(DECODERS)
def test_greedy(name, family):
    model = patched(name, family)
    tokens = generate(model, token_ids(2, 7))
    assert tokens.shape == (2, 7 + NEW)
    assert torch.equal(tokens, generate(model, token_ids(2, 7), use_cache=False))
    ids = token_ids(2, 7)
    for _ in range(NEW):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(tokens, ids)


@every_pair(DECODERS)
def test_beam_search(name, family):
    model = patched(name, family)
    settings = {"num_beams": 3, "num_return_sequences": 2}
    cached = generate(model, token_ids(2, 7), **settings)
    assert cached.shape == (4, 7 + NEW)
    assert torch.equal(cached, generate(model, token_ids(2, 7), use_cache=False, **settings))


@every_pair(DECODERS)
def test_each_row_of_a_left_padded_batch_equals_the_single_row(name, family):
    model = patched(name, family)
    rows = [token_ids(1, length, seed=length)[0] for length in (3, 11, 8)]
    batch = padded_batch(rows, "left")
    together = generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for row, tokens in enumerate(rows):
        assert torch.equal(together[row, -NEW:], generate(model, tokens[None])[0, -NEW:])


@every_pair(DECODERS)
def test_chunked_prefill(name, family):
    model = patched(name, family)
    chunked = generate(model, token_ids(2, 17), prefill_chunk_size=5)
    assert torch.equal(chunked, generate(model, token_ids(2, 17)))


@every_pair(DECODERS)
def test_assisted_decoding(name, family):
    model, ids = patched(name, family), token_ids(1, 9)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_model=patched(name, family)), expected)
    assert torch.equal(generate(model, ids, assistant_model=family.build()), expected)
    repeated = torch.cat([ids, ids], dim=1)
    assert torch.equal(generate(model, repeated, prompt_lookup_num_tokens=3), generate(model, repeated))


@pytest.mark.parametrize("plan", ["hedgehog", {"default": "hedgehog", "0": "softmax"}], ids=str)
def test_drafts_by_an_early_exit(plan):
    """They leave the later layers of their cache empty. (GPT-2 has no early exit.)"""
    model = hla.patch_model(LLAMA.build(), plan)
    expected = generate(model, token_ids(1, 9))
    assert torch.equal(generate(model, token_ids(1, 9), assistant_early_exit=1), expected)


@EITHER
def test_an_exact_model_may_have_a_patched_assistant(family):
    model = family.build()
    expected = generate(model, token_ids(1, 9))
    assert torch.equal(generate(model, token_ids(1, 9), assistant_model=patched("hedgehog", family)), expected)


@EITHER
def test_sampling_is_a_function_of_the_seed(family):
    model, tokens = patched("favor+", family), []
    for use_cache in (True, True, False):
        torch.manual_seed(5)
        tokens.append(generate(model, token_ids(2, 7), do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert tokens[0].shape == (4, 7 + NEW)
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


@EITHER
def test_continuing_from_a_cache_with_several_tokens(family):
    model, ids = patched("hedgehog", family), token_ids(2, 15)
    cache = DynamicCache()
    first = generate(model, ids[:, :10], **cache_argument(model, cache), max_new_tokens=2)
    longer = torch.cat([first, ids[:, 10:]], dim=1)
    assert torch.equal(
        generate(model, longer, **cache_argument(model, cache)), generate(model, longer, use_cache=False)
    )


@EITHER
def test_a_cache_of_the_whole_prompt_is_refused(family):
    """Transformers would read the prompt a second time."""
    model, ids = patched("hedgehog", family), token_ids(2, 9)
    cache = DynamicCache()
    logits(model, ids, **cache_argument(model, cache))
    for length in (9, 4):
        with pytest.raises(ValueError, match=f"The cache holds 9 tokens, and the input has {length}: no token is left"):
            generate(model, ids[:, :length], **cache_argument(model, cache))
    cache = DynamicCache()
    logits(model, ids[:, :-1], **cache_argument(model, cache))
    assert torch.equal(generate(model, ids, **cache_argument(model, cache)), generate(model, ids))


@EITHER
def test_streaming(family):
    model, streamer = patched("window", family), Collector()
    expected = generate(model, token_ids(1, 7))
    generate(model, token_ids(1, 7), streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == expected[0].tolist()


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@EITHER
def test_cache_implementations(family, implementation):
    model = patched("hedgehog", family)
    settings = {"cache_implementation": implementation, "disable_compile": True}
    tokens = generate(model, token_ids(2, 7), **settings)
    assert torch.equal(tokens, generate(model, token_ids(2, 7), use_cache=False))


@EITHER
def test_a_static_cache_for_layers_that_run_exactly(family):
    model = patched("hedgehog", family)
    batch = padded_batch([*token_ids(2, 7), token_ids(1, 4)[0]], "left")
    ids, mask = batch["input_ids"], {"attention_mask": batch["attention_mask"]}
    with hla.exact_attention(model):
        static = generate(model, ids, **mask, cache_implementation="static", disable_compile=True)
        assert torch.equal(static, generate(model, ids, **mask))


@EITHER
def test_a_static_cache_for_a_mixture(family):
    """Its exact layers grow as in a dynamic cache, with padding too."""
    model = hla.patch_model(family.build(), {"default": "hedgehog", "0": "softmax"})
    batch = padded_batch([*token_ids(2, 7), token_ids(1, 4)[0]], "left")
    ids, mask = batch["input_ids"], {"attention_mask": batch["attention_mask"]}
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, ids, **mask, **static), generate(model, ids, **mask))
    cache = StaticCache(model.config, max_cache_len=24)
    assert_close(logits(model, token_ids(2, 7), **cache_argument(model, cache)), logits(model, token_ids(2, 7)))
    assert type(cache.layers[0]) is DynamicLayer
    assert cache.get_seq_length() == 7


@EITHER
def test_a_filled_static_cache_of_the_exact_model_is_refused(family):
    model = family.build().eval()
    cache = StaticCache(model.config, max_cache_len=24)
    logits(model, token_ids(1, 7), **cache_argument(model, cache))
    hla.patch_model(model, {"default": "hedgehog", "0": "softmax"})
    with pytest.raises(ValueError, match="has tokens of an exact model"):
        logits(model, token_ids(1, 1), **cache_argument(model, cache))


def test_a_static_cache_with_layers_of_a_sliding_window():
    kinds = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    windows = {"sliding_window": 6, "num_key_value_heads": 2, **kinds}
    model, ids = hla.patch_model(tiny_model("qwen2", AutoModelForCausalLM, **windows), "hedgehog"), token_ids(2, 9)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, ids, **static), generate(model, ids, use_cache=False))
    short = StaticCache(model.config, max_cache_len=4)
    steps = [logits(model, ids[:, start : start + 3], **cache_argument(model, short)) for start in (0, 3, 6)]
    assert_close(torch.cat(steps, dim=1), logits(model, ids))


@EITHER
def test_scores_and_logits_are_those_of_the_full_forward(family):
    model, ids = patched("hedgehog", family), token_ids(2, 7)
    out = generate(model, ids, return_dict_in_generate=True, output_logits=True)
    full = logits(model, out.sequences)[:, 6:-1]
    assert_close(torch.stack(out.logits, dim=1), full)


@EITHER
def test_other_settings_of_the_search(family):
    model = patched("hedgehog", family)
    for settings in ({"num_beams": 2, "early_stopping": True}, {"repetition_penalty": 1.3}, {"min_new_tokens": 3}):
        cached = generate(model, token_ids(2, 7), **settings)
        assert torch.equal(cached, generate(model, token_ids(2, 7), use_cache=False, **settings))


def test_generation_in_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        tokens = generate(patched("favor+", DECODERS[0]).to(dtype), token_ids(2, 7))
        assert tokens.shape == (2, 7 + NEW)


def test_a_long_generation_does_not_drift():
    model = tiny_model("gpt2", GPT2LMHeadModel, n_positions=512, n_layer=1)
    hla.patch_model(model, "hedgehog")
    out = model.generate(
        token_ids(1, 4),
        max_new_tokens=200,
        do_sample=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert_close(torch.stack(out.logits, dim=1), logits(model, out.sequences)[:, 3:-1])


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
@pytest.mark.parametrize("plan", ["hedgehog", {"default": "hedgehog", "0": "softmax"}], ids=["linear", "mixture"])
@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_in_training_mode_with_gradient_checkpointing(plan, family, caplog):
    """Layers of some models lose the cache then, and Transformers would go on from the last token alone."""
    model, mask = hla.patch_model(family.build(), plan), padding_mask([14, 9], 14, "left").long()
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(token_ids(2, 14), **settings)
    model.gradient_checkpointing_enable()
    logging.Logger.warning_once.cache_clear()
    actual = model.train().generate(token_ids(2, 14), **settings)
    assert torch.equal(actual, expected)
    assert "call model.eval() before generate()" in caplog.text


def test_a_sliding_window_of_the_config_that_attention_ignores():
    """Llama's attention is full whatever its config says, and so is that of a patched one."""
    model = tiny_model("llama", sliding_window=4)
    exact, without = logits(model, token_ids(2, 14), use_cache=False), copy.deepcopy(model)
    without.config.sliding_window = None
    assert torch.equal(logits(without, token_ids(2, 14), use_cache=False), exact)
    hla.patch_model(model, "window")  # of 64 tokens
    assert_close(logits(model, token_ids(2, 14)), exact)
    assert torch.equal(generate(model, token_ids(2, 14)), generate(model, token_ids(2, 14), use_cache=False))
    with pytest.raises(ValueError, match=r"sliding window of 4"):
        hla.patch_model(tiny_model("mistral", sliding_window=4), "window")
