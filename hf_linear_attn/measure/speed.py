"""Speed, memory and operations of models side by side, on any tokens at any length that a model can take."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

from ..integration.ablation import NO_ATTENTION_IMPLEMENTATION
from ..integration.cache_argument import cache_argument
from ..integration.discovery import longest_input
from ..integration.positions import has_position_table
from ..ops.backends import use_backend
from ..registry import AttentionEntry
from ..streaming import cache_bytes
from ..utils.formatting import format_bytes, format_flops, format_rate, format_seconds
from ..utils.memory import peak_memory
from ..utils.models import accepted
from ..utils.timing import Timing, time_interleaved

#: What is measured.
FORWARD, PREFILL, TRAINING, DECODING = "forward", "prefill", "forward+backward", "decoding"

#: How the values of a metric are shown.
FORMATS: dict[str, Callable[[float], str]] = {
    "seconds": format_seconds,
    "speedup": "{:.2f}×".format,
    "tokens_per_second": format_rate,
    "peak_memory": format_bytes,
    "cache_bytes": format_bytes,
    "flops": format_flops,
}

#: In place of a speedup whose spread is wider than its effect.
NOT_MEASURABLE = "not measurable"

#: Tokens of one forward pass while a cache is filled.
PREFILL_CHUNK = 1024


def accepts_longer_inputs(model: PreTrainedModel) -> bool:
    """Return whether `synthetic_inputs` can be longer than the model's positions."""
    return not has_position_table(model) or "position_ids" in inspect.signature(model.forward).parameters


def synthetic_inputs(
    model: PreTrainedModel, tokens: Sequence[int], length: int, batch_size: int = 1
) -> dict[str, Tensor]:
    """Return inputs `[batch_size, length]`: the tokens, row after row, repeated as needed.

    Positions beyond the model's table start again from zero. That does not change the speed; the outputs at such
    lengths mean nothing and are not used.
    """
    ids = torch.tensor(_repeated(tokens, batch_size * length), device=model.device).view(batch_size, length)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {name: row.expand(batch_size, -1) for name, row in position_inputs(model, length).items()}
    if getattr(model.config, "type_vocab_size", None):
        inputs |= accepted(model, token_type_ids=torch.zeros_like(ids))
    return inputs


def _repeated(tokens: Sequence[int], count: int) -> list[int]:
    """Return the first `count` of the tokens, which are repeated as needed."""
    return list(islice(cycle(tokens), count))


def position_inputs(model: PreTrainedModel, length: int, start: int = 0) -> dict[str, Tensor]:
    """Return `position_ids [1, length]` that start again from zero where the model's table ends, or an empty dict.

    Several tokens need a mask of ones besides: they would otherwise be read as packed documents.
    """
    limit = longest_input(model)
    if limit is None or start + length <= limit or not has_position_table(model):
        return {}
    return {"position_ids": torch.arange(start, start + length, device=model.device)[None] % limit}


def timing_options(entry: AttentionEntry, options: Mapping[str, Any], limit: int | None, length: int) -> dict[str, Any]:
    """Return the options of a mechanism that is timed at up to `length` tokens.

    A mechanism that is built for a largest length gets that one where its own, or the model's limit, is smaller.
    """
    largest = options.get("max_length") or limit
    is_sized = any(item.name == "max_length" for item in fields(entry.options))
    is_too_small = is_sized and (largest is None or length > largest)
    return {**options, "max_length": length} if is_too_small else dict(options)


def possible_lengths(model: PreTrainedModel, lengths: Sequence[int]) -> tuple[list[int], str]:
    """Return the lengths that the whole model can take, and a sentence about those beyond its positions (or "").

    Where it can take none of them, that is its longest input.
    """
    limit = longest_input(model)
    if limit is None or max(lengths, default=0) <= limit:
        return list(lengths), ""
    if not accepts_longer_inputs(model):
        possible = [length for length in lengths if length <= limit] or [limit]
        return possible, f"The model takes {limit:,} positions; longer inputs were not timed."
    beyond = "start again from zero" if has_position_table(model) else "continue"
    return list(lengths), f"† Beyond the model's {limit:,} positions they {beyond}; no quality was measured there."


def count_flops(function: Callable[[], object]) -> int:
    """Floating-point operations of the matrix products of one call; a multiplication and an addition are two.

    Exact attention counts as in its eager form, `2·B·H·L·S·(d + d_v)`, masked entries included, whichever kernel runs:
    PyTorch's own counter counts the CPU's fused kernel as zero before torch 2.15, and since then what its backward pass
    computes again. Elementwise work (feature maps, softmax, norms) is not counted. Linear attention counts as in its
    torch form: the counter sees nothing of fused kernels, which do the same products.
    """
    aten = torch.ops.aten
    fused: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, *args, **kwargs: (
            2 * _attention_flops(*args, **kwargs)  # two products for each one of the forward pass
        ),
    }
    counter: Any = FlopCounterMode(display=False, custom_mapping=fused)
    counter.mod_tracker = _NoModules()
    with use_backend("torch"), counter:
        function()
    return int(counter.get_total_flops())


class _NoModules(nullcontext[None]):
    """No tracker of modules: torch's own fails without gradients where the input of a module is a parameter."""

    parents = frozenset({"Global"})


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """From the shapes `[B, H, L, d]`, `[B, H_kv, S, d]`, `[B, H_kv, S, d_v]`."""
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[2] * (dim + value[3])


def forward_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return one forward pass without a cache; of a language model the logits of the last token only."""
    extra = accepted(model, use_cache=False, logits_to_keep=1)
    return lambda inputs: model(**inputs, **extra)


def prefill_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return the pass in which `generate` reads the prompt: logits of the last token, with a new cache in each call."""
    if model.config._attn_implementation == NO_ATTENTION_IMPLEMENTATION:
        return forward_pass(model)  # a model without attention has nothing to cache
    last = accepted(model, logits_to_keep=1)

    def read_prompt(inputs: Mapping[str, Tensor]) -> object:
        cache = cache_argument(model, DynamicCache(config=model.config))
        return model(**inputs, **cache, use_cache=True, **last)

    return read_prompt


def training_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return one forward and backward pass with gradients of all weights (of `mean(output²)`)."""
    extra = accepted(model, use_cache=False)
    return lambda inputs: model(**inputs, **extra)[0].float().square().mean().backward()


PASSES = {FORWARD: forward_pass, PREFILL: prefill_pass, TRAINING: training_pass}


def measure_passes(
    models: Mapping[str, PreTrainedModel],
    tokens: Sequence[int],
    length: int,
    *,
    baseline: str,
    seconds: float,
    measurement: str = FORWARD,
    batch_size: int = 1,
    memory: bool = False,
    flops: bool = False,
) -> dict[str, dict[str, Any]]:
    """Time one pass (a name of `PASSES`) of several models side by side, on tokens `[batch_size, length]`.

    Returns:
        Name -> numbers (see `timing_values`), and from a further pass each `peak_memory` (bytes) and `flops`.
    """
    backward = measurement == TRAINING
    with torch.inference_mode(not backward):
        inputs = synthetic_inputs(models[baseline], tokens, length, batch_size)
        calls = {name: partial(PASSES[measurement](model), inputs) for name, model in models.items()}
        device = models[baseline].device
        try:
            timings = time_interleaved(calls, baseline=baseline, seconds=seconds, device=device)
            values = {name: timing_values(timing, batch_size * length) for name, timing in timings.items()}
            gc.collect()
            for name, call in calls.items():
                if memory:
                    values[name]["peak_memory"] = peak_memory(call, device, collect=False)  # bytes
                if flops:
                    values[name]["flops"] = count_flops(call)
        finally:
            if backward:
                for model in models.values():
                    model.zero_grad(set_to_none=True)
    return values


def timing_values(timing: Timing, tokens: int) -> dict[str, Any]:
    """Return the numbers of a timed call that processes `tokens` tokens: those of `Timing`, the median as `seconds`."""
    numbers = asdict(timing)
    seconds = numbers.pop("median")
    return {"seconds": seconds, **numbers, "tokens_per_second": tokens / seconds}


@torch.inference_mode()
def fill_cache(model: PreTrainedModel, tokens: Sequence[int], length: int) -> DynamicCache:
    """Return a cache after `length` tokens (the given ones, repeated as needed)."""
    repeated = _repeated(tokens, length)
    cache = DynamicCache(config=model.config)
    for start in range(0, length, PREFILL_CHUNK):
        ids = torch.tensor([repeated[start : start + PREFILL_CHUNK]], device=model.device)
        extra = position_inputs(model, ids.shape[1], start)
        if extra:
            extra["attention_mask"] = torch.ones(1, start + ids.shape[1], dtype=torch.long, device=model.device)
        model.base_model(input_ids=ids, **cache_argument(model.base_model, cache), use_cache=True, **extra)
    return cache


@torch.inference_mode()
def measure_decoding(
    models: Mapping[str, PreTrainedModel],
    tokens: Sequence[int],
    length: int,
    *,
    baseline: str,
    seconds: float,
    batch_size: int = 1,
) -> dict[str, dict[str, Any]]:
    """Time one new token of each of `batch_size` sequences after a context; the models are interleaved token by token.

    The exact model uses the growing cache that `generate` uses by default. During the measurement the context grows by
    the timed tokens, 8 to 40 of them, from `length` on.

    Returns:
        Name -> numbers of one step (see `timing_values`), and `cache_bytes` of all sequences.
    """
    caches = {name: fill_cache(model, tokens, length) for name, model in models.items()}
    for cache in caches.values():
        cache.batch_repeat_interleave(batch_size)
    sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
    device = models[baseline].device
    ids = torch.full((batch_size, 1), tokens[0], device=device)

    def decode(model: PreTrainedModel, cache: DynamicCache, positions: Iterator[int]) -> None:
        extra = {name: row.expand(batch_size, -1) for name, row in position_inputs(model, 1, next(positions)).items()}
        model(input_ids=ids, **cache_argument(model, cache), use_cache=True, **extra)

    steps = {name: partial(decode, model, caches[name], count(length)) for name, model in models.items()}
    options: dict[str, Any] = {"repeat": False, "warmup": 3, "min_rounds": 8, "max_rounds": 40}
    timings = time_interleaved(steps, baseline=baseline, seconds=seconds, device=device, **options)
    return {name: {**timing_values(timing, batch_size), "cache_bytes": sizes[name]} for name, timing in timings.items()}
