"""Generation: time of one token and bytes of the cache after a context of n tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..integration.cache import LinearStateLayer
from .speed import Announce, position_inputs
from .timing import Timing, clock_of, summarise

#: Tokens of one forward pass while a cache is filled.
PREFILL_CHUNK = 1024


@dataclass(frozen=True)
class DecodeRow:
    """One token of each stream after `context` tokens: their time, and what the cache of all streams holds."""

    context: int
    timing: Timing
    cache_bytes: int


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values, and of recurrent states, in a cache."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearStateLayer):
            total += layer.nbytes()
        elif layer.is_initialized:
            total += layer.keys.nbytes + layer.values.nbytes
    return total


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokens: Sequence[int], length: int) -> DynamicCache:
    """A cache that has seen `length` tokens (the given ones, repeated as needed)."""
    repeated = (list(tokens) * (length // len(tokens) + 1))[:length]
    cache = DynamicCache(config=model.config)
    for start in range(0, length, PREFILL_CHUNK):
        part = torch.tensor([repeated[start : start + PREFILL_CHUNK]], device=model.device)
        places = position_inputs(model, part.shape[1], start)
        if places:  # a mask of ones: position ids that begin again would otherwise be read as packed documents
            places["attention_mask"] = torch.ones(1, start + part.shape[1], dtype=torch.long, device=model.device)
        model.base_model(
            input_ids=part,
            past_key_values=cache,
            use_cache=True,
            **places,
        )
    return cache


@torch.inference_mode()
def decode_speed(
    models: Mapping[str, PreTrainedModel],
    tokens: Sequence[int],
    contexts: Sequence[int],
    *,
    baseline: str,
    budget: float,
    announce: Announce,
    batch: int = 1,
) -> dict[str, list[DecodeRow]]:
    """Time of one token in each of `batch` streams (the head included) after each context; the models take turns, token
    by token. The streams hold the same context: one is read, and its cache repeated.

    The exact model uses the growing cache that `generate` uses by default. During the measurement each context grows by
    the tokens timed, 8 to 40 of them. budget: seconds for each context.
    """
    rows: dict[str, list[DecodeRow]] = {name: [] for name in models}
    for done, context in enumerate(contexts):
        announce(done, f"decoding after {context:,} tokens")
        caches = {name: prefill(model, tokens, context) for name, model in models.items()}
        for cache in caches.values():
            cache.batch_repeat_interleave(batch)
        sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
        steps = {name: _stepper(models[name], caches[name], [tokens[0]] * batch, context) for name in models}
        for name, timing in _time_steps(steps, models[baseline].device, baseline, budget).items():
            rows[name].append(DecodeRow(context, timing, sizes[name]))
    return rows


def _stepper(model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int], context: int) -> Callable[[], None]:
    ids = torch.tensor(tokens, device=model.device)[:, None]
    place = context

    def step() -> None:
        nonlocal place
        places = {name: held.expand(len(ids), -1) for name, held in position_inputs(model, 1, place).items()}
        model(input_ids=ids, past_key_values=cache, use_cache=True, **places)
        place += 1

    return step


def _time_steps(
    steps: Mapping[str, Callable[[], None]], device: torch.device, baseline: str, budget: float
) -> dict[str, Timing]:
    """Single steps in turns: unlike other calls they change their cache, so none is repeated within a sample."""
    names = list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for step in steps.values():
        for _ in range(3):
            step()
    clock = clock_of(device)
    began = time.perf_counter()
    for turn in range(40):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            start = clock()
            steps[name]()
            samples[name].append(clock() - start)
        if turn >= 7 and time.perf_counter() - began > budget:
            break
    return {name: summarise(samples[name], samples[baseline]) for name in names}
