"""Whole models: the speedup of each mechanism beside that of the model without attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_linear_attn.integration.ablation import without_attention
from hf_linear_attn.integration.discovery import longest_input, self_attention
from hf_linear_attn.measure.inputs import accepts_longer_inputs, synthetic_inputs, timing_options
from hf_linear_attn.measure.speed import forward_pass
from hf_linear_attn.ops import backends
from hf_linear_attn.patching import patch_model
from hf_linear_attn.registry import ATTENTIONS
from hf_linear_attn.utils.models import shared_copy

from . import workloads
from .bench import BASELINE, Bench
from .options import FREE
from .shapes import MODELS, Shape, checkpoint_model
from .timing import ratio, sample_interleaved, spread

SECTION = "model"
FEW = ("elu", "favor+", "hedgehog", "window")
#: Where no backend is asked for, models run as they run for a user.
USUAL = "auto"
#: Shares of a ceiling are near each other: calls of fewer seconds than this are timed more than once.
SLOW = 4.0
#: The time of a whole model grows faster than its length and slower than its square.
GROWTH = 1.5


def run_model(bench: Bench) -> list[dict[str, Any]]:
    """All models, dtypes and lengths."""
    models = MODELS if bench.source is None else (checkpoint_model(bench.source),)
    rows: list[dict[str, Any]] = []
    for model in models:
        for dtype in bench.options.names("dtypes"):
            rows += WholeModel(bench, model, dtype).run()
    return rows


@dataclass
class WholeModel:
    """One model in one dtype, forward, batch 1."""

    bench: Bench
    shape: Shape
    dtype: str

    def __post_init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}
        self._patched: dict[str, PreTrainedModel] = {}

    @cached_property
    def exact(self) -> PreTrainedModel:
        longest = max(self.bench.options.numbers("model_lengths"))
        model: Any = self.shape.build(longest, self.bench.options.seed)
        return model.to(device=self.bench.device, dtype=getattr(torch, self.dtype))

    @cached_property
    def free(self) -> PreTrainedModel:
        return without_attention(self.exact)

    @cached_property
    def identities(self) -> dict[str, dict[str, Any]]:
        options, causal = self.bench.options, self_attention(self.exact)[0].causal
        identities: dict[str, dict[str, Any]] = {
            BASELINE: {"name": "softmax", "implementation": BASELINE},
            FREE: {"name": FREE},
        }
        for name in self.bench.names(FEW):
            if not workloads.serves(name, causal):
                continue
            for backend in options.backend or (USUAL,):
                label = name if backend == USUAL else f"{name} [{backend}]"
                identities[label] = {"name": name, "options": self._options(name), "backend": backend}
        return identities

    def _options(self, name: str) -> dict[str, Any]:
        entry = ATTENTIONS.get(name)
        longest = max(self.bench.options.numbers("model_lengths"))
        options = workloads.options_of(entry, self.bench.options.seed)
        return timing_options(entry, options, longest_input(self.exact), longest)

    # ---------------------------------------------------------------------------------------------- lengths

    def run(self) -> list[dict[str, Any]]:
        lengths = self._lengths()
        self.bench.progress.start(f"{self.shape.name}, {self.dtype}", len(lengths))
        rows: list[dict[str, Any]] = []
        for index, length in enumerate(lengths):
            self.bench.progress.update(index, f"{length:,} tokens")
            rows += self._cell(length)
        return rows

    def _lengths(self) -> tuple[int, ...]:
        lengths, limit = self.bench.options.numbers("model_lengths"), longest_input(self.exact)
        if limit is None or accepts_longer_inputs(self.exact) or max(lengths) <= limit:
            return lengths
        self.bench.note(SECTION, f"{self.shape.name}: takes {limit:,} positions; longer inputs were left out")
        return tuple(length for length in lengths if length <= limit)

    def _cell(self, length: int) -> list[dict[str, Any]]:
        measure = {"what": SECTION, "dtype": self.dtype, "batch": 1, "length": length, "pass": "forward"}
        names = [name for name in self.identities if self._feasible(name, length)]
        described = {"name": self.shape.name, **self.shape.describe()}
        keys = {name: self.bench.key(described, self.identities[name], measure) for name in names}
        measured = self.bench.rows(keys, partial(self._measure, length))
        facts = {"model": self.shape.name, "dtype": self.dtype, "length": length}
        for name, value in measured.items():
            self._last[name] = (length, value["seconds"]["median"])
        return [
            {"name": name, "mechanism": self.identities[name], **facts, **value} for name, value in measured.items()
        ]

    def _feasible(self, name: str, length: int) -> bool:
        if name not in self._last:
            return True
        before, seconds = self._last[name]
        expected = seconds * (length / before) ** GROWTH
        if expected <= self.bench.options.number("longest"):
            return True
        message = f"{self.shape.name}, {name}, {self.dtype}, {length:,} tokens: left out, one call would take "
        self.bench.note(SECTION, f"{message}~{expected:.0f} s")
        return False

    @torch.no_grad()
    def _measure(self, length: int, missing: Sequence[str]) -> dict[str, dict[str, Any]]:
        inputs = synthetic_inputs(self.exact, [7], length)
        calls: dict[str, Callable[[], object]] = {}
        for name in self.identities:
            if name not in missing and name not in (BASELINE, FREE):
                continue
            try:
                model, backend = self._model(name)
                calls[name] = _call(forward_pass(model), inputs, backend)
                if name not in (BASELINE, FREE) and length == min(self.bench.options.numbers("model_lengths")):
                    calls[name]()  # a backend that refuses says so here
            except workloads.UNSUPPORTED_ERRORS as error:
                calls.pop(name, None)
                message = f"{self.shape.name}, {name}, {self.dtype}: left out ({' '.join(str(error).split())})"
                self.bench.note(SECTION, message)
        seconds = self.bench.options.number("seconds")
        samples = sample_interleaved(calls, seconds=seconds, device=self.bench.device, slow=SLOW)
        ceiling = ratio(samples[BASELINE], samples[FREE])
        return {
            name: {
                "seconds": spread(samples[name]),
                "speedup": ratio(samples[BASELINE], samples[name]),
                "ceiling": ceiling,
                "ceiling_share": ratio(samples[FREE], samples[name]),
                "attention_share": max(0.0, 1 - 1 / ceiling["median"]),
            }
            for name in calls
        }

    def _model(self, name: str) -> tuple[PreTrainedModel, str]:
        if name in (BASELINE, FREE):
            return (self.exact if name == BASELINE else self.free), USUAL
        mechanism = self.identities[name]["name"]
        if mechanism not in self._patched:
            patched = patch_model(shared_copy(self.exact), mechanism, **self._options(mechanism))
            self._patched[mechanism] = patched
        return self._patched[mechanism], self.identities[name]["backend"]


def _call(forward: Callable[[Any], object], inputs: Any, backend: str) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad(), backends.use_backend(backend):
            return forward(inputs)

    return run
