"""`sink_tokens` of `window`: a row's first tokens (and last ones in encoders) are exact outside of the window, too."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.integration.cache_argument import cache_argument
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS
from tests.comparing import assert_close, logits, weighted_sum
from tests.inputs import padding_mask, qkv, token_ids
from tests.reference import naive
from tests.small import patched
from tests.tiny_models import BERT, LLAMA

BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
BACKENDS = pytest.mark.parametrize("backend", ["auto", "torch"])
SCALING = 0.4
SINKS = 3


def build(causal, *, window_size=4, sink_tokens=SINKS, value_dim=6, **options):
    entry = ATTENTIONS.get("window")
    options = {"window_size": window_size, "sink_tokens": sink_tokens, **options}
    built = entry.factory(AttentionShape(4, 2, 6, value_dim, causal=causal), entry.options(**options))
    generator = torch.Generator().manual_seed(3)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return built


def attend(module, inputs, causal, mask=None, backend="auto", **more):
    with hla.use_backend(backend):
        return module(AttentionInputs(*inputs, scaling=SCALING, causal=causal, mask=mask, **more))


def exact_keys(length, window, sinks, causal, mask):
    """Which keys are exact, `[B, 1, L, S]`, from the positions of the real tokens, one pair after the other."""
    inside = torch.zeros(len(mask), 1, length, length, dtype=torch.bool)
    for row, real in enumerate(mask.tolist()):
        tokens = [index for index, is_real in enumerate(real) if is_real]
        ends = tokens[:sinks] if causal else tokens[:sinks] + tokens[-sinks:]
        for i in tokens:
            for j in tokens:
                near = (0 <= i - j < window) if causal else abs(i - j) < window
                seen = near or (j in ends and (j <= i or not causal)) or (not causal and i in ends)
                inside[row, 0, i, j] = seen
    return inside


@BOTH
@BACKENDS
@pytest.mark.parametrize("padding", ["left", "right"])
def test_without_a_far_part_it_is_softmax_over_the_window_and_the_sinks(padding, backend, causal):
    length, mask = 90, padding_mask([90, 40, 2], 90, padding)
    module = build(causal, window_size=8, mix_init=-200.0)
    inputs = qkv(length, batch=3)
    with torch.no_grad():
        out, _ = attend(module, inputs, causal, mask, backend)
    expected = naive.softmax_attention(
        *(x.double() for x in inputs), exact_keys(length, 8, SINKS, causal, mask), SCALING
    )
    assert_close(out.transpose(1, 2)[mask], expected.transpose(1, 2)[mask])


@BOTH
@BACKENDS
def test_a_row_of_window_and_sinks_is_exact_and_none_longer(backend, causal):
    module = build(causal)
    longest = module.exact_length
    assert longest == 4 + (SINKS if causal else 2 * SINKS)
    for length in (1, 3, longest - 1, longest, longest + 1):
        inputs, mask = qkv(length), torch.ones(2, length, dtype=torch.bool)
        out, _ = attend(module, inputs, causal, mask, backend)
        allowed = naive.visible(None, 2, length, length, causal)
        exact = naive.softmax_attention(*(x.double() for x in inputs), allowed, SCALING)
        if length <= longest:
            assert_close(out, exact)
        else:
            assert (out - exact).abs().max() > 1e-3


@BACKENDS
def test_the_sinks_of_an_encoder_see_everything_exactly(backend):
    module, inputs, mask = build(False), qkv(60), padding_mask([60, 33], 60, "left")
    out, _ = attend(module, inputs, False, mask, backend)
    exact = naive.softmax_attention(*(x.double() for x in inputs), naive.visible(mask, 2, 60, 60, False), SCALING)
    for row, first in enumerate((0, 27)):
        for token in (first, first + SINKS - 1, 60 - SINKS, 59):
            assert_close(out[row, :, token], exact[row, :, token])
        assert (out[row, :, 45] - exact[row, :, 45]).abs().max() > 1e-3


@BACKENDS
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_few_tokens_of_an_encoder_have_the_gradients_of_exact_attention(backend, tokens):
    """The first tokens and the last ones are the same: they count once."""
    module, mask = build(False), padding_mask([12, tokens], 12, "right")
    grads = []
    for exact in (False, True):
        inputs = [x.double().requires_grad_() if exact else x.requires_grad_() for x in qkv(12)]
        if exact:
            out = naive.softmax_attention(*inputs, naive.visible(mask, 2, 12, 12, False), SCALING)
        else:
            out, _ = attend(module, inputs, False, mask, backend)
        grads.append(torch.autograd.grad(weighted_sum(out[1, :, :tokens]), inputs))
    for computed, reference in zip(*grads, strict=True):
        if reference.abs().max() < 1e-9:  # of the query and key of a single token
            assert computed.abs().max() < 1e-5
        else:
            assert_close(computed, reference, factor=10)


@BACKENDS
@pytest.mark.parametrize("value_dim", [6, 16])
@pytest.mark.parametrize("first", [1, 2, 5, 12])
@pytest.mark.parametrize("saturation", [None, 5])
@torch.no_grad()
def test_steps_from_the_first_token_on_equal_the_whole(saturation, first, value_dim, backend):
    """Sinks come in after a state too, and leave the window one by one."""
    module = build(True, saturation=saturation, value_dim=value_dim)
    inputs = qkv(16, value_dim=value_dim)
    full, end = attend(module, inputs, True, return_state=True)
    cuts = [0, first, *range(first + 1, 17)]
    parts, state = [], None
    for start, stop in itertools.pairwise(cuts):
        new = [x[:, :, start:stop] for x in inputs]
        out, state = attend(module, new, True, None, backend, state=state, return_state=True)
        parts.append(out)
    assert_close(torch.cat(parts, dim=2), full)
    assert state.keys() == end.keys()
    for name in ("sink_key", "sink_value", "count"):
        assert torch.equal(state[name], end[name])
    assert torch.equal(state["sink_key"], inputs[1][:, :, :SINKS])
    assert state["count"].tolist() == [16, 16]


@torch.no_grad()
def test_the_state_takes_what_it_says():
    module = build(True)
    _, state = attend(module, qkv(30, batch=1), True, return_state=True)
    assert module.state_bytes() == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
@torch.no_grad()
def test_half_precision(causal, dtype):
    module = build(causal, window_size=16)
    inputs = [x.to(dtype) for x in qkv(200)]
    out, _ = attend(module, inputs, causal)
    weights = module.double().attention_weights(
        AttentionInputs(*(x.double() for x in inputs), scaling=SCALING, causal=causal)
    )
    expected = weights @ inputs[2].double().repeat_interleave(2, dim=1)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)


def test_the_sinks_of_a_mask_for_every_query_are_those_of_its_document():
    """Two documents in a row, kept apart by a mask, are computed as each alone."""
    module, inputs = build(False), qkv(30, batch=1)
    allowed = torch.zeros(1, 1, 30, 30, dtype=torch.bool)
    allowed[..., :14, :14] = allowed[..., 14:, 14:] = True
    out = module.dense_forward(AttentionInputs(*inputs, scaling=SCALING, causal=False, mask=allowed))
    parts = [attend(module, [x[:, :, part] for x in inputs], False)[0] for part in (slice(14), slice(14, 30))]
    assert_close(out, torch.cat(parts, dim=2))


@torch.no_grad()
def test_a_decoder_keeps_its_sinks_in_the_cache():
    model, ids = patched("window", LLAMA, sink_tokens=3), token_ids(2, 40)
    full = logits(model, ids)
    assert (full - logits(patched("window", LLAMA, sink_tokens=0), ids)).abs().max() > 1e-2
    cache = DynamicCache(config=model.config)
    parts = [logits(model, ids[:, start : start + 8], **cache_argument(model, cache)) for start in range(0, 40, 8)]
    assert_close(torch.cat(parts, dim=1), full)
    assert cache.layers[0].state["sink_key"].shape == (2, 2, 3, 8)


@pytest.mark.parametrize(("family", "sinks"), [(BERT, 1), (LLAMA, 4)], ids=str)
def test_auto_is_settled_by_the_direction_and_saved(tmp_path, family, sinks):
    model = hla.patch_model(family.build(), "window", window_size=4)
    modules = [module for name, module in model.named_modules() if name.endswith("linear_attention")]
    assert [module.options.sink_tokens for module in modules] == [sinks] * 2
    model.save_pretrained(tmp_path)
    assert_close(logits(hla.load_pretrained(tmp_path), token_ids()), logits(model, token_ids()))


@pytest.mark.parametrize("value", [-1, 1.5, True, "many", None])
def test_a_bad_value_is_named(value):
    with pytest.raises(ValueError, match="sink_tokens must be a whole number of at least 0 or 'auto'"):
        ATTENTIONS.get("window").options(sink_tokens=value)
