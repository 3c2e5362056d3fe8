"""Decoding: one attention step after a context of n tokens against key-value caches; then whole models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.mechanisms.base import AttentionInputs, LinearAttention
from hf_linear_attn.ops.common import InPlaceState, State
from hf_linear_attn.registry import ATTENTIONS

from . import workloads
from .bench import Bench
from .resident import available_bytes
from .timing import InContext, ratio, sample_interleaved, spread

SECTION = "decode"
STEP = "step"

GROWING, PREALLOCATED = "growing cache", "preallocated cache"

#: Tokens of one call while a state is filled.
PIECE = 1024

#: A state of constant size holds the same tensors after any number of tokens: it is filled with at most so many.
SETTLED = 4096

#: Tokens that a mechanism built for a largest length must take beyond the longest context: those that are timed.
EXTRA_TOKENS = 16384

#: Share of the free memory that the caches of one cell may take.
MEMORY_SHARE = 0.7


def run_decode(bench: Bench) -> list[dict[str, Any]]:
    """The attention step for every mechanism, then whole models."""
    from .generate import run_generate

    rows = run_steps(bench) if bench.source is None else []
    return rows + run_generate(bench)


@dataclass
class Stepper:
    """One mechanism on one backend, with its state. own: constant states go on; growing ones are put back."""

    name: str
    identity: dict[str, Any]
    module: LinearAttention
    backend: str
    constant: bool
    state: State | None = None
    tokens: int = 0

    @property
    def features(self) -> int | None:
        return workloads.num_features(self.module)

    @torch.no_grad()
    def fill(self, context: int, token: Callable[[int], tuple[Tensor, Tensor, Tensor]]) -> None:
        """Advance the state to `context` tokens."""
        goal = min(context, SETTLED) if self.constant else context
        while self.tokens < goal:
            query, key, value = token(min(PIECE, goal - self.tokens))
            scaling = query.shape[3] ** -0.5
            _, self.state = self.module(
                AttentionInputs(query, key, value, scaling=scaling, causal=True, state=self.state, return_state=True)
            )
            self.tokens += query.shape[2]

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.state or {}).values())

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        scaling = query.shape[3] ** -0.5

        def step() -> None:
            # As in `generate`, the state is nobody else's; a growing one is put back, and so it is not.
            state = (
                self.state
                if not self.constant or isinstance(self.state, InPlaceState)
                else InPlaceState(self.state or {})
            )
            _, after = self.module(
                AttentionInputs(query, key, value, scaling=scaling, causal=True, state=state, return_state=True)
            )
            if self.constant:
                self.state = after

        return workloads.on_backend(InContext(step, torch.no_grad), self.backend)


def run_steps(bench: Bench) -> list[dict[str, Any]]:
    """All dtypes, batch sizes and contexts."""
    options = bench.options
    contexts, batches, dtypes = options.numbers("contexts"), options.numbers("batches"), options.names("dtypes")
    bench.progress.start("decoding, one attention step", len(dtypes) * len(batches) * len(contexts))
    rows: list[dict[str, Any]] = []
    done = 0
    for dtype in dtypes:
        for batch in batches:
            cells = [StepCell(bench, dtype, batch, context) for context in contexts]
            bench.progress.update(done, f"{dtype}, batch {batch}: building")
            steppers = list(_steppers(bench, cells[0], max(contexts)))
            for cell in cells:
                bench.progress.update(done, f"{dtype}, batch {batch}, after {cell.context:,} tokens")
                rows += cell.run(steppers)
                done += 1
    return rows


def _steppers(bench: Bench, first: StepCell, longest: int) -> list[Stepper]:
    options = bench.options
    steppers: list[Stepper] = []
    for name in bench.names():
        entry = ATTENTIONS.get(name)
        if not entry.causal or entry.state == "none":
            continue
        identity = {
            "name": name,
            "options": workloads.options_of(entry, options.seed),
            "longest": longest + EXTRA_TOKENS,
        }
        try:
            module = workloads.build(
                name,
                heads=options.heads,
                head_dim=options.head_dim,
                longest=longest + EXTRA_TOKENS,
                causal=True,
                seed=options.seed,
                dtype=first.torch_dtype,
                device=bench.device,
            )
            trial = Stepper(name, identity, module, workloads.OWN, entry.state == "constant")
            trial.fill(2, first.tokens)
            supported, unsupported = workloads.backends_of(trial.call(*first.tokens(1)), options.backend)
        except workloads.UNSUPPORTED_ERRORS as error:
            bench.note(SECTION, f"{name}, {first.dtype}: left out ({' '.join(str(error).split())})")
            continue
        for backend, reason in unsupported.items():
            bench.refuse(SECTION, backend, reason, f"{name} (one step, {first.dtype})")
        for backend in supported:
            label = name if backend == workloads.OWN else f"{name} [{backend}]"
            steppers.append(Stepper(label, {**identity, "backend": backend}, module, backend, trial.constant))
    return steppers


@dataclass(frozen=True)
class StepCell:
    """One dtype, batch size and context."""

    bench: Bench
    dtype: str
    batch: int
    context: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def shape(self) -> dict[str, Any]:
        heads, dim = self.bench.options.heads, self.bench.options.head_dim
        return {"name": f"{heads}×{dim}", "heads": heads, "head_dim": dim}

    @property
    def cache_bytes(self) -> int:
        options = self.bench.options
        return 2 * self.batch * options.heads * self.context * options.head_dim * self.torch_dtype.itemsize

    def tokens(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of so many tokens, the same for the same length."""
        options = self.bench.options
        inputs = workloads.Inputs.make(
            self.batch,
            options.heads,
            length,
            options.head_dim,
            self.torch_dtype,
            self.bench.device,
            options.seed,
        )
        return inputs.query, inputs.key, inputs.value

    def run(self, steppers: Sequence[Stepper]) -> list[dict[str, Any]]:
        measure = {"what": "decode step", "dtype": self.dtype, "batch": self.batch, "context": self.context}
        identities: dict[str, dict[str, Any]] = {
            name: {"name": "softmax", "implementation": f"sdpa, {name}"} for name in (GROWING, PREALLOCATED)
        }
        identities |= {stepper.name: stepper.identity for stepper in steppers}
        keys = {name: self.bench.key(self.shape, identity, measure) for name, identity in identities.items()}
        values = self.bench.rows(keys, partial(self._measure, steppers))
        facts = {"what": STEP, "shape": self.shape["name"], "dtype": self.dtype, "batch": self.batch}
        return [
            {"name": name, "mechanism": identities[name], **facts, "context": self.context, **value}
            for name, value in values.items()
        ]

    def _measure(self, steppers: Sequence[Stepper], missing: Sequence[str]) -> dict[str, dict[str, Any]]:
        chosen = {stepper.name: stepper for stepper in steppers if stepper.name in missing}
        for stepper in chosen.values():
            stepper.fill(self.context, self.tokens)
        single = self.tokens(1)
        calls: dict[str, Callable[[], object]] = self._caches(single)
        calls |= {name: stepper.call(*single) for name, stepper in chosen.items()}
        features = {stepper.features for stepper in chosen.values()}
        floors = {_floor(count): state_floor(single[0], count) for count in features if count is not None}
        samples = sample_interleaved(
            calls | floors, seconds=self.bench.options.number("seconds"), device=self.bench.device
        )
        values: dict[str, dict[str, Any]] = {}
        for name in calls:
            stepper = chosen.get(name)
            values[name] = {"seconds": spread(samples[name]), "bytes": stepper.bytes() if stepper else self.cache_bytes}
            if GROWING in samples:
                values[name]["speedup"] = ratio(samples[GROWING], samples[name])
                values[name]["over_preallocated"] = ratio(samples[PREALLOCATED], samples[name])
            if stepper is not None and stepper.features is not None:
                values[name]["over_floor"] = ratio(samples[name], samples[_floor(stepper.features)])
        return values

    def _caches(self, single: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], object]]:
        """The steps of exact attention; none where the caches do not fit."""
        needed, free = 4 * self.cache_bytes, available_bytes(self.bench.device)
        if free is not None and needed > MEMORY_SHARE * free:
            self.bench.note(
                SECTION,
                f"key-value caches of {self.batch} × {self.context:,} tokens in {self.dtype}: not measured, they take "
                f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} GB",
            )
            return {}
        query, key, value = single
        generator = torch.Generator().manual_seed(self.bench.options.seed)
        size = (*key.shape[:2], self.context, key.shape[3])
        keys, values = (torch.randn(size, generator=generator).to(key) for _ in range(2))
        key_buffer, value_buffer = (torch.cat([tensor, tensor[:, :, :1]], dim=2) for tensor in (keys, values))
        attend = torch.nn.functional.scaled_dot_product_attention

        def growing() -> Tensor:
            return attend(query, torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2))

        def preallocated() -> Tensor:
            key_buffer[:, :, -1:] = key
            value_buffer[:, :, -1:] = value
            return attend(query, key_buffer, value_buffer)

        return {GROWING: InContext(growing, torch.no_grad), PREALLOCATED: InContext(preallocated, torch.no_grad)}


def state_floor(query: Tensor, features: int) -> Callable[[], object]:
    """What a step cannot do without: `S += φ(k) vᵀ` in place and `φ(q)ᵀ S`, in float32, features given."""
    rows, width = query.shape[0] * query.shape[1], query.shape[3]
    options: Mapping[str, Any] = {"device": query.device, "dtype": torch.float32}
    state, value = torch.zeros(rows, features, width, **options), torch.rand(rows, 1, width, **options)
    mapped, out = torch.rand(rows, 1, features, **options), torch.empty(rows, 1, width, **options)

    def run() -> None:
        state.baddbmm_(mapped.transpose(1, 2), value)
        torch.bmm(mapped, state, out=out)

    return InContext(run, torch.no_grad)


def _floor(features: int) -> str:
    return f"state of {features} features"
