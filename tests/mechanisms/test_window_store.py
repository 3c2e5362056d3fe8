"""`store_size` of `window`: keys that the part outside of the window recalls badly stay exact."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import windowed
from hf_linear_attn.ops.common import InPlaceState
from tests.comparing import assert_close, logits, weighted_sum
from tests.inputs import padded_batch, qkv, token_ids
from tests.mechanisms import checks
from tests.reference import naive
from tests.small import patched
from tests.tiny_models import BERT, LLAMA

SCALING = checks.SCALING
MAPS = pytest.mark.parametrize("feature_map", ["hedgehog", "favor+", "elu"])


def build(feature_map="hedgehog", *, window_size=4, sink_tokens=2, store_size=3, **options):
    sizes = {"window_size": window_size, "sink_tokens": sink_tokens, "store_size": store_size}
    return checks.build("window", True, seed=3, feature_map=feature_map, mix_init=0.5, **sizes, **options)


def phi(project, x):
    values, log_scale = project(x, SCALING)
    return values if log_scale is None else values * log_scale.exp().unsqueeze(-1)


def stored_keys(module, key, value):
    """Which keys the store holds for each query of one row, `[G, L, S]`, one query after the other."""
    options, length = module.options, key.shape[2]
    features = phi(module.feature_map.key, key)[0].detach()
    is_stored = torch.zeros(key.shape[1], length, length, dtype=torch.bool)
    for group, (computed, values) in enumerate(zip(features, value[0].detach(), strict=True)):
        errors = {}
        for query in range(length):
            leaving = query - options.window_size
            if leaving >= options.sink_tokens:
                weights = computed[options.sink_tokens : leaving + 1] @ computed[leaving]
                recalled = weights @ values[options.sink_tokens : leaving + 1] / weights.sum()
                error, size = (recalled - values[leaving]).norm().item(), values[leaving].norm().item()
                errors[leaving] = error if error > 1e-5 * size else 0.0
            for index in sorted(errors, key=lambda index: (-errors[index], index))[: options.store_size]:
                is_stored[group, query, index] = True
    return is_stored


def key_features(module, k, carried):
    """Features of keys; `carried` is a copy of the module, and how many of the first keys have its features."""
    features = phi(module.feature_map.key, k)[0]
    if carried is None:
        return features
    before, count = carried
    return torch.cat([phi(before.feature_map.key, k[:, :, :count])[0].detach(), features[:, count:]], dim=1)


def definition(module, q, k, v, causal, carried=None):
    """Weights as `WindowAttention` defines them, from the pairs that are exact."""
    options, length, repeats = module.options, q.shape[2], q.shape[1] // k.shape[1]
    if not length:
        return v.new_zeros(1, q.shape[1], 0, v.shape[3])
    order = torch.arange(length)
    visible = order <= order[:, None]
    near = (order[:, None] - order < options.window_size) | (order < options.sink_tokens)
    exact = (near | stored_keys(module, k, v)).repeat_interleave(repeats, dim=0) & visible
    far = (order + 1 - options.window_size - options.sink_tokens - options.store_size).clamp_min(0)
    mix = module.log_mix.view(-1, 1) + SCALING**0.5 * (q[0] * module.mix_weight.unsqueeze(1)).sum(-1)
    mix = mix - torch.log1p(far / options.saturation)
    key, value = (x[0].repeat_interleave(repeats, dim=0) for x in (k, v))
    scores = SCALING * q[0] @ key.transpose(-1, -2)
    far_keys = key_features(module, k, carried).repeat_interleave(repeats, dim=0)
    estimates = phi(module.feature_map.query, q)[0] @ far_keys.transpose(-1, -2)
    top = scores.masked_fill(~exact, float("-inf")).amax(-1, keepdim=True)
    if module.feature_map.query(q, SCALING).log_scale is not None:  # estimates of exp(τ q·k) itself
        top = torch.zeros_like(top)
    linear = (estimates * mix.exp().unsqueeze(-1)).masked_fill(~visible, 0.0)
    weights = torch.where(exact, (scores - top).exp(), linear)
    return (weights @ value / weights.sum(-1, keepdim=True)).unsqueeze(0)


@MAPS
@pytest.mark.parametrize("length", [1, 9, 10, 140])
def test_output_equals_the_definition(length, feature_map):
    checks.check_output(build(feature_map), definition, length)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_is_not_stored(padding):
    checks.check_padding(build(), definition, padding)


def test_padding_leaves_the_state_unchanged():
    checks.check_padding_leaves_the_state_unchanged(build())


@MAPS
def test_gradients(feature_map):
    checks.check_gradients(build(feature_map), definition, 70)
    checks.check_poisoned_gradients(build(feature_map))


@pytest.mark.parametrize("feature_map", ["hedgehog", "t2r"])
@pytest.mark.parametrize("sizes", [[20, 40], [20] + [1] * 12, [20, 0, 9, 1, 1, 14], [20, 30, "detach", 20, 1]], ids=str)
def test_gradients_after_a_state_that_was_read_without_one(sizes, feature_map):
    """Differences of the definition, in which the keys that left the window before are constants, are the gradients."""
    module = checks.double(build(feature_map))
    inputs = [x.double() for x in qkv(sum(size for size in sizes if size != "detach"), batch=1)]
    state, outputs, start, constant, counted = None, [], 0, 0, 0
    for size in sizes:
        if size == "detach":
            state = {name: tensor.detach() for name, tensor in state.items()}
            constant, counted, outputs = start - module.options.window_size, start, []
            continue
        now = slice(start, start + size)
        with torch.set_grad_enabled(start > 0):
            out, state = checks.run(module, *(x[:, :, now] for x in inputs), state=state)
        if not start:
            constant, counted = size - module.options.window_size, size
        else:
            outputs.append(out)
        start += size
    out = torch.cat(outputs, dim=2)
    parameters, before = list(module.parameters()), checks.double(module)

    def loss():
        return weighted_sum(definition(module, *inputs, True, (before, constant))[:, :, counted:])

    checks.check_differences(loss, parameters, torch.autograd.grad(weighted_sum(out), parameters))


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 1, 1, 70, 2, 64], [130, 1, 1, 1]], ids=str)
def test_any_split_equals_the_whole(sizes):
    state = checks.check_pieces(build(), sizes)
    assert state["store_key"].shape == (2, 2, 3, 6)


@pytest.mark.parametrize("kind", [dict, InPlaceState])
@pytest.mark.parametrize(
    ("feature_map", "dtype", "window_size", "sinks", "store_size"),
    [
        ("hedgehog", torch.float32, 4, 2, 3),
        ("hedgehog", torch.float32, 5, 0, 70),  # more than the kernel reads at a time
        ("hedgehog", torch.bfloat16, 3, 4, 1),
        ("elu", torch.float32, 4, 2, 3),
    ],
)
@torch.no_grad()
def test_steps_of_the_kernel_equal_the_whole(feature_map, dtype, window_size, sinks, store_size, kind):
    sizes = {"window_size": window_size, "sink_tokens": sinks, "store_size": store_size}
    module = build(feature_map, value_dim=16, **sizes)
    inputs, mask = [x.to(dtype) for x in qkv(120, value_dim=16)], torch.ones(2, 120, dtype=torch.bool)
    mask[1, 30:40] = mask[1, :5] = False
    full, after = checks.run(module, *inputs, mask=mask)
    _, state = checks.run(module, *(x[:, :, :12] for x in inputs), mask=mask[:, :12])
    for token in range(12, 120):
        now = slice(token, token + 1)
        out, state = checks.run(module, *(x[:, :, now] for x in inputs), mask=mask[:, now], state=kind(state))
        assert_close(out[mask[:, token]], full[:, :, now][mask[:, token]], dtype, factor=5)
    assert state.keys() == after.keys()
    for name, tensor in after.items():
        assert_close(state[name].double(), tensor.double(), dtype, factor=5)


def test_blocks_that_are_computed_together_do_not_matter(monkeypatch):
    module, inputs = build(), qkv(150)
    together = checks.run(module, *inputs)[0]
    for name, value in {"MIN_BLOCK": 4, "MAX_BLOCK": 8, "MIN_GROUP": 2, "GROUP_ELEMENTS": 1}.items():
        monkeypatch.setattr(windowed, name, value)
    assert_close(checks.run(module, *inputs)[0], together)


def test_no_look_ahead():
    checks.check_no_look_ahead(build())


def test_weights():
    with torch.no_grad():
        checks.check_weights(build())


@torch.no_grad()
def test_a_row_of_window_sinks_and_store_is_exact_and_none_longer():
    module = build()
    assert module.exact_length == 4 + 2 + 3
    for length in (8, 9, 10):
        inputs = qkv(length)
        out = checks.run(module, *inputs)[0]
        exact = naive.softmax_attention(*inputs, naive.visible(None, 2, length, length, True), SCALING)
        assert ((out - exact).abs().max() < 1e-5) == (length <= 9)


@pytest.mark.parametrize("feature_map", ["hedgehog", "elu"])
@torch.no_grad()
def test_rows_whose_far_keys_are_all_stored_are_exact_whatever_they_weigh(feature_map):
    """Their estimates would leave nothing but rounding."""
    module = build(feature_map, value_dim=16, store_size=70)
    module.log_mix.data.fill_(10.0)
    (q, k, v), length = qkv(60, value_dim=16), 60
    exact = naive.softmax_attention(q, k, v, naive.visible(None, 2, length, length, True), SCALING)
    out, state = checks.run(module, q[:, :, :40], k[:, :, :40], v[:, :, :40])
    parts = [out]
    for token in range(40, length):
        now = slice(token, token + 1)
        out, state = checks.run(module, q[:, :, now], k[:, :, now], v[:, :, now], state=state)
        parts.append(out)
    assert_close(torch.cat(parts, dim=2), exact)


@torch.no_grad()
def test_a_value_unlike_all_others_stays_exact_far_back():
    """A query that looks for it finds it, where the linear part alone returns what is common."""
    module, without = (checks.build("window", True, window_size=8, mix_init=-3.0, store_size=n) for n in (4, 0))
    q, k, v = qkv(200, batch=1)
    v = 0.01 * v
    v[:, :, 60] = 5.0
    k[:, :, 60] = 3.0
    q[:, :, -1] = 3.0
    state = checks.run(module, q, k, v)[1]
    assert bool((state["store_value"] == 5.0).all(dim=-1).any(dim=-1).all())
    exact = naive.softmax_attention(q, k, v, naive.visible(None, 1, 200, 200, True), SCALING)
    errors = [(checks.run(one, q, k, v)[0] - exact)[:, :, -1].abs().max() for one in (module, without)]
    assert errors[0] < 0.1
    assert errors[1] > 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype):
    module, inputs = build(window_size=16, store_size=8), [x.to(dtype) for x in qkv(200)]
    out, state = checks.run(module, *inputs)
    expected = checks.by_rows(definition, checks.double(module), *(x.double() for x in inputs))
    assert (out.dtype, state["store_key"].dtype, state["store_error"].dtype) == (dtype, dtype, torch.float32)
    assert_close(out, expected, dtype)


@torch.no_grad()
def test_the_state_takes_what_it_says():
    module = build()
    state = checks.run(module, *qkv(30, batch=1))[1]
    assert module.state_bytes() == sum(tensor.nbytes for tensor in state.values())


@torch.no_grad()
def test_a_decoder_generates_from_its_cache(tmp_path):
    model = patched("window", LLAMA, store_size=3)
    inputs = padded_batch([token_ids(1, length)[0] for length in (40, 25)], "left")
    del inputs["position_ids"]
    for settings in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 12, "do_sample": False, **settings}
        cached, full = (model.generate(**inputs, use_cache=cache, **settings) for cache in (True, False))
        assert torch.equal(cached, full)
    model.save_pretrained(tmp_path)
    loaded = hla.load_pretrained(tmp_path)
    assert loaded.config.linear_attention["layers"]["0"]["options"]["store_size"] == 3
    assert torch.equal(logits(loaded, token_ids(2, 40)), logits(model, token_ids(2, 40)))


@torch.no_grad()
def test_beside_exact_heads_and_in_pieces():
    model, ids = patched("window", LLAMA, store_size=3, exact_heads=[1]), token_ids(2, 40)
    full, cache = logits(model, ids), DynamicCache(config=model.config)
    parts = [logits(model, ids[:, start : start + 8], past_key_values=cache) for start in range(0, 40, 8)]
    assert_close(torch.cat(parts, dim=1), full)


@pytest.mark.slow
@torch.no_grad()
def test_compiled():
    model, ids = patched("window", LLAMA, store_size=3), token_ids(2, 40)
    expected = logits(model, ids)
    assert_close(torch.compile(model, backend="aot_eager", dynamic=False)(ids).logits, expected)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="store_size=3 is for decoders"):
        patched("window", BERT, store_size=3)
    module, (q, k, v) = build(), qkv(9)
    with (
        torch.no_grad(),
        hla.use_backend("native"),
        pytest.raises(NotImplementedError, match="in steps of one token only"),
    ):
        module(AttentionInputs(q, k, v, scaling=SCALING, causal=True, return_state=True))
