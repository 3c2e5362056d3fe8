"""Attention by itself: time and memory of every mechanism and backend, and other packages, beside `sdpa` and limits."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.measure.speed import count_flops
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.utils.memory import free_memory, peak_memory
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .runner import Cell, Cells, Rows
from .workloads import BASELINE, FEW, UNSUPPORTED_ERRORS, Call, Inputs, ratio, spread

EAGER = "eager"
#: Exact attention, as PyTorch computes it and with all weights in memory.
EXACT = {BASELINE: workloads.sdpa, EAGER: workloads.eager}
#: Mechanisms that are built for a largest length are built for no smaller one than this.
LEAST_LONGEST = 512
#: A backward pass has two products for each one of the forward pass.
BACKWARD_FACTOR = 3.0
#: Tokens of a chunk of the causal products.
CHUNK = 128
PASSES = {"forward": False, "forward+backward": True}

#: The name of what is timed, and that of its backend.
Key = tuple[str, str]


def attention(
    attention: tuple[str, ...] | None = None,
    backend: tuple[str, ...] | None = None,
    directions: tuple[str, ...] = ("bidirectional", "causal"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    passes: tuple[str, ...] = tuple(PASSES),
    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384),
    batch: int = 1,
    heads: int = 12,
    head_dim: int = 64,
    peers: bool = True,
    seconds: float = 1.0,
    longest: float = 2.0,
    seed: int = 0,
    device: str = "cpu",
) -> Cells:
    """Attention by itself on random q, k, v: seconds, the speedup over sdpa, and the time over the limit.

    The limit is the time of PyTorch's matrix products alone for the same shapes, or (of mechanisms that are not
    kernelized) of as many operations at the rate of a product of the heads. Everything in a cell takes turns.

    Args:
        attention: Names of mechanisms; all by default.
        backend: Names of backends; all by default.
        directions: bidirectional, causal.
        dtypes: Names of torch dtypes.
        passes: forward, forward+backward.
        lengths: Tokens.
        batch, heads, head_dim: The shape of q, k and v.
        peers: Whether to measure other packages, where they are installed.
        seconds: Time for each cell; at least three rounds are timed.
        longest: Leave out what is expected to take so many seconds a call.
        seed: Of inputs, random weights and random features.
        device: A torch device.
    """
    workloads.check_names(attention, backend)
    for direction, dtype, done in product(directions, dtypes, passes):
        setting = Setting(direction == "causal", dtype, PASSES[done], batch, heads, head_dim, seed, device)
        keys = [(BASELINE, ""), *setting.supported(attention, backend, peers=peers)]
        last: dict[Key, float] = {}
        before = 1
        for length in sorted(lengths):
            growth = length / before
            keys = [key for key in keys if last.get(key, 0) * growth ** (1 + (key[0] == BASELINE)) < longest]
            facts = {"direction": direction, "dtype": dtype, "pass": done, "length": length}
            settings = {**vars(setting), "names": [" ".join(key) for key in keys], "seconds": seconds}
            rows = yield Cell(facts, partial(measure, setting, keys, length, seconds), settings)
            last = {(row["attention"], row["backend"]): row["seconds"]["median"] for row in rows}
            before = length


@dataclass(frozen=True)
class Form:
    """Something to time: a function of q, k, v, its module, and m if it is kernelized attention."""

    attend: Callable[..., Tensor]
    module: Any = None
    features: int | None = None


@dataclass(frozen=True)
class Setting:
    """All that is the same in the cells of one table."""

    causal: bool
    dtype: str
    backward: bool
    batch: int
    heads: int
    head_dim: int
    seed: int
    device: str = "cpu"

    def inputs(self, length: int) -> Inputs:
        return Inputs.make(self.batch, self.heads, length, self.head_dim, self.dtype, self.device, self.seed)

    def form(self, name: str, length: int) -> Form:
        """Return exact attention, a mechanism or another package by its name, for inputs of a length."""
        if name in EXACT:
            return Form(EXACT[name](self.causal))
        if name in PEERS:
            features, make = PEERS[name]
            return Form(make(self, length), None, features or self.head_dim)
        sizes: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim, "causal": self.causal}
        sizes |= {"seed": self.seed, "device": self.device, "dtype": getattr(torch, self.dtype)}
        module = workloads.build(name, longest=max(length, LEAST_LONGEST), **sizes)
        return Form(workloads.attend(module, self.causal), module, workloads.num_features(module))

    def call(self, key: Key, length: int) -> Call:
        form = self.form(key[0], length)
        return workloads.on_backend(self.inputs(length).call(form.attend, self.backward, form.module), key[1])

    def supported(
        self, names: Sequence[str] | None, backends: Sequence[str] | None, *, peers: bool = False
    ) -> Iterator[Key]:
        """Yield every mechanism on every backend that supports it, and other packages. What these print is hidden."""
        for name in (*workloads.mechanism_names(names, self.causal), *(PEERS if peers else ())):
            errors = PEER_ERRORS if name in PEERS else UNSUPPORTED_ERRORS
            try:
                with (
                    contextlib.redirect_stdout(io.StringIO()),
                    warnings.catch_warnings(action="ignore"),
                    torch.set_grad_enabled(self.backward),
                ):
                    supported = workloads.backends_of(self.call((name, ""), 64), backends)
            except errors as error:
                workloads.left_out(name, error)
            else:
                yield from ((name, backend) for backend in supported)


def measure(setting: Setting, keys: Sequence[Key], length: int, seconds: float) -> Rows:
    """Time exact attention, mechanisms and packages beside the limits."""
    inputs = setting.inputs(length)
    factor = BACKWARD_FACTOR if setting.backward else 1.0
    forms = {name: setting.form(name, length) for name, _ in keys}
    once = {name: inputs.call(form.attend, setting.backward, form.module) for name, form in forms.items()}
    calls: dict[Any, Call] = {(name, backend): workloads.on_backend(once[name], backend) for name, backend in keys}
    calls["product"], product_flops = reference_product(inputs.key, inputs.value)
    for features in {form.features for form in forms.values()} - {None}:
        calls[features] = products(inputs.key, inputs.value, features, setting.causal)
    with torch.set_grad_enabled(setting.backward):
        samples = sample_interleaved(calls, seconds=seconds, device=torch.device(setting.device))
    rows: Rows = []
    for name, backend in keys:
        times, form = samples[name, backend], forms[name]
        row: dict[str, Any] = {"attention": name, "backend": backend, "seconds": spread(times)}
        if (BASELINE, "") in samples:
            row["speedup"] = ratio(samples[BASELINE, ""], times)
        if form.features is not None:
            limit = [factor * value for value in samples[form.features]]
            row |= {"limit": "products", "over_limit": ratio(times, limit)}
        elif name in ATTENTIONS:
            share = factor * count_flops(inputs.call(form.attend, False)) / product_flops
            row |= {"limit": "operations", "over_limit": ratio(times, [share * value for value in samples["product"]])}
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------------------------------
# Limits


def products(key: Tensor, value: Tensor, features: int, causal: bool) -> Call:
    """Return the matrix products of kernelized attention with m features, and nothing else.

    Bidirectional: `S = φ(k)ᵀ v` and `φ(q) S`, 4·B·H·L·m·e operations. Causal: in each chunk of C = 128 tokens the
    weights, weights times values, reading the state, and adding to it, B·H·L·(2·C·(m + e) + 4·m·e) operations.

    Args:
        key, value: Their shapes, dtype and device are used, `[B, H, L, d]`.
        features: m.
        causal: The direction.
    """
    values = value.flatten(0, 1)
    rows, length, width = values.shape
    chunk = min(CHUNK, length)
    mapped = torch.rand(rows, length, features, device=key.device).to(key.dtype)
    state, out = values.new_zeros(rows, features, width), torch.empty_like(values)
    weights = values.new_empty(rows, chunk, chunk)
    inner = values.new_empty(rows, chunk, width)

    def bidirectional_products() -> None:
        torch.bmm(mapped.transpose(1, 2), values, out=state)
        torch.bmm(mapped, state, out=out)

    def causal_products() -> None:
        for start in range(0, length - chunk + 1, chunk):
            mapped_chunk = mapped[:, start : start + chunk]
            value_chunk = values[:, start : start + chunk]
            torch.bmm(mapped_chunk, mapped_chunk.transpose(1, 2), out=weights)
            torch.bmm(weights, value_chunk, out=inner)
            torch.bmm(mapped_chunk, state, out=inner)
            torch.bmm(mapped_chunk.transpose(1, 2), value_chunk, out=state)

    return causal_products if causal else bidirectional_products


def reference_product(key: Tensor, value: Tensor) -> tuple[Call, int]:
    """Return a product of each head, `[L, d] @ [d, d]`, and its operations: the rate at which others' are counted."""
    left = key.flatten(0, 1)
    rows, length, dim = left.shape
    right = torch.rand(rows, dim, dim, device=left.device).to(left.dtype)
    out = torch.empty_like(left)
    return (lambda: torch.bmm(left, right, out=out)), 2 * rows * length * dim * dim


# --------------------------------------------------------------------------------------------------------------------
# Other packages

#: Random features of theirs and, by default, of ours.
FEATURES = 256
#: What the import and a call of a package raise where it cannot serve.
PEER_ERRORS = (ImportError, RuntimeError, *UNSUPPORTED_ERRORS)


def by_token(tensor: Tensor) -> Tensor:
    """Return `[B, H, L, d]` as `[B, L, H, d]`."""
    return tensor.transpose(1, 2)


def fast_transformers_elu(setting: Setting, length: int) -> Callable[..., Tensor]:
    from fast_transformers.attention import CausalLinearAttention, LinearAttention
    from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    module: Any = (CausalLinearAttention if setting.causal else LinearAttention)(setting.head_dim)
    seen = TriangularCausalMask(length) if setting.causal else FullMask(length, length)
    real = LengthMask(torch.full((setting.batch,), length), max_len=length)
    return lambda q, k, v: module(by_token(q), by_token(k), by_token(v), seen, real, real).transpose(1, 2)


def performer(setting: Setting, length: int) -> Callable[..., Tensor]:
    from performer_pytorch.performer_pytorch import FastAttention

    return FastAttention(setting.head_dim, nb_features=FEATURES, causal=setting.causal).to(setting.device)


def flash_linear_attention(setting: Setting, length: int) -> Callable[..., Tensor]:
    from fla.ops.linear_attn import chunk_linear_attn

    if not setting.causal or not setting.device.startswith("cuda"):
        raise NotImplementedError("it is causal, and runs on GPUs only")
    return lambda q, k, v: chunk_linear_attn(by_token(q), by_token(k), by_token(v), normalize=False)[0].transpose(1, 2)


#: Name -> m (None: the size of a head), and the function of q, k, v for a length.
PEERS: dict[str, tuple[int | None, Callable[[Setting, int], Callable[..., Tensor]]]] = {
    "pytorch-fast-transformers: elu": (None, fast_transformers_elu),
    "performer-pytorch: favor+ (m = 256)": (FEATURES, performer),
    "flash-linear-attention: no feature map": (None, flash_linear_attention),
}

# --------------------------------------------------------------------------------------------------------------------
# Memory

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
    for direction, done in product(directions, passes):
        setting = Setting(direction == "causal", "float32", PASSES[done], batch, heads, head_dim, seed)
        keys = [*((name, "") for name in EXACT), *setting.supported(attention, backend)]
        for length, (name, chosen) in product(sorted(lengths), keys):
            if name != EAGER or _fits(setting, length):
                facts = {"direction": direction, "pass": done, "length": length, "attention": name, "backend": chosen}
                yield Cell(facts, partial(peak, setting, (name, chosen), length), vars(setting))


def _fits(setting: Setting, length: int) -> bool:
    """Whether there is memory for the weights of eager attention."""
    needed = EAGER_MATRICES[setting.backward] * 4 * setting.batch * setting.heads * length**2
    return needed < MEMORY_SHARE * (free_memory(torch.device("cpu")) or float("inf"))


def peak(setting: Setting, key: Key, length: int) -> Rows:
    """Return the peak of one call. A short call comes first: what libraries load on first use does not count."""
    with torch.set_grad_enabled(setting.backward):
        setting.call(key, min(256, length))()
        value = peak_memory(setting.call(key, length), torch.device("cpu"))
    if value is None:
        raise OSError("This system does not tell the peak of the resident set. It takes Linux.")
    return [{"bytes": value, "to_output": value / (4 * setting.batch * setting.heads * length * setting.head_dim)}]
