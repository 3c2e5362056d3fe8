"""Which layers or key-value heads of a model to convert, chosen by measuring models with more and more linear ones.

`LayerSearch` has the exact model, a patched copy of it whose learned parts are trained, and one quality metric on two
data sets: the first chooses the layers or heads, the second verifies the choice. It ends with a plan for `patch_model`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..integration.ablation import without_attention
from ..integration.context import SUBMODULE
from ..integration.discovery import self_attention
from ..measure.quality import Assessment, QualityMetric, assess
from ..measure.speed import FORWARD, fill_cache, measure_passes
from ..measure.values import Values, value
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.softmax import EXACT
from ..patching import patch_model, patch_report
from ..streaming import cache_bytes
from ..training.head_search import ExactHeads
from ..utils.environment import json_safe
from ..utils.formatting import fixed
from ..utils.models import shared_copy
from ..utils.progress import Progress
from ..utils.timing import crossover
from .records import Conditions, Record, Records

if TYPE_CHECKING:
    import pandas as pd

#: A smaller divergence of the outputs is that of rounding: the mechanism computed exact attention.
EXACT_DIVERGENCE = 1e-6


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
                raise ValueError(f"The budget {text!r} is no speedup of more than 1x at 16 tokens or more.")
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

    def accepts(self, row: Mapping[str, Any], *, informative: bool) -> bool:
        """Return whether a row of the curve is within the budget. `informative`: whether its quality says anything."""
        if self.unit is None:
            cost = self.cost_of(row)
            return cost >= self.limit if self.cost == "speedup" else 100 * cost <= self.limit
        return informative and row["damage"] is not None and row["damage"] <= self.limit and not row["chance"]

    def cost_of(self, row: Mapping[str, Any]) -> float:
        """Return the speedup of a row of the curve at the budget's length, or its share of the exact model's cache."""
        return row[self.cost][str(self.length)]

    def format_cost(self, row: Mapping[str, Any]) -> str:
        return ("{:.2f}×" if self.cost == "speedup" else "{:.1%} of the cache").format(self.cost_of(row))


@dataclass(frozen=True)
class LayerSearchResult:
    """The layers or heads to convert, and every measurement that the choice rests on.

    Measured models have `divergence`, `score`, `damage`, `chance` (better than exact, though it diverges largely), and
    `speedup` and `cache` (its share of the exact model's) by length.
    """

    budget: Budget  # what the layers were chosen for
    unit: DamageUnit  # of all damages
    score: dict[str, Any]  # `title` and `digits` of the metric's score, and what its `divergence` is
    baseline: str  # the exact model's attention implementation, which speedups are relative to
    attention: str  # the mechanism
    mechanisms: dict[str, dict[str, Any]]  # of each layer that was searched (its index as text), with its options
    part: str  # what is converted: "layers" or "key-value heads"
    total: int  # self-attention layers of the model, or their key-value heads
    met: bool  # whether the budget is met, on the data of the choice and on those of the verification
    within_budget: bool  # whether it is met on the data of the choice
    informative: bool  # whether the exact model is clearly better than without attention (`metrics.assess`)
    curve: list[dict[str, Any]]  # measured models: `count` of linear parts, `added`, `layers`, `exact_heads` in these
    single_layers: list[
        dict[str, Any]
    ]  # a model for each layer by itself: `index`, `name`; none where heads are chosen
    chosen: dict[str, Any]  # the chosen row of the curve
    verified: dict[str, Any]  # the chosen model on the data of the verification
    references: dict[str, dict[str, Any]]  # values of the exact model and of that without attention, by data set

    @property
    def layers(self) -> list[int]:
        """The chosen layers, those with some exact heads among them."""
        return self.chosen["layers"]

    @property
    def plan(self) -> dict[str, Any]:
        """The mechanism of each layer, as `patch_model` and `patch --plan` read it (see `plan_of`)."""
        return plan_of(self.chosen, self.mechanisms)

    @property
    def table(self) -> pd.DataFrame:
        """One row for each model, with the speedup at each length."""
        import pandas as pd

        left_out = ("layers", "exact_heads", "chance")
        rows = [{name: row[name] for name in row if name not in left_out} for row in self.curve]
        frame = pd.json_normalize(rows, sep="_at_").rename(columns={"count": "converted", "added": "added_layer"})
        frame["chosen"] = frame["converted"] == self.chosen["count"]
        return frame.astype({"added_layer": "Int64"})

    def formatted_table(self) -> pd.DataFrame:
        """Return `table` as text; a star marks the chosen row."""
        import pandas as pd

        rows = {}
        for row in self.curve:
            star = " ★" if row["count"] == self.chosen["count"] else ""
            rows[f"{row['count']} of {self.total}{star}"] = {
                **({"adds layer": "–" if row["added"] is None else str(row["added"])} if self.single_layers else {}),
                **self._quality_cells(row),
                **{f"speed at {int(length):,}": f"{value:.2f}×" for length, value in row["speedup"].items()},
                **{f"cache at {int(length):,}": f"{value:.1%}" for length, value in row["cache"].items()},
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("linear")

    def formatted_single_layers(self) -> pd.DataFrame:
        """Return `single_layers` as text."""
        import pandas as pd

        rows = {f"{row['index']} {row['name']}": self._quality_cells(row) for row in self.single_layers}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")

    def _quality_cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        return {
            self.score["divergence"]: format_divergence(row["divergence"]),
            self.score["title"]: self.format_score(row["score"]),
            "damage": self.unit.format(row["damage"]) if row.get("count") != 0 else "–",
        }

    def format_score(self, score: float | None) -> str:
        """Return a score with the digits of its metric."""
        return "–" if score is None else fixed(score, self.score["digits"])

    def summary(self) -> list[str]:
        """Return the findings as sentences, the most important first."""
        sentences = [f"The budget {self.budget.text!r} {self._verdict()}.", *self._warnings()]
        speedup = {int(length): value for length, value in self.chosen["speedup"].items()}
        if len(speedup) > (self.budget.cost == "speedup"):
            change = crossover(list(speedup), list(speedup.values()))
            sentences.append(f"One pass of the planned model is faster than {self.baseline} from {change} tokens on.")
        return sentences

    def _verdict(self) -> str:
        if self.budget.unit is not None and not self.informative:
            return "cannot be judged on this data"
        plan = f"{self.chosen['count']} of {self.total} {self.part} as {self.attention}"
        if self.single_layers:
            plan += f" (layers {', '.join(map(str, self.layers))})"
        choice, verification = (self.unit.format(row["damage"]) for row in (self.chosen, self.verified))
        costs = f"{choice} on the data of the choice, {verification} on the data of the verification"
        if self.budget.unit is None:
            values = [self.chosen, self.verified] if self.budget.cost == "speedup" else [self.chosen]
            costs = f"{', timed again '.join(map(self.budget.format_cost, values))}; {costs}"
        if self.within_budget:
            return f"{'is met by' if self.met else 'is not confirmed for'} {plan}: {costs}"
        return f"cannot be reached: the nearest is {plan}, {costs}"

    def _warnings(self) -> list[str]:
        sentences = []
        exact, last = self.references["choice"], self.curve[-1]
        if not self.informative:
            scores = [self.format_score(values["score"]) for values in self.references.values()]
            comparison = "{} against {}, and {} against {} on the data of the verification".format(*scores)
            problem = "the exact model is not clearly better there than the model without attention"
            sentences.append(f"The score says nothing about attention: {problem} ({self.score['title']} {comparison}).")
        counts = ", ".join(str(row["count"]) for row in self.curve if row["chance"])
        if counts:
            change = "the score is better although the outputs differ largely"
            sentences.append(f"With {counts} linear {self.part} {change}: that is chance.")
        longest = int(exact.get("longest_input") or 0)
        inputs = f"inputs of at most {longest:,} tokens"
        if last["divergence"] is not None and abs(last["divergence"]) < EXACT_DIVERGENCE:
            sentences.append(f"The linear layers compute exact attention on these {inputs}.")
        elif longest and 2 * longest < max(map(int, last["speedup"]), default=0):
            sentences.append(f"Quality is that of {inputs}; longer ones were only timed.")
        if exact.get("rows"):
            points = f"{100 / exact['rows']:.2f} points"
            sentences.append(f"The choice rests on {exact['rows']:,} examples of {points} each: a few are chance.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        return json_safe({**vars(self), "budget": self.budget.text, "unit": self.unit.name, "plan": self.plan})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerSearchResult:
        """Return the result that `to_dict` wrote."""
        parts: dict[str, Any] = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**parts | {"budget": Budget.parse(values["budget"]), "unit": DAMAGE_UNITS[values["unit"]]})


def format_divergence(value: float | None) -> str:
    """Format with four decimals, or with one significant digit where these would show zero; rounding errors as zero."""
    if value is None:
        return "–"
    return format(value, ".0e") if EXACT_DIVERGENCE < abs(value) < 5e-5 else fixed(value, 4)


def plan_of(row: Mapping[str, Any], mechanisms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plan of a row of the curve; `mechanisms` are those of all layers, by the index of the layer.

    Layers not named are exact, or, where every layer is converted, have the mechanism of the first one.
    """
    every_layer = len(row["layers"]) == len(mechanisms)
    default = next(iter(mechanisms.values())) if every_layer else EXACT
    plan: dict[str, Any] = {"default": default}
    for name in map(str, row["layers"]):
        own = {} if mechanisms[name] == default else mechanisms[name]
        exact = {"exact_heads": row["exact_heads"][name]} if name in row["exact_heads"] else {}
        plan |= {name: {**own, **exact}} if own or exact else {}
    return plan


def mechanisms_of(patched: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return the mechanism of each linear layer, with its options, by the layer's index."""
    return {
        str(layer.index): {"attention": layer.attention, **layer.options}
        for layer in patch_report(patched).layers
        if layer.attention != EXACT
    }


def convert_as_planned(exact: PreTrainedModel, patched: PreTrainedModel, plan: Mapping[str, Any]) -> PreTrainedModel:
    """Return a copy of the exact model with the planned layers and heads, and what `patched` has learned for them."""
    model = patch_model(shared_copy(exact), plan)
    for own, other in zip(self_attention(model), self_attention(patched), strict=True):
        mechanism: Any = getattr(own.module, SUBMODULE, None)
        learned: Any = getattr(other.module, SUBMODULE, None)
        if isinstance(mechanism, HeadMixture):
            mechanism.load_heads(learned)
        elif mechanism is not None:
            mechanism.load_state_dict(learned.state_dict())
    return model.eval()


@dataclass
class LayerSearch:
    """The search for what to convert under a budget of quality (the most) or of speed or cache (the least).

    The layers are ordered by the divergence that each causes by itself; of heads the choices are given. Every model on
    the path from exact to linear is measured as a whole, since the damages of single layers do not add up, and the
    chosen one is verified on other data. A model that scores better than the exact one although it diverges largely is
    never within a budget of quality; and none is unless the exact model is clearly better than the model without
    attention (see `metrics.assess`).

    Raises:
        ValueError: The budget does not fit the metric.
    """

    exact: PreTrainedModel
    patched: PreTrainedModel  # a copy, linear in every layer that may be converted, with its learned parts trained
    timed: PreTrainedModel  # the copy that is timed: another one where long inputs need it
    metrics: Mapping[str, QualityMetric]  # on the data of the `choice` and on other data of the `verification`
    budget: Budget
    records: Records  # where measurements are stored, and where a stopped search is resumed from
    conditions: Conditions  # what the measurements depend on, in `records`
    heads: Sequence[ExactHeads] = ()  # choices of exact heads, the most first, of a search over heads
    lengths: Sequence[int] = ()  # to time, in tokens; that of a budget of speed is added
    tokens: Sequence[int] = (0,)  # token ids to time with
    seconds: float = 2.0  # spent on each timing
    progress: Progress = field(default_factory=Progress)  # told what is being done

    def __post_init__(self) -> None:
        metric = self.metrics["choice"]
        assert metric.score is not None
        self.score, self.unit = metric.score, self.budget.unit_of(metric.measurement)
        for model in (self.exact, self.patched, self.timed):
            model.eval()
        self.baseline = str(self.exact.config._attn_implementation)
        self.names = [layer.name for layer in self_attention(self.patched)]
        self.references: dict[str, dict[str, Any]] = {}
        self.measured: set[str] = set()

    def run(self) -> LayerSearchResult:
        """Measure, choose and verify."""
        budget = self.budget
        self.mechanisms = mechanisms_of(self.patched)
        self.candidates = [int(index) for index in self.mechanisms]
        self.total = len(self.heads) or 2 * len(self.candidates) - 1
        for index, data in enumerate(self.metrics):
            self.progress.status("the exact model, and without attention", index, len(self.metrics))
            self.references[data] = self.measure(data, "exact", lambda: self.exact)
            floor = partial(without_attention, self.exact)
            self.references[f"{data}, no attention"] = self.measure(data, "none", floor)
        informative = all(self.assess(data, self.references[data]).valid for data in self.metrics)
        single_layers, path = self.by_heads() if self.heads else self.by_layers()
        lengths: dict[str, set[Any]] = {"speedup": {*self.lengths}, "cache": set()}
        if budget.unit is None:
            lengths[budget.cost].add(budget.length)
        exact = {"divergence": 0.0, "score": self.references["choice"]["score"], "damage": 0.0, "chance": False}
        costs = {name: {str(length): 1.0 for length in sorted(values)} for name, values in lengths.items()}
        curve = [{"count": 0, "added": None, "layers": [], "exact_heads": {}, **exact, **costs}]
        curve += [{**row, **self.quality("choice", row), "speedup": {}, "cache": {}} for row in path]
        for cost, length in ((cost, length) for cost, values in lengths.items() for length in sorted(values)):
            for index, row in enumerate(curve[1:]):
                self.progress.status(f"{cost} at {length:,} tokens", index, len(path))
                row[cost][str(length)] = self.cost(cost, "choice", row, length, self.seconds)
        chosen, within_budget = self.choose(curve[1:], informative)
        self.progress.status("verification", 0, 1)
        verified: dict[str, Any] = {**self.quality("verification", chosen), "speedup": {}, "cache": chosen["cache"]}
        if budget.cost == "speedup" and budget.length:
            again = self.cost("speedup", "verification", chosen, budget.length, 3 * self.seconds)
            verified["speedup"][str(budget.length)] = again
        divergence = MODEL_KINDS[self.unit.measurement][1]
        return LayerSearchResult(
            budget=budget,
            unit=self.unit,
            score={"title": self.score.title, "digits": self.score.digits, "divergence": divergence},
            baseline=self.baseline,
            attention=self.mechanisms[str(self.candidates[0])]["attention"],
            mechanisms=self.mechanisms,
            part="key-value heads" if self.heads else "layers",
            total=len(self.heads[0].table) if self.heads else len(self.names),
            met=within_budget and budget.accepts(verified, informative=informative),
            within_budget=within_budget,
            informative=informative,
            curve=curve,
            single_layers=single_layers,
            chosen=chosen,
            verified=verified,
            references=self.references,
        )

    def by_layers(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return a model for each layer by itself, and those with more and more layers, the least harmful first."""
        singles = [
            {
                "index": layer,
                "name": self.names[layer],
                **self.quality("choice", {"layers": [layer], "exact_heads": {}}),
            }
            for layer in self.candidates
        ]
        order = sorted(singles, key=lambda row: math.inf if row["divergence"] is None else row["divergence"])
        path = [row["index"] for row in order]
        return singles, [
            {"count": count, "added": layer, "layers": sorted(path[:count]), "exact_heads": {}}
            for count, layer in enumerate(path, start=1)
        ]

    def by_heads(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return no single layers, and the models with each choice of exact heads."""
        rows = []
        for choice in self.heads:
            sizes = choice.table.groupby("layer").size()
            left = {layer: int(sizes[layer]) - len(choice.heads.get(layer, ())) for layer in self.candidates}
            layers = [layer for layer, count in left.items() if count]
            heads = {str(layer): list(choice.heads[layer]) for layer in layers if layer in choice.heads}
            rows.append({"count": sum(left.values()), "added": None, "layers": layers, "exact_heads": heads})
        return [], rows

    def record(
        self, data: str, layers: str, measure: Callable[[], Values], measurement: str, settings: Any, **parts: Any
    ) -> Record:
        """Measure, or read what is known. `layers` are the linear ones as text, `exact` or `none`."""
        settings = {**self.conditions.settings, **settings, "data_set": data, "layers": layers}
        conditions = replace(self.conditions, measurement=measurement, settings=settings, **parts)
        return self.records.measure(conditions, measure, label=layers)

    def measure(self, data: str, layers: str, model: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        """Return the values of a model's quality, and the standard error of its score."""
        metric = self.metrics[data]
        record = self.record(data, layers, lambda: metric(model()), metric.measurement, metric.settings)
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

    def quality(self, data: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Measure the model of a row of the curve: `divergence`, `score`, `damage`, `chance`."""
        if data == "choice":
            self.measured.add(self.name(row))
            self.progress.status("models with linear layers", len(self.measured) - 1, self.total)
        values = self.measure(data, self.name(row), partial(self.convert, self.patched, row))
        return {
            "divergence": values["divergence"],
            "score": values["score"],
            "damage": self.unit.damage(self.references[data], values),
            "chance": self.assess(data, values).chance,
        }

    def name(self, row: Mapping[str, Any]) -> str:
        """Return what identifies a row of the curve in the records."""
        heads = "; ".join(f"{layer} exact in {heads}" for layer, heads in row["exact_heads"].items())
        return ",".join(map(str, row["layers"])) + (f" ({heads})" if heads else "")

    def convert(self, patched: PreTrainedModel, row: Mapping[str, Any]) -> PreTrainedModel:
        """Return the model of a row of the curve, with the options and the learned parts of a patched one."""
        return convert_as_planned(self.exact, patched, plan_of(row, mechanisms_of(patched)))

    def cost(self, cost: str, data: str, row: Mapping[str, Any], length: int, seconds: float) -> float:
        """Return the speedup of one forward pass (batch 1) of a row of the curve, or its share of the exact cache."""

        def measure() -> Values:
            linear = self.convert(self.timed, row)
            if cost == "cache":
                own, exact = (cache_bytes(fill_cache(model, self.tokens, length)) for model in (linear, self.exact))
                return [value(cost, own / exact)]
            models = {self.baseline: self.exact, "linear": linear}
            return measure_passes(models, self.tokens, length, baseline=self.baseline, seconds=seconds)["linear"]

        measurement, settings = (FORWARD, {"seconds": seconds}) if cost == "speedup" else (cost, {})
        record = self.record(data, self.name(row), measure, measurement, settings, length=length, batch_size=1)
        return record.values[0]["value" if cost == "cache" else cost]

    def choose(self, rows: list[dict[str, Any]], informative: bool) -> tuple[dict[str, Any], bool]:
        """Choose a row of the curve; where none is within the budget, the nearest one, with False."""
        within = [row for row in rows if self.budget.accepts(row, informative=informative)]
        if within:
            return within[0 if self.budget.unit is None else -1], True
        if self.budget.unit is None:
            sign = 1 if self.budget.cost == "speedup" else -1
            return max(rows, key=lambda row: sign * self.budget.cost_of(row)), False
        comparable = [row for row in rows if row["damage"] is not None and not row["chance"]] or rows
        return min(comparable, key=lambda row: row["damage"] or 0.0), False
