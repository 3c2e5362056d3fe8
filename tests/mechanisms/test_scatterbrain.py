"""Scatterbrain against its definition."""

import copy

import pytest
import torch

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.scatterbrain import ScatterbrainAttention, ScatterbrainOptions
from hf_linear_attn.ops import windowed
from tests.comparing import assert_close, assert_same_function, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.mechanisms import checks
from tests.reference import naive

both = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


pytestmark = pytest.mark.usefixtures("small_window_blocks")


def module(groups=2, value_dim=6, **options):
    chosen = {"window_size": 4, "feature_map_options": {"num_features": 24}, **options}
    shape = AttentionShape(4, groups, 6, value_dim, layer_index=1, max_length=64)
    return ScatterbrainAttention(shape, ScatterbrainOptions(**chosen)).double()


def doubles(length, **kwargs):
    return [tensor.double().requires_grad_() for tensor in qkv(length, **kwargs)]


def run(layer, tensors, causal, mask=None, **kwargs):
    return layer(AttentionInputs(*tensors, scaling=0.4, causal=causal, mask=mask, **kwargs))


def test_the_seed_is_that_of_the_feature_map_too():
    first, again, other = (module(seed=seed).state_dict() for seed in (3, 3, 4))
    assert first.keys() == {"feature_map.weight"}
    for name, drawn in first.items():
        assert torch.equal(again[name], drawn)
        assert not torch.equal(other[name], drawn)
    own = module(seed=3, feature_map_options={"num_features": 24, "seed": 4})
    assert torch.equal(own.feature_map.weight, other["feature_map.weight"])


def definition(layer, tensors, causal, mask=None, carried=None):
    """`carried`: a copy of the layer, and how many of the first keys have its features."""
    q, k, v = tensors
    allowed = naive.visible(mask, q.shape[0], q.shape[2], k.shape[2], causal)
    features = [project(x, 0.4) for project, x in ((layer.feature_map.query, q), (layer.feature_map.key, k))]
    phi = [f.values if f.log_scale is None else f.values * f.log_scale.exp().unsqueeze(-1) for f in features]
    if carried is not None:
        before, count = carried
        of_carried = before.feature_map.key(k[:, :, :count], 0.4).values.detach()
        phi[1] = torch.cat([of_carried, phi[1][:, :, count:]], dim=2)
    position = torch.arange(k.shape[2])
    band = (position[-q.shape[2] :, None] - position).abs() < layer.options.window_size
    return naive.scatterbrain_attention(q, k, v, *phi, allowed, band, 0.4)


@both
@pytest.mark.parametrize("length", [1, 2, 9, 23])
def test_outputs_and_gradients_equal_the_definition(length, causal):
    layer, tensors = module(value_dim=3), doubles(length, value_dim=3)
    out, expected = run(layer, tensors, causal)[0], definition(layer, tensors, causal)
    assert_same_function(out, expected, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[20, 30], [20, 1, 1, 1, 9, 8]], ids=str)
def test_gradients_after_a_state_that_was_read_without_one(sizes):
    """Differences of the definition, in which the keys that left the band before are constants, are the gradients."""
    layer, tensors = module(feature_map="hedgehog", feature_map_options={}), qkv(sum(sizes))
    tensors, state, outputs, start = [tensor.double() for tensor in tensors], None, [], 0
    for size in sizes:
        with torch.set_grad_enabled(start > 0):
            parts = [tensor[:, :, start : start + size] for tensor in tensors]
            out, state = run(layer, parts, True, state=state, return_state=True)
        outputs.append(out)
        start += size
    out, parameters, before = torch.cat(outputs[1:], dim=2), list(layer.parameters()), copy.deepcopy(layer)

    def loss():
        whole = definition(layer, tensors, True, carried=(before, sizes[0] - layer.options.window_size))
        return weighted_sum(whole[:, :, sizes[0] :])

    checks.check_differences(loss, parameters, torch.autograd.grad(weighted_sum(out), parameters))


@both
@pytest.mark.parametrize("groups", [1, 4])
def test_grouped_heads(groups, causal):
    layer, tensors = module(groups), doubles(17, groups=groups)
    assert_close(run(layer, tensors, causal)[0], definition(layer, tensors, causal), torch.float64)


@both
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_masks_and_nan_in_padding(padding_side, causal):
    mask = padding_mask([21, 8], 21, padding_side)
    layer, tensors = module(), doubles(21)
    expected = definition(layer, tensors, causal, mask).transpose(1, 2)[mask]
    with torch.no_grad():
        for tensor in tensors:
            tensor.transpose(1, 2)[~mask] = float("nan")
    out = run(layer, tensors, causal, mask)[0].transpose(1, 2)[mask]
    assert_close(out, expected, torch.float64)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out.square().sum(), tensors))


@both
@pytest.mark.parametrize("name", ["taylor", "hedgehog"])
def test_a_map_without_a_log_scale_is_an_absolute_estimate(name, causal):
    layer, tensors = module(feature_map=name, feature_map_options={}), doubles(14)
    assert_close(run(layer, tensors, causal)[0], definition(layer, tensors, causal), torch.float64)


@both
def test_with_everything_in_the_band_it_is_exact_attention(causal):
    q, k, v = doubles(20)
    exact = naive.softmax_attention(q, k, v, naive.visible(None, 2, 20, 20, causal), 0.4)
    assert_close(run(module(window_size=20), (q, k, v), causal)[0], exact, torch.float64)


@pytest.mark.slow
@both
def test_the_band_lowers_the_error_of_the_estimate(causal):
    tensors = [tensor.detach() for tensor in doubles(60)]
    exact = naive.softmax_attention(*tensors, naive.visible(None, 2, 60, 60, causal), 0.4)

    def error(**options):
        draws = [{"feature_map_options": {"num_features": 32, "seed": seed}, **options} for seed in range(6)]
        return sum(float((run(module(**draw), tensors, causal)[0] - exact).norm()) for draw in draws)

    assert error(window_size=1) > error(window_size=9) > error(window_size=30)


def test_a_token_is_one_step(monkeypatch):
    """It costs a fifteenth of the form for whole sequences."""
    layer, tensors = module(), [t.detach() for t in doubles(9)]
    whole = run(layer, tensors, True)[0]
    _, state = run(layer, [t[:, :, :-1] for t in tensors], True, return_state=True)
    monkeypatch.delattr(windowed, "windowed_causal")
    assert_close(run(layer, [t[:, :, -1:] for t in tensors], True, state=state)[0], whole[:, :, -1:], torch.float64)


@pytest.mark.parametrize("pieces", [(1,) * 29, (2, 0, 17, 1, 9), (0, 28, 1)])
def test_split_and_resume(pieces):
    layer, tensors = module(), [t.detach() for t in doubles(29)]
    whole, end = run(layer, tensors, True, return_state=True)
    out, state = in_pieces(
        lambda *parts, **more: run(layer, parts, True, return_state=True, **more), tensors, None, pieces
    )
    assert_close(out, whole, torch.float64)
    for name, tensor in end.items():
        assert_close(state[name].double(), tensor.double(), torch.float64)


def test_padding_anywhere_leaves_outputs_and_states_as_they_are():
    layer, tensors = module(), [t.detach()[:1] for t in doubles(18)]
    single, state = run(layer, tensors, True, return_state=True)
    real = torch.zeros(1, 30, dtype=torch.bool)
    real[:, [0, 1, 5, 7, *range(9, 20), 25, 26, 28]] = True
    spread = [torch.full((1, t.shape[1], 30, t.shape[3]), 7.0, dtype=torch.float64) for t in tensors]
    for wide, tensor in zip(spread, tensors, strict=True):
        wide.transpose(1, 2)[real] = tensor.transpose(1, 2)[0]
    outs, after = [], None
    for start, stop in ((0, 8), (8, 24), (24, 30)):
        mask = real[:, start:stop]
        out, after = run(layer, [t[:, :, start:stop] for t in spread], True, mask, state=after, return_state=True)
        outs.append(out)
    assert_close(torch.cat(outs, dim=2).transpose(1, 2)[real], single.transpose(1, 2)[0], torch.float64)
    for name in ("kv", "k_sum", "log_scale"):
        assert_close(after[name].double(), state[name].double(), torch.float64)


def test_a_large_last_token_does_not_change_the_past():
    layer, tensors = module(), [t.detach() for t in doubles(25)]
    first = run(layer, tensors, True)[0]
    for tensor in tensors:
        tensor[:, :, -1] *= 20
    assert torch.equal(run(layer, tensors, True)[0][:, :, :-1], first[:, :, :-1])


@both
def test_gradcheck(causal):
    layer, tensors = module(), [t[:1].detach().requires_grad_() for t in doubles(8)]
    assert torch.autograd.gradcheck(lambda *x: run(layer, x, causal)[0], tensors, fast_mode=True)


@both
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_explicit_weights_give_the_same_output(padding_side, causal):
    layer, (q, k, v), mask = module(), doubles(19), padding_mask([19, 7], 19, padding_side)
    weights = layer.attention_weights(AttentionInputs(q, k, v, scaling=0.4, causal=causal, mask=mask))
    out = run(layer, (q, k, v), causal, mask)[0]
    assert_close(*(x.transpose(1, 2)[mask] for x in (weights @ naive.repeat_heads(v, 4), out)), torch.float64)


@both
def test_rows_of_padding_are_zero(causal):
    mask = torch.stack([torch.ones(9), torch.zeros(9)]).bool()
    assert not bool(run(module(), doubles(9), causal, mask)[0][1].any())


@both
def test_half_precision(causal):
    layer, tensors = module().half(), [t.detach().half() for t in doubles(25)]
    out = run(layer, tensors, causal)[0]
    assert out.dtype == torch.float16
    assert_close(out, run(layer.double(), [t.double() for t in tensors], causal)[0], torch.float16)


def test_state_bytes():
    layer = module().float()
    _, state = layer(AttentionInputs(*(x[:1] for x in qkv(30)), scaling=0.4, causal=True, return_state=True))
    assert layer.state_bytes(30) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 0}, "window_size must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"feature_map": "favour+"}, r"Did you mean 'favor"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ScatterbrainOptions(**options)


def test_maps_with_negative_weights_are_refused():
    with pytest.raises(ValueError, match="A window cannot use 'favor' with these options"):
        module(feature_map="favor")


def test_a_state_of_a_bidirectional_layer_is_refused():
    with pytest.raises(ValueError, match="no state"):
        run(module(), doubles(5), False, return_state=True)
