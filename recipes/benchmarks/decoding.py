"""Decoding: one attention step after a context, beside a key-value cache that grows and the state's own update."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_linear_attn.mechanisms.base import AttentionInputs, LinearAttention
from hf_linear_attn.ops.common import InPlaceState, State
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.utils.memory import free_memory
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .attention import Setting
from .runner import Cell, Cells, Rows
from .workloads import BASELINE, UNSUPPORTED_ERRORS, Call, Inputs, ratio, spread

#: Tokens of one call while a state is filled.
PIECE = 1024
#: A state of constant size is as large after any number of tokens: it is filled with at most so many.
SETTLED = 4096
#: Tokens beyond the longest context that a mechanism built for a largest length must take: those that are timed.
EXTRA_TOKENS = 16384
#: Share of the free memory that the caches of one cell may take.
MEMORY_SHARE = 0.7


def decoding(
    attention: tuple[str, ...] | None = None,
    backend: tuple[str, ...] | None = None,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    batches: tuple[int, ...] = (1, 8),
    contexts: tuple[int, ...] = (128, 1024, 4096, 32768),
    heads: int = 12,
    head_dim: int = 64,
    seconds: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> Cells:
    """One attention step after a context: seconds, bytes of the state, and the speedup over exact attention.

    Exact attention has a key-value cache that grows by concatenation, as `generate` has it by default. The floor of a
    kernelized mechanism is the update of its state alone, `S += φ(k) vᵀ` and `φ(q)ᵀ S`.

    Args:
        attention: Names of mechanisms; all by default.
        backend: Names of backends; all by default.
        dtypes: Names of torch dtypes.
        batches: Batch sizes.
        contexts: Tokens before the step.
        heads, head_dim: The shape of q, k and v.
        seconds: Time for each cell; at least three rounds are timed.
        seed: Of inputs, random weights and random features.
        device: A torch device.
    """
    workloads.check_names(attention, backend)
    for dtype, batch in product(dtypes, batches):
        setting = Setting(True, dtype, False, batch, heads, head_dim, seed, device)
        decoders = list(decoders_of(setting, attention, backend, max(contexts) + EXTRA_TOKENS))
        settings = {**vars(setting), "names": [" ".join(one.key) for one in decoders], "seconds": seconds}
        for context in sorted(contexts):
            facts = {"dtype": dtype, "batch": batch, "context": context}
            yield Cell(facts, partial(_measure, setting, decoders, context, seconds), settings)


class Decoder:
    """A mechanism on a backend with its state. A constant state goes on; one that grows stays as before a step."""

    def __init__(self, attention: str, backend: str, module: LinearAttention) -> None:
        self.key, self.backend, self.module = (attention, backend), backend, module
        self.is_constant = ATTENTIONS.get(attention).state == "constant"
        self.state: State | None = None
        self.filled = 0

    def advance(self, tokens: Inputs, state: State | None) -> State | None:
        qkv = (tokens.query, tokens.key, tokens.value)
        scaling = tokens.query.shape[3] ** -0.5
        return self.module(AttentionInputs(*qkv, scaling=scaling, causal=True, state=state, return_state=True))[1]

    @torch.no_grad()
    def fill(self, context: int, setting: Setting) -> None:
        """Advance the state to `context` tokens."""
        goal = min(context, SETTLED) if self.is_constant else context
        while self.filled < goal:
            piece = min(PIECE, goal - self.filled)
            self.state = self.advance(setting.inputs(piece), self.state)
            self.filled += piece

    def call(self, token: Inputs) -> Call:
        def step() -> None:
            if not self.is_constant:
                self.advance(token, self.state)
                return
            # As in `generate`, the state belongs to nobody else, and may be overwritten.
            state = self.state if isinstance(self.state, InPlaceState) else InPlaceState(self.state or {})
            self.state = self.advance(token, state)

        return workloads.on_backend(step, self.backend)


def decoders_of(
    setting: Setting, names: Sequence[str] | None, backends: Sequence[str] | None, longest: int
) -> Iterator[Decoder]:
    """Yield every mechanism that has a state, on every backend that supports a step."""
    for name in workloads.mechanism_names(names, causal=True):
        if ATTENTIONS.get(name).state == "none":
            continue
        try:
            module = setting.form(name, longest).module
            trial = Decoder(name, "", module)
            trial.fill(2, setting)
            with torch.no_grad():
                supported = workloads.backends_of(trial.call(setting.inputs(1)), backends)
        except UNSUPPORTED_ERRORS as error:
            workloads.left_out(name, error)
        else:
            yield from (Decoder(name, backend, module) for backend in supported)


@torch.no_grad()
def _measure(setting: Setting, decoders: Sequence[Decoder], context: int, seconds: float) -> Rows:
    token, device = setting.inputs(1), torch.device(setting.device)
    calls: dict[Any, Call] = {}
    for one in decoders:
        one.fill(context, setting)
        calls[one.key] = one.call(token)
    cache_bytes = 2 * context * token.key.nbytes
    if 4 * cache_bytes < MEMORY_SHARE * (free_memory(device) or float("inf")):
        calls[BASELINE, ""] = growing_cache(token, context, setting.seed)
    features = {one.key: workloads.num_features(one.module) for one in decoders}
    floors: dict[Any, Call] = {m: state_floor(token.query, m) for m in features.values() if m is not None}
    samples = sample_interleaved(calls | floors, seconds=seconds, device=device)
    sizes = {one.key: sum(part.nbytes for part in (one.state or {}).values()) for one in decoders}
    rows: Rows = []
    for key in calls:
        row: dict[str, Any] = {"attention": key[0], "backend": key[1], "seconds": spread(samples[key])}
        row["bytes"] = sizes.get(key, cache_bytes)
        if (BASELINE, "") in samples:
            row["speedup"] = ratio(samples[BASELINE, ""], samples[key])
        if (count := features.get(key)) is not None:
            row["over_floor"] = ratio(samples[key], samples[count])
        rows.append(row)
    return rows


def growing_cache(token: Inputs, context: int, seed: int) -> Call:
    """Return a step of exact attention after random keys and values."""
    query, key, value = token.query, token.key, token.value
    generator = torch.Generator().manual_seed(seed)
    size = (*key.shape[:2], context, key.shape[3])
    keys, values = (torch.randn(size, generator=generator).to(key) for _ in range(2))
    return lambda: scaled_dot_product_attention(query, torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2))


def state_floor(query: Tensor, features: int) -> Call:
    """Return what no step can go without: `S += φ(k) vᵀ` in place and `φ(q)ᵀ S`, in float32, with m features."""
    rows, width = query.shape[0] * query.shape[1], query.shape[3]
    options: dict[str, Any] = {"device": query.device, "dtype": torch.float32}
    state = torch.zeros(rows, features, width, **options)
    value = torch.rand(rows, 1, width, **options)
    mapped = torch.rand(rows, 1, features, **options)
    out = torch.empty(rows, 1, width, **options)

    def run() -> None:
        state.baddbmm_(mapped.transpose(1, 2), value)
        torch.bmm(mapped, state, out=out)

    return run
