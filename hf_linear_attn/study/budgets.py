"""Budgets: what each one means.

A budget of quality is the most that a score may lose, and one of recall the least share of the exact model's that must
remain; one of speed is the least speedup, and one of cache the largest share of the exact model's cache, at a length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..data.config import BUDGETS
from ..measure.metric import Score
from ..training.options import ConvertConfig
from .kinds import KINDS, Kind, kind_of

#: Of a damage or a share in percent; the digits after them are those of rounding.
DECIMALS = 6


@dataclass(frozen=True)
class DamageUnit:
    """A unit of lost quality: `factor · (converted - exact)` of a number, or `factor · (converted / exact - 1)`."""

    name: str
    metric: str  # the number that is compared; empty: the one that decides for this kind of model
    factor: float  # makes damage positive where quality is lost
    pattern: str  # regular expression of the unit in a budget
    example: str  # a budget in it
    template: str  # format of a value
    sign: int = 1  # -1 where damage is shown as the fall of a value
    relative: bool = False

    def damage(self, exact: Mapping[str, Any], converted: Mapping[str, Any], score: str = "") -> float | None:
        """Return the damage, or None if it is undefined (for example a correlation of constant predictions).

        `score` is the number that decides.
        """
        before, after = (values.get(self.metric or score) for values in (exact, converted))
        if before is None or after is None or (self.relative and not before):
            return None
        return self.factor * (after / before - 1 if self.relative else after - before)

    def format(self, damage: float | None) -> str:
        """Return damage with its sign and unit: `+1.30% perplexity`, `-0.40 points`."""
        return "undefined" if damage is None else self.template.format(self.sign * damage)

    def check_score(self, budget: str, score: Score) -> None:
        """Raise a ValueError, for a budget, where points of a metric are no loss, because less of it is better."""
        if self.name == "points" and not score.greater_is_better:
            remedy = "Put another metric first (--data.metrics)."
            problem = f"needs a metric of which more is better, not {score.metric!r}"
            raise ValueError(f"The budget {budget!r} {problem}. {remedy}")


_LENGTH = r"(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"
_RECALL = rf"%\s*recall\s*{_LENGTH}"
_COSTS = {rf"[x×]\s*{_LENGTH}": "speedup", rf"%\s*cache\s*{_LENGTH}": "cache"}
_PERCENT = r"%\s*(?:of\s+)?(?:perplexity|ppl)"

DAMAGE_UNITS = {
    unit.name: unit
    for unit in (
        DamageUnit("perplexity", "perplexity", 100, _PERCENT, "1% perplexity", "{:+z.2f}% perplexity", relative=True),
        DamageUnit("nats", "loss", 1, "nats?", "0.05 nats", "{:+z.4f} nats"),
        DamageUnit("points", "", -100, "(?:points?|pts?)", "0.5 points", "{:+z.2f} points", sign=-1),
        DamageUnit("cosine", "cosine", -1, "cosine", "0.02 cosine", "{:z.4f} from cosine 1"),
        DamageUnit("recall", "recall", -100, _RECALL, "90% recall at 2048", "{:+z.0f}% recall", sign=-1, relative=True),
    )
}

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
            parts = match.groupdict()
            unit = units.get(pattern)
            cost = _COSTS.get(pattern, "")
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

    def check_kind(self, kind: Kind) -> None:
        """Raise a ValueError if the budget is for another kind of model."""
        if self.cost == "cache" and not kind.is_causal:
            raise ValueError(f"The budget {self.text!r} is for a causal language model: {kind.noun} has no cache.")
        if self.unit is not None and self.unit.name not in kind.units:
            others = " or ".join(other.noun for other in KINDS.values() if self.unit.name in other.units)
            example = DAMAGE_UNITS[kind.units[0]].example if kind.units else "2x at 4096"
            remedy = f"Give a budget such as {example!r} or '2x at 4096', or the --task_type of your model."
            raise ValueError(f"The budget {self.text!r} is for {others}; this is {kind.noun}. {remedy}")


def budget_of(config: ConvertConfig) -> Budget | None:
    """Return the budget of a conversion, if it has one.

    A ValueError if it is for another kind of model.
    """
    if config.budget is None:
        return None
    budget = Budget.parse(config.budget)
    budget.check_kind(kind_of(config))
    return budget
