"""Speed, memory and operations of models side by side: forward, prefill, forward and backward, decoding."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..integration.ablation import NO_ATTENTION_IMPLEMENTATION
from ..streaming import cache_bytes
from ..utils.formatting import format_bytes, format_flops, format_rate, format_seconds
from ..utils.models import accepted
from ..utils.timing import Timing, time_interleaved
from .inputs import position_inputs, synthetic_inputs
from .memory import count_flops, peak_memory
from .values import Values, value

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


def forward_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return one forward pass without a cache; of a language model the logits of the last token only."""
    extra = accepted(model, use_cache=False, logits_to_keep=1)
    return lambda inputs: model(**inputs, **extra)


def prefill_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return the pass in which `generate` reads the prompt: logits of the last token, with a new cache in each call."""
    if model.config._attn_implementation == NO_ATTENTION_IMPLEMENTATION:
        return forward_pass(model)  # a model without attention has nothing to cache
    last = accepted(model, logits_to_keep=1)
    return lambda inputs: model(**inputs, past_key_values=DynamicCache(config=model.config), use_cache=True, **last)


def training_pass(model: PreTrainedModel) -> Callable[[Mapping[str, Tensor]], object]:
    """Return one forward and backward pass with gradients of all weights (of `mean(output²)`)."""
    extra = accepted(model, use_cache=False)
    return lambda inputs: model(**inputs, **extra)[0].float().square().mean().backward()


FORWARD, PREFILL, TRAINING, DECODING = "forward", "prefill", "forward+backward", "decoding"

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
) -> dict[str, Values]:
    """Time one pass (a name of `PASSES`) of several models side by side, on tokens `[batch_size, length]`.

    Returns:
        Name -> values `seconds`, `tokens_per_second`, and from a further pass each `peak_memory` (bytes) and `flops`.
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
                    values[name].append(value("peak_memory", peak_memory(call, device, collect=False), unit="bytes"))
                if flops:
                    values[name].append(value("flops", count_flops(call), unit="FLOP"))
        finally:
            if backward:
                for model in models.values():
                    model.zero_grad(set_to_none=True)
    return values


def timing_values(timing: Timing, tokens: int) -> Values:
    """Return the values of a timed call that processes `tokens` tokens."""
    columns = asdict(timing)
    seconds, rate = columns.pop("median"), tokens / timing.median
    return [value("seconds", seconds, unit="s", **columns), value("tokens_per_second", rate, unit="tokens/s")]


@torch.inference_mode()
def fill_cache(model: PreTrainedModel, tokens: Sequence[int], length: int) -> DynamicCache:
    """Return a cache after `length` tokens (the given ones, repeated as needed)."""
    repeated = (list(tokens) * (length // len(tokens) + 1))[:length]
    cache = DynamicCache(config=model.config)
    for start in range(0, length, PREFILL_CHUNK):
        ids = torch.tensor([repeated[start : start + PREFILL_CHUNK]], device=model.device)
        extra = position_inputs(model, ids.shape[1], start)
        if extra:  # a mask of ones: position ids that start again would otherwise be read as packed documents
            extra["attention_mask"] = torch.ones(1, start + ids.shape[1], dtype=torch.long, device=model.device)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
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
) -> dict[str, Values]:
    """Time one new token of each of `batch_size` sequences after a context; the models are interleaved token by token.

    The exact model uses the growing cache that `generate` uses by default. During the measurement the context grows by
    the timed tokens, 8 to 40 of them, from `length` on.

    Returns:
        Name -> values `seconds` of one step, `tokens_per_second` and `cache_bytes` (of all sequences).
    """
    caches = {name: fill_cache(model, tokens, length) for name, model in models.items()}
    for cache in caches.values():
        cache.batch_repeat_interleave(batch_size)
    sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
    device = models[baseline].device
    ids = torch.full((batch_size, 1), tokens[0], device=device)

    def decode(model: PreTrainedModel, cache: DynamicCache, positions: Iterator[int]) -> None:
        extra = {name: row.expand(batch_size, -1) for name, row in position_inputs(model, 1, next(positions)).items()}
        model(input_ids=ids, past_key_values=cache, use_cache=True, **extra)

    steps = {name: partial(decode, model, caches[name], count(length)) for name, model in models.items()}
    options: dict[str, Any] = {"repeat": False, "warmup": 3, "min_rounds": 8, "max_rounds": 40}
    timings = time_interleaved(steps, baseline=baseline, seconds=seconds, device=device, **options)
    return {
        name: [*timing_values(timing, batch_size), value("cache_bytes", sizes[name], unit="bytes")]
        for name, timing in timings.items()
    }
