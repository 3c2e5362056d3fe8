"""Checks that mechanisms with a file of their own share: each compares the fast form with a definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck

from hf_linear_attn.feature_maps import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.registry import ATTENTIONS, build_options
from tests.comparing import GRADIENT_FACTOR, assert_close, in_pieces, weighted_sum
from tests.inputs import padding_mask, qkv

SCALING = 0.4

#: (heads, key-value heads, head size, value size): one, grouped, all sharing one.
SHAPES = [(1, 1, 2, 1), (6, 2, 5, 11), (3, 1, 7, 3)]

Definition = Callable[..., Tensor]
"""`(module, q, k, v, causal) -> out` for one row without padding, differentiable."""


def build(name: str, causal: bool, heads=4, groups=2, dim=6, value_dim=6, seed=None, **options: Any) -> Any:
    """A mechanism by itself; with a seed, learned parameters are moved off their start."""
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(
        heads, groups, dim, value_dim, layer_index=1, max_length=options.pop("limit", 2048), causal=causal
    )
    module = entry.factory(shape, build_options(entry, options))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def run(module: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
    causal = module.shape.causal
    return module(AttentionInputs(q, k, v, scaling=SCALING, causal=causal, return_state=causal, **kwargs))


def by_rows(definition: Definition, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The definition for each row without its padding; zeros at padding."""
    rows = []
    for row in range(q.shape[0]):
        real = torch.ones(q.shape[2], dtype=torch.bool) if mask is None else mask[row]
        out = definition(module, *(x[row : row + 1][:, :, real] for x in (q, k, v)), module.shape.causal)
        rows.append(out.new_zeros(1, q.shape[1], q.shape[2], v.shape[3]).index_copy(2, real.nonzero()[:, 0], out))
    return torch.cat(rows)


def double(module: Any) -> Any:
    return copy.deepcopy(module).double()


def check_output(module: Any, definition: Definition, length: int, **sizes: int) -> None:
    inputs = qkv(length, **sizes)
    out, _ = run(module, *inputs)
    with torch.no_grad():
        assert_close(out, by_rows(definition, double(module), *(x.double() for x in inputs)))


def check_padding(
    module: Any, definition: Definition, padding_side: str, total: int = 131, poison: float = float("nan")
) -> None:
    """Rows of many lengths, one of them empty, equal the rows alone; what padding holds does not matter."""
    mask = padding_mask([total, 1, 17, 0, total // 2], total, padding_side)
    inputs = qkv(total, batch=5)
    expected = by_rows(definition, double(module), *(x.double() for x in inputs), mask=mask)
    for x in inputs:
        x.masked_fill_(~mask[:, None, :, None], poison)
    out, _ = run(module, *inputs, mask=mask)
    real = mask[:, None, :, None].expand(out.shape)
    assert_close(out[real], expected[real])
    assert bool(torch.isfinite(out[real]).all())


def check_poisoned_gradients(module: Any) -> None:
    """NaN in padding reaches no gradient of a real token or a parameter."""
    mask = padding_mask([9, 4], 9, "left")
    inputs = [x.masked_fill_(~mask[:, None, :, None], float("nan")).requires_grad_() for x in qkv(9)]
    out, _ = run(module, *inputs, mask=mask)
    real = mask[:, None, :, None]
    grads = torch.autograd.grad(out.masked_select(real).square().sum(), [*inputs, *module.parameters()])
    assert all(bool(torch.isfinite(grad.masked_select(real)).all()) for grad in grads[:3])
    assert all(bool(torch.isfinite(grad).all()) for grad in grads[3:])


def check_gradients(module: Any, definition: Definition, length: int, mask: Tensor | None = None, **sizes: int) -> None:
    precise, inputs = double(module), qkv(length, **sizes)

    def gradients(owner: Any, compute: Callable[..., Tensor], leaves: list[Tensor]) -> Any:
        out = compute(*leaves)
        out = out if mask is None else out * mask[:, None, :, None]
        return torch.autograd.grad(weighted_sum(out), [*leaves, *owner.parameters()])

    actual = gradients(module, lambda *x: run(module, *x, mask=mask)[0], [x.clone().requires_grad_() for x in inputs])
    expected = gradients(
        precise, lambda *x: by_rows(definition, precise, *x, mask=mask), [x.double().requires_grad_() for x in inputs]
    )
    for computed, reference in zip(actual, expected, strict=True):
        assert_close(computed, reference, factor=GRADIENT_FACTOR)


@torch.no_grad()
def check_differences(loss: Callable[[], Tensor], parameters: list[Any], gradients: Sequence[Tensor]) -> None:
    """Central differences of a loss along a random direction are the gradients.

    The step is small because a loss may have kinks, where a rectifier switches.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        start, losses = parameter.data, []
        for step in (1e-6, -1e-6):
            parameter.data = start + step * direction
            losses.append(float(loss()))
        parameter.data = start
        slope = (losses[0] - losses[1]) / 2e-6
        assert abs(float((gradient * direction).sum()) - slope) <= 1e-6 * (1 + abs(slope))


def check_gradcheck(module: Any, length: int = 5, **sizes: int) -> None:
    module = double(module)
    inputs = [x.double().requires_grad_() for x in qkv(length, **sizes)]
    mask = padding_mask([length, length - 2], length, "left")
    names = list(dict(module.named_parameters()))

    def compute(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        parameter_dict = dict(zip(names, parameters, strict=True))
        inputs = AttentionInputs(q, k, v, SCALING, module.shape.causal, mask)
        return torch.func.functional_call(module, parameter_dict, (inputs,))[0]

    assert gradcheck(compute, [*inputs, *module.parameters()], fast_mode=True)


def check_pieces(module: Any, sizes: list[int]) -> Any:
    """Any split of a left-padded batch equals the whole; returns the last state."""
    total = sum(sizes)
    inputs, mask = qkv(total), padding_mask([total, total // 3], total, "left")
    full, after = run(module, *inputs, mask=mask)
    out, state = in_pieces(partial(run, module), inputs, mask, sizes)
    real = mask[:, None, :, None].expand(full.shape)
    assert_close(out[real], full[real])
    assert set(state) == set(after)
    for name, tensor in after.items():
        assert_close(state[name], tensor)
    return state


def check_padding_leaves_the_state_unchanged(module: Any) -> None:
    inputs = qkv(9, batch=1)
    _, unpadded = run(module, *inputs)
    for before, after in ((3, 0), (0, 3)):
        padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=float("nan")) for x in inputs]
        mask = torch.nn.functional.pad(torch.ones(1, 9, dtype=torch.bool), (before, after))
        _, state = run(module, *padded, mask=mask)
        for name, tensor in unpadded.items():
            assert_close(state[name], tensor)


def check_no_look_ahead(module: Any, length: int = 140, at: int = 133) -> None:
    """Tokens 20 or 10,000 times larger change nothing before them."""
    inputs = qkv(length)
    out, _ = run(module, *inputs)
    for factor in (20.0, 1e4):
        later = [x.clone() for x in inputs]
        for x in later:
            x[:, :, at:] *= factor
        assert torch.equal(run(module, *later)[0][:, :, :at], out[:, :, :at])


def check_weights(module: Any, length: int = 40) -> Tensor:
    """Weights times values are the output, and nothing falls on padding; returns the weights of the first row."""
    q, k, v = qkv(length)
    mask = padding_mask([length, length // 2], length, "left")
    weights = module.attention_weights(AttentionInputs(q, k, v, scaling=SCALING, causal=module.shape.causal, mask=mask))
    out, _ = run(module, q, k, v, mask=mask)
    real = mask[:, None, :, None].expand(out.shape)
    assert_close((weights @ v.repeat_interleave(2, dim=1))[real], out[real])
    assert float(weights.masked_fill(mask[:, None, None, :], 0.0).abs().max()) == 0.0
    if module.distribution:
        assert float(weights.min()) >= 0
        totals = weights.sum(-1)[mask[:, None].expand(-1, 4, -1)]
        assert_close(totals, torch.ones_like(totals))
    return weights[0]


def check_half(module: Any, definition: Definition, dtype: torch.dtype, length: int = 150, factor: float = 0.5) -> None:
    inputs = [x.to(dtype) for x in qkv(length)]
    out, _ = run(module, *inputs)
    assert out.dtype == dtype
    with torch.no_grad():
        assert_close(out, by_rows(definition, double(module), *(x.double() for x in inputs)), dtype, factor=factor)
