"""The search for the layers or heads to convert: models with more and more linear ones are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from transformers import PreTrainedModel

from ..integration.context import SUBMODULE
from ..integration.discovery import self_attention
from ..measure.quality import Assessment, Score, assess
from ..measure.speed import FORWARD, fill_cache, measure_passes
from ..measure.values import Values, value
from ..mechanisms.head_mixture import HeadMixture
from ..mechanisms.softmax import EXACT
from ..patching import patch_model, patch_report
from ..streaming import cache_bytes
from ..training.head_search import ExactHeads
from ..utils.models import shared_copy
from ..utils.timing import is_measurable
from .budget import MODEL_KINDS, Budget, DamageUnit
from .inputs import Measurement, score_of
from .plan_result import PlanResult, plan_of
from .study import Study
from .variants import Loader, Variant
from .variants import references as references_of

References = Mapping[str, Mapping[str, Any]]
"""The values of the exact model and of that without attention, by data set."""


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


@dataclass(frozen=True)
class LayerSearch:
    """The search for what to convert under a budget of quality (the most) or of speed or cache (the least).

    The layers are ordered by the divergence that each causes by itself; of heads the choices are given. Every model on
    the path from exact to linear is measured as a whole, since the damages of single layers do not add up, and the
    chosen one is verified on other data. A model that scores better than the exact one although it diverges largely is
    never within a budget of quality; and none is unless the exact model is clearly better than the model without
    attention (see `quality.assess`).
    """

    study: Study  # where everything is measured once
    exact: PreTrainedModel
    patched: PreTrainedModel  # a copy, linear in every layer that may be converted, with its learned parts trained
    timed: PreTrainedModel  # the copy that is timed: another one where long inputs need it
    measurements: Mapping[str, Measurement]  # of quality, on the data of the `choice` and of the `verification`
    budget: Budget
    linear: Variant  # of the patched copy: what all measurements depend on
    heads: Sequence[ExactHeads] = ()  # choices of exact heads, the most first, of a search over heads
    lengths: Sequence[int] = ()  # to time, in tokens; that of a budget of speed is added
    tokens: Sequence[int] = (0,)  # token ids to time with
    seconds: float = 2.0  # spent on each timing

    def run(self) -> PlanResult:
        """Measure, choose and verify."""
        budget, unit, mechanisms = self.budget, self.unit, mechanisms_of(self.patched)
        references = self.references()
        informative = all(self.assess(references, data, references[data]).valid for data in self.measurements)
        path = self.by_heads(mechanisms) if self.heads else None
        single_layers = [] if path is not None else self.single_layers(references, mechanisms)
        path = self.by_layers(single_layers) if path is None else path
        lengths: dict[str, set[Any]] = {"speedup": {*self.lengths}, "cache": set()}
        if budget.unit is None:
            lengths[budget.cost].add(budget.length)
        exact = {"divergence": 0.0, "score": references["choice"]["score"], "damage": 0.0, "chance": False}
        costs = {name: {str(length): 1.0 for length in sorted(values)} for name, values in lengths.items()}
        curve = [{"count": 0, "added": None, "layers": [], "exact_heads": {}, **exact, **costs, "unsure": []}]
        for index, row in enumerate(path):
            status = (f"models with linear {self.part}", index, len(path))
            curve.append({**row, **self.quality(references, "choice", row, status), "speedup": {}, "cache": {}})
        for cost, length in ((cost, length) for cost, values in lengths.items() for length in sorted(values)):
            for index, row in enumerate(curve[1:]):
                self.study.status(f"{cost} at {length:,} tokens", index, len(path))
                self.add_cost(row, cost, "choice", length, self.seconds)
        chosen, within_budget = self.choose(curve[1:], informative)
        self.study.status("verification", 0, 1)
        verified = {**self.quality(references, "verification", chosen), "speedup": {}, "cache": chosen["cache"]}
        if budget.cost == "speedup" and budget.length:
            timed = {**chosen, "speedup": verified["speedup"]}
            self.add_cost(timed, "speedup", "verification", budget.length, 3 * self.seconds)
        divergence = MODEL_KINDS[unit.measurement][1]
        return PlanResult(
            budget=budget,
            unit=unit,
            score={"title": self.score.title, "digits": self.score.digits, "divergence": divergence},
            baseline=str(self.exact.config._attn_implementation),
            attention=next(iter(mechanisms.values()))["attention"],
            mechanisms=mechanisms,
            part=self.part,
            total=len(self.heads[0].table) if self.heads else len(self_attention(self.patched)),
            met=within_budget and budget.accepts(verified, informative=informative),
            within_budget=within_budget,
            informative=informative,
            curve=curve,
            single_layers=single_layers,
            chosen=chosen,
            verified=verified,
            references=references,
        )

    @property
    def part(self) -> str:
        """What is converted."""
        return "key-value heads" if self.heads else "layers"

    @property
    def score(self) -> Score:
        """The score of the measurements."""
        score = score_of(self.measurements["choice"][0])
        assert score is not None
        return score

    @property
    def unit(self) -> DamageUnit:
        """The unit of damages. Raises a ValueError if the budget does not fit the measurements."""
        return self.budget.unit_of(self.measurements["choice"][0].measurement)

    def references(self) -> dict[str, dict[str, Any]]:
        """Measure the exact model and the model without attention on both data sets."""
        found = {}
        for index, data in enumerate(self.measurements):
            self.study.status("the exact model, and without attention", index, len(self.measurements))
            exact, floor = references_of(self.exact)
            found[data] = self.values(data, "exact", exact.load)
            found[f"{data}, no attention"] = self.values(data, "none", floor.load)
        return found

    def single_layers(self, references: References, mechanisms: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Measure a model for each layer by itself."""
        names, rows = [layer.name for layer in self_attention(self.patched)], []
        for index, layer in enumerate(map(int, mechanisms)):
            status = ("models with one linear layer", index, len(mechanisms))
            quality = self.quality(references, "choice", {"layers": [layer], "exact_heads": {}}, status)
            rows.append({"index": layer, "name": names[layer], **quality})
        return rows

    def by_layers(self, single_layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return models with more and more linear layers, the least harmful first."""
        order = sorted(single_layers, key=lambda row: math.inf if row["divergence"] is None else row["divergence"])
        path = [row["index"] for row in order]
        return [
            {"count": count, "added": layer, "layers": sorted(path[:count]), "exact_heads": {}}
            for count, layer in enumerate(path, start=1)
        ]

    def by_heads(self, mechanisms: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the models with each choice of exact heads."""
        rows = []
        for choice in self.heads:
            sizes = choice.table.groupby("layer").size()
            left = {layer: int(sizes[layer]) - len(choice.heads.get(layer, ())) for layer in map(int, mechanisms)}
            layers = [layer for layer, count in left.items() if count]
            heads = {str(layer): list(choice.heads[layer]) for layer in layers if layer in choice.heads}
            rows.append({"count": sum(left.values()), "added": None, "layers": layers, "exact_heads": heads})
        return rows

    def variant(self, data: str, layers: str, load: Loader) -> Variant:
        """Return a model of the search. `layers` are the linear ones as text, `exact` or `none`."""
        settings = {**self.linear.settings, "data_set": data, "layers": layers}
        return replace(self.linear, label=layers, load=cache(load), settings=settings)

    def values(self, data: str, layers: str, load: Loader) -> dict[str, Any]:
        """Return the values of a model's quality, and the standard error of its score."""
        (record,) = self.variant(data, layers, load).measure(self.study, [self.measurements[data]]).values()
        values = {row["metric"]: row["value"] for row in record.values if row.get("position") is None}
        errors = {row["metric"]: row.get("stderr") for row in record.values}
        return {**values, "score": values[self.score.metric], "stderr": errors[self.score.metric]}

    def assess(self, references: References, data: str, values: Mapping[str, Any]) -> Assessment:
        """Apply the rule that `evaluate` shares."""
        exact, floor = references[data], references[f"{data}, no attention"]
        return assess(
            values["score"],
            exact["score"],
            floor["score"],
            higher_is_better=self.score.higher_is_better,
            stderr=math.hypot(exact["stderr"] or 0.0, floor["stderr"] or 0.0),
            divergence=values["divergence"],
            floor_divergence=floor["divergence"],
        )

    def quality(
        self, references: References, data: str, row: Mapping[str, Any], status: tuple[str, int, int] | None = None
    ) -> dict[str, Any]:
        """Measure the model of a row of the curve: `divergence`, `score`, `damage`, `chance`."""
        if status is not None:
            self.study.status(*status)
        values = self.values(data, row_name(row), partial(self.convert, self.patched, row))
        return {
            "divergence": values["divergence"],
            "score": values["score"],
            "damage": self.unit.damage(references[data], values),
            "chance": self.assess(references, data, values).chance,
        }

    def convert(self, patched: PreTrainedModel, row: Mapping[str, Any]) -> PreTrainedModel:
        """Return the model of a row of the curve, with the options and the learned parts of a patched one."""
        return convert_as_planned(self.exact, patched, plan_of(row, mechanisms_of(patched)))

    def add_cost(self, row: dict[str, Any], cost: str, data: str, length: int, seconds: float) -> None:
        """Add to a row the speedup of one forward pass (batch 1), or its share of the exact model's cache."""

        def measure() -> Values:
            linear = self.convert(self.timed, row)
            if cost == "cache":
                own, exact = (cache_bytes(fill_cache(model, self.tokens, length)) for model in (linear, self.exact))
                return [value(cost, own / exact)]
            return measure_passes(
                {"exact": self.exact, "linear": linear}, self.tokens, length, baseline="exact", seconds=seconds
            )["linear"]

        base = replace(self.measurements[data][0], task="", settings={"seconds": seconds} if cost == "speedup" else {})
        measurement = FORWARD if cost == "speedup" else cost
        conditions = replace(base, measurement=measurement, length=length, batch_size=1)
        variant = self.variant(data, row_name(row), lambda: self.exact)
        first = self.study.measure(variant.of(conditions), measure, label=variant.label).values[0]
        row[cost][str(length)] = first["value" if cost == "cache" else cost]
        if cost == "speedup" and not is_measurable(first["speedup_p20"], first["speedup_p80"]):
            row["unsure"] = [*row.get("unsure", []), str(length)]

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


def row_name(row: Mapping[str, Any]) -> str:
    """Return what identifies a row of the curve in the records."""
    heads = "; ".join(f"{layer} exact in {heads}" for layer, heads in row["exact_heads"].items())
    return ",".join(map(str, row["layers"])) + (f" ({heads})" if heads else "")
