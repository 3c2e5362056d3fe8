"""Where the time of attention goes: torch forms by kind of operation, native kernels by rate, a decoding step by piece.

    python recipes/profile_attention.py

Needs the package only. One thread, float32, heads of 64 (12 of them), a row of `--length` tokens. Torch forms:
PyTorch's profiler, by the time that every operation itself takes, and the time of the matrix products by themselves
beside it. Native kernels: operations of all their products (that of the feature map too) a second, beside the rate of
one large product of PyTorch. Decoding: the medians of nested parts of one step, of which each contains the next. Use a
quiet machine. Writes recipes/results/profile.json; about a minute.
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

from hf_linear_attn.evaluation.benchmark.decode import state_floor
from hf_linear_attn.evaluation.benchmark.limits import products
from hf_linear_attn.evaluation.benchmark.turns import take_turns
from hf_linear_attn.evaluation.report import environment
from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from hf_linear_attn.ops import backends
from hf_linear_attn.ops.common import OwnState
from hf_linear_attn.ops.native.ready import ReadyStep
from hf_linear_attn.registry import FEATURE_MAPS, build_options
from hf_linear_attn.training.saving import write_json

HEADS, SIZE = 12, 64
NAMES = ("elu", "hedgehog", "favor+")
#: Kinds of operations, by parts of their names.
KINDS = {
    "products": ("mm", "matmul"),
    "rest": ("expand",),
    "exponentials": ("exp", "elu", "softmax"),
    "sums and maxima": ("sum", "max"),
    "copies": ("copy", "cat", "clone", "fill", "zero", "empty"),
    "element by element": ("add", "sub", "mul", "div", "clamp", "tril", "where", "neg", "relu"),
}


def mechanism(name: str, causal: bool) -> KernelizedAttention:
    torch.manual_seed(0)
    entry = FEATURE_MAPS.get(name)
    shape = AttentionShape(HEADS, HEADS, SIZE, SIZE, causal=causal)
    return KernelizedAttention(shape, build_options(entry, {}), entry.cls)


def medians(**calls: Callable[[], object]) -> dict[str, float]:
    """Median times of calls, timed in turns."""
    return {name: statistics.median(samples) for name, samples in take_turns(calls, seconds=0.5).items()}


def kind_of(operation: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in operation for part in parts)), "rest")


def by_kind(call: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Shares of the time of the operations themselves."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            call()
    spent: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        if event.key.startswith("aten::"):
            spent[kind_of(event.key.removeprefix("aten::"))] += event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in sorted(KINDS, key="rest".__eq__)}


def operations(features: int, projected: int, length: int, causal: bool) -> float:
    """Multiplications and additions of all products; projected: numbers that the feature map computes by a product."""
    chunk = 64  # of the native kernels; half of the weights are computed
    within = length * chunk * (features + SIZE) if causal else 0
    return HEADS * (4.0 * length * features * SIZE + within + 4.0 * length * SIZE * projected)


def forms(name: str, length: int, causal: bool) -> dict[str, Any]:
    module = mechanism(name, causal)
    inputs = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
    features = module.feature_map.num_features

    def run(backend: str) -> Callable[[], object]:
        def call() -> None:
            with backends.use_backend(backend):
                module(*inputs, scaling=SIZE**-0.5, causal=causal)

        return call

    fused = module.feature_map.fused(SIZE**-0.5)
    assert fused is not None
    weight = fused[0].weight
    work = operations(features, 0 if weight is None else weight.shape[-1], length, causal)
    alone = products(inputs[1], inputs[2], features, causal)
    times = medians(torch=run("torch"), native=run("native"), products=alone)
    return {
        "mechanism": name,
        "direction": "causal" if causal else "bidirectional",
        "length": length,
        "features": features,
        "torch_seconds": times["torch"],
        "products_seconds": times["products"],
        "torch_shares": by_kind(run("torch")),
        "native_seconds": times["native"],
        "native_operations_per_second": work / times["native"],
    }


def step(name: str) -> dict[str, Any]:
    """One token after a state, batch 1: computed by itself, and like the step before it, as `generate` takes it."""
    module = mechanism(name, True)
    before = [torch.randn(1, HEADS, 100, SIZE) for _ in range(3)]
    token = [torch.randn(1, HEADS, 1, SIZE) for _ in range(3)]
    scaling = SIZE**-0.5
    _, state = module(*before, scaling=scaling, causal=True, keep_state=True)

    def run(own: OwnState) -> Any:
        return module(*token, scaling=scaling, causal=True, state=own, keep_state=True)[1]

    own = run(OwnState(state))
    times = medians(
        alone=lambda: run(OwnState(state)),
        again=lambda: run(own),
        floor=state_floor(token[0], module.feature_map.num_features),
    )
    kernel = inner_seconds(lambda: run(own), ReadyStep, "run")
    return {
        "mechanism": name,
        "features": module.feature_map.num_features,
        "parts": {
            "by itself": times["alone"],
            "like the one before": times["again"],
            "of this its output and kernel": kernel,
        },
        "floor": times["floor"],
    }


def inner_seconds(run: Callable[[], object], owner: Any, name: str, repeats: int = 2000) -> float:
    """The median time of a function that `run` calls."""
    original, samples = getattr(owner, name), []

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        made = original(*given)
        samples.append(time.perf_counter() - began)
        return made

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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "profile.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    square = torch.randn(1024, 1024)
    with torch.no_grad():
        peak = 2.0 * 1024**3 / medians(product=lambda: square @ square)["product"]
        found = [forms(name, arguments.length, causal) for causal in (False, True) for name in NAMES]
        steps = [step(name) for name in NAMES]
    made = {
        "format_version": 1,
        "settings": {"length": arguments.length, "heads": HEADS, "size": SIZE},
        "environment": environment(torch.device("cpu")),
        "product_operations_per_second": peak,
        "forms": found,
        "steps": steps,
    }
    write_json(arguments.out, made)
    console.print(f"Written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
