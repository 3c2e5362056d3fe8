"""Gated linear attention in chunks against the recurrence, token by token, in float64."""

import pytest
import torch

from hf_linear_attn.ops import gated
from hf_linear_attn.ops.calls import GatedCall
from hf_linear_attn.ops.common import SIGNED_NORMALISER_EPS, Features
from tests.comparing import assert_close, assert_same_function, in_pieces
from tests.inputs import padding_mask, qkv
from tests.reference import naive

KINDS = ("head", "feature", "scaled", "signed")
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(gated, "HEAD_CHUNK", 8)
    monkeypatch.setattr(gated, "FEATURE_CHUNK", 8)
    monkeypatch.setattr(gated, "block_length", lambda *_: 24)


class Case:
    """Inputs, a feature map and gates in float64; `kind` says what decays, and whether keys carry a scale."""

    def __init__(self, kind, length, groups=2, mask=None, strength=1.0):
        self.kind, self.mask, self.strength = kind, mask, strength
        self.leaves = [tensor.double().requires_grad_() for tensor in qkv(length, groups=groups, value_dim=3)]
        generator = torch.Generator().manual_seed(3)
        width = 6 if kind == "feature" else 1
        self.gate = torch.randn(6, width, generator=generator, dtype=torch.float64).requires_grad_()
        self.leaves.append(self.gate)

    def phi(self, x):
        return x / 3 + 0.4 if self.kind == "signed" else x.square() + 0.1

    def log_decay(self, key):
        x = self.strength * key @ self.gate
        return -torch.sigmoid(x) if self.kind == "feature" else torch.nn.functional.logsigmoid(x)

    def log_write(self, key):
        return torch.nn.functional.logsigmoid(-self.strength * key @ self.gate).squeeze(-1)

    @property
    def writes(self):
        return self.kind in ("scaled", "signed")

    def keys(self, x):
        return gated.GatedKeys(self.phi(x), self.log_decay(x), self.log_write(x) if self.writes else None)

    def fast(self, pieces=None):
        def call(*tensors, mask, state):
            maps, signed = (lambda x: Features(self.phi(x)), self.keys), self.kind == "signed"
            per_feature = self.kind == "feature"
            return gated.gated_causal(GatedCall(*tensors, *maps, 6, signed, mask, state, per_feature=per_feature))

        return in_pieces(call, self.leaves[:3], self.mask, pieces or (self.leaves[0].shape[2],))

    def definition(self):
        q, k, v, _ = self.leaves
        k = k if self.mask is None else k.masked_fill(~self.mask[:, None, :, None], 0.0)
        write = self.log_write(k).exp() if self.writes else torch.ones_like(k[..., 0])
        decay = self.log_decay(k).exp().expand(*k.shape[:3], 6)
        guard = SIGNED_NORMALISER_EPS if self.kind == "signed" else 0.0
        return naive.gated_attention(self.phi(q), self.phi(k), v, decay, write, self.mask, guard)


def check(case):
    assert_same_function(case.fast()[0], case.definition(), case.leaves, case.mask, floor=1e-5)


@kinds
@pytest.mark.parametrize("length", [1, 2, 9, 23, 50])
def test_outputs_and_gradients_equal_the_recurrence(kind, length):
    check(Case(kind, length))


@kinds
@pytest.mark.parametrize("groups", [1, 4])
def test_grouped_heads(kind, groups):
    check(Case(kind, 19, groups=groups))


@kinds
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_neither_decays_nor_writes(kind, padding):
    mask = padding_mask([31, 12], 31, padding)
    check(Case(kind, 31, mask=mask))
    check(Case(kind, 31, mask=mask & (torch.arange(31) % 5 != 2)))


@kinds
def test_strong_and_weak_decays(kind):
    check(Case(kind, 40, strength=6.0))  # of one head from exp(-40) to 1, of one feature from exp(-1) to 1


@pytest.mark.parametrize("kind", ["head", "scaled"])
def test_no_decay_overflows_in_float32(kind):
    case = Case(kind, 60, strength=40.0)
    expected = case.definition()
    case.leaves = [tensor.detach().float().requires_grad_() for tensor in case.leaves]
    case.gate = case.leaves[3]
    out, _ = case.fast()
    assert_close(out, expected, factor=5)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out.sum(), case.leaves))


def test_the_strongest_decay_of_features_in_float32(monkeypatch):
    monkeypatch.undo()
    case = Case("feature", 200, strength=40.0)
    expected = case.definition()
    case.leaves = [tensor.detach().float().requires_grad_() for tensor in case.leaves]
    case.gate = case.leaves[3]
    out, _ = case.fast()
    assert_close(out, expected, factor=5)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out.sum(), case.leaves))


@kinds
@pytest.mark.parametrize("pieces", [(1,) * 37, (2, 0, 30, 5), (0, 36, 1)])
def test_split_and_resume(kind, pieces):
    case = Case(kind, 37, mask=padding_mask([37, 20], 37, "left"))
    (full, end), (parts, state) = case.fast(), case.fast(pieces)
    assert_close(parts, full, torch.float64)

    def total(state):
        return state["kv"] * (state["log_scale"].exp()[..., None, None] if "log_scale" in state else 1.0)

    assert_close(total(state), total(end), torch.float64)


@kinds
def test_padding_leaves_the_state_as_it_is(kind):
    mask = torch.zeros(2, 33, dtype=torch.bool)
    mask[:, [0, 3, *range(5, 20), 28]] = True
    padded = Case(kind, 33, mask=mask)
    single = Case(kind, 18)
    single.leaves[:3] = [
        x.transpose(1, 2)[mask].view(2, 18, -1, x.shape[-1]).transpose(1, 2) for x in padded.leaves[:3]
    ]
    (out, state), (expected, end) = padded.fast(), single.fast()
    assert_close(out.transpose(1, 2)[mask], expected.transpose(1, 2).flatten(0, 1), torch.float64)
    for name in end:
        assert_close(state[name], end[name], torch.float64)


@kinds
def test_nan_in_padding_and_rows_of_padding(kind):
    mask = torch.stack([torch.arange(20) < 13, torch.zeros(20, dtype=torch.bool)])
    case = Case(kind, 20, mask=mask)
    expected = case.fast()[0].transpose(1, 2)[mask]
    with torch.no_grad():
        for tensor in case.leaves[:3]:
            tensor.transpose(1, 2)[~mask] = float("nan")
    out, _ = case.fast()
    assert torch.equal(out.transpose(1, 2)[mask], expected)
    assert not bool(out[1].any())
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(out[0, :, :13].sum(), case.leaves))


@kinds
def test_gradcheck(kind):
    case = Case(kind, 10)
    leaves = [x.detach()[:1].requires_grad_() if x.dim() == 4 else x for x in case.leaves]

    def run(*tensors):
        case.leaves, case.gate = list(tensors), tensors[3]
        return case.fast()[0]

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@kinds
def test_no_tokens(kind):
    out, state = Case(kind, 0).fast()
    assert out.shape == (2, 4, 0, 3)
    assert state is None
