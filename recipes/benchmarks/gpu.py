"""All that must be known about a GPU, in minutes: kernels, attention, decoding, and a step of conversion."""

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.mechanisms.base import AttentionInputs, LinearAttention
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.check import failures, relative_error
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .attention import Setting, attention
from .decoding import decoding
from .models import transfer_cost
from .runner import Cell, Cells, Rows, driven
from .workloads import Inputs

#: Tokens of the test of kernels: a sequence, and one more that is decoded.
TESTED_TOKENS = 700
#: Backends whose speed is measured on a GPU, for whole inputs.
FUSED = ("flex", "triton")
#: Bytes that are copied to learn the bandwidth of the memory: far more than any cache has.
COPIED_BYTES = 1 << 29
#: Tensors `[B, H, L, d]` that a pass must read or write at least: q, k, v, o; then also q, k, v, ∂o and ∂q, ∂k, ∂v.
MOVED_TENSORS = {"forward": 4, "forward+backward": 11}


def gpu(
    mechanisms: tuple[str, ...] = ("window", "hedgehog", "elu", "favor+"),
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536),
    contexts: tuple[int, ...] = (1024, 8192, 65536),
    heads: int = 16,
    head_dim: int = 64,
    model: str = "Llama-3.2-1B",
    tokens: int = 2048,
    seconds: float = 0.3,
    minutes: float = 9.0,
    seed: int = 0,
    device: str = "cuda",
) -> Cells:
    """A new GPU in at most nine minutes, kernels being compiled included. Other benchmarks measure each part at length.

    compilation: the seconds until all processors have compiled the kernels. kernels: each mechanism by the backend that
    is chosen, against torch in float64, with padding: the relative error of the output, the gradients and a step of
    decoding. attention: the speedup over `sdpa` (flash attention, in bfloat16), beside flash-linear-attention where it
    is installed, and the share of the limit: the time that the bytes of inputs and outputs alone would take. decoding:
    a step after a context. conversion: a step of attention transfer.

    Args:
        mechanisms: Names of mechanisms.
        dtypes: Names of torch dtypes for the test of kernels; everything else has the first of them.
        lengths: Tokens.
        contexts: Tokens before a step of decoding.
        heads, head_dim: The shape of q, k and v.
        model: A name of a shape, for the step of conversion.
        tokens: Tokens of that step.
        seconds: Time for each cell; at least three rounds are timed.
        minutes: No cell begins later than this.
        seed: Of inputs, random weights and random features.
        device: A torch device.
    """
    workloads.check_names(mechanisms, None)
    end = time.monotonic() + 60 * minutes
    rows = yield Cell({"part": "memory"}, partial(_bandwidth, device, seconds))
    bandwidth = rows[0]["bytes_per_second"]
    if torch.device(device).type == "cuda":
        cases = list(_cases(mechanisms, dtypes, heads, head_dim, seed, device))
        yield Cell({"part": "compilation"}, partial(_compile, cases))
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "seed": seed, "device": device}
    timed: dict[str, Any] = {**sizes, "seconds": seconds, "dtypes": dtypes[:1]}
    fused = FUSED if torch.device(device).type == "cuda" else None
    parts: dict[str, Callable[[], Cells]] = {
        "kernels": partial(_kernels, mechanisms, dtypes, **sizes),
        "attention": partial(attention, mechanisms, fused, lengths=lengths, longest=1.0, **timed),
        "decoding": partial(decoding, mechanisms, contexts=contexts, batches=(1, 8), **timed),
        "conversion": partial(transfer_cost, mechanisms, (model,), (tokens,), seconds, dtypes[0], device),
    }
    for part, cells in parts.items():
        for cell, answer in driven(cells()):
            if time.monotonic() > end:
                return
            facts = {"part": part, **cell.facts}
            rows = yield Cell(facts, partial(_or_failure, cell.measure), cell.settings)
            answer.extend(row for row in rows if "failure" not in row)
            if part == "attention":
                tensor = heads * cell.facts["length"] * head_dim * getattr(torch, dtypes[0]).itemsize
                moved = MOVED_TENSORS[cell.facts["pass"]] * tensor
                for row in answer:
                    row["share_of_limit"] = moved / bandwidth / row["seconds"]["median"]


def _or_failure(measure: Callable[[], Rows]) -> Rows:
    """Return the rows, or what went wrong: the other cells must be known all the same."""
    try:
        return measure()
    except failures() as error:
        return [{"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}]


@torch.no_grad()
def _bandwidth(device: str, seconds: float) -> Rows:
    """Return how many bytes the memory reads and writes in a second."""
    size = COPIED_BYTES if torch.device(device).type == "cuda" else COPIED_BYTES >> 5
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    calls = {"copy": lambda: target.copy_(source)}
    samples = sample_interleaved(calls, seconds=seconds, device=torch.device(device))["copy"]
    return [{"bytes_per_second": 2 * size / sorted(samples)[len(samples) // 2]}]


# --------------------------------------------------------------------------------------------------------------------
# Kernels


Case = tuple[str, Setting]


def _cases(names: Any, dtypes: Any, heads: int, head_dim: int, seed: int, device: str) -> Iterator[Case]:
    """Yield each mechanism in each direction and dtype that it is tested in."""
    for dtype in dtypes:
        for causal in (True, False):
            setting = Setting(causal, dtype, True, 2, heads, head_dim, seed, device)
            yield from ((name, setting) for name in workloads.mechanism_names(names, causal))


def _compile(cases: Sequence[Case]) -> Rows:
    """Run the cases in as many processes as there are processors, which leave the compiled kernels on disk."""
    start = time.perf_counter()
    with ProcessPoolExecutor(min(len(cases), os.cpu_count() or 1), get_context("spawn")) as pool:
        for case in [pool.submit(_compare, *case) for case in cases]:
            case.exception()  # the same case fails in this process, which says why
    return [{"seconds": time.perf_counter() - start}]


def _kernels(names: Any, dtypes: Any, **sizes: Any) -> Cells:
    for name, setting in _cases(names, dtypes, **sizes):
        direction = "causal" if setting.causal else "bidirectional"
        facts = {"dtype": setting.dtype, "direction": direction, "attention": name}
        yield Cell(facts, partial(_compare, name, setting), vars(setting))


def _compare(name: str, setting: Setting) -> Rows:
    """Compare a mechanism by the backend of choice with torch in float64, from the same rounded inputs."""
    total = TESTED_TOKENS + 1
    module, inputs = setting.form(name, 2 * total).module, setting.inputs(total)
    mask = torch.ones(2, total, dtype=torch.bool, device=setting.device)
    mask[1, : total // 3] = False
    start = time.perf_counter()
    with workloads.recorded_backends() as seen:
        actual = _results(module, inputs, mask, setting.causal)
    seconds = time.perf_counter() - start
    double = Inputs(*(tensor.double() for tensor in vars(inputs).values()))
    with backends.use_backend("torch"):
        expected = _results(copy.deepcopy(module).double(), double, mask, setting.causal)
    errors = {f"{key}_error": relative_error(actual[key], expected[key]) for key in expected}
    return [{"backends": " ".join(sorted(set(seen))), "first_seconds": seconds, **errors}]


def _results(module: LinearAttention, inputs: Inputs, mask: Tensor, causal: bool) -> dict[str, Tensor]:
    """Return the output, the gradients of q, k, v in one row, and (causal) the output of one decoded token."""
    tensors = (inputs.query, inputs.key, inputs.value)
    scaling = inputs.query.shape[3] ** -0.5
    call = partial(AttentionInputs, scaling=scaling, causal=causal)
    leaves = [tensor[:, :, :-1].detach().clone().requires_grad_() for tensor in tensors]
    out = module(call(*leaves, mask=mask[:, :-1]))[0]
    out = out.masked_fill(~mask[:, None, :-1, None], 0.0)
    gradients = torch.autograd.grad(out, leaves, inputs.gradient[:, :, :-1])
    results = {"output": out.detach(), "gradient": torch.cat([gradient.flatten() for gradient in gradients])}
    if causal:
        with torch.no_grad():
            _, state = module(call(*(x[:, :, :-1] for x in tensors), mask=mask[:, :-1], return_state=True))
            token = call(*(x[:, :, -1:] for x in tensors), state=state, return_state=True)
            results["decoding"] = module(token)[0]
    return results
