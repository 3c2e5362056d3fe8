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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..integration.discovery import self_attention
from ..integration.exact import exact_attention
from ..mechanisms.softmax import EXACT
from ..patching import CONFIG_FIELD, patch_report
from ..utils.environment import json_safe
from ..utils.formatting import fixed
from ..utils.timing import crossover
from .metrics import Assessment, QualityMetric, assess, value
from .records import Conditions, Records
from .speed import FORWARD, measure_passes, without_attention

if TYPE_CHECKING:
    import pandas as pd

#: Seconds. A length that one row of the curve is expected to exceed this at is not timed.
LONGEST_TIMING = 60.0

#: A smaller divergence of the outputs is that of rounding: the mechanism computed exact attention.
EXACT_DIVERGENCE = 1e-6


# --------------------------------------------------------------------------------------------------------------------
# Budgets


@dataclass(frozen=True)
class DamageUnit:
    """A unit of lost quality.

    Attributes:
        name: The unit's name.
        measurement: The measurement of the metric that it belongs to.
        pattern: Regular expression of the unit in a budget.
        example: A budget in it.
        compute: Damage from the values of the exact and of the converted model: 0 where nothing is lost, more is worse.
        template: Format of a value.
        sign: -1 where damage is shown as the fall of a value.
    """

    name: str
    measurement: str
    pattern: str
    example: str
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


#: For each measurement, the first unit is shown where the budget is a speedup.
DAMAGE_UNITS = {
    unit.name: unit
    for unit in (
        DamageUnit(
            "perplexity",
            "perplexity",
            r"%\s*(?:of\s+)?(?:perplexity|ppl)",
            "1% perplexity",
            lambda exact, converted: 100 * math.expm1(min(converted["loss"] - exact["loss"], 600.0)),
            "{:+.2f}% perplexity",
        ),
        DamageUnit(
            "nats",
            "perplexity",
            "nats?",
            "0.05 nats",
            lambda exact, converted: converted["loss"] - exact["loss"],
            "{:+.4f} nats",
        ),
        DamageUnit(
            "points",
            "task",
            "(?:points?|pts?)",
            "0.5 points",
            lambda exact, converted: 100 * (exact["score"] - converted["score"]),
            "{:+.2f} points",
            -1,
        ),
        DamageUnit(
            "cosine",
            "sentence_embeddings",
            "cosine",
            "0.02 cosine",
            lambda exact, converted: exact["cosine"] - converted["cosine"],
            "{:.4f} from cosine 1",
        ),
    )
}

#: What a measurement's divergence is, and the kind of model that has it.
DIVERGENCES = {"perplexity": "KL, nats", "task": "divergence", "sentence_embeddings": "1 - cosine"}
MODEL_KINDS = {
    "perplexity": "a causal language model",
    "task": "a classifier with its task (--data.task, or --data.dataset with labels)",
    "sentence_embeddings": "an encoder without a task",
}

_NUMBER = r"(?P<limit>\d+(?:\.\d*)?|\.\d+)\s*"
_SPEEDUP = rf"{_NUMBER}[x×]\s*(?:at|@)\s*(?P<length>\d[\d,_]*)\s*(?P<kilo>k)?(?:\s*tokens)?"


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
            match = re.fullmatch(_NUMBER + unit.pattern, text, re.IGNORECASE)
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

    def accepts(self, row: Mapping[str, Any], *, informative: bool) -> bool:
        """Return whether a row of the curve is within the budget. `informative`: whether its quality says anything."""
        if self.unit is None:
            return row["speedup"][str(self.length)] >= self.limit
        return informative and row["damage"] is not None and row["damage"] <= self.limit and not row["chance"]


# --------------------------------------------------------------------------------------------------------------------
# The order in which layers are converted

#: Search by name: whether the remaining layers are measured again after each, and how many models of n are measured.
SEARCHES: dict[str, tuple[bool, Callable[[int], int]]] = {
    "rank": (False, lambda count: 2 * count - 1),
    "greedy": (True, lambda count: count * (count + 1) // 2),
}


def order_layers(layers: Sequence[int], divergence: Callable[[Sequence[int]], float | None], search: str) -> list[int]:
    """Order layers by the divergence from the exact model that they cause, the smallest first.

    Args:
        layers: Layer indices.
        divergence: Returns the divergence if these layers are linear; None if it is not a number.
        search: `rank`: each layer by itself; `greedy`: beside those that come before it.
    """
    again, _ = SEARCHES[search]
    path: list[int] = []
    remaining = sorted(layers)
    harm: dict[int, float] = {}
    while len(remaining) > 1:
        if again or not path:
            harm = {layer: _finite(divergence([*path, layer])) for layer in remaining}
        path.append(min(remaining, key=lambda layer: (harm[layer], layer)))
        remaining.remove(path[-1])
    return path + remaining


def _finite(divergence: float | None) -> float:
    return math.inf if divergence is None or math.isnan(divergence) else divergence


# --------------------------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class LayerSearchResult:
    """The layers to convert, and every measurement that the choice rests on.

    Attributes:
        budget: What the layers were chosen for.
        unit: The unit of all damages.
        score: `title` and `digits` of the metric's score, what its `divergence` is, and the `windows` of a perplexity.
        baseline: The exact model's attention implementation, which speedups are relative to.
        attention: Name of the mechanism.
        mechanisms: For each layer that was searched, the mechanism with its options.
        num_layers: Self-attention layers of the model.
        layers: Chosen layer indices.
        met: Whether the budget is met, on the data of the choice and on the data of the verification.
        within_budget: Whether it is met on the data of the choice.
        informative: Whether the exact model is clearly better than the model without attention (`metrics.assess`).
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

        frame = pd.json_normalize(self.curve, sep="_at_").drop(columns=["layers", "chance"])
        frame = frame.rename(columns={"count": "converted_layers", "added": "added_layer"})
        frame["chosen"] = frame["converted_layers"] == self.chosen["count"]
        return frame.astype({"added_layer": "Int64"})

    @property
    def layer_table(self) -> pd.DataFrame:
        """One row for each layer, converted by itself."""
        import pandas as pd

        return pd.DataFrame(self.single_layers)

    def formatted_table(self) -> pd.DataFrame:
        """Return `table` as text; a star marks the chosen row."""
        import pandas as pd

        rows = {}
        for row in self.curve:
            star = " ★" if row["count"] == self.chosen["count"] else ""
            rows[f"{row['count']} of {self.num_layers}{star}"] = {
                "adds layer": "–" if row["added"] is None else str(row["added"]),
                self.score["divergence"]: format_divergence(row["divergence"]),
                self.score["title"]: self.format_score(row["score"]),
                "damage": self.unit.format(row["damage"]) if row["count"] else "–",
                **{f"speed at {int(length):,}": f"{value:.2f}×" for length, value in row["speedup"].items()},
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("linear")

    def format_score(self, score: float | None) -> str:
        """Return a score with the digits of its metric."""
        return "–" if score is None else fixed(score, self.score["digits"])

    def summary(self) -> list[str]:
        """Return the findings as sentences, the most important first."""
        sentences = [_conclusion(self), *_warnings(self), _speed_sentence(self), _basis(self), _extreme_layers(self)]
        last = self.curve[-1]
        if last["count"] != self.chosen["count"]:
            speed = "".join(f", {value:.2f}× at {int(length):,} tokens" for length, value in last["speedup"].items())
            sentences.append(f"All {last['count']} layers together: {self.unit.format(last['damage'])}{speed}.")
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
    """Format with four decimals, or with one significant digit where these would show zero; rounding errors as zero."""
    if value is None:
        return "–"
    return format(value, ".0e") if EXACT_DIVERGENCE < abs(value) < 5e-5 else fixed(value, 4)


def _conclusion(result: LayerSearchResult) -> str:
    """The first sentence: whether the budget is met, and by what."""
    chosen, verified, budget = result.chosen, result.verified, f"The budget {result.budget.text!r}"
    *first, last = map(str, result.layers)
    layers = f"layers {', '.join(first)} and {last}" if first else f"layer {last}"
    plan = f"{len(result.layers)} of {result.num_layers} layers as {result.attention} ({layers})"
    cost = (
        f"{result.unit.format(chosen['damage'])} on the data of the choice, {result.unit.format(verified['damage'])} "
        "on the data of the verification"
    )
    if result.budget.length is not None:
        speedup, again = (row["speedup"][str(result.budget.length)] for row in (chosen, verified))
        if not result.within_budget:
            return f"{budget} cannot be reached: the fastest is {plan}, {speedup:.2f}×; it costs {cost}."
        if not result.met:
            return (
                f"{budget} is not confirmed: {plan} gave {speedup:.2f}×, and {again:.2f}× when timed again. Ask for "
                "less speed, or run nothing else on the machine."
            )
        return f"{budget} is met by {plan}: {speedup:.2f}×, timed again {again:.2f}×; {cost}."
    if not result.informative:
        return f"{budget} cannot be judged on this data."
    if not result.within_budget:
        return (
            f"No number of layers keeps to {result.budget.text!r}: the nearest is {plan}, {cost}. More transfer steps, "
            "another mechanism, or training all weights (`hf-linear-attn convert`) may help."
        )
    if not result.met:
        return (
            f"{budget} is not confirmed: {plan} keeps to it on the data of the choice only ({cost}). Give a smaller "
            "budget, or more data."
        )
    return f"{budget} is met by {plan}: {cost}."


def _warnings(result: LayerSearchResult) -> list[str]:
    """What limits the conclusion."""
    sentences = []
    if not result.informative:
        rows = [[data, f"{data}, no attention"] for data in ("choice", "verification")]
        scores = [
            " against ".join(result.format_score(result.references[name]["score"]) for name in row) for row in rows
        ]
        sentences.append(
            f"The exact model is not clearly better there than the model without attention ({result.score['title']} "
            f"{scores[0]}, and {scores[1]} on the data of the verification), so the score says nothing about attention."
            " Give more data, or data that the model was made for."
        )
    counts = [str(row["count"]) for row in result.curve if row["chance"]]
    if counts:
        sentences.append(
            f"With {', '.join(counts)} linear layers the model scores better than the exact one although its outputs "
            "differ largely: that is chance, and does not count as a success."
        )
    exact, last = result.references["choice"], result.curve[-1]
    longest = int(exact.get("longest_input") or 0)
    if last["divergence"] is not None and abs(last["divergence"]) < EXACT_DIVERGENCE:
        sentences.append(
            f"The linear layers compute exact attention on these inputs, which have at most {longest:,} tokens. Give "
            "longer ones, or a smaller window or block, to learn what it costs to be linear."
        )
    elif longest and 2 * longest < max(map(int, last["speedup"]), default=0):
        sentences.append(f"Quality is that of inputs of at most {longest:,} tokens; longer ones were only timed.")
    if exact.get("rows"):
        sentences.append(
            f"The choice rests on {exact['rows']:,} examples, each {100 / exact['rows']:.2f} points: a difference of a "
            "few is chance."
        )
    return sentences


def _basis(result: LayerSearchResult) -> str:
    """The exact model's scores, and why `evaluate` shows others."""
    scores = [result.format_score(result.references[data].get("score")) for data in ("choice", "verification")]
    windows = f" ({result.score['windows']})" if result.score.get("windows") else ""
    return (
        f"The exact model's {result.score['title']} is {scores[0]} on the data of the choice and {scores[1]} on that "
        f"of the verification{windows}. `evaluate` measures all held-out data, up to a limit of its own."
    )


def _speed_sentence(result: LayerSearchResult) -> str:
    """The speed of the planned model by length, and the length from which it is faster."""
    speedup = {int(length): value for length, value in result.chosen["speedup"].items()}
    if not speedup or (result.budget.length is not None and len(speedup) == 1):
        return ""
    speeds = ", ".join(f"{value:.2f}× as fast at {length:,} tokens" for length, value in speedup.items())
    change = crossover(list(speedup), list(speedup.values()))
    starts = {
        "<=": "at all of these",
        "=": f"from {change} tokens",
        ">": f"if at all, beyond {change.length:,.0f} tokens",
    }
    return (
        f"Beside {result.baseline}, the planned model is {speeds} (one forward pass, batch 1). It is faster "
        f"{starts[change.relation]}."
    )


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
    that scores better than the exact one although it diverges largely is never within a budget of quality; and none is
    unless the exact model is clearly better than the model without attention (see `metrics.assess`).

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
        on_progress: Called with the name of a stage, the steps done, and all steps.

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
        exact=model.eval(),
        patched=patched.eval(),
        timed=(timed or patched).eval(),
        metrics={"choice": choice, "verification": verification},
        budget=budget,
        tokens=tokens,
        seconds=seconds,
        records=records,
        conditions=conditions or Conditions(type(model).__name__, "", "", ""),
        on_progress=on_progress or (lambda stage, done, total: None),
    )
    return run.search(search, sorted({*lengths, *([budget.length] if budget.length else [])}))


@dataclass
class _LayerSearch:
    """The measurements of one search."""

    exact: PreTrainedModel
    patched: PreTrainedModel
    timed: PreTrainedModel
    metrics: dict[str, QualityMetric]
    budget: Budget
    tokens: Sequence[int]
    seconds: float
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

    def search(self, search: str, lengths: Sequence[int]) -> LayerSearchResult:
        self.total = SEARCHES[search][1](len(self.candidates))
        for index, data in enumerate(self.metrics):
            self.on_progress("the exact model, and without attention", index, len(self.metrics))
            self.references[data] = self.measure(data, "exact", self.exact)
            self.references[f"{data}, no attention"] = self.measure(data, "none", without_attention(self.exact))
        informative = all(self.assess(data, self.references[data]).valid for data in self.metrics)
        single_layers = [
            {"index": layer, "name": self.names[layer], **self.quality("choice", [layer])} for layer in self.candidates
        ]
        path = order_layers(self.candidates, lambda layers: self.quality("choice", layers)["divergence"], search)
        curve = [self.curve_row(path, count) for count in range(len(path) + 1)]
        self.time_curve(curve, lengths)
        chosen, within_budget = self.choose(curve[1:], informative)
        verified = self.verify(chosen["layers"])
        patched_layers = patch_report(self.patched).layers
        settings = self.metrics["choice"].settings
        windows = (
            f"windows of {settings['context']:,} tokens, {settings['stride']:,} apart" if "stride" in settings else ""
        )
        return LayerSearchResult(
            budget=self.budget,
            unit=self.unit,
            score={
                "title": self.score.title,
                "digits": self.score.digits,
                "divergence": DIVERGENCES[self.unit.measurement],
                "windows": windows,
            },
            baseline=self.baseline,
            attention=patched_layers[self.candidates[0]].attention,
            mechanisms={
                index: {"attention": patched_layers[index].attention, **patched_layers[index].options}
                for index in self.candidates
            },
            num_layers=len(self.names),
            layers=chosen["layers"],
            met=within_budget and self.budget.accepts(verified, informative=informative),
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
        values = {row["metric"]: row["value"] for row in record.values if row.get("position") is None}
        errors = {row["metric"]: row.get("stderr") for row in record.values}
        return {**values, "score": values[self.score.metric], "stderr": errors[self.score.metric]}

    def assess(self, data: str, values: Mapping[str, Any]) -> Assessment:
        """Apply the rule that `evaluate` shares."""
        exact, floor = self.references[data], self.references[f"{data}, no attention"]
        return assess(
            values["score"],
            exact["score"],
            floor["score"],
            higher_is_better=self.score.higher_is_better,
            stderr=math.hypot(exact["stderr"] or 0.0, floor["stderr"] or 0.0),
            divergence=values["divergence"],
            floor_divergence=floor["divergence"],
        )

    def quality(self, data: str, layers: Sequence[int]) -> dict[str, Any]:
        """Measure the model with these layers linear: `divergence`, `score`, `damage`, `chance`."""
        name = ",".join(map(str, sorted(layers)))
        if data == "choice":
            self._measured.add(name)
            self.on_progress("models with linear layers", len(self._measured) - 1, self.total)
        with exact_attention(self.patched, self._others(layers)):
            values = self.measure(data, name, self.patched)
        return {
            "divergence": values["divergence"],
            "score": values["score"],
            "damage": self.unit.damage(self.references[data], values),
            "chance": self.assess(data, values).chance,
        }

    def _others(self, layers: Sequence[int]) -> list[int]:
        return [index for index in range(len(self.names)) if index not in layers]

    def curve_row(self, path: Sequence[int], count: int) -> dict[str, Any]:
        """The model with the first `count` layers of the path linear."""
        layers = sorted(path[:count])
        exact = {"divergence": 0.0, "score": self.references["choice"]["score"], "damage": 0.0, "chance": False}
        row = self.quality("choice", layers) if count else exact
        return {"count": count, "added": path[count - 1] if count else None, "layers": layers, **row, "speedup": {}}

    # ---------------------------------------------------------------------------------------------- speed

    def time_curve(self, curve: list[dict[str, Any]], lengths: Sequence[int]) -> None:
        """Time every row of the curve at every length, beside the exact model."""
        last: tuple[int, float] | None = None
        for length in lengths:
            # Timing takes about eight calls of the two models, and exact attention is quadratic in the length.
            expected = 0.0 if last is None else 8 * last[1] * (length / last[0]) ** 2
            if expected > LONGEST_TIMING and length != self.budget.length:
                self.notes.append(f"{length:,} tokens were not timed: each model would take about {expected:.0f} s.")
                continue
            for row in curve[1:]:
                self.on_progress(f"models timed at {length:,} tokens", row["count"] - 1, len(curve) - 1)
                row["speedup"][str(length)], seconds = self.time(row["layers"], length, "choice", self.seconds)
                last = (length, seconds)
            curve[0]["speedup"][str(length)] = 1.0

    def time(self, layers: Sequence[int], length: int, data: str, seconds: float) -> tuple[float, float]:
        """Time one forward pass (batch 1) with these layers linear, beside the exact model.

        Returns:
            The speedup, and the seconds of the exact model.
        """

        def measure() -> list[dict[str, Any]]:
            models = {self.baseline: self.exact, "linear": self.timed}
            with exact_attention(self.timed, self._others(layers)):
                values = measure_passes(models, self.tokens, length, baseline=self.baseline, seconds=seconds)
            return [*values["linear"], value("exact_seconds", values[self.baseline][0]["value"], unit="s")]

        name = ",".join(map(str, layers))
        settings = {**self.conditions.settings, "data_set": data, "layers": name, "seconds": seconds}
        conditions = replace(self.conditions, measurement=FORWARD, length=length, batch_size=1, settings=settings)
        record = self.records.measure(conditions, measure, label=name)
        return record.values[0]["speedup"], record.values[-1]["value"]

    # ---------------------------------------------------------------------------------------------- choice

    def choose(self, rows: list[dict[str, Any]], informative: bool) -> tuple[dict[str, Any], bool]:
        """Choose a row of the curve; where none is within the budget, the nearest one, with False."""
        within = [row for row in rows if self.budget.accepts(row, informative=informative)]
        if within:
            return within[0 if self.budget.unit is None else -1], True
        if self.budget.unit is None:
            return max(rows, key=lambda row: row["speedup"][str(self.budget.length)]), False
        comparable = [row for row in rows if row["damage"] is not None and not row["chance"]] or rows
        return min(comparable, key=lambda row: (row["damage"] or 0.0, row["count"])), False

    def verify(self, layers: Sequence[int]) -> dict[str, Any]:
        """Measure the chosen model on other data, and time it again if the budget is a speedup."""
        self.on_progress("verification", 0, 1)
        verified: dict[str, Any] = {**self.quality("verification", layers), "speedup": {}}
        if self.budget.length is not None:
            speedup, _ = self.time(layers, self.budget.length, "verification", 3 * self.seconds)
            verified["speedup"][str(self.budget.length)] = speedup
        return verified
