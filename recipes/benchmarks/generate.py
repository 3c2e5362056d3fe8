"""Whole decoders: the time of one token of `generate` after a context, with each kind of attention and cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.measure.inputs import position_inputs, timing_options
from hf_linear_attn.patching import patch_model
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.streaming import cache_bytes
from hf_linear_attn.utils.models import shared_copy

from . import workloads
from .bench import Bench
from .decode import PIECE, SECTION
from .options import FREE
from .shapes import DECODERS, Decoder, checkpoint_decoder
from .timing import ratio, sample_interleaved, spread

GENERATE = "generate"
CACHED, EAGER, UNCACHED = "sdpa, cache", "eager, cache", "sdpa, no cache"
#: Mechanisms of this table where none are asked for.
FEW = ("elu", "favor+", "hedgehog", "window")


def run_generate(bench: Bench) -> list[dict[str, Any]]:
    """All decoders, batch sizes and contexts."""
    rows: list[dict[str, Any]] = []
    decoders = DECODERS if bench.source is None else (checkpoint_decoder(bench.source),)
    for decoder in decoders:
        if decoder.headline and (bench.options.quick or not bench.options.headlines):
            continue
        contexts = decoder.contexts or bench.options.numbers("contexts")
        contexts = tuple(context for context in contexts if decoder.longest is None or context <= decoder.longest)
        if not contexts:
            bench.note(SECTION, f"{decoder.name}: no context of at most {decoder.longest:,} tokens was asked for")
            continue
        for batch in decoder.batches or bench.options.numbers("batches"):
            rows += _one_decoder(bench, decoder, batch, contexts)
    return rows


def _one_decoder(bench: Bench, decoder: Decoder, batch: int, contexts: Sequence[int]) -> list[dict[str, Any]]:
    bench.progress.start(f"decoding, {decoder.name}, batch {batch}", len(contexts))
    study = Generation(bench, decoder, batch, max(contexts))
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for index, context in enumerate(contexts):
        bench.progress.update(index, f"after {context:,} tokens")
        for row in study.run(context):
            seconds = row["seconds"]
            if row["name"] in first and row["mechanism"].get("state") == "constant":
                scaled = {name: seconds[name] / first[row["name"]] for name in ("median", "p20", "p80")}
                row["growth"] = {**scaled, "rounds": seconds["rounds"]}
            first.setdefault(row["name"], seconds["median"])
            rows.append(row)
    return rows


@dataclass
class Generation:
    """One decoder with random weights (or a checkpoint), one batch size; contexts are asked for in ascending order."""

    bench: Bench
    decoder: Decoder
    batch: int
    longest: int

    def __post_init__(self) -> None:
        self._caches: dict[str, tuple[DynamicCache, int]] = {}
        self._last: dict[str, tuple[int, float]] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        model: Any = self.decoder.build(self.longest + PIECE, self.bench.options.seed)
        return model.to(self.bench.device)

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        eager = shared_copy(self.model)
        eager.set_attn_implementation("eager")
        return {CACHED: self.model, EAGER: eager, UNCACHED: self.model, FREE: without_attention(self.model)}

    @cached_property
    def identities(self) -> dict[str, dict[str, Any]]:
        identities: dict[str, dict[str, Any]] = {
            name: {"name": "softmax", "implementation": name} for name in (CACHED, EAGER, UNCACHED)
        }
        identities[FREE] = {"name": FREE}
        for name in self._mechanisms():
            entry = ATTENTIONS.get(name)
            identities[name] = {"name": name, "options": self._options(name), "state": entry.state}
        return identities

    def _mechanisms(self) -> Iterator[str]:
        for name in self.bench.names(("elu",) if self.decoder.headline else FEW):
            entry = ATTENTIONS.get(name)
            if entry.causal and entry.state != "none":
                yield name

    def _options(self, name: str) -> dict[str, Any]:
        entry = ATTENTIONS.get(name)
        options = workloads.options_of(entry, self.bench.options.seed)
        return timing_options(entry, options, None, self.longest + PIECE)

    # ---------------------------------------------------------------------------------------------- one context

    def run(self, context: int) -> list[dict[str, Any]]:
        measure = {"what": "decode model", "dtype": "float32", "batch": self.batch, "context": context}
        names = [name for name in self.identities if self._feasible(name, context)]
        described = {"name": self.decoder.name, **self.decoder.describe()}
        keys = {name: self.bench.key(described, self.identities[name], measure) for name in names}
        measured = self.bench.rows(keys, partial(self._measure, context))
        facts = {"what": GENERATE, "model": self.decoder.name, "batch": self.batch, "context": context}
        for name, value in measured.items():
            self._last[name] = (context, value["seconds"]["median"])
        return [
            {"name": name, "mechanism": self.identities[name], **facts, **value} for name, value in measured.items()
        ]

    def _feasible(self, name: str, context: int) -> bool:
        if name != UNCACHED or name not in self._last:
            return True
        before, seconds = self._last[name]
        expected = seconds * (context / before) ** 1.5  # most of a small model is linear in its length
        if expected <= self.bench.options.number("longest"):
            return True
        message = (
            f"{self.decoder.name}, {name}, after {context:,} tokens: left out, one token would take ~{expected:.0f} s"
        )
        self.bench.note(SECTION, message)
        return False

    @torch.no_grad()
    def _measure(self, context: int, missing: Sequence[str]) -> dict[str, dict[str, Any]]:
        names = [name for name in self.identities if name in missing or name in (CACHED, FREE)]
        calls: dict[str, Callable[[], object]] = {}
        sizes: dict[str, int] = {}
        for name in names:
            try:
                calls[name], sizes[name] = self._step(name, context)
            except workloads.UNSUPPORTED_ERRORS as error:
                self.bench.note(SECTION, f"{self.decoder.name}, {name}: left out ({' '.join(str(error).split())})")
        samples = sample_interleaved(calls, seconds=self.bench.options.number("seconds"), device=self.bench.device)
        return {
            name: {
                "seconds": spread(samples[name]),
                "speedup": ratio(samples[CACHED], samples[name]),
                "over_rest": ratio(samples[name], samples[FREE]),
                "bytes": sizes[name],
            }
            for name in calls
        }

    def _step(self, name: str, context: int) -> tuple[Callable[[], object], int]:
        """The call, and the bytes of its cache."""
        makers: Mapping[str, Callable[[str, int], tuple[Callable[[], object], int]]] = {
            CACHED: self._exact_step,
            EAGER: self._exact_step,
            UNCACHED: self._whole_step,
            FREE: self._free_step,
        }
        return makers.get(name, self._linear_step)(name, context)

    def _ids(self, length: int) -> torch.Tensor:
        return torch.full((self.batch, length), 7, device=self.bench.device)

    def _whole_step(self, name: str, context: int) -> tuple[Callable[[], object], int]:
        """`generate(use_cache=False)`: the whole context again for every token."""
        model, ids = self.models[name], self._ids(context + 1)
        places = position_inputs(model, context + 1)
        return _quiet(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1, **places)), 0

    def _free_step(self, name: str, context: int) -> tuple[Callable[[], object], int]:
        model, ids = self.models[name], self._ids(1)
        return _quiet(lambda: model(input_ids=ids, use_cache=False)), 0

    def _exact_step(self, name: str, context: int) -> tuple[Callable[[], object], int]:
        """A cache of random keys and values; each call finds it as long as the one before did."""
        model, ids, cache = self.models[name], self._ids(1), DynamicCache(config=self.model.config)
        text = model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dtype = next(model.parameters()).dtype
        for layer in range(text.num_hidden_layers):
            keys, values = (torch.randn(self.batch, heads, context, dim).to(self.bench.device, dtype) for _ in range(2))
            cache.update(keys, values, layer)
        layers: list[Any] = list(cache.layers)
        caches = [(layer, layer.keys, layer.values) for layer in layers]
        places = position_inputs(model, 1, context)

        def step() -> None:
            for layer, keys, values in caches:
                layer.keys, layer.values = keys, values
            model(input_ids=ids, past_key_values=cache, use_cache=True, **places)

        return _quiet(step), cache_bytes(cache)

    def _linear_step(self, name: str, context: int) -> tuple[Callable[[], object], int]:
        """A cache that has really seen the context."""
        if name not in self.models:
            self.models[name] = patch_model(shared_copy(self.model), name, **self._options(name))
        model = self.models[name]
        cache, seen = self._caches.get(name, (DynamicCache(config=self.model.config), 0))
        while seen < context:
            length = min(PIECE, context - seen)
            places = position_inputs(model, length, seen)
            model.base_model(input_ids=self._ids(length), past_key_values=cache, use_cache=True, **places)
            seen += length
        self._caches[name] = (cache, seen)
        ids, places = self._ids(1), position_inputs(model, 1, context)
        step = _quiet(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True, **places))
        return step, cache_bytes(cache)


def _quiet(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run


def total_seconds(contexts: Sequence[int], seconds: Sequence[float], tokens: int) -> float:
    """Time of `tokens` tokens one after the other: the integral of the time of one, linear between the contexts."""
    total = min(contexts[0], tokens) * seconds[0]
    for index in range(1, len(contexts)):
        low, high = contexts[index - 1], min(contexts[index], tokens)
        if high <= low:
            break
        share = (high - low) / (contexts[index] - low)
        end = seconds[index - 1] + share * (seconds[index] - seconds[index - 1])
        total += (high - low) * (seconds[index - 1] + end) / 2
    return total
