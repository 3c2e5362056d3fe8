"""Budgets: what each one means, and how a conversion meets it.

A budget of quality is the most that a score may lose, and one of recall the least share of the exact model's that must
remain; one of speed is the least speedup, and one of cache the largest share of the exact model's cache, at a length.
`plan` measures what meets it, and `choose_by_cache` and `choose_by_measuring` find exact heads and windows for
`convert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from ..config import DEFAULT_ATTENTION, CacheDtype
from ..data.config import BUDGETS
from ..feature_maps.base import AttentionShape
from ..integration.discovery import attention_shape, self_attention
from ..mechanisms.softmax import head_token_bytes
from ..mechanisms.window import WindowAttention, WindowOptions
from ..registry import ATTENTIONS, build_options

#: Widths of windows that are considered, narrower ones for rows of less than 256 tokens, and shares of exact heads for
#: a budget of quality or speed.
WINDOWS, NARROW_WINDOWS = (64, 128, 256, 384, 512, 768, 1024), (8, 16, 32)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)

#: Share of the allowed cache that windows and sums may take: with a fifth of SmolLM2's heads exact and windows of 384
#: tokens, a quarter of its cache at 8,192 tokens, they take 0.2 of it.
WINDOW_SHARE = 0.2

#: Of a damage or a share in percent; the digits after them are those of rounding.
DECIMALS = 6


@dataclass(frozen=True)
class DamageUnit:
    """A unit of lost quality: `factor · (converted - exact)` of a metric, or `factor · (converted / exact - 1)`."""

    name: str
    measurement: str  # that it belongs to
    metric: str  # the value of the measurement that is compared
    factor: float  # makes damage positive where quality is lost
    pattern: str  # regular expression of the unit in a budget
    example: str  # a budget in it
    template: str  # format of a value
    sign: int = 1  # -1 where damage is shown as the fall of a value
    relative: bool = False

    def damage(self, exact: Mapping[str, Any], converted: Mapping[str, Any]) -> float | None:
        """Return the damage, or None if it is undefined (for example a correlation of constant predictions)."""
        before, after = exact[self.metric], converted[self.metric]
        if before is None or after is None or (self.relative and not before):
            return None
        return self.factor * (after / before - 1 if self.relative else after - before)

    def format(self, damage: float | None) -> str:
        """Return damage with its sign and unit: `+1.30% perplexity`, `-0.40 points`."""
        return "undefined" if damage is None else self.template.format(self.sign * damage)

    def check_metric(self, budget: str, name: str, *, greater_is_better: bool) -> None:
        """Raise a ValueError, for a budget, where points of a metric are no loss, because less of it is better."""
        if self.name == "points" and not greater_is_better:
            remedy = "Put another metric first (data.metrics)."
            raise ValueError(f"The budget {budget!r} needs a metric of which more is better, not {name!r}. {remedy}")


def scored(values: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return metrics with the main one as the `score` that units of tasks and embeddings compare."""
    return {**values, "score": values.get(metric)}


_LENGTH = r"(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"
_RECALL = rf"%\s*recall\s*{_LENGTH}"
_COSTS = {rf"[x×]\s*{_LENGTH}": "speedup", rf"%\s*cache\s*{_LENGTH}": "cache"}
_PERCENT = r"%\s*(?:of\s+)?(?:perplexity|ppl)"

_UNITS = (
    DamageUnit(
        "perplexity", "perplexity", "perplexity", 100, _PERCENT, "1% perplexity", "{:+z.2f}% perplexity", relative=True
    ),
    DamageUnit("nats", "perplexity", "loss", 1, "nats?", "0.05 nats", "{:+z.4f} nats"),
    DamageUnit("points", "task", "score", -100, "(?:points?|pts?)", "0.5 points", "{:+z.2f} points", sign=-1),
    DamageUnit("cosine", "sentence_embeddings", "score", -1, "cosine", "0.02 cosine", "{:z.4f} from cosine 1"),
    DamageUnit(
        "recall", "recall", "recall", -100, _RECALL, "90% recall at 2048", "{:+z.0f}% recall", sign=-1, relative=True
    ),
)

#: For each measurement, the first unit is shown where the budget is one of speed or of cache.
DAMAGE_UNITS = {unit.name: unit for unit in _UNITS}

#: The kind of model that has a measurement.
MEASURED_MODELS = {
    "perplexity": "a causal language model",
    "task": "a classifier with its task (--data.task, or --data.dataset with labels)",
    "sentence_embeddings": "an encoder without a task",
    "recall": "a decoder or an encoder without a task",
}

#: What tables call the divergence of a measurement.
DIVERGENCES = {
    "perplexity": "KL, nats",
    "task": "divergence",
    "sentence_embeddings": "1 - cosine",
    "recall": "answers lost",
}

#: The measurement that shows what a kind of model loses, where the budget is not one of recall.
MEASUREMENTS = {"classifier": "task", "decoder": "perplexity", "encoder": "sentence_embeddings"}

#: Of budgets at a length: a number above the first and up to the second one, and what it is.
_RANGES = {
    "speedup": (1, math.inf, "a speedup of more than 1x"),
    "cache": (0, math.inf, "a share of the cache"),
    "recall": (0, 100, "a share of the recall, at most 100%,"),
}

_NUMBER = r"(?P<limit>\d+(?:\.\d*)?|\.\d+)\s*"


@dataclass(frozen=True)
class Budget:
    """The largest damage in a unit, or (`unit` None) the smallest speedup or the largest cache at a length."""

    text: str
    limit: float
    unit: DamageUnit | None = None
    length: int = 0  # tokens, of recall too (0: the budget has none)
    cost: str = ""  # "speedup" or "cache" where there is no unit

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget such as `1% perplexity`, `90% recall at 2048`, `2x at 4096` or `25% cache at 8192`.

        Recall and cache are percentages of the exact model's.

        Raises:
            ValueError: The text is no budget, a speedup of 1 or less, a recall above 100 %, or fewer than 16 tokens.
        """
        text = text.strip()
        units = {unit.pattern: unit for unit in DAMAGE_UNITS.values()}
        for pattern in (*units, *_COSTS):
            match = re.fullmatch(_NUMBER + pattern, text, re.IGNORECASE)
            if match is None:
                continue
            parts, unit, cost = match.groupdict(), units.get(pattern), _COSTS.get(pattern, "")
            limit = float(parts["limit"])
            length = int(re.sub(r"[,_]", "", parts.get("length") or "0")) * (1024 if parts.get("kilo") else 1)
            name = cost if unit is None else unit.name
            smallest, largest, meant = _RANGES.get(name, (0, math.inf, ""))
            if meant and (length < 16 or not smallest < limit <= largest):
                raise ValueError(f"The budget {text!r} is not {meant} at 16 tokens or more.")
            return cls(text, 100 - limit if name == "recall" else limit, unit, length, cost)  # of recall what is lost
        raise ValueError(f"The budget {text!r} cannot be read. Budgets look like {BUDGETS}.")

    def is_met(self, value: float | None) -> bool:
        """Return whether a damage in the budget's unit, a speedup, or a share of the exact cache is within it.

        A loss or a share of just the limit is, whatever its last binary digits: it is compared as it is shown.
        """
        if value is None:
            return False
        if self.cost == "speedup":
            return value >= self.limit
        return round(100 * value if self.cost == "cache" else value, DECIMALS) <= self.limit

    def unit_for(self, kind: str) -> DamageUnit:
        """Return the unit in which the damage to a `decoder`, an `encoder` or a `classifier` is shown.

        Raises:
            ValueError: The budget is for another kind of model.
        """
        if self.cost == "cache" and kind != "decoder":
            raise ValueError(f"The budget {self.text!r} is for a causal language model, whose cache grows.")
        units = [unit for unit in DAMAGE_UNITS.values() if unit.measurement == MEASUREMENTS[kind]]
        if self.unit is None:
            return units[0]
        if self.unit in units or (self.unit.name == "recall" and kind != "classifier"):
            return self.unit
        expected, actual = (MEASURED_MODELS[name] for name in (self.unit.measurement, MEASUREMENTS[kind]))
        remedy = f"Give a budget such as {units[0].example!r} or '2x at 4096'."
        raise ValueError(f"The budget {self.text!r} is for {expected}; this is {actual}. {remedy}")


@dataclass(frozen=True)
class Choice:
    """The share of the key-value heads that stay exact, the windows of all others in tokens, why, and the cache."""

    share: float
    window: int
    reason: str
    cache_dtype: CacheDtype = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """What the mechanism of the other heads is given."""
        stored = {} if self.cache_dtype == "auto" else {"cache_dtype": self.cache_dtype}
        return {"window_size": self.window, **stored}


def quarter_window(longest: int) -> int:
    """Return the width of windows for a budget of quality or speed: a quarter of the longest training row at most, but
    not below the narrowest."""
    widths = [width for width in (*NARROW_WINDOWS, *WINDOWS) if 4 * width <= longest]
    return max(widths, default=NARROW_WINDOWS[0])


def choose_by_measuring(budget: Budget, window: int, measure: Callable[[float], float | None]) -> Choice:
    """Choose exact heads for a budget of quality or speed, where all others have windows of this width.

    The shares of `SHARES` are measured in turn, before any training: for a budget of quality from none on until the
    damage is within it (or else the least that was found), for one of speed from the largest share down until the
    model is fast enough. `measure` returns the damage of a share in the budget's unit, or its speed relative to the
    exact model; None where it is undefined. A ValueError if the budget cannot be measured, or nothing is fast enough.
    """
    unit, tried, values = budget.unit, [], {}
    for share in SHARES if unit is not None else reversed(SHARES):
        value = measure(share)
        if value is None:
            reason = "the exact model recalls nothing there, or a score is undefined"
            raise ValueError(f"The budget {budget.text!r} cannot be measured: {reason}.")
        values[share] = value
        tried.append(f"{f'{value:.2f}x' if unit is None else unit.format(value)} with {share:.0%} exact heads")
        if budget.is_met(value):
            return Choice(share, window, f"untrained, the first choice within {budget.text}: {', '.join(tried)}")
    if unit is None:
        remedy = "Ask for less speed, or use plan."
        raise ValueError(f"No choice is within the budget {budget.text!r}: {', '.join(tried)}. {remedy}")
    reason = f"untrained none is within {budget.text}, and training has to do the rest: {', '.join(tried)}"
    return Choice(min(values, key=values.__getitem__), window, reason)


def choose_by_cache(
    budget: Budget, model: PreTrainedModel, longest: int, options: Mapping[str, Any] | None = None
) -> Choice:
    """Choose exact heads and windows by the bytes of caches and states, relative to exact attention in float32.

    That is arithmetic: the widest windows that take `WINDOW_SHARE` of the budget, and as many exact heads as the rest
    holds. Where it holds none, keys and values are stored in int8, and where it then holds none either, windows get the
    whole budget. They fill at most half of the longest training row, of `longest` tokens: the other half trains what is
    outside of them. Layers that see a sliding window only keep their caches, and do not count. A ValueError if nothing
    is small enough.
    """
    limit, length = budget.limit / 100, budget.length
    windows: WindowOptions = build_options(ATTENTIONS.get(DEFAULT_ATTENTION), dict(options or {}))
    every = self_attention(model)
    layers = [(index, layer) for index, layer in enumerate(every) if layer.span == "full"]
    counted = "the cache" if len(layers) == len(every) else "the cache of the layers that see the whole text"
    # The index of a layer changes no size.
    shapes = [replace(attention_shape(layer, index, None), layer_index=0) for index, layer in layers]
    whole = length * sum(shape.token_bytes for shape in shapes)
    heads = sum(shape.num_key_value_heads for shape in shapes)

    @cache
    def state_bytes(shape: AttentionShape, width: int, cache_dtype: CacheDtype) -> int:
        return WindowAttention(shape, replace(windows, window_size=width, cache_dtype=cache_dtype)).state_bytes()

    def fit(cache_dtype: CacheDtype) -> Choice | None:
        states = {width: sum(state_bytes(shape, width, cache_dtype) for shape in shapes) / whole for width in WINDOWS}
        within = [width for width, share in states.items() if share <= limit]
        if not within:
            return None
        within = [width for width in within if 2 * width <= longest] or within[:1]
        window = max([width for width in within if states[width] <= WINDOW_SHARE * limit], default=within[0])
        # As many heads as fit are exact: of share s they and the others take s exact + (1 - s) state <= limit.
        tokens = sum(shape.num_key_value_heads * head_token_bytes(shape, cache_dtype) for shape in shapes)
        exact = length * tokens / whole
        share = min(int(heads * (limit - states[window]) / max(exact - states[window], 1e-9)), heads - 1) / heads
        if not share:
            window = within[-1]
        stored = ", stored in int8," if cache_dtype == "int8" else ""
        reason = f"{share * exact + (1 - share) * states[window]:.1%} of {counted} at {length:,} tokens"
        text = f"in float32 {DEFAULT_ATTENTION} of {window} tokens and {share:.1%} exact heads{stored} take {reason}"
        return Choice(share, window, text, cache_dtype)

    own = fit(windows.cache_dtype)
    if own is not None and own.share:
        return own
    rounded = fit("int8")
    choice = own if rounded is None or (own is not None and not rounded.share) else rounded
    if choice is None:
        least = sum(state_bytes(shape, WINDOWS[0], "int8") for shape in shapes) / whole
        taken = f"windows of {WINDOWS[0]} tokens, stored in int8, take {least:.1%} of {counted} at {length:,} tokens"
        raise ValueError(f"The budget of {limit:.0%} cannot be met: {taken}. Allow more, or count longer inputs.")
    return choice
