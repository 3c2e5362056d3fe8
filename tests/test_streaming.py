"""Streams: any cut gives the same outputs, at constant memory, and positions are counted as asked."""

import copy
import itertools

import pytest
import torch
from transformers import RobertaForCausalLM

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.streaming import cache_bytes, read_stream, stream_losses
from tests.architectures.models import architecture_model
from tests.cases import every_pair
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.small import patch_small, patched
from tests.tiny_models import BERT, DECODERS, GPT2, LLAMA, MAX_LENGTH, tiny_model

LENGTH = 90
#: One pair for each kind of state: sums, a ring beside sums, decayed sums, and one that grows by blocks.
QUICK = [("hedgehog", LLAMA), ("window", GPT2), ("gla", GPT2), ("linformer-causal", LLAMA)]


def stream(length=LENGTH, seed=0):
    return token_ids(1, length, seed)[0].tolist()


def read(model, tokens, **options):
    return torch.cat([piece.output.logits for piece in read_stream(model, tokens, **options)], dim=1)


@every_pair(DECODERS, quick=QUICK)
def test_every_cut_equals_one_forward_pass(name, family):
    model, tokens = patched(name, family), stream()
    full = logits(model, torch.tensor([tokens]))
    for chunk_length in (1, 7, 32, 200):
        assert_close(read(model, tokens, chunk_length=chunk_length, positions="continue"), full)


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_a_mixture_and_an_exact_model(family):
    for model in (patch_small(family.build(), "hedgehog", layers=[0]), family.build()):
        full = logits(model, torch.tensor([stream()]))
        for chunk_length in (1, 40):
            assert_close(read(model, stream(), chunk_length=chunk_length), full)


def test_positions_that_begin_behind_those_of_padding():
    model = tiny_model("roberta", RobertaForCausalLM, is_decoder=True)
    for decoder in (model, hla.patch_model(copy.deepcopy(model), "hedgehog")):
        assert_close(read(decoder, stream(), chunk_length=7), logits(decoder, torch.tensor([stream()])))
    separate = [logits(model, torch.tensor([stream()[start : start + 30]])) for start in (0, 30, 60)]
    assert_close(read(model, stream(), chunk_length=7, positions="restart", period=30), torch.cat(separate, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hedgehog", "window"])
def test_wrapped_positions_are_tiled_ones(name):
    """A stream of any length equals a table of positions that is repeated as often as needed."""
    model, tokens = patched(name, GPT2), stream(4 * MAX_LENGTH + 5)
    longer = hla.extend_positions(copy.deepcopy(model), 5 * MAX_LENGTH)
    full = read(longer, tokens, chunk_length=50)
    for chunk_length in (1, 40, 500):
        assert_close(read(model, tokens, chunk_length=chunk_length, positions="wrap"), full)


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_positions_that_wrap_after_a_period(family):
    model, tokens = patched("hedgehog", family), stream(60)
    position_ids = (torch.arange(60) % 20)[None]
    full = logits(model, torch.tensor([tokens]), position_ids=position_ids, attention_mask=torch.ones(1, 60))
    assert_close(read(model, tokens, chunk_length=7, positions="wrap", period=20), full)


@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_restarts_are_pieces_without_a_past(family):
    model, tokens = patched("window", family), stream(50)
    separate = [logits(model, torch.tensor([tokens[start : start + 20]])) for start in (0, 20, 40)]
    out = read(model, tokens, chunk_length=7, positions="restart", period=20)
    assert_close(out, torch.cat(separate, 1))


def test_the_end_of_a_learned_table():
    model, tokens = patched("hedgehog", GPT2), stream(MAX_LENGTH + 1)
    assert read(model, tokens[:-1], chunk_length=10).shape[1] == MAX_LENGTH
    with pytest.raises(ValueError, match=rf"Token {MAX_LENGTH} .*beyond the {MAX_LENGTH} learned.*'wrap' or 'restart'"):
        read(model, tokens, chunk_length=10)
    hla.extend_positions(model, MAX_LENGTH + 1)
    assert read(model, tokens, chunk_length=10).shape[1] == MAX_LENGTH + 1


@every_pair(DECODERS, quick=QUICK)
def test_memory_is_constant(name, family):
    """Neither the state nor the number of live tensors grows; a stream is read no faster than it is used."""
    if ATTENTIONS.get(name).state != "constant":
        pytest.skip("its state grows by design")
    model, taken = patched(name, family), itertools.count()
    sizes = []
    endless = (2 + next(taken) % 50 for _ in itertools.count())
    for piece in read_stream(model, endless, chunk_length=16, positions="wrap"):
        sizes.append(cache_bytes(piece.cache))
        if piece.start > 900:
            break
    assert len(set(sizes[1:])) == 1
    assert next(taken) == piece.start + piece.ids.shape[1]


@pytest.mark.parametrize("chunk_length", [1, 7, 100])
def test_losses_are_those_of_the_whole(chunk_length):
    model, tokens = patched("hedgehog", LLAMA), stream(50)
    results = [losses for _, losses in stream_losses(read_stream(model, tokens, chunk_length=chunk_length))]
    ids = torch.tensor([tokens])
    full = torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:], reduction="none")
    assert_close(torch.cat(results).float(), full)


def test_bytes_of_a_cache():
    ids = torch.tensor([stream(12)])
    model = patch_small(LLAMA.build(), "hedgehog", layers=[0])
    with torch.no_grad():
        cache = output_cache(model(ids, use_cache=True))
    keys = 2 * 4 * 2 * 12 * 8  # keys and values, bytes, groups, tokens, head size
    assert cache_bytes(cache) == cache.layers[0].nbytes() + keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "wrapp"}, "continue, wrap, restart, got 'wrapp'. Did you mean 'wrap'"),
        ({"chunk_length": 0}, "chunk_length must be a whole number of at least 1, got 0"),
        ({"positions": "wrap", "period": 97}, "period must lie in 1 to 96, got 97"),
        ({"positions": "wrap", "period": -1}, "period must lie in 1 to 96, got -1"),
    ],
)
def test_bad_settings_are_reported(options, message):
    with pytest.raises(ValueError, match=message):
        list(read_stream(patched("hedgehog", GPT2), [1, 2], **options))


def test_an_encoder_has_no_state():
    with pytest.raises(ValueError, match="keeps no state: a stream needs a decoder"):
        list(read_stream(patched("hedgehog", BERT), [1, 2]))


def test_an_empty_stream():
    assert list(read_stream(patched("hedgehog", GPT2), [])) == []


def test_a_model_without_a_head_encodes():
    model, tokens = patched("hedgehog", LLAMA), stream(30)
    states = [piece.output.last_hidden_state for piece in read_stream(model.model, tokens, chunk_length=8)]
    with torch.no_grad():
        assert_close(torch.cat(states, 1), model.model(torch.tensor([tokens])).last_hidden_state)


@pytest.mark.parametrize("attention", ["hedgehog", None])
def test_a_mixer_that_begins_anew_is_read_by_single_tokens(attention):
    """Jamba's Mamba drops its state where several tokens follow it, in Transformers as well."""
    model, tokens = architecture_model("jamba"), stream(9)
    if attention is not None:
        hla.patch_model(model, attention)
    full = logits(model, torch.tensor([tokens]))
    assert_close(read(model, tokens, chunk_length=1), full)
    with pytest.raises(NotImplementedError, match=r"JambaMambaMixer\) goes on from its state by one token only"):
        read(model, tokens, chunk_length=5)
    if attention is not None:
        cache = output_cache(model(torch.tensor([tokens[:5]]), use_cache=True))
        with pytest.raises(NotImplementedError, match="one token at a time"):
            logits(model, torch.tensor([tokens[5:]]), **cache_argument(model, cache))
