"""Other packages' attention on the same inputs: optional, and named with the reason where they cannot run.

To add one, write a function `(batch inputs, causal) -> attend(q, k, v)` on `[B, H, L, d]` and decorate it with `peer`.
Preparation that a package needs once for a shape happens outside of what is timed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .workloads import Inputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Random features of theirs and, by default, of ours.
FEATURES = 256


@dataclass(frozen=True)
class Peer:
    """A package's form of a mechanism. module: what must import; devices, dtypes: what it runs on; features: m, or
    None where it is the head size."""

    package: str
    module: str
    what: str
    causal: bool
    bidirectional: bool
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    build: Callable[[Inputs, bool], Attend]
    features: int | None = None

    @property
    def name(self) -> str:
        return f"{self.package}: {self.what}"

    def missing(self) -> str | None:
        """Why it cannot be imported, or None."""
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            whole = self.module.partition(".")[0]
            return "it is not installed" if error.name == whole else f"its dependency {error.name} is not installed"
        except Exception as error:  # noqa: BLE001  (packages built for other versions fail in ways of their own)
            return f"it cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        return None

    def refuses(self, causal: bool, dtype: str, device: torch.device) -> str | None:
        """Why it cannot run on such inputs, or None."""
        if not (self.causal if causal else self.bidirectional):
            return f"it has no {'causal' if causal else 'bidirectional'} form"
        if device.type not in self.devices:
            return f"it runs on {' and '.join(self.devices)} only"
        if dtype not in self.dtypes:
            return f"it takes {' and '.join(self.dtypes)} only"
        return None

    def attend(self, inputs: Inputs, causal: bool) -> Attend:
        """Their attention for such inputs. What a package prints while it is built is not shown."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self.build(inputs, causal)

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)


PEERS: list[Peer] = []


def peer(
    package: str,
    module: str,
    what: str,
    *,
    causal: bool = True,
    bidirectional: bool = True,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    dtypes: tuple[str, ...] = ("float32",),
    features: int | None = None,
) -> Callable[[Callable[[Inputs, bool], Attend]], Callable[[Inputs, bool], Attend]]:
    """Decorator: measure this package's form too."""

    def decorate(build: Callable[[Inputs, bool], Attend]) -> Callable[[Inputs, bool], Attend]:
        PEERS.append(Peer(package, module, what, causal, bidirectional, devices, dtypes, build, features))
        return build

    return decorate


def by_token(tensor: Tensor) -> Tensor:
    """`[B, H, L, d]` as `[B, L, H, d]`, the order of memory in which a model hands it over."""
    return tensor.transpose(1, 2)


@peer("pytorch-fast-transformers", "fast_transformers.attention", "elu")
def fast_transformers_elu(inputs: Inputs, causal: bool) -> Attend:
    from fast_transformers.attention import CausalLinearAttention, LinearAttention
    from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask

    batch, _, length, dim = inputs.query.shape
    attention: Any = (CausalLinearAttention if causal else LinearAttention)(dim)
    seen = TriangularCausalMask(length) if causal else FullMask(length, length)
    real = LengthMask(torch.full((batch,), length), max_len=length)
    return lambda q, k, v: attention(by_token(q), by_token(k), by_token(v), seen, real, real).transpose(1, 2)


@peer("performer-pytorch", "performer_pytorch.performer_pytorch", f"favor+ (m = {FEATURES})", features=FEATURES)
def performer(inputs: Inputs, causal: bool) -> Attend:
    from performer_pytorch.performer_pytorch import FastAttention

    built: Any = FastAttention(inputs.query.shape[3], nb_features=FEATURES, causal=causal)
    return built.to(inputs.query.device)


@peer(
    "linear-attention-transformer",
    "linear_attention_transformer.linear_attention_transformer",
    "softmax features",
    dtypes=("float32", "bfloat16"),
)
def softmax_features(inputs: Inputs, causal: bool) -> Attend:
    """Bidirectional without a normaliser: not the function of any mechanism here. Causal in whole buckets of 64."""
    from linear_attention_transformer import linear_attention_transformer as package

    if causal and inputs.query.shape[2] % 64:
        raise ValueError("the causal form takes multiples of 64 tokens")
    return package.causal_linear_attn if causal else package.linear_attn


@peer(
    "flash-linear-attention",
    "fla.ops.linear_attn",
    "linear attention on q, k without a feature map",
    bidirectional=False,
    devices=("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
)
def flash_linear_attention(inputs: Inputs, causal: bool) -> Attend:
    from fla.ops.linear_attn import chunk_linear_attn

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = chunk_linear_attn(by_token(query), by_token(key), by_token(value), normalize=False)
        return out.transpose(1, 2)

    return attend
