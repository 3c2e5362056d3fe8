"""FAVOR+ with new draws of its features: what is counted, what is not, and what a draw depends on."""

import itertools

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.favor_plus import FavorPlusOptions
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.context import attention_modules
from tests.comparing import logits
from tests.inputs import token_ids
from tests.tiny_models import GPT2, LLAMA, saved_and_loaded

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def patched(every=2, name="favor+", **options):
    settings = {"num_features": 16, "redraw_every": every, **options}
    if name == "window":
        settings = {"window_size": 4, "feature_map": "favor+", "feature_map_options": settings}
    return hla.patch_model(GPT2.build(), name, **settings)


def maps(model):
    return [module.linear_attention.feature_map for module in attention_modules(model)]


def rows(model):
    return [phi.weight for phi in maps(model)]


def draws(model, passes):
    """How many different W the first layer used in so many passes, one after the other."""
    actual = []
    for _ in range(passes):
        model(token_ids(), use_cache=False)
        actual.append(rows(model)[0])
    return [int(not torch.equal(a, b)) for a, b in itertools.pairwise(actual)]


@pytest.mark.parametrize("name", ["favor+", "window"])
def test_every_nth_training_pass_is_followed_by_a_new_draw(name):
    model = patched(3, name).train()
    start = rows(model)[0].clone()
    assert draws(model, 8) == [0, 0, 1, 0, 0, 1, 0]
    assert not torch.equal(rows(model)[0], start)
    assert int(maps(model)[0].passes) == 8
    assert not torch.equal(*rows(model))


@pytest.mark.slow
def test_a_draw_by_hand_holds_until_the_next_that_is_due():
    model = patched(3).train()
    draws(model, 1)
    maps(model)[0].redraw(99)
    by_hand = rows(model)[0].clone()
    draws(model, 2)
    assert torch.equal(rows(model)[0], by_hand)
    draws(model, 1)
    assert not torch.equal(rows(model)[0], by_hand)


@pytest.mark.slow
def test_never_in_eval():
    model = patched(1)
    assert draws(model, 4) == [0, 0, 0]
    assert int(maps(model)[0].passes) == 0


@pytest.mark.slow
def test_draws_follow_from_the_seed_and_the_count():
    first, second, other = patched().train(), patched().train(), patched(seed=1).train()
    for model in (first, second, other):
        draws(model, 5)
    assert all(torch.equal(a, b) for a, b in zip(rows(first), rows(second), strict=True))
    assert not torch.equal(rows(first)[0], rows(other)[0])


@pytest.mark.slow
def test_redraws_resume_from_a_saved_model(tmp_path):
    model = patched(2).train()
    draws(model, 3)
    loaded = saved_and_loaded(model, tmp_path).train()
    assert torch.equal(rows(loaded)[0], rows(model)[0])
    assert draws(loaded, 4) == draws(model, 4)
    assert all(torch.equal(a, b) for a, b in zip(rows(loaded), rows(model), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_once_and_sees_the_same_features(reentrant):
    def gradients(checkpointing):
        torch.manual_seed(0)
        model = patched(1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for _ in range(3):
            model.zero_grad()
            embeds = model.get_input_embeddings()(token_ids())
            model(inputs_embeds=embeds, use_cache=False).logits.square().mean().backward()
        return int(maps(model)[0].passes), model.transformer.h[0].attn.c_attn.weight.grad

    (reference_count, reference), (count, checked) = gradients(False), gradients(True)
    assert count == reference_count == 3
    torch.testing.assert_close(checked, reference)


@pytest.mark.slow
def test_two_passes_before_one_backward():
    """The first graph keeps the rows that it was built with."""
    model = patched(1).train()
    losses = [model(token_ids(seed=seed), use_cache=False).logits.square().mean() for seed in (0, 1)]
    sum(losses).backward()
    assert bool(torch.isfinite(model.transformer.h[0].attn.c_attn.weight.grad).all())


@pytest.mark.slow
def test_a_stream_keeps_its_features():
    model, cache = patched(1).train(), None
    with torch.no_grad():
        for step in range(4):
            cache = output_cache(model(token_ids()[:, step : step + 1], **cache_argument(model, cache), use_cache=True))
    assert int(maps(model)[0].passes) == 1


@pytest.mark.slow
def test_redraw_by_hand_equals_a_patch_with_that_seed():
    model = hla.patch_model(LLAMA.build(), "favor+", num_features=16).half()
    for phi in maps(model):
        phi.redraw(5)
        assert phi.weight.dtype == torch.float16
    other = hla.patch_model(LLAMA.build(), "favor+", num_features=16, seed=5).half()
    assert all(torch.equal(a, b) for a, b in zip(rows(model), rows(other), strict=True))


@pytest.mark.slow
def test_observed_passes_are_exact_and_not_counted():
    model = patched(1).train()
    with hla.exact_attention(model):
        logits(model, token_ids())
    assert int(maps(model)[0].passes) == 0


@pytest.mark.slow
def test_compiled_training_is_refused_with_the_remedy():
    model = patched(1).train()
    with pytest.raises(Exception, match="redraw_every counts forward passes"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(token_ids(), use_cache=False)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_full_mask_counts_too():
    model = patched(1).train()
    full = torch.ones(2, 1, 21, 21, dtype=torch.bool).tril()
    for _ in range(3):
        model(token_ids(), attention_mask=full, use_cache=False)
    assert int(maps(model)[0].passes) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"redraw_every": 0}, "redraw_every must be a whole number of at least 1, got 0"),
        ({"hyperbolic": True, "num_features": 9}, "num_features must be even for hyperbolic=True, got 9"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FavorPlusOptions(**options)


@pytest.mark.slow
def test_without_redraws_there_is_no_counter():
    assert not hasattr(maps(hla.patch_model(GPT2.build(), "favor+"))[0], "passes")
