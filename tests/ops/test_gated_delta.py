"""The gated delta rule in chunks against the recurrence, token by token, in float64."""

import pytest
import torch
from torch.nn import functional

from hf_linear_attn.ops import gated_delta
from hf_linear_attn.ops.calls import GatedCall
from hf_linear_attn.ops.common import Features
from tests.comparing import assert_close, assert_same_function, in_pieces
from tests.inputs import padding_mask, qkv
from tests.reference import naive

strengths = pytest.mark.parametrize("strength", [0.0, 1.0, 6.0], ids=["even", "varied", "extreme"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(gated_delta, "CHUNK", 8)
    monkeypatch.setattr(gated_delta, "block_length", lambda *_: 20)


class Case:
    """Inputs and gates in float64; strength: how far decays and rates vary between 0 and 1."""

    def __init__(self, length, strength=1.0, groups=2, mask=None, signed=False):
        self.mask, self.strength, self.signed = mask, strength, signed
        self.leaves = [tensor.double().requires_grad_() for tensor in qkv(length, groups=groups, value_dim=3)]
        gate = torch.randn(6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.leaves.append(gate.requires_grad_())

    def phi(self, x):
        return functional.normalize(x if self.signed else x.square() + 0.1, dim=-1)

    def gates(self, key):
        """Log decay, and a rate that is not below 1e-4: a state that holds nothing at all has no mean in float32."""
        decay, rate = (self.strength * key @ self.leaves[3]).unbind(-1)
        return functional.logsigmoid(decay), 1e-4 + (1 - 1e-4) * torch.sigmoid(rate)

    def keys(self, x):
        return gated_delta.DeltaKeys(self.phi(x), *self.gates(x))

    def fast(self, pieces=None):
        def call(*tensors, mask, state):
            maps = lambda x: Features(self.phi(x)), self.keys
            return gated_delta.delta_causal(GatedCall(*tensors, *maps, 6, mask=mask, state=state))

        return in_pieces(call, self.leaves[:3], self.mask, pieces or (self.leaves[0].shape[2],))

    def definition(self):
        q, k, v, _ = self.leaves
        k = k if self.mask is None else k.masked_fill(~self.mask[:, None, :, None], 0.0)
        log_decay, rate = self.gates(k)
        guard = gated_delta.NORMALISER_EPS
        return naive.gated_delta_attention(self.phi(q), self.phi(k), v, log_decay.exp(), rate, self.mask, guard)


def check(case):
    options = {"factor": 10, "gradient_factor": 100, "floor": 1e-5}
    assert_same_function(case.fast()[0], case.definition(), case.leaves, case.mask, **options)


@strengths
@pytest.mark.parametrize("length", [1, 2, 9, 23, 50])
def test_outputs_and_gradients_equal_the_recurrence(length, strength):
    check(Case(length, strength))


def test_features_of_either_sign_meet_the_guard():
    case = Case(40, signed=True)
    check(case)
    q, k, _, _ = case.leaves
    totals = gated_delta._chunk(
        case.phi(q).unflatten(1, (2, 2)),
        case.keys(k),
        torch.ones(2, 2, 40, 1).double(),
        torch.zeros(2, 2, 6, 1).double(),
    )[0]
    assert bool((totals < 0).any())


@pytest.mark.parametrize("groups", [1, 4])
def test_grouped_heads(groups):
    check(Case(19, groups=groups))


@strengths
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_neither_decays_nor_writes(padding, strength):
    mask = padding_mask([31, 12], 31, padding)
    check(Case(31, strength, mask=mask))
    check(Case(31, strength, mask=mask & (torch.arange(31) % 5 != 2)))


@pytest.mark.parametrize("pieces", [(1,) * 37, (2, 0, 30, 5), (0, 36, 1)])
def test_split_and_resume(pieces):
    case = Case(37, mask=padding_mask([37, 20], 37, "left"))
    (full, end), (parts, state) = case.fast(), case.fast(pieces)
    assert_close(parts, full, torch.float64)
    for name, tensor in end.items():
        assert_close(state[name], tensor, torch.float64)


def test_padding_leaves_the_state_as_it_is():
    mask = torch.zeros(2, 33, dtype=torch.bool)
    mask[:, [0, 3, *range(5, 20), 28]] = True
    padded, single = Case(33, mask=mask), Case(18)
    single.leaves[:3] = [
        x.transpose(1, 2)[mask].view(2, 18, -1, x.shape[-1]).transpose(1, 2) for x in padded.leaves[:3]
    ]
    (out, state), (expected, end) = padded.fast(), single.fast()
    assert_close(out.transpose(1, 2)[mask], expected.transpose(1, 2).flatten(0, 1), torch.float64)
    for name in end:
        assert_close(state[name], end[name], torch.float64)


def test_nan_in_padding_and_rows_of_padding():
    mask = torch.stack([torch.arange(20) < 13, torch.zeros(20, dtype=torch.bool)])
    case = Case(20, mask=mask)
    expected = case.fast()[0].transpose(1, 2)[mask]
    with torch.no_grad():
        for tensor in case.leaves[:3]:
            tensor.transpose(1, 2)[~mask] = float("nan")
    out, _ = case.fast()
    assert torch.equal(out.transpose(1, 2)[mask], expected)
    assert not bool(out[1].any())
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out[0, :, :13].sum(), case.leaves))


def test_extreme_gates_in_float32():
    case = Case(60, strength=40.0)
    expected = case.definition()
    case.leaves = [tensor.detach().float().requires_grad_() for tensor in case.leaves]
    out, _ = case.fast()
    assert_close(out, expected, factor=20)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out.sum(), case.leaves))


def test_gradcheck():
    case = Case(10)
    leaves = [x.detach()[:1].requires_grad_() if x.dim() == 4 else x for x in case.leaves]

    def run(*tensors):
        case.leaves = list(tensors)
        return case.fast()[0]

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_no_tokens():
    out, state = Case(0).fast()
    assert out.shape == (2, 4, 0, 3)
    assert state is None
