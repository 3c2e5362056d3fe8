"""Efficient attention: a normaliser for every feature, in one pass, in pieces and token by token."""

import pytest
import torch

from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import efficient as ops
from tests.comparing import assert_close
from tests.inputs import qkv
from tests.mechanisms import checks
from tests.reference import naive
from tests.reference.naive import efficient_attention

DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


def build(causal, *sizes, **options):
    return checks.build("efficient", causal, *sizes, **options)


def definition(module, q, k, v, causal):
    allowed = naive.visible(None, q.shape[0], q.shape[2], k.shape[2], causal)
    scale = {"raw": 1.0, "split": 0.4**0.5, "matched": (0.4 * q.shape[3]) ** 0.5}[module.options.scale]
    return efficient_attention(q, k, v, allowed, scale)


@DIRECTIONS
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 127, 129, 300])
def test_equals_the_definition(length, causal):
    checks.check_output(build(causal, 4, 2, 5, 9), definition, length, dim=5, value_dim=9)


@DIRECTIONS
@pytest.mark.parametrize("scale", ["raw", "split", "matched"])
def test_scales(scale, causal):
    checks.check_output(build(causal, scale=scale), definition, 33)


@DIRECTIONS
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding(causal, padding_side):
    checks.check_padding(build(causal), definition, padding_side)


@DIRECTIONS
def test_poisoned_padding_reaches_no_gradient(causal):
    checks.check_poisoned_gradients(build(causal))


@DIRECTIONS
@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), checks.SHAPES)
def test_gradients(heads, groups, dim, value_dim, causal):
    sizes = {"heads": heads, "groups": groups, "dim": dim, "value_dim": value_dim}
    checks.check_gradients(build(causal, *sizes.values()), definition, 131, **sizes)


@DIRECTIONS
def test_gradcheck(causal):
    checks.check_gradcheck(build(causal, 2, 1, 3, 2), 10, heads=2, groups=1, dim=3, value_dim=2)


@pytest.mark.parametrize("sizes", [[1] * 30, [7, 13, 120], [139, 1], [0, 20], [128, 128, 3]])
def test_split_and_resume(sizes):
    module = build(True)
    state = checks.check_pieces(module, sizes)
    assert sum(tensor[0].nbytes for tensor in state.values()) == module.state_bytes()


def test_padding_leaves_the_state_unchanged():
    checks.check_padding_leaves_the_state_unchanged(build(True))


@pytest.mark.parametrize("at", [1, 6, 127, 128, 133])
def test_no_look_ahead(at):
    checks.check_no_look_ahead(build(True), at=at)


@DIRECTIONS
def test_a_row_of_padding_is_zero(causal):
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0] = True
    out, _ = checks.run(build(causal), *qkv(9), mask=mask)
    assert float(out[1].abs().max()) == 0.0


@pytest.mark.parametrize("size", [100.0, 1e4])
@DIRECTIONS
def test_nothing_overflows(causal, size):
    q, k, v = qkv(260)
    k = k * size * torch.linspace(0, 1, 260)[:, None]  # the running maximum grows all the way
    out, _ = checks.run(build(causal), q, k, v)
    expected = definition(build(causal), q.double(), k.double(), v.double(), causal)
    assert_close(out, expected, factor=5)


def test_decoding_with_growing_keys_equals_the_parallel_form():
    q, k, v = qkv(60)
    k = k * torch.logspace(-1, 3, 60)[:, None]
    module, state, steps = build(True), None, []
    full, _ = checks.run(module, q, k, v)
    for t in range(60):
        now = slice(t, t + 1)
        out, state = checks.run(module, q[:, :, now], k[:, :, now], v[:, :, now], state=state)
        steps.append(out)
    assert_close(torch.cat(steps, dim=2), full)


@DIRECTIONS
def test_weights(causal):
    checks.check_weights(build(causal))


def test_weights_in_blocks_of_rows(monkeypatch):
    inputs = AttentionInputs(*qkv(23), scaling=0.4, causal=True)
    full = build(True).attention_weights(inputs)
    monkeypatch.setattr(ops, "DENSE_ELEMENTS", 1)
    assert_close(build(True).attention_weights(inputs), full)


def test_packed_documents_equal_the_documents():
    q, k, v = qkv(30, batch=1)
    document = torch.arange(30) >= 11
    together = (document[:, None] == document[None, :]).tril()[None, None]
    out = build(True).dense_forward(AttentionInputs(q, k, v, scaling=0.4, causal=True, mask=together))
    for part in (document, ~document):
        assert_close(out[:, :, part], checks.run(build(True), *(x[:, :, part] for x in (q, k, v)))[0])


@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half(causal, dtype):
    checks.check_half(build(causal), definition, dtype)


def test_errors():
    with pytest.raises(ValueError, match="scale must be one of 'raw', 'split', 'matched', got 'big'"):
        build(True, scale="big")
    with pytest.raises(ValueError, match="has no state"):
        build(False)(AttentionInputs(*qkv(3), scaling=1.0, causal=False, return_state=True))
