"""Peak extra memory: each value from a process of its own, forked from one that has imported everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import workloads
from .bench import BASELINE, Bench, values_of
from .ops import PASSES
from .resident import available_bytes

SECTION = "memory"
FEW = ("elu", "favor+", "hedgehog", "window")
EAGER = "eager"
#: What is measured of a whole layer: q, k, v projections, attention, output projection, norm.
LAYER = "BERT-base attention layer"
LAYER_LENGTHS = (4096, 100_000)
#: Lengths of the published comparison, one head of 64, forward.
HEADLINE_LENGTHS = (4096, 24_576)
#: The time of exact attention at so many tokens and heads is what `longest` is compared with: seconds a pair and head.
SECONDS_A_PAIR = 256 / 6e10
#: Writing the weights down takes so many times as long.
EAGER_FACTOR = 4
MEMORY_SHARE = 0.6

WORKER = "recipes.benchmarks.memory_worker"


def run_memory(bench: Bench) -> list[dict[str, Any]]:
    """Attention by itself, a whole layer, and the published comparison."""
    requests = list(_requests(bench))
    bench.progress.start("memory", len(requests))
    rows: list[dict[str, Any]] = []
    with _worker(bench) as send_request:
        for index, request in enumerate(requests):
            bench.progress.update(index, f"{request['name']}, {request['length']:,} tokens, {request['pass']}")
            row = _measured(bench, request, send_request)
            if row is not None:
                rows.append(row)
    return rows


def _requests(bench: Bench) -> Iterator[dict[str, Any]]:
    """What to measure; left out is what would not fit or take too long."""
    options = bench.options
    shape = {"batch": options.batch, "heads": options.heads, "head_dim": options.head_dim}
    for direction in options.direction:
        for what in PASSES.values() if options.backward else (PASSES[False],):
            for length in options.numbers("memory_lengths"):
                workload = {"direction": direction, "pass": what, "length": length, **shape}
                yield from _candidates(bench, {"what": "attention", **workload}, (BASELINE, EAGER))
    if not options.headlines or options.quick:
        return
    for length in LAYER_LENGTHS:
        workload = {"direction": "bidirectional", "pass": PASSES[False], "length": length}
        layer = {"what": LAYER, **workload, "batch": 1, "heads": 12, "head_dim": 64}
        yield from _candidates(bench, layer, (BASELINE,))
    for length in HEADLINE_LENGTHS:
        workload = {"direction": "bidirectional", "pass": PASSES[False], "length": length}
        single = {"what": "attention", **workload, "batch": 1, "heads": 1, "head_dim": 64}
        yield from _candidates(bench, single, (BASELINE, EAGER))


def _candidates(bench: Bench, workload: dict[str, Any], exact: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name in exact:
        request = {**workload, "name": name, "mechanism": None, "backend": workloads.OWN}
        if _fits(bench, request):
            yield request
    for name in bench.names(FEW):
        if not workloads.serves(name, workload["direction"] == "causal"):
            continue
        for backend in _backends(bench, name, workload):
            label = name if backend == workloads.OWN else f"{name} [{backend}]"
            yield {**workload, "name": label, "mechanism": name, "backend": backend}


def _backends(bench: Bench, name: str, workload: dict[str, Any]) -> list[str]:
    """Those that serve it, tried on a short input."""
    options, length = bench.options, 64
    causal, backward = workload["direction"] == "causal", workload["pass"] == PASSES[True]
    heads, dim = workload["heads"], workload["head_dim"]
    inputs = workloads.Inputs.make(1, heads, length, dim, torch.float32, bench.device, options.seed)
    try:
        module = workloads.build(
            name, heads=heads, head_dim=dim, longest=length, causal=causal, seed=options.seed, device=bench.device
        )
        supported, unsupported = workloads.backends_of(
            workloads.timed_call(module, inputs, causal, backward), options.backend
        )
    except workloads.UNSUPPORTED_ERRORS as error:
        bench.note(SECTION, f"{name}, {workload['direction']}: left out ({' '.join(str(error).split())})")
        return []
    for backend, reason in unsupported.items():
        bench.refuse(SECTION, backend, reason, f"{name} ({workload['direction']}, {workload['pass']})")
    return supported


def _fits(bench: Bench, request: dict[str, Any]) -> bool:
    """Whether exact attention is worth trying: eager writes several matrices of L × L."""
    length, heads = request["length"], request["batch"] * request["heads"]
    backward = request["pass"] == PASSES[True]
    message = f"{request['name']}, {request['what']}, {length:,} tokens, {request['pass']}: left out"
    seconds = SECONDS_A_PAIR * heads * length**2 * (3.5 if backward else 1.0)
    seconds *= EAGER_FACTOR if request["name"] == EAGER else 1
    if seconds > bench.options.number("longest"):
        bench.note(SECTION, f"{message}, it would take ~{seconds:.0f} s")
        return False
    needed, free = (6 if backward else 3) * 4 * heads * length**2, available_bytes(bench.device)
    if request["name"] == EAGER and free is not None and needed > MEMORY_SHARE * free:
        bench.note(SECTION, f"{message}, it would take ~{needed / 1e9:.0f} GB")
        return False
    return True


def _measured(bench: Bench, request: dict[str, Any], send_request: Any) -> dict[str, Any] | None:
    shape = {name: request[name] for name in ("batch", "heads", "head_dim")}
    label = f"{shape['batch']}×{shape['heads']}×{shape['head_dim']}"
    measure = {name: request[name] for name in ("direction", "pass", "length")}
    mechanism = {
        "name": request["mechanism"] or "softmax",
        "implementation": request["name"],
        "backend": request["backend"],
    }
    model = {"name": request["what"], **shape}
    key = bench.key(model, mechanism, {"what": SECTION, "dtype": "float32", **measure})
    record = bench.store.known(key)
    if record is None:
        answer = send_request({**request, "seed": bench.options.seed, "device": str(bench.device)})
        if "error" in answer:
            label_text = f"{request['name']}, {request['what']}, {request['direction']}, {request['pass']}"
            bench.note(SECTION, f"{label_text}: left out ({answer['error']})")
            return None
        record = bench.store.add(key, answer)
    columns = {"what": request["what"], "shape": label, **measure, "dtype": "float32"}
    return {
        "name": request["name"],
        "mechanism": mechanism,
        **columns,
        **values_of(record),
    }


@contextmanager
def _worker(bench: Bench) -> Iterator[Any]:
    """A function that hands a request to a process and gives back its answer."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(bench.options.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    process: subprocess.Popen[str] | None = None

    def send_request(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal process
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=variables,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({**request, "threads": bench.options.threads}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            process.wait()
            raise OSError(f"The process that measures memory ended (exit code {process.returncode}). Try again.")
        return json.loads(line)

    try:
        yield send_request
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
