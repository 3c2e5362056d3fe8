"""The search for the layers or heads to convert: models with more and more linear ones are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
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
from .inputs import score_of
from .plan_result import Candidate, PlanResult
from .study import Study
from .variants import Loader, Measurement, Variant
from .variants import references as references_of


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
        budget, unit, score = self.budget, self.unit, self.score
        references = self.references
        informative = all(self.assess(data, references[data]).valid for data in self.measurements)
        single_layers = [] if self.heads else self.single_layers()
        path = self.by_heads() if self.heads else self.by_layers(single_layers)
        part = "key-value heads" if self.heads else "layers"
        measured = []
        for index, one in enumerate(path):
            self.study.progress.status(f"models with linear {part}", index, len(path))
            measured.append(self.with_quality(one, "choice"))
        exact = Candidate(divergence=0.0, score=references["choice"]["score"], damage=0.0)
        for cost, length in self.costs():
            getattr(exact, cost)[str(length)] = 1.0
            for index, one in enumerate(measured):
                self.study.progress.status(f"{cost} at {length:,} tokens", index, len(path))
                measured[index] = self.with_cost(one, cost, length, "choice", self.seconds)
        chosen, within_budget = self.choose(measured, informative)
        self.study.progress.status("verification", 0, 1)
        verified = self.with_quality(replace(chosen, speedup={}, unsure=[]), "verification")
        if budget.cost == "speedup" and budget.length:
            verified = self.with_cost(verified, "speedup", budget.length, "verification", 3 * self.seconds)
        return PlanResult(
            budget=budget,
            unit=unit,
            score={"title": score.title, "digits": score.digits, "divergence": MODEL_KINDS[unit.measurement][1]},
            baseline=str(self.exact.config._attn_implementation),
            attention=next(iter(self.mechanisms.values()))["attention"],
            mechanisms=self.mechanisms,
            part=part,
            total=len(self.heads[0].table) if self.heads else len(self_attention(self.patched)),
            met=within_budget and verified.is_within(budget, informative=informative) and not verified.unsure,
            within_budget=within_budget,
            informative=informative,
            curve=[exact, *measured],
            single_layers=single_layers,
            chosen=chosen,
            verified=verified,
            references=references,
        )

    @cached_property
    def mechanisms(self) -> dict[str, dict[str, Any]]:
        """The mechanism of each linear layer, with its options, by the layer's index."""
        return mechanisms_of(self.patched)

    @cached_property
    def score(self) -> Score:
        """The score of the measurements."""
        score = score_of(self.measurements["choice"][0])
        assert score is not None
        return score

    @cached_property
    def unit(self) -> DamageUnit:
        """The unit of damages. Raises a ValueError if the budget does not fit the measurements."""
        return self.budget.unit_of(self.measurements["choice"][0].measurement)

    @cached_property
    def references(self) -> dict[str, dict[str, Any]]:
        """The values of the exact model and of the model without attention, on both data sets."""
        values = {}
        for index, data in enumerate(self.measurements):
            self.study.progress.status("the exact model, and without attention", index, len(self.measurements))
            exact, floor = references_of(self.exact)
            values[data] = self.values(data, "exact", exact.load)
            values[f"{data}, no attention"] = self.values(data, "none", floor.load)
        return values

    def costs(self) -> list[tuple[str, int]]:
        """Return what is measured besides quality: the speedup or the cache at a length, that of the budget too."""
        costs = {("speedup", length) for length in self.lengths}
        if self.budget.unit is None and self.budget.length:
            costs.add((self.budget.cost, self.budget.length))
        return sorted(costs, key=lambda one: (one[0] == "cache", one[1]))

    def single_layers(self) -> list[Candidate]:
        """Measure a model for each layer by itself."""
        rows = []
        for index, layer in enumerate(map(int, self.mechanisms)):
            self.study.progress.status("models with one linear layer", index, len(self.mechanisms))
            rows.append(self.with_quality(Candidate(1, [layer], added=layer), "choice"))
        return rows

    def by_layers(self, single_layers: Sequence[Candidate]) -> list[Candidate]:
        """Return models with more and more linear layers, the least harmful first."""
        order = sorted(single_layers, key=lambda one: math.inf if one.divergence is None else one.divergence)
        path = [layer for one in order for layer in one.layers]
        return [Candidate(count, sorted(path[:count]), added=layer) for count, layer in enumerate(path, start=1)]

    def by_heads(self) -> list[Candidate]:
        """Return the models with each choice of exact heads."""
        rows = []
        for choice in self.heads:
            sizes = choice.table.groupby("layer").size()
            linear = {
                layer: int(sizes[layer]) - len(choice.heads.get(layer, ())) for layer in map(int, self.mechanisms)
            }
            layers = [layer for layer, count in linear.items() if count]
            heads = {str(layer): list(choice.heads[layer]) for layer in layers if layer in choice.heads}
            rows.append(Candidate(sum(linear.values()), layers, heads))
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

    def with_quality(self, one: Candidate, data: str) -> Candidate:
        """Return a candidate with the quality of its model on a data set."""
        values = self.values(data, one.name, partial(self.convert, self.patched, one))
        return replace(
            one,
            divergence=values["divergence"],
            score=values["score"],
            damage=self.unit.damage(self.references[data], values),
            chance=self.assess(data, values).chance,
        )

    def with_cost(self, one: Candidate, cost: str, length: int, data: str, seconds: float) -> Candidate:
        """Return a candidate with the speedup of a forward pass (batch 1), or its share of the exact model's cache."""

        def measure() -> Values:
            models = {"exact": self.exact, "linear": self.convert(self.timed, one)}
            if cost == "speedup":
                return measure_passes(models, self.tokens, length, baseline="exact", seconds=seconds)["linear"]
            exact, linear = (cache_bytes(fill_cache(model, self.tokens, length)) for model in models.values())
            return [value(cost, linear / exact)]

        base = replace(self.measurements[data][0], task="", settings={"seconds": seconds} if cost == "speedup" else {})
        measurement = FORWARD if cost == "speedup" else cost
        conditions = replace(base, measurement=measurement, length=length, batch_size=1)
        variant = self.variant(data, one.name, lambda: self.exact)
        first = self.study.measure(variant.of(conditions), measure, label=variant.label).values[0]
        if cost == "cache":
            return replace(one, cache={**one.cache, str(length): first["value"]})
        unsure = [] if is_measurable(first["speedup_p20"], first["speedup_p80"]) else [str(length)]
        return replace(one, speedup={**one.speedup, str(length): first["speedup"]}, unsure=[*one.unsure, *unsure])

    def convert(self, patched: PreTrainedModel, one: Candidate) -> PreTrainedModel:
        """Return the model of a candidate, with the options and the learned parts of a patched one."""
        return convert_as_planned(self.exact, patched, one.plan(mechanisms_of(patched)))

    def choose(self, rows: Sequence[Candidate], informative: bool) -> tuple[Candidate, bool]:
        """Choose a candidate; where none is within the budget, the nearest one, with False."""
        budget = self.budget
        within = [one for one in rows if one.is_within(budget, informative=informative)]
        if within:
            return within[0 if budget.unit is None else -1], True
        if budget.unit is None:
            sign = 1 if budget.cost == "speedup" else -1
            return max(rows, key=lambda one: sign * one.cost(budget)), False
        comparable = [one for one in rows if one.damage is not None and not one.chance] or rows
        return min(comparable, key=lambda one: one.damage or 0.0), False
