"""What every mechanism owes by itself, apart from any model: states, splits, weights, gradients, causality."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_linear_attn as hla
from hf_linear_attn.mechanisms import AttentionInputs
from tests.cases import entries, every_direction, every_feature_map, every_mechanism
from tests.comparing import assert_close, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.reference import naive
from tests.small import mechanism

SCALING = 0.4


def run(module, q, k, v, *, causal, **kwargs):
    return module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, **kwargs))


@every_direction()
def test_the_last_output_depends_on_a_token_outside_of_every_window(name, causal):
    """A part outside that weighs nothing, as it does in a window at first, would be checked by nothing below."""
    q, k, v = qkv(33)
    module, changed = mechanism(name, causal), v.clone()
    changed[:, :, 5] += 1.0
    with torch.no_grad():
        before, after = (run(module, q, k, value, causal=causal)[0][:, :, -1] for value in (v, changed))
    assert float((after - before).abs().max()) > 1e-5 * float(before.abs().max())


@every_direction()
def test_gradcheck(name, causal):
    module = mechanism(name, causal, heads=2, groups=1, dim=3, value_dim=2).double()
    inputs = [x.double().requires_grad_() for x in qkv(6, batch=1, heads=2, groups=1, dim=3, value_dim=2)]
    mask = padding_mask([5], 6, "left")
    assert torch.autograd.gradcheck(
        lambda q, k, v, *_: run(module, q, k, v, causal=causal, mask=mask)[0],
        (*inputs, *module.parameters()),
        fast_mode=True,
    )


@every_direction()
def test_single_precision_matches_double_in_outputs_and_gradients(name, causal):
    single = mechanism(name, causal, value_dim=9)
    inputs, mask = qkv(33, value_dim=9), padding_mask([33, 20], 33, "right")

    def compute(module, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        # Outputs of padding mean nothing, and backends differ there.
        out = run(module, *leaves, causal=causal, mask=mask)[0] * mask[:, None, :, None]
        return [out, *torch.autograd.grad(weighted_sum(out), [*leaves, *module.parameters()])]

    actual = compute(single, inputs)
    expected = compute(single.double(), [x.double() for x in inputs])
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=10)


@every_direction()
def test_nan_in_padding_reaches_no_gradient(name, causal):
    module, inputs, mask = mechanism(name, causal), qkv(9), padding_mask([9, 6], 9, "left")
    for tensor in inputs:
        tensor[1, :, :3] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = run(module, *leaves, causal=causal, mask=mask)[0].transpose(1, 2)[mask]
    gradients = torch.autograd.grad(weighted_sum(out), [*leaves, *module.parameters()], allow_unused=True)
    assert all(bool(tensor.isfinite().all()) for tensor in gradients if tensor is not None)


@every_direction()
@torch.no_grad()
def test_one_mask_for_all_rows(name, causal):
    module, inputs, mask = mechanism(name, causal), qkv(19), padding_mask([12], 19, "left")
    out, state = run(module, *inputs, causal=causal, mask=mask, return_state=causal)
    expected, after = run(module, *inputs, causal=causal, mask=mask.expand(2, -1).contiguous(), return_state=causal)
    assert_close(out[:, :, 7:], expected[:, :, 7:])
    assert {key: tensor.shape for key, tensor in (state or {}).items()} == {
        key: tensor.shape for key, tensor in (after or {}).items()
    }


@every_direction()
def test_values_may_be_wider_than_keys(name, causal):
    out, _ = run(mechanism(name, causal, value_dim=11), *qkv(9, value_dim=11), causal=causal)
    assert out.shape == (2, 4, 9, 11)


@every_direction()
@torch.no_grad()
def test_weights_times_values_are_the_output(name, causal):
    module, (q, k, v), mask = mechanism(name, causal), qkv(19), padding_mask([19, 12], 19, "left")
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=mask))
    out, _ = run(module, q, k, v, causal=causal, mask=mask)
    real = mask[:, None].expand(-1, 4, -1)
    assert_close((weights @ v.repeat_interleave(2, dim=1))[real], out[real])


@every_direction()
@torch.no_grad()
def test_weights_of_some_queries_are_those_of_all(name, causal):
    module, (q, k, v), mask = mechanism(name, causal), qkv(19), padding_mask([19, 12], 19, "left")
    if not module.separable_queries:
        pytest.skip(f"{name} declares that it needs all queries")
    settings = {"scaling": SCALING, "causal": causal}
    weights = module.attention_weights(AttentionInputs(q, k, v, mask=mask, **settings))
    outside = module.outside(AttentionInputs(q, k, v, mask=mask, **settings))
    for start, stop in ((0, 3), (9, 14), (16, 19)):
        keys, more = (stop, {}) if causal else (19, {"start": start})
        part = q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys]
        inputs = AttentionInputs(*part, mask=mask[:, :keys], **settings, **more)
        some = module.attention_weights(inputs)
        assert_close(some, weights[:, :, start:stop, :keys])
        if outside is not None:
            assert torch.equal(module.outside(inputs), outside[:, :, start:stop, :keys])


@every_direction()
@torch.no_grad()
def test_outputs_of_some_queries_are_those_of_all(name, causal):
    module, (q, k, v), mask = mechanism(name, causal), qkv(150), padding_mask([150, 101], 150, "left")
    if not module.sampled_outputs:
        pytest.skip(f"attention transfer by outputs takes all queries of {name}")
    for padding in (mask, torch.ones_like(mask)):
        out, _ = run(module, q, k, v, causal=causal, mask=padding)
        for start, stop in ((0, 3), (60, 130), (129, 150)):
            keys = stop if causal else 150
            part = q[:, :, start:stop], k[:, :, :keys], v[:, :, :keys]
            some, _ = run(module, *part, causal=causal, mask=padding[:, :keys])
            real = padding[:, None, start:stop].expand(-1, 4, -1)
            assert_close(some[real], out[:, :, start:stop][real])
    without_mask, _ = run(module, q[:, :, 60:], k, v, causal=causal)
    assert_close(without_mask, out[:, :, 60:])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@every_mechanism(causal=True)
@torch.no_grad()
def test_a_state_holds_no_more_memory_than_it_shows(name, backend):
    """A view of one head's tokens would keep all of them."""
    module = mechanism(name, True, heads=2, groups=1)
    with hla.use_backend(backend):
        _, state = run(module, *qkv(300, batch=1, heads=2, groups=1), causal=True, return_state=True)
        q, k, v = qkv(1, batch=1, heads=2, groups=1)
        _, after = run(module, q, k, v, causal=True, state=state, return_state=True)
    for saved in (state, after):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved.values()}
        assert sum(storages.values()) <= sum(tensor.nbytes for tensor in saved.values()) + 256


@every_direction()
@torch.no_grad()
def test_exact_up_to_the_length_that_it_says_and_not_beyond(name, causal):
    module = mechanism(name, causal)
    longest = module.exact_length
    differences = []
    for length in (longest or 8, longest + 8):
        q, k, v = qkv(length)
        out, _ = run(module, q, k, v, causal=causal)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=SCALING, enable_gqa=True
        )
        differences.append((out - exact).abs().max().item())
    assert differences[1] > 1e-3
    if longest:
        assert differences[0] < 1e-5


@every_direction()
@torch.no_grad()
def test_dense_forward_honours_any_mask_where_declared(name, causal):
    module, (q, k, v) = mechanism(name, causal), qkv(19)
    if not module.dense_masks:
        pytest.skip(f"{name} declares that it honours padding masks only")
    allowed = torch.rand(2, 1, 19, 19, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed = allowed | torch.eye(19, dtype=torch.bool)  # not causal: a full mask says it all
    out = module.dense_forward(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, mask=allowed))
    for i in (3, 18):
        other = v.clone()
        other[0, :, ~allowed[0, 0, i]] = 100.0
        changed = module.dense_forward(AttentionInputs(q, k, other, scaling=SCALING, causal=causal, mask=allowed))
        assert_close(changed[0, :, i], out[0, :, i])


@every_feature_map()
@torch.no_grad()
def test_any_mask_equals_the_definition(name):
    module, inputs = mechanism(name, True).double(), [x.double() for x in qkv(19, batch=3)]
    if not module.distribution:
        pytest.skip(f"{name} declares signed weights; its own tests compare it with its definition")
    features = []
    for values, log_scale in (module.feature_map.query(inputs[0], SCALING), module.feature_map.key(inputs[1], SCALING)):
        features.append(values if log_scale is None else values * log_scale.exp().unsqueeze(-1))
    allowed = torch.rand(3, 4, 19, 19, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[0, :, 5] = False
    out = module.dense_forward(AttentionInputs(*inputs, scaling=SCALING, causal=True, mask=allowed))
    assert_close(out, naive.kernelized_attention(*features, inputs[2], allowed), torch.float64)
    assert not bool(out[0, :, 5].any())


@every_mechanism(causal=True)
@torch.no_grad()
def test_a_huge_last_token_cannot_change_the_past(name):
    module, (q, k, v) = mechanism(name, True), qkv(140)
    first, _ = run(module, q, k, v, causal=True)
    for x in (q, k, v):
        x[:, :, -1] *= 20
    assert_close(run(module, q, k, v, causal=True)[0][:, :, :-1], first[:, :, :-1])


@every_mechanism(causal=True)
def test_gradients_of_the_past_by_the_future_are_zero(name):
    module, inputs = mechanism(name, True), [x.requires_grad_() for x in qkv(40)]
    out, _ = run(module, *inputs, causal=True)
    for grad in torch.autograd.grad(out[:, :, :25].square().sum(), inputs):
        assert not bool(grad[:, :, 25:].any())
        assert bool(grad[:, :, :25].any())


@every_mechanism(causal=True)
@settings(max_examples=12)
@given(
    splits=st.lists(st.integers(1, 25), min_size=2, max_size=5), padding=st.integers(0, 20), repeats=st.integers(1, 3)
)
@torch.no_grad()
def test_any_split_equals_the_whole(name, splits, padding, repeats):
    length = sum(splits)
    module, inputs = mechanism(name, True, heads=2 * repeats), qkv(length, heads=2 * repeats)
    mask = padding_mask([length, max(length - padding, 1)], length, "left")
    full, _ = run(module, *inputs, causal=True, mask=mask)
    out, _ = in_pieces(partial(run, module, causal=True, return_state=True), inputs, mask, splits)
    real = mask[:, None].expand(-1, 2 * repeats, -1)
    assert_close(out[real], full[real])


@every_mechanism(causal=True)
@settings(max_examples=8)
@given(rows=st.lists(st.integers(0, 2), min_size=1, max_size=5), first=st.integers(1, 20))
@torch.no_grad()
def test_states_can_be_reordered_selected_and_repeated(name, rows, first):
    module, inputs, order = mechanism(name, True), qkv(21, batch=3), torch.tensor(rows)
    mask = padding_mask([21, 14, 18], 21, "left")
    full, _ = run(module, *inputs, causal=True, mask=mask)
    head = [x[:, :, :first] for x in inputs]
    _, state = run(module, *head, causal=True, mask=mask[:, :first], return_state=True)
    picked = {key: tensor.index_select(0, order) for key, tensor in state.items()}
    tail = [x[order][:, :, first:] for x in inputs]
    out, _ = run(module, *tail, causal=True, mask=mask[order][:, first:], state=picked, return_state=True)
    real = mask[order][:, None, first:].expand(-1, 4, -1)
    assert_close(out[real], full[order][:, :, first:][real])


@every_mechanism(causal=True)
@torch.no_grad()
def test_advancing_a_state_leaves_the_old_one_as_it_was(name):
    module, (q, k, v) = mechanism(name, True), qkv(12)
    _, state = run(module, q, k, v, causal=True, return_state=True)
    before = {key: tensor.clone() for key, tensor in state.items()}
    run(module, q, k, v, causal=True, state=state, return_state=True)
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", [entry.name for entry in entries() if entry.bidirectional and entry.causal])
def test_bidirectional_attention_has_no_state(name):
    with pytest.raises(ValueError, match="Bidirectional attention has no state"):
        run(mechanism(name, False), *qkv(5), causal=False, return_state=True)


@every_direction()
@torch.no_grad()
def test_dtypes_in_are_dtypes_out(name, causal):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        module = mechanism(name, causal).to(dtype)
        out, _ = run(module, *(x.to(dtype) for x in qkv(9)), causal=causal)
        assert out.dtype == dtype
