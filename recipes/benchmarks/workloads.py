"""What is timed: mechanisms by themselves on random q, k, v and each backend, and models of known shapes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
)

from hf_linear_attn.feature_maps.base import AttentionShape
from hf_linear_attn.mechanisms.base import AttentionInputs, LinearAttention
from hf_linear_attn.mechanisms.kernelized import KernelizedAttention
from hf_linear_attn.mechanisms.softmax import EXACT
from hf_linear_attn.ops import backends
from hf_linear_attn.registry import ATTENTIONS, build_options, list_attentions, seed_options

#: The row of exact attention.
BASELINE = "sdpa"
#: What is measured where every mechanism costs seconds.
FEW = ("elu", "favor+", "hedgehog", "window")
#: What a mechanism raises where it does not support a shape.
UNSUPPORTED_ERRORS = (ValueError, NotImplementedError, TypeError)

logger = logging.getLogger(__name__)

Call = Callable[[], object]


@dataclass(frozen=True)
class Inputs:
    """Standard normal q, k, v and a gradient of the output, `[B, H, L, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor

    @classmethod
    def make(cls, batch: int, heads: int, length: int, dim: int, dtype: str, device: Any, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)
        tensors = (torch.randn(batch, heads, length, dim, generator=generator) for _ in range(4))
        return cls(*(tensor.to(device, getattr(torch, dtype)) for tensor in tensors))

    def call(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], backward: bool, module: Any = None) -> Call:
        """Return a call of `attend`; with `backward` it also computes the gradients of q, k, v and the parameters.

        Without, it is to be called under `torch.no_grad`, which is entered once: it would count in a call of 50 µs.
        """
        if not backward:
            return lambda: attend(self.query, self.key, self.value)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (self.query, self.key, self.value)]
        parameters = [] if module is None else [one for one in module.parameters() if one.requires_grad]
        return lambda: torch.autograd.grad(attend(*leaves), [*leaves, *parameters], self.gradient, allow_unused=True)


def mechanism_names(chosen: Sequence[str] | None, causal: bool | None = None) -> list[str]:
    """Return the names that were asked for, or all but exact attention, those of one direction.

    Raises:
        ValueError: A name is unknown, or that of exact attention, which is always measured.
    """
    names = [name for name in list_attentions() if name != EXACT] if chosen is None else list(chosen)
    if EXACT in names:
        raise ValueError(f"attention {EXACT!r} is exact attention, which is always measured. Leave it out.")
    entries = {name: ATTENTIONS.get(name) for name in names}
    return [
        name for name, entry in entries.items() if causal is None or (entry.causal if causal else entry.bidirectional)
    ]


def check_names(mechanisms: Sequence[str] | None, chosen_backends: Sequence[str] | None) -> None:
    """Raise a ValueError for the name of a mechanism or a backend that is unknown."""
    mechanism_names(mechanisms)
    for name in chosen_backends or ():
        with backends.use_backend(name):
            pass


def left_out(name: str, error: Exception) -> None:
    """Say that something is not measured, and why."""
    logger.warning("%s is left out: %s", name, " ".join(str(error).split()) or type(error).__name__)


def build(
    name: str,
    *,
    heads: int,
    head_dim: int,
    longest: int,
    causal: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
) -> LinearAttention:
    """Return a mechanism with default options for up to `longest` tokens; its weights follow from the seed."""
    list_attentions()
    entry = ATTENTIONS.get(name)
    shape = AttentionShape(heads, heads, head_dim, head_dim, max_length=longest, causal=causal)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = entry.factory(shape, build_options(entry, seed_options(entry, seed)))
    return module.to(device=device, dtype=dtype).eval()


def num_features(module: LinearAttention) -> int | None:
    """Return m, where the mechanism is kernelized attention and nothing else."""
    return module.feature_map.num_features if isinstance(module, KernelizedAttention) else None


def attend(module: LinearAttention, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a mechanism as a function of q, k and v."""
    return lambda query, key, value: module(
        AttentionInputs(query, key, value, scaling=query.shape[3] ** -0.5, causal=causal)
    )[0]


def sdpa(causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `scaled_dot_product_attention` as a function of q, k and v."""
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, is_causal=causal)


def eager(causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return exact attention that writes all weights `[B, H, L, L]` to memory."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query * query.shape[3] ** -0.5) @ key.transpose(2, 3)
        if causal:
            hidden = torch.ones(weights.shape[2:], dtype=torch.bool, device=weights.device).triu(1)
            weights = weights.masked_fill(hidden, -torch.inf)
        return weights.softmax(-1) @ value

    return run


# --------------------------------------------------------------------------------------------------------------------
# Backends


def on_backend(call: Call, backend: str) -> Call:
    """Return a call that uses a backend; the name of a mechanism with one form only is empty."""

    def run() -> object:
        with backends.use_backend(backend):
            return call()

    return run if backend else call


@contextmanager
def recorded_backends() -> Iterator[list[str]]:
    """Names of the backends that computed calls meanwhile."""
    seen: list[str] = []
    original = backends.select_backend

    def select(call: Any) -> Any:
        backend = original(call)
        seen.append(backend.name)
        return backend

    backends.select_backend = select
    try:
        yield seen
    finally:
        backends.select_backend = original


def backends_of(call: Call, chosen: Sequence[str] | None = None) -> list[str]:
    """Return the names of the backends that support a call; an empty one where the mechanism has one form only."""
    with recorded_backends() as seen:
        call()
    supported = []
    for name in (chosen or backends.list_backends()) if seen else ():
        try:
            on_backend(call, name)()
        except NotImplementedError:
            continue
        supported.append(name)
    return supported if seen else [""]


# --------------------------------------------------------------------------------------------------------------------
# Samples


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, the 20th and the 80th percentile, and the number of rounds."""
    median, p20, p80 = np.quantile(samples, (0.5, 0.2, 0.8)).tolist()
    return {"median": median, "p20": p20, "p80": p80, "rounds": len(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the spread of `over / under` of each round: a slower moment of the machine affects both."""
    return spread(np.divide(over, under).tolist())


# --------------------------------------------------------------------------------------------------------------------
# Models of known shapes, with random weights


def bert(longest: int, **sizes: int) -> Any:
    return BertModel(BertConfig(**sizes, max_position_embeddings=max(512, longest)), add_pooling_layer=False)


def gpt2(longest: int) -> Any:
    return GPT2LMHeadModel(GPT2Config(n_positions=max(1024, longest)))


def llama(longest: int, **sizes: int) -> Any:
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=longest, tie_word_embeddings=True))


def deberta(longest: int, layers: int) -> Any:
    """DeBERTa-v3: but for the number of words and of layers, -small and -base have one shape."""
    config = DebertaV2Config(
        vocab_size=32000,
        num_hidden_layers=layers,
        max_position_embeddings=longest,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        position_biased_input=False,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=256,
        max_relative_positions=512,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    )
    return DebertaV2Model(config)


def mpnet(longest: int, layers: int) -> Any:
    config = MPNetConfig(num_hidden_layers=layers, max_position_embeddings=longest + 2)
    return MPNetModel(config, add_pooling_layer=False)


def gpt_oss(longest: int, layers: int) -> Any:
    """The shape of gpt-oss-20b with few layers, all of full attention, and 4 experts, of which 1 serves a token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    config = GptOssConfig(
        vocab_size=32000, num_hidden_layers=layers, layer_types=["full_attention"] * layers, **experts,
        max_position_embeddings=max(longest, 131072),
    )  # fmt: skip
    return GptOssForCausalLM(config)


def gemma2(longest: int, layers: int) -> Any:
    """The shape of Gemma 2 2B with few layers, all of full attention."""
    config = Gemma2Config(
        vocab_size=32000, num_hidden_layers=layers, layer_types=["full_attention"] * layers, head_dim=256,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=longest,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def t5_encoder(longest: int, layers: int) -> Any:
    return T5EncoderModel(T5Config(num_layers=layers, is_decoder=False, use_cache=False))


#: Name -> function of the longest input. A number of layers in a name is that of the model, else it has all.
SHAPES: Mapping[str, Callable[[int], Any]] = {
    "BERT-base": bert,
    "GPT-2 small": gpt2,
    "all-MiniLM-L6-v2": partial(bert, hidden_size=384, intermediate_size=1536, num_hidden_layers=6),
    "SmolLM2-135M": partial(
        llama, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152,
    ),
    "Llama-3.2-1B": partial(
        llama, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    ),
    "Llama-3.2-1B, 1 layer": partial(
        llama, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000,
    ),
    "DeBERTa-v3-base, 3 layers": partial(deberta, layers=3),
    "T5-small's encoder, 6 layers": partial(t5_encoder, layers=6),
    "MPNet-base, 3 layers": partial(mpnet, layers=3),
    "gpt-oss-20b, 1 layer": partial(gpt_oss, layers=1),
    "Gemma 2 2B, 1 layer": partial(gemma2, layers=1),
}  # fmt: skip


def model_of(shape: str, longest: int, *, seed: int = 0, dtype: str = "float32", device: Any = None) -> Any:
    """Return a model by its name in `SHAPES`, with random weights, for inputs of up to `longest` tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SHAPES[shape](longest)
    return model.to(device=device, dtype=getattr(torch, dtype)).eval()
