"""Exact windows over feature maps, with and without a log scale: fast forms against the definition."""

import pytest
import torch

from hf_linear_attn.ops import windowed
from hf_linear_attn.ops.calls import WindowedCall
from hf_linear_attn.ops.common import Features
from tests.comparing import assert_close, assert_same_function
from tests.inputs import padding_mask, qkv
from tests.reference import naive
from tests.small import feature_map

pytestmark = pytest.mark.usefixtures("small_window_blocks")

WINDOW = 5
MAPS = ("hedgehog", "favor+", "vq")


def attend(causal, q, k, v, features, *, mask=None, state=None, **settings):
    """The output of the fast form, and the state of the causal one."""
    call = WindowedCall(q, k, v, *features, None, 0, causal, mask=mask, state=state, **settings)
    return windowed.windowed(call)


class Case:
    """One call in float64: leaves that need gradients, the fast form and the definition of it."""

    def __init__(self, name, length, causal, window=WINDOW, groups=2, value_dim=3, mask=None, size=1.0):
        self.causal, self.window, self.mask = causal, window, mask
        torch.manual_seed(0)
        self.map = feature_map(name, groups=groups).double()
        tensors = [size * t.double() for t in qkv(length, groups=groups, value_dim=value_dim)]
        mix = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.leaves = [t.requires_grad_() for t in (*tensors, mix)]
        self.learned = [parameter.requires_grad_() for parameter in self.map.parameters()]

    def settings(self):
        return {"window": self.window, "scaling": 0.4, "log_mix": self.leaves[3]}

    def features(self):
        return (lambda x: self.map.query(x, 0.4)), (lambda x: self.map.key(x, 0.4))

    def fast(self):
        return attend(self.causal, *self.leaves[:3], self.features(), mask=self.mask, **self.settings())[0]

    def definition(self):
        q, k, v, _ = self.leaves
        phi_q, phi_k = (unscaled(f(x)) for f, x in zip(self.features(), (q, k), strict=True))
        allowed = naive.visible(self.mask, 2, q.shape[2], k.shape[2], self.causal)
        relative = self.map.query(q, 0.4).log_scale is None
        settings = {**self.settings(), "relative": relative, "causal": self.causal}
        return naive.windowed_attention(q, k, v, phi_q, phi_k, allowed, **settings)

    def check(self):
        assert_same_function(self.fast(), self.definition(), self.leaves + self.learned, self.mask)


def unscaled(features: Features):
    return features.values if features.log_scale is None else features.values * features.log_scale.exp().unsqueeze(-1)


@pytest.mark.parametrize("length", [1, 2, 9, 31, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_outputs_and_gradients_equal_the_definition(name, causal, length):
    Case(name, length, causal).check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 13, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_any_window(name, causal, window):
    Case(name, 29, causal, window=window).check()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_grouped_heads(name, causal, groups):
    Case(name, 27, causal, groups=groups).check()


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_masks(name, causal, padding):
    Case(name, 30, causal, mask=padding_mask([30, 11], 30, padding)).check()


@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_share_one_stabiliser(causal):
    Case("favor+", 30, causal, size=4.0).check()


@pytest.mark.parametrize("causal", [False, True])
def test_padding_does_not_set_the_scale_of_far_keys(causal):
    """A zeroed key has the log scale 0, far above that of large keys: relative to it they would all underflow."""
    token, length = 20, 26
    q, k, v = qkv(length + 4)
    direction = torch.nn.functional.normalize(q[:1, :1, :1], dim=-1)
    q, k = 60 * (direction + 0.1 * q), 60 * (direction + 0.1 * k)
    k[:, :, token] = -240 * direction[:, :, 0]  # the key in the window is the last that the query would choose
    phi = feature_map("favor+")
    features = [lambda x: phi.query(x, 0.4), lambda x: phi.key(x, 0.4)]
    settings = {"window": 1, "scaling": 0.4, "log_mix": torch.zeros(4)}
    mask = padding_mask([length] * 2, length + 4, "right")

    def outputs(values, *, padded):
        real = slice(None) if padded else slice(length)
        tensors = (x[:, :, real] for x in (q, k, values))
        return attend(causal, *tensors, features, **settings, mask=mask if padded else None)[0][:, :, :length]

    value = v[:, :, token].repeat_interleave(2, dim=1)
    assert float((outputs(v, padded=False)[:, :, token] - value).abs().max()) > 0.1, "this row is of far keys"
    assert_close(outputs(v, padded=True), outputs(v, padded=False))
    for padded in (False, True):  # blocks are filled up with zeros in any case
        ones = outputs(torch.ones_like(v), padded=padded)
        assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
@torch.no_grad()
def test_a_mixture_for_each_row(name, causal):
    """Row i is as if its mixture were that of all rows."""
    length, case = 22, Case(name, 22, causal)
    mix = torch.randn(2, 4, length, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def outputs(log_mix):
        return attend(causal, *case.leaves[:3], case.features(), **{**case.settings(), "log_mix": log_mix})[0]

    out = outputs(mix)
    for i in range(length):
        assert_close(out[:, :, i], outputs(mix[:, :, i : i + 1])[:, :, i], torch.float64)


@pytest.mark.parametrize("name", MAPS)
def test_default_blocks(name, monkeypatch):
    monkeypatch.undo()
    Case(name, 150, False, window=64).check()
    Case(name, 150, True, window=64).check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_a_window_over_everything_is_exact_attention(name, causal):
    case = Case(name, 20, causal, window=20)
    q, k, v, _ = case.leaves
    exact = naive.softmax_attention(q, k, v, naive.visible(None, 2, 20, 20, causal), 0.4)
    assert_close(case.fast(), exact, torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_nan_in_padding_stays_there(name, causal):
    mask = padding_mask([24, 9], 24, "right")
    case = Case(name, 24, causal, mask=mask)
    expected = case.fast().transpose(1, 2)[mask]
    with torch.no_grad():
        for tensor in case.leaves[:3]:
            tensor.transpose(1, 2)[~mask] = float("nan")
    out = case.fast().transpose(1, 2)[mask]
    assert torch.equal(out, expected)
    for gradient in torch.autograd.grad(out.square().sum(), case.leaves + case.learned):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_rows_of_padding_are_zero(name, causal):
    case = Case(name, 13, causal, mask=torch.stack([torch.ones(13), torch.zeros(13)]).bool())
    assert float(case.fast()[1].detach().abs().max()) == 0.0


def states(name, pieces, masks, length=33):
    case = Case(name, length, True)
    q, k, v = (t.detach() for t in case.leaves[:3])
    outs, state, start = [], None, 0
    for size, mask in zip(pieces, masks, strict=True):
        part = (t[:, :, start : start + size] for t in (q, k, v))
        out, state = attend(True, *part, case.features(), mask=mask, state=state, **case.settings())
        outs.append(out)
        start += size
    return torch.cat(outs, dim=2), state


@pytest.mark.parametrize("pieces", [(1,) * 33, (2, 0, 17, 1, 13), (0, 32, 1)])
@pytest.mark.parametrize("name", MAPS)
def test_split_and_resume(name, pieces):
    full, state = states(name, (33,), (None,))
    parts, resumed = states(name, pieces, [None] * len(pieces))
    assert_close(parts, full, torch.float64)
    for key, tensor in state.items():
        if tensor.is_floating_point():
            assert_close(resumed[key], tensor, torch.float64)


@pytest.mark.parametrize("name", MAPS)
def test_padding_anywhere_leaves_outputs_and_states_as_they_are(name):
    case = Case(name, 20, True)
    tensors = [t.detach()[:1] for t in case.leaves[:3]]
    single, state = attend(True, *tensors, case.features(), **case.settings())
    real = torch.zeros(1, 33, dtype=torch.bool)
    real[:, [0, 1, 2, 5, 7, *range(9, 20), 25, 26, 28, 30]] = True
    spread = []
    for tensor in tensors:
        wide = torch.full((1, tensor.shape[1], 33, tensor.shape[3]), float("nan"), dtype=torch.float64)
        wide.transpose(1, 2)[real] = tensor.transpose(1, 2)[0]
        spread.append(wide)
    outs, after = [], None
    for start, stop in ((0, 6), (6, 24), (24, 33)):
        part = [t[:, :, start:stop] for t in spread]
        mask = real[:, start:stop]
        out, after = attend(True, *part, case.features(), mask=mask, state=after, **case.settings())
        outs.append(out)
    assert_close(torch.cat(outs, dim=2).transpose(1, 2)[real], single.transpose(1, 2)[0], torch.float64)
    for key in state:
        shown = state["ring_mask"][:, None, :, None] if key in ("ring_key", "ring_value") else torch.tensor(True)
        assert_close(*(t[key].masked_fill(~shown, 0).double() for t in (after, state)), torch.float64)
    assert_close(after["kv"], state["kv"], torch.float64)


@pytest.mark.parametrize("name", MAPS)
def test_a_large_last_token_does_not_change_the_past(name):
    case = Case(name, 25, True)
    first = case.fast()
    with torch.no_grad():
        for tensor in case.leaves[:3]:
            tensor[:, :, -1] *= 20
    assert torch.equal(case.fast()[:, :, :-1], first[:, :, :-1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_gradcheck(name, causal):
    case = Case(name, 9, causal, window=3)
    leaves = [tensor[:1].detach().requires_grad_() for tensor in case.leaves[:3]]

    def run(q, k, v, mix):
        return attend(causal, q, k, v, case.features(), **{**case.settings(), "log_mix": mix})[0]

    assert torch.autograd.gradcheck(run, (*leaves, case.leaves[3]), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_half_precision(name, causal, dtype):
    case = Case(name, 30, causal, size=3.0)
    case.leaves[:3] = [tensor.detach().to(dtype) for tensor in case.leaves[:3]]
    low = case.fast()
    case.leaves[:3] = [tensor.double() for tensor in case.leaves[:3]]
    assert low.dtype == dtype
    assert_close(low, case.definition(), dtype)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_explicit_weights_give_the_same_output(name, causal, padding):
    case = Case(name, 26, causal, mask=padding_mask([26, 12], 26, padding))
    q, k, v, _ = case.leaves
    inside = windowed.inside_window(case.mask, q, k, WINDOW, causal)
    allowed = naive.visible(case.mask, 2, 26, 26, causal)
    call = WindowedCall(q, k, v, *case.features(), None, 0, causal, **case.settings())
    weights = windowed.dense_windowed_weights(call, inside, allowed)
    out = weights @ naive.repeat_heads(v, 4)
    assert_close(*(t.transpose(1, 2)[case.mask] for t in (out, case.fast())), torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens(causal):
    assert Case("favor+", 0, causal).fast().shape == (2, 4, 0, 3)
