"""Peak memory of attention by itself, each value from a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from hf_linear_attn.measure.memory import free_memory, peak_memory

from . import workloads
from .attention import PASSES
from .runner import Cell, Cells, Rows
from .workloads import BASELINE, FEW, UNSUPPORTED_ERRORS, Inputs

EAGER = "eager"
#: Matrices of weights that eager attention needs at its peak: forward, and with backward.
EAGER_MATRICES = {False: 3, True: 6}
#: Share of the free memory that eager attention may take.
MEMORY_SHARE = 0.6


def memory(
    attention: tuple[str, ...] = FEW,
    backend: tuple[str, ...] | None = None,
    directions: tuple[str, ...] = ("bidirectional", "causal"),
    passes: tuple[str, ...] = tuple(PASSES),
    lengths: tuple[int, ...] = (1024, 4096, 16384),
    batch: int = 1,
    heads: int = 12,
    head_dim: int = 64,
    seed: int = 0,
) -> Cells:
    """Peak memory of one call in float32 on a CPU, beyond what was in use before it, and its ratio to the output's.

    Args:
        attention: Names of mechanisms.
        backend: Names of backends; all by default.
        directions: bidirectional, causal.
        passes: forward, forward+backward.
        lengths: Tokens.
        batch, heads, head_dim: The shape of q, k and v.
        seed: Of inputs, random weights and random features.
    """
    workloads.check_names(attention, backend)
    for direction in directions:
        for done in passes:
            shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "seed": seed}
            request = {**shape, "causal": direction == "causal", "backward": PASSES[done]}
            names = list(_names(attention, backend, request))
            for length in sorted(lengths):
                for name, one_backend in names:
                    if name == EAGER and not _fits(request, length):
                        continue
                    facts = {"direction": direction, "pass": done, "length": length}
                    facts |= {"attention": name, "backend": one_backend}
                    call = partial(_in_own_process, {**request, "name": name, "backend": one_backend}, length)
                    yield Cell(facts, call, shape)


def _fits(request: dict[str, Any], length: int) -> bool:
    """Whether there is memory for the weights of eager attention."""
    matrices = EAGER_MATRICES[request["backward"]]
    needed = matrices * 4 * request["batch"] * request["heads"] * length**2
    return needed < MEMORY_SHARE * (free_memory(torch.device("cpu")) or float("inf"))


def _names(names: Any, backends: Any, request: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((BASELINE, ""), (EAGER, ""))
    for name in workloads.mechanism_names(names, request["causal"]):
        try:
            supported = workloads.backends_of(_call({**request, "name": name, "backend": ""}, 64), backends)
        except UNSUPPORTED_ERRORS as error:
            workloads.left_out(name, error)
            continue
        yield from ((name, backend) for backend in supported)


def _call(request: dict[str, Any], length: int) -> workloads.Call:
    shape = (request["batch"], request["heads"], length, request["head_dim"])
    inputs, causal = Inputs.make(*shape, "float32", "cpu", request["seed"]), request["causal"]
    if request["name"] in (BASELINE, EAGER):
        attend = (workloads.sdpa if request["name"] == BASELINE else workloads.eager)(causal)
        return inputs.call(attend, request["backward"])
    sizes = {name: request[name] for name in ("heads", "head_dim", "causal", "seed")}
    module = workloads.build(request["name"], longest=max(length, 256), **sizes)
    call = inputs.call(workloads.attend(module, causal), request["backward"], module)
    return workloads.on_backend(call, request["backend"])


def _in_own_process(request: dict[str, Any], length: int) -> Rows:
    """Measure in a process that is forked from one which has imported everything and computed nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(peak, request, length, torch.get_num_threads()).result()
        except BrokenProcessPool as error:
            raise OSError(f"The process of {request['name']} at {length:,} tokens ended: too little memory?") from error


def peak(request: dict[str, Any], length: int, threads: int) -> Rows:
    """Return the peak of one call. A short call comes first: what libraries load on first use does not count."""
    torch.set_num_threads(threads)
    _call(request, min(256, length))()
    call = _call(request, length)
    value = peak_memory(call, torch.device("cpu"))
    if value is None:
        raise OSError("This system does not tell the peak of the resident set. It takes Linux.")
    output = 4 * request["batch"] * request["heads"] * length * request["head_dim"]
    return [{"bytes": value, "to_output": value / output}]
