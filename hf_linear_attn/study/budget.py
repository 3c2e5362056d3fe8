"""Budgets of a plan: how much quality may be lost, or how much speed or memory must be gained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        return "undefined" if damage is None else self.template.format(round(self.sign * damage, 6) + 0.0)


_LENGTH = r"(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"
_RECALL = rf"%\s*recall\s*{_LENGTH}"
_COSTS = {rf"[x×]\s*{_LENGTH}": "speedup", rf"%\s*cache\s*{_LENGTH}": "cache"}
_PERCENT = r"%\s*(?:of\s+)?(?:perplexity|ppl)"

_UNITS = (
    DamageUnit(
        "perplexity", "perplexity", "perplexity", 100, _PERCENT, "1% perplexity", "{:+.2f}% perplexity", relative=True
    ),
    DamageUnit("nats", "perplexity", "loss", 1, "nats?", "0.05 nats", "{:+.4f} nats"),
    DamageUnit("points", "task", "score", -100, "(?:points?|pts?)", "0.5 points", "{:+.2f} points", sign=-1),
    DamageUnit("cosine", "sentence_embeddings", "score", -1, "cosine", "0.02 cosine", "{:.4f} from cosine 1"),
    DamageUnit(
        "recall", "recall", "recall", -100, _RECALL, "90% recall at 2048", "{:+.0f}% recall", sign=-1, relative=True
    ),
)

#: For each measurement, the first unit is shown where the budget is a speedup.
DAMAGE_UNITS = {unit.name: unit for unit in _UNITS}

#: The kind of model that has a measurement, and what its divergence is.
MODEL_KINDS = {
    "perplexity": ("a causal language model", "KL, nats"),
    "task": ("a classifier with its task (--data.task, or --data.dataset with labels)", "divergence"),
    "sentence_embeddings": ("an encoder without a task", "1 - cosine"),
    "recall": ("a decoder or an encoder without a task", "answers lost"),
}

_NUMBER = r"(?P<limit>\d+(?:\.\d*)?|\.\d+)\s*"


@dataclass(frozen=True)
class Budget:
    """The largest damage in a unit, or (`unit` None) the smallest speedup or the largest cache at a length."""

    text: str
    limit: float
    unit: DamageUnit | None = None
    length: int | None = None  # tokens, of recall too
    cost: str = ""  # "speedup" or "cache" where there is no unit

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget such as `1% perplexity`, `90% recall at 2048`, `2x at 4096` or `25% cache at 8192`.

        Recall and cache are percentages of the exact model's.

        Raises:
            ValueError: The text is no budget, or a speedup of 1 or less, or at fewer than 16 tokens.
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
            if cost == "speedup" and (limit <= 1 or length < 16):
                raise ValueError(f"The budget {text!r} is not a speedup of more than 1x at 16 tokens or more.")
            return cls(text, 100 - limit if unit and unit.name == "recall" else limit, unit, length or None, cost)
        examples = ", ".join(repr(unit.example) for unit in DAMAGE_UNITS.values())
        remedy = f"Budgets look like {examples}, '2x at 4096' or '25% cache at 8192'."
        raise ValueError(f"The budget {text!r} cannot be read. {remedy}")

    def unit_of(self, measurement: str) -> DamageUnit:
        """Return the unit in which damage is shown.

        Raises:
            ValueError: The budget is of another measurement.
        """
        units = [unit for unit in DAMAGE_UNITS.values() if unit.measurement == measurement]
        if self.unit is None or self.unit in units:
            return self.unit or units[0]
        expected, actual = (MODEL_KINDS[name][0] for name in (self.unit.measurement, measurement))
        remedy = f"Give a budget such as {units[0].example!r} or '2x at 4096'."
        raise ValueError(f"The budget {self.text!r} is for {expected}; this is {actual}. {remedy}")
