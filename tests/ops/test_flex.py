"""Windows by FlexAttention: its eager form on the CPU against the definition in float64, in outputs and gradients.

On a CPU FlexAttention refuses gradients and maxima, which its eager form computes all the same. What it compiles for a
GPU runs in the check before first use, on that GPU.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from hf_linear_attn.ops import backends, check, flex, kernel_inputs, windowed
from hf_linear_attn.ops.calls import WindowedCall
from tests.comparing import GRADIENT_FACTOR, assert_close, weighted_sum
from tests.inputs import padding_mask, qkv
from tests.ops.test_native import build, inputs, make_call
from tests.ops.test_windowed import BOTH, LOG_MIX, call_of, definition
from tests.slow_cases import slow, slow_rows
from tests.small import feature_map

COMPILED = flex._compiled.__wrapped__
MAPS = pytest.mark.parametrize("name", ["hedgehog", "elu", "vq"])


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_options = torch_flex._apply_kernel_options

    def with_maximum(query, key, value, return_lse, options, request):
        options = kernel_options(query, key, value, return_lse, options, request._replace(max_scores=False))
        return {**options, "OUTPUT_MAX": request.max_scores}

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_apply_kernel_options", with_maximum)
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", {"flex_attention_performance"}, raising=False)
    monkeypatch.setattr(flex, "_compiled", lambda scale, configuration: functools.partial(flex._attend, scale=scale))
    monkeypatch.setattr(kernel_inputs, "GPU", "cpu")
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # compiling takes a second a size


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace FlexAttention, as gradients need."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)


def doubles(name: str, length: int, **shape: Any) -> tuple[Any, list[torch.Tensor]]:
    sizes = {key: shape[key] for key in ("heads", "groups", "dim") if key in shape}
    return feature_map(name, *sizes.values()).double(), [x.double() for x in qkv(length, **shape)]


@BOTH
@pytest.mark.parametrize(
    ("length", "window", "sinks"),
    [(129, 5, 3), (300, 70, 17), *slow_rows((65, 64, 0), (17, 90, 2), (3, 2, 1), (70, 20, 100))],
)
@MAPS
def test_output_equals_the_definition(name, length, window, sinks, causal):
    built, tensors = doubles(name, length, value_dim=9)
    options: dict[str, Any] = {"window": window, "causal": causal, "sinks": sinks}
    out, _ = flex.run(call_of(built, *tensors, **options))
    assert_close(out, definition(built, *tensors, **options), torch.float64)


@BOTH
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@pytest.mark.parametrize("sinks", [0, 4])
def test_padding_and_what_it_holds(padding, sinks, causal):
    built, tensors = doubles("hedgehog", 150, batch=3)
    mask = padding_mask([150, 90, 0], 150, "left" if padding == "left" else "right")
    if padding == "holes" and causal:  # in encoders distances count positions, holes included
        mask[1, 20:37] = False
    options: dict[str, Any] = {"window": 20, "causal": causal, "sinks": sinks, "mask": mask}
    expected, _ = windowed.windowed(call_of(built, *tensors, **options))
    poisoned = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in tensors]
    out, _ = flex.run(call_of(built, *poisoned, **options))
    assert_close(*(x.transpose(1, 2)[mask] for x in (out, expected)), torch.float64)
    assert not bool(out[2].any())


@pytest.mark.usefixtures("traced")
@BOTH
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1.0), *slow_rows((torch.float32, 1e3))], ids=str)
@pytest.mark.parametrize("sinks", [3, *slow(0)])
@pytest.mark.parametrize("name", ["hedgehog", "vq"])
def test_gradients_equal_those_of_the_definition(name, sinks, dtype, limit, causal):
    """In float32 two logits within 128 ε of each other share the gradient of the maximum."""
    shape: dict[str, Any] = {"heads": 6, "groups": 2, "dim": 5}
    mask = padding_mask([131, 70], 131, "left")

    original, tensors = doubles(name, 131, **shape, value_dim=11)

    def gradients(compute, dtype):
        built, leaves = copy.deepcopy(original).to(dtype), [x.to(dtype).requires_grad_() for x in tensors]
        mix = LOG_MIX.to(dtype).clone().requires_grad_()
        options = {"window": 7, "causal": causal, "log_mix": mix, "mask": mask, "sinks": sinks}
        out = compute(built, *leaves, **options).transpose(1, 2)[mask]
        return torch.autograd.grad(weighted_sum(out), [*leaves, mix, *built.parameters()])

    actual = gradients(lambda *x, **y: flex.run(call_of(*x, **y))[0], dtype)
    for own, true in zip(actual, gradients(definition, torch.float64), strict=True):
        assert_close(own, true, dtype, factor=GRADIENT_FACTOR * (limit if own is actual[0] or own is actual[1] else 1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [0, 4])
def test_pieces_give_the_whole(sinks, padded):
    pieces, total = (40, 1, 30, 1, 1, 3), 76
    built, tensors = doubles("hedgehog", total)
    mask = torch.ones(2, total, dtype=torch.bool)
    mask[1, [0, 1, 2, 39, 40, 50, 73]] = not padded
    options: dict[str, Any] = {"window": 9, "causal": True, "sinks": sinks}
    whole, state = windowed.windowed(call_of(built, *tensors, **options, mask=mask if padded else None))
    outputs, after, start = [], None, 0
    for length in pieces:
        now = slice(start, start + length)
        part = call_of(
            built, *(x[:, :, now] for x in tensors), **options, mask=mask[:, now] if padded else None, state=after
        )
        out, after = flex.run(part.replace(return_state=True))
        outputs.append(out)
        start += length
    assert_close(*(x.transpose(1, 2)[mask] for x in (torch.cat(outputs, dim=2), whole)), torch.float64)
    assert state is not None
    assert after is not None
    assert after.keys() == state.keys()
    for entry, expected in state.items():
        assert_close(after[entry].double(), expected.double(), torch.float64)


@BOTH
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_of_the_mask_are_those_that_hold_pairs(padded, causal, monkeypatch):
    masks = []
    monkeypatch.setattr(
        flex, "_compiled", lambda *_: lambda q, k, v, mask, _: masks.append(mask) or flex._attend(q, k, v, mask, _, 1.0)
    )
    built, tensors = doubles("hedgehog", 900)
    mask = padding_mask([900, 500], 900, "left") if padded else None
    flex.run(call_of(built, *tensors, window=60, causal=causal, sinks=2, mask=mask))
    (block_mask,) = masks
    expected = torch_flex.create_block_mask(block_mask.mask_mod, 2, 1, *block_mask.seq_lengths, device="cpu")
    blocks, needed = block_mask.to_dense().bool().expand(2, 1, -1, -1), expected.to_dense().bool()
    assert not bool((needed & ~blocks).any())
    counts = blocks.sum(dim=-1)
    rows_of_sinks = counts == blocks.shape[-1]  # which see every key in an encoder
    assert rows_of_sinks.sum(dim=-1).max() <= (0 if causal else 2)
    # The window, and sinks of either row at either end.
    assert counts.masked_fill(rows_of_sinks, 0).max() <= 3 + (3 if padded else 2)


def test_the_layout_of_a_mask_is_made_once_and_anew_where_the_mask_has_changed():
    built, tensors = doubles("hedgehog", 150)
    mask = torch.ones(2, 1, 1, 150, dtype=torch.bool)
    options: dict[str, Any] = {"window": 20, "causal": False, "sinks": 2}
    flex._layout.cache_clear()
    for index, end in enumerate((150, 100)):
        mask[1, ..., end:] = False
        for _ in range(3):  # each layer has a view of its own
            view = mask[:, 0, 0]
            out, _ = flex.run(call_of(built, *tensors, **options, mask=view))
        expected, _ = windowed.windowed(call_of(built, *tensors, **options, mask=view))
        assert_close(*(x.transpose(1, 2)[view] for x in (out, expected)), torch.float64)
        assert flex._layout.cache_info().misses == index + 1
    with torch.inference_mode():  # whose tensors do not count their changes
        flex.run(call_of(built, *tensors, **options, mask=mask[:, 0, 0].clone()))
    assert flex._layout.cache_info().misses == 2


@BOTH
def test_rows_within_a_window_have_gradients_of_zeros_for_learned_parts(causal):
    """None would be an error under DDP, and where nothing else needs a gradient."""
    built, tensors = doubles("hedgehog", 10)
    out, _ = flex.run(call_of(built, *tensors, window=20, causal=causal))
    out.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in built.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_one_graph_serves_every_length(monkeypatch):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = functools.cache(COMPILED)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(flex, "_compiled", compiled)
    built = feature_map("hedgehog")
    with torch.no_grad():
        for length in range(200, 1700, 120):  # more lengths than torch compiles a function for
            tensors = qkv(length)
            out, _ = flex.run(call_of(built, *tensors, window=20, causal=True, sinks=3))
            expected, _ = windowed.windowed(call_of(built, *tensors, window=20, causal=True, sinks=3))
            assert_close(out, expected)
    assert len(graphs) <= 2


def fused_call(causal: bool = True, size: int = 16, name: str = "hedgehog", **changes: Any) -> WindowedCall:
    call = make_call(build(name, 2, 1, size, size), *inputs((1, 2, 1, 40), size, size), causal)
    return WindowedCall(**{**vars(call), **changes}, window=7, sinks=2, scaling=0.25, log_mix=torch.zeros(2))


@BOTH
@pytest.mark.parametrize("learning", [False, *slow(True)])
@pytest.mark.parametrize("name", ["hedgehog", "vq"])
def test_the_check_before_first_use(name, learning, causal, monkeypatch):
    monkeypatch.setattr(check, "PIECES", (150, 21, 1))
    monkeypatch.setattr(check, "RUNS", 2)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not learning)
    call = fused_call(causal, name=name)
    case = check.case_of(call)._replace(learning=learning)
    assert call.fused is not None

    def wrong(call):
        out, state = flex.run(call)
        return out * 1.01, state

    runs = itertools.count()

    def racing(call):
        out, state = flex.run(call)
        return out * (1 + 1e-6 * next(runs)), state

    with torch.device("meta"):  # a default device of the user's is not that of the call
        assert check.compare(flex.run, case, call.fused) is None
    assert "differ from torch in the output" in str(check.compare(wrong, case, call.fused))
    unequal = str(check.compare(racing, case, call.fused))
    assert unequal == "on this device the output is not the same at every run"


def test_what_it_refuses(monkeypatch):
    backend = flex.FlexBackend()
    monkeypatch.setattr(flex, "installed", lambda: True)
    monkeypatch.setattr(check, "_reasons", {})
    call = fused_call()
    with torch.no_grad():
        assert backend.unsupported_reason(call) is None
        assert "fused form" in str(backend.unsupported_reason(fused_call(fused=None)))
        assert "fewer than 16" in str(backend.unsupported_reason(fused_call(size=12)))
        kernelized = make_call(build("elu", 2, 2, 16, 16), *inputs((1, 2, 2, 10), 16, 16), True)
        assert "only windows" in str(backend.unsupported_reason(kernelized))
    monkeypatch.setattr(flex, "installed", lambda: False)
    assert "pip install triton" in str(backend.unsupported_reason(call))
    monkeypatch.setattr(kernel_inputs, "GPU", "cuda")
    assert backend.unsupported_reason(call) == "the tensors are on cpu"


def test_it_comes_before_torch_and_computes_what_it_supports(monkeypatch):
    names = backends.list_backends()
    assert names.index("triton") < names.index("flex") < names.index("torch")
    monkeypatch.setattr(flex.FlexBackend, "unsupported_reason", lambda self, call: None)
    call = fused_call()
    with torch.no_grad(), backends.use_backend("flex"):
        out, _ = backends.attend(call)
    assert_close(out, windowed.windowed(call)[0])
