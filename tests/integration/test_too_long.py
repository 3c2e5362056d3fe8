"""Inputs beyond the learned positions of a patched model: a refusal with the remedy, and no row of padding too many."""

from __future__ import annotations

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from tests.comparing import assert_close
from tests.inputs import token_ids
from tests.tiny_models import tiny_model

#: The longest input of each, of 40 positions: RoBERTa's first two stand for padding, OPT's table has two more.
LIMITS = {"bert": 40, "distilbert": 40, "gpt2": 40, "opt": 40, "roberta": 38, "bart": 40}
EACH = pytest.mark.parametrize("architecture", LIMITS)


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs)[0]


def build(architecture, **options):
    return hla.patch_model(tiny_model(architecture, max_position_embeddings=40), "hedgehog", **options)


@pytest.mark.slow
@EACH
def test_one_token_too_many_is_refused_and_max_length_is_the_remedy(architecture):
    model, limit = build(architecture), LIMITS[architecture]
    ids = token_ids(2, limit + 1) % 50 + 5
    expected = logits(model, ids[:, :limit])
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match=rf"positions for {limit} tokens.* max_length={limit + 1}\)"):
            model(**inputs)
    hla.extend_positions(model, limit + 1)
    assert logits(model, ids).shape[:2] == ids.shape
    assert_close(logits(model, ids[:, :limit]), expected)
    assert logits(build(architecture, max_length=limit + 1), ids).shape[:2] == ids.shape


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["roberta", "opt"])
def test_padding_takes_no_positions(architecture):
    """The unpatched model takes such rows, too, and real tokens have the same outputs as without the padding."""
    model, limit = tiny_model(architecture, max_position_embeddings=40), LIMITS[architecture]
    pad = model.config.pad_token_id
    ids = torch.cat([token_ids(2, limit) % 50 + 5, torch.full((2, 3), pad)], dim=1)
    inputs = {"ids": ids, "attention_mask": (ids != pad).long()}
    if architecture == "roberta":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    logits(model, **inputs)
    hla.patch_model(model, "hedgehog")
    short = {name: tensor[:, :limit] for name, tensor in inputs.items()}
    assert_close(logits(model, **inputs)[:, :limit], logits(model, **short))


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
@torch.no_grad()
def test_tokens_of_a_cache_count(architecture):
    model = build(architecture)
    cache = output_cache(model(token_ids(2, 39), use_cache=True))
    model(token_ids(2, 1), **cache_argument(model, cache))
    with pytest.raises(ValueError, match=r"positions for 40 tokens, and the input has 41"):
        model(token_ids(2, 1), **cache_argument(model, cache))
    with pytest.raises(ValueError, match=r"positions for 40 tokens, and the input has 41"):
        model.generate(token_ids(2, 35), max_new_tokens=8, min_new_tokens=8, do_sample=False)


@pytest.mark.slow
@torch.no_grad()
def test_explicit_positions_may_begin_again():
    model, positions = build("gpt2"), torch.arange(60)[None] % 40
    inputs = {"attention_mask": torch.ones(1, 60, dtype=torch.long)}
    assert logits(model, token_ids(1, 60), position_ids=positions, **inputs).shape[1] == 60
    with pytest.raises(ValueError, match="positions for 40 tokens, and the input has 60"):
        model(token_ids(1, 60), position_ids=positions + 1, **inputs)
