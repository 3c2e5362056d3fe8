"""Where the time of attention goes: torch forms by kind of operation, native kernels by rate, a decoding step by piece.

    python -m recipes.benchmarks.profile_attention

Needs the package only. One thread, heads of 64 (12 of them), a row of `--length` tokens. Torch forms, float32:
PyTorch's profiler, by the time that every operation itself takes, and the time of the matrix products by themselves
beside it. Native kernels, float32 and bfloat16: operations of all their products (those of feature maps and windows
too) a second, beside the rate of one large product of PyTorch. Decoding: the medians of nested parts of one step, of
which each contains the next. Use a quiet machine. Writes recipes/results/profile.json; about two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms import AttentionInputs
from hf_linear_attn.mechanisms.window import WindowAttention
from hf_linear_attn.ops.common import InPlaceState
from hf_linear_attn.ops.native import binding
from hf_linear_attn.registry import ATTENTIONS, build_options
from hf_linear_attn.utils.environment import environment
from hf_linear_attn.utils.files import write_json
from recipes.benchmarks.decode import state_floor
from recipes.benchmarks.limits import products
from recipes.benchmarks.timing import sample_interleaved
from recipes.benchmarks.workloads import on_backend

HEADS, SIZE = 12, 64
SCALING = SIZE**-0.5
NAMES = ("elu", "hedgehog", "favor+")
DTYPES = ("float32", "bfloat16")
#: Tokens that the native kernels take at once.
BLOCK = 64
DIRECTIONS = {False: "bidirectional", True: "causal"}
#: Kinds of operations, by parts of their names.
KINDS = {
    "products": ("mm", "matmul"),
    "rest": ("expand",),
    "exponentials": ("exp", "elu", "softmax"),
    "sums and maxima": ("sum", "max"),
    "copies": ("copy", "cat", "clone", "fill", "zero", "empty"),
    "element by element": ("add", "sub", "mul", "div", "clamp", "tril", "where", "neg", "relu"),
}


def mechanism(name: str, causal: bool, dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(HEADS, HEADS, SIZE, SIZE, causal=causal)
    return entry.factory(shape, build_options(entry, {})).to(getattr(torch, dtype)).eval()


def medians(**calls: Callable[[], object]) -> dict[str, float]:
    """Median times of calls, timed in turns."""
    return {name: statistics.median(samples) for name, samples in sample_interleaved(calls, seconds=0.5).items()}


def kind_of(operation: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), "rest")


def by_kind(call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Shares of the time of the operations themselves."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            call()
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            spent[kind_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total
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


def runs(module: Any, causal: bool, length: int, dtype: str) -> dict[str, Callable[[], object]]:
    """A row of tokens by the torch form and by the native kernel."""
    inputs = [torch.randn(1, HEADS, length, SIZE).to(getattr(torch, dtype)) for _ in range(3)]

    def run() -> object:
        return module(AttentionInputs(*inputs, scaling=SCALING, causal=causal))

    return {backend: on_backend(run, backend) for backend in ("torch", "native")}


def torch_form(name: str, length: int, causal: bool) -> dict[str, Any]:
    module = mechanism(name, causal)
    features = module.feature_map.num_features
    form = runs(module, causal, length, "float32")["torch"]
    key, value = (torch.randn(1, HEADS, length, SIZE) for _ in range(2))
    times = medians(form=form, products=products(key, value, features, causal))
    return {
        "mechanism": name,
        "direction": DIRECTIONS[causal],
        "features": features,
        "seconds": times["form"],
        "products_seconds": times["products"],
        "shares": by_kind(form),
    }


def native_kernel(name: str, length: int, causal: bool, dtype: str) -> dict[str, Any]:
    module = mechanism(name, causal, dtype)
    each = multiplications(module, causal)
    times = medians(**runs(module, causal, length, dtype))
    return {
        "mechanism": name,
        "direction": DIRECTIONS[causal],
        "dtype": dtype,
        "multiplications_a_token_and_head": each,
        "seconds": times["native"],
        "operations_per_second": 2.0 * HEADS * length * each / times["native"],
        "torch_seconds": times["torch"],
    }


def large_product(dtype: str) -> float:
    """Operations a second of one large product."""
    square = torch.randn(1024, 1024).to(getattr(torch, dtype))
    return 2.0 * 1024**3 / medians(product=lambda: square @ square)["product"]


def step(name: str) -> dict[str, Any]:
    """One token after a state, batch 1: computed by itself, and like the step before it, as `generate` takes it."""
    module = mechanism(name, True)
    before = [torch.randn(1, HEADS, 100, SIZE) for _ in range(3)]
    token = [torch.randn(1, HEADS, 1, SIZE) for _ in range(3)]
    _, state = module(AttentionInputs(*before, scaling=SCALING, causal=True, return_state=True))

    def run(own: InPlaceState) -> Any:
        return module(AttentionInputs(*token, scaling=SCALING, causal=True, state=own, return_state=True))[1]

    times = medians(
        step=lambda: run(InPlaceState(state)),
        floor=state_floor(token[0], module.feature_map.num_features),
    )
    kernel = inner_seconds(lambda: run(InPlaceState(state)), binding, "launch")
    return {
        "mechanism": name,
        "features": module.feature_map.num_features,
        "parts": {
            "a step": times["step"],
            "of this its kernel": kernel,
        },
        "floor": times["floor"],
    }


def inner_seconds(run: Callable[[], object], owner: Any, name: str, repeats: int = 2000) -> float:
    """The median time of a function that `run` calls."""
    original, samples = getattr(owner, name), []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        call = original(*arguments)
        samples.append(time.perf_counter() - began)
        return call

    setattr(owner, name, timed)
    try:
        for _ in range(repeats):
            run()
    finally:
        setattr(owner, name, original)
    return statistics.median(samples)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "results" / "profile.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    length = arguments.length
    with torch.no_grad():
        peaks = {dtype: large_product(dtype) for dtype in DTYPES}
        forms = [torch_form(name, length, causal) for causal in (False, True) for name in NAMES]
        kernels = [
            native_kernel(name, length, causal, dtype)
            for dtype in DTYPES
            for causal in (False, True)
            for name in (*NAMES, "window")
        ]
        steps = [step(name) for name in NAMES]
    results = {
        "format_version": 2,
        "settings": {"length": arguments.length, "heads": HEADS, "size": SIZE},
        "environment": environment(torch.device("cpu")),
        "product_operations_per_second": peaks,
        "torch_forms": forms,
        "native_kernels": kernels,
        "steps": steps,
    }
    write_json(arguments.out, results)
    console.print(f"Written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
