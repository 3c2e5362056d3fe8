"""Masks other than padding: honoured in the quadratic form, or refused with the reason."""

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.integration.mask import full_mask_to_bool, linear_attention_mask
from hf_linear_attn.mechanisms import AttentionInputs
from tests.cases import entries, serves
from tests.comparing import assert_close, logits, relative_error
from tests.inputs import padding_mask, token_ids
from tests.small import mechanism, patched
from tests.tiny_models import BERT, FAMILIES, GPT2, LLAMA

LENGTH = 14


def pairs(dense):
    """Mechanisms that honour any mask, or those that do not, in the families that they serve."""
    cases = []
    for entry in entries():
        for family in FAMILIES:
            if serves(entry, family.causal) and mechanism(entry.name, family.causal).dense_masks is dense:
                cases.append(pytest.param(entry.name, family, id=f"{entry.name}-{family}"))
    return cases


HONOURING = pytest.mark.parametrize(("name", "family"), pairs(True))
REFUSING = pytest.mark.parametrize(("name", "family"), pairs(False))


def random_mask(batch=2):
    """Every query sees itself and some others."""
    seen = torch.rand(batch, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
    return seen | torch.eye(LENGTH, dtype=torch.bool)


def additive(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def no_cache(family):
    return {"use_cache": False} if family.causal else {}


def observed(model, ids, mask, **extra):
    calls = []
    with hla.observe_attention(model, calls.append), torch.no_grad():
        model(ids, attention_mask=mask, **extra)
    return calls


@pytest.mark.parametrize("kind", ["bool", "additive"])
@HONOURING
def test_a_mask_made_by_hand_is_honoured(name, family, kind):
    model, ids, mask = patched(name, family), token_ids(2, LENGTH), random_mask()
    mask = mask.tril() if family.causal else mask
    full_mask = mask if kind == "bool" else additive(mask)
    first = observed(model, ids, full_mask, **no_cache(family))[0]
    linear = model.get_submodule(next(key for key, m in model.named_modules() if m is first.module)).linear_attention
    tensors = (first.query, first.key, first.value)
    expected = linear.dense_forward(AttentionInputs(*tensors, scaling=first.scaling, causal=family.causal, mask=mask))
    seen = []
    handle = linear.register_forward_hook(lambda *_: seen.append(True))
    attended = []
    out_handle = first.module.register_forward_hook(lambda m, a, o: attended.append(o[0]))
    out = logits(model, ids, attention_mask=full_mask, **no_cache(family))
    handle.remove()
    out_handle.remove()
    assert not seen  # the quadratic form ran, not the linear one
    assert bool(torch.isfinite(out).all())
    projected = expected.transpose(1, 2).flatten(2)
    for layer in ("c_proj", "o_proj"):
        projected = getattr(first.module, layer)(projected) if hasattr(first.module, layer) else projected
    assert_close(attended[0], projected.detach())


@HONOURING
def test_a_full_mask_of_the_usual_pattern_equals_no_mask(name, family):
    model, ids = patched(name, family), token_ids(2, LENGTH)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask = mask.tril() if family.causal else mask
    assert_close(logits(model, ids, attention_mask=mask, **no_cache(family)), logits(model, ids))


@HONOURING
def test_a_dense_padding_mask_equals_the_padding_mask(name, family):
    model, ids = patched(name, family), token_ids(2, LENGTH)
    padding = padding_mask([LENGTH, 9], LENGTH, "right")
    mask = padding[:, None, None, :].expand(-1, 1, LENGTH, -1)
    mask = mask.tril() if family.causal else mask
    dense = logits(model, ids, attention_mask=mask, **no_cache(family))
    assert_close(dense[padding], logits(model, ids, attention_mask=padding.long())[padding])


@pytest.mark.parametrize(("name", "family"), [case for case in pairs(True) if case.values[1].causal])
def test_a_masked_future_stays_hidden_under_a_custom_mask(name, family):
    model, ids = patched(name, family), token_ids(2, LENGTH)
    mask = random_mask().tril()
    other = ids.clone()
    other[:, 9:] = token_ids(2, 5, seed=8)
    before, after = (logits(model, x, attention_mask=mask, use_cache=False)[:, :9] for x in (ids, other))
    assert_close(after, before)


@REFUSING
def test_a_mask_made_by_hand_is_refused(name, family):
    model, mask = patched(name, family), random_mask()
    mask = mask.tril() if family.causal else mask
    with pytest.raises(NotImplementedError, match=r"cannot apply a 4D attention mask of shape \(2, 1, 14, 14\)"):
        model(token_ids(2, LENGTH), attention_mask=mask, **no_cache(family))
    assert bool(torch.isfinite(logits(model, token_ids())).all())


@pytest.mark.parametrize("what", ["linear_weights", "linear_output"])
@REFUSING
def test_a_mask_made_by_hand_is_refused_by_an_observer_too(name, family, what):
    """Attention transfer and fidelity compute the mechanism's side from calls of the exact attention."""
    calls = observed(patched(name, family), token_ids(2, LENGTH), random_mask().tril(), **no_cache(family))
    with pytest.raises(NotImplementedError, match=r"cannot apply a 4D attention mask of shape \(2, 1, 14, 14\)"):
        getattr(calls[0], what)()


@HONOURING
@pytest.mark.parametrize(
    "shape", [(3, 1, 14, 14), (2, 3, 14, 14), (2, 1, 15, 15), (2, 1, 14, 20), (2, 1, 14, 9)], ids=str
)
def test_a_full_mask_of_another_shape_is_refused(name, family, shape):
    mask = torch.ones(shape, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"from 14 tokens to 14, in 2 rows and 4 heads.* Pass a mask \(2, 4, 14, 14\)"):
        patched(name, family)(token_ids(2, LENGTH), attention_mask=mask, **no_cache(family))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_an_additive_bias_is_refused(family):
    bias = torch.zeros(2, 1, LENGTH, LENGTH)
    bias[..., 3] = -1.5
    with pytest.raises(NotImplementedError, match="An additive bias cannot be expressed by linear attention"):
        patched("hedgehog", family)(token_ids(2, LENGTH), attention_mask=bias, **no_cache(family))


@pytest.mark.parametrize("value", [2, -10_000])
def test_integers_that_are_no_mask_are_refused(value):
    mask = random_mask().long()
    mask[..., 0, 5] = value
    with pytest.raises(NotImplementedError, match="values other than 0 and 1"):
        patched("hedgehog", LLAMA)(token_ids(2, LENGTH), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("saved", [False, True])
def test_a_mask_that_hides_tokens_of_the_cache_is_refused(tmp_path, padding, saved):
    model, ids = patched("hedgehog", LLAMA), token_ids(2, 10)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :padding] = 0
    cache = output_cache(model(ids[:, :6], attention_mask=mask[:, :6]))
    model(ids[:, 6:7], attention_mask=mask[:, :7], **cache_argument(model, cache))
    if saved:
        hla.save_state(model, cache, tmp_path / "state.safetensors")
        cache = hla.load_state(model, tmp_path / "state.safetensors")
    cache.reorder_cache(torch.tensor([1, 0]))
    model(ids[:, 7:8], attention_mask=mask.flip(0)[:, :8], **cache_argument(model, cache))
    wrong = mask.flip(0)
    wrong[1, 1:3] = 0
    with pytest.raises(ValueError, match=r"hides tokens of the cache.* from the first call on"):
        model(ids[:, 8:9], attention_mask=wrong[:, :9], **cache_argument(model, cache))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_refuses_an_additive_bias_too():
    model, mask = torch.compile(patched("hedgehog", LLAMA)), additive(random_mask())
    model(token_ids(2, LENGTH), attention_mask=mask, use_cache=False)
    mask[..., 3] = -1.5
    with pytest.raises(RuntimeError, match="An additive bias cannot be expressed by linear attention"):
        model(token_ids(2, LENGTH), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize(("name", "family"), [case for case in pairs(True) if case.values[1].causal])
def test_a_prefix_mask_is_honoured(name, family):
    model, ids = patched(name, family), token_ids(1, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:5, :5] = True
    inputs = {"attention_mask": mask[None, None], "use_cache": False}
    before = logits(model, ids, **inputs)
    inside, after = ids.clone(), ids.clone()
    inside[:, 4] = ids[:, 4] % 50 + 2
    after[:, 9] = ids[:, 9] % 50 + 2
    assert relative_error(logits(model, inside, **inputs)[:, :4], before[:, :4]) > 1e-3
    assert_close(logits(model, after, **inputs)[:, :9], before[:, :9])


def test_a_full_mask_cannot_meet_a_cache():
    with pytest.raises(NotImplementedError, match=r"cannot be used with a cache\. Pass use_cache=False"):
        patched("hedgehog", GPT2)(token_ids(2, LENGTH), attention_mask=random_mask().tril(), use_cache=True)


@pytest.mark.parametrize("length", [3, LENGTH - 1])
def test_a_mask_that_is_too_short_is_refused(length):
    for family in (BERT, LLAMA):
        model = patched("hedgehog", family)
        with pytest.raises((ValueError, RuntimeError)):
            model(token_ids(2, LENGTH), attention_mask=torch.ones(2, length, dtype=torch.long))


@pytest.mark.parametrize("kind", ["ones", "left", "right"])
@pytest.mark.parametrize("extra", [1, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@torch.no_grad()
def test_a_mask_that_is_too_long_is_refused(family, extra, kind):
    """The unpatched model raises too, or takes what is hidden for padding."""
    mask = torch.ones(2, LENGTH + extra, dtype=torch.long)
    if kind != "ones":
        mask[0, :3] = 0
        mask = mask.flip(1) if kind == "right" else mask
    message = rf"mask has shape \(2, {LENGTH + extra}\); it must cover all {LENGTH} tokens"
    for layers in (None, [1]):
        model, ids = patched("hedgehog", family, **({} if layers is None else {"layers": layers})), token_ids(2, LENGTH)
        for settings in ({"use_cache": False}, {"use_cache": True}) if family.causal else ({},):
            for training in (False, True):
                with pytest.raises(ValueError, match=message):
                    model.train(training)(ids, attention_mask=mask, **settings)
        with pytest.raises(ValueError, match=message), hla.exact_attention(model):
            model(ids, attention_mask=mask, **({"use_cache": False} if family.causal else {}))
        assert bool(torch.isfinite(logits(model, ids, attention_mask=mask[:, :LENGTH])).all())


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=str)
@torch.no_grad()
def test_a_mask_that_is_too_long_is_refused_after_a_cache(family):
    model, mask = patched("hedgehog", family, layers=[0]), torch.ones(2, LENGTH + 3, dtype=torch.long)
    cache = output_cache(model(token_ids(2, LENGTH), use_cache=True))
    with pytest.raises(
        ValueError, match=rf"all {LENGTH + 2} tokens seen so far \({LENGTH} in the cache and 2 new ones"
    ):
        model(token_ids(2, 2), **cache_argument(model, cache), attention_mask=mask)


def test_output_attentions_with_a_filled_cache_are_refused():
    model = patched("hedgehog", GPT2)
    cache = output_cache(model(token_ids(2, 5), use_cache=True))
    with pytest.raises(NotImplementedError, match=r"output_attentions needs all keys.*use_cache=False"):
        model(token_ids(2, 2), **cache_argument(model, cache), output_attentions=True)


# --------------------------------------------------------------------------------------------------------------------
# The functions


def test_floats_and_integers_become_booleans():
    mask = random_mask()
    for full_mask in (mask, additive(mask), additive(mask, torch.float16), additive(mask, torch.bfloat16), mask.long()):
        assert torch.equal(full_mask_to_bool(full_mask), mask)
    infinite = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    assert torch.equal(full_mask_to_bool(infinite), mask)


@pytest.mark.parametrize("offset", [0, 3])
def test_the_padding_mask_is_cut_to_the_keys(offset):
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    out = linear_attention_mask(kv_length=2, kv_offset=offset, attention_mask=mask)
    expected = mask.bool()[:, offset : offset + 2]
    assert (out is None and bool(expected.all())) or torch.equal(out, expected)
    assert linear_attention_mask(kv_length=4, attention_mask=None) is None
    assert linear_attention_mask(kv_length=6, attention_mask=torch.ones(2, 6)) is None


def test_masks_of_exact_attention():
    padding, keys = padding_mask([4, 2], 4, "left"), torch.zeros(1, 1, 4, 8)

    def visible(mask, queries, causal=True):
        return AttentionInputs(keys[:, :, :queries], keys, keys, 1.0, causal, mask).visible()

    assert visible(None, 4, causal=False).all()
    assert visible(None, 2)[0, 0].tolist() == [[True, True, True, False], [True] * 4]
    assert torch.equal(visible(padding, 4)[1, 0], torch.ones(4, 4, dtype=torch.bool).tril() & padding[1])
    assert torch.equal(visible(padding, 1)[:, 0, 0], padding)
