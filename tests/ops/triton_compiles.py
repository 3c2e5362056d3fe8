"""Compile the Triton kernels for NVIDIA GPUs without one at hand: `python -m tests.ops.triton_compiles ARCH MAP...`.

The interpreter takes what the compiler refuses (types that change in a loop, say). A stand-in for the driver names the
architecture, and every launch becomes a compilation; the shared memory that each kernel asks for is checked too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_linear_attn.ops import check
from hf_linear_attn.ops.calls import FarPass, KernelizedCall, Mix, WindowedCall
from hf_linear_attn.ops.triton import attention, window_step
from tests.ops.test_native import SCALED, build, inputs, make_call

#: Bytes that one block of threads can have on the smaller GPUs of the generations since Ampere.
SHARED_BYTES = 99 * 1024


class Driver:
    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def merge(call: KernelizedCall) -> None:
    """One pass, of a formula with all its terms, and two of given mixing weights, with rows that are exact."""
    out, log_sum, top, base = call.query.clone(), *(torch.zeros(1, 2, 40) for _ in range(3))
    real = torch.ones(1, 32, dtype=torch.bool)
    first = FarPass(slice(8, 40), slice(0, 32), False, real)
    formula = base[..., :1], torch.zeros(2, call.query.shape[3]), 2.0, 64
    attention.merge(call, attention.Exact(out, log_sum, top, formula, 0.1, 8, None), [first])
    second = FarPass(slice(0, 32), slice(8, 40), True, real)
    code = torch.zeros(1, 40, dtype=torch.int32)
    attention.merge(call, attention.Exact(out, log_sum, top, (base, None, 0.0, None), 0.1, 8, code), [first, second])


def main(architecture: int, size: int, names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver(architecture))
    made: dict[str, int] = {}

    def compile_only(
        kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = attention.STAGES
    ) -> None:
        compiled = kernel.warmup(*arguments, num_warps=warps, num_stages=stages, grid=grid)
        assert compiled.metadata.shared <= SHARED_BYTES, (kernel, compiled.metadata.shared)
        made[kernel.fn.__name__] = max(made.get(kernel.fn.__name__, 0), compiled.metadata.shared)

    attention.launch = compile_only
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            for causal in (False, True):
                for learning in (False, True)[: 1 if name in SCALED - {"vq"} else 2]:
                    tensors = inputs((1, 2, 1, 40), size, size, dtype)
                    call = make_call(build(name, 2, 1, size, size), *tensors, causal)
                    assert call.fused is not None
                    case = check.case_of(call)._replace(learning=learning)
                    with torch.enable_grad() if learning else torch.no_grad():
                        check.results(case, call.fused, attention.run, double=False)
                    if causal and not learning and not call.fused[1].scaled:
                        merge(call)
    window_step.launch = compile_only
    for width, name, dtype in ((64, "hedgehog", torch.bfloat16), (128, "elu", torch.float32)):
        call = make_call(build(name, 2, 1, width, width), *inputs((1, 2, 1, 1), width, width, dtype), True)
        mix = Mix(lambda: torch.zeros(1), torch.zeros(1, 2, 1), torch.zeros(2, width), 2.0, 8)
        window: dict[str, Any] = {"window": 64, "sinks": 4, "scaling": 0.1, "log_mix": mix}
        ring, sink = torch.zeros(1, 1, 64, width, dtype=dtype), torch.zeros(1, 1, 4, width, dtype=dtype)
        state = {"kv": torch.zeros(1, 1, call.num_features, width), "k_sum": torch.zeros(1, 1, call.num_features)}
        state |= {"ring_key": ring, "ring_value": ring, "ring_mask": torch.ones(1, 64, dtype=torch.bool)}
        state |= {"count": torch.ones(1, dtype=torch.long), "sink_key": sink, "sink_value": sink}
        assert window_step.step(WindowedCall(**vars(call.replace(state=state)), **window)) is not None
    sys.stdout.write(f"compiled {sorted(made.items())}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
