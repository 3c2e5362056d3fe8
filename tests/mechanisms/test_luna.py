"""Luna: the packed sequence, both directions, its state, its start."""

import copy

import pytest
import torch

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from tests.comparing import assert_close, relative_error
from tests.inputs import qkv, token_ids
from tests.mechanisms import checks
from tests.reference.naive import luna_attention, luna_causal_attention
from tests.tiny_models import BERT, GPT2

DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


def build(causal, *sizes, **options):
    return checks.build("luna", causal, *sizes, seed=3, **{"num_packed": 5, **options})


def definition(module, q, k, v, causal):
    packed, tau = module.packed, checks.SCALING
    if not causal:
        return luna_attention(q, k, v, packed, tau)
    return luna_causal_attention(q, k, v, packed, lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()), tau, 1.0)


@DIRECTIONS
@pytest.mark.parametrize("length", [0, 1, 2, 127, 128, 129, 300])
def test_equals_the_definition(length, causal):
    checks.check_output(build(causal, 4, 2, 5, 9), definition, length, dim=5, value_dim=9)


def test_a_packed_sequence_of_one_vector():
    checks.check_output(build(True, num_packed=1), definition, 140)


@torch.no_grad()
def test_causal_weights_times_values_are_the_output():
    module, (q, k, v) = build(True), qkv(40)
    out, _ = module(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=True))
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=True))
    assert_close(weights @ v.repeat_interleave(2, dim=1), out)


@DIRECTIONS
@torch.no_grad()
def test_half_models_work_in_single_precision(causal):
    """Parameters in half precision are rounded, and what is made of them is not."""
    module, inputs = build(causal).bfloat16(), [x.bfloat16() for x in qkv(40)]
    out, _ = module(AttentionInputs(*inputs, scaling=checks.SCALING, causal=causal))
    expected, _ = copy.deepcopy(module).double()(
        AttentionInputs(*(x.double() for x in inputs), scaling=checks.SCALING, causal=causal)
    )
    assert_close(out, expected, torch.bfloat16)


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
    checks.check_gradcheck(build(causal, 2, 1, 3, 2, num_packed=2), heads=2, groups=1, dim=3, value_dim=2)


@pytest.mark.parametrize("sizes", [[1] * 30, [7, 13, 120], [139, 1], [0, 20], [128, 128, 3]])
def test_split_and_resume(sizes):
    module = build(True)
    state = checks.check_pieces(module, sizes)
    assert sum(tensor[0].nbytes for tensor in state.values()) == module.state_bytes()
    assert state["count"].tolist() == [sum(sizes), sum(sizes) // 3]


def test_padding_leaves_the_state_unchanged():
    checks.check_padding_leaves_the_state_unchanged(build(True))


@pytest.mark.parametrize("at", [1, 127, 133])
def test_no_look_ahead(at):
    checks.check_no_look_ahead(build(True), at=at)


@DIRECTIONS
def test_a_row_of_padding_is_zero(causal):
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0] = True
    out, _ = checks.run(build(causal), *qkv(9), mask=mask)
    assert float(out[1].abs().max()) == 0.0


@DIRECTIONS
def test_weights(causal):
    module = build(causal)
    assert module.distribution is not causal
    weights = checks.check_weights(module)
    assert float(weights.min()) >= 0


def test_packed_documents_equal_the_documents():
    q, k, v = qkv(30, batch=1)
    document, module = torch.arange(30) >= 11, build(True)
    together = (document[:, None] == document[None, :]).tril()[None, None]
    out = module.dense_forward(AttentionInputs(q, k, v, scaling=0.4, causal=True, mask=together))
    for part in (document, ~document):
        assert_close(out[:, :, part], checks.run(module, *(x[:, :, part] for x in (q, k, v)))[0])


def test_a_bidirectional_model_refuses_a_full_mask():
    model = hla.patch_model(BERT.build(), "luna")
    with pytest.raises(NotImplementedError, match="4D attention mask"):
        model(token_ids(1, 6), attention_mask=torch.ones(1, 1, 6, 6).tril().bool())


@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half(causal, dtype):
    checks.check_half(build(causal), definition, dtype)


def test_a_packed_sequence_of_zeros_averages_the_values():
    module = build(True)
    module.packed.data.zero_()
    q, k, v = qkv(20)
    expected = v.cumsum(dim=2) / torch.arange(1, 21)[:, None]
    assert_close(checks.run(module, q, k, v)[0], expected.repeat_interleave(2, dim=1))


# --------------------------------------------------------------------------------------------------------------------
# Start


def test_layers_and_seeds_differ_and_the_scale_depends_on_the_direction():
    for family, scale in ((BERT, 2.0), (GPT2, 0.1)):
        model = hla.patch_model(family.build(), "luna")
        first, second = [p for name, p in model.named_parameters() if name.endswith("linear_attention.packed")]
        assert not torch.equal(first, second)
        assert 0.9 * scale < float(first.std()) < 1.1 * scale
    one, two = (checks.build("luna", False, **{"seed": None}) for _ in range(2))
    assert torch.equal(one.packed, two.packed)


def test_a_start_from_queries():
    module, mask = build(False), torch.tensor([[True] * 6 + [False] * 3, [False] * 9])
    query = qkv(9)[0]
    module.start_from_queries(query, mask)
    for group in range(2):
        candidates = query[0, 2 * group : 2 * group + 2, :6].reshape(-1, 6)
        distances = torch.cdist(module.packed[group], candidates)
        assert float(distances.min(dim=1).values.max()) < 1e-6
        assert len(set(distances.argmin(dim=1).tolist())) == 5
    few = build(False, num_packed=50)
    few.start_from_queries(query[:, :, :1])
    assert bool(torch.isfinite(few.packed).all())
    with pytest.raises(ValueError, match="at least one query"):
        module.start_from_queries(query, torch.zeros(2, 9, dtype=torch.bool))


def test_a_start_from_queries_of_the_model():
    model = hla.patch_model(BERT.build(), "luna", num_packed=8)
    module = model.bert.encoder.layer[0].attention.self.linear_attention
    before = module.packed.clone()
    with (
        torch.no_grad(),
        hla.observe_attention(model, lambda call: call.mechanism.start_from_queries(call.query, call.padding)),
    ):
        model(token_ids(), attention_mask=torch.ones(2, 21))
    assert relative_error(module.packed, before) > 0.1
    assert bool(torch.isfinite(model(token_ids()).logits).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_packed": 0}, "num_packed must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        hla.patch_model(BERT.build(), "luna", **options)


def test_no_state_in_both_directions():
    with pytest.raises(ValueError, match="has no state"):
        build(False)(AttentionInputs(*qkv(3), scaling=1.0, causal=False, return_state=True))
