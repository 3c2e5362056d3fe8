"""Every mechanism on a device without data: nothing stands on another device, the host reads nothing, few launches.

Fake tensors on the device "meta" stand for those of a GPU: they need none, and have gradients in any build of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attn.integration import cache
from hf_linear_attn.integration import mask as integration_mask
from hf_linear_attn.integration.cache_argument import cache_argument, output_cache
from hf_linear_attn.mechanisms.base import AttentionInputs
from hf_linear_attn.ops import flex, kernel_inputs
from hf_linear_attn.ops.triton import backend
from hf_linear_attn.registry import ATTENTIONS
from tests.cases import every_direction
from tests.small import mechanism, patched
from tests.tiny_models import DECODERS, FAMILIES

HEADS, GROUPS, DIM, LENGTH = 4, 2, 16, 200
DEVICE = "meta"

#: Causal mechanisms whose host reads how many tokens a state has: it decides a size.
READING = ("linformer-causal",)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    flex._layout.cache_clear()
    with FakeTensorMode():
        yield
    flex._layout.cache_clear()


def inputs(length: int, causal: bool, mask: Tensor | None = None, **more: Any) -> AttentionInputs:
    sizes = (HEADS, GROUPS, GROUPS)
    tensors = (torch.randn(2, heads, length, DIM, device=DEVICE, dtype=torch.bfloat16) for heads in sizes)
    return AttentionInputs(*tensors, scaling=0.25, causal=causal, mask=mask, **more)


def mask_of(length: int) -> Tensor:
    return torch.ones(2, length, dtype=torch.bool, device=DEVICE)


def on_device(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)


def built(name: str, causal: bool, **options: Any) -> Any:
    with unset_fake_temporarily():
        module = mechanism(name, causal, HEADS, GROUPS, DIM, DIM, **options).bfloat16()
    return moved(module)


def moved(module: Any) -> Any:
    for part in module.modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, torch.nn.Parameter(on_device(parameter)))
        for key, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(key, on_device(buffer))
    return module


def train(module: Any, causal: bool, mask: Tensor | None) -> None:
    tokens = inputs(LENGTH, causal, mask)
    for tensor in tokens.tensors:
        tensor.requires_grad_()
    out, _ = module(tokens)
    out.sum().backward()
    gradients = [tensor.grad for tensor in (*tokens.tensors, *module.parameters())]
    assert {tensor.device.type for tensor in (out, *gradients) if tensor is not None} == {DEVICE}
    assert all(tensor.grad is not None for tensor in tokens.tensors)


def decode(module: Any, mask: Tensor | None) -> None:
    _, state = module(inputs(LENGTH, True, mask, return_state=True))
    out, state = module(inputs(1, True, state=state, return_state=True))
    assert {out.device.type, *(tensor.device.type for tensor in state.values())} == {DEVICE}


@every_direction()
def test_every_mechanism(name, causal):
    module = built(name, causal)
    for mask in (None, mask_of(LENGTH)):
        train(module, causal, mask)
        with torch.no_grad():
            out, _ = module(inputs(LENGTH, causal, mask))
            assert out.device.type == DEVICE
            if not causal or ATTENTIONS.get(name).state == "none":
                continue
            if name not in READING:
                decode(module, mask)
                continue
            with pytest.raises(DataDependentOutputException):
                decode(module, mask)


needs_triton = pytest.mark.skipif(
    not backend.installed(), reason="Triton is not installed; `pip install triton` counts what its kernels launch"
)


@torch.library.custom_op("hf_linear_attn_tests::flex_attention", mutates_args=())
def flex_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stand in for FlexAttention once it is compiled: output, log-sum-exp and largest logits."""
    raise NotImplementedError


@flex_attention.register_fake
def flex_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = query.shape[:3]
    statistics = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return query.new_empty(*rows, value.shape[3]), *statistics


def flex_gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, ctx.saved_tensors))


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


flex_attention.register_autograd(flex_gradients, setup_context=save_inputs)


class Launches(TorchDispatchMode):
    """Counts what a GPU would run: operators that are no views and do not only allocate, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in function._schema.returns)
        if not is_view and not name.startswith(("prim::", "empty", "new_empty", "detach", "_unsafe_view")):
            self.counts[name] += 1
        if name == "hf_linear_attn_tests::flex_attention":  # and one for the factors of both statistics
            self.counts["mul of flex_attention"] += 1
        return function(*args, **(kwargs or {}))

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        assert all(grid)
        self.counts[f"triton {kernel.fn.__name__}"] += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    from hf_linear_attn.ops.triton import attention, window_step

    counted = Launches()
    for module in (attention, window_step):
        monkeypatch.setattr(module, "launch", counted.launch)
    monkeypatch.setattr(kernel_inputs, "GPU", DEVICE)
    monkeypatch.setattr(kernel_inputs, "Tensor", FakeTensor)  # other subclasses are refused
    for module in (backend, flex):
        monkeypatch.setattr(module, "checked_reason", lambda *_: None)
    monkeypatch.setattr(flex, "_compiled", lambda *_: lambda query, key, value, *_: flex_result(query, key, value))
    return counted


def flex_result(*tensors: Tensor) -> Any:
    out, log_sum, top = flex_attention(*tensors)
    return out, torch_flex.AuxOutput(log_sum, top)


def count(launches: Launches, module: Any, tokens: AttentionInputs) -> int:
    """Return how many launches a layer needs; what all layers of a pass share is there already."""
    with torch.no_grad():
        module(tokens)
        launches.counts.clear()
        with launches:
            module(tokens)
    return launches.counts.total()


#: Tokens enough for a split of every sequence.
LONG = 2000

#: The mechanism, its options, and most launches of a forward pass of a decoder and of an encoder, without padding and
#: with it (None: not counted), and of a decoding step.
COUNTED = [
    ("elu", {}, (3, 3), (3, 3), 1),
    ("hedgehog", {}, (4, 4), (4, 4), 1),
    ("t2r", {}, (4, 4), (4, 4), 1),
    ("window", {"window_size": 64, "feature_map": "elu"}, (8, None), (8, 10), 1),
    ("window", {"window_size": 64, "feature_map": "hedgehog"}, (8, None), (8, 10), 1),
    ("window", {"window_size": 64, "feature_map": "vq"}, (8, None), (8, 10), 1),
]


@needs_triton
@pytest.mark.parametrize(("name", "options", "decoder", "encoder", "step"), COUNTED)
def test_launches(name, options, decoder, encoder, step, launches):
    for causal, most in ((True, decoder), (False, encoder)):
        module = built(name, causal, **options)
        for limit, mask in zip(most, (None, mask_of(LONG)), strict=True):
            train(module, causal, None if mask is None else mask[:, :LENGTH])
            if limit is not None:
                assert count(launches, module, inputs(LONG, causal, mask)) <= limit, launches.counts
    module = built(name, True, **options)
    for mask in (None, mask_of(1)):
        with torch.no_grad():
            _, state = module(inputs(LENGTH, True, return_state=True))
        tokens = inputs(1, True, mask, state=state, return_state=True)
        assert count(launches, module, tokens) <= step, launches.counts


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["elu", "window"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_models_that_cuda_records(family, name, masked, monkeypatch):
    """What a mask hides is read once a pass, but not while a graph is recorded."""
    for module in (cache, integration_mask):
        monkeypatch.setattr(module, "may_read", lambda tensor: False)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # it knows no device "meta"
    with unset_fake_temporarily():
        model = patched(name, family).eval()
    moved(model)
    ids = torch.zeros(2, 30, dtype=torch.long, device=DEVICE)
    mask = torch.ones_like(ids) if masked else None
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask)
        if family in DECODERS:
            longer = None if mask is None else torch.ones(2, 31, dtype=torch.long, device=DEVICE)
            out = model(input_ids=ids[:, :1], attention_mask=longer, **cache_argument(model, output_cache(out)))
    assert out.logits.device.type == DEVICE


def test_a_number_that_the_host_reads_is_found():
    with pytest.raises(DataDependentOutputException):
        bool(mask_of(3).all())
