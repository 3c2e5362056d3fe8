"""Which layers of a model to convert, chosen by measuring models with more and more linear layers.

`search_layers` takes the exact model, a patched copy of it whose learned parts are trained, and one quality metric on
two data sets: the first chooses the layers, the second verifies the choice.

    patched = patch_model(copy.deepcopy(model), "window")
    transfer_attention(patched, batches)
    windows = {"context": 512, "stride": 256, "batch_size": 8, "exact": model}
    choice, verification = (perplexity_metric(half, **windows) for half in (documents[::2], documents[1::2]))
    result = search_layers(model, patched, choice, verification, budget="1% perplexity")
    result.table  # a pandas DataFrame with one row for each number of converted layers
    result.plan   # what `patch_model(model, plan)` and `hf-linear-attn patch --plan` take
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..integration.attention import exact_attention
from ..integration.discovery import self_attention
from ..integration.inputs import synthetic_inputs
from ..mechanisms.softmax import EXACT
from ..patching import CONFIG_FIELD, patch_report
from ..utils.environment import json_safe
from ..utils.formatting import fixed
from ..utils.timing import time_interleaved
from .metrics import QualityMetric
from .records import Conditions, Records
from .speed import forward_pass, without_attention

if TYPE_CHECKING:
    import pandas as pd

#: A model whose divergence from the exact one exceeds this share of that of a model without any attention is another
#: model: if it scores better than the exact one, that is chance.
LARGE_DIVERGENCE = 0.25

#: Seconds. A length that one row of the curve is expected to exceed this at is not timed.
LONGEST_TIMING = 60.0


# --------------------------------------------------------------------------------------------------------------------
# Budgets


@dataclass(frozen=True)
class DamageUnit:
    """A unit of lost quality.

    Attributes:
        name: The unit's name.
        measurement: The measurement of the metric that it belongs to.
        pattern: Regular expression of a budget in this unit.
        example: Such a budget.
        title: What it measures, for a plot's axis.
        compute: Damage from the values of the exact and of the converted model: 0 where nothing is lost, more is worse.
        template: Format of a value.
        sign: -1 where damage is shown as the fall of a value.
    """

    name: str
    measurement: str
    pattern: str
    example: str
    title: str
    compute: Callable[[Mapping[str, Any], Mapping[str, Any]], float]
    template: str
    sign: int = 1

    def damage(self, exact: Mapping[str, Any], converted: Mapping[str, Any]) -> float | None:
        """Return the damage, or None if it is undefined (for example a correlation of constant predictions)."""
        try:
            damage = self.compute(exact, converted)
        except TypeError:  # JSON has no NaN: a value read from disk may be None.
            return None
        return damage if math.isfinite(damage) else None

    def format(self, damage: float | None) -> str:
        """Return damage with its sign and unit: `+1.30% perplexity`, `-0.40 points`."""
        if damage is None or not math.isfinite(damage):
            return "undefined"
        return self.template.format(round(self.sign * damage, 6) + 0.0)


_NUMBER = r"(?P<limit>\d+(?:\.\d*)?|\.\d+)"
_SPEEDUP = rf"{_NUMBER}\s*[x×]\s*(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"

#: For each measurement, the first unit is shown where the budget is a speedup.
DAMAGE_UNITS = {
    unit.name: unit
    for unit in (
        DamageUnit(
            "perplexity",
            "perplexity",
            rf"{_NUMBER}\s*%\s*(?:of\s+)?(?:perplexity|ppl)",
            "1% perplexity",
            "rise of perplexity, %",
            lambda exact, converted: 100 * math.expm1(min(converted["loss"] - exact["loss"], 600.0)),
            "{:+.2f}% perplexity",
        ),
        DamageUnit(
            "nats",
            "perplexity",
            rf"{_NUMBER}\s*nats?",
            "0.05 nats",
            "rise of the loss, nats per token",
            lambda exact, converted: converted["loss"] - exact["loss"],
            "{:+.4f} nats",
        ),
        DamageUnit(
            "points",
            "task",
            rf"{_NUMBER}\s*(?:points?|pts?)",
            "0.5 points",
            "loss of the metric, points (100 = all)",
            lambda exact, converted: 100 * (exact["score"] - converted["score"]),
            "{:+.2f} points",
            -1,
        ),
        DamageUnit(
            "cosine",
            "sentence_embeddings",
            rf"{_NUMBER}\s*cosine",
            "0.02 cosine",
            "1 - cosine of sentence embeddings",
            lambda exact, converted: exact["cosine"] - converted["cosine"],
            "{:.4f} from cosine 1",
        ),
    )
}

#: What a measurement's divergence is, and the kind of model that has it.
DIVERGENCES = {"perplexity": "KL, nats", "task": "divergence", "sentence_embeddings": "1 - cosine"}
MODEL_KINDS = {
    "perplexity": "a causal language model",
    "task": "a classifier with its task (--data.task)",
    "sentence_embeddings": "an encoder without a task",
}


@dataclass(frozen=True)
class Budget:
    """The largest damage in a unit, or (`unit` None) the smallest speedup at a length in tokens."""

    text: str
    limit: float
    unit: DamageUnit | None = None
    length: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget such as `1% perplexity` or `2x at 4096`.

        Raises:
            ValueError: The text is no budget, or a speedup of 1 or less, or at fewer than 16 tokens.
        """
        text = text.strip()
        for unit in DAMAGE_UNITS.values():
            match = re.fullmatch(unit.pattern, text, re.IGNORECASE)
            if match:
                return cls(text, float(match["limit"]), unit)
        match = re.fullmatch(_SPEEDUP, text, re.IGNORECASE)
        if match is None:
            examples = ", ".join(repr(unit.example) for unit in DAMAGE_UNITS.values())
            raise ValueError(f"The budget {text!r} cannot be read. Budgets look like {examples} or '2x at 4096'.")
        length = int(re.sub(r"[,_]", "", match["length"])) * (1024 if match["kilo"] else 1)
        if float(match["limit"]) <= 1:
            raise ValueError(f"The budget {text!r} is no speedup. Give more than 1x, for example '2x at 4096'.")
        if length < 16:
            raise ValueError(f"The budget {text!r} is a speedup at {length} tokens. Give 16 tokens or more.")
        return cls(text, float(match["limit"]), None, length)

    def check_measurement(self, measurement: str) -> None:
        """Raise a ValueError with an example unless this budget is a speedup or fits the measurement."""
        if self.unit is None or self.unit.measurement == measurement:
            return
        examples = [repr(unit.example) for unit in DAMAGE_UNITS.values() if unit.measurement == measurement]
        raise ValueError(
            f"The budget {self.text!r} is for {MODEL_KINDS[self.unit.measurement]}; this is "
            f"{MODEL_KINDS[measurement]}. Give a budget such as {', '.join(examples)} or '2x at 4096'."
        )

    def damage_unit(self, measurement: str) -> DamageUnit:
        """Return the unit in which damage is shown."""
        return self.unit or next(unit for unit in DAMAGE_UNITS.values() if unit.measurement == measurement)


# --------------------------------------------------------------------------------------------------------------------
# The order in which layers are converted

Divergence = Callable[[Sequence[int]], float | None]
"""Returns the divergence from the exact model if these layers are converted; None if it is not a number."""


def rank_layers(layers: Sequence[int], divergence: Divergence) -> list[int]:
    """Order layers by the divergence that each causes by itself, the smallest first: n measurements."""
    return sorted(layers, key=lambda layer: (_finite(divergence([layer])), layer))


def greedy_layers(layers: Sequence[int], divergence: Divergence) -> list[int]:
    """Order layers so that each causes the least divergence beside those before it: n(n + 1)/2 measurements."""
    path: list[int] = []
    remaining = sorted(layers)
    while len(remaining) > 1:
        best = min(remaining, key=lambda layer: (_finite(divergence([*path, layer])), layer))
        path.append(best)
        remaining.remove(best)
    return path + remaining


def _finite(divergence: float | None) -> float:
    return math.inf if divergence is None or math.isnan(divergence) else divergence


#: Search by name: the function, and how many models of n layers it measures, those on the path included.
SEARCHES: dict[str, tuple[Callable[[Sequence[int], Divergence], list[int]], Callable[[int], int]]] = {
    "rank": (rank_layers, lambda count: 2 * count - 1),
    "greedy": (greedy_layers, lambda count: count * (count + 1) // 2),
}


# --------------------------------------------------------------------------------------------------------------------
# Results


def layer_key(layers: Sequence[int]) -> str:
    """Return layer indices as text: `0,2,3`."""
    return ",".join(map(str, sorted(layers)))


@dataclass(frozen=True)
class LayerSearchResult:
    """The layers to convert, and every measurement that the choice rests on.

    Attributes:
        budget: What the layers were chosen for.
        unit: The unit of all damages.
        score: `title` and `digits` of the metric's score, and what its `divergence` is.
        baseline: The exact model's attention implementation, which speedups are relative to.
        attention: Name of the mechanism.
        mechanisms: For each layer that was searched, the mechanism with its options.
        num_layers: Self-attention layers of the model.
        layers: Chosen layer indices.
        met: Whether the budget is met, on the data of the choice and on the data of the verification.
        within_budget: Whether it is met on the data of the choice.
        informative: Whether the exact model is better than the model without attention.
        curve: One row for each number of converted layers: `count`, `added`, `layers`, `divergence`, `score`,
            `damage`, `chance` (better than exact, though it diverges largely), `speedup` by length.
        single_layers: One row for each layer by itself: `index`, `name`, `divergence`, `score`, `damage`, `chance`.
        chosen: The chosen row of the curve.
        verified: The chosen model on the data of the verification.
        references: Values of the exact model and of the model without attention, by data set.
        notes: What was not measured, and why.
    """

    budget: Budget
    unit: DamageUnit
    score: dict[str, Any]
    baseline: str
    attention: str
    mechanisms: dict[int, dict[str, Any]]
    num_layers: int
    layers: list[int]
    met: bool
    within_budget: bool
    informative: bool
    curve: list[dict[str, Any]]
    single_layers: list[dict[str, Any]]
    chosen: dict[str, Any]
    verified: dict[str, Any]
    references: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, Any]:
        """The mechanism of each layer, as `patch_model` and `patch --plan` read it; layers not named are exact."""
        return {"default": EXACT, **{str(layer): self.mechanisms[layer] for layer in self.layers}}

    @property
    def table(self) -> pd.DataFrame:
        """One row for each number of converted layers, with the speedup at each length."""
        import pandas as pd

        rows = [
            {
                "converted_layers": row["count"],
                "added_layer": row["added"],
                **{name: row[name] for name in ("divergence", "score", "damage")},
                **{f"speedup_at_{length}": value for length, value in row["speedup"].items()},
                "chosen": row["count"] == self.chosen["count"],
            }
            for row in self.curve
        ]
        return pd.DataFrame(rows).astype({"added_layer": "Int64"})

    @property
    def layer_table(self) -> pd.DataFrame:
        """One row for each layer, converted by itself."""
        import pandas as pd

        return pd.DataFrame(self.single_layers)

    def formatted_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles and the cells of `table` as text; a star marks the chosen row."""
        lengths = list(self.curve[0]["speedup"])
        titles = ["linear", "adds layer", self.score["divergence"], self.score["title"], "damage"]
        titles += [f"speed at {int(length):,}" for length in lengths]
        rows = []
        for row in self.curve:
            star = " ★" if row["count"] == self.chosen["count"] else ""
            rows.append(
                [
                    f"{row['count']} of {self.num_layers}{star}",
                    "–" if row["added"] is None else str(row["added"]),
                    format_divergence(row["divergence"]),
                    "–" if row["score"] is None else fixed(row["score"], self.score["digits"]),
                    self.unit.format(row["damage"]) if row["count"] else "–",
                    *(f"{row['speedup'][length]:.2f}×" for length in lengths),
                ]
            )
        return titles, rows

    def summary(self) -> list[str]:
        """Return the findings as sentences, the most important first."""
        sentences = [_conclusion(self), *_warnings(self), _speed_sentence(self), _extreme_layers(self)]
        last = self.curve[-1]
        if last["count"] != self.chosen["count"]:
            speed = "".join(f", {value:.2f}× at {int(length):,} tokens" for length, value in last["speedup"].items())
            sentences.append(f"All {last['count']} layers together: {self.unit.format(last['damage'])}{speed}.")
        rows = self.references["choice"].get("rows")
        if rows:
            sentences.append(
                f"The choice rests on {rows:,} examples, each {100 / rows:.2f} points: a difference of a few is chance."
            )
        return [sentence for sentence in [*sentences, *self.notes] if sentence]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        values = {name: value for name, value in vars(self).items() if name not in ("budget", "unit")}
        budget = {"text": self.budget.text, "limit": self.budget.limit, "length": self.budget.length}
        return json_safe({"budget": budget, "unit": self.unit.name, **values, "plan": self.plan})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerSearchResult:
        """Return the result that `to_dict` wrote."""
        values = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        values["mechanisms"] = {int(layer): value for layer, value in values["mechanisms"].items()}
        values |= {"budget": Budget.parse(values["budget"]["text"]), "unit": DAMAGE_UNITS[values["unit"]]}
        return cls(**values)


def format_divergence(value: float | None) -> str:
    """Format with four decimals, or with one significant digit where these would show zero."""
    if value is None:
        return "–"
    return format(value, ".0e") if 0 < abs(value) < 5e-5 else fixed(value, 4)


def _plan_text(result: LayerSearchResult) -> str:
    indices = [str(layer) for layer in result.layers]
    text = indices[0] if len(indices) == 1 else f"{', '.join(indices[:-1])} and {indices[-1]}"
    noun = "layer" if len(indices) == 1 else "layers"
    return f"{len(indices)} of {result.num_layers} layers as {result.attention} ({noun} {text})"


def _conclusion(result: LayerSearchResult) -> str:
    """The first sentence: whether the budget is met, and by what."""
    budget, plan, unit = result.budget, _plan_text(result), result.unit
    chosen, verified = result.chosen, result.verified
    cost = (
        f"{unit.format(chosen['damage'])} on the data of the choice, {unit.format(verified['damage'])} on the data of "
        "the verification"
    )
    if budget.length is not None:
        speedup, again = chosen["speedup"][str(budget.length)], verified["speedup"][str(budget.length)]
        if not result.within_budget:
            return (
                f"The budget {budget.text!r} cannot be reached: the fastest is {plan}, {speedup:.2f}×; it costs {cost}."
            )
        if not result.met:
            return (
                f"The budget {budget.text!r} is not confirmed: {plan} gave {speedup:.2f}×, and {again:.2f}× when timed "
                "again. Ask for less speed, or run nothing else on the machine."
            )
        return f"The budget {budget.text!r} is met by {plan}: {speedup:.2f}×, timed again {again:.2f}×; {cost}."
    if not result.informative:
        return (
            f"The budget {budget.text!r} cannot be judged on this data: the exact model is no better there than the "
            "model without attention. Give data that the model was made for."
        )
    if not result.within_budget:
        return (
            f"No number of layers keeps to {budget.text!r}: the nearest is {plan}, {cost}. More transfer steps, "
            "another mechanism, or training all weights (`hf-linear-attn convert`) may help."
        )
    if not result.met:
        return (
            f"The budget {budget.text!r} is not confirmed: {plan} keeps to it on the data of the choice only ({cost}). "
            "Give a smaller budget, or more data."
        )
    return f"The budget {budget.text!r} is met by {plan}: {cost}."


def _warnings(result: LayerSearchResult) -> list[str]:
    sentences = []
    if not result.informative and result.budget.length is not None:
        sentences.append(
            f"The {result.score['title']} says nothing on this data: the exact model is no better than the model "
            "without attention."
        )
    counts = [str(row["count"]) for row in result.curve if row["chance"]]
    if counts:
        sentences.append(
            f"With {', '.join(counts)} linear layers the model scores better than the exact one although its outputs "
            "differ largely: that is chance, and does not count as a success."
        )
    return sentences


def _speed_sentence(result: LayerSearchResult) -> str:
    speedup = result.chosen["speedup"]
    if not speedup or (result.budget.length is not None and len(speedup) == 1):
        return ""
    parts = [
        f"{value:.2f}× as fast as {result.baseline} at {int(length):,} tokens" for length, value in speedup.items()
    ]
    return f"The planned model is {', '.join(parts)} (one forward pass, batch 1)."


def _extreme_layers(result: LayerSearchResult) -> str:
    rows = [row for row in result.single_layers if row["damage"] is not None]
    if len(rows) < 2:
        return ""
    best, worst = (select(rows, key=lambda row: row["divergence"]) for select in (min, max))
    texts = [f"{format_divergence(row['divergence'])}; {result.unit.format(row['damage'])}" for row in (best, worst)]
    return (
        f"By itself, layer {best['index']} does the least harm ({result.score['divergence']}: {texts[0]}), layer "
        f"{worst['index']} the most ({texts[1]})."
    )


# --------------------------------------------------------------------------------------------------------------------
# The search


def search_layers(
    model: PreTrainedModel,
    patched: PreTrainedModel,
    choice: QualityMetric,
    verification: QualityMetric,
    *,
    budget: str | Budget,
    search: str = "rank",
    lengths: Sequence[int] = (),
    tokens: Sequence[int] = (0,),
    seconds: float = 2.0,
    timed: PreTrainedModel | None = None,
    records: Records | None = None,
    conditions: Conditions | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> LayerSearchResult:
    """Find the layers to convert under a budget of quality (the most layers) or of speed (the fewest layers).

    The layers are ordered by the divergence that they cause. Every model on the path from exact to linear is measured
    as a whole, since the damages of single layers do not add up, and the chosen one is verified on other data. A model
    that scores better than the exact one although it diverges largely (`LARGE_DIVERGENCE`) is never within a budget of
    quality; and none is, if the exact model is no better than the model without attention.

    Args:
        model: The exact model.
        patched: A copy with the mechanism in every layer that may be converted, its learned parts trained.
        choice: The metric on the data that the layers are chosen with.
        verification: The same metric on other data.
        budget: `"1% perplexity"`, `"0.05 nats"`, `"0.5 points"`, `"0.02 cosine"`, or a speedup: `"2x at 4096"`.
        search: `"rank"` measures each layer by itself; `"greedy"` measures the remaining layers again after each.
        lengths: Lengths to time, in tokens; that of the budget is added.
        tokens: Token ids to time with.
        seconds: Time spent on each timing.
        timed: The copy that is timed, where another one is needed for long inputs. None means `patched`.
        records: Where measurements are stored, and where a stopped search is resumed from. None means in memory.
        conditions: What the measurements depend on, in `records`.
        on_progress: Called with a description, the steps done, and all steps.

    Raises:
        ValueError: The budget cannot be read or does not fit the metric, or the search is unknown.
    """
    budget = Budget.parse(budget) if isinstance(budget, str) else budget
    budget.check_measurement(choice.measurement)
    if search not in SEARCHES:
        raise ValueError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}.")
    if records is None:
        records = Records()
        records.start_run("search_layers", {}, {})
    run = _LayerSearch(
        model.eval(),
        patched.eval(),
        (timed or patched).eval(),
        {"choice": choice, "verification": verification},
        budget,
        tokens,
        records,
        conditions or Conditions(type(model).__name__, "", "", ""),
        on_progress or (lambda description, done, total: None),
    )
    return run.search(search, sorted({*lengths, *([budget.length] if budget.length else [])}), seconds)


@dataclass
class _LayerSearch:
    """The measurements of one search."""

    exact: PreTrainedModel
    patched: PreTrainedModel
    timed: PreTrainedModel
    metrics: dict[str, QualityMetric]
    budget: Budget
    tokens: Sequence[int]
    records: Records
    conditions: Conditions
    on_progress: Callable[[str, int, int], None]

    def __post_init__(self) -> None:
        metric = self.metrics["choice"]
        assert metric.score is not None
        self.score, self.unit = metric.score, self.budget.damage_unit(metric.measurement)
        self.baseline = str(self.exact.config._attn_implementation)
        self.candidates = sorted(int(index) for index in getattr(self.patched.config, CONFIG_FIELD)["layers"])
        self.names = [layer.name for layer in self_attention(self.patched)]
        self.references: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self._measured: set[str] = set()

    def search(self, search: str, lengths: Sequence[int], seconds: float) -> LayerSearchResult:
        order, effort = SEARCHES[search]
        self.total = effort(len(self.candidates))
        for index, data in enumerate(self.metrics):
            self.on_progress("exact model, and without attention", index, len(self.metrics))
            self.references[data] = self.measure(data, "exact", self.exact)
            self.references[f"{data}, no attention"] = self.measure(data, "none", without_attention(self.exact))
        single_layers = [
            {"index": layer, "name": self.names[layer], **self.quality("choice", [layer])} for layer in self.candidates
        ]
        path = order(self.candidates, lambda layers: self.quality("choice", layers)["divergence"])
        curve = [self.curve_row(path, count) for count in range(len(path) + 1)]
        self.time_curve(curve, lengths, seconds)
        informative = all(self.is_informative(data) for data in self.metrics)
        chosen, within_budget = self.choose(curve, informative)
        verified = self.verify(chosen["layers"], seconds)
        patched_layers = patch_report(self.patched).layers
        return LayerSearchResult(
            budget=self.budget,
            unit=self.unit,
            score={
                "title": self.score.title,
                "digits": self.score.digits,
                "divergence": DIVERGENCES[self.unit.measurement],
            },
            baseline=self.baseline,
            attention=patched_layers[self.candidates[0]].attention,
            mechanisms={
                index: {"attention": patched_layers[index].attention, **patched_layers[index].options}
                for index in self.candidates
            },
            num_layers=len(self.names),
            layers=chosen["layers"],
            met=within_budget and self.is_within_budget(verified, informative),
            within_budget=within_budget,
            informative=informative,
            curve=curve,
            single_layers=single_layers,
            chosen=chosen,
            verified=verified,
            references=self.references,
            notes=self.notes,
        )

    # ---------------------------------------------------------------------------------------------- quality

    def measure(self, data: str, layers: str, model: PreTrainedModel) -> dict[str, Any]:
        """Measure a model, or read what is known of it. `layers` are the linear ones as text, `exact` or `none`."""
        metric = self.metrics[data]
        settings = {**self.conditions.settings, **metric.settings, "data_set": data, "layers": layers}
        conditions = replace(self.conditions, measurement=metric.measurement, settings=settings)
        record = self.records.measure(conditions, lambda: metric(model), label=layers)
        return {row["metric"]: row["value"] for row in record.values}

    def is_informative(self, data: str) -> bool:
        """Whether the exact model is better than the model without attention."""
        exact, free = (self.references[name][self.score.metric] for name in (data, f"{data}, no attention"))
        if exact is None or free is None:
            return exact is not None
        return exact > free if self.score.higher_is_better else exact < free

    def quality(self, data: str, layers: Sequence[int]) -> dict[str, Any]:
        """Measure the model with these layers linear: `divergence`, `score`, `damage`, `chance`."""
        name = layer_key(layers)
        if data == "choice":
            self._measured.add(name)
            self.on_progress(f"layers {name}", len(self._measured) - 1, self.total)
        with exact_attention(self.patched, self._others(layers)):
            values = self.measure(data, name, self.patched)
        damage = self.unit.damage(self.references[data], values)
        scale = self.references[f"{data}, no attention"]["divergence"]
        large = _finite(values["divergence"]) > LARGE_DIVERGENCE * (scale or math.inf)
        return {
            "divergence": values["divergence"],
            "score": values[self.score.metric],
            "damage": damage,
            "chance": damage is not None and damage < 0 and large,
        }

    def _others(self, layers: Sequence[int]) -> list[int]:
        return [index for index in range(len(self.names)) if index not in layers]

    def curve_row(self, path: Sequence[int], count: int) -> dict[str, Any]:
        """The model with the first `count` layers of the path linear."""
        layers = sorted(path[:count])
        score = self.references["choice"][self.score.metric]
        exact = {"divergence": 0.0, "score": score, "damage": 0.0, "chance": False}
        return {
            "count": count,
            "added": path[count - 1] if count else None,
            "layers": layers,
            **(self.quality("choice", layers) if count else exact),
            "speedup": {},
        }

    # ---------------------------------------------------------------------------------------------- speed

    def time_curve(self, curve: list[dict[str, Any]], lengths: Sequence[int], seconds: float) -> None:
        """Time every row of the curve at every length, beside the exact model."""
        last: tuple[int, float] | None = None
        for length in lengths:
            # Timing takes about eight calls of the two models, and exact attention is quadratic in the length.
            expected = 0.0 if last is None else 8 * last[1] * (length / last[0]) ** 2
            if expected > LONGEST_TIMING and length != self.budget.length:
                self.notes.append(f"{length:,} tokens were not timed: each model would take about {expected:.0f} s.")
                continue
            for row in curve[1:]:
                self.on_progress(f"time at {length:,} tokens", row["count"] - 1, len(curve) - 1)
                timing = self.time(row["layers"], length, "choice", seconds)
                row["speedup"][str(length)] = timing["speedup"]
                last = (length, timing["exact_seconds"])
            curve[0]["speedup"][str(length)] = 1.0

    def time(self, layers: Sequence[int], length: int, data: str, seconds: float) -> dict[str, Any]:
        """Time one forward pass (batch 1) of the exact model and of the model with these layers linear, interleaved."""

        @torch.inference_mode()
        def measure() -> dict[str, Any]:
            inputs = synthetic_inputs(self.exact, self.tokens, length)
            models = {self.baseline: self.exact, "linear": self.timed}
            calls = {name: partial(forward_pass(model), inputs) for name, model in models.items()}
            with exact_attention(self.timed, self._others(layers)):
                timings = time_interleaved(calls, baseline=self.baseline, seconds=seconds, device=self.exact.device)
            return {**asdict(timings["linear"]), "exact_seconds": timings[self.baseline].median}

        settings = {**self.conditions.settings, "data_set": data, "layers": layer_key(layers), "seconds": seconds}
        conditions = replace(self.conditions, measurement="forward", length=length, batch_size=1, settings=settings)
        record = self.records.measure(conditions, measure, label=layer_key(layers))
        return {row["metric"]: row["value"] for row in record.values}

    # ---------------------------------------------------------------------------------------------- choice

    def is_within_budget(self, row: Mapping[str, Any], informative: bool) -> bool:
        if self.budget.unit is None:
            return row["speedup"][str(self.budget.length)] >= self.budget.limit
        damage = row["damage"]
        return informative and damage is not None and damage <= self.budget.limit and not row["chance"]

    def choose(self, curve: list[dict[str, Any]], informative: bool) -> tuple[dict[str, Any], bool]:
        """Choose a row of the curve; where none is within the budget, the nearest one, with False."""
        rows = curve[1:]
        within = [row for row in rows if self.is_within_budget(row, informative)]
        if self.budget.unit is None:
            fastest = max(rows, key=lambda row: row["speedup"][str(self.budget.length)])
            return (within[0] if within else fastest), bool(within)
        comparable = [row for row in rows if row["damage"] is not None and not row["chance"]] or rows
        nearest = min(comparable, key=lambda row: (row["damage"] or 0.0, row["count"]))
        return (within[-1] if within else nearest), bool(within)

    def verify(self, layers: Sequence[int], seconds: float) -> dict[str, Any]:
        """Measure the chosen model on other data, and time it again if the budget is a speedup."""
        self.on_progress("verification", 0, 1)
        verified: dict[str, Any] = {**self.quality("verification", layers), "speedup": {}}
        if self.budget.length is not None:
            timing = self.time(layers, self.budget.length, "verification", 3 * seconds)
            verified["speedup"][str(self.budget.length)] = timing["speedup"]
        return verified
