"""Mixtures of heads by themselves: exact heads are softmax attention, the others are their mechanism alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.head_mixture import HeadMixture
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.cases import every_direction
from tests.comparing import assert_close, in_pieces
from tests.inputs import qkv
from tests.mechanisms import checks
from tests.small import small_options

HEADS, GROUPS, DIM = 8, 4, 6
CHOICES = [(0,), (2,), (0, 1, 3)]


def mixture(name: str, causal: bool, exact_heads: tuple[int, ...] = (1, 3), groups: int = GROUPS) -> HeadMixture:
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(HEADS, groups, DIM, DIM, layer_index=1, max_length=2048, causal=causal)
    module = HeadMixture(shape, entry, build_options(entry, small_options(entry.options)), exact_heads)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


def definition(module: HeadMixture, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One row without padding: softmax written out for the exact heads, the mechanism alone for the others."""
    shared, length = HEADS // k.shape[1], q.shape[2]
    exact = [head for head in range(HEADS) if head // shared in module.exact_heads]
    others = [head for head in range(HEADS) if head not in exact]
    others_kv = [group for group in range(k.shape[1]) if group not in module.exact_heads]
    inputs = AttentionInputs(q[:, others], k[:, others_kv], v[:, others_kv], checks.SCALING, causal)
    linear, _ = module.mechanism(inputs)
    repeated_keys, repeated_values = k.repeat_interleave(shared, 1)[:, exact], v.repeat_interleave(shared, 1)[:, exact]
    logits = q[:, exact] @ repeated_keys.mT * checks.SCALING
    if causal:
        logits = logits + torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    softmax = logits.softmax(-1) @ repeated_values
    out = q.new_zeros(q.shape[0], HEADS, length, DIM)
    return out.index_copy(1, torch.tensor(others), linear).index_copy(1, torch.tensor(exact), softmax)


SIZES: dict[str, Any] = {"heads": HEADS, "groups": GROUPS, "dim": DIM, "value_dim": DIM}


def inputs(length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(dtype) for x in qkv(length, batch, **SIZES)]


@pytest.mark.parametrize("exact_heads", CHOICES, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("name", ["window", "elu"])
def test_the_definition(name: str, causal: bool, exact_heads: tuple[int, ...]) -> None:
    module = mixture(name, causal, exact_heads)
    q, k, v = inputs(37)
    out, _ = module(AttentionInputs(q, k, v, checks.SCALING, causal))
    expected = definition(checks.double(module), q.double(), k.double(), v.double(), causal)
    assert_close(out, expected)


@every_direction()
def test_gradients_and_padding_of_every_mechanism(name: str, causal: bool) -> None:
    """Rows of several lengths equal the rows alone, in outputs and in all gradients, whatever padding holds."""
    module, total = mixture(name, causal), 29
    mask = torch.ones(3, total, dtype=torch.bool)
    mask[1, :11], mask[2, :20] = False, False
    leaves = [x.masked_fill(~mask[:, None, :, None], 30.0).requires_grad_() for x in inputs(total, batch=3)]
    out, _ = module(AttentionInputs(*leaves, checks.SCALING, causal, mask))
    real = mask[:, None, :, None].expand(out.shape)
    gradients = torch.autograd.grad(out.masked_select(real).square().sum(), [*leaves, *module.parameters()])
    precise = checks.double(module)
    doubled = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for row in range(3):
        part = definition(precise, *(x[row : row + 1][:, :, mask[row]] for x in doubled), causal)
        expected[row, :, mask[row]] = part[0]
    assert_close(out[real], expected[real])
    true = torch.autograd.grad(expected[real].square().sum(), [*doubled, *precise.parameters()])
    for computed, other in zip(gradients[:3], true[:3], strict=True):
        rows = mask[:, None, :, None].expand(computed.shape)
        assert_close(computed[rows], other[rows], factor=10)
    for computed, other in zip(gradients[3:], true[3:], strict=True):
        assert_close(computed, other, factor=10)


@pytest.mark.parametrize("name", ["window", "hedgehog", "linformer-causal", "gla"])
def test_any_split_equals_the_whole_and_only_exact_heads_grow(name: str) -> None:
    module = mixture(name, True, (1,))
    q, k, v = inputs(41)
    mask = torch.ones(2, 41, dtype=torch.bool)
    mask[1, :13] = False
    full, _ = module(AttentionInputs(q, k, v, checks.SCALING, True, mask))

    def call(*new: Tensor, mask: Any, state: Any) -> Any:
        return module(AttentionInputs(*new, checks.SCALING, True, mask, state, return_state=True))

    out, state = in_pieces(call, (q, k, v), mask, (5, 17, 1, 1, 17))
    real = mask[:, None, :, None].expand(full.shape)
    assert_close(out[real], full[real])
    assert state is not None
    assert state["exact_key"].shape == state["exact_value"].shape == (2, 1, 41, DIM)
    for tensor in (state["exact_key"], state["exact_value"]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_nan_in_padding_stays_there(causal: bool) -> None:
    module, (q, k, v) = mixture("window", causal), inputs(23)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[1, :9] = False
    expected, _ = module(AttentionInputs(q, k, v, checks.SCALING, causal, mask))
    for x in (q, k, v):
        x[1, :, :9] = float("nan")
    out, _ = module(AttentionInputs(q, k, v, checks.SCALING, causal, mask))
    real = mask[:, None, :, None].expand(out.shape)
    assert_close(out[real], expected[real])


def test_a_mask_may_begin_after_a_state_without_one() -> None:
    module, (q, k, v) = mixture("elu", True), inputs(12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 9:] = False  # right padding, in the second piece only
    full, _ = module(AttentionInputs(q, k, v, checks.SCALING, True, mask))
    first = AttentionInputs(*(x[:, :, :6] for x in (q, k, v)), checks.SCALING, True, return_state=True)
    _, state = module(first)
    second = AttentionInputs(
        *(x[:, :, 6:] for x in (q, k, v)), checks.SCALING, True, mask[:, 6:], state, return_state=True
    )
    out, _ = module(second)
    real = mask[:, None, 6:, None].expand(out.shape)
    assert_close(out[real], full[:, :, 6:][real])


@every_direction()
@torch.no_grad()
def test_weights_times_values_are_the_output(name: str, causal: bool) -> None:
    module, (q, k, v) = mixture(name, causal), inputs(19)
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=causal))
    out, _ = module(AttentionInputs(q, k, v, checks.SCALING, causal))
    assert_close(weights @ v.repeat_interleave(HEADS // GROUPS, dim=1), out)


@torch.no_grad()
def test_a_mask_of_each_head() -> None:
    module, (q, k, v) = mixture("window", False), inputs(15)
    mask = torch.rand(2, HEADS, 15, 15, generator=torch.Generator().manual_seed(0)) < 0.6
    mask |= torch.eye(15, dtype=torch.bool)
    out = module.dense_forward(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=False, mask=mask))
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=False, mask=mask))
    assert not bool(weights[~mask].any())
    assert_close(weights @ v.repeat_interleave(HEADS // GROUPS, dim=1), out)


def test_the_linear_branch_has_no_keys_in_exact_heads() -> None:
    module, (q, k, v) = mixture("window", True, (1,)), inputs(15)
    outside = module.outside(AttentionInputs(q, k, v, scaling=checks.SCALING, causal=True))
    assert outside is not None
    assert not bool(outside[:, 2:4].any())
    others = [0, 1, 4, 5, 6, 7]
    rest = (q[:, others], k[:, [0, 2, 3]], v[:, [0, 2, 3]])
    expected = module.mechanism.outside(AttentionInputs(*rest, scaling=checks.SCALING, causal=True))
    assert bool(expected.any())
    assert torch.equal(outside[:, others], expected.expand_as(outside[:, others]))


@pytest.mark.parametrize(("heads", "message"), [((4,), r"\(0 to 3\)"), ((0, 1, 2, 3), "'softmax' instead")])
def test_impossible_choices_are_refused(heads: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture("elu", True, heads)


def test_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        module = mixture("window", True).to(dtype)
        rounded = inputs(40, dtype=dtype)
        out, _ = module(AttentionInputs(*rounded, checks.SCALING, True))
        assert out.dtype == dtype
        assert_close(out, definition(checks.double(module), *(x.double() for x in rounded), True), dtype)


@torch.no_grad()
def test_weights_of_some_queries_are_those_of_all() -> None:
    module, (q, k, v) = mixture("window", False), inputs(19)
    settings = {"scaling": checks.SCALING, "causal": False}
    some = module.attention_weights(AttentionInputs(q[:, :, 7:12], k, v, start=7, **settings))
    assert_close(some, module.attention_weights(AttentionInputs(q, k, v, **settings))[:, :, 7:12])
