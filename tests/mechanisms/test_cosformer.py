"""cosFormer: positions of real tokens, in one pass, in blocks, in pieces, and under padding."""

import copy
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck

import hf_linear_attn as hla
from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, weighted_sum
from tests.inputs import padded_batch, padding_mask, qkv, token_ids
from tests.reference import naive
from tests.reference.naive import cosformer_attention
from tests.small import patched
from tests.tiny_models import GPT2

SCALING = 0.4
M = 400
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


def build(heads=4, groups=2, dim=6, value_dim=6, causal=True, limit=None, **options) -> KernelizedAttention:
    entry = ATTENTIONS.get("cosformer")
    shape = AttentionShape(heads, groups, dim, value_dim, max_length=limit, causal=causal)
    return entry.factory(shape, build_options(entry, {"max_length": M, **options}))


def run(module, q, k, v, *, causal, **kwargs):
    return module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, return_state=causal, **kwargs))


def definition(q, k, v, *, causal, mask=None, epsilon=0.01):
    """Row by row without its padding, in float64."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for row in range(q.shape[0]):
        real = torch.ones(q.shape[2], dtype=torch.bool) if mask is None else mask[row]
        inputs = [x[row : row + 1, :, real].double() for x in (q, k, v)]
        allowed = naive.visible(None, 1, int(real.sum()), int(real.sum()), causal)
        out[row, :, real] = cosformer_attention(*inputs, allowed, max_length=M, epsilon=epsilon)[0]
    return out


@DIRECTIONS
@pytest.mark.parametrize("length", [0, 1, 2, 127, 129, 300, 400])
@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_equals_the_definition(length, causal, epsilon):
    inputs = qkv(length, dim=7, value_dim=9)
    out, _ = run(build(dim=7, value_dim=9, epsilon=epsilon), *inputs, causal=causal)
    assert_close(out, definition(*inputs, causal=causal, epsilon=epsilon))


@DIRECTIONS
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_blocks_and_padding(causal, padding_side, small_blocks):
    inputs, mask = qkv(131, batch=3), padding_mask([131, 40, 77], 131, padding_side)
    out, _ = run(build(), *inputs, causal=causal, mask=mask)
    real = mask[:, None, :, None].expand(out.shape)
    assert_close(out[real], definition(*inputs, causal=causal, mask=mask)[real])


@DIRECTIONS
@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), [(1, 1, 2, 1), (6, 2, 5, 11), (3, 1, 7, 3)])
def test_gradients_equal_those_of_the_definition(heads, groups, dim, value_dim, causal):
    inputs = qkv(131, heads=heads, groups=groups, dim=dim, value_dim=value_dim)
    module = build(heads, groups, dim, value_dim)

    def gradients(compute, leaves):
        out = compute(*leaves)
        return torch.autograd.grad(weighted_sum(out), leaves)

    fast = gradients(lambda *x: run(module, *x, causal=causal)[0], [x.clone().requires_grad_() for x in inputs])
    slow = gradients(lambda *x: definition(*x, causal=causal), [x.double().requires_grad_() for x in inputs])
    for computed, reference in zip(fast, slow, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


@DIRECTIONS
def test_gradcheck(causal):
    inputs = [x.double().requires_grad_() for x in qkv(5, heads=2, groups=1, dim=3, value_dim=2)]
    mask = padding_mask([5, 3], 5, "left")
    module = build(2, 1, 3, 2)
    assert gradcheck(lambda *x: run(module, *x, causal=causal, mask=mask)[0], inputs)


@pytest.mark.parametrize("sizes", [[1] * 20, [7, 13], [19, 1], [0, 20]])
def test_split_and_resume_with_left_padding(sizes):
    inputs, mask, module = qkv(20), padding_mask([20, 6], 20, "left"), build()
    full, after = run(module, *inputs, causal=True, mask=mask)
    out, state = in_pieces(partial(run, module, causal=True), inputs, mask, sizes)
    assert_close(out, full)
    assert state["count"].tolist() == [20, 6]
    assert set(state) == set(after) == {"kv", "k_sum", "count"}
    assert sum(tensor[0].nbytes for tensor in state.values()) == module.state_bytes()


def test_padding_changes_no_state():
    inputs, module = qkv(9, batch=1), build()
    _, single = run(module, *inputs, causal=True)
    for before, after in ((3, 0), (0, 3)):
        padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=float("nan")) for x in inputs]
        mask = torch.nn.functional.pad(torch.ones(1, 9, dtype=torch.bool), (before, after))
        out, state = run(module, *padded, causal=True, mask=mask)
        assert bool(torch.isfinite(out[:, :, mask[0]]).all())
        for name, tensor in single.items():
            assert_close(state[name], tensor)


@DIRECTIONS
def test_weights_times_values_are_the_output(causal):
    q, k, v = qkv(40)
    mask, module = padding_mask([40, 23], 40, "left"), build()
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))
    out, _ = run(module, q, k, v, causal=causal, mask=mask)
    assert_close(weights @ v.repeat_interleave(2, dim=1), out)
    assert float(weights.min()) >= 0
    assert_close(weights.sum(-1)[mask[:, None].expand(-1, 4, -1)], torch.ones(4 * 63))


def test_packed_documents_equal_the_documents():
    q, k, v = qkv(30, batch=1)
    document = torch.arange(30) >= 11
    together = (document[:, None] == document[None, :]).tril()[None, None]
    out = build().dense_forward(AttentionInputs(q, k, v, scaling=SCALING, causal=True, mask=together))
    for part in (document, ~document):
        single, _ = run(build(), *(x[:, :, part] for x in (q, k, v)), causal=True)
        assert_close(out[:, :, part], single)


def test_a_huge_last_token_changes_no_earlier_one():
    q, k, v = qkv(33)
    out, _ = run(build(), q, k, v, causal=True)
    q[:, :, -1] *= 20
    k[:, :, -1] *= 20
    v[:, :, -1] *= 20
    assert torch.equal(run(build(), q, k, v, causal=True)[0][:, :, :-1], out[:, :, :-1])


@DIRECTIONS
def test_a_row_of_padding_is_zero(causal):
    mask, inputs = padding_mask([8, 0], 8, "right"), qkv(8)
    for x in inputs[1:]:
        x[1] = float("nan")
    out, _ = run(build(), *inputs, causal=causal, mask=mask)
    assert float(out[1].abs().max()) == 0.0


@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_inputs(causal, dtype):
    inputs = [x.to(dtype) for x in qkv(150)]
    out, _ = run(build(), *inputs, causal=causal)
    assert out.dtype == dtype
    assert_close(out, definition(*inputs, causal=causal), dtype, factor=0.3)


def test_the_scale_of_the_model_cancels():
    inputs = qkv(12)
    first, _ = build(epsilon=0.0)(AttentionInputs(*inputs, scaling=0.1, causal=True))
    assert_close(build(epsilon=0.0)(AttentionInputs(*inputs, scaling=3.0, causal=True))[0], first)


def test_a_query_without_a_shared_feature_sees_the_average():
    q, k, v = (x[:1, :1] for x in qkv(3, heads=1, groups=1))
    out, _ = run(build(1, 1, max_length=100_000), -q.abs(), -k.abs(), v, causal=True)
    assert_close(out[:, :, -1], v.mean(dim=2), factor=10)
    assert float(run(build(1, 1, epsilon=0.0), -q.abs(), -k.abs(), v, causal=True)[0].abs().max()) == 0.0


# --------------------------------------------------------------------------------------------------------------------
# Lengths and errors


def test_features_without_positions_begin_at_the_first():
    phi, x = build().feature_map, qkv(7, batch=3)[0]
    positions = torch.arange(7.0).unsqueeze(0)
    for first in (0, 1):
        features = phi.fused(SCALING, (positions + first, positions))[0].features(x)
        assert torch.equal(phi.query(x, SCALING).values, features.values) is (first == 0)


def test_one_token_is_a_possible_limit():
    q, k, v = qkv(1)
    assert_close(run(build(max_length=1), q, k, v, causal=True)[0], v.repeat_interleave(2, dim=1))


def test_too_long_an_input_raises():
    module = build(max_length=10)
    with pytest.raises(ValueError, match=r"11 tokens.*max_length=10.*max_length=11 or more"):
        run(module, *qkv(11), causal=True)
    _, state = run(module, *qkv(9), causal=True)
    _, state = run(module, *qkv(1), causal=True, state=state)
    with pytest.raises(ValueError, match="11 tokens"):
        run(module, *qkv(1), causal=True, state=state)
    with pytest.raises(ValueError, match="12 tokens"):
        module.attention_weights(AttentionInputs(*qkv(12), scaling=SCALING, causal=False))


def test_padding_does_not_count():
    module, inputs = build(max_length=10), qkv(14)
    out, _ = run(module, *inputs, causal=False, mask=padding_mask([10, 4], 14, "left"))
    assert bool(torch.isfinite(out).all())
    with pytest.raises(ValueError, match="11 tokens"):
        run(module, *inputs, causal=False, mask=padding_mask([11, 4], 14, "left"))


def test_max_length_comes_from_the_model_and_is_saved():
    model = patched("cosformer", GPT2)
    assert model.config.linear_attention["layers"]["0"]["options"]["max_length"] == 96
    assert build(limit=50, max_length=None).feature_map.max_length == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"max_length": 2.5}, "got 2.5"),
        ({"epsilon": -1.0}, r"epsilon must be a finite number of at least 0 and below 1, got -1.0"),
        ({"max_length": None}, "cosformer needs max_length"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_window_refuses_a_map_with_positions():
    with pytest.raises(ValueError, match="window cannot use 'cosformer'"):
        hla.patch_model(GPT2.build(), "window", feature_map="cosformer")


def test_generation_with_left_padding_equals_single_rows():
    model = patched("cosformer", GPT2)
    rows = [token_ids(1, length, seed=length)[0] for length in (5, 12)]
    batch = padded_batch(rows, "left")
    batch.pop("position_ids")
    settings = {"max_new_tokens": 6, "do_sample": False}
    together = copy.deepcopy(model).generate(**batch, **settings)[:, -6:]
    for row, tokens in enumerate(rows):
        assert torch.equal(model.generate(tokens[None], **settings)[0, -6:], together[row])
