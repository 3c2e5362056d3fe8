"""Terms of a model's logits (sinks, a cap, a position bias) in every form of a window and of exact attention."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from hf_linear_attn.config import LayerConfig
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.head_mixture import HeadMixture
from hf_linear_attn.ops.backends import use_backend
from hf_linear_attn.ops.disentangled import Disentangled
from hf_linear_attn.ops.native.backend import unavailable_reason
from hf_linear_attn.ops.terms import Terms
from hf_linear_attn.registry import ATTENTIONS
from tests import comparing
from tests.inputs import padding_mask
from tests.reference import naive

BOTH = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
NAMES = ["sink", "softcap", "bias", "all"]
KINDS = pytest.mark.parametrize("kind", [*NAMES, "slope"])
#: A slope is for decoders.
CASES = pytest.mark.parametrize(
    ("causal", "kind"), [*((causal, kind) for causal in (False, True) for kind in NAMES), (True, "slope")]
)
SCALING, CAP, REACH, WINDOW = 0.9, 2.0, 4, 5


def assert_close(actual, expected, factor=1.0):
    comparing.assert_close(actual, expected, torch.float64, factor)


def terms_of(kind, causal, heads=4, seed=5):
    """Random terms of one kind, or all of them; the bias is that of distances up to `REACH`."""
    generator = torch.Generator().manual_seed(seed)
    sink = torch.randn(heads, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(heads, 2 * REACH + 1, generator=generator, dtype=torch.float64).requires_grad_()
    every = {"sink": sink, "softcap": CAP, "bias": bias}
    if kind == "slope":
        return Terms(slope=torch.tensor([0.5, 0.25, 0.0625, 0.003], dtype=torch.float64).requires_grad_())
    return Terms(**(every if kind == "all" else {kind: every[kind]}))


def groups_of(kind, causal):
    """Key-value heads: with slopes as many as heads."""
    return 2 if causal and kind != "slope" else 4


def explicit_bias(terms, length):
    """b `[H, L, L]`, pair by pair."""
    if terms.slope is not None:
        return torch.stack([-terms.slope[:, None] * (i - torch.arange(length)) for i in range(length)], dim=1)
    if terms.bias is None:
        return 0.0
    rows = []
    for i in range(length):
        indices = [max(-REACH, min(REACH, i - j)) + REACH for j in range(length)]
        rows.append(terms.bias[:, indices])
    return torch.stack(rows, dim=1)


def build(name, causal, groups=4, cap=None, **options):
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(4, groups, 6, 6, causal=causal, softcap=cap, bias_reach=0)
    built = entry.factory(shape, entry.options(**options))
    generator = torch.Generator().manual_seed(3)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    if hasattr(built, "mix_weight"):
        built.mix_weight.data.zero_()
    return built.double()


def tensors(length, groups=4, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, count, length, 6) for count in (4, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def definition(module, qkv, terms, causal, mask, sinks):
    """The outputs of a window by their definition, padded rows as rows of their own."""
    query, key, value = qkv
    features = [part(x, SCALING) for part, x in ((module.feature_map.query, query), (module.feature_map.key, key))]
    features = [f.values if f.log_scale is None else f.values * f.log_scale.exp().unsqueeze(-1) for f in features]
    relative = module.options.feature_map != "vq"
    out = []
    for row, real in enumerate(mask):
        parts = [x[row : row + 1, :, real] for x in (query, key, value, *features)]
        length = int(real.sum())
        allowed = naive.visible(None, 1, length, length, causal)
        settings = {"window": WINDOW, "causal": causal, "scaling": SCALING, "log_mix": module.log_mix}
        added = {"model_sink": terms.sink, "cap": terms.softcap, "bias": explicit_bias(terms, length)}
        out.append(naive.windowed_attention(*parts, allowed, relative=relative, sinks=sinks, **settings, **added))
    return out


@CASES
@pytest.mark.parametrize("name", ["vq", "hedgehog"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_window_with_terms_is_its_definition_with_all_gradients(causal, kind, name, padding):
    groups = groups_of(kind, causal)
    terms = terms_of(kind, causal)
    module = build("window", causal, groups, terms.softcap, window_size=WINDOW, feature_map=name, mix_init=0.3,
                   saturation=None, sink_tokens=2)  # fmt: skip
    length, mask = 80, padding_mask([80, 37], 80, padding)
    qkv = tensors(length, groups)
    leaves = [*qkv, *terms.tensors(), module.log_mix]
    out, _ = module(AttentionInputs(*qkv, SCALING, causal, mask, terms=terms))
    rows = [out[row : row + 1, :, real] for row, real in enumerate(mask)]
    expected = definition(module, qkv, terms, causal, mask, sinks=2)
    for actual, right in zip(rows, expected, strict=True):
        assert_close(actual, right)
    gradients = torch.autograd.grad(sum(part.square().sum() for part in rows), leaves)
    expected_gradients = torch.autograd.grad(sum(part.square().sum() for part in expected), leaves)
    for actual, right in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, right, factor=10)


@CASES
def test_explicit_weights_with_terms_give_the_outputs(causal, kind):
    terms = terms_of(kind, causal)
    module = build("window", causal, 4, terms.softcap, window_size=WINDOW, mix_init=0.3, saturation=None)
    inputs = AttentionInputs(*tensors(40), SCALING, causal, terms=terms)
    weights = module.attention_weights(inputs)
    assert_close(weights @ inputs.value, module(inputs)[0])
    if terms.sink is not None:
        assert bool((weights.sum(dim=-1) < 1).all())
    some = replace(inputs, query=inputs.query[:, :, 10:20], start=10)
    if not causal:
        assert_close(module.attention_weights(some), weights[:, :, 10:20])


@KINDS
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_tokens_one_by_one_and_prompts_in_pieces_see_the_terms(kind, cache_dtype):
    terms = terms_of(kind, True)
    options = {"window_size": WINDOW, "mix_init": 0.3, "saturation": None, "cache_dtype": cache_dtype}
    groups = groups_of(kind, True)
    module, qkv = build("window", True, groups, terms.softcap, **options), tensors(33, groups)
    with torch.no_grad():
        whole, _ = module(AttentionInputs(*qkv, SCALING, True, terms=terms))
        parts, state = [], None
        for start, stop in ((0, 1), (1, 18), (18, 19), (19, 20), (20, 30), (30, 31), (31, 32), (32, 33)):
            piece = [x[:, :, start:stop] for x in qkv]
            out, state = module(AttentionInputs(*piece, SCALING, True, None, state, return_state=True, terms=terms))
            parts.append(out)
    joined = torch.cat(parts, dim=2)
    if cache_dtype == "auto":
        assert_close(joined, whole)
    else:  # keys and values of earlier calls are rounded to 1/127 of their largest number
        assert float((joined - whole).abs().max()) < 0.1
        assert float((joined[:, :, 0] - whole[:, :, 0]).abs().max()) < 1e-9


@CASES
def test_exact_attention_with_terms_is_its_definition(causal, kind):
    """Also in pieces, with padding, and in rows of more than one block of queries."""
    terms, length = terms_of(kind, causal), 300
    groups = groups_of(kind, causal)
    qkv, mask = tensors(length, groups), padding_mask([300, 37], 300, "left")
    module = build("softmax", causal, groups)
    allowed = naive.visible(mask, 2, length, length, causal)
    bias = explicit_bias(terms, length)
    expected = naive.attention_with_terms(*qkv, allowed, SCALING, sink=terms.sink, cap=terms.softcap, bias=bias)
    out, _ = module(AttentionInputs(*qkv, SCALING, causal, mask, terms=terms))
    for row in range(2):
        assert_close(out[row, :, mask[row]], expected[row, :, mask[row]])
    if causal:
        first = [x[:, :, :200] for x in qkv]
        _, state = module(AttentionInputs(*first, SCALING, True, mask[:, :200], return_state=True, terms=terms))
        rest = [x[:, :, 200:] for x in qkv]
        out, _ = module(AttentionInputs(*rest, SCALING, True, mask[:, 200:], state, return_state=True, terms=terms))
        assert_close(out, expected[:, :, 200:])


@KINDS
def test_exact_heads_get_their_own_terms(kind):
    groups = groups_of(kind, True)
    terms, qkv = terms_of(kind, True), tensors(40, groups)
    entry, options = ATTENTIONS.get("window"), LayerConfig("window", {"window_size": 40}).build_options()[0]
    shape = AttentionShape(4, groups, 6, 6, causal=True, softcap=terms.softcap)
    mixture = HeadMixture(shape, entry, options, [1]).double()
    allowed = naive.visible(None, 2, 40, 40, True)
    bias = explicit_bias(terms, 40)
    expected = naive.attention_with_terms(*qkv, allowed, SCALING, sink=terms.sink, cap=terms.softcap, bias=bias)
    inputs = AttentionInputs(*qkv, SCALING, True, terms=terms)
    assert_close(mixture(inputs)[0], expected)
    assert_close(mixture.attention_weights(inputs) @ inputs.value.repeat_interleave(4 // groups, 1), expected)


def test_a_window_is_as_wide_as_a_position_bias_reaches():
    entry = ATTENTIONS.get("window")
    built = entry.factory(AttentionShape(4, 4, 6, 6, causal=True, bias_reach=91), entry.options(window_size=64))
    assert built.options.window_size == 91
    assert entry.factory(AttentionShape(4, 4, 6, 6, bias_reach=91), entry.options(window_size=99)).exact_length == 101


@pytest.mark.parametrize("name", ["elu", "gla", "linformer-causal", "luna"])
def test_mechanisms_without_terms_refuse_them_by_name(name):
    entry = ATTENTIONS.get(name)
    module = entry.factory(AttentionShape(4, 4, 6, 6, causal=True), entry.options())
    inputs = AttentionInputs(*(x.float() for x in tensors(8)), SCALING, True, terms=terms_of("sink", True))
    with pytest.raises(NotImplementedError, match=r"adds attention sinks to its logits.*Use 'window'"):
        module(inputs)


# --------------------------------------------------------------------------------------------------------------------
# Disentangled attention

LAST, ROWS = 20, 41


def disentangled(kinds=("query", "key")):
    """Random vectors for each distance up to `LAST`, and those of pairs by the definition."""
    generator = torch.Generator().manual_seed(8)
    tables = [torch.randn(4, ROWS, 6, generator=generator, dtype=torch.float64) * 0.5 for _ in range(2)]
    query_table, key_table = (table.requires_grad_() for table in tables)
    rows = torch.arange(ROWS)
    table = query_table if "query" in kinds else None
    other = key_table * SCALING if "key" in kinds else None
    zeros = torch.zeros_like(query_table)
    used = (query_table if "query" in kinds else zeros, key_table if "key" in kinds else zeros)
    return Terms(relative=Disentangled(table, other, rows)), used


def row_of(distance):
    return max(-LAST, min(LAST, distance)) + LAST


@pytest.mark.parametrize("kinds", [("query", "key"), ("query",), ("key",)], ids=["both", "c2p", "p2c"])
@pytest.mark.parametrize(("length", "window"), [(100, 32), (90, 33), (70, 40), (7, 32), (1, 32)])
def test_disentangled_attention_in_a_window_is_its_definition_with_all_gradients(kinds, length, window):
    terms, (query_table, key_table) = disentangled(kinds)
    module = build("window", False, window_size=window, mix_init=0.3, sink_tokens=1, feature_map="hedgehog")
    query, key, value = qkv = tensors(length)
    leaves = [*qkv, *(table for table, name in ((query_table, "query"), (key_table, "key")) if name in kinds)]
    out, _ = module(AttentionInputs(*qkv, SCALING, False, torch.ones(2, length, dtype=torch.bool), terms=terms))
    far = round(math.sqrt(window * max(LAST, window)))
    bias = naive.disentangled_bias(query, key, query_table, key_table, row_of, SCALING)
    far_bias = naive.disentangled_bias(
        query, key, query_table, key_table, lambda d: row_of(far if d > 0 else -far), SCALING
    )
    maps = module.feature_map
    features = maps.query(query, SCALING).values, maps.key(key, SCALING).values
    allowed = naive.visible(None, 2, length, length, False)
    settings = {"window": window, "causal": False, "scaling": SCALING, "log_mix": module.log_mix, "sinks": 1}
    expected = naive.windowed_attention(*qkv, *features, allowed, **settings, bias=bias, far_bias=far_bias)
    assert_close(out, expected)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True)
    for actual, right in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, right, factor=10)
    weights = module.attention_weights(AttentionInputs(*qkv, SCALING, False, terms=terms))
    assert_close(weights @ value, expected)


def test_exact_disentangled_attention_is_its_definition():
    terms, tables = disentangled()
    qkv, mask = tensors(50), padding_mask([50, 31], 50, "right")
    bias = naive.disentangled_bias(*qkv[:2], *tables, row_of, SCALING)
    expected = naive.attention_with_terms(*qkv, naive.visible(mask, 2, 50, 50, False), SCALING, bias=bias)
    out, _ = build("softmax", False)(AttentionInputs(*qkv, SCALING, False, mask, terms=terms))
    for row in range(2):
        assert_close(out[row, :, mask[row]], expected[row, :, mask[row]])


# --------------------------------------------------------------------------------------------------------------------
# The native kernels

needs_kernels = pytest.mark.skipif(unavailable_reason() is not None, reason="No compiler for the native kernels.")


@needs_kernels
@BOTH
@pytest.mark.parametrize("kind", ["sink", "softcap", "bias", "all", "relative"])
@pytest.mark.parametrize("name", ["vq", "hedgehog"])
@pytest.mark.parametrize("length", [1, 40, 130, 300])
@pytest.mark.parametrize("window", [32, 64, 70])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_kernels_apply_terms_as_torch_does(causal, kind, name, length, window, padding):
    if causal and kind == "relative":
        pytest.skip("Disentangled attention is for encoders.")
    groups = 2 if kind in ("sink", "softcap") else 4
    terms = disentangled()[0] if kind == "relative" else terms_of(kind, causal)
    terms = terms.apply(lambda tensor: tensor.detach().float())
    options = {"window_size": window, "feature_map": name, "mix_init": 0.3, "sink_tokens": 2}
    module = build("window", causal, groups, terms.softcap, **options).float()
    module.mix_weight.data.normal_(generator=torch.Generator().manual_seed(4))
    qkv = [tensor.detach().float() for tensor in tensors(length, groups)]
    mask = None if padding is None else padding_mask([length, length - length // 3], length, padding)
    outs = []
    for backend in ("torch", "native"):
        with torch.no_grad(), use_backend(backend):
            outs.append(module(AttentionInputs(*qkv, SCALING, causal, mask, return_state=causal, terms=terms)))
    (expected, expected_state), (actual, state) = outs
    real = slice(None) if mask is None else mask
    comparing.assert_close(actual.transpose(1, 2)[real], expected.transpose(1, 2)[real], factor=2)
    for entry, tensor in (expected_state or {}).items():
        torch.testing.assert_close(state[entry], tensor, rtol=1e-4, atol=1e-5)


def test_kernels_say_what_of_terms_they_do_not_apply():
    qkv = [tensor.detach().float() for tensor in tensors(80)]
    for kind in ("sink", "softcap"):
        terms = terms_of(kind, True).apply(lambda tensor: tensor.detach().float())
        module = build("window", True, cap=terms.softcap, window_size=32, mix_init=0.0).float()
        with use_backend("native"), pytest.raises(NotImplementedError, match="gradients of a model with terms"):
            module(AttentionInputs(*qkv, SCALING, True, terms=terms))
        with torch.no_grad():
            _, state = module(AttentionInputs(*qkv, SCALING, True, return_state=True, terms=terms))
            token = AttentionInputs(*(x[:, :, :1] for x in qkv), SCALING, True, state=state, terms=terms)
            with (
                use_backend("native"),
                pytest.raises(NotImplementedError, match="decoding steps of a model with terms"),
            ):
                module(token)


# --------------------------------------------------------------------------------------------------------------------
# ALiBi

#: BLOOM's steepest head and its flattest one, and two between them.
SLOPES = (0.84, 0.25, 0.0625, 2.0**-8)


def alibi(dtype=torch.float32):
    return Terms(slope=torch.tensor(SLOPES, dtype=dtype))


def slope_bias(queries, keys):
    """`-m (i - j)` `[H, L, S]`, where the queries are the last of the keys."""
    places = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return -torch.tensor(SLOPES, dtype=torch.float64)[:, None, None] * places


def features_of(module, query, key):
    """Features in float64 with their scales multiplied in."""
    maps = module.feature_map
    features = [part(x.double(), SCALING) for part, x in ((maps.query, query), (maps.key, key))]
    return [f.values if f.log_scale is None else f.values * f.log_scale.exp().unsqueeze(-1) for f in features]


@pytest.mark.parametrize("name", ["vq", "hedgehog"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_9000_tokens_decay_without_loss(name, dtype):
    """In one pass, in pieces and token by token, against explicit weights in float64 of some queries.

    No exponent in the state grows with the number of tokens.
    """
    length, window = 9000, 64
    options = {"window_size": window, "feature_map": name, "mix_init": 0.0, "saturation": None, "sink_tokens": 2}
    module = build("window", True, **options).float()
    qkv = [tensor.detach().to(dtype) for tensor in tensors(length, batch=1)]
    with torch.no_grad():
        whole, _ = module(AttentionInputs(*qkv, SCALING, True, terms=alibi()))
        parts, state = [], None
        for start, stop in ((0, 5000), (5000, 8990), *((token, token + 1) for token in range(8990, 9000))):
            piece = [x[:, :, start:stop] for x in qkv]
            out, state = module(AttentionInputs(*piece, SCALING, True, None, state, return_state=True, terms=alibi()))
            parts.append(out)
    pieces = torch.cat(parts, dim=2)
    assert float(state["log_scale"].abs().max()) < 100
    for start, stop in ((60, 70), (4995, 5005), (8980, 9000)):
        query, key, value = qkv[0][:, :, start:stop].double(), *(x[:, :, :stop].double() for x in qkv[1:])
        double = copy.deepcopy(module).double()
        expected = naive.windowed_attention(
            query,
            key,
            value,
            *features_of(double, query, key),
            naive.visible(None, 1, stop - start, stop, True),
            window=window,
            causal=True,
            scaling=SCALING,
            log_mix=double.log_mix,
            relative=name != "vq",
            sinks=2,
            bias=slope_bias(stop - start, stop),
        )
        for actual in (whole, pieces):
            comparing.assert_close(actual[:, :, start:stop], expected, dtype)


@pytest.mark.parametrize("attention", ["window", "scatterbrain", "elu", "hedgehog", "favor+"])
def test_padding_anywhere_in_a_prompt_in_pieces_decays_nothing(attention):
    """Padding before, inside and as a token of its own: its row is that of its real tokens alone."""
    options = {"window_size": WINDOW} if attention in ("window", "scatterbrain") else {}
    if attention == "window":
        options |= {"mix_init": 0.3, "saturation": None, "sink_tokens": 2}
    module, qkv, mask = build(attention, True, **options), tensors(70), torch.ones(2, 70, dtype=torch.bool)
    mask[1, [*range(9), *range(30, 36), 60, 61]] = False
    terms, parts, state = alibi(torch.float64), [], None
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 58), (58, 60), (60, 61), (61, 62), (62, 63), (63, 70)):
            piece = [x[:, :, start:stop] for x in qkv]
            inputs = AttentionInputs(*piece, SCALING, True, mask[:, start:stop], state, return_state=True, terms=terms)
            out, state = module(inputs)
            parts.append(out)
        out = torch.cat(parts, dim=2)
        for row in range(2):
            single = [x[row : row + 1, :, mask[row]] for x in qkv]
            expected, _ = module(AttentionInputs(*single, SCALING, True, terms=terms))
            assert_close(out[row : row + 1, :, mask[row]], expected)


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor+", "taylor", "vq"])
def test_kernelized_sums_that_decay_are_the_definition_with_all_gradients(name):
    length, module = 90, build(name, True)
    terms = Terms(slope=torch.tensor(SLOPES, dtype=torch.float64, requires_grad=True))
    query, key, value = qkv = tensors(length)
    positions = torch.arange(length)
    maps = module.feature_map.functions(SCALING)
    features = [part(x) for part, x in zip(maps[:2], (query, key), strict=True)]
    queries, keys = features[0].values, features[1].values
    if features[1].log_scale is not None:
        keys = keys * features[1].log_scale.exp().unsqueeze(-1)
    weights = queries @ keys.transpose(-1, -2) * (-terms.slope[:, None, None] * (positions[:, None] - positions)).exp()
    weights = weights.tril()
    expected = weights / weights.sum(dim=-1, keepdim=True) @ value
    inputs = AttentionInputs(*qkv, SCALING, True, terms=terms)
    out, _ = module(inputs)
    assert_close(out, expected)
    leaves = [*qkv, terms.slope]
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True)
    for actual, right in zip(torch.autograd.grad(out.square().sum(), leaves), expected_gradients, strict=True):
        assert_close(actual, right, factor=10)
    assert_close(module.attention_weights(inputs) @ value, expected)


def test_alibi_of_an_encoder_is_refused():
    module = build("window", False, window_size=WINDOW)
    with pytest.raises(NotImplementedError, match="ALiBi is for decoders"):
        module(AttentionInputs(*tensors(80), SCALING, False, terms=alibi(torch.float64)))
