"""Nyström attention: landmarks of each row's own tokens, the pseudo-inverse, exactness of short rows."""

import itertools

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.ops import common
from hf_linear_attn.ops import nystrom as ops
from tests.comparing import assert_close, relative_error
from tests.inputs import padded_batch, padding_mask, qkv, token_ids
from tests.mechanisms import checks
from tests.reference import naive
from tests.reference.naive import nystrom_attention
from tests.tiny_models import BERT, GPT2


def build(*sizes, **options):
    return checks.build("nystrom", False, *sizes, seed=3, **{"num_landmarks": 7, **options})


def definition(module, q, k, v, causal):
    options = module.options
    settings = {"landmarks": options.num_landmarks, "iterations": options.iterations, "scaling": checks.SCALING}
    return nystrom_attention(q, k, v, **settings) if q.shape[2] else q.new_zeros(*q.shape[:3], v.shape[3])


@pytest.mark.parametrize("length", [0, 1, 2, 6, 7, 8, 13, 14, 128, 131, 300])
def test_equals_the_definition(length):
    checks.check_output(build(4, 2, 5, 9), definition, length, dim=5, value_dim=9)


@pytest.mark.parametrize("options", [{"num_landmarks": 1}, {"iterations": 1}, {"iterations": 9}])
def test_options(options):
    checks.check_output(build(**options), definition, 33)


@pytest.mark.parametrize("options", [{}, {"num_landmarks": 70}])
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_padding(padding_side, options):
    checks.check_padding(build(**options), definition, padding_side)


def test_a_row_does_not_depend_on_the_others_of_its_batch():
    q, k, v = qkv(40, batch=3)
    single = [checks.run(build(), q[i : i + 1], k[i : i + 1], v[i : i + 1])[0] for i in range(3)]
    k[2] *= 30
    together, _ = checks.run(build(), q, k, v)
    assert_close(together[:2], torch.cat(single[:2]))


def test_poisoned_padding_reaches_no_gradient():
    checks.check_poisoned_gradients(build())


@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), checks.SHAPES)
def test_gradients(heads, groups, dim, value_dim):
    sizes = {"heads": heads, "groups": groups, "dim": dim, "value_dim": value_dim}
    checks.check_gradients(build(*sizes.values()), definition, 45, **sizes)


@pytest.mark.parametrize("length", [4, 6])
def test_gradcheck(length):
    module = build(2, 1, 3, 2, num_landmarks=3)
    checks.check_gradcheck(module, length, heads=2, groups=1, dim=3, value_dim=2)


def test_gradients_of_a_batch_with_a_short_row():
    mask = padding_mask([20, 5], 20, "left")
    checks.check_gradients(build(), definition, 20, mask=mask)


def test_short_rows_are_exact():
    q, k, v = (x.double() for x in qkv(40))
    mask = padding_mask([40, 7], 40, "right")
    out, _ = checks.run(build(), q, k, v, mask=mask)
    exact = naive.softmax_attention(q, k, v, mask[:, None, None, :], checks.SCALING)
    assert_close(out[1, :, :7], exact[1, :, :7], torch.float64)
    assert relative_error(out[0], exact[0]) > 1e-3
    assert_close(
        checks.run(build(num_landmarks=40), q, k, v)[0],
        naive.softmax_attention(q, k, v, torch.ones(1, dtype=torch.bool), checks.SCALING),
        torch.float64,
    )


def test_more_landmarks_are_nearer_on_smooth_sequences():
    q, k, v = qkv(128)
    q, k = (x.cumsum(dim=2) / 8 for x in (q, k))  # neighbours are alike, as in text
    exact = naive.softmax_attention(q, k, v, torch.ones(1, dtype=torch.bool), checks.SCALING)
    errors = [relative_error(checks.run(build(num_landmarks=m), q, k, v)[0], exact) for m in (2, 8, 32, 128)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_a_row_of_padding_is_zero():
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0] = True
    out, _ = checks.run(build(), *qkv(20), mask=mask)
    assert float(out[1].abs().max()) == 0.0


def test_weights():
    module = build()
    weights = checks.check_weights(module)
    assert not module.distribution
    # All three factors have rows that sum to 1, and so has the inverse, as far as it got.
    assert float(weights.sum(-1).mean()) == pytest.approx(1.0, abs=0.1)


def test_blocks_of_queries(monkeypatch):
    full, _ = checks.run(build(), *qkv(300))
    monkeypatch.setattr(common, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(common, "BLOCK_QUANTUM", 16)
    assert_close(checks.run(build(), *qkv(300))[0], full)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half(dtype):
    checks.check_half(build(), definition, dtype)


# --------------------------------------------------------------------------------------------------------------------
# Parts


@pytest.mark.parametrize("length", [1, 5, 8, 9, 23, 100_003])
def test_pooling_averages_equal_segments(length):
    pooling, lengths = ops.landmark_pooling(length, 8, None, torch.zeros(()))
    used = min(length, 8)
    assert lengths.tolist() == [length]
    assert_close(pooling[0, :used].sum(dim=1), torch.ones(used))
    assert_close(pooling[0].sum(dim=0), torch.full((length,), used / length))
    assert float(pooling[0, used:].abs().sum()) == 0.0
    if length <= 8:
        assert torch.equal(pooling[0, :used], torch.eye(length))


def test_the_pseudo_inverse_converges_at_third_order():
    matrix = torch.softmax(torch.randn(2, 3, 6, 6, dtype=torch.float64), dim=-1)
    true = torch.linalg.pinv(matrix)
    assert_close(ops.iterative_pinv(matrix, 20), true, torch.float64)
    residuals = []
    for steps in range(1, 16):
        product = matrix @ ops.iterative_pinv(matrix, steps)
        residuals.append(float(torch.linalg.matrix_norm(torch.eye(6) - product, 2).max()))
    pairs = [(before, after) for before, after in itertools.pairwise(residuals) if before <= 1]
    assert residuals[-1] < 1e-6
    assert len(pairs) > 2
    assert all(after <= (3 * before**3 + before**4) / 4 + 1e-9 for before, after in pairs)


def test_a_short_batch_through_a_model_is_exact():
    model = BERT.build()
    batch = padded_batch([token_ids(1, length)[0] for length in (3, 9)], "right")
    real, exact = batch["attention_mask"].bool(), model(**batch).logits
    hla.patch_model(model, "nystrom")
    assert_close(model(**batch).logits[real], exact[real])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks must be a whole number of at least 1, got 0"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        hla.patch_model(BERT.build(), "nystrom", **options)


def test_decoders_are_sent_elsewhere():
    with pytest.raises(NotImplementedError, match="Use 'window'"):
        hla.patch_model(GPT2.build(), "nystrom")
    with pytest.raises(NotImplementedError, match=r"'nystrom' cannot be causal. Use 'window'"):
        build()(AttentionInputs(*qkv(9), scaling=1.0, causal=True))
