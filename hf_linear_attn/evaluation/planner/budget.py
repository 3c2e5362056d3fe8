"""What a conversion may cost, or what it must bring: `"1% perplexity"`, `"0.5 points"`, `"2x at 4096"`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Measured = Mapping[str, Any]

NUMBER = r"(?P<amount>\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class Kind:
    """What is measured on one kind of model.

    divergence: what the order of the layers goes by; score: key of the value that a reader knows, shown with `digits`.
    material: what the user gives for it.
    """

    name: str
    divergence: str
    score: str
    title: str
    digits: int
    material: str


@dataclass(frozen=True)
class Unit:
    """A measure of damage.

    damage: from what was measured on the exact and on the converted model; 0 where nothing is lost, more is worse.
    sign: -1 where damage is shown as the change of a value that should be high.
    """

    name: str
    kind: str
    pattern: str
    example: str
    title: str
    damage: Callable[[Measured, Measured], float]
    shown: str
    sign: int = 1

    def show(self, value: float | None) -> str:
        """With its sign: `+1.3% perplexity`, `-0.40 points`."""
        if value is None or not math.isfinite(value):
            return "undefined"
        return self.shown.format(round(self.sign * value, 6) + 0.0)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("decoder", "KL, nats", "perplexity", "perplexity", 3, "a causal language model"),
        Kind("classifier", "divergence", "score", "metric", 4, "a classifier and its task (--task)"),
        Kind("encoder", "1 - cosine", "cosine", "sentence cosine", 4, "an encoder without --task"),
    )
}

#: Damage by its name; the first of a kind is shown where the budget is one of speed.
UNITS = {
    unit.name: unit
    for unit in (
        Unit(
            "perplexity",
            "decoder",
            rf"{NUMBER}\s*%\s*(?:of\s+)?(?:perplexity|ppl)",
            "1% perplexity",
            "rise of perplexity, %",
            lambda exact, own: 100 * math.expm1(min(own["loss"] - exact["loss"], 600.0)),
            "{:+.2f}% perplexity",
        ),
        Unit(
            "nats",
            "decoder",
            rf"{NUMBER}\s*nats?",
            "0.05 nats",
            "rise of the loss, nats a token",
            lambda exact, own: own["loss"] - exact["loss"],
            "{:+.4f} nats",
        ),
        Unit(
            "points",
            "classifier",
            rf"{NUMBER}\s*(?:points?|pts?)",
            "0.5 points",
            "loss of the metric, points (100 = all)",
            lambda exact, own: 100 * (exact["score"] - own["score"]),
            "{:+.2f} points",
            -1,
        ),
        Unit(
            "cosine",
            "encoder",
            rf"{NUMBER}\s*cosine",
            "0.02 cosine",
            "1 - cosine of sentence embeddings",
            lambda exact, own: exact["cosine"] - own["cosine"],
            "{:.4f} from cosine 1",
        ),
    )
}

SPEED = rf"{NUMBER}\s*[x×]\s*(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"
SPEED_EXAMPLE = "2x at 4096"


@dataclass(frozen=True)
class Budget:
    """The most damage in a unit, or (unit None) the least speedup at a length in tokens."""

    text: str
    amount: float
    unit: Unit | None = None
    length: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget.

        Raises:
            ValueError: it is none, with examples; a speedup that is none.
        """
        words = text.strip()
        for unit in UNITS.values():
            found = re.fullmatch(unit.pattern, words, re.IGNORECASE)
            if found:
                return cls(words, float(found["amount"]), unit)
        found = re.fullmatch(SPEED, words, re.IGNORECASE)
        if found is None:
            examples = ", ".join(repr(unit.example) for unit in UNITS.values())
            raise ValueError(f"The budget {text!r} cannot be read. Budgets look like {examples} or {SPEED_EXAMPLE!r}.")
        length = int(re.sub(r"[,_]", "", found["length"])) * (1024 if found["kilo"] else 1)
        amount = float(found["amount"])
        if amount <= 1:
            raise ValueError(
                f"The budget {text!r} asks for no speedup: give more than 1x, for example {SPEED_EXAMPLE!r}."
            )
        if length < 16:
            raise ValueError(f"The budget {text!r} asks for a speedup at {length} tokens; give 16 or more.")
        return cls(words, amount, None, length)

    def check(self, kind: Kind) -> None:
        """Raise a ValueError, with what would fit, unless this budget can be measured on models of this kind."""
        if self.unit is None or self.unit.kind == kind.name:
            return
        fitting = [repr(unit.example) for unit in UNITS.values() if unit.kind == kind.name]
        raise ValueError(
            f"The budget {self.text!r} is for {KINDS[self.unit.kind].material}; this is {kind.material}. Give one such "
            f"as {', '.join(fitting)} or {SPEED_EXAMPLE!r}."
        )

    def damage_unit(self, kind: Kind) -> Unit:
        """The unit in which damage is shown."""
        return self.unit or next(unit for unit in UNITS.values() if unit.kind == kind.name)


def damage(unit: Unit, exact: Measured, own: Measured) -> float | None:
    """Damage in a unit; None where it is undefined (a correlation of constant answers, a loss that is not finite)."""
    try:
        value = unit.damage(exact, own)
    except TypeError:  # a value that JSON could not hold was kept as None
        return None
    return value if math.isfinite(value) else None
