"""Where documents begin: what counts as packed, what is refused, and caches."""

import pytest
import torch
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.integration.packing import MODEL_CONTEXT, find_documents
from tests.architectures.models import architecture_model
from tests.comparing import assert_close, logits
from tests.inputs import token_ids
from tests.integration.packed import as_ids, calls_of, packed, positions, unpacked_logits
from tests.small import patch_small, patched
from tests.tiny_models import BERT, DECODERS, FAMILIES, LLAMA, tiny_model

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)


# --------------------------------------------------------------------------------------------------------------------
# What positions say


def test_what_counts_as_packed():
    assert find_documents(torch.arange(9)[None]) is None
    assert find_documents(torch.arange(9).expand(3, -1)) is None
    assert find_documents(positions((4, 1, 2))).tolist() == [0, 4, 5, 7]
    assert find_documents(positions((4, 2), start=2)).tolist() == [0, 4, 6]  # RoBERTa's
    assert find_documents(torch.cat([positions((2, 2)), torch.arange(4)[None]])).tolist() == [0, 2, 4, 8]
    for other in ([3, 1, 0, 2], [0, 0, 0, 0], [0, 1, 2, 5], [4, 5, 0, 1]):
        assert find_documents(torch.tensor([other])) is None
    assert find_documents(torch.tensor([[4, 5, 0, 1]]), any_jump=True).tolist() == [0, 2, 4]


def test_other_positions_of_an_encoder_are_positions():
    model, ids = patched("hedgehog", BERT), token_ids(2, 9)
    mixed = torch.randperm(9, generator=torch.Generator().manual_seed(1))[None]
    out = logits(model, ids, position_ids=mixed)
    assert_close(out, logits(model, ids, position_ids=mixed.expand(2, -1), attention_mask=torch.ones(2, 9)))


@EACH_FAMILY
def test_beside_a_mask_positions_are_positions(family):
    """As everywhere in Transformers: whoever passes a mask has said what is to be seen."""
    model, inputs = patched("hedgehog", family), packed((6, 8))
    calls = calls_of(model, lambda: logits(model, **as_ids(inputs), attention_mask=torch.ones(1, 14)))
    assert calls == [(1, 14)] * 2


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_decoder_without_a_cache_splits_at_every_jump(architecture):
    """Transformers' own rule, there."""
    options = {"sliding_window": None} if architecture == "mistral" else {}
    model = hla.patch_model(tiny_model(architecture, **options), "hedgehog")
    ids, position_ids = token_ids(1, 9), torch.tensor([[3, 4, 5, 0, 1, 2, 3, 7, 8]])
    out = logits(model, ids, position_ids=position_ids, use_cache=False)
    parts = [
        logits(model, ids[:, part], position_ids=position_ids[:, part]) for part in (slice(3), slice(3, 7), slice(7, 9))
    ]
    assert_close(out, torch.cat(parts, 1))
    sizes = calls_of(model, lambda: logits(model, ids, position_ids=position_ids))
    assert sizes == [(1, 9)] * 2  # with a cache they are positions


@pytest.mark.parametrize(("model_type", "options"), [("opt", {"use_cache": False}), ("clip_text_model", {})])
@torch.no_grad()
def test_jumps_are_positions_where_the_model_itself_makes_no_masks_of_them(model_type, options):
    model, jumps = architecture_model(model_type), torch.tensor([[3, 4, 5, 0, 1, 2, 3, 7, 8]])
    exact = model(token_ids(1, 9), position_ids=jumps, **options)[0]
    hla.patch_model(model, "window", window_size=64)
    assert_close(model(token_ids(1, 9), position_ids=jumps, **options)[0], exact)


@pytest.mark.parametrize(
    ("edges", "message"),
    [([0, 5], "go up from 0 to the 14 tokens"), ([0, 9, 5, 14], "go up"), ([3, 14], "go up"), ([14], "go up")],
)
def test_boundaries_that_do_not_fit_are_refused(edges, message):
    inputs = {**as_ids(packed((6, 8))), "cu_seq_lens_q": torch.tensor(edges)}
    with pytest.raises(ValueError, match=message):
        logits(patched("hedgehog", BERT), **inputs)


@pytest.mark.slow
def test_a_document_over_two_rows_is_refused():
    inputs = {"position_ids": torch.arange(6).expand(2, -1), "cu_seq_lens_q": torch.tensor([0, 4, 12])}
    with pytest.raises(ValueError, match=r"lies over two rows of the batch \(at token 6 of 2 x 6\)"):
        logits(patched("hedgehog", LLAMA), token_ids(2, 6), **inputs)


@pytest.mark.slow
@EACH_FAMILY
def test_boundaries_without_positions_are_refused(family):
    with pytest.raises(ValueError, match="needs position_ids that begin again"):
        logits(patched("hedgehog", family), token_ids(1, 6), cu_seq_lens_q=torch.tensor([0, 4, 6]))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
def test_a_model_that_keeps_boundaries_from_its_layers(masked):
    """As StableLM's layers do: the mask carries them too. What hands on neither is refused."""
    model = patched("hedgehog", BERT)
    encoder, forward = model.bert.encoder, model.bert.encoder.forward

    def keeping(hidden, attention_mask=None, **rest):
        return forward(hidden, attention_mask if masked else None)

    encoder.forward = keeping
    if masked:
        assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))
    else:
        with pytest.raises(NotImplementedError, match="does not hand cu_seq_lens_q to its attention"):
            logits(model, **as_ids(packed()))
    del encoder.forward
    assert_close(logits(model, **as_ids(packed())), unpacked_logits(model))


# As far as Transformers 5.23 goes: every kind of path that positions and masks take to the layers.
@pytest.mark.parametrize(
    "model_type",
    [
        *("roberta", "distilbert", "albert", "esm", "modernbert", "siglip_text_model"),
        *("opt", "phi", "gpt_neox", "gemma3_text", "llama4_text", "stablelm"),
    ],
)
def test_architectures_keep_documents_apart(model_type):
    model = hla.patch_model(architecture_model(model_type), "elu")
    start = model.config.pad_token_id + 1 if model_type in ("roberta", "esm") else 0
    lengths = (5, 9, 1, 7)
    parts = [token_ids(1, length, seed=length) % 40 + 5 for length in lengths]
    with torch.no_grad():
        out = model(input_ids=torch.cat(parts, 1), position_ids=positions(lengths, start))[0]
        assert_close(out, torch.cat([model(input_ids=ids)[0] for ids in parts], 1))


@pytest.mark.slow
def test_a_compiled_model_that_keeps_boundaries_from_its_layers():
    """The masks that carry them are made outside of a graph only: refused in one, right without."""
    model = hla.patch_model(architecture_model("stablelm"), "elu")
    parts = [token_ids(1, length) % 40 + 5 for length in (5, 9)]
    ids, inputs = torch.cat(parts, 1), {"position_ids": positions((5, 9)), "use_cache": False}
    inputs["cu_seq_lens_q"] = torch.tensor([0, 5, 14])
    with torch.no_grad():
        out = torch.compile(model, backend="eager")(input_ids=ids, **inputs)[0]
        assert_close(out, torch.cat([model(input_ids=part)[0] for part in parts], 1))
        torch.compiler.reset()
        with pytest.raises(Exception, match="does not hand cu_seq_lens_q to its attention"):
            torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jamba", "lfm2_moe", "minimax"])
def test_mixers_without_boundaries_are_refused(model_type):
    """State-space layers and convolutions would carry one document into the next."""
    model = hla.patch_model(architecture_model(model_type), "elu")
    ids = token_ids(1, 14) % 40 + 5
    with pytest.raises(NotImplementedError, match="mixes tokens without attention and knows no boundaries"):
        model(input_ids=ids, position_ids=positions((5, 9)))
    assert bool(torch.isfinite(model(input_ids=ids)[0]).all())


@pytest.mark.slow
def test_position_ids_may_be_positional_arguments():
    model, inputs = patched("hedgehog", BERT), packed()
    with torch.no_grad():
        by_position = model.bert(inputs["input_ids"], None, None, inputs["position_ids"])[0]
        by_name = model.bert(**inputs)[0]
    assert torch.equal(by_position, by_name)


@pytest.mark.slow
@EACH_FAMILY
def test_unpatching_takes_the_hooks_off(family):
    model = hla.unpatch_model(patched("hedgehog", family))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(MODEL_CONTEXT in vars(module) for module in model.modules())


# --------------------------------------------------------------------------------------------------------------------
# Caches


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, [1]], ids=["linear", "mixture"])
@pytest.mark.parametrize("family", DECODERS, ids=str)
def test_a_packed_prompt_cannot_be_continued(family, layers):
    model = patch_small(family.build(), "hedgehog", layers=layers)
    cache = DynamicCache()
    assert_close(
        logits(model, **as_ids(packed()), **cache_argument(model, cache), use_cache=True), unpacked_logits(model)
    )
    with pytest.raises(NotImplementedError, match="which document would be continued"):
        logits(model, token_ids(1, 1), **cache_argument(model, cache))
    cache.reset()
    if layers is None:  # Transformers keeps the size of the keys that a cache held
        assert_close(logits(model, token_ids(), **cache_argument(model, cache)), logits(model, token_ids()))


@pytest.mark.slow
def test_packed_documents_cannot_go_on_from_a_cache():
    model, cache = patched("hedgehog", LLAMA), DynamicCache()
    logits(model, token_ids(1, 5), **cache_argument(model, cache))
    with pytest.raises(NotImplementedError, match="cannot be combined with a cache that holds tokens"):
        logits(model, **as_ids(packed()), **cache_argument(model, cache))


@pytest.mark.slow
def test_positions_that_wrap_go_on_from_a_cache():
    """Only runs that all begin alike are documents: a stream may count its positions anew."""
    model, ids = patched("hedgehog", LLAMA), token_ids(1, 8)
    mask = torch.ones(1, 8)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    cache = DynamicCache()
    parts = [
        logits(model, ids[:, part], position_ids=position_ids[:, part], **cache_argument(model, cache))
        for part in (slice(3), slice(3, 8))
    ]
    assert_close(torch.cat(parts, 1), logits(model, ids, position_ids=position_ids, attention_mask=mask))
