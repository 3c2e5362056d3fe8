"""Every mechanism in every family: forward passes, padding, causality, decoding."""

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import entries, every_pair, every_refused_pair, serves
from tests.comparing import Snapshot, assert_close, logits, relative_error
from tests.inputs import padded_batch, token_ids
from tests.small import patched, small_options
from tests.tiny_models import DECODERS, FAMILIES


def test_every_mechanism_serves_at_least_one_family():
    for entry in entries():
        assert any(serves(entry, family.causal) for family in FAMILIES), entry.name


@every_refused_pair()
def test_a_missing_direction_is_refused_and_nothing_changes(name, family):
    entry, model = ATTENTIONS.get(name), family.build()
    before = Snapshot.of(model)
    with pytest.raises(NotImplementedError, match=f"{name!r} cannot be") as caught:
        hla.patch_model(model, name, **small_options(entry.options))
    if entry.alternative:
        assert f"Use {entry.alternative!r}" in str(caught.value)
    before.assert_same(model)


@every_pair()
def test_patching_changes_the_output(name, family):
    model = family.build()
    exact = logits(model, token_ids())
    hla.patch_model(model, name, **small_options(ATTENTIONS.get(name).options))
    assert 0.005 < relative_error(logits(model, token_ids()), exact) < 10


@every_pair()
def test_patching_twice_from_the_same_seed_gives_the_same_model(name, family):
    model = family.build()
    exact = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    options = small_options(ATTENTIONS.get(name).options)
    first = logits(hla.patch_model(model, name, **options), token_ids())
    other = family.build()
    other.load_state_dict(exact)
    assert torch.equal(logits(hla.patch_model(other, name, **options), token_ids()), first)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@every_pair()
def test_a_padded_row_equals_the_row_without_padding(name, family, padding_side):
    model = patched(name, family)
    rows = [token_ids(1, length, seed=length)[0] for length in (3, 17, 12)]
    batch = padded_batch(rows, padding_side)
    together = logits(model, **{"ids": batch.pop("input_ids"), **batch})
    for row, tokens in enumerate(rows):
        single = logits(model, tokens[None])
        assert_close(together[row][batch["attention_mask"][row].bool()], single[0])


@pytest.mark.parametrize("padding_side", ["left", "right"])
@every_pair()
def test_padded_tokens_do_not_matter(name, family, padding_side):
    model = patched(name, family)
    batch = padded_batch([token_ids(1, 9)[0], token_ids(1, 14)[0]], padding_side)
    real = batch["attention_mask"].bool()
    other = torch.where(real, batch["input_ids"], 5)
    first = logits(model, batch.pop("input_ids"), **batch)
    assert torch.equal(logits(model, other, **batch)[real], first[real])


@every_pair()
def test_a_fully_padded_row_is_finite_and_harmless(name, family):
    model = patched(name, family)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1] = 0
    out = logits(model, token_ids(2, 11), attention_mask=mask)
    assert bool(torch.isfinite(out).all())
    assert_close(out[:1], logits(model, token_ids(2, 11)[:1]))


@pytest.mark.parametrize("length", [1, 2, 3])
@every_pair()
def test_very_short_inputs(name, family, length):
    model = patched(name, family)
    out = logits(model, token_ids(2, length))
    assert bool(torch.isfinite(out).all())
    assert_close(out[1:], logits(model, token_ids(2, length)[1:]))


@every_pair(DECODERS)
def test_a_changed_future_token_cannot_change_the_past(name, family):
    model, ids = patched(name, family), token_ids(2, 21)
    changed = ids.clone()
    changed[:, 13:] = token_ids(2, 8, seed=3)
    assert_close(logits(model, changed)[:, :13], logits(model, ids)[:, :13])


@every_pair(DECODERS)
def test_a_huge_last_embedding_cannot_change_the_past(name, family):
    model, ids = patched(name, family), token_ids(2, 21)
    embeds = model.get_input_embeddings()(ids).detach()
    huge = embeds.clone()
    huge[:, -1] *= 20
    first = logits(model, None, inputs_embeds=embeds)
    assert_close(logits(model, None, inputs_embeds=huge)[:, :-1], first[:, :-1])


@every_pair(DECODERS)
def test_no_gradient_flows_from_the_past_to_the_future(name, family):
    model, ids = patched(name, family), token_ids(1, 14)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeds).logits[:, :9].square().sum().backward()
    assert float(embeds.grad[:, 9:].abs().max()) == 0.0
    assert bool(torch.isfinite(embeds.grad).all())


@every_pair(DECODERS)
def test_decoding_equals_the_full_forward_at_every_step(name, family):
    model, ids = patched(name, family), token_ids(2, 23)
    full, cache = logits(model, ids), None
    for step in range(ids.shape[1]):
        with torch.no_grad():
            out = model(ids[:, step : step + 1], **cache_argument(model, cache), use_cache=True)
        cache = output_cache(out)
        # Sines and cosines nearly cancel in some normalisers, which enlarges the rounding.
        assert_close(out.logits[:, 0], full[:, step], factor=2.0 if name == "favor" else 1.0)
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("first", [1, 4, 11])
@every_pair(DECODERS)
def test_split_and_resume(name, family, first):
    model, ids = patched(name, family), token_ids(2, 19)
    full = logits(model, ids)
    with torch.no_grad():
        head = model(ids[:, :first], use_cache=True)
        middle = model(ids[:, first : first + 5], **cache_argument(model, output_cache(head)))
        tail = model(ids[:, first + 5 :], **cache_argument(model, output_cache(middle)))
    assert_close(torch.cat([head.logits, middle.logits, tail.logits], dim=1), full)


@every_pair(DECODERS)
def test_decoding_a_left_padded_batch(name, family):
    model = patched(name, family)
    rows = [token_ids(1, length, seed=length)[0] for length in (4, 15)]
    batch = padded_batch(rows, "left")
    with torch.no_grad():
        out = model(**{name: tensor[:, :12] for name, tensor in batch.items()}, use_cache=True)
        steps = [out.logits]
        for stop in range(13, 16):
            part = {name: batch[name][:, stop - 1 : stop] for name in ("input_ids", "position_ids")}
            mask = batch["attention_mask"][:, :stop]
            out = model(**part, attention_mask=mask, **cache_argument(model, output_cache(out)))
            steps.append(out.logits)
    together = torch.cat(steps, dim=1)
    for row, tokens in enumerate(rows):
        assert_close(together[row][batch["attention_mask"][row].bool()], logits(model, tokens[None])[0])
