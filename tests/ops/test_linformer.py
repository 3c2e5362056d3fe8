"""Low-rank attention: projections, resampling, blocks, against the definitions in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import linformer as ops
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, relative_error, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.reference import naive

SCALING = 0.4


def projections(slots, length, heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    start = ops.segment_means(slots, length)
    return [start + 0.1 * torch.randn(heads, slots, length, generator=generator) for _ in range(2)]


def blocks(q, k, v, e, f, **kwargs):
    return ops.causal_blocks(AttentionInputs(q, k, v, SCALING, True, **kwargs), e, f)


@pytest.mark.parametrize(("slots", "length"), [(1, 1), (4, 12), (5, 12), (12, 12), (7, 3), (128, 100)])
def test_segment_means_average_equal_segments(slots, length):
    rows = ops.segment_means(slots, length)
    assert_close(rows.sum(dim=1), torch.ones(slots))
    assert_close(rows.sum(dim=0), torch.full((length,), slots / length))
    assert bool((rows >= 0).all())


def test_complete_segments_are_averaged():
    assert_close(ops.segment_means(3, 12), torch.eye(3).repeat_interleave(4, dim=1) / 4)


@given(slots=st.integers(1, 9), n=st.integers(1, 40), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_resampling_preserves_row_totals_at_any_length(slots, n, lengths):
    projection = torch.randn(2, slots, n, generator=torch.Generator().manual_seed(n))
    mask = padding_mask(lengths, max(lengths), "right")
    fitted = ops.columns(projection, max(lengths), mask, resample=True)
    assert fitted.shape == (len(lengths), 2, slots, max(lengths))
    expected = projection.sum(dim=-1).expand(len(lengths), -1, -1)
    assert float((fitted.sum(dim=-1) - expected).abs().max()) < 1e-4


def test_resampling_to_the_full_length_changes_nothing():
    projection = torch.randn(2, 5, 300)
    positions = torch.arange(300)[None]
    fitted = ops.resample_projection(projection, positions, torch.tensor([300]))
    assert relative_error(fitted[0], projection) < 1e-5
    assert torch.equal(ops.columns(projection, 300, None, resample=True)[0], projection)


def test_resampling_segment_means_gives_segment_means():
    fitted = ops.columns(ops.segment_means(4, 48)[None], 12, None, resample=True)
    assert_close(fitted[0, 0], ops.segment_means(4, 12))


def test_truncating_takes_the_first_columns():
    projection = torch.randn(1, 3, 20)
    assert torch.equal(ops.columns(projection, 8, None, resample=False)[0], projection[..., :8])
    fitted = ops.columns(projection, 8, padding_mask([8, 5], 8, "left"), resample=False)
    assert torch.equal(fitted[1, :, :, 3:], projection[..., :5])
    assert not bool(fitted[1, :, :, :3].any())


@pytest.mark.parametrize(("heads", "groups", "shared"), [(4, 4, True), (4, 2, True), (6, 2, False)])
def test_low_rank_attention_equals_the_definition(heads, groups, shared):
    q, k, v = qkv(37, heads=heads, groups=groups, value_dim=9)
    e, f = projections(5, 37, 1 if shared else groups)
    out = ops.low_rank_attention(q, e @ k, f @ v, SCALING)
    expected = naive.linformer_attention(*(x.double() for x in (q, k, v, e, f)), SCALING)
    assert_close(out, expected)


def test_low_rank_gradients_equal_those_of_the_definition():
    leaves = [*qkv(37), *projections(5, 37, 2)]

    def gradients(compute, inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(weighted_sum(compute(*inputs)), inputs)

    actual = gradients(lambda q, k, v, e, f: ops.low_rank_attention(q, e @ k, f @ v, SCALING), leaves)
    expected = gradients(lambda *x: naive.linformer_attention(*x, SCALING), [x.double() for x in leaves])
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


# --------------------------------------------------------------------------------------------------------------------
# Causal blocks


@pytest.mark.parametrize(("block", "slots"), [(1, 1), (4, 2), (7, 3), (64, 4)])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_blocks_equal_the_definition(length, block, slots):
    q, k, v = qkv(length, value_dim=9)
    e, f = projections(slots, block, 2)
    expected = naive.linformer_causal_attention(*(x.double() for x in (q, k, v, e, f)), SCALING)
    assert_close(blocks(q, k, v, e, f)[0], expected)


def test_no_tokens_give_no_outputs():
    q, k, v = qkv(0, value_dim=9)
    assert blocks(q, k, v, *projections(2, 4))[0].shape == (2, 4, 0, 9)


def test_block_gradients_equal_those_of_the_definition():
    leaves = [*qkv(30, heads=6, dim=5, value_dim=11), *projections(3, 7, 2)]

    def gradients(compute, inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(weighted_sum(compute(*inputs)), inputs)

    actual = gradients(lambda *x: blocks(*x)[0], leaves)
    expected = gradients(lambda *x: naive.linformer_causal_attention(*x, SCALING), [x.double() for x in leaves])
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


def test_block_gradcheck():
    inputs = [*qkv(7, batch=1, heads=2, groups=1, dim=2, value_dim=2), *projections(2, 3)]
    inputs = [x.double().requires_grad_() for x in inputs]
    mask = torch.tensor([[False, True, True, True, True, True, True]])
    assert torch.autograd.gradcheck(lambda *x: blocks(*x, mask=mask)[0], inputs)


@given(seed=st.integers(0, 99), length=st.integers(1, 30), block=st.integers(1, 6))
def test_a_masked_token_might_as_well_not_be_there(seed, length, block):
    q, k, v = qkv(length, batch=1, seed=seed)
    e, f = projections(1, block)
    mask = torch.rand(1, length, generator=torch.Generator().manual_seed(seed)) < 0.6
    expected_state = [x[:, :, mask[0]] for x in (q, k, v)]
    assert_close(blocks(q, k, v, e, f, mask=mask)[0][:, :, mask[0]], blocks(*expected_state, e, f)[0])


@given(splits=st.lists(st.integers(1, 20), min_size=1, max_size=6), block=st.integers(1, 9), seed=st.integers(0, 9))
def test_any_split_of_uneven_rows_equals_the_whole(splits, block, seed):
    length = sum(splits)
    inputs = qkv(length, batch=3, seed=seed)
    e, f = projections(min(2, block), block)
    mask = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    full, _ = blocks(*inputs, e, f, mask=mask)
    out, state = in_pieces(lambda *new, **more: blocks(*new, e, f, return_state=True, **more), inputs, mask, splits)
    shown = mask[:, None, :, None]
    assert_close(out.masked_fill(~shown, 0.0), full.masked_fill(~shown, 0.0))
    assert state["slot_count"].tolist() == [int(row.sum()) // block * min(2, block) for row in mask]
    assert state["open_count"].tolist() == [int(row.sum()) % block for row in mask]


def test_poison_in_padding_does_not_spread():
    q, k, v = qkv(20)
    e, f = projections(2, 4)
    mask = padding_mask([20, 11], 20, "left")
    clean, _ = blocks(q, k, v, e, f, mask=mask)
    k[1, :, :9] = v[1, :, :9] = float("nan")
    out, state = blocks(q, k, v, e, f, mask=mask, return_state=True)
    assert torch.equal(out, clean)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def test_a_fully_padded_row_gives_zeros():
    out, _ = blocks(*qkv(20), *projections(2, 4), mask=padding_mask([20, 0], 20, "left"))
    assert not bool(out[1].any())
