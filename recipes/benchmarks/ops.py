"""Attention by itself: every mechanism and backend against `sdpa`, other packages and the limits, in the same turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_linear_attn.measure.memory import count_flops
from hf_linear_attn.mechanisms.base import LinearAttention

from . import limits, workloads
from .bench import BASELINE, Bench
from .peers import PEERS
from .timing import InContext, Samples, ratio, sample_interleaved, spread
from .workloads import Inputs

SECTION = "ops"
COPY = "copy"
REFERENCE = "product"
#: What `longest` allows a mechanism by itself, of what it allows exact attention: there are dozens of them.
SHARE_OF_LONGEST = 0.05
#: Mechanisms that are built for a largest length are built for that of their inputs, as a model's limit is near them,
#: and for no less than this.
LEAST_LIMIT = 512
#: Calls of so many seconds are timed once.
SLOW = 0.5
PASSES = {False: "forward", True: "forward+backward"}


@dataclass(frozen=True)
class Cell:
    """One direction, dtype, pass and length: what is timed side by side."""

    causal: bool
    dtype: str
    backward: bool
    length: int
    batch: int
    heads: int
    head_dim: int
    seed: int
    device: torch.device
    section: str = SECTION

    @property
    def direction(self) -> str:
        return "causal" if self.causal else "bidirectional"

    @property
    def shape(self) -> dict[str, Any]:
        name = f"{self.batch}×{self.heads}×{self.head_dim}"
        return {"name": name, "batch": self.batch, "heads": self.heads, "head_dim": self.head_dim}

    @property
    def measure(self) -> dict[str, Any]:
        return {
            "what": self.section,
            "direction": self.direction,
            "dtype": self.dtype,
            "pass": PASSES[self.backward],
            "length": self.length,
        }

    def inputs(self) -> Inputs:
        dtype = getattr(torch, self.dtype)
        return Inputs.make(self.batch, self.heads, self.length, self.head_dim, dtype, self.device, self.seed)


@dataclass(frozen=True)
class Candidate:
    """Something to time: `make` builds its call for inputs; features: m, where the limit is that of its products; else
    `forward` builds a call whose operations can be counted."""

    name: str
    identity: dict[str, Any]
    make: Callable[[Inputs], Callable[[], object]]
    features: int | None = None
    forward: Callable[[Inputs], Callable[[], object]] | None = None
    quadratic: bool = False


@dataclass
class Table:
    """The cells of one direction, dtype and pass, the shortest first."""

    bench: Bench
    candidates: list[Candidate] = field(default_factory=list)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)

    def expected(self, candidate: Candidate, length: int) -> float:
        """Seconds of one call, from the length before."""
        if candidate.name not in self.last:
            return 0.0
        before, seconds = self.last[candidate.name]
        growth = length / before
        return seconds * (growth**2 if candidate.quadratic else growth)

    def feasible(self, length: int, where: str) -> list[Candidate]:
        longest = self.bench.options.number("longest")
        feasible = []
        for candidate in self.candidates:
            expected = self.expected(candidate, length)
            if expected <= (longest if candidate.name == BASELINE else longest * SHARE_OF_LONGEST):
                feasible.append(candidate)
            else:
                message = (
                    f"{candidate.name}, {where}, {length:,} tokens: left out, one call would take ~{expected:.0f} s"
                )
                self.bench.note(SECTION, message)
        return feasible


def run_ops(bench: Bench) -> list[dict[str, Any]]:
    """All cells; one row for each candidate and cell."""
    options = bench.options
    lengths, dtypes = options.numbers("lengths"), options.names("dtypes")
    passes = (False, True) if options.backward else (False,)
    kinds = [
        (direction == "causal", dtype, backward)
        for direction in options.direction
        for dtype in dtypes
        for backward in passes
    ]
    bench.progress.start("attention by itself", len(kinds) * len(lengths))
    rows: list[dict[str, Any]] = []
    for index, (causal, dtype, backward) in enumerate(kinds):
        shape = (options.batch, options.heads, options.head_dim)
        cells = [Cell(causal, dtype, backward, length, *shape, options.seed, bench.device) for length in lengths]
        setting = f"{cells[0].direction}, {dtype}, {PASSES[backward]}"
        bench.progress.update(index * len(lengths), f"{setting}: building")
        table = Table(bench, candidates(bench, cells[0]))
        for index, cell in enumerate(cells):
            bench.progress.update(index * len(lengths) + index, f"{setting}, {cell.length:,} tokens")
            rows += run_cell(bench, cell, table.feasible(cell.length, setting), table)
    if options.headlines and not options.quick:
        rows += headline_cells(bench)
    return rows


def headline_cells(bench: Bench) -> list[dict[str, Any]]:
    """The comparison published for a width of 1,024 at 4,000 tokens, forward."""
    rows = []
    for direction in bench.options.direction:
        cell = Cell(direction == "causal", "float32", False, 4000, 1, 16, 64, bench.options.seed, bench.device)
        bench.progress.start(f"width 1,024 at 4,000 tokens, {direction}", 1)
        names = [name for name in HEADLINE_NAMES if bench.options.attention is None or name in bench.names()]
        chosen = candidates(bench, cell, names)
        rows += run_cell(bench, cell, [*chosen, eager_candidate(cell)], None)
    return rows


HEADLINE_NAMES = ("elu", "favor+", "hedgehog", "linformer")


def eager_candidate(cell: Cell) -> Candidate:
    """Exact attention that writes all weights down, as published comparisons have it."""

    def make(inputs: Inputs) -> Callable[[], object]:
        return InContext(lambda: workloads.eager(inputs, cell.causal), torch.no_grad)

    return Candidate("eager", {"name": "softmax", "implementation": "eager"}, make, forward=make, quadratic=True)


# --------------------------------------------------------------------------------------------------------------------
# Candidates


def candidates(bench: Bench, first: Cell, names: Sequence[str] | None = None) -> list[Candidate]:
    """Exact attention, every mechanism on every backend, and the other packages; tried on the shortest cell."""
    causal, backward = first.causal, first.backward
    inputs = first.inputs()
    candidates = [
        Candidate(
            BASELINE,
            {"name": "softmax", "implementation": BASELINE},
            lambda inputs: workloads.exact_call(inputs, causal, backward),
            quadratic=True,
        )
    ]
    for name in bench.names() if names is None else names:
        if workloads.serves(name, causal):
            try:
                candidates += _mechanism(bench, first, inputs, name)
            except workloads.UNSUPPORTED_ERRORS as error:
                bench.note(SECTION, f"{name}, {first.direction}, {first.dtype}: left out ({_line(error)})")
    return candidates + (_peers(bench, first, inputs) if bench.options.peers else [])


def _mechanism(bench: Bench, first: Cell, inputs: Inputs, name: str) -> list[Candidate]:
    options, causal, backward = bench.options, first.causal, first.backward

    @functools.lru_cache(maxsize=1)  # cells come length by length
    def built(length: int) -> LinearAttention:
        return workloads.build(
            name,
            heads=first.heads,
            head_dim=first.head_dim,
            longest=max(length, LEAST_LIMIT),
            causal=causal,
            seed=options.seed,
            dtype=getattr(torch, first.dtype),
            device=bench.device,
        )

    module = built(first.length)
    entry_options = workloads.options_of(workloads.ATTENTIONS.get(name), options.seed)
    call = workloads.timed_call(module, inputs, causal, backward)
    supported, unsupported = workloads.backends_of(call, options.backend)
    for backend, reason in unsupported.items():
        bench.refuse(SECTION, backend, reason, f"{name} ({first.direction}, {first.dtype}, {PASSES[backward]})")

    def make(inputs: Inputs, backend: str) -> Callable[[], object]:
        return workloads.on_backend(workloads.timed_call(built(inputs.length), inputs, causal, backward), backend)

    return [
        Candidate(
            name if backend == workloads.OWN else f"{name} [{backend}]",
            {"name": name, "options": entry_options, "backend": backend, "least_limit": LEAST_LIMIT},
            lambda inputs, backend=backend: make(inputs, backend),  # type: ignore[misc]
            workloads.num_features(module),
            lambda inputs: workloads.forward(built(inputs.length), inputs, causal),
        )
        for backend in supported
    ]


def _peers(bench: Bench, first: Cell, inputs: Inputs) -> list[Candidate]:
    causal, backward = first.causal, first.backward
    candidates = []
    for peer in PEERS:
        reason = peer.missing()
        if reason is not None:
            bench.note(SECTION, f"{peer.package}: {reason}")
            continue
        reason = peer.refuses(causal, first.dtype, bench.device)
        if reason is not None:
            bench.note(SECTION, f"{peer.name}: not measured {first.direction} in {first.dtype}: {reason}")
            continue

        def make(inputs: Inputs, peer: Any = peer) -> Callable[[], object]:
            attend = peer.attend(inputs, causal)
            if backward:
                return workloads.forward_backward(attend, inputs)
            return InContext(lambda: attend(inputs.query, inputs.key, inputs.value), torch.no_grad)

        try:
            make(inputs)()
        except (*workloads.UNSUPPORTED_ERRORS, RuntimeError, AssertionError) as error:
            bench.note(SECTION, f"{peer.name}: not measured {first.direction}, {PASSES[backward]}: {_line(error)}")
            continue
        identity = {"name": peer.what, "package": peer.package, "version": peer.version}
        candidates.append(Candidate(peer.name, identity, make, peer.features or first.head_dim))
    return candidates


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --------------------------------------------------------------------------------------------------------------------
# One cell


def run_cell(bench: Bench, cell: Cell, chosen: list[Candidate], table: Table | None) -> list[dict[str, Any]]:
    by_name = {candidate.name: candidate for candidate in chosen}
    keys = {name: bench.key(cell.shape, candidate.identity, cell.measure) for name, candidate in by_name.items()}
    measured = bench.rows(keys, lambda missing: measure_cell(bench, cell, by_name, missing))
    rows = []
    for name, value in measured.items():
        if table is not None:
            table.last[name] = (cell.length, value["seconds"]["median"])
        facts = {key: candidate for key, candidate in cell.measure.items() if key != "what"}
        rows.append({"name": name, "mechanism": by_name[name].identity, "shape": cell.shape["name"], **facts, **value})
    return rows


def measure_cell(
    bench: Bench, cell: Cell, by_name: Mapping[str, Candidate], missing: list[str]
) -> dict[str, dict[str, Any]]:
    """Time what is missing beside exact attention and the limits."""
    inputs = cell.inputs()
    chosen = {name: candidate for name, candidate in by_name.items() if name in missing or name == BASELINE}
    calls: dict[str, Callable[[], object]] = {}
    for name, candidate in chosen.items():
        try:
            calls[name] = candidate.make(inputs)
        except workloads.UNSUPPORTED_ERRORS as error:
            bench.note(cell.section, f"{name}, {cell.direction}, {cell.length:,} tokens: left out ({_line(error)})")
    factor = limits.BACKWARD_FACTOR if cell.backward else 1.0
    flops = {
        name: factor * count_flops(candidate.forward(inputs))
        for name, candidate in chosen.items()
        if name in calls and candidate.features is None and candidate.forward is not None
    }
    product, product_flops = limits.reference_product(inputs.key, inputs.value)
    moved = inputs.moved_bytes(cell.backward)
    beside = {COPY: limits.copying(moved, cell.device), REFERENCE: product}
    for features in {chosen[name].features for name in calls} - {None}:
        assert features is not None
        beside[_products(features)] = limits.products(inputs.key, inputs.value, features, cell.causal)
    seconds = bench.options.number("seconds")
    samples = sample_interleaved(calls | beside, seconds=seconds, device=cell.device, slow=SLOW)
    values = {}
    for name in calls:
        values[name] = _value(samples, name)
        values[name]["moved_bytes"] = moved
        features = chosen[name].features
        if features is not None:
            limit = [factor * candidate for candidate in samples[_products(features)]]
            values[name] |= {"limit": "products", "features": features}
        elif flops.get(name):
            limit = [candidate * flops[name] / product_flops for candidate in samples[REFERENCE]]
            values[name] |= {"limit": "operations", "flops": flops[name]}
        else:
            continue
        values[name] |= {"limit_seconds": spread(limit)["median"], "over_limit": ratio(samples[name], limit)}
    return values


def _products(features: int) -> str:
    return f"products with {features} features"


def _value(samples: Samples, name: str) -> dict[str, Any]:
    value: dict[str, Any] = {"seconds": spread(samples[name]), "over_copy": ratio(samples[name], samples[COPY])}
    if BASELINE in samples:
        value["speedup"] = ratio(samples[BASELINE], samples[name])
    return value
