"""Attention by itself: time and memory of every mechanism and backend, and other packages, beside `sdpa` and limits."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from hf_linear_attn.measure.memory import count_flops, free_memory, peak_memory
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.utils.timing import sample_interleaved

from . import workloads
from .runner import Cell, Cells, Rows
from .workloads import BASELINE, FEW, UNSUPPORTED_ERRORS, Call, Inputs, ratio, spread

#: Mechanisms that are built for a largest length are built for no smaller one than this.
LEAST_LONGEST = 512
#: A backward pass has two products for each one of the forward pass.
BACKWARD_FACTOR = 3.0
#: Tokens of a chunk of the causal products.
CHUNK = 128
PASSES = {"forward": False, "forward+backward": True}


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
    for direction in directions:
        for dtype in dtypes:
            for done in passes:
                setting = Setting(direction == "causal", dtype, PASSES[done], batch, heads, head_dim, seed, device)
                candidates = [
                    *own_candidates(setting, attention, backend),
                    *(peer_candidates(setting) if peers else ()),
                ]
                last: dict[tuple[str, str], float] = {}
                before = 0
                for length in sorted(lengths):
                    chosen = [one for one in candidates if one.expected(last.get(one.key), length, before) < longest]
                    names = [" ".join(one.key) for one in chosen]
                    facts = {"direction": direction, "dtype": dtype, "pass": done, "length": length}
                    settings = {**vars(setting), "names": names, "seconds": seconds}
                    rows = yield Cell(facts, partial(measure, setting, chosen, length, seconds), settings)
                    last = {(row["attention"], row["backend"]): row["seconds"]["median"] for row in rows}
                    candidates, before = chosen, length


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
    device: str

    def inputs(self, length: int) -> Inputs:
        return Inputs.make(self.batch, self.heads, length, self.head_dim, self.dtype, self.device, self.seed)


@dataclass(frozen=True)
class Candidate:
    """Something to time.

    Args:
        attention, backend: Its names.
        make: Makes the function of q, k, v for a length.
        features: m, where its limit is that of the products of kernelized attention.
        module: Makes the module whose parameters need gradients.
    """

    attention: str
    backend: str
    make: Callable[[int], Callable[..., Tensor]]
    features: int | None = None
    module: Callable[[int], Any] = lambda length: None

    @property
    def key(self) -> tuple[str, str]:
        return self.attention, self.backend

    def expected(self, seconds: float | None, length: int, before: int) -> float:
        """Return the seconds of one call, by those at the length before."""
        return 0.0 if seconds is None else seconds * (length / before) ** (2 if self.attention == BASELINE else 1)

    def call(self, setting: Setting, inputs: Inputs) -> Call:
        length = inputs.query.shape[2]
        call = inputs.call(self.make(length), setting.backward, self.module(length))
        return workloads.on_backend(call, self.backend)


def own_candidates(setting: Setting, names: Sequence[str] | None, backends: Sequence[str] | None) -> list[Candidate]:
    """Exact attention, and every mechanism on every backend that supports it."""
    candidates = [Candidate(BASELINE, "", lambda length: workloads.sdpa(setting.causal))]
    inputs = setting.inputs(64)
    for name in workloads.mechanism_names(names, setting.causal):

        @lru_cache(maxsize=1)  # cells come length by length
        def module(length: int, name: str = name) -> Any:
            sizes: dict[str, Any] = {"heads": setting.heads, "head_dim": setting.head_dim, "causal": setting.causal}
            dtype = getattr(torch, setting.dtype)
            longest = max(length, LEAST_LONGEST)
            return workloads.build(
                name, **sizes, longest=longest, seed=setting.seed, dtype=dtype, device=setting.device
            )

        def make(length: int, module: Any = module) -> Callable[..., Tensor]:
            return workloads.attend(module(length), setting.causal)

        try:
            built = module(64)
            with torch.set_grad_enabled(setting.backward):
                supported = workloads.backends_of(inputs.call(make(64), setting.backward, built), backends)
        except UNSUPPORTED_ERRORS as error:
            workloads.left_out(name, error)
            continue
        features = workloads.num_features(built)
        candidates += [Candidate(name, backend, make, features, module) for backend in supported]
    return candidates


def measure(setting: Setting, candidates: Sequence[Candidate], length: int, seconds: float) -> Rows:
    """Time the candidates beside the limits."""
    inputs = setting.inputs(length)
    calls = {one.key: one.call(setting, inputs) for one in candidates}
    factor = BACKWARD_FACTOR if setting.backward else 1.0
    product, product_flops = reference_product(inputs.key, inputs.value)
    limits: dict[Any, Call] = {"product": product}
    for features in {one.features for one in candidates} - {None}:
        limits[features] = products(inputs.key, inputs.value, features, setting.causal)
    with torch.set_grad_enabled(setting.backward):
        samples: dict[Any, list[float]] = sample_interleaved(
            calls | limits, seconds=seconds, device=torch.device(setting.device)
        )
    rows: Rows = []
    for one in candidates:
        own = samples[one.key]
        row: dict[str, Any] = {"attention": one.attention, "backend": one.backend, "seconds": spread(own)}
        if (BASELINE, "") in samples:
            row["speedup"] = ratio(samples[BASELINE, ""], own)
        if one.features is not None:
            row |= {"limit": "products", "over_limit": ratio(own, [factor * value for value in samples[one.features]])}
        elif one.attention in ATTENTIONS:
            forward = count_flops(inputs.call(one.make(length), False))
            limit = [factor * value * forward / product_flops for value in samples["product"]]
            row |= {"limit": "operations", "over_limit": ratio(own, limit)}
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
    weights, inner = values.new_empty(rows, chunk, chunk), values.new_empty(rows, chunk, width)

    def bidirectional_products() -> None:
        torch.bmm(mapped.transpose(1, 2), values, out=state)
        torch.bmm(mapped, state, out=out)

    def causal_products() -> None:
        for start in range(0, length - chunk + 1, chunk):
            mapped_chunk, value_chunk = mapped[:, start : start + chunk], values[:, start : start + chunk]
            torch.bmm(mapped_chunk, mapped_chunk.transpose(1, 2), out=weights)
            torch.bmm(weights, value_chunk, out=inner)
            torch.bmm(mapped_chunk, state, out=inner)
            torch.bmm(mapped_chunk.transpose(1, 2), value_chunk, out=state)

    return causal_products if causal else bidirectional_products


def reference_product(key: Tensor, value: Tensor) -> tuple[Call, int]:
    """Return a product of each head, `[L, d] @ [d, d]`, and its operations: the rate at which others' are counted."""
    left = key.flatten(0, 1)
    rows, length, dim = left.shape
    right, out = torch.rand(rows, dim, dim, device=left.device).to(left.dtype), torch.empty_like(left)
    return (lambda: torch.bmm(left, right, out=out)), 2 * rows * length * dim * dim


# --------------------------------------------------------------------------------------------------------------------
# Other packages

#: Random features of theirs and, by default, of ours.
FEATURES = 256


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


#: Name -> the module that must be installed, m, and the function of q, k, v for a length.
PEERS: dict[str, tuple[str, int | None, Callable[[Setting, int], Callable[..., Tensor]]]] = {
    "pytorch-fast-transformers: elu": ("fast_transformers.attention", None, fast_transformers_elu),
    "performer-pytorch: favor+ (m = 256)": ("performer_pytorch.performer_pytorch", FEATURES, performer),
    "flash-linear-attention: no feature map": ("fla.ops.linear_attn", None, flash_linear_attention),
}


def peer_candidates(setting: Setting) -> list[Candidate]:
    """The packages that are installed and support the setting. What they print while they are built is not shown."""
    candidates, inputs = [], setting.inputs(64)
    for name, (module, features, make) in PEERS.items():
        one = Candidate(name, "", partial(make, setting), features or setting.head_dim)
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
                one.call(setting, inputs)()
        except (ImportError, RuntimeError, *UNSUPPORTED_ERRORS) as error:
            workloads.left_out(name, error)
        else:
            candidates.append(one)
    return candidates


# --------------------------------------------------------------------------------------------------------------------
# Memory

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
            with torch.set_grad_enabled(request["backward"]):
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
    with torch.set_grad_enabled(request["backward"]):
        _call(request, min(256, length))()
        value = peak_memory(_call(request, length), torch.device("cpu"))
    if value is None:
        raise OSError("This system does not tell the peak of the resident set. It takes Linux.")
    output = 4 * request["batch"] * request["heads"] * length * request["head_dim"]
    return [{"bytes": value, "to_output": value / output}]
