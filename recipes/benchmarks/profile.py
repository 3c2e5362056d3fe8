"""Where the time of attention goes: torch forms by kind of operation, native kernels by rate, a step by its kernel."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.window import WindowAttention
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.ops.native import binding
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .attention import products
from .decoding import state_floor
from .runner import Cell, Cells, Rows
from .workloads import Call, Inputs

HEADS, SIZE = 12, 64
SCALING = SIZE**-0.5
DIRECTIONS = {"bidirectional": False, "causal": True}
#: Tokens that the native kernels take at once.
BLOCK = 64
#: Kinds of operations, by parts of their names.
KINDS = {
    "products": ("mm", "matmul"),
    "rest": ("expand",),
    "exponentials": ("exp", "elu", "softmax"),
    "sums and maxima": ("sum", "max"),
    "copies": ("copy", "cat", "clone", "fill", "zero", "empty"),
    "element by element": ("add", "sub", "mul", "div", "clamp", "tril", "where", "neg", "relu"),
}


def profile(attention: tuple[str, ...] = ("elu", "hedgehog", "favor+"), length: int = 4096) -> Cells:
    """Where the time of attention goes, for 12 heads of 64. Use a quiet machine; two minutes on one thread.

    Torch forms, float32: PyTorch's profiler, by the time that every operation itself takes, and the time of the matrix
    products alone. Native kernels: operations of all their products (those of feature maps and windows too) a second,
    beside the rate of one large product of PyTorch. Decoding: a step, and of this its kernel.

    Args:
        attention: Names of kernelized mechanisms; window is measured beside them.
        length: Tokens.
    """
    dtypes = ("float32", "bfloat16")
    for dtype in dtypes:
        yield Cell({"part": "product", "dtype": dtype}, partial(large_product, dtype))
    for direction, causal in DIRECTIONS.items():
        for name in attention:
            facts = {"part": "torch form", "attention": name, "direction": direction}
            yield Cell(facts, partial(torch_form, name, length, causal), {"length": length})
    for dtype in dtypes:
        for direction, causal in DIRECTIONS.items():
            for name in (*attention, "window"):
                facts = {"part": "native kernel", "attention": name, "direction": direction, "dtype": dtype}
                yield Cell(facts, partial(native_kernel, name, length, causal, dtype), {"length": length})
    for name in attention:
        yield Cell({"part": "step", "attention": name}, partial(step, name))


def build(name: str, causal: bool, dtype: str = "float32") -> Any:
    options: dict[str, Any] = {"heads": HEADS, "head_dim": SIZE, "longest": 512, "causal": causal, "seed": 0}
    return workloads.build(name, **options, dtype=getattr(torch, dtype))


@torch.no_grad()
def medians(**calls: Call) -> dict[str, float]:
    """Return the median times of calls, timed in turns."""
    return {name: statistics.median(samples) for name, samples in sample_interleaved(calls, seconds=1.0).items()}


@torch.no_grad()
def shares(call: Call, repeats: int = 5) -> dict[str, float]:
    """Return the shares of the time of the operations themselves, by kind."""
    call()
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            call()
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            name = event.key.removeprefix("aten::")
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "rest")
            spent[kind] += event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in sorted(KINDS, key="rest".__eq__)}


def multiplications(module: Any, causal: bool) -> float:
    """Of all products, for one token and head, as the native kernels do them: half of a triangle of weights."""
    features, weight = module.feature_map.num_features, module.feature_map.fused(SCALING)[0].weight
    count = 2 * features * SIZE + (0 if weight is None else 2 * SIZE * weight.shape[-1])
    triangle = BLOCK // 2 * (features + SIZE)
    if not isinstance(module, WindowAttention):
        return count + (triangle if causal else 0)
    window, sinks = module.options.window_size, module.options.sink_tokens
    if causal:
        return count + triangle + 2 * SIZE * (window + sinks)
    exact = 2 * SIZE * (2 * window - 1 + 2 * sinks)
    return count + features * SIZE + 2 * triangle + exact  # (sums from the end as well)


def calls_of(module: Any, causal: bool, length: int, dtype: str) -> dict[str, Call]:
    """A row of tokens by the torch form and by the native kernel."""
    inputs = Inputs.make(1, HEADS, length, SIZE, dtype, "cpu", 0)
    call = inputs.call(workloads.attend(module, causal), False)
    return {backend: workloads.on_backend(call, backend) for backend in ("torch", "native")}


def large_product(dtype: str) -> Rows:
    """Operations a second of one large product."""
    square = torch.randn(1024, 1024).to(getattr(torch, dtype))
    return [{"operations_per_second": 2.0 * 1024**3 / medians(product=lambda: square @ square)["product"]}]


def torch_form(name: str, length: int, causal: bool) -> Rows:
    module = build(name, causal)
    features = module.feature_map.num_features
    form = calls_of(module, causal, length, "float32")["torch"]
    inputs = Inputs.make(1, HEADS, length, SIZE, "float32", "cpu", 0)
    times = medians(form=form, products=products(inputs.key, inputs.value, features, causal))
    row = {"features": features, "seconds": times["form"], "products_seconds": times["products"]}
    return [{**row, "shares": shares(form)}]


def native_kernel(name: str, length: int, causal: bool, dtype: str) -> Rows:
    module = build(name, causal, dtype)
    each = multiplications(module, causal)
    times = medians(**calls_of(module, causal, length, dtype))
    rate = 2.0 * HEADS * length * each / times["native"]
    row = {"multiplications": each, "seconds": times["native"], "operations_per_second": rate}
    return [{**row, "torch_seconds": times["torch"]}]


@torch.no_grad()
def step(name: str) -> Rows:
    """One token after a state, batch 1, as `generate` takes it."""
    module = build(name, True)
    inputs = Inputs.make(1, HEADS, 101, SIZE, "float32", "cpu", 0)
    tokens = [tensor[:, :, :100] for tensor in (inputs.query, inputs.key, inputs.value)]
    token = [tensor[:, :, 100:] for tensor in (inputs.query, inputs.key, inputs.value)]
    _, state = module(AttentionInputs(*tokens, scaling=SCALING, causal=True, return_state=True))

    def run() -> Any:
        own = InPlaceState(state)
        return module(AttentionInputs(*token, scaling=SCALING, causal=True, state=own, return_state=True))[1]

    times = medians(step=run, floor=state_floor(token[0], module.feature_map.num_features))
    kernel = inner_seconds(run, binding, "launch")
    row = {"features": module.feature_map.num_features, "seconds": times["step"], "kernel_seconds": kernel}
    return [{**row, "floor_seconds": times["floor"]}]


def inner_seconds(run: Callable[[], object], owner: Any, name: str, repeats: int = 2000) -> float:
    """Return the median time of a function that `run` calls."""
    original, samples = getattr(owner, name), []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments)
        samples.append(time.perf_counter() - began)
        return result

    setattr(owner, name, timed)
    try:
        for _ in range(repeats):
            run()
    finally:
        setattr(owner, name, original)
    return statistics.median(samples)
