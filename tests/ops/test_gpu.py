"""The kernels for GPUs, on a GPU: the small case of the check before first use, for every map and size of heads.

Skipped without a GPU. The first run compiles all of them: `pytest tests/ops/test_gpu.py` takes minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_linear_attn.ops import check, flex
from hf_linear_attn.ops.calls import KernelizedCall, WindowedCall
from hf_linear_attn.ops.formulas import FusedMap
from hf_linear_attn.ops.triton.backend import TritonBackend
from tests.ops.test_native import BOTH, MAPS, build, inputs, make_call

DEVICE = "cuda"

attention = pytest.importorskip("hf_linear_attn.ops.triton.attention", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
LEARNING = pytest.mark.parametrize("learning", [False, True], ids=["forward", "gradients"])
SIZES = pytest.mark.parametrize("size", [32, 64, 128])


def on_device(fused: FusedMap) -> FusedMap:
    tensors = {name: x.to(DEVICE) for name, x in fused._asdict().items() if isinstance(x, torch.Tensor)}
    return fused._replace(**tensors)


def call_for(
    name: str, size: int, dtype: torch.dtype, causal: bool, learning: bool, shape: tuple[int, ...] = (1, 2, 1, 40)
) -> KernelizedCall:
    call = make_call(build(name, shape[1], shape[2], size, size), *inputs(shape, size, size, dtype), causal)
    tensors = {part: getattr(call, part).to(DEVICE).requires_grad_(learning) for part in ("query", "key", "value")}
    assert call.fused is not None
    return call.replace(**tensors, fused=tuple(map(on_device, call.fused)))


@LEARNING
@BOTH
@DTYPES
@SIZES
@pytest.mark.parametrize("name", MAPS)
def test_kernelized_attention(name, size, dtype, causal, learning, monkeypatch):
    call = call_for(name, size, dtype, causal, learning)
    with monkeypatch.context() as patch:
        patch.setattr("hf_linear_attn.ops.triton.backend.checked_reason", lambda *_: None)
        if (reason := TritonBackend().unsupported_reason(call)) is not None:
            pytest.skip(reason)
    assert check.compare(attention.run, check.case_of(call), call.fused) is None


@LEARNING
@BOTH
@DTYPES
@SIZES
@pytest.mark.parametrize("name", ["hedgehog", "vq"])
def test_windows(name, size, dtype, causal, learning):
    call = call_for(name, size, dtype, causal, learning)
    sizes: dict[str, Any] = {"window": 64, "sinks": 4, "scaling": size**-0.5}
    window = WindowedCall(**vars(call), **sizes, log_mix=torch.zeros(2, device=DEVICE))
    assert check.compare(flex.run, check.case_of(window), window.fused) is None


@BOTH
@DTYPES
@pytest.mark.parametrize("windowed", [False, True], ids=["kernelized", "window"])
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_the_bits_are_the_same_at_every_run(name, windowed, dtype, causal):
    """A race shows where many programs run: the small case of the check has few."""
    call: Any = call_for(name, 64, dtype, causal, True, (2, 16, 4, 4096))
    if windowed:
        mix = torch.zeros(16, device=DEVICE)
        call = WindowedCall(**vars(call), window=64, sinks=4, scaling=0.125, log_mix=mix)
    run, leaves = (flex.run if windowed else attention.run), (call.query, call.key, call.value)

    def results() -> list[torch.Tensor]:
        out, _ = run(call)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    first = results()
    with torch.no_grad():
        outputs = [run(call)[0] for _ in range(20)]
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    for _ in range(20):
        assert all(map(torch.equal, results(), first))
